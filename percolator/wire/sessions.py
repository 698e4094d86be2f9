"""This process's session with the lock service, and lookups of other processes' sessions.

A session is a hint that lets others clean up sooner after this process has died. Nothing waits for
it: while the lock service cannot be reached, `current` is None and transactions continue without.

Invariants:
- `session_id` names a session only while it is certainly alive: less than its time to live has
  passed since the last successful renewal was *sent*.
- An id that expired is never used again; a new session has a new id, and the owner is notified.
- A pin that expired is not renewed: it is unknown what has been collected since.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from percolator.errors import (
    ExecutionUnknown,
    InvalidArgument,
    NotReady,
    PercolatorError,
    SessionExpired,
    Unavailable,
    UsageError,
)
from percolator.v1 import lockservice_pb2 as pb
from percolator.wire.liveness import Liveness, LivenessLookups
from percolator.wire.lock_service import LockServiceCalls, Procedure
from percolator.world import RequestT, ResponseT, World

_log = logging.getLogger(__name__)

_RENEWALS_PER_LIFE = 3
"""Two renewals in a row may be lost, and the session is still alive."""
_OPENING_SECONDS = 0.5
"""How long `close` waits for the answer to a call that opens a session."""
_DESCRIPTION_BYTES_MAX = 256
_SECONDS_MAX = 86_400.0
_TIMESTAMP_MAX = 2**64 - 1
ACTIVITY_BYTES_MAX = 8_192
"""The largest report that a lock service accepts by default."""
_JITTER = 0.2
"""Renewals come early by up to this fraction of their interval; otherwise, all clients would renew
at the same moment after a restart."""


@dataclass(frozen=True)
class SessionSettings:
    """How this process presents itself to the lock service."""

    description: str = ""
    """For humans: "worker shop.index on host-7 pid 312". At most 256 bytes."""
    ttl_seconds: float = 3.0
    ttl_may_be_shorter: bool = False
    """True if a lock service that does not allow so long a time to live may shorten it."""
    pin_at: int = 0
    """If not 0, the session is a pin: history from this timestamp on is not collected."""
    liveness_timeout_seconds: float = 1.0
    caller_seconds_max: float = math.inf
    """How long a caller waits until it is open, or has ended, even if its time to live would allow
    more."""

    def __post_init__(self) -> None:
        """Checks here, in the caller: renewals run in a background task, where an error would go
        unnoticed."""
        size = len(self.description.encode(errors="replace"))
        if size > _DESCRIPTION_BYTES_MAX:
            raise InvalidArgument("description", f"has {size} bytes, of {_DESCRIPTION_BYTES_MAX}")
        if any("\ud800" <= character <= "\udfff" for character in self.description):
            raise InvalidArgument("description", f"{self.description!r} cannot be encoded as UTF-8")
        for field in ("ttl_seconds", "liveness_timeout_seconds"):
            seconds: float = getattr(self, field)
            # NaN fails this comparison too.
            if not 0.001 <= seconds <= _SECONDS_MAX:
                raise InvalidArgument(field, f"{seconds} is outside 0.001 .. {_SECONDS_MAX:.0f}")
        if not 0 <= self.pin_at <= _TIMESTAMP_MAX:
            raise InvalidArgument("pin_at", f"{self.pin_at} is not a timestamp")


class Sessions:
    """Opens a session when it is first needed, and keeps it alive until `close`."""

    def __init__(
        self,
        world: World,
        addresses: Sequence[str],
        settings: SessionSettings,
        *,
        oldest_start: Callable[[], int] = lambda: 0,
        activity: Callable[[], pb.Activity | None] = lambda: None,
        on_expired: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """`addresses` is read, and `oldest_start` called, whenever they are needed; `oldest_start`
        returns the smallest start timestamp of the open transactions, 0 for none. `activity` says
        what this process does. `on_expired`
        receives the id of a session that was lost: its advisory locks are no longer held.
        """
        self._world = world
        self._settings = settings
        self._ttl_seconds = settings.ttl_seconds
        self._oldest_start = oldest_start
        self._activity = activity
        self._on_expired = on_expired
        self.calls = LockServiceCalls(world.network, addresses)
        """For everything done in the session's name. They go to the service that knows it, unless
        one has failed there since the last renewal."""
        self._lookups = LivenessLookups(
            self.calls, timeout_seconds=settings.liveness_timeout_seconds
        )
        self._id: bytes | None = None
        self._home = ""
        """The address of the lock service that knows the session."""
        self._alive_until = 0.0
        self._tried = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._opening: asyncio.Future[None] | None = None
        """Done when the call that opens a session has ended."""
        self._closed = False
        self.last_error: PercolatorError | None = None
        """Why the last attempt to open or renew the session failed; None if it succeeded."""
        self.lost_because = ""
        """The lock service's reason when the session ended; empty before that."""

    @property
    def session_id(self) -> bytes | None:
        """The id of the live session, if there is one; never waits."""
        now = self._world.clock.monotonic_seconds()
        return self._id if now < self._alive_until else None

    async def current(self) -> bytes | None:
        """The id of the live session. Waits only for the very first attempt to open one."""
        if self._closed:
            raise UsageError("the sessions of this client are closed")
        self.begin()
        await self._tried.wait()
        return self.session_id

    def begin(self) -> None:
        """Opens the session in the background, and keeps it alive from then on. May be repeated;
        after `close`, it does nothing."""
        if self._keeper is None and not self._closed:
            self._keeper = asyncio.create_task(self._keep())

    def pin(
        self,
        at: int,
        description: str,
        *,
        ttl_seconds: float,
        ttl_may_be_shorter: bool = False,
        timeout_seconds: float,
        on_lost: Callable[[bytes], None] = lambda _: None,
    ) -> Sessions:
        """A session that keeps what was readable at a timestamp from being collected.

        Its `current` opens it, and it lasts until its `close`, or until it is lost. Each of the two
        takes `timeout_seconds` at most, however many lock services are silent.
        """
        settings = SessionSettings(
            description=description,
            ttl_seconds=ttl_seconds,
            ttl_may_be_shorter=ttl_may_be_shorter,
            pin_at=at,
            caller_seconds_max=timeout_seconds,
        )
        return Sessions(self._world, self.calls.addresses, settings, on_expired=on_lost)

    async def liveness(self, session_ids: Sequence[bytes]) -> list[Liveness]:
        """Asks now which of these sessions are alive. No answer means undecided."""
        if self._closed:
            raise UsageError("the sessions of this client are closed")
        return await self._lookups.ask(session_ids)

    async def close(self) -> None:
        """Ends the session, if the lock service answers within one renewal interval, and within
        what callers wait at most."""
        self._closed = True
        self._tried.set()
        await self._lookups.close()
        if self._opening is not None:
            # Cancelled in the middle, it may leave a session that nobody knows, and nobody ends.
            await asyncio.wait([self._opening], timeout=_OPENING_SECONDS)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        self._alive_until = 0.0
        session_id = self._id
        if session_id is None:
            return
        request = pb.EndSessionRequest(session_id=session_id)
        try:
            for address in self.calls.in_turn(self._home)[:1]:
                await self.calls.call_at(
                    address, lambda stub: stub.end_session, request, self._caller_seconds
                )
        except PercolatorError as error:
            # No harm is done: the session expires by itself.
            _log.debug("session %s was left to expire: %s", session_id.hex(), error)
        self._id = None  # not before: if this is cancelled, the next call tries again

    async def _keep(self) -> None:
        clock = self._world.clock
        while not self._closed:  # also if `close` is cancelled before it has cancelled this
            started = clock.monotonic_seconds()
            had = self._id
            try:
                await (self._open() if had is None else self._renew(had))
            except PercolatorError as error:
                self._report(error)
            else:
                self.last_error = None
            self._tried.set()
            lost = had is not None and self._id is None
            if lost and self._settings.pin_at:
                # An operator released the pin, or it expired and history may have been collected
                # since: a new pin could not restore its promise.
                return
            early = self._world.random.uniform(0.0, _JITTER)
            due = started + self._renewal_seconds * (1.0 - early)
            await clock.sleep(max(due - clock.monotonic_seconds(), 0.0))

    async def _open(self) -> None:
        sent = self._world.clock.monotonic_seconds()
        self._opening = asyncio.get_running_loop().create_future()
        try:
            response = await self._answer(
                lambda stub: stub.open_session,
                pb.OpenSessionRequest(
                    info=self._info(), ttl_may_be_shorter=self._settings.ttl_may_be_shorter
                ),
                self._caller_seconds,
            )
            self._id = response.session_id
        finally:
            self._opening.set_result(None)
            self._opening = None
        if response.ttl_milliseconds:
            self._ttl_seconds = response.ttl_milliseconds / 1000
        self._alive_until = sent + self._ttl_seconds

    async def _renew(self, session_id: bytes) -> None:
        sent = self._world.clock.monotonic_seconds()
        try:
            await self._answer(
                lambda stub: stub.renew_session,
                pb.RenewSessionRequest(session_id=session_id, info=self._info()),
                self._renewal_seconds,
            )
        except SessionExpired as error:
            self._id, self._home = None, ""
            self.lost_because = error.message
            # In a separate turn of the loop, so that an error in the callback cannot stop renewals.
            asyncio.get_running_loop().call_soon(self._on_expired, session_id)
            if not self._settings.pin_at:
                await self._open()
            return
        self._alive_until = sent + self._ttl_seconds

    async def _answer(
        self, procedure: Procedure[RequestT, ResponseT], request: RequestT, within_seconds: float
    ) -> ResponseT:
        """Asks the lock service that knows the session; if it does not answer, the others, one
        after another."""
        addresses = self.calls.in_turn(self._home)
        seconds = within_seconds / max(len(addresses), 1)
        problem: PercolatorError = Unavailable("no address of a lock service is known")
        for address in addresses:
            try:
                response = await self.calls.call_at(address, procedure, request, seconds)
            except (ExecutionUnknown, NotReady) as error:
                problem = error
            except SessionExpired:
                # Another service may not know the pin. The one that does may come back.
                # An ordinary session is replaced at once.
                is_known_elsewhere = address != self._home and self.session_id is not None
                if not self._settings.pin_at or not is_known_elsewhere:
                    raise
                problem = Unavailable(f"the pin is known at {self._home}, which does not answer")
            else:
                self._home = address
                self.calls.stay_at(address)
                return response
        raise problem

    @property
    def _renewal_seconds(self) -> float:
        return self._ttl_seconds / _RENEWALS_PER_LIFE

    @property
    def _caller_seconds(self) -> float:
        return min(self._renewal_seconds, self._settings.caller_seconds_max)

    def _info(self) -> pb.SessionInfo:
        pin_at = self._settings.pin_at
        return pb.SessionInfo(
            description=self._settings.description,
            ttl_milliseconds=round(self._ttl_seconds * 1000),
            oldest_start_timestamp=pin_at or self._oldest(),
            pin=pin_at != 0,
            activity=self._activity(),
        )

    def _oldest(self) -> int:
        """The owner's answer. If it is wrong, that is logged and does not end the renewals."""
        try:
            oldest = self._oldest_start()
        except Exception as error:
            raise UsageError(f"oldest_start() failed: {error!r}") from error
        if not 0 <= oldest <= _TIMESTAMP_MAX:
            raise UsageError(f"oldest_start() returned {oldest}, which is not a timestamp")
        return oldest

    def _report(self, error: PercolatorError) -> None:
        """Logs once per outage, not once per attempt."""
        if self.last_error is None:
            _log.warning("the session could not be renewed; continuing: %s", error)
        self.last_error = error
