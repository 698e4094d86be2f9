"""What is between simulated processes: it carries bytes from one to another, or loses them.

Deliveries belong to no process: what was sent arrives even if its sender has stopped since.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from google.protobuf.descriptor import ServiceDescriptor

from percolator.testing.simulator.network_faults import PERFECT, Fault, FaultCounts, NetworkFaults
from percolator.testing.simulator.network_links import Link, Links
from percolator.testing.simulator.simulated_life import Life
from percolator.testing.simulator.simulated_loop import SimulationLoop
from percolator.testing.simulator.simulated_timeouts import TimeOuts
from percolator.wire.methods import method_name
from percolator.world import Random


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
    """All links and listeners of a simulation, and the random faults that strike them."""

    def __init__(self, loop: SimulationLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        self.faults: NetworkFaults = PERFECT
        """May be replaced at any moment; applies to messages sent from then on."""
        self.links = Links()
        self.time_outs = TimeOuts(loop)
        self.counts: FaultCounts = Counter()
        self.messages = 0
        self.watcher: Watcher | None = None
        self.on_call: Callable[[Callable[[], float]], object] | None = None
        """Called before a handler, in its context, with a function that returns how long the caller
        still waits."""
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
