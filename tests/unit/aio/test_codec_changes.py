"""A column's codec is changed on purpose, or declared first, while programs are at work."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

import percolator.testing
from percolator import Column, Limits, SchemaError, Table, UsageError, codecs, observes
from percolator.aio import Database, Transaction
from percolator.aio.shared import SharedTransaction
from percolator.aio.transaction import Outcome
from percolator.errors import DeadlineExceeded, Retry, SchemaChanged, Unavailable
from percolator.protocol.roll_forward import MANY
from percolator.v1 import master_pb2, tabletserver_pb2
from percolator.wire.status import to_detail
from tests.simulation.virtual_time import VirtualClock
from tests.unit.aio.shared_attempts import receipt_of, values_of
from tests.unit.connected import TWO_PHASES, Cluster, accounts, balance, put, written_out

text = accounts.column("balance", codecs.text)
CHANGE = master_pb2.ChangeCodecsRequest(
    table="accounts", columns=[master_pb2.ColumnCodec(column=b"balance", codec="text")]
)


@pytest.fixture
@asynccontextmanager
async def late(db: Database) -> AsyncIterator[Transaction]:
    """A transaction that has set an integer, like one before it, and is not committed yet."""
    await put(db, balance, a=1)
    late = db.transaction()
    await late.set("a", balance, 2)
    yield late


async def kept(db: Database) -> dict[bytes, str]:
    found = await db.internal.engine.catalog.describe("accounts", db.internal.engine.now() + 5)
    return {one.column: one.codec for one in found.codecs.columns}


@pytest.mark.parametrize("limits", [Limits(), TWO_PHASES], ids=["one round", "two phases"])
async def test_what_was_encoded_before_a_change_is_not_committed_after_it(
    db: Database, cluster: Cluster, late: Transaction
) -> None:
    await cluster.change_codecs(CHANGE)  # by another client
    with pytest.raises(SchemaError, match=r"changed from integer to text.*nothing was commit"):
        await late.commit()
    assert late.outcome is Outcome.ABORTED
    with pytest.raises(SchemaError, match="declares the codec integer, but the table has text"):
        await db.get("a", balance)
    await put(db, text, a="one")
    assert await db.get("a", text) == "one"


async def test_a_change_that_this_client_knows_already_stops_a_commit_too(
    db: Database, cluster: Cluster, late: Transaction
) -> None:
    await cluster.change_codecs(CHANGE)
    assert await kept(db) == {b"balance": "text"}
    with pytest.raises(SchemaError, match="changed from integer to text"):
        await late.commit()


async def test_a_change_of_another_column_stops_nothing(db: Database, cluster: Cluster) -> None:
    owner = accounts.column("owner", codecs.text)
    async with db.transaction() as tx:
        await tx.set("a", {balance: 1, owner: "ann"})
    late = db.transaction()
    await late.set("a", owner, "bob")
    await cluster.change_codecs(CHANGE)
    await late.commit()
    assert await db.get("a", owner) == "bob"


class WithoutDescriptions(Cluster):
    """Its master describes no table while a test does not want it to."""

    answers = True
    seconds = 0.0
    """How long an answer is on its way."""

    async def describe_table(
        self, request: master_pb2.DescribeTableRequest
    ) -> master_pb2.DescribeTableResponse:
        if not self.answers:
            raise Unavailable("nothing is listening")
        answer = master_pb2.DescribeTableResponse()
        answer.CopyFrom(await super().describe_table(request))
        await asyncio.sleep(self.seconds)
        return answer


@pytest.mark.parametrize("kind_of_cluster", [WithoutDescriptions])
async def test_a_client_that_only_reads_learns_of_a_change_when_a_master_answers_again(
    db: Database, cluster: WithoutDescriptions
) -> None:
    """The tablet says only once that there is a newer schema."""
    await put(db, balance, a=1)
    await cluster.change_codecs(CHANGE)
    cluster.answers = False
    await db.get("a", balance)
    await asyncio.sleep(30)
    cluster.answers = True
    await asyncio.sleep(5)
    with pytest.raises(SchemaError, match="declares the codec integer, but the table has text"):
        await db.get("a", balance)


@pytest.mark.parametrize("kind_of_cluster", [WithoutDescriptions])
async def test_a_client_that_only_reads_learns_of_a_change_while_it_learns_of_another(
    db: Database, cluster: WithoutDescriptions
) -> None:
    await put(db, balance, a=1)
    cluster.seconds = 0.5
    feed = master_pb2.SetChangeFeedRequest(table="accounts", change_feed=True)
    await cluster.set_change_feed(feed)
    await db.get("a", balance)
    await asyncio.sleep(0.2)
    await cluster.change_codecs(CHANGE)
    await db.get("a", balance)
    await asyncio.sleep(5)
    with pytest.raises(SchemaError, match="declares the codec integer, but the table has text"):
        await db.get("a", balance)


@pytest.mark.parametrize("how", ["get", "get_many", "row", "family", "set", "key"])
async def test_a_client_that_was_refused_is_accepted_once_the_codec_is_changed(
    how: str, db: Database, cluster: Cluster
) -> None:
    """It asked nobody any more: the remedy that the error names did not help programs that ran."""
    await put(db, balance, a=1)
    assert await _refused(db, how)
    change = master_pb2.ChangeCodecsRequest()
    change.CopyFrom(CHANGE)
    if how == "key":
        change.key = "ordered_integer"
    await cluster.change_codecs(change)  # by another client
    await _refused(db, how)  # it may still be: what is known here is older
    await asyncio.sleep(2)
    assert not await _refused(db, how)


async def _refused(db: Database, how: str) -> bool:
    numbered = Table("accounts", key=codecs.ordered_integer).column("balance", codecs.text)
    try:
        async with db.transaction() as tx:
            match how:
                case "get":
                    await tx.get("a", text)
                case "get_many":
                    await tx.get_many(accounts, ["a"], [text])
                case "row":
                    [row] = await tx.get_many(accounts, ["a"])
                    row.get(text)
                case "family":
                    [row] = await tx.get_many(accounts, ["a"])
                    row.family(accounts.family("bal", codecs.text))
                case "set":
                    await tx.set("b", text, "x")
                case _:
                    await tx.get(5, numbered)
    except SchemaError as error:
        return "the program declares the codec" in str(error)
    return False


async def test_observers_and_feeds_change_the_schema_and_no_codec(
    db: Database, cluster: Cluster, late: Transaction
) -> None:
    feed = master_pb2.SetChangeFeedRequest(table="accounts", change_feed=True)
    await cluster.set_change_feed(feed)
    await late.commit()
    assert await db.get("a", balance) == 2


class Counting(Cluster):
    """Counts declarations, and answers them only while it may."""

    declared = 0
    answers = True

    async def declare_codecs(
        self, request: master_pb2.DeclareCodecsRequest
    ) -> master_pb2.DeclareCodecsResponse:
        self.declared += 1
        if not self.answers:
            await asyncio.get_running_loop().create_future()
        return await super().declare_codecs(request)


@pytest.mark.parametrize("kind_of_cluster", [Counting])
async def test_many_transactions_that_begin_with_a_column_ask_once(
    db: Database, cluster: Counting
) -> None:
    async def put(number: int) -> None:
        async with db.transaction() as tx:
            await tx.set(f"{number}", balance, number)

    await asyncio.gather(*(put(number) for number in range(100)))
    assert cluster.declared == 1


@pytest.mark.parametrize("kind_of_cluster", [Counting])
async def test_without_a_master_the_first_write_fails_in_time_and_can_be_repeated(
    db: Database, cluster: Counting
) -> None:
    await db.get("a", balance)
    cluster.answers = False
    tx = db.transaction(timeout=0.5)
    with pytest.raises(DeadlineExceeded, match=r"balance.*before the first write") as late:
        await tx.set("a", balance, 1)
    assert late.value.retry is Retry.SAFE
    tx.rollback()
    cluster.answers = True
    async with db.transaction() as tx:
        await tx.set("a", balance, 1)
    cluster.answers = False  # nobody has to ask again
    async with db.transaction() as tx:
        await tx.set("b", balance, 1)


async def test_a_program_that_learns_of_a_codec_late_is_refused_from_then_on(
    db: Database, cluster: Cluster
) -> None:
    """It has read the column before anything was declared."""
    assert await db.get("a", text) is None
    info = await cluster.describe_table(master_pb2.DescribeTableRequest(name="accounts"))
    declared = master_pb2.Codecs(
        columns=[master_pb2.ColumnCodec(column=b"balance", codec="integer")]
    )
    await cluster.declare_codecs(
        master_pb2.DeclareCodecsRequest(table_id=info.table.table_id, codecs=declared)
    )
    with pytest.raises(SchemaError, match="declares the codec text, but the table has integer"):
        await put(db, text, a="x")
    with pytest.raises(SchemaError, match="declares the codec text, but the table has integer"):
        await db.get("a", text)


@pytest.mark.parametrize("kind_of_cluster", [Counting])
async def test_tables_of_the_library_keep_no_codecs(db: Database, cluster: Counting) -> None:
    table = Table("percolator.sinks")
    await db.internal.engine.catalog.create(
        table.name, (), master_pb2.TableOptions(), exist_ok=True, deadline=1e9
    )
    await put(db, table.column("batch", codecs.integer), a=1)
    assert cluster.declared == 0


# A client that meets a newer schema asks for it once, however many cells it writes.


class AskedSlowly(Cluster):
    """Counts descriptions, each of which takes a while."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.described = 0
        self.lag_until = 0.0
        """Until then, tablets have not heard of any schema but the first."""
        self.registers_after_a_commit = ""

    async def describe_table(
        self, request: master_pb2.DescribeTableRequest
    ) -> master_pb2.DescribeTableResponse:
        self.described += 1
        await asyncio.sleep(0.01)
        return await super().describe_table(request)

    async def register(self, name: str, *, weak: bool = False) -> None:
        """By another client."""
        observer = master_pb2.Observer(name=name, columns=[balance.name], weak=weak)
        request = master_pb2.ChangeObserversRequest(table="accounts", add=[observer])
        await self.change_observers(request)

    async def mutate(
        self, request: tabletserver_pb2.MutateRequest
    ) -> tabletserver_pb2.MutateResponse:
        response = await super().mutate(request)
        if self._clock.monotonic_seconds() < self.lag_until:
            for batch, result in zip(request.batches, response.batches, strict=True):
                if batch.target.schema_version > 1:
                    result.Clear()
                    lags = SchemaChanged("not that one", table_id=1, schema_version=1)
                    result.error.CopyFrom(to_detail(lags))
        elif (
            self.registers_after_a_commit and sum(len(written_out(b)) for b in request.batches) == 1
        ):
            name, self.registers_after_a_commit = self.registers_after_a_commit, ""
            await self.register(name)
        return response


@pytest.mark.parametrize("kind_of_cluster", [AskedSlowly])
async def test_a_client_that_is_refused_all_the_time_asks_once_a_second(
    db: Database, cluster: AskedSlowly
) -> None:
    await put(db, balance, a=1)
    before = cluster.described
    for _ in range(300):
        with pytest.raises(SchemaError):
            await db.get("a", text)
        await asyncio.sleep(0.01)
    assert 2 <= cluster.described - before <= 4


@pytest.mark.parametrize("kind_of_cluster", [AskedSlowly])
async def test_many_weak_notifications_ask_once(db: Database, cluster: AskedSlowly) -> None:
    await cluster.register("first", weak=True)
    engine = db.internal.engine
    info = await engine.catalog.table("accounts", engine.now() + 1.0)
    await engine.catalog.refresh(info.table_id, engine.now() + 1.0)
    tx = db.transaction()
    for number in range(2_000):
        await tx.notify(f"{number}", balance)
    await cluster.register("second", weak=True)
    cluster.described = 0
    await tx.commit()
    assert cluster.described == 1


@pytest.mark.parametrize("kind_of_cluster", [AskedSlowly])
async def test_the_other_cells_of_a_large_commit_ask_once_or_twice(
    db: Database, cluster: AskedSlowly
) -> None:
    tx = db.transaction()
    for number in range(2_000):
        await tx.set(f"{number}", balance, number)
    cluster.described = 0
    cluster.registers_after_a_commit = "first"
    await tx.commit()
    await asyncio.sleep(3.0)
    assert cluster.described <= 2
    assert not any(len(tablet._state.mirror) for tablet in cluster.tablets.values())


async def _dead(self: SharedTransaction, commit: int) -> None:
    """The process has ended."""


@pytest.mark.parametrize("kind_of_cluster", [AskedSlowly])
async def test_a_reader_that_knows_a_newer_schema_than_a_tablet_asks_now_and_then(
    monkeypatch: pytest.MonkeyPatch, db: Database, cluster: AskedSlowly
) -> None:
    """A tablet hears of a schema after the master has recorded it."""
    monkeypatch.setattr(SharedTransaction, "_tell_tablets", _dead)
    values = {f"a{number}": number for number in range(MANY // 2)}
    async with db.shared_transaction() as shared:
        await shared.commit([await receipt_of(db, shared.ticket, "a", **values)])
    await cluster.register("first")
    engine = db.internal.engine
    info = await engine.catalog.table("accounts", engine.now() + 1.0)
    await engine.catalog.refresh(info.table_id, engine.now() + 1.0)
    cluster.described = 0
    cluster.lag_until = engine.now() + 2.0
    assert await values_of(db) == values
    await asyncio.sleep(3.0)
    assert cluster.described < 20
    assert not any(len(tablet._state.mirror) for tablet in cluster.tablets.values())


@pytest.mark.parametrize("kind_of_cluster", [AskedSlowly])
async def test_a_backfill_that_is_ahead_of_a_tablet_asks_now_and_then(
    db: Database, cluster: AskedSlowly
) -> None:
    @observes(balance)
    async def first(tx: Transaction, row: str) -> None:
        """Is never run."""

    await put(db, balance, a=1)
    await db.register_observers([first])
    cluster.described = 0
    cluster.lag_until = db.internal.engine.now() + 2.0
    assert await db.backfill(first) == 1
    assert 2 < cluster.described < 60


# What is sent to other processes: tables, columns and rows arrive there, and so do receipts by
# programs of the release before. A database cannot be sent, and its error says what to do there.


async def test_a_database_of_asyncio_is_not_pickled(db: Database) -> None:
    with pytest.raises(UsageError, match=r"percolator\.connect\(\)"):
        pickle.dumps(db)


@dataclass
class Price:
    amount: Decimal


sales = Table(
    "sales", key=codecs.tuple_of(codecs.hashed(codecs.text), codecs.ordered_date, codecs.uuid)
)
SALE = ("ann", date(2026, 3, 1), UUID(int=7))
COLUMNS: dict[Column[Any], Any] = {
    sales.column("amount", codecs.decimal(10, 2)): Decimal("-1.50"),
    sales.column("price", codecs.model(Price)): Price(Decimal(3)),
    sales.column("table", codecs.message(master_pb2.Table)): master_pb2.Table(name="a"),
    sales.column("at", codecs.timestamp): datetime(2026, 3, 1, tzinfo=UTC),
    sales.family("f:", codecs.integer).column("x"): 1,
}


@pytest.mark.parametrize("sent", [lambda one: pickle.loads(pickle.dumps(one)), deepcopy])
def test_tables_columns_and_rows_can_be_sent_to_another_process(sent: Callable[[Any], Any]) -> None:
    with percolator.testing.connect() as db:
        db.create_table(sent(sales))
        with db.transaction() as tx:
            tx.set(SALE, sent(COLUMNS))
        (row,) = db.snapshot().scan(sales, columns=list(COLUMNS))
        assert dict(sent(row).items()) == dict(row.items()) == COLUMNS
        assert sent(row).key == SALE
        assert [sent(row)[column] for column in COLUMNS] == list(COLUMNS.values())
        assert [db.get(SALE, sent(column)) for column in COLUMNS] == list(COLUMNS.values())


def test_codecs_of_which_there_is_one_are_still_that_one() -> None:
    for codec in (codecs.ordered_integer, codecs.ordered_timestamp, codecs.ordered_date):
        assert pickle.loads(pickle.dumps(codec)) is codec
