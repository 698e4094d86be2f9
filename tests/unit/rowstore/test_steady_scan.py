"""A scan of a whole table outlasts lost messages, without beginning anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from percolator.bigtable.store import BigtableStore
from percolator.errors import DeadlineExceeded, InvalidArgument, Unavailable
from percolator.limits import Limits
from percolator.rowstore.layout import WRITES
from percolator.rowstore.patience import steady_scan
from percolator.rowstore.port import TIME_UNIT, RowChange, Selection, SetCell, StoredRow
from tests.unit.rowstore.model_store import PLACE, SECONDS, TABLE, ModelStore

KEYS = [b"row %d" % number for number in range(10)]
_LOST = "lost"


class Unsteady(BigtableStore):
    """Each scan ends as it is told to, after so many rows."""

    def __init__(self, rows: ModelStore, *ends: tuple[int, str | float | Exception]) -> None:
        super().__init__(rows.network, PLACE)
        self._ends = list(ends)
        self.began: list[bytes] = []
        self.asked: list[int] = []

    async def scan(
        self, table_id: int, first: bytes, *arguments: Any, **named: Any
    ) -> AsyncGenerator[StoredRow, None]:
        self.began.append(first)
        self.asked.append(named["rows_max"])
        after, end = self._ends.pop(0) if self._ends else (len(KEYS), 0.0)
        async for row in super().scan(table_id, first, *arguments, **named):
            if not after:
                await _ended(end)
            after -= 1
            yield row


async def _ended(end: str | float | Exception) -> None:
    if isinstance(end, Exception):
        raise end
    if end == _LOST:
        await asyncio.Event().wait()
    await asyncio.sleep(float(end))


async def _scanned(store: Unsteady, rows: ModelStore, rows_max: int = 0) -> Sequence[bytes]:
    stream = steady_scan(
        store, TABLE, [Selection(WRITES)], rows.world, rows.limits, rows_max=rows_max
    )
    return [row.key async for row in stream]


async def _filled() -> ModelStore:
    rows = await ModelStore().opened()
    cell = (SetCell(WRITES, b"column", TIME_UNIT, b"value"),)
    await rows.store.write(TABLE, [RowChange(key, cell) for key in KEYS], SECONDS)
    return rows


async def test_a_lost_answer_costs_a_second_and_the_scan_goes_on_behind_the_last_row() -> None:
    rows = await _filled()
    store = Unsteady(rows, (4, _LOST), (3, _LOST))
    began = rows.clock.monotonic_seconds()
    assert await _scanned(store, rows) == KEYS
    assert store.began == [b"", KEYS[3] + b"\0", KEYS[6] + b"\0"]
    assert rows.clock.monotonic_seconds() - began == 2 * Limits().silence_seconds


async def test_errors_that_pass_are_outlasted_in_the_same_way() -> None:
    rows = await _filled()
    store = Unsteady(rows, (4, Unavailable("gone for a moment")), (0, Unavailable("and again")))
    assert await _scanned(store, rows) == KEYS
    assert store.began == [b"", KEYS[3] + b"\0", KEYS[3] + b"\0"]


async def test_other_errors_are_raised() -> None:
    rows = await _filled()
    with pytest.raises(InvalidArgument):
        await _scanned(Unsteady(rows, (4, InvalidArgument("filter", "is wrong"))), rows)


async def test_no_more_rows_come_than_asked_for_however_often_it_begins() -> None:
    rows = await _filled()
    store = Unsteady(rows, (4, _LOST))
    assert await _scanned(store, rows, rows_max=6) == KEYS[:6]
    assert store.asked == [6, 2]


async def test_a_long_part_in_which_nothing_is_selected_is_passed() -> None:
    rows = await _filled()
    store = Unsteady(rows, *[(0, 20.0)] * 6)
    assert await _scanned(store, rows) == KEYS
    assert set(store.began) == {b""}


async def test_a_store_that_stays_silent_is_given_up() -> None:
    rows = await _filled()
    store = Unsteady(rows, *[(5, _LOST)] + [(0, _LOST)] * 20)
    with pytest.raises(DeadlineExceeded, match="for 30 s"):
        await _scanned(store, rows)
    assert rows.clock.monotonic_seconds() < 70.0
