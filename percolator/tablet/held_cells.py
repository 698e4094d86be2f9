"""Cells that transactions hold in memory while they commit in one round.

Such a transaction sets no locks. From the moment its cells are judged until its records are durable
and published, everything else that touches the cells waits here. What each rule prevents:

* Mutations of a held cell wait. Otherwise a rollback marker would be put and reported, and the
  commit would still be written.
* Reads at or above the start timestamp wait. The commit timestamp may be below theirs, and there is
  no lock to report. Once it is known to be above a read, that read goes on: it must not see it.
  The same holds for scans of changes up to a timestamp, which never come back to what they missed.
* The cells are held *before* the commit timestamp is fetched. So every timestamp that was handed
  out before is below the commit, and a read that came before has seen what it had to see.
* They are let go only after the batch was published. The storage shows a batch before its writer
  hears of it, and memory knows of it only after that.

A waiter is woken only by the transactions in its way, and its total wait is limited. Otherwise, on
busy cells it would be woken for nothing and never time out.

A server that dies loses what is held, and nothing else: the batch is in the log, or it never was.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from math import inf
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from percolator.errors import NotReady
from percolator.tablet import keys
from percolator.tablet.memory import OrderedKeys, ReadLocks

WAIT_SECONDS_MAX = 5.0
"""How long a read waits. A commit waits about a second for the oracle, and then for the disk."""
_RETRY_SECONDS = 0.1


class Holder(Protocol):
    """A transaction that holds cells."""

    @property
    def start(self) -> int: ...

    @property
    def commit(self) -> int:
        """Its commit timestamp; 0 while it is not known."""
        ...

    @property
    def cells(self) -> Sequence[bytes]:
        """`keys.cell_prefix` of each."""
        ...


class HeldCells:
    """The held cells of one tablet."""

    def __init__(self) -> None:
        self.holders: dict[bytes, Holder] = {}
        """By cell. Public for lookups on the hottest paths."""
        self._ordered = OrderedKeys()
        """The same cells."""
        self._changes: dict[Holder, asyncio.Future[None]] = {}
        """The next change of each holder that something waits for."""
        self._emptied: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self.holders)

    def hold(self, holder: Holder) -> None:
        for cell in holder.cells:
            self.holders[cell] = holder
            self._ordered.add(cell)

    def let_go(self, holders: Collection[Holder]) -> None:
        for holder in holders:
            for cell in holder.cells:
                del self.holders[cell]
                self._ordered.remove(cell)
        self.changed(holders)
        if self._emptied is not None and not self.holders:
            self._emptied.set_result(None)
            self._emptied = None

    def changed(self, holders: Iterable[Holder]) -> None:
        """Wakes what waits for them: their commit timestamps are known, or they have let go."""
        if not self._changes:
            return
        for holder in holders:
            change = self._changes.pop(holder, None)
            if change is not None:
                change.set_result(None)

    def in_the_way(self, cell: bytes, timestamp: int) -> Holder | None:
        """The transaction that may be about to commit on the cell at or below this timestamp."""
        holder = self.holders.get(cell)
        return holder if holder is not None and _is_in_the_way(holder, timestamp) else None

    def in_the_way_in_rows(self, start: bytes, end: bytes, timestamp: int) -> list[Holder]:
        """The same for the rows in [start, end), each once; an empty end means to the last row.
        Read locks change nothing that could be read."""
        found = dict.fromkeys(
            self.holders[cell]
            for cell in self._ordered.between(*keys.cell_bounds(start, end))
            if keys.locked_cell(cell) is None
        )
        return [holder for holder in found if _is_in_the_way(holder, timestamp)]

    async def let_pass(self, in_the_way: Callable[[], Collection[Holder]]) -> None:
        """Returns once this finds nothing, without an await after its last look. Raises `NotReady`
        if that takes too long in total."""
        deadline: float | None = None
        while self.holders and (holders := in_the_way()):
            loop = asyncio.get_running_loop()
            if deadline is None:
                deadline = loop.time() + WAIT_SECONDS_MAX
            changes = [self._change_of(holder) for holder in holders]
            # Not awaited directly: a caller that is cancelled must not take the others with it.
            _, pending = await asyncio.wait(changes, timeout=deadline - loop.time())
            if pending:
                raise NotReady(
                    "a commit of these cells is taking long: the oracle or the disk is slow",
                    retry_after_seconds=_RETRY_SECONDS,
                )

    async def none_left(self) -> None:
        """Returns when no cell is held."""
        while self.holders:
            if self._emptied is None:
                self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._emptied,))

    def _change_of(self, holder: Holder) -> asyncio.Future[None]:
        change = self._changes.get(holder)
        if change is None:
            change = self._changes[holder] = asyncio.get_running_loop().create_future()
        return change


def _is_in_the_way(holder: Holder, timestamp: int) -> bool:
    return holder.start <= timestamp and holder.commit <= timestamp


# The lines in which mutations and transactions wait for their cells: first come, first served.
#
# A cell is free when no transaction holds it, and the batch in progress does not change it. A read
# lock (tablet/memory.py) also needs the cell that it locks, but only for reading: other read locks
# of the cell do not make it wait, and only who writes the cell waits for them. What each rule
# prevents:
#
# * What meets a cell that is not free, or in whose line others stand, joins the line. If it looked
# at the cell alone, it would overtake an earlier mutation of the same cell when the cell is let go
# while a batch is being judged. Nor can a crowd of transactions keep a roll-back waiting forever,
# or a crowd of mutations a transaction.
# * A transaction joins the lines of all its cells at one moment. So no two wait for each other.
# * When a cell becomes free, the first in its line is called, and nothing else is looked at: what a
# change costs does not depend on how many wait. It is still the first until it has taken the cell.

T = TypeVar("T")


class Place(Generic[T]):
    """A place in the lines of all cells that one mutation or transaction needs."""

    __slots__ = ("called", "cells", "lacks", "read_locked", "waiter")

    def __init__(
        self,
        waiter: T,
        cells: Sequence[bytes],
        read_locked: Sequence[bytes],
        called: deque[Place[T]],
    ) -> None:
        self.waiter = waiter
        self.cells = [*cells, *read_locked] if read_locked else cells
        self.read_locked = read_locked
        """Those of the cells that it needs only for reading."""
        self.called = called
        """Where it goes when it has all its cells."""
        self.lacks = 0
        """How many of the cells are not free, or have others first in their line."""


class Lines:
    """The lines of one tablet."""

    def __init__(self, held: HeldCells, read_locks: ReadLocks) -> None:
        self._held = held
        self._read_held = read_locks.held
        self._lines: dict[bytes, deque[Place[Any]]] = {}
        """By cell. None of them is empty."""
        self._offered: set[bytes] = set()
        """The free cells that were offered to the first in their line."""
        self.touched: Mapping[bytes, None] = {}
        """The cells that the batch in progress changes."""
        self.read_locked: Mapping[bytes, None] = {}
        """The cells of whose read locks it changes any."""

    def are_open(self, cells: Iterable[bytes], read_locked: Sequence[bytes] = ()) -> bool:
        """Whether these cells are free, and nothing waits for them; the latter for reading."""
        holders, touched, lines = self._held.holders, self.touched, self._lines
        for cell in cells:  # called for each mutation: a generator would double its price
            if cell in holders or cell in touched or cell in lines:
                return False
        if not (self._read_held or self.read_locked or read_locked):
            return True
        if any(self._is_read_locked(cell) for cell in cells):
            return False
        return not any(cell in holders or cell in touched or cell in lines for cell in read_locked)

    def join(
        self,
        waiter: T,
        cells: Sequence[bytes],
        called: deque[Place[T]],
        read_locked: Sequence[bytes] = (),
    ) -> Place[T]:
        """Puts it into the lines of these cells. Its place goes to `called` when it has them all,
        which may be at once."""
        place = Place(waiter, cells, read_locked, called)
        place.lacks = len(place.cells)
        for cell in place.cells:
            self._lines.setdefault(cell, deque()).append(place)
            self._offer(cell)
        return place

    def still_has_its_cells(self, place: Place[Any]) -> bool:
        """Whether a place that was called has all its cells still. If not, it is called again: a
        transaction in the batch may notify observers of a cell that it does not hold."""
        for cell in place.cells:
            if not self._is_free(cell, place):
                self._offered.discard(cell)
                place.lacks += 1
        return not place.lacks

    def give_up(self, place: Place[Any]) -> None:
        """Ends a place wherever it stands: its waiter no longer waits. Whoever called it has to
        ignore the call."""
        for cell in place.cells:
            line = self._lines[cell]
            was_first = line[0] is place
            line.remove(place)
            if not line:
                del self._lines[cell]
                self._offered.discard(cell)
            elif was_first:
                self._offered.discard(cell)
                self._offer(cell)

    def leave(self, place: Place[Any]) -> None:
        """Ends a place that was called: its cells are taken now, or no longer needed."""
        for cell in place.cells:
            line = self._lines[cell]
            line.popleft()
            self._offered.discard(cell)
            if line:
                self._offer(cell)
            else:
                del self._lines[cell]

    def look_again(self, cells: Iterable[bytes]) -> None:
        """Calls what waits for those of these cells that are free now."""
        if self._lines:
            for cell in cells:
                if cell in self._lines:
                    self._offer(cell)

    def end_batch(self) -> list[bytes]:
        """Notes that the batch is over; returns the cells to look at again."""
        touched = [*self.touched, *self.read_locked]
        self.touched = self.read_locked = {}
        return touched

    def clear(self) -> None:
        """Forgets all places, once the tablet is closed."""
        self._lines.clear()
        self._offered.clear()

    def _is_free(self, cell: bytes, place: Place[Any]) -> bool:
        if cell in self._held.holders or cell in self.touched:
            return False
        return not self._is_read_locked(cell) or cell in place.read_locked

    def _is_read_locked(self, cell: bytes) -> bool:
        return cell in self._read_held or cell in self.read_locked

    def _offer(self, cell: bytes) -> None:
        place = self._lines[cell][0]
        if cell in self._offered or not self._is_free(cell, place):
            return
        self._offered.add(cell)
        place.lacks -= 1
        if not place.lacks:
            place.called.append(place)


# The right to write to a tablet: for a batch of the group commit, or between two batches.
#
# There are two ways to write between two batches:
#
# * `async with latch.between_batches()`: no batch is in progress, and what was judged in one is
# durable and answered. Transactions may hold cells (held_cells.py), and go on to take cells. This
# is enough for writes that no transaction in memory can meet: those behind the fence of a bulk load
# (bulk_load.py).
# * `async with latch`: no cell is held, either. It is for what changes the rules under which
# transactions are judged (a version of the schema, a fence, a safe point), or what they are judged
# by. A transaction judged before the change would be written after it.
#
# Nobody starves. What each rule prevents:
#
# * While somebody waits for all cells to be let go, no more are held. Otherwise a steady stream of
# transactions would keep a load, a split or a new schema out forever.
# * When one of them has finished, the transactions that have waited are judged and hold their cells
# before the next one has its turn. Otherwise writers that overlap, such as the parts of shared
# transactions beside a collection, would keep all transactions of the tablet out until the last of
# them has finished.
# * Of those that write between two batches, one at a time waits for `writing`, so a batch comes
# between two of them. Otherwise each batch would wait for all loaders of the tablet in turn, and
# four of them would leave commits a quarter of what one does.

_LATELY_SECONDS = 1.0


class WriteLatch:
    """See the module's docstring."""

    def __init__(self, held: HeldCells, admit_waiting: Callable[[], None]) -> None:
        """`admit_waiting` judges the transactions that wait, and have them hold their cells."""
        self._held = held
        self._admit_waiting = admit_waiting
        self._wanted = 0
        self._last_batch = -inf
        self._turn = asyncio.Lock()
        """Held by the one of those that need all cells to be let go that has its turn."""
        self.between = asyncio.Lock()
        """Held by the one of those that write between two batches that has its turn. With more than
        one write to do, it holds this throughout, and `writing` for each of them."""
        self.writing = asyncio.Lock()
        """Held by a batch from judging to answering, and by every other write: only one is in
        flight at a time."""

    def note_batch(self) -> None:
        """Called at the end of each batch."""
        self._last_batch = asyncio.get_running_loop().time()

    @property
    def has_batches(self) -> bool:
        """True if there was a batch lately, so that another one may wait soon."""
        return asyncio.get_running_loop().time() - self._last_batch < _LATELY_SECONDS

    @property
    def is_wanted(self) -> bool:
        """True while transactions have to wait before they hold cells."""
        return self._wanted > 0

    @asynccontextmanager
    async def between_batches(self) -> AsyncIterator[None]:
        async with self.between, self.writing:
            yield

    async def __aenter__(self) -> None:
        self._wanted += 1
        try:
            await self._turn.acquire()
        except BaseException:
            self._wanted -= 1
            if not self._wanted:
                self._admit_waiting()
            raise
        try:
            await self._held.none_left()
            await self.writing.acquire()
        except BaseException:
            self._leave()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.writing.release()
        self._leave()

    def _leave(self) -> None:
        self._wanted -= 1
        try:
            self._admit_waiting()
        finally:
            self._turn.release()
