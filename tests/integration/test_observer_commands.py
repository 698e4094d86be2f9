"""`percolator observers`, `notifications` and `wait`, on a running cluster."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from subprocess import Popen

import pytest

import percolator
from percolator import Database, Table, Ticket, Transaction, aio, codecs, observes
from percolator.aio.connecting import connect
from percolator.backup import export_files, exporter, importer
from percolator.backup.export_files import DamagedExport, ExportFormat
from percolator.errors import InvalidArgument, SchemaError
from percolator.services.local.cluster import LocalCluster
from percolator.v1.master_pb2 import ChangeObserversRequest, Observer
from tests.integration.command_line import CommandLine
from tests.integration.observed_orders import by_city, city, people

pages = Table("pages")
body = pages.column("body", codecs.text)
size = pages.column("size", codecs.integer)
_TIMEOUT_SECONDS = 30


@observes(body, name="measure")
async def measure(tx: percolator.aio.Transaction, row: str) -> None:
    await tx.set(row, size, len(await tx.get(row, body, "")))


asked = pages.column("asked", codecs.integer)


@observes(asked, name="hang")
async def hang(tx: percolator.aio.Transaction, row: str) -> None:
    print("hanging", file=sys.stderr, flush=True)
    await asyncio.to_thread(threading.Event().wait)


@observes(asked, name="leave")
async def leave(tx: percolator.aio.Transaction, row: str) -> None:
    left.append(asyncio.create_task(_exit()))


async def _exit() -> None:
    sys.exit()


left: list[asyncio.Task[None]] = []
hanging, leaving = [hang], [leave]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=2) as started:
        yield started


@pytest.fixture(scope="module")
def db(cluster: LocalCluster) -> Iterator[Database]:
    with percolator.connect(cluster.address) as database:
        database.create_table(pages, splits=["m"])
        database.set_many((f"{side}{n}", {body: "text"}) for side in "az" for n in range(3))
        yield database


@pytest.fixture
def command(cluster: LocalCluster, db: Database) -> CommandLine:
    """The command line, with `measure` registered and nothing left for it to do."""
    with db.run_observers([measure]):
        db.wait_for_observers(timeout=_TIMEOUT_SECONDS)
    return CommandLine(cluster.address)


def test_observers_are_listed_paused_and_resumed(command: CommandLine) -> None:
    listed = command.data("observers", "list", "--table", "pages")
    expected: dict[str, object] = {"table": "pages", "observer": "measure", "columns": ["body"]}
    done = {"backfill": True, "backfill_owed": False, "backfilled_cells": None}
    expected |= {"weak": False, "paused": False, "table_exists": True}
    assert listed == [{**expected, **done}]
    assert "with backfill" in command.text("observers", "list")
    assert "is now paused" in command.text("observers", "pause", "pages", "measure")
    assert "paused" in command.text("observers", "list")
    quiet = command.data("wait", "--timeout", "20")
    assert quiet["paused"] == [{"table": "pages", "observer": "measure"}]
    assert "is paused" in command.text("wait")
    assert not command.data("observers", "resume", "pages", "measure")["paused"]


def test_a_backfill_is_shown_waited_for_and_ended_by_a_removal(
    command: CommandLine, db: Database
) -> None:
    choices: dict[str, tuple[bool, bool | None]] = {
        "with": (False, None),
        "without": (False, False),
        "weakly": (True, None),
    }
    for name, (weak, backfill) in choices.items():
        decorate = observes(body, name=name, weak=weak, backfill=backfill)
        db.register_observers([decorate(lambda tx, row: None)])
    listed = {one["observer"]: one for one in command.data("observers", "list")}
    assert [listed[name]["backfill_owed"] for name in choices] == [True, False, False]
    assert listed["with"]["backfilled_cells"] == 0
    shown = [line.strip() for line in command.text("observers", "list").splitlines()]
    ends = {line.split()[1]: line for line in shown}
    assert ends["with"].endswith("backfilling, 0 cells so far")
    assert ends["without"].endswith("without backfill")
    assert ends["weakly"].endswith("weak")
    late = command.error("wait", "--timeout", "2", code=1)
    assert "a backfill for 'with' of 'pages', 0 cells so far" in late
    for name in choices:
        assert command.data("observers", "remove", "pages", name, "--yes")["removed"]
    assert command.data("wait", "--timeout", "20")["dead_letters"] == []


def test_observers_of_a_table_that_does_not_exist_are_listed_and_removed(
    command: CommandLine, cluster: LocalCluster
) -> None:
    added = Observer(name="early", columns=[b"body"])
    request = ChangeObserversRequest(table="to come", add=[added], awaited=True)

    async def register() -> bool:
        async with aio.connect(cluster.address) as database:
            engine = database.internal.engine
            return await engine.catalog.await_table(request, engine.now() + 20)

    assert not asyncio.run(register())
    shown = next(line for line in command.text("observers", "list").splitlines() if "early" in line)
    assert shown.strip().endswith("the table does not exist yet")
    listed = {one["observer"]: one for one in command.data("observers", "list")}
    assert (listed["early"]["table"], listed["early"]["table_exists"]) == ("to come", False)
    removed = command.data("observers", "remove", "to come", "early", "--yes")
    assert (removed["removed"], removed["purged"], removed["left"]) == (True, 0, 0)
    assert "early" not in command.text("observers", "list")
    assert "'to come'" in command.error("observers", "remove", "to come", "early", "--yes", code=1)


def test_waiting_notifications_are_listed_counted_and_thrown_away(command: CommandLine) -> None:
    assert command.text("notifications").strip() == "no notifications"
    assert command.data("observers", "backfill", "pages", "measure")["cells"] == 6
    listed = command.data("notifications", "--limit", "2")
    assert [one["row"] for one in listed] == ["a0", "a1"]
    assert (listed[0]["observer"], listed[0]["column"]) == ("measure", "body")
    for form in (["--json"], []):
        cut = command.run(*form, "notifications", "--limit", "2")
        assert cut.stderr.strip() == "only the first 2 cells; --limit shows more"
        assert "only" not in cut.stdout
    counted = [{"table": "pages", "observer": "measure", "cells": 6}]
    assert command.data("notifications", "--count") == counted
    late = command.error("wait", "--timeout", "2", code=1)
    assert "6 for 'measure' of 'pages'" in late
    assert "--yes" in command.error("observers", "remove", "pages", "measure", "--purge", code=2)
    refused = command.error("observers", "remove", "pages", "measure", "--yes", code=2)
    assert "purge" in refused
    removed = command.data("observers", "remove", "pages", "measure", "--purge", "--yes")
    assert (removed["removed"], removed["purged"], removed["left"]) == (True, 6, 0)
    # Other tests have observers that wait for tables.
    assert "measure" not in command.text("observers", "list")


def test_an_unknown_observer_or_table_is_named_in_the_error(command: CommandLine) -> None:
    assert "'unknown'" in command.error("observers", "pause", "pages", "unknown", code=2)
    assert "'unknown'" in command.error("observers", "backfill", "pages", "unknown", code=1)
    assert "'unknown'" in command.error("observers", "remove", "pages", "unknown", "--yes", code=1)
    assert "'none'" in command.error("notifications", "--table", "none", code=1)
    assert "'none'" in command.error("observers", "list", "--table", "none", code=1)
    assert "--from" in command.error(
        "observers", "backfill", "pages", "measure", "--from", "hex:0", code=2
    )
    for named in (["--observer", "unknown"], ["--observer", "unknown", "--table", "pages"]):
        of_table = " of table 'pages'" if "--table" in named else ""
        for asked in (
            ["notifications"],
            ["notifications", "--count"],
            ["notifications", "--follow"],
            ["observers", "stats"],
            ["dead-letters", "list"],
            ["dead-letters", "show", "row"],
            ["dead-letters", "retry"],
            ["dead-letters", "clear", "--yes"],
        ):
            says = f"no observer 'unknown'{of_table} is registered"
            assert says in command.error(*asked, *named, code=1)
    assert command.data("notifications", "--observer", "measure") == []
    assert command.data("dead-letters", "list", "--observer", "measure") == []


def test_following_notifications_takes_no_work_from_the_workers(
    cluster: LocalCluster, db: Database
) -> None:
    done = threading.Event()

    def write() -> None:
        """Keeps writing: a listener hears nothing of what happened before it began to listen."""
        while not done.wait(0.05):
            db.set_many([("a0", {body: "first"}), ("z0", {body: "second"})])

    follow = [sys.executable, "-m", "percolator.cli", "--address", cluster.address, "--json"]
    with db.run_observers([measure]):
        writing = threading.Thread(target=write)
        writing.start()
        command = [*follow, "notifications", "--follow"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
            try:
                assert following.stdout is not None
                heard = [json.loads(following.stdout.readline()) for _ in range(4)]
            finally:
                done.set()
                writing.join()
                following.kill()
        db.wait_for_observers(timeout=_TIMEOUT_SECONDS)
    assert {one["row"] for one in heard} == {"a0", "z0"}
    assert {(one["table"], one["observer"]) for one in heard} == {("pages", "measure")}


def test_workers_of_the_library_and_what_they_do_are_shown(
    cluster: LocalCluster, db: Database, command: CommandLine
) -> None:
    while (idle := command.data("observers", "stats")[0])["workers"]:
        pass  # that of the test before: the session's next renewal tells that it has ended
    assert (idle["observer"], idle["waiting"]) == ("measure", 0)
    command.data("observers", "backfill", "pages", "measure", "--again")
    [waits] = command.data("observers", "stats", "--table", "pages")
    assert waits["waiting"] == 6
    assert waits["oldest_seconds"] >= 0
    with db.run_observers([measure]):
        db.wait_for_observers(timeout=_TIMEOUT_SECONDS)
        while (stats := command.data("observers", "stats"))[0]["runs"] < 6:
            assert stats[0]["workers"] <= 1  # told with the session's next renewal
        assert (stats[0]["waiting"], stats[0]["oldest_seconds"]) == (0, None)
        [worker] = command.data("status")["workers"]
        assert worker["observers"] == [["pages", "measure"]]
        assert "worker (library)" in command.text("status")
        assert "measure" in command.text("observers", "stats")
        shown = command.text("top", "--times", "2", "--every", "0.2")
        assert shown.count("commits/s") == 4, "two tables, twice"
        assert "measure" in shown
    assert "no observer of table 'x' is registered" in command.error(
        "observers", "stats", "--table", "x", code=1
    )


@contextmanager
def _worker(cluster: LocalCluster, observers: str, *options: str) -> Iterator[Popen[str]]:
    """`percolator worker` as a process of its own, which says what it does on standard error."""
    command = [sys.executable, "-m", "percolator.cli", "--address", cluster.address, "worker"]
    with subprocess.Popen(
        [*command, "--observers", observers, *options], stderr=subprocess.PIPE, text=True
    ) as worker:
        try:
            yield worker
        finally:
            worker.kill()


def _remove(cluster: LocalCluster, observer: str) -> None:
    CommandLine(cluster.address).run("observers", "remove", "pages", observer, "--purge", "--yes")


def _said(worker: Popen[str]) -> str:
    """The next line that it prints, apart from what it logs."""
    assert worker.stderr is not None
    while " INFO " in (line := worker.stderr.readline()):
        pass
    return line


def test_a_worker_that_waits_for_its_table_says_what_it_lacks_and_can_be_stopped(
    cluster: LocalCluster,
) -> None:
    lacks = "waiting: there is no table 'orders': create it with db.create_table"
    with _worker(cluster, "tests.integration.observed_orders:observers") as worker:
        assert _said(worker).startswith(lacks)
        worker.terminate()
        assert worker.wait(_TIMEOUT_SECONDS) == 0


def test_a_worker_is_stopped_even_if_a_run_hangs_in_a_thread(
    cluster: LocalCluster, db: Database
) -> None:
    observers = "tests.integration.test_observer_commands:hanging"
    with _worker(cluster, observers, "--drain-seconds", "0.1") as worker:
        assert _said(worker) == "running hang of pages\n"
        db.set_many([("a0", {asked: 1})])
        assert _said(worker) == "hanging\n"
        worker.terminate()
        assert worker.wait(_TIMEOUT_SECONDS) == 1
    _remove(cluster, "hang")


def test_a_worker_fails_if_an_observer_exits_in_a_task_whatever_its_code(
    cluster: LocalCluster, db: Database
) -> None:
    with _worker(cluster, "tests.integration.test_observer_commands:leaving") as worker:
        assert _said(worker) == "running leave of pages\n"
        db.set_many([("a1", {asked: 1})])
        assert worker.wait(_TIMEOUT_SECONDS) == 1
        assert worker.stderr is not None
        assert "error: an observer called sys.exit in a task" in worker.stderr.read()
    _remove(cluster, "leave")


@pytest.mark.usefixtures("db")
def test_a_worker_of_which_a_part_fails_ends(cluster: LocalCluster) -> None:
    """It would find work late or never, and look as if it ran."""
    with _worker(cluster, "tests.integration.broken_worker:observers") as worker:
        assert worker.wait(_TIMEOUT_SECONDS) == 1
        assert worker.stderr is not None
        assert "RuntimeError: a bug" in worker.stderr.read()


# Commands take and show rows as the codec of the table's keys says, on a running cluster.

orders = Table("orders", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
state = orders.column("state", codecs.text)


@observes(state)
def count(tx: Transaction, row: tuple[str, int]) -> None:
    """It never runs here: its notifications wait."""


@pytest.fixture(scope="module")
def typed_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=1) as started:
        yield started


@pytest.fixture(scope="module")
def typed_db(typed_cluster: LocalCluster) -> Iterator[Database]:
    with percolator.connect(typed_cluster.address) as connected:
        connected.create_table(orders)
        connected.set_many((("ann", number), {state: "open"}) for number in (1, 2, 3))
        yield connected


@pytest.fixture
def typed_command(typed_cluster: LocalCluster) -> CommandLine:
    return CommandLine(typed_cluster.address)


def test_the_lock_of_a_row_is_found_by_the_row_as_it_is_shown(
    typed_db: Database, typed_command: CommandLine
) -> None:
    with typed_db.shared_transaction() as whole:
        lock(typed_db, whole.ticket)
        (held,) = typed_command.data("locks", "orders", '["ann", 2]')
        assert (held["row"], held["column"]) == (["ann", 2], "state")
        assert '["ann", 2]' in typed_command.text("locks", "orders")
        assert typed_command.data("locks", "orders", '["ann", 3]') == []
        whole.abort()
    assert "expected tuple_of(text" in typed_command.error("locks", "orders", "ann", code=2)


def lock(typed_db: Database, ticket: Ticket) -> None:
    with typed_db.share(ticket, task="1") as share:
        share.set(("ann", 2), state, "held")
        share.finish()


def test_a_backfill_begins_and_ends_at_the_rows_that_are_named(
    typed_db: Database, typed_command: CommandLine
) -> None:
    typed_db.register_observers([count])
    chosen = ("--from", '["ann", 2]', "--to", '["ann", 3]')
    done = typed_command.data("observers", "backfill", "orders", "count", *chosen)
    assert done["cells"] == 1
    (waiting,) = typed_command.data("notifications", "--table", "orders")
    assert waiting["row"] == ["ann", 2]
    assert '["ann", 2]' in typed_command.text("notifications")
    wrong = ("observers", "backfill", "orders", "count", "--from", "ann")
    assert "--from: expected tuple_of(text" in typed_command.error(*wrong, code=2)


def test_a_tablet_is_split_at_the_key_that_is_named(
    typed_db: Database, typed_command: CommandLine
) -> None:
    (whole,) = typed_command.data("tablets", "--table", "orders")
    assert (whole["start"], whole["end"]) == ("", None)
    split = ("tablets", "split", str(whole["tablet_id"]), "--row")
    assert "--row: expected tuple_of(text" in typed_command.error(*split, "ann", code=2)
    made = typed_command.data(*split, '["ann", 2]')
    assert (made["lower"]["end"], made["upper"]["start"]) == (["ann", 2], ["ann", 2])
    shown = typed_command.data("tablets", "--table", "orders")
    assert [one["start"] for one in shown] == ["", ["ann", 2]]
    assert '["ann", 2]' in typed_command.text("tablets", "--table", "orders")


def test_no_command_writes_a_row_that_programs_cannot_read(
    typed_db: Database, typed_command: CommandLine
) -> None:
    for row in ("", "ann", '["ann"]', '["ann", 1, 2]'):
        assert "row: expected tuple_of" in typed_command.error(
            "set", "orders", row, "state=x", code=2
        )
    with typed_db.snapshot() as snapshot:
        assert [row.key for row in snapshot.scan(orders)] == [("ann", 1), ("ann", 2), ("ann", 3)]
    assert len(typed_command.data("scan", "orders", "--start", "", "--end", "")) == 3


# Exports as lines of JSON: readable by people and programs, and imported as the same bytes.


products = Table("products", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
stock = products.column("stock", codecs.integer)
label = products.column("label", codecs.text)
photo = products.column("photo", codecs.raw)
ROWS = 40
HERE = "products/part-00000.jsonl"


@pytest.fixture
def records_db(typed_cluster: LocalCluster) -> Iterator[Database]:
    with percolator.connect(typed_cluster.address) as database:
        database.drop_table(products, missing_ok=True)
        database.create_table(products, splits=[("eu", 20)])
        database.set_many(
            (("eu", number), {stock: number, label: f"hex:{number}\nnext line", photo: b"\xff\x00"})
            for number in range(ROWS)
        )
        yield database


@pytest.fixture
def exported(typed_cluster: LocalCluster, records_db: Database, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    table = ("--table", products.name)
    CommandLine(typed_cluster.address).run("export", str(out), *table, "--format", "jsonl")
    return out


def _rows(records_db: Database) -> list[tuple[object, object]]:
    with records_db.snapshot() as snapshot:
        return [(row.key, row.raw()) for row in snapshot.scan(products)]


def _edited(exported: Path, old: str, new: str) -> None:
    """Changes the first file by hand, and makes all checksums agree."""
    path = exported / HERE
    path.write_text(path.read_text().replace(old, new, 1))
    record = export_files.read_record(exported / export_files.MANIFEST)
    changed = {
        "bytes": path.stat().st_size,
        "sha256": sha256(path.read_bytes()).hexdigest(),
    }
    for table in record["tables"]:
        for part in table["parts"]:
            if part["file"] == HERE:
                part.update(changed)
    export_files.write_record(exported / export_files.MANIFEST, record)


def test_a_line_is_a_row_as_scan_shows_it_and_all_of_them_are_the_table_again(
    typed_cluster: LocalCluster, records_db: Database, exported: Path
) -> None:
    typed_command, before = CommandLine(typed_cluster.address), _rows(records_db)
    lines = (exported / HERE).read_text().splitlines()
    assert len(lines) == 20
    first = json.loads(lines[3])
    shown = typed_command.data("scan", "products", "--column", "stock", "--column", "photo")[3]
    label_bytes = b"hex:3\nnext line".hex()
    assert first["row"] == shown["row"] == ["eu", 3]
    assert first["columns"] == {**shown["columns"], "label": f"hex:{label_bytes}"}
    assert first["columns"]["stock"] == 3
    assert typed_command.data("export", "verify", str(exported))["cells"] == 3 * ROWS
    records_db.drop_table(products)
    assert typed_command.data("import", str(exported))["tables"]["products"] == 3 * ROWS
    assert _rows(records_db) == before
    with (
        pytest.raises(SchemaError, match="the table has integer"),
        records_db.transaction() as tx,
    ):
        tx.set(("eu", 1), products.column("stock", codecs.text), "many")


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ('"stock": 3', '"stock": "3"', "line 4, table 'products': column 'stock': expected int"),
        ('["eu", 3]', '["eu", "3"]', r"line 4, table 'products': row: expected tuple_of\(text"),
        ('["eu", 3]', '["eu", 2]', "has rows out of order"),
    ],
)
async def test_what_does_not_fit_is_refused_and_nothing_of_it_is_there(
    old: str,
    new: str,
    wrong: str,
    typed_cluster: LocalCluster,
    records_db: Database,
    exported: Path,
) -> None:
    records_db.drop_table(products)
    _edited(exported, old, new)
    with pytest.raises(DamagedExport, match=wrong):
        importer.verify(exported)
    async with connect(typed_cluster.address) as database:
        with pytest.raises(DamagedExport, match=wrong):
            await importer.import_tables(database, exported)
    assert _rows(records_db) == []


async def test_what_was_edited_by_hand_is_damaged_and_an_interrupted_export_keeps_its_format(
    typed_cluster: LocalCluster, records_db: Database, exported: Path, tmp_path: Path
) -> None:
    path = exported / HERE
    path.write_text(path.read_text().replace('"stock": 3', '"stock": 4', 1))
    with pytest.raises(DamagedExport, match="its checksum differs"):
        importer.verify(exported)

    def break_off(_cells: int, done: int, _all: int) -> None:
        if done == 1:
            raise KeyError

    async with connect(typed_cluster.address) as database:
        with pytest.raises(KeyError):
            await exporter.export(
                database, tmp_path / "later", form=ExportFormat.JSONL, progress=break_off
            )
        with pytest.raises(InvalidArgument, match="was started as jsonl"):
            await exporter.export(database, tmp_path / "later", form=ExportFormat.PARQUET)
        done = await exporter.export(database, tmp_path / "later")
    assert done.form is ExportFormat.JSONL
    assert importer.verify(tmp_path / "later") == done


# `percolator index`, on a running cluster.


REFERENCE = "tests.integration.observed_orders:by_city"


def test_an_index_is_built_over_existing_data_and_checked(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        LocalCluster(tmp_path_factory.mktemp("cluster")) as typed_cluster,
        percolator.connect(typed_cluster.address) as typed_db,
    ):
        typed_db.create_table(people)
        typed_db.set_many(
            (f"person {number}", {city: f"city {number % 3}"}) for number in range(30)
        )
        by_city.create(typed_db)
        typed_command = CommandLine(typed_cluster.address)
        missing = typed_command.text("index", "check", REFERENCE, code=1)
        assert "row 'person 0' is missing for 'city 0'" in missing
        assert typed_command.data("index", "backfill", REFERENCE) == {
            "index": "people by city",
            "rows": 30,
        }
        assert "column and index agree" in typed_command.text("index", "check", REFERENCE)
        wrong = typed_command.error(
            "index", "check", REFERENCE.replace("by_city", "people"), code=2
        )
        assert "index: tests.integration.observed_orders:people is Table('people'" in wrong
