"""How many calls are in flight to a store: bounded, fewer when it has enough, and fair.

A call beyond the bound waits for its turn, in the order of arrival. When the store refuses a call,
or is silent for too long, the bound is halved, once for all calls that were sent before that; each
answer raises it a little. While the store asks for a pause, nothing is sent.
"""

from __future__ import annotations

import asyncio
from collections import deque

from percolator.bigtable.channel import LANES_MAX, STREAMS_MAX
from percolator.errors import DeadlineExceeded, Overloaded, PercolatorError

CALLS_MAX = LANES_MAX * STREAMS_MAX
"""The bound when nothing is wrong: as many as all connections carry without waiting."""
_PAUSE_SECONDS_MAX = 30.0
"""A pause that is asked for is kept up to this; longer ones are for the callers to wait."""


class Admission:
    """Lets calls through. Belongs to one event loop."""

    def __init__(self, most: int = CALLS_MAX) -> None:
        self._most = most
        self._bound = float(most)
        self._in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._tickets = self._halved_until = 0
        self._pause: asyncio.TimerHandle | None = None

    @property
    def bound(self) -> int:
        """How many calls may be in flight at present."""
        return int(self._bound)

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def enter_at_once(self) -> int:
        """The ticket of a call that need not wait; 0 if it has to `enter`."""
        if self._pause is not None or self._waiting or self._in_flight >= int(self._bound):
            return 0
        self._in_flight += 1
        self._tickets += 1
        return self._tickets

    async def enter(self, timeout_seconds: float) -> int:
        """The ticket of a call, after it has waited for its turn. Raises `Overloaded` if that takes
        too long: the call was not made."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        try:
            await asyncio.wait([turn], timeout=timeout_seconds)
        except asyncio.CancelledError:
            self._withdraw(turn)
            raise
        if not turn.done():
            self._withdraw(turn)
            raise Overloaded(
                f"Bigtable answers too slowly: {self._in_flight} calls are in flight, and "
                f"{len(self._waiting)} more wait",
                retry_after_seconds=0.0,
            )
        self._tickets += 1
        return self._tickets

    def leave(self, ticket: int, error: PercolatorError | None = None) -> None:
        """Called when a call has ended."""
        self._in_flight -= 1
        if error is None:
            if self._bound < self._most:
                self._bound = min(self._bound + 1.0 / self._bound, float(self._most))
        elif isinstance(error, (Overloaded, DeadlineExceeded)) or error.retry_after_seconds:
            self._slow_down(ticket, error.retry_after_seconds)
        if self._waiting:
            self._admit()

    def _slow_down(self, ticket: int, asked_seconds: float) -> None:
        if ticket > self._halved_until:
            self._halved_until = self._tickets
            self._bound = max(self._bound / 2.0, 1.0)
        if asked_seconds > 0:
            loop = asyncio.get_running_loop()
            until = loop.time() + min(asked_seconds, _PAUSE_SECONDS_MAX)
            if self._pause is None or self._pause.when() < until:
                if self._pause is not None:
                    self._pause.cancel()
                self._pause = loop.call_at(until, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._pause is None and self._in_flight < int(self._bound):
            turn = self._waiting.popleft()
            if not turn.done():
                self._in_flight += 1
                turn.set_result(None)

    def _withdraw(self, turn: asyncio.Future[None]) -> None:
        """Whoever waited does not call any more."""
        if turn.done():  # it was let through in the same moment
            self._in_flight -= 1
            self._admit()
        else:
            self._waiting.remove(turn)
            turn.cancel()
