"""Whether a change of a cell was put aside as a dead letter: then its newest record has to stay.

Its notifications are gone by then. What is left is what the observer noted beside the cell, and as
long as that is locked, it may be about to be noted: the notifications are deleted when the note is
committed, which is before its lock is gone.
"""

from __future__ import annotations

from typing import Any

from percolator.protocol.hidden_cells import (
    ACKNOWLEDGEMENTS,
    observed_column,
    tells_of_a_dead_letter,
)
from percolator.protocol.records import (
    KIND_DELETE,
    KIND_LOCK_ONLY,
    KIND_PUT_IN_DATA,
    START_TIMESTAMP_BYTES,
    WRITE_HEADER_BYTES,
    WRITE_KIND_OFFSET,
)
from percolator.tablet.keys import (
    TIMESTAMP_BYTES,
    D,
    W,
    component,
    inverted,
    split_component,
)
from percolator.tablet.lock_mirror import LockMirror
from percolator.world import Storage

_BEGIN = component(ACKNOWLEDGEMENTS)[:-2]
"""Of such a column, as a component."""
_STOP = component(ACKNOWLEDGEMENTS[:-1])[:-2] + b"\x01"
"""Behind all of them: an encoded 00 is followed by ff."""


def may_be_put_aside(mirror: LockMirror, storage: Storage[Any], cell: bytes) -> bool:
    """`cell` is an encoded row and column. No lock may come or go meanwhile."""
    _, behind_row = split_component(cell, 0)
    row = cell[:behind_row]
    column, _ = split_component(cell, behind_row)
    first, stop = row + _BEGIN, row + _STOP
    for locked, _ in mirror.between(first, stop):
        if _observed(locked, len(row)) == column:
            return True
    decided = b""
    for key, value in storage.iterate(W + first, W + stop):
        noted = key[1:-TIMESTAMP_BYTES]
        kind = value[WRITE_KIND_OFFSET]
        if noted == decided or kind == KIND_LOCK_ONLY:
            continue
        decided = noted  # older versions say nothing any more
        if kind == KIND_DELETE or _observed(noted, len(row)) != column:
            continue
        if tells_of_a_dead_letter(noted_value(storage, noted, kind, value)):
            return True
    return False


def _observed(hidden: bytes, row_bytes: int) -> bytes | None:
    """The column that a hidden cell is about."""
    return observed_column(split_component(hidden, row_bytes)[0])


def noted_value(storage: Storage[Any], noted: bytes, kind: int, record: bytes) -> bytes:
    """What a write record of a hidden cell says."""
    if kind != KIND_PUT_IN_DATA:
        return record[WRITE_HEADER_BYTES:]
    start = int.from_bytes(record[:START_TIMESTAMP_BYTES], "big")
    return storage.get(D + noted + inverted(start)) or b""
