"""History in a cluster whose cells are in Google's emulator, and is kept for two seconds."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import percolator
from percolator import Database, SchemaError, SnapshotTooOld, Table, Timestamp, codecs
from percolator.backup import export_files, part_files
from percolator.bigtable.admin import has_table
from percolator.bigtable.connection import BigtableNetwork
from percolator.bigtable.place import EMULATOR_VARIABLE, Place, parse_place
from percolator.services.local.cluster import LocalCluster
from tests.bigtable.emulator_process import emulator
from tests.integration.command_line import CommandLine
from tests.integration.test_history import SETTINGS

pytestmark = [pytest.mark.bigtable, pytest.mark.timeout(300)]

ACCOUNTS = Table("accounts")
BALANCE = ACCOUNTS.column("balance", codecs.integer)
SECONDS = 40.0


@pytest.fixture(scope="module", name="store")
def _store() -> Iterator[str]:
    """The address of a store with nothing in it."""
    with emulator() as address, pytest.MonkeyPatch.context() as patch:
        for name, value in {**SETTINGS, EMULATOR_VARIABLE: address}.items():
            patch.setenv(name, value)
        yield f"bigtable://history/i{uuid.uuid4().hex[:20]}"


@pytest.fixture(scope="module", name="cluster")
def _cluster(store: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    data = tmp_path_factory.mktemp("cluster")
    with LocalCluster(data, store=store, tablet_servers=0, start_seconds=60.0) as started:
        with percolator.connect(started.address) as db:
            db.create_table(ACCOUNTS)
        yield started


@pytest.fixture(name="db")
def _db(cluster: LocalCluster) -> Iterator[Database]:
    with percolator.connect(cluster.address, description="a test") as db:
        yield db


@pytest.fixture(name="command")
def _command(cluster: LocalCluster) -> CommandLine:
    return CommandLine(cluster.address)


def _put(db: Database, row: str, value: int) -> None:
    with db.transaction() as tx:
        tx.set(row, BALANCE, value)


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


def test_a_dropped_table_leaves_the_store(store: str, db: Database) -> None:
    extra = Table("extra")
    value = extra.column("value", codecs.integer)
    place = parse_place(store, field="store")
    before = _tables_of(place)
    db.create_table(extra)
    with db.transaction() as tx:
        tx.set("a", value, 1)
        tx.set("a", BALANCE, 1)
    assert len(_tables_of(place)) == len(before) + 1
    db.drop_table(extra)
    deadline = time.monotonic() + SECONDS
    while _tables_of(place) != before:
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.2)
    with pytest.raises(SchemaError), db.snapshot() as snapshot:
        snapshot.get("a", value)
    with db.snapshot() as snapshot:
        assert snapshot.get("a", BALANCE) == 1
    _put(db, "a", 2)


def _until_refused(db: Database, row: str, at: Timestamp) -> SnapshotTooOld:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            with db.snapshot(at=at) as snapshot:
                snapshot.get(row, BALANCE)
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
    assert db.get("bob", BALANCE) == 3
    assert command.data("locks", "accounts") == []
    (told,) = command.data("gc", "status")["tables"]
    assert told["table"] == "accounts"
    assert told["cells_collected"] >= 2


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
            assert snapshot.get("row-07", BALANCE) == 7
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
        BALANCE.codec.encode(number) for number in range(50)
    ]
    _until_refused(db, "row-07", at)
    with (
        LocalCluster(tmp_path / "tablets", tablet_servers=1, start_seconds=60.0) as other,
        percolator.connect(other.address) as tablets,
    ):
        CommandLine(other.address).run("import", str(tmp_path / "export"))
        with tablets.snapshot() as snapshot:
            found = {row.key: row[BALANCE] for row in snapshot.scan(ACCOUNTS, prefix="row-")}
    assert found == {f"row-{number:02}": number for number in range(50)}
