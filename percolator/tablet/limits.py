"""What one tablet accepts at most. Everything has a limit, with its unit in its name."""

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
    """Of one stored cell: a value of 4 MiB, and what a record has besides it."""
    conditions_max: int = 64
    """Of one mutation."""
    changes_max: int = 256
    """Of one mutation: one cell's lock, write and data, and a notification per observer."""

    queue_bytes_max: int = 4 * MEBIBYTE
    """Of mutations waiting for their group commit; above it, `Overloaded`."""
    overload_retry_seconds: float = 0.05
    commit_mutations_max: int = 1024
    """Of one group commit: bounds the time that its first mutation waits for the last."""
    commit_bytes_max: int = 4 * MEBIBYTE

    answer_bytes_max: int = 8 * MEBIBYTE
    """Of one batch of reads, or of the cells that made mutations of one batch fail: what does not
    fit is refused, to be asked again."""
    read_bytes_max: int = 16 * MEBIBYTE
    """Of one read, which may exceed `answer_bytes_max` when it is the last one answered."""
    columns_max: int = 10_000
    """Named by one read."""
    page_rows_default: int = 1_000
    page_rows_max: int = 10_000
    page_bytes_default: int = 1 * MEBIBYTE
    page_bytes_max: int = 8 * MEBIBYTE
    page_entries_max: int = 100_000
    """Stored entries looked at for one page: one of nothing but deleted rows ends, too."""
    slice_rows: int = 256
    """Mutations or reads handled before the event loop gets its turn."""
    slice_entries: int = 1024
    """Entries of a scan handled before the event loop gets its turn: about 1.5 ms."""

    sweep_share: float = 0.1
    """Of a tablet's time that collection, and whatever else deletes in the background, may take."""

    notifications_indexed_max: int = 100_000
    """Live notifications kept in memory; the rest are found by scanning the store."""
    recent_writes_max: int = 16_384
    """Cells remembered in each generation of recent_writes.py: about 6 MiB in all."""
    timestamp_lead_milliseconds: int = 3_600_000
    """A timestamp further ahead than this of every other one seen, and of the clock, is absurd."""
