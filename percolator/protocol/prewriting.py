"""Prewriting: locking every cell that a transaction writes, all at once.

A cell is locked once its prewrite was applied, or is refused because of the transaction's own lock.
Unanswered prewrites are repeated. A lock of an older transaction is waited out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from percolator.errors import CellAddress, PercolatorError, Retry
from percolator.protocol import conflicts, steps
from percolator.protocol.commit_point import CommitPoint
from percolator.protocol.environment import Environment
from percolator.protocol.lock_waiting import LockWaiting
from percolator.protocol.met_lock import MetLock
from percolator.protocol.portions import portion, portions
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.protocol.same_writes import is_own_lock, require_same
from percolator.protocol.statistics import Statistics
from percolator.protocol.write_steps import WriteSteps
from percolator.routing.cells import APPLIED, Answer, Refused


class _Unlocked:
    """The cells that a round of prewrites did not lock, and why not."""

    __slots__ = ("blocked", "met", "problem", "unanswered")

    def __init__(self) -> None:
        self.unanswered: list[CellAddress] = []
        self.blocked: list[CellAddress] = []
        self.met: list[MetLock] = []
        """Locks of older transactions: on these, or on cells that exclude them."""
        self.problem: PercolatorError | None = None
        """Why the last unanswered one got no answer."""

    def cells(self) -> list[CellAddress]:
        return self.unanswered + self.blocked

    def has(self, cell: CellAddress) -> bool:
        return cell in self.unanswered or cell in self.blocked


class Prewriting:
    """Locks the cells of one transaction, and knows which of them may carry its locks."""

    __slots__ = ("_cleanup", "_env", "_point", "_statistics", "_write", "is_lost", "touched")

    def __init__(
        self,
        env: Environment,
        cleanup: Cleanup,
        write: WriteSteps,
        point: CommitPoint,
        statistics: Statistics,
    ) -> None:
        self._env = env
        self._cleanup = cleanup
        self._write = write
        self._point = point
        self._statistics = statistics
        self.is_lost = False
        """Another transaction committed the primary above our start, so we can never lock it."""
        self.touched: Sequence[CellAddress] = ()
        """The cells that may carry our locks."""

    async def run(self, deadline: float) -> int:
        """Locks every cell. Returns 0, or the commit timestamp if it is committed already."""
        point = self._point
        pending: Sequence[CellAddress] = self._write.cells
        waiting: LockWaiting | None = None
        while True:
            point.choose_ttl()
            unlocked: _Unlocked | None = None  # rarely needed, so created only then
            for first in portions(pending):
                cells = portion(pending, first)
                point.is_awaited = not point.is_locked and self._write.primary in cells
                answers = await self._send(cells, deadline)
                if answers.count(APPLIED) == len(cells):
                    self._note_touched(cells)
                else:
                    unlocked = unlocked or _Unlocked()
                    committed = self._sort_out(cells, answers, unlocked)
                    if committed:
                        return committed
                if point.is_awaited:
                    # Before the other portions, which may take longer than its time to live.
                    point.answered(is_locked=not unlocked or not unlocked.has(self._write.primary))
                if point.announcement is not None:
                    point.announcement.require()
            pending = unlocked.cells() if unlocked is not None else ()
            if unlocked is None or not pending:
                return 0
            waiting = waiting or LockWaiting(self._env, self._write.start, self._statistics)
            await waiting.settle(unlocked.met, self._cleanup, deadline)
            await waiting.pause(unlocked.problem, deadline)

    def _send(self, cells: Sequence[CellAddress], deadline: float) -> Awaitable[list[Answer]]:
        prewrite, min_commit, ttl = self._write.prewrite, self._point.min_commit, self._point.ttl
        self._statistics.round_trips += 1
        locks = [prewrite(cell, min_commit, ttl) for cell in cells]
        answers = self._env.cells.mutate(locks, deadline)
        announcement = self._point.announcement
        return answers if announcement is None else announcement.beside(cells, answers, deadline)

    def _sort_out(
        self, cells: Sequence[CellAddress], answers: Sequence[Answer], unlocked: _Unlocked
    ) -> int:
        """Returns the commit timestamp if it is committed already, else 0. Raises conflicts."""
        write = self._write
        problem: PercolatorError | None = None
        touched: list[CellAddress] = []
        try:
            for cell, answer in zip(cells, answers, strict=True):
                if answer is APPLIED:
                    touched.append(cell)
                elif isinstance(answer, Refused):
                    if answer.condition == steps.OWN_COMMIT:
                        require_same(write, cell, answer)
                        return answer.offender.timestamp
                    if is_own_lock(write, cell, answer):
                        # Set by an attempt whose answer was lost, or by another committer.
                        touched.append(cell)
                        if cell == write.primary:
                            self._point.learn_lock(answer)
                        continue
                    if answer.condition == steps.PREWRITE_NEWER_COMMIT and cell == write.primary:
                        self.is_lost = True
                    conflict = conflicts.obstacle(self._env, write, cell, answer, unlocked.met)
                    if conflict is None:
                        unlocked.blocked.append(cell)
                    problem = conflict or problem
                elif answer.retry is Retry.UNKNOWN:
                    touched.append(cell)
                    unlocked.unanswered.append(cell)
                    unlocked.problem = answer
                else:
                    problem = answer
        finally:
            self._note_touched(touched)
        if problem is not None:
            raise problem
        return 0

    def _note_touched(self, cells: Sequence[CellAddress]) -> None:
        self.touched = [*self.touched, *cells] if self.touched else cells
