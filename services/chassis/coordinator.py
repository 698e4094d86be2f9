"""The coordinator: roles that one process leads at a time, values of the leader, sessions.

Contract:
- At most one leader of a role can write. A leader finds what all former leaders wrote: it becomes
  leader first, and reads second.
- A value is durable before `put` returns. If a `put` fails, its value may or may not be found
  later, so the caller must not report it.
- Leadership is lost without notice: a paused process loses it during the pause. So `check` is
  called after all work, and before its response leaves.
- Sessions are hints about who is alive, and nothing more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import structlog

from percolator.errors import InvalidArgument, NotReady, PercolatorError, StoreFault, StoreUnusable
from percolator.services.chassis.files import Files
from percolator.world import Clock

BEAT_SECONDS = 0.5
GRACE_SECONDS_MIN = 2 * BEAT_SECONDS
"""With one interval, a leader whose heartbeat is a little late would be taken for dead."""


@dataclass(frozen=True)
class CoordinatorTimes:
    """How soon other processes notice a loss."""

    beat_seconds: float = BEAT_SECONDS
    """The interval between two heartbeats."""
    grace_seconds: float = 3.0
    """A leader without a heartbeat for this long is taken for dead."""
    poll_seconds: float = 0.1
    """The interval between two checks by a candidate or a watcher."""
    session_factor: int = 1
    """Sessions beat, and are taken for dead, so many times more slowly than leaders."""
    lease_seconds: float = 0.0
    """How long a leader knows, after a look at its record, that it leads. The next leader waits for
    so long. In a directory, where a look is a call of the operating system, each is made."""

    @property
    def session_beat_seconds(self) -> float:
        """The interval between two heartbeats of a session."""
        return self.beat_seconds * self.session_factor

    @property
    def session_grace_seconds(self) -> float:
        """A session without a heartbeat for this long is taken for dead."""
        return self.grace_seconds * self.session_factor


USUAL_TIMES = CoordinatorTimes()


FORMAT = 1
_HEADER = re.compile(rb"percolator-value ([0-9]{1,9}) ([0-9]{1,12}) ([0-9a-f]{8})\n")
_HEADER_BYTES_MAX = 64


def encode(value: bytes) -> bytes:
    """The content of the file."""
    return b"percolator-value %d %d %08x\n" % (FORMAT, len(value), zlib.crc32(value)) + value


def decode(data: bytes, where: object) -> bytes:
    """The value that was written; `StoreUnusable` for any other content.

    The bytes of a value in a file: a line with its length and checksum, and the value.

    A file that is not exactly what was written is refused: half a map of tablets is worse than
    none.
    """
    header = _HEADER.match(data)
    if header is None:
        raise _damaged(where, "it does not begin with the header of a value")
    if int(header[1]) != FORMAT:
        raise _damaged(where, f"it has format {int(header[1])}, this release knows {FORMAT}")
    value = data[header.end() :]
    if len(value) != int(header[2]) or zlib.crc32(value) != int(header[3], 16):
        raise _damaged(where, "its checksum is wrong")
    return value


async def read(files: Files, path: Path) -> bytes:
    """The value in a file; `FileNotFoundError` if there is none."""
    data = await files.read(path, bytes_max=VALUE_BYTES_MAX + _HEADER_BYTES_MAX)
    return decode(data, path)


def _damaged(where: object, reason: str) -> StoreUnusable:
    return StoreUnusable(f"{where} is damaged: {reason}", fault=StoreFault.DAMAGED)


TICK_MILLISECONDS = 10
GAP_SECONDS_MAX = 0.25
"""Far above the intervals in which a healthy process calls `tick`, far below any time to live."""
ASK_SECONDS = GAP_SECONDS_MAX / 2
"""How often a task calls `tick` that has no other reason to do so more often."""


class LivedTime:
    """The time during which this process was running: time while it was stopped does not count.

    Counts ticks of 10 ms since it was created; never goes back.

    While a process is stopped, no other can report to it. If that time counted, the first thing it
    would do on waking is to declare all others dead. So `tick` has to be called often (many times a
    second, by a task that does nothing else), and a longer gap between two calls counts only up to
    `GAP_SECONDS_MAX`. The wall clock plays no part, because it jumps.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked_at = clock.monotonic_seconds()
        self._lived_seconds = 0.0

    def tick(self) -> int:
        """The current tick."""
        now = self._clock.monotonic_seconds()
        gap = now - self._asked_at
        if gap > 0.0:
            self._lived_seconds += min(GAP_SECONDS_MAX, gap)
        self._asked_at = now
        return int(self._lived_seconds * (1000 / TICK_MILLISECONDS))


def ticks_of(milliseconds: int) -> int:
    """The ticks that last at least `milliseconds`, even if the current one is partly over."""
    return -(-milliseconds // TICK_MILLISECONDS) + 1


def milliseconds_between(earlier: int, later: int) -> int:
    """The time from one tick to another; 0 if `later` is the earlier one."""
    return max(later - earlier, 0) * TICK_MILLISECONDS


REASONS_MAX = 16
"""How many reasons of one trouble are told. A text may say something else each time."""


class Trouble:
    """Logs when a trouble begins, each new reason, and when it is over.

    A reason that comes back is not new: of two servers that are both gone, callers name sometimes
    the one and sometimes the other.

    A trouble that lasts is logged once, not at every attempt: a full disk may last for days, and
    the logs of all processes that try again twice a second may be on it.
    """

    def __init__(
        self,
        log: Any,  # noqa: ANN401 - structlog's loggers have no common type
        event: str,
        over: str = "",
        *,
        level: int = logging.WARNING,
        **context: object,
    ) -> None:
        """Without `over`, its end is not logged: something else tells of it."""
        self._log = log
        self._event = event
        self._over = over
        self._level = level
        self._context = context
        self._told: set[str] = set()

    def lasts(self, error: object) -> None:
        reason = str(error)
        if reason not in self._told and len(self._told) < REASONS_MAX:
            self._told.add(reason)
            self._log.log(self._level, self._event, error=reason, **self._context)

    def is_over(self) -> None:
        """May be called at any time, also without a trouble."""
        if self._told and self._over:
            self._log.info(self._over, **self._context)
        self._told.clear()


_FORGET_FACTOR = 20
"""A session that was silent for this many grace periods is removed."""


class Silence:
    """Measures how long nothing has changed."""

    def __init__(self, clock: Clock, grace_seconds: float) -> None:
        self._clock = clock
        self._time = LivedTime(clock)
        self._grace_milliseconds = round(grace_seconds * 1000)
        self._last: object = None
        self._changed = 0

    def lasts(self, seen: object) -> bool:
        """True if `seen` has been the same for the whole grace period."""
        now = self._time.tick()
        if seen != self._last:
            self._last, self._changed = seen, now
        return milliseconds_between(self._changed, now) > self._grace_milliseconds

    async def sleep(self, seconds: float) -> None:
        """Waits until the next look. It counts as time that this process was running."""
        until = self._clock.monotonic_seconds() + seconds
        while (left := until - self._clock.monotonic_seconds()) > 0:
            await self._clock.sleep(min(left, ASK_SECONDS))
            self._time.tick()


@dataclass
class Judged:
    """The result of one look at the sessions."""

    alive: dict[str, bytes] = field(default_factory=dict)
    """By name, as they were found."""
    forgotten: list[str] = field(default_factory=list)
    """Silent for so long that they are to be removed."""


@dataclass
class _Seen:
    content: bytes
    changed: int


class SilentSessions:
    """The sessions as one reader knows them: each changes while its owner lives.

    Silence is measured by the time during which this process was running.

    A reader judges by its own clock, and by what has changed. One that has just started takes
    everybody for alive.
    """

    def __init__(self, clock: Clock, grace_seconds: float) -> None:
        self._time = LivedTime(clock)
        self._grace_milliseconds = round(grace_seconds * 1000)
        self._seen: dict[str, _Seen] = {}

    def tick(self) -> int:
        """The time of a look that begins now."""
        return self._time.tick()

    def judge(self, now: int, prefix: str, found: Mapping[str, bytes]) -> Judged:
        """`found` is all sessions with names of that prefix, at a look that began `now`."""
        self._seen = {
            name: seen
            for name, seen in self._seen.items()
            if name in found or not name.startswith(prefix)
        }
        judged = Judged()
        for name, content in found.items():
            seen = self._seen.get(name)
            if seen is None or seen.content != content:
                seen = self._seen[name] = _Seen(content, now)
            silence = milliseconds_between(seen.changed, now)
            if silence <= self._grace_milliseconds:
                judged.alive[name] = content
            elif silence > _FORGET_FACTOR * self._grace_milliseconds:
                judged.forgotten.append(name)
        return judged


_log = structlog.get_logger("percolator.coordinator")


class Led(Protocol):
    """A leadership of this process."""

    @property
    def epoch(self) -> int: ...

    @property
    def is_over(self) -> bool:
        """True if it has ended, and nothing of it is left to do."""

    async def resign(self) -> None: ...


LedT = TypeVar("LedT", bound=Led)


class OwnProcess(ABC, Generic[LedT]):
    """The roles and sessions of one process, alike in both back ends. Belongs to one event loop.

    It knows what the process leads and which sessions it has opened, and ends all of it at the end.
    A value is watched by reading it again: neither back end can be told of a change.
    """

    def __init__(self, clock: Clock, times: CoordinatorTimes) -> None:
        self._clock = clock
        self._times = times
        self._open: list[BeatingSession] = []
        self._led: list[LedT] = []
        """Leaderships that may still stand, or whose end has not been noticed yet."""

    @abstractmethod
    async def read(self, role: str, key: str) -> bytes | None:
        """See `Coordinator.read`."""

    async def watch(self, role: str, key: str) -> AsyncGenerator[bytes | None, None]:
        last = await self.read(role, key)
        yield last
        while True:
            await self._clock.sleep(self._times.poll_seconds)
            value = await self.read(role, key)
            if value != last:
                last = value
                yield value

    def _leads(self, role: str, leadership: LedT) -> LedT:
        """Notes that this process leads from now on."""
        self._led = [former for former in self._led if not former.is_over]
        self._led.append(leadership)
        _log.info("leading", role=role, epoch=leadership.epoch)
        return leadership

    async def _begin_session(self, place: SessionPlace, name: str, value: bytes) -> BeatingSession:
        session = BeatingSession(
            place, self._clock, name, value, beat_seconds=self._times.session_beat_seconds
        )
        await session.begin()
        self._open.append(session)
        return session

    async def close(self) -> None:
        for session in self._open:
            await session.close()
        for leadership in self._led:
            await leadership.resign()
        self._open.clear()
        self._led.clear()


VALUE_BYTES_MAX = 64 << 20
_NAME = re.compile(r"[a-z][a-z0-9-]{0,99}")


@dataclass(frozen=True)
class KnownLeader:
    """The leader of a role."""

    epoch: int
    holder: str
    """The name that it gave itself: its address."""


def no_lost_leader() -> str:
    """The default for `lost`: the candidate knows of no lost leader."""
    return ""


class Leadership(Protocol):
    """The leadership of one role by this process, while `is_held` says so."""

    @property
    def epoch(self) -> int:
        """Higher than that of every former leader."""

    async def is_held(self) -> bool:
        """True if no later leader had read anything when this was called. Raises `StoreUnusable` if
        the store does not say."""

    async def was_held(self) -> bool:
        """True if it was held two heartbeats ago, or later. For work that needs no proof, and is
        done so often that it may not cost a look each time."""

    async def check(self) -> None:
        """Raises `NotReady` unless it is held; after the first time, always raises it."""

    async def get(self, key: str) -> bytes | None:
        """The last value that this or a former leader wrote. `StoreUnusable` if it is damaged."""

    async def put(self, key: str, value: bytes) -> None:
        """Returns when the value is durable and this process still leads; raises `NotReady` or
        `StoreUnusable` otherwise, and `InvalidArgument` for a value that is too large."""

    async def resign(self) -> None:
        """Lets the next candidate lead at once."""


class Session(Protocol):
    """Shows other processes that this one is alive, until it is closed."""

    async def close(self) -> None: ...


class Coordinator(Protocol):
    """Roles, values of leaders and sessions, as all processes of a cluster see them."""

    async def campaign(
        self, role: str, holder: str, lost: Callable[[], str] = no_lost_leader
    ) -> Leadership:
        """Returns when this process leads: at once, or when the former leader is gone, has been
        silent for too long, or is known to be lost: `lost` returns the holder of a leader that the
        candidate knows, from elsewhere, to be lost."""

    async def leader(self, role: str) -> KnownLeader | None:
        """The present leader, as far as can be told from outside."""

    async def read(self, role: str, key: str) -> bytes | None:
        """The last value that a leader of the role wrote; it may be slightly out of date. Any
        process may read it."""

    def watch(self, role: str, key: str) -> AsyncGenerator[bytes | None, None]:
        """Yields the present value, and then every new value that it sees. Never ends."""

    async def open_session(self, name: str, value: bytes) -> Session:
        """Opens a session, one per name and process."""

    async def sessions(self, prefix: str) -> Mapping[str, bytes]:
        """The live sessions by name. Call it often: it sees who is silent by what has changed."""

    async def close(self) -> None:
        """Resigns, and ends sessions."""


def check_name(field: str, name: str) -> None:
    """Refuses names of roles, keys and sessions that some back end could not store."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            field, f"expected a letter, then up to 99 of a-z, 0-9 and '-'; found {name[:100]!r}"
        )


_COUNT_BYTES = 8


class SessionPlace(Protocol):
    """Where one session is written: a file or a row. Fails with `OSError` or `PercolatorError`."""

    async def put(self, content: bytes) -> None: ...

    async def remove(self) -> None: ...


class BeatingSession:
    """A session: a value that its owner writes until it is closed, each time with a new count.

    Others see by the count that the owner is alive. One that has not changed for the grace period
    is silent.
    """

    def __init__(
        self, place: SessionPlace, clock: Clock, name: str, value: bytes, *, beat_seconds: float
    ) -> None:
        self._place = place
        self._clock = clock
        self._name = name
        self._value = value
        self._beat_seconds = beat_seconds
        self._counts = itertools.count(1)
        self._beating: asyncio.Task[None] | None = None
        self._trouble = Trouble(_log, "session not renewed", "session renewed again", session=name)

    async def begin(self) -> None:
        await self._beat()
        self._beating = asyncio.create_task(self._keep_beating(), name=f"session {self._name}")

    async def close(self) -> None:
        beating, self._beating = self._beating, None
        if beating is None:
            return
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        try:
            await self._place.remove()
        except (OSError, PercolatorError) as error:
            # The session becomes silent instead.
            _log.info("session not removed", session=self._name, error=str(error))

    async def _keep_beating(self) -> None:
        while True:
            await self._clock.sleep(self._beat_seconds)
            try:
                await self._beat()
            except (OSError, PercolatorError) as error:
                self._trouble.lasts(error)
            else:
                self._trouble.is_over()

    async def _beat(self) -> None:
        count = next(self._counts).to_bytes(_COUNT_BYTES, "big")
        await self._place.put(count + self._value)


def value_of(content: bytes) -> bytes:
    """The value that a session was opened with."""
    return content[_COUNT_BYTES:]


LOOK_SECONDS = 0.25
"""The interval at which a waiting process checks who leads."""
_POLL_SECONDS = 0.02
_REFUSED_RETRY_SECONDS = 0.1
_CANNOT_LEAD_SECONDS = 0.5
"""How long a process that cannot lead leaves the role to other candidates."""

TermT = TypeVar("TermT")


class Candidacy(Generic[TermT]):
    """The candidacy of one process for one role: it waits, leads for a term, and waits again.

    What a service does while it leads is its *term*, an object that the service provides and
    `begin` creates. A process without a term serves nothing that only the leader may serve: it
    refuses, and names the leader if it knows one.

    Invariants:
    - There is a term only while this process holds the leadership from which the term was created.
      Holding it does not prove that this process leads: one that was paused may have a successor.
      So every response is preceded by `Leadership.check` or `is_held`.
    - If a term cannot be created, the process resigns at once. Otherwise it would hold the role for
      as long as it lives, and serve nothing.
    """

    def __init__(self, coordinator: Coordinator, clock: Clock, *, role: str, address: str) -> None:
        """`address` is how other processes reach this one."""
        self._coordinator = coordinator
        self._clock = clock
        self._role = role
        self._address = address
        self._leadership: Leadership | None = None
        self.term: TermT | None = None
        """None while this process does not lead."""
        self.leader_address = ""
        """The leader at this process's last check, while it was waiting. Empty if unknown."""
        self._not_leading = Trouble(_log, f"this {role} cannot lead", level=logging.ERROR)
        self._unseen = Trouble(
            _log, "the coordinator does not answer", "the coordinator answers again", role=role
        )

    def serving(self) -> TermT:
        """The term, or `NotReady` with the address of the process that leads."""
        if self.term is None:
            other = self.leader_address
            at = f"; the one at {other} does" if other and other != self._address else ""
            raise NotReady(
                f"this {self._role} does not lead{at}", retry_after_seconds=_REFUSED_RETRY_SECONDS
            )
        return self.term

    async def until_decided(self, seconds: float) -> None:
        """Returns when some process leads, or after `seconds`.

        A service that waits for this before it accepts calls does not refuse its first callers
        merely because it has not looked yet.
        """
        deadline = self._clock.monotonic_seconds() + seconds
        while self.term is None and not self.leader_address:
            if self._clock.monotonic_seconds() >= deadline:
                return
            await self._clock.sleep(_POLL_SECONDS)

    async def run(
        self, serve: Callable[[], Awaitable[None]], cannot_lead: tuple[type[Exception], ...]
    ) -> NoReturn:
        """Serves one term after another, until cancelled or until `serve` raises another error.

        `serve` calls `begin`, and raises `NotReady` when the term is over, or one of `cannot_lead`
        if this process could not lead: another one may have a better disk, or a better clock.
        """
        while True:
            try:
                await self._serve_a_term(serve)
            except cannot_lead as error:
                self._not_leading.lasts(error)
                await self._clock.sleep(_CANNOT_LEAD_SECONDS)

    async def _serve_a_term(self, serve: Callable[[], Awaitable[None]]) -> None:
        try:
            await serve()
        except NotReady as error:
            _log.warning(f"this {self._role} no longer leads", reason=str(error))
        finally:
            await self.end()

    async def begin(
        self,
        make_term: Callable[[Leadership], Awaitable[TermT]],
        lost: Callable[[], str] = no_lost_leader,
    ) -> TermT:
        """Waits until this process leads, and creates its term.

        `lost` is passed to `Coordinator.campaign`.
        """
        looking = asyncio.create_task(self._keep_looking(), name=f"look which {self._role} leads")
        try:
            leadership = await self._coordinator.campaign(self._role, self._address, lost)
        finally:
            looking.cancel()
        try:
            self.term = await make_term(leadership)
        except BaseException:
            await asyncio.shield(leadership.resign())
            raise
        self._leadership = leadership
        self._not_leading.is_over()
        # What was seen before this term will be out of date when the term ends.
        self.leader_address = ""
        return self.term

    async def end(self) -> None:
        """Ends the term, if there is one, and lets the next candidate lead at once."""
        self.term = None
        leadership, self._leadership = self._leadership, None
        if leadership is not None:
            await asyncio.shield(leadership.resign())

    async def _keep_looking(self) -> None:
        while True:
            try:
                leader = await self._coordinator.leader(self._role)
            except (OSError, PercolatorError) as error:
                self._unseen.lasts(error)
            else:
                self._unseen.is_over()
                self.leader_address = leader.holder if leader is not None else ""
            await self._clock.sleep(LOOK_SECONDS)
