"""`make compose-test`: the cluster of deploy/compose.tls.yaml is hurt, and checked from outside.

Clients are processes of this machine that know the published port, a certificate and a token. One
kind of container after another is killed, and one is disconnected. At the end, the checker sees the
whole history, and the audit everything that is stored.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from examples.webindex import tables
from percolator import aio
from percolator.bigtable.place import EMULATOR_VARIABLE
from percolator.errors import SchemaError
from percolator.services.local.authority import files_in, make_all
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import addresses_of, describe
from percolator.wire.credentials import TLS_VARIABLES, TOKEN_VARIABLE
from percolator.wire.through import routed_world
from percolator.world import MachineClock, World, machine_random
from tests.chaos.clients import Clients, Shop, lives
from tests.chaos.supervisor import Verdict, leader, supervising
from tests.containers.composed import (
    KINDS,
    ComposedCluster,
    Container,
    Scene,
    all_faults,
    free_port,
    until_described,
)

FILES = ("compose.yaml", "deploy/compose.tls.yaml", "tests/containers/compose.orders.yaml")
TABLET_SERVERS = 3
CLIENTS = 2
SESSIONS_PER_CLIENT = 4
WORKS_AGAIN_SECONDS = 60.0

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

console = Console()


@pytest.fixture(name="certificates")
def _certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything that `make certs` makes; this process is an operator."""
    make_all(tmp_path / "certificates")
    client = tmp_path / "certificates" / "client"
    files = files_in(client)
    for part, name in TLS_VARIABLES.items():
        monkeypatch.setenv(name, getattr(files, part))
    monkeypatch.setenv(TOKEN_VARIABLE, str(client / "admin.token"))
    return tmp_path / "certificates"


@pytest.fixture(name="cluster")
def _cluster(certificates: Path) -> Iterator[ComposedCluster]:
    project = f"percolator-test-{os.getpid()}"
    variables = {"CERTIFICATES": str(certificates)}
    cluster = ComposedCluster(project, free_port(), FILES, variables=variables)
    try:
        cluster.up(tabletserver=TABLET_SERVERS, loader=0)
        yield cluster
    finally:
        cluster.down(even_data=True)


async def test_whatever_container_is_lost_nothing_else_is(
    cluster: ComposedCluster,
    certificates: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recovery: dict[str, float] = {}
    faults = all_faults(TABLET_SERVERS)
    await until_described(cluster.address, dict.fromkeys(set(KINDS) - {"worker"}, 1))
    for container in cluster.containers():
        if container.service != "certificates":  # it has ended
            await asyncio.to_thread(container.require_contained)
    async with supervising(cluster, "bank", tmp_path) as supervisor:
        # From now on, processes that are started are clients, not operators.
        monkeypatch.setenv(TOKEN_VARIABLE, str(certificates / "client" / "client.token"))
        shop = Shop(supervisor.database)
        await shop.open()
        await until_described(cluster.address, {"worker": 1})
        orders = asyncio.create_task(shop.work())
        clients = Clients(
            lives(
                cluster.address,
                tmp_path / "clients",
                "bank",
                seed=1,
                count=CLIENTS,
                sessions=SESSIONS_PER_CLIENT,
            )
        )
        try:
            scene = Scene(cluster, supervisor)
            for fault in faults:
                await asyncio.to_thread(clients.wait_until_all_commit, WORKS_AGAIN_SECONDS)
                console.print(f"{fault.name}: ", end="")
                recovery[fault.name] = await fault.inject(scene)
                console.print(f"works again after {recovery[fault.name]:.2f} s")
            await asyncio.to_thread(clients.wait_until_all_commit, WORKS_AGAIN_SECONDS)
            await asyncio.to_thread(clients.stop)
            shop.stop()
            await orders
        finally:
            orders.cancel()
            clients.kill()
        problems = await shop.problems()
        verdict = await supervisor.judge(clients)
    show(recovery, verdict)
    console.print(f"{shop.placed} orders placed, each of which two observers had to handle once")
    verdict.require_clean(tmp_path)
    assert problems == []
    assert shop.placed > 10 * len(recovery)
    assert recovery.keys() == {fault.name for fault in faults}
    assert verdict.committed > CLIENTS * SESSIONS_PER_CLIENT * len(recovery)


def show(recovery: dict[str, float], verdict: Verdict) -> None:
    table = Table("fault", "works again after, s", box=None)
    for name, seconds in recovery.items():
        table.add_row(name, f"{seconds:.2f}")
    console.print(table)
    console.print(
        f"{len(verdict.history):,} transactions checked: {verdict.committed:,} committed writes, "
        f"{verdict.unknown:,} whose outcome no client was told"
    )


# `docker-compose -f compose.yaml -f deploy/compose.bigtable.yaml`: a cluster on Google's emulator.
#
# Orders are placed from outside, through published ports, and workers in containers handle them.
# One container after another is killed. At the end, each order must be stored, and handled once.
# Then the emulator is killed, and with it everything that is stored.

BIGTABLE_FILES = (
    "compose.yaml",
    "deploy/compose.bigtable.yaml",
    "tests/containers/compose.orders.yaml",
)
GONE = "bigtable://percolator/percolator now belongs to"
WANTED = {"master": 2, "oracle": 2, "lockservice": 1}
WORKERS = 2
HANDLED_SECONDS = 60.0


@pytest.fixture(scope="module", name="bigtable_cluster")
def _bigtable_cluster() -> Iterator[ComposedCluster]:
    port = free_port()
    variables = {"PERCOLATOR_EMULATOR_PORT": str(port)}
    project = f"percolator-bigtable-{os.getpid()}"
    bigtable_cluster = ComposedCluster(project, free_port(), BIGTABLE_FILES, variables=variables)
    with pytest.MonkeyPatch.context() as patch:
        for name in (*TLS_VARIABLES.values(), TOKEN_VARIABLE):
            patch.delenv(name, raising=False)
        patch.setenv(EMULATOR_VARIABLE, f"127.0.0.1:{port}")
        try:
            bigtable_cluster.up(worker=WORKERS, loader=0)
            yield bigtable_cluster
        finally:
            bigtable_cluster.down(even_data=True)


@asynccontextmanager
async def _placing(shop: Shop) -> AsyncIterator[None]:
    """Places orders all the time."""
    placing = asyncio.create_task(shop.work())
    try:
        yield
        shop.stop()
        await placing
    finally:
        placing.cancel()


async def _handled(shop: Shop) -> None:
    """Returns when observers have handled an order that is placed now."""
    async with asyncio.timeout(HANDLED_SECONDS):
        await shop.handled(await shop.place())


async def _leading(bigtable_cluster: ComposedCluster, kind: str) -> Container:
    world = World(MachineClock(), GrpcNetwork(), machine_random())
    try:
        described = await describe(world.network, [bigtable_cluster.address], HANDLED_SECONDS)
        routed = routed_world(world, [bigtable_cluster.address], described)
        found = await leader(routed.network, kind, addresses_of(described, KINDS[kind]))
    finally:
        await world.network.close()
    return await asyncio.to_thread(bigtable_cluster.at, found)


async def _killed(victim: Container, shop: Shop) -> None:
    """Kills a container, sees that everything works without it, and starts it again."""
    began = time.monotonic()
    await asyncio.to_thread(victim.kill)
    await _handled(shop)
    console.print(f"without {victim.service}: works again after {time.monotonic() - began:.2f} s")
    await asyncio.to_thread(victim.start)


async def _all_healthy(bigtable_cluster: ComposedCluster) -> None:
    """Returns when the health checks of all containers find nothing wrong."""
    deadline = time.monotonic() + HANDLED_SECONDS
    for container in bigtable_cluster.containers():
        while said := await asyncio.to_thread(container.trouble):
            assert time.monotonic() < deadline, said


@pytest.mark.timeout(600)
async def test_whatever_container_is_lost_the_row_store_has_everything(
    bigtable_cluster: ComposedCluster,
) -> None:
    await until_described(bigtable_cluster.address, WANTED)
    assert bigtable_cluster.containers("tabletserver") == []
    async with aio.connect(bigtable_cluster.address) as database:
        for container in bigtable_cluster.containers():
            if container.service != "emulator":  # it has no program that could write
                await asyncio.to_thread(container.require_contained)
        shop = Shop(database)
        await shop.open()
        await until_described(bigtable_cluster.address, WANTED | {"worker": WORKERS})
        async with _placing(shop):
            await _handled(shop)
            await _killed(bigtable_cluster.containers("worker")[0], shop)
            for kind in ("oracle", "master"):
                await _killed(await _leading(bigtable_cluster, kind), shop)
        assert await shop.problems() == []
        assert shop.placed > 10
        console.print(f"{shop.placed} orders placed, each of which two observers handled once")
    await _all_healthy(bigtable_cluster)
    (gateway,) = bigtable_cluster.containers("gateway")
    assert "shipped" in gateway.runs("percolator", "scan", "orders", "--limit", "1")


@pytest.mark.timeout(600)
async def test_an_emulator_that_begins_again_has_lost_the_cluster_and_all_services_say_so(
    bigtable_cluster: ComposedCluster,
) -> None:
    await until_described(bigtable_cluster.address, WANTED)
    (emulator,) = bigtable_cluster.containers("emulator")
    emulator.kill()
    emulator.start()
    said = {
        "master": GONE,
        "master-standby": GONE,
        "oracle": GONE,
        "oracle-standby": GONE,
        "lockservice": "refusing to serve: this is cluster",
        "gateway": "refusing to serve: this is cluster",
    }
    deadline = time.monotonic() + HANDLED_SECONDS
    while silent := {
        one for one, words in said.items() if words not in _log(bigtable_cluster, one)
    }:
        assert time.monotonic() < deadline, f"these do not say what happened: {silent}"
    bigtable_cluster.down()
    bigtable_cluster.up(worker=WORKERS, loader=0)
    await until_described(bigtable_cluster.address, WANTED)
    async with aio.connect(bigtable_cluster.address) as database:
        assert await database.tables() == []


def _log(bigtable_cluster: ComposedCluster, service: str) -> str:
    (container,) = bigtable_cluster.containers(service)
    return container.log()


# `docker-compose --profile demo up`: plain text, workers with the document pipeline, a loader.

DEMO_TABLET_SERVERS = 2
SERVED_SECONDS = 120.0
PAGES = 10


@pytest.fixture(name="demo_cluster")
def _demo_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[ComposedCluster]:
    for name in (*TLS_VARIABLES.values(), TOKEN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    demo_cluster = ComposedCluster(f"percolator-demo-{os.getpid()}", free_port(), ["compose.yaml"])
    try:
        demo_cluster.up(tabletserver=DEMO_TABLET_SERVERS)
        yield demo_cluster
    finally:
        demo_cluster.down(even_data=True)


async def until_served(database: aio.Database, pages: int) -> None:
    """Returns when this many pages are in the serving table."""
    deadline = time.monotonic() + SERVED_SECONDS
    while True:
        try:
            async with database.snapshot() as snapshot:
                found = [page.key async for page in snapshot.scan(tables.serving)]
        except SchemaError:
            found = []  # the loader creates the tables
        if len(found) >= pages:
            return
        assert time.monotonic() < deadline, f"{len(found)} of {pages} pages are served"
        await asyncio.sleep(0.2)


@pytest.mark.timeout(600)
async def test_documents_are_loaded_and_served_by_as_many_workers_as_one_likes(
    demo_cluster: ComposedCluster,
) -> None:
    began = time.monotonic()
    await until_described(demo_cluster.address, {"worker": 2, "tabletserver": DEMO_TABLET_SERVERS})
    async with aio.connect(demo_cluster.address) as database:
        await until_served(database, PAGES)
        console.print(f"{PAGES} pages are served {time.monotonic() - began:.1f} s after `up`")
        demo_cluster.up(tabletserver=DEMO_TABLET_SERVERS, worker=4)
        await until_described(demo_cluster.address, {"worker": 4})
        async with database.snapshot() as snapshot:
            before = len([page.key async for page in snapshot.scan(tables.serving)])
        await until_served(database, before + PAGES)
    loader = demo_cluster.containers("loader")
    assert [one.is_running() for one in loader] == [True]
