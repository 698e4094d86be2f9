"""Workers as processes: if killed at work, they lose no change and handle none twice."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import percolator
from percolator import Database, Table, Transaction, aio, codecs
from percolator.services.local.cluster import LocalCluster
from percolator.world import Random
from tests.chaos.clients import Clients, lives
from tests.chaos.supervisor import supervising
from tests.integration.command_line import CommandLine
from tests.integration.observed_orders import disputed, orders, packed, placed, shipped
from tests.integration.recipes_at_work import FILE_VARIABLE, mirror, mirrors, out, sums

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


# Recipes on a cluster of processes, whose workers are killed at work.

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
def recipes_cluster(
    tmp_path_factory: pytest.TempPathFactory, exports: Path
) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path_factory.mktemp("cluster"),
        tablet_servers=2,
        workers=2,
        observers=["tests.integration.recipes_at_work:observers"],
    ) as started:
        yield started


@pytest.fixture(scope="module")
def recipes_db(recipes_cluster: LocalCluster) -> Iterator[Database]:
    with percolator.connect(recipes_cluster.address) as database:
        database.create_table(mirrors)
        sums.create(database, tablets=2)
        out.create(database)
        recipes_cluster.wait_workers()
        yield database


def kill(recipes_cluster: LocalCluster, worker: str) -> None:
    recipes_cluster.processes[worker].kill()
    recipes_cluster.restart(worker)


def test_everything_added_counts_once_though_workers_are_killed(
    recipes_cluster: LocalCluster, recipes_db: Database
) -> None:
    def add(tx: Transaction, number: int) -> None:
        sums.add(tx, KEYS[number % len(KEYS)], 1)
        sums.add(tx, KEYS[number % 2], 100)

    def program(thread: int) -> None:
        for number in range(EACH):
            recipes_db.run(add, number + thread)

    with ThreadPoolExecutor(THREADS) as threads:
        working = [threads.submit(program, thread) for thread in range(THREADS)]
        kill(recipes_cluster, "worker")
        for one in working:
            one.result()
    with recipes_db.snapshot() as snapshot:
        assert sum(sums.items(snapshot).values()) == THREADS * EACH * 101
    kill(recipes_cluster, "worker-2")
    quiet = recipes_db.wait_for_observers(timeout=WAIT_SECONDS)
    assert not any(quiet.dead_letters.values())
    with recipes_db.snapshot() as snapshot:
        found = sums.items(snapshot)
        shown = {row.key: row[mirror] for row in snapshot.scan(mirrors)}
    assert sum(found.values()) == THREADS * EACH * 101
    assert shown == found


def test_everything_put_is_in_the_file_once_and_in_order_though_workers_are_killed(
    recipes_cluster: LocalCluster, recipes_db: Database, exports: Path
) -> None:
    committed: dict[str, list[tuple[int, int]]] = {key: [] for key in KEYS}

    def program(thread: int) -> None:
        for number in range(EACH):
            key, value = KEYS[number % len(KEYS)], thread * EACH + number
            with recipes_db.transaction() as tx:
                out.put(tx, key, value)
            committed[key].append((tx.commit_timestamp or 0, value))

    with ThreadPoolExecutor(THREADS) as threads:
        working = [threads.submit(program, thread) for thread in range(THREADS)]
        kill(recipes_cluster, "worker")
        for one in working:
            one.result()
    kill(recipes_cluster, "worker-2")
    recipes_db.wait_for_observers(timeout=WAIT_SECONDS)
    found: dict[str, list[int]] = {key: [] for key in KEYS}
    for line in exports.read_text().splitlines():
        one = json.loads(line)
        found[one["key"]].append(one["value"])
    assert found == {key: [value for _, value in sorted(committed[key])] for key in KEYS}


# A bank on several tablet servers. One of them is killed, and so is a client in mid-commit.

COMMITS_SECONDS = 15.0


@pytest.fixture(scope="module")
def bank_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=3) as started:
        yield started


async def test_a_killed_server_and_a_killed_client_lose_no_acknowledged_transfer_and_no_money(
    bank_cluster: LocalCluster, tmp_path: Path
) -> None:
    async with supervising(bank_cluster, "bank", tmp_path) as supervisor:
        first = lives(
            bank_cluster.address, tmp_path / "clients", "bank", seed=1, count=2, sessions=5
        )
        clients = Clients(first)
        try:
            await asyncio.to_thread(clients.wait_until_all_commit, COMMITS_SECONDS)

            before = {one.tablet_id: one for one in await supervisor.tablets()}
            at = {process.address: process for process in bank_cluster.processes.values()}
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
    await asyncio.to_thread(bank_cluster.restart, victim.name)


def test_the_bank_example_keeps_the_same_total_from_run_to_run(bank_cluster: LocalCluster) -> None:
    for _ in range(2):
        command = [sys.executable, "-m", "examples.bank", "--address", bank_cluster.address]
        done = subprocess.run(
            [*command, "--seconds", "0.5"], check=True, capture_output=True, text=True, timeout=50
        )
        transfers, audits, total = map(int, re.findall(r"\d+", done.stdout.replace(",", "")))
        assert transfers > 0
        assert audits > 0
        assert total == 12_000


# Every service is restarted under load, one process after another; no user notices.
#
# The library may retry inside a transaction; what a program calls must not fail once.

ACCOUNTS = 20
OPENING = 100
TELLERS = 2
PROGRESS_SECONDS = 30.0
TRANSACTIONS_BETWEEN = 3
"""Transactions that every teller completes between two restarts, so that none is stuck."""

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)
ROLLING_ROWS = [f"account-{number:02}" for number in range(ACCOUNTS)]


@pytest.fixture(name="rolling_cluster")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path_factory.mktemp("cluster"),
        tablet_servers=2,
        masters=2,
        oracles=2,
        gateways=1,
        workers=1,
        observers=["tests.integration.observed_orders:observers"],
    ) as started:
        yield started


@dataclass
class Teller:
    """Moves money and audits until told to stop. An error ends it: a user would have seen it."""

    name: str
    database: aio.Database
    chance: Random
    done: int = 0
    stopping: bool = False

    async def work(self) -> None:
        while not self.stopping:
            if self.chance.random() < 0.3:
                await self._audit()
            else:
                await self.database.run(self._transfer)
            self.done += 1

    async def _transfer(self, tx: aio.Transaction) -> None:
        source, target = self.chance.sample(ROLLING_ROWS, 2)
        found = await tx.get_many(accounts, [source, target], [balance])
        await tx.set(source, balance, found[0][balance] - 1)
        await tx.set(target, balance, found[1][balance] + 1)

    async def _audit(self) -> None:
        async with self.database.snapshot() as snapshot:
            total = sum([row[balance] async for row in snapshot.scan(accounts)])
        assert total == ACCOUNTS * OPENING, f"{self.name} found {total}"


async def all_go_on(tellers: list[Teller], working: list[asyncio.Task[None]]) -> None:
    """Returns when each has done several transactions more; raises the first one's error."""
    before = [teller.done for teller in tellers]
    deadline = time.monotonic() + PROGRESS_SECONDS
    while any(
        teller.done < was + TRANSACTIONS_BETWEEN
        for teller, was in zip(tellers, before, strict=True)
    ):
        for task in working:
            if task.done():
                task.result()
        assert time.monotonic() < deadline, [(one.name, one.done) for one in tellers]
        await asyncio.sleep(0.02)


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_a_rolling_restart_of_everything_fails_no_transaction(
    rolling_cluster: LocalCluster,
) -> None:
    async with (
        aio.connect(rolling_cluster.address, description="direct") as direct,
        aio.connect(rolling_cluster.gateway_address, description="through") as through,
    ):
        await direct.create_table(orders)
        await asyncio.to_thread(rolling_cluster.wait_workers)
        await direct.create_table(accounts, splits=[ROLLING_ROWS[ACCOUNTS // 2]])
        opening = ((row, {balance: OPENING}) for row in ROLLING_ROWS)
        await direct.set_many(opening)
        tellers = [
            Teller(f"{where} {number}", database, Random(f"{where} {number}"))
            for where, database in (("direct", direct), ("through", through))
            for number in range(TELLERS)
        ]
        working = [asyncio.create_task(teller.work()) for teller in tellers]
        try:
            restarted = []
            for name, process in rolling_cluster.processes.items():
                await all_go_on(tellers, working)
                process.ask_to_stop()
                assert await asyncio.to_thread(process.wait_stopped) == 0, name
                await asyncio.to_thread(rolling_cluster.restart, name)
                restarted.append(name)
            await all_go_on(tellers, working)
            for teller in tellers:
                teller.stopping = True
            await asyncio.gather(*working)
        finally:
            for task in working:
                task.cancel()
        assert restarted == list(rolling_cluster.processes)
        print(f"{sum(teller.done for teller in tellers)} transactions, {len(restarted)} restarts")
