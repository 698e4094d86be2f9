"""CombineQueue: exact at every snapshot, a chain of changes, no conflicts, any buckets."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import reduce
from random import Random
from typing import Any

import pytest

import percolator.testing
from percolator import Database, Transaction, aio, codecs, transactional
from percolator.errors import InvalidArgument, SchemaError, UsageError
from percolator.recipes import CombineQueue, KeyChange

ROWS = 7


def queue(buckets: int = 4, name: str = "sums") -> CombineQueue[str, int]:
    return CombineQueue(
        name,
        key=codecs.text,
        value=codecs.integer,
        combine=lambda values: sum(values) or None,
        buckets=buckets,
    )


@pytest.fixture
def db() -> Iterator[Database]:
    with percolator.testing.connect() as opened:
        yield opened


def add(db: Database, sums: CombineQueue[str, int], *pairs: tuple[str, int]) -> None:
    with db.transaction() as tx:
        for key, value in pairs:
            sums.add(tx, key, value)


def shown(db: Database, sums: CombineQueue[str, int]) -> dict[str, int]:
    with db.snapshot() as snapshot:
        return sums.items(snapshot)


def test_what_was_added_counts_before_and_after_it_is_combined(db: Database) -> None:
    sums = queue()
    sums.create(db)
    add(db, sums, ("a", 1), ("b", 2), ("a", 3))
    assert shown(db, sums) == {"a": 4, "b": 2}
    assert percolator.testing.run_observers(db, [sums.combiner()]) > 0
    assert shown(db, sums) == {"a": 4, "b": 2}
    add(db, sums, ("a", 10))
    with db.snapshot() as snapshot:
        assert sums.get(snapshot, "a") == 14
        assert sums.get(snapshot, "c") is None
        assert sums.get(snapshot, "c", 0) == 0
    assert percolator.testing.run_observers(db, [sums.combiner()]) == 1
    assert shown(db, sums) == {"a": 14, "b": 2}


def test_a_transaction_sees_what_it_has_added_itself(db: Database) -> None:
    sums = queue()
    sums.create(db)
    with db.transaction() as tx:
        sums.add(tx, "a", 1)
        sums.add(tx, "a", 1)
        assert sums.get(tx, "a") == 2
        tx.rollback()
    assert shown(db, sums) == {}


def test_changes_of_a_key_form_a_chain_and_a_value_of_none_is_no_value(db: Database) -> None:
    sums = queue()
    sums.create(db)
    seen: list[KeyChange[str, int]] = []

    @sums.changed
    async def note(tx: aio.Transaction, changes: Sequence[KeyChange[str, int]]) -> None:
        seen.extend(changes)

    for pairs in ([("a", 1), ("a", 2)], [("a", -1), ("a", 1)], [("a", -3)], [("a", 5)]):
        add(db, sums, *pairs)
        percolator.testing.run_observers(db, [note])
    assert seen == [("a", None, 3), ("a", 3, None), ("a", None, 5)]
    assert shown(db, sums) == {"a": 5}


def test_a_function_that_changes_the_first_value_it_is_given_loses_nothing(db: Database) -> None:
    def merged(values: Iterable[dict[str, int]]) -> dict[str, int]:
        return reduce(operator.ior, values)

    sets = CombineQueue("sets", key=codecs.text, value=codecs.json, combine=merged)
    sets.create(db)
    seen: list[KeyChange[str, dict[str, int]]] = []

    @sets.changed
    async def note(tx: aio.Transaction, changes: Sequence[KeyChange[str, Any]]) -> None:
        seen.extend(changes)

    for member in ("ann", "bob"):
        with db.transaction() as tx:
            sets.add(tx, "a", {member: 1})
        percolator.testing.run_observers(db, [note])
    with db.snapshot() as snapshot:
        assert sets.get(snapshot, "a") == {"ann": 1, "bob": 1}
    assert seen == [("a", None, {"ann": 1}), ("a", {"ann": 1}, {"ann": 1, "bob": 1})]


def test_a_function_may_go_through_the_values_twice(db: Database) -> None:
    def span(values: Iterable[list[int]]) -> list[int]:
        return [min(low for low, _ in values), max(high for _, high in values)]

    spans = CombineQueue("spans", key=codecs.text, value=codecs.json, combine=span)
    spans.create(db)
    for value, expected in ((7, [7, 7]), (3, [3, 7]), (9, [3, 9])):
        with db.transaction() as tx:
            spans.add(tx, "a", [value, value])
        with db.snapshot() as snapshot:
            assert spans.get(snapshot, "a") == expected
        percolator.testing.run_observers(db, [spans.combiner()])
        with db.snapshot() as snapshot:
            assert spans.get(snapshot, "a") == expected


def test_a_value_of_another_type_is_a_change_even_if_python_calls_it_equal(db: Database) -> None:
    newest = CombineQueue("newest", key=codecs.text, value=codecs.json, combine=lambda v: [*v][-1])
    newest.create(db)
    for value in (1, True):
        with db.transaction() as tx:
            newest.add(tx, "a", value)
        percolator.testing.run_observers(db, [newest.combiner()])
    with db.snapshot() as snapshot:
        assert newest.get(snapshot, "a") is True


def test_what_a_changed_observer_writes_is_in_the_transaction_that_combines(db: Database) -> None:
    sums, order = queue(), queue(name="how often each sum occurs")
    sums.create(db)
    order.create(db)

    @sums.changed(batch=2)
    def tell(tx: Transaction, changes: Sequence[KeyChange[str, int]]) -> None:
        for _, old, new in changes:
            if old is not None:
                order.add(tx, str(old), -1)
            if new is not None:
                order.add(tx, str(new), 1)

    chance = Random(3)
    for _ in range(20):
        add(db, sums, *((f"key {chance.randrange(6)}", 1) for _ in range(4)))
        if chance.random() < 0.3:
            percolator.testing.run_observers(db, [tell, order.combiner()])
    percolator.testing.run_observers(db, [tell, order.combiner()])
    found = shown(db, sums)
    assert sum(found.values()) == 80
    assert shown(db, order) == Counter(map(str, found.values()))


def test_an_observer_that_fails_combines_nothing(db: Database) -> None:
    sums = queue()
    sums.create(db)

    @sums.changed
    def fail(tx: Transaction, changes: object) -> None:
        raise ValueError("no")

    add(db, sums, ("a", 1))
    with pytest.raises(ValueError, match="no"):
        percolator.testing.run_observers(db, [fail])
    assert shown(db, sums) == {"a": 1}
    assert percolator.testing.run_observers(db, [sums.combiner()]) == 1


def test_an_error_of_the_function_that_combines_names_the_key(db: Database) -> None:
    def below_ten(values: Iterable[int]) -> int:
        if (total := sum(values)) >= 10:
            raise ValueError("too much")
        return total

    sums = CombineQueue("sums", key=codecs.text, value=codecs.integer, combine=below_ten, buckets=1)
    sums.create(db)
    add(db, sums, ("a", 1), ("b", 9), ("b", 3), ("c", 5))
    with pytest.raises(ValueError, match="too much") as met_by_an_observer:
        percolator.testing.run_observers(db, [sums.combiner()])
    with pytest.raises(ValueError, match="too much") as met_by_a_reader, db.snapshot() as snapshot:
        sums.items(snapshot)
    for met in (met_by_an_observer, met_by_a_reader):
        assert "combining the values of key 'b' of 'sums'" in met.value.__notes__


def test_a_function_that_ran_nothing_is_a_failure(db: Database) -> None:
    sums = queue()
    sums.create(db)

    async def asynchronous(changes: object) -> None:
        """Never runs: what calls it is blocking."""

    @sums.changed
    def forgets_to_await(tx: Transaction, changes: object) -> Any:
        return asynchronous(changes)

    add(db, sums, ("a", 1))
    with pytest.raises(UsageError, match="ran nothing"):
        percolator.testing.run_observers(db, [forgets_to_await])


def test_more_than_a_batch_is_combined_in_several_runs(db: Database) -> None:
    sums = queue(buckets=1)
    sums.create(db)
    for number in range(25):
        add(db, sums, (f"key {number % 3}", 1))
    assert percolator.testing.run_observers(db, [sums.combiner(batch=10)]) == 3
    assert shown(db, sums) == {"key 0": 9, "key 1": 8, "key 2": 8}


def test_keys_with_more_bytes_than_a_transaction_may_write_are_combined_in_several_runs(
    db: Database,
) -> None:
    """What is added may be small, and what it is added to large, such as the union of many sets."""
    letters = CombineQueue(
        "letters",
        key=codecs.ordered_integer,
        value=codecs.raw,
        combine=lambda values: bytes(sorted(b"".join(values))),
        buckets=1,
    )
    letters.create(db)
    keys, large = range(17), bytes(4 * 1024 * 1024 - 1)
    for key in keys:
        with db.transaction() as tx:
            letters.add(tx, key, large)
    percolator.testing.run_observers(db, [letters.combiner()])
    with db.transaction() as tx:
        for key in keys:
            letters.add(tx, key, b"a")
    assert percolator.testing.run_observers(db, [letters.combiner()]) == 4
    with db.snapshot() as snapshot:
        assert {key: value[-2:] for key, value in letters.items(snapshot).items()} == dict.fromkeys(
            keys, b"\x00a"
        )


@pytest.mark.parametrize("tablets", [1, 5])
def test_programs_with_different_numbers_of_buckets_share_a_queue(
    db: Database, tablets: int
) -> None:
    few, many = queue(buckets=3), queue(buckets=100)
    few.create(db, tablets=tablets, retention=timedelta(minutes=5))
    for number in range(60):
        add(db, few if number % 2 else many, (f"key {number % 7}", number))
    percolator.testing.run_observers(db, [many.combiner()])
    expected = {f"key {key}": sum(range(60)[key::7]) for key in range(7)}
    assert shown(db, few) == shown(db, many) == expected
    with db.snapshot() as snapshot:
        left = list(snapshot.scan(few.table, columns=[few.table.column("entry", codecs.raw)]))
    assert left == []


def test_a_snapshot_of_the_past_is_exact(db: Database) -> None:
    sums = queue()
    sums.create(db)
    moments = []
    for _ in range(5):
        add(db, sums, ("a", 1))
        moments.append(db.timestamp())
        percolator.testing.run_observers(db, [sums.combiner()])
        moments.append(db.timestamp())
    found = []
    for moment in moments:
        with db.snapshot(at=moment) as snapshot:
            found.append(sums.get(snapshot, "a"))
    assert found == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_adders_of_one_key_do_not_conflict(db: Database) -> None:
    sums = queue()
    sums.create(db)
    transactions = [db.transaction() for _ in range(10)]
    for tx in transactions:
        sums.add(tx, "a", 1)
    for tx in transactions:
        tx.commit()
    assert shown(db, sums) == {"a": 10}


async def test_asyncio_has_the_same_methods() -> None:
    sums = queue()
    async with percolator.testing.connect_async() as db:
        await sums.create(db)
        await sums.create(db, exist_ok=True)

        @transactional
        async def count(tx: aio.Transaction) -> None:
            await sums.add(tx, "a", 1)

        await count(db)
        await count(db)
        await percolator.testing.run_observers_async(db, [sums.combiner()])
        async with db.snapshot() as snapshot:
            assert await sums.get(snapshot, "a") == 2
            assert await sums.items(snapshot) == {"a": 2}


def test_workers_combine_while_threads_add(db: Database) -> None:
    sums = queue(buckets=2)
    sums.create(db)
    with db.run_observers([sums.combiner()]):
        for number in range(200):
            add(db, sums, (f"key {number % 5}", 1))
        db.wait_for_observers()
    assert shown(db, sums) == {f"key {number}": 40 for number in range(5)}


def test_bad_arguments_are_refused_by_name(db: Database) -> None:
    with pytest.raises(InvalidArgument, match="buckets"):
        queue(buckets=0)
    with pytest.raises(InvalidArgument, match="buckets: at most 4096"):
        queue(buckets=5000)
    with pytest.raises(InvalidArgument, match="batch"):
        queue().combiner(batch=0)
    with pytest.raises(InvalidArgument, match="tablets"):
        queue().create(db, tablets=5000)
    with pytest.raises(InvalidArgument, match="combine: expected a function"):
        CombineQueue("x", key=codecs.text, value=codecs.integer, combine=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="key: expected a codec"):
        CombineQueue("x", key=codecs.integer, value=codecs.integer, combine=sum)  # type: ignore[arg-type]
    sums = queue()
    sums.create(db)
    with db.transaction() as tx:
        with pytest.raises(SchemaError, match="table 'sums', key 7: expected str, got int"):
            sums.add(tx, 7, 1)  # type: ignore[call-overload]
        with pytest.raises(SchemaError, match="expected int, got str"):
            sums.add(tx, "a", "1")  # type: ignore[call-overload]
        with pytest.raises(UsageError, match="expected a transaction, got Database"):
            sums.add(db, "a", 1)  # type: ignore[call-overload]
