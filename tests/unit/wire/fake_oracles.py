"""A network with oracles in it, whose behaviour a test chooses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from percolator import errors
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import (
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
    World,
)
from tests.simulation.virtual_time import VirtualClock

ROUND_TRIP_SECONDS = 0.1

Behaviour = Callable[[int], Awaitable[int]]
"""Returns the first timestamp for a requested count."""


class Oracles:
    """A network with oracles in it, which all draw from one sequence."""

    def __init__(self) -> None:
        self.next = 1000
        self.requests: list[tuple[float, str, int]] = []
        self.behaviours: dict[str, Behaviour] = {}
        self.in_flight = 0
        self.in_flight_most = 0

    async def healthy(self, count: int) -> int:
        """Allocates when the request arrives, half a round trip after it was sent."""
        await asyncio.sleep(ROUND_TRIP_SECONDS / 2)
        first, self.next = self.next, self.next + count
        await asyncio.sleep(ROUND_TRIP_SECONDS / 2)
        return first

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        async def call(request: RequestT, timeout: float) -> ResponseT:
            assert isinstance(request, GetTimestampsRequest)
            self.requests.append((asyncio.get_running_loop().time(), address, request.count))
            self.in_flight += 1
            self.in_flight_most = max(self.in_flight_most, self.in_flight)
            try:
                async with asyncio.timeout(timeout):
                    first = await self.behaviours.get(address, self.healthy)(request.count)
            except TimeoutError:
                raise errors.DeadlineExceeded("no answer in time", where=address) from None
            finally:
                self.in_flight -= 1
            response = GetTimestampsResponse(first=first, count=request.count)
            assert isinstance(response, method.response)
            return response

        return call

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        raise errors.UsageError("oracles stream nothing")

    async def close(self) -> None:
        """There is nothing to close."""

    def counts(self) -> list[int]:
        return [count for _, _, count in self.requests]


def source_of(oracles: Oracles, *addresses: str, count_max: int = 1_000_000) -> TimestampSource:
    world = World(VirtualClock(asyncio.get_running_loop()), oracles, random.Random(1))
    return TimestampSource(world, addresses or ("a:1",), count_max=count_max)


def refusing(error: errors.PercolatorError) -> Behaviour:
    async def refuse(count: int) -> int:
        raise error

    return refuse


async def silent(count: int) -> int:
    await asyncio.sleep(10**6)
    return 0
