"""Clusters of processes whose only durable place is a row store: no two of them share a disk."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import grpc
import pytest

import percolator
from examples.webindex import tables
from examples.webindex.crawl import Crawl
from percolator import (
    Database,
    InvalidArgument,
    SchemaError,
    Table,
    Transaction,
    codecs,
    observes,
)
from percolator.bigtable.connection import BigtableNetwork
from percolator.bigtable.place import Place
from percolator.errors import InvariantViolation, PercolatorError, Retry, UsageError
from percolator.services.local.cluster import LocalCluster
from percolator.testing.row_database import connect_over
from percolator.v1.bigtable_pb2 import BigtableDeleteTableRequest
from tests.bigtable.emulator_process import emulator
from tests.integration.test_examples import crawl_among_kills

pytestmark = [pytest.mark.bigtable, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
NOTES = Table("notes")
TEXT = NOTES.column("text", codecs.text)
LENGTH = NOTES.column("length", codecs.integer)

CLIENTS = 3
CLIENTS_KILLED_WITH_A_LEADER = 2
TRANSFERS_BETWEEN_KILLS = 3
ACCOUNTS = [f"account-{number}" for number in range(6)]
START_BALANCE = 100
BANK = Table("bank")
BALANCE = BANK.column("balance", codecs.integer)
TRANSFERS = BANK.column("transfers", codecs.integer)

DOCUMENTS = 100
DELETIONS = 15


@pytest.fixture(scope="module")
def emulator_host() -> Iterator[str]:
    with emulator() as address:
        yield address


@pytest.fixture
def store(emulator_host: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an empty instance."""
    monkeypatch.setenv("BIGTABLE_EMULATOR_HOST", emulator_host)
    return f"bigtable://clusters/i{uuid.uuid4().hex[:20]}"


def cluster_on(
    store: str, data: Path, *, leaders: int = 1, workers: int = 0, observers: Sequence[str] = ()
) -> LocalCluster:
    return LocalCluster(
        data,
        store=store,
        tablet_servers=0,
        masters=leaders,
        oracles=leaders,
        workers=workers,
        observers=observers,
        start_seconds=60.0,
    )


def test_a_program_finds_its_data_after_everything_was_restarted(
    store: str, tmp_path: Path
) -> None:
    with (
        cluster_on(store, tmp_path / "first") as cluster,
        percolator.connect(cluster.address) as db,
    ):
        db.create_table(NOTES)
        with db.transaction() as tx:
            tx.set("one", TEXT, "written before")
        before = db.timestamp()
    # Another directory: nothing but the store connects the two.
    with (
        cluster_on(store, tmp_path / "second") as cluster,
        percolator.connect(cluster.address) as db,
    ):
        assert db.timestamp() > before
        assert db.get("one", TEXT) == "written before"
        with pytest.raises(PercolatorError, match="table 'notes' exists"):
            db.create_table(NOTES)
        with db.transaction() as tx:
            tx.set("two", TEXT, "written after")
        with db.snapshot(at=before) as snapshot:
            assert [row.key for row in snapshot.scan(NOTES)] == ["one"]


def test_features_of_tablets_are_refused_with_an_explanation(store: str, tmp_path: Path) -> None:
    with cluster_on(store, tmp_path) as cluster:
        called = _command(cluster, "tablets")
        assert called.returncode == 2
        assert f"the cells of this cluster are in {store}, and it has no tablets" in called.stderr
        assert "no tablet servers" in _command(cluster, "servers").stdout
        with (
            percolator.connect(cluster.address) as db,
            pytest.raises(InvalidArgument, match="feed"),
        ):
            db.create_table(NOTES, change_feed=True)


def test_the_environment_may_name_the_emulator_but_not_that_of_another_cluster(
    store: str, emulator_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster_on(store, tmp_path) as cluster:
        with emulator() as other:
            monkeypatch.setenv("BIGTABLE_EMULATOR_HOST", other)
            with pytest.raises(UsageError, match=f"the emulator at {other}, which cannot be used"):
                percolator.connect(cluster.address)
        with pytest.raises(PercolatorError, match="name it in BIGTABLE_EMULATOR_HOST"):
            percolator.connect(cluster.address, timeout=5.0)
        for here in (emulator_host.replace("127.0.0.1", "localhost"), ""):
            monkeypatch.setenv("BIGTABLE_EMULATOR_HOST", here)
            with percolator.connect(cluster.address) as db:
                assert db.tables() == []


def test_an_oracle_of_another_cluster_is_refused(store: str, tmp_path: Path) -> None:
    other = f"{store}b"
    with cluster_on(other, tmp_path / "other"), cluster_on(store, tmp_path / "one") as cluster:
        command = ["serve", "oracle", "--store", other, "--masters", cluster.address]
        called = subprocess.run(
            [sys.executable, "-m", "percolator.cli", *command, "--listen", "127.0.0.1:0"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert called.returncode == 2
    last = called.stderr.strip().splitlines()[-1]
    assert last.startswith(f"oracle: store: {other} belongs to cluster"), called.stderr


def test_money_is_neither_created_nor_lost_while_leaders_and_clients_are_killed(
    store: str, tmp_path: Path
) -> None:
    with (
        cluster_on(store, tmp_path, leaders=2) as cluster,
        percolator.connect(cluster.address) as db,
    ):
        db.create_table(BANK)
        with db.transaction() as tx:
            for account in ACCOUNTS:
                tx.set(account, BALANCE, START_BALANCE)

        def start(number: int) -> subprocess.Popen[bytes]:
            command = ["-m", "tests.bigtable.test_cluster", cluster.address, f"client-{number}"]
            return subprocess.Popen([sys.executable, *command], cwd=ROOT)

        clients = [start(number) for number in range(CLIENTS)]
        numbers = cycle(range(CLIENTS))
        try:
            for leader in ("oracle", "master", "oracle-2", "master-2"):
                _until_more(db, TRANSFERS_BETWEEN_KILLS)
                cluster.processes[leader].kill()
                for number in islice(numbers, CLIENTS_KILLED_WITH_A_LEADER):
                    clients[number].kill()
                    assert clients[number].wait() == -9, "it did not end by itself"
                    clients[number] = start(number)
                    _until_more(db, TRANSFERS_BETWEEN_KILLS)
                cluster.restart(leader)
        finally:
            for client in clients:
                client.kill()
                client.wait()
        made = _transfers(db)
    with (
        cluster_on(store, tmp_path / "again") as cluster,
        percolator.connect(cluster.address) as db,
    ):
        assert _transfers(db) >= made


def _command(cluster: LocalCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `percolator` on a cluster."""
    return subprocess.run(
        [sys.executable, "-m", "percolator.cli", *arguments],
        env={**os.environ, "PERCOLATOR_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        check=False,
    )


def test_status_finds_nothing_wrong_and_names_the_store(store: str, tmp_path: Path) -> None:
    with cluster_on(store, tmp_path) as cluster:
        called = _command(cluster, "status", "--check")
    assert called.returncode == 0, called
    assert f"cells in {store}" in called.stdout


@observes(TEXT, name="measure")
def measure(tx: Transaction, row: str) -> None:
    tx.set(row, LENGTH, len(tx.get(row, TEXT, "")))


def _lengths(db: Database) -> dict[str, int]:
    with db.snapshot() as snapshot:
        return {row.key: row[LENGTH] for row in snapshot.scan(NOTES, columns=[LENGTH])}


def test_a_client_that_knows_an_older_schema_notifies_a_new_observer(
    store: str, tmp_path: Path
) -> None:
    fresh = observes(TEXT, name="measure", backfill=False)(measure.function)
    with (
        cluster_on(store, tmp_path) as cluster,
        percolator.connect(cluster.address) as db,
        percolator.connect(cluster.address) as other,
    ):
        db.create_table(NOTES)
        with other.transaction() as tx:  # now it knows the table, without an observer
            tx.set("before", TEXT, "text")
        db.register_observers([fresh])
        with other.transaction() as tx:
            tx.set("after", TEXT, "text")
        with db.run_observers([fresh]):
            db.wait_for_observers(timeout=60)
            assert _lengths(db) == {"after": 4}
            assert db.backfill(fresh) == 2
            db.wait_for_observers(timeout=60)
            assert _lengths(db) == {"before": 4, "after": 4}


def test_a_crawl_survives_the_death_of_a_worker_and_the_oracle(store: str, tmp_path: Path) -> None:
    options = ("--documents", str(DOCUMENTS), "--seed", "3", "--updates", "30")
    deletions = ("--deletions", str(DELETIONS))
    observers = ["examples.webindex.observers:observers"]
    with (
        cluster_on(store, tmp_path, workers=2, observers=observers) as cluster,
        percolator.connect(cluster.address) as db,
    ):
        tables.create_tables(db)
        documents = crawl_among_kills(
            cluster, db, *options, *deletions, loaded=40, killed=("oracle", "worker")
        )
    assert {one.url for one in documents} <= {one.url for one in Crawl(DOCUMENTS, seed=3)}
    assert DOCUMENTS - DELETIONS <= len(documents) < DOCUMENTS


def _until_more(db: Database, count: int) -> None:
    """Returns when that many more transfers were made. Each look checks the sum."""
    before = _transfers(db)
    deadline = time.monotonic() + 120.0
    while _transfers(db) < before + count:
        assert time.monotonic() < deadline, "no money moves"
        time.sleep(0.05)


def _transfers(db: Database) -> int:
    # Longer than it takes others to replace a leader that was killed, on a slow machine, too.
    with db.snapshot(timeout=60.0) as snapshot:
        rows = list(snapshot.scan(BANK))
    balances = [row[BALANCE] for row in rows if BALANCE in row]
    assert len(balances) == len(ACCOUNTS)
    assert sum(balances) == START_BALANCE * len(ACCOUNTS)
    return sum(row[TRANSFERS] for row in rows if TRANSFERS in row)


def _transfer(tx: Transaction, name: str) -> None:
    source, target = random.sample(ACCOUNTS, 2)
    amount = random.randint(1, 5)
    tx.set(source, BALANCE, (tx.get(source, BALANCE) or 0) - amount)
    tx.set(target, BALANCE, (tx.get(target, BALANCE) or 0) + amount)
    tx.set(name, TRANSFERS, (tx.get(name, TRANSFERS) or 0) + 1)


def main() -> None:
    """A client that moves money until it is killed."""
    address, name = sys.argv[1:]
    with percolator.connect(address) as db:
        while True:
            try:
                db.run(_transfer, name)
            except PercolatorError as error:
                if error.retry is Retry.USELESS:
                    raise


# The emulator as a store: the commands that prepare and check it, and changes made by hand.

STORE = "bigtable://some-project/some-instance"


def _store_store(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "percolator.cli", "--json", "store", *arguments],
        env={**os.environ, "BIGTABLE_EMULATOR_HOST": address},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.timeout(120)
def test_the_emulator_is_prepared_and_passes_the_check() -> None:
    with emulator() as address:
        for _ in range(2):
            prepared = _store_store(address, "init", STORE)
            assert prepared.returncode == 0, prepared.stderr
        checked = _store_store(address, "check", STORE, "--seconds", "0.5", "--in-flight", "8")
    assert checked.returncode == 0, checked.stderr
    shown = json.loads(checked.stdout)
    assert shown["not_kept"] == {}
    assert shown["check_and_mutates_per_second"] > 0
    assert checked.stderr.count("kept: ") == 8
    assert "not tried: scans backwards" in checked.stderr


@pytest.mark.timeout(120)
def test_a_silent_store_is_reported_without_a_traceback() -> None:
    for verb in ("init", "check"):
        result = _store_store("127.0.0.1:1", verb, STORE)
        assert result.returncode == 1
        assert "Traceback" not in result.stderr


ADMIN = "/google.bigtable.admin.v2.BigtableTableAdmin/"
PATIENT = 600.0
SOON = 30.0
STORE_SECONDS = 10.0


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with emulator() as address:
        yield Place(address, "changed", "by-hand", scans_backwards=False)


def _change(place: Place, method: str, request: bytes) -> None:
    with grpc.insecure_channel(place.address) as channel:
        channel.unary_unary(ADMIN + method)(request, timeout=STORE_SECONDS)


def _family(place: Place, table: str, family: bytes, change: bytes) -> None:
    """`ModifyColumnFamilies`, with one modification."""
    name, one = table.encode(), b"\x0a" + bytes([len(family)]) + family + change
    request = b"\x0a" + bytes([len(name)]) + name + b"\x12" + bytes([len(one)]) + one
    _change(place, "ModifyColumnFamilies", request)


_DROP, _CREATE = b"\x20\x01", b"\x12\x00"


@pytest.mark.timeout(120)
def test_a_removed_family_and_a_deleted_table_are_named_at_once(place: Place) -> None:
    with connect_over(BigtableNetwork, place) as db:
        db.create_table(NOTES)
        table = place.table(1)

        def write(key: str) -> None:
            with db.transaction(timeout=PATIENT) as tx:
                tx.set(key, TEXT, "text")

        write("before")
        for family in (b"l", b"w"):
            _family(place, table, family, _DROP)
            began = time.monotonic()
            says = f"the table percolator-1 lacks the family {family.decode()}: somebody has"
            with pytest.raises(InvariantViolation, match=says):
                write("meanwhile")
            assert time.monotonic() - began < SOON
            _family(place, table, family, _CREATE)
            write("again")
        _change(place, "DeleteTable", BigtableDeleteTableRequest(name=table).SerializeToString())
        began = time.monotonic()
        with pytest.raises(
            SchemaError, match=r"percolator-1.*somebody has deleted it in the store"
        ):
            write("after")
        assert time.monotonic() - began < SOON


if __name__ == "__main__":
    main()
