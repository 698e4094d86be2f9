"""Group commit: many mutations, one synced write, and the rules that make it safe.

A batch is judged, written with one synced write, the ownership of the tablet is checked, mirror and
index are brought up to date, and only then every answer of the batch leaves. Then the next batch is
judged. What each rule prevents:

* Refusals leave with the batch, not before: a refusal may tell of a commit in the same batch, and
  after a power cut that commit never was, but somebody has acted on it.
* The next batch is judged after the last is durable: else a late prewrite passes the rollback
  marker that is still on its way to the disk.
* A second mutation of a cell that the batch changes waits for the next batch: conditions are then
  always judged against what is durable, never against an overlay.
* A batch without changes checks the ownership too: a deposed owner must not answer from old state.
* After a failed write the batch's outcome is unknown, its log decides at reopening, and nothing is
  judged or read until then.
* What waited beyond its deadline is dropped unexecuted, and says so.
"""

from __future__ import annotations

import asyncio
from collections import deque

from percolator.errors import ExecutionUnknown, NotExecuted, Overloaded, PercolatorError
from percolator.tablet import opening
from percolator.tablet.commit_work import APPLIED, CommitWork, not_executed, unknown
from percolator.tablet.judge import Judge
from percolator.tablet.judged_batch import JudgedBatch
from percolator.tablet.keys import STATISTICS_KEY
from percolator.tablet.load_fences import closed
from percolator.tablet.mutations import marked_below
from percolator.tablet.state import TabletState
from percolator.v1 import tabletserver_pb2 as pb

BATCHES_PER_NOTE = 64
"""After a crash the statistics are as old as this many batches."""


_ANSWER_FULL = not_executed(NotExecuted("the answer is full: ask for the rest again"))


class GroupCommit:
    """The queue of a tablet's mutations, and the one task that works it off."""

    def __init__(self, state: TabletState) -> None:
        self._state = state
        self._queue: deque[CommitWork] = deque()
        self._conditions = Judge(state.storage, state.mirror, state.recent)
        self._turn = asyncio.Lock()
        """Held from judging to answering, and by every other write: one is in flight at a time."""
        self._task: asyncio.Task[None] | None = None
        self.queued_bytes = 0

    def execute(self, work: CommitWork) -> asyncio.Future[list[pb.MutationResult]]:
        """One result per mutation. Raises `Overloaded`."""
        self.require_room(work.weight)
        self._queue.append(work)
        self.queued_bytes += work.weight
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return work.done

    def require_room(self, weight: int) -> None:
        """An empty queue takes whatever fits into a request."""
        limits = self._state.limits
        if self._queue and self.queued_bytes + weight > limits.queue_bytes_max:
            raise Overloaded(
                f"{self.queued_bytes} bytes of mutations wait for {self._state.identity}",
                retry_after_seconds=limits.overload_retry_seconds,
            )

    def between_batches(self) -> asyncio.Lock:
        """While it is held no batch is under way: what was judged before has been answered."""
        return self._turn

    def abandon(self) -> None:
        """Answers whatever waits, once the tablet is closed. Only between two batches."""
        self._conclude(None)

    async def _run(self) -> None:
        try:
            while self._queue:
                async with self._turn:
                    # Empty by now when the tablet was closed first: so is its storage.
                    if self._queue:
                        await self._commit()
        finally:
            self._task = None

    async def _commit(self) -> None:
        """One batch, from its judgement to its answers."""
        state = self._state
        batch = JudgedBatch(state.storage, state.mirror)
        try:
            result = await self._judge_and_write(batch)
            if result is None:
                batch.publish(state.mirror, state.index, state.recent, state.counters)
                if batch.notifications and state.watch is not None:
                    state.watch.tell(state.identity.table_id, batch.notifications)
        except BaseException as error:
            # A bug, or the end of the process: nobody may be left waiting for an answer, and
            # nothing may be judged or read when memory does not know what is durable.
            why = f"{state.identity} stopped: {error!r}"
            state.stop(NotExecuted(why))
            self._conclude(unknown(ExecutionUnknown(why)))
            raise
        self._conclude(result)

    async def _judge_and_write(self, batch: JudgedBatch) -> pb.MutationResult | None:
        """None, or what has become of everything judged, whatever the judge found."""
        state = self._state
        try:
            state.require_open()
            await self._judge(batch)
            state.require_open()
        except state.storage.failures as error:
            return not_executed(state.storage_failed(error))
        except PercolatorError as error:
            return not_executed(error)
        try:
            if batch.changed:
                batch.note_bounds(state.recent)
                if state.counters.batches_synced % BATCHES_PER_NOTE == 0:
                    batch.writes.put(STATISTICS_KEY, opening.counts_record(state))
                await state.storage.write(batch.writes)
            else:
                await asyncio.sleep(0)
        except state.storage.failures as error:
            return unknown(ExecutionUnknown(f"the write failed: {state.storage_failed(error)}"))
        if not state.owned():
            return unknown(ExecutionUnknown(f"it may be done: {state.closed_because}"))
        return None

    async def _judge(self, batch: JudgedBatch) -> None:
        """Judges what waits, in the order in which it came, as far as one batch may go."""
        state, limits = self._state, self._state.limits
        judge = self._conditions
        room = limits.commit_mutations_max
        until_pause = limits.slice_rows
        try:
            for work in tuple(self._queue):
                while work.untaken and room and batch.bytes < limits.commit_bytes_max:
                    refusal = work.refusal(state)
                    if refusal is not None:
                        work.abandon(not_executed(refusal))
                        break
                    part = work.take(min(room, until_pause))
                    self._judge_part(work, part, judge, batch)
                    room -= len(part)
                    until_pause -= len(part)
                    if not until_pause:
                        await asyncio.sleep(0)
                        until_pause = limits.slice_rows
        finally:
            judge.close()

    def _judge_part(
        self, work: CommitWork, part: list[int], judge: Judge, batch: JudgedBatch
    ) -> None:
        state = self._state
        _, safe_point, collected = state.safe_points
        fences = state.load_fences
        steps, results, judged, touched = work.steps, work.results, work.judged, batch.touched
        for index in part:
            step = steps[index]
            _, _, cell, not_below, _, changes = step
            if cell in touched:
                work.deferred.append(index)
                continue
            judged.append(index)
            fence = fences.over(step[0]) if fences else None
            if fence is not None:
                results[index] = not_executed(closed(fence))
                continue
            if not_below:
                if not_below < safe_point:
                    results[index] = not_executed(state.too_old(not_below, safe_point))
                    continue
            elif collected and (marked := marked_below(collected, changes)):
                results[index] = not_executed(state.too_old(marked, collected))
                continue
            refusal = judge.refusal(step)
            if refusal is not None:
                results[index] = refusal
                batch.refused += 1
                work.refusal_bytes += len(refusal.cell.value)
                if work.refusal_bytes > state.limits.answer_bytes_max:
                    # None of the rest was judged, and the order of what is done stays.
                    for late in part[part.index(index) + 1 :]:
                        results[late] = _ANSWER_FULL
                    work.abandon(_ANSWER_FULL)
                    return
            else:
                results[index] = APPLIED
                batch.applied += 1
                if changes:
                    batch.add(step)

    def _conclude(self, result: pb.MutationResult | None) -> None:
        """Ends the batch for every work in the queue, and lets go of those that are answered."""
        if self._state.closed_because is not None:
            refused = not_executed(self._state.closed_because)
            for work in self._queue:
                work.abandon(refused)
        queue = self._queue
        for _ in range(len(queue)):
            work = queue.popleft()
            if work.conclude(result):
                self.queued_bytes -= work.weight
            else:
                queue.append(work)
