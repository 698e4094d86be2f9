"""Tablet servers that are alive, and the tablets that they serve: the leader keeps asking them.

A server that refuses connections (its process was killed) counts as dead after two attempts. A
silent one (paused or cut off) counts as dead when its lease has expired. Time during which this
master did not run does not count: otherwise, a paused master would declare all servers dead when it
resumes. To declare a live server dead costs a takeover and nothing else, since the epoch
directories decide whether a server may answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import structlog

from percolator.errors import PercolatorError, Unavailable
from percolator.services.chassis.coordinator import LivedTime, milliseconds_between
from percolator.tasks import Tasks, stop_waiting_for
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.wire import methods
from percolator.wire.backoff import doubled_seconds
from percolator.world import World

PROBATION_SECONDS_MIN = 5.0
PROBATION_SECONDS_MAX = 60.0
"""How long a server that was lost several times must answer before it is given tablets again."""
_LOSSES_FORGOTTEN_SECONDS = 300.0
_BROKEN_ATTEMPTS = 2
_BROKEN_PAUSE_SECONDS = 0.1
_LOOK_SECONDS = 0.1

T = TypeVar("T")

_log = structlog.get_logger("percolator.master")


class ServerState(Enum):
    """The state of a tablet server, as far as the master knows."""

    UNKNOWN = "unknown"
    """Has not answered since this master began to lead."""
    ALIVE = "alive"
    DEAD = "dead"


@dataclass(frozen=True)
class WatchTimes:
    """How soon the master notices that a server is gone."""

    ask_seconds: float = 0.25
    answer_seconds: float = 1.0
    lease_seconds: float = 3.0


@dataclass
class WatchedServer:
    """One process, with what it reported in its last answer."""

    server_id: str
    address: str
    heard: int
    state: ServerState = ServerState.UNKNOWN
    reported: dict[int, pb.ReportedTablet] = field(default_factory=dict)
    writes_refused: ErrorDetail | None = None
    """Why it can store nothing, while it cannot."""
    broken: int = 0
    """Consecutive attempts that could not connect."""
    alive_since: int = 0
    asking: asyncio.Task[None] | None = None

    def is_dead(self) -> bool:
        return self.state is ServerState.DEAD


@dataclass
class _Losses:
    """How often servers at one address were lost."""

    count: int
    last: int


class ServerWatch:
    """`tick` has to be called often: it advances time."""

    def __init__(
        self,
        world: World,
        times: WatchTimes,
        changed: Callable[[], None],
        *,
        newest_timestamp: Callable[[], int],
    ) -> None:
        """`changed` is called when a server comes or goes, or serves other tablets than before.
        `newest_timestamp` is the oracle's time as the servers are told it."""
        self._clock = world.clock
        self._network = world.network
        self._times = times
        self._changed = changed
        self._newest_timestamp = newest_timestamp
        self._lived = LivedTime(world.clock)
        self._tasks = Tasks()
        self.servers: dict[str, WatchedServer] = {}
        self._losses: dict[str, _Losses] = {}
        """By address."""

    def tick(self) -> None:
        self._lived.tick()

    def watch(self, server_id: str, address: str) -> None:
        """Watches a server that registered, or that the map names. Repeating it is harmless."""
        known = self.servers.get(server_id)
        if known is not None and (not known.is_dead() or known.asking is not None):
            return
        for other in self.servers.values():
            if other.address == address and other.server_id != server_id:
                # An address belongs to one process at a time: the former one is gone.
                self._give_up(other, "another process has its address")
        server = WatchedServer(server_id, address, self._lived.tick())
        self.servers[server_id] = server
        server.asking = self._tasks.start(self._ask_forever(server), name=f"watch {address}")

    def forget(self, server_ids: Iterable[str]) -> None:
        """Forgets those of them that are dead. They must have no tablets."""
        for server_id in list(server_ids):
            server = self.servers.get(server_id)
            if server is not None and server.is_dead():
                del self.servers[server_id]

    def alive(self) -> list[WatchedServer]:
        return [server for server in self.servers.values() if server.state is ServerState.ALIVE]

    def steady(self) -> list[WatchedServer]:
        """The living servers that do not come and go. The tablets of one that keeps being lost and
        found would be taken over again and again, and clients would wait each time."""
        now = self._lived.tick()
        return [one for one in self.alive() if self._has_proved_itself(one, now)]

    def _has_proved_itself(self, server: WatchedServer, now: int) -> bool:
        losses = self._losses.get(server.address)
        # One loss may be a restart or an accident.
        if losses is None or losses.count < 2:
            return True
        seconds = doubled_seconds(
            PROBATION_SECONDS_MIN, PROBATION_SECONDS_MAX, doublings=losses.count - 2
        )
        return milliseconds_between(server.alive_since, now) >= seconds * 1000

    def is_dead(self, server_id: str) -> bool:
        """True also for a server that is not known."""
        server = self.servers.get(server_id)
        return server is None or server.is_dead()

    def silence_milliseconds(self, server: WatchedServer) -> int:
        return milliseconds_between(server.heard, self._lived.tick())

    def find(self, name: str) -> WatchedServer | None:
        """A living server, by address or id."""
        return next((one for one in self.alive() if name in (one.address, one.server_id)), None)

    async def answer(self, server_id: str, call: Awaitable[T]) -> T:
        """The answer to a call of this server; `Unavailable` as soon as the server is lost. What
        waits for an answer that does not come keeps its tablets from those that could serve it."""
        task = asyncio.ensure_future(call)
        has_ended = False
        try:
            while not (await asyncio.wait([task], timeout=_LOOK_SECONDS))[0]:
                if self.is_dead(server_id):
                    raise Unavailable("the server was lost before it answered")
            has_ended = True
        finally:
            if not has_ended:
                # Who is cancelled as the task ends does not hear how: nobody else would.
                task.cancel()
                stop_waiting_for(task)
        return task.result()

    async def close(self) -> None:
        await self._tasks.cancel()

    async def _ask_forever(self, server: WatchedServer) -> None:
        ask = self._network.unary(server.address, methods.REPORT)
        while not server.is_dead():
            pause = self._times.ask_seconds
            try:
                request = pb.ReportRequest(newest_timestamp=self._newest_timestamp())
                answer = await ask(request, self._times.answer_seconds)
            except PercolatorError as error:
                if isinstance(error, Unavailable):
                    pause = _BROKEN_PAUSE_SECONDS
                self._no_answer(server, error)
            else:
                self._answered(server, answer)
            if not server.is_dead():
                await self._clock.sleep(pause)
        server.asking = None

    def _answered(self, server: WatchedServer, answer: pb.ReportResponse) -> None:
        if answer.server_id != server.server_id:
            self._give_up(server, "another process answers at its address")
            return
        server.heard = self._lived.tick()
        server.broken = 0
        reported = {tablet.tablet_id: tablet for tablet in answer.tablets}
        if server.state is not ServerState.ALIVE:
            server.alive_since = server.heard
        news = server.state is not ServerState.ALIVE or reported != server.reported
        server.state, server.reported = ServerState.ALIVE, reported
        refused = answer.writes_refused if answer.HasField("writes_refused") else None
        server.writes_refused = refused
        if news:
            self._changed()

    def _no_answer(self, server: WatchedServer, error: PercolatorError) -> None:
        server.broken = server.broken + 1 if isinstance(error, Unavailable) else 0
        if server.broken >= _BROKEN_ATTEMPTS:
            self._give_up(server, f"cannot connect: {error.message}")
        elif self.silence_milliseconds(server) > self._times.lease_seconds * 1000:
            self._give_up(server, f"silent for {self._times.lease_seconds:g} s: {error.message}")

    def _give_up(self, server: WatchedServer, reason: str) -> None:
        if server.is_dead():
            return
        was_alive = server.state is ServerState.ALIVE
        server.state = ServerState.DEAD
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
