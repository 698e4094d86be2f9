"""The timestamp that a snapshot or a transaction reads at: from its first use to an end."""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop

from percolator.aio.engine import Engine
from percolator.arguments import require_seconds
from percolator.errors import InvalidArgument, PercolatorError, UsageError
from percolator.protocol.surroundings import Statistics
from percolator.timestamps import Timestamp


class Moment:
    """One instant of the store, which holds back history from its first use to its end."""

    _start = 0
    _starting: asyncio.Future[int] | None = None
    """The question for the timestamp, which all who read meanwhile share."""
    _at: Timestamp | None = None
    """Where a snapshot of the past reads."""
    _ended = ""
    """How it ended, or is about to; empty while it is open."""
    _over = False
    """Nothing of it is going on any more, so it must hold back no history."""

    def __init__(self, engine: Engine, timeout_seconds: float | None) -> None:
        self._engine = engine
        self._around = engine.around
        self._timeout_seconds = timeout_seconds or engine.limits.call_seconds
        self.statistics = Statistics()
        """What it has cost so far: round trips, retries, locks waited for and whose."""

    async def timestamp(self) -> Timestamp:
        """The timestamp at which it reads; fetched now, if nothing was read yet."""
        return Timestamp(self._start or await self._begin(self._deadline(None)))

    async def _begin(self, deadline: float) -> int:
        """Never before the first use: what was committed until then is to be seen."""
        if self._at is not None:
            return await self._begin_in_the_past(self._at, deadline)
        while True:
            starting = self._starting
            if starting is None:
                self.statistics.round_trips += 1
                left = max(deadline - self._engine.now(), 0.001)
                starting = self._engine.timestamps.get(timeout_seconds=left)
                self._starting = starting
            try:
                start = await starting
            except asyncio.CancelledError:
                self._starting = None
                task = asyncio.current_task()
                if task is None or task.cancelling() or not starting.cancelled():
                    raise
                continue  # it was another reader of this transaction that gave up, not this one
            except PercolatorError:
                self._starting = None
                raise
            if not self._start:
                self._set_start(start)
            return self._start

    async def _begin_in_the_past(self, at: Timestamp, deadline: float) -> int:
        self.statistics.round_trips += 1
        left = max(deadline - self._engine.now(), 0.001)
        now = await self._around.timestamps.get(timeout_seconds=left)
        if at > now:
            # What is committed below it later would appear in a snapshot that was read already.
            raise InvalidArgument(
                "at", f"{at} lies in the future: the oracle is at {Timestamp(now).describe()}"
            )
        self._set_start(at)
        return at

    def _set_start(self, start: int) -> None:
        if self._over:  # since the timestamp was asked for: nobody would take it out again
            self.require_not_ended()
        self._start = start
        self._starting = None
        self._engine.open_starts.add(self, start)

    # ------------------------------------------------------------------ checks

    def _deadline(self, timeout: float | None) -> float:
        """Of a call that begins now. Also the place where every call is checked."""
        if self._ended or self._engine.closed or get_running_loop() is not self._engine.loop:
            self._require_open()  # says what is wrong
        if timeout is None:
            return self._engine.now() + self._timeout_seconds
        require_seconds(timeout)
        return self._engine.now() + timeout

    def _require_open(self) -> None:
        if self._ended or self._engine.closed or get_running_loop() is not self._engine.loop:
            self._engine.require_usable()
            self.require_not_ended()

    @property
    def ended(self) -> bool:
        """Whether its end was reached, or begun."""
        return bool(self._ended)

    def require_not_ended(self) -> None:
        """Raises `UsageError` after the end, its own or the database's. In any thread."""
        if self._engine.closed:
            raise UsageError("the database is closed")
        if self._ended:
            raise UsageError(f"it is {self._ended}: begin another one")
