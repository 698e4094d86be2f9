"""Failover of many tablets: how long until all tablets of a killed server are served elsewhere."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.report import Report
from percolator.formats.records import RecordKind, WriteRecord
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess
from percolator.services.tabletserver.storage import write_buffer_bytes
from percolator.v1 import cells_pb2
from percolator.v1 import master_pb2 as pb
from percolator.v1 import tabletserver_pb2 as tablets
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.world import Network

SERVERS = 3
SECONDS_MAX = 120.0
VALUE_BYTES = 1024
ROWS_PER_CALL = 500
VICTIM = "tabletserver-2"
_TIMESTAMP = 1_000 << 18


class FailedOver(NamedTuple):
    """How long the tablets of a server that was killed were not served."""

    first_seconds: float
    all_seconds: float


class Site:
    """A cluster with one table of many tablets."""

    def __init__(self, cluster: LocalCluster, network: Network, tablets_count: int) -> None:
        self.cluster = cluster
        self.network = network
        self.count = tablets_count

    @property
    def victim(self) -> ServiceProcess:
        return self.cluster.processes[VICTIM]

    async def create(self) -> float:
        """Seconds until all tablets are served."""
        splits = [b"%06d" % number for number in range(1, self.count)]
        create = self.network.unary(self.cluster.address, methods.CREATE_TABLE)
        started = time.monotonic()
        await create(pb.CreateTableRequest(name="many", splits=splits), SECONDS_MAX)
        return time.monotonic() - started

    async def tablets(self) -> list[pb.TabletInfo]:
        listed = self.network.unary(self.cluster.address, methods.LIST_TABLETS)
        found: list[pb.TabletInfo] = []
        while True:
            after = found[-1].location.tablet_id if found else 0
            page = await listed(pb.ListTabletsRequest(after_tablet_id=after), SECONDS_MAX)
            found += page.tablets
            if not page.more:
                return found

    async def of_victim(self) -> list[pb.TabletInfo]:
        address = self.victim.address
        return [one for one in await self.tablets() if one.location.address == address]

    async def fail_over(self) -> FailedOver:
        """Kills the server; returns when others serve all of its tablets."""
        lost = {one.location.tablet_id for one in await self.of_victim()}
        address = self.victim.address
        self.victim.kill()
        started = time.monotonic()
        first_seconds = 0.0
        while time.monotonic() - started < SECONDS_MAX:
            left = [
                one
                for one in await self.tablets()
                if one.location.tablet_id in lost
                and not (one.serving and one.location.address != address)
            ]
            if len(left) < len(lost) and not first_seconds:
                first_seconds = time.monotonic() - started
            if not left:
                break
            await asyncio.sleep(0.02)
        return FailedOver(first_seconds, time.monotonic() - started)

    async def fill_logs(self, bytes_each: int) -> None:
        """Writes this much to each of the victim's tablets, and leaves it unflushed in the log."""
        mutate = self.network.unary(self.victim.address, methods.MUTATE)
        limit = asyncio.Semaphore(8)

        async def fill(info: pb.TabletInfo) -> None:
            location = info.location
            target = tablets.TabletTarget(
                tablet_id=location.tablet_id, epoch=location.epoch, schema_version=1
            )
            rows = bytes_each // VALUE_BYTES
            async with limit:
                for first in range(0, rows, ROWS_PER_CALL):
                    batch = tablets.MutationBatch(target=target)
                    for row in range(first, min(first + ROWS_PER_CALL, rows)):
                        batch.mutations.append(_written(location.range.start + b"/%06d" % row))
                    answer = await mutate(tablets.MutateRequest(batches=[batch]), SECONDS_MAX)
                    (written,) = answer.batches
                    if written.mutations != len(batch.mutations) or written.unapplied:
                        raise AssertionError(f"not written: {written}")

        await asyncio.gather(*map(fill, await self.of_victim()))

    def log_bytes(self) -> int:
        """The size of all tablets' logs together."""
        store = self.cluster.data / "store"
        return sum(one.stat().st_size for one in store.glob("*/*/e*[0-9]/*.log"))


def _written(row: bytes) -> tablets.Mutation:
    value = WriteRecord(_TIMESTAMP - 1, RecordKind.PUT, os.urandom(VALUE_BYTES)).encode()
    change = tablets.Change(
        kind=tablets.Change.KIND_PUT,
        space=cells_pb2.SPACE_WRITE,
        timestamp=_TIMESTAMP,
        value=value,
    )
    return tablets.Mutation(row=row, column=b"c", changes=[change])


@asynccontextmanager
async def site(directory: Path, tablets_count: int, store: str = "") -> AsyncIterator[Site]:
    with LocalCluster(directory, store=store, tablet_servers=SERVERS) as cluster:
        network = GrpcNetwork()
        try:
            yield Site(cluster, network, tablets_count)
        finally:
            await network.close()


async def idle(directory: Path, report: Report) -> None:
    """300 tablets, 100 of them on the server that is killed."""
    async with site(directory, 300) as at:
        report.add("300 tablets on 3 servers open", await at.create(), "s")
        memory = psutil.Process(at.victim.pid).memory_info().rss / (1 << 20)
        report.add("memory of a server with 100 idle tablets", memory, "MiB")
        report.add("100 idle tablets open elsewhere", (await at.fail_over()).all_seconds, "s")


async def with_full_logs(directory: Path, report: Report) -> None:
    """As above, when the other servers must replay everything written since the last flush."""
    async with site(directory, 300) as at:
        await at.create()
        # LevelDB begins a new log when its buffer is full; a little less stays in one log.
        await at.fill_logs(write_buffer_bytes(100) * 85 // 100)
        logs = at.log_bytes() / (1 << 20)
        report.add("logs of 100 tablets to replay", logs, "MiB")
        seconds = (await at.fail_over()).all_seconds
        report.add("100 tablets with full logs open elsewhere", seconds, "s")


async def a_thousand(directory: Path, report: Report) -> None:
    """Far more tablets than advised (8 per server): does it work, and what does it cost?"""
    async with site(directory, 1_000) as at:
        report.add("1,000 tablets on 3 servers open", await at.create(), "s")
        memory = psutil.Process(at.victim.pid).memory_info().rss / (1 << 20)
        report.add("memory of a server with 333 idle tablets", memory, "MiB")
        report.add("333 idle tablets open elsewhere", (await at.fail_over()).all_seconds, "s")
