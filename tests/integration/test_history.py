"""History in a real cluster that keeps it for two seconds: pins, refused reads, shown versions."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import percolator
from percolator import (
    Change,
    Column,
    Database,
    InvalidArgument,
    SnapshotTooOld,
    Table,
    Timestamp,
    codecs,
    observes,
)
from percolator.backup import exporter, importer
from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    NotExecuted,
    OutcomeUnknown,
    SchemaError,
    SessionExpired,
)
from percolator.formats.records import acknowledgement_column
from percolator.services.local.authority import files_in, make_all
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess
from percolator.timestamps import SEQUENCE_BITS
from tests.integration.command_line import CommandLine

SETTINGS = {
    # After a start, the lock service's grace period is as long as its longest time to live.
    "PERCOLATOR_LOCKSERVICE_TTL_MILLISECONDS_MAX": "4000",
    "PERCOLATOR_MASTER_COLLECTION_SECONDS": "0.3",
    "PERCOLATOR_MASTER_RETENTION_SECONDS": "2",
    "PERCOLATOR_MASTER_RETENTION_MIN_SECONDS": "1",
}
SECONDS = 30.0
PIN_TTL = 3.0
accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)


@pytest.fixture(scope="module", name="cluster")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=1) as started:
            with percolator.connect(started.address) as db:
                db.create_table(accounts, splits=["m"])
            yield started


@pytest.fixture(name="db")
def _db(cluster: LocalCluster) -> Iterator[percolator.Database]:
    with percolator.connect(cluster.address, description="a test") as db:
        yield db


def command_line(cluster: LocalCluster, *arguments: str) -> list[str]:
    """A command to run in a separate process."""
    command = [sys.executable, "-m", "percolator.cli", "--address", cluster.address, "--json"]
    return [*command, *arguments]


@pytest.fixture(name="command")
def _command(cluster: LocalCluster) -> CommandLine:
    return CommandLine(cluster.address)


def put(db: percolator.Database, row: str, value: int) -> None:
    with db.transaction() as tx:
        tx.set(row, balance, value)


def until_refused(db: percolator.Database, row: str, at: Timestamp) -> SnapshotTooOld:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            with db.snapshot(at) as snapshot:
                snapshot.get(row, balance)
        except SnapshotTooOld as error:
            return error
        threading.Event().wait(0.1)
    raise AssertionError("history was never collected")


def until_lost(pin: percolator.Pin) -> None:
    deadline = time.monotonic() + SECONDS
    while not pin.is_lost:
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def test_a_snapshot_older_than_the_retention_says_how_far_history_goes_back(
    db: percolator.Database,
) -> None:
    put(db, "bob", 1)
    error = until_refused(db, "bob", at := db.timestamp())
    assert error.timestamp == at < error.safe_point
    assert Timestamp(error.safe_point).describe() in str(error)
    with pytest.raises(SnapshotTooOld, match="history of table 'accounts', which goes back to"):
        db.pin(at, ttl=PIN_TTL).__enter__()
    with db.snapshot(db.timestamp()) as snapshot:
        assert snapshot.get("bob", balance) == 1


def test_a_pin_keeps_history_and_collection_continues_once_it_ends(
    command: CommandLine, db: percolator.Database
) -> None:
    put(db, "joe", 1)
    with db.pin(ttl=PIN_TTL, description="a report") as pin:
        for value in range(2, 30):
            put(db, "joe", value)
        # By the end of this, the pin is older than the retention.
        until_refused(db, "joe", Timestamp(pin.at - (1 << SEQUENCE_BITS)))
        deadline = time.monotonic() + SECONDS
        while (found := command.data("gc", "status"))["held_by"] != "a report":
            assert time.monotonic() < deadline, found
        assert found["held_at"] == str(int(pin.at))
        assert {table["safe_point"] for table in found["tables"]} == {str(int(pin.at))}
        assert [one["description"] for one in command.data("pins", "list")] == ["a report"]
        with db.snapshot(pin.at) as snapshot:
            assert snapshot.get("joe", balance) == 1
        at = pin.at
    until_refused(db, "joe", at)
    deadline = time.monotonic() + SECONDS
    while len(versions := command.data("history", "accounts", "joe", "--as", "integer")) > 1:
        assert time.monotonic() < deadline, versions
    assert [one["value"] for one in versions] == [29]


def test_a_pin_of_the_future_is_refused(db: percolator.Database) -> None:
    later = Timestamp(db.timestamp() + (3_600_000 << SEQUENCE_BITS))
    with pytest.raises(InvalidArgument, match="is in the future: the oracle is at"):
        db.pin(later).__enter__()


def test_the_versions_of_a_row_are_shown_with_their_times_and_kinds(
    command: CommandLine, db: percolator.Database
) -> None:
    with db.pin(ttl=PIN_TTL):
        put(db, "zoe", 1)
        with db.transaction() as tx:
            tx.delete("zoe", balance)
        put(db, "zoe", 3)
        shown = command.data("history", "accounts", "zoe", "balance", "--as", "integer")
    assert [(one["kind"], one["value"]) for one in shown] == [
        ("put", 3),
        ("delete", None),
        ("put", 1),
    ]
    times = [one["commit_timestamp"] for one in shown]
    assert times == sorted(times, reverse=True)
    assert command.data("history", "accounts", "unwritten", code=1) == []


def test_a_pin_created_by_the_command_line_lasts_as_long_as_the_command_after_it(
    cluster: LocalCluster, command: CommandLine
) -> None:
    # The output of the inner command follows that of the outer one.
    done = subprocess.run(
        [
            *command_line(cluster, "pins", "create", "--ttl", str(PIN_TTL)),
            *("--description", "of the command line", "--"),
            *command_line(cluster, "pins", "list"),
        ],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    decoder = json.JSONDecoder()
    made, end = decoder.raw_decode(done.stdout)
    listed, _ = decoder.raw_decode(done.stdout[end:].lstrip())
    assert [one["session_id"] for one in listed] == [made["session_id"]]
    assert command.data("pins", "list") == []


def test_a_pin_whose_holder_is_killed_ends_with_its_time_to_live(
    cluster: LocalCluster, command: CommandLine, db: percolator.Database
) -> None:
    holder = subprocess.Popen(
        command_line(cluster, "pins", "create", "--ttl", "1", "--description", "killed"),
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline()
    assert [one["description"] for one in command.data("pins", "list")] == ["killed"]
    at = db.timestamp()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    # What it held is collected like everything else.
    until_refused(db, "kim", at)
    assert command.data("pins", "list") == []


def test_a_pin_for_an_unknown_table_is_refused_and_holds_nothing(
    command: CommandLine, db: percolator.Database
) -> None:
    with pytest.raises(SchemaError, match="no table 'nothing'"):
        db.pin(tables=[Table("nothing")], ttl=PIN_TTL).__enter__()
    assert command.data("pins", "list") == []


def test_acknowledgements_are_not_part_of_a_rows_history_unless_they_are_named(
    command: CommandLine, db: percolator.Database
) -> None:
    @observes(balance)
    def observer(_tx: percolator.Transaction, _row: str) -> None:
        return

    db.register_observers([observer])
    with db.pin(ttl=PIN_TTL):
        put(db, "oma", 1)
        with db.run_observers([observer]):
            db.wait_for_observers(timeout=SECONDS)
        noted = "hex:" + acknowledgement_column(observer.name.encode(), b"balance").hex()
        assert len(command.data("history", "accounts", "oma", noted)) == 1
        shown = command.data("history", "accounts", "oma", "--as", "integer")
    assert [one["column"] for one in shown] == ["balance"]


@pytest.mark.spark
def test_a_spark_read_is_pinned_or_refused_if_its_history_is_gone(
    cluster: LocalCluster,
    command: CommandLine,
    db: percolator.Database,
) -> None:
    from percolator.spark.options import ReadOptions
    from percolator.spark.reader import pinned_timestamp

    before = db.timestamp()
    until_refused(db, "sue", before)

    def pinned(**options: str) -> Timestamp:
        given = {"address": cluster.address, "table": "accounts", **options}
        return pinned_timestamp(ReadOptions.parse(given))

    with pytest.raises(SnapshotTooOld, match="history of table 'accounts', which goes back to"):
        pinned(snapshot_ts=str(int(before)))
    later = int(db.timestamp()) + (1 << 50)
    with pytest.raises(InvalidArgument, match=r"snapshot_ts: .* is in the future"):
        pinned(snapshot_ts=str(later))
    at = pinned(pin_seconds="4")
    (listed,) = command.data("pins", "list")
    assert listed["oldest_start_timestamp"] == str(int(at))
    assert listed["description"].startswith("Spark read on ")
    until_refused(db, "sue", at)
    assert command.data("pins", "list") == []


def test_a_released_pin_ends_and_its_holder_gets_an_error(
    command: CommandLine, db: percolator.Database
) -> None:
    with db.pin(ttl=PIN_TTL) as pin:
        (listed,) = command.data("pins", "list")
        assert "no pin" in command.error("pins", "release", "00" * 16, code=2)
        command.run("pins", "release", listed["session_id"])
        until_lost(pin)
        with pytest.raises(SessionExpired, match="was released or lost"):
            pin.check()
        assert command.data("pins", "list") == []


def test_a_pin_of_a_client_ends_when_it_is_too_old_and_that_of_an_administrator_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (*SETTINGS.items(), ("PERCOLATOR_MASTER_CLIENT_HELD_SECONDS_MAX", "3")):
        monkeypatch.setenv(name, value)
    certificates = tmp_path / "certificates"
    make_all(certificates)
    files = files_in(certificates / "client")
    client, admin = (
        (certificates / "client" / f"{role}.token").read_text().strip()
        for role in ("client", "admin")
    )
    with (
        LocalCluster(tmp_path / "data", tablet_servers=1, certificates=certificates) as cluster,
        percolator.connect(cluster.address, tls=files, token=admin) as boss,
        percolator.connect(cluster.address, tls=files, token=client) as db,
    ):
        boss.create_table(accounts)
        put(db, "joe", 1)
        with db.pin(ttl=PIN_TTL) as pin:
            put(db, "joe", 2)
            error = until_refused(db, "joe", pin.at)
            assert "client_held_seconds_max" in str(error)
            until_lost(pin)
            with pytest.raises(SessionExpired, match=r"too old.*client_held_seconds_max"):
                pin.check()
            with pytest.raises(SnapshotTooOld, match=r"pins of clients.*client_held_seconds_max"):
                db.pin(pin.at, ttl=PIN_TTL).__enter__()
        with boss.pin(ttl=PIN_TTL, description="an archive") as kept:
            put(db, "joe", 3)
            with db.pin(ttl=PIN_TTL) as pin:
                until_lost(pin)
            kept.check()
            with db.snapshot(kept.at) as snapshot:
                assert snapshot.get("joe", balance) == 2


# Change feeds of a real cluster: followed while servers are killed, tablets split, feeds begin.

ROWS = 40
orders = Table("orders")
price = orders.column("price", codecs.integer)
note = orders.column("note", codecs.raw)


@pytest.fixture(scope="module", name="changes_cluster")
def _changes_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=2, gateways=1) as started:
        yield started


@pytest.fixture(name="changes_db")
def _changes_db(changes_cluster: LocalCluster) -> Iterator[percolator.Database]:
    with percolator.connect(changes_cluster.address) as changes_db:
        changes_db.drop_table(orders, missing_ok=True)
        yield changes_db


def row(number: int) -> str:
    return f"order-{number:03}"


class Writer(threading.Thread):
    """Moves amounts between rows, so that the sum over all rows is 0 at every commit."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self.stopping = threading.Event()
        self.commits = 0
        self.changed = threading.Condition()

    def run(self) -> None:
        with percolator.connect(self._address) as changes_db:
            number = 0
            while not self.stopping.is_set():
                number += 1
                one, other = row(number % ROWS), row((number * 7 + 3) % ROWS)
                if one == other:
                    continue
                try:
                    with changes_db.transaction() as tx:
                        tx.set(one, price, (tx.get(one, price) or 0) + number)
                        tx.set(other, price, (tx.get(other, price) or 0) - number)
                        if number % 10 == 0:
                            tx.set(other, note, b"long" * 1_000)
                except (NotExecuted, ExecutionUnknown, OutcomeUnknown):
                    continue
                with self.changed:
                    self.commits += 1
                    self.changed.notify_all()

    def wait_for(self, commits: int) -> None:
        with self.changed:
            target = self.commits + commits
            assert self.changed.wait_for(lambda: self.commits >= target, timeout=60)


class Follower(threading.Thread):
    """Keeps a copy of the table, and checks it after every commit."""

    def __init__(self, address: str, after: Timestamp) -> None:
        super().__init__()
        self._address = address
        self.position = after
        self.until: Timestamp | None = None
        self.copy: dict[str, int] = {}
        self.wrong: list[str] = []

    def run(self) -> None:
        with percolator.connect(self._address) as changes_db:
            while self.until is None or self.position < self.until:
                try:
                    self._read(changes_db)
                except (NotExecuted, ExecutionUnknown):
                    continue

    def _read(self, changes_db: percolator.Database) -> None:
        until = self.until or changes_db.timestamp()
        commit: list[Change[str]] = []
        for change in changes_db.changes(orders, after=self.position, until=until):
            commit.append(change)
            if change.ends_commit:
                self._take(commit)
                commit = []
        self.position = until

    def _take(self, commit: list[Change[str]]) -> None:
        if len({change.commit_timestamp for change in commit}) != 1:
            self.wrong.append(f"not one commit: {commit}")
        if commit[0].commit_timestamp <= self.position:
            self.wrong.append(f"again: {commit}")
        for change in commit:
            if change.is_of(price):
                self.copy[change.key] = change.value(price) or 0
        if sum(self.copy.values()) != 0:
            self.wrong.append(f"half a commit at {commit[0].commit_timestamp}")
        self.position = commit[0].commit_timestamp


@pytest.mark.parametrize("through_gateway", [False, True], ids=["directly", "through a gateway"])
def test_a_copy_is_exact_through_splits_and_kills(
    changes_cluster: LocalCluster, changes_db: percolator.Database, through_gateway: bool
) -> None:
    changes_db.create_table(orders, splits=[row(20)], change_feed=True)
    address = changes_cluster.gateway_address if through_gateway else changes_cluster.address
    writer, follower = Writer(changes_cluster.address), Follower(address, changes_db.timestamp())
    writer.start()
    follower.start()
    try:
        command = CommandLine(changes_cluster.address)
        writer.wait_for(30)
        tablets = command.data("tablets", "--table", "orders")
        [inside] = [one for one in tablets if one["start"] < row(10) < (one["end"] or "z")]
        command.run("tablets", "split", str(inside["tablet_id"]), "--row", row(10))
        writer.wait_for(30)
        for server in ("tabletserver-1", "tabletserver-2"):
            changes_cluster.processes[server].kill()
            changes_cluster.restart(server)
            writer.wait_for(30)
    finally:
        writer.stopping.set()
        writer.join()
        follower.until = changes_db.timestamp()
        follower.join(timeout=60)
    assert not follower.is_alive()
    assert follower.wrong == []
    with changes_db.snapshot(at=follower.until) as snapshot:
        stored = {one.key: one[price] for one in snapshot.scan(orders, columns=[price])}
    assert follower.copy == stored
    assert len(stored) == ROWS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_follows_ends_cleanly_when_it_is_told_to(
    changes_cluster: LocalCluster, changes_db: percolator.Database, number: signal.Signals
) -> None:
    changes_db.create_table(orders, change_feed=True)
    after = str(int(changes_db.timestamp()))
    with changes_db.transaction() as tx:
        tx.set("a", price, 1)
    command = [
        sys.executable,
        "-m",
        "percolator.cli",
        "--address",
        changes_cluster.address,
        "--json",
    ]
    command += ["changes", "orders", "--follow", "--after", after]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as following:
        assert following.stdout is not None
        assert following.stderr is not None
        assert json.loads(following.stdout.readline())["row"] == "a"
        following.send_signal(number)
        assert following.stdout.read() == b""
        assert following.stderr.read() == b""
    assert following.returncode == 0
    # A session that was left behind would keep history until it expires.
    sessions = CommandLine(changes_cluster.address).data("sessions")
    assert "percolator command" not in [one["description"] for one in sessions]


def test_a_feed_begins_while_its_table_is_written(
    changes_cluster: LocalCluster, changes_db: percolator.Database
) -> None:
    changes_db.create_table(orders, splits=[row(20)])
    before = changes_db.timestamp()
    writer = Writer(changes_cluster.address)
    writer.start()
    try:
        writer.wait_for(20)
        changes_db.set_change_feed(orders, on=True)
        begin = changes_db.timestamp()
        writer.wait_for(20)
    finally:
        writer.stopping.set()
        writer.join()
    end = changes_db.timestamp()
    with pytest.raises(SnapshotTooOld, match="complete only from"):
        next(iter(changes_db.changes(orders, after=before, until=end)))
    with changes_db.snapshot(at=begin) as snapshot:
        copy = {one.key: one[price] for one in snapshot.scan(orders, columns=[price])}
    for change in changes_db.changes(orders, after=begin, until=end, before=True):
        if change.is_of(price):
            assert change.before(price) == copy.get(change.key)
            copy[change.key] = change.value(price) or 0
    with changes_db.snapshot(at=end) as snapshot:
        assert copy == {one.key: one[price] for one in snapshot.scan(orders, columns=[price])}


def test_the_command_shows_one_line_for_each_change(
    changes_cluster: LocalCluster, changes_db: percolator.Database
) -> None:
    command = CommandLine(changes_cluster.address)
    command.run("tables", "create", "orders")
    assert not command.data("tables", "describe", "orders")["change_feed"]
    assert command.data("tables", "change-feed", "orders", "--on")["change_feed"]
    after = str(int(changes_db.timestamp()))
    with changes_db.transaction() as tx:
        tx.set("a", note, b"new")
        tx.set("b", note, b"\0")
    with changes_db.transaction() as tx:
        tx.delete("a", note)
    lines = command.text("--json", "changes", "orders", "--after", after, "--before").splitlines()
    shown = [json.loads(line) for line in lines]
    assert [
        (one["row"], one["column"], one["kind"], one["before"], one["value"], one["ends_commit"])
        for one in shown
    ] == [
        ("a", "note", "insert", None, "new", False),
        ("b", "note", "insert", None, "hex:00", True),
        ("a", "note", "delete", "new", None, True),
    ]
    later = str(shown[1]["commit_timestamp"])
    assert [
        json.loads(line)["kind"]
        for line in command.text("--json", "changes", "orders", "--after", later).splitlines()
    ] == ["delete"]
    assert "change feed on" in command.text("tables", "describe", "orders")
    command.run("tables", "change-feed", "orders", "--off")
    assert "no change feed" in command.error("changes", "orders", "--after", after, code=2)


def test_an_import_is_one_commit_of_a_table_with_a_feed(
    changes_cluster: LocalCluster, changes_db: percolator.Database, tmp_path: Path
) -> None:
    changes_db.create_table(orders, splits=["m"], change_feed=True)
    with changes_db.transaction() as tx:
        tx.set("a", price, 1)
        tx.set("z", note, b"long" * 1_000)

    async def copied() -> Timestamp:
        async with percolator.aio.connect(changes_cluster.address) as other:
            await exporter.export(other, tmp_path / "export", tables=[orders.name])
            await other.drop_table(orders)
            await importer.import_tables(other, tmp_path / "export")
            return await other.timestamp()

    end = asyncio.run(copied())
    with percolator.connect(changes_cluster.address) as later:
        with later.snapshot(at=end) as snapshot:
            assert len(list(snapshot.scan(orders))) == 2
        newest = later.newest_change(orders, after=_created(later))
        assert newest is not None
        found = list(later.changes(orders, after=_created(later), until=end))
    assert [(one.key, one.ends_commit) for one in found] == [("a", False), ("z", True)]
    assert {one.commit_timestamp for one in found} == {newest}


def _created(changes_db: percolator.Database) -> Timestamp:
    """The creation of the table, before which its feed cannot be asked."""
    catalog = changes_db._asynchronous.internal.engine.catalog
    info = catalog.known(orders.name)
    if info is None:
        changes_db.newest_change(orders, after=changes_db.timestamp())
        info = catalog.known(orders.name)
    assert info is not None
    return Timestamp(info.created_at)


# A dropped table is gone for everybody, also where its tablet's server has not heard of it yet.

ROUNDS = 8
SECONDS_AFTER = 0.016
"""For so long after a drop, other clients could read the table, without any fault."""


@pytest.fixture(scope="module")
def dropped_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=2) as started:
        yield started


@pytest.fixture
def near(dropped_cluster: LocalCluster) -> Iterator[Database]:
    """The client that drops tables."""
    with percolator.connect(dropped_cluster.address) as database:
        yield database


@pytest.fixture
def other(dropped_cluster: LocalCluster) -> Iterator[Database]:
    """A client that knows the tables and their servers from before."""
    with percolator.connect(dropped_cluster.address) as database:
        yield database


def owner(dropped_cluster: LocalCluster, table: Table[str]) -> ServiceProcess:
    """The server that has the only tablet of a table."""
    (tablet,) = CommandLine(dropped_cluster.address).data("tablets", "--table", table.name)
    (server,) = [
        one for one in dropped_cluster.processes.values() if one.address == tablet["address"]
    ]
    return server


def written(near: Database, other: Database, name: str) -> Column[int]:
    """A column of a new table, in which the other client has written."""
    value = Table(name).column("v", codecs.integer)
    near.create_table(value.table)
    with other.transaction() as tx:
        tx.set("a", value, 1)
    return value


def test_no_other_client_reads_or_writes_a_table_after_it_was_dropped(
    near: Database, other: Database
) -> None:
    for number in range(ROUNDS):
        value = written(near, other, f"at-once-{number}")
        assert other.get("a", value) == 1
        near.drop_table(value.table)
        until = time.monotonic() + SECONDS_AFTER
        while True:
            with pytest.raises(SchemaError):
                other.get("a", value)
            with pytest.raises(SchemaError), other.transaction() as tx:
                tx.set("a", value, 2)
            if time.monotonic() > until:
                break


def at_the_same_time(*calls: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call) for call in calls]
    for one in threads:
        one.start()
    return threads


def test_a_table_that_is_dropped_and_created_again_while_its_server_is_stopped(
    dropped_cluster: LocalCluster, near: Database, other: Database
) -> None:
    """The other client's calls wait at the stopped server, which goes on when the next table is
    there: they use that one, all by themselves."""
    value = written(near, other, "recreated")
    stopped = owner(dropped_cluster, value.table)
    found: dict[str, object] = {}
    stopped.pause()
    try:
        near.drop_table(value.table, timeout=30)
        near.create_table(value.table, timeout=30)
        with near.transaction(timeout=30) as tx:
            tx.set("a", value, 2)

        def read() -> None:
            found["read"] = other.get("a", value)

        def write() -> None:
            try:
                other.run(lambda tx: tx.set("w", value, 3))
            except OutcomeUnknown:  # the stopped server ended before it had read the message
                other.run(lambda tx: tx.set("w", value, 3))
            found["written"] = near.get("w", value)

        waiting = at_the_same_time(read, write)
    finally:
        stopped.resume()
    for one in waiting:
        one.join()
    assert found == {"read": 2, "written": 3}


def test_a_drop_that_a_stopped_server_holds_up_says_so_and_is_waited_for_when_repeated(
    dropped_cluster: LocalCluster, near: Database, other: Database
) -> None:
    command = CommandLine(dropped_cluster.address)
    value = written(near, other, "held-up")
    servers = [
        one for name, one in dropped_cluster.processes.items() if name.startswith("tabletserver")
    ]
    for one in servers:
        one.pause()
    try:
        with pytest.raises(DeadlineExceeded, match="'held-up' is dropped, but this is not in forc"):
            near.drop_table(value.table, timeout=2)
        delete = ("--timeout", "2", "tables", "delete", "held-up", "--yes")
        assert "'held-up' is dropped, but this is not in force" in command.error(*delete, code=1)
        with pytest.raises(DeadlineExceeded, match="created, but cannot be used yet"):
            near.create_table(value.table, timeout=2)
    finally:
        for one in servers:
            one.resume()
    near.drop_table(value.table, timeout=30)
    with pytest.raises(SchemaError):
        other.get("a", value)
