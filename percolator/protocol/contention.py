"""Hot cells: transactions of one client that would collide at a cell run one by one there.

Transactions that have lost at a cell would collide there again, and all but one of them would lose
again. So they stand in line at the cell, the oldest first, and the next one runs when the one
before it has ended. Most collisions can be foreseen: many functions write every cell that they
read. A transaction of such a function holds the cells that it reads, until it ends. Another one
that would begin by reading such a cell stands in line for it. If it meets one later, its snapshot
is too old already: it is run again when it can hold all its cells.

Rules, each with the failure that it prevents:
- A line only says who runs when. What a transaction may commit is decided by its commit, in line or
  not, so a place that is lost or granted late costs time and nothing else.
- The line is ordered by age: when the first attempt began. Otherwise, one that has lost ten times
  waits behind all that came after it.
- A transaction that has lost at several cells is granted its place at all of them at the same time,
  when it is the first in each line. If it had one while it waited for the next, two could wait for
  each other.
- Once another one waits, a cell is held for a limited time, whatever its holder does. A function
  that waits for something else would hold up the line forever. If the time was too short, its next
  grant is twice as long: otherwise, a slow function would never commit at a cell where fast ones
  stand in line.
- A transaction waits before it holds a cell, and never while it does. Two that have read one cell
  each, and want the other's, would wait for each other.
- Only a first attempt gives way to a holder that it meets. One that reads other cells at each
  attempt would give way forever.
- A cell that is only read is not held: everybody may read it at once. So a function has to write
  all that it reads of a column, commit after commit, before its transactions hold cells there. When
  one commits without writing a cell that it held, those that waited with their first read all go.
- A line is kept for a short time after the last one has left. Otherwise, the next two to come would
  collide, and one of them lose, each time that a line was empty.
- Where nobody waits, there is no line, no timer and no future: a transaction pays for an entry in a
  dictionary with each cell that it holds.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from percolator.errors import CellAddress, ConflictError, PercolatorError
from percolator.formats.records import KIND_DELETE, KIND_PUT
from percolator.routing.cells import FollowedCommit, FoundCell, KnownRows
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

    def known(self, cell: CellAddress) -> KnownRows | None:
        """The cell at the new start, if the transaction before has written it."""
        table_id, row, column = cell
        kind, value = self.writes.get(cell, (0, b""))
        if kind not in (KIND_PUT, KIND_DELETE):
            return None
        found = FoundCell(self.start - 1, value if kind == KIND_PUT else None)
        return KnownRows(table_id, {row: {column: found}})


# Rivals: other clients whose transactions have won recently, and the cells where they did.
#
# Lines exist within one client. Between clients, tablets keep queues (protocol/turns.py), and a
# caller that has lost at a cell asks for its turn there before its next transactions, too. In a row
# store there are only pauses, and with pauses after conflicts alone, winners go on
# winning: a client that has just committed retries at once, while all others pause longer and
# longer. With fifty clients on two cells, the unluckiest waited hundreds of times as long as most.
# So there are two rules for pauses:
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
TURN_WEIGHT = 2**5
"""After five half-lives, nothing is left of it."""
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

    def note_turn(self, cell: CellAddress, caller: object, now: float) -> None:
        """Notes that this caller waits for its turn at the cell: its transactions do so from their
        first attempt on, until nothing was noted for ten seconds. That costs them nothing: the
        message that waits also brings the timestamp and the cell."""
        self.note_loss(cell, caller, TURN_WEIGHT * PAUSE_SECONDS_MIN, now)

    def forget_loss(self, caller: object, cell: CellAddress) -> None:
        """As `HotCells.forget_loss`."""
        contention = self.contended.get(cell)
        if contention is not None:
            contention.callers.discard(caller)

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
"""How long a cell is held while others wait for it."""
KEPT_SECONDS = 0.25
"""How long a line is kept when it is empty."""
CELLS_MAX = 8
"""The most cells at which one transaction stands in line: those where it lost last."""
WRITTEN_MIN = 16
"""So many cells of a column must a function have read and written, and none only read, before its
transactions hold such cells."""
HELD_MAX = 32
"""The most cells that a transaction holds because it has read them."""
CALLERS_MAX = 1_024
COLUMNS_MAX = 256
"""The most functions, and columns of each, of which that is known."""


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
    """One transaction's place in the lines of its cells, until it is granted."""

    __slots__ = ("cells", "granted", "is_reading", "left", "number", "owner")

    def __init__(self, owner: Contender, cells: Sequence[CellAddress], *, is_reading: bool) -> None:
        self.owner = owner
        self.cells = cells
        self.number = 0
        """Decides between places of the same age: the one that joined first has a lower number."""
        self.is_reading = is_reading
        """Its transaction waits with its first read, so that it could begin anywhere from now."""
        self.granted: asyncio.Future[Handover | None] = asyncio.get_running_loop().create_future()
        """Done when the owner may run, perhaps with a handover; cancelled if it never will."""
        self.left = False

    def __lt__(self, other: Place) -> bool:
        return (self.owner.since, self.number) < (other.owner.since, other.number)


class _Line:
    """The transactions that wait for one cell."""

    __slots__ = ("callers", "ends_at", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Place] = []
        """A heap: the oldest is the first. It may contain some that have left."""
        self.callers: set[object] = set()
        """The functions and observers that have lost here since the line formed."""
        self.ends_at = 0.0
        """When the line ends, if nothing waits or was granted its place; else 0.0."""

    def first(self) -> Place | None:
        while self.waiting and self.waiting[0].left:
            heappop(self.waiting)
        return self.waiting[0] if self.waiting else None


class HotCells:
    """The held cells and the lines of one client. Belongs to its event loop."""

    def __init__(self) -> None:
        self.holders: dict[CellAddress, Contender] = {}
        self.lines: dict[CellAddress, _Line] = {}
        """Where something stands in line, or has just now."""
        self._ending: deque[CellAddress] = deque()
        """The lines that are empty, or were, in the order in which they end."""
        self._joined = 0
        self._written: dict[object, dict[tuple[int, bytes], int]] = {}

    def __len__(self) -> int:
        """The number of cells where something stands in line, or was granted its place."""
        return sum(not line.ends_at for line in self.lines.values())

    def has_lost(self, caller: object, cell: CellAddress) -> bool:
        """True if there is a line at the cell, and this caller has lost there since it formed.

        Then it writes the cell: a caller that only reads the cell never conflicts, and never waits.
        """
        line = self.lines.get(cell)
        return line is not None and caller in line.callers

    def is_free(self, cell: CellAddress) -> bool:
        """True if nothing holds the cell or waits for it."""
        if cell in self.holders:
            return False
        line = self.lines.get(cell)
        return line is None or line.first() is None

    def written_by(self, caller: object) -> dict[tuple[int, bytes], int]:
        """How many cells of each column the function has read and written since it has only read
        one there."""
        columns = self._written.get(caller)
        if columns is None or len(columns) >= COLUMNS_MAX:
            if len(self._written) >= CALLERS_MAX:
                self._written.clear()
            columns = self._written[caller] = {}
        return columns

    def forget_loss(self, caller: object, cell: CellAddress) -> None:
        """Notes that this caller has committed with a read lock of the cell: of those, any number
        may be held at once."""
        line = self.lines.get(cell)
        if line is not None:
            line.callers.discard(caller)

    def let_go_at(self, cell: CellAddress) -> None:
        """Ends the waits of those that would begin by reading a cell that is only read."""
        line = self.lines.get(cell)
        for place in list(line.waiting) if line is not None else ():
            if place.is_reading and not place.left:
                if not place.granted.done():
                    place.granted.set_result(None)
                place.owner.leave()

    def hold(self, cell: CellAddress, holder: Contender) -> None:
        self.holders[cell] = holder
        holder.held.append(cell)
        line = self.lines.get(cell)
        if line is not None and line.first() is not None:
            holder.limit()

    def join(self, place: Place) -> None:
        """Puts a new place into the lines of its cells."""
        place.number = self._joined
        self._joined += 1
        for cell in place.cells:
            line = self.lines.get(cell)
            if line is None:
                line = self.lines[cell] = _Line()
            line.ends_at = 0.0
            line.callers.add(place.owner.caller)
            heappush(line.waiting, place)
            holder = self.holders.get(cell)
            if holder is not None:
                holder.limit()
        self._grant(place.cells)

    def is_followed(self, holder: Contender) -> bool:
        """True if the next in line could use the handover. Asked before the commit."""
        holder.followers = self._joined
        for cell in holder.held:
            line = self.lines.get(cell)
            following = None if line is None else line.first()
            if following is not None and following.is_reading:
                return True
        return False

    def leave(self, contender: Contender, handover: Handover | None = None) -> None:
        """Ends its grant, or gives up its place in line. The handover is for the next one, if it
        has joined before the commit was sent."""
        held, contender.held = contender.held, []
        for cell in held:
            del self.holders[cell]
        self._grant(held, handover, contender.followers)
        place, contender.place = contender.place, None
        if place is not None:
            place.left = True
            if not place.granted.done():
                place.granted.cancel()
            self._grant(place.cells)

    def _grant(
        self, cells: Sequence[CellAddress], handover: Handover | None = None, followers: int = 0
    ) -> None:
        """Grants every place that can be, now that something has changed at these cells."""
        for cell in cells:
            line = self.lines.get(cell)
            if line is None or line.ends_at or cell in self.holders:
                continue
            place = line.first()
            if place is None:
                self._end_later(cell, line)
            elif self._is_first_everywhere(place):
                owner = place.owner
                owner.place = None
                for each in place.cells:
                    heappop(self.lines[each].waiting)
                    self.hold(each, owner)
                begins_there = place.is_reading and place.number < followers
                if not place.granted.done():  # else its task was cancelled, and is about to leave
                    place.granted.set_result(handover if begins_there else None)
                handover = None if begins_there else handover

    def _is_first_everywhere(self, place: Place) -> bool:
        for cell in place.cells:
            if cell in self.holders or self.lines[cell].first() is not place:
                return False
        return True

    def _end_later(self, cell: CellAddress, line: _Line) -> None:
        loop = asyncio.get_running_loop()
        line.ends_at = loop.time() + KEPT_SECONDS
        if not self._ending:
            loop.call_later(KEPT_SECONDS, self._end_lines)
        self._ending.append(cell)

    def _end_lines(self) -> None:
        """Forgets the lines whose time has come. One timer serves all: with thousands of them, a
        timer each would cost more than the lines."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._ending:
            line = self.lines.get(self._ending[0])
            if line is not None and line.ends_at:
                if line.ends_at > now:
                    loop.call_at(line.ends_at, self._end_lines)
                    return
                del self.lines[self._ending[0]]
            self._ending.popleft()


class Contender:
    """Work that is tried until it commits, the cells that it holds, and where it has lost so
    far."""

    __slots__ = (
        "_cells",
        "_expired",
        "_hot_cells",
        "_seconds",
        "_timer",
        "caller",
        "followers",
        "held",
        "place",
        "since",
    )

    def __init__(
        self,
        hot_cells: HotCells,
        caller: object,
        since: float,
        *,
        seconds: float = GRANT_SECONDS,
    ) -> None:
        """`caller` is what is tried: a function, an observer. `since`: when the first attempt
        began, on the monotonic clock. `seconds`: how long it may hold cells while others wait."""
        self.caller = caller
        self.since = since
        self.place: Place | None = None
        """Where it waits."""
        self.held: list[CellAddress] = []
        self.followers = 0
        """Places with a lower number had joined before it sent its commit."""
        self._hot_cells = hot_cells
        self._cells: tuple[CellAddress, ...] = ()
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False
        """Others have waited for too long for the cells that it held."""

    @property
    def in_line(self) -> bool:
        """True if it stands in line, or holds cells."""
        return self.place is not None or bool(self.held)

    def is_granted_at(self, cell: CellAddress) -> bool:
        """True if it holds this cell."""
        return cell in self.held

    def hold(self, cell: CellAddress) -> None:
        """Holds a cell that no other one holds, unless it has held others for too long."""
        if not self._expired and len(self.held) < HELD_MAX:
            self._hot_cells.hold(cell, self)

    def lost_at(self, cell: CellAddress) -> None:
        if cell not in self._cells:
            self._cells = (*self._cells[1 - CELLS_MAX :], cell)

    @property
    def is_followed(self) -> bool:
        """True if it holds cells, and the next in line could use the handover. Asked before its
        commit is sent."""
        return bool(self.held) and self._hot_cells.is_followed(self)

    def stand_in_line(self, *, is_reading: bool = False) -> asyncio.Future[Handover | None]:
        """Lets go what it holds; the result is done when it holds all cells where it has lost.

        `is_reading`: its transaction waits with its first read.
        """
        if self._expired:
            self._seconds = min(2 * self._seconds, GRANT_SECONDS_MAX)
        self.leave()
        self._expired = False
        place = self.place = Place(self, self._cells, is_reading=is_reading)
        self._hot_cells.join(place)
        return place.granted

    def limit(self) -> None:
        """Another one waits for what it holds."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._seconds, self._expire)

    def _expire(self) -> None:
        self.leave()
        self._expired = True

    def leave(self, handover: Handover | None = None) -> None:
        """Lets go what it holds, or gives up its place in line."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.in_line:
            self._hot_cells.leave(self, handover)
