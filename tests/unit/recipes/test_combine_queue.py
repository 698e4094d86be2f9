"""CombineQueue: exact at every snapshot, a chain of changes, no conflicts, any buckets."""

from __future__ import annotations

import json
import operator
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import reduce
from pathlib import Path
from random import Random
from typing import Any

import pytest

import percolator.testing
from percolator import Database, Timestamp, Transaction, aio, codecs, transactional
from percolator.errors import InvalidArgument, SchemaError, UsageError
from percolator.recipes import (
    CombineQueue,
    Export,
    ExportFile,
    ExportQueue,
    KeyChange,
    ShardedCounter,
    export_queue,
)
from percolator.testing.pytest_plugin import percolator_db

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


@pytest.fixture
def sums(db: Database) -> CombineQueue[str, int]:
    sums = queue()
    sums.create(db)
    return sums


def add(db: Database, sums: CombineQueue[str, int], *pairs: tuple[str, int]) -> None:
    with db.transaction() as tx:
        for key, value in pairs:
            sums.add(tx, key, value)


def shown(db: Database, sums: CombineQueue[str, int]) -> dict[str, int]:
    return sums.items(db.snapshot())


def test_what_was_added_counts_before_and_after_it_is_combined(
    db: Database, sums: CombineQueue[str, int]
) -> None:
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


def test_a_transaction_sees_what_it_has_added_itself(
    db: Database, sums: CombineQueue[str, int]
) -> None:
    with db.transaction() as tx:
        sums.add(tx, "a", 1)
        sums.add(tx, "a", 1)
        assert sums.get(tx, "a") == 2
        tx.rollback()
    assert shown(db, sums) == {}


def test_changes_of_a_key_form_a_chain_and_a_value_of_none_is_no_value(
    db: Database, sums: CombineQueue[str, int]
) -> None:
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
    assert sets.get(db.snapshot(), "a") == {"ann": 1, "bob": 1}
    assert seen == [("a", None, {"ann": 1}), ("a", {"ann": 1}, {"ann": 1, "bob": 1})]


def test_a_function_may_go_through_the_values_twice(db: Database) -> None:
    def span(values: Iterable[list[int]]) -> list[int]:
        return [min(low for low, _ in values), max(high for _, high in values)]

    spans = CombineQueue("spans", key=codecs.text, value=codecs.json, combine=span)
    spans.create(db)
    for value, expected in ((7, [7, 7]), (3, [3, 7]), (9, [3, 9])):
        with db.transaction() as tx:
            spans.add(tx, "a", [value, value])
        assert spans.get(db.snapshot(), "a") == expected
        percolator.testing.run_observers(db, [spans.combiner()])
        assert spans.get(db.snapshot(), "a") == expected


def test_a_value_of_another_type_is_a_change_even_if_python_calls_it_equal(db: Database) -> None:
    newest = CombineQueue("newest", key=codecs.text, value=codecs.json, combine=lambda v: [*v][-1])
    newest.create(db)
    for value in (1, True):
        with db.transaction() as tx:
            newest.add(tx, "a", value)
        percolator.testing.run_observers(db, [newest.combiner()])
    assert newest.get(db.snapshot(), "a") is True


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


def test_an_observer_that_fails_combines_nothing(
    db: Database, sums: CombineQueue[str, int]
) -> None:

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


def test_a_function_that_ran_nothing_is_a_failure(
    db: Database, sums: CombineQueue[str, int]
) -> None:

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
    """An addition may be small, and its sum large, such as the union of many sets."""
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
    assert {
        key: value[-2:] for key, value in letters.items(db.snapshot()).items()
    } == dict.fromkeys(keys, b"\x00a")


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
    left = list(db.snapshot().scan(few.table, columns=[few.table.column("entry", codecs.raw)]))
    assert left == []


def test_a_snapshot_of_the_past_is_exact(db: Database, sums: CombineQueue[str, int]) -> None:
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


def test_adders_of_one_key_do_not_conflict(db: Database, sums: CombineQueue[str, int]) -> None:
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


BAD_ARGUMENTS: list[tuple[str, Callable[[Database], object]]] = [
    ("buckets", lambda db: queue(buckets=0)),
    ("buckets: at most 4096", lambda db: queue(buckets=5000)),
    ("batch", lambda db: queue().combiner(batch=0)),
    ("tablets", lambda db: queue().create(db, tablets=5000)),
    (
        "combine: expected a function",
        lambda db: CombineQueue("x", key=codecs.text, value=codecs.integer, combine=3),  # type: ignore[arg-type]
    ),
    (
        "key: expected a codec",
        lambda db: CombineQueue("x", key=codecs.integer, value=codecs.integer, combine=sum),  # type: ignore[arg-type]
    ),
    ("batch", lambda db: exporting().exporter(batch=0)),
    ("batch: at most", lambda db: exporting().exporter(batch=1_000_000)),
    ("function: expected a function", lambda db: exporting().exporter()(3)),  # type: ignore[arg-type]
    ("shards", lambda db: ShardedCounter("visits", shards=0)),
    ("shards: at most 65536", lambda db: ShardedCounter("visits", shards=100_000)),
]


@pytest.mark.parametrize(("says", "call"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused_by_name(
    db: Database, says: str, call: Callable[[Database], object]
) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call(db)


def test_what_fits_no_queue_is_refused_by_name(db: Database, sums: CombineQueue[str, int]) -> None:
    with db.transaction() as tx:
        with pytest.raises(SchemaError, match="table 'sums', key 7: expected str, got int"):
            sums.add(tx, 7, 1)  # type: ignore[call-overload]
        with pytest.raises(SchemaError, match="expected int, got str"):
            sums.add(tx, "a", "1")  # type: ignore[call-overload]
        with pytest.raises(UsageError, match="expected a transaction, got Database"):
            sums.add(db, "a", 1)  # type: ignore[call-overload]


# ExportQueue: committed values, in the order of commits, at least once.

__all__ = ["percolator_db"]


def exporting(buckets: int = 4) -> ExportQueue[str, int]:
    return ExportQueue("out", key=codecs.text, value=codecs.integer, buckets=buckets)


def put(db: Database, out: ExportQueue[str, int], *pairs: tuple[str, int]) -> None:
    with db.transaction() as tx:
        for key, value in pairs:
            out.put(tx, key, value)


class Receiver:
    """Notes what it is given, and that it is in order."""

    def __init__(self) -> None:
        self.calls: list[Sequence[Export[str, int]]] = []

    def __call__(self, exports: Sequence[Export[str, int]]) -> None:
        self.calls.append(exports)

    @property
    def by_key(self) -> dict[str, list[int]]:
        found = defaultdict(list)
        last: dict[str, int] = {}
        for key, sequence, value in (export for call in self.calls for export in call):
            assert sequence > last.get(key, -1)
            last[key] = sequence
            found[key].append(value)
        return dict(found)


def test_committed_values_arrive_once_in_the_order_of_commits(percolator_db: Database) -> None:
    out, received = exporting(), Receiver()
    out.create(percolator_db, tablets=3)
    early = percolator_db.transaction()
    out.put(early, "a", 1)
    put(percolator_db, out, ("a", 2), ("b", 3), ("a", 4))
    percolator.testing.run_observers(percolator_db, [out.exporter()(received)])
    assert received.by_key == {"a": [2, 4], "b": [3]}
    early.commit()  # it began first, and comes last
    never = percolator_db.transaction()
    out.put(never, "a", 5)
    never.rollback()
    assert out.pending(percolator_db.snapshot()) == 1
    percolator.testing.run_observers(percolator_db, [out.exporter()(received)])
    assert received.by_key == {"a": [2, 4, 1], "b": [3]}
    assert out.pending(percolator_db.snapshot()) == 0


def test_what_is_refused_since_there_is_no_observer_is_not_put(percolator_db: Database) -> None:
    out = exporting()
    percolator_db.create_table(out.table)  # and not out.create
    with percolator_db.transaction() as tx, pytest.raises(UsageError, match="no weak observer"):
        out.put(tx, "a", 1)
    assert out.pending(percolator_db.snapshot()) == 0


def test_one_snapshot_is_exported_in_the_order_of_commits(percolator_db: Database) -> None:
    out, received = exporting(), Receiver()
    out.create(percolator_db)
    transactions = [percolator_db.transaction() for _ in range(8)]
    for number, tx in enumerate(transactions):
        out.put(tx, "a", number)
    for number in (3, 7, 0, 1, 6, 2, 5, 4):
        transactions[number].commit()
    percolator.testing.run_observers(percolator_db, [out.exporter(batch=3)(received)])
    assert received.by_key == {"a": [3, 7, 0, 1, 6, 2, 5, 4]}
    assert [len(call) for call in received.calls] == [3, 3, 2]


def test_more_than_a_batch_comes_in_several_calls(percolator_db: Database) -> None:
    out, received = exporting(buckets=1), Receiver()
    out.create(percolator_db)
    for number in range(50):
        put(percolator_db, out, (f"key {number % 3}", number))
    percolator.testing.run_observers(percolator_db, [out.exporter(batch=4)(received)])
    assert received.by_key == {f"key {key}": list(range(key, 50, 3)) for key in range(3)}
    assert max(map(len, received.calls)) == 4


def test_what_an_exporter_did_not_finish_comes_again(percolator_db: Database) -> None:
    out, calls = exporting(), list[Sequence[Export[str, int]]]()
    out.create(percolator_db)

    @out.exporter()
    async def send(exports: Sequence[Export[str, int]]) -> None:
        calls.append(exports)
        if len(calls) == 1:
            raise ValueError("the line is down")

    put(percolator_db, out, ("a", 1))
    with pytest.raises(ValueError, match="the line is down"):
        percolator.testing.run_observers(percolator_db, [send])
    put(percolator_db, out, ("a", 2))
    percolator.testing.run_observers(percolator_db, [send])
    first, second = calls
    assert second[0] == first[0]
    assert [one.value for one in second] == [1, 2]


def test_programs_with_different_numbers_of_buckets_share_an_export_queue(
    percolator_db: Database,
) -> None:
    few, many, received = exporting(2), exporting(50), Receiver()
    few.create(percolator_db)
    for number in range(40):
        put(percolator_db, few if number % 2 else many, (f"key {number % 5}", number))
    percolator.testing.run_observers(percolator_db, [many.exporter()(received)])
    assert received.by_key == {f"key {key}": list(range(key, 40, 5)) for key in range(5)}


def test_an_exporter_that_ran_nothing_has_failed(percolator_db: Database) -> None:
    out = exporting()
    out.create(percolator_db)

    async def asynchronous(exports: object) -> None:
        """Never runs: what calls it is blocking."""

    @out.exporter()
    def forgets_to_await(exports: object) -> Any:
        return asynchronous(exports)

    put(percolator_db, out, ("a", 1))
    with pytest.raises(UsageError, match="ran nothing"):
        percolator.testing.run_observers(percolator_db, [forgets_to_await])


async def test_no_more_values_of_a_key_are_held_than_a_call_can_be_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export_queue, "BATCH_BYTES", 100)
    out = ExportQueue("out", key=codecs.text, value=codecs.raw, buckets=1)
    calls: list[Sequence[Export[str, bytes]]] = []

    async def note(exports: Sequence[Export[str, bytes]]) -> None:
        calls.append(exports)

    async with percolator.testing.connect_async() as db:
        await out.create(db)
        async with db.transaction() as tx:
            for number in range(50):
                await out.put(tx, "a", bytes([number]) * 40)
        async with db.transaction() as tx:
            bucket = out._rows.bucket(out.key_bytes("a"))
            held = [kept.first() async for _, kept in out._by_key(tx, bucket, 1_000)]
        assert [len(entries) for entries in held] == [4]
        await percolator.testing.run_observers_async(db, [out.exporter()(note)])
    assert [one.value[0] for call in calls for one in call] == list(range(50))
    assert {len(call) for call in calls} == {3, 2}


def exports(*pairs: tuple[str, int]) -> list[Export[str, int]]:
    return [Export(key, sequence, sequence * 10) for key, sequence in pairs]


def lines(path: Path) -> list[tuple[str, int, int]]:
    found = map(json.loads, path.read_text().splitlines())
    return [(one["key"], one["sequence"], one["value"]) for one in found]


def test_what_is_in_the_file_is_not_appended_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    file = ExportFile(path)
    assert file.append(exports(("a", 1), ("b", 1), ("a", 3))) == 3
    assert file.append(exports(("a", 1), ("a", 3), ("a", 4))) == 1
    assert ExportFile(path).append(exports(("b", 1), ("a", 4), ("b", 2), ("b", 2))) == 1
    assert file.append(exports(("b", 2))) == 0
    expected = [("a", 1), ("b", 1), ("a", 3), ("a", 4), ("b", 2)]
    assert lines(path) == [(key, number, number * 10) for key, number in expected]


def test_a_line_that_was_left_half_written_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    ExportFile(path).append(exports(("a", 1), ("a", 2), ("b", 1)))
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        ExportFile(path).append(exports(("a", 1), ("a", 2), ("b", 1)))
        assert path.read_bytes() == whole


def test_an_open_file_notices_what_another_one_appends_and_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = ExportFile(path), ExportFile(path)
    for number in range(10):
        (first if number % 2 else second).append(exports(("a", number), ("a", number + 1)))
    assert [sequence for _, sequence, _ in lines(path)] == list(range(11))
    path.rename(tmp_path / "old.jsonl")
    first.append(exports(("a", 11)))
    assert [sequence for _, sequence, _ in lines(path)] == [11]


def test_an_open_file_notices_that_it_was_emptied(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = ExportFile(path), ExportFile(path)
    first.append(exports(("a", 1), ("a", 2)))
    path.write_bytes(b"")  # as programs do that rotate logs by copying them
    second.append(exports(("a", 3)))
    assert first.append(exports(("a", 3), ("a", 4))) == 1
    assert [sequence for _, sequence, _ in lines(path)] == [3, 4]


def test_what_another_process_wrote_and_left_is_made_durable_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    synced: list[str] = []

    def sync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "fsync", sync)
    ExportFile(path).append(exports(("a", 1)))
    assert synced == [tmp_path.name, "out.jsonl"]
    synced.clear()
    file = ExportFile(path)
    assert file.append(exports(("a", 1))) == 0
    assert synced == [tmp_path.name, "out.jsonl"]
    assert file.append(exports(("a", 1))) == 0
    assert len(synced) == 2, "what is durable is not written out again"


def test_threads_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    files = [ExportFile(path), ExportFile(path)]
    with ThreadPoolExecutor(4) as threads:
        work = [
            threads.submit(files[number % 2].append, exports((f"key {number % 4}", number // 8)))
            for number in range(80)
        ]
        for one in work:
            one.result()
    for key in range(4):
        found = [sequence for name, sequence, _ in lines(path) if name == f"key {key}"]
        assert found == sorted(set(found))
        assert found[-1] == 9


def test_what_is_no_export_is_refused_and_nothing_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    file = ExportFile(path)
    with pytest.raises(InvalidArgument, match="value: not a JSON value"):
        file.append([Export("a", 1, 1), Export("a", 2, b"bytes")])
    assert not path.exists()
    path.write_text('{"key": "a", "sequence": 1, "value": 1}\nmine\n')
    with pytest.raises(InvalidArgument, match=r"out.jsonl, byte 40: this line is not an export"):
        file.append(exports(("a", 2)))
    assert path.read_text().endswith("mine\n")


# ShardedCounter: exact at every snapshot, with any number of shards.


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
    assert visits.value(percolator_db.snapshot(), "home") == 0
    committed = 0
    for tx in transactions:
        try:
            tx.commit()
        except percolator.ConflictError:
            continue
        committed += 1
    assert committed >= 15
    assert visits.value(percolator_db.snapshot(), "home") == committed


def test_bad_arguments_of_a_counter_are_refused_by_name(percolator_db: Database) -> None:
    visits = ShardedCounter("visits")
    visits.create(percolator_db)
    with percolator_db.transaction() as tx, pytest.raises(SchemaError, match="'visits', key 7"):
        visits.add(tx, 7, 1)  # type: ignore[call-overload]
    for amount in (None, "x", True, 1.5):
        with percolator_db.transaction() as tx:
            with pytest.raises(InvalidArgument, match="amount: expected an int, got "):
                visits.add(tx, "home", amount)  # type: ignore[arg-type]
            assert visits.items(tx) == {}
