"""Group commit: many mutations, one synced write, and the rules that make it safe.

A batch is judged and written with one synced write; then the ownership of the tablet is checked,
mirror and index are updated, and only then the answers of the batch leave. Then the next batch is
judged. What each rule prevents:

* Refusals leave with the batch, not before: a refusal may reveal a commit in the same batch, and
  after a power cut that commit would never have happened, although a client has acted on it.
* The next batch is judged after the previous one is durable: otherwise a late prewrite would miss
  the rollback marker that is still on its way to the disk.
* A second mutation of a cell that the batch changes waits for the next batch (lines.py): so
  conditions are always judged against what is durable, never against changes that are not yet
  durable.
* A batch without changes checks the ownership too: a deposed owner must not answer from old state.
* A mutation of a cell that a transaction holds (held_transactions.py) waits for that transaction's
  batch, and transactions that are ready go into the next batch together with the mutations.
* After a failed write, the outcome of the batch is unknown, the storage's log decides it when the
  tablet is reopened, and nothing is judged or read until then.
* A mutation that waited beyond its deadline is dropped unexecuted, and its answer says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from percolator.errors import ExecutionUnknown, NotExecuted, Overloaded, PercolatorError
from percolator.tablet import opening
from percolator.tablet.keys import STATISTICS_KEY
from percolator.tablet.memory.state import TabletState
from percolator.tablet.writing.held_transactions import HeldTransactions
from percolator.tablet.writing.judged_batch import JudgedBatch
from percolator.tablet.writing.lines import Lines
from percolator.tablet.writing.mutation_queue import MutationQueue
from percolator.tablet.writing.mutation_work import MutationWork
from percolator.tablet.writing.results import not_executed, unknown
from percolator.tablet.writing.transactions import WholeTransaction
from percolator.tablet.writing.write_latch import WriteLatch
from percolator.v1 import tabletserver_pb2 as pb

BATCHES_PER_NOTE = 64
"""After a crash, the statistics are out of date by up to this many batches."""


class GroupCommit:
    """The queue of a tablet's mutations and transactions, and the one task that processes it."""

    def __init__(self, state: TabletState) -> None:
        self._state = state
        self.latch = WriteLatch(state.held, self._admit_waiting)
        """Held by whatever else writes to the tablet."""
        self._lines = Lines(state.held, state.read_locks)
        self._mutations = MutationQueue(state, self._lines, on_answered=self._answered)
        self._transactions = HeldTransactions(
            state,
            self._lines,
            may_hold=lambda: not self.latch.is_wanted,
            stir=self._stir,
            on_answered=self._answered,
        )
        self._taken: list[WholeTransaction] = []
        """The transactions in the batch in progress."""
        self._task: asyncio.Task[None] | None = None
        self.queued_bytes = 0

    def execute(self, work: MutationWork) -> asyncio.Future[list[pb.MutationResult]]:
        """Queues the work; the future holds one result per mutation. Raises `Overloaded`."""
        self.require_room(work.weight)
        self._mutations.add(work)
        self.queued_bytes += work.weight
        self._stir()
        return work.done

    def commit(
        self, transactions: Sequence[WholeTransaction]
    ) -> asyncio.Future[pb.TransactionBatchResult]:
        """Queues the transactions of one request; the future holds its answer. Raises
        `Overloaded`."""
        work = transactions[0].work
        self.require_room(work.weight)
        self.queued_bytes += work.weight
        self._transactions.arrive(transactions)
        return work.done

    def require_room(self, weight: int) -> None:
        """Raises `Overloaded` if the queue is full. An empty queue takes any request."""
        limits = self._state.limits
        if self.queued_bytes and self.queued_bytes + weight > limits.queue_bytes_max:
            raise Overloaded(
                f"{self.queued_bytes} bytes of mutations wait for {self._state.identity}",
                retry_after_seconds=limits.overload_retry_seconds,
            )

    def abandon(self) -> None:
        """Answers all that waits, once the tablet is closed. Call it only with the latch held."""
        self._conclude(None)

    def _admit_waiting(self) -> None:
        self._transactions.admit_waiting()

    def _answered(self, weight: int) -> None:
        self.queued_bytes -= weight

    @property
    def _has_work(self) -> bool:
        return self._mutations.is_ready or self._transactions.is_ready

    def _stir(self) -> None:
        if self._task is None and self._has_work:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._has_work:
                async with self.latch.writing:
                    # Nothing is left if the tablet was closed meanwhile, with its storage.
                    if self._has_work:
                        await self._commit()
                        self.latch.note_batch()
        finally:
            self._task = None

    async def _commit(self) -> None:
        """Processes one batch, from its judgement to its answers."""
        state = self._state
        batch = JudgedBatch(state, self._mutations.last_change)
        self._lines.touched, self._lines.read_locked = batch.touched, batch.read_locked
        try:
            result = await self._judge_and_write(batch)
            if result is None and self._answers_something:
                batch.publish()
        except BaseException as error:
            # A bug, or the end of the process: no caller may be left waiting for an answer, and
            # nothing may be judged or read while memory does not know what is durable.
            why = f"{state.identity} stopped: {error!r}"
            state.stop(NotExecuted(why))
            self._conclude(unknown(ExecutionUnknown(why)))
            raise
        self._conclude(result)

    @property
    def _answers_something(self) -> bool:
        """Whether the batch answers anything; if not, all that it looked at waits for cells."""
        return bool(self._taken) or self._mutations.answers_something

    async def _judge_and_write(self, batch: JudgedBatch) -> pb.MutationResult | None:
        """Returns None if the batch is durable, else the result that replaces all its results."""
        state = self._state
        try:
            state.require_open()
            await self._fill(batch)
            state.require_open()
        except state.storage.failures as error:
            return not_executed(state.storage_failed(error))
        except PercolatorError as error:
            return not_executed(error)
        if not self._answers_something:
            return None
        try:
            if batch.changed:
                batch.begin()
                if state.counters.batches_synced % BATCHES_PER_NOTE == 0:
                    batch.writes.put(STATISTICS_KEY, opening.counts_record(state))
                owned = await state.write_owned(batch.writes)
            else:
                await asyncio.sleep(0)
                owned = await state.owned()
        except state.storage.failures as error:
            return unknown(ExecutionUnknown(f"the write failed: {state.storage_failed(error)}"))
        if not owned:
            return unknown(ExecutionUnknown(f"it may have been done: {state.closed_because}"))
        return None

    async def _fill(self, batch: JudgedBatch) -> None:
        limits = self._state.limits
        try:
            # Half of the bytes at most, so that mutations have their share of every batch.
            most = limits.commit_mutations_max, limits.commit_bytes_max // 2
            self._transactions.fill(batch, self._taken, *most)
            await self._mutations.judge(batch)
        finally:
            self._mutations.end_judging()

    def _conclude(self, result: pb.MutationResult | None) -> None:
        """Ends the batch: what it met is answered, and what waits for its cells is called."""
        taken, self._taken = self._taken, []
        touched = self._lines.end_batch()
        self._transactions.conclude(taken, result)
        if self._state.closed_because is not None:
            self._transactions.abandon(not_executed(self._state.closed_because))
            self._lines.clear()
        self._mutations.conclude(result)
        self._lines.look_again(touched)
        self._transactions.admit()
