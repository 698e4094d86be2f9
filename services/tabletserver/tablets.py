"""All tablets of this server: opened and closed as the master orders, and the calls to them.

ServedTablet         one tablet: opened, serving, failed, reopened
Tablets              all of them, and the master's orders
TabletServerHandler  the RPCs of a tablet server

If a tablet fails to open, or fails later, it is listed with its error; the others keep serving.
Orders about one tablet are carried out one after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from structlog.stdlib import BoundLogger

from percolator.errors import (
    InvalidArgument,
    NotExecuted,
    NotReady,
    Overloaded,
    PercolatorError,
    StoreFault,
    StoreUnusable,
    TabletMoved,
)
from percolator.services.chassis.coordinator import Trouble
from percolator.services.chassis.epoch_directory import EPOCH_MAX
from percolator.services.chassis.rpc import Quota, caller_identity, remaining_seconds
from percolator.services.tabletserver.own_steps import OwnSteps
from percolator.services.tabletserver.rights import (
    ResolveLocks,
    RowRights,
    locks_in,
    queries,
)
from percolator.services.tabletserver.settings import RequestLimits
from percolator.services.tabletserver.storage import Ancestry, DiskSpace, TabletStore
from percolator.tablet.notification_watch import NotificationWatch
from percolator.tablet.requests import not_executed
from percolator.tablet.state import (
    Commits,
    CommitTimestamps,
    Ownership,
    TabletIdentity,
    TabletLimits,
    TimestampGuard,
    Ttls,
    ttls_of,
)
from percolator.tablet.tablet import AnswerBudget, Tablet
from percolator.tasks import Tasks
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.wire.backoff import Backoff
from percolator.wire.status import to_detail
from percolator.world import Clock, Random

# One order about a tablet after another; orders about different tablets do not wait.


class _Orders:
    """The orders about one tablet that are under way or wait."""

    __slots__ = ("lock", "orders")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.orders = 0


class OrderQueues:
    """Runs orders about one tablet one after another. Belongs to one event loop.

    Keeps nothing of a tablet without orders: a server sees any number of tablets in its life, and
    any number in orders to close what it does not have.
    """

    def __init__(self) -> None:
        self._tablets: dict[int, _Orders] = {}

    def __len__(self) -> int:
        return len(self._tablets)

    @asynccontextmanager
    async def in_order(self, tablet_id: int) -> AsyncIterator[None]:
        """The block runs once the tablet's earlier orders have ended, in the order of arrival."""
        queue = self._tablets.setdefault(tablet_id, _Orders())
        queue.orders += 1
        try:
            async with queue.lock:
                yield
        finally:
            queue.orders -= 1
            if not queue.orders:
                del self._tablets[tablet_id]


# One tablet on this server, through everything that may happen to it.
#
# It is opened, serves, may fail, and is reopened automatically: after an I/O error it is not known
# what the last batch left, so LevelDB is closed and its log decides. A tablet that is no longer
# held is released. Meanwhile every request gets the error that says which case it is.

REOPEN_SECONDS_MIN = 0.05
REOPEN_SECONDS_MAX = 5.0
OPENING_RETRY_SECONDS = 0.05


class Background(Protocol):
    """Runs work in the background; a failure there is not lost."""

    def __call__(self, name: str, work: Coroutine[Any, Any, object], /) -> asyncio.Task[Any]: ...


class Schema(NamedTuple):
    """The parts of its table's schema that a tablet has to know."""

    version: int
    change_feed: bool = False
    ttls: Ttls = ()


@dataclass
class TabletEvents:
    """Counts of events of all tablets of this process, including those that have left it."""

    reopened: int = 0
    """How often a tablet was reopened after an I/O error."""
    lost: int = 0
    """How many tablets were lost to a later owner, without an order to close."""
    cells_trimmed: int = 0
    """How many cells were deleted after splits because their rows belong to other tablets."""


@dataclass(frozen=True)
class SharedByTablets:
    """Objects that all tablets of a server share."""

    store: TabletStore
    clock: Clock
    random: Random
    limits: TabletLimits
    background: Background
    log: BoundLogger
    open_tablets: Callable[[], int]
    watch: NotificationWatch
    guard: TimestampGuard
    timestamps: CommitTimestamps | None = None
    commits: Commits | None = None
    events: TabletEvents = field(default_factory=TabletEvents)
    trimming: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held to trim a tablet, one at a time: each takes its share of this process's time."""


class ServedTablet:
    """One tablet of this server. Belongs to one event loop."""

    def __init__(
        self,
        identity: TabletIdentity,
        schema: Schema,
        ownership: Ownership,
        shared: SharedByTablets,
        on_lost: Callable[[ServedTablet], None],
    ) -> None:
        self.identity = identity
        self.schema_version = schema.version
        """The acknowledged version: nothing is judged under an older one any longer, and everything
        that was judged under one has been answered."""
        self._ordered = schema
        """The newest schema that was requested: the tablet judges under it once it is open."""
        self._ownership = ownership
        self._shared = shared
        self._on_lost = on_lost
        self._log = shared.log.bind(tablet=identity.tablet_id, epoch=identity.epoch)
        self._tablet: Tablet | None = None
        self._ended: Tablet | None = None
        """A tablet that no longer serves, and is not closed yet: until then its LevelDB is open."""
        self._notifications_written = 0
        """The count from before the tablet was last opened. Comparing counts works only if they
        never shrink within an epoch."""
        self._error: PercolatorError | None = NotReady(
            f"tablet {identity.tablet_id} is being opened",
            retry_after_seconds=OPENING_RETRY_SECONDS,
        )
        # Opening, reopening and closing exclude each other: LevelDB is open at most once.
        self._changing = asyncio.Lock()
        self._closed = False
        self._reopening: asyncio.Task[Any] | None = None

    async def serving(self) -> Tablet:
        """The open tablet, or the error that says why there is none."""
        if self._tablet is None:
            error = self._error or NotReady(f"tablet {self.identity.tablet_id} is closed")
            if not await self._ownership.is_held():
                # Even if it is still being opened here, the caller has to go elsewhere.
                error = self._moved()
            # All requests get the same object: without this, its traceback would grow with each.
            raise error.with_traceback(None)
        return self._tablet

    @property
    def error(self) -> PercolatorError | None:
        """Why it is not served; None while it is."""
        return None if self._tablet is not None else self._error

    async def open(self) -> None:
        """Serves from now on; after `StoreUnusable`, every request gets that error."""
        async with self._changing:
            if self._closed or self._tablet is not None:
                return
            await self._close_ended()
            try:
                self._tablet = await self._opened()
            except StoreUnusable as error:
                self._error = error
                raise
            self.schema_version = self._tablet.schema_version
            self._error = None
            if self._tablet.needs_trimming:
                name = f"trim tablet {self.identity.tablet_id}"
                self._shared.background(name, self._trim(self._tablet))

    async def set_schema(self, schema: Schema) -> None:
        """Once this returns, the tablet judges under this schema; an older one is ignored. While
        the tablet is not open, only opening it acknowledges the schema."""
        ordered = self._ordered = max(self._ordered, schema)
        if self._tablet is not None:
            await self._follow(self._tablet, ordered)
            self.schema_version = max(self.schema_version, ordered.version)

    @staticmethod
    async def _follow(tablet: Tablet, schema: Schema) -> None:
        await tablet.set_schema_version(
            schema.version, change_feed=schema.change_feed, ttls=schema.ttls
        )

    async def close(self) -> None:
        """Lets the running batch finish, flushes, and never opens again."""
        self._closed = True
        async with self._changing:
            self._stop_waiting()
            self._error = self._moved()
            if self._tablet is not None:
                self._ended, self._tablet = self._tablet, None
            await self._close_ended()

    def _moved(self) -> TabletMoved:
        return TabletMoved(
            f"tablet {self.identity.tablet_id} is no longer served here",
            tablet_id=self.identity.tablet_id,
            epoch=self.identity.epoch,
        )

    def describe(self) -> pb.TabletDescription:
        """Its identity and current state."""
        if self._tablet is not None:
            description = self._tablet.describe()
            description.schema_version = self.schema_version
            return description
        description = pb.TabletDescription(
            table_id=self.identity.table_id,
            tablet_id=self.identity.tablet_id,
            epoch=self.identity.epoch,
            schema_version=self.schema_version,
        )
        description.range.start = self.identity.start
        description.range.end = self.identity.end
        if self._error is not None:
            description.error.CopyFrom(to_detail(self._error))
        return description

    def report(self) -> pb.ReportedTablet:
        """No more than the master needs to know several times a second."""
        reported = pb.ReportedTablet(
            tablet_id=self.identity.tablet_id,
            epoch=self.identity.epoch,
            schema_version=self.schema_version,
        )
        if self._tablet is None and self._error is not None:
            reported.error.CopyFrom(to_detail(self._error))
        return reported

    async def _opened(self) -> Tablet:
        started = self._shared.clock.monotonic_seconds()
        storage = await self._shared.store.open(
            self._ownership, open_tablets=self._shared.open_tablets()
        )
        tablet = Tablet(
            self.identity,
            schema_version=self._ordered.version,
            change_feed=self._ordered.change_feed,
            ttls=self._ordered.ttls,
            storage=storage,
            clock=self._shared.clock,
            ownership=self._ownership,
            on_closed=lambda error: self._stopped_by_itself(tablet, error),
            limits=self._shared.limits,
            guard=self._shared.guard,
            watch=self._shared.watch,
            timestamps=self._shared.timestamps,
            commits=self._shared.commits,
            notifications_written=self._notifications_written,
        )
        try:
            await tablet.open()
            while tablet.schema_version < self._ordered.version:
                # Ordered while it was being opened. Nothing has been judged yet.
                await self._follow(tablet, self._ordered)
        except BaseException:
            await self._close(tablet)
            raise
        seconds = self._shared.clock.monotonic_seconds() - started
        self._log.info("tablet open", seconds=round(seconds, 3))
        return tablet

    async def _trim(self, tablet: Tablet) -> None:
        """Trims after a split. If this is interrupted, the next owner or the next opening starts it
        again."""
        async with self._shared.trimming:
            try:
                cells = await tablet.trim()
            except PercolatorError as error:
                self._log.info("trimming was interrupted", reason=str(error))
                return
        self._shared.events.cells_trimmed += cells
        self._log.info("trimmed to its range", cells=cells)

    async def _close(self, tablet: Tablet) -> None:
        try:
            await tablet.close()
        except StoreUnusable as error:
            # It is closed anyway, and everything that was acknowledged is in its log.
            self._log.warning("tablet not closed cleanly", error=str(error))

    async def _close_ended(self) -> None:
        """Closes a tablet that no longer serves. The next change of the tablet does this, under the
        lock. If it is cancelled, the change after it closes the same one."""
        if self._ended is not None:
            await self._close(self._ended)
            self._ended = None

    def _stopped_by_itself(self, tablet: Tablet, error: PercolatorError) -> None:
        if self._tablet is not tablet:
            # Failed while being opened or closed: that operation raises the error.
            return
        self._tablet, self._ended = None, tablet
        self._error = error
        # The notifications of the failed batch may exist or not: one more says that they may.
        self._notifications_written = tablet.statistics().notifications_written + 1
        if isinstance(error, StoreUnusable):
            self._log.error("tablet closed itself, reopening it", error=str(error))
        else:
            self._log.warning("tablet lost to a later owner", error=str(error))
        self._reopening = self._shared.background(
            f"tablet {self.identity.tablet_id} after {type(error).__name__}",
            self._after(error),
        )

    async def _after(self, error: PercolatorError) -> None:
        async with self._changing:
            await self._close_ended()
        if isinstance(error, StoreUnusable):
            await self._reopen()
        else:
            self._lose()

    def _lose(self) -> None:
        self._closed = True
        self._shared.events.lost += 1
        self._on_lost(self)

    async def _reopen(self) -> None:
        shared = self._shared
        # Partly random: a failed disk has closed all tablets of this server at once.
        backoff = Backoff(shared.clock, shared.random, REOPEN_SECONDS_MIN, REOPEN_SECONDS_MAX)
        trouble = Trouble(self._log, "tablet cannot be opened yet")
        while not self._closed:
            if not await self._may_be_held():
                # Anything that is found there belongs to another owner.
                self._log.warning("tablet lost to a later owner before it could be reopened")
                self._lose()
                return
            try:
                await self.open()
            except StoreUnusable as error:
                if error.fault is StoreFault.DAMAGED:
                    self._log.error("tablet is damaged and stays closed", error=str(error))
                    return
                pause = backoff.next_seconds()
                trouble.lasts(error)
            else:
                shared.events.reopened += 1
                return
            await shared.clock.sleep(pause)

    async def _may_be_held(self) -> bool:
        try:
            return await self._ownership.is_held()
        except NotReady:
            # The store does not say. Opening the tablet asks again, and finds what to do.
            return True

    def _stop_waiting(self) -> None:
        # Called while nothing else changes this tablet, so that this cuts short only a pause.
        if self._reopening is not None and self._reopening is not asyncio.current_task():
            self._reopening.cancel()
            self._reopening = None


class Tablets:
    """All tablets of this server. Belongs to one event loop."""

    def __init__(
        self,
        store: TabletStore,
        clock: Clock,
        random: Random,
        limits: TabletLimits,
        background: Background,
        log: BoundLogger,
        *,
        guard: TimestampGuard,
        timestamps: CommitTimestamps | None = None,
        commits: Commits | None = None,
        tablets_warn: int,
    ) -> None:
        self._served: dict[int, ServedTablet] = {}
        self._leaving: dict[ServedTablet, None] = {}
        """Tablets that were released, but are not closed yet."""
        self._orders = OrderQueues()
        self._under_way = Tasks()
        """Orders, which continue even if their caller has gone. If one were cancelled half-way, a
        tablet would be "being opened" forever, and one that takes longer to open than its master
        waits would never be open."""
        self._store = store
        self._background = background
        self._log = log
        self._tablets_warn = tablets_warn
        self._warn_above = tablets_warn
        """The number of tablets above which the log says it, or says it again."""
        self.watch = NotificationWatch()
        """The streams that receive notifications from any of the tablets."""
        self.guard = guard
        """The oracle's time as far as it is known, for all tablets."""
        self._shared = SharedByTablets(
            store,
            clock,
            random,
            limits,
            background,
            log,
            lambda: len(self._served),
            self.watch,
            guard,
            timestamps,
            commits,
        )

    @property
    def events(self) -> TabletEvents:
        """Events since the process started."""
        return self._shared.events

    async def serving(self, target: pb.TabletTarget) -> Tablet:
        """The open tablet that a request names; the tablet itself checks epoch and schema."""
        served = self._served.get(target.tablet_id)
        if served is None:
            raise _not_here(target.tablet_id, target.epoch)
        return await served.serving()

    def table_of(self, target: pb.TabletTarget) -> int:
        """The table of a tablet that is here."""
        served = self._served.get(target.tablet_id)
        if served is None:
            raise _not_here(target.tablet_id, target.epoch)
        return served.identity.table_id

    def all(self) -> list[ServedTablet]:
        """Every tablet, whether it can be served or not."""
        return list(self._served.values())

    async def open(
        self, identity: TabletIdentity, schema: Schema, ancestry: Ancestry
    ) -> ServedTablet:
        """Serves the tablet at this epoch from now on. Repeating the order is harmless."""
        _check(identity)
        return await self._under_way.run_to_the_end(self._open(identity, schema, ancestry))

    async def _open(
        self, identity: TabletIdentity, schema: Schema, ancestry: Ancestry
    ) -> ServedTablet:
        async with self._orders.in_order(identity.tablet_id):
            present = self._served.get(identity.tablet_id)
            if present is not None and present.identity.epoch >= identity.epoch:
                return await self._open_again(present, identity, schema)
            if present is not None:
                # The next owner is this very process, and nothing else would keep apart two open
                # LevelDBs of one tablet.
                await self._let_go(present)
            ownership = await self._store.take_over(identity, ancestry)
            served = ServedTablet(identity, schema, ownership, self._shared, self._on_lost)
            self._served[identity.tablet_id] = served
            self._warn_of_many()
            await self._opened(served)
            return served

    async def close(self, tablet_id: int, epoch: int) -> None:
        """Flushes and closes the tablet. One that is not here at this epoch is closed already."""
        await self._under_way.run_to_the_end(self._close(tablet_id, epoch))

    async def _close(self, tablet_id: int, epoch: int) -> None:
        async with self._orders.in_order(tablet_id):
            present = self._served.get(tablet_id)
            if present is None or present.identity.epoch < epoch:
                return
            if present.identity.epoch > epoch:
                raise _not_here(tablet_id, epoch)
            await self._let_go(present)

    async def close_all(self) -> None:
        """Closes all tablets at the end of the process: what is flushed needs no replay."""
        await self._under_way.cancel()
        await asyncio.gather(*map(self._let_go, [*self.all(), *self._leaving]))

    def describe(self, tablet_ids: Iterable[int]) -> list[pb.TabletDescription]:
        """Describes these tablets, or all; unknown ones are left out."""
        wanted = set(tablet_ids)
        return [
            served.describe()
            for tablet_id, served in sorted(self._served.items())
            if not wanted or tablet_id in wanted
        ]

    async def _open_again(
        self, present: ServedTablet, identity: TabletIdentity, schema: Schema
    ) -> ServedTablet:
        if present.identity.epoch > identity.epoch:
            raise _not_here(identity.tablet_id, identity.epoch, present.identity.epoch)
        if present.identity != identity:
            raise InvalidArgument(
                "range",
                f"tablet {identity.tablet_id} is open here at this epoch with another identity",
            )
        await present.set_schema(schema)
        if present.error is not None:
            # It failed to open before, or it is just being opened again after an I/O error.
            await self._opened(present)
        return present

    async def _opened(self, served: ServedTablet) -> None:
        identity = served.identity
        await served.open()
        if served.error is None:  # or it was closed meanwhile
            name = f"clear up behind tablet {identity.tablet_id}"
            self._background(name, self._clear_up(identity))

    async def _let_go(self, served: ServedTablet) -> None:
        # Unlist it first: new requests learn at once that it moves.
        self._on_lost(served)
        self._leaving[served] = None
        await served.close()
        self._leaving.pop(served, None)
        self._log.info("tablet closed", tablet=served.identity.tablet_id)

    def _on_lost(self, served: ServedTablet) -> None:
        if self._served.get(served.identity.tablet_id) is served:
            del self._served[served.identity.tablet_id]

    def _warn_of_many(self) -> None:
        if len(self._served) <= self._tablets_warn:
            self._warn_above = self._tablets_warn
        elif len(self._served) > self._warn_above:
            # Not with each tablet: one server may be given hundreds within seconds.
            self._warn_above = 2 * len(self._served)
            self._log.warning(
                "many tablets on one server: each costs an fsync per batch",
                tablets=len(self._served),
                tablets_warn=self._tablets_warn,
            )

    async def _clear_up(self, identity: TabletIdentity) -> None:
        try:
            await self._store.remove_superseded(identity)
        except StoreUnusable as error:
            # The only cost is space, until the next owner cleans up.
            self._log.warning(
                "leftovers of former owners not deleted",
                tablet=identity.tablet_id,
                error=str(error),
            )


def _not_here(tablet_id: int, epoch: int, highest_epoch: int = 0) -> TabletMoved:
    why = f"tablet {tablet_id} is not served here at epoch {epoch}"
    return TabletMoved(why, tablet_id=tablet_id, epoch=epoch, highest_epoch=highest_epoch)


def _check(identity: TabletIdentity) -> None:
    for name in ("table_id", "tablet_id", "epoch"):
        if getattr(identity, name) < 1:
            raise InvalidArgument(name, "expected 1 or more, found 0")
    if identity.epoch > EPOCH_MAX:
        # No later owner could have a higher one: the tablet would be lost to all but this server.
        raise InvalidArgument("epoch", f"expected at most {EPOCH_MAX}, found {identity.epoch}")
    if identity.end and identity.start >= identity.end:
        raise InvalidArgument("range", "expected the start below the end")


# TabletServerService: passes requests to tablets, and returns their responses.
#
# Every batch of a request is answered separately: a tablet that has moved, is full or is damaged
# does not affect the others. The handler knows messages and `PercolatorError`s, but not gRPC.

OVERLOAD_RETRY_SECONDS = 0.1
_ANSWER_SECONDS = 0.5
_ANSWER_SHARE = 0.1
"""The time that is reserved of the caller's deadline for the answer: a caller without one has to
take for unknown what was never executed."""

_ANSWER_FULL = NotExecuted("the response is full; request the rest again")

BatchT = TypeVar("BatchT", pb.MutationBatch, pb.TransactionBatch, pb.ReadBatch)
ScanT = TypeVar("ScanT", pb.ScanRequest, pb.ScanCellsRequest, pb.ScanChangesRequest)
PageT = TypeVar("PageT")
ResultT = TypeVar("ResultT", pb.MutationBatchResult, pb.TransactionBatchResult, pb.ReadBatchResult)


@dataclass
class RequestCounts:
    """Counts of what was requested since the start."""

    pages: int = 0
    slow: int = 0
    queue_bytes: int = 0
    """The bytes of mutations that are in progress now."""
    refused: dict[str, int] = field(default_factory=dict)
    """Batches refused as a whole, by error."""


class TabletServerHandler:
    """Answers the RPCs of one tablet server."""

    def __init__(
        self,
        tablets: Tablets,
        raise_safe_points: Callable[
            [pb.RaiseSafePointsRequest], Awaitable[pb.RaiseSafePointsResponse]
        ],
        disk: DiskSpace,
        clock: Clock,
        log: BoundLogger,
        limits: RequestLimits = RequestLimits(),  # noqa: B008 - frozen
        *,
        server_id: str,
        watches: Quota,
        rights: RowRights,
        own_steps: OwnSteps,
        resolve_locks: ResolveLocks | None,
    ) -> None:
        """`watches` is the quota of streams that watch notifications. Without masters, no locks are
        resolved for others."""
        self._tablets = tablets
        self._raise_safe_points = raise_safe_points
        self._disk = disk
        self._now = clock.monotonic_seconds
        self._log = log
        self._limits = limits
        self._server_id = server_id
        self._watches = watches
        self._rights = rights
        self._own_steps = own_steps
        self._resolve_locks = resolve_locks
        self.counts = RequestCounts()

    # ---------------------------------------------------------------------------- rows

    async def mutate(self, request: pb.MutateRequest) -> pb.MutateResponse:
        started = self._now()
        deadline = self._deadline(started)
        batches = request.batches
        rows = sum(len(batch.mutations) + len(batch.steps.rows) for batch in batches)
        self._check_rows(len(batches), rows)
        bytes_held = request.ByteSize()
        self.counts.queue_bytes += bytes_held
        try:
            results = await _each(batches, lambda i, batch: self._mutated(i, batch, deadline))
        finally:
            self.counts.queue_bytes -= bytes_held
        self._note_slow("Mutate", started, batches)
        return pb.MutateResponse(batches=results)

    async def mutate_together(self, request: pb.MutateTogetherRequest) -> pb.MutateTogetherResponse:
        started = self._now()
        deadline = self._deadline(started)
        batch = request.batch
        self._check_rows(1, len(batch.mutations))
        bytes_held = request.ByteSize()
        self.counts.queue_bytes += bytes_held
        try:
            self._require_disk()
            self._require_capacity()
            tablet = await self._tablets.serving(batch.target)
            response = await tablet.mutate_together(batch, deadline_seconds=deadline)
        finally:
            self.counts.queue_bytes -= bytes_held
        self._note_slow("MutateTogether", started, [batch])
        return response

    async def roll_forward(self, request: pb.RollForwardRequest) -> pb.RollForwardResponse:
        self._require_disk()
        return await (await self._tablets.serving(request.target)).roll_forward(request)

    async def commit_transactions(
        self, request: pb.CommitTransactionsRequest
    ) -> pb.CommitTransactionsResponse:
        started = self._now()
        deadline = self._deadline(started)
        if request.wait_milliseconds:
            deadline = min(deadline, started + request.wait_milliseconds / 1000)
        batches = request.batches
        notifications = sum(len(batch.notifications) for batch in batches)
        self._check_rows(len(batches), sum(len(batch.rows) for batch in batches), notifications)
        bytes_held = request.ByteSize()
        self.counts.queue_bytes += bytes_held
        try:
            results = await _each(batches, lambda i, batch: self._committed(i, batch, deadline))
        finally:
            self.counts.queue_bytes -= bytes_held
        self._note_slow("CommitTransactions", started, batches)
        return pb.CommitTransactionsResponse(batches=results)

    async def read(self, request: pb.ReadRequest) -> pb.ReadResponse:
        started = self._now()
        batches = request.batches
        rows = sum(len(batch.reads) + len(batch.cells.rows) for batch in batches)
        self._check_rows(len(batches), rows)
        budget = AnswerBudget()
        results = await _each(batches, lambda i, batch: self._read(i, batch, budget))
        self._note_slow("Read", started, batches)
        return pb.ReadResponse(batches=results)

    async def resolve_locks(self, request: pb.ResolveLocksRequest) -> pb.ResolveLocksResponse:
        if self._resolve_locks is None:
            raise InvalidArgument("target", "the server has no masters, and resolves no locks")
        deadline = self._deadline(self._now())
        self._check_rows(1, len(request.rows))
        if not request.rows:
            return pb.ResolveLocksResponse()
        # A lock that is pushed above what the oracle has handed out could not be committed.
        await self._tablets.guard.require(request.read_at, "read_at")
        tablet = await self._tablets.serving(request.target)
        table_id = self._tablets.table_of(request.target)
        await self._rights.require_read_rows(table_id, request.rows)
        batch = queries(request, tablet.schema_version)
        seen = locks_in(await tablet.mutate(batch, deadline_seconds=deadline))
        return await self._resolve_locks(table_id, seen, request, deadline)

    async def await_turn(self, request: pb.AwaitTurnRequest) -> pb.AwaitTurnResponse:
        started = self._now()
        deadline = min(self._deadline(started), started + request.wait_milliseconds / 1000)
        tablet = await self._tablets.serving(request.target)
        return await tablet.await_turn(request, deadline_seconds=deadline)

    async def end_turn(self, request: pb.EndTurnRequest) -> pb.EndTurnResponse:
        return (await self._tablets.serving(request.target)).end_turn(request)

    def scan(self, request: pb.ScanRequest) -> AsyncGenerator[pb.ScanResponse, None]:
        return self._pages(request, Tablet.scan, pb.ScanResponse)

    def scan_cells(
        self, request: pb.ScanCellsRequest
    ) -> AsyncGenerator[pb.ScanCellsResponse, None]:
        return self._pages(request, Tablet.scan_cells, pb.ScanCellsResponse)

    async def _pages(
        self,
        request: ScanT,
        scan: Callable[[Tablet, ScanT], AsyncGenerator[PageT, None]],
        page_of: Callable[..., PageT],
    ) -> AsyncGenerator[PageT, None]:
        """The pages of a scan; a refusal is the last one."""
        is_restricted = caller_identity().rights is not None
        try:
            tablet = await self._tablets.serving(request.target)
            if is_restricted:
                bounds = request.range.start, request.range.end
                await self._rights.require_read(self._tablets.table_of(request.target), bounds)
            async with aclosing(scan(tablet, request)) as pages:
                async for page in pages:
                    self.counts.pages += 1
                    if is_restricted and isinstance(page, pb.ScanResponse | pb.ScanChangesResponse):
                        await self._rights.hide_in(page)
                    yield page
        except PercolatorError as error:
            yield page_of(error=self._refusal(error, request.target))

    # ------------------------------------------------------------------------- changes

    def scan_changes(
        self, request: pb.ScanChangesRequest
    ) -> AsyncGenerator[pb.ScanChangesResponse, None]:
        return self._pages(request, Tablet.scan_changes, pb.ScanChangesResponse)

    async def look_for_changes(
        self, request: pb.LookForChangesRequest
    ) -> pb.LookForChangesResponse:
        self._check_rows(len(request.looks), 0)
        response = pb.LookForChangesResponse()
        for index, asked in enumerate(request.looks):
            try:
                tablet = await self._tablets.serving(asked.target)
                # Whatever a tablet knows of changes, it knows of all of its rows.
                await self._rights.require_read(self._tablets.table_of(asked.target), (b"", b""))
                result = await tablet.look_for_changes(asked)
                await self._rights.hide_in(result)
            except PercolatorError as error:
                detail = self._batch_refusal(error, f"looks[{index}]", asked.target)
                result = pb.ChangesLookResult(error=detail)
            response.looks.append(result)
        return response

    # ------------------------------------------------------------------- notifications

    async def scan_notifications(
        self, request: pb.ScanNotificationsRequest
    ) -> pb.ScanNotificationsResponse:
        self._check_rows(len(request.scans), 0)
        response = pb.ScanNotificationsResponse()
        bytes_left = self._limits.answer_bytes_max
        for index, scan in enumerate(request.scans):
            if bytes_left <= 0:
                response.scans.add(error=to_detail(_ANSWER_FULL))
                continue
            try:
                result = await (await self._tablets.serving(scan.target)).scan_notifications(scan)
            except PercolatorError as error:
                detail = self._batch_refusal(error, f"scans[{index}]", scan.target)
                result = pb.NotificationScanResult(error=detail)
            bytes_left -= result.ByteSize()
            response.scans.append(result)
            # Each scan takes up to a few milliseconds.
            await asyncio.sleep(0)
        return response

    async def watch_notifications(
        self, request: pb.WatchNotificationsRequest
    ) -> AsyncIterator[pb.WatchNotificationsResponse]:
        caller = caller_identity()
        self._watches.take(caller)
        try:
            async with aclosing(self._tablets.watch.stream(request)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            self._watches.give_back(caller)

    # ------------------------------------------------------------------------- tablets

    async def describe_tablets(
        self, request: pb.DescribeTabletsRequest
    ) -> pb.DescribeTabletsResponse:
        return pb.DescribeTabletsResponse(tablets=self._tablets.describe(request.tablet_ids))

    async def report(self, request: pb.ReportRequest) -> pb.ReportResponse:
        self._tablets.guard.heard(request.newest_timestamp)
        trouble = self._disk.trouble()
        return pb.ReportResponse(
            server_id=self._server_id,
            tablets=[served.report() for served in self._tablets.all()],
            writes_refused=None if trouble is None else to_detail(trouble),
        )

    async def propose_parts(self, request: pb.ProposePartsRequest) -> pb.ProposePartsResponse:
        tablet = await self._tablets.serving(request.target)
        bounds = request.range.start, request.range.end
        await self._rights.require_read(self._tablets.table_of(request.target), bounds)
        return await tablet.propose_parts(request)

    async def fence(self, request: pb.FenceRequest) -> pb.FenceResponse:
        return await (await self._tablets.serving(request.target)).fence(request)

    async def load(self, request: pb.LoadRequest) -> pb.LoadResponse:
        self._require_disk()
        self._check_rows(1, len(request.rows))
        return await (await self._tablets.serving(request.target)).load(request)

    async def propose_split(self, request: pb.ProposeSplitRequest) -> pb.ProposeSplitResponse:
        target = request.target
        row = await (await self._tablets.serving(target)).propose_split(target)
        return pb.ProposeSplitResponse(row=row)

    async def open_tablet(self, request: pb.OpenTabletRequest) -> pb.OpenTabletResponse:
        identity = TabletIdentity(
            table_id=request.table_id,
            tablet_id=request.tablet_id,
            epoch=request.epoch,
            start=request.range.start,
            end=request.range.end,
        )
        ancestry = Ancestry(
            request.must_exist,
            request.origin_tablet_id,
            request.origin_epoch,
            request.served_epoch,
        )
        schema = Schema(request.schema_version, request.change_feed, ttls_of(request.ttls))
        served = await self._tablets.open(identity, schema, ancestry)
        return pb.OpenTabletResponse(tablet=served.describe())

    async def close_tablet(self, request: pb.CloseTabletRequest) -> pb.CloseTabletResponse:
        await self._tablets.close(request.tablet_id, request.epoch)
        return pb.CloseTabletResponse()

    async def raise_safe_points(
        self, request: pb.RaiseSafePointsRequest
    ) -> pb.RaiseSafePointsResponse:
        return await self._raise_safe_points(request)

    # ------------------------------------------------------------------------- batches

    async def _mutated(
        self, index: int, batch: pb.MutationBatch, deadline: float
    ) -> pb.MutationBatchResult:
        try:
            if self._disk.full is not None:
                return await self._mutated_on_full_disk(self._disk.full, batch, deadline)
            result = await self._mutate(batch, deadline)
        except PercolatorError as error:
            detail = self._batch_refusal(error, f"batches[{index}]", batch.target)
            return pb.MutationBatchResult(error=detail)
        return result

    async def _mutate(self, batch: pb.MutationBatch, deadline: float) -> pb.MutationBatchResult:
        self._require_capacity()
        tablet = await self._tablets.serving(batch.target)
        if caller_identity().rights is None:
            return await tablet.mutate(batch, deadline_seconds=deadline)
        table_id = self._tablets.table_of(batch.target)
        own = await self._own_steps.require_mutations(table_id, batch)
        result = await tablet.mutate(batch, deadline_seconds=deadline)
        await self._rights.hide(locks_in(result), own)
        return result

    async def _mutated_on_full_disk(
        self, full: StoreUnusable, batch: pb.MutationBatch, deadline: float
    ) -> pb.MutationBatchResult:
        """Like `_mutate`, for mutations that need no disk space; refuses the others, and steps."""
        fitting = [at for at, one in enumerate(batch.mutations) if not self._disk.refuses(one)]
        if not fitting:
            raise full.with_traceback(None)
        smaller = pb.MutationBatch(
            target=batch.target, mutations=[batch.mutations[at] for at in fitting]
        )
        answer = await self._mutate(smaller, deadline)
        number = len(batch.mutations) + len(batch.steps.rows)
        result = pb.MutationBatchResult(mutations=number)
        unapplied = dict.fromkeys(range(number), not_executed(full))
        for at in fitting:
            del unapplied[at]
        unapplied |= {fitting[one.mutation]: one.result for one in answer.unapplied}
        for at, why in unapplied.items():
            result.unapplied.add(mutation=at, result=why)
        return result

    async def _committed(
        self, index: int, batch: pb.TransactionBatch, deadline: float
    ) -> pb.TransactionBatchResult:
        try:
            self._require_disk()
            self._require_capacity()
            tablet = await self._tablets.serving(batch.target)
            if caller_identity().rights is None:
                return await tablet.commit(batch, deadline_seconds=deadline)
            table_id = self._tablets.table_of(batch.target)
            own = await self._own_steps.require_transactions(table_id, batch)
            result = await tablet.commit(batch, deadline_seconds=deadline)
            await self._rights.hide(locks_in(result), own)
        except PercolatorError as error:
            detail = self._batch_refusal(error, f"batches[{index}]", batch.target)
            return pb.TransactionBatchResult(error=detail)
        return result

    def _deadline(self, started: float) -> float:
        """Until when a request that begins now may wait to be executed. It is counted from now on,
        so it does not matter what the caller's clock says."""
        remaining = remaining_seconds()
        if remaining is None:
            return started + self._limits.request_seconds_max
        return started + remaining - min(remaining * _ANSWER_SHARE, _ANSWER_SECONDS)

    def _require_disk(self) -> None:
        """Refuses what needs space on the disk while there is none."""
        if self._disk.full is not None:
            # All requests get the same error: its traceback would grow with each.
            raise self._disk.full.with_traceback(None)

    def _require_capacity(self) -> None:
        if self.counts.queue_bytes > self._limits.queue_bytes_max:
            raise Overloaded(
                f"{self.counts.queue_bytes >> 20} MiB of mutations are in progress",
                retry_after_seconds=OVERLOAD_RETRY_SECONDS,
            )

    async def _read(
        self, index: int, batch: pb.ReadBatch, budget: AnswerBudget
    ) -> pb.ReadBatchResult:
        try:
            tablet = await self._tablets.serving(batch.target)
            if caller_identity().rights is None:
                return await tablet.read(batch, budget)
            rows = (*(one.row for one in batch.reads), *batch.cells.rows)
            await self._rights.require_read_rows(self._tablets.table_of(batch.target), rows)
            result = await tablet.read(batch, budget)
            await self._rights.hide_in(result)
        except PercolatorError as error:
            detail = self._batch_refusal(error, f"batches[{index}]", batch.target)
            return pb.ReadBatchResult(error=detail)
        return result

    def _check_rows(self, batches: int, rows: int, notifications: int = 0) -> None:
        """An empty batch is two bytes of a request, and a task here. A notification is a row that
        is written, although no cell of a transaction."""
        most = self._limits.rows_max
        for name, found, unit in (
            ("batches", batches, ""),
            ("batches", rows, " rows"),
            ("batches.notifications", notifications, " in total"),
        ):
            if found > most:
                raise InvalidArgument(name, f"expected at most {most}{unit}, found {found}")

    def _refusal(self, error: PercolatorError, target: pb.TabletTarget) -> ErrorDetail:
        """The error as a message. The error itself is not changed: many requests may share it."""
        kind = type(error).__name__
        self.counts.refused[kind] = self.counts.refused.get(kind, 0) + 1
        detail = to_detail(error)
        detail.where = detail.where or f"tablet {target.tablet_id}"
        return detail

    def _batch_refusal(
        self, error: PercolatorError, batch: str, target: pb.TabletTarget
    ) -> ErrorDetail:
        detail = self._refusal(error, target)
        if isinstance(error, InvalidArgument):
            detail.invalid_argument.field = f"{batch}.{error.field}"
        return detail

    def _note_slow(
        self,
        method: str,
        started: float,
        batches: Sequence[pb.MutationBatch]
        | Sequence[pb.TransactionBatch]
        | Sequence[pb.ReadBatch],
    ) -> None:
        seconds = self._now() - started
        if seconds < self._limits.slow_request_seconds:
            return
        self.counts.slow += 1
        self._log.warning(
            "slow request",
            method=method,
            seconds=round(seconds, 3),
            tablets=[batch.target.tablet_id for batch in batches][:8],
            batches=len(batches),
        )


async def _each(
    batches: Sequence[BatchT], answer: Callable[[int, BatchT], Awaitable[ResultT]]
) -> list[ResultT]:
    """Runs all batches concurrently: one that waits for its disk does not hold up the others."""
    if len(batches) == 1:
        return [await answer(0, batches[0])]
    return await asyncio.gather(*(answer(i, batch) for i, batch in enumerate(batches)))
