"""What is asked of tablets, and what they answer: the words between protocol and dispatchers.

The protocol thinks in cells of tables; it knows neither tablets nor servers. Whoever answers its
questions (`Router`, or a test's double) finds the tablet, and tries again whatever was definitely
not executed, until the deadline.

A deadline is an instant on the clock's monotonic time, in seconds.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from enum import Enum
from typing import Final, NamedTuple, Protocol

from percolator.errors import PercolatorError
from percolator.v1.cells_pb2 import Cell
from percolator.v1.tabletserver_pb2 import Mutation, RowRead

ANY_SCHEMA = 0
"""The step means the same under every version of the table's schema."""


class Step(NamedTuple):
    """One conditional mutation of one cell."""

    table_id: int
    mutation: Mutation
    schema_version: int = ANY_SCHEMA
    """When it was built for one version (a commit notifies that version's observers), a tablet of
    another version answers `SchemaChanged`, and the step has to be built anew."""


class Applied(Enum):
    """Every condition held; the changes are durable."""

    APPLIED = "applied"


APPLIED: Final = Applied.APPLIED


class Refused:
    """A condition failed; nothing was changed."""

    __slots__ = ("cell", "condition")

    def __init__(self, condition: int, cell: Cell | None) -> None:
        self.condition = condition
        """The index of the first condition that failed."""
        self.cell = cell
        """The cell that failed it; None when something expected was not there."""

    def __repr__(self) -> str:
        return f"Refused({self.condition}, {self.cell})"


Answer = Applied | Refused | PercolatorError
"""To a step. An error with `Retry.UNKNOWN` means that it may or may not be applied; any other
error means that it was not."""


class RowQuestion(NamedTuple):
    """The cells of one row, at a timestamp."""

    table_id: int
    read: RowRead


class FoundCell(NamedTuple):
    """A version that a read has found."""

    commit_timestamp: int
    value: bytes | None
    """None for a deletion, when deletions were asked for."""


class RowAnswer:
    """What a read of one row has found. With locks in the way, `found` is not all."""

    __slots__ = ("found", "locks")

    def __init__(self) -> None:
        self.found: dict[bytes, FoundCell] = {}
        """By column."""
        self.locks: list[Cell] = []


class RangeQuestion(NamedTuple):
    """The rows of a range, at a timestamp."""

    table_id: int
    start: bytes
    end: bytes
    """Excluded; empty: to the last row."""
    columns: tuple[bytes, ...] | None
    """None for all."""
    timestamp: int
    reverse: bool = False
    row_limit: int = 0
    """How many rows will be wanted; 0 when that is not known."""
    report_deletes: bool = False


class RangePage(NamedTuple):
    """Consecutive rows of a range, in the direction of the scan."""

    rows: dict[bytes, dict[bytes, FoundCell]]
    locks: list[Cell]
    """In the way. Their rows, in `rows` or not, have to be read one by one."""
    start: bytes
    end: bytes
    """The page tells everything about [start, end); an empty end means to the last row."""


class CellPage(NamedTuple):
    """As `RangePage`, for whoever moves many cells: parallel lists, and no object for each cell.

    Entry i of every list is about one cell; the cells of a row stand together.
    """

    rows: list[bytes]
    columns: list[bytes]
    commit_timestamps: list[int]
    values: list[bytes]
    deletes: list[int]
    """The entries that are deletions, when those were asked for."""
    locks: list[Cell]
    start: bytes
    end: bytes

    def by_row(self) -> RangePage:
        """The same cells, each an object."""
        rows: dict[bytes, dict[bytes, FoundCell]] = {}
        deletes = set(self.deletes)
        last: bytes | None = None
        cells: dict[bytes, FoundCell] = {}
        found = zip(self.rows, self.columns, self.commit_timestamps, self.values, strict=True)
        for place, (row, column, commit, value) in enumerate(found):
            if row != last:
                cells = rows[row] = {}
                last = row
            cells[column] = FoundCell(commit, None if place in deletes else value)
        return RangePage(rows, self.locks, self.start, self.end)


class Mutations(Protocol):
    """Cells that can be changed."""

    def mutate(self, steps: Sequence[Step], deadline: float) -> Awaitable[list[Answer]]:
        """Answers in the order of the steps. Never raises for what happened to one of them."""
        ...


class Cells(Mutations, Protocol):
    """All cells of all tables."""

    def read(self, questions: Sequence[RowQuestion], deadline: float) -> Awaitable[list[RowAnswer]]:
        """Answers in the order of the questions. Raises what made one of them impossible."""
        ...

    def scan(
        self, question: RangeQuestion, timeout_seconds: float
    ) -> AsyncGenerator[RangePage, None]:
        """Pages without gaps from one end of the range to the other. The time-out is each page's,
        since a scan lasts as long as its caller takes."""
        ...
