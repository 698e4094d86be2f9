"""A master: a candidate until it leads, and a candidate again when it no longer does.

Invariant: only the leader changes anything, and it checks that it still leads before each of its
answers leaves. A standby answers from what the leader recorded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from percolator.errors import PercolatorError, StoreUnusable
from percolator.v1 import master_records_pb2
from percolator.v1.cluster_pb2 import Server
from percolator.world import World
from services.chassis.coordinator.candidacy import Candidacy
from services.chassis.coordinator.interface import Coordinator, Leadership, Session
from services.chassis.store.files import Files
from services.master.kind_check import KindCheck
from services.master.leader import SERVERS_KEY, Leader, MasterTimes
from services.master.map import map_record
from services.master.map.cluster_map import ClusterMap
from services.master.map.map_store import KEY, MapStore
from services.master.registry import Registry, check

ROLE = "master"
SESSION_PREFIX = "master-"
_MASTERS_SECONDS = 0.5

_log = structlog.get_logger("percolator.master")


@dataclass(frozen=True)
class Site:
    """Where a master runs, and with what."""

    world: World
    files: Files
    root: Path
    own: Server
    times: MasterTimes = field(default_factory=MasterTimes)
    tablets_max: int = 100_000


class Master:
    """`run` has to run beside it."""

    def __init__(self, site: Site, coordinator: Coordinator, registry: Registry) -> None:
        self._site = site
        self._coordinator = coordinator
        self.registry = registry
        self.candidacy: Candidacy[Leader] = Candidacy(
            coordinator, site.world.clock, role=ROLE, address=site.own.address
        )
        self._kinds = KindCheck(site.world.network)
        self.elections = 0
        self.masters: list[Server] = [site.own]
        """All living masters, including this one."""

    @property
    def leader(self) -> Leader | None:
        """None while this master does not lead."""
        return self.candidacy.term

    # ------------------------------------------------------------------------- answers

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[Leader]:
        """Runs a call for the leader. It raises at the end unless this master still leads."""
        leader = await self._leader()
        yield leader
        await leader.leadership.check()

    async def current(self) -> ClusterMap:
        """The map: the leader's own or, on a standby, as the leader last recorded it."""
        leader = self.leader
        if leader is not None and await leader.leadership.stands():
            return leader.store.current
        stored = await self._coordinator.read(ROLE, KEY)
        return ClusterMap() if stored is None else map_record.decode(stored)

    @property
    def timestamp_lead_milliseconds(self) -> int | None:
        """How far timestamps are ahead of this master's wall clock; None on a standby."""
        return None if self.leader is None else self.leader.oracle_time.lead_milliseconds

    async def servers(self) -> list[Server]:
        """The servers that report to the leader."""
        if self.leader is not None:
            return self.registry.servers()
        stored = await self._coordinator.read(ROLE, SERVERS_KEY)
        servers = master_records_pb2.ServersRecord.FromString(stored or b"").servers
        for server in servers:
            # It was compared with the leader's clock, and a while ago.
            server.ClearField("clock_lead_milliseconds")
        return list(servers)

    async def registered(self, server: Server, wall_milliseconds: int) -> None:
        """A server reports. On a standby, `NotReady` tells it to report to another master."""
        leader = await self._leader()
        check(server)
        others = self.registry.others_at(server)
        masters = [
            one for one in self.masters if one.address == server.address and one.kind != server.kind
        ]
        if others or masters:
            await self._kinds.require(server, [*others, *masters])
            self.registry.forget(others)
        self.registry.report(server, wall_milliseconds=wall_milliseconds)
        leader.registered(server)

    async def _leader(self) -> Leader:
        leader = self.candidacy.serving()
        await leader.leadership.check()
        return leader

    # ------------------------------------------------------------------------- terms

    async def run(self) -> None:
        """Runs until cancelled."""
        await self.candidacy.run(self._serve_a_term, cannot_lead=(StoreUnusable,))

    async def keep_listed(self) -> None:
        """Shows that this master is alive and looks which others are, until cancelled."""
        session = await self._listed()
        try:
            while True:
                await self._look()
                await self._site.world.clock.sleep(_MASTERS_SECONDS)
        finally:
            await session.close()

    async def _listed(self) -> Session:
        """A full disk must not end a master that may lead as soon as there is space."""
        own = self._site.own
        while True:
            try:
                return await self._coordinator.open_session(
                    SESSION_PREFIX + own.server_id, own.SerializeToString()
                )
            except (OSError, PercolatorError) as error:
                _log.warning("this master is not listed", error=str(error))
                await self._site.world.clock.sleep(_MASTERS_SECONDS)

    async def _look(self) -> None:
        try:
            found = await self._coordinator.sessions(SESSION_PREFIX)
        except (OSError, PercolatorError) as error:
            _log.warning("the coordinator does not answer", error=str(error))
            return
        masters = {one.address: one for one in map(Server.FromString, found.values())}
        # By address: a restarted master is listed twice until its former session is silent.
        masters[self._site.own.address] = self._site.own
        self.masters = list(masters.values())

    async def _serve_a_term(self) -> None:
        leader = await self.candidacy.begin(self._leader_of_a_term)
        await leader.begin()
        await leader.until_over()

    async def _leader_of_a_term(self, leadership: Leadership) -> Leader:
        site = self._site
        self.elections += 1
        return Leader(
            site.world,
            site.files,
            site.root,
            await MapStore.load(leadership),
            self.registry,
            site.times,
            tablets_max=site.tablets_max,
        )
