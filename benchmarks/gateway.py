"""make bench-gateway: the cost of using a gateway, and of transactions from other languages.

The same transactions run directly and through the gateway, in turn, on the same servers. The
gateway's own CPU time is shown beside them. Its transaction service is measured with bare messages,
as a client in another language would send them.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

from benchmarks.report import Report
from benchmarks.tablet_traffic import process_clock
from benchmarks.transaction_cost import Cost, Meter
from benchmarks.transaction_traffic import Accounts, Traffic, row_key
from percolator import aio
from percolator.services.local.cluster import LocalCluster
from percolator.v1 import gateway_pb2 as pb
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork

ROWS = 20_000
COUNT = 4_000
IN_FLIGHT = 1_000
CALLS = 1_000
CALLS_IN_FLIGHT = 64
TURNS = 3
CALL_SECONDS = 30.0

Slice = Callable[[Accounts, int, int], Awaitable[Cost]]


class GatewayClock:
    """The CPU time of the gateway's process."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._clock = process_clock(cluster.processes["gateway"].pid)

    def micros(self) -> float:
        return time.clock_gettime(self._clock) * 1e6


async def forwarding(cluster: LocalCluster, clock: GatewayClock, report: Report) -> None:
    """The library's transactions, directly and through the gateway."""
    accounts = Accounts.of("forwarded", ROWS)
    async with (
        aio.connect(cluster.address) as near,
        aio.connect(cluster.gateway_address) as far,
    ):
        await near.create_table(accounts.table)
        direct, through = Traffic(near, Meter(cluster)), Traffic(far, Meter(cluster))
        await direct.fill(accounts)
        for work in ("write_only", "read_write", "snapshot_reads"):
            slices: list[Slice] = [getattr(direct, work), getattr(through, work)]
            rates: list[list[float]] = [[], []]
            spent: list[float] = []
            for turn in range(TURNS + 1):
                for way, run in enumerate(slices):
                    before = clock.micros()
                    cost = await run(accounts, COUNT, IN_FLIGHT)
                    if turn:  # the first one warms up
                        rates[way].append(cost.rate)
                        if way:
                            spent.append((clock.micros() - before) / COUNT)
            shown = work.replace("_", " ")
            report.add(f"{shown}, direct", median(rates[0]), "1/s")
            report.add(f"{shown}, through", median(rates[1]), "1/s")
            name = f"{shown}, through: gateway"
            report.add(name, median(spent), "µs CPU")


async def lone_calls(cluster: LocalCluster, clock: GatewayClock, report: Report) -> None:
    """The cost of forwarding one call that shares nothing with others."""
    network = GrpcNetwork()
    oracle = cluster.processes["oracle"].address
    call = network.unary(cluster.gateway_address, methods.GET_TIMESTAMPS, server=oracle)
    request = methods.GET_TIMESTAMPS.request(count=1)

    async def worker() -> None:
        for _ in range(CALLS // CALLS_IN_FLIGHT):
            await call(request, CALL_SECONDS)

    await worker()
    before = clock.micros()
    await asyncio.gather(*(worker() for _ in range(CALLS_IN_FLIGHT)))
    count = CALLS // CALLS_IN_FLIGHT * CALLS_IN_FLIGHT
    report.add("one forwarded call", (clock.micros() - before) / count, "µs CPU")
    await network.close()


async def transactions(cluster: LocalCluster, clock: GatewayClock, report: Report) -> None:
    """Begin, Get, Commit of one cell, as another language sends them."""
    network = GrpcNetwork()
    address = cluster.gateway_address
    begin = network.unary(address, methods.BEGIN)
    get = network.unary(address, methods.GET)
    commit = network.unary(address, methods.COMMIT)
    numbers = iter(range(CALLS))

    async def worker() -> None:
        for number in numbers:
            row = row_key(number).encode()
            start = (await begin(pb.BeginRequest(), CALL_SECONDS)).start_timestamp
            query = pb.RowQuery(table="forwarded", row=row, columns=[b"balance"])
            await get(pb.GetRequest(start_timestamp=start, rows=[query]), CALL_SECONDS)
            write = pb.CellWrite(
                kind=pb.CellWrite.KIND_PUT,
                table="forwarded",
                row=row,
                column=b"balance",
                value=b"12345678",
            )
            await commit(pb.CommitRequest(start_timestamp=start, writes=[write]), CALL_SECONDS)

    before, began = clock.micros(), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(CALLS_IN_FLIGHT)))
    report.add("transaction service", CALLS / (time.perf_counter() - began), "1/s")
    report.add("transaction service: gateway", (clock.micros() - before) / CALLS, "µs CPU")
    await network.close()


async def measure(data: Path) -> Report:
    report = Report("gateway")
    with LocalCluster(data, tablet_servers=1, gateways=1) as cluster:
        clock = GatewayClock(cluster)
        await forwarding(cluster, clock, report)
        await lone_calls(cluster, clock, report)
        await transactions(cluster, clock, report)
    return report


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(Path(directory))).finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
