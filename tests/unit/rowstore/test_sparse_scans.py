"""Scans of tables in which hardly anything is selected: the store says how far they have come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from percolator.bigtable.store import BigtableStore
from percolator.errors import DeadlineExceeded, InvalidArgument, PercolatorError, Unavailable
from percolator.formats.records import RecordKind, WriteRecord
from percolator.limits import Limits
from percolator.protocol import steps
from percolator.routing.cells import CellMutation, RangePage, RangeRequest
from percolator.rowstore import intents
from percolator.rowstore.intents import Intent, Intents, exactly
from percolator.rowstore.layout import LOCKS, WRITES
from percolator.rowstore.patience import Part, scanned_part, steady_scan
from percolator.rowstore.port import TIME_UNIT, RowChange, Selection, SetCell, StoredRow
from percolator.rowstore.reads import RowScan
from percolator.wire.status import from_detail, to_detail
from tests.unit.rowstore.model_store import PLACE, SECONDS, TABLE, TIMES, ModelStore, at
from tests.unit.rowstore.test_calls import CountedStore, cover_the_table, lock, prewrites, written
from tests.unit.rowstore.test_groups import with_intents

KEYS = [b"row %02d" % number for number in range(40)]
LOCKED = KEYS[-1]
LOCK = (SetCell(LOCKS, b"cc", TIME_UNIT, b"lock"),)
OTHER = (SetCell(WRITES, b"cc", TIME_UNIT, b"record"),)


class Slow(BigtableStore):
    """Takes so many seconds for each message, and ends calls whose time is over."""

    def __init__(self, rows: ModelStore, seconds: float) -> None:
        super().__init__(rows.network, PLACE)
        self.seconds = seconds
        self.lost_after: list[int] = []
        """After so many messages, the next calls say nothing any more."""
        self.began: list[bytes] = []
        self.late: PercolatorError = DeadlineExceeded("no answer in time")

    async def scan(
        self, table_id: int, first: bytes, *rest: Any, **named: Any
    ) -> AsyncGenerator[StoredRow, None]:
        self.began.append(first)
        left = named["timeout_seconds"]
        lost_after = self.lost_after.pop(0) if self.lost_after else len(KEYS)
        # It takes its time also for what the caller has not asked to be told.
        tells, named["marks"] = named.get("marks", False), True
        async with aclosing(super().scan(table_id, first, *rest, **named)) as found:
            async for row in found:
                if not lost_after:
                    await asyncio.Event().wait()
                lost_after -= 1
                await asyncio.sleep(min(self.seconds, left))
                left -= self.seconds
                if left <= 0:
                    raise self.late
                if row.cells or tells:
                    yield row


class Repeating(BigtableStore):
    """Says again and again that it has come to the same key."""

    async def scan(self, *_: Any, **__: Any) -> AsyncGenerator[StoredRow, None]:
        while True:
            await asyncio.sleep(0.5)
            yield StoredRow(KEYS[0], [])


async def _with_one_lock() -> ModelStore:
    """A table in which every row has a commit, and only the last one has a lock."""
    rows = await ModelStore().opened()
    changes = [RowChange(key, OTHER) for key in KEYS[:-1]]
    await rows.store.write(TABLE, [*changes, RowChange(LOCKED, LOCK)], SECONDS)
    return rows


async def _locked(store: BigtableStore, rows: ModelStore) -> list[bytes]:
    stream = steady_scan(store, TABLE, [Selection(LOCKS)], rows.world, rows.limits)
    return [row.key async for row in stream]


async def test_only_who_asks_is_told_how_far_a_scan_has_come() -> None:
    rows = await _with_one_lock()

    async def scanned(**named: Any) -> list[StoredRow]:
        scan = rows.store.scan(
            TABLE,
            b"",
            b"",
            [Selection(LOCKS)],
            rows_max=1,
            reverse=False,
            timeout_seconds=SECONDS,
            **named,
        )
        return [row async for row in scan]

    (found,) = await scanned()
    assert found.key == LOCKED
    *marks, last = await scanned(marks=True)
    assert last == found
    assert [row.cells for row in marks] == [[]] * len(marks)
    assert [row.key for row in marks] == KEYS[3::4][: len(marks)]
    assert marks


async def test_minutes_without_a_selected_row_are_passed() -> None:
    rows = await _with_one_lock()
    store = Slow(rows, 20.0)
    began = rows.clock.monotonic_seconds()
    assert await _locked(store, rows) == [LOCKED]
    assert rows.clock.monotonic_seconds() - began > 120.0
    # It has learned to wait so long, and does not begin again for each message.
    assert set(store.began) == {b""}


async def test_an_answer_that_is_lost_there_is_asked_for_again_where_the_scan_was() -> None:
    rows = await _with_one_lock()
    store = Slow(rows, 0.1)
    store.lost_after = [3, 2]
    assert await _locked(store, rows) == [LOCKED]
    assert store.began == [b"", KEYS[11], KEYS[18]]


async def test_whoever_says_the_same_for_ever_makes_no_progress() -> None:
    rows = await _with_one_lock()
    store = Repeating(rows.network, PLACE)
    with pytest.raises(DeadlineExceeded, match="no further than b'row 00' for 30 s"):
        await _locked(store, rows)


def _pages(
    rows: ModelStore, store: BigtableStore, column: bytes, *, reverse: bool = False
) -> AsyncIterator[RangePage]:
    """A scan of one column in this store."""
    request = RangeRequest(TABLE, b"", b"", (column,), at(9), reverse=reverse)
    reads = rows.cells._reads
    return RowScan(request, SECONDS, store, reads, TIMES, rows.world, rows.limits).pages()


@pytest.mark.parametrize("through_gateway", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
async def test_a_snapshot_finds_what_no_single_call_would_find_in_its_time(
    reverse: bool, through_gateway: bool
) -> None:
    rows = await ModelStore().opened()
    wanted = KEYS[0] if reverse else KEYS[-1]
    for key in KEYS:
        await written(rows, key, [b"rare" if key == wanted else b"usual"])
    store = Slow(rows, 2.0)
    if through_gateway:
        store.late = from_detail(to_detail(store.late))
    pages = [page async for page in _pages(rows, store, b"rare", reverse=reverse)]
    assert [list(page.rows) for page in pages if page.rows] == [[wanted]]
    assert len(pages) > 1
    cover_the_table(((page.start, page.end) for page in pages), reverse=reverse)


async def test_locks_are_announced_that_no_single_call_would_find_in_its_time() -> None:
    """A shared transaction looks for its locks in the whole table if an observer is new."""
    rows = await with_intents(await ModelStore().opened())
    for key in KEYS[:-1]:
        await written(rows, key, [b"0"])
    await rows.cells.mutate(prewrites(at(5), LOCKED, [b"0"]), rows.deadline)
    store = Slow(rows, 2.0)
    slowly = Intents(store, TIMES, rows.world, rows.limits)
    await slowly.announce_locked(TABLE, [(b"0", b"late")], [at(5)], rows.deadline)
    columns = [exactly(TABLE, b"late")]
    (found,), _ = await rows.intents.page(b"", b"", columns, rows.deadline)
    assert found == Intent(TABLE, LOCKED, b"0", b"late", at(5), is_certain=False)


async def test_intents_behind_those_of_another_observer_are_found_page_by_page() -> None:
    """It may be stopped, and have left so many that no single call passes them in its time."""
    rows = await with_intents(ModelStore())
    others = [Intent(TABLE, key, b"c", b"stopped", at(5), is_certain=False) for key in KEYS]
    mine = Intent(TABLE, b"row", b"c", b"mine", at(9), is_certain=False)
    await rows.intents.write([*others, mine], rows.deadline)
    slowly = Intents(Slow(rows, 2.0), TIMES, rows.world, rows.limits)
    found: list[Intent] = []
    pages = slowly.all_of(TABLE, [b"mine"], lambda: rows.clock.monotonic_seconds() + 10.0)
    async with aclosing(pages) as several:
        async for page in several:
            found += page
    assert found == [mine]


async def test_taking_a_part_that_broke_off_for_the_last_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mistake that no history can show: a later look finds what it has passed over."""

    async def wrong(*arguments: Any) -> Part:
        return (await scanned_part(*arguments))._replace(rest=b"")

    monkeypatch.setattr(intents, "scanned_part", wrong)
    with pytest.raises(AssertionError):
        await test_intents_behind_those_of_another_observer_are_found_page_by_page()


async def test_a_scan_that_broke_off_goes_on_after_the_pause_that_was_asked_for() -> None:
    """Rows found before are there at once, and only the next call waits."""
    rows = await ModelStore().opened()
    for key in KEYS:
        await written(rows, key, [b"usual"])
    store = Slow(rows, 2.0)
    store.late = Unavailable("restarting")
    store.late.retry_after_seconds = 7.0
    came: list[float] = []
    found: list[bytes] = []
    began = rows.clock.monotonic_seconds()
    async for page in _pages(rows, store, b"usual"):
        came.append(rows.clock.monotonic_seconds() - began)
        found += page.rows
    assert found == KEYS
    call = min(SECONDS, rows.limits.attempt_seconds_max)
    assert came[0] == pytest.approx(call)
    assert all(later - earlier >= 7.0 for earlier, later in pairwise(came))
    assert len(came) > 2


@pytest.mark.parametrize("reverse", [False, True])
async def test_values_that_lie_apart_count_towards_the_size_of_a_page(reverse: bool) -> None:
    """A thousand rows of megabytes each are not held in memory at the same time."""
    rows = await ModelStore(page_bytes_max=5_000).opened()
    for key in KEYS:
        prewrite = steps.prewrite(key, b"c", at(1), lock(at(1), value=b""), b"v" * 2_000)
        record = WriteRecord(at(1), RecordKind.PUT_IN_DATA).encode()
        commit = steps.commit_secondary(key, b"c", at(1), at(2), record, ())
        for step in (prewrite, commit):
            await rows.cells.mutate([CellMutation(TABLE, step)], rows.deadline)
    store = CountedStore(rows)
    request = RangeRequest(TABLE, b"", b"", (b"c",), at(9), reverse=reverse)
    pages = [page async for page in rows.cells.scan(request, SECONDS)]
    assert [key for page in pages for key in page.rows] == sorted(KEYS, reverse=reverse)
    values = {cells[b"c"].value for page in pages for cells in page.rows.values()}
    assert (values, [len(page.rows) for page in pages]) == ({b"v" * 2_000}, [3] * 13 + [1])
    assert store.calls.count("scan") == 1
    cover_the_table(((page.start, page.end) for page in pages), reverse=reverse)


# A scan of a whole table outlasts lost messages, without beginning anew.

TEN_KEYS = [b"row %d" % number for number in range(10)]
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
        after, end = self._ends.pop(0) if self._ends else (len(TEN_KEYS), 0.0)
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


@pytest.fixture(name="rows")
@asynccontextmanager
async def _filled() -> AsyncIterator[ModelStore]:
    rows = await ModelStore().opened()
    cell = (SetCell(WRITES, b"column", TIME_UNIT, b"value"),)
    await rows.store.write(TABLE, [RowChange(key, cell) for key in TEN_KEYS], SECONDS)
    yield rows


async def test_a_lost_answer_costs_a_second_and_the_scan_goes_on_behind_the_last_row(
    rows: ModelStore,
) -> None:
    store = Unsteady(rows, (4, _LOST), (3, _LOST))
    began = rows.clock.monotonic_seconds()
    assert await _scanned(store, rows) == TEN_KEYS
    assert store.began == [b"", TEN_KEYS[3] + b"\0", TEN_KEYS[6] + b"\0"]
    assert rows.clock.monotonic_seconds() - began == 2 * Limits().silence_seconds


async def test_errors_that_pass_are_outlasted_in_the_same_way(rows: ModelStore) -> None:
    store = Unsteady(rows, (4, Unavailable("gone for a moment")), (0, Unavailable("and again")))
    assert await _scanned(store, rows) == TEN_KEYS
    assert store.began == [b"", TEN_KEYS[3] + b"\0", TEN_KEYS[3] + b"\0"]


async def test_other_errors_are_raised(rows: ModelStore) -> None:
    with pytest.raises(InvalidArgument):
        await _scanned(Unsteady(rows, (4, InvalidArgument("filter", "is wrong"))), rows)


async def test_no_more_rows_come_than_asked_for_however_often_it_begins(rows: ModelStore) -> None:
    store = Unsteady(rows, (4, _LOST))
    assert await _scanned(store, rows, rows_max=6) == TEN_KEYS[:6]
    assert store.asked == [6, 2]


async def test_a_long_part_in_which_nothing_is_selected_is_passed(rows: ModelStore) -> None:
    store = Unsteady(rows, *[(0, 20.0)] * 6)
    assert await _scanned(store, rows) == TEN_KEYS
    assert set(store.began) == {b""}


async def test_a_store_that_stays_silent_is_given_up(rows: ModelStore) -> None:
    store = Unsteady(rows, *[(5, _LOST)] + [(0, _LOST)] * 20)
    with pytest.raises(DeadlineExceeded, match="for 30 s"):
        await _scanned(store, rows)
    assert rows.clock.monotonic_seconds() < 70.0
