"""`percolator status` tells the truth, even when half of the cluster is down."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import percolator
from percolator import Table, codecs
from percolator.blocking.api import Database
from percolator.cli.app import app
from percolator.errors import OutcomeUnknown
from percolator.limits import Limits
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess
from percolator.world import MachineClock
from tests.command_line import CliRunner
from tests.integration.oracle_with_clock_ahead import AHEAD_MILLISECONDS

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


# A tablet server whose disk is full as far as it allows: real processes.


def all_in_reserve(name: str, service: str) -> Sequence[str]:
    """The first tablet server keeps more in reserve than any disk has."""
    return (
        (service, "--disk-reserve-bytes", str(10**15)) if name == "tabletserver-1" else (service,)
    )


@pytest.fixture
def full_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    data = tmp_path_factory.mktemp("cluster")
    with LocalCluster(data, tablet_servers=1, program=all_in_reserve) as cluster:
        yield cluster


def run(address: str, *arguments: str) -> tuple[int, Any]:
    done = CliRunner().invoke(app, ["--json", "--address", address, *arguments])
    return done.exit_code, json.loads(done.stdout)


def test_a_server_that_refuses_writes_is_found_by_status_and_servers(
    full_cluster: LocalCluster,
) -> None:
    table = Table("people")
    name = table.column("name", codecs.text)
    full = full_cluster.processes["tabletserver-1"].address
    with percolator.connect(full_cluster.address, limits=Limits(call_seconds=2.0)) as db:
        db.create_table(table)
        # Not even the marker that would roll it back can be stored.
        with pytest.raises(OutcomeUnknown, match="kept in reserve"), db.transaction() as tx:
            tx.set("ada", name, "Ada")
    deadline = time.monotonic() + SECONDS
    while True:
        code, found = run(full_cluster.address, "status", "--check")
        wanted = f"tablet server {full} takes no writes: "
        if any(one.startswith(wanted) for one in found["problems"]):
            break
        assert time.monotonic() < deadline, found["problems"]
    assert code == WRONG
    shown = {one["address"]: one["writes_refused"] for one in found["servers"]}
    assert "kept in reserve" in shown.pop(full)
    assert not any(shown.values())
    _, [server] = run(full_cluster.address, "servers")
    assert "kept in reserve" in server["writes_refused"]
    text = CliRunner().invoke(app, ["--address", full_cluster.address, "status"]).stdout
    assert "1, takes no writes" in text


# An oracle whose clock is temporarily two hours fast: real processes, before, during, after.


@contextmanager
def fast_oracle(cluster: LocalCluster, *flags: str) -> Iterator[None]:
    """Replaces the cluster's own oracle, which is killed first and restarted afterwards."""
    own = cluster.processes["oracle"]
    own.kill()
    store = str(cluster.data / "store")
    process = ServiceProcess(
        "oracle-ahead",
        "tests.integration.oracle_with_clock_ahead",
        ["--store", store, "--masters", cluster.address, *flags],
        logs=cluster.data / "logs",
        run=cluster.data / "run",
    )
    process.listen_on(own.address)
    process.start()
    try:
        process.wait_ready(SECONDS)
        yield
    finally:
        process.kill()
    cluster.restart("oracle")


def everything_works(db: Database, name: str) -> None:
    """Reads and writes, also in a new table, which has not seen any timestamp yet."""
    table = Table(name)
    column = table.column("value", codecs.integer)
    db.create_table(table)
    with db.transaction() as tx:
        tx.set("row", column, 7)
    with db.snapshot() as snapshot:
        assert snapshot.get("row", column) == 7


def lead_milliseconds(db: Database) -> int:
    return (db.timestamp() >> 18) - MachineClock().wall_milliseconds()


def problems(address: str, expected: str) -> list[str]:
    """What `status --check` finds, once it finds what is expected."""
    deadline = time.monotonic() + SECONDS
    while True:
        done = CliRunner().invoke(app, ["--json", "--address", address, "status", "--check"])
        found: dict[str, Any] = json.loads(done.stdout)
        if any(expected in one for one in found["problems"]):
            assert done.exit_code == WRONG
            return list(found["problems"])
        assert time.monotonic() < deadline, found["problems"]


def test_timestamps_far_ahead_of_the_clock_stop_nothing_and_are_reported(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, tablet_servers=2) as cluster:
        with percolator.connect(cluster.address) as db:
            everything_works(db, "before")
            with fast_oracle(cluster, "--follow-clock-jumps"):
                everything_works(db, "meanwhile")
            everything_works(db, "after")
            assert lead_milliseconds(db) == pytest.approx(AHEAD_MILLISECONDS, abs=60_000)
        cluster.processes["tabletserver-1"].kill()
        cluster.restart("tabletserver-1")
        with percolator.connect(cluster.address) as db:
            everything_works(db, "later")
        problems(cluster.address, "the oracle's timestamps are 7,")


def test_an_oracle_with_a_fast_clock_does_not_take_the_cluster_into_the_future(
    tmp_path: Path,
) -> None:
    with (
        LocalCluster(tmp_path, tablet_servers=1) as cluster,
        percolator.connect(cluster.address) as db,
    ):
        everything_works(db, "before")
        with fast_oracle(cluster):
            everything_works(db, "meanwhile")
            assert lead_milliseconds(db) < 60_000
        assert lead_milliseconds(db) < 60_000
