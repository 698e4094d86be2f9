"""`percolator status` tells what is so, also of a cluster of which half is gone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from percolator.cli.app import app
from services.local.cluster import LocalCluster
from tests.command_line import CliRunner

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SECONDS = 30.0
WRONG = 3


@pytest.fixture(scope="module", name="cluster")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path_factory.mktemp("cluster"), tablet_servers=1, masters=2, oracles=2, gateways=1
    ) as cluster:
        yield cluster


def status(address: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["--json", "--address", address, "status", "--check"])
    return done.exit_code, json.loads(done.stdout)


def until_well(address: str) -> dict[str, Any]:
    deadline = time.monotonic() + SECONDS
    while True:
        code, found = status(address)
        if code == 0:
            return found
        assert time.monotonic() < deadline, found["problems"]


def roles(found: dict[str, Any], kind: str) -> list[str]:
    return sorted(one["role"] for one in found["servers"] if one["kind"] == kind)


def test_whichever_address_is_asked_the_answer_is_the_leaders(cluster: LocalCluster) -> None:
    masters = cluster.address.split(",")
    nobody = "127.0.0.1:1"
    for address in (*masters, cluster.gateway_address, f"{nobody},{cluster.gateway_address}"):
        found = until_well(address)
        assert roles(found, "master") == roles(found, "oracle") == ["leads", "standby"]
        # What registers says 0 once; only those who do not know say it for ever.
        deadline = time.monotonic() + SECONDS
        while not all(one["uptime_seconds"] for one in found["servers"]):
            assert time.monotonic() < deadline, found["servers"]
            found = until_well(address)


def test_oracles_that_are_registered_and_do_not_answer_are_a_problem(cluster: LocalCluster) -> None:
    until_well(cluster.address)
    oracles = [cluster.processes[name] for name in ("oracle", "oracle-2")]
    for oracle in oracles:
        oracle.pause()
    try:
        code, found = status(cluster.gateway_address)
        listed = roles(found, "oracle")
        assert code == WRONG
        assert listed == ["no answer"] * len(listed)
        # Until they are forgotten, their silence alone would be a few seconds.
        wanted = "no oracle leads" if listed else "no oracle is registered"
        assert wanted in found["problems"]
    finally:
        for oracle in oracles:
            oracle.resume()
    until_well(cluster.address)


def test_without_a_leading_master_nothing_is_said_of_the_servers_times(
    cluster: LocalCluster,
) -> None:
    until_well(cluster.address)
    leader, standby = cluster.processes["master"], cluster.processes["master-2"]
    leader.pause()
    standby.pause()
    try:
        code, found = status(cluster.gateway_address)
        assert code == WRONG
        assert "no master leads" in found["problems"]
        assert {one["silence_seconds"] for one in found["servers"]} == {None}
    finally:
        leader.resume()
        standby.resume()
    until_well(cluster.address)
