"""Clusters of processes whose only durable place is a row store: no two of them share a disk."""

from __future__ import annotations

import asyncio
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
from typing import Any

import grpc
import pytest

import percolator
from examples.webindex import tables
from examples.webindex.crawl import Crawl
from percolator import (
    Database,
    InvalidArgument,
    OutcomeUnknown,
    SchemaError,
    SnapshotTooOld,
    Table,
    Timestamp,
    Transaction,
    codecs,
    observes,
)
from percolator.backup import export_files, part_files
from percolator.bigtable.admin import has_table
from percolator.bigtable.connection import BigtableNetwork
from percolator.bigtable.place import EMULATOR_VARIABLE, Place, parse_place
from percolator.errors import InvariantViolation, PercolatorError, Retry, Unavailable, UsageError
from percolator.services.local.cluster import LocalCluster
from percolator.testing.row_database import connect_over
from percolator.v1 import gateway_pb2 as pb
from percolator.v1.bigtable_pb2 import BigtableDeleteTableRequest
from percolator.v1.master_pb2 import CreateTableRequest
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from tests.bigtable.emulator_process import emulator
from tests.integration.command_line import CommandLine
from tests.integration.test_examples import crawl_among_kills
from tests.integration.test_gateway import (
    ACCOUNTS as GATEWAY_ACCOUNTS,
)
from tests.integration.test_gateway import (
    CALL_SECONDS,
    OPENING_BALANCE,
    PATIENCE_SECONDS,
    TABLE,
    Teller,
    account,
    put,
    total,
)
from tests.integration.test_history import SETTINGS

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


# Clients that have no access to the store, and reach it through gateways only.

NOWHERE = "127.0.0.1:1"
PAGES = Table("pages")
BODY = PAGES.column("body", codecs.text)
GATEWAY_LENGTH = PAGES.column("length", codecs.integer)


@pytest.fixture(scope="module", name="cluster")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster on an emulator that only its services find."""
    data = tmp_path_factory.mktemp("cluster")
    store = f"bigtable://gateways/i{uuid.uuid4().hex[:20]}"
    with emulator() as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv(EMULATOR_VARIABLE, address)
        cluster = LocalCluster(data, store=store, tablet_servers=0, gateways=2, start_seconds=60.0)
        with cluster:
            yield cluster


@pytest.fixture(autouse=True)
def _outside(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EMULATOR_VARIABLE, NOWHERE)


def _restart(cluster: LocalCluster, name: str) -> None:
    """With the address that the masters know."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(EMULATOR_VARIABLE)
        cluster.restart(name)


@pytest.mark.timeout(300)
def test_the_store_itself_is_out_of_reach_here(cluster: LocalCluster) -> None:
    with pytest.raises(Unavailable, match="a program without access to it connects to a gateway"):
        percolator.connect(cluster.address, timeout=1.0)


@pytest.mark.timeout(300)
def test_a_program_runs_as_it_is_through_a_gateway(cluster: LocalCluster) -> None:
    with percolator.connect(cluster.gateway_address) as db:
        db.create_table(NOTES)
        with db.transaction() as tx:
            tx.set("one", TEXT, "first")
            tx.set("two", TEXT, "x" * 3_000_000)
        before = db.timestamp()
        with db.transaction() as tx:
            tx.lock("two", TEXT)
            tx.set("one", TEXT, (tx.get("one", TEXT) or "") + ", then second")
            tx.delete("two", TEXT)
        assert db.get("one", TEXT) == "first, then second"
        with db.snapshot(at=before) as snapshot:
            found = {row.key: len(row[TEXT]) for row in snapshot.scan(NOTES)}
        assert found == {"one": 5, "two": 3_000_000}
    command = CommandLine(cluster.gateway_address)
    assert "first, then second" in command.text("get", "notes", "one")
    assert command.text("status").count("gateway") >= 2
    command.run("locks", "notes")


@observes(BODY, name="measure")
def gateway_measure(tx: Transaction, row: str) -> None:
    tx.set(row, GATEWAY_LENGTH, len(tx.get(row, BODY, "")))


@pytest.mark.timeout(300)
def test_observers_run_in_a_program_behind_a_gateway(cluster: LocalCluster) -> None:
    with percolator.connect(cluster.gateway_address) as db:
        db.create_table(PAGES)
        db.register_observers([gateway_measure])
        with db.run_observers([gateway_measure]):
            with db.transaction() as tx:
                tx.set("three", BODY, "third")
            db.wait_for_observers(timeout=PATIENCE_SECONDS)
        assert db.get("three", GATEWAY_LENGTH) == 5


@pytest.mark.timeout(300)
def test_a_program_continues_at_the_next_gateway_when_its_own_is_killed(
    cluster: LocalCluster,
) -> None:
    table = Table("counted")
    number = table.column("number", codecs.integer)
    with percolator.connect(cluster.gateway_address) as db:
        db.create_table(table)
        made = unknown = 0
        cluster.processes["gateway"].kill()
        try:
            for _ in range(10):
                try:
                    with db.transaction(timeout=PATIENCE_SECONDS) as tx:
                        tx.set("a", number, tx.get("a", number, default=0) + 1)
                    made += 1
                except OutcomeUnknown:
                    unknown += 1
            assert made <= (db.get("a", number) or 0) <= made + unknown
            assert made > 5
        finally:
            _restart(cluster, "gateway")


@pytest.mark.timeout(300)
async def test_callers_in_other_languages_lose_nothing_when_gateways_are_killed(
    cluster: LocalCluster,
) -> None:
    addresses = cluster.gateway_address.split(",")
    network = GrpcNetwork()
    opening = Teller(network, addresses, 0)
    await network.unary(addresses[0], methods.CREATE_TABLE)(
        CreateTableRequest(name=TABLE), CALL_SECONDS
    )
    start = (await opening.anywhere(methods.BEGIN, pb.BeginRequest())).start_timestamp
    writes = [put(account(number), OPENING_BALANCE) for number in range(GATEWAY_ACCOUNTS)]
    await opening.anywhere(methods.COMMIT, pb.CommitRequest(start_timestamp=start, writes=writes))
    tellers = [Teller(network, addresses, seed) for seed in range(3)]
    for name in ("gateway", "gateway-2"):
        working = asyncio.gather(*(_gateway_transfers(one) for one in tellers))
        await tellers[0].has_committed.wait()
        await asyncio.to_thread(cluster.processes[name].kill)
        await working
        await asyncio.to_thread(_restart, cluster, name)
    assert await total(network, addresses[0]) == GATEWAY_ACCOUNTS * OPENING_BALANCE
    # A repeated request gets the same answer from gateways that have forgotten everything.
    for teller in tellers:
        request, commit = list(teller.committed.values())[-1]
        for address in addresses:
            again = await network.unary(address, methods.COMMIT)(request, CALL_SECONDS)
            assert again.commit_timestamp == commit
            asked = pb.ResolveRequest(
                start_timestamp=request.start_timestamp, writes=request.writes
            )
            told = await network.unary(address, methods.RESOLVE)(asked, CALL_SECONDS)
            assert told.commit_timestamp == commit
    assert await total(network, addresses[1]) == GATEWAY_ACCOUNTS * OPENING_BALANCE
    await network.close()


async def _gateway_transfers(teller: Teller) -> None:
    for _ in range(4):
        await teller.transfer()


# History in a cluster whose cells are in Google's emulator, and is kept for two seconds.

HISTORY_ACCOUNTS = Table("accounts")
HISTORY_BALANCE = HISTORY_ACCOUNTS.column("balance", codecs.integer)
SECONDS = 40.0


@pytest.fixture(scope="module", name="history_store")
def _store() -> Iterator[str]:
    """The address of a store with nothing in it."""
    with emulator() as address, pytest.MonkeyPatch.context() as patch:
        for name, value in {**SETTINGS, EMULATOR_VARIABLE: address}.items():
            patch.setenv(name, value)
        yield f"bigtable://history/i{uuid.uuid4().hex[:20]}"


@pytest.fixture(scope="module", name="history_cluster")
def _history_cluster(
    history_store: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    data = tmp_path_factory.mktemp("cluster")
    with LocalCluster(data, store=history_store, tablet_servers=0, start_seconds=60.0) as started:
        with percolator.connect(started.address) as db:
            db.create_table(HISTORY_ACCOUNTS)
        yield started


@pytest.fixture(name="db")
def _db(history_cluster: LocalCluster) -> Iterator[Database]:
    with percolator.connect(history_cluster.address, description="a test") as db:
        yield db


@pytest.fixture(name="command")
def _history_command(history_cluster: LocalCluster) -> CommandLine:
    return CommandLine(history_cluster.address)


def _put(db: Database, row: str, value: int) -> None:
    with db.transaction() as tx:
        tx.set(row, HISTORY_BALANCE, value)


def _tables_of(place: Place) -> set[str]:
    """The names of the first tables of a cluster that the emulator has."""

    async def ask() -> set[str]:
        network = BigtableNetwork()
        try:
            found = [one for one in range(10) if await has_table(network, place, one, SECONDS)]
        finally:
            await network.close()
        return {place.table_name(one) for one in found}

    return asyncio.run(ask())


@pytest.mark.timeout(300)
def test_a_dropped_table_leaves_the_store(history_store: str, db: Database) -> None:
    extra = Table("extra")
    value = extra.column("value", codecs.integer)
    place = parse_place(history_store, field="store")
    before = _tables_of(place)
    db.create_table(extra)
    with db.transaction() as tx:
        tx.set("a", value, 1)
        tx.set("a", HISTORY_BALANCE, 1)
    assert len(_tables_of(place)) == len(before) + 1
    db.drop_table(extra)
    deadline = time.monotonic() + SECONDS
    while _tables_of(place) != before:
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.2)
    with pytest.raises(SchemaError), db.snapshot() as snapshot:
        snapshot.get("a", value)
    with db.snapshot() as snapshot:
        assert snapshot.get("a", HISTORY_BALANCE) == 1
    _put(db, "a", 2)


def _until_refused(db: Database, row: str, at: Timestamp) -> SnapshotTooOld:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            with db.snapshot(at=at) as snapshot:
                snapshot.get(row, HISTORY_BALANCE)
        except SnapshotTooOld as error:
            return error
        time.sleep(0.2)
    pytest.fail("nothing was collected")


def _until_held(command: CommandLine, at: Timestamp) -> None:
    """Returns when all is collected that a pin lets go, and more would be without it."""
    deadline = time.monotonic() + SECONDS
    while True:
        told = command.data("gc", "status")
        (table,) = told["tables"]
        if told["held_by"] == "a copy" and table["collected_below"] == str(int(at)):
            return
        assert time.monotonic() < deadline, told


def _versions(command: CommandLine, row: str) -> list[Any]:
    found: list[Any] = command.data("history", "accounts", row)
    return [one["value"] for one in found]


@pytest.mark.timeout(300)
def test_old_versions_go_and_commands_show_what_is_left(db: Database, command: CommandLine) -> None:
    for value in (1, 2):
        _put(db, "bob", value)
    between = db.timestamp()
    _put(db, "bob", 3)
    assert _versions(command, "bob")[0] == 3
    refused = _until_refused(db, "bob", between)
    assert refused.safe_point > between
    deadline = time.monotonic() + SECONDS
    while (left := _versions(command, "bob")) != [3]:  # they go after the safe point was raised
        assert time.monotonic() < deadline, left
    assert db.get("bob", HISTORY_BALANCE) == 3
    assert command.data("locks", "accounts") == []
    (told,) = command.data("gc", "status")["tables"]
    assert told["table"] == "accounts"
    assert told["cells_collected"] >= 2


@pytest.mark.timeout(300)
def test_a_pin_keeps_what_an_export_reads_and_tablet_servers_import(
    db: Database, command: CommandLine, tmp_path: Path
) -> None:
    for number in range(50):
        _put(db, f"row-{number:02}", number)
    with db.pin(description="a copy") as pin:
        for number in range(50):
            _put(db, f"row-{number:02}", -1)
        _until_held(command, pin.at)
        with db.snapshot(at=pin.at) as snapshot:
            assert snapshot.get("row-07", HISTORY_BALANCE) == 7
        at = pin.at
        command.run("export", str(tmp_path / "export"), "--at", str(int(at)))
    exported = export_files.read_export(tmp_path / "export" / export_files.MANIFEST)
    (table,) = exported.tables
    batches = [
        batch
        for part in table.parts
        for batch in part_files.cells_of(tmp_path / "export", exported, table, part)
    ]
    values = {cell[0]: cell[2] for batch in batches for cell in batch}
    assert [values[b"row-%02d" % row] for row in range(50)] == [
        HISTORY_BALANCE.codec.encode(number) for number in range(50)
    ]
    _until_refused(db, "row-07", at)
    with (
        LocalCluster(tmp_path / "tablets", tablet_servers=1, start_seconds=60.0) as other,
        percolator.connect(other.address) as tablets,
    ):
        CommandLine(other.address).run("import", str(tmp_path / "export"))
        with tablets.snapshot() as snapshot:
            found = {
                row.key: row[HISTORY_BALANCE]
                for row in snapshot.scan(HISTORY_ACCOUNTS, prefix="row-")
            }
    assert found == {f"row-{number:02}": number for number in range(50)}


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
