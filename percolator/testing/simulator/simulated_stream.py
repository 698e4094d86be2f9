"""One call whose response is streamed: pages that arrive in order, or not at all.

As on a real connection, there are no gaps: after a lost message nothing more arrives, and the
caller waits for its time-out. A slow reader holds the handler back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing

from percolator.errors import PercolatorError
from percolator.testing.simulator.network_faults import Fault
from percolator.testing.simulator.simulated_call import (
    CallInFlight,
    CallingProcess,
    decoded_error,
    encoded_error,
)
from percolator.testing.simulator.simulated_wire import Handler, Listener
from percolator.world import RequestT, ResponseT, StreamMethod

STREAM_WINDOW_MESSAGES = 16
"""How many messages of a stream may be in flight or unread before its server waits."""


class StreamInFlight(CallInFlight[RequestT, ResponseT]):
    """One request, any number of responses, which arrive in order or not at all."""

    def __init__(
        self,
        caller: CallingProcess,
        method: StreamMethod[RequestT, ResponseT],
        target: str,
        request: bytes,
        timeout_seconds: float,
    ) -> None:
        self._received: deque[bytes] = deque()
        self._end: PercolatorError | None = None
        self._ended = False
        self._caller: asyncio.Future[None] | None = None
        self._server: asyncio.Future[None] | None = None
        self._sent = self._expected = self._consumed = 0
        self._last_arrival = 0.0
        super().__init__(caller, method, target, request, timeout_seconds)

    async def next(self) -> bytes | None:
        """The next response, serialised, or None at the end."""
        while not self._received:
            if self._end is not None:
                raise self._end
            if self._ended:
                return None
            self._caller = self._wire.loop.create_future()
            await self._caller
        self._consumed += 1
        _wake(self._server)
        return self._received.popleft()

    def _fail(self, error: PercolatorError) -> None:
        self._end = error
        _wake(self._caller)

    def _take(self, number: int, payload: bytes | None, error: bytes | None) -> None:
        # After a lost message the connection is stuck: nothing may arrive past a gap.
        if self.is_over or number != self._expected:
            return
        self._expected += 1
        if payload is not None:
            self._received.append(payload)
        else:
            self._finish()
            self._ended = True
            if error is not None:
                self._end = decoded_error(error)
        _wake(self._caller)

    async def _answer(self, handler: Handler, listener: Listener) -> None:
        request = self._method.request.FromString(self._request)
        # Close it at once when the caller is gone, not whenever it is garbage-collected.
        async with aclosing(handler(request)) as messages:
            async for message in messages:
                while self._sent - self._consumed >= STREAM_WINDOW_MESSAGES:
                    self._server = self._wire.loop.create_future()
                    await self._server
                self._push(listener, message.SerializeToString(), None)
        self._push(listener, None, None)

    def _answer_error(self, error: PercolatorError, listener: Listener) -> None:
        self._push(listener, None, encoded_error(error))

    def _push(self, listener: Listener, payload: bytes | None, error: bytes | None) -> None:
        if not listener.life.alive:
            return
        wire, back = self._wire, self._back
        number = self._sent
        self._sent += 1
        fate = wire.fate(back, self._method.path, payload or error or b"", is_reply=True)
        if fate in (None, Fault.SLOW):
            self._last_arrival = wire.carry(
                back,
                self._take,
                number,
                payload,
                error,
                late=fate is Fault.SLOW,
                not_before=self._last_arrival,
            )
        elif fate is not Fault.REPLY_DROPPED:
            self._break_soon()


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
