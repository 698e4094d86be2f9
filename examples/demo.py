"""`make demo`: a cluster of processes on this machine, hurt on purpose.

A bank of many tellers works on three tablet servers; one of them is killed with SIGKILL in the
middle, the others take over its tablets, and the money in all accounts together stays the same.
Then it takes timestamps as fast as it can, kills the oracle, starts it again, and checks that no
timestamp was repeated or went back. It does the same to the lock service, and checks that a session
survives under its id.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from rich.console import Console
from rich.table import Table

import percolator
from examples.bank import TELLERS, Bank, total
from percolator.timestamps import Timestamp
from percolator.wire.channels import GrpcNetwork
from percolator.wire.sessions import Sessions, SessionSettings
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import MachineClock, World, machine_random
from services.local.cluster import LocalCluster

ASKERS = 200
SECONDS_PER_PART = 2.0
BANK_SECONDS = 6
KILLED_AFTER_SECONDS = 3
TRANSFERS_PER_MARK = 25

console = Console()


class WentBack(Exception):
    """What this demonstration exists to rule out."""


def kill_a_tablet_server(cluster: LocalCluster) -> None:
    console.rule("a bank, and a killed tablet server")
    victim = cluster.processes["tabletserver-1"]
    with percolator.connect(cluster.address, description="the bank") as db:
        bank = Bank(db)
        before = total(db)
        console.print(f"{TELLERS} tellers, {before:,} in all accounts together; transfers:")
        with ThreadPoolExecutor(1) as thread:
            working = thread.submit(bank.work, BANK_SECONDS)
            for second in range(BANK_SECONDS):
                if second == KILLED_AFTER_SECONDS:
                    victim.kill()
                    console.print(f"      kill -9 of {victim.name}, process {victim.pid}")
                show_a_second(bank, second, working)
            working.result()
        after = total(db)
    if after != before:
        raise WentBack(f"the accounts held {before:,} together, and now hold {after:,}")
    cluster.restart(victim.name)
    console.print(f"{bank.transfers:,} transfers, {bank.audits:,} audits, all found {after:,}")


def show_a_second(bank: Bank, second: int, working: Future[None]) -> None:
    already = bank.transfers
    wait([working], 1)
    done = bank.transfers - already
    console.print(f"{second + 1:3d} s {done:6,} {'▇' * (done // TRANSFERS_PER_MARK)}")


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
        LocalCluster(Path(data), tablet_servers=3, progress=console.print) as cluster,
    ):
        show(cluster)
        kill_a_tablet_server(cluster)
        asyncio.run(show_everything(cluster))
        console.rule("what next")
        console.print("make cluster-up, then .venv/bin/percolator status; README.md tells the rest")
    return 0


if __name__ == "__main__":
    sys.exit(main())
