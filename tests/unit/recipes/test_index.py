"""Index: kept by an observer, backfilled and checked."""

from __future__ import annotations

import asyncio
import random
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from random import Random
from typing import Any

import pytest

import percolator.testing
from percolator import Database, Limits, RetryPolicy, Table, codecs
from percolator.aio import Database as AsyncDatabase
from percolator.aio.connecting import connect_to
from percolator.errors import InvalidArgument, SchemaError
from percolator.recipes import CombineQueue, ExportQueue, Index, ShardedCounter
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.pytest_plugin import percolator_db
from percolator.v1 import master_pb2
from percolator.v1.master_pb2 import SetTtlsRequest
from percolator.v1.tabletserver_pb2 import ColumnTtl
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock
from tests.unit.connected import DistantMaster, accounts, connected, connected_to

__all__ = ["percolator_db"]

people = Table("people")
city = people.column("city", codecs.text)
age = people.column("age", codecs.integer)


def by_city() -> Index[str, str, str]:
    return Index("by city", on=city, value=codecs.text)


@pytest.fixture
def db(percolator_db: Database) -> Database:
    """A database with the table of people."""
    percolator_db.create_table(people)
    return percolator_db


@pytest.fixture
def index(db: Database) -> Index[str, str, str]:
    index = by_city()
    index.create(db)
    return index


LIVE_IN = {"ann": "Rome", "bob": "Bern", "eve": "Rome", "kim": "Ro", "zoe": "Rome\x00"}


def by_words(words: Callable[[str], list[str]]) -> Index[str, str, str]:
    return Index("by word", on=city, value=codecs.text, values=words)


def test_values_are_found_once_its_observer_has_run_and_in_order(
    db: Database, index: Index[str, str, str]
) -> None:
    db.set_many((person, {city: lives_in}) for person, lives_in in LIVE_IN.items())
    assert index.find(db.snapshot(), "Rome") == []
    percolator.testing.run_observers(db, [index.observer()])
    with db.snapshot() as snapshot:
        assert index.find(snapshot, "Rome") == ["ann", "eve"]
        assert index.find(snapshot, "Ro") == ["kim"], "a value that begins another"
        assert index.find(snapshot, "Rome", limit=1) == ["ann"]
        assert index.range(snapshot, "C", "Rome") == [("Ro", "kim")]
        assert index.range(snapshot, reverse=True, limit=1) == [("Rome\x00", "zoe")]
        assert index.check(snapshot) == []


def test_an_index_by_an_observer_follows_changes_and_deletions(db: Database) -> None:
    text = people.column("text", codecs.text)
    index: Index[str, str, str] = Index("by word", on=text, value=codecs.text, values=str.split)
    index.create(db)
    chance, kept = Random(5), dict[str, str]()
    for _ in range(10):
        for _ in range(15):
            row = f"row {chance.randrange(12)}"
            with db.transaction() as tx:
                if chance.random() < 0.3:
                    tx.delete(row, text)
                    kept.pop(row, None)
                else:
                    kept[row] = " ".join(chance.choices("abcdef", k=3))
                    tx.set(row, text, kept[row])
        percolator.testing.run_observers(db, [index.observer()])
        plain = defaultdict(set)
        for row, words in kept.items():
            for word in words.split():
                plain[word].add(row)
        with db.snapshot() as snapshot:
            found = {word: set(index.find(snapshot, word)) for word in plain}
            assert index.check(snapshot) == []
        assert found == plain


def test_backfill_builds_and_mends_what_check_reports(db: Database) -> None:
    db.set_many((f"person {n}", {city: f"city {n % 5}"}) for n in range(450))
    index = by_city()
    index.create(db)
    assert len(index.check(db.snapshot())) == 450
    assert index.backfill(db) == 450
    with db.transaction() as tx:  # which its observer has not handled yet
        tx.set("person 3", city, "elsewhere")
        tx.delete("person 4", city)
    with db.snapshot() as snapshot:
        assert len(index.find(snapshot, "city 0")) == 90
        assert index.check(snapshot) == [
            "row 'person 3' is missing for 'elsewhere'",
            "row 'person 3' is indexed for 'city 3', which it does not have",
            "row 'person 4' is indexed for 'city 4', which it does not have",
        ]
    index.backfill(db)
    assert index.check(db.snapshot()) == []


def test_a_backfill_and_a_writer_of_the_same_row_conflict(db: Database) -> None:
    index = by_city()
    db.set_many([("ann", {city: "Rome"})])
    index.create(db)
    with db.transaction() as tx:
        tx.set("ann", city, tx.get("ann", city, "") + "!")
        index.backfill(db)
        with pytest.raises(percolator.ConflictError):
            tx.commit()
    assert index.find(db.snapshot(), "Rome") == ["ann"]


async def test_asyncio_has_the_same_methods() -> None:
    index = by_city()
    async with percolator.testing.connect_async() as db:
        await db.create_table(people)
        await index.create(db)
        async with db.transaction() as tx:
            tx.set("ann", city, "Rome")
        assert await index.backfill(db) == 1
        async with db.snapshot() as snapshot:
            assert await index.find(snapshot, "Rome") == ["ann"]
            assert await index.range(snapshot, "R") == [("Rome", "ann")]
            assert await index.check(snapshot) == []


def test_bad_arguments_are_refused(db: Database) -> None:
    with pytest.raises(InvalidArgument, match="on: expected a Column, got Table"):
        Index("x", on=people, value=codecs.text)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="value: expected a codec for row keys"):
        Index("x", on=city, value=codecs.integer)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="values: expected a function"):
        Index("x", on=city, value=codecs.text, values=3)  # type: ignore[arg-type]
    Index("ä" * 29, on=city, value=codecs.text).observer()
    with pytest.raises(InvalidArgument, match="name: expected at most 58 bytes, got 'xxx"):
        Index("x" * 59, on=city, value=codecs.text)
    index = by_city()
    index.create(db)
    with pytest.raises(SchemaError, match="'by city', value 7: expected str"):
        index.find(db.snapshot(), 7)  # type: ignore[call-overload]


def refusing(text: str) -> list[str]:
    if text == "bad":
        raise ValueError("no words")
    return text.split()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bad", "index 'by word', row 'ann': values raised ValueError: no words"),
        ("x" * 5_000, "index 'by word', row 'ann', value 'x.*: the entry has 50.. bytes"),
    ],
)
def test_a_row_that_cannot_be_indexed_is_named_and_check_goes_on(
    db: Database, text: str, says: str
) -> None:
    index = by_words(refusing)
    index.create(db)
    db.set_many([("ann", {city: text}), ("bob", {city: "Bern"})])
    with pytest.raises(SchemaError, match=says):
        index.backfill(db)
    wrong, missing = index.check(db.snapshot())
    assert re.search(says, wrong)
    assert missing == "row 'bob' is missing for 'Bern'"


def test_backfill_writes_lost_entries_anew_and_removes_stray_ones(
    db: Database, index: Index[str, str, str]
) -> None:
    db.set_many([("ann", {city: "Rome"}), ("bob", {city: "Bern"})])
    index.backfill(db)
    entries = index.table.column("entry", codecs.raw)
    _, rome = [row.key for row in db.snapshot().scan(index.table, prefix=b"i")]
    with db.transaction() as tx:  # as a tool does that knows nothing of indexes
        tx.delete(rome, entries)
        tx.set(rome.replace(b"Rome", b"Oslo"), entries, b"")
    assert len(index.check(db.snapshot())) == 2
    index.backfill(db)
    with db.snapshot() as snapshot:
        assert index.check(snapshot) == []
        assert index.range(snapshot) == [("Bern", "bob"), ("Rome", "ann")]


def test_rows_may_have_more_values_together_than_can_be_read_or_written_at_once() -> None:
    limits = Limits(get_many_cells_max=20_000, transaction_cells_max=20_000)
    index = by_words(lambda text: text.split())
    text = " ".join(str(number) for number in range(201))
    with percolator.testing.connect(limits=limits) as db:
        db.create_table(people)
        db.set_many((f"person {n}", {city: text}) for n in range(100))
        index.create(db)
        assert len(index.check(db.snapshot())) == 1_000, "as many as it lists"
        assert index.backfill(db) == 100
        with db.snapshot() as snapshot:
            assert index.check(snapshot) == []
            assert len(index.find(snapshot, "200")) == 100


def test_what_a_second_backfill_costs_does_not_depend_on_how_many_values_rows_have(
    db: Database,
) -> None:
    asked: list[str] = []

    def words(text: str) -> list[str]:
        asked.append(text)
        return text.split()

    index = by_words(words)
    text = " ".join(str(number) for number in range(100))
    db.set_many((f"person {n}", {city: text}) for n in range(10))
    index.create(db)
    index.backfill(db)
    asked.clear()
    index.backfill(db)
    assert len(asked) == 20, "for each row with the column, and for each that the index knows"


@pytest.mark.parametrize("returned", [5, None, "rome", b"rome"])
def test_values_that_are_no_values_are_refused_by_name(db: Database, returned: Any) -> None:
    index = by_words(lambda _: returned)
    index.create(db)
    db.set_many([("ann", {city: "Rome"})])
    says = f"index 'by word', row 'ann': values returned {returned!r}, not several values"
    with pytest.raises(SchemaError, match=says):
        index.backfill(db)


def test_an_index_that_is_kept_by_an_observer_indexes_older_rows_by_itself(
    db: Database,
) -> None:
    index = by_city()
    db.set_many([("ann", {city: "Rome"}), ("bob", {city: "Bern"})])
    index.create(db)
    percolator.testing.run_observers(db, [index.observer()])
    with db.snapshot() as snapshot:
        assert index.range(snapshot) == [("Bern", "bob"), ("Rome", "ann")]
        assert index.check(snapshot) == []


HOUR = 3_600.0
DAY = timedelta(days=1)
city_of_index_ttls = accounts.column("city", codecs.text)


def _index() -> Index[str, str, str]:
    return Index("by city", on=city_of_index_ttls, value=codecs.text)


async def _set(db: AsyncDatabase, index: Index[str, str, str]) -> None:
    async with db.transaction() as tx:
        await tx.set("ann", city_of_index_ttls, "Rome")
    async with db.run_observers([index.observer()]):
        await db.wait_for_observers()


async def _require_agreement(
    db: AsyncDatabase, index: Index[str, str, str], found: list[str]
) -> None:
    async with db.snapshot() as snapshot:
        assert await index.find(snapshot, "Rome") == found
        assert await index.check(snapshot) == []


async def test_a_value_that_is_written_again_stays_in_the_index_as_long_as_it_lives() -> None:
    index = _index()
    async with connected() as (db, _):
        await index.create(db)
        await db.set_ttl(city_of_index_ttls, DAY)
        for name in ("entry", "indexed"):
            await db.set_ttl(index.table.column(name, codecs.raw), DAY)
        for _ in range(3):
            await _set(db, index)
            await asyncio.sleep(18 * HOUR)
            await _require_agreement(db, index, ["ann"])
        await asyncio.sleep(18 * HOUR)
        await _require_agreement(db, index, [])


async def test_a_worker_that_has_kept_the_index_before_its_entries_expired_renews_them() -> None:
    index = _index()
    async with connected_to(DistantMaster) as (db, cluster):
        await index.create(db)
        await _set(db, index)
        await asyncio.sleep(1.0)
        for table, name in (("accounts", b"city"), ("by city", b"entry"), ("by city", b"indexed")):
            ttl = ColumnTtl(column=name, ttl_milliseconds=86_400_000)
            await cluster.set_ttls(SetTtlsRequest(table=table, ttls=[ttl]))  # another program
        await asyncio.sleep(18 * HOUR)
        await _set(db, index)
        await asyncio.sleep(18 * HOUR)
        await _require_agreement(db, index, ["ann"])


visits = people.column("visits", codecs.integer)
sums = CombineQueue("sums", key=codecs.text, value=codecs.integer, combine=sum)
out = ExportQueue("out", key=codecs.text, value=codecs.integer)
counter = ShardedCounter("counter")


class SuspendingCluster(ClusterInMemory):
    """Looks tables up with a suspension, as over a network."""

    async def describe_table(
        self, request: master_pb2.DescribeTableRequest
    ) -> master_pb2.DescribeTableResponse:
        await asyncio.sleep(0)
        return await super().describe_table(request)


@pytest.fixture(name="async_db")
@asynccontextmanager
async def fresh_client() -> AsyncIterator[AsyncDatabase]:
    clock = VirtualClock(asyncio.get_running_loop())
    world = World(clock, InProcessNetwork({ADDRESS: SuspendingCluster(clock)}), random.Random(1))
    async with await connect_to(world, [ADDRESS], Limits(), RetryPolicy()) as first:
        await first.create_table(people)
        for recipe in (sums, out, counter):
            await recipe.create(first)
        async with await connect_to(world, [ADDRESS], Limits(), RetryPolicy()) as fresh:
            yield fresh


async def test_gathered_additions_to_a_queue_all_count(async_db: AsyncDatabase) -> None:
    async with async_db.transaction() as tx:
        await asyncio.gather(*(sums.add(tx, "home", 1) for _ in range(10)))
    assert await sums.get(async_db.snapshot(), "home") == 10


async def test_gathered_exports_are_all_put(async_db: AsyncDatabase) -> None:
    async with async_db.transaction() as tx:
        await asyncio.gather(*(out.put(tx, "home", number) for number in range(10)))
    assert await out.pending(async_db.snapshot()) == 10


async def test_gathered_additions_to_a_sharded_counter_all_count(async_db: AsyncDatabase) -> None:
    async with async_db.transaction() as tx:
        await asyncio.gather(*(counter.add(tx, "home", 1) for _ in range(10)))
    async with async_db.snapshot() as snapshot:
        assert await counter.value(snapshot, "home") == 10
        assert await counter.items(snapshot) == {"home": 10}


async def test_gathered_increments_of_a_cell_all_count(async_db: AsyncDatabase) -> None:
    async with async_db.transaction() as tx:
        sums_seen = await asyncio.gather(*(tx.increment("ann", visits) for _ in range(10)))
    assert sums_seen == list(range(1, 11))
    assert await async_db.get("ann", visits) == 10
