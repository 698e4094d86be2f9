"""Hot cells: transactions of one client that have lost at a cell take turns, the oldest first.

Transactions that have lost at a cell would collide there again, and all but one of them would lose
again. So they stand in line at the cell, and the next one runs when the one before it has ended.

Rules, each with the failure that it prevents:
- Turns only say who runs when. What a transaction may commit is decided by its commit, with a turn
  or without, so a lost or late turn costs time and nothing else.
- The line is ordered by age: when the first attempt began. Otherwise, one that has lost ten times
  waits behind all that came after it.
- A transaction that has lost at several cells gets its turn at all of them at the same time, when
  it is the first in each line. If it had one turn while it waited for the next, two could wait for
  each other.
- A turn ends after a time, whatever its owner does. A function that waits for something else would
  hold up the line forever. If the time was too short, the owner's next turn is twice as long:
  otherwise, a slow function would never commit at a cell where fast ones take turns.
- A line is kept for a moment after the last one has left. Otherwise, the next two to come would
  collide, and one of them lose, each time that a line was empty.
- Without contention, nothing is kept, and one look at an empty dictionary is all that a transaction
  pays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from percolator.errors import CellAddress, ConflictError, PercolatorError
from percolator.protocol.contention.baton import Baton

TURN_SECONDS = 1.0
TURN_SECONDS_MAX = 16.0
KEPT_SECONDS = 0.25
"""How long a line is kept when it is empty."""
CELLS_MAX = 8
"""The most cells at which one transaction stands in line: those where it lost last."""


class Loss(NamedTuple):
    """Where a transaction has lost, and to which other one."""

    cell: CellAddress
    winner: int
    """The start timestamp of the other transaction."""

    @classmethod
    def reported_by(cls, error: PercolatorError) -> Loss | None:
        """None if no other transaction was in the way: it was given up, or presumed dead."""
        if not isinstance(error, ConflictError) or error.cell is None:
            return None
        return cls(error.cell, error.other_start_timestamp) if error.other_start_timestamp else None


class Turn:
    """One transaction's place in the lines of its cells."""

    __slots__ = (
        "_timer",
        "cells",
        "expired",
        "followers",
        "granted",
        "is_reading",
        "left",
        "number",
        "owner",
        "seconds",
    )

    def __init__(self, owner: Contender, cells: Sequence[CellAddress], seconds: float) -> None:
        self.owner = owner
        self.cells = cells
        self.seconds = seconds
        self.number = 0
        """Decides between turns of the same age: the one that joined first has the lower number."""
        self.is_reading = False
        """Its transaction waits with its first read, so that it could begin anywhere from now."""
        self.followers = 0
        """Turns with a lower number had joined before the owner sent its commit."""
        self.granted: asyncio.Future[Baton | None] = asyncio.get_running_loop().create_future()
        """Done when the turn begins, perhaps with a baton; cancelled if it never will."""
        self.left = False
        self.expired = False
        """It was ended because it had lasted too long."""
        self._timer: asyncio.TimerHandle | None = None

    def __lt__(self, other: Turn) -> bool:
        return (self.owner.since, self.number) < (other.owner.since, other.number)

    def begin(self, timer: asyncio.TimerHandle, baton: Baton | None) -> None:
        self._timer = timer
        if not self.granted.done():  # the task that waits was cancelled, and is about to leave
            self.granted.set_result(baton)

    def end(self) -> None:
        self.left = True
        if self._timer is not None:
            self._timer.cancel()


class _Line:
    """The transactions that have lost at one cell, or would, and not committed yet."""

    __slots__ = ("callers", "end", "owner", "waiting")

    def __init__(self) -> None:
        self.owner: Turn | None = None
        self.waiting: list[Turn] = []
        """A heap: the oldest is the first. It may contain some that have left."""
        self.callers: set[object] = set()
        """The functions and observers that have lost here since the line formed."""
        self.end: asyncio.TimerHandle | None = None
        """The end of the line, if nothing stands in it."""

    def first(self) -> Turn | None:
        while self.waiting and self.waiting[0].left:
            heappop(self.waiting)
        return self.waiting[0] if self.waiting else None


class HotCells:
    """The lines of one client. Belongs to its event loop."""

    def __init__(self) -> None:
        self._lines: dict[CellAddress, _Line] = {}
        self._joined = 0

    def __len__(self) -> int:
        """The number of cells where something stands in line."""
        return sum(line.end is None for line in self._lines.values())

    def __contains__(self, cell: CellAddress) -> bool:
        """Whether something stands in line there, or has a moment ago."""
        return cell in self._lines

    def has_lost(self, caller: object, cell: CellAddress) -> bool:
        """Whether there is a line at the cell, and this caller has lost there since it formed.

        Then it writes the cell: a caller that only reads the cell never conflicts, and never waits.
        """
        line = self._lines.get(cell)
        return line is not None and caller in line.callers

    def join(self, turn: Turn) -> None:
        """Puts a new turn in line at its cells."""
        turn.number = self._joined
        self._joined += 1
        for cell in turn.cells:
            line = self._lines.get(cell)
            if line is None:
                line = self._lines[cell] = _Line()
            elif line.end is not None:
                line.end.cancel()
                line.end = None
            line.callers.add(turn.owner.caller)
            heappush(line.waiting, turn)
        self._grant(turn.cells)

    def is_followed(self, turn: Turn) -> bool:
        """Whether one that could take the baton is the next in line. Asked before the commit."""
        turn.followers = self._joined
        for cell in turn.cells:
            following = self._lines[cell].first()
            if following is not None and following.is_reading:
                return True
        return False

    def leave(self, turn: Turn, baton: Baton | None = None) -> None:
        """Ends the turn, or gives up the place in line. The baton is for the next one, if it has
        joined before the commit was sent."""
        if turn.left:
            return
        turn.end()
        if not turn.granted.done():
            turn.granted.cancel()
        for cell in turn.cells:
            line = self._lines[cell]
            if line.owner is turn:
                line.owner = None
        self._grant(turn.cells, baton, turn.followers)

    def _grant(
        self, cells: Sequence[CellAddress], baton: Baton | None = None, followers: int = 0
    ) -> None:
        """Begins every turn that can begin, now that something has changed at these cells."""
        for cell in cells:
            line = self._lines.get(cell)
            if line is None or line.owner is not None or line.end is not None:
                continue
            turn = line.first()
            if turn is None:
                loop = asyncio.get_running_loop()
                line.end = loop.call_later(KEPT_SECONDS, self._lines.pop, cell)
            elif self._is_first_everywhere(turn):
                for each in turn.cells:
                    self._lines[each].owner = heappop(self._lines[each].waiting)
                takes = turn.is_reading and turn.number < followers
                timer = asyncio.get_running_loop().call_later(turn.seconds, self._expire, turn)
                turn.begin(timer, baton if takes else None)
                baton = None if takes else baton

    def _is_first_everywhere(self, turn: Turn) -> bool:
        for cell in turn.cells:
            line = self._lines[cell]
            if line.owner is not None or line.first() is not turn:
                return False
        return True

    def _expire(self, turn: Turn) -> None:
        turn.expired = True
        self.leave(turn)


class Contender:
    """Work that is tried until it commits, and the cells where it has lost so far."""

    __slots__ = ("_cells", "_hot_cells", "_seconds", "_turn", "caller", "since")

    def __init__(
        self,
        hot_cells: HotCells,
        caller: object,
        since: float,
        *,
        seconds: float = TURN_SECONDS,
    ) -> None:
        """`caller` is what is tried: a function, an observer. `since`: when the first attempt
        began, on the monotonic clock. `seconds`: how long its turn may last."""
        self.caller = caller
        self.since = since
        self._hot_cells = hot_cells
        self._cells: tuple[CellAddress, ...] = ()
        self._seconds = seconds
        self._turn: Turn | None = None

    @property
    def in_line(self) -> bool:
        """Whether it stands in line, or has its turn."""
        return self._turn is not None and not self._turn.left

    def has_turn_at(self, cell: CellAddress) -> bool:
        """Whether it has its turn at this cell, and the turn has not lasted too long."""
        turn = self._turn
        return turn is not None and not turn.left and turn.granted.done() and cell in turn.cells

    def lost_at(self, cell: CellAddress) -> None:
        if cell not in self._cells:
            self._cells = (*self._cells[1 - CELLS_MAX :], cell)

    @property
    def is_followed(self) -> bool:
        """Whether it has its turn, and the next in line could take the baton. Asked before its
        commit is sent."""
        turn = self._turn
        if turn is None or turn.left or not turn.granted.done():
            return False
        return self._hot_cells.is_followed(turn)

    def stand_in_line(self, *, is_reading: bool = False) -> asyncio.Future[Baton | None]:
        """Ends its turn if it has one; the result is done when the next one begins.

        `is_reading`: its transaction waits with its first read.
        """
        if self._turn is not None and self._turn.expired:
            self._seconds = min(2 * self._seconds, TURN_SECONDS_MAX)
        self.leave()
        self._turn = Turn(self, self._cells, self._seconds)
        self._turn.is_reading = is_reading
        self._hot_cells.join(self._turn)
        return self._turn.granted

    def leave(self, baton: Baton | None = None) -> None:
        """Ends its turn, or gives up its place in line."""
        if self._turn is not None:
            self._hot_cells.leave(self._turn, baton)
            self._turn = None
