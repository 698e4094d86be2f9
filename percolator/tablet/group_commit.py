"""Group commit: many mutations, one synced write, and the rules that make it safe.

GroupCommit           the task that judges and writes one batch after another
MutationQueue         the mutations that wait to be judged
OneRoundTransactions  transactions: judged, given a commit timestamp, then written with a batch

A batch is judged and written with one synced write; then the ownership of the tablet is checked,
mirror and index are updated, and only then the answers of the batch leave. Then the next batch is
judged. (Transactions in one round, below, are judged earlier.) What each rule prevents:

* Refusals leave with the batch, not before: a refusal may reveal a commit in the same batch, and
  after a power cut that commit would never have happened, although a client has acted on it.
* The next batch is judged after the previous one is durable: otherwise a late prewrite would miss
  the rollback marker that is still on its way to the disk.
* A second mutation of a cell that the batch changes waits for the next batch (judge.py): so
  conditions are always judged against what is durable, never against changes that are not yet
  durable.
* A batch without changes checks the ownership too: a deposed owner must not answer from old state.
* A mutation of a cell that a transaction holds (cells.py) waits for that transaction's
  batch, and transactions that are ready go into the next batch together with the mutations.
* After a failed write, the outcome of the batch is unknown, the storage's log decides it when the
  tablet is reopened, and nothing is judged or read until then.
* A mutation that waited beyond its deadline is dropped unexecuted, and its answer says so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from percolator.errors import (
    ExecutionUnknown,
    NotExecuted,
    NotReady,
    Overloaded,
    PercolatorError,
)
from percolator.formats.records import too_old
from percolator.tablet import opening
from percolator.tablet.cells import STATISTICS_KEY, cells_locked_by
from percolator.tablet.judge import Judge, JudgedBatch, Lines, Place, WriteLatch
from percolator.tablet.requests import (
    ANSWER_FULL,
    APPLIED,
    CheckedCondition,
    CheckedMutation,
    OneRoundTransaction,
    TransactionWork,
    marked_below,
    not_executed,
    prewrite_conditions,
    unknown,
)
from percolator.tablet.state import TabletState, closed
from percolator.v1 import tabletserver_pb2 as pb

BATCHES_PER_NOTE = 64
"""After a crash, the statistics are out of date by up to this many batches."""


class GroupCommit:
    """The queue of a tablet's mutations and transactions, and the one task that processes it."""

    def __init__(self, state: TabletState) -> None:
        self._state = state
        self.latch = WriteLatch(state.held_cells, self._admit_waiting)
        """Held by whatever else writes to the tablet."""
        self._lines = Lines(state.held_cells, state.read_locks)
        self._mutations = MutationQueue(state, self._lines, on_answered=self._answered)
        self._transactions = OneRoundTransactions(
            state,
            self._lines,
            may_hold=lambda: not self.latch.is_wanted,
            wake=self._wake,
            on_answered=self._answered,
        )
        self._taken: list[OneRoundTransaction] = []
        """The transactions in the batch in progress."""
        self._task: asyncio.Task[None] | None = None
        self.queued_bytes = 0

    def execute(self, work: MutationWork) -> asyncio.Future[list[pb.MutationResult]]:
        """Queues the work; the future holds one result per mutation. Raises `Overloaded`."""
        self.require_capacity(work.weight)
        self._mutations.add(work)
        self.queued_bytes += work.weight
        self._wake()
        return work.done

    def commit(
        self, transactions: Sequence[OneRoundTransaction]
    ) -> asyncio.Future[pb.TransactionBatchResult]:
        """Queues the transactions of one request; the future holds its answer. Raises
        `Overloaded`."""
        work = transactions[0].work
        self.require_capacity(work.weight)
        self.queued_bytes += work.weight
        self._transactions.arrive(transactions)
        return work.done

    def require_capacity(self, weight: int) -> None:
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

    def _wake(self) -> None:
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
        """True if the batch answers anything; if not, all that it looked at waits for cells."""
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
        except NotReady as error:
            # The batch changes nothing, but may tell of what an earlier copy of it has done.
            return unknown(ExecutionUnknown(f"it may have been done before: {error}"))
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
            self._state.turns.close()
            self._transactions.abandon(not_executed(self._state.closed_because))
            self._lines.clear()
        self._mutations.conclude(result)
        self._lines.look_again(touched)
        self._transactions.admit()


# The mutations of one request, as they pass through the batches of a group commit.


class MutationWork:
    """The mutations of one request: each waits, is judged in one batch, and is answered with it."""

    def __init__(
        self,
        mutations: list[CheckedMutation],
        weight: int,
        schema_version: int,
        deadline_seconds: float,
    ) -> None:
        self.mutations = mutations
        self.weight = weight
        self._schema_version = schema_version
        self._deadline_seconds = deadline_seconds
        self._taken = 0
        """How many of the mutations, in order, have been taken to be judged or to wait."""
        self._left = len(mutations)
        """How many of them have no result, or one that must not leave before its batch's end."""
        self.judged: list[int] = []
        """Mutations judged in the current batch: their results must not leave before its end."""
        self.results: list[pb.MutationResult | None] = [None] * len(mutations)
        self.refusal_bytes = 0
        """The size of the cells that made conditions fail: a short mutation may meet megabytes."""
        self.done: asyncio.Future[list[pb.MutationResult]] = (
            asyncio.get_running_loop().create_future()
        )

    @property
    def untaken(self) -> bool:
        """True if there are mutations that were not taken yet."""
        return self._taken < len(self.mutations)

    def take(self, most: int) -> range:
        """Takes the next mutations, to judge them or to let them wait for their cells."""
        part = range(self._taken, min(self._taken + most, len(self.mutations)))
        self._taken = part.stop
        return part

    def refusal(self, state: TabletState) -> PercolatorError | None:
        """Why this work is not judged any further, or None. Call it right before judging: while the
        work waited, the schema may have changed, and the time may have run out."""
        if self._schema_version != state.schema_version:
            return state.schema_changed()
        if state.clock.monotonic_seconds() >= self._deadline_seconds:
            return NotExecuted("the deadline passed while the mutation waited for its batch")
        if self.done.cancelled():
            return NotExecuted("the caller has cancelled the request")
        return None

    def abandon(self, result: pb.MutationResult) -> None:
        """Gives this result to all mutations that are not judged yet."""
        for index, found in enumerate(self.results):
            if found is None:
                self.results[index] = result
                self._left -= 1
        self._taken = len(self.mutations)

    def conclude(self, result: pb.MutationResult | None) -> bool:
        """Ends the current batch: `result`, if given, replaces the results of all that was judged
        in it. Returns True, and answers the request, once nothing is left waiting."""
        if result is not None:
            for index in self.judged:
                self.results[index] = result
        self._left -= len(self.judged)
        self.judged = []
        if self._left:
            return False
        if not self.done.done():
            self.done.set_result([found for found in self.results if found is not None])
        return True


_Waiting = tuple[MutationWork, int]
"""A mutation: the work that it belongs to, and its index there."""


class MutationQueue:
    """The mutations of one tablet: queued, waiting for their cells, judged in batches, answered.

    A mutation that waits for its cell (judge.py) has left the queue, and counts in no batch: one
    held cell must not stop the others.
    """

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
        """Mutations that waited for their cell and are the next to have it."""
        self._unanswered: dict[MutationWork, None] = {}
        """Everything in the queue, and what has left it to wait for cells."""
        self._met: dict[MutationWork, None] = {}
        """The work of which the batch in progress has judged or abandoned something."""

    @property
    def is_ready(self) -> bool:
        """True if the next batch has something to look at."""
        # Closed by a failure outside of any batch: what waits for cells has to be told.
        is_closed = self._state.closed_because is not None
        return bool(self._queue or self._called or (is_closed and self._unanswered))

    @property
    def answers_something(self) -> bool:
        """True if the batch in progress answers any mutation."""
        return bool(self._met)

    def add(self, work: MutationWork) -> None:
        self._queue.append(work)
        self._unanswered[work] = None

    async def judge(self, batch: JudgedBatch) -> None:
        """Judges mutations until the batch is full: first those that have waited for their cells,
        then the others in order of arrival."""
        limits, queue, called = self._state.limits, self._queue, self._called
        left = limits.commit_mutations_max
        until_pause = limits.slice_rows
        while left > 0 and batch.bytes < limits.commit_bytes_max:
            if called:
                until_pause -= 1
                left -= self._judge_called(called.popleft(), batch)
            elif queue:
                work = queue[0]
                # One of its mutations may have ended the whole request while it waited.
                if work.untaken and not self._is_refused(work):
                    part = work.take(min(left, until_pause))
                    until_pause -= len(part)
                    left -= self._judge_part(work, part, batch)
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
        """True if nothing more of the work is judged. If so, its mutations end."""
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


TIMESTAMPS_AT_ONCE_MAX = 1_024
OWN_COMMIT = 0
"""The first of `prewrite_conditions` to fail: the transaction is committed already."""


class OneRoundTransactions:
    """The transactions of one tablet that commit in one round: judged, held, given a timestamp, and
    ready to be written.

    While a batch is on its way to the disk, the next transactions are judged and their timestamps
    fetched, so neither the disk nor the oracle waits for the other. What each rule prevents:

    - A transaction is judged when none of its cells is held, or changed by the batch in progress.
      So its conditions are judged against what is durable. Others wait for their cells (judge.py).
    - All its cells are judged, and held, together. Its own commit, a rollback marker, a lock, and a
      newer commit on *any* of them stop it: a late copy must not commit what `resolve` has rolled
      back.
    - Its own commit is looked for even below the safe point. Told there that it is too old, a
      client would report as failed what an earlier copy of the message has committed.
    - The commit timestamp is requested after that: readers above an earlier one may have passed by.
    - The timestamp after a commit may be the start of another transaction, if its client has asked
      for that. Then it is one of those fetched, so nobody else has it as a start or a commit.
    - A refused transaction is answered with the next batch, after the ownership was checked.
    - Without a timestamp nothing is written: the transaction is definitely not executed. Nor are
      those that wait for cells: while the oracle is silent, each of them in turn would wait for it,
      and the mutations behind them for all of them.
    - What waits for its cells is answered at its deadline, as not executed, and leaves their lines.
      Left without an answer, its client would have to report an unknown outcome. Left in the lines,
      it would stop the marker by which its client makes sure of that. What is ready is not written
      after its deadline, either.
    """

    def __init__(
        self,
        state: TabletState,
        lines: Lines,
        *,
        may_hold: Callable[[], bool],
        wake: Callable[[], None],
        on_answered: Callable[[int], None],
    ) -> None:
        """`wake` is called when there is something to write, `on_answered` with the weight of a
        request that was answered."""
        self._state = state
        self._held_cells = state.held_cells
        self._read_locks = state.read_locks
        self._may_hold = may_hold
        self._wake = wake
        self._on_answered = on_answered
        self._judge = Judge.of(state)
        self._lines = lines
        self._waiting: dict[OneRoundTransaction, Place[OneRoundTransaction]] = {}
        """Transactions in lines."""
        self._called: deque[Place[OneRoundTransaction]] = deque()
        """Transactions in lines that are the next to have all their cells."""
        self._ready: deque[OneRoundTransaction] = deque()
        self._asked: dict[asyncio.Future[int], Sequence[OneRoundTransaction]] = {}
        """Transactions that hold their cells, by the timestamps that they wait for."""

    @property
    def is_ready(self) -> bool:
        """True if the next batch has something to write or to answer."""
        return bool(self._ready)

    # ------------------------------------------------------------------ judging

    def arrive(self, transactions: Sequence[OneRoundTransaction]) -> None:
        """Judges those of one request whose cells are open; the others wait."""
        self._judge_all(self._open(transactions))
        waiting = [one for one in transactions if one in self._waiting] if self._waiting else []
        if waiting:
            work = waiting[0].work
            left = work.deadline_seconds - self._state.clock.monotonic_seconds()
            work.timer = asyncio.get_running_loop().call_later(left, self._too_late, waiting)

    def admit(self) -> None:
        """Judges those that have waited, and have all their cells now, unless none may hold cells
        at present."""
        if self._may_hold():
            self.admit_waiting()

    def admit_waiting(self) -> None:
        """Judges those that have waited, and have all their cells now."""
        if self._called:
            self._judge_all(self._next_called())

    def _open(self, transactions: Iterable[OneRoundTransaction]) -> Iterator[OneRoundTransaction]:
        may_hold, lines = self._may_hold(), self._lines
        for transaction in transactions:
            if may_hold and lines.are_open(transaction.cells, transaction.read_locked):
                yield transaction
            else:
                self._waiting[transaction] = lines.join(
                    transaction, transaction.cells, self._called, transaction.read_locked
                )

    def _next_called(self) -> Iterator[OneRoundTransaction]:
        lines, called = self._lines, self._called
        while called:
            place = called.popleft()
            transaction = place.waiter
            # Otherwise it was given up after it was called.
            if transaction in self._waiting and lines.still_has_its_cells(place):
                del self._waiting[transaction]
                yield transaction
                lines.leave(place)

    def _judge_all(self, transactions: Iterator[OneRoundTransaction]) -> None:
        """Judges them one after the other, and holds the cells of those that pass."""
        holders: list[OneRoundTransaction] = []
        judging: list[OneRoundTransaction] = []
        work: TransactionWork | None = None
        of_work: PercolatorError | None = None
        try:
            for transaction in transactions:
                judging = [transaction]
                if transaction.work is not work:  # most come with the one before
                    work = transaction.work
                    of_work = self._obstacle(work)
                obstacle = of_work or self._fence(transaction)
                if obstacle is not None:
                    self._end(transaction, not_executed(obstacle))
                    continue
                transaction.refusal = self._verdict(transaction)
                if transaction.refusal is None:
                    self._held_cells.hold(transaction)
                    self._read_locks.hold(transaction.read_locked)
                    holders.append(transaction)
                elif self._fits(transaction, transaction.refusal):
                    self._ready.append(transaction)
                else:
                    self._end(transaction, ANSWER_FULL)
        except self._state.storage.failures as error:
            why: PercolatorError = self._state.storage_failed(error)
            self._give_up(holders, [*judging, *transactions], not_executed(why))
            return
        except BaseException as error:
            # Whatever the reason, no cell may stay held, and no caller be left without an answer.
            why = NotExecuted(f"judging failed: {error!r}")
            self._give_up(holders, [*judging, *transactions], not_executed(why))
            raise
        finally:
            self._judge.close()
        for first in range(0, len(holders), TIMESTAMPS_AT_ONCE_MAX):
            self._take_timestamps(holders[first : first + TIMESTAMPS_AT_ONCE_MAX])
        self._wake()

    def _obstacle(self, work: TransactionWork) -> PercolatorError | None:
        """Why nothing of a request is judged: what may have changed while it waited."""
        state = self._state
        if state.closed_because is not None:
            return state.closed_because
        if work.schema_version != state.schema_version:
            return state.schema_changed()
        if state.clock.monotonic_seconds() >= work.deadline_seconds:
            return NotExecuted("the deadline passed before the transaction was judged")
        if work.done.cancelled():
            return NotExecuted("the caller has cancelled the request")
        return None

    def _fence(self, transaction: OneRoundTransaction) -> PercolatorError | None:
        """The bulk load, if any, that has closed one of its rows."""
        fences = self._state.load_fences
        if fences:
            for write in (*transaction.writes, *transaction.weak):
                fence = fences.over(write[0])
                if fence is not None:
                    return closed(fence)
        return None

    def _verdict(self, transaction: OneRoundTransaction) -> pb.MutationResult | None:
        """Why it is not committed now, or None."""
        refusal, safe_points = self._refusal(transaction), self._state.safe_points
        if transaction.start >= safe_points.transactions:
            return refusal
        if refusal is not None and refusal.failed_condition == OWN_COMMIT:
            return refusal
        return not_executed(too_old(transaction.start, safe_points.transactions))

    def _refusal(self, transaction: OneRoundTransaction) -> pb.MutationResult | None:
        """The first condition of a prewrite that fails on a cell, or None."""
        state, start = self._state, transaction.start
        locked, bound = state.mirror.headers, state.recent.bound
        may_be_marked = start <= state.recent.newest_marker
        read_locks = state.read_locks
        conditions: list[CheckedCondition] = []
        for row, column, cell, _, _, _ in transaction.writes:
            may_exclude = read_locks.used and read_locks.may_exclude(cell, start)
            if not may_be_marked and cell not in locked and bound(cell) < start and not may_exclude:
                continue  # what nearly always holds, without building the conditions
            conditions = conditions or prewrite_conditions(start)
            refusal = self._judge.refusal((row, column, cell, start, conditions, []))
            if refusal is not None:
                return refusal
        return None

    def _fits(self, transaction: OneRoundTransaction, refusal: pb.MutationResult) -> bool:
        """True if the refusal fits into the answer: a short message may meet gigabytes of locks.
        Its own commit always does: it is as long as the message, and `ANSWER_FULL` would deny it.
        """
        if refusal.failed_condition == OWN_COMMIT:
            return True
        work = transaction.work
        work.refusal_bytes += len(refusal.cell.value)
        return work.refusal_bytes <= self._state.limits.answer_bytes_max

    # ------------------------------------------------------------------ timestamps

    def _take_timestamps(self, holders: Sequence[OneRoundTransaction]) -> None:
        """Asks for the commit timestamps of transactions whose cells are held."""
        try:
            asked = self._first_timestamp(holders)
        except Exception as error:
            self._without_timestamps(holders, error)
            if not isinstance(error, PercolatorError):
                raise
        else:
            self._asked[asked] = holders
            asked.add_done_callback(self._have_timestamps)

    def _have_timestamps(self, asked: asyncio.Future[int]) -> None:
        holders = self._asked.pop(asked)
        try:
            first = asked.result()
        except BaseException as error:
            self._without_timestamps(holders, error)
            if not isinstance(error, PercolatorError | asyncio.CancelledError):
                raise
        else:
            self._state.guard.heard(first)
            in_time: list[OneRoundTransaction] = []
            early: list[OneRoundTransaction] = []
            for commit_ts, transaction in commit_timestamps(holders, first):
                if commit_ts > transaction.start:
                    transaction.commit_ts = commit_ts
                    if transaction.too_late_to_follow:
                        self._state.turns.set_aside(
                            transaction.cells,
                            transaction.start,
                            commit_ts + transaction.set_aside,
                            transaction.too_late_to_follow,
                        )
                    in_time.append(transaction)
                else:
                    early.append(transaction)
            self._ready.extend(in_time)
            self._held_cells.changed(in_time)
            if early:
                # Their start was never handed out. They must not stop the others.
                why = f"the oracle is at {first}, not above its start timestamp"
                self._give_up(early, (), not_executed(NotExecuted(why)))
            self._wake()

    def _first_timestamp(self, holders: Sequence[OneRoundTransaction]) -> asyncio.Future[int]:
        timestamps = self._state.timestamps
        if timestamps is None:
            raise NotExecuted("this server has no oracle")
        # A transaction that follows takes the timestamp after the commit of the one before it.
        turns = self._state.turns
        if turns.queues:
            for one in holders:
                one.too_late_to_follow = turns.followers(one.cells, one.start)
        count = len(holders) + sum(one.set_aside for one in holders)
        return asyncio.ensure_future(timestamps(count))

    def _without_timestamps(
        self, holders: Sequence[OneRoundTransaction], error: BaseException
    ) -> None:
        """Whatever the reason, a bug or the end of the process, the cells must not stay held."""
        why = error.message if isinstance(error, PercolatorError) else repr(error)
        waiting = list(self._waiting)
        self._stop_waiting(waiting)
        self._give_up(holders, waiting, not_executed(NotExecuted(f"no commit timestamp: {why}")))

    def _too_late(self, transactions: Sequence[OneRoundTransaction]) -> None:
        """Gives up those of a request that still wait, because its deadline has passed."""
        late = [one for one in transactions if one in self._waiting]
        self._stop_waiting(late)
        found = "other transactions hold its cells"
        if not self._may_hold():
            found = "the tablet waits for all cells to be let go, to be changed or closed"
        why = f"the deadline passed while the transaction waited: {found}"
        self._give_up((), late, not_executed(NotExecuted(why)))

    def _stop_waiting(self, transactions: Iterable[OneRoundTransaction]) -> None:
        for transaction in transactions:
            self._lines.give_up(self._waiting.pop(transaction))

    def _give_up(
        self,
        holders: Sequence[OneRoundTransaction],
        others: Iterable[OneRoundTransaction],
        result: pb.MutationResult,
    ) -> None:
        """Ends those that hold their cells, and others."""
        self._let_go(holders)
        self._end_all(holders, result)
        self._end_all(others, result)
        for transaction in holders:
            self._lines.look_again((*transaction.cells, *transaction.read_locked))
        self.admit()
        self._wake()

    # ------------------------------------------------------------------ batches

    def fill(
        self, batch: JudgedBatch, taken: list[OneRoundTransaction], cells_max: int, bytes_max: int
    ) -> None:
        """Adds what is ready to the batch, and to `taken`, as far as it fits."""
        ready = self._ready
        now = self._state.clock.monotonic_seconds()
        late: list[OneRoundTransaction] = []
        while ready and cells_max > 0 and batch.bytes < bytes_max:
            transaction = ready.popleft()
            if transaction.refusal is None and transaction.work.deadline_seconds <= now:
                late.append(transaction)
                continue
            taken.append(transaction)
            if transaction.refusal is not None:
                batch.refused += 1
                continue
            for mutation in transaction.mutations():
                batch.add(mutation)
            batch.applied += len(transaction.cells)
            cells_max -= len(transaction.cells) + len(transaction.weak)
        if late:
            why = "the deadline passed while the transaction waited for its batch"
            self._give_up(late, (), not_executed(NotExecuted(why)))

    def conclude(
        self, taken: Sequence[OneRoundTransaction], result: pb.MutationResult | None
    ) -> None:
        """Ends the transactions of a batch; `result`, if given, replaces how they ended."""
        if not taken:
            return
        self._let_go([one for one in taken if one.refusal is None])
        for transaction in taken:
            self._end(transaction, result or transaction.refusal)

    def _let_go(self, holders: Sequence[OneRoundTransaction]) -> None:
        for transaction in holders:
            self._read_locks.let_go(transaction.read_locked)
        self._held_cells.let_go(holders)

    def abandon(self, result: pb.MutationResult) -> None:
        """Ends everything that waits, once the tablet is closed."""
        ready, waiting = list(self._ready), list(self._waiting)
        self._ready.clear()
        self._waiting.clear()
        self._called.clear()
        self.conclude(ready, result)
        self._end_all(waiting, result)

    def _end_all(self, ending: Iterable[OneRoundTransaction], result: pb.MutationResult) -> None:
        for transaction in ending:
            self._end(transaction, result)

    def _end(self, transaction: OneRoundTransaction, result: pb.MutationResult | None) -> None:
        if transaction.end(result):
            self._on_answered(transaction.work.weight)


def commit_timestamps(
    holders: Iterable[OneRoundTransaction], first: int
) -> Iterator[tuple[int, OneRoundTransaction]]:
    """Hands out timestamps from the first on, and leaves out those that are set aside."""
    for transaction in holders:
        yield first, transaction
        first += 1 + transaction.set_aside
