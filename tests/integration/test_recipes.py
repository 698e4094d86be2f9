"""Recipes on a cluster of processes, whose workers are killed at work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import percolator
from percolator import Database, Transaction
from percolator.services.local.cluster import LocalCluster
from tests.integration.recipes_at_work import FILE_VARIABLE, mirror, mirrors, out, sums

pytestmark = pytest.mark.integration

WAIT_SECONDS = 50.0
THREADS = 4
EACH = 60
KEYS = [f"key {number}" for number in range(6)]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file to which the workers export."""
    path = tmp_path_factory.mktemp("exports") / "exports.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FILE_VARIABLE, str(path))
        yield path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, exports: Path) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path_factory.mktemp("cluster"),
        tablet_servers=2,
        workers=2,
        observers=["tests.integration.recipes_at_work:observers"],
    ) as started:
        yield started


@pytest.fixture(scope="module")
def db(cluster: LocalCluster) -> Iterator[Database]:
    with percolator.connect(cluster.address) as database:
        database.create_table(mirrors)
        sums.create(database, tablets=2)
        out.create(database)
        cluster.wait_workers()
        yield database


def kill(cluster: LocalCluster, worker: str) -> None:
    cluster.processes[worker].kill()
    cluster.restart(worker)


def test_everything_added_counts_once_though_workers_are_killed(
    cluster: LocalCluster, db: Database
) -> None:
    def add(tx: Transaction, number: int) -> None:
        sums.add(tx, KEYS[number % len(KEYS)], 1)
        sums.add(tx, KEYS[number % 2], 100)

    def program(thread: int) -> None:
        for number in range(EACH):
            db.run(add, number + thread)

    with ThreadPoolExecutor(THREADS) as threads:
        working = [threads.submit(program, thread) for thread in range(THREADS)]
        kill(cluster, "worker")
        for one in working:
            one.result()
    with db.snapshot() as snapshot:
        assert sum(sums.items(snapshot).values()) == THREADS * EACH * 101
    kill(cluster, "worker-2")
    quiet = db.wait_for_observers(timeout=WAIT_SECONDS)
    assert not any(quiet.dead_letters.values())
    with db.snapshot() as snapshot:
        found = sums.items(snapshot)
        shown = {row.key: row[mirror] for row in snapshot.scan(mirrors)}
    assert sum(found.values()) == THREADS * EACH * 101
    assert shown == found


def test_everything_put_is_in_the_file_once_and_in_order_though_workers_are_killed(
    cluster: LocalCluster, db: Database, exports: Path
) -> None:
    committed: dict[str, list[tuple[int, int]]] = {key: [] for key in KEYS}

    def program(thread: int) -> None:
        for number in range(EACH):
            key, value = KEYS[number % len(KEYS)], thread * EACH + number
            with db.transaction() as tx:
                out.put(tx, key, value)
            committed[key].append((tx.commit_timestamp or 0, value))

    with ThreadPoolExecutor(THREADS) as threads:
        working = [threads.submit(program, thread) for thread in range(THREADS)]
        kill(cluster, "worker")
        for one in working:
            one.result()
    kill(cluster, "worker-2")
    db.wait_for_observers(timeout=WAIT_SECONDS)
    found: dict[str, list[int]] = {key: [] for key in KEYS}
    for line in exports.read_text().splitlines():
        one = json.loads(line)
        found[one["key"]].append(one["value"])
    assert found == {key: [value for _, value in sorted(committed[key])] for key in KEYS}
