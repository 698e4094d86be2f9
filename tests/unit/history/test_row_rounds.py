"""Rounds of collection over the tables of a row store: what goes, what stays, and what is first."""

from __future__ import annotations

import pytest

from percolator import Timestamp
from percolator.errors import (
    DeadlineExceeded,
    InvariantViolation,
    PercolatorError,
    SnapshotTooOld,
)
from percolator.formats.records import RecordKind, WriteRecord
from percolator.protocol import steps
from percolator.routing.cells import APPLIED, CellMutation
from percolator.rowstore import collection
from percolator.rowstore.collection import Bounds, Collected, RowCollector
from percolator.rowstore.layout import WRITES
from percolator.rowstore.port import RowChange, SetCell
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_WRITE
from tests.unit.history.row_site import ONE, OTHER, SECONDS, VALUE, Site, site


async def test_old_versions_go_and_snapshots_that_need_them_are_refused() -> None:
    async with site() as here:
        await here.set("a", 1)
        before = await here.now()
        await here.set("a", 2)
        await here.set("b", 2)
        await here.history.collect(await here.decided(await here.now()))
        assert await here.cells(ONE, SPACE_WRITE) == 2
        async with here.database.snapshot() as snapshot:
            assert await snapshot.get("a", VALUE) == 2
        async with here.database.snapshot(at=Timestamp(before)) as snapshot:
            with pytest.raises(SnapshotTooOld, match="older than the history that is kept"):
                await snapshot.get("a", VALUE)
        async with here.database.snapshot(at=Timestamp(before)) as snapshot:
            assert await snapshot.get("b", VALUE) is None, "nothing of this row was collected"
        progress = here.history.tables[await here.table_id(ONE)]
        assert progress.collected.cells == 1
        assert progress.below > before


async def test_a_row_that_was_deleted_tells_old_snapshots_so() -> None:
    async with site() as here:
        await here.set("a", 1)
        before = await here.now()
        async with here.database.transaction() as tx:
            await tx.delete("a", VALUE)
        await here.history.collect(await here.decided(await here.now()))
        assert not await here.cells(ONE, SPACE_WRITE)
        async with here.database.snapshot(at=Timestamp(before)) as snapshot:
            with pytest.raises(SnapshotTooOld):
                [row async for row in snapshot.scan(ONE)]


async def test_a_table_whose_history_is_kept_loses_nothing_but_its_old_locks() -> None:
    async with site() as here:
        await here.set("a", 1)
        await here.set("a", 2)
        await _leave_half_committed(here)
        assert await here.cells(OTHER, SPACE_LOCK) == 1
        await here.history.collect(await here.decided(await here.now(), keeping=[OTHER]))
        assert not await here.cells(OTHER, SPACE_LOCK)
        assert here.history.locks_resolved == 1
        assert await here.cells(OTHER, SPACE_WRITE) == 3, "the lock was rolled forward"
        assert await here.cells(ONE, SPACE_WRITE) == 2, "one in each row"


async def test_a_row_that_was_changed_by_hand_does_not_keep_other_tables_from_being_collected() -> (
    None
):
    async with site() as here:
        await here.set("a", 1)
        await here.set("a", 2)
        time = here.times.at_or_above(await here.now())
        changed = RowChange(b"b", (SetCell(WRITES, b"cvalue", time, b"short"),))
        await here.store.write(await here.table_id(ONE), [changed], SECONDS)
        decided = await here.decided(await here.now())
        with pytest.raises(InvariantViolation, match="row 'b' has a cell that no transaction"):
            await here.history.collect(decided)
        assert await here.cells(OTHER, SPACE_WRITE) == 1
        progress = here.history.tables
        assert progress[await here.table_id(OTHER)].below > progress[await here.table_id(ONE)].below


async def test_a_store_that_does_not_answer_ends_a_round_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site() as here:
        await here.set("a", 1)
        await here.set("a", 2)
        decided = await here.decided(await here.now())
        tried: list[int] = []

        async def silent(table_id: int, *_: object) -> None:
            tried.append(table_id)
            raise DeadlineExceeded("no answer")

        monkeypatch.setattr(here.history._collector, "collect", silent)
        with pytest.raises(DeadlineExceeded):
            await here.history.collect(decided)
        assert tried == [await here.table_id(ONE)]


async def test_an_older_lock_is_rolled_back_although_its_time_to_live_is_not_over() -> None:
    """Otherwise, whoever goes on extending it could stop the collection of the whole store."""
    async with site() as here:
        await here.set("a", 1)
        await here.set("a", 2)
        await here.lock(b"c", ttl_milliseconds=600_000)
        await here.history.collect(await here.decided(await here.now()))
        assert await here.cells(ONE, SPACE_WRITE) == 1
        assert await here.cells(OTHER, SPACE_LOCK) == 0


async def test_a_row_with_a_lock_that_came_late_is_left_alone() -> None:
    """It was not there when locks were looked for: as if its prewrite had been late."""
    async with site() as here:
        await here.set("c", 1)
        await here.set("c", 2)
        await here.lock(b"c", ttl_milliseconds=600_000)
        table_id = await here.table_id(ONE)
        bounds = Bounds(await here.now(), await here.now())
        engine = here.database.internal.engine
        done = Collected()
        alone = RowCollector(here.store, here.times, engine.world, engine.limits, share=1.0)
        assert await alone.collect(table_id, bounds, done) is None
        assert (done.rows, done.cells, done.passed_over) == (1, 0, 1)


async def test_a_lock_that_comes_between_the_reading_and_the_change_prevents_it() -> None:
    async with site() as here:
        await here.set("c", 1)
        await here.set("c", 2)
        start = await here.now()
        bounds = Bounds(await here.now(), await here.now())

        async def late() -> None:
            here.store.before_change = None
            await here.lock(b"c", ttl_milliseconds=600_000, start=start)

        here.store.before_change = late
        engine = here.database.internal.engine
        done = Collected()
        alone = RowCollector(here.store, here.times, engine.world, engine.limits, share=1.0)
        await alone.collect(await here.table_id(ONE), bounds, done)
        assert (done.cells, done.passed_over) == (0, 1)
        assert await here.cells(ONE, SPACE_WRITE) == 2


async def test_a_round_that_broke_off_continues_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collection, "_ROWS_OF_A_SLICE", 2)
    async with site() as here:
        for value in (1, 2):
            for row in "abcde":
                await here.set(row, value)
        decided = await here.decided(await here.now(), keeping=[OTHER])
        here.store.changes_until_failure = 2
        with pytest.raises(PercolatorError, match="told to fail"):
            await here.history.collect(decided)
        progress = here.history.tables[await here.table_id(ONE)]
        assert (progress.collected.rows, progress.below) == (2, 0)
        here.store.changes_until_failure = None
        await here.history.collect(await here.decided(await here.now(), keeping=[OTHER]))
        assert progress.collected.rows == 5, "no row was looked at twice"
        assert progress.collected.cells == 5
        assert progress.below == decided.transactions, "the first rows were collected for that"
        assert await here.cells(ONE, SPACE_WRITE) == 5


async def test_many_deletions_are_several_changes_and_the_deletion_of_the_cell_goes_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collection, "CHANGES_MAX", 4)
    async with site() as here:
        for value in range(5):
            await here.set("a", value)
        async with here.database.transaction() as tx:
            await tx.delete("a", VALUE)
        decided = await here.decided(await here.now(), keeping=[OTHER])
        here.store.changes_until_failure = 1
        with pytest.raises(PercolatorError, match="told to fail"):
            await here.history.collect(decided)
        assert 0 < await here.cells(ONE, SPACE_WRITE) < 6
        async with here.database.snapshot() as snapshot:
            assert await snapshot.get("a", VALUE) is None, "the deletion is still there"
        here.store.changes_until_failure = None
        await here.history.collect(decided)
        assert not await here.cells(ONE, SPACE_WRITE)


async def test_deletions_wait_for_the_observers_of_their_transaction() -> None:
    async with site() as here:
        await here.set("a", 1)
        await here.change_observers(add="observer")
        async with here.database.transaction() as tx:
            await tx.delete("a", VALUE)
        decided = await here.decided(await here.now())
        await here.history.collect(decided)
        assert await here.cells(ONE, SPACE_WRITE) == 1, "the value is gone, the deletion is not"
        await here.intents.delete(await here.all_intents(), here.env.now() + SECONDS)
        await here.history.collect(decided)
        assert not await here.cells(ONE, SPACE_WRITE)


async def _leave_half_committed(here: Site) -> None:
    start = await here.lock(b"c", ttl_milliseconds=1)
    record = WriteRecord(start, RecordKind.PUT, b"3").encode()
    step = steps.commit_primary(b"c", VALUE.name, start, start + 1, await here.now(), record, ())
    assert await here.answer(CellMutation(await here.table_id(ONE), step)) is APPLIED
