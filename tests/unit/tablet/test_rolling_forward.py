"""A tablet rolls the locks of committed transactions forward by itself, once it is told."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from percolator.errors import CellAddress, InvalidArgument, SchemaChanged, TabletMoved
from percolator.formats.records import (
    LockRecord,
    RecordKind,
    WriteRecord,
    timestamp_bytes,
    value_offset,
)
from percolator.tablet import rolling_forward
from percolator.tablet.cells import STEPS_MAX
from percolator.tablet.rolling_forward import AHEAD_SECONDS_MAX
from percolator.tablet.state import SafePoints, TabletIdentity
from percolator.testing.memory_storage import DurableMemory
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import (
    COLUMN,
    DATA,
    LOCK,
    NOT_EXECUTED,
    NOTIFY,
    ROLLBACK,
    TARGET,
    WRITE,
    Change,
    CountingStorage,
    LingeringStorage,
    Rig,
    SlowDisk,
    changes,
    commit,
    counted_turns,
    delete,
    lock_record,
    mutation,
    outcomes,
    prewrite,
    put,
    roll_back,
    under_way,
    write_record,
    written,
)
from tests.unit.tablet.test_bulk_load import begin_load, finish

START, COMMIT, LATER = 10, 20, 30
OBSERVED = pb.ObservedColumn(column=COLUMN, observers=[b"index"])


async def _told(
    rig: Rig,
    commits: dict[int, int] | None = None,
    *,
    target: pb.TabletTarget = TARGET,
    primaries_say: dict[int, int] | None = None,
    **fields: Any,
) -> None:
    """`primaries_say`: when transactions have committed; as the tablet is told, if not given."""
    commits = {START: COMMIT} if commits is None else commits
    rig.commits |= commits if primaries_say is None else primaries_say
    await rig.tablet.roll_forward(
        pb.RollForwardRequest(
            target=target,
            start_timestamps=commits.keys(),
            commit_timestamps=commits.values(),
            **fields,
        )
    )


async def _done(rig: Rig) -> None:
    """Waits until the tablet has done what it was told."""
    await asyncio.gather(*rig.tablet._rolling._tasks._tasks)


async def _rolled_forward(rig: Rig, commits: dict[int, int] | None = None, **fields: Any) -> None:
    """Tells the tablet, and waits until it has done so."""
    await _told(rig, commits, **fields)
    await _done(rig)


def _rows(count: int) -> list[bytes]:
    return [b"row%04d" % number for number in range(count)]


async def _in_three_batches(**fields: Any) -> Rig:
    """A tablet with twelve locks, of which four go at a time."""
    rig = await Rig(slice_rows=4, commit_mutations_max=4, **fields).open()
    await rig.apply(*(prewrite(row, START) for row in _rows(12)))
    return rig


async def _locked(rig: Rig) -> list[bytes]:
    return [cell.row for cell in await rig.cells(LOCK)]


async def test_every_kind_of_lock_becomes_the_commit_that_its_owner_would_have_written(
    rig: Rig,
) -> None:
    primary = CellAddress(9, b"job", b"part" * 20)
    apart = lock_record(START, kind=RecordKind.PUT_IN_DATA, primary=primary)
    with_session = lock_record(START, b"d", session=b"s" * 16, primary=primary)
    await rig.apply(
        prewrite(b"a", START, b"new", primary=primary),
        prewrite(b"b", START, kind=RecordKind.DELETE, primary=primary),
        prewrite(b"c", START, kind=RecordKind.LOCK_ONLY, primary=primary),
        mutation(b"d", put(LOCK, with_session)),
        mutation(b"e", put(LOCK, apart), put(DATA, b"e", START)),
    )
    await _rolled_forward(rig)
    assert await _locked(rig) == []
    stored = {cell.row: (cell.timestamp, cell.value) for cell in await rig.cells(WRITE)}
    below = (0).to_bytes(8, "big")  # what the tablet adds to a lock-only record: nothing is there
    assert stored == {
        b"a": (COMMIT, write_record(START, b"new")),
        b"b": (COMMIT, write_record(START, kind=RecordKind.DELETE)),
        b"c": (COMMIT, write_record(START, kind=RecordKind.LOCK_ONLY) + below),
        b"d": (COMMIT, write_record(START, b"d")),
        b"e": (COMMIT, write_record(START, kind=RecordKind.PUT_IN_DATA)),
    }
    assert (await rig.value(b"a", LATER), await rig.value(b"e", LATER)) == (b"new", b"e")


async def test_only_the_locks_of_the_named_transactions_go_each_to_its_own_commit(rig: Rig) -> None:
    await rig.apply(prewrite(b"a", 10, b"1"), prewrite(b"b", 11, b"2"), prewrite(b"c", 12, b"3"))
    await _rolled_forward(rig, {10: 20, 12: 25})
    assert await _locked(rig) == [b"b"]
    stored = {cell.row: cell.timestamp for cell in await rig.cells(WRITE)}
    assert stored == {b"a": 20, b"c": 25}


@pytest.mark.parametrize("committed", [{}, {START: LATER}])
async def test_locks_stay_if_their_primary_does_not_say_what_the_caller_says(
    rig: Rig,
    committed: dict[int, int],
) -> None:
    """A driver that took another one's commit for its own had its cells committed."""
    await rig.apply(prewrite(b"a", START, b"1"), prewrite(b"b", 11, b"2"), prewrite(b"c", START))
    await _rolled_forward(rig, {START: COMMIT, 11: 21}, primaries_say={11: 21, **committed})
    assert await _locked(rig) == [b"a", b"c"]
    assert [cell.row for cell in await rig.cells(WRITE)] == [b"b"]
    await _rolled_forward(rig)  # by a caller that knows better
    assert await _locked(rig) == []


async def test_each_primary_is_asked_once_and_only_for_transactions_with_a_lock_here() -> None:
    rig = await Rig(slice_rows=4, commit_mutations_max=8).open()
    first, second = CellAddress(9, b"job", b"1"), CellAddress(9, b"job", b"2")
    await rig.apply(*(prewrite(row, START, primary=first) for row in _rows(20)))
    await rig.apply(prewrite(b"z1", 11, primary=second), prewrite(b"z2", 11, primary=second))
    await _rolled_forward(rig, {START: COMMIT, 11: 21, 12: 22})
    assert await _locked(rig) == []
    assert rig.asked == [[(first, START)], [(second, 11)]]


async def test_a_lock_that_names_another_primary_than_the_first_one_stays(rig: Rig) -> None:
    job, other = CellAddress(9, b"job", b"1"), CellAddress(9, b"job", b"2")
    await rig.apply(
        prewrite(b"a", START, primary=job),
        prewrite(b"b", START, primary=other),
        prewrite(b"c", START, primary=job),
    )
    await _rolled_forward(rig)
    assert await _locked(rig) == [b"b"]


async def test_a_tablet_that_can_ask_nobody_leaves_all_locks(rig: Rig) -> None:
    rig.tablet._state.commits = None
    await rig.apply(prewrite(b"a", START))
    await _rolled_forward(rig)
    assert await _locked(rig) == [b"a"]


async def test_many_locks_go_in_synced_batches() -> None:
    rig = await Rig(slice_rows=4, commit_mutations_max=8).open()
    await rig.apply(*(prewrite(row, START, row) for row in _rows(50)))
    writes = rig.disk.writes  # type: ignore[attr-defined]
    await _rolled_forward(rig)
    assert await _locked(rig) == []
    assert [cell.row for cell in await rig.cells(WRITE)] == _rows(50)
    assert rig.disk.writes - writes == 7  # type: ignore[attr-defined]


async def test_it_begins_where_the_caller_is_and_comes_to_the_other_rows_at_the_end() -> None:
    rig = await _in_three_batches()
    await _told(rig, row=_rows(12)[8])
    await asyncio.sleep(1.5)  # one batch
    assert await _locked(rig) == _rows(12)[:8]
    await _done(rig)
    assert await _locked(rig) == []


async def test_rows_outside_of_the_tablet_are_no_place_to_begin() -> None:
    for row in (b"", b"a", b"row0002", b"z"):
        identity = TabletIdentity(table_id=7, tablet_id=1, epoch=2, start=b"m", end=b"s")
        rig = await Rig(identity=identity).open()
        await rig.apply(*(prewrite(row, START) for row in _rows(4)))
        await _rolled_forward(rig, row=row)
        assert await _locked(rig) == []


async def test_observers_are_notified_of_changes_and_of_nothing_else(rig: Rig) -> None:
    await rig.apply(
        prewrite(b"a", START, b"new"),
        prewrite(b"b", START, kind=RecordKind.LOCK_ONLY),
        mutation(b"c", put(LOCK, lock_record(START)), column=b"other"),
    )
    await _rolled_forward(rig, observed=[OBSERVED])
    notified = [(cell.row, cell.timestamp, cell.qualifier) for cell in await rig.cells(NOTIFY)]
    assert notified == [(b"a", COMMIT, b"index")]


async def test_the_change_feed_has_the_commits() -> None:
    rig = await Rig(change_feed=True).open()
    await rig.apply(prewrite(b"a", START, b"new"), prewrite(b"b", START, kind=RecordKind.DELETE))
    await _rolled_forward(rig)
    answer = await changes(rig, START, LATER)
    assert answer.changes == [
        Change(COMMIT, b"a", COLUMN, b"new"),
        Change(COMMIT, b"b", COLUMN, None),
    ]


async def test_a_lock_that_goes_meanwhile_is_not_committed(rig: Rig) -> None:
    await rig.apply(prewrite(b"a", START), prewrite(b"b", START))
    # The tablet has looked at the locks, and its steps wait behind this batch.
    before = await under_way(rig.mutate(roll_back(b"a", START)))
    await _told(rig)
    await asyncio.sleep(0.1)
    assert await outcomes(before)
    await _done(rig)
    assert [cell.row for cell in await rig.cells(ROLLBACK)] == [b"a"]
    assert [cell.row for cell in await rig.cells(WRITE)] == [b"b"]


async def test_under_another_schema_the_rest_is_left() -> None:
    rig = await _in_three_batches()
    await _told(rig)
    await asyncio.sleep(0.5)  # in the middle of the first batch
    await rig.tablet.set_schema_version(4)
    await _done(rig)
    assert len(rig.tablet._state.mirror) == 8
    with pytest.raises(SchemaChanged):
        await _told(rig)
    await _rolled_forward(rig, target=_version(4))
    assert len(rig.tablet._state.mirror) == 0


def _version(version: int) -> pb.TabletTarget:
    return pb.TabletTarget(tablet_id=1, epoch=2, schema_version=version)


async def test_a_second_order_for_the_same_transaction_adds_nothing(rig: Rig) -> None:
    await rig.apply(prewrite(b"a", START), prewrite(b"b", 11))
    await _told(rig)
    await _told(rig)
    await _told(rig, {START: COMMIT, 11: 21})
    assert [len(one.fates) for one in rig.tablet._rolling._orders] == [1, 1]
    await _done(rig)
    assert await _locked(rig) == []


class _Start(bytes):
    """A start timestamp that counts with how many others it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        _Start.compared += 1
        return super().__eq__(other)

    __hash__ = bytes.__hash__


async def test_an_order_does_not_compare_all_its_transactions_with_all_that_are_known(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shared transaction may have 8,000 tasks: that would stop the server for a second."""
    await rig.apply(prewrite(b"a", START))
    monkeypatch.setattr(
        rolling_forward, "timestamp_bytes", lambda start: _Start(timestamp_bytes(start))
    )
    await _told(rig, dict.fromkeys(range(1, 1_000), 10_000))
    _Start.compared = 0
    await _told(rig, dict.fromkeys(range(1_000, 2_000), 10_000))
    assert _Start.compared < 5_000
    assert [len(one.fates) for one in rig.tablet._rolling._orders] == [999, 1_000]
    await _done(rig)


async def test_a_closed_tablet_forgets_the_rest_and_the_next_one_can_be_told() -> None:
    rig = await _in_three_batches()
    await _told(rig)
    later = await rig.reopened()
    assert await _locked(later)
    await _rolled_forward(later)
    assert await _locked(later) == []


async def test_what_makes_no_sense_is_refused(rig: Rig) -> None:
    await rig.apply(prewrite(b"a", START))
    uneven = pb.RollForwardRequest(target=TARGET, start_timestamps=[1, 2], commit_timestamps=[3])
    nobody = pb.ObservedColumn(column=COLUMN, observers=[b""])
    for telling in (
        *(_told(rig, one) for one in ({}, {START: START}, {0: COMMIT}, {START: 1 << 63})),
        rig.tablet.roll_forward(uneven),
        _told(rig, observed=[nobody]),
    ):
        with pytest.raises(InvalidArgument):
            await telling
    with pytest.raises(TabletMoved):
        await _told(rig, target=pb.TabletTarget(tablet_id=1, epoch=1, schema_version=3))
    assert await _locked(rig) == [b"a"]


def test_where_a_value_begins() -> None:
    for session in (b"", b"s" * 16):
        for primary in (CellAddress(1, b"", b""), CellAddress(2, b"r" * 300, b"c" * 300)):
            lock = LockRecord(1, 2, 3, RecordKind.PUT, session, primary, b"value").encode()
            assert lock[value_offset(lock) :] == b"value"


async def test_a_caller_on_its_way_may_wait_until_the_tablet_is_ahead() -> None:
    rig = await _in_three_batches(disk=SlowDisk(0.1))
    await _told(rig, await_cells=6)  # in two batches
    assert await _locked(rig) == _rows(12)[8:]
    await _told(rig, await_cells=1_000)
    assert await _locked(rig) == []
    await _told(rig, await_cells=1_000)  # nothing is left


async def test_a_caller_waits_no_longer_than_a_while() -> None:
    rig = await Rig(disk=SlowDisk(10.0)).open()
    await rig.apply(prewrite(b"a", START))
    began = rig.clock.monotonic_seconds()
    await _told(rig, await_cells=1)
    assert rig.clock.monotonic_seconds() - began == AHEAD_SECONDS_MAX
    assert await _locked(rig) == [b"a"]
    waiting = await under_way(_told(rig, await_cells=1), seconds=0.1)
    await rig.tablet.close()
    await waiting


# Lock-only records cost readers nothing: each names the change below it.

LOCKS = 500


def locked(row: bytes, end: int, kind: RecordKind = RecordKind.LOCK_ONLY) -> pb.Mutation:
    return mutation(row, put(WRITE, write_record(end - 1, b"", kind), end))


async def lock_many(rig: Rig, first: int, count: int = LOCKS) -> int:
    """Commits a cell lock-only this many times; returns a timestamp above them."""
    end = first + 2 * count
    for at in range(first, end, 2):
        await rig.apply(locked(b"a", at))
    return end


async def named(rig: Rig) -> list[int | None]:
    """Timestamps that the lock-only records name, newest first."""
    records = [WriteRecord.decode(cell.value) for cell in await rig.cells(WRITE)]
    return [one.last_change for one in records if one.kind is RecordKind.LOCK_ONLY]


async def without_names(rig: Rig, **options: Any) -> Rig:
    """Makes all lock-only records name nothing, and opens the tablet again."""
    await rig.tablet.close()
    for key, value in rig.disk.durable.items():
        if key.startswith(b"W") and value[8] == RecordKind.LOCK_ONLY:
            rig.disk.durable[key] = value[:9]
    return await Rig(disk=rig.disk, **options).open()


async def reopened(rig: Rig) -> tuple[Rig, Counter[str]]:
    """Makes memory forget everything."""
    await rig.tablet.close()
    storage = CountingStorage(rig.disk)
    opened = await Rig(disk=rig.disk, storage=storage).open()
    storage.counts.clear()
    return opened, storage.counts


@pytest.mark.parametrize("below", [1, LOCKS])
async def test_a_read_above_many_locks_costs_two_seeks_and_the_next_one_costs_one(
    rig: Rig,
    below: int,
) -> None:
    await rig.apply(written(b"a", 10, 11, b"value"))
    end = await lock_many(rig, 100)
    rig, counts = await reopened(rig)
    assert await rig.value(b"a", 100 + 2 * below) == b"value"
    assert counts == Counter({"seek W": 2})
    counts.clear()
    assert (await rig.value(b"a", end), await rig.value(b"a", end)) == (b"value", b"value")
    assert counts["seek W"] == (3 if below == 1 else 2)
    assert not counts["step"]


async def test_a_cell_that_was_only_ever_locked_is_absent_at_the_same_cost(rig: Rig) -> None:
    end = await lock_many(rig, 100)
    await rig.apply(written(b"a\0", 10, 11, b"another"))
    rig, counts = await reopened(rig)
    assert (await rig.value(b"a", end), await rig.value(b"a", end)) == (None, None)
    assert counts == Counter({"seek W": 3})
    assert set(await named(rig)) == {0}


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_scan_passes_many_locks_at_the_cost_of_a_few(rig: Rig, reverse: bool) -> None:
    await rig.apply(written(b"a", 10, 11, b"value"), written(b"b", 10, 11, b"next"))
    end = await lock_many(rig, 100)
    rig, counts = await reopened(rig)
    pages = await rig.scan(end, reverse=reverse)
    values = [value for page in pages for value in page.found.values]
    assert sorted(values) == [b"next", b"value"]
    assert sum(counts.values()) < 25
    counts.clear()
    assert list((await rig.read_row(b"a", end)).found.values) == [b"value"]
    assert sum(counts.values()) < 15


async def test_a_hot_lock_is_committed_and_read_without_stepping_over_its_records(rig: Rig) -> None:
    await rig.apply(written(b"a", 10, 11, b"value"))
    rig, counts = await reopened(rig)
    await rig.apply(locked(b"a", 13))
    counts.clear()
    for end in range(15, 55, 2):
        await rig.apply(locked(b"a", end))
        assert await rig.value(b"a", end) == b"value"
    assert counts == Counter({"seek W": 20})
    assert set(await named(rig)) == {11}


async def test_a_lock_names_the_newest_put_or_deletion_below_it(rig: Rig) -> None:
    await rig.apply(locked(b"a", 5), written(b"a", 6, 7), locked(b"a", 9), locked(b"a", 11))
    await rig.apply(locked(b"a", 13, RecordKind.DELETE), locked(b"a", 15), locked(b"a", 17))
    await rig.apply(written(b"a", 18, 19), locked(b"a", 21))
    assert await named(rig) == [19, 13, 13, 7, 7, 0]


async def test_the_remembered_change_of_a_cell_is_forgotten_when_it_changes(rig: Rig) -> None:
    await rig.apply(written(b"a", 10, 11, b"old"), locked(b"a", 13))
    assert await rig.value(b"a", 14) == b"old"
    await rig.apply(written(b"a", 15, 16, b"new"))
    assert [await rig.value(b"a", at) for at in (14, 15, 16, 20)] == [
        b"old",
        b"old",
        b"new",
        b"new",
    ]
    await rig.apply(locked(b"a", 18), locked(b"a", 22, RecordKind.DELETE), locked(b"a", 24))
    assert [await rig.value(b"a", at) for at in (19, 21, 22, 30)] == [b"new", b"new", None, None]


async def test_a_read_of_the_past_teaches_nothing_about_the_present(rig: Rig) -> None:
    await rig.apply(written(b"a", 10, 11, b"old"), locked(b"a", 13), written(b"a", 15, 16, b"new"))
    rig, _ = await reopened(rig)
    assert (await rig.value(b"a", 14), await rig.value(b"a", 20)) == (b"old", b"new")


async def test_what_a_lock_names_may_be_collected(rig: Rig) -> None:
    await rig.apply(written(b"a", 10, 11, b"old"), locked(b"a", 13, RecordKind.DELETE))
    await rig.apply(locked(b"a", 31), locked(b"b", 15), written(b"b", 16, 17), locked(b"b", 33))
    await rig.tablet.raise_safe_points(SafePoints(20, 20))
    await rig.tablet.collect(20)
    rig, _ = await reopened(rig)
    assert [await rig.value(row, 40) for row in (b"a", b"b")] == [None, b""]
    assert await named(rig) == [13, 17]


async def test_the_clients_own_last_change_is_ignored(rig: Rig) -> None:
    lie = WriteRecord(19, RecordKind.LOCK_ONLY, last_change=5).encode()
    await rig.apply(written(b"a", 10, 11, b"value"), mutation(b"a", put(WRITE, lie, 20)))
    assert await named(rig) == [11]
    assert await rig.value(b"a", 30) == b"value"


@pytest.mark.parametrize("kind", [RecordKind.PUT, RecordKind.DELETE])
async def test_a_change_cannot_be_committed_under_a_lock_that_names_an_older_one(
    rig: Rig,
    kind: RecordKind,
) -> None:
    """Locks rule it out; a client that writes without them must not make others read the past."""
    await rig.apply(written(b"a", 4, 5, b"value"), locked(b"a", 20), locked(b"a", 30))
    results = await rig.mutate(*(locked(b"a", at, kind) for at in (10, 20, 25)))
    assert [one.outcome for one in results] == [NOT_EXECUTED] * 3
    assert "below a lock-only commit" in results[0].error.message
    await rig.apply(locked(b"a", 8), locked(b"a", 40, kind), locked(b"a", 35, kind))


async def test_a_bulk_load_of_a_cell_that_was_locked_once_is_read(rig: Rig) -> None:
    await rig.apply(locked(b"c", 11))
    assert await rig.value(b"c", 15) is None
    await rig.apply(mutation(b"c", delete(WRITE, 11)))
    await begin_load(rig, [b"c"], 20, value=b"loaded")
    await finish(rig, 20)
    assert await rig.value(b"c", 30) == b"loaded"


# ------------------------------------------------------------------- records that name nothing


async def test_records_that_name_nothing_are_stepped_over_in_slices(rig: Rig) -> None:
    await rig.apply(written(b"a", 10, 11, b"value"))
    end = await lock_many(rig, 100)
    rig = await without_names(rig, slice_entries=50)
    async with counted_turns() as turns:
        assert await rig.value(b"a", end) == b"value"
    assert turns.count >= LOCKS // 50 - 1
    assert rig.tablet.statistics().versions_skipped == LOCKS


async def test_a_tablet_that_is_closed_while_a_read_steps_over_records_answers_nothing(
    rig: Rig,
) -> None:
    end = await lock_many(rig, 100)
    rig = await without_names(rig, slice_entries=50)
    reading = await under_way(rig.value(b"a", end), seconds=0)
    await rig.tablet.close()
    with pytest.raises(TabletMoved):
        await reading


async def test_a_commit_during_such_a_read_does_not_leave_a_stale_memory_of_the_cell(
    rig: Rig,
) -> None:
    await rig.apply(written(b"a", 10, 11, b"old"))
    end = await lock_many(rig, 100)
    rig = await without_names(rig, slice_entries=10)
    reading = await under_way(rig.value(b"a", end), seconds=0)
    await rig.apply(prewrite(b"a", end + 1, b"new"))
    await rig.apply(commit(b"a", end + 1, end + 2, b"new"))
    assert await reading == b"old"
    assert await rig.value(b"a", end + 3) == b"new"


@pytest.mark.parametrize(("older", "expected"), [(STEPS_MAX - 1, 11), (STEPS_MAX, None)])
async def test_a_new_lock_finds_the_change_below_a_few_records_that_name_nothing(
    rig: Rig, older: int, expected: int | None
) -> None:
    await rig.apply(written(b"a", 10, 11, b"value"))
    end = await lock_many(rig, 100, older)
    rig = await without_names(rig)
    await rig.apply(locked(b"a", end))
    assert (await named(rig))[0] == expected
    assert await rig.value(b"a", end) == b"value"
    await rig.apply(locked(b"a", end + 2))
    assert (await named(rig))[0] == 11, "a read has found it in the meantime"


async def test_two_commits_of_a_cell_in_one_mutation_name_no_change(rig: Rig) -> None:
    """The change that the second one would name is not in the storage yet."""
    changes = [put(WRITE, write_record(9, b"value"), 10)]
    changes.append(put(WRITE, write_record(11, b"", RecordKind.LOCK_ONLY), 12))
    await rig.apply(mutation(b"a", *changes))
    assert await named(rig) == [None]
    assert await rig.value(b"a", 20) == b"value"


async def lingering_commit() -> tuple[Rig, asyncio.Task[list[pb.MutationResult]]]:
    """A cell whose change below a lock is remembered, and a commit that the storage shows but
    memory has not heard of."""
    storage = LingeringStorage(DurableMemory())
    rig = await Rig(storage=storage).open()
    await rig.apply(written(b"a", 10, 11, b"old"), written(b"b", 10, 11, b"other"))
    await rig.apply(locked(b"a", 20))
    assert await rig.value(b"a", 25) == b"old"
    await rig.apply(prewrite(b"a", 30, b"new"))
    storage.lingering = True
    return rig, await under_way(rig.mutate(commit(b"a", 30, 40, b"new")))


@pytest.mark.parametrize("moments", [[50], [25, 50]], ids=["above it only", "below it before"])
async def test_a_commit_is_read_as_soon_as_its_lock_is_gone_whatever_memory_remembers(
    moments: list[int],
) -> None:
    """And a read below it teaches memory nothing about its cell."""
    rig, committing = await lingering_commit()
    expected = [{25: b"old", 50: b"new"}[at] for at in moments]
    assert [await rig.value(b"a", at) for at in moments] == expected
    await committing
    assert [await rig.value(b"a", at) for at in moments] == expected
