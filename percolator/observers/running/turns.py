"""Which runs take turns at a cell where they have lost, or where they would lose.

If a thousand documents bump one counter, nearly all of their runs would lose. A run that has lost
stands in line (hot_cells.py). While there is a line, new work is expected to lose there, too, if
the last run of its observer that lost did so at this cell, and all runs since have written it: then
it stands in line before its first run.

That may be a mistake, for an observer that writes one hot cell among many cold ones. A run that
commits without the cell shows it: then all that was only expected to lose runs at once, and until
the next run loses, nothing is expected. A turn that takes long proves nothing: on a busy machine
any turn may, and if all ran at once, nearly all would lose. It ends, and the next one begins.
"""

from __future__ import annotations

from collections.abc import Container

from percolator.errors import CellAddress, ConflictError
from percolator.observers.watched import Watched
from percolator.observers.work import Work
from percolator.observers.work_queue import WorkQueue
from percolator.protocol.contention.hot_cells import Contender, Loss
from percolator.protocol.environment import Environment

EXPECTED_SECONDS = 0.25
"""The turn of work that has not lost yet. If it was a mistake to wait, others wait no longer."""


class Turns:
    """The turns of the runs of one worker."""

    def __init__(self, env: Environment, queue: WorkQueue) -> None:
        self._env = env
        self._queue = queue

    def waits(self, work: Work) -> bool:
        """Whether the work has to stand in line before its first run; makes it a contender."""
        cell = work.watched.hot_cell
        if work.contender is not None or cell is None or cell not in self._env.hot_cells:
            return False
        work.contender = Contender(
            self._env.hot_cells,
            work.watched,
            work.found_seconds,
            seconds=EXPECTED_SECONDS,
        )
        work.contender.lost_at(cell)
        return True

    def lost(self, work: Work, error: ConflictError) -> bool:
        """Makes the work a contender. Returns whether to pause before it stands in line."""
        loss = Loss.reported_by(error)
        if loss is None:
            work.leave()
            return True
        work.has_lost, cell = True, loss.cell
        if cell != work.watched.acknowledgement(work.row, work.column):
            work.watched.hot_cell = cell  # a cell that other rows' runs may write, too
        if work.contender is None:
            work.contender = Contender(self._env.hot_cells, work.watched, work.found_seconds)
        contender = work.contender
        lost_in_turn = contender.has_turn_at(cell)
        contender.lost_at(cell)
        if not self._env.knows_winner(loss):
            return True
        if lost_in_turn:  # to one that takes none, perhaps to a call of its own function
            contender.leave()
        return lost_in_turn

    def committed(self, work: Work, written: Container[CellAddress]) -> None:
        """Takes note of the cells that a run has written."""
        cell = work.watched.hot_cell
        if cell is not None and cell not in written:
            self._mistaken(work.watched)

    def _mistaken(self, watched: Watched) -> None:
        watched.hot_cell = None
        for work in self._queue.in_line(watched):
            if not work.has_lost:
                work.leave()
