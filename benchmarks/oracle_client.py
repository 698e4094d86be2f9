"""One client process of the oracle's benchmark: it reads and writes lines of JSON.

Start it with `python -m benchmarks.oracle_client ADDRESS`; each measurement is one line on stdin:
{"what": "await", "tasks": 2000, "count": 1, "seconds": 1.5}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Literal

from grpc_health.v1 import health_pb2

from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.wire.channels import GrpcNetwork
from percolator.wire.methods import GET_TIMESTAMPS
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import MachineClock, UnaryMethod, World, machine_random

EMPTY_CALL = UnaryMethod(
    "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
)
LATENCY_OF_EVERY = 64
"""Timing every one of 300,000 operations a second would dominate the cost."""


@dataclass(frozen=True)
class Order:
    """One measurement."""

    what: Literal["await", "empty", "request"]
    """Through the client, which shares requests; or separate calls, empty or for timestamps."""
    tasks: int
    count: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """Measurements of one process."""

    operations: int
    requests: int
    seconds: float
    cpu_seconds: float
    latencies: list[float]
    """Latencies of one operation in `LATENCY_OF_EVERY`, in seconds."""


async def measure(order: Order, source: TimestampSource, network: GrpcNetwork, to: str) -> Measured:
    """Runs the operation in `tasks` loops for `seconds`."""
    empty = network.unary(to, EMPTY_CALL)
    request = health_pb2.HealthCheckRequest()

    async def call_empty() -> object:
        return await empty(request, 10.0)

    async def get_block() -> object:
        return await source.get(order.count)

    get_timestamps = network.unary(to, GET_TIMESTAMPS)
    for_a_block = GetTimestampsRequest(count=order.count)

    async def call_for_a_block() -> object:
        return await get_timestamps(for_a_block, 10.0)

    operation: Callable[[], Awaitable[object]]
    if order.what == "empty":
        operation = call_empty
    elif order.what == "request":
        operation = call_for_a_block
    else:
        operation = source.get if order.count == 1 else get_block
    is_over = False
    operations = 0
    latencies: list[float] = []
    now = time.perf_counter

    async def loop() -> None:
        nonlocal operations
        done = 0
        while not is_over:
            done += 1
            if done % LATENCY_OF_EVERY != 1:  # includes the first: a slow machine may do no more
                await operation()
            else:
                started = now()
                await operation()
                latencies.append(now() - started)
        operations += done

    answered, started, cpu_started = source.requests_answered, now(), time.process_time()
    looping = [asyncio.create_task(loop()) for _ in range(order.tasks)]
    await asyncio.sleep(order.seconds)
    is_over = True
    await asyncio.gather(*looping)
    return Measured(
        operations=operations,
        requests=source.requests_answered - answered if order.what == "await" else operations,
        seconds=now() - started,
        cpu_seconds=time.process_time() - cpu_started,
        latencies=latencies,
    )


async def main(address: str) -> None:
    network = GrpcNetwork()
    source = TimestampSource(World(MachineClock(), network, machine_random()), [address])
    await source.get()
    while line := await asyncio.to_thread(sys.stdin.readline):
        measured = await measure(Order(**json.loads(line)), source, network, address)
        print(json.dumps(asdict(measured)), flush=True)
    await source.close()
    await network.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
