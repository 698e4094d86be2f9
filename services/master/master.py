"""A master: a candidate until it leads, and again a candidate when it no longer does.

Invariant: what changes anything is done by the leader alone, and every answer of it is preceded by
a look at whether it still leads. A standby answers from what the leader recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from percolator.errors import NotReady, PercolatorError, StoreUnusable
from percolator.v1 import master_records_pb2
from percolator.v1.cluster_pb2 import Server
from percolator.world import World
from services.chassis.coordinator.interface import Coordinator
from services.chassis.files import Files
from services.master import map_record
from services.master.cluster_map import ClusterMap
from services.master.leader import SERVERS_KEY, Leader, MasterTimes
from services.master.map_store import KEY, MapStore
from services.master.registry import Registry

ROLE = "master"
SESSION_PREFIX = "master-"
_RETRY_SECONDS = 0.5
_STANDBY_RETRY_SECONDS = 0.1
_MASTERS_SECONDS = 0.5
_POLL_SECONDS = 0.02

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
        self.leader: Leader | None = None
        self.elections = 0
        self.masters: list[Server] = [site.own]
        """All masters that live, this one among them."""
        self._leader_address = ""

    # ------------------------------------------------------------------------- answers

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[Leader]:
        """What is done inside is answered only if this master leads to the end of it."""
        leader = self._leader()
        yield leader
        leader.leadership.check()

    async def current(self) -> ClusterMap:
        """The map: the leader's own, or as it last recorded it."""
        leader = self.leader
        if leader is not None and leader.leadership.stands():
            return leader.store.current
        stored = await self._coordinator.read(ROLE, KEY)
        return ClusterMap() if stored is None else map_record.decode(stored)

    async def servers(self) -> list[Server]:
        """Those that reported to the leader."""
        if self.leader is not None:
            return self.registry.servers()
        stored = await self._coordinator.read(ROLE, SERVERS_KEY)
        return list(master_records_pb2.ServersRecord.FromString(stored or b"").servers)

    def registered(self, server: Server) -> None:
        """A server reports. Only a leader can do anything with that: `NotReady` sends it on."""
        leader = self._leader()
        self.registry.report(server)
        leader.registered(server)

    async def until_decided(self, seconds: float) -> None:
        """Returns when somebody leads, for a start without needless refusals, or after a while."""
        clock = self._site.world.clock
        deadline = clock.monotonic_seconds() + seconds
        while self.leader is None and not self._leader_address:
            if clock.monotonic_seconds() >= deadline:
                return
            await clock.sleep(_POLL_SECONDS)

    def _leader(self) -> Leader:
        leader = self.leader
        if leader is None:
            at = f", the one at {self._leader_address} does" if self._leader_address else ""
            raise NotReady(
                f"this master does not lead{at}", retry_after_seconds=_STANDBY_RETRY_SECONDS
            )
        leader.leadership.check()
        return leader

    # ------------------------------------------------------------------------- terms

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._serve_a_term()
            except StoreUnusable as error:
                _log.error("cannot lead", error=str(error))
                await self._site.world.clock.sleep(_RETRY_SECONDS)

    async def keep_listed(self) -> None:
        """Shows that this master lives, and looks who else does. Until cancelled."""
        own = self._site.own
        session = await self._coordinator.open_session(
            SESSION_PREFIX + own.server_id, own.SerializeToString()
        )
        try:
            while True:
                await self._look()
                await self._site.world.clock.sleep(_MASTERS_SECONDS)
        finally:
            await session.close()

    async def _look(self) -> None:
        try:
            found = await self._coordinator.sessions(SESSION_PREFIX)
            leader = await self._coordinator.leader(ROLE)
        except (OSError, PercolatorError) as error:
            _log.warning("the coordinator does not answer", error=str(error))
            return
        masters = {one.address: one for one in map(Server.FromString, found.values())}
        # By address: one that was started again is there twice until its former self is silent.
        masters[self._site.own.address] = self._site.own
        self.masters = list(masters.values())
        self._leader_address = leader.holder if leader is not None else ""

    async def _serve_a_term(self) -> None:
        site = self._site
        leadership = await self._coordinator.campaign(ROLE, site.own.address)
        self.elections += 1
        try:
            leader = Leader(
                site.world,
                site.files,
                site.root,
                await MapStore.load(leadership),
                self.registry,
                site.times,
                tablets_max=site.tablets_max,
            )
            self.leader = leader
            try:
                await leader.begin()
                await leader.until_over()
            finally:
                self.leader = None
        except NotReady as error:
            _log.warning("this master leads no more", error=str(error))
        finally:
            await asyncio.shield(leadership.resign())
