"""Writes take effect at the call, awaited or not. Other calls that are not awaited are errors."""

from __future__ import annotations

import asyncio
import gc
import inspect
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from percolator import DeadlineExceeded, Table, UsageError, both_kinds, codecs, transactional
from percolator.aio import Database, Snapshot, Transaction
from percolator.aio.shared import SharedTransaction
from percolator.errors import ConflictError, InvalidArgument, SchemaError
from percolator.recipes import CombineQueue, ShardedCounter
from percolator.v1 import master_pb2
from tests.unit.aio.shared_attempts import values_of
from tests.unit.connected import Cluster, accounts, balance

visits = accounts.column("visits", codecs.integer)
elsewhere = Table("elsewhere")
number = elsewhere.column("number", codecs.integer)

on_both_engines = pytest.mark.usefixtures("engine_of_cells")


@transactional
async def adds(tx: Transaction, row: str) -> None:
    tx.set(row, balance, await tx.get(row, balance, default=0) + 1)


@both_kinds
async def doubled(tx: Transaction, row: str) -> int:
    return 2 * await tx.get(row, balance, default=0)


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    """Python warns when a coroutine that was never awaited is collected."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(one.message) for one in caught] == []


# ---------------------------------------------------------------- writes


@on_both_engines
async def test_writes_that_are_not_awaited_are_committed(db: Database) -> None:
    await db.create_table(elsewhere)
    async with db.transaction() as tx:  # the client knows neither table nor columns yet
        tx.set("ann", balance, 1)
        tx.set("bob", {balance: 2, visits: 3})
        tx.delete("ann", balance)
        tx.set("zoe", balance, 4)
        tx.delete("none", number)
        tx.lock("none", balance)
        tx.lock("none", number, shared=True)
        assert await tx.get("ann", balance) is None
        assert await tx.get("bob", visits) == 3
    async with db.transaction() as tx:
        tx.set("bob", balance, 5)
    assert tx.commit_timestamp is not None
    assert await values_of(db) == {"bob": 5, "zoe": 4}


async def test_the_last_of_several_writes_to_a_cell_counts_whichever_waits_for_the_table(
    db: Database,
) -> None:
    async with db.transaction() as tx:
        tx.set("ann", balance, 1)
        waiting = tx.set("ann", balance, 2)
        tx.set("bob", balance, 1)
        await asyncio.gather(waiting, tx.set("zoe", balance, 1))
        tx.set("ann", balance, 3)
        tx.delete("bob", balance)
        row, _ = await tx.get_many(accounts, ["ann", "bob"])
        assert row[balance] == 3
        assert [one.key async for one in tx.scan(accounts)] == ["ann", "zoe"]
    assert await values_of(db) == {"ann": 3, "zoe": 1}


async def test_what_a_write_returns_may_be_awaited_gathered_and_made_a_task(db: Database) -> None:
    for row in ("ann", "bob"):  # with a table that is not known yet, and with one that is
        async with db.transaction() as tx:
            await tx.set(row, balance, 1)
            await asyncio.gather(tx.set(row, balance, 2), tx.lock(row, visits))
            await asyncio.create_task(tx.set(row, balance, 3))
            async with asyncio.TaskGroup() as group:
                group.create_task(tx.set(row, visits, 4))
            await asyncio.wait_for(tx.delete(row, visits), 1.0)
    assert await values_of(db) == {"ann": 3, "bob": 3}


async def test_writes_of_a_known_table_share_what_they_return(db: Database) -> None:
    async with db.transaction() as tx:
        await tx.set("ann", balance, 1)
        assert tx.set("ann", balance, 2) is tx.set("bob", balance, 3) is tx.delete("a", balance)
        assert tx.lock("c", balance) is tx.set("bob", {balance: 1})


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (lambda tx: tx.set(7, balance, 1), SchemaError),
        (lambda tx: tx.set("ann", balance, "1"), SchemaError),
        (lambda tx: tx.set("ann", "balance", 1), UsageError),
        (lambda tx: tx.set("ann", balance), InvalidArgument),
        (lambda tx: tx.set("ann", {balance: 1, visits: "1"}), SchemaError),
        (lambda tx: tx.set("ann", {balance: 1, number: 1}), InvalidArgument),
        (lambda tx: tx.delete(7, balance), SchemaError),
        (lambda tx: tx.lock(7, balance), SchemaError),
        (lambda tx: tx.lock("ann", balance, shared=1), InvalidArgument),
        (lambda tx: tx.notify(7, balance), SchemaError),
    ],
)
@pytest.mark.parametrize("is_known", [False, True])
async def test_bad_arguments_are_refused_at_the_call_and_leave_nothing(
    db: Database, write: Callable[[Any], object], error: type[Exception], is_known: bool
) -> None:
    async with db.transaction() as tx:
        if is_known:
            await tx.set("ann", {balance: 1, visits: 1})
        with pytest.raises(error):
            write(tx)
    assert await values_of(db) == ({"ann": 1} if is_known else {})


async def test_a_missing_table_is_an_error_of_the_read_or_commit_that_follows(db: Database) -> None:
    tx = db.transaction()
    tx.set("ann", balance, 1)
    tx.set("ann", number, 1)
    with pytest.raises(SchemaError, match="elsewhere"):
        await tx.get("ann", balance)
    with pytest.raises(SchemaError, match="elsewhere"):
        await tx.commit()
    assert tx.outcome.value == "aborted"
    assert await values_of(db) == {}


async def test_whoever_awaits_a_write_may_go_on_without_it(db: Database) -> None:
    async with db.transaction() as tx:
        tx.set("ann", balance, 1)
        with pytest.raises(SchemaError, match="elsewhere"):
            await tx.set("ann", number, 1)
        refused, _ = await asyncio.gather(
            tx.set("ann", number, 1), tx.get("ann", balance), return_exceptions=True
        )
        assert isinstance(refused, SchemaError)
    assert await values_of(db) == {"ann": 1}


async def test_a_notification_without_observer_fails_the_commit(db: Database) -> None:
    with pytest.raises(UsageError, match="has no weak observer"):  # noqa: PT012 - a block is left
        async with db.transaction() as tx:
            tx.set("ann", balance, 1)
            tx.notify("ann", balance)
    assert await values_of(db) == {}


async def test_a_write_after_the_end_is_refused_at_the_call(db: Database) -> None:
    tx = db.transaction()
    await tx.commit()
    for write in (tx.set, tx.delete, tx.lock, tx.notify):
        given: Any = ("ann", balance, 1) if write == tx.set else ("ann", balance)
        with pytest.raises(UsageError, match="has committed; begin a new one"):
            write(*given)


@on_both_engines
async def test_shares_commit_what_was_not_awaited(db: Database) -> None:
    async with db.shared_transaction() as shared:
        async with db.share(shared.ticket, task="1") as share:
            share.set("ann", balance, 1)
            share.set("bob", balance, 2)
            share.delete("zoe", balance)
            receipt = await share.finish()
        assert receipt.cells == 3
        await shared.commit([receipt])
    assert await values_of(db) == {"ann": 1, "bob": 2}


async def test_an_attempt_with_a_refused_write_cannot_be_finished(
    db: Database, shared: SharedTransaction
) -> None:
    async with db.share(shared.ticket, task="1") as share:
        share.set("ann", number, 1)
        with pytest.raises(SchemaError, match="elsewhere"):
            await share.finish()
        with pytest.raises(UsageError, match="has failed to write a cell"):
            await share.finish()


# ---------------------------------------------------------------- forgotten calls

counter = ShardedCounter("counter")
queue = CombineQueue("queue", key=codecs.text, value=codecs.integer, combine=sum)

Call = Callable[[Any], Any]
CALLS: list[tuple[Call, str]] = [
    (lambda tx: tx.get("ann", balance), r"tx\.get\('ann', 'accounts':'balance'\)"),
    (lambda tx: tx.get_many(accounts, ["ann"]), r"tx\.get_many\(table 'accounts'\)"),
    (lambda tx: tx.timestamp(), r"tx\.timestamp\(\.\.\.\)"),
    (lambda tx: tx.increment("ann", balance), r"tx\.increment\('ann', 'accounts':'balance'\)"),
    (lambda tx: tx.delete_row(accounts, "ann"), r"tx\.delete_row\(table 'accounts', 'ann'\)"),
    (lambda tx: tx.commit(), r"tx\.commit\(\.\.\.\)"),
    (lambda tx: counter.add(tx, "ann", 1), r"ShardedCounter\.add\(\.\.\.\)"),
    (lambda tx: queue.add(tx, "ann", 1), r"CombineQueue\.add\(\.\.\.\)"),
    (lambda tx: doubled(tx, "ann"), r"doubled\('ann'\)"),
    (lambda tx: adds(tx, "ann"), r"adds\('ann'\)"),
]


@pytest.mark.parametrize(("call", "name"), CALLS)
async def test_a_call_without_await_fails_the_commit(db: Database, call: Call, name: str) -> None:
    line = inspect.getsourcelines(call)[1]
    with pytest.raises(UsageError, match=rf"{name} at \S+test_awaiting.py:{line} was called"):  # noqa: PT012 - a block is left
        async with db.transaction() as tx:
            tx.set("bob", balance, 1)
            call(tx)
    assert tx.outcome.value == "aborted"
    assert await values_of(db) == {}


@pytest.mark.parametrize("writes", [False, True])
async def test_a_call_without_await_fails_a_function_that_is_run(
    writes: bool, db: Database
) -> None:
    runs = []

    async def body(tx: Transaction) -> None:
        runs.append(tx)
        if writes:
            tx.set("bob", balance, 1)
        tx.get("ann", balance)  # type: ignore[unused-coroutine]

    with pytest.raises(UsageError, match=r"tx\.get.*without await.*nothing is committed"):
        await db.run(body)
    assert len(runs) == 1
    assert await values_of(db) == {}


async def test_the_error_names_a_function_as_the_program_calls_it(db: Database) -> None:
    @both_kinds
    async def pay(tx: Transaction) -> None:
        tx.set("ann", balance, 1)

    with pytest.raises(UsageError, match=r"^pay\(\.\.\.\) at .*: write await pay\(\.\.\.\)$"):
        async with db.transaction() as tx:
            pay(tx)  # type: ignore[unused-coroutine]


async def test_a_call_that_is_still_running_fails_the_commit(db: Database) -> None:
    tx = db.transaction()
    tx.set("bob", balance, 1)
    reading = asyncio.create_task(tx.get("ann", balance))
    never = asyncio.create_task(asyncio.wait_for(_never(tx), None))
    await reading
    with pytest.raises(
        UsageError, match=r"waits\('ann'\) at .* is still running, so .*: await it first$"
    ):
        await tx.commit()
    never.cancel()
    await asyncio.wait([never])
    assert await values_of(db) == {}


@transactional
async def waits(tx: Transaction, row: str) -> None:
    await asyncio.get_running_loop().create_future()


async def _never(tx: Transaction) -> None:
    await waits(tx, "ann")


async def test_calls_that_end_before_the_commit_are_no_failure(db: Database) -> None:
    await db.run(_set_all)
    async with db.transaction() as tx:
        later = tx.get("ann", balance)
        task = asyncio.create_task(tx.increment("bob", balance))
        many = asyncio.gather(*(tx.get(f"row {n}", balance) for n in range(200)))
        assert await later == 1
        assert await task == 2
        await many
        cancelled = asyncio.gather(tx.get("ann", balance), tx.get("bob", balance))
        await asyncio.sleep(0)
        cancelled.cancel()
        not_begun = asyncio.create_task(tx.get("ann", balance))
        not_begun.cancel()
    with suppress(asyncio.CancelledError):
        await cancelled
    assert await db.get("bob", balance) == 2


async def _set_all(tx: Transaction) -> None:
    tx.set("ann", balance, 1)
    tx.set("bob", balance, 1)


async def test_a_function_that_was_joined_may_commit_by_itself(db: Database) -> None:
    @transactional
    async def commits(tx: Transaction) -> None:
        tx.set("ann", balance, 1)
        await tx.commit()

    async with db.transaction() as tx:
        await commits(tx)
    await commits(db)
    assert await values_of(db) == {"ann": 1}


async def test_the_error_of_the_body_wins(db: Database) -> None:
    with pytest.raises(ZeroDivisionError) as raised:  # noqa: PT012 - a block is left
        async with db.transaction() as tx:
            tx.get("ann", balance)  # type: ignore[unused-coroutine]
            raise ZeroDivisionError
    assert raised.value.__context__ is None
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - a block is left
        async with db.snapshot() as snapshot:
            snapshot.get("ann", balance)  # type: ignore[unused-coroutine]
            raise ZeroDivisionError
    await asyncio.sleep(0)


async def test_what_is_rolled_back_needs_no_await(db: Database) -> None:
    async with db.transaction() as tx:
        tx.get("ann", balance)  # type: ignore[unused-coroutine]
        task = asyncio.create_task(tx.get("ann", balance))
        tx.rollback()
    with pytest.raises(UsageError, match="was rolled back"):
        await task
    await asyncio.sleep(0)


async def test_a_run_after_a_conflict_begins_with_no_calls(db: Database) -> None:
    runs = []

    async def body(tx: Transaction) -> None:
        runs.append(tx)
        tx.set("ann", balance, len(runs))
        if len(runs) == 1:
            tx.get("bob", balance)  # type: ignore[unused-coroutine]
            raise ConflictError("as if the commit had lost")

    await db.run(body)
    assert await values_of(db) == {"ann": 2}


@pytest.mark.parametrize("closes", [False, True])
async def test_a_read_of_a_snapshot_without_await_is_an_error_at_its_end(
    closes: bool, db: Database
) -> None:
    async def use(snapshot: Snapshot) -> None:
        if closes:
            snapshot.get("ann", balance)  # type: ignore[unused-coroutine]
            await snapshot.close()
        async with snapshot:
            snapshot.get("ann", balance)  # type: ignore[unused-coroutine]

    with pytest.raises(UsageError, match=r"snapshot\.get\('ann'.*nothing was read"):
        await use(db.snapshot())


@pytest.mark.parametrize(
    "begin", [lambda tx: tx.set("ann", balance, 1), lambda tx: tx.get("ann", balance)]
)
async def test_a_commit_that_is_cancelled_while_it_asks_for_a_table_rolls_back(
    db: Database, begin: Call
) -> None:
    tx = db.transaction()
    begin(tx)
    committing = asyncio.create_task(tx.commit())
    await asyncio.sleep(0)
    committing.cancel()
    await asyncio.wait([committing])
    assert committing.cancelled()
    assert tx.outcome.value == "aborted"


async def test_the_end_of_a_shared_transaction_that_is_not_awaited_is_an_error(
    db: Database,
) -> None:
    with pytest.raises(UsageError, match=r"shared_transaction\.commit\(.*without await"):  # noqa: PT012 - a block is left
        async with db.shared_transaction() as shared:
            with pytest.raises(UsageError, match=r"share\.finish\(.*without await"):  # noqa: PT012 - a block is left
                async with db.share(shared.ticket, task="1") as share:
                    share.set("ann", balance, 1)
                    share.finish()  # type: ignore[unused-coroutine]
            shared.commit([])  # type: ignore[unused-coroutine]
    assert await values_of(db) == {}


async def test_finished_calls_are_not_kept(db: Database) -> None:
    async with db.transaction() as tx:
        for _ in range(1_000):
            await tx.get("ann", balance)
        assert tx._calls is not None
        assert len(tx._calls) <= 64


# Calls of one transaction may be gathered: a commit leaves out none that has succeeded.

other_number = Table("others").column("number", codecs.integer)

Write = Callable[[Transaction], Awaitable[object]]


class SlowMaster(Cluster):
    """Answers what a first write asks for when the test lets it."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def describe_table(
        self, request: master_pb2.DescribeTableRequest
    ) -> master_pb2.DescribeTableResponse:
        await self._hold()
        return await super().describe_table(request)

    async def declare_codecs(
        self, request: master_pb2.DeclareCodecsRequest
    ) -> master_pb2.DeclareCodecsResponse:
        if visits.name in [one.column for one in request.codecs.columns]:
            await self._hold()
        return await super().declare_codecs(request)

    async def _hold(self) -> None:
        self.asked.set()
        await self.may_answer.wait()


@pytest.fixture
@asynccontextmanager
async def tx(db: Database) -> AsyncIterator[Transaction]:
    """A transaction that has written a cell."""
    tx = db.transaction()
    await tx.set("bob", balance, 1)
    yield tx


@pytest.mark.parametrize(
    "write",
    [
        lambda tx: tx.set("bob", visits, 1),
        lambda tx: tx.set("bob", {visits: 1}),
        lambda tx: tx.delete("bob", other_number),
        lambda tx: tx.lock("bob", other_number),
    ],
)
@pytest.mark.parametrize("kind_of_cluster", [SlowMaster])
async def test_a_commit_waits_until_earlier_writes_have_their_tables(
    write: Write, tx: Transaction, cluster: SlowMaster
) -> None:
    await cluster.create_table(master_pb2.CreateTableRequest(name="others"))
    writing = asyncio.ensure_future(write(tx))
    await cluster.asked.wait()
    committing = asyncio.create_task(tx.commit())
    await asyncio.sleep(0.1)
    assert not writing.done()
    assert not committing.done()
    cluster.may_answer.set()
    await writing
    await committing
    assert len(tx.internal.writes.cells) == 2


@pytest.mark.parametrize("kind_of_cluster", [SlowMaster])
async def test_a_notification_that_is_refused_while_it_is_awaited_is_left_out(
    tx: Transaction, cluster: SlowMaster
) -> None:
    await cluster.create_table(master_pb2.CreateTableRequest(name="others"))
    notifying = asyncio.ensure_future(tx.notify("bob", other_number))
    await cluster.asked.wait()
    committing = asyncio.create_task(tx.commit())
    cluster.may_answer.set()
    with pytest.raises(UsageError, match="has no weak observer"):
        await notifying
    assert await committing is not None


@pytest.mark.parametrize("kind_of_cluster", [SlowMaster])
async def test_a_read_that_runs_out_of_time_beside_an_awaited_write_does_not_lose_it(
    db: Database, tx: Transaction, cluster: SlowMaster
) -> None:
    writing = asyncio.create_task(tx.set("bob", visits, 2))
    await cluster.asked.wait()
    with pytest.raises(DeadlineExceeded):
        await tx.get("bob", balance, timeout=0.5)
    cluster.may_answer.set()
    await writing
    await tx.commit()
    assert await db.get("bob", visits) == 2


@pytest.mark.parametrize("kind_of_cluster", [SlowMaster])
async def test_an_increment_that_is_under_way_when_the_commit_begins_fails_it(
    db: Database, tx: Transaction, cluster: SlowMaster
) -> None:
    incrementing = asyncio.ensure_future(tx.increment("bob", visits))
    await cluster.asked.wait()
    with pytest.raises(UsageError, match=r"tx\.increment\(.*is still running, so nothing is"):
        await tx.commit()
    cluster.may_answer.set()
    with pytest.raises(UsageError, match="this transaction was rolled back; begin a new one"):
        await incrementing
    assert await db.get("bob", balance) is None
