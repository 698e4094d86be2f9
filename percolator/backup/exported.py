"""What an export says about itself, its tables and their parts, in its plan and its manifest.

Anyone can edit these files, and sign them again: a checksum is no signature. So each of these
classes refuses, with `ValueError`, what could not become a message to a cluster. Otherwise an
import would find out in the middle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from urllib.parse import quote

_NAME_BYTES_MAX = 255
"""The longest name in a directory that file systems accept."""
_NUMBER_MAX = (1 << 64) - 1
"""The largest number in a message to the cluster."""


class ExportFormat(StrEnum):
    """What the files of parts are."""

    PARQUET = "parquet"
    """Cells as they are stored."""
    JSONL = "jsonl"
    """Rows as people read them, as lines of JSON."""

    @property
    def suffix(self) -> str:
        return f".{self.value}"


@dataclass(frozen=True)
class ExportPart:
    """The cells of a range of rows: those of one tablet, when the export began."""

    file: str
    """The path of the file, relative to the export's directory."""
    start: str
    end: str
    """The row to end before; like `start` in hexadecimal. Empty: up to the last row."""
    cells: int = 0
    bytes: int = 0
    """The size of the file."""
    sha256: str = ""
    columns: tuple[str, ...] = ()
    """Names of the columns that occur, in hexadecimal; only some if there are very many."""

    def __post_init__(self) -> None:
        _require_hex(self.start, self.end, *self.columns)
        _require_numbers(self.cells, self.bytes)


@dataclass(frozen=True)
class ExportedObserver:
    """An observer, as it is registered with its table."""

    name: str
    columns: tuple[str, ...]
    """In hexadecimal digits."""
    weak: bool
    paused: bool
    backfill: bool = False
    """Its backfill was not finished: an import owes it another one."""

    def __post_init__(self) -> None:
        _require_hex(*self.columns)


@dataclass(frozen=True)
class ExportedCodecs:
    """The codecs of a table, by name: so a reader of the files knows what the bytes mean."""

    key: str
    """Empty if none is known."""
    columns: tuple[tuple[str, str], ...]
    """(column in hexadecimal digits, codec), by column."""

    def __post_init__(self) -> None:
        _require_hex(*(column for column, _ in self.columns))


@dataclass(frozen=True)
class ExportedTable:
    """One table: how to create it, and its cells."""

    name: str
    table_id: int
    """The table's id in its cluster. A later table of this name has another id."""
    retention_milliseconds: int
    split_bytes: int
    observers: tuple[ExportedObserver, ...]
    parts: tuple[ExportPart, ...]
    change_feed: bool = False
    codecs: ExportedCodecs | None = None
    """What its schema says about codecs; None if it says nothing."""
    ttls: tuple[tuple[str, int], ...] = ()
    """(column in hexadecimal digits, milliseconds), of columns whose values expire."""

    def __post_init__(self) -> None:
        _require_hex(*(column for column, _ in self.ttls))
        _require_numbers(self.table_id, self.retention_milliseconds, self.split_bytes)
        _require_numbers(*(milliseconds for _, milliseconds in self.ttls))

    @property
    def splits(self) -> list[bytes]:
        """The first rows of its tablets, except the first tablet."""
        return [bytes.fromhex(part.start) for part in self.parts[1:]]

    @property
    def cells(self) -> int:
        return sum(part.cells for part in self.parts)


@dataclass(frozen=True)
class Export:
    """A whole export: its tables, and the timestamp at which they are exported."""

    at: int
    """The timestamp. The export contains what was committed up to then."""
    tables: tuple[ExportedTable, ...]
    form: ExportFormat = ExportFormat.PARQUET
    cluster: str = ""
    """The id of the cluster. Empty in exports of earlier releases."""

    def __post_init__(self) -> None:
        _require_numbers(self.at)

    @property
    def cells(self) -> int:
        return sum(table.cells for table in self.tables)

    @property
    def parts(self) -> list[ExportPart]:
        return [part for table in self.tables for part in table.parts]

    def with_parts(self, done: Mapping[str, ExportPart]) -> Export:
        """The export with these finished parts, by file, in place of those that are planned."""
        return replace(
            self,
            tables=tuple(
                replace(table, parts=tuple(done.get(part.file, part) for part in table.parts))
                for table in self.tables
            ),
        )


def file_of(table: str, number: int, form: ExportFormat = ExportFormat.PARQUET) -> str:
    """The path of a part's file, whatever characters the table's name contains.

    A directory whose name would be too long is named by the beginning and, after a dot, which no
    other one has, a hash.
    """
    directory = quote(table, safe="").replace(".", "%2E")
    if len(directory) > _NAME_BYTES_MAX:
        digest = hashlib.sha256(table.encode()).hexdigest()
        directory = f"{directory[: _NAME_BYTES_MAX - len(digest) - 1]}.{digest}"
    return f"{directory}/part-{number:05}{form.suffix}"


def _require_hex(*digits: str) -> None:
    for one in digits:
        if bytes.fromhex(one).hex() != one:  # it also accepts spaces and capitals
            raise ValueError(f"{one!r:.80} are no hexadecimal digits")


def _require_numbers(*numbers: int) -> None:
    for one in numbers:
        if not 0 <= one <= _NUMBER_MAX:
            raise ValueError(f"{one!r:.80} is out of range")
