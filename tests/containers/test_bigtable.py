"""`docker-compose -f compose.yaml -f deploy/compose.bigtable.yaml`: a cluster on Google's emulator.

Orders are placed from outside, through published ports, and workers in containers handle them. One
container after another is killed. At the end, each order must be stored, and handled once. Then the
emulator is killed, and with it everything that is stored.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from rich.console import Console

from percolator import aio
from percolator.bigtable.place import EMULATOR_VARIABLE
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import addresses_of, describe
from percolator.wire.credentials import TLS_VARIABLES, TOKEN_VARIABLE
from percolator.wire.through import routed_world
from percolator.world import MachineClock, World, machine_random
from tests.chaos.pulse import leader
from tests.chaos.shop import Shop
from tests.containers.composed import KINDS, ComposedCluster, Container, free_port, until_described

FILES = ("compose.yaml", "deploy/compose.bigtable.yaml", "tests/containers/compose.orders.yaml")
GONE = "bigtable://percolator/percolator now belongs to"
WANTED = {"master": 2, "oracle": 2, "lockservice": 1}
WORKERS = 2
HANDLED_SECONDS = 60.0

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

console = Console()


@pytest.fixture(scope="module", name="cluster")
def _cluster() -> Iterator[ComposedCluster]:
    port = free_port()
    variables = {"PERCOLATOR_EMULATOR_PORT": str(port)}
    project = f"percolator-bigtable-{os.getpid()}"
    cluster = ComposedCluster(project, free_port(), FILES, variables=variables)
    with pytest.MonkeyPatch.context() as patch:
        for name in (*TLS_VARIABLES.values(), TOKEN_VARIABLE):
            patch.delenv(name, raising=False)
        patch.setenv(EMULATOR_VARIABLE, f"127.0.0.1:{port}")
        try:
            cluster.up(worker=WORKERS, loader=0)
            yield cluster
        finally:
            cluster.down(even_data=True)


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


async def _leading(cluster: ComposedCluster, kind: str) -> Container:
    world = World(MachineClock(), GrpcNetwork(), machine_random())
    try:
        described = await describe(world.network, [cluster.address], HANDLED_SECONDS)
        routed = routed_world(world, [cluster.address], described)
        found = await leader(routed.network, kind, addresses_of(described, KINDS[kind]))
    finally:
        await world.network.close()
    return await asyncio.to_thread(cluster.at, found)


async def _killed(victim: Container, shop: Shop) -> None:
    """Kills a container, sees that everything works without it, and starts it again."""
    began = time.monotonic()
    await asyncio.to_thread(victim.kill)
    await _handled(shop)
    console.print(f"without {victim.service}: works again after {time.monotonic() - began:.2f} s")
    await asyncio.to_thread(victim.start)


async def _all_healthy(cluster: ComposedCluster) -> None:
    """Returns when the health checks of all containers find nothing wrong."""
    deadline = time.monotonic() + HANDLED_SECONDS
    for container in cluster.containers():
        while said := await asyncio.to_thread(container.trouble):
            assert time.monotonic() < deadline, said


async def test_whatever_container_is_lost_the_row_store_has_everything(
    cluster: ComposedCluster,
) -> None:
    await until_described(cluster.address, WANTED)
    assert cluster.containers("tabletserver") == []
    async with aio.connect(cluster.address) as database:
        for container in cluster.containers():
            if container.service != "emulator":  # it has no program that could write
                await asyncio.to_thread(container.require_contained)
        shop = Shop(database)
        await shop.open()
        await until_described(cluster.address, WANTED | {"worker": WORKERS})
        async with _placing(shop):
            await _handled(shop)
            await _killed(cluster.containers("worker")[0], shop)
            for kind in ("oracle", "master"):
                await _killed(await _leading(cluster, kind), shop)
        assert await shop.problems() == []
        assert shop.placed > 10
        console.print(f"{shop.placed} orders placed, each of which two observers handled once")
    await _all_healthy(cluster)
    (gateway,) = cluster.containers("gateway")
    assert "shipped" in gateway.runs("percolator", "scan", "orders", "--limit", "1")


async def test_an_emulator_that_begins_again_has_lost_the_cluster_and_all_services_say_so(
    cluster: ComposedCluster,
) -> None:
    await until_described(cluster.address, WANTED)
    (emulator,) = cluster.containers("emulator")
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
    while silent := {one for one, words in said.items() if words not in _log(cluster, one)}:
        assert time.monotonic() < deadline, f"these do not say what happened: {silent}"
    cluster.down()
    cluster.up(worker=WORKERS, loader=0)
    await until_described(cluster.address, WANTED)
    async with aio.connect(cluster.address) as database:
        assert await database.tables() == []


def _log(cluster: ComposedCluster, service: str) -> str:
    (container,) = cluster.containers(service)
    return container.log()
