"""Rounds of collection over the tables of a row store: what goes, what stays, and what is first."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from percolator import Timestamp, codecs, observes
from percolator.aio import Transaction
from percolator.aio.pin import Pin
from percolator.backup import exporter, part_files
from percolator.cli.values import SPACES, first_cells, stored_cells
from percolator.errors import (
    DeadlineExceeded,
    InvariantViolation,
    NotReady,
    PercolatorError,
    SnapshotTooOld,
)
from percolator.formats.records import RecordKind, WriteRecord
from percolator.protocol import steps
from percolator.protocol.steps import OWN_ROLLBACK
from percolator.routing.cells import APPLIED, CellMutation, Refused
from percolator.routing.ranges import TableRange
from percolator.rowstore import adapter, collection
from percolator.rowstore.intents import Intent
from percolator.rowstore.layout import WRITES
from percolator.rowstore.port import RowChange, Sample, SetCell
from percolator.testing import run_observers_async
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_WRITE, Space
from tests.patching import in_place_of
from tests.unit.history.row_site import ONE, OTHER, SECONDS, VALUE, Site, site


@pytest.fixture
def here() -> AbstractAsyncContextManager[Site]:
    """A database over the model of a row store, by the clock of the machine."""
    return site()


async def test_old_versions_go_and_snapshots_that_need_them_are_refused(here: Site) -> None:
    await here.set("a", 1)
    before = await here.now()
    await here.set("a", 2)
    await here.set("b", 2)
    await here.history.collect(await here.decided(await here.now()))
    assert await here.cells(ONE, SPACE_WRITE) == 2
    assert await here.seen("a") == 2
    with pytest.raises(SnapshotTooOld, match="older than the history that is kept"):
        await here.seen("a", before)
    assert await here.seen("b", before) is None, "nothing of this row was collected"
    progress = here.history.tables[await here.table_id(ONE)]
    assert progress.collected.cells == 1
    assert progress.below > before


async def test_a_row_that_was_deleted_tells_old_snapshots_so(here: Site) -> None:
    await here.set("a", 1)
    before = await here.now()
    await here.delete("a")
    await here.history.collect(await here.decided(await here.now()))
    assert not await here.cells(ONE, SPACE_WRITE)
    async with here.database.snapshot(at=Timestamp(before)) as snapshot:
        with pytest.raises(SnapshotTooOld):
            [row async for row in snapshot.scan(ONE)]


async def test_a_table_whose_history_is_kept_loses_nothing_but_its_old_locks(here: Site) -> None:
    await here.set("a", 1, 2)
    await _leave_half_committed(here)
    assert await here.cells(OTHER, SPACE_LOCK) == 1
    await here.history.collect(await here.decided(await here.now(), keeping=[OTHER]))
    assert not await here.cells(OTHER, SPACE_LOCK)
    assert here.history.locks_resolved == 1
    assert await here.cells(OTHER, SPACE_WRITE) == 3, "the lock was rolled forward"
    assert await here.cells(ONE, SPACE_WRITE) == 2, "one in each row"


async def test_a_row_that_was_changed_by_hand_does_not_keep_other_tables_from_being_collected(
    here: Site,
) -> None:
    await here.set("a", 1, 2)
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
    here: Site,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await here.set("a", 1, 2)
    decided = await here.decided(await here.now())
    tried: list[int] = []

    @in_place_of(monkeypatch, here.history._collector, "collect")
    async def silent(table_id: int, *_: object) -> None:
        tried.append(table_id)
        raise DeadlineExceeded("no answer")

    with pytest.raises(DeadlineExceeded):
        await here.history.collect(decided)
    assert tried == [await here.table_id(ONE)]


async def test_an_older_lock_is_rolled_back_although_its_time_to_live_is_not_over(
    here: Site,
) -> None:
    """Otherwise, whoever goes on extending it could stop the collection of the whole store."""
    await here.set("a", 1, 2)
    await here.lock(b"c", ttl_milliseconds=600_000)
    await here.history.collect(await here.decided(await here.now()))
    assert (await here.cells(ONE, SPACE_WRITE), await here.cells(OTHER, SPACE_LOCK)) == (1, 0)


async def test_a_row_with_a_lock_that_came_late_is_left_alone(here: Site) -> None:
    """It was not there when locks were looked for: as if its prewrite had been late."""
    await here.set("c", 1, 2)
    await here.lock(b"c", ttl_milliseconds=600_000)
    done = await here.collect_one()
    assert (done.rows, done.cells, done.passed_over) == (1, 0, 1)


async def test_a_lock_that_comes_between_the_reading_and_the_change_prevents_it(here: Site) -> None:
    await here.set("c", 1, 2)
    here.lock_before_a_change(b"c", await here.now())
    done = await here.collect_one()
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
        await here.set("a", *range(5))
        await here.delete("a")
        decided = await here.decided(await here.now(), keeping=[OTHER])
        here.store.changes_until_failure = 1
        with pytest.raises(PercolatorError, match="told to fail"):
            await here.history.collect(decided)
        assert 0 < await here.cells(ONE, SPACE_WRITE) < 6
        assert await here.seen("a") is None, "the deletion is still there"
        here.store.changes_until_failure = None
        await here.history.collect(decided)
        assert not await here.cells(ONE, SPACE_WRITE)


async def test_deletions_wait_for_the_observers_of_their_transaction(here: Site) -> None:
    await here.set("a", 1)
    await here.change_observers(add="observer")
    await here.delete("a")
    decided = await here.decided(await here.now())
    await here.history.collect(decided)
    assert await here.cells(ONE, SPACE_WRITE) == 1, "the value is gone, the deletion is not"
    await here.intents.delete(await here.all_intents(), here.env.now() + SECONDS)
    await here.history.collect(decided)
    assert not await here.cells(ONE, SPACE_WRITE)


@pytest.mark.parametrize("apart", [False, True])
async def test_what_an_observer_has_last_seen_stays_until_it_has_run_again(
    here: Site, apart: bool
) -> None:
    """Also values so long that they lie apart from their record."""
    text = ONE.column("text", codecs.text)
    told: list[tuple[str | None, str | None]] = []

    @observes(text)
    async def observer(tx: Transaction, row: str) -> None:
        told.append((await tx.previous(row, text), await tx.get(row, text)))

    async def change_and_collect(*values: str | None) -> None:
        for value in values:
            async with here.database.transaction() as tx:
                if value is None:
                    await tx.delete_row(ONE, "a")
                else:
                    tx.set("a", text, value)
            await here.history.collect(await here.decided(await here.now()))

    length = 5_000 if apart else 1
    texts = [letter * length for letter in "abcd"]
    await here.database.register_observers([observer])
    for values in ([texts[0]], texts[1:3], [None], [texts[3]], [None]):
        await change_and_collect(*values)
        await run_observers_async(here.database, [observer])
    assert told == [
        (None, texts[0]),
        (texts[0], texts[2]),
        (texts[2], None),
        (None, texts[3]),
        (texts[3], None),
    ]
    await change_and_collect()
    await here.history.collect(await here.decided(await here.now()))
    assert not await here.cells(ONE, SPACE_WRITE), "nothing is kept once it was seen"


async def test_what_was_seen_goes_with_a_deletion_for_which_nobody_waits(here: Site) -> None:
    @observes(VALUE)
    async def observer(tx: Transaction, row: str) -> None: ...

    await here.database.register_observers([observer])
    await here.set("a", 1)
    await run_observers_async(here.database, [observer])
    await here.set("a", 2)
    await here.change_observers(remove="observer")
    await here.delete("a")
    await here.history.collect(await here.decided(await here.now()))
    assert not await here.cells(ONE, SPACE_WRITE)
    assert await here.seen("a") is None


async def _leave_half_committed(here: Site) -> None:
    start = await here.lock(b"c", ttl_milliseconds=1)
    record = WriteRecord(start, RecordKind.PUT, b"3").encode()
    step = steps.commit_primary(b"c", VALUE.name, start, start + 1, await here.now(), record, ())
    assert await here.answer(CellMutation(await here.table_id(ONE), step)) is APPLIED


# Intents for which nobody asks: they hold up no collection, and go only if that loses nothing.

LONG = 600_000


async def test_a_removed_observer_holds_up_no_deletion(here: Site) -> None:
    await here.set("a", 1)
    await here.change_observers(add="observer")
    await here.delete("a")
    await here.change_observers(remove="observer")
    await here.history.collect(await here.decided(await here.now()))
    assert not await here.cells(ONE, SPACE_WRITE)
    assert await here.all_intents() == []


async def test_a_dropped_table_holds_up_no_deletion_in_another(here: Site) -> None:
    await here.change_observers(add="observer")
    await here.set("a", 1)
    async with here.database.transaction() as tx:
        await tx.delete_row(OTHER, "a")
    decided = await here.decided(await here.now())
    await here.database.drop_table(ONE)
    await here.history.collect(decided)
    assert not await here.cells(OTHER, SPACE_WRITE)
    assert await here.all_intents() == []


async def test_other_observers_are_awaited_as_before(here: Site) -> None:
    await here.change_observers(add="removed")
    await here.set("a", 1)
    await here.change_observers(remove="removed")
    await here.change_observers(add="observer")
    await here.set("b", 1)
    (mine,) = [one for one in await here.all_intents() if one.observer == b"observer"]
    assert await here.history.awaited.oldest(await here.now()) == mine.timestamp
    assert mine in await here.all_intents()


async def test_an_intent_stays_while_its_transaction_may_commit(here: Site) -> None:
    await _announce(here, await here.lock(b"a", ttl_milliseconds=LONG))
    assert await here.history.awaited.oldest(await here.now()) == 0
    assert len(await here.all_intents()) == 1
    assert await here.cells(ONE, SPACE_LOCK) == 1


async def test_an_intent_above_the_safe_point_stays(here: Site) -> None:
    """Its transaction may be about to lock its cells, and would be rolled back in vain."""
    start = await here.now()
    await _announce(here, start)
    assert await here.history.awaited.oldest(start) == 0
    assert len(await here.all_intents()) == 1


async def test_a_marker_keeps_a_late_prewrite_out_before_its_intent_goes(here: Site) -> None:
    start = await here.now()
    await _announce(here, start)
    await here.history.awaited.oldest(await here.now())
    assert await here.all_intents() == []
    prewrite = steps.prewrite(b"a", VALUE.name, start, b"lock", None)
    answer = await here.answer(CellMutation(await here.table_id(ONE), prewrite))
    assert isinstance(answer, Refused)
    assert answer.condition == OWN_ROLLBACK


async def test_a_lock_that_comes_before_the_marker_stays(here: Site) -> None:
    """It may be one of many, of a transaction that commits: it would lose this write."""
    start = await here.now()
    await _announce(here, start)

    here.lock_before_a_change(b"a", start)
    await here.history.awaited.oldest(await here.now())
    assert await here.cells(ONE, SPACE_LOCK) == 1
    assert len(await here.all_intents()) == 1


async def test_an_observer_that_is_registered_meanwhile_is_awaited(here: Site) -> None:
    await _change_for_a_removed_observer(here)

    here.asked = [here.now, lambda: here.change_observers(add="observer")]
    await here.history.awaited.oldest(await here.now())
    assert len(await here.all_intents()) == 1


async def test_who_does_not_lead_any_more_clears_nothing(here: Site) -> None:
    """A later leader may have registered the observer."""
    await _change_for_a_removed_observer(here)

    async def fail() -> None:
        raise NotReady("another one leads")

    here.asked = [here.now, fail]
    with pytest.raises(NotReady, match="another one leads"):
        await here.history.awaited.oldest(await here.now())
    assert len(await here.all_intents()) == 1


async def _change_for_a_removed_observer(here: Site) -> None:
    await here.change_observers(add="observer")
    await here.set("a", 1)
    await here.change_observers(remove="observer")


async def _announce(here: Site, start: int) -> None:
    one = await here.table_id(ONE)
    intent = Intent(one, b"a", VALUE.name, b"nobody", start, is_certain=False)
    await here.intents.write([intent], here.env.now() + SECONDS)


# What a row store's engine tells those who divide work, and operators who look at stored cells.

ROWS = [f"{number:03}" for number in range(40)]


async def _filled(here: Site) -> TableRange:
    for row in ROWS:
        await here.set(row, 1)
    return TableRange(await here.table_id(ONE), b"", b"")


async def test_a_small_table_is_one_range_and_parts_cover_it(
    here: Site,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = await _filled(here)
    engine = here.database.internal.engine
    deadline = engine.now() + SECONDS
    assert await engine.ranges.of_table(whole.table_id, deadline) == [whole]
    inner = await engine.ranges.cut(whole, 1, SECONDS)
    assert inner == [f"{number:03}".encode() for number in (7, 15, 23, 31, 39)]
    part = whole._replace(start=b"010", end=b"031")
    assert await engine.ranges.cut(part, 1, SECONDS) == [b"015", b"023"]
    assert await engine.ranges.cut(part, 1 << 30, SECONDS) == []
    monkeypatch.setattr(adapter, "RANGE_BYTES", 300)
    several = await engine.ranges.of_table(whole.table_id, deadline)
    assert len(several) > 2
    assert [one.start for one in several[1:]] == [one.end for one in several[:-1]]
    assert (several[0].start, several[-1].end) == (b"", b"")


async def test_samples_that_repeat_or_are_empty_make_no_empty_ranges() -> None:
    samples = [Sample(b"a", 5), Sample(b"a", 9), Sample(b"b", 9), Sample(b"c", 20), Sample(b"", 30)]
    assert list(adapter._borders(samples, 5)) == [b"a", b"c"]


async def test_stored_cells_of_each_space_are_listed_in_order(here: Site) -> None:
    for value in (1, 2):
        await here.set("a", value)
        await here.set("b", value)
    engine = here.database.internal.engine
    info = await engine.catalog.table(ONE.name, engine.now() + SECONDS)
    cells = stored_cells(here.database, info, [Space.SPACE_WRITE, Space.SPACE_LOCK], b"a", b"b")
    found = [cell async for cell in cells]
    assert [(cell.row, cell.column) for cell in found] == [(b"a", VALUE.name)] * 2
    assert found[0].timestamp > found[1].timestamp
    first = await first_cells(
        here.database, info, [Space.SPACE_WRITE], b"", b"", [VALUE.name], 3, SECONDS
    )
    assert [cell.row for cell in first] == [b"a", b"a", b"b"]


async def test_stored_cells_do_not_include_notes_of_collection(here: Site) -> None:
    await here.set("a", 1, 2)
    await here.history.collect(await here.decided(await here.now()))
    engine = here.database.internal.engine
    for table in (ONE, OTHER):
        info = await engine.catalog.table(table.name, engine.now() + SECONDS)
        cells = [cell async for cell in stored_cells(here.database, info, list(SPACES))]
        assert [cell.space for cell in cells] == [Space.SPACE_WRITE]
        assert Timestamp(cells[0].timestamp) < await here.now()


# Exports of a row store: its ranges become files, which hold what a snapshot shows.


@pytest.mark.real_time
async def test_every_range_is_a_file_and_all_files_are_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "RANGE_BYTES", 300)
    async with site() as here:
        for number in range(40):
            await here.set(f"{number:03}", number)
        at = Timestamp(await here.now())
        await here.set("000", 1_000)  # above the snapshot
        planned = await exporter._plan(here.database, at, [ONE.name], named=True)
        pin = cast("Pin", SimpleNamespace(at=at))
        done = await exporter._Exporter(
            here.database, tmp_path, planned, pin, lambda *_: None
        ).run()
        (table,) = done.tables
        assert len(table.parts) > 2
        found = [
            cell
            for part in table.parts
            for batch in part_files.cells_of(tmp_path, done, table, part)
            for cell in batch
        ]
        expected = [
            (f"{number:03}".encode(), VALUE.name, VALUE.codec.encode(number))
            for number in range(40)
        ]
        assert found == expected
