"""The mutations of a tablet: queued, waiting for their cells, judged in batches, answered.

What waits for its cell (lines.py) has left the queue, and takes up no room in a batch: one held
cell must not stop the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from percolator.formats.reach import too_old
from percolator.tablet.memory.load_fences import closed
from percolator.tablet.memory.read_locks import cells_locked_by
from percolator.tablet.memory.state import TabletState
from percolator.tablet.writing.judge import Judge
from percolator.tablet.writing.judged_batch import JudgedBatch
from percolator.tablet.writing.lines import Lines, Place
from percolator.tablet.writing.mutation_work import MutationWork
from percolator.tablet.writing.mutations import marked_below
from percolator.tablet.writing.results import ANSWER_FULL, APPLIED, not_executed
from percolator.v1 import tabletserver_pb2 as pb

_Waiting = tuple[MutationWork, int]
"""A mutation: the work that it belongs to, and its index there."""


class MutationQueue:
    """The mutations of one tablet that are on their way."""

    def __init__(
        self, state: TabletState, lines: Lines, *, on_answered: Callable[[int], None]
    ) -> None:
        """`on_answered` is called with the weight of a request that was answered."""
        self._state = state
        self._lines = lines
        self._on_answered = on_answered
        self._judge = Judge.of(state)
        self.last_change = self._judge.last_change
        self._queue: deque[MutationWork] = deque()
        self._called: deque[Place[_Waiting]] = deque()
        """Those that waited for their cell and are the next to have it."""
        self._unanswered: dict[MutationWork, None] = {}
        """Everything in the queue, and what has left it to wait for cells."""
        self._met: dict[MutationWork, None] = {}
        """The work of which the batch in progress has judged or abandoned something."""

    @property
    def is_ready(self) -> bool:
        """Whether the next batch has something to look at."""
        # Closed by a failure outside of any batch: what waits for cells has to be told.
        is_closed = self._state.closed_because is not None
        return bool(self._queue or self._called or (is_closed and self._unanswered))

    @property
    def answers_something(self) -> bool:
        """Whether the batch in progress answers any mutation."""
        return bool(self._met)

    def add(self, work: MutationWork) -> None:
        self._queue.append(work)
        self._unanswered[work] = None

    async def judge(self, batch: JudgedBatch) -> None:
        """Judges mutations until the batch is full: first those that have waited for their cells,
        then the others in order of arrival."""
        limits, queue, called = self._state.limits, self._queue, self._called
        room = limits.commit_mutations_max
        until_pause = limits.slice_rows
        while room > 0 and batch.bytes < limits.commit_bytes_max:
            if called:
                until_pause -= 1
                room -= self._judge_called(called.popleft(), batch)
            elif queue:
                work = queue[0]
                # One of its mutations may have ended the whole request while it waited.
                if work.untaken and not self._is_refused(work):
                    part = work.take(min(room, until_pause))
                    until_pause -= len(part)
                    room -= self._judge_part(work, part, batch)
                if not work.untaken:
                    queue.popleft()
            else:
                break
            if until_pause <= 0:
                await asyncio.sleep(0)
                until_pause = limits.slice_rows

    def end_judging(self) -> None:
        """Closes what was opened to judge this batch."""
        self._judge.close()

    def _is_refused(self, work: MutationWork) -> bool:
        """Whether nothing more of the work is judged. If so, its mutations end."""
        refusal = work.refusal(self._state)
        if refusal is None:
            return False
        work.abandon(not_executed(refusal))
        self._met[work] = None
        return True

    def _judge_called(self, place: Place[_Waiting], batch: JudgedBatch) -> int:
        """Judges a mutation that has waited for its cell. Returns 1 if it was judged, else 0."""
        work, index = place.waiter
        judged = 0
        if work.results[index] is None:
            if not self._lines.still_has_its_cells(place):
                return 0
            if not self._is_refused(work):
                judged = self._judge_part(work, (index,), batch, has_its_cell=True)
        self._lines.leave(place)
        return judged

    def _judge_part(
        self,
        work: MutationWork,
        part: Iterable[int],
        batch: JudgedBatch,
        *,
        has_its_cell: bool = False,
    ) -> int:
        """Judges these mutations; those whose cells are not free wait. Returns how many were
        judged."""
        state, lines, judge = self._state, self._lines, self._judge
        _, safe_point, collected = state.safe_points
        fences = state.load_fences or None
        mutations, results, judged = work.mutations, work.results, work.judged
        judged_before = len(judged)
        for index in part:
            mutation = mutations[index]
            _, _, cell, not_below, _, changes = mutation
            if not has_its_cell:
                locked = cells_locked_by((cell,)) if state.read_locks.used else ()
                if not lines.are_open((cell,), locked):
                    lines.join((work, index), (cell,), self._called, locked)
                    continue
            judged.append(index)
            fence = None if fences is None else fences.over(mutation[0])
            if fence is not None:
                results[index] = not_executed(closed(fence))
                continue
            if not_below:
                if not_below < safe_point:
                    results[index] = not_executed(too_old(not_below, safe_point))
                    continue
            elif collected and (marked := marked_below(collected, changes)):
                results[index] = not_executed(too_old(marked, collected))
                continue
            refusal = judge.refusal(mutation)
            if refusal is not None:
                results[index] = refusal
                batch.refused += 1
                work.refusal_bytes += len(refusal.cell.value)
                if work.refusal_bytes > state.limits.answer_bytes_max:
                    # None of the rest is judged, so the order of the mutations is preserved.
                    work.abandon(ANSWER_FULL)
                    break
            else:
                results[index] = APPLIED
                batch.applied += 1
                if changes:
                    batch.add(mutation)
        if len(judged) > judged_before:
            self._met[work] = None
        return len(judged) - judged_before

    def conclude(self, result: pb.MutationResult | None) -> None:
        """Ends the batch, and answers what it met; once the tablet is closed, everything."""
        met, self._met = self._met, {}
        if self._state.closed_because is not None:
            refused = not_executed(self._state.closed_because)
            met = self._unanswered.copy()
            for work in met:
                work.abandon(refused)
            self._queue.clear()
            self._called.clear()
        for work in met:
            if work.conclude(result):
                del self._unanswered[work]
                self._on_answered(work.weight)
