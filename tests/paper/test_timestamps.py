"""Section 2.3 of the paper, "Timestamps", sentence by sentence."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from percolator.services.oracle.oracle import Oracle, OracleHandler, OracleLimits
from percolator.v1.oracle_pb2 import GetTimestampsResponse
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import UnaryMethod, World
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles
from tests.simulation.virtual_time import VirtualClock
from tests.unit.oracle.ledgers import open_ledger
from tests.unit.unary_network import UnaryNetwork


async def started(files: MemoryFiles) -> Oracle:
    """An oracle on this disk, just started."""
    clock = VirtualClock(asyncio.get_running_loop())
    ledger = await open_ledger(files, clock)
    oracle = Oracle(clock, ledger, ledger.is_still_ours, OracleLimits())
    await oracle.extend()
    return oracle


class Wire(UnaryNetwork):
    """Carries requests to one oracle, each in 10 ms, and remembers them."""

    def __init__(self, oracle: Oracle) -> None:
        self._handler = OracleHandler(lambda: oracle)
        self.counts: list[int] = []
        self.pending = 0
        self.pending_most = 0

    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> GetTimestampsResponse:
        self.counts.append(request.count)
        self.pending += 1
        self.pending_most = max(self.pending_most, self.pending)
        await asyncio.sleep(0.005)
        response = await self._handler.get_timestamps(request)
        await asyncio.sleep(0.005)
        self.pending -= 1
        return response


async def test_strictly_increasing() -> None:
    """ "The timestamp oracle is a server that hands out timestamps in strictly increasing
    order." """
    oracle = await started(MemoryFiles(MemoryDisk()))
    handed_out = [await oracle.get_timestamps(1) for _ in range(10_000)]
    assert handed_out == sorted(set(handed_out))


async def test_strictly_from_memory() -> None:
    """ "... given an allocated range of timestamps, the oracle can satisfy future requests strictly
    from memory." """
    files = MemoryFiles(MemoryDisk())
    oracle = await started(files)
    files.faults.operations.clear()
    for _ in range(10_000):
        await oracle.get_timestamps(1)
    # Only a directory entry is looked at, which the system holds in memory.
    assert set(files.faults.operations) == {"stat"}


async def test_jumps_forward_on_restart_but_never_backwards() -> None:
    """ "If the oracle restarts, the timestamps will jump forward to the maximum allocated timestamp
    (but will never go backwards)." """
    files = MemoryFiles(MemoryDisk())
    oracle = await started(files)
    last = await oracle.get_timestamps(1)
    files.kill()
    restarted = await started(MemoryFiles(files.disk))
    first = await restarted.get_timestamps(1)
    assert first > last
    assert first == oracle.mark_milliseconds << 18


async def test_one_pending_rpc_and_batching_that_grows_with_load() -> None:
    """ "Each Percolator worker batches timestamp requests across transactions by maintaining only
    one pending RPC to the oracle. As the oracle becomes more loaded, the batching naturally
    increases to compensate." """
    wire = Wire(await started(MemoryFiles(MemoryDisk())))
    clock = VirtualClock(asyncio.get_running_loop())
    source = TimestampSource(World(clock, wire, random.Random(1)), ["oracle:1"])

    async def transactions(per_second: int) -> float:
        """The mean number of timestamps in a request at this load."""
        before = len(wire.counts)
        asked = []
        for _ in range(per_second // 5):
            asked.append(source.get())
            await asyncio.sleep(1 / per_second)
        await asyncio.gather(*asked)
        sent = wire.counts[before:]
        return sum(sent) / len(sent)

    assert await transactions(50) == 1
    assert 9 <= await transactions(1_000) <= 11
    assert 90 <= await transactions(10_000) <= 110
    assert wire.pending_most == 1


async def test_batching_does_not_affect_the_guarantees() -> None:
    """ "Batching increases the scalability of the oracle but does not affect the timestamp
    guarantees." """
    wire = Wire(await started(MemoryFiles(MemoryDisk())))
    clock = VirtualClock(asyncio.get_running_loop())
    workers = [
        TimestampSource(World(clock, wire, random.Random(seed)), ["oracle:1"]) for seed in range(3)
    ]
    received = [0]

    async def transaction(number: int) -> None:
        await asyncio.sleep(number * 0.001)
        largest_received = max(received)
        timestamp = await workers[number % 3].get()
        assert timestamp > largest_received
        received.append(timestamp)

    await asyncio.gather(*(transaction(number) for number in range(300)))
    assert len(set(received)) == 301
