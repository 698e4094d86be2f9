"""`percolator status` tells the truth, even when half of the cluster is down."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from percolator.cli.app import app
from percolator.services.local.cluster import LocalCluster
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


def test_every_address_gives_the_leaders_answer(cluster: LocalCluster) -> None:
    masters = cluster.address.split(",")
    unused = "127.0.0.1:1"
    for address in (*masters, cluster.gateway_address, f"{unused},{cluster.gateway_address}"):
        found = until_well(address)
        assert roles(found, "master") == roles(found, "oracle") == ["leads", "standby"]
        # A server that has just registered reports 0. It stays 0 only in a wrong answer.
        deadline = time.monotonic() + SECONDS
        while not all(one["uptime_seconds"] for one in found["servers"]):
            assert time.monotonic() < deadline, found["servers"]
            found = until_well(address)


def test_registered_oracles_that_do_not_answer_are_a_problem(cluster: LocalCluster) -> None:
    until_well(cluster.address)
    oracles = [cluster.processes[name] for name in ("oracle", "oracle-2")]
    for oracle in oracles:
        oracle.pause()
    try:
        code, found = status(cluster.gateway_address)
        listed = roles(found, "oracle")
        assert code == WRONG
        assert listed == ["no answer"] * len(listed)
        # They may have been forgotten by now; before that, they have been silent only for seconds.
        wanted = "no oracle leads" if listed else "no oracle is registered"
        assert wanted in found["problems"]
    finally:
        for oracle in oracles:
            oracle.resume()
    until_well(cluster.address)


def test_a_tablet_server_that_is_paused_is_named_before_it_counts_as_dead(
    cluster: LocalCluster,
) -> None:
    until_well(cluster.address)
    paused = cluster.processes["tabletserver-1"]
    for address in (cluster.address, cluster.gateway_address):
        paused.pause()
        try:
            code, found = status(address)
        finally:
            paused.resume()
        assert code == WRONG
        assert f"tablet server {paused.address} does not answer" in found["problems"]
        until_well(cluster.address)


def test_without_a_leading_master_status_claims_no_times_of_servers(cluster: LocalCluster) -> None:
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
