"""Cells of a tablet: their keys, and what an open tablet has in memory about them.

LockMirror, ReadLocks      all locks, and which cells read locks lock
RecentWrites, LastChanges  how new the commits of a cell can be, and where its newest change is
NotifyIndex                live notifications
HeldCells                  cells that transactions hold while they commit in one round
Tombstones, TabletCounts   what was deleted, and what was done

A key is the address of a cell, in bytes that sort in the order of the cells:

    key        space 1 | row | column | [qualifier, only in N] | [~timestamp 8, not in L]
    change     F | timestamp 8 | row | column
    component  the bytes, each 00 written as 00 FF, terminated by 00 01

`~timestamp` is the 64-bit complement, big-endian: the newest version of a cell comes first.
A component never contains 00 01 before its end, and its end sorts below every continuation
(00 01 < 00 FF < 01 < ... FF). So for any bytes, including 00 and the empty string, keys sort by
row, then column, then qualifier, then newest first; no component of one key is mistaken for part of
another; and the keys of one row, or of one cell, are contiguous.

Between the spaces are *fences*: entries that are never deleted. Without them, an iterator that
leaves a space walks over all deleted entries at the beginning of the next one: after a million
committed locks, that took 300 us instead of 2.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from sortedcontainers import SortedList

from percolator.errors import InvariantViolation, NotReady
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    LOCK_HEADER_BYTES,
    READ_LOCKS,
    START_TIMESTAMP_BYTES,
    WRITE_KIND_OFFSET,
    last_change,
    locked_column,
    read_locks_of,
)
from percolator.v1 import cells_pb2
from percolator.world import Clock, Cursor

LOCK: int = cells_pb2.SPACE_LOCK
WRITE: int = cells_pb2.SPACE_WRITE
DATA: int = cells_pb2.SPACE_DATA
ROLLBACK: int = cells_pb2.SPACE_ROLLBACK
NOTIFY: int = cells_pb2.SPACE_NOTIFY
SPACES = (LOCK, WRITE, DATA, ROLLBACK, NOTIFY)

D, F, L, M, N, R, W = b"D", b"F", b"L", b"M", b"N", b"R", b"W"
"""First bytes of keys: the five spaces, F for the change feed, and M for what the tablet notes
about itself."""

PREFIX_OF_SPACE = {LOCK: L, WRITE: W, DATA: D, ROLLBACK: R, NOTIFY: N}
SPACE_OF_PREFIX = {prefix: space for space, prefix in PREFIX_OF_SPACE.items()}

FENCES = (b"C", b"E", b"M", b"O", b"S", b"V", b"X")
"""Live entries before D, after D, after L, after N, after R, before W and after W."""
FEED_FENCE = b"G"
"""A live entry after F, in tablets with a change feed."""

FORMAT_KEY = M + b"format"
SAFE_POINT_KEY = M + b"safe_point"
NEWEST_KEY = M + b"newest"
STATISTICS_KEY = M + b"statistics"
LOAD_FENCE_PREFIX = M + b"load_fence "
LOAD_FLOOR_KEY = M + b"load_floor"
FEED_KEY = M + b"feed"
"""Notes of the tablet about itself: see opening.py and state.py."""

TIMESTAMP_MAX = 2**64 - 1
TIMESTAMP_BYTES = 8

RESERVED = b"\0\xff"
"""How a reserved column, whose name begins with 00, begins as a component. It holds what an
observer notes next to a cell. It is read only if it is named, and is not part of "all columns"."""

READ_LOCK_MARK = READ_LOCKS.replace(b"\0", b"\0\xff")
"""In an encoded cell that is a read lock; hardly ever in another one."""
AFTER_READ_LOCKS = b"\xff" * 9
"""Behind `read_locks_prefix`, it sorts after every read lock of the cell."""

END = b"\0\x01"
_AFTER = b"\0\x02"
_COLUMN_CACHE_ENTRIES_MAX = 4096


class CellKey(NamedTuple):
    """The contents of a key in one of the five spaces."""

    space: int
    row: bytes
    column: bytes
    qualifier: bytes
    timestamp: int


def component(raw: bytes) -> bytes:
    """One self-delimiting component: a row, a column or a qualifier."""
    if b"\0" in raw:
        raw = raw.replace(b"\0", b"\0\xff")
    return raw + END


def column_prefix(raw: bytes) -> bytes:
    """How the components of all columns that begin with these bytes begin."""
    return component(raw)[: -len(END)]


def after_component(encoded: bytes) -> bytes:
    """The smallest bytes that sort after every key beginning with this component."""
    return encoded[:-2] + _AFTER


def cell_prefix(row: bytes, column: bytes) -> bytes:
    """The prefix that all keys of a (row, column) share after their space byte."""
    return component(row) + component(column)


def inverted(timestamp: int) -> bytes:
    """A timestamp as encoded in keys: larger ones sort first."""
    return (timestamp ^ TIMESTAMP_MAX).to_bytes(8, "big")


def timestamp_of(key: bytes) -> int:
    """The timestamp at the end of a key of W, D, R or N."""
    return int.from_bytes(key[-8:], "big") ^ TIMESTAMP_MAX


def encode(
    space: int, row: bytes, column: bytes, timestamp: int = 0, qualifier: bytes = b""
) -> bytes:
    """The key of a cell."""
    key = PREFIX_OF_SPACE[space] + cell_prefix(row, column)
    if space == LOCK:
        return key
    if space == NOTIFY:
        key += component(qualifier)
    return key + inverted(timestamp)


def decode(key: bytes) -> CellKey:
    """Decodes a key into the address that `encode` was given."""
    space = SPACE_OF_PREFIX.get(key[:1])
    if space is None:
        raise InvariantViolation(f"a key of no space: {key[:1]!r}")
    row, at = split_component(key, 1)
    column, at = split_component(key, at)
    qualifier = b""
    if space == NOTIFY:
        qualifier, at = split_component(key, at)
    if len(key) - at != (0 if space == LOCK else TIMESTAMP_BYTES):
        raise InvariantViolation(
            f"a key of space {key[:1]!r} with {len(key) - at} bytes at its end"
        )
    return CellKey(space, row, column, qualifier, 0 if space == LOCK else timestamp_of(key))


def split_component(key: bytes, at: int) -> tuple[bytes, int]:
    """The raw bytes of the component at this offset, and the offset after it."""
    end = key.find(END, at)
    if end < 0:
        raise InvariantViolation("a key with a component that does not end")
    return unescaped(key[at:end]), end + 2


def unescaped(encoded: bytes) -> bytes:
    """The raw bytes of a component without its end."""
    if b"\0" not in encoded:
        return encoded
    if encoded.count(b"\0") != encoded.count(b"\0\xff"):
        # Damage: taken for a row, it would be another row than the one that lies here.
        raise InvariantViolation("a key with a byte 00 that is not escaped")
    return encoded.replace(b"\0\xff", b"\0")


def change_key(cell: bytes, timestamp: int) -> bytes:
    """The key in the change feed of a commit of this cell (`cell_prefix`)."""
    return F + timestamp.to_bytes(8, "big") + cell


def change_of_write(key: bytes) -> bytes:
    """The key in the change feed of what is stored under this key of W."""
    return change_key(key[1:-TIMESTAMP_BYTES], timestamp_of(key))


def split_change(key: bytes) -> tuple[int, bytes]:
    """The commit timestamp and the cell of a key of the change feed."""
    return int.from_bytes(key[1:9], "big"), key[9:]


def is_reserved(cell: bytes) -> bool:
    """True if the column of this cell (`cell_prefix`) is reserved."""
    # Hardly any cell contains these bytes at all, and every commit asks.
    return RESERVED in cell and cell.startswith(RESERVED, split_component(cell, 0)[1])


def locked_cell(cell: bytes) -> bytes | None:
    """The cell that is locked, if this hidden one (`cell_prefix`) is a read lock; else None."""
    if READ_LOCK_MARK not in cell:
        return None
    behind_row = split_component(cell, 0)[1]
    column = locked_column(split_component(cell, behind_row)[0])
    return None if column is None else cell[:behind_row] + component(column)


def read_locks_prefix(cell: bytes) -> bytes:
    """How all read locks of this cell (`cell_prefix`) begin."""
    behind_row = split_component(cell, 0)[1]
    column = split_component(cell, behind_row)[0]
    return cell[:behind_row] + column_prefix(read_locks_of(column))


def space_bounds(prefix: bytes, start: bytes, end: bytes) -> tuple[bytes, bytes]:
    """First key (included) and last key (excluded) of a space's rows in [start, end)."""
    return prefix + component(start), prefix + component(end) if end else bytes([prefix[0] + 1])


def cell_bounds(start: bytes, end: bytes) -> tuple[bytes, bytes | None]:
    """Like `space_bounds`, without the space byte; None: no limit."""
    return component(start), component(end) if end else None


class ColumnEncoder(dict[bytes, bytes]):
    """Caches the components of columns: a table has few columns and many rows."""

    def __missing__(self, column: bytes) -> bytes:
        if len(self) >= _COLUMN_CACHE_ENTRIES_MAX:
            self.clear()
        encoded = self[column] = component(column)
        return encoded


# The versions of one cell in a space with timestamps, newest first.
#
# Fences around the spaces keep a cursor valid after every seek to a key of a space, and
# after one step back from it, so none of these functions checks that.

Version = tuple[int, bytes]
"""Timestamp and value."""

VERSIONS_MAX = 1_024
"""How many versions are looked at for one condition. No step of the protocol needs more than one,
and a condition on all versions of a hot cell must not hold up everything else."""


class TooManyVersions(Exception):
    """A condition cannot be judged in reasonable time."""


def limited(found: Iterable[Version]) -> Iterator[Version]:
    """Yields versions; raises `TooManyVersions` after `VERSIONS_MAX` of them."""
    for number, version in enumerate(found):
        if number == VERSIONS_MAX:
            raise TooManyVersions
        yield version


def descending(cursor: Cursor, prefix: bytes, from_: int, until: int) -> Iterator[Version]:
    """Versions with from <= timestamp < until (0: no bound), newest first."""
    cursor.seek(prefix + inverted(until - 1) if until else prefix)
    while True:
        key, value = cursor.item()
        if not key.startswith(prefix):
            return
        timestamp = timestamp_of(key)
        if timestamp < from_:
            return
        yield timestamp, value
        cursor.next()


def ascending(cursor: Cursor, prefix: bytes, from_: int, until: int) -> Iterator[Version]:
    """Versions with from <= timestamp < until (0: no bound), oldest first.

    The first version costs one seek and one step, however many there are above it: a transaction
    that began long ago finds its own commit below a thousand later ones.
    """
    below = prefix + inverted(from_ - 1) if from_ else prefix[:-1] + b"\x02"
    cursor.seek(below)
    end = until or TIMESTAMP_MAX + 1
    while True:
        cursor.prev()
        key, value = cursor.item()
        if not key.startswith(prefix):
            return
        timestamp = timestamp_of(key)
        if timestamp >= end:
            return
        yield timestamp, value


# The memory of an open tablet about its cells, so that most requests need no look at disk.
#
# It is rebuilt when the tablet is opened, and changed only when a batch is durable.

# A set of keys that is sorted only when its order is needed.
#
# Most locks live for milliseconds and no scan ever sees them: keeping them sorted would cost more
# than judging their mutations. So a new key stays unsorted until the next iteration; a key that is
# removed before that has cost only two set operations.

UNSORTED_MAX = 1024
"""Limits what the next iteration has to sort: about 3 ms."""


class OrderedKeys:
    """Distinct keys, iterated in byte order."""

    def __init__(self) -> None:
        self._sorted: SortedList = SortedList()
        self._unsorted: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._unsorted)

    def add(self, key: bytes) -> None:
        """The key must not be in the set. Callers know that; checking it would cost a search."""
        self._unsorted.add(key)
        if len(self._unsorted) > UNSORTED_MAX:
            self._sort()

    def add_all(self, keys: Sequence[bytes]) -> None:
        """As `add`, for distinct keys."""
        self._unsorted.update(keys)
        if len(self._unsorted) > UNSORTED_MAX:
            self._sort()

    def remove(self, key: bytes) -> None:
        """The key must be in the set."""
        if key in self._unsorted:
            self._unsorted.remove(key)
        else:
            self._sorted.remove(key)

    def between(
        self, start: bytes, stop: bytes | None, *, reverse: bool = False
    ) -> Iterator[bytes]:
        """The keys with start <= key < stop (None: no limit). The set must not change meanwhile."""
        if self._unsorted:
            self._sort()
        keys: Iterator[bytes] = self._sorted.irange(
            start, stop, inclusive=(True, False), reverse=reverse
        )
        return keys

    def _sort(self) -> None:
        self._sorted.update(self._unsorted)
        self._unsorted.clear()


# Which cells were committed recently, so that most prewrites need not look into the storage.
#
# Nearly every transaction asks whether a cell was written since it began, just now, and nearly
# always it was not. The newest commit of each cell since some *horizon* fits into memory, and that
# gives a bound for every cell: its own newest commit, or the horizon. A transaction that began
# above the bound has its answer; any other has to look into the storage.
#
# Kept in two generations: when the younger one is full, the older one is forgotten, and the horizon
# moves to the newest commit that the younger one may lack. For rollback markers, the newest one is
# enough: they are few, and transactions that begin later cannot have one.
#
# Invariants, for everything that was published: no cell has a write record above its bound, and no
# marker is above `newest_marker`. The two newest timestamps are stored with every batch that raises
# them, so that they hold when the tablet is opened again (opening.py).

NEWEST = struct.Struct(">QQ")
"""How the bounds are stored: newest commit, newest marker."""


class RecentWrites:
    """Bounds of the write records and rollback markers of one tablet."""

    def __init__(self, cells_max: int) -> None:
        """`cells_max` is the number of cells remembered in each of the two generations."""
        self._cells_max = cells_max
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._newest_before_young = 0
        self._horizon = 0
        self.newest_commit = 0
        self.newest_marker = 0

    def load(self, newest_commit: int, newest_marker: int) -> None:
        """Starts with nothing remembered, at opening: any cell may have the newest commit."""
        self.newest_commit = self._horizon = self._newest_before_young = newest_commit
        self.newest_marker = newest_marker

    def forget(self, newest_commit: int) -> None:
        """Forgets all cells: any of them may have unpublished writes up to this timestamp."""
        self._young, self._old = {}, {}
        self.load(max(newest_commit, self.newest_commit), self.newest_marker)

    def bound(self, cell: bytes) -> int:
        """A timestamp above which the cell has no write record."""
        found = self._young.get(cell)
        return self._old.get(cell, self._horizon) if found is None else found

    def publish(self, committed: dict[bytes, int], newest_commit: int, newest_marker: int) -> None:
        """Records a durable batch: its commits by cell, and the newest timestamps it wrote."""
        if min(committed.values(), default=0) >= self.newest_commit:
            self._young.update(committed)  # above every bound, as nearly always
        else:
            bound = self.bound
            self._young.update({cell: max(at, bound(cell)) for cell, at in committed.items()})
        self.newest_marker = max(self.newest_marker, newest_marker)
        self.newest_commit = max(self.newest_commit, newest_commit)
        if len(self._young) > self._cells_max:
            # Everything published before the young generation began is at or below this.
            self._horizon = self._newest_before_young
            self._old, self._young = self._young, {}
            self._newest_before_young = self.newest_commit


# Read locks, by the cells that they lock: which are set or held, and how new the last one is.
#
# A read lock is a lock-only write of a hidden column of its row (formats/records.py). Each
# transaction has a column of its own, so read locks of a cell never meet each other, and everything
# that deals with locks and lock-only records deals with them as well. Only this is different: a
# read lock and a write of the cell that it locks exclude each other (judge.py). So the tablet has
# to find the read locks of a cell, and that is what is kept here.
#
# * Nothing is kept, and nothing is looked up, in a tablet that has never had a read lock.
# * A tablet that has had one has format 3. A release that does not know read locks would commit
# writes in spite of them. So that release has to refuse the tablet.

FORMAT_WITH_READ_LOCKS = b"3"


class ReadLocks:
    """The read locks of one tablet."""

    def __init__(self, cells_max: int) -> None:
        """`cells_max` is the number of cells remembered as in `RecentWrites`."""
        self.used = False
        """True if there is, was, or is about to be any. Public, since the hottest paths ask."""
        self.noted = False
        """True if the storage says so."""
        self.live: dict[bytes, dict[bytes, None]] = {}
        """The hidden cells that have a lock, by locked cell. No entry is empty."""
        self.held: dict[bytes, int] = {}
        """The number of transactions that hold a read lock while they commit, by locked cell."""
        self.recent = RecentWrites(cells_max)
        """A timestamp above which no read lock of a cell was committed, by locked cell."""

    def load(self, newest_commit: int) -> None:
        """Begins in a tablet that is being opened and has had read locks. `add` all of its locked
        cells, too."""
        self.used = self.noted = True
        self.recent.load(newest_commit, 0)

    def note(self, cell: bytes) -> None:
        """Notes that a cell is about to be locked or written. From the first read lock on, all of
        the tablet's mutations are judged by read locks, too."""
        if not self.used and locked_cell(cell) is not None:
            self.used = True

    def hold(self, cells: Iterable[bytes]) -> None:
        """Notes that a transaction holds read locks of these cells."""
        for cell in cells:
            self.held[cell] = self.held.get(cell, 0) + 1

    def let_go(self, cells: Iterable[bytes]) -> None:
        for cell in cells:
            left = self.held.pop(cell) - 1
            if left:
                self.held[cell] = left

    def may_exclude(self, cell: bytes, start: int) -> bool:
        """True if a transaction that began then may be excluded from this cell, which it wants to
        write or, if it is a hidden one, to hold a read lock in."""
        return cell in self.live or self.recent.bound(cell) >= start or READ_LOCK_MARK in cell

    def publish(
        self, put: Iterable[bytes], removed: Iterable[bytes], committed: Mapping[bytes, int]
    ) -> None:
        """Applies a durable batch: its locks, in the order in which it was judged, and commits."""
        for cell in removed:
            locked = locked_cell(cell)
            if locked is not None and locked in self.live:
                self.live[locked].pop(cell, None)
                if not self.live[locked]:
                    del self.live[locked]
        self.add(put)
        reads: dict[bytes, int] = {}
        for cell, timestamp in committed.items():
            locked = locked_cell(cell)
            if locked is not None:
                reads[locked] = max(timestamp, reads.get(locked, 0))
        if reads:
            self.recent.publish(reads, max(reads.values()), 0)

    def add(self, cells: Iterable[bytes]) -> None:
        """Notes those of these cells, which have locks, that are read locks."""
        for cell in cells:
            locked = locked_cell(cell)
            if locked is not None:
                self.live.setdefault(locked, {})[cell] = None


def cells_locked_by(cells: Collection[bytes]) -> list[bytes]:
    """The cells that are locked by the read locks among these hidden and other cells."""
    return [locked for cell in cells if (locked := locked_cell(cell)) is not None]


# Where the newest change of a cell is, so that readers need not walk over lock-only records.
#
# A lock-only commit changes nothing, and readers want what is below it. A cell that is locked two
# hundred times a second collects 720,000 such records within an hour of history. So each of them
# names the commit timestamp of the newest put or deletion below it, or 0 if there was none, and a
# reader that meets one gets there with a single seek. (TiKV calls this last_change.)
#
# A record says that *no put or deletion of its cell lies between the two timestamps*. It does not
# say that the record it names still exists. Collection may delete that record; a reader that seeks
# there then finds the next one below it, which is correct.
#
# * The tablet fills in the timestamp when it stores the record. A client cannot know it.
# * A record would become false if a put or deletion were later committed between the two
# timestamps. Locks keep the commits of a cell in order, and the judge refuses anything that is out
# of order.
# * Some records name nothing (see STEPS_MAX). Readers step over them, in slices.
#
# For cells that were locked or read recently, the tablet keeps the newest change in memory. Then a
# read costs one seek, as for any other cell, and the next lock-only commit costs none. Memory
# forgets a cell *before* its next commit is written. The storage shows that commit, and that its
# lock is gone, before the writer hears that its write has ended; a reader in between would be sent
# below a commit that it has to see.

STEPS_MAX = 64
"""How many records that name nothing are stepped over while a commit waits. If there are more, the
new record names nothing either, until a read has found the change or they are collected."""


class LastChanges:
    """The newest change of some cells, as `RecentWrites` keeps the newest commit.

    Invariant: the storage shows no put or deletion of a cell above the timestamp kept for it.
    """

    def __init__(self, cells_max: int) -> None:
        self._cells_max = cells_max
        self.inverted: dict[bytes, bytes] = {}
        """Timestamps as encoded in keys, by cell. Public for lookups on the hottest path."""
        self.published = 0
        """The number of batches with commits. An older view lacks the commits of the last one."""
        self._being_written: Collection[bytes] = ()
        """The cells whose commits are on their way to the disk, and may show at any time."""

    def of(self, cell: bytes) -> int | None:
        """The commit timestamp, or 0 if the cell was never changed; None if it is not known."""
        found = self.inverted.get(cell)
        return None if found is None else timestamp_of(found)

    def learn(self, cell: bytes, timestamp: int) -> None:
        """Records a change that was read in a view that shows everything published so far."""
        if cell in self._being_written:
            return
        if len(self.inverted) >= self._cells_max:
            self.inverted.clear()
        self.inverted[cell] = inverted(timestamp)

    def begin(self, committed: Collection[bytes]) -> None:
        """Forgets the cells with commits in a batch that is about to be written."""
        self._being_written = committed
        if self.inverted:
            for cell in committed:
                self.inverted.pop(cell, None)

    def publish(self, under_locks: Mapping[bytes, int]) -> None:
        """Records that the batch is durable, and the changes below its lock-only commits."""
        self.published += 1
        self._being_written = ()
        for cell, timestamp in under_locks.items():
            self.learn(cell, timestamp)

    def forget(self) -> None:
        """Forgets everything, because cells may have been changed without being published."""
        self.published += 1
        self.inverted.clear()


def newest_change_below(cursor: Cursor, cell: bytes, timestamp: int) -> int | None:
    """The commit timestamp of the newest put or deletion below this one, or 0 if there is none;
    None if too many records that name nothing are in the way."""
    prefix = W + cell
    cursor.seek(prefix + inverted(timestamp - 1))
    for _ in range(STEPS_MAX):
        key, record = cursor.item()
        if not key.startswith(prefix):
            return 0
        if record[WRITE_KIND_OFFSET] != KIND_LOCK_ONLY:
            return timestamp_of(key)
        named = last_change(record)
        if named is not None:
            return named
        cursor.next()
    return None


def lies_under_a_lock(cursor: Cursor, cell: bytes, timestamp: int) -> bool:
    """True if the next commit above this timestamp is lock-only and names what is below it."""
    prefix = W + cell
    cursor.seek(prefix + inverted(timestamp))
    cursor.prev()
    key, record = cursor.item()
    if not key.startswith(prefix) or record[WRITE_KIND_OFFSET] != KIND_LOCK_ONLY:
        return False
    named = last_change(record)
    return named is not None and named < timestamp


# The live notifications of a tablet, in memory and in order, up to a limit.
#
# Like locks, notifications are deleted soon after they are written, so finding the live ones with
# an iterator means walking over deleted ones. The index holds the first ones, up to a limit. Beyond
# that, it is *incomplete* from a known key on: from there only the store has all of them, and a
# search has to walk over it. Once enough of them are handled, the index is filled from that key on;
# the deleted ones before it are not walked over again.


class NotifyIndex:
    """Keys of SPACE_NOTIFY, without their space byte."""

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._keys: set[bytes] = set()
        self._order = OrderedKeys()
        self.missing_from: bytes | None = None
        """Every live notification below this key is in the index. None: all of them are."""

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def complete(self) -> bool:
        """True if every live notification is in the index."""
        return self.missing_from is None

    @property
    def worth_filling(self) -> bool:
        """True if the index can hold many more notifications from the store."""
        return self.missing_from is not None and len(self._keys) <= self._entries_max // 2

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def put(self, key: bytes) -> bool:
        """Adds a key. Returns False if it does not fit."""
        if key in self._keys:
            return True
        if len(self._keys) >= self._entries_max:
            if self.missing_from is None or key < self.missing_from:
                self.missing_from = key
            return False
        self._keys.add(key)
        self._order.add(key)
        return True

    def remove(self, key: bytes) -> None:
        if key in self._keys:
            self._keys.remove(key)
            self._order.remove(key)

    def between(
        self, start: bytes, stop: bytes | None, *, reverse: bool = False
    ) -> Iterator[bytes]:
        """The indexed keys with start <= key < stop, in order. They must not change meanwhile."""
        return self._order.between(start, stop, reverse=reverse)


# How much sweeps have deleted in a tablet since its last compaction, and where.

_BOUNDARIES_MAX = 4_096


class Tombstones:
    """Deletions since the last compaction, or since the tablet was opened."""

    def __init__(self) -> None:
        self.deletions = 0
        self.bytes = 0
        self.boundaries: list[bytes] = []
        """The first and last key that each write deleted; thinned out when there are many."""

    def add(self, keys: Sequence[bytes], size: int) -> None:
        """Records the keys that one write has deleted."""
        self.deletions += len(keys)
        self.bytes += size
        self.boundaries += (min(keys), max(keys))
        if len(self.boundaries) > _BOUNDARIES_MAX:
            ordered = sorted(self.boundaries)
            self.boundaries = [*ordered[::2], ordered[-1]]


# Counts what a tablet does, cheaply enough to count everything.

WINDOW_SECONDS = 10


class Rate:
    """Events per second over the last ten seconds, in buckets of one second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock.monotonic_seconds()
        self._buckets: deque[list[int]] = deque(maxlen=WINDOW_SECONDS + 1)

    def add(self, events: int) -> None:
        second = int(self._clock.monotonic_seconds())
        if self._buckets and self._buckets[-1][0] == second:
            self._buckets[-1][1] += events
        else:
            self._buckets.append([second, events])

    def per_second(self) -> float:
        now = self._clock.monotonic_seconds()
        oldest = now - WINDOW_SECONDS
        events = sum(count for second, count in self._buckets if second > oldest)
        return events / max(1.0, min(WINDOW_SECONDS, now - self._since))


class TabletCounts:
    """Counts since the tablet was opened, unless stated otherwise."""

    def __init__(self, clock: Clock) -> None:
        self.mutation_rate = Rate(clock)
        self.read_rate = Rate(clock)
        self.cells = 0
        """Stored cells except locks and notifications: an estimate that survives reopening."""
        self.bytes = 0
        """The size of the keys and values of these cells."""
        self.foreign_cells = 0
        self.foreign_bytes = 0
        """The estimated part of both that belongs to other tablets' rows (collection.py)."""
        self.mutations_applied = 0
        self.mutations_refused = 0
        self.reads = 0
        self.rows_scanned = 0
        self.versions_skipped = 0
        self.batches_synced = 0
        self.notifications_written = 0
        self.locks_written = 0
        self.cells_collected = 0
        self.bytes_collected = 0


# All locks of a tablet, in memory: the header of each, found by cell or in order.
#
# Locks come and go with every transaction, and LevelDB keeps a tombstone for each one removed: an
# iterator that seeks among them walks over all tombstones up to the next live key. So locks in
# LevelDB are never iterated while serving; the mirror is filled once, when the tablet is opened.
#
# The order of use makes the mirror equivalent to one snapshot of locks and writes:
# * a commit first becomes durable in LevelDB, and then removes its lock from the mirror;
# * a reader first looks into the mirror, and then opens its cursor. So if a lock has already left
# the mirror, its write record is in the cursor's view; and a lock that is added later will get a
# commit timestamp above every timestamp issued so far.


class LockMirror:
    """Locked cells (`cell_prefix`), each with the header of its lock."""

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        """Public for lookups on the hottest paths; changed only through `put` and `remove`."""
        self._order = OrderedKeys()
        self._starts: dict[bytes, int] = {}
        """The number of locks by their transaction's start, as it is stored. One transaction may
        hold millions, and this shows whether any is old without looking at each of them."""

    def __len__(self) -> int:
        return len(self.headers)

    def put(self, cell: bytes, record: bytes) -> None:
        self.put_all(((cell, record),))

    def put_all(self, locks: Iterable[tuple[bytes, bytes]]) -> None:
        """Puts the locks of a batch: cells, each at most once, and records."""
        headers, starts, added = self.headers, self._starts, []
        for cell, record in locks:
            before = headers.get(cell)
            if before is None:
                added.append(cell)
            else:
                self._forget_start(before)
            start = record[:START_TIMESTAMP_BYTES]
            starts[start] = starts.get(start, 0) + 1
            headers[cell] = record[:LOCK_HEADER_BYTES]
        self._order.add_all(added)

    def remove(self, cell: bytes) -> None:
        header = self.headers.pop(cell, None)
        if header is not None:
            self._forget_start(header)
            self._order.remove(cell)

    def has_older(self, below: int) -> bool:
        """True if a transaction that began below this timestamp has a lock."""
        before = below.to_bytes(START_TIMESTAMP_BYTES, "big")
        # They may be a million, of as many clients, and no step of Python's is spent on each.
        return min(self._starts, default=before) < before

    def _forget_start(self, header: bytes) -> None:
        start = header[:START_TIMESTAMP_BYTES]
        left = self._starts[start] - 1
        if left:
            self._starts[start] = left
        else:
            del self._starts[start]

    def between(
        self, start: bytes, stop: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Cells with start <= cell < stop, and their lock's header, in order. No lock may be added
        or removed while this is iterated."""
        headers = self.headers
        for cell in self._order.between(start, stop, reverse=reverse):
            yield cell, headers[cell]


# Cells that transactions hold in memory while they commit in one round.
#
# Such a transaction sets no locks. From when its cells are judged until its records are
# durable and published, everything else that touches the cells waits here. What each rule prevents:
#
# * Mutations of a held cell wait. Otherwise a rollback marker would be put and reported, and the
#   commit would still be written.
# * Reads at or above the start timestamp wait. The commit timestamp may be below theirs, and there
#   is no lock to report. Once it is known to be above a read, that read goes on: it must not see
#   it. This holds for scans of changes up to a timestamp, too, which never come back to what they
#   missed.
# * The cells are held *before* the commit timestamp is fetched. So every timestamp that was handed
#   out before is below the commit, and a read that came before has seen what it had to see.
# * They are let go only after the batch was published. The storage shows a batch before its writer
#   hears of it, and memory knows of it only after that.
#
# A waiter is woken only by the transactions in its way, and its total wait is limited. Otherwise,
# on busy cells it would be woken for nothing and never time out.
#
# A server that dies loses what is held, and nothing else: the batch is in the log, or it never was.

WAIT_SECONDS_MAX = 5.0
"""How long a read waits. A commit waits about a second for the oracle, and then for the disk."""
_RETRY_SECONDS = 0.1


class Holder(Protocol):
    """A transaction that holds cells."""

    @property
    def start(self) -> int: ...

    @property
    def commit_ts(self) -> int:
        """Its commit timestamp; 0 while it is not known."""

    @property
    def cells(self) -> Sequence[bytes]:
        """`cell_prefix` of each."""


class HeldCells:
    """The held cells of one tablet."""

    def __init__(self) -> None:
        self.holders: dict[bytes, Holder] = {}
        """By cell. Public for lookups on the hottest paths."""
        self._ordered = OrderedKeys()
        """Its cells, in order."""
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
        """As `in_the_way`, for the rows in [start, end), each once; an empty end means to the last
        row. Read locks change nothing that could be read."""
        found = dict.fromkeys(
            self.holders[cell]
            for cell in self._ordered.between(*cell_bounds(start, end))
            if locked_cell(cell) is None
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
    return holder.start <= timestamp and holder.commit_ts <= timestamp
