"""The lines in which mutations and transactions wait for their cells: first come, first served.

A cell is free when no transaction holds it, and the batch in progress does not change it. A read
lock (memory/read_locks.py) also needs the cell that it locks, but only for reading: other read
locks of the cell do not make it wait, and only who writes the cell waits for them. What each rule
prevents:

* What meets a cell that is not free, or in whose line others stand, joins the line. If it looked at
  the cell alone, it would overtake an earlier mutation of the same cell when the cell is let go
  while a batch is being judged. Nor can a crowd of transactions keep a roll-back waiting forever,
  or a crowd of mutations a transaction.
* A transaction joins the lines of all its cells at one moment. So no two wait for each other.
* When a cell becomes free, the first in its line is called, and nothing else is looked at: what a
  change costs does not depend on how many wait. It is still the first until it has taken the cell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from percolator.tablet.memory.held_cells import HeldCells
from percolator.tablet.memory.read_locks import ReadLocks

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
