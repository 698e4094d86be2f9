"""Any steps of writers and read locks, in any order, in both ways to commit: against a few lines
that say when each may pass."""

from __future__ import annotations

import asyncio
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.testing.memory_storage import DurableMemory
from percolator.v1 import tabletserver_pb2 as pb
from tests.simulation.loop import run_simulation
from tests.unit.tablet.read_lock_steps import (
    LOCKED,
    NEWER,
    commit_read_lock,
    read_lock,
    roll_back_read_lock,
    whole_read_lock,
)
from tests.unit.tablet.tablets import APPLIED, Rig, commit, prewrite, roll_back
from tests.unit.tablet.whole_transactions import OneRoundRig, whole

ROWS = [b"a", b"a\0", b"b"]

Interval = tuple[int, int]
"""Start and commit timestamp."""


class _Cell:
    """What is known of one cell: who is writing or reading it, and who has."""

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
        message = whole_read_lock(start, row) if reads else whole(start, {row: b"v"})
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
    rig = OneRoundRig()
    await rig.open()
    cell = _Cell()

    async def one(start: int) -> None:
        await asyncio.sleep(random.random() * 4)
        reads, in_one_round = random.random() < 0.6, random.random() < 0.5
        if in_one_round:
            message = whole_read_lock(start, b"a") if reads else whole(start, {b"a": b"v"})
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
    await _apply(rig, commit_read_lock(b"a", start, end) if reads else commit(b"a", start, end))
    return end


async def _apply(rig: Rig, step: pb.Mutation) -> None:
    await rig.apply(step)
