"""What the command line shows about a cluster without tables, for people and for programs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from percolator.services.local.cluster import LocalCluster
from percolator.wire.channels import GrpcNetwork
from percolator.wire.sessions import Sessions, SessionSettings
from percolator.world import MachineClock, World, machine_random
from tests.integration.command_line import CommandLine

pytestmark = pytest.mark.integration

PIN_AT = 1_800_000_000_000 << 18
SERVICES = ["lock service", "master", "oracle", "tablet server"]
MISSED_SECONDS = 30.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=1) as started:
        yield started


@pytest.fixture
def command(cluster: LocalCluster) -> CommandLine:
    return CommandLine(cluster.address)


async def test_sessions_and_pins_are_listed_with_their_descriptions(
    cluster: LocalCluster, command: CommandLine
) -> None:
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
        as_data = await asyncio.to_thread(command.data, "sessions")
        as_text = await asyncio.to_thread(command.text, "sessions")
    finally:
        for sessions in opened:
            await sessions.close()
        await network.close()

    assert [session["session_id"] for session in as_data] == [i.hex() for i in ids if i]
    assert [session["pin"] for session in as_data] == [False, True]
    assert as_data[1]["oldest_start_timestamp"] == str(int(PIN_AT))
    assert "an ordinary worker" in as_text
    assert "2027-01-15" in as_text
    assert "(pin)" in as_text
    assert "no sessions" in await asyncio.to_thread(command.text, "sessions")
    assert await asyncio.to_thread(command.data, "sessions") == []


def test_status_shows_every_service_with_its_address_and_reports_none_missing(
    cluster: LocalCluster, command: CommandLine
) -> None:
    status = command.data("status")
    assert sorted(server["kind"] for server in status["servers"]) == SERVICES
    addresses = {process.address for process in cluster.processes.values()}
    assert {server["address"] for server in status["servers"]} == addresses
    assert status["problems"] == []
    text = command.text("status")
    assert [address for address in addresses if address not in text] == []
    assert "no oracle" not in text


def test_timestamps_requested_later_are_larger(command: CommandLine) -> None:
    first = [int(one) for one in command.data("timestamp", "--count", "3")]
    second = [int(one) for one in command.data("timestamp")]
    assert first == list(range(first[0], first[0] + 3))
    assert second[0] > first[-1]


def test_a_killed_oracle_is_reported_missing_and_comes_back_with_larger_timestamps(
    cluster: LocalCluster, command: CommandLine
) -> None:
    before = int(command.data("timestamp")[0])
    cluster.processes["oracle"].kill()
    # It is listed while it might only be silent, and then reported missing.
    deadline = time.monotonic() + MISSED_SECONDS
    while "no oracle is registered" not in command.data("status")["problems"]:
        assert time.monotonic() < deadline
    assert "no oracle is registered" in command.text("status")
    cluster.restart("oracle")
    assert int(command.data("timestamp")[0]) > before
