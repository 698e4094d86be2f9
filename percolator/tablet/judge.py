"""Judges mutations against what is durable, in the order in which they may have their cells.

Lines        the queues in which mutations and transactions wait for cells
WriteLatch   the right to write to the tablet: for a batch, or between two batches
Exclusion    what read locks and writers of one cell refuse each other
Judge        the verdict on one mutation
JudgedBatch  the changes of those that passed, for the storage and then for memory

The first condition that fails decides about a mutation. What passes is collected for its batch.
Nothing is in flight while the judge works (group_commit.py): the mirror and the storage agree, and
nothing but the batch being judged will change them.

A prewrite has four conditions, and memory nearly always decides them all: the lock mirror knows the
locks, and `RecentWrites` knows how new the write records and rollback markers can be. If that is
not enough, one seek finds the newest write record. This decides both conditions on writes, unless
the record is newer than the transaction.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from math import inf
from types import TracebackType
from typing import Any, Generic, TypeVar

from percolator.errors import InvalidArgument, NotReady
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    LAST_CHANGE,
    LOCK_HEADER_BYTES,
    START_TIMESTAMP_BYTES,
    WRITE_HEADER,
    WRITE_HEADER_BYTES,
    WRITE_KIND_OFFSET,
    timestamp_bytes,
)
from percolator.tablet.cells import (
    AFTER_READ_LOCKS,
    FORMAT_KEY,
    FORMAT_WITH_READ_LOCKS,
    LOCK,
    NEWEST,
    NEWEST_KEY,
    NOTIFY,
    PREFIX_OF_SPACE,
    ROLLBACK,
    TIMESTAMP_BYTES,
    TIMESTAMP_MAX,
    VERSIONS_MAX,
    WRITE,
    HeldCells,
    L,
    LastChanges,
    LockMirror,
    ReadLocks,
    RecentWrites,
    TooManyVersions,
    Version,
    W,
    ascending,
    change_of_write,
    component,
    descending,
    inverted,
    lies_under_a_lock,
    limited,
    locked_cell,
    newest_change_below,
    read_locks_prefix,
    split_component,
    timestamp_of,
)
from percolator.tablet.requests import (
    ABSENT,
    AT_MOST,
    BEGINS_IF_PRESENT,
    DELETE,
    EQUALS,
    PRESENT,
    PUT,
    CheckedChange,
    CheckedCondition,
    CheckedMutation,
    PrewriteConditions,
    not_executed,
)
from percolator.tablet.state import TabletState, note_change
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_WRITE, Space
from percolator.world import Cursor, Storage

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
        """Cells that it needs only for reading."""
        self.called = called
        """The queue to which the place is added when it has all its cells."""
        self.lacks = 0
        """The number of cells that are not free, or have others first in their line."""


class Lines:
    """The lines of one tablet, in which mutations and transactions wait for cells: first come,
    first served.

    A cell is free when no transaction holds it, and the batch in progress does not change it. A
    read lock (cells.py) also needs the cell that it locks, but only for reading: other read locks
    of the cell do not make it wait, and only who writes the cell waits for them. What each rule
    prevents:

    - What meets a cell that is not free, or in whose line others stand, joins the line. If it
      looked at the cell alone, it would overtake an earlier mutation of the same cell when the cell
      is let go while a batch is being judged. Nor can a crowd of transactions keep a roll-back
      waiting forever, or a crowd of mutations a transaction.
    - A transaction joins the lines of all its cells at once. So no two wait for each other.
    - When a cell becomes free, the first in its line is called, and nothing else is looked at: what
      a change costs does not depend on how many wait. It is still the first until it has taken the
      cell.
    """

    def __init__(self, held_cells: HeldCells, read_locks: ReadLocks) -> None:
        self._held_cells = held_cells
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
        """True if these cells are free, and nothing waits for them; the latter for reading."""
        holders, touched, lines = self._held_cells.holders, self.touched, self._lines
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
        """True if a place that was called has all its cells still. If not, it is called again: a
        transaction in the batch may notify observers of a cell that it does not hold."""
        for cell in place.cells:
            if not self._is_free(cell, place):
                self._offered.discard(cell)
                place.lacks += 1
        return not place.lacks

    def give_up(self, place: Place[Any]) -> None:
        """Removes a place from all of its lines, because its waiter no longer waits. If it was
        called already, that call has to be ignored."""
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
        """Removes a place that was called: its cells are taken now, or no longer needed."""
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
        if cell in self._held_cells.holders or cell in self.touched:
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


_LATELY_SECONDS = 1.0


class WriteLatch:
    """The right to write to one tablet: for a batch of the group commit, or between two batches.

    There are two ways to write between two batches:

    - `async with latch.between_batches()`: no batch is in progress, and what was judged in one is
      durable and answered. Transactions may hold cells (cells.py), and go on to take cells. This is
      enough for writes that no transaction in memory can meet: those behind the fence of a bulk
      load (bulk_load.py).
    - `async with latch`: no cell is held, either. It is for what changes the rules under which
      transactions are judged (a version of the schema, a fence, a safe point), or what they are
      judged by. A transaction judged before the change would be written after it.

    Nobody starves. What each rule prevents:

    - While somebody waits for all cells to be let go, no more are held. Otherwise a steady stream
      of transactions would keep a load, a split or a new schema out forever.
    - When one of them has finished, the transactions that have waited are judged and hold their
      cells before the next one gets the latch. Otherwise writers that overlap would keep all
      transactions of the tablet out until the last of them has finished. Participants in shared
      transactions overlap during a collection.
    - Of those that write between two batches, one at a time waits for `writing`, so a batch comes
      between two of them. Otherwise each batch would wait for one loader of the tablet after
      another, and four of them would leave commits a quarter of what one does.
    """

    def __init__(self, held_cells: HeldCells, admit_waiting: Callable[[], None]) -> None:
        """`admit_waiting` judges the transactions that wait, and have them hold their cells."""
        self._held_cells = held_cells
        self._admit_waiting = admit_waiting
        self._wanted = 0
        self._last_batch = -inf
        self._exclusive = asyncio.Lock()
        """Held by one writer at a time among the writers that need all cells to be let go."""
        self.between = asyncio.Lock()
        """Held by one writer at a time among the writers between two batches. With more than one
        write to do, a writer holds this throughout, and `writing` for each of them."""
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
            await self._exclusive.acquire()
        except BaseException:
            self._wanted -= 1
            if not self._wanted:
                self._admit_waiting()
            raise
        try:
            await self._held_cells.none_left()
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
            self._exclusive.release()


LOOKED_AT_MAX = 16_384
"""The most read locks of one cell that are looked at for a transaction that is older than what
memory knows. Until they are collected, it is told to come back: a loop must not stand still."""

_RETRY_SECONDS = 0.5


class Exclusion:
    """Keeps read locks and writers of a cell apart, although their records are in different cells:
    judges prewrites by what is on the other side. The previous batch must be durable.

    A prewrite has two conditions that name no transaction: there is no lock, and no newer commit.
    In a tablet with read locks, they hold for more than the cell itself (cells.py): for a cell,
    also for the read locks of it; for a read lock, also for the cell that it locks. So a client
    that knows nothing of read locks is kept away from them as well. What each rule prevents:

    - A live lock on the other side refuses, as a lock on the cell does. Its owner may yet commit.
    - A commit on the other side, above the start, refuses. A writer and a read lock whose times
      overlap would otherwise both commit, and what was read under the lock was changed before its
      commit.
    - Read locks of one cell are not compared with each other: that they all may commit is their
      use.
    - The refusal names the cell of the mutation, and the column on the other side as a qualifier. A
      client that knows nothing of it takes the lock for one on the cell, and waits.
    - What is judged is durable, since a mutation waits while the other side is touched or held
      (`Lines`). Judged in one batch, each would pass before the other is there.
    """

    def __init__(
        self,
        storage: Storage[Any],
        mirror: LockMirror,
        recent: RecentWrites,
        read_locks: ReadLocks,
    ) -> None:
        self._get = storage.get
        self._headers = mirror.headers
        self._recent = recent
        self._read_locks = read_locks

    def refusal(
        self, mutation: CheckedMutation, cursor: Callable[[], Cursor]
    ) -> pb.MutationResult | None:
        """Why a mutation whose conditions hold on its own cell must not be applied, or None.

        `cursor` returns the judge's, which shows what is durable.
        """
        unlocked = unwritten = since = -1
        for index, condition in enumerate(mutation[4]):
            if _names_nobody(condition):
                if condition[0] == LOCK:
                    unlocked = index
                elif condition[0] == WRITE:
                    unwritten, since = index, condition[2]
        if unlocked < 0 and unwritten < 0:
            return None  # not a prewrite
        cell = mutation[2]
        locked = locked_cell(cell)
        if unlocked >= 0:
            on_other_side = self._read_lock(cell) if locked is None else self._lock(locked)
            if on_other_side is not None:
                record = self._get(L + on_other_side) or b""
                return _refused(unlocked, SPACE_LOCK, mutation, on_other_side, 0, record)
        if unwritten < 0:
            return None
        if locked is None:
            found = self._newer_read(cell, since, cursor)
        else:
            found = self._newer(locked, since, cursor)
        if isinstance(found, pb.MutationResult) or found is None:
            return found
        return _refused(unwritten, SPACE_WRITE, mutation, *found)

    # ------------------------------------------------------------------ what a writer meets

    def _read_lock(self, cell: bytes) -> bytes | None:
        return next(iter(self._read_locks.live.get(cell, ())), None)

    def _newer_read(
        self, cell: bytes, since: int, new_cursor: Callable[[], Cursor]
    ) -> tuple[bytes, int, bytes] | pb.MutationResult | None:
        """A read lock that was committed at or above `since`: cell, timestamp and record."""
        if self._read_locks.recent.bound(cell) < since:
            return None
        begin = W + read_locks_prefix(cell)
        cursor = new_cursor()
        cursor.seek(begin + AFTER_READ_LOCKS)
        # The youngest transactions come first: nearly always, one of them is the answer.
        for _ in range(LOOKED_AT_MAX):
            cursor.prev()
            key, record = cursor.item()
            if not key.startswith(begin):
                return None
            if timestamp_of(key) >= since:
                return key[1:-TIMESTAMP_BYTES], timestamp_of(key), record
        return not_executed(
            NotReady(
                f"the cell has more than {LOOKED_AT_MAX} read locks that wait to be collected",
                retry_after_seconds=_RETRY_SECONDS,
            )
        )

    # ------------------------------------------------------------------ what a read lock meets

    def _lock(self, locked: bytes) -> bytes | None:
        return locked if locked in self._headers else None

    def _newer(
        self, locked: bytes, since: int, cursor: Callable[[], Cursor]
    ) -> tuple[bytes, int, bytes] | None:
        """The first commit of the locked cell at or above `since`."""
        if self._recent.bound(locked) < since:
            return None
        for timestamp, record in ascending(cursor(), W + locked, since, 0):
            return locked, timestamp, record
        return None


def _names_nobody(condition: CheckedCondition) -> bool:
    _, expectation, _, until, prefix, _, _ = condition
    return expectation == ABSENT and not prefix and not until


def _refused(
    index: int,
    space: Space,
    mutation: CheckedMutation,
    other: bytes,
    timestamp: int,
    record: bytes,
) -> pb.MutationResult:
    """The refusal of a mutation because of a cell on the other side."""
    result = pb.MutationResult(outcome=pb.OUTCOME_REFUSED, failed_condition=index)
    result.cell.space = space
    result.cell.row, result.cell.column = mutation[0], mutation[1]
    result.cell.timestamp = timestamp
    result.cell.value = record
    result.cell.qualifier = split_component(other, split_component(other, 0)[1])[0]
    return result


_HOLD_WHEN_NOTHING_IS_SELECTED = (ABSENT, BEGINS_IF_PRESENT)


class Judge:
    """Judges the mutations of one batch after another. Use it only when the previous batch is
    durable, and close it at the end of each batch."""

    def __init__(
        self,
        storage: Storage[Any],
        mirror: LockMirror,
        recent: RecentWrites,
        last_changes: LastChanges,
        read_locks: ReadLocks,
    ) -> None:
        self._storage = storage
        self._get = storage.get
        self._headers = mirror.headers
        self._recent = recent
        self._last_changes = last_changes
        self._read_locks = read_locks
        self._exclusion = Exclusion(storage, mirror, recent, read_locks)
        self._open_cursor: Cursor | None = None

    @classmethod
    def of(cls, state: TabletState) -> Judge:
        """The judge of what a tablet has stored and remembers."""
        return cls(state.storage, state.mirror, state.recent, state.last_changes, state.read_locks)

    def close(self) -> None:
        if self._open_cursor is not None:
            self._open_cursor.close()
            self._open_cursor = None

    def refusal(self, mutation: CheckedMutation) -> pb.MutationResult | None:
        """Why the mutation must not be applied: a condition fails, or a stored record would become
        false. None if it may be applied."""
        cell, changes = mutation[2], mutation[5]
        conditions: Sequence[CheckedCondition] = mutation[4]
        bound: int | None = None
        if type(conditions) is PrewriteConditions and self._all_hold(cell, conditions.start):
            conditions = ()
        for index, condition in enumerate(conditions):
            space, expectation, from_, _, prefix, _, _ = condition
            if space == LOCK and expectation == PRESENT:
                # Every commit has this condition, and the header in memory nearly always meets it.
                header = self._headers.get(cell)
                if header is not None and header.startswith(prefix):
                    continue
            elif expectation in _HOLD_WHEN_NOTHING_IS_SELECTED:
                if space == WRITE:
                    if bound is None:
                        bound = self._recent.bound(cell)
                    if bound >= from_:
                        bound = self._newest_write(cell)
                    if bound < from_:
                        continue
                elif space == LOCK:
                    if cell not in self._headers:
                        continue
                elif space == ROLLBACK and from_ > self._recent.newest_marker:
                    continue
            try:
                holds, offender = self._judge(cell, condition)
            except TooManyVersions:
                reason = (
                    f"needs more than {VERSIONS_MAX} versions of the cell; narrow its timestamps"
                )
                return not_executed(InvalidArgument(f"mutations.conditions[{index}]", reason))
            if not holds:
                return self._refused(mutation, index, condition, offender)
        for change in changes:
            # Nothing is above the bound. Where it is the timestamp itself, nothing is above that.
            if change[1] == WRITE and change[0] == PUT and self._recent.bound(cell) > change[2]:
                return self._out_of_order(cell, change)
        if self._read_locks.used:
            return self._exclusion.refusal(mutation, self._cursor)
        return None

    def _all_hold(self, cell: bytes, start: int) -> bool:
        """True if memory alone says that all conditions of a prewrite hold."""
        recent = self._recent
        if cell in self._headers or start <= recent.newest_marker:
            return False
        return recent.bound(cell) < start

    def last_change(self, cell: bytes, timestamp: int) -> int | None:
        """The newest put or deletion of the cell below the timestamp, or 0 if there is none; None
        if finding it takes too long."""
        known = self._last_changes.of(cell)
        if known is not None and known < timestamp:
            return known
        return newest_change_below(self._cursor(), cell, timestamp)

    def _out_of_order(self, cell: bytes, change: CheckedChange) -> pb.MutationResult | None:
        """Refuses a put or deletion below a lock-only record that names an older one: readers would
        never see it (cells.py)."""
        _, _, timestamp, record, _ = change
        if record[WRITE_KIND_OFFSET] == KIND_LOCK_ONLY:
            return None
        if not lies_under_a_lock(self._cursor(), cell, timestamp):
            return None
        return not_executed(
            InvalidArgument(
                "mutations.changes.timestamp",
                f"a commit at {timestamp} is below a lock-only commit of its cell; the commits of "
                "a cell must come in order",
            )
        )

    def _cursor(self) -> Cursor:
        if self._open_cursor is None:
            self._open_cursor = self._storage.cursor()
        return self._open_cursor

    def _newest_write(self, cell: bytes) -> int:
        """The newest commit timestamp of the cell in the storage; -1 if there is none."""
        prefix = W + cell
        cursor = self._cursor()
        cursor.seek(prefix)
        key = cursor.key()
        if key.startswith(prefix):
            return int.from_bytes(key[-8:], "big") ^ TIMESTAMP_MAX
        return -1

    def _judge(self, cell: bytes, condition: CheckedCondition) -> tuple[bool, Version | None]:
        """True if the condition holds; else False, and the version that fails it, if one does."""
        _, expectation, _, _, prefix, required, _ = condition
        versions_found = self._versions(cell, condition)
        if expectation == ABSENT:
            for version in versions_found:
                if version[1].startswith(prefix):
                    return False, version
            return True, None
        if expectation == BEGINS_IF_PRESENT:
            for version in versions_found:
                if version[1].startswith(prefix) and not version[1].startswith(required):
                    return False, version
            return True, None
        other: Version | None = None
        for version in versions_found:
            if version[1].startswith(prefix):
                if expectation == AT_MOST:
                    end = len(prefix) + len(required)
                    holds = version[1][len(prefix) : end] <= required
                    return holds, None if holds else version
                if expectation != EQUALS or version[1] == prefix:
                    return True, None
                return False, other or version
            other = other or version
        return False, other

    def _versions(self, cell: bytes, condition: CheckedCondition) -> Iterable[Version]:
        """The versions in the condition's range: oldest first if ABSENT, otherwise newest first."""
        space, expectation, from_, until, prefix, required, qualifier = condition
        if space == LOCK:
            header = self._headers.get(cell)
            if header is None:
                return ()
            longest = max(len(prefix), len(required))
            if expectation == AT_MOST:
                longest = len(prefix) + len(required)
            if expectation == EQUALS or longest > LOCK_HEADER_BYTES:
                return ((0, self._get(L + cell) or b""),)
            return ((0, header),)
        key = PREFIX_OF_SPACE[space] + cell
        if space == NOTIFY:
            key += component(qualifier)
        if until == from_ + 1:
            value = self._get(key + inverted(from_))
            return () if value is None else ((from_, value),)
        if expectation != ABSENT:
            return limited(descending(self._cursor(), key, from_, until))
        found = ascending(self._cursor(), key, from_, until)
        if space == WRITE and prefix[:START_TIMESTAMP_BYTES] == timestamp_bytes(from_):
            # A transaction's own commit is the oldest write at or above its start, because it held
            # the lock until then: there is no need to look at a thousand later writes.
            return islice(found, 1)
        return limited(found)

    def _refused(
        self,
        mutation: CheckedMutation,
        index: int,
        condition: CheckedCondition,
        offender: Version | None,
    ) -> pb.MutationResult:
        result = pb.MutationResult(outcome=pb.OUTCOME_REFUSED, failed_condition=index)
        if offender is not None:
            row, column, cell, _, _, _ = mutation
            timestamp, value = offender
            if condition[0] == LOCK:
                value = self._get(L + cell) or b""
            result.cell.space = condition[0]
            result.cell.row = row
            result.cell.column = column
            result.cell.timestamp = timestamp
            result.cell.value = value
            result.cell.qualifier = condition[6]
        return result


# Changes that one group commit will write, and that memory learns of once they are durable.


class JudgedBatch:
    """Collects the changes of mutations whose conditions held."""

    def __init__(self, state: TabletState, last_change: Callable[[bytes, int], int | None]) -> None:
        """`last_change` returns a cell's newest put or deletion below a timestamp, or None."""
        self._state = state
        self._get = state.storage.get
        self._last_change = last_change
        self._headers = state.mirror.headers
        self._in_feed = state.feed.on
        self.writes = state.storage.batch()
        self.touched: dict[bytes, None] = {}
        """Cells that this batch changes: further mutations of them wait for the next batch."""
        self.read_locked: dict[bytes, None] = {}
        """Cells of whose read locks this batch changes any: their writers wait for the next one."""
        self.bytes = 0
        """The size of the keys and values written."""
        self.applied = 0
        self.refused = 0
        self._locks_put: list[tuple[bytes, bytes]] = []
        self._locks_removed: list[bytes] = []
        self._notifications_put: list[bytes] = []
        """Keys without their space byte."""
        self._notifications_removed: list[bytes] = []
        self._committed: dict[bytes, int] = {}
        self._under_locks: dict[bytes, int] = {}
        """For each cell with a lock-only commit, the newest change below it, if it is known."""
        self._newest_commit = 0
        self._newest_marker = 0
        self._turns_decided: list[tuple[bytes, int]] = []
        """Cells with queues, and the transactions that are committed or rolled back there."""
        self._cells_added = 0
        self._bytes_added = 0
        self._notes_read_locks = False
        self.changed = False
        """True if there is anything to write."""

    def add(self, mutation: CheckedMutation) -> None:
        """Adds the changes of a mutation on a cell that was not touched before."""
        cell, changes = mutation[2], mutation[5]
        self.touched[cell] = None
        if self._state.read_locks.used and (locked := locked_cell(cell)) is not None:
            self.read_locked[locked] = None
        for change in changes:
            kind, space, timestamp, value, qualifier = change
            if space == LOCK:
                self._change_lock(cell, kind, value)
                continue
            suffix = inverted(timestamp)
            if space == NOTIFY:
                suffix = component(qualifier) + suffix
            if kind == PUT:
                if space == WRITE and value[WRITE_KIND_OFFSET] == KIND_LOCK_ONLY:
                    value = self._lock_only(mutation, timestamp, value)
                key = PREFIX_OF_SPACE[space] + cell + suffix
                self.writes.put(key, value)
                self.changed = True
                size = len(key) + len(value)
                self.bytes += size
                if space == NOTIFY:
                    self._notifications_put.append(cell + suffix)
                    continue
                self._cells_added += 1
                self._bytes_added += size
                if space == WRITE:
                    if self._in_feed:
                        self.bytes += note_change(self.writes, cell, timestamp, value)
                    self._committed[cell] = max(timestamp, self._committed.get(cell, 0))
                    self._newest_commit = max(self._newest_commit, timestamp)
                    if cell in self._state.turns.queues:
                        self._turns_decided.append((cell, WRITE_HEADER.unpack_from(value)[0]))
                elif space == ROLLBACK:
                    if cell in self._state.turns.queues:
                        self._turns_decided.append((cell, timestamp))
                    self._newest_marker = max(self._newest_marker, timestamp)
            else:
                self._delete(change, cell + suffix)

    def begin(self) -> None:
        """Call it right before writing. Adds what memory has to know when the tablet is opened;
        what it says about the newest change of a cell stops being true."""
        recent, read_locks = self._state.recent, self._state.read_locks
        if self._committed:
            self._state.last_changes.begin(self._committed)
        if read_locks.used and not read_locks.noted:
            self.writes.put(FORMAT_KEY, FORMAT_WITH_READ_LOCKS)
            self._notes_read_locks = True
        commit, marker = self._newest_commit, self._newest_marker
        if commit > recent.newest_commit or marker > recent.newest_marker:
            newest = max(commit, recent.newest_commit), max(marker, recent.newest_marker)
            self.writes.put(NEWEST_KEY, NEWEST.pack(*newest))

    def publish(self) -> None:
        """Applies the batch to memory, and tells workers of its notifications. Call it only when
        the batch is durable."""
        state, counters = self._state, self._state.counters
        mirror, index, recent = state.mirror, state.index, state.recent
        if state.read_locks.used:
            put = [cell for cell, _ in self._locks_put]
            state.read_locks.publish(put, self._locks_removed, self._committed)
            state.read_locks.noted = state.read_locks.noted or self._notes_read_locks
        for cell in self._locks_removed:
            mirror.remove(cell)
        mirror.put_all(self._locks_put)
        for key in self._notifications_removed:
            index.remove(key)
        for key in self._notifications_put:
            index.put(key)
        if self._committed:
            # Leave out cells with a newer commit, which may be a change.
            state.last_changes.publish(
                {
                    cell: change
                    for cell, change in self._under_locks.items()
                    if recent.bound(cell) < self._committed[cell]
                }
            )
        if self._committed or self._newest_marker:
            recent.publish(self._committed, self._newest_commit, self._newest_marker)
        counters.locks_written += len(self._locks_put)
        counters.notifications_written += len(self._notifications_put)
        counters.cells += self._cells_added
        counters.bytes += self._bytes_added
        counters.batches_synced += self.changed
        counters.mutations_applied += self.applied
        counters.mutations_refused += self.refused
        counters.mutation_rate.add(self.applied + self.refused)
        if self._notifications_put and state.watch is not None:
            state.watch.tell(state.identity.table_id, self._notifications_put)
        for cell, start in self._turns_decided:
            state.turns.decided(cell, start)

    def _lock_only(self, mutation: CheckedMutation, timestamp: int, record: bytes) -> bytes:
        """The record with the timestamp of the change below it, whatever the client has sent."""
        _, _, cell, _, _, changes = mutation
        record = record[:WRITE_HEADER_BYTES]
        if self._state.read_locks.used and locked_cell(cell) is not None:
            return record + LAST_CHANGE.pack(0)  # it holds no data, so nothing lies under it
        if sum(change[1] == WRITE for change in changes) > 1:
            return record  # the mutation's other commits are not in the storage yet
        change = self._last_change(cell, timestamp)
        if change is None:
            return record
        self._under_locks[cell] = change
        return record + LAST_CHANGE.pack(change)

    def _change_lock(self, cell: bytes, kind: int, value: bytes) -> None:
        key = L + cell
        if kind == PUT:
            self.writes.put(key, value)
            self._locks_put.append((cell, value))
            self.bytes += len(key) + len(value)
        else:
            header = self._headers.get(cell)
            if header is None:
                return
            if kind != DELETE:
                record = header if len(value) <= LOCK_HEADER_BYTES else self._get(key)
                if record is None or not record.startswith(value):
                    return
            self.writes.delete(key)
            self._locks_removed.append(cell)
        self.changed = True

    def _delete(self, change: CheckedChange, address: bytes) -> None:
        """Deletes only what exists: a tombstone for what never existed slows every later seek."""
        kind, space, _, value, _ = change
        key = PREFIX_OF_SPACE[space] + address
        # The store has all that memory knows. Nearly all handled notifications are among that.
        is_known = space == NOTIFY and kind == DELETE and address in self._state.index
        found = b"" if is_known else self._get(key)
        if found is None or (kind != DELETE and not found.startswith(value)):
            return
        self.writes.delete(key)
        self.changed = True
        if space == WRITE:
            # It may be the commit that memory has as the cell's newest change.
            self._committed.setdefault(address[:-TIMESTAMP_BYTES], 0)
            if self._in_feed:
                self.writes.delete(change_of_write(key))
        if space == NOTIFY:
            self._notifications_removed.append(address)
        else:
            self._cells_added -= 1
            self._bytes_added -= len(key) + len(found)
