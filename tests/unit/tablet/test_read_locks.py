"""Read locks of a cell and its writers exclude each other, and read locks do not."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.errors import InvalidArgument, Unavailable
from percolator.formats.records import KIND_READ_LOCK, RecordKind
from percolator.tablet import judge
from percolator.tablet.cells import FORMAT_KEY
from percolator.tablet.group_commit import MutationWork, OneRoundTransactions
from percolator.tablet.state import SafePoints
from percolator.testing.memory_storage import DurableMemory
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from tests.simulation.loop import run_simulation
from tests.unit.tablet.tablets import (
    ABSENT,
    APPLIED,
    COLUMN,
    LOCKED,
    NEWER,
    NOT_EXECUTED,
    REFUSED,
    TARGET,
    WRITE,
    OneRoundRig,
    Rig,
    SlowDisk,
    commit,
    commit_read_lock,
    condition,
    counted,
    hidden,
    mutation,
    one_round,
    one_round_read_lock,
    only,
    outcomes,
    prewrite,
    read_lock,
    roll_back,
    roll_back_read_lock,
    started,
    under_way,
    written,
)

ROW = b"hub"


async def _refusal(rig: Rig, step: pb.Mutation) -> tuple[int, bytes, int]:
    """Which condition failed, and the column and timestamp of the cell that is in the way."""
    (result,) = await rig.mutate(step)
    assert result.outcome == REFUSED
    assert (result.cell.row, result.cell.column) == (ROW, step.column)
    return result.failed_condition, _column(result), result.cell.timestamp


def _column(refusal: pb.MutationResult) -> bytes:
    """The column in which the lock or record is stored because of which it was refused."""
    return refusal.cell.qualifier or refusal.cell.column


# ------------------------------------------------------------------ who excludes whom


async def test_a_writer_meets_a_live_read_lock_and_then_its_commit(rig: Rig) -> None:
    """Its prewrite is the one of the protocol, without a word about read locks."""
    await rig.apply(read_lock(ROW, 10))
    assert await _refusal(rig, prewrite(ROW, 12)) == (LOCKED, hidden(10), 0)
    (result,) = await rig.mutate(prewrite(ROW, 12))
    assert result.cell.value.startswith((10).to_bytes(8, "big"))
    await rig.apply(commit_read_lock(ROW, 10, 20))
    assert await _refusal(rig, prewrite(ROW, 12)) == (NEWER, hidden(10), 20)
    assert await _refusal(rig, prewrite(ROW, 20)) == (NEWER, hidden(10), 20)
    await rig.apply(prewrite(ROW, 21))


@pytest.mark.parametrize("kind", [RecordKind.PUT, RecordKind.DELETE, RecordKind.LOCK_ONLY])
async def test_a_read_lock_meets_a_live_writer_and_then_its_commit(
    rig: Rig, kind: RecordKind
) -> None:
    await rig.apply(prewrite(ROW, 10, kind=kind))
    assert await _refusal(rig, read_lock(ROW, 12)) == (LOCKED, COLUMN, 0)
    await rig.apply(commit(ROW, 10, 20, kind=kind))
    assert await _refusal(rig, read_lock(ROW, 12)) == (NEWER, COLUMN, 20)
    await rig.apply(read_lock(ROW, 21))


async def test_only_the_locked_cell_is_locked(rig: Rig) -> None:
    """Not the others of its row, not one whose name begins the same, nor one in another row."""
    await rig.apply(read_lock(ROW, 10))
    await rig.apply(commit_read_lock(ROW, 10, 20))
    await rig.apply(read_lock(ROW, 11))
    for row, column in (
        (ROW, b"other"),
        (ROW, COLUMN + b"s"),
        (ROW, COLUMN[:-1]),
        (b"hut", COLUMN),
    ):
        step = prewrite(row, 12)
        step.column = column
        await rig.apply(step)


async def test_both_ways_to_commit_exclude_each_other(one_round_rig: OneRoundRig) -> None:
    await one_round_rig.apply(read_lock(ROW, 10))
    assert only(await one_round_rig.commit(one_round(12, {ROW: b"v"}))).failed_condition == LOCKED
    await one_round_rig.apply(roll_back_read_lock(ROW, 10))
    assert list((await one_round_rig.commit(one_round_read_lock(13, ROW))).commit_timestamps) == [
        100
    ]
    found = only(await one_round_rig.commit(one_round(14, {ROW: b"v"})))
    assert (found.failed_condition, _column(found)) == (NEWER, hidden(13))
    assert await _refusal(one_round_rig, prewrite(ROW, 15)) == (NEWER, hidden(13), 100)
    assert list((await one_round_rig.commit(one_round(150, {ROW: b"v"}))).commit_timestamps) == [
        200
    ]
    assert only(await one_round_rig.commit(one_round_read_lock(160, ROW))).failed_condition == NEWER
    assert await _refusal(one_round_rig, read_lock(ROW, 161)) == (NEWER, COLUMN, 200)


async def test_a_read_does_not_wait_for_a_read_lock(rig: Rig) -> None:
    await rig.apply(written(ROW, 2, 3, b"v"), read_lock(ROW, 10))
    assert await rig.value(ROW, 50) == b"v"
    (page,) = await rig.scan(50)
    assert (list(page.found.values), list(page.locks)) == ([b"v"], [])


# ------------------------------------------------------------------ at the same time


async def test_of_two_in_one_request_only_one_is_there() -> None:
    """Each would be judged before the other is durable."""
    for steps in ((read_lock(ROW, 10), prewrite(ROW, 12)), (prewrite(ROW, 12), read_lock(ROW, 10))):
        rig = await Rig().open()
        assert [one.outcome for one in await rig.mutate(*steps)] == [APPLIED, REFUSED]


async def test_read_locks_of_one_cell_share_a_batch(rig: Rig) -> None:
    await rig.apply(*(read_lock(ROW, start) for start in range(10, 60)))
    assert rig.tablet._state.counters.batches_synced == 1


async def test_a_writer_waits_for_read_locks_that_are_held_and_the_other_way_round(
    one_round_rig: OneRoundRig,
) -> None:
    readers = [one_round_rig.committing(one_round_read_lock(start, ROW)) for start in (10, 11)]
    await asyncio.sleep(0.5)
    writing = await under_way(one_round_rig.mutate(prewrite(ROW, 12)), seconds=0.1)
    late = one_round_rig.committing(one_round_read_lock(13, ROW))
    for reader in readers:
        assert (await reader).commit_timestamps[0] >= 100
    assert await outcomes(writing) == [REFUSED], "it began before they had committed"
    assert (await late).commit_timestamps[0] > 100, "it waited behind the writer"


async def test_a_read_lock_waits_for_a_writer_that_holds_the_cell(
    one_round_rig: OneRoundRig,
) -> None:
    writing = await under_way(one_round_rig.commit(one_round(10, {ROW: b"v"})))
    reading = started(one_round_rig, read_lock(ROW, 12))
    late = await under_way(one_round_rig.commit(one_round_read_lock(13, ROW)), seconds=0.1)
    assert not reading.done()
    assert list((await writing).commit_timestamps) == [100]
    assert await outcomes(reading) == [REFUSED]
    assert only(await late).failed_condition == NEWER


# ------------------------------------------------------------------ what is stored


async def test_the_format_is_marked_once_there_is_a_read_lock(rig: Rig, disk: SlowDisk) -> None:
    await rig.apply(prewrite(ROW, 5))
    await rig.apply(commit(ROW, 5, 6))
    assert disk.durable[FORMAT_KEY] == b"1"
    await rig.apply(read_lock(ROW, 10))
    assert disk.durable[FORMAT_KEY] == b"3"


async def test_a_change_feed_does_not_lower_the_format_nor_does_the_end_of_an_earlier_load(
    rig: Rig, disk: SlowDisk
) -> None:
    await rig.apply(read_lock(ROW, 10))
    load = pb.LoadFence(name="load", run=20, range=RowRange(start=b"x"))
    await _fence(rig, pb.FenceRequest.ACTION_RAISE, load)
    await rig.tablet.set_schema_version(4, change_feed=True)
    assert disk.durable[FORMAT_KEY] == b"3"
    load.commit_timestamp = 21
    await _fence(rig, pb.FenceRequest.ACTION_FINISH, load)
    await _fence(rig, pb.FenceRequest.ACTION_LIFT, load)
    assert (disk.durable[FORMAT_KEY], rig.tablet._state.feed.complete_from) == (b"3", 21)
    again = await rig.reopened(change_feed=True)
    assert again.tablet._state.feed.on
    assert await _refusal(again, prewrite(ROW, 25)) == (LOCKED, hidden(10), 0)


async def _fence(rig: Rig, action: pb.FenceRequest.Action, load: pb.LoadFence) -> None:
    await rig.tablet.fence(pb.FenceRequest(target=TARGET, action=action, fence=load))


async def test_a_new_owner_knows_the_read_locks_and_their_commits(rig: Rig) -> None:
    await rig.apply(read_lock(ROW, 10), read_lock(ROW, 11), written(b"other", 18, 30))
    await rig.apply(commit_read_lock(ROW, 11, 20))
    again = await rig.reopened()
    assert await _refusal(again, prewrite(ROW, 25)) == (LOCKED, hidden(10), 0)
    await again.apply(roll_back_read_lock(ROW, 10))
    assert await _refusal(again, prewrite(ROW, 12)) == (NEWER, hidden(11), 20)
    await again.apply(prewrite(ROW, 25))


async def test_an_old_transaction_comes_back_when_there_are_too_many_to_look_at(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "LOOKED_AT_MAX", 3)
    for start in range(10, 18, 2):
        await rig.apply(read_lock(ROW, start))
        await rig.apply(commit_read_lock(ROW, start, start + 1))
    await rig.apply(written(b"other", 30, 40))
    again = await rig.reopened()
    assert await _refusal(again, prewrite(ROW, 17)) == (NEWER, hidden(16), 17)
    (result,) = await again.mutate(prewrite(ROW, 25))
    assert result.outcome == NOT_EXECUTED
    assert "more than 3 read locks" in result.error.message
    await again.apply(prewrite(ROW, 41))


async def test_their_records_are_collected_before_the_history_around_them(
    rig: Rig, disk: SlowDisk
) -> None:
    """However long the table keeps snapshots: they carry nothing that a snapshot shows."""
    await rig.apply(written(ROW, 6, 7, b"old"), written(b"hut", 6, 7, b"old"))
    await rig.apply(*(read_lock(ROW, start) for start in (10, 20, 30)))
    await rig.apply(*(commit_read_lock(ROW, start, start + 1) for start in (10, 20, 30)))
    await rig.apply(roll_back_read_lock(ROW, 12))
    await rig.tablet.raise_safe_points(SafePoints(reads=5, transactions=25))
    assert (await rig.tablet.collect(5, ended_below=25)).cells == 3
    left = [(cell.column, cell.timestamp) for cell in await rig.cells(WRITE)]
    assert left == [(hidden(30), 31), (COLUMN, 7), (COLUMN, 7)]
    for opened in (rig, await Rig(disk=disk).open()):
        assert await _refusal(opened, prewrite(ROW, 26)) == (NEWER, hidden(30), 31)


async def test_a_repeated_prewrite_finds_its_own_lock_commit_and_marker(rig: Rig) -> None:
    await rig.apply(read_lock(ROW, 10))
    assert await _refusal(rig, read_lock(ROW, 10)) == (LOCKED, hidden(10), 0)
    await rig.apply(commit_read_lock(ROW, 10, 20), roll_back_read_lock(ROW, 11))
    assert await _refusal(rig, read_lock(ROW, 10)) == (0, hidden(10), 20)
    assert await _refusal(rig, read_lock(ROW, 11)) == (1, hidden(11), 11)


# ------------------------------------------------------------------ bad requests


async def test_a_kind_that_is_only_for_write_sets_is_refused(one_round_rig: OneRoundRig) -> None:
    with pytest.raises(InvalidArgument, match=r"kinds\[0\]: 5 is not a kind"):
        await one_round_rig.commit(one_round(10, {ROW: b""}, KIND_READ_LOCK, hidden(10)))


async def test_a_transaction_does_not_write_a_cell_and_read_lock_it(
    one_round_rig: OneRoundRig,
) -> None:
    both = one_round(10, {ROW: b"v"})
    both.MergeFrom(one_round_read_lock(10, ROW))
    del both.start_timestamps[1:], both.cells[:]
    both.cells.append(2)
    with pytest.raises(InvalidArgument, match=r"cells\[0\]: a write of a cell, and a read lock"):
        await one_round_rig.commit(both)
    assert not await one_round_rig.cells(WRITE)


# Who has a cell next, and that nothing else is looked at.

# ---------------------------------------------------------------- order


async def test_what_waits_for_several_cells_is_not_overtaken_on_any_of_them(
    one_round_rig: OneRoundRig,
) -> None:
    """It would wait forever where the others never leave all of them free at once."""
    first = await under_way(one_round_rig.commit(one_round(10, {b"a": b"1"})))
    both = one_round_rig.committing(one_round(150, {b"a": b"2", b"b": b"2"}))
    await asyncio.sleep(0.1)
    later = one_round_rig.committing(one_round(160, {b"b": b"3"}))
    found = [list((await one).commit_timestamps) for one in (first, both)]
    assert (found, only(await later).cell.timestamp) == ([[100], [200]], 200)


async def test_a_crowd_of_mutations_does_not_keep_a_transaction_waiting(
    one_round_rig: OneRoundRig,
) -> None:
    crowd = [started(one_round_rig, written(b"a", 1, 2)) for _ in range(3)]
    await asyncio.sleep(0.5)
    committing = await under_way(one_round_rig.commit(one_round(10, {b"a": b"1"})), seconds=0.1)
    crowd += [started(one_round_rig, written(b"a", 1, 2)) for _ in range(20)]
    await committing
    assert sum(task.done() for task in crowd) == 3
    await asyncio.gather(*crowd)


async def test_a_mutation_never_overtakes_an_earlier_one_of_its_cell() -> None:
    """Not even if the cell becomes free between the looks at the two."""
    rig = await OneRoundRig(slice_rows=1).open()
    rig.oracle.failure, rig.oracle.gate = Unavailable("silent"), asyncio.Event()
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})), seconds=0.1)
    others = [written(b"%d" % number, 1, 2) for number in range(200)]
    question = mutation(b"a", conditions=[condition(WRITE, ABSENT)])
    asked = started(rig, written(b"a", 1, 2), *others, question)
    for _ in range(50):
        await asyncio.sleep(0)  # a mutation is looked at in each turn
    rig.oracle.gate.set()
    assert only(await committing).outcome == NOT_EXECUTED
    assert not asked.done()
    first, *_, last = await outcomes(asked)
    assert (first, last) == (APPLIED, REFUSED)


async def test_while_the_oracle_is_silent_those_that_wait_do_not_wait_one_after_the_other(
    one_round_rig: OneRoundRig,
) -> None:
    one_round_rig.oracle.failure = Unavailable("silent")
    crowd = []
    for start in range(10, 20):
        crowd.append(one_round_rig.committing(one_round(start, {b"a": b"1"})))
        await asyncio.sleep(0.01)
    marking = started(one_round_rig, roll_back(b"a", 5))
    began = one_round_rig.clock.monotonic_seconds()
    assert await outcomes(marking) == [APPLIED]
    assert one_round_rig.clock.monotonic_seconds() - began == pytest.approx(
        1.9, abs=0.1
    )  # and the disk
    for task in crowd:
        assert only(await task).outcome == NOT_EXECUTED
    assert len(one_round_rig.oracle.asked) == 1


async def test_a_request_that_ends_in_line_is_not_judged_any_further_in_the_queue() -> None:
    rig = await OneRoundRig(commit_mutations_max=2).open()
    committing = await under_way(
        rig.commit(one_round(10, {b"a": b"1", b"c": b"1", b"d": b"1"})), seconds=0.1
    )
    others = started(rig, roll_back(b"c", 5), roll_back(b"d", 5))
    asked = [roll_back(b"a", 5), *(written(b"%d" % row, 1, 2) for row in range(9))]
    late = asyncio.ensure_future(rig.mutate(*asked, within_seconds=1.5))
    await committing
    found = [result.outcome for result in await late]
    assert found[0] == found[-1] == NOT_EXECUTED
    assert await outcomes(others) == [APPLIED, APPLIED]
    await rig.apply(written(b"z", 1, 2))


# ---------------------------------------------------------------- cost


async def test_mutations_behind_a_held_cell_leave_room_for_others() -> None:
    rig = await OneRoundRig(commit_mutations_max=4).open()
    rig.oracle.seconds = 60.0
    committing = await under_way(rig.commit(one_round(10, {b"a": b"1"})))
    behind = [started(rig, roll_back(b"a", start)) for start in range(20, 40)]
    await asyncio.sleep(0.1)
    await rig.apply(*(written(b"b%d" % number, 1, 2) for number in range(8)))
    assert not committing.done()
    assert not any(task.done() for task in behind)
    await committing
    assert all([await outcomes(task) == [APPLIED] for task in behind])


async def test_a_transaction_that_waits_is_judged_once(
    one_round_rig: OneRoundRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = counted(monkeypatch, OneRoundTransactions, "_obstacle")
    crowd = []
    for start in range(10, 110):
        crowd.append(one_round_rig.committing(one_round(start, {b"a": b"1"})))
        await asyncio.sleep(0.001)
    for row in range(10):
        await one_round_rig.commit(one_round(10, {b"%d" % row: b"1"}))
    results = await asyncio.gather(*crowd)
    assert [list(result.commit_timestamps) for result in results].count([100]) == 1
    assert len(looks) == 110


async def test_a_mutation_that_waits_is_looked_at_twice(
    one_round_rig: OneRoundRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it arrives, and when it is the first in line and the cell is free."""
    one_round_rig.oracle.seconds = 60.0
    committing = await under_way(one_round_rig.commit(one_round(10, {b"a": b"1"})))
    looks = counted(monkeypatch, MutationWork, "refusal")
    behind = [started(one_round_rig, roll_back(b"a", 10)) for _ in range(50)]
    for row in range(20):
        await one_round_rig.apply(written(b"b%d" % row, 1, 2))
    await committing
    assert all([await outcomes(task) == [REFUSED] for task in behind])
    assert len(looks) == 2 * 50 + 20


# Any steps of writers and read locks, in any order, in both ways to commit: against a few lines
# that say when each may pass.

ROWS = [b"a", b"a\0", b"b"]

Interval = tuple[int, int]
"""Start and commit timestamp."""


class _Cell:
    """Knowledge of one cell: who is writing or reading it, and who has."""

    def __init__(self) -> None:
        self.writer = 0
        self.readers: set[int] = set()
        self.written: list[Interval] = []
        self.read: list[Interval] = []

    def obstacle(self, start: int, *, reads: bool) -> int | None:
        """The condition that fails for a prewrite, or None."""
        newer = [commit for _, commit in self.written if commit >= start]
        if self.writer or newer:
            return LOCKED if self.writer else NEWER
        if reads:
            return None
        if self.readers:
            return LOCKED
        return NEWER if any(commit >= start for _, commit in self.read) else None

    def check(self) -> None:
        """No writer overlaps anybody."""
        for start, end in self.written:
            for other_start, other_end in (*self.written, *self.read):
                if (start, end) != (other_start, other_end):
                    assert end <= other_start or other_end <= start


class _Model:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._now = 10
        self._disk = DurableMemory()
        self._cells = {row: _Cell() for row in ROWS}
        self._begun: list[int] = []

    def _next(self) -> int:
        self._now += self._random.randint(1, 3)
        return self._now

    async def run(self, steps: int) -> None:
        await self._open()
        for _ in range(steps):
            self._begun.append(self._next())
            row = self._random.choice(ROWS)
            await self._step(row, self._cells[row])
        for cell in self._cells.values():
            cell.check()

    async def _open(self) -> None:
        self._rig = OneRoundRig(disk=self._disk)
        self._rig.oracle.seconds = 0.0
        await self._rig.open()

    async def _step(self, row: bytes, cell: _Cell) -> None:
        match self._random.randrange(7):
            case 0 | 1:
                await self._prewrite(row, cell)
            case 2 | 3:
                await self._in_one_round(row, cell)
            case 4 | 5:
                await self._end(row, cell)
            case _:
                await self._rig.tablet.close()
                await self._open()

    def _old_or_new(self) -> int:
        """The start of a transaction that has done nothing yet: a recent one, or an old one."""
        at = self._random.choice((-1, self._random.randrange(len(self._begun))))
        return self._begun.pop(at)

    async def _prewrite(self, row: bytes, cell: _Cell) -> None:
        start, reads = self._old_or_new(), self._random.random() < 0.6
        step = read_lock(row, start) if reads else prewrite(row, start)
        (result,) = await self._rig.mutate(step)
        expected = cell.obstacle(start, reads=reads)
        assert (None if result.outcome == APPLIED else result.failed_condition) == expected
        if expected is None and reads:
            cell.readers.add(start)
        elif expected is None:
            cell.writer = start

    async def _in_one_round(self, row: bytes, cell: _Cell) -> None:
        start, reads = self._old_or_new(), self._random.random() < 0.6
        self._rig.oracle.next = self._next()
        message = one_round_read_lock(start, row) if reads else one_round(start, {row: b"v"})
        result: pb.TransactionBatchResult = await self._rig.commit(message)
        expected = cell.obstacle(start, reads=reads)
        if expected is None:
            (cell.read if reads else cell.written).append((start, result.commit_timestamps[0]))
            assert list(result.commit_timestamps) == [self._now]
        else:
            assert result.uncommitted[0].result.failed_condition == expected

    async def _end(self, row: bytes, cell: _Cell) -> None:
        commits = self._random.random() < 0.7
        if cell.readers:
            start = self._random.choice(sorted(cell.readers))
            cell.readers.remove(start)
            if commits:
                cell.read.append((start, self._next()))
                await self._rig.apply(commit_read_lock(row, start, self._now))
            else:
                await self._rig.apply(roll_back_read_lock(row, start))
        elif cell.writer:
            start, cell.writer = cell.writer, 0
            if commits:
                cell.written.append((start, self._next()))
                await self._rig.apply(commit(row, start, self._now))
            else:
                await self._rig.apply(roll_back(row, start))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_each_step_passes_when_it_may_and_no_writer_overlaps_anybody(seed: int, steps: int) -> None:
    run_simulation(lambda _: _Model(Random(seed)).run(steps))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_of_what_comes_at_the_same_time_no_writer_overlaps_anybody(seed: int) -> None:
    run_simulation(lambda _: _crowd(Random(seed)))


async def _crowd(random: Random) -> None:
    """Writers and read locks of one cell, in both ways, all on their way at once."""
    rig = await OneRoundRig().open()
    cell = _Cell()

    async def one(start: int) -> None:
        await asyncio.sleep(random.random() * 4)
        reads, in_one_round = random.random() < 0.6, random.random() < 0.5
        if in_one_round:
            message = one_round_read_lock(start, b"a") if reads else one_round(start, {b"a": b"v"})
            commit_timestamp = (await rig.commit(message)).commit_timestamps[0]
        else:
            commit_timestamp = await _in_two_phases(rig, start, reads=reads)
        if commit_timestamp:
            (cell.read if reads else cell.written).append((start, commit_timestamp))

    await asyncio.gather(*(one(start) for start in range(10, 40)))
    cell.check()


async def _in_two_phases(rig: OneRoundRig, start: int, *, reads: bool) -> int:
    step = read_lock(b"a", start) if reads else prewrite(b"a", start)
    (result,) = await rig.mutate(step)
    if result.outcome != APPLIED:
        return 0
    end = await rig.oracle(1)
    await rig.apply(commit_read_lock(b"a", start, end) if reads else commit(b"a", start, end))
    return end
