"""Workers as processes: if killed at work, they lose no change and handle none twice."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import percolator
from percolator import Database
from percolator.services.local.cluster import START_SECONDS, LocalCluster
from tests.integration.command_line import CommandLine

from .observed_orders import disputed, orders, packed, placed, shipped

pytestmark = pytest.mark.integration

ROWS = 400
WAIT_SECONDS = 50.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path_factory.mktemp("cluster"),
        tablet_servers=2,
        workers=2,
        observers=["tests.integration.observed_orders:observers"],
    ) as started:
        yield started


@pytest.fixture(scope="module")
def db(cluster: LocalCluster) -> Iterator[Database]:
    with percolator.connect(cluster.address) as database:
        database.create_table(orders, splits=["1", "3"])
        cluster.wait_workers()
        yield database


def counts(db: Database, column: percolator.Column[int]) -> Counter[int]:
    """The number of numbered rows for each value of the column."""
    with db.snapshot() as snapshot:
        rows = snapshot.scan(orders, start="000", end="999z")
        return Counter(row[column] for row in rows if column in row)


def wait_for(db: Database, column: percolator.Column[int], rows: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while sum(counts(db, column).values()) < rows:
        assert time.monotonic() < deadline, f"only {counts(db, column)} of {rows} rows"
        time.sleep(0.02)


def test_workers_killed_at_work_lose_no_change_and_handle_none_twice(
    cluster: LocalCluster, db: Database
) -> None:
    first, second = cluster.processes["worker"], cluster.processes["worker-2"]
    db.set_many(((f"{number:03}", {placed: 1}) for number in range(ROWS)), in_flight_max=32)
    first.kill()
    assert sum(counts(db, shipped).values()) < ROWS, "the worker was killed too late"
    cluster.restart("worker")
    second.kill()
    cluster.restart("worker-2")
    wait_for(db, shipped, ROWS)
    db.wait_for_observers(timeout=WAIT_SECONDS)
    assert counts(db, packed) == {1: ROWS}
    assert counts(db, shipped) == {1: ROWS}


def test_a_worker_reports_its_health_and_its_observers_counters(
    cluster: LocalCluster, db: Database
) -> None:
    with db.transaction() as tx:
        tx.set("one more", placed, 1)
    db.wait_for_observers(timeout=WAIT_SECONDS)
    commits = 0.0
    for name in ("worker", "worker-2"):
        ready = cluster.processes[name].wait_ready(START_SECONDS)
        with grpc.insecure_channel(ready.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with urllib.request.urlopen(f"http://{ready.metrics_address}/metrics") as page:
            for line in page.read().decode().splitlines():
                if line.startswith('percolator_observer_commits_total{observer="pack"'):
                    commits += float(line.rpartition(" ")[2])
    assert commits >= 1


def test_dead_letters_are_listed_shown_retried_and_cleared(
    cluster: LocalCluster, db: Database
) -> None:
    command = CommandLine(cluster.address)

    def dead_letters(*arguments: str) -> str:
        return command.text("dead-letters", *arguments)

    db.set_many((row, {disputed: 1}) for row in ("x1", "x2", "y"))
    db.wait_for_observers(timeout=WAIT_SECONDS)
    assert dead_letters("list", "--observer", "settle").count("was never packed") == 3
    assert "ValueError: order x1 was never packed" in dead_letters("show", "x1")
    assert dead_letters("list", "--observer", "pack") == "no dead letters\n"

    db.set_many((row, {packed: 1}) for row in ("x1", "x2"))
    assert dead_letters("retry", "--table", "orders") == "3 dead letters will be retried\n"
    db.wait_for_observers(timeout=WAIT_SECONDS)
    assert [one["attempts"] for one in command.data("dead-letters", "list")] == [1]
    cleared = dead_letters("clear", "--row", "y", "--yes")
    assert cleared == "1 dead letter was cleared\n"
    assert command.data("dead-letters", "list") == []
    command.run("dead-letters", "retry", code=2)


def test_a_worker_that_is_told_to_stop_drains_and_another_continues(
    cluster: LocalCluster, db: Database
) -> None:
    worker = cluster.processes["worker"]
    worker.ask_to_stop()
    assert worker.wait_stopped() == 0
    with db.transaction() as tx:
        tx.set("without it", placed, 1)
    db.wait_for_observers(timeout=WAIT_SECONDS)
    with db.snapshot() as snapshot:
        assert snapshot.get("without it", shipped) == 1
    cluster.restart("worker")


@pytest.mark.parametrize(
    ("served", "observers", "reason"),
    [
        (True, "tests.integration.observed_orders:others", "has another observer 'pack'"),
        (True, "tests.integration.nothing:x", "cannot be imported: ModuleNotFoundError"),
        (False, "tests.integration.observed_orders:observer", "did you mean 'observers'?"),
    ],
)
def test_wrong_observers_are_reported_in_one_line_with_exit_code_2(
    cluster: LocalCluster, db: Database, served: bool, observers: str, reason: str
) -> None:
    if served:
        arguments = ["serve", "worker", "--masters", cluster.address]
        arguments += ["--listen", "127.0.0.1:0", "--metrics-listen="]
    else:
        arguments = ["--address", cluster.address, "worker"]
    command = [sys.executable, "-m", "percolator.cli", *arguments, "--observers", observers]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert ended.returncode == 2, ended.stderr
    assert reason in ended.stderr.splitlines()[-1]


def test_the_command_runs_observers_until_it_is_told_to_stop(
    cluster: LocalCluster, db: Database
) -> None:
    command = [sys.executable, "-m", "percolator.cli", "--address", cluster.address, "worker"]
    command += ["--observers", "tests.integration.observed_orders:observers"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stderr is not None
        assert "running pack of orders, ship of orders" in running.stderr.readline()
        running.terminate()
        assert running.wait(WAIT_SECONDS) == 0
    finally:
        running.kill()
        running.communicate()
