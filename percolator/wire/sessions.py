"""This process's session with the lock service, and questions about those of others.

A session is a hint that lets others clean up sooner after this process died. Nothing waits for it:
while the lock service cannot be reached, `current` is None and transactions go on without one.

Invariants:
- `session_id` names a session only while it surely lives: less than its time to live has passed
  since the last renewal that succeeded was *sent*.
- An id that expired is never used again; a new session has a new id, and the owner is told.
- A pin that expired is over: nobody knows what was collected since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from percolator.errors import InvalidArgument, PercolatorError, SessionExpired, UsageError
from percolator.v1 import lockservice_pb2 as wire
from percolator.wire.liveness import Liveness, LivenessQuestions
from percolator.wire.lock_service import LockServiceCalls
from percolator.world import World

_log = logging.getLogger(__name__)

_RENEWALS_PER_LIFE = 3
"""Two renewals in a row may be lost and the session still lives."""
_DESCRIPTION_BYTES_MAX = 256
_SECONDS_MAX = 86_400.0
_TIMESTAMP_MAX = 2**64 - 1
_JITTER = 0.2
"""Renewals come up to this part early, or after a restart all clients would renew at once."""


@dataclass(frozen=True)
class SessionSettings:
    """How this process presents itself to the lock service."""

    description: str = ""
    """For humans: "worker shop.index on host-7 pid 312". At most 256 bytes."""
    ttl_seconds: float = 3.0
    pin_at: int = 0
    """Not 0: the session is a pin, which holds back the collection of history from here on."""
    liveness_timeout_seconds: float = 1.0

    def __post_init__(self) -> None:
        """Here, at the caller: the renewals run in a task of their own, where nobody looks."""
        size = len(self.description.encode(errors="replace"))
        if size > _DESCRIPTION_BYTES_MAX:
            raise InvalidArgument("description", f"has {size} bytes, of {_DESCRIPTION_BYTES_MAX}")
        if any("\ud800" <= character <= "\udfff" for character in self.description):
            raise InvalidArgument("description", "cannot be written as UTF-8")
        for field in ("ttl_seconds", "liveness_timeout_seconds"):
            seconds: float = getattr(self, field)
            # NaN is in no range.
            if not 0.001 <= seconds <= _SECONDS_MAX:
                raise InvalidArgument(field, f"{seconds} is outside 0.001 .. {_SECONDS_MAX:.0f}")
        if not 0 <= self.pin_at <= _TIMESTAMP_MAX:
            raise InvalidArgument("pin_at", f"{self.pin_at} is not a timestamp")

    @property
    def renewal_seconds(self) -> float:
        return self.ttl_seconds / _RENEWALS_PER_LIFE


class Sessions:
    """Opens a session when one is first asked for, and keeps it alive until `close`."""

    def __init__(
        self,
        world: World,
        addresses: Sequence[str],
        settings: SessionSettings,
        *,
        oldest_start: Callable[[], int] = lambda: 0,
        on_expired: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """`addresses` is read, and `oldest_start` (the smallest start timestamp among what is
        open, 0 for none) called, whenever they are needed. `on_expired` is told the id of a session
        that was lost: whoever held advisory locks in its name holds them no more.
        """
        self._world = world
        self._settings = settings
        self._oldest_start = oldest_start
        self._on_expired = on_expired
        self.calls = LockServiceCalls(world.network, addresses)
        """To the service that knows the session: for all that is done in its name."""
        self._questions = LivenessQuestions(
            self.calls, timeout_seconds=settings.liveness_timeout_seconds
        )
        self._id: bytes | None = None
        self._alive_until = 0.0
        self._tried = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False
        self.last_error: PercolatorError | None = None
        """Why the last attempt to open or renew failed; None if it did not."""

    @property
    def session_id(self) -> bytes | None:
        """The living session, if there is one; never waits."""
        now = self._world.clock.monotonic_seconds()
        return self._id if now < self._alive_until else None

    async def current(self) -> bytes | None:
        """The living session. Waits only for the very first attempt to open one."""
        if self._closed:
            raise UsageError("the sessions of this client are closed")
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())
        await self._tried.wait()
        return self.session_id

    def pin(
        self,
        at: int,
        description: str,
        *,
        ttl_seconds: float,
        on_lost: Callable[[bytes], None] = lambda _: None,
    ) -> Sessions:
        """A session that keeps what was readable at a timestamp from being collected.

        It is opened by its own `current`, and lasts until its own `close`, or until it is lost.
        """
        settings = SessionSettings(description=description, ttl_seconds=ttl_seconds, pin_at=at)
        return Sessions(self._world, self.calls.addresses, settings, on_expired=on_lost)

    async def liveness(self, session_ids: Sequence[bytes]) -> list[Liveness]:
        """Which of these sessions live, asked now. No answer means undecided."""
        if self._closed:
            raise UsageError("the sessions of this client are closed")
        return await self._questions.ask(session_ids)

    async def close(self) -> None:
        """Ends the session, if the lock service can be told within one renewal interval."""
        self._closed = True
        self._tried.set()
        await self._questions.close()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        session_id, self._id = self._id, None
        if session_id is None:
            return
        try:
            await self.calls.call(
                lambda stub: stub.end_session,
                wire.EndSessionRequest(session_id=session_id),
                self._settings.renewal_seconds,
            )
        except PercolatorError as error:
            # Not ended is no harm: it expires by itself.
            _log.debug("session %s was left to expire: %s", session_id.hex(), error)

    async def _keep(self) -> None:
        clock = self._world.clock
        while True:
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
                # Released by an operator, or history went on without it: not for us to take back.
                return
            early = self._world.random.uniform(0.0, _JITTER)
            due = started + self._settings.renewal_seconds * (1.0 - early)
            await clock.sleep(max(due - clock.monotonic_seconds(), 0.0))

    async def _open(self) -> None:
        sent = self._world.clock.monotonic_seconds()
        response = await self.calls.call_any(
            lambda stub: stub.open_session,
            wire.OpenSessionRequest(info=self._info()),
            self._settings.renewal_seconds,
        )
        self._id = response.session_id
        self._alive_until = sent + self._settings.ttl_seconds

    async def _renew(self, session_id: bytes) -> None:
        sent = self._world.clock.monotonic_seconds()
        try:
            await self.calls.call_any(
                lambda stub: stub.renew_session,
                wire.RenewSessionRequest(session_id=session_id, info=self._info()),
                self._settings.renewal_seconds,
            )
        except SessionExpired:
            self._id = None
            # In a turn of its own: what the owner does there cannot stop the renewals.
            asyncio.get_running_loop().call_soon(self._on_expired, session_id)
            if not self._settings.pin_at:
                await self._open()
            return
        self._alive_until = sent + self._settings.ttl_seconds

    def _info(self) -> wire.SessionInfo:
        pin_at = self._settings.pin_at
        return wire.SessionInfo(
            description=self._settings.description,
            ttl_milliseconds=round(self._settings.ttl_seconds * 1000),
            oldest_start_timestamp=pin_at or self._oldest(),
            pin=pin_at != 0,
        )

    def _oldest(self) -> int:
        """What is wrong with the owner's answer is reported, and does not end the renewals."""
        try:
            oldest = self._oldest_start()
        except Exception as error:
            raise UsageError(f"oldest_start() failed: {error!r}") from error
        if not 0 <= oldest <= _TIMESTAMP_MAX:
            raise UsageError(f"oldest_start() returned {oldest}, which is not a timestamp")
        return oldest

    def _report(self, error: PercolatorError) -> None:
        """Once per loss, not once per attempt."""
        if self.last_error is None:
            _log.warning("going on without renewing the session: %s", error)
        self.last_error = error
