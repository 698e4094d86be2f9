"""What only the asyncio API can get wrong: attempts, starts, bulk writes, notifications."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from percolator import InvalidArgument, Limits, RetryPolicy, UsageError, codecs
from percolator.aio import Database, Transaction
from percolator.decorators import transactional
from percolator.errors import ConflictError, SchemaError
from percolator.v1 import master_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_NOTIFY
from percolator.wire import methods
from tests.unit.connected import accounts, balance, connected


async def test_several_reads_of_one_transaction_share_one_timestamp() -> None:
    async with connected() as (db, _):
        async with db.transaction() as tx:
            await asyncio.gather(*(tx.get(f"{i}", balance) for i in range(10)))
        assert tx.statistics.round_trips == 11


async def test_a_cancelled_reader_does_not_cancel_the_start_for_other_readers() -> None:
    async with connected() as (db, _):
        tx = db.transaction()
        one = asyncio.create_task(tx.get("a", balance))
        other = asyncio.create_task(tx.get("b", balance))
        await asyncio.sleep(0)
        one.cancel()
        assert await other is None
        assert one.cancelled()
        tx.rollback()


@pytest.mark.parametrize("kind", ["transaction", "snapshot"])
async def test_ending_while_the_start_is_fetched_holds_back_no_history(kind: str) -> None:
    async with connected() as (db, _):
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


async def test_what_is_open_holds_back_collection_until_it_ends_or_is_dropped() -> None:
    async with connected() as (db, _):
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


async def test_a_coroutine_function_is_run_again_after_a_conflict() -> None:
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

    async with connected() as (db, _):
        assert await increment(db, "a") == 200
        assert runs == 3
        async with db.transaction() as tx:
            assert await increment(tx, "a") == 201


async def test_a_function_that_always_conflicts_is_given_up_in_the_end() -> None:
    @transactional(retry=RetryPolicy(attempts_max=3))
    async def hopeless(tx: Transaction) -> None:
        await tx.get("a", balance)
        async with db.transaction() as other:
            await other.set("a", balance, 1)
        await tx.set("a", balance, 2)

    async with connected() as (db, _):
        with pytest.raises(ConflictError):
            await hopeless(db)


async def test_transactional_functions_require_a_database_or_a_transaction() -> None:
    @transactional
    async def function(tx: Transaction) -> None:
        """Never called."""

    with pytest.raises(UsageError, match="takes a Database or a Transaction as its first"):
        await function("a string")  # type: ignore[arg-type]  # the mistake
    partly: Any = transactional(partial(function))
    with pytest.raises(UsageError, match="takes a Database or a Transaction as its first"):
        partly("a string")


async def test_arguments_of_a_transactional_function_may_have_any_names() -> None:
    @transactional
    async def page(
        tx: Transaction, first: int, *, retry: int, function: str
    ) -> tuple[int, int, str]:
        return first, retry, function

    async with connected() as (db, _):
        assert await page(db, first=10, retry=2, function="f") == (10, 2, "f")
        async with db.transaction() as tx:
            assert await page(tx, first=10, retry=2, function="f") == (10, 2, "f")


async def test_what_has_a_method_run_is_not_taken_for_a_database() -> None:
    """As `self` is, if a method is decorated."""

    class Service:
        def run(self, *arguments: object, **keywords: object) -> None:
            pytest.fail("this is no transaction")

    @transactional
    async def function(tx: Transaction) -> None:
        """Never called."""

    with pytest.raises(UsageError, match="as its first argument, got Service"):
        await function(Service())  # type: ignore[arg-type]  # the mistake


async def test_a_value_that_is_too_long_is_refused_and_not_written() -> None:
    async with connected(Limits(value_bytes_max=100)) as (db, _):
        blob = accounts.column("blob", codecs.raw)
        async with db.transaction() as tx:
            await tx.set("a", blob, bytes(100))
            with pytest.raises(InvalidArgument, match="101 bytes, at most 100"):
                await tx.set("a", blob, bytes(101))
            tx.rollback()
        async with db.snapshot() as snapshot:
            assert await snapshot.get("a", blob) is None


async def test_a_slow_transaction_is_logged_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected(Limits(slow_transaction_seconds=1.0)) as (db, _):
        with caplog.at_level(logging.WARNING, "percolator.transactions"):
            async with db.transaction() as tx:
                await tx.get("a", balance)
                await asyncio.sleep(1.5)
                await tx.set("a", balance, 1)
            async with db.transaction() as tx:
                await tx.set("a", balance, 2)
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


async def test_a_dropped_and_recreated_table_is_found_again() -> None:
    async with connected() as (db, cluster):
        async with db.transaction() as tx:
            await tx.set("a", balance, 1)
        # Another client drops and creates it: this one only knows the old table.
        await cluster.delete_table(master_pb2.DeleteTableRequest(name="accounts"))
        await cluster.create_table(master_pb2.CreateTableRequest(name="accounts"))
        with pytest.raises(SchemaError, match="'accounts' was dropped"):
            async with db.snapshot() as snapshot:
                await snapshot.get("a", balance)
        async with db.snapshot() as snapshot:
            assert await snapshot.get("a", balance) is None


async def test_calls_that_may_be_repeated_use_the_next_table_of_the_name_by_themselves() -> None:
    async with connected() as (db, cluster):
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


async def test_bulk_writes_take_asynchronous_sources_too() -> None:
    async def rows() -> AsyncIterator[tuple[str, dict[object, object]]]:
        for i in range(100):
            await asyncio.sleep(0)
            yield f"{i:03}", {balance: i}

    async with connected() as (db, _):
        assert await db.set_many(rows(), in_flight_max=7) == 100
        async with db.snapshot() as snapshot:
            assert [row[balance] async for row in snapshot.scan(accounts)] == list(range(100))


async def test_a_bulk_write_stops_at_the_first_error() -> None:
    async with connected() as (db, _):
        with pytest.raises(Exception, match="expected int"):
            await db.set_many([("a", {balance: 1}), ("b", {balance: "x"}), ("c", {balance: 1})])


async def test_a_row_that_is_none_does_not_end_an_asynchronous_bulk_write_unnoticed() -> None:
    async def rows() -> AsyncIterator[Any]:
        for i in range(10):
            yield None if i % 2 else (f"{i}", {balance: i})

    async with connected() as (db, _):
        with pytest.raises(InvalidArgument, match="rows: expected pairs of a row key"):
            await db.set_many(rows(), in_flight_max=2)


async def test_if_many_writes_fail_at_once_the_first_error_is_raised() -> None:
    rows = [(f"{i:02}", {balance: type(f"Kind{i:02}", (), {})()}) for i in range(50)]
    async with connected() as (db, _):
        with pytest.raises(SchemaError, match="expected int, got Kind00"):
            await db.set_many(rows, in_flight_max=50)


async def test_weak_notifications_reach_the_observers_of_the_column() -> None:
    async with connected() as (db, cluster):
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


async def test_a_scan_ends_with_its_transaction_or_snapshot() -> None:
    async with connected() as (db, _):
        await db.set_many([(f"{i}", {balance: i}) for i in range(5)])
        async with db.snapshot() as snapshot:
            rows = snapshot.scan(accounts)
            assert (await anext(rows)).key == "0"
        with pytest.raises(UsageError, match="begin a new one"):
            await anext(rows)


async def test_a_function_that_is_not_a_coroutine_function_is_refused() -> None:
    async with connected() as (db, _):
        with pytest.raises(UsageError, match="returns int"):
            await db.run(lambda tx: 5)  # type: ignore[arg-type, return-value]  # the mistake
