"""Whatever happens, an answer holds every change up to where it says it is complete, forever.

Transactions come and go in any order, commits show before they are heard of, tablets are closed,
split, trimmed and collected. Each answer of the feed is kept, and compared at the end with all
commits that there have been: also those that reached the tablet after the answer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.errors import SnapshotTooOld
from percolator.formats.records import RecordKind
from percolator.tablet.state import SafePoints, TabletIdentity
from percolator.testing.memory_storage import DurableMemory
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Random
from tests.simulation.virtual_time import run_virtually
from tests.unit.tablet.change_feeds import Answer, Change, changes, look
from tests.unit.tablet.tablets import COLUMN, Rig, commit, prewrite, roll_back, started
from tests.unit.tablet.watched_storages import LingeringStorage

ROWS = [b"", b"\0", b"a", b"a\0", b"b", b"n", b"\xff"]
SPLIT = b"a\0"
TINY_LIMITS: dict[str, Any] = {"slice_entries": 2, "recent_writes_max": 2}


@dataclass
class Locked:
    """A transaction with locks that are still there."""

    start: int
    rows: list[bytes]
    kind: RecordKind
    commit: int = 0


@dataclass
class World:
    """A tablet, its transactions, and the answers that it has given."""

    random: Random
    disk: DurableMemory = field(default_factory=DurableMemory)
    time: int = 0
    open: list[Locked] = field(default_factory=list)
    committed: dict[tuple[int, bytes], bytes | None] = field(default_factory=dict)
    answers: list[tuple[int, Answer, bytes]] = field(default_factory=list)
    safe_point: int = 0
    start_row: bytes = b""

    async def run(self, steps: int) -> None:
        rig = await self._opened()
        choices = [self._begin] * 4 + [self._end] * 5 + [self._ask] * 5 + [self._collect]
        for _ in range(steps):
            if self.random.random() < 0.05:
                await rig.tablet.close()
                if self.random.random() < 0.3 and not self.start_row and not self.open:
                    self.start_row = SPLIT
                rig = await self._opened()
                if self.random.random() < 0.5:
                    await rig.tablet.trim()
            await self.random.choice(choices)(rig)
        for answer in self.answers:
            self._compare(*answer)

    async def _opened(self) -> Rig:
        storage = LingeringStorage(self.disk)
        storage.lingering = True
        identity = TabletIdentity(7, 1, 2, self.start_row, b"")
        return await Rig(storage=storage, identity=identity, change_feed=True, **TINY_LIMITS).open()

    def _now(self) -> int:
        self.time += 1
        return self.time

    async def _begin(self, rig: Rig) -> None:
        start = self._now()
        taken = {row for locked in self.open for row in locked.rows}
        free = [row for row in ROWS if row not in taken and row >= self.start_row]
        rows = self.random.sample(free, min(len(free), self.random.randint(1, 2)))
        kind = self.random.choice([RecordKind.PUT, RecordKind.DELETE, RecordKind.LOCK_ONLY])
        if rows:
            await rig.apply(*(prewrite(row, start, kind=kind) for row in rows))
            self.open.append(Locked(start, rows, kind))

    async def _end(self, rig: Rig) -> None:
        """Commits or rolls back one cell; the others of its transaction may wait for long."""
        if not self.open:
            return
        locked = self.random.choice(self.open)
        row = locked.rows.pop()
        if not locked.rows:
            self.open.remove(locked)
        if not locked.commit and self.random.random() < 0.2:
            await rig.apply(roll_back(row, locked.start), *self._rest(locked))
            return
        locked.commit = locked.commit or self._now()
        value = b"of %d" % locked.start if locked.kind is RecordKind.PUT else b""
        task = started(rig, commit(row, locked.start, locked.commit, value, locked.kind))
        if locked.kind is not RecordKind.LOCK_ONLY:
            deleted = locked.kind is RecordKind.DELETE
            self.committed[locked.commit, row] = None if deleted else value
        # The write takes a second, and shows a second before its writer hears of it.
        for _ in range(self.random.randint(0, 2)):
            await asyncio.sleep(0.9)
            await self._ask(rig)
        await task

    def _rest(self, locked: Locked) -> list[pb.Mutation]:
        rows, locked.rows = locked.rows, []
        if locked in self.open:
            self.open.remove(locked)
        return [roll_back(row, locked.start) for row in rows]

    async def _ask(self, rig: Rig) -> None:
        until = self._now()
        after = self.random.randint(self.safe_point, until - 1)
        answer = await changes(
            rig, after, until, changes_max=self.random.choice([0, 1, 3]), page_bytes_max=40
        )
        self.answers.append((after, answer, self.start_row))
        reached, newest = await look(rig, after, until)
        assert reached >= answer.reached
        found = [change.commit for change in answer.changes]
        assert newest >= max(found, default=0)
        if not self.open:
            assert reached == until

    async def _collect(self, rig: Rig) -> None:
        below = min([self.time, *(locked.start for locked in self.open)])
        if below <= self.safe_point:
            return
        self.safe_point = self.random.randint(self.safe_point + 1, below)
        await rig.tablet.raise_safe_points(SafePoints(self.safe_point, self.safe_point))
        await rig.tablet.collect(self.safe_point)
        if self.safe_point > 1:
            try:
                await changes(rig, self.safe_point - 1, self._now())
            except SnapshotTooOld:
                return
            raise AssertionError("history that is gone was read")

    def _compare(self, after: int, answer: Answer, start_row: bytes) -> None:
        expected = [
            Change(at, row, COLUMN, value)
            for (at, row), value in sorted(self.committed.items())
            if after < at <= answer.reached and row >= start_row
        ]
        assert answer.changes == expected


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(5, 60))
def test_an_answer_is_complete_as_far_as_it_says(seed: int, steps: int) -> None:
    run_virtually(World(Random(seed)).run(steps))
