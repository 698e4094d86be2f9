"""The edge of a server: handlers on one side, bytes on the other, by gRPC or in frames.

RpcEdge             the services that are exposed, and their calls
Gate, Quotas        whether a call may begin, and how many at once
Arrivals, Held      the memory that requests take, from before they arrive
MethodMetrics       the figures of one method
Forwarder           calls that are meant for other servers

A handler is an object with one method per RPC, in snake_case. It knows messages and
`PercolatorError`s, but not gRPC, so that a simulation can call the very same object. This module
counts and times a call, checks it against the limits, decodes it, and maps its error. Read
`_Call.unary`, at the end, first.

A method may be cancelled at any `await`, when its caller gives up: work that must not be torn
belongs in a separate task of the service.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc
import structlog
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from percolator.errors import (
    ExecutionUnknown,
    InvalidArgument,
    InvariantViolation,
    NotReady,
    Overloaded,
    PercolatorError,
    PermissionDenied,
    Unauthenticated,
)
from percolator.services.chassis.access import (
    CLUSTER_IDENTITY,
    OWN,
    Access,
    CallerIdentity,
    Check,
    by_address,
)
from percolator.services.chassis.audit import Audit
from percolator.services.chassis.settings import CLIENT_QUOTA_PERCENT, CLIENTS_QUOTA_PERCENT
from percolator.wire.channels import cancelled_by_caller
from percolator.wire.methods import method_name
from percolator.wire.roles import REQUIRED, Role
from percolator.wire.status import failure, status_code
from percolator.world import Clock

# Figures of calls. Counting one costs a few additions to plain integers, on the event loop's
# thread; they are converted to what Prometheus expects when it asks.

BUCKETS_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds of the latency histograms."""


class MethodMetrics:
    """The figures of one method. Only the event loop changes them; any thread may read them."""

    __slots__ = ("buckets", "by_code", "in_flight", "method", "seconds", "service")

    def __init__(self, service: str, method: str) -> None:
        self.service = service
        self.method = method
        self.in_flight = 0
        # INTERNAL from the start: a counter that appears with its first event has not increased.
        self.by_code: dict[str, int] = {"OK": 0, "INTERNAL": 0}
        self.seconds = 0.0
        self.buckets = [0] * (len(BUCKETS_SECONDS) + 1)

    def finished(self, code: str, seconds: float) -> None:
        """Counts the end of a call that was counted in `in_flight`."""
        self.in_flight -= 1
        self.by_code[code] = self.by_code.get(code, 0) + 1
        self.seconds += seconds
        self.buckets[bisect_left(BUCKETS_SECONDS, seconds)] += 1


class RpcMetrics(Collector):
    """The figures of all methods."""

    def __init__(self) -> None:
        self._methods: list[MethodMetrics] = []

    def method(self, service: str, method: str) -> MethodMetrics:
        metrics = MethodMetrics(service, method)
        self._methods.append(metrics)
        return metrics

    def collect(self) -> Iterator[Metric]:
        labels = ["service", "method"]
        finished = CounterMetricFamily(
            "percolator_rpc_finished", "Calls answered, by status code.", labels=[*labels, "code"]
        )
        in_flight = GaugeMetricFamily(
            "percolator_rpc_in_flight", "Calls in progress.", labels=labels
        )
        seconds = HistogramMetricFamily(
            "percolator_rpc_seconds", "Time from a call to its answer.", labels=labels
        )
        for of in self._methods:
            names = [of.service, of.method]
            for code, count in tuple(of.by_code.items()):
                finished.add_metric([*names, code], count)
            in_flight.add_metric(names, of.in_flight)
            seconds.add_metric(names, _cumulative(of.buckets), sum_value=of.seconds)
        yield from (finished, in_flight, seconds)


def _cumulative(buckets: list[int]) -> list[tuple[str, float]]:
    bounds = [*map(str, BUCKETS_SECONDS), "+Inf"]
    total = 0
    found: list[tuple[str, float]] = []
    for bound, count in zip(bounds, tuple(buckets), strict=True):
        total += count
        found.append((bound, total))
    return found


# Limits of calls: quotas say how much one caller may use, arrivals how much memory requests may
# take, and the gate how many calls run.


class Quota:
    """One limit of a server, and how much of it each client uses, so that none can exhaust it.

    Belongs to the event loop.

    A client is a token at an address (docs/decisions.md, 75):
    - One client may use `client_quota_percent` of each limit.
    - All clients together may use `clients_quota_percent`. Half of the rest is for administrators
      and servers, the other half for servers alone.
    """

    def __init__(
        self,
        what: str,
        setting: str,
        limit: int,
        *,
        client_percent: int = CLIENT_QUOTA_PERCENT,
        clients_percent: int = CLIENTS_QUOTA_PERCENT,
        retry_after_seconds: float = 1.0,
    ) -> None:
        """`what` is limited by a setting: "sessions" by "sessions_max"."""
        self.what = what
        self.used = 0
        self.used_by_clients = 0
        self.refused = {"client": 0, "clients": 0, "all": 0}
        """By the limit that was reached: that of one client, of all clients, or of all callers."""
        self._setting = setting
        self._limit = limit
        self._client_percent = client_percent
        self._clients_percent = clients_percent
        self._client_max = max(1, limit * client_percent // 100)
        self._clients_max = max(1, limit * clients_percent // 100)
        self._admins_max = limit - (limit - self._clients_max) // 2
        self._retry_after_seconds = retry_after_seconds
        self._by_client: dict[tuple[bytes, str], int] = {}

    @property
    def most_used(self) -> int:
        """How much the client uses that uses the most."""
        return max(tuple(self._by_client.values()), default=0)

    def reached(self, caller: CallerIdentity, amount: int = 1) -> str:
        """The limit that is in the way of so much more; empty if none is."""
        total = self.used + amount
        if caller.client is not None:
            if self._by_client.get(caller.client, 0) + amount > self._client_max:
                return "client"
            if self.used_by_clients + amount > self._clients_max:
                return "clients"
        elif caller.role == Role.ADMIN and total > self._admins_max:
            return "all"
        return "all" if total > self._limit else ""

    def take(self, caller: CallerIdentity, amount: int = 1) -> None:
        """Counts so much more for the caller, until it is given back. Raises `Overloaded`."""
        if limit := self.reached(caller, amount):
            self.refused[limit] += 1
            raise Overloaded(self._explained(limit), retry_after_seconds=self._retry_after_seconds)
        self.used += amount
        client = caller.client
        if client is not None and amount:
            self.used_by_clients += amount
            self._by_client[client] = self._by_client.get(client, 0) + amount

    def give_back(self, caller: CallerIdentity, amount: int = 1) -> None:
        self.used -= amount
        client = caller.client
        if client is not None and amount:
            self.used_by_clients -= amount
            left = self._by_client[client] - amount
            if left:
                self._by_client[client] = left
            else:
                del self._by_client[client]

    def _explained(self, limit: str) -> str:
        whole = f"{self._setting}, {self._limit}"
        if limit == "client":
            return (
                f"this client may have {self._client_max} {self.what} here at once: "
                f"{self._client_percent}% (client_quota_percent) of {whole}; programs with the "
                "same token at the same address count as one client"
            )
        if limit == "clients":
            return (
                f"all clients together may have {self._clients_max} {self.what} here at once: "
                f"{self._clients_percent}% (clients_quota_percent) of {whole}; the rest is for "
                "administrators and servers"
            )
        return f"{self.used} {self.what} are in use here, and the limit is {whole}"


class Quotas(Collector):
    """All quotas of one process, and their metrics."""

    def __init__(
        self,
        client_percent: int = CLIENT_QUOTA_PERCENT,
        clients_percent: int = CLIENTS_QUOTA_PERCENT,
    ) -> None:
        self._client_percent = client_percent
        self._clients_percent = clients_percent
        self._all: list[Quota] = []

    def of(self, what: str, setting: str, limit: int, *, retry_after_seconds: float = 1.0) -> Quota:
        """The quota of one more limit."""
        quota = Quota(
            what,
            setting,
            limit,
            client_percent=self._client_percent,
            clients_percent=self._clients_percent,
            retry_after_seconds=retry_after_seconds,
        )
        self._all.append(quota)
        return quota

    def collect(self) -> Iterator[Metric]:
        used = GaugeMetricFamily(
            "percolator_quota_used",
            "What callers use: all of them, all clients, or the client that uses the most.",
            labels=["what", "by"],
        )
        refused = CounterMetricFamily(
            "percolator_quota_refused",
            "Calls refused, by the limit that was reached: that of one client, of all clients, or "
            "of all callers.",
            labels=["what", "limit"],
        )
        for one in self._all:
            used.add_metric([one.what, "all"], one.used)
            used.add_metric([one.what, "clients"], one.used_by_clients)
            used.add_metric([one.what, "client"], one.most_used)
            for limit, count in one.refused.items():
                refused.add_metric([one.what, limit], count)
        yield from (used, refused)


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
_MEMORY_RETRY_SECONDS = 0.1
_INT_MAX = 2**31 - 1
_ALL = "all callers"


def received_bytes_max(request_bytes_max: int) -> int:
    """gRPC's own limit of a request's size. It is above the limit that is documented, so that the
    gate refuses what is a little too large, with a typed error; gRPC has none. This one limits
    memory."""
    return min(request_bytes_max + min(request_bytes_max, _SLACK_BYTES), _INT_MAX)


class NoMoreRequests(InvalidArgument):
    """The caller has ended its stream of requests."""


class Arrivals:
    """The memory that requests of one kind of caller may take, from before they arrive until they
    are answered. Belongs to one event loop.

    gRPC hands over a request when it is complete. Until then its caller decides how long that
    takes, and the server holds what has come. So a call asks here before it receives; nothing of
    its request is received earlier, apart from the `LOOKAHEAD_BYTES` that every stream may send:
    - Until it has arrived, a request counts as the largest one, and afterwards as what it is.
    - The requests of one connection have a share, and so do those of one client, whose connections
      may be many. Above it they wait for each other, without loss: flow control stops their sender.
    - All requests together have a budget. Above it, a few may arrive at a time if they do so at
      once, as small ones do; one that does not is refused. Others wait: no client can make them
      wait alone, because its share is half.
    """

    def __init__(self, request_bytes_max: int, bytes_max: int, seconds: float) -> None:
        """One request fits, however small `bytes_max` is. A request may wait for memory for so
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
            await held.wait_for_memory()
            held.raw = await self._arrived(held, context)
        except BaseException:
            held.release()
            raise
        return held

    def hold(self, raw: bytes) -> Held:
        """A request that has arrived. Raises `Overloaded`."""
        if self.used + len(raw) > self.bytes_max:
            raise self.refusal("budget", "the requests in progress use all memory for requests")
        held = Held(self, [], raw)
        held.count()
        return held

    def refusal(self, reason: str, text: str) -> Overloaded:
        """The error of a request that was not executed; counts it."""
        self.refused[reason] += 1
        return Overloaded(text, retry_after_seconds=_MEMORY_RETRY_SECONDS)

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
        """Lets waiting requests arrive. Call it when there may be memory for more."""
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
        if CLUSTER_IDENTITY not in (context.peer_identities() or ()):
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

    def __init__(self, arrivals: Arrivals, shares: list[_Share], raw: bytes = b"") -> None:
        self.raw = raw
        self.is_hasty = False
        self._arrivals = arrivals
        self._shares = shares
        self._reserved = 0
        """The number of shares in which its bytes are counted."""
        self._bytes = len(raw)
        self._is_counted = False
        """True while its bytes are part of the budget in use."""
        self._granted: asyncio.Future[None] | None = None
        self._wait_until: float | None = None
        for share in shares:
            share.calls += 1

    async def wait_for_memory(self) -> None:
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
        """Counts the bytes of the request in the next share."""
        self._shares[self._reserved].used += self._bytes
        self._reserved += 1

    def count(self) -> None:
        """Counts the bytes of the request in the budget."""
        self._is_counted = True
        self._arrivals.used += self._bytes
        self._settle()

    def hurry(self) -> None:
        """Lets the request arrive although the budget is used up."""
        self.is_hasty = True
        self._arrivals.hasty += 1

    def _settle(self) -> None:
        if self.is_hasty:
            self.is_hasty = False
            self._arrivals.hasty -= 1
            self._arrivals.admit_waiting()

    def resize(self, size: int) -> None:
        """Sets the size of the request, and lets others use the memory that this frees."""
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
        """Gives the memory of the request back: it was answered, or refused."""
        self._settle()
        self.resize(0)
        shares, self._shares, self._reserved = self._shares, [], 0
        for share in shares:
            share.calls -= 1
            if not share.calls:
                del self._arrivals.shares[share.owner]


STREAMS_MAX = 10_000
REQUEST_BYTES_TOTAL_MAX = 256 << 20
REQUEST_SECONDS_MAX = 60.0
FRAME_BYTES_MAX = 64 * 1024
"""The largest request in a frame. The library sends larger ones than 8 KiB over gRPC."""
_OPEN_SECONDS_MAX = 10.0
_OPEN_REQUESTS = 4
_CALLS_RETRY_SECONDS = 0.1
_STREAMS_RETRY_SECONDS = 1.0
"""Longer: a stream may last for as long as its caller wants."""


class Gate:
    """Admits calls: whether this server answers at all, the limits of concurrent
    calls and streams, and the memory that its request takes.

    Streams have a limit of their own, because an idle one may last for days: it must not take the
    place of a short call. Belongs to the event loop. `idle` is set while no admitted call is in
    progress.
    """

    def __init__(
        self,
        concurrency_max: int,
        request_bytes_max: int,
        request_bytes_total_max: int = REQUEST_BYTES_TOTAL_MAX,
        request_seconds_max: float = REQUEST_SECONDS_MAX,
        streams_max: int = STREAMS_MAX,
        quotas: Quotas | None = None,
    ) -> None:
        quotas = quotas or Quotas()
        self._calls = quotas.of(
            "calls", "concurrency_max", concurrency_max, retry_after_seconds=_CALLS_RETRY_SECONDS
        )
        self._streams = quotas.of(
            "streams", "streams_max", streams_max, retry_after_seconds=_STREAMS_RETRY_SECONDS
        )

        def arrivals(bytes_max: int, seconds: float = request_seconds_max) -> Arrivals:
            return Arrivals(request_bytes_max, bytes_max, seconds)

        self._usual = arrivals(request_bytes_total_max)
        self._trusted = arrivals(request_bytes_total_max)
        """For administrators and servers, which get through whatever clients do."""
        self.open = arrivals(
            _OPEN_REQUESTS * received_bytes_max(request_bytes_max),
            min(_OPEN_SECONDS_MAX, request_seconds_max),
        )
        """For requests that need no token, of health and reflection: one at a time of a connection,
        and half of them of a machine."""
        self.framed = arrivals(request_bytes_total_max // 4)
        """For what is complete, and small: what arrives slowly over gRPC does not stop it."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._request_bytes_max = request_bytes_max
        self._refusal: PercolatorError | None = None
        self._closed = False

    def refuse(self, error: PercolatorError | None) -> None:
        """From now on every new call gets this error; None admits calls again."""
        if not self._closed:
            self._refusal = error

    def close(self, error: PercolatorError) -> None:
        """Refuses every new call for good."""
        self.refuse(error)
        self._closed = True

    @property
    def in_flight(self) -> int:
        """Calls and streams in progress."""
        return self._calls.used + self._streams.used

    def require_open(self) -> None:
        """Raises the error that every new call gets, if there is one."""
        if self._refusal is not None:
            # A copy for each call: raising an error adds to the traceback that it keeps.
            raise copy(self._refusal)

    def enter(self, caller: CallerIdentity, *, is_stream: bool = False) -> None:
        """Admits a call, or raises. A call that was admitted must `leave`."""
        (self._streams if is_stream else self._calls).take(caller)
        self.idle.clear()

    @property
    def arrivals(self) -> tuple[Arrivals, ...]:
        """All kinds, for the metrics."""
        return self._usual, self._trusted, self.open, self.framed

    async def receive(self, context: grpc.aio.ServicerContext, caller: CallerIdentity) -> Held:
        """The request of an admitted call over gRPC. To be released when it is answered."""
        # Not by the role: where no token proves it, clients have the role of administrators.
        arrivals = self._trusted if caller.client is None else self._usual
        held = await arrivals.receive(context, caller)
        try:
            self._require_size(held.raw)
        except BaseException:
            held.release()
            raise
        return held

    def hold(self, raw: bytes) -> Held:
        """The request of an admitted call in a frame. To be released when it is answered."""
        self._require_size(raw)
        return self.framed.hold(raw)

    def _require_size(self, raw: bytes) -> None:
        """Refuses a request above the limit. gRPC would do so too, but without any detail."""
        if len(raw) > self._request_bytes_max:
            raise InvalidArgument(
                "request",
                f"has {len(raw)} bytes, at most {self._request_bytes_max} are accepted "
                "(request_bytes_max); send less in one call",
            )

    def leave(self, caller: CallerIdentity, *, is_stream: bool = False) -> None:
        (self._streams if is_stream else self._calls).give_back(caller)
        if self.in_flight == 0:
            self.idle.set()


_STARTING_RETRY_SECONDS = 0.25
_CHECKED_AGAIN_SECONDS = 1.0
"""How old the check of a stream's caller may be when an answer is sent."""
_OWN_PACKAGE = "/percolator."

Unary = Callable[[bytes, Any], Awaitable[bytes]]
"""Answers a request with a response. Takes a `grpc.aio.ServicerContext`, or what stands for it."""

Unreceived = AsyncIterator[bytes]
"""The request of a call over gRPC, whose message nobody has received yet. gRPC has it so only for
methods that stream their requests: of others it receives the message, however large, before it
asks anybody. To callers both look alike."""

_remaining: ContextVar[Callable[[], float | None] | None] = ContextVar("remaining", default=None)

_caller: ContextVar[CallerIdentity] = ContextVar("caller", default=OWN)

_log = structlog.get_logger("percolator.rpc")


def remaining_seconds() -> float | None:
    """How long the caller of the current RPC will still wait; None if it set no deadline."""
    remaining = _remaining.get()
    return None if remaining is None else remaining()


def caller_role() -> Role:
    """The role of the caller of the current RPC. Without TLS, callers have no names, and may do
    everything that an operator may."""
    return _caller.get().role


def caller_identity() -> CallerIdentity:
    """The caller of the current RPC."""
    return _caller.get()


@dataclass(frozen=True)
class Exposed:
    """A service of the wire API, and the object that answers it.

    `descriptor` is, for example, `oracle_pb2.DESCRIPTOR.services_by_name["OracleService"]`. A unary
    method is `async def get_timestamps(self, request) -> response`; a method that streams its
    response is an asynchronous generator.
    """

    descriptor: ServiceDescriptor
    handler: object

    def __post_init__(self) -> None:
        for method in self.descriptor.methods:
            if not callable(getattr(self.handler, method_name(method.name), None)):
                raise InvariantViolation(
                    f"{type(self.handler).__name__} has no {method_name(method.name)}(), "
                    f"which {self.descriptor.full_name} needs"
                )


class Forwarder(Protocol):
    """Forwards calls that are meant for other servers, without decoding them."""

    @property
    def services(self) -> Sequence[str]:
        """Full names of the services for which it answers, in addition to those of this process."""

    def handler(
        self, details: grpc.HandlerCallDetails, gate: Gate, check: Check
    ) -> grpc.RpcMethodHandler | None:
        """None for a call that is meant for this process.

        The handler that it returns subjects the call to the gate and the check.
        """


class RpcEdge(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Answers the calls to the exposed services; before they are, tells callers to come back."""

    def __init__(
        self,
        gate: Gate,
        metrics: RpcMetrics,
        clock: Clock,
        access: Access | None = None,
        audit: Audit | None = None,
    ) -> None:
        self._gate = gate
        self._audit = audit
        self._access = access
        self._metrics = metrics
        self._clock = clock
        self._methods: dict[str, grpc.RpcMethodHandler] = {}
        self.unary: dict[str, Unary] = {}
        """The exposed methods by path, for calls that do not come by gRPC and have one response: of
        a stream, the first."""
        self._forwarder: Forwarder | None = None
        self._starting: grpc.RpcMethodHandler | None = grpc.stream_unary_rpc_method_handler(
            _refuse_starting
        )

    def expose(self, services: list[Exposed], forwarder: Forwarder | None = None) -> None:
        """From now on these services are answered; other methods do not exist, except those of the
        forwarder. Call it once.
        """
        self._forwarder = forwarder
        for exposed in services:
            for method in exposed.descriptor.methods:
                path = f"/{exposed.descriptor.full_name}/{method.name}"
                self._methods[path] = self._handler(exposed, method, path)
        self._starting = None

    def mount(self, path: str, handler: grpc.RpcMethodHandler) -> None:
        """Adds a method that does not belong to the service: it is not counted and not limited."""
        self._methods[path] = handler

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Called by gRPC for every call."""
        path: str = details.method
        if self._forwarder is not None:
            passed_on = self._forwarder.handler(details, self._gate, self._check_of(path))
            if passed_on is not None:
                return passed_on
        handler = self._methods.get(path)
        if handler is None and path.startswith(_OWN_PACKAGE):
            return self._starting
        return handler

    def _check_of(self, path: str) -> Check:
        return by_address if self._access is None else self._access.check_of(path)

    def _handler(
        self, exposed: Exposed, method: MethodDescriptor, path: str
    ) -> grpc.RpcMethodHandler:
        if method.client_streaming:
            raise InvariantViolation(f"{path} streams its requests, which nothing needs")
        call = _Call(
            path=path,
            parse=GetMessageClass(method.input_type).FromString,
            handle=getattr(exposed.handler, method_name(method.name)),
            gate=self._gate,
            check=self._check_of(path),
            metrics=self._metrics.method(exposed.descriptor.full_name, method.name),
            now=self._clock.monotonic_seconds,
            audit=self._audit,
            is_administrative=REQUIRED.get(path) is Role.ADMIN,
        )
        # Bytes in, bytes out: decode here, where a failure becomes a typed error.
        if method.server_streaming:
            self.unary[path] = replace(call, handle=_first(call.handle)).unary
            return grpc.stream_stream_rpc_method_handler(call.stream)
        self.unary[path] = call.unary
        return grpc.stream_unary_rpc_method_handler(call.unary)


def _first(
    stream: Callable[[Message], AsyncGenerator[Message, None]],
) -> Callable[[Message], Awaitable[Message]]:
    """A handler that ends the stream after its first response."""

    async def handle(request: Message) -> Message:
        async with aclosing(stream(request)) as responses:
            async for response in responses:
                return response
        raise InvariantViolation("a stream has ended without a response")

    return handle


async def _refuse_starting(requests: Unreceived, context: grpc.aio.ServicerContext) -> bytes:
    error = NotReady("the service is starting", retry_after_seconds=_STARTING_RETRY_SECONDS)
    await _abort(error, context)
    raise error


async def _abort(error: PercolatorError, context: grpc.aio.ServicerContext) -> None:
    """Ends the call by raising gRPC's own exception."""
    await context.abort(*failure(error))


@dataclass(frozen=True, slots=True)
class _Call:
    """One method of one service; its two coroutines are what grpc.aio calls, and a connection for
    frames.

    Their common part is written twice: a context manager around it took 0.5 µs of each call, a
    third of the whole cost of this edge.
    """

    path: str
    parse: Callable[[bytes], Message]
    handle: Callable[[Message], Any]
    gate: Gate
    check: Check
    metrics: MethodMetrics
    now: Callable[[], float]
    audit: Audit | None
    is_administrative: bool

    async def unary(self, request: bytes | Unreceived, context: grpc.aio.ServicerContext) -> bytes:
        started = self.now()
        self.metrics.in_flight += 1
        admitted: CallerIdentity | None = None
        held: Held | None = None
        code = "CANCELLED"
        try:
            self.gate.require_open()
            caller = self.check(context)
            self.gate.enter(caller)
            admitted = caller
            _caller.set(caller)
            _remaining.set(context.time_remaining)
            if isinstance(request, bytes):
                held = self.gate.hold(request)
            else:
                held = await self.gate.receive(context, caller)
            answer: Awaitable[Message] = self.handle(self._decode(held.raw))
            encoded = (await answer).SerializeToString()
            code = "OK"
        except (asyncio.CancelledError, Exception) as error:
            told = self._told(error, admitted)
            if told is not None:
                code = status_code(told).name
                await _abort(told, context)
            raise
        else:
            return encoded
        finally:
            if self.is_administrative and self.audit is not None and admitted is not None:
                raw = None if held is None else held.raw
                self.audit.called(admitted, self.path, self.parse, raw, code)
            if held is not None:
                held.release()
            if admitted is not None:
                self.gate.leave(admitted)
            self.metrics.finished(code, self.now() - started)

    async def stream(
        self, request: Unreceived, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        started = self.now()
        self.metrics.in_flight += 1
        admitted: CallerIdentity | None = None
        held: Held | None = None
        code = "CANCELLED"
        try:
            self.gate.require_open()
            caller = self.check(context)
            self.gate.enter(caller, is_stream=True)
            admitted = caller
            _caller.set(caller)
            _remaining.set(context.time_remaining)
            held = await self.gate.receive(context, caller)
            checked = started
            # Close it at once when the caller is gone, not whenever it is garbage-collected.
            async with aclosing(self.handle(self._decode(held.raw))) as messages:
                async for message in messages:
                    now = self.now()
                    if now - checked > _CHECKED_AGAIN_SECONDS:
                        self._check_again(context, caller)
                        checked = now
                    yield message.SerializeToString()
            code = "OK"
        except (asyncio.CancelledError, Exception) as error:
            told = self._told(error, admitted)
            if told is not None:
                code = status_code(told).name
                await _abort(told, context)
            raise
        finally:
            if self.is_administrative and self.audit is not None and admitted is not None:
                raw = None if held is None else held.raw
                self.audit.called(admitted, self.path, self.parse, raw, code)
            if held is not None:
                held.release()
            if admitted is not None:
                self.gate.leave(admitted, is_stream=True)
            self.metrics.finished(code, self.now() - started)

    def _check_again(self, context: grpc.aio.ServicerContext, caller: CallerIdentity) -> None:
        """A stream may last for as long as the server runs, but a token may be withdrawn, and its
        rights may change."""
        try:
            if self.check(context).rights == caller.rights:
                return
        except (Unauthenticated, PermissionDenied) as error:
            # As it is, this error says that nothing was answered: with another token, clients would
            # begin from the start, and take what they have read already for something new.
            raise NotReady("the token that began this stream is no longer accepted") from error
        raise NotReady("the rights of the token that began this stream have changed")

    def _decode(self, raw: bytes) -> Message:
        try:
            return self.parse(raw)
        except DecodeError as error:
            raise InvalidArgument("request", f"is not a message of its type: {error}") from None

    def _told(
        self, error: BaseException, admitted: CallerIdentity | None
    ) -> PercolatorError | None:
        """The error that the caller is told; None if it has gone."""
        if isinstance(error, PermissionDenied) and admitted is not None and self.audit is not None:
            code, reason = status_code(error).name, error.message
            self.audit.refused(admitted.name, admitted.machine, self.path, code, reason)
        if not isinstance(error, asyncio.CancelledError):
            return self._known(error)
        return None if cancelled_by_caller() else self._cut_off()

    def _cut_off(self) -> PercolatorError:
        """The error of a call that waited for something that was cancelled, but was not cancelled
        itself. To gRPC both look alike: it would send a caller who still waits no status at all."""
        _log.warning("what a call waited for was cancelled", rpc=self.path)
        return ExecutionUnknown("what it waited for was cancelled", where=self.path)

    def _known(self, error: BaseException) -> PercolatorError:
        if isinstance(error, PercolatorError):
            if isinstance(error, InvariantViolation):
                _log.error("an invariant is violated", rpc=self.path, error=str(error))
            return error
        _log.error("a call failed unexpectedly", rpc=self.path, exc_info=error)
        # The text of an unknown exception may hold stored values: it only goes to the log.
        return InvariantViolation(
            f"failed unexpectedly ({type(error).__name__}); see the server's log",
            where=self.path,
        )
