"""`percolator.v1.MasterService`: answers from the leader, or from the map that it recorded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, NoReturn

from percolator.errors import InvalidArgument, SchemaError, WrongCluster
from percolator.services.chassis.cluster_store import ClusterIdentity
from percolator.services.chassis.coordinator import ASK_SECONDS
from percolator.services.chassis.process import are_compatible
from percolator.services.chassis.rpc import caller_identity, caller_role, remaining_seconds
from percolator.services.master import cluster_map
from percolator.services.master.cluster_map import (
    Catalogue,
    ClusterMap,
    Table,
    Tablet,
    location_message,
    table_message,
)
from percolator.services.master.collection import Collection
from percolator.services.master.leader import Leader
from percolator.services.master.map_store import MapT
from percolator.services.master.master import Master, TermT
from percolator.services.master.registry import Registry
from percolator.services.master.row_term import RowTerm
from percolator.v1 import cluster_pb2
from percolator.v1 import master_pb2 as pb
from percolator.wire.roles import Role
from percolator.wire.status import to_detail
from percolator.world import Clock


def describe(
    collection: Collection, tables: Iterable[Table], now: float, *, tells_id: bool
) -> pb.DescribeCollectionResponse:
    """Describes history. `now` is monotonic time. `NotReady` until the safe points are known.

    `tells_id`: whether the caller may know the id of the session that holds collection back.
    """
    by_name = sorted(tables, key=lambda table: table.name)
    answer = pb.DescribeCollectionResponse(
        tables=[_history(collection, table) for table in by_name if table.is_used],
        transactions_safe_point=collection.safe_points.transactions,
    )
    if collection.held:
        needs = collection.needs
        answer.held_by = needs.description or "a session"
        if tells_id:
            answer.held_by_session_id = needs.session_id
        answer.held_at = needs.oldest
        answer.held_milliseconds = round(collection.held_seconds * 1000)
    if collection.error is not None:
        answer.error.CopyFrom(to_detail(collection.error))
    if collection.finished_at is not None:
        answer.age_milliseconds = round((now - collection.finished_at) * 1000)
    return answer


def _history(collection: Collection, table: Table) -> pb.TableHistory:
    default = round(collection.times.retention_seconds * 1000)
    collected = collection.collected(table.table_id)
    return pb.TableHistory(
        table=table.name,
        table_id=table.table_id,
        retention_milliseconds=table.retention_milliseconds or default,
        safe_point=collection.safe_points.reads.get(table.table_id, 0),
        collected_below=collected.below,
        history_bytes=collected.history_bytes,
        cells_collected=collected.cells,
        bytes_collected=collected.bytes,
    )


def _by_rights(current: Catalogue, table: Table | pb.Table) -> str:
    """The name by which tokens have rights to a table: an index has those of its table."""
    indexed = current.tables.get(table.index_of) if table.index_of else None
    return table.name if indexed is None else indexed.name


def _require_known(current: Catalogue, name: str, table_id: int) -> None:
    """Raises `PermissionDenied` if the caller has no right to the table, and `SchemaError` if the
    caller has rights to some tables only, and nothing is known here of one with this id."""
    caller = caller_identity()
    if caller.rights is None:
        return
    table = current.named(name) if name else current.tables.get(table_id)
    if table is not None:
        caller.require_known(_by_rights(current, table), repr(name) if name else f"{table_id}")
    elif name:
        caller.require_known(name)
    else:
        raise SchemaError(f"there is no table with the id {table_id}")


WAIT_SECONDS_MAX = 60.0
_ANSWER_SECONDS = 0.2
"""Time reserved of the caller's deadline for the response."""


class TableHandler(Generic[MapT, TermT]):
    """Answers from the leader, or from the map that it recorded."""

    def __init__(self, clock: Clock, master: Master[MapT, TermT]) -> None:
        self._clock = clock
        self._master = master

    async def create_table(self, request: pb.CreateTableRequest) -> pb.CreateTableResponse:
        caller_identity().require_administer(request.name)
        async with self._master.leading() as leader:
            table, created = await leader.tables.create(request, self._deadline())
            tablets = leader.stored.current.tablets_of(table)
        return pb.CreateTableResponse(table=table_message(table, tablets), created=created)

    async def delete_table(self, request: pb.DeleteTableRequest) -> pb.DeleteTableResponse:
        caller_identity().require_administer(request.name)
        async with self._master.leading() as leader:
            deleted = await leader.tables.delete(request, self._deadline())
        return pb.DeleteTableResponse(deleted=deleted)

    async def list_tables(self, request: pb.ListTablesRequest) -> pb.ListTablesResponse:
        current, rights = await self._master.current(), caller_identity().rights
        found = cluster_map.list_tables(current)
        if rights is None:
            return found
        return pb.ListTablesResponse(
            tables=[one for one in found.tables if rights.may_know(_by_rights(current, one))],
            awaited=[one for one in found.awaited if rights.may_know(one.name)],
        )

    async def describe_table(self, request: pb.DescribeTableRequest) -> pb.DescribeTableResponse:
        current = await self._master.current()
        try:
            _require_known(current, request.name, request.table_id)
            return cluster_map.describe_table(current, request)
        except SchemaError:
            # A standby may not have heard of it yet: only the leader may deny that it exists.
            async with self._master.leading() as leader:
                _require_known(leader.stored.current, request.name, request.table_id)
                return cluster_map.describe_table(leader.stored.current, request)

    async def change_observers(
        self, request: pb.ChangeObserversRequest
    ) -> pb.ChangeObserversResponse:
        caller_identity().require_administer(request.table)
        table = await self._after(
            lambda leader: leader.tables.change_observers(request, self._deadline())
        )
        return pb.ChangeObserversResponse(table=table)

    async def report_backfill(self, request: pb.ReportBackfillRequest) -> pb.ReportBackfillResponse:
        table = await self._after(
            lambda leader: leader.tables.report_backfill(request, self._deadline())
        )
        return pb.ReportBackfillResponse(table=table)

    async def set_change_feed(self, request: pb.SetChangeFeedRequest) -> pb.SetChangeFeedResponse:
        caller_identity().require_administer(request.table)
        table = await self._after(
            lambda leader: leader.tables.set_change_feed(request, self._deadline())
        )
        return pb.SetChangeFeedResponse(table=table)

    async def set_ttls(self, request: pb.SetTtlsRequest) -> pb.SetTtlsResponse:
        caller_identity().require_administer(request.table)
        table = await self._after(lambda leader: leader.tables.set_ttls(request, self._deadline()))
        return pb.SetTtlsResponse(table=table)

    async def change_indexes(self, request: pb.ChangeIndexesRequest) -> pb.ChangeIndexesResponse:
        caller_identity().require_administer(request.table)
        table = await self._after(
            lambda leader: leader.tables.change_indexes(request, self._deadline())
        )
        return pb.ChangeIndexesResponse(table=table)

    async def declare_codecs(self, request: pb.DeclareCodecsRequest) -> pb.DeclareCodecsResponse:
        caller = caller_identity()
        if caller.rights is not None:
            async with self._master.leading() as leader:
                current = leader.stored.current
                _require_known(current, "", request.table_id)
                caller.require_writer(_by_rights(current, current.tables[request.table_id]))
        table = await self._after(lambda leader: leader.tables.declare_codecs(request))
        return pb.DeclareCodecsResponse(table=table)

    async def change_codecs(self, request: pb.ChangeCodecsRequest) -> pb.ChangeCodecsResponse:
        caller_identity().require_administer(request.table)
        table = await self._after(
            lambda leader: leader.tables.change_codecs(request, self._deadline())
        )
        return pb.ChangeCodecsResponse(table=table)

    async def describe_collection(
        self, request: pb.DescribeCollectionRequest
    ) -> pb.DescribeCollectionResponse:
        async with self._master.leading() as leader:
            current, rights = leader.stored.current, caller_identity().rights
            tables = current.tables.values()
            if rights is not None:
                tables = [one for one in tables if rights.may_know(_by_rights(current, one))]
            # Whoever knows the id of a session can end it, and this would end other clients' pins.
            tells_id = caller_role() >= Role.ADMIN
            return describe(leader.collection, tables, leader.now(), tells_id=tells_id)

    async def _after(self, change: Callable[[TermT], Awaitable[Table]]) -> pb.Table:
        """The table as the leader describes it after a change."""
        async with self._master.leading() as leader:
            table = await change(leader)
            return table_message(table, leader.stored.current.tablets_of(table))

    def _deadline(self) -> float:
        """When to stop waiting: early enough to tell the caller that the work continues."""
        remaining = remaining_seconds()
        seconds = WAIT_SECONDS_MAX if remaining is None else min(remaining, WAIT_SECONDS_MAX)
        return self._clock.monotonic_seconds() + max(seconds - _ANSWER_SECONDS, 0.0)


class MasterHandler(TableHandler[ClusterMap, Leader]):
    """Answers the calls of one master over tablets."""

    # ------------------------------------------------------------------------- tablets

    async def locate_tablets(self, request: pb.LocateTabletsRequest) -> pb.LocateTabletsResponse:
        leader = self._master.leader
        current = await self._master.current()
        try:
            _require_known(current, "", request.table_id)
            return cluster_map.locate_tablets(
                current, request, lambda one: _is_assigned(leader, one)
            )
        except SchemaError:
            async with self._master.leading() as leading:
                _require_known(leading.store.current, "", request.table_id)
                return cluster_map.locate_tablets(
                    leading.store.current, request, lambda one: _is_assigned(leading, one)
                )

    async def list_tablets(self, request: pb.ListTabletsRequest) -> pb.ListTabletsResponse:
        async with self._master.leading() as leader:
            page, more = cluster_map.tablets_page(leader.store.current, request)
            return pb.ListTabletsResponse(
                tablets=[_info(leader, tablet) for tablet in page], more=more
            )

    async def split_tablet(self, request: pb.SplitTabletRequest) -> pb.SplitTabletResponse:
        row = request.row if request.HasField("row") else None
        async with self._master.leading() as leader:
            lower, upper = await leader.changes.split(request.tablet_id, row, self._deadline())
        return pb.SplitTabletResponse(lower=location_message(lower), upper=location_message(upper))

    async def move_tablet(self, request: pb.MoveTabletRequest) -> pb.MoveTabletResponse:
        async with self._master.leading() as leader:
            moved = await leader.changes.move(request.tablet_id, request.server, self._deadline())
        return pb.MoveTabletResponse(location=location_message(moved))

    # ------------------------------------------------------------------------- row stores

    async def _refuse_loads(self, request: object) -> NoReturn:
        raise InvalidArgument(
            "load", "the cells of this cluster are in tablets, which are loaded in place"
        )

    begin_load = publish_loads = abandon_load = _refuse_loads

    # ------------------------------------------------------------------------- servers

    async def list_servers(self, request: pb.ListServersRequest) -> pb.ListServersResponse:
        async with self._master.leading() as leader:
            return pb.ListServersResponse(servers=_servers(leader))

    async def drain_server(self, request: pb.DrainServerRequest) -> pb.DrainServerResponse:
        async with self._master.leading() as leader:
            await leader.changes.drain(request.server, undo=request.undo, deadline=self._deadline())
        return pb.DrainServerResponse()


def _is_assigned(leader: Leader | None, tablet: Tablet) -> bool:
    """True if it has a living owner. A standby cannot know: its callers find out."""
    if not tablet.server_id:
        return False
    return leader is None or not leader.watch.is_dead(tablet.server_id)


def _info(leader: Leader, tablet: Tablet) -> pb.TabletInfo:
    serving = leader.assignment.is_served(tablet)
    info = pb.TabletInfo(
        location=location_message(tablet, served=_is_assigned(leader, tablet)),
        table=leader.store.current.tables[tablet.table_id].name,
        server_id=tablet.server_id,
        serving=serving,
    )
    error = leader.assignment.errors.get(tablet.tablet_id)
    if error is not None and not serving:
        info.error.CopyFrom(to_detail(error))
    statistics = leader.balance.statistics.get(tablet.tablet_id)
    if statistics is not None:
        info.statistics.CopyFrom(statistics)
    return info


def _servers(leader: Leader) -> list[pb.TabletServerInfo]:
    current = leader.store.current
    found = []
    for server in sorted(leader.watch.alive(), key=lambda one: one.address):
        given = [one for one in current.tablets.values() if one.server_id == server.server_id]
        found.append(
            pb.TabletServerInfo(
                server_id=server.server_id,
                address=server.address,
                tablets=len(given),
                serving=sum(map(leader.assignment.is_served, given)),
                draining=server.server_id in current.draining,
                silence_milliseconds=leader.watch.silence_milliseconds(server),
                writes_refused=server.writes_refused,
            )
        )
    return found


_NOT_YET = "are not there yet on a row store (docs/bigtable.md)"


class RowMasterHandler(TableHandler[Catalogue, RowTerm]):
    """Answers the calls of one master over a row store."""

    def __init__(self, clock: Clock, master: Master[Catalogue, RowTerm], store: str) -> None:
        """`store` is named in refusals."""
        super().__init__(clock, master)
        self._store = store

    async def begin_load(self, request: pb.BeginLoadRequest) -> pb.BeginLoadResponse:
        async with self._master.leading() as leader:
            table = await leader.tables.begin_load(request, self._deadline())
        message = None if table is None else table_message(table)
        return pb.BeginLoadResponse(table=message)

    async def publish_loads(self, request: pb.PublishLoadsRequest) -> pb.PublishLoadsResponse:
        async with self._master.leading() as leader:
            tables = await leader.tables.publish_loads(request, self._deadline())
        return pb.PublishLoadsResponse(tables=map(table_message, tables))

    async def abandon_load(self, request: pb.AbandonLoadRequest) -> pb.AbandonLoadResponse:
        async with self._master.leading() as leader:
            return await leader.tables.abandon_load(request, self._deadline())

    # -------------------------------------------------------------------- not there yet

    async def set_change_feed(self, request: pb.SetChangeFeedRequest) -> pb.SetChangeFeedResponse:
        raise InvalidArgument("change feeds", _NOT_YET)

    async def set_ttls(self, request: pb.SetTtlsRequest) -> pb.SetTtlsResponse:
        raise InvalidArgument("times to live", _NOT_YET)

    async def change_codecs(self, request: pb.ChangeCodecsRequest) -> pb.ChangeCodecsResponse:
        raise InvalidArgument("changes of declared codecs", _NOT_YET)

    # -------------------------------------------------------------------- only tablets

    async def list_servers(self, request: pb.ListServersRequest) -> pb.ListServersResponse:
        async with self._master.leading():  # a call by which callers learn who leads
            return pb.ListServersResponse()

    async def _refuse_tablets(self, request: object) -> NoReturn:
        raise InvalidArgument(
            "tablets",
            f"the cells of this cluster are in {self._store}, and it has no tablets",
        )

    locate_tablets = list_tablets = split_tablet = move_tablet = drain_server = _refuse_tablets


REPORT_INTERVAL_MILLISECONDS = 1_000


class ClusterHandler:
    """Describes the cluster, and refuses processes of other clusters and releases.

    `watch_forever` has to run in a task: it advances time, and forgets servers that fell silent.
    """

    def __init__(
        self,
        clock: Clock,
        identity: ClusterIdentity,
        own: cluster_pb2.Server,
        registry: Registry,
        master: Master[Any, Any],
        rows: cluster_pb2.RowStorePlace | None = None,
    ) -> None:
        """`rows` has the cells, unless tablet servers have them."""
        self._clock = clock
        self._identity = identity
        self._own = own
        self._started = clock.monotonic_seconds()
        self._registry = registry
        self._master = master
        self._rows = rows

    async def describe(self, request: cluster_pb2.DescribeRequest) -> cluster_pb2.DescribeResponse:
        own = cluster_pb2.Server()
        own.CopyFrom(self._own)
        own.uptime_milliseconds = int((self._clock.monotonic_seconds() - self._started) * 1000)
        own.clock_lead_milliseconds = 0
        others = [one for one in self._master.masters if one.server_id != own.server_id]
        servers = [own, *others, *await self._master.servers()]
        servers.sort(key=lambda server: (server.kind, server.address))
        return cluster_pb2.DescribeResponse(
            cluster_id=self._identity.cluster_id,
            version=self._own.version,
            format=self._identity.format,
            route=cluster_pb2.ROUTE_DIRECT,
            servers=servers,
            wall_milliseconds=self._clock.wall_milliseconds(),
            timestamp_lead_milliseconds=self._master.timestamp_lead_milliseconds,
            gone=self._registry.missed(),
            row_store=self._rows,
            restricted=caller_identity().rights is not None,
        )

    async def register(self, request: cluster_pb2.RegisterRequest) -> cluster_pb2.RegisterResponse:
        if not request.HasField("server"):
            raise InvalidArgument("server", "is missing")
        self._refuse_foreign(request)
        await self._master.registered(request.server, request.wall_milliseconds)
        return cluster_pb2.RegisterResponse(
            cluster_id=self._identity.cluster_id,
            format=self._identity.format,
            interval_milliseconds=REPORT_INTERVAL_MILLISECONDS,
        )

    async def watch_forever(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._clock.sleep(ASK_SECONDS)
            self._registry.forget_silent()

    def _refuse_foreign(self, request: cluster_pb2.RegisterRequest) -> None:
        own, other = self._identity.cluster_id, request.cluster_id
        # Empty for a process that does not know the id yet, and learns it from the answer.
        if other and other != own:
            raise WrongCluster(f"this is cluster {own}, not {other}", expected=own, found=other)
        release = request.server.version
        if not are_compatible(self._own.version, release):
            raise WrongCluster(
                f"release {release!r} does not work with release {self._own.version}: both must "
                "have the same major version, and be at most one minor version apart",
                expected=self._own.version,
                found=release,
            )
