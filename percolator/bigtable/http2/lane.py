"""The way to one address: a connection at a time, opened when a call needs it.

While there is none, calls wait for the attempt to connect, and fail with it. After an attempt that
failed, further ones wait a little, and calls fail at once until then. A call of which it is certain
that it was not executed is repeated once, on another connection: servers end connections now and
then, and say how far they got.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Final

from percolator.bigtable.http2.call import Call
from percolator.bigtable.http2.connection import Connection
from percolator.bigtable.http2.dialling import NoConnection, dial
from percolator.bigtable.http2.frames import STREAM_MAX
from percolator.bigtable.http2.headers import Metadata, RequestHeads
from percolator.bigtable.http2.messages import prefixed
from percolator.bigtable.http2.status import CallFailed, Code, not_executed
from percolator.wire.backoff import doubled_seconds

PAUSE_SECONDS_MIN: Final = 0.1
PAUSE_SECONDS_MAX: Final = 5.0
"""From an attempt to connect that failed to the next one; twice as long after each."""
_USER_AGENT: Final = "percolator-store"
_CLOSED: Final = "the connection was closed"

Dial = Callable[[str, ssl.SSLContext | None], Awaitable[Connection]]


class HttpLane:
    """Belongs to one event loop."""

    def __init__(self, address: str, tls: ssl.SSLContext | None, dial: Dial = dial) -> None:
        self._address = address
        self._tls = tls
        self._dial = dial
        self._heads = RequestHeads(address, is_secure=tls is not None, user_agent=_USER_AGENT)
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._leaving: set[Connection] = set()
        """Connections that take no further calls, but have some in progress."""
        self._connecting: asyncio.Task[None] | None = None
        self._failures = 0
        self._problem = ""
        self._next_attempt = float("-inf")
        self._is_closed = False
        self.in_flight = 0
        """Calls in progress, as whoever makes them counts."""

    @property
    def calls_max(self) -> int:
        """How many calls the server takes at a time, if that is known."""
        return STREAM_MAX if self._connection is None else self._connection.streams_max

    async def unary(self, path: str, request: bytes, timeout: float, metadata: Metadata) -> bytes:
        """The answer to a call. Raises `CallFailed`."""
        deadline = self._loop.time() + timeout
        body, again = prefixed(request), True
        while True:
            connection = self._connection
            if connection is None or not connection.takes_calls:
                connection = await self._connected(deadline)
            call = self._begun(connection, path, body, deadline, metadata, wants_all=True)
            try:
                return await call.message()
            except CallFailed as failure:
                if not self._may_be_repeated(failure, again=again):
                    raise
            finally:
                connection.leave(call)
            again = False

    async def stream(
        self, path: str, request: bytes, timeout: float, metadata: Metadata
    ) -> AsyncGenerator[bytes, None]:
        """The messages of the answer. Raises `CallFailed`."""
        deadline = self._loop.time() + timeout
        body, again = prefixed(request), True
        while True:
            connection = self._connection
            if connection is None or not connection.takes_calls:
                connection = await self._connected(deadline)
            call = self._begun(connection, path, body, deadline, metadata, wants_all=False)
            try:
                while (message := await call.next()) is not None:
                    yield message
                    connection.taken(call)
            except CallFailed as failure:
                if not self._may_be_repeated(failure, again=again):
                    raise
            else:
                return
            finally:
                connection.leave(call)
            again = False

    async def close(self) -> None:
        """Ends the connections, and calls in progress with them."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._connection is not None:
            self._leaving.add(self._connection)
        await asyncio.gather(*(connection.close() for connection in self._leaving))

    def _may_be_repeated(self, failure: CallFailed, *, again: bool) -> bool:
        return again and failure.not_executed and not self._is_closed

    def _begun(
        self,
        connection: Connection,
        path: str,
        body: bytes,
        deadline: float,
        metadata: Metadata,
        *,
        wants_all: bool,
    ) -> Call:
        """The call on this connection, with the time that it has left."""
        seconds = max(deadline - self._loop.time(), 0.0)
        head = self._heads.head(path, metadata, seconds)
        return connection.begin(head, body, seconds, wants_all=wants_all)

    async def _connected(self, deadline: float) -> Connection:
        """A new connection, or one that another call has waited for. Raises `CallFailed`."""
        if self._is_closed:
            raise CallFailed(Code.UNAVAILABLE, _CLOSED)
        now = self._loop.time()
        connecting = self._connecting
        if connecting is None:
            if now < self._next_attempt:
                raise not_executed(self._problem)
            connecting = self._connecting = self._loop.create_task(self._connect())
        await asyncio.wait([connecting], timeout=max(deadline - now, 0.0))
        if not connecting.done():
            raise CallFailed(Code.DEADLINE_EXCEEDED, "not connected in time", not_executed=True)
        if connecting.cancelled():
            raise CallFailed(Code.UNAVAILABLE, _CLOSED)
        connecting.result()  # raises what is no reason of the network's
        if self._connection is None:
            raise not_executed(self._problem)
        return self._connection

    async def _connect(self) -> None:
        if self._connection is not None:
            self._leaving.add(self._connection)
            self._connection.ended.add_done_callback(partial(self._left, self._connection))
            self._connection = None
        try:
            self._connection = await self._dial(self._address, self._tls)
            self._failures = 0
        except NoConnection as error:
            self._problem = f"there is no connection to {self._address}: {error}"
            pause = doubled_seconds(PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX, doublings=self._failures)
            self._failures += 1
            self._next_attempt = self._loop.time() + pause
        finally:
            self._connecting = None

    def _left(self, connection: Connection, _: asyncio.Future[None]) -> None:
        self._leaving.discard(connection)
