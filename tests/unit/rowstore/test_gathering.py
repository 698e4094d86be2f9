"""Reads that begin together share a call; each is answered for itself."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import InvalidArgument
from percolator.routing.cells import FoundCell
from tests.unit.rowstore.model_store import TABLE, ModelStore, at
from tests.unit.rowstore.test_calls import CountedStore, written

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


async def test_reads_at_two_timestamps_are_two_calls() -> None:
    rows = await _opened()
    store = CountedStore(rows)
    found = await asyncio.gather(_read(rows, b"a", 9), _read(rows, b"a", 1))
    assert list(found) == [FoundCell(at(2), b"v"), None]
    assert store.calls == ["read", "read"]


async def test_all_who_share_a_call_are_told_what_it_has_raised() -> None:
    rows = await _opened()
    CountedStore(rows, InvalidArgument("row", "refused"))
    found = await asyncio.gather(*(_read(rows, row) for row in ROWS), return_exceptions=True)
    assert [str(error) for error in found] == ["row: refused"] * 3


@pytest.mark.parametrize("cancelled", [0, 1])
async def test_who_is_cancelled_takes_nobody_along(cancelled: int) -> None:
    rows = await _opened()
    reads = [asyncio.create_task(_read(rows, row)) for row in (b"a", b"b")]
    await asyncio.sleep(0)
    reads[cancelled].cancel()
    assert await reads[1 - cancelled] == FoundCell(at(2), b"v")
    with pytest.raises(asyncio.CancelledError):
        await reads[cancelled]
