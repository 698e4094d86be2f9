"""`make chaos`: a cluster of real processes is hurt in every way, one after the other.

    CHAOS_SECONDS=600 CHAOS_SEED=7 CHAOS_WORKLOAD=mixed make chaos

Every kind of fault strikes at least once, in an order that the seed decides, and again until the
time is over; a fault that cannot be shown to have struck fails the run. At the end the checker
sees the whole history, and the audit everything that is stored.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from percolator.world import Random
from services.local.cluster import LocalCluster
from tests.chaos.catalogue import all_faults
from tests.chaos.clients import Clients
from tests.chaos.compaction import WRITE_BUFFERS_BYTES, Filler
from tests.chaos.faults import Fault, Scene
from tests.chaos.supervisor import Supervisor, Verdict, supervising

SECONDS = float(os.environ.get("CHAOS_SECONDS", "90"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or secrets.randbelow(1_000_000) + 1
WORKLOAD = os.environ.get("CHAOS_WORKLOAD", "mixed")
CLIENTS = 3
SESSIONS_PER_CLIENT = 4
WORKS_AGAIN_SECONDS = 20.0
TABLET_SERVER = ("tests.chaos.tablet_server", "--write-buffers-bytes", str(WRITE_BUFFERS_BYTES))

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SECONDS * 2 + 240)]

console = Console()


@pytest.fixture(name="cluster")
def _cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path / "cluster",
        tablet_servers=3,
        masters=2,
        oracles=2,
        links=True,
        tablet_server=TABLET_SERVER,
    ) as started:
        yield started


async def test_whatever_strikes_no_promise_is_broken(cluster: LocalCluster, tmp_path: Path) -> None:
    console.print(f"\nCHAOS_SEED={SEED} CHAOS_WORKLOAD={WORKLOAD} CHAOS_SECONDS={SECONDS:g}")
    async with supervising(cluster, WORKLOAD, tmp_path) as supervisor:
        clients = Clients(
            cluster.address,
            tmp_path / "clients",
            WORKLOAD,
            seed=SEED,
            count=CLIENTS,
            sessions=SESSIONS_PER_CLIENT,
        )
        try:
            recovery = await hurt(cluster, clients, supervisor)
            await asyncio.to_thread(clients.stop)
        finally:
            clients.kill()
        verdict = await supervisor.judge(clients)
    show(recovery, verdict)
    verdict.require_clean(tmp_path)
    assert recovery.keys() == {fault.name for fault in all_faults()}
    assert verdict.committed > CLIENTS * SESSIONS_PER_CLIENT * len(recovery)


async def hurt(
    cluster: LocalCluster, clients: Clients, supervisor: Supervisor
) -> dict[str, list[float]]:
    """By kind of fault: how long it took each time until everything worked again."""
    recovery: defaultdict[str, list[float]] = defaultdict(list)
    chance = Random(f"chaos {SEED}")
    filler = await Filler.of(supervisor.database)
    scene = Scene(cluster, clients, supervisor, filler, chance)
    deadline = time.monotonic() + SECONDS
    await supervisor.recovered()
    for fault in in_endless_order(chance):
        # No client may be left behind by what struck before, whatever the probes could do.
        await asyncio.to_thread(clients.wait_until_all_commit, WORKS_AGAIN_SECONDS)
        if time.monotonic() > deadline and len(recovery) == len(all_faults()):
            break
        console.print(f"{fault.name}: ", end="")
        seconds = await fault.strike(scene)
        recovery[fault.name].append(seconds)
        console.print(f"works again after {seconds:.2f} s")
    return recovery


def in_endless_order(chance: Random) -> Iterator[Fault]:
    """Each kind once before any comes again."""
    while True:
        faults = all_faults()
        chance.shuffle(faults)
        yield from faults


def show(recovery: dict[str, list[float]], verdict: Verdict) -> None:
    table = Table("fault", "struck", "works again after, s", box=None)
    for name, seconds in sorted(recovery.items()):
        table.add_row(name, str(len(seconds)), " ".join(f"{one:.2f}" for one in seconds))
    console.print(table)
    console.print(
        f"{len(verdict.history):,} transactions checked: {verdict.committed:,} committed writes, "
        f"{verdict.unknown:,} of which nobody was told how they ended"
    )
