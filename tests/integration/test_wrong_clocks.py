"""An oracle whose clock is temporarily two hours fast: real processes, before, during, after."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import percolator
from percolator import Table, codecs
from percolator.blocking.database import Database
from percolator.cli.app import app
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess
from percolator.world import MachineClock
from tests.command_line import CliRunner
from tests.integration.oracle_with_clock_ahead import AHEAD_MILLISECONDS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SECONDS = 30.0
WRONG = 3


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
