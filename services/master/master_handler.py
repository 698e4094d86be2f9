"""`percolator.v1.MasterService`: answers from the leader, or from the map that it recorded."""

from __future__ import annotations

from percolator.errors import InvalidArgument, SchemaError
from percolator.services.master.leader import Leader
from percolator.services.master.map import locations
from percolator.services.master.map.cluster_map import ClusterMap, Tablet
from percolator.services.master.map.map_record import location_message
from percolator.services.master.table_handler import TableHandler
from percolator.v1 import master_pb2 as pb
from percolator.wire.status import to_detail


class MasterHandler(TableHandler[ClusterMap, Leader]):
    """Answers the calls of one master over tablets."""

    # ------------------------------------------------------------------------- tablets

    async def locate_tablets(self, request: pb.LocateTabletsRequest) -> pb.LocateTabletsResponse:
        leader = self._master.leader
        current = await self._master.current()
        try:
            return locations.locate_tablets(current, request, lambda one: _is_assigned(leader, one))
        except SchemaError:
            async with self._master.leading() as leading:
                return locations.locate_tablets(
                    leading.store.current, request, lambda one: _is_assigned(leading, one)
                )

    async def list_tablets(self, request: pb.ListTabletsRequest) -> pb.ListTabletsResponse:
        async with self._master.leading() as leader:
            page, more = locations.tablets_page(leader.store.current, request)
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

    async def begin_load(self, request: pb.BeginLoadRequest) -> pb.BeginLoadResponse:
        raise _only_rows()

    async def publish_loads(self, request: pb.PublishLoadsRequest) -> pb.PublishLoadsResponse:
        raise _only_rows()

    async def abandon_load(self, request: pb.AbandonLoadRequest) -> pb.AbandonLoadResponse:
        raise _only_rows()

    # ------------------------------------------------------------------------- servers

    async def list_servers(self, request: pb.ListServersRequest) -> pb.ListServersResponse:
        async with self._master.leading() as leader:
            return pb.ListServersResponse(servers=_servers(leader))

    async def drain_server(self, request: pb.DrainServerRequest) -> pb.DrainServerResponse:
        async with self._master.leading() as leader:
            await leader.changes.drain(request.server, undo=request.undo, deadline=self._deadline())
        return pb.DrainServerResponse()


def _only_rows() -> InvalidArgument:
    return InvalidArgument(
        "load", "the cells of this cluster are in tablets, which are loaded in place"
    )


def _is_assigned(leader: Leader | None, tablet: Tablet) -> bool:
    """Whether it has a living owner. A standby cannot know: its callers find out."""
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
