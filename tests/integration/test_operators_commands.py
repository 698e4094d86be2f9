"""Commands of operators: they look at rows, repair them, and see who holds locks."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import percolator
from percolator import Table, aio, codecs
from percolator.blocking.api import Database
from percolator.cli.app import app
from percolator.cli.connection import console
from percolator.errors import CellAddress, OutcomeUnknown
from percolator.formats.records import LockRecord, RecordKind, read_lock_column
from percolator.limits import Limits
from percolator.services.chassis.access import Grant, Tokens
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.roles import Role
from percolator.wire.sessions import Sessions, SessionSettings
from percolator.wire.tokens import token_hash
from percolator.world import MachineClock, World, machine_random
from tests.command_line import CliRunner
from tests.integration.command_line import CommandLine
from tests.integration.oracle_with_clock_ahead import AHEAD_MILLISECONDS

SECONDS = 10.0


TYPED_KEYS = "tuple_of(text, ordered_integer)"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=2) as started:
        run(started, "tables", "create", "shop", "--split", "m")
        run(started, "tables", "create", "attic")
        run(started, "tables", "create", "typed", "--key", TYPED_KEYS, "--column", "stock=integer")
        yield started


def run(cluster: LocalCluster, *arguments: str, code: int = 0) -> str:
    """Runs a command in this process: starting another takes longer than everything tested here."""
    with console.capture() as shown:
        done = CliRunner().invoke(app, ["--address", cluster.address, *arguments])
    assert done.exit_code == code, done.output
    return done.stdout + shown.get()


def refused(cluster: LocalCluster, *arguments: str, code: int) -> str:
    """The error of a command that is refused."""
    done = CliRunner().invoke(app, ["--address", cluster.address, *arguments])
    assert done.exit_code == code, done.output
    return done.output


def run_apart(cluster: LocalCluster, *arguments: str) -> str:
    """Runs a command in a separate process, because an event loop is running in this one."""
    return apart(cluster, *arguments).stdout


def apart(cluster: LocalCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "percolator.cli", "--address", cluster.address, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)


def asked(cluster: LocalCluster, *arguments: str, code: int = 0) -> Any:
    return json.loads(run(cluster, "--json", *arguments, code=code))


def test_cells_that_were_set_are_shown_and_deleted_ones_are_not(cluster: LocalCluster) -> None:
    run(cluster, "set", "shop", "pen", "price=3", "stock=hex:00ff")
    run(cluster, "set", "shop", "ink", "grams=7", "--as", "integer")
    assert asked(cluster, "get", "shop", "pen") == {"price": "3", "stock": "hex:00ff"}
    assert asked(cluster, "get", "shop", "ink") == {"grams": 7}
    assert asked(cluster, "get", "shop", "pen", "price") == {"price": "3"}
    assert asked(cluster, "get", "shop", "pen", "--family", "st") == {"stock": "hex:00ff"}
    assert asked(cluster, "scan", "shop", "--family=st", "--family=none:") == [
        {"row": "pen", "columns": {"stock": "hex:00ff"}}
    ]
    assert [row["row"] for row in asked(cluster, "scan", "shop")] == ["ink", "pen"]
    assert [row["row"] for row in asked(cluster, "scan", "shop", "--prefix", "p")] == ["pen"]
    assert [row["row"] for row in asked(cluster, "scan", "shop", "--where=price=3")] == ["pen"]
    assert [row["row"] for row in asked(cluster, "scan", "shop", "--reverse", "--limit=1")] == [
        "pen"
    ]
    assert "price" in run(cluster, "get", "shop", "pen")
    for mistyped in (["prize"], ["--family", "prize"]):
        shown = run(cluster, "get", "shop", "pen", *mistyped, code=1)
        assert shown == "the row has nothing in these columns\n"
    before = asked(cluster, "timestamp")[0]
    assert asked(cluster, "delete", "shop", "pen", "stock") == {"deleted": 1}
    assert asked(cluster, "delete", "shop", "pen") == {"deleted": 1}
    assert asked(cluster, "get", "shop", "pen", code=1) == {}
    assert run(cluster, "get", "shop", "pen", code=1) == "the row is empty\n"
    at = f"--at={before}"
    assert asked(cluster, "get", "shop", "pen", at) == {"price": "3", "stock": "hex:00ff"}
    assert [row["row"] for row in asked(cluster, "scan", "shop", at)] == ["ink", "pen"]


def test_versions_that_the_limit_leaves_out_are_not_taken_for_collected(
    cluster: LocalCluster,
) -> None:
    for price in range(3):
        run(cluster, "set", "attic", "hat", f"price={price}")
    command = CommandLine(cluster.address)
    for form in (["--json"], []):
        cut = command.run(*form, "history", "attic", "hat", "--limit", "2")
        assert cut.stderr.strip() == "only the first 2 versions; --limit shows more"
        assert command.run(*form, "history", "attic", "hat", "--limit", "3").stderr == ""
    assert len(command.data("history", "attic", "hat", "--limit", "2")) == 2


def test_a_row_that_is_too_large_to_be_read_at_once_is_deleted(cluster: LocalCluster) -> None:
    pictures = Table("attic", key=codecs.text).family("picture:", codecs.raw)
    with percolator.connect(cluster.address) as db:
        for number in range(8):
            picture = bytes(4 << 20 if number < 7 else 7 << 19)  # all of them: 31.5 MiB
            db.run(lambda tx, at=number, of=picture: tx.set("bob", pictures.column(f"{at}"), of))
            if number == 6:
                with db.snapshot() as snapshot:
                    (row,) = snapshot.get_many(pictures.table, ["bob"])
                assert row is not None
                assert len(row.family(pictures)) == 7, "28 MiB, as a scan returns"
        db.run(lambda tx: tx.set("bobby", pictures.column("1"), b"of another row"))
    assert "read fewer columns" in refused(cluster, "get", "attic", "bob", code=2)
    some = [f"picture:{number}" for number in range(7)]
    assert asked(cluster, "delete", "attic", "bob", *some, "picture:none") == {"deleted": 7}
    with percolator.connect(cluster.address) as db:
        for number in range(7):
            db.run(lambda tx, at=number: tx.set("bob", pictures.column(f"{at}"), bytes(4 << 20)))
    assert asked(cluster, "delete", "attic", "bob") == {"deleted": 8}
    assert [one["row"] for one in asked(cluster, "scan", "attic", "--prefix=bob")] == ["bobby"]


def test_cells_and_rows_are_written_and_shown_as_their_codecs_say(cluster: LocalCluster) -> None:
    row = '["trap", -7]'
    run(cluster, "set", "typed", row, "stock=12345678", "note=as text")
    assert asked(cluster, "get", "typed", row) == {"note": "as text", "stock": 12345678}
    typed = Table("typed", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
    stock = typed.column("stock", codecs.integer)
    with percolator.connect(cluster.address) as db, db.snapshot() as snapshot:
        assert [(one.key, one[stock]) for one in snapshot.scan(typed)] == [(("trap", -7), 12345678)]
    shown = asked(cluster, "scan", "typed", "--prefix", '["trap"]')
    assert [one["row"] for one in shown] == [["trap", -7]]
    assert asked(cluster, "scan", "typed", "--where=stock>=12345678", "--where=note!=x") == shown
    assert asked(cluster, "scan", "typed", "--where=stock>12345678") == []
    assert asked(cluster, "scan", "typed", "--count", "--where=stock<20000000") == {"rows": 1}
    assert asked(cluster, "scan", "typed", "--count") == {"rows": 1}
    for where, reason in (
        ("stock>=many", "--where: column 'stock': expected integer, found 'many'"),
        ("stock=" + "9" * 20, "--where: column 'stock': expected integer, found '999"),
    ):
        assert reason in refused(cluster, "scan", "typed", f"--where={where}", code=2)
    assert "expected integer" in refused(cluster, "set", "typed", row, "stock=many", code=2)
    assert "expected tuple_of" in refused(cluster, "get", "typed", "trap", code=2)
    other = refused(cluster, "set", "typed", row, "stock=7", "--as", "text", code=1)
    assert "column 'stock': the program declares the codec text" in other
    altered = asked(cluster, "tables", "alter", "typed", "--column", "note=json", "--yes")
    assert altered["columns"] == {"note": "json", "stock": "integer"}
    assert altered["key_codec"] == TYPED_KEYS
    unordered = refused(cluster, "scan", "typed", '--where=note<"a"', code=2)
    assert "--where: column 'note': values of codec json have no order" in unordered
    unknown = refused(cluster, "tables", "alter", "typed", "--column", "note=jason", code=2)
    assert "'jason' is not a codec for columns" in unknown
    assert asked(cluster, "delete", "typed", row) == {"deleted": 2}


def test_an_index_is_created_shown_checked_and_dropped(cluster: LocalCluster) -> None:
    run(cluster, "tables", "create", "people", "--column", "city=text", "--column", "notes=json")
    run(cluster, "set", "people", "ann", "city=Rome", "age=17", "--as", "text")
    place = ("people", "by place", "--column", "city", "--column", "age=text")
    assert asked(cluster, "index", "create", *place) == {
        "table": "people",
        "index": "by place",
        "rows": 1,
    }
    run(cluster, "index", "create", "people", "city", "--column", "city", "--unique")
    people = Table("people")
    city, age = people.column("city", codecs.text), people.column("age", codecs.text)
    by_place = people.index("by place", city, age)
    with percolator.connect(cluster.address) as db, db.snapshot() as snapshot:
        assert [row.key for row in snapshot.find(by_place, "Rome", "17")] == ["ann"]
    bob = {"row": "bob", "columns": {"age": "-3"}}
    run(cluster, "set", "people", "bob", "city=Rimini", "age=-3", "--as", "text")
    assert asked(cluster, "find", "people", "by place", "Rimini", "--column=age") == [bob]
    run(cluster, "set", "people", "ann", "born=1990", "--as", "integer")
    run(cluster, "index", "create", "people", "born", "--column", "born")
    found: dict[tuple[str, ...], list[str]] = {
        ("born", "--start=999"): ["ann"],
        ("city", "Rome"): ["ann"],
        ("city", "--reverse", "--limit=1"): ["ann"],
        ("city", "--prefix=Ri"): ["bob"],
        ("city", "--start=Rome", "--end=S"): ["ann"],
        ("by place", "--", "Rimini", "-3"): ["bob"],
        ("by place", "Rome", "--prefix="): ["ann"],
        ("by place", "Roma"): [],
    }
    for arguments, keys in found.items():
        assert [row["row"] for row in asked(cluster, "find", "people", *arguments)] == keys
    described = asked(cluster, "tables", "describe", "people")
    assert described["indexes"] == [
        {"name": "born", "columns": ["born"], "unique": False},
        {"name": "by place", "columns": ["city", "age"], "unique": False},
        {"name": "city", "columns": ["city"], "unique": True},
    ]
    shown = run(cluster, "tables", "describe", "people")
    assert "index by place, over 'city' (text), 'age' (text)" in shown
    assert "index city, unique over 'city' (text)" in shown
    listed = [one["name"] for one in asked(cluster, "tables", "list")]
    assert "people" in listed
    assert not [name for name in listed if "index" in name]
    assert asked(cluster, "index", "check", "people", "by place")["problems"] == []

    other = refused(cluster, "index", "create", "people", "city", "--column", "age", code=1)
    assert "has another index 'city', unique over 'city' (text), not over 'age' (text)" in other
    for changed, code, reason in (
        (("create", "people", "none"), 2, "--column: is missing: an index has one column at least"),
        (("create", "people", "new", "--column", "new"), 2, "expected COLUMN=CODEC, found 'new'"),
        (("create", "people", "new", "--column", "new=x"), 2, "'x' is not a codec for columns"),
        (("create", "people", "new", "--column", "notes"), 1, "codec json have no order"),
        (("check", "people", "new"), 1, "table 'people' has no index 'new'"),
        (("check", "people"), 2, "NAME: is missing: say which index of table 'people'"),
        (("drop", "people", "new"), 1, "table 'people' has no index 'new'"),
    ):
        assert reason in refused(cluster, "index", *changed, code=code)
    for wanted, code, reason in (
        (("new", "Rome"), 1, "table 'people' has no index 'new'"),
        (("city", "Rome", "17"), 2, "values: index 'city' has 1 column, got 2 values"),
        (("city", "hex:ff"), 2, "values: column 'city'"),
        (("born", "x"), 2, "values: expected integer, found 'x'"),
        (("born", "--prefix=1"), 2, "prefix: values of codec integer have no prefixes"),
    ):
        assert reason in refused(cluster, "find", "people", *wanted, code=code)

    assert "dropped" in run(cluster, "index", "drop", "people", "by place")
    for name in ("born", "city"):
        run(cluster, "index", "drop", "people", name)
    assert asked(cluster, "tables", "describe", "people")["indexes"] == []
    run(cluster, "tables", "delete", "people", "--yes")


def test_every_stored_version_is_shown_raw(cluster: LocalCluster) -> None:
    for price in ("1", "2"):
        run(cluster, "set", "shop", "brush", f"price={price}")
    run(cluster, "delete", "shop", "brush")
    cells = asked(cluster, "get", "shop", "brush", "--raw")
    assert [(cell["space"], cell["kind"], cell["value"]) for cell in cells] == [
        ("write", "delete", None),
        ("write", "put", "2"),
        ("write", "put", "1"),
    ]
    assert "commit_timestamp" in run(cluster, "scan", "shop", "--raw", "--prefix", "brush")


def test_an_empty_row_has_no_raw_cells(cluster: LocalCluster) -> None:
    assert asked(cluster, "get", "shop", "empty", "--raw", code=1) == []


def test_with_more_cells_than_the_limit_the_first_rows_are_whole(cluster: LocalCluster) -> None:
    """A value this long is stored in another space than its commit record."""
    for row in ("wide-1", "wide-2"):
        run(cluster, "set", "attic", row, f"text={'x' * 2000}")
    found = apart(cluster, "--json", "scan", "attic", "--prefix=wide", "--raw", "--limit=3")
    cells = json.loads(found.stdout)
    assert [(cell["row"], cell["space"]) for cell in cells] == [
        ("wide-1", "write"),
        ("wide-1", "data"),
        ("wide-2", "write"),
    ]
    assert found.stderr == "only the first 3 cells; --limit shows more\n"
    found = apart(cluster, "--json", "scan", "attic", "--prefix=wide", "--raw", "--limit=4")
    assert len(json.loads(found.stdout)) == 4
    assert found.stderr == ""


def test_numbers_that_json_cannot_express_are_text(cluster: LocalCluster) -> None:
    run(cluster, "set", "attic", "odd", "a=nan", "b=-inf", "c=0.5", "--as=float")
    printed = run(cluster, "--json", "get", "attic", "odd", "--as=float")
    assert json.loads(printed, parse_constant=pytest.fail) == {
        "a": "NaN",
        "b": "-Infinity",
        "c": 0.5,
    }


def test_the_json_option_may_be_given_anywhere(cluster: LocalCluster) -> None:
    run(cluster, "set", "attic", "nib", "price=1")
    found = apart(cluster, "get", "attic", "nib", "--json")
    assert json.loads(found.stdout) == {"price": "1"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["set", "shop", "pen", "price"], "expected COLUMN=VALUE"),
        (["set", "shop", "pen", "=3"], "no column in '=3'"),
        (["set", "shop", "pen", "price=3", "price=4"], "two values for 'price'"),
        (["set", "shop", "pen", "price=x", "--as=integer"], "price: expected integer"),
        (["get", "shop", "pen", "--raw", "--at=1"], "--raw: shows all versions"),
        (["get", "shop", "hex:0"], "row: expected pairs"),
        (["get", "shop", "pen", "--raw", "--family=p"], "--raw: cannot be combined"),
        (["scan", "shop", "--family="], "--family: is empty"),
        (["get", "shop", "pen", "--at=yesterday"], "--at: 'yesterday'"),
        (["scan", "shop", "--prefix=p", "--start=a"], "--prefix"),
        (["get", "shop", "pen\udcff"], "row: 'pen\\udcff' cannot be encoded as UTF-8"),
        (["history", "shop\udcff", "pen"], "'shop\\udcff' cannot be encoded as UTF-8"),
        (["pins", "create", "--description=\udcff"], "description: '\\udcff' cannot be encoded"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(
    cluster: LocalCluster, arguments: list[str], words: str
) -> None:
    command = [sys.executable, "-m", "percolator.cli", "--address", cluster.address, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


async def test_a_lock_is_shown_with_its_owner_and_whether_it_is_alive(
    cluster: LocalCluster,
) -> None:
    async with aio.connect(cluster.address) as database:
        world = database.internal.engine.world
        services = [cluster.processes["lockservice"].address]
        settings = SessionSettings(description="the till", ttl_seconds=20)
        owner = Sessions(world, services, settings)
        session = await owner.current()
        await lock(database, b"lamp", session or b"")
        ask = ("--json", "locks", "shop", "lamp")
        held = json.loads(await asyncio.to_thread(run_apart, cluster, *ask))
        shown = await asyncio.to_thread(run_apart, cluster, "locks", "shop")
        everywhere = json.loads(await asyncio.to_thread(run_apart, cluster, "--json", "locks"))
        await owner.close()
        after = json.loads(await asyncio.to_thread(run_apart, cluster, *ask))
    assert [(one["row"], one["column"], one["kind"]) for one in held] == [("lamp", "price", "put")]
    assert (held[0]["owner"], held[0]["state"]) == ("the till", "alive")
    assert "the till" in shown
    assert ("shop", "lamp", "the till") in [
        (one["table"], one["row"], one["owner"]) for one in everywhere
    ]
    assert (after[0]["owner"], after[0]["state"]) == (None, "gone")


def test_a_read_resolves_the_lock_of_a_dead_owner(cluster: LocalCluster) -> None:
    async def left_behind() -> None:
        async with aio.connect(cluster.address) as database:
            services = [cluster.processes["lockservice"].address]
            owner = Sessions(database.internal.engine.world, services, SessionSettings())
            await lock(database, b"table", await owner.current() or b"")
            await owner.close()

    asyncio.run(left_behind())
    assert asked(cluster, "locks", "shop", "table")[0]["state"] == "gone"
    assert asked(cluster, "get", "shop", "table", code=1) == {}
    assert asked(cluster, "locks", "shop", "table") == []
    assert "no locks" in run(cluster, "locks", "shop", "table")


async def test_read_locks_are_shown_as_such_with_the_columns_that_they_lock(
    cluster: LocalCluster,
) -> None:
    async with aio.connect(cluster.address) as database:
        price = Table("shop").column("price", codecs.text)
        async with database.transaction() as tx:
            await tx.lock("shelf", price, shared=True)
        await lock(database, b"shelf", b"", column=read_lock_column(b"price", 1))
        versions = json.loads(
            await asyncio.to_thread(run_apart, cluster, "--json", "history", "shop", "shelf")
        )
        held = json.loads(
            await asyncio.to_thread(run_apart, cluster, "--json", "locks", "shop", "shelf")
        )
        shown = await asyncio.to_thread(run_apart, cluster, "locks", "shop", "shelf")
    assert [(one["column"], one["kind"]) for one in versions] == [("price", "read lock")]
    assert [(one["column"], one["kind"]) for one in held] == [("price", "read_lock")]
    assert "read_lock" in shown


async def lock(
    database: aio.Database, row: bytes, session: bytes, column: bytes = b"price"
) -> None:
    """Locks a cell, as a client does that stops between prewrite and commit."""
    engine = database.internal.engine
    info = await engine.catalog.table("shop", engine.now() + SECONDS)
    tablets = await engine.catalog.all_tablets(info.table_id, engine.now() + SECONDS)
    tablet = next(one for one in tablets if row >= one.start and (not one.end or row < one.end))
    started = await database.timestamp()
    record = LockRecord(
        int(started), 0, 3_000, RecordKind.PUT, session, CellAddress(info.table_id, row, column)
    )
    target = pb.TabletTarget(
        tablet_id=tablet.tablet_id, epoch=tablet.epoch, schema_version=info.schema.version
    )
    put = pb.Change(kind=pb.Change.KIND_PUT, space=cells_pb2.SPACE_LOCK, value=record.encode())
    mutation = pb.Mutation(row=row, column=column, changes=[put])
    request = pb.MutateRequest(batches=[pb.MutationBatch(target=target, mutations=[mutation])])
    call = engine.world.network.unary(tablet.address, methods.MUTATE)
    answer = await call(request, SECONDS)
    assert (answer.batches[0].mutations, len(answer.batches[0].unapplied)) == (1, 0)


def test_status_shows_tables_and_tablets(cluster: LocalCluster) -> None:
    status = asked(cluster, "status", "--check")
    assert (status["tables"], status["tablets"], status["tablets_served"]) == (3, 4, 4)
    assert status["problems"] == []
    assert "3 tables, 4 of 4 tablets served" in run(cluster, "status")


def test_a_new_token_without_a_file_of_tokens_prints_its_entry(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    secret, servers = tmp_path / "token", tmp_path / "tokens.toml"
    entry = run(cluster, "token", "create", "shop", "--role=admin", f"--file={secret}")
    token = secret.read_text().strip()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert token not in entry
    servers.write_text(entry)
    assert Tokens(servers).grant_of(token_hash(token)) == Grant("shop", Role.ADMIN)


def test_a_shell_completes_commands() -> None:
    script = Path(sys.executable).with_name("percolator")
    environment = {
        **os.environ,
        "_PERCOLATOR_COMPLETE": "complete_bash",
        "COMP_WORDS": "percolator sta",
        "COMP_CWORD": "1",
    }
    done = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["status"]


# What the command line shows about a cluster without tables, for people and for programs.

PIN_AT = 1_800_000_000_000 << 18
SERVICES = ["lock service", "master", "oracle", "tablet server"]
MISSED_SECONDS = 30.0


@pytest.fixture(scope="module")
def output_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=1) as started:
        yield started


@pytest.fixture
def command(output_cluster: LocalCluster) -> CommandLine:
    return CommandLine(output_cluster.address)


async def test_sessions_and_pins_are_listed_with_their_descriptions(
    network: GrpcNetwork, output_cluster: LocalCluster, command: CommandLine
) -> None:
    world = World(MachineClock(), network, machine_random())
    addresses = [output_cluster.processes["lockservice"].address]
    wanted = [
        SessionSettings(description="an ordinary worker", ttl_seconds=20),
        SessionSettings(description="the nightly export", ttl_seconds=20, pin_at=PIN_AT),
    ]
    opened = [Sessions(world, addresses, settings) for settings in wanted]
    try:
        ids = [await sessions.current() for sessions in opened]
        as_data = await asyncio.to_thread(command.data, "sessions")
        as_text = await asyncio.to_thread(command.text, "sessions")
    finally:
        for sessions in opened:
            await sessions.close()

    assert [session["session_id"] for session in as_data] == [i.hex() for i in ids if i]
    assert [session["pin"] for session in as_data] == [False, True]
    assert as_data[1]["oldest_start_timestamp"] == str(int(PIN_AT))
    assert "an ordinary worker" in as_text
    assert "2027-01-15" in as_text
    assert "(pin)" in as_text
    assert "no sessions" in await asyncio.to_thread(command.text, "sessions")
    assert await asyncio.to_thread(command.data, "sessions") == []


def test_status_shows_every_service_with_its_address_and_reports_none_missing(
    output_cluster: LocalCluster, command: CommandLine
) -> None:
    status = command.data("status")
    assert sorted(server["kind"] for server in status["servers"]) == SERVICES
    addresses = {process.address for process in output_cluster.processes.values()}
    assert {server["address"] for server in status["servers"]} == addresses
    assert status["problems"] == []
    text = command.text("status")
    assert [address for address in addresses if address not in text] == []
    assert "no oracle" not in text


def test_timestamps_requested_later_are_larger(command: CommandLine) -> None:
    first = [int(one) for one in command.data("timestamp", "--count", "3")]
    second = [int(one) for one in command.data("timestamp")]
    assert first == list(range(first[0], first[0] + 3))
    assert second[0] > first[-1]


def test_a_killed_oracle_is_reported_missing_and_comes_back_with_larger_timestamps(
    output_cluster: LocalCluster, command: CommandLine
) -> None:
    before = int(command.data("timestamp")[0])
    output_cluster.processes["oracle"].kill()
    # It is listed while it might only be silent, and then reported missing.
    deadline = time.monotonic() + MISSED_SECONDS
    while "no oracle is registered" not in command.data("status")["problems"]:
        assert time.monotonic() < deadline
    assert "! no oracle is registered" in command.text("status")
    output_cluster.restart("oracle")
    assert int(command.data("timestamp")[0]) > before


# `percolator status` tells the truth, even when half of the cluster is down.

STATUS_SECONDS = 30.0
WRONG = 3


@pytest.fixture(scope="module", name="status_cluster")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path_factory.mktemp("cluster"), tablet_servers=1, masters=2, oracles=2, gateways=1
    ) as status_cluster:
        yield status_cluster


def status(address: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["--json", "--address", address, "status", "--check"])
    return done.exit_code, json.loads(done.stdout)


def until_well(address: str) -> dict[str, Any]:
    deadline = time.monotonic() + STATUS_SECONDS
    while True:
        code, found = status(address)
        if code == 0:
            return found
        assert time.monotonic() < deadline, found["problems"]


def roles(found: dict[str, Any], kind: str) -> list[str]:
    return sorted(one["role"] for one in found["servers"] if one["kind"] == kind)


@pytest.mark.timeout(120)
def test_every_address_gives_the_leaders_answer(status_cluster: LocalCluster) -> None:
    masters = status_cluster.address.split(",")
    unused = "127.0.0.1:1"
    for address in (
        *masters,
        status_cluster.gateway_address,
        f"{unused},{status_cluster.gateway_address}",
    ):
        found = until_well(address)
        assert roles(found, "master") == roles(found, "oracle") == ["leads", "standby"]
        # A server that has just registered reports 0. It stays 0 only in a wrong answer.
        deadline = time.monotonic() + STATUS_SECONDS
        while not all(one["uptime_seconds"] for one in found["servers"]):
            assert time.monotonic() < deadline, found["servers"]
            found = until_well(address)


@pytest.mark.timeout(120)
def test_registered_oracles_that_do_not_answer_are_a_problem(status_cluster: LocalCluster) -> None:
    until_well(status_cluster.address)
    oracles = [status_cluster.processes[name] for name in ("oracle", "oracle-2")]
    for oracle in oracles:
        oracle.pause()
    try:
        code, found = status(status_cluster.gateway_address)
        listed = roles(found, "oracle")
        assert code == WRONG
        assert listed == ["no answer"] * len(listed)
        # They may have been forgotten by now; before that, they have been silent only for seconds.
        wanted = "no oracle leads" if listed else "no oracle is registered"
        assert wanted in found["problems"]
    finally:
        for oracle in oracles:
            oracle.resume()
    until_well(status_cluster.address)


@pytest.mark.timeout(120)
def test_a_tablet_server_that_is_paused_is_named_before_it_counts_as_dead(
    status_cluster: LocalCluster,
) -> None:
    until_well(status_cluster.address)
    paused = status_cluster.processes["tabletserver-1"]
    for address in (status_cluster.address, status_cluster.gateway_address):
        paused.pause()
        try:
            code, found = status(address)
        finally:
            paused.resume()
        assert code == WRONG
        assert f"tablet server {paused.address} does not answer" in found["problems"]
        until_well(status_cluster.address)


@pytest.mark.timeout(120)
def test_without_a_leading_master_status_claims_no_times_of_servers(
    status_cluster: LocalCluster,
) -> None:
    until_well(status_cluster.address)
    leader, standby = status_cluster.processes["master"], status_cluster.processes["master-2"]
    leader.pause()
    standby.pause()
    try:
        code, found = status(status_cluster.gateway_address)
        assert code == WRONG
        assert "no master leads" in found["problems"]
        assert {one["silence_seconds"] for one in found["servers"]} == {None}
    finally:
        leader.resume()
        standby.resume()
    until_well(status_cluster.address)


# A tablet server whose disk is full as far as it allows: real processes.


def all_in_reserve(name: str, service: str) -> Sequence[str]:
    """The first tablet server keeps more in reserve than any disk has."""
    return (
        (service, "--disk-reserve-bytes", str(10**15)) if name == "tabletserver-1" else (service,)
    )


@pytest.fixture
def full_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    data = tmp_path_factory.mktemp("cluster")
    with LocalCluster(data, tablet_servers=1, program=all_in_reserve) as status_cluster:
        yield status_cluster


def status_run(address: str, *arguments: str) -> tuple[int, Any]:
    done = CliRunner().invoke(app, ["--json", "--address", address, *arguments])
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.timeout(120)
def test_a_server_that_refuses_writes_is_found_by_status_and_servers(
    full_cluster: LocalCluster,
) -> None:
    table = Table("people")
    name = table.column("name", codecs.text)
    full = full_cluster.processes["tabletserver-1"].address
    with percolator.connect(full_cluster.address, limits=Limits(call_seconds=2.0)) as db:
        db.create_table(table)
        # Not even the marker that would roll it back can be stored.
        with pytest.raises(OutcomeUnknown, match="kept in reserve"), db.transaction() as tx:
            tx.set("ada", name, "Ada")
    deadline = time.monotonic() + STATUS_SECONDS
    while True:
        code, found = status_run(full_cluster.address, "status", "--check")
        wanted = f"tablet server {full} takes no writes: "
        if any(one.startswith(wanted) for one in found["problems"]):
            break
        assert time.monotonic() < deadline, found["problems"]
    assert code == WRONG
    shown = {one["address"]: one["writes_refused"] for one in found["servers"]}
    assert "kept in reserve" in shown.pop(full)
    assert not any(shown.values())
    _, [server] = status_run(full_cluster.address, "servers")
    assert "kept in reserve" in server["writes_refused"]
    text = CliRunner().invoke(app, ["--address", full_cluster.address, "status"]).stdout
    assert "1, takes no writes" in text


# An oracle whose clock is temporarily two hours fast: real processes, before, during, after.


@contextmanager
def fast_oracle(status_cluster: LocalCluster, *flags: str) -> Iterator[None]:
    """Replaces the cluster's own oracle, which is killed first and restarted afterwards."""
    own = status_cluster.processes["oracle"]
    own.kill()
    store = str(status_cluster.data / "store")
    process = ServiceProcess(
        "oracle-ahead",
        "tests.integration.oracle_with_clock_ahead",
        ["--store", store, "--masters", status_cluster.address, *flags],
        logs=status_cluster.data / "logs",
        run=status_cluster.data / "run",
    )
    process.listen_on(own.address)
    process.start()
    try:
        process.wait_ready(STATUS_SECONDS)
        yield
    finally:
        process.kill()
    status_cluster.restart("oracle")


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
    """Problems that `status --check` finds, once it finds the expected one."""
    deadline = time.monotonic() + STATUS_SECONDS
    while True:
        done = CliRunner().invoke(app, ["--json", "--address", address, "status", "--check"])
        found: dict[str, Any] = json.loads(done.stdout)
        if any(expected in one for one in found["problems"]):
            assert done.exit_code == WRONG
            return list(found["problems"])
        assert time.monotonic() < deadline, found["problems"]


@pytest.mark.timeout(120)
def test_timestamps_far_ahead_of_the_clock_stop_nothing_and_are_reported(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, tablet_servers=2) as status_cluster:
        with percolator.connect(status_cluster.address) as db:
            everything_works(db, "before")
            with fast_oracle(status_cluster, "--follow-clock-jumps"):
                everything_works(db, "meanwhile")
            everything_works(db, "after")
            assert lead_milliseconds(db) == pytest.approx(AHEAD_MILLISECONDS, abs=60_000)
        status_cluster.processes["tabletserver-1"].kill()
        status_cluster.restart("tabletserver-1")
        with percolator.connect(status_cluster.address) as db:
            everything_works(db, "later")
        problems(status_cluster.address, "the oracle's timestamps are 7,")


@pytest.mark.timeout(120)
def test_an_oracle_with_a_fast_clock_does_not_take_the_cluster_into_the_future(
    tmp_path: Path,
) -> None:
    with (
        LocalCluster(tmp_path, tablet_servers=1) as status_cluster,
        percolator.connect(status_cluster.address) as db,
    ):
        everything_works(db, "before")
        with fast_oracle(status_cluster):
            everything_works(db, "meanwhile")
            assert lead_milliseconds(db) < 60_000
        assert lead_milliseconds(db) < 60_000
