"""A whole cluster as one object: a master's tables, tablets in memory, a counter for an oracle.

The tablets are the real ones, over a storage that keeps everything in memory; so what works here
works against servers, but for what makes servers servers: processes, disks, networks.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing

from percolator.errors import InvalidArgument, PercolatorError, SchemaError, TabletMoved
from percolator.tablet.memory_storage import MemoryStorage
from percolator.tablet.notification_watch import NotificationWatch
from percolator.tablet.tablet import Tablet, TabletIdentity
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import cluster_pb2, master_pb2, oracle_pb2
from percolator.v1 import tabletserver_pb2 as wire
from percolator.v1.cells_pb2 import RowRange
from percolator.v1.errors_pb2 import TabletLocation
from percolator.wire.observer_change import changed_observers
from percolator.wire.status import to_detail
from percolator.world import Clock

ADDRESS = "in-memory:1"


class ClusterInMemory:
    """Answers what a client asks of masters, oracles and tablet servers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_timestamp = 0
        self._ids = itertools.count(1)
        self._tables: dict[str, master_pb2.Table] = {}
        self.tablets: dict[int, Tablet] = {}
        self._watch = NotificationWatch()

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
        now = self._clock.wall_milliseconds() << SEQUENCE_BITS
        first = max(self._last_timestamp + 1, now)
        self._last_timestamp = first + request.count - 1
        return oracle_pb2.GetTimestampsResponse(first=first, count=request.count)

    # ------------------------------------------------------------------ tables

    async def create_table(
        self, request: master_pb2.CreateTableRequest
    ) -> master_pb2.CreateTableResponse:
        known = self._tables.get(request.name)
        if known is not None:
            if not request.exist_ok:
                raise SchemaError(f"table {request.name!r} exists", table=request.name)
            return master_pb2.CreateTableResponse(table=known)
        bounds = [b"", *request.splits, b""]
        if any(a >= b for a, b in itertools.pairwise(bounds[1:-1])) or b"" in request.splits:
            raise InvalidArgument("splits", "must ascend, and none may be empty")
        table = master_pb2.Table(
            table_id=next(self._ids),
            name=request.name,
            schema_version=1,
            options=request.options,
            tablets=len(bounds) - 1,
        )
        for start, end in itertools.pairwise(bounds):
            identity = TabletIdentity(table.table_id, next(self._ids), 1, start, end)
            tablet = Tablet(
                identity,
                schema_version=table.schema_version,
                storage=MemoryStorage(),
                clock=self._clock,
                still_owner=lambda: True,
                on_closed=lambda _: None,
                watch=self._watch,
            )
            await tablet.open()
            self.tablets[identity.tablet_id] = tablet
        self._tables[table.name] = table
        return master_pb2.CreateTableResponse(table=table, created=True)

    async def delete_table(
        self, request: master_pb2.DeleteTableRequest
    ) -> master_pb2.DeleteTableResponse:
        if request.name not in self._tables:
            if request.missing_ok:
                return master_pb2.DeleteTableResponse()
            raise self._no_table(request.name, 0)
        table = self._tables.pop(request.name)
        for tablet in self._tablets_of(table.table_id):
            del self.tablets[tablet.identity.tablet_id]
            await tablet.close()
        return master_pb2.DeleteTableResponse(deleted=True)

    async def list_tables(
        self, request: master_pb2.ListTablesRequest
    ) -> master_pb2.ListTablesResponse:
        return master_pb2.ListTablesResponse(
            tables=[self._tables[name] for name in sorted(self._tables)]
        )

    async def describe_table(
        self, request: master_pb2.DescribeTableRequest
    ) -> master_pb2.DescribeTableResponse:
        table = self._table(request.name, request.table_id)
        return master_pb2.DescribeTableResponse(table=table)

    async def change_observers(
        self, request: master_pb2.ChangeObserversRequest
    ) -> master_pb2.ChangeObserversResponse:
        table = self._table(request.table, 0)
        change = changed_observers(table.name, table.observers, request)
        del table.observers[:]
        table.observers.extend(change.observers)
        table.schema_version += change.raises_version
        for tablet in self._tablets_of(table.table_id):
            await tablet.set_schema_version(table.schema_version)
        return master_pb2.ChangeObserversResponse(table=table)

    async def locate_tablets(
        self, request: master_pb2.LocateTabletsRequest
    ) -> master_pb2.LocateTabletsResponse:
        table = self._table("", request.table_id)
        locations = [
            TabletLocation(
                table_id=table.table_id,
                tablet_id=tablet.identity.tablet_id,
                epoch=tablet.identity.epoch,
                range=RowRange(start=tablet.identity.start, end=tablet.identity.end),
                address=ADDRESS,
            )
            for tablet in self._tablets_of(table.table_id)
        ]
        return master_pb2.LocateTabletsResponse(
            locations=locations,
            schema_version=table.schema_version,
            observers=table.observers,
        )

    def _table(self, name: str, table_id: int) -> master_pb2.Table:
        for table in self._tables.values():
            if table.name == name if name else table.table_id == table_id:
                return table
        raise self._no_table(name, table_id)

    @staticmethod
    def _no_table(name: str, table_id: int) -> SchemaError:
        which = repr(name) if name else f"with id {table_id}"
        return SchemaError(f"there is no table {which}", table=name, table_id=table_id)

    def _tablets_of(self, table_id: int) -> list[Tablet]:
        found = [t for t in self.tablets.values() if t.identity.table_id == table_id]
        return sorted(found, key=lambda tablet: tablet.identity.start)

    # ------------------------------------------------------------------ tablets

    async def mutate(self, request: wire.MutateRequest) -> wire.MutateResponse:
        deadline = self._clock.monotonic_seconds() + 60.0
        response = wire.MutateResponse()
        for batch in request.batches:
            try:
                tablet = self._serving(batch.target)
                result = await tablet.mutate(batch, deadline_seconds=deadline)
            except PercolatorError as error:
                result = wire.MutationBatchResult(error=to_detail(error))
            response.batches.append(result)
        return response

    async def read(self, request: wire.ReadRequest) -> wire.ReadResponse:
        response = wire.ReadResponse()
        for batch in request.batches:
            try:
                result = await self._serving(batch.target).read(batch)
            except PercolatorError as error:
                result = wire.ReadBatchResult(error=to_detail(error))
            response.batches.append(result)
        return response

    async def scan(self, request: wire.ScanRequest) -> AsyncIterator[wire.ScanResponse]:
        async for page in self._serving(request.target).scan(request):
            yield page

    async def scan_cells(
        self, request: wire.ScanCellsRequest
    ) -> AsyncIterator[wire.ScanCellsResponse]:
        async for page in self._serving(request.target).scan_cells(request):
            yield page

    async def scan_notifications(
        self, request: wire.ScanNotificationsRequest
    ) -> wire.ScanNotificationsResponse:
        response = wire.ScanNotificationsResponse()
        for scan in request.scans:
            try:
                result = await self._serving(scan.target).scan_notifications(scan)
            except PercolatorError as error:
                result = wire.NotificationScanResult(error=to_detail(error))
            response.scans.append(result)
        return response

    async def watch_notifications(
        self, request: wire.WatchNotificationsRequest
    ) -> AsyncIterator[wire.WatchNotificationsResponse]:
        async with aclosing(self._watch.stream(request)) as answers:
            async for answer in answers:
                yield answer

    def _serving(self, target: wire.TabletTarget) -> Tablet:
        tablet = self.tablets.get(target.tablet_id)
        if tablet is None:
            raise TabletMoved("it is not here", tablet_id=target.tablet_id, epoch=target.epoch)
        return tablet

    async def close(self) -> None:
        for tablet in self.tablets.values():
            await tablet.close()
