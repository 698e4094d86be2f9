"""`percolator.v1.MasterService`: answers from the leader, or from the map that it recorded."""

from __future__ import annotations

from percolator.errors import SchemaError
from percolator.v1 import master_pb2 as wire
from percolator.wire.status import to_detail
from percolator.world import Clock
from services.chassis.serving.rpc import remaining_seconds
from services.master import collection_report
from services.master.leader import Leader
from services.master.map import locations
from services.master.map.cluster_map import Tablet
from services.master.map.map_record import location_message, table_message
from services.master.master import Master

WAIT_SECONDS_MAX = 60.0
_ANSWER_SECONDS = 0.2
"""What is reserved of the caller's deadline for the answer."""


class MasterHandler:
    """Answers the calls of one master."""

    def __init__(self, clock: Clock, master: Master) -> None:
        self._clock = clock
        self._master = master

    # ------------------------------------------------------------------------- tables

    async def create_table(self, request: wire.CreateTableRequest) -> wire.CreateTableResponse:
        async with self._master.leading() as leader:
            table, created = await leader.tables.create(request, self._deadline())
            tablets = len(leader.store.current.of_tables.get(table.table_id, ()))
        return wire.CreateTableResponse(table=table_message(table, tablets), created=created)

    async def delete_table(self, request: wire.DeleteTableRequest) -> wire.DeleteTableResponse:
        async with self._master.leading() as leader:
            deleted = await leader.tables.delete(request.name, missing_ok=request.missing_ok)
        return wire.DeleteTableResponse(deleted=deleted is not None)

    async def list_tables(self, request: wire.ListTablesRequest) -> wire.ListTablesResponse:
        return locations.list_tables(await self._master.current())

    async def describe_table(
        self, request: wire.DescribeTableRequest
    ) -> wire.DescribeTableResponse:
        try:
            return locations.describe_table(await self._master.current(), request)
        except SchemaError:
            # A standby may not have heard of it yet: only the leader may deny that it exists.
            async with self._master.leading() as leader:
                return locations.describe_table(leader.store.current, request)

    async def change_observers(
        self, request: wire.ChangeObserversRequest
    ) -> wire.ChangeObserversResponse:
        async with self._master.leading() as leader:
            table = await leader.tables.change_observers(request, self._deadline())
            tablets = len(leader.store.current.of_tables.get(table.table_id, ()))
        return wire.ChangeObserversResponse(table=table_message(table, tablets))

    async def set_change_feed(
        self, request: wire.SetChangeFeedRequest
    ) -> wire.SetChangeFeedResponse:
        async with self._master.leading() as leader:
            table = await leader.tables.set_change_feed(request, self._deadline())
            tablets = len(leader.store.current.of_tables.get(table.table_id, ()))
        return wire.SetChangeFeedResponse(table=table_message(table, tablets))

    async def declare_codecs(
        self, request: wire.DeclareCodecsRequest
    ) -> wire.DeclareCodecsResponse:
        async with self._master.leading() as leader:
            table = await leader.tables.declare_codecs(request)
            tablets = len(leader.store.current.of_tables.get(table.table_id, ()))
        return wire.DeclareCodecsResponse(table=table_message(table, tablets))

    async def change_codecs(self, request: wire.ChangeCodecsRequest) -> wire.ChangeCodecsResponse:
        async with self._master.leading() as leader:
            table = await leader.tables.change_codecs(request, self._deadline())
            tablets = len(leader.store.current.of_tables.get(table.table_id, ()))
        return wire.ChangeCodecsResponse(table=table_message(table, tablets))

    # ------------------------------------------------------------------------- tablets

    async def locate_tablets(
        self, request: wire.LocateTabletsRequest
    ) -> wire.LocateTabletsResponse:
        leader = self._master.leader
        current = await self._master.current()
        try:
            return locations.locate_tablets(current, request, lambda one: _is_assigned(leader, one))
        except SchemaError:
            async with self._master.leading() as leading:
                return locations.locate_tablets(
                    leading.store.current, request, lambda one: _is_assigned(leading, one)
                )

    async def list_tablets(self, request: wire.ListTabletsRequest) -> wire.ListTabletsResponse:
        async with self._master.leading() as leader:
            page, more = locations.tablets_page(leader.store.current, request)
            return wire.ListTabletsResponse(
                tablets=[_info(leader, tablet) for tablet in page], more=more
            )

    async def split_tablet(self, request: wire.SplitTabletRequest) -> wire.SplitTabletResponse:
        row = request.row if request.HasField("row") else None
        async with self._master.leading() as leader:
            lower, upper = await leader.changes.split(request.tablet_id, row, self._deadline())
        return wire.SplitTabletResponse(
            lower=location_message(lower), upper=location_message(upper)
        )

    async def move_tablet(self, request: wire.MoveTabletRequest) -> wire.MoveTabletResponse:
        async with self._master.leading() as leader:
            moved = await leader.changes.move(request.tablet_id, request.server, self._deadline())
        return wire.MoveTabletResponse(location=location_message(moved))

    async def describe_collection(
        self, request: wire.DescribeCollectionRequest
    ) -> wire.DescribeCollectionResponse:
        async with self._master.leading() as leader:
            return collection_report.describe(leader, self._clock.monotonic_seconds())

    # ------------------------------------------------------------------------- servers

    async def list_servers(self, request: wire.ListServersRequest) -> wire.ListServersResponse:
        async with self._master.leading() as leader:
            return wire.ListServersResponse(servers=_servers(leader))

    async def drain_server(self, request: wire.DrainServerRequest) -> wire.DrainServerResponse:
        async with self._master.leading() as leader:
            await leader.changes.drain(request.server, undo=request.undo, deadline=self._deadline())
        return wire.DrainServerResponse()

    def _deadline(self) -> float:
        """When to stop waiting: early enough to tell the caller that the work continues."""
        remaining = remaining_seconds()
        seconds = WAIT_SECONDS_MAX if remaining is None else min(remaining, WAIT_SECONDS_MAX)
        return self._clock.monotonic_seconds() + max(seconds - _ANSWER_SECONDS, 0.0)


def _is_assigned(leader: Leader | None, tablet: Tablet) -> bool:
    """Whether it has a living owner. A standby cannot know: its callers find out."""
    if not tablet.server_id:
        return False
    return leader is None or not leader.watch.is_dead(tablet.server_id)


def _info(leader: Leader, tablet: Tablet) -> wire.TabletInfo:
    serving = leader.assignment.is_served(tablet)
    info = wire.TabletInfo(
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


def _servers(leader: Leader) -> list[wire.TabletServerInfo]:
    current = leader.store.current
    found = []
    for server in sorted(leader.watch.alive(), key=lambda one: one.address):
        given = [one for one in current.tablets.values() if one.server_id == server.server_id]
        found.append(
            wire.TabletServerInfo(
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
