"""Moving tablets, splitting them, and taking all of them from one server.

Moves and splits close the tablet first, so that its log is flushed and clients learn at once that
it goes. That is for speed alone. What makes them safe is that the map is changed in one durable
step, and that whoever opens a tablet seals what the owner before still has: its writes that were
acknowledged are in the clone, and what it does afterwards is not acknowledged. A crash before the
step leaves the former tablet to be opened again, one after it the new ones.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from percolator.errors import InvalidArgument, NotReady, PercolatorError
from percolator.v1 import tabletserver_pb2 as wire
from percolator.wire import methods
from percolator.world import World
from services.master.assignment import Assignment
from services.master.cluster_map import ClusterMap, Tablet
from services.master.map_store import MapStore
from services.master.server_watch import ServerWatch, WatchedServer
from services.master.tables import ROW_BYTES_MAX

_PROPOSE_SECONDS = 10.0
_MOVES_AT_ONCE = 4
_POLL_SECONDS = 0.02

_log = structlog.get_logger("percolator.master")


class TabletChanges:
    """What the leading master does to tablets that are served."""

    def __init__(
        self,
        world: World,
        store: MapStore,
        watch: ServerWatch,
        assignment: Assignment,
        *,
        tablets_max: int,
    ) -> None:
        self._world = world
        self._store = store
        self._watch = watch
        self._assignment = assignment
        self._tablets_max = tablets_max

    async def move(self, tablet_id: int, server: str, deadline: float) -> Tablet:
        """Returns when the tablet is served by that server (empty: the one with the fewest)."""
        await self._give(tablet_id, server)
        await self._assignment.until_served([tablet_id], deadline)
        return self._tablet(tablet_id)

    async def _give(self, tablet_id: int, server: str) -> None:
        """Decides it durably, and leaves the rest to the assignment."""
        target = self._target(server, self._tablet(tablet_id))
        self._assignment.hold(tablet_id)
        try:
            tablet = self._tablet(tablet_id)
            if tablet.server_id == target.server_id:
                return
            await self._close(tablet)

            def decide(current: ClusterMap) -> tuple[ClusterMap, None]:
                _unchanged(current, tablet)
                # Chosen again: other moves have filled the server that was the emptiest.
                chosen = self._target(server, tablet)
                given = tablet.given_to(chosen.server_id, chosen.address)
                return current.with_tablets([given]), None

            await self._store.change(decide)
        finally:
            self._assignment.let_go(tablet_id)

    async def split(
        self, tablet_id: int, row: bytes | None, deadline: float
    ) -> tuple[Tablet, Tablet]:
        """Returns when both halves are served. Clients meet a short pause, and nothing else."""
        self._assignment.hold(tablet_id)
        try:
            parent = self._tablet(tablet_id)
            if not parent.exists or not self._assignment.is_served(parent):
                raise NotReady(f"tablet {tablet_id} is not served", retry_after_seconds=1.0)
            if len(self._store.current.tablets) >= self._tablets_max:
                raise InvalidArgument(
                    "tablet_id", f"the cluster has {self._tablets_max} tablets already"
                )
            cut = _checked(row, parent) if row is not None else await self._propose(parent)
            await self._close(parent)

            def decide(current: ClusterMap) -> tuple[ClusterMap, tuple[Tablet, Tablet]]:
                _unchanged(current, parent)
                changed, lower, upper = current.with_split(parent, cut)
                return changed, (lower, upper)

            halves = await self._store.change(decide)
        finally:
            self._assignment.let_go(tablet_id)
        _log.info("tablet split", tablet=tablet_id, into=[half.tablet_id for half in halves])
        await self._assignment.until_served([half.tablet_id for half in halves], deadline)
        lower, upper = (self._tablet(half.tablet_id) for half in halves)
        return lower, upper

    async def drain(self, name: str, *, undo: bool, deadline: float) -> None:
        """Returns when the server has no tablets, and gets none."""
        server = self._watch.find(name)
        if server is None:
            raise InvalidArgument("server", f"no tablet server {name!r} is alive")
        await self._mark_draining(server, undo=undo)
        if undo:
            return
        moved = await self._empty(server, deadline)
        served = self._assignment.is_served
        while self._assignment.usable() and self._world.clock.monotonic_seconds() < deadline:
            tablets = self._store.current.tablets
            if all(served(one) for key in moved if (one := tablets.get(key))):
                return
            await self._world.clock.sleep(_POLL_SECONDS)
        raise NotReady(f"{server.address} has no tablets, but not all are served elsewhere yet")

    async def _empty(self, server: WatchedServer, deadline: float) -> list[int]:
        """Gives every tablet of the server to another one, and returns which they were."""
        moved: list[int] = []
        while tablets := self._tablets_of(server):
            if self._world.clock.monotonic_seconds() >= deadline:
                raise NotReady(
                    f"{len(tablets)} tablets are left on {server.address}; it gets no new ones"
                )
            batch = [one.tablet_id for one in tablets[:_MOVES_AT_ONCE]]
            # Not waited for one by one: a server that takes them may be the next one to go.
            await asyncio.gather(*(self._give(tablet_id, "") for tablet_id in batch))
            moved += batch
        return moved

    async def _mark_draining(self, server: WatchedServer, *, undo: bool) -> None:
        def decide(current: ClusterMap) -> tuple[ClusterMap, None]:
            if undo:
                draining = current.draining - {server.server_id}
            else:
                others = {one.server_id for one in self._assignment.usable()} - {server.server_id}
                if not others:
                    raise InvalidArgument(
                        "server", f"{server.address} is the last one that can serve tablets"
                    )
                draining = current.draining | {server.server_id}
            return replace(current, draining=draining), None

        await self._store.change(decide)

    def _tablets_of(self, server: WatchedServer) -> list[Tablet]:
        tablets = self._store.current.tablets.values()
        return [one for one in tablets if one.server_id == server.server_id]

    def _tablet(self, tablet_id: int) -> Tablet:
        found = self._store.current.tablets.get(tablet_id)
        if found is None:
            raise InvalidArgument("tablet_id", f"there is no tablet {tablet_id}")
        return found

    def _target(self, name: str, tablet: Tablet) -> WatchedServer:
        usable = self._assignment.usable()
        if not name:
            load = self._assignment.load()
            preferred = self._assignment.preferred()
            others = _without(tablet.server_id, preferred) or _without(tablet.server_id, usable)
            others = others or usable
            if not others:
                raise NotReady("no tablet server is there", retry_after_seconds=1.0)
            return min(others, key=lambda one: (load[one.server_id], one.address))
        for server in usable:
            if name in (server.address, server.server_id):
                return server
        raise InvalidArgument("server", f"no tablet server {name!r} is alive and takes tablets")

    async def _propose(self, tablet: Tablet) -> bytes:
        call = self._world.network.unary(tablet.address, methods.PROPOSE_SPLIT)
        target = wire.TabletTarget(
            tablet_id=tablet.tablet_id,
            epoch=tablet.epoch,
            schema_version=self._store.current.tables[tablet.table_id].schema_version,
        )
        answer = await call(wire.ProposeSplitRequest(target=target), _PROPOSE_SECONDS)
        if not answer.HasField("row") or not _is_inside(answer.row, tablet):
            raise InvalidArgument(
                "row", f"tablet {tablet.tablet_id} has too few rows to be split by size"
            )
        return answer.row

    async def _close(self, tablet: Tablet) -> None:
        if self._watch.is_dead(tablet.server_id):
            return
        try:
            await self._assignment.closing.close(tablet.address, tablet.tablet_id, tablet.epoch)
        except PercolatorError as error:
            # The next owner replays what was not flushed.
            _log.info(
                "tablet not closed before a change", tablet=tablet.tablet_id, error=str(error)
            )


def _unchanged(current: ClusterMap, tablet: Tablet) -> None:
    """Nobody else was given the tablet meanwhile."""
    found = current.tablets.get(tablet.tablet_id)
    if found is None or found.epoch != tablet.epoch:
        raise NotReady(f"tablet {tablet.tablet_id} was given to another server meanwhile")


def _without(server_id: str, servers: list[WatchedServer]) -> list[WatchedServer]:
    return [one for one in servers if one.server_id != server_id]


def _is_inside(row: bytes, tablet: Tablet) -> bool:
    return row > tablet.start and (not tablet.end or row < tablet.end)


def _checked(row: bytes, tablet: Tablet) -> bytes:
    if not _is_inside(row, tablet):
        raise InvalidArgument(
            "row", f"{row!r} does not lie inside tablet {tablet.tablet_id}, behind its first row"
        )
    if len(row) > ROW_BYTES_MAX:
        raise InvalidArgument("row", f"is longer than {ROW_BYTES_MAX} bytes")
    return row
