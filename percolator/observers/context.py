"""The port on which workers stand: the parts of the client that they need, as narrow as possible.

When notifications are written is the engine's affair: tablets write them with the commit of a cell
(`percolator/tablet`), a row store writes intents before it (`intent_notifications.py`).
`Notifications` is what workers, `wait` and the commands ask of it; all its answers but those of
`survey` are hints.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from percolator.errors import PercolatorError
from percolator.observers.definition import BlockingTransactions, Observer
from percolator.observers.time_limits import ClusterWaits
from percolator.observers.watched import Watched
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.environment import Environment, Statistics
from percolator.protocol.write_set import WriteSet
from percolator.routing.catalog import Catalog
from percolator.routing.cells import KnownRows
from percolator.timestamps import Timestamp
from percolator.v1 import master_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import Cell
from percolator.wire.advisory_locks import AdvisoryLocks
from percolator.world import World

if TYPE_CHECKING:
    from percolator.observers.work_queue import Work


LOCKS_OF_ANY_AGE = 2**64 - 1


@dataclass(frozen=True)
class WorkRequest:
    """A range of rows, and what to look for there."""

    table_id: int
    start: bytes = b""
    end: bytes = b""
    """The rows from start (inclusive) to end (exclusive); an empty end means to the last row."""
    observers: tuple[bytes, ...] = ()
    """The observers whose notifications to find; empty for all."""
    locked_columns: tuple[bytes, ...] = ()
    """Locks on these columns are work, too: an owner that died after its commit point leaves
    nothing else behind, and resolving such a lock writes the notification."""
    locks_before: int = 0
    """Only locks with a start timestamp below this are found."""
    row_limit: int = 0
    """The most rows in each tablet's answer; 0 leaves it to the tablet server."""


class Waiting(NamedTuple):
    """The notifications of one observer about one cell."""

    table_id: int
    row: bytes
    column: bytes
    observer: bytes
    timestamps: tuple[int, ...]
    """Commit timestamps, newest first; only the oldest if there are very many."""


@dataclass(frozen=True, slots=True)
class FoundWork:
    """One answer to one request, for a range of its rows."""

    request: WorkRequest
    """The request as answered: with the range of which this tells."""
    waiting: list[Waiting]
    """Notifications in row order; all those of a row are in one answer."""
    locks: list[Cell]
    """Cells with locks, with their stored records."""
    rest: tuple[bytes, bytes] | None
    """The range that remains to be requested; None if there is none."""
    problem: PercolatorError | None
    """Why there was no answer in time; then all of the range remains."""
    place: Hashable = None
    """The place that answered: a tablet at its epoch, for instance. None if none did."""
    mark: Hashable = None
    """Not the same in two answers of a place if work has come or gone there unseen in between:
    what `percolator.observers.quiet` needs to know."""


@dataclass(frozen=True, slots=True)
class WorkHints:
    """Some notifications that were just written."""

    address: str
    """The server that says so."""
    began: bool
    """The stream has just begun: notifications written before may not have been delivered."""
    notifications: Sequence[pb.WatchedNotification]
    left_out: int
    """How many were dropped before these, because this process reads slowly."""


class Claim(NamedTuple):
    """A cell for one of this worker's observers."""

    watched: Watched
    row: bytes
    column: bytes


class Admission(Protocol):
    """A worker that a pass tells what it finds."""

    @property
    def watched(self) -> Sequence[Watched]:
        """The observers to run now."""

    @property
    def admitted(self) -> int:
        """The number of cells for which this worker will run observers."""

    def observer(self, table_id: int, observer: bytes) -> Watched | None:
        """The observer of this name, if it is one of this worker's."""

    def has_space(self, watched: Watched) -> bool: ...

    def take(self, found: Iterable[Waiting]) -> Awaitable[bool]:
        """Locks and queues what was found. Returns False if another worker is at work there."""

    def knows(self, claim: Claim) -> bool:
        """True if it is queued here, or being run."""

    def claim(self, claims: Sequence[Claim]) -> Awaitable[list[bool]]:
        """Tries to lock these cells. Says for each whether it is this worker's now: then it has to
        be admitted or released."""

    def admit(self, claim: Claim, timestamps: Iterable[int]) -> None:
        """Queues it, if the queue has space, and it was not handled meanwhile."""

    def release(self, claims: Iterable[Claim]) -> None:
        """Leaves these cells to others."""


class Notifications(Protocol):
    """The notifications of one engine."""

    @property
    def pause_seconds_max(self) -> float:
        """The longest pause between two passes with which work is found in time."""

    def look(self, admission: Admission, *, everything: bool) -> Awaitable[int]:
        """Makes one pass, and has this worker admit what it finds. Returns how many cells it has
        admitted. Without `everything`, what others were told of just now is left to them."""

    def hints(
        self, watched: Mapping[int, Sequence[bytes]], *, listen_only: bool = False
    ) -> AsyncGenerator[WorkHints, None]:
        """Yields hints for these observers, by table, as they are written; never ends by itself.

        Each row goes to one of the workers that watch its observer; with `listen_only`, this
        process gets every row.
        """

    def survey(
        self, request: WorkRequest, deadline: float = ...
    ) -> AsyncGenerator[FoundWork, None]:
        """Yields answers until the whole range is covered. Raises the error of a part that did not
        answer by the deadline."""

    def forget(
        self, handled: Sequence[Waiting], deadline: float
    ) -> Awaitable[PercolatorError | None]:
        """Deletes exactly these notifications, many at a time. Returns the first error: what was
        not deleted is found again."""


class RunInternals(Protocol):
    """`percolator.aio.Transaction.internal`."""

    writes: WriteSet

    def bind(self, table: str, table_id: int) -> None:
        """Fixes which table the name means in this transaction, before it is used."""

    def know(self, rows: KnownRows) -> None:
        """Cells as they are at the transaction's timestamp: no need to read them again."""


class RunTransaction(Protocol):
    """The transaction of a run: `percolator.aio.observing.ObserverTransaction`."""

    waits: ClusterWaits
    """The calls in which it waits for the cluster."""
    works: Sequence[Work]
    """The changes that are handled once it has committed."""
    is_in_function: bool
    """The observer's function has it, and must not commit it."""
    last_runs: Mapping[Work, int]
    """The start timestamp of the observer's last run for each of the cells; 0 if it never ran."""

    @property
    def statistics(self) -> Statistics: ...

    @property
    def internal(self) -> RunInternals: ...

    @property
    def ended(self) -> bool: ...

    @property
    def commit_timestamp(self) -> Timestamp | None: ...

    async def timestamp(self) -> Timestamp: ...

    async def commit(self) -> Timestamp | None: ...

    def rollback(self) -> None: ...


class BlockingCalls:
    """Calls observers with transactions of one event loop. May be used in any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread_ident: int | None) -> None:
        self._loop = loop
        self._thread_ident = thread_ident
        self._wrappers: dict[BlockingTransactions, Callable[[Any], Any]] = {}
        """Kept for reuse, because threads that share a wrapper are woken together."""

    def call(self, observer: Observer, transaction: object, arguments: list[object]) -> None:
        """Calls the observer's function with the transaction, wrapped in the blocking API."""
        make = observer.blocking_transactions
        wrap = self._wrappers.get(make)
        if wrap is None:  # two threads may make one at the same time: the first is kept
            wrap = self._wrappers.setdefault(make, make(self._loop, self._thread_ident))
        observer.call_blocking(wrap(transaction), *arguments)


@dataclass(frozen=True)
class WorkerContext:
    """One connection to a cluster, for workers, backfills and `wait`."""

    world: World
    env: Environment
    cleanup: Cleanup
    catalog: Catalog
    notifications: Notifications
    locks: AdvisoryLocks
    begin: Callable[[Work | None], RunTransaction]
    """Begins a transaction for a run of this work; with None, for the worker's own purposes."""
    blocking: BlockingCalls
    """Calls blocking observers with such a transaction."""
    running_observers: Callable[[], Awaitable[Collection[tuple[str, str]] | None]]
    """Asks which observers, by table and name, run in any process; None if some process may run
    others."""

    tablet_of: Callable[[int, bytes], Hashable]
    """The tablet of a row, as far as it is known: None without tablets."""

    async def describe(self, table: str) -> master_pb2.Table:
        """The table with its observers, as it is now."""
        return await self.catalog.describe(table, self.env.deadline())
