"""Everything the library may know of the outside: time, network, storage, chance.

Whatever decides something takes these as arguments and touches nothing else, so that a whole
cluster runs deterministically in one process, on a virtual clock and a simulated network. Code
that calls `time.time()`, `random.random()` or opens a socket by itself cannot be simulated, and
what cannot be simulated has not been tested against crashes.

`asyncio` itself (tasks, futures, `asyncio.timeout`) may be used directly: it takes its time from
the running event loop, which a simulation replaces.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from google.protobuf.message import Message

from percolator.errors import StoreFault

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)

Random = random.Random
"""Chance: seeded in a simulation, the operating system's in production."""


class Clock(Protocol):
    """Time as one machine sees it."""

    def wall_milliseconds(self) -> int:
        """Milliseconds since 1970-01-01 UTC. May jump, both ways; another machine's differs."""
        ...

    def monotonic_seconds(self) -> float:
        """Seconds since some fixed instant. Never goes back; means nothing to other machines."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Returns after `seconds` of this machine's monotonic time."""
        ...


@dataclass(frozen=True)
class UnaryMethod(Generic[RequestT, ResponseT]):
    """One request, one response."""

    path: str
    """As on the wire: "/percolator.v1.OracleService/GetTimestamps"."""
    request: type[RequestT]
    response: type[ResponseT]


@dataclass(frozen=True)
class StreamMethod(Generic[RequestT, ResponseT]):
    """One request, any number of responses."""

    path: str
    request: type[RequestT]
    response: type[ResponseT]


UnaryCall = Callable[[RequestT, float], Awaitable[ResponseT]]
"""Called with the request and a time-out in seconds; raises only `PercolatorError`s."""

StreamCall = Callable[[RequestT, float], AsyncIterator[ResponseT]]
"""Called with the request and a time-out for the whole stream; raises only `PercolatorError`s."""


class Network(Protocol):
    """Calls to other processes, by `host:port`."""

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        """A callable for many calls: ask for it once, not per call."""
        ...

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]: ...

    async def close(self) -> None: ...


class Cursor(Protocol):
    """A place in an unchanging view of a `Storage`: that of the instant the cursor was made.

    Made for one batch and closed soon: a long-lived one holds back compaction, and crawls over
    everything written since. It stands on an entry (`valid`), or outside of all of them.
    """

    def seek(self, key: bytes) -> None:
        """Stands on the first entry whose key is not less than `key`."""
        ...

    def seek_to_last(self) -> None: ...

    def valid(self) -> bool: ...

    def key(self) -> bytes: ...

    def item(self) -> tuple[bytes, bytes]: ...

    def next(self) -> None:
        """Only when valid. From the last entry, stands outside."""
        ...

    def prev(self) -> None:
        """Only when valid. From the first entry, stands outside."""
        ...

    def close(self) -> None: ...


class StorageBatch(Protocol):
    """Changes that happen all or not at all. Of two changes of one key, the later one counts."""

    def put(self, key: bytes, value: bytes) -> None: ...

    def delete(self, key: bytes) -> None: ...


BatchT = TypeVar("BatchT", bound=StorageBatch)


class Storage(Protocol[BatchT]):
    """An ordered map from bytes to bytes on one disk: what a tablet stands on.

    Used from one event loop; only the disk's part of `write` may run elsewhere.
    """

    failures: tuple[type[Exception], ...]
    """What any method or cursor raises when the disk fails or the stored data is damaged."""

    def fault(self, error: Exception) -> StoreFault:
        """What one of the `failures` means."""
        ...

    def get(self, key: bytes) -> bytes | None: ...

    def cursor(self) -> Cursor: ...

    def iterate(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The entries with start <= key < stop of this instant, in order. Exhaust it soon."""
        ...

    def batch(self) -> BatchT:
        """An empty batch for this storage."""
        ...

    async def write(self, batch: BatchT) -> None:
        """Writes all or nothing, and returns when it is durable.

        Until then neither `get` nor any cursor shows any of it. After a failure it may or may not
        be there once the storage is opened again, and nothing else may be written before that.
        One write at a time.
        """
        ...

    def approximate_bytes(self, start: bytes, stop: bytes) -> int:
        """The size on disk of a range of keys; what was written lately may be missing."""
        ...

    async def compact(self, start: bytes, stop: bytes) -> None:
        """Gets rid of what deleted entries with start <= key < stop have left behind."""
        ...

    async def close(self) -> None:
        """Makes opening it again cheap, and lets go of it. Closes open cursors."""
        ...


class MachineClock:
    """The clock of this machine."""

    def wall_milliseconds(self) -> int:
        return time.time_ns() // 1_000_000

    monotonic_seconds = staticmethod(time.monotonic)
    """Itself, since every step of every transaction asks it."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def machine_random() -> Random:
    """Chance from the operating system: ids that nobody can guess or repeat."""
    return random.SystemRandom()


@dataclass(frozen=True)
class World:
    """The surroundings that one process lives in."""

    clock: Clock
    network: Network
    random: Random
