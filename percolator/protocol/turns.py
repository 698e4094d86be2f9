"""The turns of one transaction at cells that it is about to write: see percolator/tablet/turns.py.

A transaction asks for a turn with `tx.get(..., for_update=True)`, and by itself at a cell where an
attempt has lost to another client. Rules, each with the failure that it prevents:

- A transaction that has not begun takes its start timestamp after its turn has come: before that,
  it would lose. One that has begun, and finds the cell changed above its snapshot, cannot commit:
  it is run again, and keeps its place meanwhile.
- The next attempt waits for its turns at all cells at which it has asked for one, in their order,
  before it begins. In the order of the program, two that take the same cells could wait for each
  other again and again.
- One that has a turn waits only briefly for a turn at a cell that sorts before it: the
  other one may wait for it. Then it gives way, and the next attempt goes by the order. If it is so,
  and both cells are in one tablet, the tablet says at once that its turn does not come.
- An attempt that loses in its turn was too slow: the next one may take twice as long. Otherwise, a
  slow function would never commit at a cell where fast ones are in the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from percolator.errors import (
    CellAddress,
    ConflictError,
    ExecutionUnknown,
    NotExecuted,
    Overloaded,
    PercolatorError,
    SchemaError,
    UsageError,
)
from percolator.formats.records import KIND_READ_LOCK
from percolator.protocol.environment import Environment
from percolator.protocol.write_set import Write
from percolator.routing.cells import Turn

HOLD_SECONDS = 0.5
"""How long a turn lasts at first, if its transaction does not end before."""
HOLD_SECONDS_MAX = 16.0
GIVE_WAY_SECONDS = 0.01
"""A few round trips. Meanwhile nobody else has the cells where its turn has come; giving way costs
one run of a function at most, since the next attempt goes by the order."""
CELLS_MAX = 64
"""The most cells at which an attempt waits for turns before it begins."""


class TransactionTurns:
    """The turns of one transaction, and of its attempts."""

    __slots__ = ("_env", "_hold_seconds", "_place", "asked", "ended_at", "held", "is_lined_up")

    def __init__(self, env: Environment, place: int = 0) -> None:
        """`place` identifies the transaction in the queues, if that is not left to chance."""
        self._env = env
        self._place = place or env.random.getrandbits(64) or 1
        self._hold_seconds = HOLD_SECONDS
        self.held: dict[CellAddress, int] = {}
        """The cells where its turn has come, or where it may have a place; with the start timestamp
        that the tablet knows."""
        self.asked: dict[CellAddress, None] = {}
        """The cells where an attempt has asked for a turn, or has lost."""
        self.ended_at: CellAddress | None = None
        """The cell at which this attempt has ended: it has given way, or found the cell changed."""
        self.is_lined_up = True
        """This attempt waits for no turns before it begins, or has done so."""

    def ask(self, cell: CellAddress) -> None:
        """The attempt that begins next waits for a turn there."""
        if cell in self.asked or len(self.asked) < CELLS_MAX:
            self.asked[cell] = None
            self.is_lined_up = False

    def has_missed(self, cell: CellAddress) -> bool:
        """True if this attempt has waited for a turn there, and none has come."""
        return cell in self.asked and cell not in self.held

    def run_again(self, error: PercolatorError) -> bool:
        """Another attempt is made. True if this one has given way, or found a cell changed: then it
        need not pause, and keeps its places."""
        cell = error.cell if isinstance(error, ConflictError) else None
        has_ended_itself = cell is not None and cell == self.ended_at
        if not has_ended_itself and cell in self.held:
            self._hold_seconds = min(2 * self._hold_seconds, HOLD_SECONDS_MAX)
        self.ended_at = None
        self.is_lined_up = not self.asked
        return has_ended_itself

    async def line_up(self, deadline: float) -> tuple[CellAddress, Turn] | None:
        """Waits for its turns before it begins. Returns the last one: the transaction begins there.

        At the deadline, it goes on without those that have not come.
        """
        self.is_lined_up = True
        cells, turn = sorted(self.asked), None
        missing = next((cell for cell in cells if cell not in self.held), None)
        if missing is not None:
            self.end([held for held in self.held if held > missing])
        for cell in cells:
            turn = await self._await(cell, 0, deadline - self._env.now())
        return None if turn is None else (cells[-1], turn)

    async def at(self, cell: CellAddress, start: int, deadline: float) -> Turn | None:
        """Waits for a turn at a cell, for a transaction that has begun. None if it has not come at
        the deadline. Raises `ConflictError` if it gives way, or the cell has changed."""
        seconds = deadline - self._env.now()
        out_of_order = any(held > cell for held in self.held)
        if out_of_order:
            seconds = min(seconds, GIVE_WAY_SECONDS)
        if cell in self.asked or len(self.asked) < CELLS_MAX:
            self.asked[cell] = None
        turn = await self._await(cell, start, seconds)
        if turn is None:
            if out_of_order:
                raise self._conflict(cell, start, 0, "is being written by one that may wait for it")
            return None
        if turn.is_known and turn.found is not None and turn.found.commit_timestamp > start:
            changed_at = turn.found.commit_timestamp
            raise self._conflict(cell, start, changed_at, f"was written at {changed_at}")
        return turn

    def _conflict(
        self, cell: CellAddress, start: int, commit_timestamp: int, why: str
    ) -> ConflictError:
        self.ended_at = cell
        self._env.tally.lost_at(cell)
        return ConflictError(
            f"{self._env.described(cell)} {why}, after this transaction began at {start}",
            cell=cell,
            start_timestamp=start,
            other_commit_timestamp=commit_timestamp,
        )

    async def _await(self, cell: CellAddress, start: int, seconds: float) -> Turn | None:
        queues = self._env.turns
        if queues is None or seconds <= 0:
            return None
        self.held[cell] = 0
        try:
            turn = await queues.await_turn(cell, self._place, start, seconds, self._hold_seconds)
        except Overloaded:
            self.held.pop(cell, None)
            raise
        except SchemaError:  # the table was dropped: the next attempt uses another one
            self.asked.pop(cell, None)
            self.held.pop(cell, None)
            return None
        except (NotExecuted, ExecutionUnknown, UsageError):
            # It is advice: the reads and the commit say what is wrong. A server of an earlier
            # release has no such procedure, which is a `UsageError`.
            self.held.pop(cell, None)
            return None
        if not turn.in_turn or cell not in self.held:  # the transaction may have ended meanwhile
            self.held.pop(cell, None)
            return None
        self.held[cell] = turn.start
        return turn

    def committed(self, start: int, writes: Mapping[CellAddress, Write]) -> None:
        """The transaction has committed. Where it has written, tablets have seen that, but not
        where it has a read lock: that is in another cell."""
        self.end(
            cell
            for cell, known in self.held.items()
            if known != start or cell not in writes or writes[cell][0] == KIND_READ_LOCK
        )
        self.held.clear()

    def end(self, cells: Iterable[CellAddress] | None = None) -> None:
        """Ends the turns at these cells, or all. Works in any thread."""
        queues = self._env.turns
        for cell in list(self.held if cells is None else cells):
            if queues is not None and self.held.pop(cell, None) is not None:
                queues.end_turn(cell, self._place)
