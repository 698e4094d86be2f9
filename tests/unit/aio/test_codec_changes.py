"""A column's codec is changed on purpose, or declared first, while programs are at work."""

from __future__ import annotations

import asyncio

import pytest

from percolator import Limits, SchemaError, Table, codecs
from percolator.aio import Database
from percolator.aio.transaction import Outcome
from percolator.errors import DeadlineExceeded, Retry, Unavailable
from percolator.v1 import master_pb2
from tests.unit.connected import TWO_PHASES, Cluster, accounts, balance, connected, connected_to

text = accounts.column("balance", codecs.text)
CHANGE = master_pb2.ChangeCodecsRequest(
    table="accounts", columns=[master_pb2.ColumnCodec(column=b"balance", codec="text")]
)


async def kept(db: Database) -> dict[bytes, str]:
    found = await db.internal.engine.catalog.describe("accounts", db.internal.engine.now() + 5)
    return {one.column: one.codec for one in found.codecs.columns}


@pytest.mark.parametrize("limits", [Limits(), TWO_PHASES], ids=["one round", "two phases"])
async def test_what_was_encoded_before_a_change_is_not_committed_after_it(limits: Limits) -> None:
    async with connected(limits=limits) as (db, cluster):
        async with db.transaction() as tx:
            await tx.set("a", balance, 1)
        late = db.transaction()
        await late.set("a", balance, 2)
        await cluster.change_codecs(CHANGE)  # by another client
        with pytest.raises(SchemaError, match=r"changed from integer to text.*nothing was commit"):
            await late.commit()
        assert late.outcome is Outcome.ABORTED
        with pytest.raises(SchemaError, match="declares the codec integer, but the table has text"):
            await db.get("a", balance)
        async with db.transaction() as tx:
            await tx.set("a", text, "one")
        assert await db.get("a", text) == "one"


async def test_a_change_that_this_client_knows_already_stops_a_commit_too() -> None:
    async with connected() as (db, cluster):
        async with db.transaction() as tx:
            await tx.set("a", balance, 1)
        late = db.transaction()
        await late.set("a", balance, 2)
        await cluster.change_codecs(CHANGE)
        assert await kept(db) == {b"balance": "text"}
        with pytest.raises(SchemaError, match="changed from integer to text"):
            await late.commit()


async def test_a_change_of_another_column_stops_nothing() -> None:
    async with connected() as (db, cluster):
        owner = accounts.column("owner", codecs.text)
        async with db.transaction() as tx:
            await tx.set("a", {balance: 1, owner: "ann"})
        late = db.transaction()
        await late.set("a", owner, "bob")
        await cluster.change_codecs(CHANGE)
        await late.commit()
        assert await db.get("a", owner) == "bob"


async def test_a_client_that_only_reads_learns_of_a_change() -> None:
    async with connected() as (db, cluster):
        async with db.transaction() as tx:
            await tx.set("a", balance, 1)
        await cluster.change_codecs(CHANGE)
        await db.get("a", balance)  # a tablet says that there is a newer schema
        await asyncio.sleep(1)
        with pytest.raises(SchemaError, match="declares the codec integer, but the table has text"):
            await db.get("a", balance)


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


async def test_a_client_that_only_reads_learns_of_a_change_when_a_master_answers_again() -> None:
    """The tablet says only once that there is a newer schema."""
    async with connected_to(WithoutDescriptions) as (db, cluster):
        async with db.transaction() as tx:
            await tx.set("a", balance, 1)
        await cluster.change_codecs(CHANGE)
        cluster.answers = False
        await db.get("a", balance)
        await asyncio.sleep(30)
        cluster.answers = True
        await asyncio.sleep(5)
        with pytest.raises(SchemaError, match="declares the codec integer, but the table has text"):
            await db.get("a", balance)


async def test_a_client_that_only_reads_learns_of_a_change_while_it_learns_of_another() -> None:
    async with connected_to(WithoutDescriptions) as (db, cluster):
        async with db.transaction() as tx:
            await tx.set("a", balance, 1)
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
async def test_a_client_that_was_refused_is_accepted_once_the_codec_is_changed(how: str) -> None:
    """It asked nobody any more: the remedy that the error names did not help programs that ran."""
    async with connected() as (db, cluster):
        async with db.transaction() as tx:
            await tx.set("a", balance, 1)
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


class Asked(Cluster):
    """Counts how often it is asked for a schema."""

    times = 0

    async def describe_table(
        self, request: master_pb2.DescribeTableRequest
    ) -> master_pb2.DescribeTableResponse:
        self.times += 1
        return await super().describe_table(request)


async def test_a_client_that_is_refused_all_the_time_asks_once_a_second() -> None:
    async with connected_to(Asked) as (db, asked):
        async with db.transaction() as tx:
            await tx.set("a", balance, 1)
        before = asked.times
        for _ in range(300):
            with pytest.raises(SchemaError):
                await db.get("a", text)
            await asyncio.sleep(0.01)
        assert 2 <= asked.times - before <= 4


async def test_observers_and_feeds_change_the_schema_and_no_codec() -> None:
    async with connected() as (db, cluster):
        async with db.transaction() as tx:
            await tx.set("a", balance, 1)
        late = db.transaction()
        await late.set("a", balance, 2)
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


async def test_many_transactions_that_begin_with_a_column_ask_once() -> None:
    async with connected_to(Counting) as (db, cluster):

        async def put(number: int) -> None:
            async with db.transaction() as tx:
                await tx.set(f"{number}", balance, number)

        await asyncio.gather(*(put(number) for number in range(100)))
        assert cluster.declared == 1


async def test_without_a_master_the_first_write_fails_in_time_and_can_be_repeated() -> None:
    async with connected_to(Counting) as (db, cluster):
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


async def test_a_program_that_learns_of_a_codec_late_is_refused_from_then_on() -> None:
    """It has read the column before anything was declared."""
    async with connected() as (db, cluster):
        assert await db.get("a", text) is None
        info = await cluster.describe_table(master_pb2.DescribeTableRequest(name="accounts"))
        declared = master_pb2.Codecs(
            columns=[master_pb2.ColumnCodec(column=b"balance", codec="integer")]
        )
        await cluster.declare_codecs(
            master_pb2.DeclareCodecsRequest(table_id=info.table.table_id, codecs=declared)
        )
        with pytest.raises(SchemaError, match="declares the codec text, but the table has integer"):
            async with db.transaction() as tx:
                await tx.set("a", text, "x")
        with pytest.raises(SchemaError, match="declares the codec text, but the table has integer"):
            await db.get("a", text)


async def test_tables_of_the_library_keep_no_codecs() -> None:
    async with connected_to(Counting) as (db, cluster):
        table = Table("percolator.sinks")
        await db.internal.engine.catalog.create(
            table.name, (), master_pb2.TableOptions(), exist_ok=True, deadline=1e9
        )
        async with db.transaction() as tx:
            await tx.set("a", table.column("batch", codecs.integer), 1)
        assert cluster.declared == 0
