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
from typing import Any

from percolator.errors import InvalidArgument, PercolatorError, StoreUnusable
from percolator.tablet import opening, scans, split_point, stored_cells
from percolator.tablet.commit_work import CommitWork
from percolator.tablet.group_commit import GroupCommit
from percolator.tablet.keys import SAFE_POINT_KEY, STATISTICS_KEY, ColumnEncoder
from percolator.tablet.limits import TabletLimits
from percolator.tablet.mutations import MutationChecker
from percolator.tablet.point_reads import PointReads
from percolator.tablet.state import TabletIdentity, TabletState
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Clock, Storage

__all__ = ["Tablet", "TabletIdentity", "TabletLimits"]


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
    ) -> None:
        """`still_owner` is one stat of the tablet's directory: called after each batch, before any
        answer of it leaves. `on_closed` is called once, on the event loop, when the tablet stops
        serving by itself: with `StoreUnusable` after a failed write (close this object, then open
        a new storage and a new tablet), with `TabletMoved` after a failed owner check (close only).
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
        self._columns = ColumnEncoder()
        self._checker = MutationChecker(self._state, self._columns)
        self._commit = GroupCommit(self._state)

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
    def safe_point(self) -> int:
        """Reads and mutations below it are refused."""
        return self._state.safe_point

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

    async def raise_safe_point(self, safe_point: int) -> None:
        """Refuses reads and mutations below it from now on, durably; returns when nothing below
        it is being judged. Never goes back."""
        state = self._state
        state.safe_point = max(state.safe_point, safe_point)
        async with self._commit.between_batches():
            state.require_open()
            try:
                await self._note(SAFE_POINT_KEY, state.safe_point.to_bytes(8, "big"))
            except state.storage.failures as error:
                raise state.storage_failed(error) from error
            state.require_ownership()

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
            cells=max(0, counters.cells),
            bytes=max(0, counters.bytes),
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
        await self._state.storage.write(batch)

    def _unreadable(self, error: Exception) -> StoreUnusable:
        """Reading failed: that costs the request, not the tablet. Other rows may be fine."""
        state = self._state
        return StoreUnusable(
            f"{state.identity} cannot be read: {error}", fault=state.storage.fault(error)
        )
