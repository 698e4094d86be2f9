"""Tables, rows, values and history of every `Database`; scans and bad input."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from percolator import (
    Column,
    Database,
    Family,
    InvalidArgument,
    Row,
    SchemaError,
    Snapshot,
    Table,
    Timestamp,
    Transaction,
    UsageError,
    aio,
    both_kinds,
    codecs,
)
from percolator.arguments import COLUMNS_MAX
from percolator.codecs.names import COLUMNS_KEPT_MAX
from percolator.protocol import commit
from percolator.protocol.commit import Commit
from percolator.protocol.environment import Verdicts
from percolator.v1 import master_pb2
from tests.contracts.conftest import Accounts, needs_backward_scans, needs_tablets, put


def test_history_is_read_by_timestamp_and_by_time(db: Database, accounts: Accounts) -> None:
    commits: list[Timestamp] = []
    # At least until a millisecond begins: a time means what is before its millisecond.
    while len(commits) < 3 or commits[-1].to_datetime() == commits[0].to_datetime():
        with db.transaction() as tx:
            tx.set("a", accounts.balance, len(commits))
        assert tx.commit_timestamp is not None
        commits.append(tx.commit_timestamp)
    for number, at in enumerate(commits):
        with db.snapshot(at=at) as snapshot:
            assert (snapshot.get("a", accounts.balance), snapshot.timestamp()) == (number, at)
    time = commits[-1].to_datetime()
    shown = [at for at in commits if at < Timestamp.from_datetime(time)]
    with db.snapshot(at=time) as snapshot:
        assert snapshot.get("a", accounts.balance) == len(shown) - 1


def test_the_future_cannot_be_read(db: Database, accounts: Accounts) -> None:
    with (
        pytest.raises(InvalidArgument, match="future"),
        db.snapshot(at=datetime.now(UTC) + timedelta(hours=1)) as snapshot,
    ):
        snapshot.get("a", accounts.balance)


@needs_backward_scans
def test_scans_cross_tablets_in_both_directions(db: Database, accounts: Accounts) -> None:
    keys = [f"{letter}{number}" for letter in "afgoptz" for number in range(3)]
    assert db.set_many((key, {accounts.balance: i}) for i, key in enumerate(keys)) == len(keys)

    def scan(**arguments: Any) -> list[str]:
        return [row.key for row in db.snapshot().scan(accounts.table, **arguments)]

    assert (scan(), scan(reverse=True)) == (keys, keys[::-1])
    assert scan(start="f1", end="p0") == [key for key in keys if "f1" <= key < "p0"]
    assert scan(prefix="g") == ["g0", "g1", "g2"]
    assert (scan(prefix="g", reverse=True, limit=2), scan(limit=4)) == (["g2", "g1"], keys[:4])
    assert (scan(limit=0), scan(start="x", end="b"), scan(columns=[accounts.owner])) == ([], [], [])


def test_a_limit_counts_what_is_left_after_the_own_deletions(
    db: Database, accounts: Accounts
) -> None:
    db.set_many((f"{i:02}", {accounts.balance: i}) for i in range(20))
    with db.transaction() as tx:
        for i in range(10):
            tx.delete(f"{i:02}", accounts.balance)
        tx.set("1050", accounts.balance, 7)
        assert [row.key for row in tx.scan(accounts.table, limit=3)] == ["10", "1050", "11"]
        tx.rollback()


def test_rows_are_typed_by_column(db: Database, accounts: Accounts) -> None:
    with db.transaction() as tx:
        tx.set("bob", accounts.balance, -5)
        tx.set("bob", accounts.owner, "Røbert")
    with db.snapshot() as snapshot:
        bob, missing = snapshot.get_many(accounts.table, ["bob", "missing"])
        assert (bob.key, bob[accounts.balance], bob[accounts.owner]) == ("bob", -5, "Røbert")
        assert (list(missing), missing.get(accounts.balance, 0)) == ([], 0)
        with pytest.raises(KeyError):
            missing[accounts.balance]
        (only,) = snapshot.get_many(accounts.table, ["bob"], [accounts.owner])
        assert list(only) == [b"owner"]


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, 1_000_000])
def test_values_of_every_size_come_back(db: Database, accounts: Accounts, size: int) -> None:
    blob = accounts.table.column("blob", codecs.raw)
    value = bytes(i % 251 for i in range(size))
    put(db, blob, a=value)
    assert db.get("a", blob) == value


def test_rows_and_columns_are_any_bytes(db: Database) -> None:
    table = Table(f"bytes-{uuid.uuid4()}", key=codecs.raw)
    db.create_table(table)
    rows = [b"", b"\x00", b"\x00\x00", b"\x00\xff", b"a", b"a\x00", b"\xff", b"\xff\xff"]
    column = table.column(b"\xff:\x00", codecs.raw)
    with db.transaction() as tx:
        for row in rows:
            tx.set(row, column, row)
    assert [(row.key, row[column]) for row in db.snapshot().scan(table)] == [
        (row, row) for row in rows
    ]


def test_a_new_table_has_a_name_on_one_line_and_a_retention_that_ends(db: Database) -> None:
    with pytest.raises(InvalidArgument, match="unprintable characters, or a space at either end"):
        db.create_table(Table(f"two\nlines-{uuid.uuid4()}"))
    with pytest.raises(InvalidArgument, match=r"retention: is .* 100 years"):
        db.create_table(Table(f"kept-{uuid.uuid4()}"), retention=timedelta(days=365 * 101))


def test_tables_are_created_listed_and_dropped(db: Database) -> None:
    table = Table(f"passing-{uuid.uuid4()}")
    column = table.column("c", codecs.text)
    db.create_table(table)
    assert table.name in db.tables()
    db.create_table(table, exist_ok=True)
    with pytest.raises(InvalidArgument, match="exists; pass exist_ok=True to use it"):
        db.create_table(table)
    put(db, column, a="old")
    db.drop_table(table)
    assert table.name not in db.tables()
    db.drop_table(table, missing_ok=True)
    with pytest.raises(SchemaError):
        db.drop_table(table)
    db.create_table(table)
    assert db.get("a", column) is None


def test_an_unknown_table_is_said_so_at_once(db: Database) -> None:
    column = Table("nowhere").column("c", codecs.text)
    with pytest.raises(SchemaError, match="nowhere"), db.transaction() as tx:
        tx.set("a", column, "b")
    with pytest.raises(SchemaError, match="nowhere"), db.snapshot() as snapshot:
        snapshot.get("a", column)


def test_values_that_do_not_fit_their_column_are_refused(db: Database, accounts: Accounts) -> None:
    balance = accounts.balance
    wrong: list[tuple[type[Exception], str, Callable[[Transaction], object]]] = [
        (SchemaError, "expected int, got str", lambda tx: tx.set("a", balance, "10")),  # type: ignore[misc]
        (SchemaError, "64 bits", lambda tx: tx.set("a", balance, 2**63)),
        (SchemaError, "expected str, got int", lambda tx: tx.set(5, balance, 5)),
        (InvalidArgument, "row", lambda tx: tx.set("x" * 5000, balance, 5)),
        (UsageError, "expected a Column", lambda tx: tx.get("a", "balance")),  # type: ignore[call-overload]
    ]
    with db.transaction() as tx:
        for error, said, use in wrong:
            with pytest.raises(error, match=said):
                use(tx)
    assert tx.commit_timestamp is None, "nothing was written"


def test_progress_of_bulk_writes_is_told(db: Database, accounts: Accounts) -> None:
    told: list[int] = []
    rows = ((f"{i:05}", {accounts.balance: i, accounts.owner: "x"}) for i in range(300))
    assert db.set_many(rows, in_flight_max=50, progress=told.append) == 300
    assert told[-1] == 300
    assert sum(1 for _ in db.snapshot().scan(accounts.table)) == 300


# `get_many` with single cells, when a snapshot is taken, and what has ended for good.


@pytest.fixture
def orders(db: Database, accounts: Accounts) -> Iterator[Column[str]]:
    table: Table[int] = Table(f"orders-of-{accounts.table.name}", key=codecs.ordered_integer)
    db.create_table(table)
    yield table.column("state", codecs.text)
    db.drop_table(table)


def test_cells_of_several_tables_are_read_in_one_round_trip(
    db: Database, accounts: Accounts, orders: Column[str]
) -> None:
    balance, owner = accounts.balance, accounts.owner
    with db.transaction() as tx:
        tx.set("bob", balance, 10)
        tx.set("bob", owner, "Bob")
        tx.set("joe", balance, 20)
        tx.set(17, orders, "open")
    with db.snapshot() as snapshot:
        cells: list[tuple[object, Column[Any]]]
        cells = [(17, orders), ("joe", balance), ("bob", owner), ("zoe", balance), ("joe", balance)]
        snapshot.get_many(cells)  # past the locks that the commit may still have to remove
        before = snapshot.statistics.round_trips
        assert snapshot.get_many(cells) == ["open", 20, "Bob", None, 20]
        assert (snapshot.statistics.round_trips, snapshot.get_many([])) == (before + 1, [])
        assert snapshot.get_many([(17, orders), ("bob", balance)]) == ["open", 10]


def test_cells_are_read_through_the_writes_of_the_transaction(
    db: Database, accounts: Accounts
) -> None:
    balance = accounts.balance
    put(db, balance, bob=1, joe=2)
    with db.transaction() as tx:
        tx.set("bob", balance, 5)
        tx.delete("joe", balance)
        tx.lock("zoe", balance)
        cells = ((name, balance) for name in ("bob", "joe", "zoe"))
        assert tx.get_many(cells) == [5, None, None]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (["bob"], r"cells\[0\].*'bob' is not a row and a column"),
        ([("bob", "balance")], r"cells\[0\].* is not a row and a column"),
        ("bob", "expected pairs of a row and a column, or a Table, got str"),
        (7, "expected pairs of a row and a column, or a Table, got int"),
    ],
)
def test_what_is_no_list_of_cells_is_refused(
    db: Database, accounts: Accounts, cells: Any, said: str
) -> None:
    with db.snapshot() as snapshot, pytest.raises(InvalidArgument, match=said):
        snapshot.get_many(cells)


def test_rows_without_columns_are_empty(db: Database, accounts: Accounts) -> None:
    put(db, accounts.balance, bob=10)
    with db.snapshot() as snapshot:
        bob, zoe = snapshot.get_many(accounts.table, ["bob", "zoe"], [])
        assert (bob.key, list(bob), zoe.key, list(zoe)) == ("bob", [], "zoe", [])
        with pytest.raises(InvalidArgument, match="columns: is empty"):
            list(snapshot.scan(accounts.table, columns=[]))


def test_the_first_read_takes_the_snapshot_and_timestamp_counts_as_one(
    db: Database, accounts: Accounts
) -> None:
    balance = accounts.balance

    def change(value: int) -> None:
        put(db, balance, bob=value)

    for begin in (db.snapshot, db.transaction):
        change(1)
        with begin() as late, begin() as fixed:
            fixed.timestamp()
            change(2)
            assert (late.get("bob", balance), fixed.get("bob", balance)) == (2, 1)
            change(3)
            assert (late.get("bob", balance), fixed.get("bob", balance)) == (2, 1)


def test_the_last_of_several_writes_to_a_cell_counts(db: Database, accounts: Accounts) -> None:
    with db.transaction() as tx:
        for value in (1, 2, 3):
            tx.set("bob", accounts.balance, value)
        tx.set("joe", accounts.balance, 1)
        tx.delete("joe", accounts.balance)
    cells = [("bob", accounts.balance), ("joe", accounts.balance)]
    assert db.snapshot().get_many(cells) == [3, None]


def test_what_has_ended_has_no_timestamp_to_ask_for(db: Database, accounts: Accounts) -> None:
    async def after_the_end() -> None:
        async with db._asynchronous.transaction() as tx:
            await tx.get("bob", accounts.balance)
            await tx.set("bob", accounts.balance, 1)
        with pytest.raises(UsageError, match="has committed"):
            await tx.timestamp()
        async with db._asynchronous.snapshot() as snapshot:
            await snapshot.timestamp()
        with pytest.raises(UsageError, match="is closed"):
            await snapshot.timestamp()

    db._loop_thread.call(after_the_end)
    with db.transaction() as tx:
        tx.get("bob", accounts.balance)
    with pytest.raises(UsageError, match="has committed"):
        tx.timestamp()
    undone = db.transaction()
    undone.timestamp()
    undone.rollback()
    with pytest.raises(UsageError, match="was rolled back"):
        undone.timestamp()
    with db.snapshot() as snapshot:
        snapshot.timestamp()
    with pytest.raises(UsageError, match="is closed"):
        snapshot.timestamp()


# Families: reads of all columns whose names begin alike.


@pytest.fixture
def edges(db: Database, accounts: Accounts) -> Family[int]:
    """Three nodes in three tablets, with columns before, in and behind the family."""
    family = accounts.table.family("edge:", codecs.integer)
    with db.transaction() as tx:
        for node in ("ann", "hub", "zoe"):
            tx.set(node, accounts.owner, node.title())
            tx.set(node, accounts.balance, 7)
            tx.set(node, accounts.table.column("edge", codecs.text), "not of the family")
            tx.set(node, accounts.table.column("edge;", codecs.text), "not of the family")
        for number, name in enumerate(("ann", "bob", "zoe")):
            tx.set("hub", family.column(name), number)
        tx.set("zoe", family.column("hub"), 9)
        tx.set("joe", accounts.owner, "Joe, without edges")
    return family


def families_of(rows: Sequence[Row[str]], edges: Family[int]) -> dict[str, dict[str, int]]:
    return {row.key: row.family(edges) for row in rows}


HUB = {"ann": 0, "bob": 1, "zoe": 2}


def test_a_scan_of_a_family_finds_its_columns_and_no_others(
    db: Database, edges: Family[int]
) -> None:
    with db.snapshot() as snapshot:
        for _ in range(2):
            rows = list(snapshot.scan(edges.table, columns=[edges]))
            assert families_of(rows, edges) == {"hub": HUB, "zoe": {"hub": 9}}
            assert [list(row) for row in rows] == [
                [b"edge:ann", b"edge:bob", b"edge:zoe"],
                [b"edge:hub"],
            ]


@needs_backward_scans
def test_columns_and_families_are_read_together(
    db: Database, accounts: Accounts, edges: Family[int]
) -> None:
    with db.snapshot() as snapshot:
        found = snapshot.scan(edges.table, columns=[accounts.owner, edges], reverse=True, limit=3)
        zoe, joe, hub = list(found)
        assert [row.get(accounts.owner) for row in (zoe, joe, hub)] == [
            "Zoe",
            "Joe, without edges",
            "Hub",
        ]
        assert (joe.family(edges), hub.family(edges)) == ({}, HUB)
        shown = [(column.name.decode(), value) for column, value in hub.items()]
        assert shown == [("owner", "Hub"), ("edge:ann", 0), ("edge:bob", 1), ("edge:zoe", 2)]
        assert accounts.balance not in hub


def test_rows_of_one_scan_end_at_the_limit_and_the_next_scan_goes_on(
    db: Database, edges: Family[int]
) -> None:
    with db.snapshot() as snapshot:
        (first,) = snapshot.scan(edges.table, columns=[edges], limit=1)
        rest = list(snapshot.scan(edges.table, columns=[edges], start=first.key + "\0"))
        assert (first.key, [row.key for row in rest]) == ("hub", ["zoe"])


def test_get_many_reads_families(db: Database, accounts: Accounts, edges: Family[int]) -> None:
    with db.snapshot() as snapshot:
        for _ in range(2):
            hub, joe = snapshot.get_many(edges.table, ["hub", "joe"], [edges])
            assert (hub.family(edges), len(hub), bool(joe)) == (HUB, 3, False)
        both = snapshot.get_many(edges.table, ["joe"], [edges, accounts.owner])[0]
        assert list(both) == [b"owner"]


def test_a_transaction_sees_its_own_writes_in_a_family(
    db: Database, accounts: Accounts, edges: Family[int]
) -> None:
    with db.transaction() as tx:
        tx.set("hub", edges.column("bob"), 11)
        tx.delete("hub", edges.column("ann"))
        tx.set("hub", edges.column("a new one"), 12)
        tx.set("hub", accounts.balance, 13)
        tx.set("joe", edges.column("hub"), 14)
        tx.delete("zoe", edges.column("hub"))
        tx.lock("zoe", edges.column("lock"))
        tx.lock("ann", edges.column("lock"), shared=True)
        hub = {"a new one": 12, "bob": 11, "zoe": 2}
        for _ in range(2):
            rows = list(tx.scan(edges.table, columns=[edges]))
            assert families_of(rows, edges) == {"hub": hub, "joe": {"hub": 14}}
            assert all(name.startswith(edges.prefix) for row in rows for name in row)
        found = tx.get_many(edges.table, ["hub", "zoe", "joe"], [edges])
        assert families_of(found, edges) == {"hub": hub, "zoe": {}, "joe": {"hub": 14}}
    rows = list(db.snapshot().scan(edges.table, columns=[edges]))
    assert families_of(rows, edges) == {"hub": hub, "joe": {"hub": 14}}


@both_kinds
async def _edges_of(reads: aio.Transaction | aio.Snapshot, edges: Family[int]) -> dict[str, Any]:
    found = {row.key: row.family(edges) async for row in reads.scan(edges.table, columns=[edges])}
    (hub,) = await reads.get_many(edges.table, ["hub"], [edges])
    assert hub.family(edges) == found["hub"]
    return found


@pytest.mark.parametrize("kind", [Snapshot, Transaction])
def test_asyncio_reads_families(db: Database, edges: Family[int], kind: type) -> None:
    with db.snapshot() if kind is Snapshot else db.transaction() as reads:
        for _ in range(2):
            assert _edges_of(reads, edges) == {"hub": HUB, "zoe": {"hub": 9}}


def test_a_snapshot_of_the_past_shows_the_family_as_it_was(
    db: Database, edges: Family[int]
) -> None:
    before = db.timestamp()
    with db.transaction() as tx:
        tx.set("hub", edges.column("later"), 1)
        tx.delete("zoe", edges.column("hub"))
    with db.snapshot(at=before) as then, db.snapshot() as now:
        past = families_of(list(then.scan(edges.table, columns=[edges])), edges)
        assert past == {"hub": HUB, "zoe": {"hub": 9}}
        assert families_of(list(now.scan(edges.table, columns=[edges])), edges) == {
            "hub": HUB | {"later": 1}
        }


def test_what_is_no_family_of_the_table_is_refused(
    db: Database, accounts: Accounts, edges: Family[int]
) -> None:
    other = Table("another").family("edge:", codecs.integer)
    with db.snapshot() as snapshot:
        with pytest.raises(SchemaError, match=r"Family\('another', .* is not a column of table"):
            list(snapshot.scan(edges.table, columns=[other]))
        many = [accounts.table.family(f"f{number}:", codecs.raw) for number in range(101)]
        with pytest.raises(InvalidArgument, match="columns: expected at most 100 families"):
            list(snapshot.scan(edges.table, columns=many))
        assert list(snapshot.scan(edges.table, columns=many[:100])) == []


# A table remembers which codecs its columns and row keys have, and refuses others by name.


def described(db: Database, table: Table[Any]) -> master_pb2.Table:
    async def describe() -> master_pb2.Table:
        engine = db._asynchronous.internal.engine
        return await engine.catalog.describe(table.name, engine.now() + 10.0)

    return db._loop_thread.call(describe)


def alter(db: Database, table: Table[Any], **columns: str) -> master_pb2.Table:
    async def change() -> master_pb2.Table:
        engine = db._asynchronous.internal.engine
        changed = [
            master_pb2.ColumnCodec(column=name.encode(), codec=codec)
            for name, codec in columns.items()
        ]
        request = master_pb2.ChangeCodecsRequest(table=table.name, columns=changed)
        return await engine.catalog.change_codecs(request, engine.now() + 10.0)

    return db._loop_thread.call(change)


def kept(db: Database, table: Table[Any]) -> dict[bytes, str]:
    return {one.column: one.codec for one in described(db, table).codecs.columns}


def test_the_first_write_of_a_column_declares_its_codec(db: Database, accounts: Accounts) -> None:
    assert described(db, accounts.table).codecs.key == "text"
    assert db.get("bob", accounts.balance) is None
    assert kept(db, accounts.table) == {}
    for _ in range(2):
        put(db, accounts.balance, bob=7)
    assert kept(db, accounts.table) == {b"balance": "integer"}


WAYS: dict[str, Callable[[Database, Column[Any]], object]] = {
    "set": lambda db, column: db.run(lambda tx: tx.set("bob", column, "x")),
    "set of a mapping": lambda db, column: db.run(lambda tx: tx.set("bob", {column: "x"})),
    "get": lambda db, column: db.get("bob", column),
    "get_many": lambda db, column: db.run(lambda tx: tx.get_many([("bob", column)])),
    "rows": lambda db, column: db.run(lambda tx: tx.get_many(column.table, ["bob"], [column])),
    "a row": lambda db, column: db.run(lambda tx: tx.get_many(column.table, ["bob"])[0][column]),
    "scan": lambda db, column: db.run(lambda tx: list(tx.scan(column.table, columns=[column]))),
    "a scanned row": lambda db, column: db.run(
        lambda tx: [row.get(column) for row in tx.scan(column.table)]
    ),
    "a family": lambda db, column: db.run(
        lambda tx: [
            row.family(column.table.family("bal", column.codec)) for row in tx.scan(column.table)
        ]
    ),
    "delete": lambda db, column: db.run(lambda tx: tx.delete("bob", column)),
    "lock": lambda db, column: db.run(lambda tx: tx.lock("bob", column)),
}


@pytest.mark.parametrize("way", WAYS)
def test_another_codec_is_refused_with_both_names(
    db: Database, accounts: Accounts, way: str
) -> None:
    put(db, accounts.balance, bob=7)
    text = accounts.table.column("balance", codecs.text)
    for _ in range(2):  # refused once is refused again
        with pytest.raises(SchemaError) as refused:
            WAYS[way](db, text)
        assert str(refused.value).startswith(
            f"table {accounts.table.name!r}, column 'balance': the program declares the codec "
            "text, but the table has integer"
        )
    assert db.get("bob", accounts.balance) == 7


def test_row_keys_have_a_codec_too(db: Database, accounts: Accounts) -> None:
    put(db, accounts.balance, bob=7)
    numbers = Table(accounts.table.name, key=codecs.ordered_integer)
    balance = numbers.column("balance", codecs.integer)
    for use in (
        lambda: db.run(lambda tx: tx.set(5, balance, 7)),
        lambda: db.run(lambda tx: list(tx.scan(numbers))),
        lambda: db.create_table(numbers, exist_ok=True),
    ):
        with pytest.raises(SchemaError, match=r"row keys: .*ordered_integer, but the table has te"):
            use()
    db.create_table(accounts.table, exist_ok=True)


def test_bytes_are_read_from_every_column_and_stored_may_be_written(
    db: Database, accounts: Accounts
) -> None:
    put(db, accounts.balance, bob=7)
    seven = codecs.integer.encode(7)
    raw = Table(accounts.table.name, key=codecs.raw).column("balance", codecs.raw)
    assert db.get(b"bob", raw) == seven
    with pytest.raises(SchemaError, match="declares the codec raw"):
        db.run(lambda tx: tx.set(b"joe", raw, seven))
    stored = Table(accounts.table.name, key=codecs.stored).column("balance", codecs.stored)
    db.run(lambda tx: tx.set(b"joe", stored, seven))
    assert db.get("joe", accounts.balance) == 7
    assert kept(db, accounts.table) == {b"balance": "integer"}


def test_an_altered_column_has_the_new_codec_and_no_other(db: Database, accounts: Accounts) -> None:
    put(db, accounts.balance, bob=7)
    version = described(db, accounts.table).schema_version
    assert alter(db, accounts.table, balance="text").schema_version == version + 1
    with pytest.raises(SchemaError, match="declares the codec integer, but the table has text"):
        db.get("bob", accounts.balance)
    text = accounts.table.column("balance", codecs.text)
    db.run(lambda tx: tx.set("bob", text, "seven"))
    assert db.get("bob", text) == "seven"
    assert alter(db, accounts.table, balance="").codecs.columns == []
    db.run(lambda tx: tx.set("bob", accounts.balance, 7))
    assert kept(db, accounts.table) == {b"balance": "integer"}


def test_a_bad_change_names_its_field_and_changes_nothing(db: Database, accounts: Accounts) -> None:
    for codec in ("in\nteger", "x" * 256):
        with pytest.raises(InvalidArgument, match=r"columns\[0\]\.codec"):
            alter(db, accounts.table, balance=codec)
    with pytest.raises(SchemaError, match="no table 'missing'"):
        alter(db, Table("missing"), balance="text")
    assert kept(db, accounts.table) == {}


def test_of_two_programs_that_begin_with_different_codecs_one_is_refused(
    db: Database, accounts: Accounts
) -> None:
    """Neither has written before, so neither knows of the other."""
    text = accounts.table.column("balance", codecs.text)

    async def both() -> Sequence[BaseException | None]:
        database = db._asynchronous

        async def one(column: Column[Any], value: object) -> None:
            async with database.transaction() as tx:
                await tx.set(str(value), column, value)

        return await asyncio.gather(
            one(accounts.balance, 7), one(text, "seven"), return_exceptions=True
        )

    results = db._loop_thread.call(both)
    assert sorted(type(one).__name__ for one in results) == ["NoneType", "SchemaError"]
    assert len(kept(db, accounts.table)) == 1


def test_a_new_table_of_the_same_name_has_codecs_of_its_own(db: Database) -> None:
    table = Table(f"again-{uuid.uuid4()}")
    db.create_table(table)
    db.run(lambda tx: tx.set("a", table.column("x", codecs.integer), 1))
    db.drop_table(table)
    db.create_table(Table(table.name, key=codecs.uuid))
    other = Table(table.name, key=codecs.uuid)
    row = uuid.uuid4()
    db.run(lambda tx: tx.set(row, other.column("x", codecs.text), "one"))
    assert db.get(row, other.column("x", codecs.text)) == "one"


def test_a_table_keeps_the_codecs_of_so_many_columns_only(db: Database, accounts: Accounts) -> None:
    """Names of columns may be data. Beyond the limit they are used, and no longer checked."""
    assert COLUMNS_KEPT_MAX < COLUMNS_MAX
    alter(db, accounts.table, **{f"c{at}": "text" for at in range(COLUMNS_KEPT_MAX)})
    for _ in range(2):
        db.run(lambda tx: tx.set("bob", accounts.balance, 7))
    assert db.get("bob", accounts.balance) == 7
    assert b"balance" not in kept(db, accounts.table)
    more = accounts.table.column("c7", codecs.integer)
    with pytest.raises(SchemaError, match="but the table has text"):
        db.get("bob", more)


@needs_tablets
def test_the_values_of_a_change_are_read_with_the_codec_of_the_column(db: Database) -> None:
    table = Table(f"followed-{uuid.uuid4()}")
    balance, text = table.column("balance", codecs.integer), table.column("balance", codecs.text)
    db.create_table(table, change_feed=True)
    with db.transaction() as tx:
        tx.set("bob", balance, 7)
    with db.changes(table, after=Timestamp((tx.commit_timestamp or 1) - 1), before=True) as changes:
        change = next(changes)
        assert (change.value(balance), change.before(balance)) == (7, None)
        for read in (change.value, change.before):
            with pytest.raises(SchemaError, match="declares the codec text, but the table has int"):
                read(text)


def test_a_family_reads_columns_that_were_declared_singly_with_the_same_codec(
    db: Database, accounts: Accounts
) -> None:
    put(db, accounts.balance, bob=7)
    family = accounts.table.family("bal", codecs.integer)
    with db.snapshot() as snapshot:
        (row,) = snapshot.scan(accounts.table, columns=[family])
        assert row.family(family) == {"ance": 7}
        with pytest.raises(SchemaError, match="text, but the table has integer"):
            row.family(accounts.table.family("b", codecs.text))


# What a transaction or snapshot sees of a table that is dropped, and created again, under it.

READS: dict[str, Callable[[Snapshot | Transaction, Accounts], object]] = {
    "get": lambda reads, accounts: reads.get("bob", accounts.balance),
    "get_many": lambda reads, accounts: reads.get_many(accounts.table, ["bob"]),
    "scan": lambda reads, accounts: list(reads.scan(accounts.table)),
}
WRITES: dict[str, Callable[[Transaction, Accounts], None]] = {
    "set": lambda tx, accounts: tx.set("joe", accounts.balance, 2),
    "delete": lambda tx, accounts: tx.delete("joe", accounts.balance),
    "lock": lambda tx, accounts: tx.lock("joe", accounts.balance),
}
DROPPED = "dropped|younger|no table"


@pytest.fixture
def others(db: Database) -> Accounts:
    """Another table, which stays."""
    return Accounts(db)


@pytest.fixture
def bob(db: Database, accounts: Accounts) -> Accounts:
    """A table with one row."""
    put(db, accounts.balance, bob=1)
    return accounts


def _create_again(db: Database, accounts: Accounts) -> None:
    db.drop_table(accounts.table)
    db.create_table(accounts.table)


def _is_empty(db: Database, accounts: Accounts) -> bool:
    return not list(db.snapshot().scan(accounts.table))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", READS)
@needs_tablets
def test_what_was_read_from_a_table_is_never_committed_into_its_successor(
    db: Database, bob: Accounts, others: Accounts, read: str, write: str
) -> None:
    with pytest.raises(SchemaError), db.transaction() as tx:  # noqa: PT012 - as programs do it
        READS[read](tx, bob)
        _create_again(db, bob)
        WRITES[write](tx, bob)
        tx.set("seen", others.balance, 1)
    assert tx.commit_timestamp is None
    assert _is_empty(db, bob)
    assert _is_empty(db, others), "nothing of the transaction is visible"


@pytest.mark.parametrize("again", READS)
@pytest.mark.parametrize("first", READS)
@needs_tablets
def test_a_table_that_was_read_does_not_become_empty(
    db: Database, bob: Accounts, first: str, again: str
) -> None:
    with db.snapshot() as snapshot:
        READS[first](snapshot, bob)
        _create_again(db, bob)
        for _ in range(2):
            with pytest.raises(SchemaError, match=DROPPED):
                READS[again](snapshot, bob)


@pytest.mark.parametrize("read", READS)
@needs_tablets
def test_a_table_younger_than_the_snapshot_cannot_be_read(
    db: Database, bob: Accounts, others: Accounts, read: str
) -> None:
    """It was not read before, but another table was: so the snapshot is older."""
    with db.snapshot() as snapshot:
        assert snapshot.get("bob", others.balance) is None
        _create_again(db, bob)
        with pytest.raises(SchemaError, match=f"{bob.table.name}.* is younger than the snapshot"):
            READS[read](snapshot, bob)
        assert snapshot.get("bob", others.balance) is None, "the other table is as it was"


@pytest.mark.parametrize("write", WRITES)
@needs_tablets
def test_a_table_younger_than_the_transaction_cannot_be_written(
    db: Database, bob: Accounts, others: Accounts, write: str
) -> None:
    with db.transaction() as tx:
        tx.get("bob", others.balance)
        _create_again(db, bob)
        with pytest.raises(SchemaError, match="is younger than the snapshot"):
            WRITES[write](tx, bob)
        tx.set("seen", others.balance, 1)
    assert tx.commit_timestamp is not None, "it goes on without the table that it could not use"
    assert _is_empty(db, bob)


@pytest.mark.parametrize("write", WRITES)
@needs_tablets
def test_writes_stay_with_the_table_that_they_were_made_for(
    db: Database, bob: Accounts, write: str
) -> None:
    """Nothing was read, so the transaction has no timestamp yet."""
    tx = db.transaction()
    WRITES[write](tx, bob)
    _create_again(db, bob)
    WRITES[write](tx, bob)
    with pytest.raises(SchemaError, match=DROPPED):
        tx.commit()
    assert _is_empty(db, bob)


@pytest.mark.parametrize("read", READS)
@needs_tablets
def test_the_past_of_a_table_ends_at_its_creation(db: Database, bob: Accounts, read: str) -> None:
    with db.snapshot() as snapshot:
        before = snapshot.timestamp()
        assert snapshot.get("bob", bob.balance) == 1
    _create_again(db, bob)
    for at in (before, datetime.now(UTC) - timedelta(seconds=30)):
        with (
            db.snapshot(at=at) as snapshot,
            pytest.raises(SchemaError, match="is younger than the snapshot"),
        ):
            READS[read](snapshot, bob)


@needs_tablets
def test_the_next_transaction_uses_the_new_table(db: Database, bob: Accounts) -> None:
    with db.snapshot() as snapshot:
        snapshot.get("bob", bob.balance)
        _create_again(db, bob)
    with db.transaction() as tx:
        assert tx.get("bob", bob.balance) is None
        tx.set("bob", bob.balance, 2)
    assert db.get("bob", bob.balance) == 2


@needs_tablets
def test_a_table_created_in_the_middle_of_a_transaction_is_younger(db: Database) -> None:
    with db.snapshot() as snapshot:
        snapshot.timestamp()
        accounts = Accounts(db)
        with pytest.raises(SchemaError, match="begin a new transaction or snapshot"):
            snapshot.get("bob", accounts.balance)


# Transactions across two tables whose client dies, and whose primary's table is then dropped.


class Died(BaseException):
    """The client has gone no further."""


async def _dies(*_: Any) -> int:
    raise Died


async def _never_comes(*_: Any) -> None:
    pass


def _write_to_both(db: Database, first: Accounts, second: Accounts) -> None:
    with db.transaction() as tx:
        tx.set("a", first.balance, 1)
        tx.set("a", second.balance, 1)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The client that comes afterwards knows no verdict, as if it were another one."""
    monkeypatch.setattr(Verdicts, "put", lambda *_: None)
    return monkeypatch


def test_what_was_committed_is_completed(db: Database, forgetful: pytest.MonkeyPatch) -> None:
    first, second = Accounts(db), Accounts(db)  # the first has the primary, since its id is lower
    forgetful.setattr(commit, "commit_secondaries", _never_comes)
    _write_to_both(db, first, second)
    forgetful.undo()
    db.drop_table(first.table)
    for _ in range(2):
        assert db.get("a", second.balance) == 1
    put(db, second.balance, a=2)


def test_what_was_not_committed_is_rolled_back(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Accounts(db), Accounts(db)
    monkeypatch.setattr(commit, "roll_back_all", _never_comes)
    monkeypatch.setattr(Commit, "commit_primary", _dies)
    with pytest.raises(Died):
        _write_to_both(db, first, second)
    monkeypatch.undo()
    db.drop_table(first.table)
    assert db.get("a", second.balance) is None
    put(db, second.balance, a=2)
