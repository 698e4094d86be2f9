"""A master: a candidate until it leads, and a candidate again when it no longer does.

Invariant: only the leader changes anything, and it checks that it still leads before each of its
answers leaves. A standby answers from what the leader recorded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import structlog

from percolator.errors import NotReady, PercolatorError, Retry, StoreUnusable
from percolator.services.chassis.coordinator import (
    Candidacy,
    Coordinator,
    Leadership,
    Session,
    Trouble,
)
from percolator.services.master.map_store import KEY, MapT
from percolator.services.master.registry import KindCheck, Registry, check
from percolator.services.master.term import SERVERS_KEY, Term
from percolator.v1 import master_records_pb2
from percolator.v1.cluster_pb2 import Server
from percolator.world import World

ROLE = "master"
SESSION_PREFIX = "master-"
_MASTERS_SECONDS = 0.5
_UNREAD_RETRY_SECONDS = 0.5

TermT = TypeVar("TermT", bound=Term[Any])

_log = structlog.get_logger("percolator.master")


class Master(Generic[MapT, TermT]):
    """A master, leading or on standby. A task has to run `run` as long as it serves."""

    def __init__(
        self,
        world: World,
        own: Server,
        coordinator: Coordinator,
        registry: Registry,
        begin: Callable[[Leadership], Awaitable[TermT]],
        decoded: Callable[[bytes | None], MapT],
    ) -> None:
        """`begin` makes the term of a new leadership; `decoded` reads the map that another leader
        has recorded."""
        self._world = world
        self._own = own
        self._coordinator = coordinator
        self._begin = begin
        self._decoded = decoded
        self.registry = registry
        self.candidacy: Candidacy[TermT] = Candidacy(
            coordinator, world.clock, role=ROLE, address=own.address
        )
        self._kinds = KindCheck(world.network)
        self._unlisted = Trouble(
            _log, "this master is not listed", "this master is listed", address=own.address
        )
        self._unseen = Trouble(
            _log, "other masters cannot be found", "other masters can be found again"
        )
        registry.masters = [own]

    @property
    def masters(self) -> list[Server]:
        """All living masters, including this one."""
        return self.registry.masters

    @property
    def leader(self) -> TermT | None:
        """None while this master does not lead."""
        return self.candidacy.term

    # ------------------------------------------------------------------------- answers

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[TermT]:
        """Runs a call for the leader. It raises at the end unless this master still leads."""
        leader = await self._leader()
        try:
            yield leader
        except PercolatorError as error:
            # Whoever is refused for good asks nobody else, so it has to be the leader who refuses.
            if error.retry is Retry.USELESS:
                if leader.is_over:
                    raise NotReady("this master no longer leads") from error
                await leader.leadership.check()
            raise
        await leader.leadership.check()

    async def current(self) -> MapT:
        """The map: the leader's own or, on a standby, as the leader last recorded it."""
        leader = self.leader
        if leader is not None and await leader.leadership.is_held():
            current: MapT = leader.stored.current
            return current
        return self._decoded(await self._recorded(KEY))

    async def _recorded(self, key: str) -> bytes | None:
        """The record of the leader. `NotReady` sends the caller to another master."""
        try:
            return await self._coordinator.read(ROLE, key)
        except (OSError, StoreUnusable) as error:
            raise NotReady(
                f"this master does not lead, and cannot read what the leader has recorded: {error}",
                retry_after_seconds=_UNREAD_RETRY_SECONDS,
            ) from error

    @property
    def timestamp_lead_milliseconds(self) -> int | None:
        """How far timestamps are ahead of this master's wall clock; None on a standby."""
        return None if self.leader is None else self.leader.oracle_time.lead_milliseconds

    async def servers(self) -> list[Server]:
        """The servers that report to the leader."""
        if self.leader is not None and self.leader.knows_servers:
            return self.registry.servers()
        stored = await self._recorded(SERVERS_KEY)
        servers = master_records_pb2.ServersRecord.FromString(stored or b"").servers
        for server in servers:
            # It was compared with the leader's clock, and a while ago.
            server.ClearField("clock_lead_milliseconds")
        return list(servers)

    async def registered(self, server: Server, wall_milliseconds: int) -> None:
        """A server reports. On a standby, `NotReady` tells it to report to another master."""
        leader = self.candidacy.serving()
        # All servers report every second: a look for each would keep a store busy. One that reports
        # to a master that was just replaced will do so to the other one soon.
        if not await leader.leadership.was_held():
            raise NotReady("this master no longer leads")
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
        if server.leaving:
            # This master may be stopped next, and the one after it must not miss the server.
            await leader.note_servers()

    async def _leader(self) -> TermT:
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
                await self._world.clock.sleep(_MASTERS_SECONDS)
        finally:
            await session.close()

    async def _listed(self) -> Session:
        """A full disk must not end a master that may lead as soon as there is space."""
        own = self._own
        while True:
            try:
                session = await self._coordinator.open_session(
                    SESSION_PREFIX + own.server_id, own.SerializeToString()
                )
            except (OSError, PercolatorError) as error:
                self._unlisted.lasts(error)
                await self._world.clock.sleep(_MASTERS_SECONDS)
            else:
                self._unlisted.is_over()
                return session

    async def _look(self) -> None:
        try:
            found = await self._coordinator.sessions(SESSION_PREFIX)
        except (OSError, PercolatorError) as error:
            self._unseen.lasts(error)
            return
        self._unseen.is_over()
        masters = {one.address: one for one in map(Server.FromString, found.values())}
        # By address: a restarted master is listed twice until its former session is silent.
        masters[self._own.address] = self._own
        self.registry.masters = list(masters.values())

    async def _serve_a_term(self) -> None:
        leader = await self.candidacy.begin(self._begin)
        try:
            await leader.begin()
            await leader.until_over()
        finally:
            # They report to the next leader. Here, they would all be missed.
            self.registry.forget_all()
