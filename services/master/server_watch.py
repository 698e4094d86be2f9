"""Which tablet servers live, and what they really serve: the leader asks them all the time.

A process that was killed refuses the connection, and counts as dead after two attempts; one that
is silent (paused, cut off) after its lease, in the time that this master has lived: one that slept
through its own pause must not bury the others. Being wrong costs a takeover and nothing else, since
whether a server may answer is decided by its directories.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

import structlog

from percolator.errors import PercolatorError, Unavailable
from percolator.v1 import tabletserver_pb2 as wire
from percolator.wire import methods
from percolator.world import World
from services.chassis.lived_time import LivedTime, milliseconds_between

PROBATION_SECONDS_MIN = 5.0
PROBATION_SECONDS_MAX = 60.0
"""So long must a server that was lost several times answer, before it is given tablets again."""
_LOSSES_FORGOTTEN_SECONDS = 300.0
_BROKEN_ATTEMPTS = 2
_BROKEN_PAUSE_SECONDS = 0.1

_log = structlog.get_logger("percolator.master")


class Life(Enum):
    """Of a tablet server, as far as the master knows."""

    UNKNOWN = "unknown"
    """Not heard of since this master leads."""
    ALIVE = "alive"
    DEAD = "dead"


@dataclass(frozen=True)
class WatchTimes:
    """How soon a server is noticed to be gone."""

    ask_seconds: float = 0.25
    answer_seconds: float = 1.0
    lease_seconds: float = 3.0


@dataclass
class WatchedServer:
    """One process. What it reported is as old as its last answer."""

    server_id: str
    address: str
    heard: int
    life: Life = Life.UNKNOWN
    reported: dict[int, wire.ReportedTablet] = field(default_factory=dict)
    broken: int = 0
    """Attempts in a row that found nobody."""
    alive_since: int = 0
    asking: asyncio.Task[None] | None = None

    def is_dead(self) -> bool:
        return self.life is Life.DEAD


@dataclass
class _Losses:
    """Of the servers at one address, one after the other."""

    count: int
    last: int


class ServerWatch:
    """`tick` has to be called often, to let time pass."""

    def __init__(self, world: World, times: WatchTimes, changed: Callable[[], None]) -> None:
        """`changed` is called when somebody else serves, or other tablets are served."""
        self._clock = world.clock
        self._network = world.network
        self._times = times
        self._changed = changed
        self._lived = LivedTime(world.clock)
        self.servers: dict[str, WatchedServer] = {}
        self._losses: dict[str, _Losses] = {}
        """By address."""

    def tick(self) -> None:
        self._lived.tick()

    def watch(self, server_id: str, address: str) -> None:
        """It registered, or the map says that it was there. Repeating it is harmless."""
        known = self.servers.get(server_id)
        if known is not None and (not known.is_dead() or known.asking is not None):
            return
        for other in self.servers.values():
            if other.address == address and other.server_id != server_id:
                # One address, one process: the former one is gone.
                self._bury(other, "another process has its address")
        server = WatchedServer(server_id, address, self._lived.tick())
        self.servers[server_id] = server
        server.asking = asyncio.create_task(self._ask_forever(server), name=f"watch {address}")

    def forget(self, server_ids: Iterable[str]) -> None:
        """Dead ones that nothing is assigned to any more."""
        for server_id in list(server_ids):
            server = self.servers.get(server_id)
            if server is not None and server.is_dead():
                del self.servers[server_id]

    def alive(self) -> list[WatchedServer]:
        return [server for server in self.servers.values() if server.life is Life.ALIVE]

    def steady(self) -> list[WatchedServer]:
        """The living ones that do not come and go: of two that take turns at being lost and found,
        tablets would be taken over again and again, and each time somebody waits for them."""
        now = self._lived.tick()
        return [one for one in self.alive() if self._has_proved_itself(one, now)]

    def _has_proved_itself(self, server: WatchedServer, now: int) -> bool:
        losses = self._losses.get(server.address)
        # Once is a restart, or an accident.
        if losses is None or losses.count < 2:
            return True
        seconds = min(PROBATION_SECONDS_MIN * 2.0 ** (losses.count - 2), PROBATION_SECONDS_MAX)
        return milliseconds_between(server.alive_since, now) >= seconds * 1000

    def is_dead(self, server_id: str) -> bool:
        """Also one that was never heard of."""
        server = self.servers.get(server_id)
        return server is None or server.is_dead()

    def silence_milliseconds(self, server: WatchedServer) -> int:
        return milliseconds_between(server.heard, self._lived.tick())

    def find(self, name: str) -> WatchedServer | None:
        """A living server, by address or id."""
        for server in self.alive():
            if name in (server.address, server.server_id):
                return server
        return None

    async def close(self) -> None:
        tasks = [server.asking for server in self.servers.values() if server.asking is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_forever(self, server: WatchedServer) -> None:
        ask = self._network.unary(server.address, methods.REPORT)
        while not server.is_dead():
            pause = self._times.ask_seconds
            try:
                answer = await ask(wire.ReportRequest(), self._times.answer_seconds)
            except PercolatorError as error:
                if isinstance(error, Unavailable):
                    pause = _BROKEN_PAUSE_SECONDS
                self._no_answer(server, error)
            else:
                self._answered(server, answer)
            if not server.is_dead():
                await self._clock.sleep(pause)
        server.asking = None

    def _answered(self, server: WatchedServer, answer: wire.ReportResponse) -> None:
        if answer.server_id != server.server_id:
            self._bury(server, "another process answers at its address")
            return
        server.heard = self._lived.tick()
        server.broken = 0
        reported = {tablet.tablet_id: tablet for tablet in answer.tablets}
        if server.life is not Life.ALIVE:
            server.alive_since = server.heard
        news = server.life is not Life.ALIVE or reported != server.reported
        server.life, server.reported = Life.ALIVE, reported
        if news:
            self._changed()

    def _no_answer(self, server: WatchedServer, error: PercolatorError) -> None:
        server.broken = server.broken + 1 if isinstance(error, Unavailable) else 0
        if server.broken >= _BROKEN_ATTEMPTS:
            self._bury(server, f"nobody answers: {error.message}")
        elif self.silence_milliseconds(server) > self._times.lease_seconds * 1000:
            self._bury(server, f"silent for {self._times.lease_seconds:g} s: {error.message}")

    def _bury(self, server: WatchedServer, reason: str) -> None:
        if server.is_dead():
            return
        was_alive = server.life is Life.ALIVE
        server.life = Life.DEAD
        server.reported = {}
        if was_alive:
            self._note_loss(server.address)
        say = _log.warning if was_alive else _log.info
        say("tablet server lost", address=server.address, reason=reason)
        self._changed()

    def _note_loss(self, address: str) -> None:
        now = self._lived.tick()
        forgotten = _LOSSES_FORGOTTEN_SECONDS * 1000
        self._losses = {
            known: losses
            for known, losses in self._losses.items()
            if milliseconds_between(losses.last, now) < forgotten
        }
        before = self._losses.get(address)
        self._losses[address] = _Losses(before.count + 1 if before else 1, now)
