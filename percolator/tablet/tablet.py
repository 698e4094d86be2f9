"""One tablet: a contiguous range of rows over one `Storage`.

Lives on one event loop: open it, serve, close it; a closed one is never opened again. Everything
here may be called concurrently. What it promises, and where:

* mutations: judged, durable, ownership checked, and only then answered (group_commit.py);
* reads see nothing that is not durable, and everything committed at or below their timestamp,
  unless they report a lock in the way (lock_mirror.py); they never wait for a write;
* no answer leaves after the ownership was lost, and none below the safe point (state.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from percolator.errors import InvalidArgument, PercolatorError, StoreUnusable
from percolator.tablet import bulk_load, opening, scans, split_point, stored_cells, trimming
from percolator.tablet.collection import collect
from percolator.tablet.commit_work import CommitWork
from percolator.tablet.group_commit import GroupCommit
from percolator.tablet.keys import SAFE_POINT_KEY, STATISTICS_KEY, ColumnEncoder
from percolator.tablet.limits import TabletLimits
from percolator.tablet.mutations import MutationChecker
from percolator.tablet.notification_scan import LockVanished, NotificationLook
from percolator.tablet.notification_watch import NotificationWatch
from percolator.tablet.point_reads import PointReads
from percolator.tablet.state import Collected, SafePoints, TabletIdentity, TabletState
from percolator.tablet.to_the_end import ToTheEnd
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Clock, Storage

__all__ = ["Collected", "SafePoints", "Tablet", "TabletIdentity", "TabletLimits"]

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
        still_owner: Callable[[], bool],
        on_closed: Callable[[PercolatorError], None],
        limits: TabletLimits = TabletLimits(),  # noqa: B008 - frozen
        watch: NotificationWatch | None = None,
        notifications_written: int = 0,
    ) -> None:
        """`still_owner` is one stat of the tablet's directory: called after each batch, before any
        answer of it leaves. `on_closed` is called once, on the event loop, when the tablet stops
        serving by itself: with `StoreUnusable` after a failed write (close this object, then open
        a new storage and a new tablet), with `TabletMoved` after a failed owner check (close only).
        `watch` is told of notifications. `notifications_written` is what the counter begins with:
        within an epoch it must never shrink.
        """
        self._state = TabletState(
            identity,
            schema_version=schema_version,
            storage=storage,
            clock=clock,
            still_owner=still_owner,
            on_closed=on_closed,
            limits=limits,
        )
        self._state.watch = watch
        self._state.counters.notifications_written = notifications_written
        self._columns = ColumnEncoder()
        self._checker = MutationChecker(self._state, self._columns)
        self._commit = GroupCommit(self._state)
        self._to_the_end = ToTheEnd()
        """What writes between two batches: torn there, it would let the next batch be judged while
        the disk is still at the write, and memory would never learn of what became durable."""

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
        """The last whole pass of collection since the tablet was opened."""
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
        except self._state.storage.failures as error:
            raise self._state.storage_failed(error) from error

    async def close(self) -> None:
        """Lets the batch under way finish, answers what waits as not executed, saves the
        statistics and closes the storage. May be called again; after a failure, too.

        Raises `StoreUnusable` when the storage cannot be closed cleanly: it is closed anyway.
        """
        await self._to_the_end.run(self._close())

    async def _close(self) -> None:
        state = self._state
        async with self._commit.between_batches():
            served_until_now = state.closed_because is None
            state.closed_because = state.closed_because or state.moved("closed here")
            self._commit.abandon()
            try:
                try:
                    if served_until_now:
                        await self._note(STATISTICS_KEY, opening.counts_record(state))
                finally:
                    await state.storage.close()
            except state.storage.failures as error:
                raise state.storage_failed(error) from error

    async def set_schema_version(self, schema_version: int) -> None:
        """Judges under this version from now on; returns when all that was judged under an older
        one is durable and answered. Never goes back: an older version is ignored."""
        self._state.schema_version = max(self._state.schema_version, schema_version)
        async with self._commit.between_batches():
            self._state.require_open()

    async def raise_safe_points(self, asked: SafePoints) -> None:
        """Refuses reads and mutations below them from now on, durably; returns when nothing below
        them is being judged. Never goes back."""
        state = self._state
        state.safe_points = state.safe_points.raised_to(asked)
        await self._to_the_end.run(self._note_safe_points())

    async def _note_safe_points(self) -> None:
        state = self._state
        async with self._commit.between_batches():
            state.require_open()
            await self._note(SAFE_POINT_KEY, opening.safe_points_record(state.safe_points))
            state.require_ownership()

    async def collect(self, below: int) -> Collected:
        """Deletes, beside everything else, what no read at or above `below` can see: the safe
        points must have been raised to it, and all older locks of all tables be resolved before.

        Raises `NotReady` while such locks are left here, `StoreUnusable`, `TabletMoved`.
        """
        state = self._state
        state.require_open()
        try:
            state.collected = await collect(
                state,
                self._commit.between_batches(),
                below,
                before_deleting=lambda: self.raise_safe_points(SafePoints(collected=below)),
            )
        except state.storage.failures as error:
            raise self._unreadable(error) from error
        state.counters.cells_collected += state.collected.cells
        state.counters.bytes_collected += state.collected.bytes
        return state.collected

    @property
    def needs_trimming(self) -> bool:
        """Whether cells of other tablets' rows may be stored here, as after a split."""
        return trimming.is_due(self._state)

    async def trim(self) -> int:
        """Deletes such cells, beside everything else; returns how many.

        Raises `StoreUnusable`, `TabletMoved`.
        """
        state = self._state
        state.require_open()
        try:
            return await trimming.trim(state, self._commit.between_batches())
        except state.storage.failures as error:
            raise self._unreadable(error) from error

    async def mutate(
        self, batch: pb.MutationBatch, *, deadline_seconds: float
    ) -> pb.MutationBatchResult:
        """Applies a batch; `deadline_seconds` is on the clock's monotonic time.

        The result has one entry per mutation: once queued, each has its own outcome (NOT_EXECUTED
        and UNKNOWN with their `error`), and nothing is raised. Before that, the whole batch is
        refused, nothing executed: `InvalidArgument` (field paths begin at the batch:
        "mutations[3].row"), `Overloaded`, `StoreUnusable`, `TabletMoved`, `SchemaChanged`.
        """
        self._state.require_target(batch.target)
        self._commit.require_room(0)
        steps, weight = self._checker.check(batch)
        if not steps:
            raise InvalidArgument("mutations", "none")
        work = CommitWork(steps, weight, batch.target.schema_version, deadline_seconds)
        return pb.MutationBatchResult(results=await self._commit.execute(work))

    async def read(self, batch: pb.ReadBatch) -> pb.ReadBatchResult:
        """Raises `InvalidArgument` ("reads[3].row"), `TabletMoved`, `SchemaChanged` or
        `StoreUnusable`; then nothing of the batch is answered."""
        state = self._state
        state.require_target(batch.target)
        try:
            result = await PointReads(state, batch.reads, self._columns).answer()
        except state.storage.failures as error:
            raise self._unreadable(error) from error
        state.require_ownership()
        return result

    async def scan(self, request: pb.ScanRequest) -> AsyncIterator[pb.ScanResponse]:
        """Pages; raises like `read`, and `SnapshotTooOld`, possibly after some pages."""
        state = self._state
        state.require_target(request.target)
        plan = scans.plan_scan(state, request, self._columns)
        try:
            async for page in scans.pages(state, request, plan):
                yield page
        except state.storage.failures as error:
            raise self._unreadable(error) from error

    async def scan_cells(self, request: pb.ScanCellsRequest) -> AsyncIterator[pb.ScanCellsResponse]:
        """Pages of stored cells, as they are. Raises like `read`, possibly after some pages."""
        state = self._state
        state.require_target(request.target)
        try:
            async for page in stored_cells.pages(state, request):
                yield page
        except state.storage.failures as error:
            raise self._unreadable(error) from error

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
                async with self._commit.between_batches():
                    state.require_open()
                    result = NotificationLook(state, scan).answer()
        except state.storage.failures as error:
            raise self._unreadable(error) from error
        state.require_ownership()
        return result

    async def fence(self, request: pb.FenceRequest) -> pb.FenceResponse:
        """Closes rows for a bulk load, or opens them. Raises `InvalidArgument`, `StoreUnusable`,
        `TabletMoved`."""
        self._state.require_tablet(request.target)
        try:
            return await self._to_the_end.run(
                bulk_load.fence(self._state, self._commit.between_batches(), request)
            )
        except self._state.storage.failures as error:
            raise self._unreadable(error) from error

    async def load(self, request: pb.LoadRequest) -> pb.LoadResponse:
        """Puts rows into a range that is closed for them. Raises like `fence`, and
        `SchemaChanged`."""
        self._state.require_tablet(request.target)
        turn = self._commit.between_batches()
        await self._to_the_end.run(bulk_load.load(self._state, turn, request, self._columns))
        return pb.LoadResponse()

    async def propose_parts(self, request: pb.ProposePartsRequest) -> pb.ProposePartsResponse:
        """Rows that cut a range into parts. Raises `TabletMoved`, `InvalidArgument`."""
        state = self._state
        state.require_tablet(request.target)
        if not request.part_bytes:
            raise InvalidArgument("part_bytes", "missing")
        start, end = scans.clipped(state, request.range)
        try:
            rows = split_point.parts(state, start, end, request.part_bytes)
        except state.storage.failures as error:
            raise self._unreadable(error) from error
        return pb.ProposePartsResponse(rows=rows)

    async def propose_split(self, target: pb.TabletTarget | None = None) -> bytes | None:
        """The first row of the upper half by size; None when there are fewer than two rows. Refuses
        a target that is not this tablet at this epoch and schema."""
        self._state.require_open()
        if target is not None:
            self._state.require_target(target)
        try:
            return await split_point.propose(self._state)
        except self._state.storage.failures as error:
            raise self._unreadable(error) from error

    def statistics(self) -> pb.TabletStatistics:
        state, counters = self._state, self._state.counters
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
            queue_bytes=self._commit.queued_bytes,
            notifications_written=counters.notifications_written,
            locks_written=counters.locks_written,
        )

    def describe(self) -> pb.TabletDescription:
        identity = self._state.identity
        return pb.TabletDescription(
            table_id=identity.table_id,
            tablet_id=identity.tablet_id,
            epoch=identity.epoch,
            schema_version=self._state.schema_version,
            range=cells_pb2.RowRange(start=identity.start, end=identity.end),
            statistics=self.statistics(),
        )

    async def _note(self, key: bytes, value: bytes) -> None:
        """Writes something about the tablet itself. Only between two batches."""
        batch = self._state.storage.batch()
        batch.put(key, value)
        await self._state.write(batch)

    def _unreadable(self, error: Exception) -> StoreUnusable:
        """Reading failed: that costs the request, not the tablet. Other rows may be fine."""
        state = self._state
        return StoreUnusable(
            f"{state.identity} cannot be read: {error}", fault=state.storage.fault(error)
        )
