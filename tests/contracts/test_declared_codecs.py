"""A table remembers which codecs its columns and row keys have, and refuses others by name."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from percolator import Database, InvalidArgument, SchemaError, Table, Timestamp, codecs
from percolator.arguments import COLUMNS_MAX
from percolator.codec_names import COLUMNS_KEPT_MAX
from percolator.schema import Column
from percolator.v1 import master_pb2
from tests.contracts.conftest import Accounts, needs_tablets


def described(db: Database, table: Table[Any]) -> master_pb2.Table:
    async def describe() -> master_pb2.Table:
        engine = db._database.internal.engine
        return await engine.catalog.describe(table.name, engine.now() + 10.0)

    return db._loop_thread.call(describe)


def alter(db: Database, table: Table[Any], **columns: str) -> master_pb2.Table:
    async def change() -> master_pb2.Table:
        engine = db._database.internal.engine
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
    with db.snapshot() as snapshot:
        assert snapshot.get("bob", accounts.balance) is None
    assert kept(db, accounts.table) == {}
    for _ in range(2):
        with db.transaction() as tx:
            tx.set("bob", accounts.balance, 7)
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
    with db.transaction() as tx:
        tx.set("bob", accounts.balance, 7)
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
    with db.transaction() as tx:
        tx.set("bob", accounts.balance, 7)
    numbers = Table(accounts.table.name, key=codecs.ordered_integer)
    balance = numbers.column("balance", codecs.integer)
    with pytest.raises(SchemaError, match=r"row keys: .*ordered_integer, but the table has text"):
        db.run(lambda tx: tx.set(5, balance, 7))
    with pytest.raises(SchemaError, match=r"row keys: .*ordered_integer, but the table has text"):
        db.run(lambda tx: list(tx.scan(numbers)))
    with pytest.raises(SchemaError, match=r"row keys: .*ordered_integer, but the table has text"):
        db.create_table(numbers, exist_ok=True)
    db.create_table(accounts.table, exist_ok=True)


def test_bytes_are_read_from_every_column_and_stored_may_be_written(
    db: Database, accounts: Accounts
) -> None:
    with db.transaction() as tx:
        tx.set("bob", accounts.balance, 7)
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
    with db.transaction() as tx:
        tx.set("bob", accounts.balance, 7)
    version = described(db, accounts.table).schema_version
    altered = alter(db, accounts.table, balance="text")
    assert altered.schema_version == version + 1
    with pytest.raises(SchemaError, match="declares the codec integer, but the table has text"):
        db.get("bob", accounts.balance)
    text = accounts.table.column("balance", codecs.text)
    db.run(lambda tx: tx.set("bob", text, "seven"))
    assert db.get("bob", text) == "seven"
    assert alter(db, accounts.table, balance="").codecs.columns == []
    db.run(lambda tx: tx.set("bob", accounts.balance, 7))
    assert kept(db, accounts.table) == {b"balance": "integer"}


def test_a_bad_change_names_its_field_and_changes_nothing(db: Database, accounts: Accounts) -> None:
    with pytest.raises(InvalidArgument, match=r"columns\[0\]\.codec"):
        alter(db, accounts.table, balance="in\nteger")
    with pytest.raises(InvalidArgument, match=r"columns\[0\]\.codec"):
        alter(db, accounts.table, balance="x" * 256)
    with pytest.raises(SchemaError, match="no table 'missing'"):
        alter(db, Table("missing"), balance="text")
    assert kept(db, accounts.table) == {}


def test_of_two_programs_that_begin_with_different_codecs_one_is_refused(
    db: Database, accounts: Accounts
) -> None:
    """Neither has written before, so neither knows of the other."""
    text = accounts.table.column("balance", codecs.text)

    async def both() -> Sequence[BaseException | None]:
        database = db._database

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
    with db.transaction() as tx:
        tx.set("bob", accounts.balance, 7)
    family = accounts.table.family("bal", codecs.integer)
    with db.snapshot() as snapshot:
        (row,) = snapshot.scan(accounts.table, columns=[family])
        assert row.family(family) == {"ance": 7}
        with pytest.raises(SchemaError, match="text, but the table has integer"):
            row.family(accounts.table.family("b", codecs.text))
