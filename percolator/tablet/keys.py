"""Keys: how a cell's address is encoded in bytes that sort in the order of the cells.

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

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from percolator.errors import InvariantViolation
from percolator.formats.records import READ_LOCKS, locked_column, read_locks_of
from percolator.v1 import cells_pb2
from percolator.world import Cursor

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
"""What the tablet stores about itself: see opening.py, state.py and state.py."""

TIMESTAMP_MAX = 2**64 - 1
TIMESTAMP_BYTES = 8

RESERVED = b"\0\xff"
"""How a reserved column, whose name begins with 00, begins as a component. It holds what an
observer notes beside a cell. It is read only if it is named, and is not part of "all columns"."""

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
    """Whether the column of this cell (`cell_prefix`) is reserved."""
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
    return prefix + component(start), prefix + component(end) if end else _next(prefix)


def cell_bounds(start: bytes, end: bytes) -> tuple[bytes, bytes | None]:
    """Like `space_bounds`, without the space byte; None: no limit."""
    return component(start), component(end) if end else None


def _next(prefix: bytes) -> bytes:
    return bytes([prefix[0] + 1])


class ColumnEncoder(dict[bytes, bytes]):
    """Caches the components of columns: a table has few columns and many rows."""

    def __missing__(self, column: bytes) -> bytes:
        if len(self) >= _COLUMN_CACHE_ENTRIES_MAX:
            self.clear()
        encoded = self[column] = component(column)
        return encoded


# The versions of one cell in a space with timestamps, newest first.
#
# Fences around the spaces (keys.py) keep a cursor valid after every seek to a key of a space, and
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
