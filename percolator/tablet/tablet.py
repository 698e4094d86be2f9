"""One tablet: a contiguous range of rows over one `Storage`.

A tablet belongs to one event loop: open it, serve, close it; it is never opened again once closed.
Everything here may be called concurrently. What it guarantees, and where:

* mutations: judged, durable, ownership checked, and only then answered (group_commit.py);
* reads see nothing that is not durable, and everything committed at or below their timestamp,
  unless they report a lock in the way (memory.py); they wait for no write but that of a
  transaction that commits in one round (held_cells.py);
* changes of the schema, safe points, collection and loads write between two batches (upkeep.py);
* no response is sent after ownership was lost, and none below the safe point (state.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from percolator.errors import InvalidArgument, PercolatorError
from percolator.tablet import change_scan, collection, opening, scans
from percolator.tablet.group_commit import GroupCommit, MutationWork
from percolator.tablet.keys import ColumnEncoder, D, W, component, space_bounds, split_component
from percolator.tablet.notification_scan import LockVanished, NotificationLook
from percolator.tablet.notification_watch import NotificationWatch
from percolator.tablet.reads import AnswerRoom, PointReads, asked_reads
from percolator.tablet.requests import (
    CheckedMutation,
    MutationChecker,
    StepChecker,
    TransactionChecker,
    WholeTransaction,
    answer_of,
)
from percolator.tablet.rolling_forward import RollingForward
from percolator.tablet.scans import ScanPlan
from percolator.tablet.state import (
    FOREVER,
    Collected,
    Commits,
    CommitTimestamps,
    Lifetimes,
    Ownership,
    SafePoints,
    TabletIdentity,
    TabletLimits,
    TabletState,
    TimestampGuard,
    Ttls,
    UnheardTimestamp,
)
from percolator.tablet.upkeep import Upkeep, require_different_cells
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Clock, Storage

# What a tablet reports about itself.


def statistics(state: TabletState, queue_bytes: int) -> pb.TabletStatistics:
    counters = state.counters
    return pb.TabletStatistics(
        cells=max(0, counters.cells - counters.foreign_cells),
        bytes=max(0, counters.bytes - counters.foreign_bytes),
        locks=len(state.mirror),
        notifications=len(state.index),
        mutations_applied=counters.mutations_applied,
        mutations_refused=counters.mutations_refused,
        reads=counters.reads,
        rows_scanned=counters.rows_scanned,
        versions_skipped=counters.versions_skipped,
        batches_synced=counters.batches_synced,
        mutations_per_second=counters.mutation_rate.per_second(),
        reads_per_second=counters.read_rate.per_second(),
        queue_bytes=queue_bytes,
        notifications_written=counters.notifications_written,
        locks_written=counters.locks_written,
    )


def describe(state: TabletState, queue_bytes: int) -> pb.TabletDescription:
    identity = state.identity
    return pb.TabletDescription(
        table_id=identity.table_id,
        tablet_id=identity.tablet_id,
        epoch=identity.epoch,
        schema_version=state.schema_version,
        range=cells_pb2.RowRange(start=identity.start, end=identity.end),
        statistics=statistics(state, queue_bytes),
    )


# Proposes the row that divides a tablet into two halves of about the same size.
#
# The storage estimates the size of any range of keys, so a bisection over existing rows finds the
# middle in a few dozen seeks. The estimate does not see a tablet that is small or has only just
# been written; its middle is found by walking over it.

ESTIMATE_TRUSTED_BYTES = 32 * 1024 * 1024
"""Far above the largest write buffer: anything smaller may be mostly in memory."""
STEPS_MAX = 256
PARTS_MAX = 256
"""Roughly the most parts of one range."""


async def propose(state: TabletState) -> bytes | None:
    """The first row of the upper half; None if there are fewer than two rows."""
    identity = state.identity
    first, stop = space_bounds(W, identity.start, identity.end)
    lowest = _row_at(state.storage, first, stop)
    if lowest is None:
        return None
    estimate = state.storage.approximate_bytes(first, stop)
    if estimate >= ESTIMATE_TRUSTED_BYTES:
        found = _bisect(state.storage, first, stop, estimate // 2)
    else:
        found = await _walk(state, first, stop)
    return found if found is not None and found > lowest else None


def parts(state: TabletState, start: bytes, end: bytes, part_bytes: int) -> list[bytes]:
    """The first rows of all parts except the first; ranges are cut until they are small enough."""
    estimate = state.storage.approximate_bytes
    size, first, stop = max(
        (estimate(*bounds), *bounds) for bounds in (space_bounds(one, start, end) for one in (W, D))
    )
    if size <= part_bytes:
        return []
    row = _bisect(state.storage, first, stop, size // 2)
    if row is None:
        return []
    part_bytes = max(part_bytes, size // PARTS_MAX)
    return [*parts(state, start, row, part_bytes), row, *parts(state, row, end, part_bytes)]


def _row_at(storage: Storage[Any], key: bytes, stop: bytes) -> bytes | None:
    """The row of the first entry from this key on."""
    for found, _ in storage.iterate(key, stop):
        return split_component(found, 1)[0]
    return None


def _bisect(storage: Storage[Any], first: bytes, stop: bytes, half: int) -> bytes | None:
    """Finds the last row with at most half of the bytes before it, by halving the interval of keys;
    if that is the very first row, the one after it. None if there is only one.

    Keys are treated as binary fractions of any length. Both ends move on to rows that exist:
    otherwise, among rows that begin with the same long prefix, all steps would be spent on the
    empty interval between them and a row with another one.
    """

    def key_of(row: bytes) -> bytes:
        return first[:1] + component(row)

    def is_below(row: bytes) -> bool:
        return storage.approximate_bytes(first, key_of(row)) <= half

    lowest = _row_at(storage, first, stop)
    if lowest is None:
        return None
    above = _row_before(storage, stop)
    if above == lowest or is_below(above):
        return above if above > lowest else None
    below, low, high = lowest, key_of(lowest), key_of(above)
    for _ in range(STEPS_MAX):
        middle = _between(low, high)
        if middle is None:
            break
        row = _row_at(storage, middle, stop)
        if row is None:
            break
        if is_below(row):
            below, low = row, max(middle, key_of(row))
            continue
        above, row = row, _row_before(storage, middle)
        if row <= below or is_below(row):
            below = max(below, row)
            break
        above, high = row, key_of(row)
    return below if below > lowest else above


def _row_before(storage: Storage[Any], key: bytes) -> bytes:
    """The row of the last entry before this key, which must exist."""
    cursor = storage.cursor()
    try:
        cursor.seek(key)
        cursor.prev()
        return split_component(cursor.key(), 1)[0]
    finally:
        cursor.close()


def _between(low: bytes, high: bytes) -> bytes | None:
    """A key strictly between the two, near the middle; None if there is hardly any room."""
    length = max(len(low), len(high)) + 1
    low_number = int.from_bytes(low.ljust(length, b"\0"), "big")
    high_number = int.from_bytes(high.ljust(length, b"\0"), "big")
    if high_number - low_number < 2:
        return None
    return ((low_number + high_number) // 2).to_bytes(length, "big")


async def _walk(state: TabletState, first: bytes, stop: bytes) -> bytes | None:
    """Exact, for a small tablet: finds the row at which the running total is nearest to half."""
    sizes: list[tuple[bytes, int]] = []
    total = 0
    row_prefix = b"\0"
    for entries, (key, value) in enumerate(state.storage.iterate(first, stop), 1):
        if not key.startswith(row_prefix):
            row, at = split_component(key, 1)
            row_prefix = key[:at]
            sizes.append((row, total))
        total += len(key) + len(value)
        if entries % state.limits.slice_entries == 0:
            await asyncio.sleep(0)
            state.require_open()
    return min(sizes, key=lambda found: abs(total - 2 * found[1]))[0] if sizes else None


T = TypeVar("T")


class Tablet:
    """See the module's docstring."""

    def __init__(
        self,
        identity: TabletIdentity,
        *,
        schema_version: int,
        storage: Storage[Any],
        clock: Clock,
        ownership: Ownership,
        on_closed: Callable[[PercolatorError], None],
        guard: TimestampGuard,
        limits: TabletLimits = TabletLimits(),  # noqa: B008 - frozen
        watch: NotificationWatch | None = None,
        timestamps: CommitTimestamps | None = None,
        commits: Commits | None = None,
        notifications_written: int = 0,
        change_feed: bool = False,
        ttls: Ttls = (),
    ) -> None:
        """`ownership` is checked after each batch and each read, before any response is sent.
        `on_closed` is called once, on the event loop, when the tablet stops serving by itself: with
        `StoreUnusable` after a failed write (close this object, then open a new storage and a new
        tablet), with `TabletMoved` after a failed owner check (close only). `guard` is shared by
        all tablets of a server. `watch` receives notifications. `timestamps` asks the oracle for
        commit timestamps; without it, no transaction commits in one round. `commits` asks
        primaries; without it, `roll_forward` does nothing.
        `notifications_written` is the counter's initial value: within an epoch it must never
        shrink. `change_feed` says whether the table has a change feed under this version of its
        schema, and `ttls` which values expire.
        """
        self._state = TabletState(
            identity,
            schema_version=schema_version,
            storage=storage,
            clock=clock,
            ownership=ownership,
            on_closed=on_closed,
            limits=limits,
            guard=guard,
            timestamps=timestamps,
            commits=commits,
            lifetimes=Lifetimes(ttls) if ttls else FOREVER,
        )
        self._state.watch = watch
        self._state.counters.notifications_written = notifications_written
        self._columns = ColumnEncoder()
        self._checker = MutationChecker(self._state, self._columns)
        self._steps = StepChecker(self._state, self._columns)
        self._transactions = TransactionChecker(self._state, self._columns)
        self._commit = GroupCommit(self._state)
        self._upkeep = Upkeep(self._state, self._commit, self._columns, change_feed=change_feed)
        self._rolling = RollingForward(self._state, self._commit, self._columns)

    @property
    def identity(self) -> TabletIdentity:
        return self._state.identity

    @property
    def closed_because(self) -> PercolatorError | None:
        """Why every request is refused; None while serving."""
        return self._state.closed_because

    @property
    def schema_version(self) -> int:
        return self._state.schema_version

    @property
    def safe_points(self) -> SafePoints:
        """Reads and mutations below them are refused."""
        return self._state.safe_points

    @property
    def collected(self) -> Collected:
        """The last complete pass of collection since the tablet was opened."""
        return self._state.collected

    @property
    def cells_collected(self) -> int:
        return self._state.counters.cells_collected

    @property
    def bytes_collected(self) -> int:
        return self._state.counters.bytes_collected

    async def open(self) -> None:
        """Rebuilds the lock mirror and the notification index. Call once, before anything else.

        Raises `StoreUnusable` (damaged, failing, or of another format).
        """
        try:
            await opening.load(self._state)
            await self._upkeep.switch_feed()
        except self._state.storage.failures as error:
            raise self._state.storage_failed(error) from error

    async def close(self) -> None:
        """Lets the batch under way finish, answers what waits as not executed, saves the
        statistics and closes the storage. May be called again; after a failure, too.

        Raises `StoreUnusable` when the storage cannot be closed cleanly: it is closed anyway.
        """
        await self._rolling.close()
        await self._upkeep.close()

    async def set_schema_version(
        self, schema_version: int, *, change_feed: bool = False, ttls: Ttls = ()
    ) -> None:
        """Judges under this version from now on: see `Upkeep`, as for the methods that follow."""
        await self._upkeep.set_schema_version(schema_version, change_feed=change_feed, ttls=ttls)

    async def raise_safe_points(self, asked: SafePoints) -> None:
        await self._upkeep.raise_safe_points(asked)

    async def collect(self, below: int, ended_below: int = 0) -> Collected:
        return await self._upkeep.collect(below, ended_below)

    @property
    def needs_trimming(self) -> bool:
        """Whether cells of other tablets' rows may be stored here, for example after a split."""
        return collection.is_due(self._state)

    async def trim(self) -> int:
        return await self._upkeep.trim()

    async def fence(self, request: pb.FenceRequest) -> pb.FenceResponse:
        return await self._upkeep.fence(request)

    async def load(self, request: pb.LoadRequest) -> pb.LoadResponse:
        return await self._upkeep.load(request)

    async def mutate(
        self, batch: pb.MutationBatch, *, deadline_seconds: float
    ) -> pb.MutationBatchResult:
        """Applies a batch; `deadline_seconds` is on the clock's monotonic time.

        Once queued, each mutation has its own outcome (NOT_EXECUTED and UNKNOWN with their
        `error`), and nothing is raised.
        Before that, the whole batch is refused, nothing executed: `InvalidArgument` (field paths
        begin at the batch: "mutations[3].row"), `Overloaded`, `NotReady` (the oracle has to be
        asked about a timestamp, and does not answer), `StoreUnusable`, `TabletMoved`,
        `SchemaChanged`.
        """
        mutations, weight = await self._state.guard.checked(lambda: self._checked(batch))
        work = MutationWork(mutations, weight, batch.target.schema_version, deadline_seconds)
        return answer_of(await self._commit.execute(work))

    def _checked(self, batch: pb.MutationBatch) -> tuple[list[CheckedMutation], int]:
        self._state.require_target(batch.target)
        self._commit.require_room(0)
        if not batch.mutations:  # as in nearly all batches
            mutations, weight = self._steps.check(batch.steps)
        else:
            mutations, weight = self._checker.check(batch)
            if batch.HasField("steps"):
                steps, weight_of_steps = self._steps.check(batch.steps)
                mutations += steps
                weight += weight_of_steps
        if not mutations:
            raise InvalidArgument("mutations", "none")
        return mutations, weight

    async def mutate_together(
        self, batch: pb.MutationBatch, *, deadline_seconds: float
    ) -> pb.MutateTogetherResponse:
        """Applies all mutations of the batch at one moment, or none. Raises what `mutate` does when
        nothing was executed, and `ExecutionUnknown` when it may have been."""
        if batch.HasField("steps"):
            raise InvalidArgument("batch.steps", "a group has mutations")
        mutations, _ = await self._state.guard.checked(lambda: self._checked(batch))
        require_different_cells(mutations)
        results = await self._upkeep.apply_together(
            mutations, batch.target.schema_version, deadline_seconds
        )
        return pb.MutateTogetherResponse(results=results)

    async def roll_forward(self, request: pb.RollForwardRequest) -> pb.RollForwardResponse:
        """Rolls the locks of committed transactions forward, in the background. Raises what
        `mutate` does when it takes nothing, except `Overloaded`."""
        await self._state.guard.checked(lambda: self._rolling.take(request))
        if request.await_cells:
            await self._rolling.get_ahead(request.await_cells)
        return pb.RollForwardResponse()

    async def commit(
        self, batch: pb.TransactionBatch, *, deadline_seconds: float
    ) -> pb.TransactionBatchResult:
        """Commits whole transactions in one round; means and raises what `mutate` does."""
        transactions = await self._state.guard.checked(
            lambda: self._checked_transactions(batch, deadline_seconds)
        )
        return await self._commit.commit(transactions)

    def _checked_transactions(
        self, batch: pb.TransactionBatch, deadline_seconds: float
    ) -> list[WholeTransaction]:
        self._state.require_target(batch.target)
        self._commit.require_room(0)
        return self._transactions.check(batch, deadline_seconds)

    async def read(self, batch: pb.ReadBatch, room: AnswerRoom | None = None) -> pb.ReadBatchResult:
        """Raises `InvalidArgument` ("reads[3].row"), `NotReady` (as `mutate` does), `TabletMoved`,
        `SchemaChanged` or `StoreUnusable`; then nothing of the batch is answered. `room` is what
        it shares with other batches of its call."""
        state, room = self._state, room or AnswerRoom()
        asked = asked_reads(batch)
        while True:
            state.require_target(batch.target)
            reads = PointReads(state, asked, self._columns, room)
            try:
                result = await reads.answer()
            except UnheardTimestamp as unheard:
                reads.give_up()
                await state.guard.settle(unheard)
            except state.storage.failures as error:
                raise state.unreadable(error) from error
            else:
                await state.require_ownership()
                result.reads = len(asked)
                return result

    async def scan(self, request: pb.ScanRequest) -> AsyncGenerator[pb.ScanResponse, None]:
        """Pages; raises like `read`, and `SnapshotTooOld`, possibly after some pages."""
        state = self._state
        plan = await state.guard.checked(lambda: self._planned(request))
        try:
            async with aclosing(scans.pages(state, request, plan)) as pages:
                async for page in pages:
                    yield page
        except state.storage.failures as error:
            raise state.unreadable(error) from error

    def _planned(self, request: pb.ScanRequest) -> ScanPlan:
        self._state.require_target(request.target)
        return scans.plan_scan(self._state, request, self._columns)

    async def scan_cells(self, request: pb.ScanCellsRequest) -> AsyncIterator[pb.ScanCellsResponse]:
        """Pages of raw stored cells. Raises like `read`, possibly after some pages."""
        state = self._state
        state.require_target(request.target)
        try:
            async for page in scans.stored_pages(state, request):
                yield page
        except state.storage.failures as error:
            raise state.unreadable(error) from error

    async def scan_changes(
        self, request: pb.ScanChangesRequest
    ) -> AsyncIterator[pb.ScanChangesResponse]:
        """Pages of the change feed. Means the same under every version of the schema. Raises like
        `scan`, and `InvalidArgument` if the table has no feed."""
        state = self._state
        state.require_tablet(request.target)
        await change_scan.require_feed(state)
        plan = await state.guard.checked(lambda: change_scan.plan_changes(state, request))
        try:
            async for page in change_scan.pages(state, plan):
                yield page
        except state.storage.failures as error:
            raise state.unreadable(error) from error

    async def look_for_changes(self, asked: pb.ChangesLook) -> pb.ChangesLookResult:
        """How new the newest change is. Raises like `scan_changes`."""
        state = self._state
        state.require_tablet(asked.target)
        await change_scan.require_feed(state)
        await state.guard.checked(lambda: change_scan.check_times(state, asked.after, asked.until))
        try:
            return await change_scan.look(state, asked)
        except state.storage.failures as error:
            raise state.unreadable(error) from error

    async def scan_notifications(self, scan: pb.NotificationScan) -> pb.NotificationScanResult:
        """Work for observers. Means the same under every version of the schema. Raises like `read`,
        and `InvalidArgument`."""
        state = self._state
        state.require_tablet(scan.target)
        try:
            if state.index.worth_filling:
                await opening.fill_index(state)
            try:
                result = NotificationLook(state, scan).answer()
            except LockVanished:
                async with self._commit.latch.between_batches():
                    state.require_open()
                    result = NotificationLook(state, scan).answer()
        except state.storage.failures as error:
            raise state.unreadable(error) from error
        await state.require_ownership()
        return result

    async def propose_parts(self, request: pb.ProposePartsRequest) -> pb.ProposePartsResponse:
        """Rows that cut a range into parts. Raises `TabletMoved`, `InvalidArgument`."""
        state = self._state
        state.require_tablet(request.target)
        if not request.part_bytes:
            raise InvalidArgument("part_bytes", "missing")
        start, end = scans.clipped(state, request.range)
        try:
            rows = parts(state, start, end, request.part_bytes)
        except state.storage.failures as error:
            raise state.unreadable(error) from error
        return pb.ProposePartsResponse(rows=rows)

    async def propose_split(self, target: pb.TabletTarget | None = None) -> bytes | None:
        """The first row of the upper half by size; None when there are fewer than two rows. Refuses
        a target that is not this tablet at this epoch and schema."""
        state = self._state
        state.require_open()
        if target is not None:
            state.require_target(target)
        try:
            return await propose(state)
        except state.storage.failures as error:
            raise state.unreadable(error) from error

    def statistics(self) -> pb.TabletStatistics:
        return statistics(self._state, self._commit.queued_bytes)

    def describe(self) -> pb.TabletDescription:
        return describe(self._state, self._commit.queued_bytes)
