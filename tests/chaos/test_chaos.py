"""`make chaos`: a cluster of real processes is hurt in every way, in many ways at the same time.

    CHAOS_SECONDS=900 CHAOS_SEED=7 CHAOS_WORKLOAD=mixed CHAOS_TOGETHER=10 make chaos

Each role has a stream of faults of its own, whose order the seed decides; CHAOS_TOGETHER limits how
many occur at once. A kind of fault without a proven effect fails the run. At the end, the library's
checker sees the whole history of half of the clients, a judge that knows nothing of it sees that of
the others, the audit sees everything that is stored, every order must have been handled once by
each observer, and recipes must hold what plain Python makes of what was committed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from percolator import aio
from percolator.services.local.cluster import LocalCluster
from tests.chaos import appender, recovery
from tests.chaos.catalogue import streams
from tests.chaos.client import Life
from tests.chaos.clients import Clients
from tests.chaos.compaction import WRITE_BUFFERS_BYTES, Filler
from tests.chaos.host_clock import HostClock
from tests.chaos.list_append.judge import judge_lists
from tests.chaos.list_append.lists import SPLITS, lists
from tests.chaos.pulse import RECOVERY_SECONDS_MAX, Pulse
from tests.chaos.recipes import at_work
from tests.chaos.recipes.client import PROGRAM as RECIPES
from tests.chaos.recipes.judged import judge_recipes
from tests.chaos.scene import Scene
from tests.chaos.shop import Shop
from tests.chaos.streams import Streams
from tests.chaos.supervisor import Supervisor, Verdict, supervising
from tests.integration.recipes_at_work import FILE_VARIABLE
from tests.mounted_file_system import MAY_MOUNT, FileSystem

SECONDS = float(os.environ.get("CHAOS_SECONDS", "90"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or secrets.randbelow(1_000_000) + 1
WORKLOAD = os.environ.get("CHAOS_WORKLOAD", "mixed")
TOGETHER = int(os.environ.get("CHAOS_TOGETHER", "100"))
HOSTS = 3
SESSIONS = 3
PACE_SECONDS = 0.03
"""Clients leave the machine to the servers most of the time: what is measured is recovery."""
RECIPES_PACE_SECONDS = 0.2
COMMITS_PER_FAULT_MIN = 4
"""Commits of the clients that the library's checker judges: fewer would prove nothing."""
DISK_BYTES = 3 << 30
_THREADS = 32

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SECONDS * 2 + 420)]

console = Console(highlight=False, markup=False, soft_wrap=True)


@pytest.fixture(name="disk")
def _disk(tmp_path: Path) -> Iterator[FileSystem | None]:
    if not MAY_MOUNT:
        yield None
        return
    found = FileSystem(tmp_path, bytes_max=DISK_BYTES)
    found.make()
    found.mount()
    try:
        yield found
    finally:
        found.unmount_in_any_case()


@pytest.fixture(name="clocks")
def _clocks(tmp_path: Path) -> list[HostClock]:
    return [HostClock(tmp_path / f"clock-{host}") for host in range(HOSTS)]


@pytest.fixture(name="exports")
def _exports(tmp_path: Path) -> Path:
    """The file to which workers export."""
    return tmp_path / "exports.jsonl"


@pytest.fixture(name="cluster")
def _cluster(
    tmp_path: Path,
    exports: Path,
    disk: FileSystem | None,
    clocks: list[HostClock],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[LocalCluster]:
    def program(name: str, service: str) -> list[str]:
        own = ["--write-buffers-bytes", str(WRITE_BUFFERS_BYTES)]
        if service == "tabletserver":
            run, more = "tests.chaos.tablet_server", own
        else:
            run, more = service, []
        clock = clocks[cluster.host_of[name]].file
        return ["tests.chaos.host_clock", *more, f"--program={run}", f"--host-clock={clock}"]

    monkeypatch.setenv(FILE_VARIABLE, str(exports))
    data = tmp_path / "cluster"
    if disk is not None:
        (disk.point / "store").mkdir()
        data.mkdir()
        (data / "store").symlink_to(disk.point / "store")
    cluster = LocalCluster(
        data,
        tablet_servers=3,
        masters=2,
        oracles=2,
        gateways=2,
        workers=2,
        observers=[
            "tests.integration.observed_orders:observers",
            "tests.chaos.recipes.at_work:observers",
        ],
        links=True,
        hosts=HOSTS,
        program=program,
    )
    with cluster:
        yield cluster


def lives(cluster: LocalCluster, clocks: list[HostClock], directory: Path) -> list[Life]:
    """Clients of each kind: with the library, directly and through gateways, and without it; and
    one that uses recipes."""
    direct, gateways = cluster.address, cluster.gateway_address
    first = Life(
        direct, "client-1", 1, WORKLOAD, SESSIONS, str(directory), SEED, pace_seconds=PACE_SECONDS
    )
    appends = replace(first, workload=appender.LIBRARY, program="tests.chaos.appender")
    bare = replace(appends, address=gateways, workload=appender.BARE)
    return [
        replace(first, host_clock=str(clocks[0].file)),
        replace(first, name="client-2", address=gateways, host_clock=str(clocks[1].file)),
        replace(appends, name="appender-1", host_clock=str(clocks[2].file)),
        replace(appends, name="appender-2", address=gateways, host_clock=str(clocks[0].file)),
        replace(bare, name="appender-3", host_clock=str(clocks[1].file)),
        replace(
            first,
            name="recipes",
            program=RECIPES,
            # Each of its transactions writes to six tables, and wakes three observers.
            sessions=2,
            pace_seconds=RECIPES_PACE_SECONDS,
            host_clock=str(clocks[2].file),
        ),
    ]


async def test_no_promise_is_broken_whatever_faults_meet(
    cluster: LocalCluster,
    clocks: list[HostClock],
    disk: FileSystem | None,
    tmp_path: Path,
    exports: Path,
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
    console.print(f"\nCHAOS_SEED={SEED} CHAOS_WORKLOAD={WORKLOAD} CHAOS_SECONDS={SECONDS:g}")
    async with (
        supervising(cluster, WORKLOAD, tmp_path) as supervisor,
        aio.connect(cluster.gateway_address, description="supervisor") as through_gateways,
    ):
        shop = Shop(supervisor.database)
        await shop.open()
        await at_work.create(supervisor.database)
        await asyncio.to_thread(cluster.wait_workers)
        await supervisor.database.create_table(lists, SPLITS)
        clients = Clients(lives(cluster, clocks, tmp_path / "clients"))
        try:
            pulse = Pulse(probes(supervisor, through_gateways, shop, clients), RECOVERY_SECONDS_MAX)
            filler = await Filler.of(supervisor.database)
            scene = Scene(cluster, clients, supervisor, filler, pulse, clocks, disk)
            kinds = streams(full_disk=disk is not None)
            faults = Streams(scene, kinds, seed=SEED, together=TOGETHER)
            async with watched(scene):
                await faults.run(SECONDS)
                await scene.recovered_since(time.monotonic())
            await asyncio.to_thread(clients.stop)
        finally:
            clients.kill()
        problems = await judge_lists(supervisor.database, clients, tmp_path / "clients")
        problems += await shop.problems()
        problems += await judge_recipes(supervisor.database, clients, exports)
        verdict = await supervisor.judge(clients)
        verdict.problems += problems
    show(faults, verdict, shop)
    verdict.require_clean(tmp_path)
    recovery.write_run(f"{SEED}-{TOGETHER}", faults.injected)
    assert faults.never_injected() == [], faults.missed
    assert verdict.committed > COMMITS_PER_FAULT_MIN * len(faults.injected)


def probes(
    supervisor: Supervisor, through_gateways: aio.Database, shop: Shop, clients: Clients
) -> dict[str, Callable[[], Awaitable[None]]]:
    async def orders() -> None:
        await shop.handled(await shop.place())

    return {
        "every tablet, directly": supervisor.recovered,
        "every tablet, through a gateway": lambda: supervisor.recovered(through_gateways),
        "an order and its observers": orders,
        "every client commits": clients.all_commit,
    }


@asynccontextmanager
async def watched(scene: Scene) -> AsyncIterator[None]:
    """Probes all the time, and looks for processes that end by themselves."""
    async with asyncio.TaskGroup() as tasks:
        watching = [tasks.create_task(scene.pulse.run()), tasks.create_task(scene.watch())]
        await scene.recovered_since(time.monotonic())
        yield
        for one in watching:
            one.cancel()


def show(faults: Streams, verdict: Verdict, shop: Shop) -> None:
    console.print(recovery.table(recovery.figures(faults.injected)))
    console.print(
        f"{len(faults.injected)} faults; {len(verdict.history):,} transactions checked: "
        f"{verdict.committed:,} committed writes, {verdict.unknown:,} whose outcome no client was "
        f"told; {shop.placed:,} orders placed"
    )
