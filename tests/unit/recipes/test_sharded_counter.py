"""ShardedCounter: exact at every snapshot, with any number of shards."""

from __future__ import annotations

import pytest

import percolator.testing
from percolator import Database, Timestamp, codecs
from percolator.errors import InvalidArgument, SchemaError
from percolator.recipes import ShardedCounter
from percolator.testing.pytest_plugin import percolator_db

__all__ = ["percolator_db"]


def test_a_counter_is_the_sum_of_what_was_added_at_every_snapshot(percolator_db: Database) -> None:
    visits = ShardedCounter("visits", shards=4)
    visits.create(percolator_db, tablets=3)
    moments: list[Timestamp] = []
    for amount in (5, -2, 10):
        with percolator_db.transaction() as tx:
            visits.add(tx, "home", amount)
            visits.add(tx, "home", 1)
            visits.add(tx, "help", 1)
            assert visits.value(tx, "help") == len(moments) + 1
        moments.append(percolator_db.timestamp())
    found = []
    for moment in moments:
        with percolator_db.snapshot(at=moment) as snapshot:
            found.append(visits.value(snapshot, "home"))
    assert found == [6, 5, 16]
    with percolator_db.snapshot() as snapshot:
        assert visits.value(snapshot, "no such page") == 0
        assert visits.items(snapshot) == {"home": 16, "help": 3}


def test_programs_with_different_numbers_of_shards_share_a_counter(percolator_db: Database) -> None:
    counters = [ShardedCounter("visits", key=codecs.raw, shards=shards) for shards in (1, 3, 64)]
    counters[0].create(percolator_db)
    for number in range(30):
        with percolator_db.transaction() as tx:
            counters[number % 3].add(tx, b"\x00", number)
    with percolator_db.snapshot() as snapshot:
        assert {one.value(snapshot, b"\x00") for one in counters} == {sum(range(30))}
        assert counters[0].items(snapshot) == {b"\x00": sum(range(30))}


def test_few_of_those_that_add_at_the_same_time_conflict(percolator_db: Database) -> None:
    visits = ShardedCounter("visits", shards=1_000)
    visits.create(percolator_db)
    transactions = [percolator_db.transaction() for _ in range(20)]
    for tx in transactions:
        visits.add(tx, "home", 1)
    with percolator_db.snapshot() as snapshot:
        assert visits.value(snapshot, "home") == 0
    committed = 0
    for tx in transactions:
        try:
            tx.commit()
        except percolator.ConflictError:
            continue
        committed += 1
    assert committed >= 15
    with percolator_db.snapshot() as snapshot:
        assert visits.value(snapshot, "home") == committed


async def test_asyncio_has_the_same_methods() -> None:
    visits = ShardedCounter("visits")
    async with percolator.testing.connect_async() as db:
        await visits.create(db)
        async with db.transaction() as tx:
            await visits.add(tx, "home", 2)
        async with db.snapshot() as snapshot:
            assert await visits.value(snapshot, "home") == 2
            assert await visits.items(snapshot) == {"home": 2}


def test_bad_arguments_are_refused_by_name(percolator_db: Database) -> None:
    with pytest.raises(InvalidArgument, match="shards"):
        ShardedCounter("visits", shards=0)
    with pytest.raises(InvalidArgument, match="shards: at most 65536"):
        ShardedCounter("visits", shards=100_000)
    visits = ShardedCounter("visits")
    visits.create(percolator_db)
    with percolator_db.transaction() as tx, pytest.raises(SchemaError, match="'visits', key 7"):
        visits.add(tx, 7, 1)  # type: ignore[call-overload]
    for amount in (None, "x", True, 1.5):
        with percolator_db.transaction() as tx:
            with pytest.raises(InvalidArgument, match="amount: expected an int, got "):
                visits.add(tx, "home", amount)  # type: ignore[arg-type]
            assert visits.items(tx) == {}
