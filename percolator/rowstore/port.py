"""The narrow interface of a row store, on which the rest of this package depends.

A table has rows, a row has cells, and a cell has a family, a column, a time and a value. What is
done to one row is atomic: a check together with its changes, and the reading of the row. Nothing is
atomic over several rows.

Times are microseconds, and multiples of a thousand. Raised errors are `PercolatorError`s, whose
`retry` says whether a call was executed: `SAFE`, definitely not; `UNKNOWN`, perhaps.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")

TIME_UNIT = 1_000
"""All times are multiples of this."""


class Selection(NamedTuple):
    """Cells of one family in a row: those for which all of this holds."""

    family: str
    first_column: bytes = b""
    end_column: bytes = b""
    """Exclusive; empty: to the last."""
    from_time: int = 0
    until_time: int = 0
    """Exclusive; 0: no end."""
    first_value: bytes = b""
    end_value: bytes = b""
    """Exclusive; empty: no end."""
    newest: bool = False
    """Select only the newest of these cells in each column."""
    any_of: tuple[tuple[bytes, bytes], ...] = ()
    """Unless empty: only cells whose values are in one of these ranges, of each the first and the
    exclusive end. A cell counts for each range that it is in."""

    @property
    def size_bytes(self) -> int:
        """About how long its description is in a call: stores limit that."""
        columns = len(self.first_column) + len(self.end_column)
        values = len(self.first_value) + len(self.end_value)
        ranges = sum(len(first) + len(end) + _RANGE_BYTES for first, end in self.any_of)
        return columns + values + ranges + _OTHER_BYTES


_OTHER_BYTES = 64
"""The size of a selection besides names and values, generously."""
_RANGE_BYTES = 8
"""The size of one of several ranges of values besides its ends."""


def in_calls(
    needs: Iterable[tuple[T, Sequence[Selection]]], bytes_max: int
) -> Iterator[tuple[list[T], tuple[Selection, ...]]]:
    """Divides what needs these selections among calls that may describe so much each: yields what
    belongs to a call, and all that it selects. One need is never divided."""
    members: list[T] = []
    selected: dict[Selection, None] = {}
    size = 0
    for one, selections in needs:
        added = sum(each.size_bytes for each in selections)
        if members and size + added > bytes_max:
            yield members, tuple(selected)
            members, selected, size = [], {}, 0
        members.append(one)
        selected |= dict.fromkeys(selections)
        size += added
    if members:
        yield members, tuple(selected)


def can_be_named(selections: Iterable[Selection], bytes_max: int) -> bool:
    """True if one call may describe all of these."""
    return sum(one.size_bytes for one in selections) <= bytes_max


class Check(NamedTuple):
    """When the changes of a call are made. The store counts the cells that are selected; a cell
    that several selections name counts for each of them."""

    selections: tuple[Selection, ...]
    found: bool
    """If true, the changes are made if more than `more_than` are found, or if no more are."""
    more_than: int = 0


class SetCell(NamedTuple):
    """Sets one version of a cell, and replaces the one at the same time."""

    family: str
    column: bytes
    time: int
    value: bytes


class DeleteCell(NamedTuple):
    """Deletes one version of a cell, if it is there."""

    family: str
    column: bytes
    time: int


Change = SetCell | DeleteCell


class StoredCell(NamedTuple):
    """One version of a cell."""

    family: str
    column: bytes
    time: int
    value: bytes


class StoredRow(NamedTuple):
    """Selected cells of one row, all read at once."""

    key: bytes
    cells: list[StoredCell]


class Sample(NamedTuple):
    """A key that divides a table: it need not be that of a row."""

    key: bytes
    """Empty: the end of the table."""
    bytes_before: int
    """About how much the rows before it occupy."""


class RowChange(NamedTuple):
    """Changes of one row, made at once, whatever is there."""

    key: bytes
    changes: Sequence[Change]


class RowStore(Protocol):
    """A store of rows."""

    name_of: Callable[[int], str]
    """Name of a table, for errors; empty if unknown."""

    @property
    def scans_backwards(self) -> bool:
        """True if `scan` can go from the end of a range to its start."""

    @property
    def check_bytes_max(self) -> int:
        """The most that the selections of one check or read may describe, by `size_bytes`."""

    @property
    def keys_bytes_max(self) -> int:
        """The most that the keys of one read may have together, a few bytes for each not counted.
        A single key may always be read."""

    @property
    def ranges_max(self) -> int:
        """How many ranges of values, of up to 24 bytes each, the one selection of a check may
        have besides a few others."""

    def check_and_mutate(
        self,
        table_id: int,
        key: bytes,
        check: Check,
        changes: Sequence[Change],
        timeout_seconds: float,
    ) -> Awaitable[bool]:
        """Makes the changes if the check allows it, all at once. Returns whether it did."""

    def write(
        self, table_id: int, rows: Sequence[RowChange], timeout_seconds: float
    ) -> Awaitable[None]:
        """Changes rows without looking at them, each by itself, none of them twice. If it raises,
        any of them may have been changed."""

    def read(
        self,
        table_id: int,
        keys: Sequence[bytes],
        selections: Sequence[Selection],
        timeout_seconds: float,
    ) -> Awaitable[list[StoredRow]]:
        """The rows among these in which something is selected, in any order."""

    def scan(
        self,
        table_id: int,
        first: bytes,
        end: bytes,
        selections: Sequence[Selection],
        *,
        rows_max: int,
        reverse: bool,
        timeout_seconds: float,
        marks: bool = False,
    ) -> AsyncGenerator[StoredRow, None]:
        """The rows with first <= key < end (empty: to the last) in which something is selected, in
        order. Ends after `rows_max` of them; 0: without a limit.

        With `marks`, a row without cells comes now and then where nothing is selected for long. It
        says that the scan has come so far: nothing is selected from the row before to its key.
        """

    def sample(self, table_id: int, timeout_seconds: float) -> Awaitable[list[Sample]]:
        """Keys that divide a table into parts of about equal size, in order."""
