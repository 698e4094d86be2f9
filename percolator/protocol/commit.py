"""Committing a transaction: the paper's Figure 6, with an answer for every lost message.

    prewrite   lock every cell that the transaction writes, all at once
    timestamp  ask the oracle for the commit timestamp: only now (commit_point.py)
    commit     replace the primary's lock by its commit record: from here on, it is committed
    (later)    the other cells, in the background (aftermath.py)

Rules, each with the failure that it prevents:
- The primary is the least cell of the write set. Two committers of one transaction (a gateway that
  took over) with different primaries would decide twice.
- A repeated step has the same content: whatever the network does with it, it means one thing.
- Aborting marks the primary first and touches nothing else until the mark is durable. If the mark
  is refused because the commit record is there, the outcome is: committed.
- "Aborted" is said only of what nobody can commit any more. Until the mark is durable, another
  committer of the same transaction, if there may be one, finds its locks, and commits it after the
  user was told to do the work again.
- Once the commit was sent and not answered, the outcome is unknown until the primary tells.
  Guessing "failed" makes the user do the work twice.
- Whoever asks for an unknown outcome joins the one attempt that is going on. Two at a time might
  each take a commit timestamp after a push, and commit the other cells at the wrong one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from copy import copy

from percolator.errors import (
    CellAddress,
    ConflictError,
    DeadlineExceeded,
    OutcomeUnknown,
    PercolatorError,
    Retry,
    Unavailable,
)
from percolator.protocol import aftermath, conflicts, steps
from percolator.protocol.aftermath import portion, portions, shown
from percolator.protocol.cleanup import Cleanup, MetLock
from percolator.protocol.commit_point import CommitPoint
from percolator.protocol.heartbeats import Heartbeats
from percolator.protocol.lock_waiting import LockWaiting
from percolator.protocol.same_writes import AnotherWriteSet, require_same
from percolator.protocol.surroundings import Statistics, Surroundings
from percolator.protocol.verdicts import ROLLED_BACK
from percolator.protocol.write_steps import WriteSteps
from percolator.wire.questions import APPLIED, Answer, Refused

_Settled = int | ConflictError | OutcomeUnknown
"""What became of a commit, or its timestamp."""


class _Unlocked:
    """The cells that a round of prewrites has not locked, and why not."""

    __slots__ = ("met", "unanswered")

    def __init__(self) -> None:
        self.unanswered: list[CellAddress] = []
        self.met: list[MetLock] = []
        """Locks of older transactions."""

    def cells(self) -> list[CellAddress]:
        return self.unanswered + [lock.address for lock in self.met]


class Commit:
    """One transaction's way from its write set to its outcome."""

    __slots__ = (
        "_alone",
        "_around",
        "_cleanup",
        "_given_up",
        "_heartbeats",
        "_last_problem",
        "_point",
        "_primary_lost",
        "_settling",
        "_statistics",
        "_touched",
        "_write",
    )

    def __init__(
        self,
        around: Surroundings,
        cleanup: Cleanup,
        heartbeats: Heartbeats,
        write: WriteSteps,
        *,
        weak_notifications: Sequence[CellAddress],
        started_seconds: float,
        statistics: Statistics,
        alone: bool = False,
    ) -> None:
        """`started_seconds`: when the start timestamp was received, on the monotonic clock.

        `alone`: nobody else commits this transaction, as a gateway might that was asked again.
        """
        self._around = around
        self._cleanup = cleanup
        self._heartbeats = heartbeats
        self._write = write
        self._statistics = statistics
        self._alone = alone
        self._point = CommitPoint(around, write, weak_notifications, started_seconds, statistics)
        self._settling: asyncio.Task[_Settled] | None = None
        """Finds out what became of the commit."""
        self._primary_lost = False
        """Somebody committed the primary above our start: it can never be locked any more."""
        self._given_up = False
        """It is being rolled back, and must not be committed by us any more."""
        self._touched: Sequence[CellAddress] = ()
        """May carry our locks."""
        self._last_problem: PercolatorError | None = None
        """Why the last attempt of a prewrite was not answered."""

    def run(self, deadline: float) -> Coroutine[None, None, int]:
        """Returns the commit timestamp.

        Raises `ConflictError`, `OutcomeUnknown`, or what made it impossible; of these only
        `OutcomeUnknown` leaves open whether it is committed.
        """
        return self._reach_outcome(deadline, prewritten=False)

    async def settle(self, deadline: float) -> int:
        """After `OutcomeUnknown`: goes on where it was, and returns the commit timestamp.

        What was to be committed is committed, by the very same commit; what was being given up is
        rolled back. Raises `ConflictError` when it turns out to be rolled back, `OutcomeUnknown`
        when still nobody answers. It goes on in the background when its caller leaves.
        """
        while True:
            joined = self._settling
            settling = joined or self._start_settling(deadline)
            left = deadline - self._around.clock.monotonic_seconds()
            await asyncio.wait((settling,), timeout=max(left, 0.0))
            if not settling.done():
                raise self._unknown(DeadlineExceeded("no answer in time"))
            if settling.cancelled():
                raise self._unknown(Unavailable("the client was closed"))
            outcome = settling.result()
            if isinstance(outcome, int):
                return outcome
            if joined is None or not isinstance(outcome, OutcomeUnknown):
                raise copy(outcome)  # others may wait for the same
            # The one that was joined had less time than there is left.

    @property
    def may_be_committed(self) -> bool:
        """The commit was sent, and nothing since then says that it was not applied."""
        return self._point.sent

    async def _reach_outcome(self, deadline: float, *, prewritten: bool) -> int:
        around, write, point = self._around, self._write, self._point
        self._heartbeats.add(point)
        try:
            try:
                commit = 0 if prewritten else await self._prewrite(deadline)
                if not commit:
                    commit = await point.reach(deadline)
            except AnotherWriteSet:
                raise
            except PercolatorError as problem:
                if point.sent:
                    raise self._unknown(problem) from problem
                commit = await self._give_up(problem, deadline)
        except asyncio.CancelledError:
            if not prewritten:
                self._go_on_alone()
            raise
        finally:
            self._heartbeats.discard(point)
        around.verdicts.put(write.start, commit)
        if len(write.cells) > 1:
            too_much = around.background.full
            rest = around.background.start(aftermath.commit_secondaries(around, write, commit))
            if too_much:
                # However it ends, the transaction is committed, and nobody is told otherwise.
                await asyncio.wait((rest,))
        return commit

    # ------------------------------------------------------------------ prewrite

    async def _prewrite(self, deadline: float) -> int:
        """Locks every cell. Returns 0, or the timestamp at which somebody has committed it."""
        point = self._point
        pending: Sequence[CellAddress] = self._write.cells
        waiting: LockWaiting | None = None
        while True:
            point.choose_ttl()
            unlocked: _Unlocked | None = None  # as nearly always: made when it is needed
            for first in portions(pending):
                cells = portion(pending, first)
                answers = await self._send_prewrites(cells, deadline)
                if answers.count(APPLIED) == len(cells):
                    self._note_touched(cells)
                    continue
                unlocked = unlocked or _Unlocked()
                committed = self._sort_out(cells, answers, unlocked)
                if committed:
                    return committed
            pending = unlocked.cells() if unlocked is not None else ()
            point.is_locked = not pending or self._write.primary not in pending
            if unlocked is None or not pending:
                return 0
            self._statistics.retries += 1
            waiting = waiting or LockWaiting(self._around)
            await self._wait_for_locks(waiting, unlocked.met, deadline)

    def _send_prewrites(
        self, cells: Sequence[CellAddress], deadline: float
    ) -> Awaitable[list[Answer]]:
        prewrite, min_commit, ttl = self._write.prewrite, self._point.min_commit, self._point.ttl
        self._statistics.round_trips += 1
        return self._around.cells.mutate(
            [prewrite(cell, min_commit, ttl) for cell in cells], deadline
        )

    def _sort_out(
        self, cells: Sequence[CellAddress], answers: Sequence[Answer], unlocked: _Unlocked
    ) -> int:
        """Returns the timestamp at which somebody has committed it, or 0. Raises conflicts."""
        problem: PercolatorError | None = None
        touched: list[CellAddress] = []
        try:
            for cell, answer in zip(cells, answers, strict=True):
                if answer is APPLIED:
                    touched.append(cell)
                elif isinstance(answer, Refused):
                    if answer.condition == steps.OWN_COMMIT:
                        require_same(self._write, cell, answer)
                        return shown(answer).timestamp
                    if self._is_own_lock(cell, answer):
                        touched.append(cell)
                    else:
                        problem = self._obstacle(cell, answer, unlocked.met) or problem
                elif answer.retry is Retry.UNKNOWN:
                    touched.append(cell)
                    unlocked.unanswered.append(cell)
                    self._last_problem = answer
                else:
                    problem = answer
        finally:
            self._note_touched(touched)
        if problem is not None:
            raise problem
        return 0

    def _note_touched(self, cells: Sequence[CellAddress]) -> None:
        self._touched = [*self._touched, *cells] if self._touched else cells

    async def _wait_for_locks(
        self, waiting: LockWaiting, met: Sequence[MetLock], deadline: float
    ) -> None:
        """Settles what was met, and pauses. Raises when it has lasted too long."""
        if met:
            waited = waiting.note(met[0], self._statistics)
            if waited > self._around.limits.lock_wait_seconds:
                raise conflicts.locked(self._write, met[0])
            await self._cleanup.clear(
                met, deadline=deadline, known_now=self._write.start, waited_seconds=waited
            )
        if not await waiting.backoff.pause(deadline):
            raise conflicts.locked(self._write, met[0]) if met else self._out_of_time()

    def _is_own_lock(self, cell: CellAddress, answer: Refused) -> bool:
        """Set by an earlier attempt, whose answer was lost, or by another committer."""
        if answer.condition != steps.PREWRITE_LOCKED:
            return False
        if int.from_bytes(shown(answer).value[:8], "big") != self._write.start:
            return False
        require_same(self._write, cell, answer)
        if cell == self._write.primary:
            self._point.learn_lock(answer)
        return True

    def _obstacle(
        self, cell: CellAddress, answer: Refused, met: list[MetLock]
    ) -> PercolatorError | None:
        """What a refused prewrite means. The lock of an older transaction is put into `met`."""
        if answer.condition == steps.PREWRITE_LOCKED:
            lock = MetLock.of(cell.table_id, shown(answer))
            if lock.lock.start_timestamp < self._write.start:
                met.append(lock)
                return None
            # Only the younger waits for the older. Two that wait for each other wait for ever.
            return conflicts.locked(self._write, lock)
        if answer.condition == steps.OWN_ROLLBACK:
            return conflicts.rolled_back_by_others(self._write, cell)
        if cell == self._write.primary:
            self._primary_lost = True
        return conflicts.written(self._write, cell, shown(answer))

    def _out_of_time(self) -> PercolatorError:
        return self._last_problem or DeadlineExceeded("no time was left to prewrite")

    # ------------------------------------------------------------------ giving up

    async def _give_up(self, problem: PercolatorError, deadline: float) -> int:
        """Rolls back and raises `problem`, unless it turns out that it is committed.

        Without an answer to the mark, that is as good as done when no commit was sent and nobody
        else will send one, or nothing locks the primary; else `OutcomeUnknown` is raised.
        """
        self._given_up = True
        problem = copy(problem)  # the same answer may have gone to others
        if problem.retry is Retry.UNKNOWN:
            problem.retry = Retry.SAFE  # nothing is committed, whatever was prewritten
        if self._primary_lost:
            # As final as a marker, which a dying owner's lock on another cell will still find.
            if self._touched:
                self._roll_back_in_background()
            raise problem
        if self._around.verdicts.get(self._write.start) != ROLLED_BACK:
            try:
                commit = await aftermath.mark_primary(self._around, self._write, deadline)
            except PercolatorError as unmarked:
                self._roll_back_in_background()
                if self._alone or self._write.primary not in self._touched:
                    raise problem from None
                raise self._unknown(unmarked) from problem
            if commit:
                return commit
        others = aftermath.roll_back_others(self._around, self._write, self._touched)
        self._around.background.start(others)
        raise problem

    def _roll_back_in_background(self) -> None:
        work = aftermath.roll_back_all(self._around, self._write, self._touched)
        self._around.background.start(work)

    # ------------------------------------------------------------------ unknown outcomes

    def _go_on_alone(self) -> None:
        """The caller has left in the middle. Nobody else should have to wait for our locks."""
        if self._point.sent:
            self._start_settling(aftermath.background_deadline(self._around))
        else:
            self._touched = self._write.cells  # prewrites that were not answered may still arrive
            self._roll_back_in_background()

    def _start_settling(self, deadline: float) -> asyncio.Task[_Settled]:
        self._settling = self._around.background.start(self._settle(deadline))
        return self._settling

    async def _settle(self, deadline: float) -> _Settled:
        try:
            if self._given_up:
                commit = await self._give_up(conflicts.given_up(self._write), deadline)
                self._around.verdicts.put(self._write.start, commit)
                return commit
            return await self._reach_outcome(deadline, prewritten=True)
        except (ConflictError, OutcomeUnknown) as outcome:
            # An outcome like any other, which whoever asks is told; maybe nobody does.
            return outcome
        finally:
            self._settling = None

    def _unknown(self, problem: PercolatorError) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"whether the transaction begun at {self._write.start} is committed could not be "
            f"learned: {problem}",
            start_timestamp=self._write.start,
            primary=self._write.primary,
        )
