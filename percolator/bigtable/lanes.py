"""The connections to one address: as many as the calls in flight need.

A connection carries about a hundred calls at a time; Google's front ends let more of them wait,
unseen. So the next connection is opened when the ones before are full.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from percolator.bigtable.http2.headers import Metadata
from percolator.errors import UsageError

STREAMS_MAX = 90
"""Calls in flight on one connection; the service permits a hundred."""
LANES_MAX = 10


class Lane(Protocol):
    """One connection at a time, by whatever client. Calls raise `CallFailed`."""

    in_flight: int
    """Counted by whoever makes the calls."""

    @property
    def calls_max(self) -> int:
        """How many calls the server takes on it, if that is known."""
        ...

    async def unary(
        self, path: str, request: bytes, timeout: float, metadata: Metadata
    ) -> bytes: ...

    def stream(
        self, path: str, request: bytes, timeout: float, metadata: Metadata
    ) -> AsyncGenerator[bytes, None]: ...

    async def close(self) -> None: ...


class Lanes:
    """All connections to an address."""

    def __init__(self, open_lane: Callable[[], Lane]) -> None:
        self._open_lane = open_lane
        self._lanes: list[Lane] = []
        self._is_closed = False

    def lane(self) -> Lane:
        """The first connection that is not full; if all are, the one with the fewest calls."""
        if self._is_closed:
            raise network_closed()
        for lane in self._lanes:
            if lane.in_flight < STREAMS_MAX and lane.in_flight < lane.calls_max:
                return lane
        if len(self._lanes) < LANES_MAX:
            self._lanes.append(self._open_lane())
            return self._lanes[-1]
        return min(self._lanes, key=lambda lane: lane.in_flight)

    async def close(self) -> None:
        self._is_closed = True
        lanes, self._lanes = self._lanes, []
        await asyncio.gather(*(lane.close() for lane in lanes))


def network_closed() -> UsageError:
    """The error of a call that is made after its network was closed."""
    return UsageError("the network of this client is closed")
