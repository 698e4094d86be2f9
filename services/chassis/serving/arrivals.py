"""How much memory requests may take, from the moment when one may arrive until it is answered.

gRPC hands over a request when it is complete. Until then its caller decides how long that takes,
and the server holds what has come. So a call asks here before it receives; nothing of its request
is received earlier, apart from the `LOOKAHEAD_BYTES` that every stream may send:
- Until it has arrived, a request counts as the largest one, and afterwards as what it is.
- The requests of one connection have a share. Above it they wait for each other, without loss: flow
  control stops their sender.
- All requests together have a budget. Requests do not wait for those of other connections: a few
  may arrive above the budget if they do so at once, as small ones do. Others are refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque

import grpc

from percolator.errors import InvalidArgument, Overloaded
from percolator.wire.tls import CLUSTER_NAME

LOOKAHEAD_BYTES = 16 * 1024
"""How much of its request a stream may send before a call receives it."""
CONNECTIONS_MIN = 4
"""A connection may use the budget divided by this number."""
HASTY_MAX = 4
"""Requests above the budget that may arrive at a time."""
HASTY_SECONDS = 0.1
"""How long each of them may take."""
_SLACK_BYTES = 1024 * 1024
_RETRY_SECONDS = 0.1
_INT_MAX = 2**31 - 1
_CLUSTER = CLUSTER_NAME.encode()


def received_bytes_max(request_bytes_max: int) -> int:
    """gRPC's own limit of a request's size. It is above the limit that is documented, so that the
    gate refuses what is a little too large, with a typed error; gRPC has none. This one limits
    memory."""
    return min(request_bytes_max + min(request_bytes_max, _SLACK_BYTES), _INT_MAX)


class NoMoreRequests(InvalidArgument):
    """The caller has ended its stream of requests."""


class Arrivals:
    """The memory for requests of one kind of caller. Belongs to one event loop."""

    def __init__(self, request_bytes_max: int, bytes_max: int, seconds: float) -> None:
        """One request fits, however small `bytes_max` is. A request may wait for its turn for so
        many seconds, and may then take as many to arrive."""
        self.largest = received_bytes_max(request_bytes_max)
        self.bytes_max = max(bytes_max, self.largest)
        self.connection_bytes_max = max(bytes_max // CONNECTIONS_MIN, self.largest)
        self.seconds = seconds
        self.connections: dict[str, _Connection] = {}
        self.used = 0
        """Bytes of the budget in use."""
        self.hasty = 0
        """Requests above the budget."""
        self.refused: Counter[str] = Counter(dict.fromkeys(("budget", "late", "streams"), 0))
        """Refused requests, by reason."""

    async def receive(self, context: grpc.aio.ServicerContext) -> Held:
        """The request of a call, which nobody has received yet, in memory until it is released.
        Raises `Overloaded` and `InvalidArgument`."""
        held = Held(self, self._connection(context))
        try:
            await held.turn()
            held.raw = await self._arrived(held, context)
        except BaseException:
            held.release()
            raise
        return held

    def hold(self, raw: bytes) -> Held:
        """A request that has arrived. Raises `Overloaded`."""
        if self.used + len(raw) > self.bytes_max:
            raise self.refusal("budget", "the requests in progress use all memory for requests")
        held = Held(self, None)
        held.raw = raw
        held.count()
        held.resize(len(raw))
        return held

    def refusal(self, reason: str, text: str) -> Overloaded:
        """The error of a request that was not executed; counts it."""
        self.refused[reason] += 1
        return Overloaded(text, retry_after_seconds=_RETRY_SECONDS)

    async def _arrived(self, held: Held, context: grpc.aio.ServicerContext) -> bytes:
        seconds = self.seconds
        if self.used + self.largest <= self.bytes_max:
            held.count()
        elif self.hasty < HASTY_MAX:
            held.hurry()
            seconds = HASTY_SECONDS
        else:
            raise self._no_memory()
        try:
            async with asyncio.timeout(seconds):
                raw: bytes = await context.read()
        except TimeoutError:
            if held.is_hasty:
                raise self._no_memory() from None
            reason = f"the request has not arrived within {seconds:g} s (request_seconds_max)"
            raise self.refusal("late", reason) from None
        if raw is grpc.aio.EOF:
            raise NoMoreRequests("request", "is missing")
        held.resize(len(raw))
        if held.is_hasty and self.used + len(raw) <= self.bytes_max:
            held.count()
        return raw

    def _connection(self, context: grpc.aio.ServicerContext) -> _Connection:
        peer = context.peer()
        connection = self.connections.get(peer)
        if connection is None:
            # A gateway has one connection for all its callers, and has shared out between them.
            is_server = _CLUSTER in (context.peer_identities() or ())
            bytes_max = self.bytes_max if is_server else self.connection_bytes_max
            connection = self.connections[peer] = _Connection(peer, bytes_max)
        return connection

    def _no_memory(self) -> Overloaded:
        return self.refusal(
            "budget", "requests of others use all memory for requests (request_bytes_total_max)"
        )


class _Connection:
    """The requests of one connection, while there are any."""

    __slots__ = ("bytes_max", "calls", "peer", "used", "waiting")

    def __init__(self, peer: str, bytes_max: int) -> None:
        self.peer = peer
        self.bytes_max = bytes_max
        self.calls = 0
        self.used = 0
        self.waiting: deque[Held] = deque()


class Held:
    """A request in memory, or the memory into which it arrives."""

    __slots__ = ("_arrivals", "_bytes", "_connection", "_granted", "_is_counted", "is_hasty", "raw")

    def __init__(self, arrivals: Arrivals, connection: _Connection | None) -> None:
        self.raw = b""
        self.is_hasty = False
        self._arrivals = arrivals
        self._connection = connection
        self._bytes = 0
        self._is_counted = False
        """Whether its bytes are part of the budget in use."""
        self._granted: asyncio.Future[None] | None = None
        if connection is not None:
            connection.calls += 1

    async def turn(self) -> None:
        """Returns when the largest request fits into the connection's share, and reserves it."""
        connection, largest = self._connection, self._arrivals.largest
        if connection is None:
            return
        if not connection.waiting and connection.used + largest <= connection.bytes_max:
            self.resize(largest)
            return
        self._granted = asyncio.get_running_loop().create_future()
        connection.waiting.append(self)
        try:
            async with asyncio.timeout(self._arrivals.seconds):
                await self._granted
        except TimeoutError:
            raise self._arrivals.refusal(
                "budget", "the requests of this connection use its share of the memory"
            ) from None

    def count(self) -> None:
        """From now on its bytes are part of the budget in use."""
        self._settle()
        self._is_counted = True
        self._arrivals.used += self._bytes

    def hurry(self) -> None:
        """It arrives above the budget."""
        self.is_hasty = True
        self._arrivals.hasty += 1

    def _settle(self) -> None:
        if self.is_hasty:
            self.is_hasty = False
            self._arrivals.hasty -= 1

    def resize(self, size: int) -> None:
        """It takes so many bytes now."""
        change, self._bytes = size - self._bytes, size
        if self._is_counted:
            self._arrivals.used += change
        connection = self._connection
        if connection is not None:
            connection.used += change
            largest = self._arrivals.largest
            while connection.waiting and connection.used + largest <= connection.bytes_max:
                connection.waiting.popleft()._grant(largest)

    def _grant(self, size: int) -> None:
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)
            self.resize(size)

    def release(self) -> None:
        """It is answered, or refused."""
        self._settle()
        self.resize(0)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.calls -= 1
            if not connection.calls:
                del self._arrivals.connections[connection.peer]
