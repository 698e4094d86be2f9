"""A bank on several tablet servers. One of them is killed, and so is a client in mid-commit."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from percolator.services.local.cluster import LocalCluster
from tests.chaos.clients import Clients, lives
from tests.chaos.supervisor import supervising

pytestmark = pytest.mark.integration

COMMITS_SECONDS = 15.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=3) as started:
        yield started


async def test_a_killed_server_and_a_killed_client_lose_no_acknowledged_transfer_and_no_money(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    async with supervising(cluster, "bank", tmp_path) as supervisor:
        first = lives(cluster.address, tmp_path / "clients", "bank", seed=1, count=2, sessions=5)
        clients = Clients(first)
        try:
            await asyncio.to_thread(clients.wait_until_all_commit, COMMITS_SECONDS)

            before = {one.tablet_id: one for one in await supervisor.tablets()}
            at = {process.address: process for process in cluster.processes.values()}
            victim = at[await supervisor.owner_of_most(at)]
            victim.kill()
            await supervisor.recovered()
            after = {one.tablet_id: one for one in await supervisor.tablets()}
            lost = {key for key, one in before.items() if one.address == victim.address}
            assert lost, "the killed server served nothing"
            assert {key for key, one in after.items() if one.epoch > before[key].epoch} == lost
            await asyncio.to_thread(clients.wait_until_all_commit, COMMITS_SECONDS)

            caught = await asyncio.to_thread(clients.all[0].catch_in_a_commit)
            assert caught
            clients.all[0].kill()
            await supervisor.recovered()
            clients.all[0].begin_another_life()
            await asyncio.to_thread(clients.wait_until_all_commit, COMMITS_SECONDS)
            await asyncio.to_thread(clients.stop)
        finally:
            clients.kill()
        verdict = await supervisor.judge(clients)
    verdict.require_clean(tmp_path)
    assert verdict.unknown >= caught, "the killed client's commits should count as unknown"
    await asyncio.to_thread(cluster.restart, victim.name)


def test_the_bank_example_keeps_the_same_total_from_run_to_run(cluster: LocalCluster) -> None:
    for _ in range(2):
        command = [sys.executable, "-m", "examples.bank", "--address", cluster.address]
        done = subprocess.run(
            [*command, "--seconds", "0.5"], check=True, capture_output=True, text=True, timeout=50
        )
        transfers, audits, total = map(int, re.findall(r"\d+", done.stdout.replace(",", "")))
        assert transfers > 0
        assert audits > 0
        assert total == 12_000
