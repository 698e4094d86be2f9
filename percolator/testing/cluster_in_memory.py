"""A whole cluster as one object: a master's tables, tablets in memory, a counter for an oracle.

The tablets are the real ones, over a storage that keeps everything in memory. So what works here
also works against servers, apart from what only servers have: processes, disks, networks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from percolator.errors import PercolatorError, TabletMoved
from percolator.tablet.reading.point_reads import AnswerRoom
from percolator.tablet.tablet import Tablet
from percolator.testing.tables_in_memory import ADDRESS, TablesInMemory
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import cluster_pb2, oracle_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import to_detail
from percolator.world import Clock

__all__ = ["ADDRESS", "ClusterInMemory"]


class ClusterInMemory(TablesInMemory):
    """Answers the calls that a client makes to masters, oracles and tablet servers."""

    takes_lists = True
    """False as in an older release: then each mutation is a message, easy for a test to inspect."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._last_timestamp = 0

    # ------------------------------------------------------------------ cluster and oracle

    async def describe(self, request: cluster_pb2.DescribeRequest) -> cluster_pb2.DescribeResponse:
        kinds = (
            cluster_pb2.SERVICE_KIND_MASTER,
            cluster_pb2.SERVICE_KIND_ORACLE,
            cluster_pb2.SERVICE_KIND_TABLET_SERVER,
        )
        return cluster_pb2.DescribeResponse(
            cluster_id="in-memory",
            route=cluster_pb2.ROUTE_DIRECT,
            servers=[cluster_pb2.Server(kind=kind, address=ADDRESS) for kind in kinds],
        )

    async def get_timestamps(
        self, request: oracle_pb2.GetTimestampsRequest
    ) -> oracle_pb2.GetTimestampsResponse:
        first = self._allocate(request.count)
        return oracle_pb2.GetTimestampsResponse(first=first, count=request.count)

    def _allocate(self, count: int) -> int:
        now = self._clock.wall_milliseconds() << SEQUENCE_BITS
        first = max(self._last_timestamp + 1, now)
        self._last_timestamp = first + count - 1
        return first

    # ------------------------------------------------------------------ tablets

    async def mutate(self, request: pb.MutateRequest) -> pb.MutateResponse:
        deadline = self._clock.monotonic_seconds() + 60.0
        response = pb.MutateResponse(takes_steps=self.takes_lists)
        for batch in request.batches:
            try:
                tablet = self._serving(batch.target)
                result = await tablet.mutate(batch, deadline_seconds=deadline)
            except PercolatorError as error:
                result = pb.MutationBatchResult(error=to_detail(error))
            response.batches.append(result)
        return response

    async def mutate_together(self, request: pb.MutateTogetherRequest) -> pb.MutateTogetherResponse:
        deadline = self._clock.monotonic_seconds() + 60.0
        tablet = self._serving(request.batch.target)
        return await tablet.mutate_together(request.batch, deadline_seconds=deadline)

    async def roll_forward(self, request: pb.RollForwardRequest) -> pb.RollForwardResponse:
        return await self._serving(request.target).roll_forward(request)

    async def commit_transactions(
        self, request: pb.CommitTransactionsRequest
    ) -> pb.CommitTransactionsResponse:
        deadline = self._clock.monotonic_seconds() + 60.0
        response = pb.CommitTransactionsResponse()
        for batch in request.batches:
            try:
                tablet = self._serving(batch.target)
                result = await tablet.commit(batch, deadline_seconds=deadline)
            except PercolatorError as error:
                result = pb.TransactionBatchResult(error=to_detail(error))
            response.batches.append(result)
        return response

    async def read(self, request: pb.ReadRequest) -> pb.ReadResponse:
        response = pb.ReadResponse(takes_cells=self.takes_lists)
        room = AnswerRoom()
        for batch in request.batches:
            try:
                result = await self._serving(batch.target).read(batch, room)
            except PercolatorError as error:
                result = pb.ReadBatchResult(error=to_detail(error))
            response.batches.append(result)
        return response

    async def scan(self, request: pb.ScanRequest) -> AsyncIterator[pb.ScanResponse]:
        async for page in self._serving(request.target).scan(request):
            yield page

    async def scan_changes(
        self, request: pb.ScanChangesRequest
    ) -> AsyncIterator[pb.ScanChangesResponse]:
        async for page in self._serving(request.target).scan_changes(request):
            yield page

    async def look_for_changes(
        self, request: pb.LookForChangesRequest
    ) -> pb.LookForChangesResponse:
        response = pb.LookForChangesResponse()
        for asked in request.looks:
            try:
                result = await self._serving(asked.target).look_for_changes(asked)
            except PercolatorError as error:
                result = pb.ChangesLookResult(error=to_detail(error))
            response.looks.append(result)
        return response

    async def scan_cells(self, request: pb.ScanCellsRequest) -> AsyncIterator[pb.ScanCellsResponse]:
        async for page in self._serving(request.target).scan_cells(request):
            yield page

    async def scan_notifications(
        self, request: pb.ScanNotificationsRequest
    ) -> pb.ScanNotificationsResponse:
        response = pb.ScanNotificationsResponse()
        for scan in request.scans:
            try:
                result = await self._serving(scan.target).scan_notifications(scan)
            except PercolatorError as error:
                result = pb.NotificationScanResult(error=to_detail(error))
            response.scans.append(result)
        return response

    async def watch_notifications(
        self, request: pb.WatchNotificationsRequest
    ) -> AsyncIterator[pb.WatchNotificationsResponse]:
        async with aclosing(self._watch.stream(request)) as answers:
            async for answer in answers:
                yield answer

    def _serving(self, target: pb.TabletTarget) -> Tablet:
        tablet = self.tablets.get(target.tablet_id)
        if tablet is None:
            raise TabletMoved(
                "the tablet is not here", tablet_id=target.tablet_id, epoch=target.epoch
            )
        return tablet

    async def close(self) -> None:
        for tablet in self.tablets.values():
            await tablet.close()
