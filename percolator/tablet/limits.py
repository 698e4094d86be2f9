"""The limits of what one tablet accepts. Everything has a limit, named with its unit."""

from __future__ import annotations

from dataclasses import dataclass

KIBIBYTE = 1024
MEBIBYTE = 1024 * KIBIBYTE


@dataclass(frozen=True)
class TabletLimits:
    """The limits of one tablet. The defaults are those of docs/operating.md."""

    row_bytes_max: int = 4 * KIBIBYTE
    column_bytes_max: int = 1 * KIBIBYTE
    qualifier_bytes_max: int = 1 * KIBIBYTE
    value_bytes_max: int = 4 * MEBIBYTE + 64 * KIBIBYTE
    """The size of one stored cell: a value of 4 MiB plus the rest of its record."""
    conditions_max: int = 64
    """The number of conditions in one mutation."""
    changes_max: int = 256
    """Per mutation: one cell's lock, write and data, and a notification for each observer."""

    queue_bytes_max: int = 4 * MEBIBYTE
    """The size of all mutations waiting for their group commit; above it, `Overloaded`."""
    overload_retry_seconds: float = 0.05
    commit_mutations_max: int = 1024
    """Mutations in one group commit: limits how long its first one waits for its last."""
    commit_bytes_max: int = 4 * MEBIBYTE

    answer_bytes_max: int = 8 * MEBIBYTE
    """The response to one call that reads, or the cells that made mutations of one batch fail: what
    does not fit is refused, and has to be requested again."""
    read_bytes_max: int = 31 * MEBIBYTE
    """The result of one read, which is as much as a scan can return of one row: messages end at 32
    MiB. The last read in a response may exceed `answer_bytes_max`; one that does not fit beside the
    others has to be requested again."""
    columns_max: int = 10_000
    """The number of columns that one read can name."""
    column_prefixes_max: int = 100
    """Each entry of a scan is compared with all of them."""
    page_rows_default: int = 1_000
    page_rows_max: int = 10_000
    page_bytes_default: int = 1 * MEBIBYTE
    page_bytes_max: int = 8 * MEBIBYTE
    page_entries_max: int = 100_000
    """Stored entries examined for one page, so that a page of only deleted rows ends, too."""
    slice_rows: int = 256
    """Mutations or reads handled before the event loop gets its turn."""
    slice_entries: int = 1024
    """Entries of a scan handled before the event loop gets its turn: about 1.5 ms."""

    sweep_share: float = 0.1
    """The share of a tablet's time that collection and other background deletions may take."""

    notifications_indexed_max: int = 100_000
    """Live notifications kept in memory; the rest are found by scanning the store."""
    recent_writes_max: int = 16_384
    """Cells remembered in each generation of recent_writes.py: about 6 MiB in total."""


def too_long(found: bytes, bytes_max: int) -> str:
    """Why a field is refused."""
    return f"{len(found)} bytes, at most {bytes_max} allowed"
