"""`make demo`: a cluster of processes on this machine, hurt on purpose.

Shows what exists so far: it takes timestamps as fast as it can, kills the oracle with SIGKILL in
the middle, starts it again, and checks that no timestamp was repeated or went back. It does the
same to the lock service, and checks that a session survives under its id.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from percolator.timestamps import Timestamp
from percolator.wire.channels import GrpcNetwork
from percolator.wire.sessions import Sessions, SessionSettings
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import MachineClock, World, machine_random
from services.local.cluster import LocalCluster

ASKERS = 200
SECONDS_PER_PART = 2.0

console = Console()


class WentBack(Exception):
    """What this demonstration exists to rule out."""


async def take_timestamps(source: TimestampSource, until: asyncio.Event) -> int:
    """Many at a time, each of which must lie above the last one of the same asker."""

    async def ask() -> int:
        taken = last = 0
        while not until.is_set():
            timestamp = await source.get()
            if timestamp <= last:
                raise WentBack(f"{timestamp} came after {last}")
            last = timestamp
            taken += 1
        return taken

    return sum(await asyncio.gather(*(ask() for _ in range(ASKERS))))


async def kill_the_oracle(cluster: LocalCluster, world: World) -> None:
    console.rule("timestamps, and a killed oracle")
    source = TimestampSource(world, [cluster.processes["oracle"].address], timeout_seconds=30)
    done = asyncio.Event()
    taking = asyncio.create_task(take_timestamps(source, done))
    await asyncio.sleep(SECONDS_PER_PART)
    before = await source.get()
    console.print(f"the last one before the kill    {before}  {Timestamp(before).describe()}")
    await asyncio.to_thread(cluster.processes["oracle"].kill)
    killed = time.monotonic()
    await asyncio.to_thread(cluster.restart, "oracle")
    after = await source.get()
    console.print(f"the first one after the restart {after}  {Timestamp(after).describe()}")
    console.print(f"back after {time.monotonic() - killed:.2f} s")
    await asyncio.sleep(SECONDS_PER_PART)
    done.set()
    taken = await taking
    await source.close()
    if after <= before:
        raise WentBack(f"{after} came after {before}")
    console.print(f"{taken:,} timestamps taken one by one by {ASKERS} askers: none repeated")


async def kill_the_lock_service(cluster: LocalCluster, world: World) -> None:
    console.rule("a session, and a killed lock service")
    settings = SessionSettings(description="the demonstration")
    sessions = Sessions(world, [cluster.processes["lockservice"].address], settings)
    mine = await sessions.current()
    console.print(f"opened session {mine.hex() if mine else 'none'}")
    await asyncio.to_thread(cluster.processes["lockservice"].kill)
    await asyncio.to_thread(cluster.restart, "lockservice")
    await asyncio.sleep(settings.ttl_seconds)
    kept = await sessions.current()
    await sessions.close()
    if mine is None or kept != mine:
        raise WentBack("the session did not survive the restart of the lock service")
    console.print("the restarted lock service knows it again, under the same id")


def show(cluster: LocalCluster) -> None:
    table = Table("service", "process", "address", box=None)
    for process in cluster.processes.values():
        table.add_row(process.name, str(process.pid), process.address)
    console.print(table)


async def show_everything(cluster: LocalCluster) -> None:
    network = GrpcNetwork()
    try:
        world = World(MachineClock(), network, machine_random())
        await kill_the_oracle(cluster, world)
        await kill_the_lock_service(cluster, world)
    finally:
        await network.close()


def main() -> int:
    with (
        tempfile.TemporaryDirectory(prefix="percolator-demo-") as data,
        LocalCluster(Path(data), tablet_servers=0, progress=console.print) as cluster,
    ):
        show(cluster)
        asyncio.run(show_everything(cluster))
        console.rule("what next")
        console.print("make cluster-up, then .venv/bin/percolator status; README.md tells the rest")
    return 0


if __name__ == "__main__":
    sys.exit(main())
