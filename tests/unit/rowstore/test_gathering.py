"""Reads that begin together share a call; each is answered for itself."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import InvalidArgument, SnapshotTooOld
from percolator.routing.cells import FoundCell, RowRequest, RowResult
from percolator.rowstore.collection import Bounds, Collected, RowCollector
from percolator.rowstore.reads import ROWS_MAX
from percolator.v1.tabletserver_pb2 import RowRead
from tests.unit.rowstore.model_store import TABLE, TIMES, ModelStore, at
from tests.unit.rowstore.test_calls import CountedStore, commits, prewrites, written

ROWS = [b"a", b"b", b"c"]


async def _opened() -> ModelStore:
    rows = await ModelStore().opened()
    for row in ROWS[:2]:
        await written(rows, row, [b"0"])
    return rows


async def _read(rows: ModelStore, row: bytes, number: int = 9) -> object:
    return await rows.cells.read_cell(TABLE, row, b"0", at(number), rows.deadline)


async def test_reads_at_one_timestamp_that_begin_together_are_one_call() -> None:
    rows = await _opened()
    store = CountedStore(rows)
    found = await asyncio.gather(*(_read(rows, row) for row in [*ROWS, b"a"]))
    cell = FoundCell(at(2), b"v")
    assert found == [cell, cell, None, cell]
    assert store.calls == ["read"]


async def test_reads_of_several_transactions_are_one_call() -> None:
    rows = await _opened()
    store = CountedStore(rows)
    found = await asyncio.gather(_read(rows, b"a", 9), _read(rows, b"b", 5), _read(rows, b"c", 7))
    assert list(found) == [FoundCell(at(2), b"v"), FoundCell(at(2), b"v"), None]
    assert store.calls == ["read"]


@pytest.mark.parametrize("leads", [1, 9])
async def test_a_version_that_a_later_reader_sees_hides_none_from_an_earlier_one(
    leads: int,
) -> None:
    """The earlier one reads by itself, whoever leads: it sees what was there before."""
    rows = await _opened()
    await rows.cells.mutate(prewrites(at(5), b"a", [b"0"]), rows.deadline)
    await rows.cells.mutate(commits(at(5), at(6), b"a", [b"0"]), rows.deadline)
    store = CountedStore(rows)
    numbers = [leads, 3, 10 - leads]
    found = await asyncio.gather(*(_read(rows, b"a", number) for number in numbers))
    seen = {1: None, 3: FoundCell(at(2), b"v"), 9: FoundCell(at(6), b"v")}
    assert list(found) == [seen[number] for number in numbers]
    assert store.calls == ["read"] * 3


async def test_a_lock_above_a_readers_timestamp_is_in_nobody_elses_way() -> None:
    rows = await _opened()
    await rows.cells.mutate(prewrites(at(5), b"a", [b"0"]), rows.deadline)
    late, early = await asyncio.gather(_read(rows, b"a", 9), _read(rows, b"a", 3))
    assert isinstance(late, RowResult)
    assert early == FoundCell(at(2), b"v")


async def _columns(rows: ModelStore, number: int, passing: int = 0) -> dict[bytes, int]:
    """The commit timestamps of a row's cells, and 0 for those that are locked."""
    read = RowRead(row=b"a", all_columns=True, timestamp=at(number))
    if passing:
        read.passing.append(at(passing))
    (found,) = await rows.cells.read([RowRequest(TABLE, read)], rows.deadline)
    cells = {column: cell.commit_timestamp for column, cell in found.found.items()}
    return cells | {lock.column: 0 for lock in found.locks}


async def test_whole_rows_are_read_together_each_as_of_its_own_timestamp() -> None:
    rows = await _opened()
    await written(rows, b"a", [b"1"], since=5)
    await rows.cells.mutate(prewrites(at(7), b"a", [b"2"]), rows.deadline)
    store = CountedStore(rows)
    found = await asyncio.gather(
        _columns(rows, 9), _columns(rows, 4), _columns(rows, 9, passing=7), _columns(rows, 6)
    )
    newest = {b"0": at(2), b"1": at(6)}
    assert list(found) == [newest | {b"2": 0}, {b"0": at(2)}, newest, newest]
    assert store.calls == ["read", "read"], "one for all, and one for whom a version was hidden"


async def test_reads_of_different_columns_are_different_calls() -> None:
    rows = await _opened()
    store = CountedStore(rows)
    found = await asyncio.gather(_columns(rows, 9), _read(rows, b"a"))
    assert list(found) == [{b"0": at(2)}, FoundCell(at(2), b"v")]
    assert store.calls == ["read", "read"]


@pytest.mark.parametrize("order", [(9, 3), (3, 9)])
async def test_a_note_of_collection_refuses_only_those_below_it(order: tuple[int, int]) -> None:
    rows = await _opened()
    await written(rows, b"a", [b"0"], since=5)
    bounds = Bounds(at(8), at(8))
    await RowCollector(rows.store, TIMES, rows.world, rows.limits).collect(
        TABLE, bounds, Collected()
    )
    found = await asyncio.gather(
        *(_read(rows, b"a", number) for number in order), return_exceptions=True
    )
    told = dict(zip(order, found, strict=True))
    assert told[9] == FoundCell(at(6), b"v")
    assert isinstance(told[3], SnapshotTooOld)


async def test_if_the_call_fails_each_reads_for_itself() -> None:
    """The reason may be another's row, such as one that is too large to be read."""
    rows = await _opened()
    store = CountedStore(rows, InvalidArgument("response", "a row is too large"))
    found = await asyncio.gather(*(_read(rows, row) for row in ROWS))
    assert found == [FoundCell(at(2), b"v"), FoundCell(at(2), b"v"), None]
    assert store.calls == ["read"] * 4


async def test_a_read_that_fails_by_itself_is_not_repeated() -> None:
    rows = await _opened()
    store = CountedStore(rows, InvalidArgument("row", "refused"))
    with pytest.raises(InvalidArgument, match="row: refused"):
        await _read(rows, b"a")
    assert store.calls == ["read"]


async def test_nobody_waits_for_a_call_with_a_later_deadline() -> None:
    rows = await _opened()
    store = CountedStore(rows)
    some = [
        rows.cells.read_cell(TABLE, row, b"0", at(9), rows.deadline + seconds)
        for row, seconds in ((b"a", 0.0), (b"b", 1.0), (b"c", -1.0))
    ]
    assert await asyncio.gather(*some) == [FoundCell(at(2), b"v")] * 2 + [None]
    assert store.calls == ["read", "read"]


async def test_a_call_reads_a_limited_number_of_rows() -> None:
    rows = await _opened()
    store = CountedStore(rows)
    keys = [b"%d" % number for number in range(ROWS_MAX + 1)]
    assert await asyncio.gather(*(_read(rows, key) for key in keys)) == [None] * len(keys)
    assert store.calls == ["read", "read"]


@pytest.mark.parametrize("cancelled", [0, 1])
async def test_who_is_cancelled_takes_nobody_along(cancelled: int) -> None:
    rows = await _opened()
    reads = [asyncio.create_task(_read(rows, row)) for row in (b"a", b"b")]
    await asyncio.sleep(0)
    reads[cancelled].cancel()
    assert await reads[1 - cancelled] == FoundCell(at(2), b"v")
    with pytest.raises(asyncio.CancelledError):
        await reads[cancelled]
