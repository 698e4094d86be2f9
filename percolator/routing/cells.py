"""Requests about cells, and their answers: the vocabulary between the protocol and the router.

The protocol thinks in cells of tables; it knows neither tablets nor servers. `Router` (or a test's
double) finds the tablet, and retries until the deadline whatever was definitely not executed.

A deadline is an instant on the clock's monotonic time, in seconds.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Protocol

from percolator.conditions import Predicate
from percolator.errors import (
    CellAddress,
    InvalidArgument,
    InvariantViolation,
    NotExecuted,
    PercolatorError,
    TabletLocation,
)
from percolator.v1.cells_pb2 import Cell
from percolator.v1.tabletserver_pb2 import Mutation, RowRead

# A mutation that nearly every transaction sends: it travels in parallel lists, not by itself.
#
# A message of its own would cost the client and the server most of what the mutation costs them.


@dataclass(slots=True, eq=False)
class ListedStep:
    """One entry of a `StepList`; a subclass for each kind."""

    row: bytes
    column: bytes
    value: bytes
    start: int
    commit: int = 0
    min_commit: int = 0
    observers: tuple[bytes, ...] = ()

    kind = 0

    def mutation(self) -> Mutation:
        """The step as a mutation of its own, as row stores and the memory take it."""
        raise InvariantViolation(f"{type(self).__name__} is not a kind of step")


ANY_SCHEMA = 0
"""The mutation means the same under every version of the table's schema."""


class CellMutation(NamedTuple):
    """One conditional mutation of one cell."""

    table_id: int
    mutation: Mutation | ListedStep
    schema_version: int = ANY_SCHEMA
    """The version that the mutation was built for (a commit notifies that version's observers). A
    tablet of another version answers `SchemaChanged`, and the mutation has to be rebuilt."""

    def message(self) -> Mutation:
        """The mutation as a message, whatever it travels as."""
        mutation = self.mutation
        return mutation.mutation() if isinstance(mutation, ListedStep) else mutation


class Applied(Enum):
    """The answer to a mutation whose conditions all held; its changes are durable."""

    APPLIED = "applied"


APPLIED: Final = Applied.APPLIED


@dataclass(slots=True, eq=False)
class Refused:
    """The answer to a mutation of which a condition failed; nothing was changed."""

    condition: int
    """The index of the first condition that failed."""
    cell: Cell | None
    """The cell that failed it; None if a cell was expected and there was none."""

    @property
    def offender(self) -> Cell:
        """The cell that failed a condition by being there."""
        if self.cell is None:
            raise InvariantViolation(
                f"condition {self.condition} failed, and the tablet did not return the cell"
            )
        return self.cell


Answer = Applied | Refused | PercolatorError
"""The answer to a mutation. An error with `Retry.UNKNOWN` means that the mutation may or may not
have been applied; any other error means that it was not."""


class RowRequest(NamedTuple):
    """A read of cells of one row, at a timestamp."""

    table_id: int
    read: RowRead


class FoundCell(NamedTuple):
    """A version that a read has found."""

    commit_timestamp: int
    value: bytes | None
    """None for a deletion, if deletions were requested."""


@dataclass(slots=True, eq=False)
class RowResult:
    """The result of reading one row. With locks in the way, `found` has only the other cells."""

    found: dict[bytes, FoundCell] = field(default_factory=dict)
    """The cells by column."""
    locks: list[Cell] = field(default_factory=list)

    def size_bytes(self) -> int:
        """The size of the columns and values that were found."""
        return sum(len(column) + len(cell.value or b"") for column, cell in self.found.items())


class ReadSize:
    """How much one request has read, and how much it may."""

    __slots__ = ("_bytes_max", "_found")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._found = 0

    def add(self, result: RowResult) -> None:
        """Raises `InvalidArgument` once there is too much."""
        self._found += result.size_bytes()
        if self._found > self._bytes_max:
            raise InvalidArgument(
                "rows",
                f"the answer would have more than {self._bytes_max} bytes: ask for fewer rows at "
                "once",
            )


class KnownRows:
    """Some cells of some rows, as a transaction's timestamp shows them: they need not be read.

    The columns that the last run of an observer has read in the row of its change are read together
    with the next change, in the first message of its run (the paper's section 2.5). Nothing that an
    earlier run has read is used.
    """

    __slots__ = ("_rows", "_table_id", "read")

    def __init__(
        self, table_id: int, rows: Mapping[bytes, Mapping[bytes, FoundCell | None]]
    ) -> None:
        self._table_id = table_id
        self._rows = rows
        self.read: dict[bytes, None] = {}
        """The columns of the rows that were asked for, known or not, in that order."""

    def has(self, address: CellAddress) -> bool:
        """True if the cell is known, and need not be read. Notes that it was asked for."""
        table_id, row, column = address
        if table_id != self._table_id or row not in self._rows:
            return False
        self.read[column] = None
        return column in self._rows[row]

    def cells_of(
        self, table_id: int, row: bytes, columns: Sequence[bytes]
    ) -> Mapping[bytes, FoundCell | None] | None:
        """These cells, if all of them are known. Notes that they were asked for."""
        if table_id != self._table_id or row not in self._rows:
            return None
        self.read.update(dict.fromkeys(columns))
        cells = self._rows[row]
        if not cells.keys() >= set(columns):
            return None
        return {column: cells[column] for column in columns}

    def __getitem__(self, address: CellAddress) -> FoundCell | None:
        return self._rows[address.row][address.column]


def known_rows(
    known: KnownRows | None, table_id: int, rows: Iterable[bytes], columns: Sequence[bytes] | None
) -> dict[bytes, Mapping[bytes, FoundCell | None]]:
    """The rows of which all these columns are known; none without columns."""
    if known is None or not columns:
        return {}
    found = {row: known.cells_of(table_id, row, columns) for row in rows}
    return {row: cells for row, cells in found.items() if cells is not None}


class RangeRequest(NamedTuple):
    """A scan of a range of rows, at a timestamp."""

    table_id: int
    start: bytes
    end: bytes
    """Exclusive; an empty end means to the last row."""
    columns: tuple[bytes, ...] | None
    """None for all."""
    timestamp: int
    reverse: bool = False
    row_limit: int = 0
    """How many rows the caller will want; 0 if unknown."""
    report_deletes: bool = False
    prefixes: tuple[bytes, ...] = ()
    """Columns that begin with one of these are wanted, too."""
    passing: tuple[int, ...] = ()
    """Start timestamps of locks that are known not to affect this scan."""
    joined: bool = False
    """The caller can do without commit timestamps: a page may be a `JoinedPage`."""
    predicate: Predicate | None = None
    """Rows that it does not keep may be left out of a page, unless they have a lock in the way or a
    value that cannot be read. Its columns are among those of the request."""
    counts: bool = False
    """Rows that are kept may be counted instead, with the same exceptions."""

    @property
    def all_columns(self) -> bool:
        return self.columns is None

    def wants(self, column: bytes) -> bool:
        return wants(column, self.columns, self.prefixes)


def wants(column: bytes, names: Sequence[bytes] | None, prefixes: tuple[bytes, ...]) -> bool:
    """True if a read of these names (None: of all) and of these prefixes includes the column."""
    return names is None or column in names or column.startswith(prefixes)


class RangePage(NamedTuple):
    """Consecutive rows of a range, in the direction of the scan."""

    rows: dict[bytes, dict[bytes, FoundCell]]
    locks: list[Cell]
    """Locks in the way. Of their rows, `rows` has only the other cells."""
    start: bytes
    end: bytes
    """The page covers all of [start, end); an empty end means to the last row."""
    counted: int = 0
    """Rows that are not in `rows`, since they were to be counted."""


class CellPage(NamedTuple):
    """Like `RangePage`, for callers that move many cells: parallel lists, and no object per cell.

    Entry i of every list is about one cell; the cells of a row are adjacent.
    """

    rows: list[bytes]
    columns: list[bytes]
    commit_timestamps: list[int]
    values: list[bytes]
    deletes: list[int]
    """The indexes of the entries that are deletions, if those were requested."""
    locks: list[Cell]
    start: bytes
    end: bytes
    counted: int = 0

    def by_row(self) -> RangePage:
        """The page with an object for each cell."""
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
        return RangePage(rows, self.locks, self.start, self.end, self.counted)


class StoredChange(NamedTuple):
    """A change of a cell, as the change feed has it. Changes sort in the order of the feed."""

    commit_timestamp: int
    row: bytes
    column: bytes
    value: bytes | None
    """None for a deletion."""
    before: bytes | None
    """The value before, if it was requested and there was one."""


class ChangesRequest(NamedTuple):
    """The changes of a table with after < commit timestamp <= until, all of them stored by now."""

    table_id: int
    after: int
    until: int
    before: bool = False
    """The values before the changes are returned, too."""


class ChangesSeen(NamedTuple):
    """The findings of a look for changes, in all tablets of a table."""

    reached: int
    """Every change up to this timestamp is stored."""
    newest: int
    """No change is above this, up to `reached`; 0 if there is none."""
    ranges: list[tuple[bytes, bytes]]
    """The rows of the tablets that may have changes, in order."""
    locks: list[Cell]
    """Some of the locks because of which `reached` is not higher."""


class NotSent(NotExecuted):
    """The one-round commit did not leave this process, so no copy of it can ever arrive."""


class NotInOneRound(NotSent):
    """It cannot be one message: its cells are not in one tablet."""


_SETTLING_SECONDS = 1.0
_SETTLING_SHARE = 0.2


def waiting_seconds(left: float) -> float:
    """The time for which a transaction may wait to be executed, if it has `left` seconds left. The
    rest is for its marker, without which its caller cannot know that no late copy will be executed.
    """
    return left - min(left * _SETTLING_SHARE, _SETTLING_SECONDS)


class FollowedCommit(int):
    """A commit timestamp. The one directly above it was set aside, as the start of a transaction of
    this client that had begun before the commit was sent."""


CommitAnswer = int | Refused | PercolatorError
"""The commit timestamp of a one-round commit; or the first condition of a prewrite that failed on
one of its cells; or an error, of which only `Retry.UNKNOWN` leaves open whether it is committed."""


class OneRoundCommit(NamedTuple):
    """A transaction that one message commits: the cells that it writes, as parallel lists in the
    order of their rows."""

    table_id: int
    schema_version: int
    start: int
    rows: Sequence[bytes]
    columns: Sequence[bytes]
    kinds: Sequence[int]
    values: Sequence[bytes]
    observed: Sequence[tuple[bytes, tuple[bytes, ...]]] = ()
    """Columns among these, with the observers that their changes notify."""
    notifications: Sequence[tuple[bytes, bytes, tuple[bytes, ...]]] = ()
    """Rows and columns of which weak observers are notified."""
    is_followed: bool = False
    """Another transaction waits for this one, and would begin directly above it."""

    def lies_in(self, location: TabletLocation) -> bool:
        """True if the tablet has all of its rows."""
        start, end = location.start, location.end
        first, last = self.rows[0], self.rows[-1]
        if first < start or (end and last >= end):
            return False
        if not self.notifications:
            return True
        return all(start <= row and (not end or row < end) for row, _, _ in self.notifications)


class RollForward(NamedTuple):
    """An order to roll the locks of committed transactions forward."""

    table_id: int
    commits: Mapping[int, int]
    """Commit timestamps by start timestamp, as they were seen."""
    schema_version: int
    observers: Mapping[bytes, tuple[bytes, ...]]
    """By column: whom a put or deletion notifies."""
    row: bytes | None = None
    """Only the tablet of this row, which begins there; None: all tablets of the table."""
    await_cells: int = 0
    """For so many locks the answer waits, for about a second at most."""


class Mutations(Protocol):
    """Cells that can be changed."""

    def mutate(self, mutations: Sequence[CellMutation], deadline: float) -> Awaitable[list[Answer]]:
        """Returns answers in the order of the mutations. A mutation that fails raises nothing."""


class Cells(Mutations, Protocol):
    """All cells of all tables."""

    def commit(self, commit: OneRoundCommit, deadline: float) -> Awaitable[CommitAnswer]:
        """Commits a transaction with one message, if all its cells are in one tablet. Any
        other answer than an unknown one means that this message did not commit it."""

    def read(
        self, requests: Sequence[RowRequest], deadline: float, *, bytes_max: int = 0
    ) -> Awaitable[list[RowResult]]:
        """Returns answers in the order of the requests. Raises if one of them failed, and
        `InvalidArgument` as soon as they have more than `bytes_max` bytes; 0 means any number."""

    def scan(
        self, request: RangeRequest, timeout_seconds: float
    ) -> AsyncGenerator[RangePage, None]:
        """Yields pages without gaps from one end of the range to the other. The timeout applies to
        each page, since the length of a scan depends on its caller."""

    async def boundaries(self, table_id: int, start: bytes, end: bytes) -> list[bytes]:
        """Rows at which the range may be cut, in order: to scan the parts at the same time is
        faster. Found without a promise: tablets move, and are split."""


class Groups(Protocol):
    """Groups of mutations that take effect at one moment or not at all."""

    def mutate_together(
        self, table_id: int, mutations: Sequence[Mutation], deadline: float
    ) -> Awaitable[list[Answer]]:
        """Applies mutations of one row, and returns their answers in the same order. Either all are
        applied, or none is, and at least one is refused. Raises if neither is known."""


class RollsForward(Protocol):
    """Tables that roll the locks of committed transactions forward by themselves, once told."""

    async def roll_forward(self, order: RollForward, deadline: float) -> None:
        """Returns once all tablets concerned have been told. Nothing depends on it: what is left is
        done by those who meet the locks. Raises the error of a tablet that was not told."""


class ResolvedLocks(NamedTuple):
    """Outcomes of the transactions whose locks were met, as far as they are known."""

    verdicts: dict[int, int]
    """By start timestamp: the commit timestamp, or 0 if it was rolled back."""
    passable: set[int]
    """Start timestamps of those that commit above the snapshot, if at all."""


class ResolvesLocks(Protocol):
    """Servers that resolve the locks of others for a client that may not do so itself."""

    async def resolve(
        self,
        met: Sequence[tuple[CellAddress, int]],
        *,
        read_at: int,
        waited_seconds: float,
        deadline: float,
        remove: bool = False,
    ) -> ResolvedLocks:
        """Resolves locks, given with the start timestamps of their transactions, in the way of a
        snapshot at `read_at`; of a write, if that is 0. With `remove`, locks that the snapshot may
        pass are removed, too, or pushed. What was not answered is left out."""


class Turn(NamedTuple):
    """The answer of a tablet at which a transaction has waited for its turn."""

    in_turn: bool
    contended: bool
    """Others had to end their turns first, or wait now."""
    start: int
    """Where the transaction begins, if it has not begun before; 0 if it has to ask the oracle."""
    found: FoundCell | None
    """The cell at that timestamp; or as it is now, if the transaction has begun before."""
    is_known: bool
    """True if the cell was read, so that None says that it does not exist."""


class Turns(Protocol):
    """The queues of cells that many transactions are about to write."""

    async def await_turn(
        self, cell: CellAddress, place: int, start: int, wait_seconds: float, hold_seconds: float
    ) -> Turn:
        """Waits for a turn at the cell. `place`: a random number that the attempts at one
        transaction share. `start`: its start timestamp; 0 if it has not begun."""

    def end_turn(self, cell: CellAddress, place: int) -> None:
        """Ends the turn in the background: the transaction has not written the cell. Works in any
        thread, and after the end of the client."""


class ChangeFeeds(Protocol):
    """The change feeds of all tables."""

    def look_for_changes(
        self, request: ChangesRequest, passing: Sequence[int], deadline: float
    ) -> Awaitable[ChangesSeen]:
        """Asks all tablets how new their changes are. `passing` are the start timestamps of locks
        that do not matter."""

    def scan_changes(
        self,
        request: ChangesRequest,
        ranges: Sequence[tuple[bytes, bytes]],
        timeout_seconds: float,
    ) -> AsyncGenerator[list[StoredChange], None]:
        """Yields the changes of these rows in the order of their commits. The timeout applies to
        each page."""
