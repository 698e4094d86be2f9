"""A whole cluster as one object: a master's tables, tablets in memory, a counter for an oracle.

The tablets are the real ones, over a storage that keeps everything in memory. So what works here
also works against servers, apart from what only servers have: processes, disks, networks.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

from percolator.codecs.indexes import IndexDefinition, indexes_of
from percolator.codecs.names import CodecNames
from percolator.errors import CellAddress, PercolatorError, SchemaError, TabletMoved
from percolator.formats.records import LockRecord
from percolator.observers.observer_change import (
    awaited_observers,
    changed_observers,
    report_backfill,
)
from percolator.protocol.cleanup import commits_of
from percolator.routing.cells import APPLIED, Answer, CellMutation
from percolator.routing.lanes import unapplied
from percolator.tablet.cells import L
from percolator.tablet.notification_watch import NotificationWatch
from percolator.tablet.state import TabletIdentity, TimestampGuard, ttls_of
from percolator.tablet.tablet import AnswerBudget, Tablet
from percolator.testing.memory_storage import DurableMemory, MemoryOwnership, MemoryStorage
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import cluster_pb2, master_pb2, oracle_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from percolator.v1.errors_pb2 import TabletLocation
from percolator.wire.status import to_detail
from percolator.wire.table_indexes import (
    changed_indexes,
    entries_name,
    entries_ttls,
    require_codecs_kept,
    require_indexes,
    require_no_entries,
    require_same_indexes,
    require_ttls_kept,
    with_index_codecs,
)
from percolator.wire.table_options import (
    changed_ttls,
    require_options,
    require_retention,
    require_splits,
    require_table_name,
    require_ttls,
    table_exists,
)
from percolator.world import Clock

ADDRESS = "in-memory:1"


class TablesInMemory(ABC):
    """Answers the calls that a client makes to masters about tables.

    A deleted table is kept, at epochs that are told only to clients that resolve locks, while a
    lock in another table has its primary there, as in a real cluster: only the primary knows
    whether the lock's transaction has committed.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ids = itertools.count(1)
        self._tables: dict[str, master_pb2.Table] = {}
        self._creating = asyncio.Lock()
        self._deleting: dict[int, master_pb2.Table] = {}
        self._awaited: dict[str, list[master_pb2.Observer]] = {}
        """Observers of tables that do not exist yet."""
        self._deletions: set[bytes] = set()
        """The ids of the requests that deleted tables."""
        self.tablets: dict[int, Tablet] = {}
        self._disks: dict[int, DurableMemory] = {}
        self._watch = NotificationWatch()
        self._guard = TimestampGuard(self._next_timestamp, clock)

    @abstractmethod
    def _allocate(self, count: int) -> int:
        """As the oracle: the first of `count` new timestamps."""

    async def _next_timestamp(self) -> int:
        return self._allocate(1)

    async def _take_timestamps(self, count: int) -> int:
        return self._allocate(count)

    async def create_table(
        self, request: master_pb2.CreateTableRequest
    ) -> master_pb2.CreateTableResponse:
        async with self._creating:  # while its tablets are opened, another call would make it again
            return await self._created(request)

    async def _created(
        self, request: master_pb2.CreateTableRequest
    ) -> master_pb2.CreateTableResponse:
        require_table_name("name", request.name)
        require_splits("splits", request.splits)
        require_ttls("options.ttls", request.options.ttls)
        require_retention(request.options)
        indexes = require_indexes("indexes", request.indexes)
        known = self._tables.get(request.name)
        if known is not None:
            if request.request_id and request.request_id == known.created_by:
                return master_pb2.CreateTableResponse(table=known, created=True)
            if not request.exist_ok:
                raise table_exists(request.name)
            require_options(request.name, known.options, request.options)
            require_same_indexes(known.name, indexes_of(known.indexes), indexes)
            self._keep(known, CodecNames.of(known.codecs).declared(known.name, request.codecs))
            return master_pb2.CreateTableResponse(table=known)
        table = master_pb2.Table(
            table_id=next(self._ids),
            name=request.name,
            schema_version=1,
            options=request.options,
            created_at=self._allocate(1),
            codecs=CodecNames().declared(request.name, request.codecs).message(),
            created_by=request.request_id,
            observers=self._awaited.get(request.name, ()),
        )
        await self._set_indexes(table, (), indexes, ready_at=table.created_at)
        await self._add_table(table, request.splits)
        return master_pb2.CreateTableResponse(table=table, created=True)

    async def _add_table(self, table: master_pb2.Table, splits: Sequence[bytes] = ()) -> None:
        bounds = [b"", *splits, b""]
        table.tablets = len(bounds) - 1
        for start, end in itertools.pairwise(bounds):
            identity = TabletIdentity(table.table_id, next(self._ids), 1, start, end)
            self._disks[identity.tablet_id] = DurableMemory()
            await self._open(identity, table)
        self._tables[table.name] = table

    async def delete_table(
        self, request: master_pb2.DeleteTableRequest
    ) -> master_pb2.DeleteTableResponse:
        if request.request_id and request.request_id in self._deletions:
            return master_pb2.DeleteTableResponse(deleted=True)
        if request.name not in self._tables:
            if request.missing_ok:
                return master_pb2.DeleteTableResponse()
            raise self._no_table(request.name, 0)
        table = self._alterable(request.name)
        self._deletions.add(request.request_id)
        await self._delete([table, *self._entries(table)])
        return master_pb2.DeleteTableResponse(deleted=True)

    async def _delete(self, tables: Iterable[master_pb2.Table]) -> None:
        for table in tables:
            del self._tables[table.name]
            self._deleting[table.table_id] = table
            for tablet in self._tablets_of(table.table_id):
                await tablet.close()
                later = replace(tablet.identity, epoch=tablet.identity.epoch + 1)
                await self._open(later, table)
        await self._remove_unneeded()

    async def list_tables(
        self, request: master_pb2.ListTablesRequest
    ) -> master_pb2.ListTablesResponse:
        return master_pb2.ListTablesResponse(
            tables=[self._tables[name] for name in sorted(self._tables)],
            awaited=[
                master_pb2.Table(name=name, observers=found)
                for name, found in sorted(self._awaited.items())
                if found and name not in self._tables
            ],
        )

    async def describe_table(
        self, request: master_pb2.DescribeTableRequest
    ) -> master_pb2.DescribeTableResponse:
        table = self._table(request.name, request.table_id)
        return master_pb2.DescribeTableResponse(table=table)

    async def change_observers(
        self, request: master_pb2.ChangeObserversRequest
    ) -> master_pb2.ChangeObserversResponse:
        if request.awaited and request.table not in self._tables:
            known = self._awaited.get(request.table, [])
            awaited = awaited_observers(request.table, known, request)
            self._awaited[request.table] = awaited
            table = master_pb2.Table(name=request.table, observers=awaited)
            return master_pb2.ChangeObserversResponse(table=table)
        table = self._alterable(request.table)
        change = changed_observers(table, request)
        named = {one.name for one in request.add}.union(request.remove)
        awaited = self._awaited.get(request.table, [])
        self._awaited[request.table] = [one for one in awaited if one.name not in named]
        del table.observers[:]
        table.observers.extend(change.observers)
        table.schema_version += change.raises_version
        await self._tell_tablets(table)
        return master_pb2.ChangeObserversResponse(table=table)

    async def report_backfill(
        self, request: master_pb2.ReportBackfillRequest
    ) -> master_pb2.ReportBackfillResponse:
        return report_backfill(self._table("", request.table_id), request)

    async def set_change_feed(
        self, request: master_pb2.SetChangeFeedRequest
    ) -> master_pb2.SetChangeFeedResponse:
        table = self._alterable(request.table)
        if table.options.change_feed != request.change_feed:
            table.options.change_feed = request.change_feed
            table.schema_version += 1
            await self._tell_tablets(table)
        return master_pb2.SetChangeFeedResponse(table=table)

    async def set_ttls(self, request: master_pb2.SetTtlsRequest) -> master_pb2.SetTtlsResponse:
        table = self._alterable(request.table)
        ttls = changed_ttls(table.options.ttls, request.ttls)
        require_ttls_kept(table.name, indexes_of(table.indexes), table.options.ttls, ttls)
        if ttls != list(table.options.ttls):
            del table.options.ttls[:]
            table.options.ttls.extend(ttls)
            table.schema_version += 1
            await self._tell_tablets(table)
        return master_pb2.SetTtlsResponse(table=table)

    async def declare_codecs(
        self, request: master_pb2.DeclareCodecsRequest
    ) -> master_pb2.DeclareCodecsResponse:
        table = self._table("", request.table_id)
        require_no_entries(table.name, table.index_of)
        self._keep(table, CodecNames.of(table.codecs).declared(table.name, request.codecs))
        return master_pb2.DeclareCodecsResponse(table=table)

    async def change_codecs(
        self, request: master_pb2.ChangeCodecsRequest
    ) -> master_pb2.ChangeCodecsResponse:
        table = self._alterable(request.table)
        before = CodecNames.of(table.codecs)
        after = before.changed(request)
        require_codecs_kept(table.name, indexes_of(table.indexes), after)
        self._keep(table, after)
        if before.contradicts(after):
            table.schema_version += 1
            await self._tell_tablets(table)
        return master_pb2.ChangeCodecsResponse(table=table)

    async def change_indexes(
        self, request: master_pb2.ChangeIndexesRequest
    ) -> master_pb2.ChangeIndexesResponse:
        async with self._creating:  # it creates tables
            table = self._table(request.table, 0)
            kept, added = changed_indexes(table, request)
            if added or len(kept) < len(table.indexes):
                await self._set_indexes(table, kept, added)
                table.schema_version += 1
                await self._tell_tablets(table)
                used = {one.table_id for one in table.indexes}
                await self._delete(
                    [one for one in self._entries(table) if one.table_id not in used]
                )
            return master_pb2.ChangeIndexesResponse(table=table)

    async def _set_indexes(
        self,
        table: master_pb2.Table,
        kept: Iterable[IndexDefinition],
        added: Iterable[IndexDefinition],
        ready_at: int = 0,
    ) -> None:
        indexes = [*kept]
        for one in added:
            entries = master_pb2.Table(
                table_id=next(self._ids),
                name=entries_name(table.table_id, one.name),
                schema_version=1,
                options=master_pb2.TableOptions(
                    retention_milliseconds=table.options.retention_milliseconds,
                    ttls=entries_ttls(one, table.options.ttls),
                ),
                created_at=ready_at or self._allocate(1),
                index_of=table.table_id,
            )
            await self._add_table(entries)
            indexes.append(replace(one, table_id=entries.table_id, ready_at=ready_at))
        self._keep(table, with_index_codecs(table.name, CodecNames.of(table.codecs), added))
        del table.indexes[:]
        table.indexes.extend(one.message() for one in sorted(indexes, key=lambda one: one.name))

    def _entries(self, table: master_pb2.Table) -> list[master_pb2.Table]:
        return [one for one in self._tables.values() if one.index_of == table.table_id]

    def _alterable(self, name: str) -> master_pb2.Table:
        table = self._table(name, 0)
        require_no_entries(name, table.index_of)
        return table

    @staticmethod
    def _keep(table: master_pb2.Table, codecs: CodecNames) -> None:
        table.codecs.CopyFrom(codecs.message())

    async def _tell_tablets(self, table: master_pb2.Table) -> None:
        for tablet in self._tablets_of(table.table_id):
            await tablet.set_schema_version(
                table.schema_version,
                change_feed=table.options.change_feed,
                ttls=ttls_of(table.options.ttls),
            )

    async def locate_tablets(
        self, request: master_pb2.LocateTabletsRequest
    ) -> master_pb2.LocateTabletsResponse:
        if request.even_deleting:
            await self._remove_unneeded()
        deleting = self._deleting.get(request.table_id) if request.even_deleting else None
        table = deleting or self._table("", request.table_id)
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
            codecs=table.codecs,
            ttls=table.options.ttls,
            indexes=table.indexes,
        )

    # ------------------------------------------------------------------ deleted tables

    async def _remove_unneeded(self) -> None:
        """Removes deleted tables, except those that still decide about locks in other tables."""
        needed = {
            LockRecord.decode(value).primary.table_id
            for tablet_id, tablet in self.tablets.items()
            if tablet.identity.table_id not in self._deleting and tablet.statistics().locks
            for key, value in self._disks[tablet_id].durable.items()
            if key.startswith(L)
        }
        for table_id in self._deleting.keys() - needed:
            del self._deleting[table_id]
            for tablet in self._tablets_of(table_id):
                del self.tablets[tablet.identity.tablet_id], self._disks[tablet.identity.tablet_id]
                await tablet.close()

    # ------------------------------------------------------------------ tablets

    async def _commits(self, transactions: Sequence[tuple[CellAddress, int]]) -> list[int]:
        return await commits_of(_AllCells(self), transactions, self._clock.monotonic_seconds() + 5)

    async def _open(self, identity: TabletIdentity, table: master_pb2.Table) -> None:
        tablet = Tablet(
            identity,
            schema_version=table.schema_version,
            storage=MemoryStorage(self._disks[identity.tablet_id]),
            clock=self._clock,
            ownership=MemoryOwnership(),
            on_closed=lambda _: None,
            guard=self._guard,
            watch=self._watch,
            change_feed=table.options.change_feed,
            ttls=ttls_of(table.options.ttls),
            timestamps=self._take_timestamps,
            commits=self._commits,
        )
        await tablet.open()
        self.tablets[identity.tablet_id] = tablet

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


class _AllCells:
    """`percolator.routing.cells.Mutations`, also of deleted tables."""

    def __init__(self, tables: TablesInMemory) -> None:
        self._tables = tables

    async def mutate(self, mutations: Sequence[CellMutation], deadline: float) -> list[Answer]:
        return [await self._answer(one, deadline) for one in mutations]

    async def _answer(self, asked: CellMutation, deadline: float) -> Answer:
        table_id, mutation = asked.table_id, asked.message()
        for tablet in self._tables._tablets_of(table_id):
            own = tablet.identity
            if own.start <= mutation.row and (not own.end or mutation.row < own.end):
                target = pb.TabletTarget(
                    tablet_id=own.tablet_id, epoch=own.epoch, schema_version=tablet.schema_version
                )
                batch = pb.MutationBatch(target=target, mutations=(mutation,))
                answer = await tablet.mutate(batch, deadline_seconds=deadline)
                return unapplied(answer.unapplied[0].result) if answer.unapplied else APPLIED
        return self._tables._no_table("", table_id)


__all__ = ["ADDRESS", "ClusterInMemory"]


class ClusterInMemory(TablesInMemory):
    """Answers the calls that a client makes to masters, oracles and tablet servers."""

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
        response = pb.MutateResponse()
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
        response = pb.ReadResponse()
        budget = AnswerBudget()
        for batch in request.batches:
            try:
                result = await self._serving(batch.target).read(batch, budget)
            except PercolatorError as error:
                result = pb.ReadBatchResult(error=to_detail(error))
            response.batches.append(result)
        return response

    async def await_turn(self, request: pb.AwaitTurnRequest) -> pb.AwaitTurnResponse:
        deadline = self._clock.monotonic_seconds() + request.wait_milliseconds / 1000
        return await self._serving(request.target).await_turn(request, deadline_seconds=deadline)

    async def end_turn(self, request: pb.EndTurnRequest) -> pb.EndTurnResponse:
        return self._serving(request.target).end_turn(request)

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
