"""Hot cells: transactions of one client that have lost at a cell run one by one, the oldest first.

Transactions that have lost at a cell would collide there again, and all but one of them would lose
again. So they stand in line at the cell, and the next one runs when the one before it has ended.

Rules, each with the failure that it prevents:
- A line only says who runs when. What a transaction may commit is decided by its commit, in line or
  not, so a place that is lost or granted late costs time and nothing else.
- The line is ordered by age: when the first attempt began. Otherwise, one that has lost ten times
  waits behind all that came after it.
- A transaction that has lost at several cells is granted its place at all of them at the same time,
  when it is the first in each line. If it had one while it waited for the next, two could wait for
  each other.
- A grant ends after a time, whatever its owner does. A function that waits for something else would
  hold up the line forever. If the time was too short, the owner's next grant is twice as long:
  otherwise, a slow function would never commit at a cell where fast ones stand in line.
- A line is kept for a short time after the last one has left. Otherwise, the next two to come would
  collide, and one of them lose, each time that a line was empty.
- Without contention, nothing is kept, and one look at an empty dictionary is all that a transaction
  pays.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from percolator.errors import CellAddress, ConflictError, PercolatorError
from percolator.formats.records import KIND_DELETE, KIND_PUT
from percolator.routing.cells import FollowedCommit, FoundCell, KnownRow
from percolator.world import Random

# The handover from a transaction that has committed at a hot cell to the next in line there.
#
# The next one would ask the oracle for a timestamp, and read what was just written. Instead, the
# tablet sets aside the timestamp directly above the commit, and the next transaction begins there.
# No commit lies between the two, so what the winner has written is what the next one finds.
#
# Rules, each with the failure that it prevents:
# - The next one has begun to read before the commit was sent. Its snapshot has to show all that was
#   committed before its first read, and the timestamp is only above that if it was fetched later.
# - Nobody else may have the timestamp: a transaction is known by its start. So it is set aside by
#   the tablet that fetches the commit's, and only by the message that commits: a repeated one,
#   which finds the commit, knows nothing of it.
# - It is handed to one. The other cells of its snapshot are read at its timestamp, as ever.


class Handover(NamedTuple):
    """Where the next transaction begins, and what it finds there."""

    start: int
    """The timestamp directly above the commit of the transaction before it."""
    writes: Mapping[CellAddress, tuple[int, bytes]]
    """The writes of that transaction."""

    @classmethod
    def after(
        cls, commit_ts: int, writes: Mapping[CellAddress, tuple[int, bytes]]
    ) -> Handover | None:
        """None if no timestamp was set aside."""
        return cls(commit_ts + 1, writes) if isinstance(commit_ts, FollowedCommit) else None

    def known(self, cell: CellAddress) -> KnownRow | None:
        """The cell at the new start, if the transaction before has written it."""
        table_id, row, column = cell
        kind, value = self.writes.get(cell, (0, b""))
        if kind not in (KIND_PUT, KIND_DELETE):
            return None
        found = FoundCell(self.start - 1, value if kind == KIND_PUT else None)
        return KnownRow(table_id, row, {column: found})


# Rivals: other clients whose transactions have won recently, and the cells where they did.
#
# Lines exist within one client. Between clients there are only pauses, and with
# pauses after conflicts alone, winners go on winning: a client that has just committed retries at
# once, while all others pause longer and longer. With fifty clients on two cells, the unluckiest
# waited hundreds of times as long as most. So there are two rules:
#
# - The older a transaction, the shorter its pauses: half as long after four seconds.
# - A caller that has paused at a cell pauses there before its next transaction, too, up to as long.
#   It forgets half of that in two seconds, so that nothing is left soon after the others have gone.

HALF_AGE_SECONDS = 4.0
"""The age at which pauses are half as long. With one second, waits differ less, but when fifty
clients keep the machine busy, they need more attempts and commit a third less."""
HALF_LIFE_SECONDS = 2.0
"""The time in which half of a pause is forgotten."""
PAUSE_SECONDS_MIN = 0.001
"""A shorter pause is none."""
REMEMBERED_CELLS_MAX = 1_024


def conflict_pause_seconds(randomness: Random, longest_seconds: float, age_seconds: float) -> float:
    """A pause of a transaction of this age. All of it is random: two that have lost at the same
    time would meet again otherwise."""
    return longest_seconds * randomness.random() / (1.0 + age_seconds / HALF_AGE_SECONDS)


class _Contention:
    """The callers that have lost at one cell, and how long they pause there."""

    __slots__ = ("callers", "seconds", "since")

    def __init__(self) -> None:
        self.callers: set[object] = set()
        """Functions and observers that have lost."""
        self.seconds = 0.0
        """The longest pause, as of `since`."""
        self.since = 0.0

    def seconds_at(self, now: float) -> float:
        return float(self.seconds * 0.5 ** ((now - self.since) / HALF_LIFE_SECONDS))


class Rivals:
    """Where transactions of other clients have won recently. Times are monotonic."""

    def __init__(self) -> None:
        self.contended: OrderedDict[CellAddress, _Contention] = OrderedDict()

    def __len__(self) -> int:
        return len(self.contended)

    def note_loss(
        self, cell: CellAddress, caller: object, longest_seconds: float, now: float
    ) -> None:
        """Notes that this caller has lost at the cell, and pauses for `longest_seconds` at most."""
        contention = self.contended.get(cell)
        if contention is None:
            contention = self.contended[cell] = _Contention()
            if len(self.contended) > REMEMBERED_CELLS_MAX:
                self.contended.popitem(last=False)
        self.contended.move_to_end(cell)
        contention.callers.add(caller)
        contention.seconds = max(contention.seconds_at(now), longest_seconds)
        contention.since = now

    def longest_seconds(self, cell: CellAddress, caller: object, now: float) -> float:
        """The longest pause of a new transaction that reads the cell; 0.0 for none.

        A caller that has never lost there does not write the cell, and needs none.
        """
        contention = self.contended.get(cell)
        if contention is None:
            return 0.0
        seconds = contention.seconds_at(now)
        if seconds < PAUSE_SECONDS_MIN:
            del self.contended[cell]
            return 0.0
        return seconds if caller in contention.callers else 0.0


GRANT_SECONDS = 1.0
GRANT_SECONDS_MAX = 16.0
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


class Place:
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
        """Decides between places of the same age: the one that joined first has a lower number."""
        self.is_reading = False
        """Its transaction waits with its first read, so that it could begin anywhere from now."""
        self.followers = 0
        """Places with a lower number had joined before the owner sent its commit."""
        self.granted: asyncio.Future[Handover | None] = asyncio.get_running_loop().create_future()
        """Done when the owner may run, perhaps with a handover; cancelled if it never will."""
        self.left = False
        self.expired = False
        """It was ended because it had lasted too long."""
        self._timer: asyncio.TimerHandle | None = None

    def __lt__(self, other: Place) -> bool:
        return (self.owner.since, self.number) < (other.owner.since, other.number)

    def begin(self, timer: asyncio.TimerHandle, handover: Handover | None) -> None:
        self._timer = timer
        if not self.granted.done():  # the task that waits was cancelled, and is about to leave
            self.granted.set_result(handover)

    def end(self) -> None:
        self.left = True
        if self._timer is not None:
            self._timer.cancel()


class _Line:
    """The transactions that have lost at one cell, or would, and not committed yet."""

    __slots__ = ("callers", "end", "owner", "waiting")

    def __init__(self) -> None:
        self.owner: Place | None = None
        self.waiting: list[Place] = []
        """A heap: the oldest is the first. It may contain some that have left."""
        self.callers: set[object] = set()
        """The functions and observers that have lost here since the line formed."""
        self.end: asyncio.TimerHandle | None = None
        """The end of the line, if nothing stands in it."""

    def first(self) -> Place | None:
        while self.waiting and self.waiting[0].left:
            heappop(self.waiting)
        return self.waiting[0] if self.waiting else None


class HotCells:
    """The lines of one client. Belongs to its event loop."""

    def __init__(self) -> None:
        self.lines: dict[CellAddress, _Line] = {}
        """Where something stands in line, or has just now."""
        self._joined = 0

    def __len__(self) -> int:
        """The number of cells where something stands in line."""
        return sum(line.end is None for line in self.lines.values())

    def has_lost(self, caller: object, cell: CellAddress) -> bool:
        """True if there is a line at the cell, and this caller has lost there since it formed.

        Then it writes the cell: a caller that only reads the cell never conflicts, and never waits.
        """
        line = self.lines.get(cell)
        return line is not None and caller in line.callers

    def join(self, place: Place) -> None:
        """Puts a new place into the lines of its cells."""
        place.number = self._joined
        self._joined += 1
        for cell in place.cells:
            line = self.lines.get(cell)
            if line is None:
                line = self.lines[cell] = _Line()
            elif line.end is not None:
                line.end.cancel()
                line.end = None
            line.callers.add(place.owner.caller)
            heappush(line.waiting, place)
        self._grant(place.cells)

    def is_followed(self, place: Place) -> bool:
        """True if the next in line could use the handover. Asked before the commit."""
        place.followers = self._joined
        for cell in place.cells:
            following = self.lines[cell].first()
            if following is not None and following.is_reading:
                return True
        return False

    def leave(self, place: Place, handover: Handover | None = None) -> None:
        """Ends the grant, or gives up the place in line. The handover is for the next one, if it
        has joined before the commit was sent."""
        if place.left:
            return
        place.end()
        if not place.granted.done():
            place.granted.cancel()
        for cell in place.cells:
            line = self.lines[cell]
            if line.owner is place:
                line.owner = None
        self._grant(place.cells, handover, place.followers)

    def _grant(
        self, cells: Sequence[CellAddress], handover: Handover | None = None, followers: int = 0
    ) -> None:
        """Grants every place that can be, now that something has changed at these cells."""
        for cell in cells:
            line = self.lines.get(cell)
            if line is None or line.owner is not None or line.end is not None:
                continue
            place = line.first()
            if place is None:
                loop = asyncio.get_running_loop()
                line.end = loop.call_later(KEPT_SECONDS, self.lines.pop, cell)
            elif self._is_first_everywhere(place):
                for each in place.cells:
                    self.lines[each].owner = heappop(self.lines[each].waiting)
                begins_there = place.is_reading and place.number < followers
                timer = asyncio.get_running_loop().call_later(place.seconds, self._expire, place)
                place.begin(timer, handover if begins_there else None)
                handover = None if begins_there else handover

    def _is_first_everywhere(self, place: Place) -> bool:
        for cell in place.cells:
            line = self.lines[cell]
            if line.owner is not None or line.first() is not place:
                return False
        return True

    def _expire(self, place: Place) -> None:
        place.expired = True
        self.leave(place)


class Contender:
    """Work that is tried until it commits, and the cells where it has lost so far."""

    __slots__ = ("_cells", "_hot_cells", "_place", "_seconds", "caller", "since")

    def __init__(
        self,
        hot_cells: HotCells,
        caller: object,
        since: float,
        *,
        seconds: float = GRANT_SECONDS,
    ) -> None:
        """`caller` is what is tried: a function, an observer. `since`: when the first attempt
        began, on the monotonic clock. `seconds`: how long its grant may last."""
        self.caller = caller
        self.since = since
        self._hot_cells = hot_cells
        self._cells: tuple[CellAddress, ...] = ()
        self._seconds = seconds
        self._place: Place | None = None

    @property
    def in_line(self) -> bool:
        """True if it stands in line, or its place was granted."""
        return self._place is not None and not self._place.left

    def is_granted_at(self, cell: CellAddress) -> bool:
        """True if its place at this cell was granted, and that has not lasted too long."""
        place = self._place
        return place is not None and not place.left and place.granted.done() and cell in place.cells

    def lost_at(self, cell: CellAddress) -> None:
        if cell not in self._cells:
            self._cells = (*self._cells[1 - CELLS_MAX :], cell)

    @property
    def is_followed(self) -> bool:
        """True if its place was granted, and the next in line could use the handover. Asked before
        its commit is sent."""
        place = self._place
        if place is None or place.left or not place.granted.done():
            return False
        return self._hot_cells.is_followed(place)

    def stand_in_line(self, *, is_reading: bool = False) -> asyncio.Future[Handover | None]:
        """Leaves its place if it has one; the result is done when the new one is granted.

        `is_reading`: its transaction waits with its first read.
        """
        if self._place is not None and self._place.expired:
            self._seconds = min(2 * self._seconds, GRANT_SECONDS_MAX)
        self.leave()
        self._place = Place(self, self._cells, self._seconds)
        self._place.is_reading = is_reading
        self._hot_cells.join(self._place)
        return self._place.granted

    def leave(self, handover: Handover | None = None) -> None:
        """Ends its grant, or gives up its place in line."""
        if self._place is not None:
            self._hot_cells.leave(self._place, handover)
            self._place = None
