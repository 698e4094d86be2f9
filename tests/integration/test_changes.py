"""Change feeds of a real cluster: followed while servers are killed, tablets split, feeds begin."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import percolator
from percolator import Change, SnapshotTooOld, Table, Timestamp, codecs
from percolator.backup import exporter, importer
from percolator.errors import ExecutionUnknown, NotExecuted, OutcomeUnknown
from percolator.services.local.cluster import LocalCluster
from tests.integration.command_line import CommandLine

pytestmark = pytest.mark.integration

ROWS = 40
orders = Table("orders")
price = orders.column("price", codecs.integer)
note = orders.column("note", codecs.raw)


@pytest.fixture(scope="module", name="cluster")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=2, gateways=1) as started:
        yield started


@pytest.fixture(name="db")
def _db(cluster: LocalCluster) -> Iterator[percolator.Database]:
    with percolator.connect(cluster.address) as db:
        db.drop_table(orders, missing_ok=True)
        yield db


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
        with percolator.connect(self._address) as db:
            number = 0
            while not self.stopping.is_set():
                number += 1
                one, other = row(number % ROWS), row((number * 7 + 3) % ROWS)
                if one == other:
                    continue
                try:
                    with db.transaction() as tx:
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
        with percolator.connect(self._address) as db:
            while self.until is None or self.position < self.until:
                try:
                    self._read(db)
                except (NotExecuted, ExecutionUnknown):
                    continue

    def _read(self, db: percolator.Database) -> None:
        until = self.until or db.timestamp()
        commit: list[Change[str]] = []
        for change in db.changes(orders, after=self.position, until=until):
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
    cluster: LocalCluster, db: percolator.Database, through_gateway: bool
) -> None:
    db.create_table(orders, splits=[row(20)], change_feed=True)
    address = cluster.gateway_address if through_gateway else cluster.address
    writer, follower = Writer(cluster.address), Follower(address, db.timestamp())
    writer.start()
    follower.start()
    try:
        command = CommandLine(cluster.address)
        writer.wait_for(30)
        tablets = command.data("tablets", "--table", "orders")
        [inside] = [one for one in tablets if one["start"] < row(10) < (one["end"] or "z")]
        command.run("tablets", "split", str(inside["tablet_id"]), "--row", row(10))
        writer.wait_for(30)
        for server in ("tabletserver-1", "tabletserver-2"):
            cluster.processes[server].kill()
            cluster.restart(server)
            writer.wait_for(30)
    finally:
        writer.stopping.set()
        writer.join()
        follower.until = db.timestamp()
        follower.join(timeout=60)
    assert not follower.is_alive()
    assert follower.wrong == []
    with db.snapshot(at=follower.until) as snapshot:
        stored = {one.key: one[price] for one in snapshot.scan(orders, columns=[price])}
    assert follower.copy == stored
    assert len(stored) == ROWS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_follows_ends_cleanly_when_it_is_told_to(
    cluster: LocalCluster, db: percolator.Database, number: signal.Signals
) -> None:
    db.create_table(orders, change_feed=True)
    after = str(int(db.timestamp()))
    with db.transaction() as tx:
        tx.set("a", price, 1)
    command = [sys.executable, "-m", "percolator.cli", "--address", cluster.address, "--json"]
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
    sessions = CommandLine(cluster.address).data("sessions")
    assert "percolator command" not in [one["description"] for one in sessions]


def test_a_feed_begins_while_its_table_is_written(
    cluster: LocalCluster, db: percolator.Database
) -> None:
    db.create_table(orders, splits=[row(20)])
    before = db.timestamp()
    writer = Writer(cluster.address)
    writer.start()
    try:
        writer.wait_for(20)
        db.set_change_feed(orders, on=True)
        begin = db.timestamp()
        writer.wait_for(20)
    finally:
        writer.stopping.set()
        writer.join()
    end = db.timestamp()
    with pytest.raises(SnapshotTooOld, match="complete only from"):
        next(iter(db.changes(orders, after=before, until=end)))
    with db.snapshot(at=begin) as snapshot:
        copy = {one.key: one[price] for one in snapshot.scan(orders, columns=[price])}
    for change in db.changes(orders, after=begin, until=end, before=True):
        if change.is_of(price):
            assert change.before(price) == copy.get(change.key)
            copy[change.key] = change.value(price) or 0
    with db.snapshot(at=end) as snapshot:
        assert copy == {one.key: one[price] for one in snapshot.scan(orders, columns=[price])}


def test_the_command_shows_one_line_for_each_change(
    cluster: LocalCluster, db: percolator.Database
) -> None:
    command = CommandLine(cluster.address)
    command.run("tables", "create", "orders")
    assert not command.data("tables", "describe", "orders")["change_feed"]
    assert command.data("tables", "change-feed", "orders", "--on")["change_feed"]
    after = str(int(db.timestamp()))
    with db.transaction() as tx:
        tx.set("a", note, b"new")
        tx.set("b", note, b"\0")
    with db.transaction() as tx:
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
    cluster: LocalCluster, db: percolator.Database, tmp_path: Path
) -> None:
    db.create_table(orders, splits=["m"], change_feed=True)
    with db.transaction() as tx:
        tx.set("a", price, 1)
        tx.set("z", note, b"long" * 1_000)

    async def copied() -> Timestamp:
        async with percolator.aio.connect(cluster.address) as other:
            await exporter.export(other, tmp_path / "export", tables=[orders.name])
            await other.drop_table(orders)
            await importer.import_tables(other, tmp_path / "export")
            return await other.timestamp()

    end = asyncio.run(copied())
    with percolator.connect(cluster.address) as later:
        with later.snapshot(at=end) as snapshot:
            assert len(list(snapshot.scan(orders))) == 2
        newest = later.newest_change(orders, after=_created(later))
        assert newest is not None
        found = list(later.changes(orders, after=_created(later), until=end))
    assert [(one.key, one.ends_commit) for one in found] == [("a", False), ("z", True)]
    assert {one.commit_timestamp for one in found} == {newest}


def _created(db: percolator.Database) -> Timestamp:
    """The creation of the table, before which its feed cannot be asked."""
    catalog = db._asynchronous.internal.engine.catalog
    info = catalog.known(orders.name)
    if info is None:
        db.newest_change(orders, after=db.timestamp())
        info = catalog.known(orders.name)
    assert info is not None
    return Timestamp(info.created_at)
