"""Everything that the library may know of the outside world: time, network, storage, randomness.

Code that makes decisions takes these as arguments and uses nothing else, so that a whole cluster
runs deterministically in one process, with a virtual clock and a simulated network. Code that calls
`time.time()` or `random.random()` or opens a socket itself cannot be simulated, and what cannot be
simulated has not been tested against crashes.

`asyncio` (tasks, futures, `asyncio.timeout`) may be used directly: it takes the time from the
running event loop, which a simulation replaces.
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
AnswerT_co = TypeVar("AnswerT_co", covariant=True)

Random = random.Random
"""A source of randomness: seeded in a simulation, the operating system's in production."""


class Clock(Protocol):
    """Time as one machine sees it."""

    def wall_milliseconds(self) -> int:
        """Milliseconds since 1970-01-01 UTC. May jump both ways, and differs between machines."""

    def monotonic_seconds(self) -> float:
        """Seconds since some fixed instant. Never goes back. Means nothing to other machines."""

    async def sleep(self, seconds: float) -> None:
        """Returns after `seconds` of this machine's monotonic time."""


@dataclass(frozen=True)
class UnaryMethod(Generic[RequestT, ResponseT]):
    """One request, one response."""

    path: str
    """The path on the wire: "/percolator.v1.OracleService/GetTimestamps"."""
    request: type[RequestT]
    response: type[ResponseT]


@dataclass(frozen=True)
class StreamMethod(Generic[RequestT, ResponseT]):
    """One request, any number of responses."""

    path: str
    request: type[RequestT]
    response: type[ResponseT]
    is_short: Callable[[RequestT], bool] | None = None
    """Says if one response probably suffices for a request. Then the stream may end after the
    first, and the caller asks again for the rest. None: a stream never ends before its last
    response."""


UnaryCall = Callable[[RequestT, float], Awaitable[ResponseT]]
"""Takes the request and a time-out in seconds. Raises only `PercolatorError`."""


class Responses(Protocol[AnswerT_co]):
    """Responses of a stream, in order. A caller that does not want all of them closes it
    (`contextlib.aclosing`): the call goes on until then."""

    def __aiter__(self) -> AsyncIterator[AnswerT_co]: ...

    async def __anext__(self) -> AnswerT_co: ...

    async def aclose(self) -> None: ...


StreamCall = Callable[[RequestT, float], Responses[ResponseT]]
"""Takes the request and a time-out for the whole stream. Raises only `PercolatorError`."""


class Network(Protocol):
    """Calls to other processes, by `host:port`."""

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        """A callable that can be used for many calls: keep it, rather than asking for each call."""

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]: ...

    async def close(self) -> None: ...


class Cursor(Protocol):
    """A position in an unchanging view of a `Storage`, as it was when the cursor was created.

    Create it for one batch and close it soon: a long-lived cursor holds back compaction, and slowly
    skips everything written since. It is at an entry (`valid`), or outside of all entries.
    """

    def seek(self, key: bytes) -> None:
        """Moves to the first entry whose key is not less than `key`."""

    def valid(self) -> bool: ...

    def key(self) -> bytes: ...

    def item(self) -> tuple[bytes, bytes]: ...

    def next(self) -> None:
        """Moves forward; from the last entry to outside. Call it only if `valid`."""

    def prev(self) -> None:
        """Moves back; from the first entry to outside. Call it only if `valid`."""

    def close(self) -> None: ...


class StorageBatch(Protocol):
    """Changes that are applied all or not at all. The last of several changes to a key counts."""

    def put(self, key: bytes, value: bytes) -> None: ...

    def delete(self, key: bytes) -> None: ...


BatchT = TypeVar("BatchT", bound=StorageBatch)


class Storage(Protocol[BatchT]):
    """An ordered map from bytes to bytes on one disk: the storage of a tablet.

    Keys that begin with FF are its own: cursors may show them. It is used from one event loop; only
    the disk access of `write` may run elsewhere.
    """

    failures: tuple[type[Exception], ...]
    """Errors of any method or cursor if the disk fails or the stored data is damaged."""
    is_cache: bool
    """True if what has failed is made anew from elsewhere when the storage is opened again."""

    def fault(self, error: Exception) -> StoreFault:
        """The kind of fault behind one of the `failures`."""

    def get(self, key: bytes) -> bytes | None: ...

    def cursor(self) -> Cursor: ...

    def iterate(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The entries with start <= key < stop at this instant, in order. Consume them soon."""

    def batch(self) -> BatchT:
        """An empty batch for this storage."""

    async def write(self, batch: BatchT, then: Callable[[], bool] | None = None) -> bool:
        """Writes all or nothing, and returns when it is durable.

        `then` is called once it is durable, still where it may block, and its result is returned;
        without `then`, the result is True.

        Until then, neither `get` nor any cursor shows any of it. After a failure, it may or may not
        be there once the storage is opened again, and nothing else may be written before that. Only
        one write may run at a time.
        """

    def approximate_bytes(self, start: bytes, stop: bytes) -> int:
        """The size on disk of a range of keys; recent writes may be missing."""

    async def compact(self, start: bytes, stop: bytes) -> None:
        """Removes what deleted entries with start <= key < stop have left behind."""

    async def close(self) -> None:
        """Makes reopening cheap, closes open cursors, and releases the storage."""


class MachineClock:
    """The clock of this machine."""

    def wall_milliseconds(self) -> int:
        return time.time_ns() // 1_000_000

    monotonic_seconds = staticmethod(time.monotonic)
    """The function itself, without a wrapper, since every step of every transaction calls it."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def machine_random() -> Random:
    """Randomness from the operating system, for ids that cannot be guessed and never repeat."""
    return random.SystemRandom()


@dataclass(frozen=True)
class World:
    """The outside world of one process."""

    clock: Clock
    network: Network
    random: Random
