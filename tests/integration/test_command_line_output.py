"""What the command line shows of a running cluster, for people and for programs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from percolator.wire.channels import GrpcNetwork
from percolator.wire.sessions import Sessions, SessionSettings
from percolator.world import MachineClock, World, machine_random
from services.local.cluster import LocalCluster

pytestmark = pytest.mark.integration

PIN_AT = 1_800_000_000_000 << 18


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=0) as started:
        yield started


def percolator(cluster: LocalCluster, *arguments: str) -> str:
    command = [sys.executable, "-m", "percolator.cli", "--address", cluster.address, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    return done.stdout


async def test_sessions_and_pins_are_listed_with_who_they_are(cluster: LocalCluster) -> None:
    network = GrpcNetwork()
    world = World(MachineClock(), network, machine_random())
    addresses = [cluster.processes["lockservice"].address]
    wanted = [
        SessionSettings(description="an ordinary worker", ttl_seconds=20),
        SessionSettings(description="the nightly export", ttl_seconds=20, pin_at=PIN_AT),
    ]
    opened = [Sessions(world, addresses, settings) for settings in wanted]
    try:
        ids = [await sessions.current() for sessions in opened]
        as_data = json.loads(percolator(cluster, "--json", "sessions"))
        as_text = percolator(cluster, "sessions")
    finally:
        for sessions in opened:
            await sessions.close()
        await network.close()

    assert [session["session_id"] for session in as_data] == [i.hex() for i in ids if i]
    assert [session["pin"] for session in as_data] == [False, True]
    assert as_data[1]["oldest_start_timestamp"] == PIN_AT
    assert "an ordinary worker" in as_text
    assert "2027-01-15" in as_text
    assert "(pin)" in as_text
    assert "no sessions" in percolator(cluster, "sessions")


def test_status_shows_the_servers_and_misses_none(cluster: LocalCluster) -> None:
    text = percolator(cluster, "status")
    for process in cluster.processes.values():
        assert process.address in text
    assert "no oracle" not in text


def test_status_says_which_service_is_missing(cluster: LocalCluster) -> None:
    cluster.processes["oracle"].ask_to_stop()
    cluster.processes["oracle"].wait_stopped()
    # Listed for as long as it might only be silent, then missed.
    while json.loads(percolator(cluster, "--json", "status"))["missing"] != ["oracle"]:
        assert cluster.processes["master"].exit_code is None
    assert "no oracle is registered" in percolator(cluster, "status")
    cluster.restart("oracle")
