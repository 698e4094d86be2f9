"""The network as one simulated process sees it: a `percolator.world.Network`.

Requests and responses travel as bytes, and errors as the same detail messages as on the real wire.
So two processes never share an object, and what cannot be serialised fails here too.

A handler is an object with one coroutine method per RPC (an asynchronous generator if it streams).
It runs as a task of its own process: it stops while that process is paused, dies with it, and is
cancelled when its caller gives up, as with gRPC.
"""

from __future__ import annotations

import asyncio
import errno
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol

from google.protobuf.descriptor import ServiceDescriptor

from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    InvariantViolation,
    PercolatorError,
    Unavailable,
    UsageError,
)
from percolator.v1 import errors_pb2
from percolator.wire.methods import method_name
from percolator.wire.status import from_detail, to_detail
from percolator.world import (
    Random,
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
)
from tests.simulation.loop import Life, SimulationLoop, TimeOuts

# Faults of messages, and how often each happened.
#
# All probabilities are per message (a call is a request and a reply) and drawn from one `Random`,
# so the seed decides everything. Every fault that occurs is counted: a run without faults proves
# nothing.


class Fault(Enum):
    """A fault; its value is the name under which it is counted."""

    SLOW = "message slow"
    REORDERED = "message overtaken"
    DUPLICATED = "request duplicated"
    REQUEST_DROPPED = "request dropped"
    REPLY_DROPPED = "reply dropped"
    BROKEN_BEFORE = "connection broken before the request arrived"
    BROKEN_AFTER = "connection broken after the request arrived"
    CUT_OFF = "message lost in a partition"
    SLOW_LINK = "message on a slow link"
    REFUSED = "connection refused"
    GIVEN_UP = "call given up by its caller"
    CRASH = "process crash"
    PAUSE = "process pause"
    RESTART = "process restart"

    __hash__ = object.__hash__
    """By identity: each member exists once. Every second message is counted, and Enum's own hash is
    slow."""


FaultCounts = Counter[Fault]


@dataclass(frozen=True)
class NetworkFaults:
    """How bad the network is. The default is a good one, with ordinary delays."""

    delay_seconds_min: float = 0.0002
    delay_seconds_max: float = 0.001
    slow: float = 0.0
    """Probability of a delay of up to `slow_seconds_max`: the source of late arrivals."""
    slow_seconds_max: float = 5.0
    duplicate: float = 0.0
    """Probability that a request arrives twice, the second time later."""
    drop_request: float = 0.0
    """Probability that a request is lost, and its caller waits for its time-out."""
    drop_reply: float = 0.0
    break_connection: float = 0.0
    """Probability that the caller is told at once that the connection broke, while the request
    may or may not have been executed."""

    def __post_init__(self) -> None:
        if not 0 <= self.delay_seconds_min <= self.delay_seconds_max:
            raise InvalidArgument("delay_seconds_min", "expected 0 <= min <= max")
        for name in ("slow", "duplicate", "drop_request", "drop_reply", "break_connection"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidArgument(name, "expected a probability, 0 to 1")
        for limits in (self._request_limits, self._reply_limits):
            if limits and limits[-1][0] > 1:
                raise InvalidArgument("faults", "expected probabilities that add up to at most 1")

    @cached_property
    def _request_limits(self) -> tuple[tuple[float, Fault], ...]:
        half = self.break_connection / 2
        return _limits(
            (self.drop_request, Fault.REQUEST_DROPPED),
            (half, Fault.BROKEN_BEFORE),
            (half, Fault.BROKEN_AFTER),
            (self.duplicate, Fault.DUPLICATED),
            (self.slow, Fault.SLOW),
        )

    @cached_property
    def _reply_limits(self) -> tuple[tuple[float, Fault], ...]:
        return _limits(
            (self.drop_reply, Fault.REPLY_DROPPED),
            (self.break_connection, Fault.BROKEN_AFTER),
            (self.slow, Fault.SLOW),
        )

    def fate(self, random: Random, *, is_reply: bool) -> Fault | None:
        """Fault for one message; None if it arrives exactly once."""
        limits = self._reply_limits if is_reply else self._request_limits
        if not limits:
            return None
        drawn = random.random()
        if drawn >= limits[-1][0]:
            return None
        return next(fault for limit, fault in limits if drawn < limit)

    def delay_seconds(self, random: Random) -> float:
        least = self.delay_seconds_min
        return least + random.random() * (self.delay_seconds_max - least)

    def long_delay_seconds(self, random: Random) -> float:
        """The delay of a slow message or a duplicate: sometimes longer than any time-out."""
        return self.delay_seconds(random) + random.random() ** 2 * self.slow_seconds_max


def _limits(*faults: tuple[float, Fault]) -> tuple[tuple[float, Fault], ...]:
    total = 0.0
    limits = []
    for probability, fault in faults:
        if probability:
            total += probability
            limits.append((total, fault))
    return tuple(limits)


PERFECT = NetworkFaults()
"""Nothing is lost, duplicated or broken."""


# Links between processes: partitions of every shape, and slow links.
#
# A link goes one way, from one process to another, both named by their addresses. A message that
# arrives while its link is cut is lost silently.

Link = tuple[str, str]
"""From, to."""


class Links:
    """The state of every link; links that were never mentioned are intact and fast."""

    def __init__(self) -> None:
        self._cut: set[Link] = set()
        self._extra_seconds: dict[Link, float] = {}
        self.whole = True
        """True if nothing is cut or slow: the fast check that every message makes."""

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cut

    def extra_seconds(self, source: str, target: str) -> float:
        return self._extra_seconds.get((source, target), 0.0)

    def cut(self, source: str, target: str) -> None:
        """Cuts one way: `target` no longer hears `source`, which still hears `target`."""
        self._cut.add((source, target))
        self.whole = False

    def mend(self, source: str, target: str) -> None:
        """Undoes `cut`. What else is cut or slow stays so."""
        self._cut.discard((source, target))
        self.whole = not (self._cut or self._extra_seconds)

    def cut_both(self, one: str, other: str) -> None:
        self.cut(one, other)
        self.cut(other, one)

    def slow(self, source: str, target: str, extra_seconds: float) -> None:
        """Makes everything from `source` to `target` take this much longer."""
        self._extra_seconds[source, target] = extra_seconds
        self.whole = False

    def isolate(self, name: str, others: Iterable[str]) -> None:
        """Cuts one process off from `others`, both ways."""
        for other in others:
            if other != name:
                self.cut_both(name, other)

    def split(self, one: Iterable[str], other: Iterable[str]) -> None:
        """Separates two groups: no process of one reaches a process of the other."""
        others = list(other)
        for name in one:
            for far in others:
                self.cut_both(name, far)

    def split_at_random(self, names: Sequence[str], random: Random) -> None:
        """Separates two halves, chosen at random."""
        shuffled = list(names)
        random.shuffle(shuffled)
        middle = len(shuffled) // 2
        self.split(shuffled[:middle], shuffled[middle:])

    def ring(self, names: Sequence[str]) -> None:
        """Lets each reach only its two neighbours: every process sees a different part."""
        count = len(names)
        for place, name in enumerate(names):
            for distance in range(2, count - 1):
                self.cut(name, names[(place + distance) % count])

    def heal(self) -> None:
        """Lets every process reach every other one again, without extra delay."""
        self._cut.clear()
        self._extra_seconds.clear()
        self.whole = True


# The wire between simulated processes: it carries bytes from one to another, or loses them.
#
# Deliveries belong to no process: what was sent arrives even if its sender has stopped since.


class Served(Protocol):
    """A service of the wire API, and the object that answers it."""

    @property
    def descriptor(self) -> ServiceDescriptor: ...
    @property
    def handler(self) -> object: ...


class Envelope(NamedTuple):
    """A message in flight, as a `Watcher` sees it."""

    source: str
    target: str
    path: str
    """The path of the method."""
    is_reply: bool
    payload: bytes


Watcher = Callable[[Envelope], Fault | None]
"""Sees every message when it is sent, and may decide its fate; None leaves it to chance."""


Handler = Callable[[Any], Any]
"""A method of a service's handler, which takes a request: a coroutine function or an asynchronous
generator."""


class BreakableCall(Protocol):
    """A call in progress at a server."""

    def broken_by_server(self) -> None: ...


class Listener:
    """A process that accepts calls at an address."""

    def __init__(self, life: Life, address: str, services: Iterable[Served]) -> None:
        self.life = life
        self.address = address
        self.calls: dict[BreakableCall, None] = {}
        """The calls in progress, in order of arrival."""
        self.methods: dict[str, Handler] = {}
        for service in services:
            for method in service.descriptor.methods:
                handle = getattr(service.handler, method_name(method.name), None)
                if handle is not None:
                    self.methods[f"/{service.descriptor.full_name}/{method.name}"] = handle


class Wire:
    """All links and listeners of a simulation, and the random faults that hit them."""

    def __init__(self, loop: SimulationLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        self.faults: NetworkFaults = PERFECT
        """May be replaced at any time; applies to messages sent from then on."""
        self.links = Links()
        self.time_outs = TimeOuts(loop)
        self.counts: FaultCounts = Counter()
        self.messages = 0
        self.watcher: Watcher | None = None
        self.on_call: Callable[[Callable[[], float], str], object] | None = None
        """Called before a handler, in its context, with a function that returns how long the caller
        still waits, and the caller's address."""
        self.unexpected: list[Exception] = []
        """Exceptions that no correct handler raises, and those of the watcher. A simulation fails
        unless this is empty."""
        self._listeners: dict[str, Listener] = {}
        self._silent: set[str] = set()
        self._latest: dict[Link, float] = {}

    # --------------------------------------------------------------------- listeners

    def listen(self, life: Life, address: str, services: Iterable[Served]) -> None:
        """Accepts calls at `address` while the process lives."""
        other = self._listeners.get(address)
        if other is not None and other.life is not life:
            raise OSError(errno.EADDRINUSE, "address in use", address)
        self._silent.discard(address)
        listener = Listener(life, address, services)
        if other is None:
            life.at_end(lambda: self._unlisten(address))
        else:
            listener.methods = {**other.methods, **listener.methods}
            listener.calls = other.calls
        self._listeners[address] = listener

    def listener_at(self, address: str) -> Listener | None:
        return self._listeners.get(address)

    def silence(self, address: str) -> None:
        """The machine itself is gone: nothing even refuses a call there, until a process listens
        again."""
        self._silent.add(address)

    def wake(self, address: str) -> None:
        """The machine is back: a process there calls others before it listens itself."""
        self._silent.discard(address)

    def _unlisten(self, address: str) -> None:
        listener = self._listeners.pop(address)
        if address not in self._silent:
            for call in list(listener.calls):
                call.broken_by_server()

    # ---------------------------------------------------------------------- messages

    def fate(self, link: Link, path: str, payload: bytes, *, is_reply: bool) -> Fault | None:
        """Decides what will happen to a message, and counts it."""
        self.messages += 1
        fault = None
        if self.watcher is not None:
            try:
                fault = self.watcher(Envelope(*link, path, is_reply, payload))
            except Exception as error:
                # Raised in the sender, which may treat it as a failed call and continue.
                self.unexpected.append(error)
                raise
        if fault is None:
            fault = self.faults.fate(self.random, is_reply=is_reply)
        if fault is not None:
            self.counts[fault] += 1
        return fault

    def carry(
        self,
        link: Link,
        arrive: Callable[..., None],
        *arguments: object,
        late: bool = False,
        not_before: float = 0.0,
    ) -> float:
        """Calls `arrive` when the message arrives, if it does. Returns the instant of arrival."""
        faults, random = self.faults, self.random
        delay = faults.long_delay_seconds(random) if late else faults.delay_seconds(random)
        if not self.links.whole:
            extra = self.links.extra_seconds(*link)
            if extra:
                self.counts[Fault.SLOW_LINK] += 1
                delay += extra
        arrival = max(self.loop.now + delay, not_before)
        if arrival < self._latest.get(link, 0.0):
            self.counts[Fault.REORDERED] += 1
        else:
            self._latest[link] = arrival
        self.loop.deliver_at(arrival, self._arrive, (link, arrive, arguments))
        return arrival

    def _arrive(
        self, link: Link, arrive: Callable[..., None], arguments: tuple[object, ...]
    ) -> None:
        # A silent machine neither receives nor sends anything, whatever was in flight.
        lost = not self.links.whole and self.links.is_cut(*link)
        if lost or link[1] in self._silent or link[0] in self._silent:
            self.counts[Fault.CUT_OFF] += 1
        else:
            arrive(*arguments)


# One call from one simulated process to another: its request, its execution, its response.
#
# The caller waits for whatever comes first: the response, a broken connection, or its time-out.
# Anything that arrives later is ignored. A request that is duplicated or late is executed all the
# same, since its server cannot tell.


class CallingProcess(NamedTuple):
    """The caller: a process, named by its address, in its present life."""

    wire: Wire
    life: Life
    address: str


class CallInFlight(ABC, Generic[RequestT, ResponseT]):
    """State common to unary and streaming calls: everything but the response."""

    def __init__(
        self,
        caller: CallingProcess,
        method: UnaryMethod[RequestT, ResponseT] | StreamMethod[RequestT, ResponseT],
        target: str,
        request: bytes,
        timeout_seconds: float,
    ) -> None:
        self._wire = wire = caller.wire
        self._target = target
        self._there = caller.address, target
        self._back = target, caller.address
        self._method = method
        self._request = request
        self._timeout_seconds = timeout_seconds
        self._executions: list[tuple[Life, asyncio.Task[None]]] = []
        """Futures that wait for something, each with its process."""
        self.is_over = False
        self.context = caller.life.own_context
        self._send()
        # If sending raises, there is no call: nothing is left that would time out with no caller.
        wire.time_outs.set(wire.loop.now + timeout_seconds, self)

    # ------------------------------------------------------------------ the caller's side

    @abstractmethod
    def _fail(self, error: PercolatorError) -> None:
        """Ends the caller's wait with this error."""

    def break_off(self, why: str) -> None:
        """The connection is gone; the request may or may not have been executed."""
        if not self.is_over:
            self._finish()
            self._fail(Unavailable(why, where=self._where()))

    def give_up(self) -> None:
        """The caller no longer waits. The handler learns of it, if that message arrives."""
        if not self.is_over:
            self._finish()
            self._wire.counts[Fault.GIVEN_UP] += 1
            self._wire.carry(self._there, self._cancel_executions)

    def time_out(self) -> None:
        if not self.is_over:
            self.give_up()
            self._fail(DeadlineExceeded("no answer in time", where=self._where()))

    def _finish(self) -> None:
        self.is_over = True

    def _where(self) -> str:
        return f"{self._method.path} at {self._target}"

    def _send(self) -> None:
        wire, there = self._wire, self._there
        match wire.fate(there, self._method.path, self._request, is_reply=False):
            case None:
                wire.carry(there, self._arrive)
            case Fault.SLOW:
                wire.carry(there, self._arrive, late=True)
            case Fault.DUPLICATED:
                wire.carry(there, self._arrive)
                wire.carry(there, self._arrive, late=True)
            case Fault.BROKEN_BEFORE:
                self._break_soon()
            case Fault.BROKEN_AFTER:
                wire.carry(there, self._arrive)
                self._break_soon()
            case _:
                pass  # dropped: it never arrives anywhere

    def _break_soon(self) -> None:
        self._wire.carry(self._back, self.break_off, "the connection broke")

    # ------------------------------------------------------------------ the server's side

    def _arrive(self) -> None:
        listener = self._wire.listener_at(self._target)
        if listener is None:
            self._wire.counts[Fault.REFUSED] += 1
            self._wire.carry(self._back, self.break_off, "connection refused")
            return
        handler = listener.methods.get(self._method.path)
        if handler is None:
            self._wire.carry(self._back, self._miss)
            return
        listener.calls[self] = None
        waiting = listener.life.begin(self._execute(handler, listener))
        if waiting is not None:
            self._executions.append((listener.life, waiting))

    def _miss(self) -> None:
        if not self.is_over:
            self._finish()
            self._fail(UsageError("no such method there", where=self._where()))

    def broken_by_server(self) -> None:
        """The process that was executing it has ended, and its machine resets the connection."""
        self._wire.carry(self._back, self.break_off, "connection reset")

    def _cancel_executions(self) -> None:
        for life, task in self._executions:
            life.cancel(task)

    async def _execute(self, handler: Handler, listener: Listener) -> None:
        """Runs the handler as a task of the process that owns it."""
        wire = self._wire
        try:
            if wire.on_call is not None:
                loop, deadline = wire.loop, wire.loop.now + self._timeout_seconds
                wire.on_call(lambda: deadline - loop.now, self._there[0])
            await self._answer(handler, listener)
        except InvariantViolation as error:
            wire.unexpected.append(error)
            self._answer_error(error, listener)
        except PercolatorError as error:
            self._answer_error(error, listener)
        except Exception as error:  # noqa: BLE001  # the simulation fails with it at the end
            wire.unexpected.append(error)
            self._answer_error(InvariantViolation(f"failed unexpectedly: {error!r}"), listener)
        finally:
            listener.calls.pop(self, None)

    @abstractmethod
    async def _answer(self, handler: Handler, listener: Listener) -> None:
        """Calls the handler and sends its response."""

    @abstractmethod
    def _answer_error(self, error: PercolatorError, listener: Listener) -> None:
        """Sends the error as the response."""


class UnaryInFlight(CallInFlight[RequestT, ResponseT]):
    """One request, one response."""

    def __init__(
        self,
        caller: CallingProcess,
        method: UnaryMethod[RequestT, ResponseT],
        target: str,
        request: bytes,
        timeout_seconds: float,
    ) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.Future(loop=caller.wire.loop)
        """The serialised response."""
        super().__init__(caller, method, target, request, timeout_seconds)

    def _fail(self, error: PercolatorError) -> None:
        if not self.answer.done():  # cancelled, when the caller was
            self.answer.set_exception(error)

    def _take(self, payload: bytes) -> None:
        if not self.is_over:
            self._finish()
            self.answer.set_result(payload)

    def _take_error(self, payload: bytes) -> None:
        if not self.is_over:
            self._finish()
            self._fail(decoded_error(payload))

    async def _answer(self, handler: Handler, listener: Listener) -> None:
        response = await handler(self._method.request.FromString(self._request))
        self._reply(listener, response.SerializeToString(), is_error=False)

    def _answer_error(self, error: PercolatorError, listener: Listener) -> None:
        self._reply(listener, encoded_error(error), is_error=True)

    def _reply(self, listener: Listener, payload: bytes, *, is_error: bool) -> None:
        if not listener.life.alive:
            return
        wire, back = self._wire, self._back
        take = self._take_error if is_error else self._take
        match wire.fate(back, self._method.path, payload, is_reply=True):
            case None:
                wire.carry(back, take, payload)
            case Fault.SLOW:
                wire.carry(back, take, payload, late=True)
            case Fault.BROKEN_AFTER | Fault.BROKEN_BEFORE:
                self._break_soon()
            case _:
                pass  # dropped


def encoded_error(error: PercolatorError) -> bytes:
    """An error as it travels on the wire."""
    return to_detail(error).SerializeToString()


def decoded_error(payload: bytes) -> PercolatorError:
    """A new error, equal to the one that was sent."""
    return from_detail(errors_pb2.ErrorDetail.FromString(payload))


# One call whose response is streamed: pages that arrive in order, or not at all.
#
# As on a real connection, there are no gaps: after a lost message nothing more arrives, and the
# caller waits for its time-out. A slow reader holds the handler back.

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


class SimulatedNetwork:
    """The calls of one process. `address` is the origin of its messages."""

    def __init__(self, wire: Wire, life: Life, address: str) -> None:
        self._wire = wire
        self._life = life
        self._address = address
        self._closed = False
        self._waiting: dict[UnaryInFlight[Any, Any], None] = {}

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        _check(address)
        caller = CallingProcess(self._wire, self._life, self._address)
        waiting, decode = self._waiting, method.response.FromString

        async def call(request: RequestT, timeout: float) -> ResponseT:
            if self._closed or not caller.life.alive:
                await self._refuse(address)
            in_flight = UnaryInFlight(caller, method, address, request.SerializeToString(), timeout)
            waiting[in_flight] = None
            try:
                return decode(await in_flight.answer)
            except asyncio.CancelledError:
                in_flight.give_up()
                raise
            finally:
                del waiting[in_flight]

        return call

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        _check(address)
        caller = CallingProcess(self._wire, self._life, self._address)
        decode = method.response.FromString

        async def call(request: RequestT, timeout: float) -> AsyncGenerator[ResponseT, None]:
            if self._closed or not caller.life.alive:
                await self._refuse(address)
            in_flight = StreamInFlight(
                caller, method, address, request.SerializeToString(), timeout
            )
            try:
                while (payload := await in_flight.next()) is not None:
                    yield decode(payload)
            finally:
                in_flight.give_up()

        return call

    async def close(self) -> None:
        self._closed = True
        for in_flight in list(self._waiting):
            in_flight.break_off("the channel was closed")

    async def _refuse(self, address: str) -> None:
        if not self._life.alive:
            # A dead process sends nothing; this is cancelled by the end of the process.
            await self._wire.loop.create_future()
        raise Unavailable("the channel was closed", where=address)


def _check(address: str) -> None:
    if not address:
        raise InvalidArgument("address", "is empty; expected host:port")
