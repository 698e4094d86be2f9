"""A cluster of processes whose data is in a bucket of Ceph, while parts of both are killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from percolator.bucket.place import UNFINISHED
from percolator.services.local.cluster import LocalCluster
from tests.bucket.ceph import Ceph
from tests.chaos import in_bucket
from tests.chaos.catalogue import kills
from tests.chaos.client import Life
from tests.chaos.clients import Clients, Shop
from tests.chaos.compaction import Filler
from tests.chaos.scene import Scene
from tests.chaos.streams import Streams
from tests.chaos.supervisor import RECOVERY_SECONDS_MAX, Pulse, supervising
from tests.doubles.s3_server import set_credentials

SECONDS = 100.0
SEED = 1
WORKLOAD = "bank"
CLIENTS = 2

pytestmark = [pytest.mark.bucket, pytest.mark.timeout(420)]


@pytest.fixture(name="cluster")
def _cluster(ceph: Ceph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setenv(UNFINISHED, "1")
    set_credentials(monkeypatch, ceph.account.access_key_id, ceph.account.secret)
    place = ceph.new_bucket()
    cluster = LocalCluster(
        tmp_path / "cluster",
        store=str(place),
        tablet_servers=3,
        masters=2,
        oracles=2,
        workers=2,
        observers=["tests.integration.observed_orders:observers"],
        links=True,
        program=lambda name, service: [
            in_bucket.MODULE,
            f"--service={service}",
            *ceph.nearest(place, name, service),
        ],
    )
    with cluster:
        yield cluster


async def test_what_was_acknowledged_is_kept_whatever_parts_of_cluster_and_store_are_killed(
    cluster: LocalCluster, ceph: Ceph, tmp_path: Path
) -> None:
    async with supervising(cluster, WORKLOAD, tmp_path) as supervisor:
        shop = Shop(supervisor.database)
        await shop.open()
        await asyncio.to_thread(cluster.wait_workers)
        directory = str(tmp_path / "clients")
        clients = Clients(
            [
                Life(cluster.address, f"client-{one}", 1, WORKLOAD, 3, directory, SEED, 0.03)
                for one in range(1, CLIENTS + 1)
            ]
        )

        async def orders() -> None:
            await shop.handled(await shop.place())

        probes = {
            "every tablet": supervisor.recovered,
            "an order and its observers": orders,
            "every client commits": clients.all_commit,
        }
        try:
            pulse = Pulse(probes, RECOVERY_SECONDS_MAX)
            filler = await Filler.of(supervisor.database)
            scene = Scene(cluster, clients, supervisor, filler, pulse, [], None, ceph)
            faults = Streams(scene, kills(), seed=SEED, together=3)
            async with scene.watched():
                await faults.run(SECONDS)
                await scene.recovered_since(time.monotonic())
            await asyncio.to_thread(clients.stop)
        finally:
            clients.kill()
        problems = await shop.problems()
        verdict = await supervisor.judge(clients)
        verdict.problems += problems
    faults.show(verdict, shop)
    verdict.require_clean(tmp_path)
    assert faults.never_injected() == [], faults.missed
    assert verdict.committed > len(faults.injected)
    assert in_bucket.swept(cluster.logs()) > 0
