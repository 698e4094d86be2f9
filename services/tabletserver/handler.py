"""TabletServerService: passes requests to tablets, and returns their responses.

Every batch of a request is answered separately: a tablet that has moved, is full or is damaged does
not affect the others. The handler knows messages and `PercolatorError`s, but not gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from structlog.stdlib import BoundLogger

from percolator.errors import (
    InvalidArgument,
    NotExecuted,
    Overloaded,
    PercolatorError,
    StoreFault,
    StoreUnusable,
)
from percolator.services.chassis.coordinator import Trouble
from percolator.services.chassis.rpc import Quota, caller_identity, remaining_seconds
from percolator.services.tabletserver.collecting import Collecting
from percolator.services.tabletserver.storage import Ancestry
from percolator.services.tabletserver.tablets import Schema, Tablets
from percolator.tablet.requests import not_executed
from percolator.tablet.state import TabletIdentity, ttls_of
from percolator.tablet.tablet import AnswerRoom
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_ROLLBACK
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.wire.status import to_detail
from percolator.world import Clock

# Space on the disk: refuses writes before it runs out, and accepts them again without help.
#
# LevelDB needs some space to delete data (compaction writes before it deletes), and even to open.
# Thanks to a reserve, writes to a full disk get a refusal that is safe to repeat, instead of
# failing with an unknown outcome, and reads continue.
#
# Half of the reserve is for roll-backs, of a few bytes each. Without them a client could not say
# whether a transaction that met the full disk is aborted, and its locks would stay.

CHECK_SECONDS = 1.0


class DiskSpace:
    """Watches the free bytes of one disk. Lives on one event loop."""

    def __init__(
        self,
        free_bytes: Callable[[], Awaitable[int]],
        clock: Clock,
        log: BoundLogger,
        *,
        reserve_bytes: int,
        store_trouble: Callable[[], str] = lambda: "",
    ) -> None:
        """`store_trouble` says why nothing can be written at the moment, for another reason than
        the reserve; it is empty while something can."""
        self._free_bytes = free_bytes
        self._clock = clock
        self._log = log
        self._reserve_bytes = reserve_bytes
        self.store_trouble = store_trouble
        self._trouble = Trouble(
            log, "the free space of the disk is unknown", "the free space of the disk is known"
        )
        self.bytes_free = 0
        self.full: StoreUnusable | None = None
        """The error with which writes are refused; None while there is space."""

    def refuses(self, mutation: pb.Mutation) -> bool:
        """Whether there is no room for this mutation."""
        if self.full is None:
            return False
        if self.bytes_free < self._reserve_bytes // 2:
            return bool(mutation.changes)
        return not all(map(_frees_or_marks, mutation.changes))

    def trouble(self) -> StoreUnusable | None:
        """Why the server can store nothing; None while it can."""
        if self.full is None and (trouble := self.store_trouble()):
            return StoreUnusable(trouble, fault=StoreFault.INPUT_OUTPUT)
        return self.full

    async def check(self) -> None:
        """Checks once."""
        was_full = self.full is not None
        self.bytes_free = await self._free_bytes()
        if self.bytes_free >= self._reserve_bytes:
            self.full = None
        else:
            self.full = StoreUnusable(
                f"{self.bytes_free >> 20} MiB are free on the disk, and "
                f"{self._reserve_bytes >> 20} MiB are kept in reserve",
                fault=StoreFault.DISK_FULL,
            )
        if was_full != (self.full is not None):
            say = self._log.info if was_full else self._log.error
            say(
                "writes are accepted again" if was_full else "the disk is full: refusing writes",
                bytes_free=self.bytes_free,
                reserve_bytes=self._reserve_bytes,
            )

    async def watch(self) -> None:
        """Checks every second. Never returns."""
        while True:
            await self._clock.sleep(CHECK_SECONDS)
            try:
                await self.check()
            except OSError as error:
                # Whether the store is gone is for the watch of the store to decide.
                self._trouble.lasts(error)
            else:
                self._trouble.is_over()


def _frees_or_marks(change: pb.Change) -> bool:
    """Whether it deletes something, or is a roll-back marker."""
    return change.kind != pb.Change.KIND_PUT or (
        change.space == SPACE_ROLLBACK and not change.value
    )


OVERLOAD_RETRY_SECONDS = 0.1
_ANSWER_SECONDS = 0.5
_ANSWER_SHARE = 0.1
"""What is reserved of the caller's deadline for the answer: a caller without one has to take for
unknown what was never executed."""

_ANSWER_FULL = NotExecuted("the response is full; request the rest again")

BatchT = TypeVar("BatchT", pb.MutationBatch, pb.TransactionBatch, pb.ReadBatch)
ResultT = TypeVar("ResultT", pb.MutationBatchResult, pb.TransactionBatchResult, pb.ReadBatchResult)


@dataclass(frozen=True)
class RequestLimits:
    """What one request may hold, and what all of them may hold together."""

    rows_max: int = 10_000
    queue_bytes_max: int = 64 << 20
    answer_bytes_max: int = 8 << 20
    """The size of one response to a scan of notifications; the caller asks again for the rest."""
    request_seconds_max: float = 60.0
    slow_request_seconds: float = 1.0


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
        collecting: Collecting,
        disk: DiskSpace,
        clock: Clock,
        log: BoundLogger,
        limits: RequestLimits = RequestLimits(),
        *,
        server_id: str,
        watches: Quota,
    ) -> None:
        """`watches` is the quota of streams that watch notifications."""
        self._tablets = tablets
        self._collecting = collecting
        self._disk = disk
        self._now = clock.monotonic_seconds
        self._log = log
        self._limits = limits
        self._server_id = server_id
        self._watches = watches
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
            self._require_room()
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
        self._check_rows(len(batches), sum(len(batch.rows) for batch in batches))
        self._check_notifications(sum(len(batch.notifications) for batch in batches))
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
        room = AnswerRoom()
        results = await _each(batches, lambda i, batch: self._read(i, batch, room))
        self._note_slow("Read", started, batches)
        return pb.ReadResponse(batches=results)

    async def scan(self, request: pb.ScanRequest) -> AsyncIterator[pb.ScanResponse]:
        try:
            tablet = await self._tablets.serving(request.target)
            async with aclosing(tablet.scan(request)) as pages:
                async for page in pages:
                    self.counts.pages += 1
                    yield page
        except PercolatorError as error:
            yield pb.ScanResponse(error=self._refusal(error, request.target))

    async def scan_cells(self, request: pb.ScanCellsRequest) -> AsyncIterator[pb.ScanCellsResponse]:
        try:
            tablet = await self._tablets.serving(request.target)
            async for page in tablet.scan_cells(request):
                self.counts.pages += 1
                yield page
        except PercolatorError as error:
            yield pb.ScanCellsResponse(error=self._refusal(error, request.target))

    # ------------------------------------------------------------------------- changes

    async def scan_changes(
        self, request: pb.ScanChangesRequest
    ) -> AsyncIterator[pb.ScanChangesResponse]:
        try:
            tablet = await self._tablets.serving(request.target)
            async for page in tablet.scan_changes(request):
                self.counts.pages += 1
                yield page
        except PercolatorError as error:
            yield pb.ScanChangesResponse(error=self._refusal(error, request.target))

    async def look_for_changes(
        self, request: pb.LookForChangesRequest
    ) -> pb.LookForChangesResponse:
        self._check_rows(len(request.looks), 0)
        response = pb.LookForChangesResponse()
        for index, asked in enumerate(request.looks):
            try:
                result = await (await self._tablets.serving(asked.target)).look_for_changes(asked)
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
        return await (await self._tablets.serving(request.target)).propose_parts(request)

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
        return await self._collecting.raise_all(request)

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
        self._require_room()
        tablet = await self._tablets.serving(batch.target)
        return await tablet.mutate(batch, deadline_seconds=deadline)

    async def _mutated_on_full_disk(
        self, full: StoreUnusable, batch: pb.MutationBatch, deadline: float
    ) -> pb.MutationBatchResult:
        """Like `_mutate`, for those mutations that need no room; refuses the others, and steps."""
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
            self._require_room()
            tablet = await self._tablets.serving(batch.target)
            return await tablet.commit(batch, deadline_seconds=deadline)
        except PercolatorError as error:
            detail = self._batch_refusal(error, f"batches[{index}]", batch.target)
            return pb.TransactionBatchResult(error=detail)

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

    def _require_room(self) -> None:
        if self.counts.queue_bytes > self._limits.queue_bytes_max:
            raise Overloaded(
                f"{self.counts.queue_bytes >> 20} MiB of mutations are in progress",
                retry_after_seconds=OVERLOAD_RETRY_SECONDS,
            )

    async def _read(self, index: int, batch: pb.ReadBatch, room: AnswerRoom) -> pb.ReadBatchResult:
        try:
            result = await (await self._tablets.serving(batch.target)).read(batch, room)
        except PercolatorError as error:
            detail = self._batch_refusal(error, f"batches[{index}]", batch.target)
            return pb.ReadBatchResult(error=detail)
        return result

    def _check_rows(self, batches: int, rows: int) -> None:
        if batches > self._limits.rows_max:
            # An empty batch is two bytes of a request, and a task here.
            raise InvalidArgument(
                "batches", f"expected at most {self._limits.rows_max}, found {batches}"
            )
        if rows > self._limits.rows_max:
            raise InvalidArgument(
                "batches", f"expected at most {self._limits.rows_max} rows, found {rows}"
            )

    def _check_notifications(self, count: int) -> None:
        """Each is a row that is written, although no cell of a transaction."""
        if count > self._limits.rows_max:
            raise InvalidArgument(
                "batches.notifications",
                f"expected at most {self._limits.rows_max} in total, found {count}",
            )

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
