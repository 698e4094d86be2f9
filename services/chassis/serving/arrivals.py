"""How much memory requests may take, from the moment when one may arrive until it is answered.

gRPC hands over a request when it is complete. Until then its caller decides how long that takes,
and the server holds what has come. So a call asks here before it receives; nothing of its request
is received earlier, apart from the `LOOKAHEAD_BYTES` that every stream may send:
- Until it has arrived, a request counts as the largest one, and afterwards as what it is.
- The requests of one connection have a share, and so do those of one client, whose connections may
  be many. Above it they wait for each other, without loss: flow control stops their sender.
- All requests together have a budget. Above it, a few may arrive at a time if they do so at once,
  as small ones do; one that does not is refused. Others wait: no client can make them wait alone,
  because its share is half.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict

import grpc

from percolator.errors import InvalidArgument, Overloaded
from percolator.services.chassis.serving.quotas import CallerIdentity
from percolator.wire.tls import CLUSTER_NAME

LOOKAHEAD_BYTES = 16 * 1024
"""How much of its request a stream may send before a call receives it."""
CONNECTIONS_MIN = 4
"""A connection may use the budget divided by this number."""
CLIENTS_MIN = 2
"""A client may use the budget divided by this number."""
HASTY_MAX = 4
"""Requests above the budget that may arrive at a time, and how many of the largest ones may be in
memory above it when they have arrived."""
HASTY_SECONDS = 0.1
"""How long each of them may take."""
_SLACK_BYTES = 1024 * 1024
_RETRY_SECONDS = 0.1
_INT_MAX = 2**31 - 1
_CLUSTER = CLUSTER_NAME.encode()
_ALL = "all callers"


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
        self.client_bytes_max = max(bytes_max // CLIENTS_MIN, self.largest)
        self.seconds = seconds
        self.shares: dict[object, _Share] = {}
        """By connection, and by client."""
        self.used = 0
        """Bytes of the budget in use."""
        self.hasty = 0
        """Requests that arrive above the budget, or are too large to be counted in it."""
        self.waiting: OrderedDict[Held, None] = OrderedDict()
        """Requests that wait for the budget, the oldest first."""
        self.refused: Counter[str] = Counter(dict.fromkeys(("budget", "late", "streams"), 0))
        """Refused requests, by reason."""

    async def receive(
        self, context: grpc.aio.ServicerContext, caller: CallerIdentity | None = None
    ) -> Held:
        """The request of a call, which nobody has received yet, in memory until it is released.
        Raises `Overloaded` and `InvalidArgument`."""
        held = Held(self, self._shares(context, caller))
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
        held = Held(self, [])
        held.raw = raw
        held.count()
        held.resize(len(raw))
        return held

    def refusal(self, reason: str, text: str) -> Overloaded:
        """The error of a request that was not executed; counts it."""
        self.refused[reason] += 1
        return Overloaded(text, retry_after_seconds=_RETRY_SECONDS)

    def admit(self, held: Held) -> bool:
        """Lets the request arrive, within the budget or above it, if it may now."""
        if self.used + self.largest <= self.bytes_max:
            held.count()
        elif self.hasty < HASTY_MAX:
            held.hurry()
        else:
            return False
        return True

    def admit_waiting(self) -> None:
        """To be called when there may be memory for more."""
        while self.waiting and self.admit(next(iter(self.waiting))):
            self.waiting.popitem(last=False)[0].grant()

    async def _arrived(self, held: Held, context: grpc.aio.ServicerContext) -> bytes:
        seconds = HASTY_SECONDS if held.is_hasty else self.seconds
        try:
            async with asyncio.timeout(seconds):
                raw: bytes = await context.read()
        except TimeoutError:
            if held.is_hasty:
                raise self.no_memory(_ALL) from None
            reason = f"the request has not arrived within {seconds:g} s (request_seconds_max)"
            raise self.refusal("late", reason) from None
        if raw is grpc.aio.EOF:
            raise NoMoreRequests("request", "is missing")
        held.resize(len(raw))
        # Otherwise a few long calls would keep all others from arriving.
        above = self.bytes_max + HASTY_MAX * self.largest
        if held.is_hasty and self.used + len(raw) <= above:
            held.count()
        return raw

    def _shares(
        self, context: grpc.aio.ServicerContext, caller: CallerIdentity | None
    ) -> list[_Share]:
        shares = []
        # A gateway has one connection for all its callers: they must not wait for each other.
        if _CLUSTER not in (context.peer_identities() or ()):
            peer = context.peer()
            shares.append(self._share(peer, "this connection", self.connection_bytes_max))
        if caller is not None and caller.client is not None:
            shares.append(self._share(caller.client, "this client", self.client_bytes_max))
        return shares

    def _share(self, owner: object, described: str, bytes_max: int) -> _Share:
        share = self.shares.get(owner)
        if share is None:
            share = self.shares[owner] = _Share(owner, described, bytes_max)
        return share

    def no_memory(self, whose: str) -> Overloaded:
        return self.refusal(
            "budget", f"the requests of {whose} use all memory for them (request_bytes_total_max)"
        )


class _Share:
    """The requests of one connection or client, while there are any."""

    __slots__ = ("bytes_max", "calls", "described", "owner", "used", "waiting")

    def __init__(self, owner: object, described: str, bytes_max: int) -> None:
        self.owner = owner
        self.described = described
        self.bytes_max = bytes_max
        self.calls = 0
        self.used = 0
        self.waiting: OrderedDict[Held, None] = OrderedDict()


class Held:
    """A request in memory, or the memory into which it arrives."""

    __slots__ = (
        "_arrivals",
        "_bytes",
        "_granted",
        "_is_counted",
        "_reserved",
        "_shares",
        "_wait_until",
        "is_hasty",
        "raw",
    )

    def __init__(self, arrivals: Arrivals, shares: list[_Share]) -> None:
        self.raw = b""
        self.is_hasty = False
        self._arrivals = arrivals
        self._shares = shares
        self._reserved = 0
        """In how many of the shares its bytes are counted."""
        self._bytes = 0
        self._is_counted = False
        """True while its bytes are part of the budget in use."""
        self._granted: asyncio.Future[None] | None = None
        self._wait_until: float | None = None
        for share in shares:
            share.calls += 1

    async def turn(self) -> None:
        """Returns when the largest request fits, and reserves it: in the share of the connection,
        then in that of the client, then in the budget. Raises `Overloaded`."""
        arrivals = self._arrivals
        self._bytes = arrivals.largest
        for share in self._shares:
            if share.waiting or share.used + arrivals.largest > share.bytes_max:
                await self._wait_in(share.waiting, share.described)
            else:
                self.reserve()
        if arrivals.waiting or not arrivals.admit(self):
            await self._wait_in(arrivals.waiting, _ALL)

    async def _wait_in(self, queue: OrderedDict[Held, None], whose: str) -> None:
        loop = asyncio.get_running_loop()
        self._granted = loop.create_future()
        if self._wait_until is None:
            self._wait_until = loop.time() + self._arrivals.seconds
        queue[self] = None
        try:
            async with asyncio.timeout_at(self._wait_until):
                await self._granted
        except TimeoutError:
            raise self._arrivals.no_memory(whose) from None
        finally:
            queue.pop(self, None)

    def grant(self) -> None:
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    def reserve(self) -> None:
        """From now on its bytes are part of the next share."""
        self._shares[self._reserved].used += self._bytes
        self._reserved += 1

    def count(self) -> None:
        """From now on its bytes are part of the budget in use."""
        self._is_counted = True
        self._arrivals.used += self._bytes
        self._settle()

    def hurry(self) -> None:
        """It arrives above the budget."""
        self.is_hasty = True
        self._arrivals.hasty += 1

    def _settle(self) -> None:
        if self.is_hasty:
            self.is_hasty = False
            self._arrivals.hasty -= 1
            self._arrivals.admit_waiting()

    def resize(self, size: int) -> None:
        """It takes so many bytes now."""
        change, self._bytes = size - self._bytes, size
        for share in self._shares[: self._reserved]:
            share.used += change
            while share.waiting and share.used + self._arrivals.largest <= share.bytes_max:
                waiting, _ = share.waiting.popitem(last=False)
                waiting.reserve()
                waiting.grant()
        if self._is_counted:
            self._arrivals.used += change
            self._arrivals.admit_waiting()

    def release(self) -> None:
        """It is answered, or refused."""
        self._settle()
        self.resize(0)
        shares, self._shares, self._reserved = self._shares, [], 0
        for share in shares:
            share.calls -= 1
            if not share.calls:
                del self._arrivals.shares[share.owner]
