"""Transactions that commit in one round: judged, held, given a timestamp, and ready to be written.

While a batch is on its way to the disk, the next transactions are judged and their timestamps
fetched, so neither the disk nor the oracle waits for the other. What each rule prevents:

* A transaction is judged when none of its cells is held, or changed by the batch in progress. So
  its conditions are judged against what is durable. Others wait for their cells (lines.py).
* All its cells are judged, and held, at one moment. Its own commit, a rollback marker, a lock, and
  a newer commit on *any* of them stop it: a late copy must not commit what `resolve` has rolled
  back.
* Its own commit is looked for even below the safe point. Told there that it is too old, a client
  would report as failed what an earlier copy of the message has committed.
* The commit timestamp is requested after that: readers above an earlier one may have passed by.
* The timestamp after a commit may be the start of another transaction, if its client has asked for
  that. Then it is one of those fetched, so nobody else has it as a start or a commit.
* A refused transaction is answered with the next batch, after the ownership was checked.
* Without a timestamp nothing is written: the transaction is definitely not executed. Nor are those
  that wait for cells: while the oracle is silent, each of them in turn would wait for it, and the
  mutations behind them for all of them.
* What waits for its cells is answered at its deadline, as not executed, and leaves their lines.
  Left without an answer, its client would have to report an unknown outcome. Left in the lines, it
  would stop the marker by which its client makes sure of that. What is ready is not written after
  its deadline, either.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from percolator.errors import NotExecuted, PercolatorError
from percolator.formats.reach import too_old
from percolator.tablet.memory.load_fences import closed
from percolator.tablet.memory.state import TabletState
from percolator.tablet.writing.judge import Judge
from percolator.tablet.writing.judged_batch import JudgedBatch
from percolator.tablet.writing.lines import Lines, Place
from percolator.tablet.writing.listed_steps import prewrite_conditions
from percolator.tablet.writing.mutations import CheckedCondition
from percolator.tablet.writing.results import ANSWER_FULL, not_executed
from percolator.tablet.writing.transactions import TransactionWork, WholeTransaction
from percolator.tasks import Tasks
from percolator.v1 import tabletserver_pb2 as pb

TIMESTAMPS_AT_ONCE_MAX = 1_024
OWN_COMMIT = 0
"""The first of `prewrite_conditions` to fail: the transaction is committed already."""


class HeldTransactions:
    """The transactions of one tablet that are on their way."""

    def __init__(
        self,
        state: TabletState,
        lines: Lines,
        *,
        may_hold: Callable[[], bool],
        stir: Callable[[], None],
        on_answered: Callable[[int], None],
    ) -> None:
        """`stir` is called when there is something to write, `on_answered` with the weight of a
        request that was answered."""
        self._state = state
        self._held = state.held
        self._read_locks = state.read_locks
        self._may_hold = may_hold
        self._stir = stir
        self._on_answered = on_answered
        self._judge = Judge.of(state)
        self._lines = lines
        self._waiting: dict[WholeTransaction, Place[WholeTransaction]] = {}
        """Those in lines."""
        self._called: deque[Place[WholeTransaction]] = deque()
        """Those of them that are the next to have all their cells."""
        self._ready: deque[WholeTransaction] = deque()
        self._tasks = Tasks()

    @property
    def is_ready(self) -> bool:
        """Whether the next batch has something to write or to answer."""
        return bool(self._ready)

    # ------------------------------------------------------------------ judging

    def arrive(self, transactions: Sequence[WholeTransaction]) -> None:
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

    def _open(self, transactions: Iterable[WholeTransaction]) -> Iterator[WholeTransaction]:
        may_hold, lines = self._may_hold(), self._lines
        for transaction in transactions:
            if may_hold and lines.are_open(transaction.cells, transaction.read_locked):
                yield transaction
            else:
                self._waiting[transaction] = lines.join(
                    transaction, transaction.cells, self._called, transaction.read_locked
                )

    def _next_called(self) -> Iterator[WholeTransaction]:
        lines, called = self._lines, self._called
        while called:
            place = called.popleft()
            transaction = place.waiter
            # Otherwise it was given up after it was called.
            if transaction in self._waiting and lines.still_has_its_cells(place):
                del self._waiting[transaction]
                yield transaction
                lines.leave(place)

    def _judge_all(self, transactions: Iterator[WholeTransaction]) -> None:
        """Judges them one after the other, and holds the cells of those that pass."""
        held: list[WholeTransaction] = []
        judging: list[WholeTransaction] = []
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
                    self._held.hold(transaction)
                    self._read_locks.hold(transaction.read_locked)
                    held.append(transaction)
                elif self._has_room(transaction, transaction.refusal):
                    self._ready.append(transaction)
                else:
                    self._end(transaction, ANSWER_FULL)
        except self._state.storage.failures as error:
            why: PercolatorError = self._state.storage_failed(error)
            self._give_up(held, [*judging, *transactions], not_executed(why))
            return
        except BaseException as error:
            # Whatever the reason, no cell may stay held, and no caller be left without an answer.
            why = NotExecuted(f"judging failed: {error!r}")
            self._give_up(held, [*judging, *transactions], not_executed(why))
            raise
        finally:
            self._judge.close()
        for first in range(0, len(held), TIMESTAMPS_AT_ONCE_MAX):
            part = held[first : first + TIMESTAMPS_AT_ONCE_MAX]
            self._tasks.start(self._take_timestamps(part))
        self._stir()

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

    def _fence(self, transaction: WholeTransaction) -> PercolatorError | None:
        """The bulk load, if any, that has closed one of its rows."""
        fences = self._state.load_fences
        if fences:
            for write in (*transaction.writes, *transaction.weak):
                fence = fences.over(write[0])
                if fence is not None:
                    return closed(fence)
        return None

    def _verdict(self, transaction: WholeTransaction) -> pb.MutationResult | None:
        """Why it is not committed now, or None."""
        refusal, safe_points = self._refusal(transaction), self._state.safe_points
        if transaction.start >= safe_points.transactions:
            return refusal
        if refusal is not None and refusal.failed_condition == OWN_COMMIT:
            return refusal
        return not_executed(too_old(transaction.start, safe_points.transactions))

    def _refusal(self, transaction: WholeTransaction) -> pb.MutationResult | None:
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

    def _has_room(self, transaction: WholeTransaction, refusal: pb.MutationResult) -> bool:
        """Whether the refusal fits into the answer: a short message may meet gigabytes of locks.
        Its own commit always does: it is as long as the message, and `ANSWER_FULL` would deny it.
        """
        if refusal.failed_condition == OWN_COMMIT:
            return True
        work = transaction.work
        work.refusal_bytes += len(refusal.cell.value)
        return work.refusal_bytes <= self._state.limits.answer_bytes_max

    # ------------------------------------------------------------------ timestamps

    async def _take_timestamps(self, held: Sequence[WholeTransaction]) -> None:
        """Fetches the commit timestamps of transactions whose cells are held."""
        try:
            first = await self._first_timestamp(held)
        except PercolatorError as error:
            self._without_timestamps(held, error.message)
        except BaseException as error:
            # A bug, or the end of the process: the cells must not stay held.
            self._without_timestamps(held, repr(error))
            raise
        else:
            in_time: list[WholeTransaction] = []
            early: list[WholeTransaction] = []
            for commit, transaction in commit_timestamps(held, first):
                if commit > transaction.start:
                    transaction.commit = commit
                    in_time.append(transaction)
                else:
                    early.append(transaction)
            self._ready.extend(in_time)
            self._held.changed(in_time)
            if early:
                # Their start was never handed out. They must not stop the others.
                why = f"the oracle is at {first}, not above its start timestamp"
                self._give_up(early, (), not_executed(NotExecuted(why)))
            self._stir()

    async def _first_timestamp(self, held: Sequence[WholeTransaction]) -> int:
        timestamps = self._state.timestamps
        if timestamps is None:
            raise NotExecuted("this server has no oracle")
        # A transaction that follows takes the timestamp after the commit of the one before it.
        first = await timestamps(len(held) + sum(one.is_followed for one in held))
        self._state.guard.heard(first)
        return first

    def _without_timestamps(self, held: Sequence[WholeTransaction], why: str) -> None:
        waiting = list(self._waiting)
        self._stop_waiting(waiting)
        self._give_up(held, waiting, not_executed(NotExecuted(f"no commit timestamp: {why}")))

    def _too_late(self, transactions: Sequence[WholeTransaction]) -> None:
        """Gives up those of a request that still wait, because its deadline has passed."""
        late = [one for one in transactions if one in self._waiting]
        self._stop_waiting(late)
        found = "other transactions hold its cells"
        if not self._may_hold():
            found = "the tablet waits for all cells to be let go, to be changed or closed"
        why = f"the deadline passed while the transaction waited: {found}"
        self._give_up((), late, not_executed(NotExecuted(why)))

    def _stop_waiting(self, transactions: Iterable[WholeTransaction]) -> None:
        for transaction in transactions:
            self._lines.give_up(self._waiting.pop(transaction))

    def _give_up(
        self,
        held: Sequence[WholeTransaction],
        others: Iterable[WholeTransaction],
        result: pb.MutationResult,
    ) -> None:
        """Ends those that hold their cells, and others."""
        self._let_go(held)
        self._end_all(held, result)
        self._end_all(others, result)
        for transaction in held:
            self._lines.look_again((*transaction.cells, *transaction.read_locked))
        self.admit()
        self._stir()

    # ------------------------------------------------------------------ batches

    def fill(
        self, batch: JudgedBatch, taken: list[WholeTransaction], cells_max: int, bytes_max: int
    ) -> None:
        """Adds what is ready to the batch, and to `taken`, as far as there is room."""
        ready = self._ready
        now = self._state.clock.monotonic_seconds()
        late: list[WholeTransaction] = []
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

    def conclude(self, taken: Sequence[WholeTransaction], result: pb.MutationResult | None) -> None:
        """Ends the transactions of a batch; `result`, if given, replaces how they ended."""
        if not taken:
            return
        self._let_go([one for one in taken if one.refusal is None])
        for transaction in taken:
            self._end(transaction, result or transaction.refusal)

    def _let_go(self, held: Sequence[WholeTransaction]) -> None:
        for transaction in held:
            self._read_locks.let_go(transaction.read_locked)
        self._held.let_go(held)

    def abandon(self, result: pb.MutationResult) -> None:
        """Ends everything that waits, once the tablet is closed."""
        ready, waiting = list(self._ready), list(self._waiting)
        self._ready.clear()
        self._waiting.clear()
        self._called.clear()
        self.conclude(ready, result)
        self._end_all(waiting, result)

    def _end_all(self, ending: Iterable[WholeTransaction], result: pb.MutationResult) -> None:
        for transaction in ending:
            self._end(transaction, result)

    def _end(self, transaction: WholeTransaction, result: pb.MutationResult | None) -> None:
        if transaction.end(result):
            self._on_answered(transaction.work.weight)


def commit_timestamps(
    held: Iterable[WholeTransaction], first: int
) -> Iterator[tuple[int, WholeTransaction]]:
    """Hands out timestamps from the first on, and leaves out those that are set aside."""
    for transaction in held:
        yield first, transaction
        first += 1 + transaction.is_followed
