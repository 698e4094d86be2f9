"""ExportQueue: committed values, in the order of commits, at least once."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import percolator.testing
from percolator import Database, codecs
from percolator.errors import InvalidArgument, UsageError
from percolator.recipes import Export, ExportFile, ExportQueue, export_queue
from percolator.testing.pytest_plugin import percolator_db

__all__ = ["percolator_db"]


def queue(buckets: int = 4) -> ExportQueue[str, int]:
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
    out, received = queue(), Receiver()
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
    with percolator_db.snapshot() as snapshot:
        assert out.pending(snapshot) == 1
    percolator.testing.run_observers(percolator_db, [out.exporter()(received)])
    assert received.by_key == {"a": [2, 4, 1], "b": [3]}
    with percolator_db.snapshot() as snapshot:
        assert out.pending(snapshot) == 0


def test_what_is_refused_since_there_is_no_observer_is_not_put(percolator_db: Database) -> None:
    out = queue()
    percolator_db.create_table(out.table)  # and not out.create
    with percolator_db.transaction() as tx, pytest.raises(UsageError, match="no weak observer"):
        out.put(tx, "a", 1)
    with percolator_db.snapshot() as snapshot:
        assert out.pending(snapshot) == 0


def test_one_snapshot_is_exported_in_the_order_of_commits(percolator_db: Database) -> None:
    out, received = queue(), Receiver()
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
    out, received = queue(buckets=1), Receiver()
    out.create(percolator_db)
    for number in range(50):
        put(percolator_db, out, (f"key {number % 3}", number))
    percolator.testing.run_observers(percolator_db, [out.exporter(batch=4)(received)])
    assert received.by_key == {f"key {key}": list(range(key, 50, 3)) for key in range(3)}
    assert max(map(len, received.calls)) == 4


def test_what_an_exporter_did_not_finish_comes_again(percolator_db: Database) -> None:
    out, calls = queue(), list[Sequence[Export[str, int]]]()
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


def test_programs_with_different_numbers_of_buckets_share_a_queue(percolator_db: Database) -> None:
    few, many, received = queue(2), queue(50), Receiver()
    few.create(percolator_db)
    for number in range(40):
        put(percolator_db, few if number % 2 else many, (f"key {number % 5}", number))
    percolator.testing.run_observers(percolator_db, [many.exporter()(received)])
    assert received.by_key == {f"key {key}": list(range(key, 40, 5)) for key in range(5)}


def test_an_exporter_that_ran_nothing_has_failed(percolator_db: Database) -> None:
    out = queue()
    out.create(percolator_db)

    async def asynchronous(exports: object) -> None:
        """Never runs: what calls it is blocking."""

    @out.exporter()
    def forgets_to_await(exports: object) -> Any:
        return asynchronous(exports)

    put(percolator_db, out, ("a", 1))
    with pytest.raises(UsageError, match="ran nothing"):
        percolator.testing.run_observers(percolator_db, [forgets_to_await])


async def test_asyncio_has_the_same_methods() -> None:
    out, received = queue(), Receiver()
    async with percolator.testing.connect_async() as db:
        await out.create(db)
        async with db.transaction() as tx:
            await out.put(tx, "a", 1)
        async with db.snapshot() as snapshot:
            assert await out.pending(snapshot) == 1

        @out.exporter()
        async def send(exports: Sequence[Export[str, int]]) -> None:
            received(exports)

        await percolator.testing.run_observers_async(db, [send])
    assert received.by_key == {"a": [1]}


def test_bad_arguments_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="batch"):
        queue().exporter(batch=0)
    with pytest.raises(InvalidArgument, match="batch: at most"):
        queue().exporter(batch=1_000_000)
    with pytest.raises(InvalidArgument, match="function: expected a function"):
        queue().exporter()(3)  # type: ignore[arg-type]


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
