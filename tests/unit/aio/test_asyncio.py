"""Attempts, starts, bulk writes and notifications, as only the asyncio API can get them wrong."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from percolator import (
    ConflictError,
    InvalidArgument,
    Limits,
    RetryPolicy,
    SchemaError,
    Table,
    TransactionTooLarge,
    UsageError,
    codecs,
)
from percolator import Database as BlockingDatabase
from percolator.aio import Database, Transaction
from percolator.decorators import transactional
from percolator.errors import CellAddress
from percolator.protocol import commit
from percolator.protocol.commit import Commit
from percolator.protocol.write_set import Write
from percolator.testing.pytest_plugin import percolator_db
from percolator.timestamps import Timestamp
from percolator.v1 import master_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_NOTIFY
from percolator.wire import methods
from tests.unit.connected import Cluster, accounts, balance, connected, put


async def test_several_reads_of_one_transaction_share_one_timestamp(db: Database) -> None:
    async with db.transaction() as tx:
        await asyncio.gather(*(tx.get(f"{i}", balance) for i in range(10)))
    assert tx.statistics.round_trips == 11


async def test_a_cancelled_reader_does_not_cancel_the_start_for_other_readers(db: Database) -> None:
    tx = db.transaction()
    one = asyncio.create_task(tx.get("a", balance))
    other = asyncio.create_task(tx.get("b", balance))
    await asyncio.sleep(0)
    one.cancel()
    assert await other is None
    assert one.cancelled()
    tx.rollback()


@pytest.mark.parametrize("kind", ["transaction", "snapshot"])
async def test_ending_while_the_start_is_fetched_holds_back_no_history(
    db: Database, kind: str
) -> None:
    reading = db.transaction() if kind == "transaction" else db.snapshot()
    getting = asyncio.create_task(reading.get("a", balance))
    await asyncio.sleep(0)
    if isinstance(reading, Transaction):
        reading.rollback()
    else:
        await reading.close()
    with pytest.raises(UsageError, match="begin a new one"):
        await getting
    assert db._engine.open_starts.oldest() == 0


async def test_what_is_open_holds_back_collection_until_it_ends_or_is_dropped(db: Database) -> None:
    starts = db._engine.open_starts
    tx = db.transaction()
    snapshot = db.snapshot()
    first = await tx.timestamp()
    second = await snapshot.timestamp()
    assert starts.oldest() == first
    tx.rollback()
    assert starts.oldest() == second
    del snapshot
    gc.collect()
    assert starts.oldest() == 0
    dropped = db.transaction()
    await dropped.timestamp()
    assert starts.oldest() != 0
    del dropped
    gc.collect()
    assert starts.oldest() == 0


async def test_a_coroutine_function_is_run_again_after_a_conflict(db: Database) -> None:
    runs = 0

    @transactional(retry=RetryPolicy(attempts_max=5))
    async def increment(tx: Transaction, row: str) -> int:
        nonlocal runs
        runs += 1
        value = await tx.get(row, balance, default=0)
        if runs < 3:
            async with db.transaction() as other:
                await other.set(row, balance, 100 * runs)
        await tx.set(row, balance, value + 1)
        return value

    assert await increment(db, "a") == 200
    assert runs == 3
    async with db.transaction() as tx:
        assert await increment(tx, "a") == 201


class Service:
    """The object whose method is decorated."""

    def run(self, *arguments: object, **keywords: object) -> None:
        pytest.fail("this is no transaction")


@pytest.mark.parametrize("first", ["a string", Service()], ids=["str", "Service"])
async def test_transactional_functions_require_a_database_or_a_transaction(first: Any) -> None:
    @transactional
    async def function(tx: Transaction) -> None:
        """Never called."""

    kind = f"takes a Database or a Transaction as its first argument, got {type(first).__name__}"
    with pytest.raises(UsageError, match=kind):
        await function(first)
    partly: Any = transactional(partial(function))
    with pytest.raises(UsageError, match=kind):
        partly(first)


async def test_arguments_of_a_transactional_function_may_have_any_names(db: Database) -> None:
    @transactional
    async def page(
        tx: Transaction, first: int, *, retry: int, function: str
    ) -> tuple[int, int, str]:
        return first, retry, function

    assert await page(db, first=10, retry=2, function="f") == (10, 2, "f")
    async with db.transaction() as tx:
        assert await page(tx, first=10, retry=2, function="f") == (10, 2, "f")


@pytest.mark.parametrize("limits", [Limits(value_bytes_max=100)])
async def test_a_value_that_is_too_long_is_refused_and_not_written(db: Database) -> None:
    blob = accounts.column("blob", codecs.raw)
    async with db.transaction() as tx:
        await tx.set("a", blob, bytes(100))
        with pytest.raises(InvalidArgument, match="101 bytes, at most 100"):
            await tx.set("a", blob, bytes(101))
        tx.rollback()
    assert await db.get("a", blob) is None


@pytest.mark.parametrize("limits", [Limits(slow_transaction_seconds=1.0)])
async def test_a_slow_transaction_is_logged_in_one_line(
    caplog: pytest.LogCaptureFixture, db: Database
) -> None:
    with caplog.at_level(logging.WARNING, "percolator.transactions"):
        async with db.transaction() as tx:
            await tx.get("a", balance)
            await asyncio.sleep(1.5)
            await tx.set("a", balance, 1)
        await put(db, balance, a=2)
    (line,) = caplog.messages
    assert "slow transaction: committed after 1.5" in line


async def test_slow_transactions_are_one_line_a_minute_that_counts_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def end_slowly(db: Database, transactions: int) -> None:
        many = [db.transaction() for _ in range(transactions)]
        await asyncio.sleep(2.0)
        for tx in many:
            tx.rollback()

    with caplog.at_level(logging.WARNING, "percolator.transactions"):
        async with connected(Limits(slow_transaction_seconds=1.0)) as (db, _):
            await end_slowly(db, 50)
            await asyncio.sleep(30.0)
            await end_slowly(db, 5)
            (line,) = caplog.messages
            assert "more before it" not in line
            await asyncio.sleep(30.0)
            await end_slowly(db, 50)
            assert len(caplog.messages) == 2
            assert caplog.messages[1].endswith("; 54 more before it")
    assert caplog.messages[2:] == ["49 more slow transactions were not logged"]


async def test_a_dropped_and_recreated_table_is_found_again(db: Database, cluster: Cluster) -> None:
    await put(db, balance, a=1)
    # Another client drops and creates it: this one only knows the old table.
    await cluster.delete_table(master_pb2.DeleteTableRequest(name="accounts"))
    await cluster.create_table(master_pb2.CreateTableRequest(name="accounts"))
    with pytest.raises(SchemaError, match="'accounts' was dropped"):
        await db.snapshot().get("a", balance)
    assert await db.get("a", balance) is None


async def test_calls_that_may_be_repeated_use_the_next_table_of_the_name_by_themselves(
    db: Database, cluster: Cluster
) -> None:
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: db.get("a", balance),
        lambda: db.run(lambda tx: tx.get("a", balance)),
        lambda: db.run(lambda tx: tx.set("a", balance, 2)),
        lambda: db.set_many([("a", {balance: 3})]),
    ]
    for call in calls:
        await db.set_many([("a", {balance: 1})])
        await cluster.delete_table(master_pb2.DeleteTableRequest(name="accounts"))
        await cluster.create_table(master_pb2.CreateTableRequest(name="accounts"))
        assert await call() in (None, 1)
    assert await db.get("a", balance) == 3
    await cluster.delete_table(master_pb2.DeleteTableRequest(name="accounts"))
    for call in calls:
        with pytest.raises(SchemaError, match="no table 'accounts'"):
            await call()


async def test_bulk_writes_take_asynchronous_sources_too(db: Database) -> None:
    async def rows() -> AsyncIterator[tuple[str, dict[object, object]]]:
        for i in range(100):
            await asyncio.sleep(0)
            yield f"{i:03}", {balance: i}

    assert await db.set_many(rows(), in_flight_max=7) == 100
    assert [row[balance] async for row in db.snapshot().scan(accounts)] == list(range(100))


async def test_a_bulk_write_stops_at_the_first_error(db: Database) -> None:
    with pytest.raises(Exception, match="expected int"):
        await db.set_many([("a", {balance: 1}), ("b", {balance: "x"}), ("c", {balance: 1})])


async def test_a_row_that_is_none_does_not_end_an_asynchronous_bulk_write_unnoticed(
    db: Database,
) -> None:
    async def rows() -> AsyncIterator[Any]:
        for i in range(10):
            yield None if i % 2 else (f"{i}", {balance: i})

    with pytest.raises(InvalidArgument, match="rows: expected pairs of a row key"):
        await db.set_many(rows(), in_flight_max=2)


async def test_if_many_writes_fail_at_once_the_first_error_is_raised(db: Database) -> None:
    rows = [(f"{i:02}", {balance: type(f"Kind{i:02}", (), {})()}) for i in range(50)]
    with pytest.raises(SchemaError, match="expected int, got Kind00"):
        await db.set_many(rows, in_flight_max=50)


async def test_weak_notifications_reach_the_observers_of_the_column(
    db: Database, cluster: Cluster
) -> None:
    observer = master_pb2.Observer(name="w", columns=[b"balance"], weak=True)
    await cluster.change_observers(
        master_pb2.ChangeObserversRequest(table="accounts", add=[observer])
    )
    info = db._engine.catalog.known("accounts")
    assert info is not None
    await db._engine.catalog.refresh(info.table_id, db._engine.now() + 1)
    async with db.transaction() as tx:
        await tx.notify("a", balance)
        await tx.set("z", balance, 1)
    async with db.transaction() as only:
        await only.notify("b", balance)
    assert only.commit_timestamp is not None
    notified = [
        (cell.row, cell.timestamp)
        for tablet in cluster.tablets.values()
        async for page in tablet.scan_cells(
            methods.SCAN_CELLS.request(
                target=pb.TabletTarget(
                    tablet_id=tablet.identity.tablet_id, epoch=1, schema_version=2
                ),
                space=SPACE_NOTIFY,
            )
        )
        for cell in page.cells
    ]
    assert sorted(notified) == [
        (b"a", tx.commit_timestamp),
        (b"b", only.commit_timestamp),
    ]


async def test_a_scan_ends_with_its_transaction_or_snapshot(db: Database) -> None:
    await db.set_many([(f"{i}", {balance: i}) for i in range(5)])
    async with db.snapshot() as snapshot:
        rows = snapshot.scan(accounts)
        assert (await anext(rows)).key == "0"
    with pytest.raises(UsageError, match="begin a new one"):
        await anext(rows)


async def test_a_function_that_is_not_a_coroutine_function_is_refused(db: Database) -> None:
    with pytest.raises(UsageError, match="returns int"):
        await db.run(lambda tx: 5)  # type: ignore[arg-type, return-value]  # the mistake


# Rows that are longer than the tablet servers allow: they are refused, and block nothing.


@pytest.mark.parametrize(
    "limits",
    [Limits(row_bytes_max=8_192, one_round_cells_max=cells) for cells in (0, 256)],
    ids=["two phases", "one round"],
)
@pytest.mark.parametrize(
    ("long", "other"),
    [("a" * 5_000, "z"), ("z" * 5_000, "a")],
    ids=["as the primary", "as another cell"],
)
async def test_a_transaction_with_a_refused_row_leaves_no_lock_that_nobody_can_settle(
    long: str, other: str, db: Database
) -> None:
    """The two are in different tablets: one refuses its cell, and the other one locks its own."""
    tx = db.transaction()
    await tx.set(long, balance, 1)
    await tx.set(other, balance, 1)
    with pytest.raises(InvalidArgument, match="5000 bytes, at most 4096 allowed"):
        await tx.commit()
    async with db.transaction() as later:
        assert [await later.get(row, balance) for row in (long, other)] == [None, None]
        await later.set(other, balance, 2)
    assert await db.get(other, balance) == 2


@pytest.mark.parametrize("limits", [Limits(row_bytes_max=65536)])
async def test_a_row_that_no_server_could_store_is_refused_when_it_is_written(db: Database) -> None:
    async with db.transaction() as tx:
        with pytest.raises(InvalidArgument, match="row: has 65537 bytes, at most 65536"):
            await tx.set("a" * 65_537, balance, 1)


# What a transaction reads where it has written or deleted much itself, and what that costs.

on_both_engines = pytest.mark.usefixtures("engine_of_cells")


@on_both_engines
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("limit", [1, 10])
@pytest.mark.parametrize("limits", [Limits()])
async def test_a_limited_scan_over_many_own_deletions_takes_few_calls(
    limit: int, reverse: bool, db: Database
) -> None:
    keys = [f"a{number:03}" for number in range(400)]
    await db.set_many((key, {balance: 1}) for key in keys)
    async with db.transaction() as tx:
        await tx.timestamp()
        left = sorted(keys, reverse=reverse)
        for key in left[:300]:
            await tx.delete(key, balance)
        before = tx.statistics.round_trips
        scan = tx.scan(accounts, limit=limit, reverse=reverse)
        assert [row.key async for row in scan] == left[300 : 300 + limit]
        assert tx.statistics.round_trips - before <= 12
        tx.rollback()


class Counted(dict[CellAddress, Write]):
    """Writes that count how often all of them are looked at."""

    looks = 0

    def __iter__(self) -> Iterator[CellAddress]:
        self.looks += 1
        return super().__iter__()

    def items(self) -> Any:
        self.looks += 1
        return super().items()


@on_both_engines
@pytest.mark.parametrize("limits", [Limits()])
async def test_all_reads_of_rows_together_look_once_at_what_the_transaction_has_written(
    db: Database,
) -> None:
    async with db.transaction() as tx:
        keys = [f"a{number:03}" for number in range(100)]
        for number, key in enumerate(keys):
            await tx.set(key, balance, number)
        cells = tx.internal.writes.cells = Counted(tx.internal.writes.cells)
        for number, key in enumerate(keys):
            assert [row[balance] for row in await tx.get_many(accounts, [key])] == [number]
        assert [row[balance] for row in await tx.get_many(accounts, keys)] == list(range(100))
        assert [row.key async for row in tx.scan(accounts, start="a010", end="a020")] == keys[10:20]
        assert cells.looks == 1
        tx.rollback()


# Cells in bulk: what a snapshot returns as parallel lists, for programs that move many of them.


async def test_cells_of_single_rows_are_those_that_a_scan_finds_there(db: Database) -> None:
    await db.set_many((f"{number}", {balance: number}) for number in range(10))
    async with db.transaction() as tx:
        await tx.delete("7", balance)
    async with db.snapshot() as snapshot:
        await snapshot.get("0", balance)
        await db.set_many([("3", {balance: 33})])
        page = await snapshot.get_cells(accounts, [b"3", b"7", b"9", b"nothing"])
        scanned = [page async for page in snapshot.scan_cells(accounts, columns=[b"balance"])]
        assert page.rows == [b"3", b"9"]
        assert page.columns == [b"balance"] * 2
        for row, value, commit in zip(page.rows, page.values, page.commit_timestamps, strict=True):
            place = scanned[0].rows.index(row)
            assert value == scanned[0].values[place]
            assert commit == scanned[0].commit_timestamps[place]
        none = await snapshot.get_cells(accounts, [b"3"], columns=[b"another"])
        assert none.rows == []


# Several cells of a row, sums, single values and pages, each in one call.

__all__ = ["percolator_db"]

owner = accounts.column("owner", codecs.text)
other = Table("others").column("number", codecs.integer)


async def test_a_mapping_sets_several_columns_of_a_row(db: Database) -> None:
    async with db.transaction() as tx:
        await tx.set("bob", {balance: 1, owner: "Bob"})
        await tx.set("joe", {})
    async with db.snapshot() as snapshot:
        bob, joe = await snapshot.get_many(accounts, ["bob", "joe"], [owner, balance])
        assert bob.items() == [(owner, "Bob"), (balance, 1)]
        assert joe.items() == []


@pytest.mark.parametrize("limits", [Limits(transaction_cells_max=3)])
async def test_a_row_is_deleted_whole_or_not_at_all(db: Database) -> None:
    """A program that commits as much as did fit must not make half a row visible."""
    async with db.transaction() as tx:
        await tx.set("bob", {balance: 1, owner: "Bob"})
    async with db.transaction() as tx:
        for row in ("joe", "zoe"):
            await tx.set(row, balance, 2)
        with pytest.raises(TransactionTooLarge):
            await tx.delete_row(accounts, "bob")
    (bob,) = await db.snapshot().get_many(accounts, ["bob"], [balance, owner])
    assert bob.items() == [(balance, 1), (owner, "Bob")]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({balance: 1, owner: 2}, "column 'owner': expected str, got int"),
        ({balance: 1, "owner": "Bob"}, "expected a Column, got str"),
        ({balance: 1, other: 2}, "expected columns of one table"),
        (balance, r"value: is missing: expected set\(row, column, value\)"),
        ([(balance, 1)], "value: is missing"),
    ],
)
async def test_of_a_mapping_all_is_set_or_nothing(db: Database, values: Any, says: str) -> None:
    await db.create_table(other.table)
    tx = db.transaction()
    with pytest.raises((SchemaError, UsageError, InvalidArgument), match=says):
        await tx.set("bob", values)
    assert await tx.get("bob", balance) is None


async def test_a_deleted_row_has_no_cell_left_not_even_those_that_were_just_set(
    db: Database,
) -> None:
    async with db.transaction() as tx:
        await tx.set("bob", {balance: 1, owner: "Bob"})
        await tx.set("bobby", balance, 2)
    async with db.transaction() as tx:
        await tx.set("bob", accounts.column("new", codecs.raw), b"")
        await tx.delete_row(accounts, "bob")
        await tx.delete_row(accounts, "nothing")
        assert not (await tx.get_many(accounts, ["bob"]))[0]
    assert [row.key async for row in db.snapshot().scan(accounts)] == ["bobby"]


async def test_a_row_that_is_too_large_to_be_read_at_once_is_deleted(db: Database) -> None:
    picture = accounts.family("picture:", codecs.raw)
    async with db.transaction() as tx:
        await tx.set("joe", balance, 1)
        for number in range(5):
            await tx.set("bob", picture.column(f"{number}"), bytes(4 << 20))
    async with db.transaction() as tx:
        await tx.set("bob", balance, 1)
        await tx.delete_row(accounts, "bob")
    assert [row.key async for row in db.snapshot().scan(accounts)] == ["joe"]


async def test_a_row_that_was_deleted_conflicts_with_a_writer_of_its_cells(db: Database) -> None:
    await db.set_many([("bob", {balance: 1})])
    tx = db.transaction()
    await tx.delete_row(accounts, "bob")
    await db.set_many([("bob", {balance: 2})])
    with pytest.raises(ConflictError):
        await tx.commit()


async def test_an_increment_returns_the_sum_and_begins_at_zero(db: Database) -> None:
    async with db.transaction() as tx:
        assert await tx.increment("bob", balance) == 1
        assert await tx.increment("bob", balance, 10) == 11
        assert await tx.increment("bob", balance, -20) == -9
    assert await db.get("bob", balance) == -9


async def test_two_increments_of_one_cell_conflict(db: Database) -> None:
    first, second = db.transaction(), db.transaction()
    await first.increment("bob", balance)
    await second.increment("bob", balance)
    await first.commit()
    with pytest.raises(ConflictError):
        await second.commit()
    assert await db.get("bob", balance) == 1


async def test_only_integers_are_incremented(db: Database) -> None:
    async with db.transaction() as tx:
        await tx.set("bob", owner, "Bob")
        column: Any = owner
        with pytest.raises(SchemaError, match="only integers can be incremented, found str"):
            await tx.increment("bob", column)
        with pytest.raises(InvalidArgument, match="by: expected an int, got float"):
            await tx.increment("bob", balance, 0.5)  # type: ignore[arg-type]  # the mistake
        await tx.set("bob", balance, 2**63 - 1)
        with pytest.raises(SchemaError, match="does not fit into 64 bits"):
            await tx.increment("bob", balance)
        assert await tx.get("bob", balance) == 2**63 - 1


async def test_a_database_reads_one_value_as_it_is_now(db: Database) -> None:
    assert await db.get("bob", balance) is None
    assert await db.get("bob", balance, 7) == 7
    for number in (1, 2):
        await db.set_many([("bob", {balance: number})])
        assert await db.get("bob", balance) == number


async def test_a_row_read_without_columns_does_not_guess_their_types(db: Database) -> None:
    await db.set_many([("bob", {balance: 1})])
    async with db.snapshot() as snapshot:
        (row,) = await snapshot.get_many(accounts, ["bob"])
        with pytest.raises(UsageError, match=r"pass columns to get_many or scan, or use raw"):
            row.items()
        async for row in snapshot.scan(accounts, columns=(c for c in [balance, owner])):  # type: ignore[arg-type]  # consumed once
            assert row.items() == [(balance, 1)]


KEYS = ["a1", "b1", "b2", "b3", "b4", "c1"]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"start": "b3"}, ["b3", "b4"]),
        ({"end": "b3"}, ["b1", "b2"]),
        ({"start": "b2", "end": "b4"}, ["b2", "b3"]),
        ({"start": "a1", "end": "z"}, ["b1", "b2", "b3", "b4"]),
        ({"start": "c"}, []),
        ({"end": "a5"}, []),
        ({"start": "b2", "limit": 2}, ["b2", "b3"]),
        ({"end": "b4", "limit": 2, "reverse": True}, ["b3", "b2"]),
    ],
)
async def test_a_scan_shows_what_is_in_the_prefix_and_in_the_bounds(
    db: Database, bounds: Any, expected: list[str]
) -> None:
    await db.set_many((key, {balance: 1}) for key in KEYS)
    found = [row.key async for row in db.snapshot().scan(accounts, prefix="b", **bounds)]
    assert found == expected


async def test_tables_are_created_together_or_refused_before_the_first(db: Database) -> None:
    new = [Table("one"), Table("two")]
    for wrong, says in [
        ([*new, "three"], r"tables\[2\]: expected a Table, got str"),
        ([*new, Table("one")], r"tables\[2\]: 'one' is named twice"),
        ([*new, Table("percolator.x")], "'percolator.x' is internal"),
        ("one", "tables: expected a list of tables, got str"),
    ]:
        with pytest.raises(InvalidArgument, match=says):
            await db.create_tables(wrong)  # type: ignore[arg-type]  # the mistake
    assert await db.tables() == ["accounts"]
    await db.create_tables(new)
    await db.create_tables(iter([*new, Table("three")]), exist_ok=True)
    assert await db.tables() == ["accounts", "one", "three", "two"]


def test_the_blocking_twins_do_the_same(percolator_db: BlockingDatabase) -> None:
    db = percolator_db
    db.create_tables(table for table in [accounts, other.table])
    with db.transaction() as tx:
        tx.set("bob", {balance: 1, owner: "Bob"})
        assert tx.increment("bob", balance, 2) == 3
        tx.set("joe", balance, 1)
        tx.delete_row(accounts, "joe")
    assert db.get("bob", balance) == 3
    assert db.get("joe", balance, default=0) == 0
    (row,) = db.snapshot().scan(accounts, prefix="b", start="bob", columns=[owner, balance])
    assert row.items() == [(owner, "Bob"), (balance, 3)]


# Reads of families, past locks.

edges = accounts.family("edge:", codecs.integer)


class Died(BaseException):
    """The client has gone no further."""


@pytest.mark.parametrize("limits", [Limits(page_rows_max=rows) for rows in (1, 3, 1000)])
@pytest.mark.parametrize("reverse", [False, True])
async def test_only_the_family_is_found_and_limits_count_only_its_rows(
    reverse: bool, db: Database
) -> None:
    async with db.transaction() as tx:
        for row in "abcdefghijklmnopqrst":
            await tx.set(row, balance, 1)
            if row in "dmps":
                await tx.set(row, edges.column("x"), 2)
        await tx.delete("m", balance)
    wanted = ["s", "p", "m", "d"] if reverse else ["d", "m", "p", "s"]
    async with db.snapshot() as snapshot:
        for limit in (None, 4, 3, 1):
            found = snapshot.scan(accounts, columns=[edges], reverse=reverse, limit=limit)
            rows = [row async for row in found]
            assert [row.key for row in rows] == wanted[:limit]
            assert all(list(row) == [b"edge:x"] for row in rows)
        got = await snapshot.get_many(accounts, ["a", "d", "m"], [edges])
        assert [row.raw() for row in got] == [
            {},
            *2 * [{b"edge:x": codecs.integer.encode(2)}],
        ]


def _dies_before_its_commit(patch: pytest.MonkeyPatch) -> None:
    """From now on, a client locks its cells, and does nothing more."""

    async def dies(*_: Any) -> int:
        raise Died

    async def removes_nothing(*_: Any) -> None:
        pass

    patch.setattr(commit, "roll_back_all", removes_nothing)
    patch.setattr(Commit, "commit_primary", dies)


async def test_a_family_is_read_past_the_lock_of_a_client_that_died(
    monkeypatch: pytest.MonkeyPatch, db: Database
) -> None:
    async with db.transaction() as tx:
        await tx.set("a", edges.column("x"), 1)
        await tx.set("a", balance, 1)
        await tx.set("b", edges.column("x"), 1)
    with monkeypatch.context() as patch:
        _dies_before_its_commit(patch)
        lost = db.transaction()
        await lost.set("a", edges.column("x"), 2)
        await lost.set("a", edges.column("y"), 2)
        await lost.set("z", edges.column("y"), 2)
        with pytest.raises(Died):
            await lost.commit()
    async with db.snapshot() as snapshot:
        for _ in range(2):
            found = [row async for row in snapshot.scan(accounts, columns=[edges])]
            assert [(row.key, row.family(edges)) for row in found] == [
                ("a", {"x": 1}),
                ("b", {"x": 1}),
            ]
            assert list(found[0]) == [b"edge:x"]


@pytest.mark.parametrize("read", ["scan", "get_many"])
async def test_a_lock_outside_of_the_family_is_not_in_the_way(
    read: str, monkeypatch: pytest.MonkeyPatch, db: Database
) -> None:
    _dies_before_its_commit(monkeypatch)
    lost = db.transaction()
    await lost.set("a", balance, 2)
    with pytest.raises(Died):
        await lost.commit()
    async with db.snapshot() as snapshot:
        if read == "scan":
            assert [row async for row in snapshot.scan(accounts, columns=[edges])] == []
        else:
            (row,) = await snapshot.get_many(accounts, ["a"], [edges])
            assert not row
        assert snapshot.statistics.lock_waits == []


@pytest.mark.usefixtures("engine_of_cells")
async def test_any_number_of_single_cells_of_a_row_is_read_at_once(db: Database) -> None:
    cells = [("hub", edges.column(f"{number}")) for number in range(10_001)]
    async with db.transaction() as tx:
        for row, column in (cells[0], cells[-1]):
            await tx.set(row, column, 1)
    found = await db.snapshot().get_many(cells)
    assert (found[0], found[-1], found.count(None)) == (1, 1, 9_999)


# A datetime shows what was committed before its millisecond, and nothing of it.


async def at_the_first_timestamp_of_a_millisecond(db: Database) -> Timestamp:
    async with db.transaction() as tx:
        await tx.get("a", balance)
        await tx.set("a", balance, 1)
        await asyncio.sleep(1)
    assert tx.commit_timestamp is not None
    assert tx.commit_timestamp.sequence == 0
    return tx.commit_timestamp


async def test_a_datetime_does_not_show_a_commit_at_the_first_timestamp_of_its_millisecond(
    db: Database,
) -> None:
    await db.set_change_feed(accounts, on=True)
    begin = await db.timestamp()
    commit = await at_the_first_timestamp_of_a_millisecond(db)
    moment = commit.to_datetime()
    async with db.snapshot(at=moment) as snapshot:
        assert await snapshot.get("a", balance) is None
    async with db.snapshot(at=commit) as snapshot:
        assert await snapshot.get("a", balance) == 1
    now = await db.timestamp()
    until = [one async for one in db.changes(accounts, after=begin, until=moment)]
    after = [one async for one in db.changes(accounts, after=moment, until=now)]
    assert (len(until), len(after)) == (0, 1)


NAMED: dict[str, Callable[[Database, Any], object]] = {
    "at": lambda db, moment: db.snapshot(at=moment),
    "after": lambda db, moment: db.changes(accounts, after=moment),
    "until": lambda db, moment: db.changes(accounts, until=moment),
}


@pytest.mark.parametrize("field", NAMED)
@pytest.mark.parametrize(
    "moment",
    [
        datetime(2027, 1, 15, tzinfo=UTC).replace(tzinfo=None),
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(9999, 1, 1, tzinfo=UTC),
        Timestamp(0),
        5,
    ],
    ids=str,
)
async def test_a_bad_time_is_refused_by_the_name_of_its_argument(
    db: Database, field: str, moment: object
) -> None:
    with pytest.raises(InvalidArgument, match=f"^{field}: ") as refused:
        NAMED[field](db, moment)
    assert refused.value.field == field
