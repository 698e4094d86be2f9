"""Everything that the protocol needs from outside, through narrow interfaces."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from percolator.codecs import KeyCodec, readable
from percolator.errors import CellAddress, InvariantViolation, PercolatorError, SchemaChanged
from percolator.limits import Limits
from percolator.protocol.contention import HotCells, Loss, Rivals
from percolator.routing.catalog import TableSchema
from percolator.routing.cells import (
    Answer,
    CellMutation,
    Cells,
    Mutations,
    ResolvesLocks,
    RollsForward,
    Turns,
)
from percolator.tasks import NextTurn, Tasks
from percolator.wire.backoff import Backoff
from percolator.wire.liveness import Liveness
from percolator.world import Clock, Random

# The outcomes of transactions: facts that never change, so they can be cached.
#
# Invariant: a verdict is *seen*: a commit record or a rollback marker was read or written. Only
# then may it be put here. A second verdict on the same transaction has to be the same.

ROLLED_BACK = 0
"""The verdict on a transaction that was rolled back. Any other verdict is a commit timestamp."""


class Verdicts:
    """The last verdicts, by start timestamp: at most `entries_max`, and at least half as many.

    The process adds its own commits at once, so that its next transaction does not have to wait for
    locks of the previous one. So the older half is forgotten at once, rather than one verdict with
    each commit.
    """

    def __init__(self, entries_max: int) -> None:
        self._half = max(entries_max // 2, 1)
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}

    def get(self, start_timestamp: int) -> int | None:
        """The verdict, or None if it is not known."""
        known = self._newer.get(start_timestamp)
        return self._older.get(start_timestamp) if known is None else known

    def put(self, start_timestamp: int, verdict: int) -> None:
        known = self.get(start_timestamp)
        if known is None:
            if len(self._newer) >= self._half:
                self._older, self._newer = self._newer, {}
            self._newer[start_timestamp] = verdict
        elif known != verdict:
            raise InvariantViolation(
                f"transaction {start_timestamp} has two outcomes: "
                f"{_text(known)} and {_text(verdict)}"
            )


def _text(verdict: int) -> str:
    return f"committed at {verdict}" if verdict else "rolled back"


# What the transactions of one client came to: how many committed, how many lost, and where.
#
# Only numbers are kept: every transaction counts. People ask for them when throughput falls, which
# it usually does because many transactions write one cell.

CELLS_MAX = 256
"""The most cells that are counted. When there are more, the half with the fewest conflicts is
forgotten, so a count is a lower bound; that of a cell that matters is hardly off."""


class ContendedCells:
    """The cells where transactions have lost, and how often."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[CellAddress] = Counter()

    def lost_at(self, cell: CellAddress) -> None:
        self._counts[cell] += 1
        if len(self._counts) > CELLS_MAX:
            self._counts = Counter(dict(self._counts.most_common(CELLS_MAX // 2)))

    def most(self, number: int) -> list[tuple[CellAddress, int]]:
        """The cells with the most conflicts, and their counts."""
        return self._counts.most_common(number)


class Tally:
    """The counts of one client since it connected. Blocking threads do not touch it."""

    __slots__ = ("cells", "commits", "conflicts")

    def __init__(self) -> None:
        self.commits = 0
        self.conflicts = 0
        self.cells = ContendedCells()

    def lost_at(self, cell: CellAddress | None) -> None:
        """Counts a conflict. The cell is None if the transaction was given up without one."""
        self.conflicts += 1
        if cell is not None:
            self.cells.lost_at(cell)


class OpenStarts:
    """The start timestamps of open transactions and snapshots. The oldest limits collection."""

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}

    def add(self, owner: object, start_timestamp: int) -> None:
        self._starts[id(owner)] = start_timestamp

    def discard(self, owner: object) -> None:
        self._starts.pop(id(owner), None)

    def oldest(self) -> int:
        """The oldest start timestamp; 0 if nothing is open."""
        # A copy, since other threads may end their transactions at the same time.
        return min(list(self._starts.values()), default=0)


# What one transaction has cost so far, for its program: `tx.statistics`.


class LockWait:
    """A lock that a transaction waited for, and which transaction held it."""

    __slots__ = ("column", "holder_start_timestamp", "row", "seconds", "table_id")

    def __init__(
        self, table_id: int, row: bytes, column: bytes, holder: int, seconds: float
    ) -> None:
        self.table_id = table_id
        self.row = row
        self.column = column
        self.holder_start_timestamp = holder
        self.seconds = seconds

    def __repr__(self) -> str:
        return (
            f"LockWait({CellAddress(self.table_id, self.row, self.column)}, "
            f"held by {self.holder_start_timestamp}, {self.seconds:.3f} s)"
        )


@dataclass(slots=True, repr=False, eq=False)
class Statistics:
    """The cost of one transaction so far."""

    round_trips: int = 0
    """How often the transaction waited for responses; parallel requests count once."""
    rows_read: int = 0
    """How many rows were asked for or scanned."""
    retries: int = 0
    """How many of the round trips repeated a request: it had failed, or met a lock."""
    _lock_waits: list[LockWait] | None = None

    @property
    def lock_waits(self) -> list[LockWait]:
        """The locks that the transaction waited for, and their holders."""
        if self._lock_waits is None:  # most transactions never need it
            self._lock_waits = []
        return self._lock_waits

    def __repr__(self) -> str:
        return (
            f"Statistics(round_trips={self.round_trips}, retries={self.retries}, "
            f"lock_waits={self.lock_waits})"
        )


_log = logging.getLogger(__name__)


class Timestamps(Protocol):
    """The oracle."""

    def get(self, count: int = 1, timeout_seconds: float | None = None) -> Awaitable[int]:
        """Return a timestamp larger than every one that was received before the call."""
        ...


class Owners(Protocol):
    """The sessions of transaction owners: hints only."""

    @property
    def session_id(self) -> bytes | None:
        """The session of this process, if it has a live one."""
        ...

    async def liveness(self, session_ids: Sequence[bytes]) -> list[Liveness]:
        """Ask now which of these sessions are alive."""
        ...


class Schemas(Protocol):
    """The schemas of the tables, as far as this client knows them."""

    def get(self, table_id: int) -> TableSchema | None: ...

    async def refresh(self, table_id: int, deadline: float) -> TableSchema:
        """Fetch the current one."""
        ...


class Announcing(Protocol):
    """A store that has to be told which cells may change, before they do: a row store."""

    async def announce(
        self, start: int, cells: Sequence[tuple[CellAddress, bytes]], deadline: float
    ) -> None:
        """Returns when it is durable that the transaction that began then may change these cells,
        each for an observer."""
        ...

    async def announce_locked(
        self,
        table_id: int,
        observed: Collection[tuple[bytes, bytes]],
        starts: Collection[int],
        deadline: float,
    ) -> None:
        """As `announce`, for all cells of a table that the transactions that began then have
        locked, in these columns, each with an observer."""
        ...


@dataclass(frozen=True)
class Environment:
    """The parts of a client that all its transactions share."""

    cells: Cells
    timestamps: Timestamps
    owners: Owners
    schemas: Schemas
    clock: Clock
    random: Random
    limits: Limits
    verdicts: Verdicts
    deleted_tables: Mutations | None = None
    """Asks primaries in tables that are not served any more; `SchemaError` if the table is gone for
    good. Without it, locks whose primary is in such a table stay."""
    announcing: Announcing | None = None
    """Without it, commits themselves notify the observers of their cells."""
    rolls_forward: RollsForward | None = None
    """Where tables roll the locks of committed transactions forward by themselves."""
    resolves_locks: ResolvesLocks | None = None
    """Resolves the locks of others, if this client may not: its token has rights to some tables
    only."""
    catalogue_epoch: Callable[[], int] = lambda: 0
    """The highest that came with a timestamp. Below: by table, when its schema was asked for."""
    schemas_as_of: dict[int, int] = field(default_factory=dict)
    named_schema_version: Callable[[int], int] = lambda _: 0
    """The newest version of a table's schema that a tablet has named to this client."""
    table_names: Callable[[int], str] = lambda _: ""
    """The name of a table by its id, for errors; empty if this client does not know it."""
    hot_cells: HotCells = field(default_factory=HotCells)
    """Where this client's transactions have lost, and queue up."""
    rivals: Rivals = field(default_factory=Rivals)
    """Where they have lost to other clients, and wait for turns, or pause."""
    turns: Turns | None = None
    """Where many transactions are about to write a cell, and do so in turn; None in a row store."""
    tally: Tally = field(default_factory=Tally)
    background: Tasks = field(default_factory=lambda: Tasks(_left_to_others))
    """Work that continues after its caller has its result: committing other cells, or rolling them
    back. Nothing depends on it: what is left when the process ends is done by the clients that meet
    the locks. A caller that waits for one of the tasks must not cancel it."""

    committed: NextTurn[tuple[Any, int]] = field(default_factory=NextTurn)
    """Committed transactions (`WriteSteps`) whose other cells are committed in the background, and
    their commit timestamps."""

    @property
    def background_is_full(self) -> bool:
        """True when so much background work is pending that commits wait for their own."""
        return len(self.background) + len(self.committed) >= self.limits.background_tasks_max

    def now(self) -> float:
        """The monotonic clock, in seconds."""
        return self.clock.monotonic_seconds()

    def deadline(self) -> float:
        """The deadline of a call that begins now."""
        return self.now() + self.limits.call_seconds

    async def timestamp(self, deadline: float) -> int:
        """A fresh timestamp. Past the deadline, it is still tried, for a millisecond."""
        left = max(deadline - self.now(), 0.001)
        return await self.timestamps.get(timeout_seconds=left)

    def described(self, cell: CellAddress) -> str:
        """The cell, for errors: by name, and its row as the table's programs know it."""
        codec = self._key_codec(cell.table_id)
        key = None if codec is None else readable.key_data(codec, cell.row)
        return cell.described(self.table_names(cell.table_id), key)

    def row_named(self, table_id: int, row: bytes) -> str:
        """The key of a row, for errors, as the table's programs know it."""
        return readable.quoted_key(self._key_codec(table_id), row)

    def _key_codec(self, table_id: int) -> KeyCodec[Any] | None:
        schema = self.schemas.get(table_id)
        return None if schema is None else readable.key_codec(schema.codecs.names.key)

    def is_contended(self, cell: CellAddress) -> bool:
        """True if transactions of this client have recently lost at the cell."""
        return cell in self.hot_cells.lines or cell in self.rivals.contended

    def knows_winner(self, loss: Loss) -> bool:
        """True if this client knows the winner's outcome. Then it was nearly always its own."""
        return self.verdicts.get(loss.winner) is not None

    def backoff(self) -> Backoff:
        return Backoff(
            self.clock,
            self.random,
            self.limits.backoff_seconds_min,
            self.limits.backoff_seconds_max,
        )

    async def schema(self, table_id: int, deadline: float) -> TableSchema:
        known = self.schemas.get(table_id)
        return known if known is not None else await self.schemas.refresh(table_id, deadline)

    async def schema_of_reads(self, table_id: int, deadline: float) -> TableSchema:
        """The schema, no older than the one under which tablets have answered the last reads: a
        commit checks what it writes, not what is left out because of something that was read."""
        known = await self.schema(table_id, deadline)
        is_newest = known.version >= self.named_schema_version(table_id)
        return known if is_newest else await self.schemas.refresh(table_id, deadline)

    async def refresh_schemas(
        self, steps: Iterable[CellMutation], answers: Iterable[Answer], deadline: float
    ) -> None:
        """Asks for the newer schemas of which these answers speak: of each table once, however many
        of its cells have met it."""
        changed: dict[int, None] = {}
        for step, answer in zip(steps, answers, strict=True):
            if isinstance(answer, SchemaChanged):
                changed[step.table_id] = None
        for table_id in changed:
            await self.schemas.refresh(table_id, deadline)


def _left_to_others(_: asyncio.Task[Any], error: BaseException) -> None:
    if isinstance(error, PercolatorError):
        _log.warning("background work left to the clients that meet the locks: %s", error)
    else:
        _log.error("background work failed", exc_info=error)
