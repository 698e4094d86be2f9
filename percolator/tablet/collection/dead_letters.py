"""Finds out whether a change of a cell became a dead letter: then its newest record has to stay.

By then, its notifications are gone. What is left is the observer's note beside the cell. While the
note's cell is locked, a note may be about to be committed: the notifications are deleted when the
note is committed, which is before its lock is removed.
"""

from __future__ import annotations

from typing import Any

from percolator.formats.hidden_cells import (
    ACKNOWLEDGEMENTS,
    observed_column,
    tells_of_a_dead_letter,
)
from percolator.formats.records import (
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
    after_component,
    component,
    inverted,
    split_component,
)
from percolator.tablet.memory.lock_mirror import LockMirror
from percolator.world import Storage

_BEGIN = component(ACKNOWLEDGEMENTS)[:-2]
"""How such a column begins, as a component."""
_STOP = component(ACKNOWLEDGEMENTS[:-1])[:-2] + b"\x01"
"""Sorts after all of them: an encoded 00 is followed by ff."""


def may_be_put_aside(mirror: LockMirror, storage: Storage[Any], cell: bytes) -> bool:
    """`cell` is an encoded row and column. No lock may be added or removed meanwhile."""
    _, behind_row = split_component(cell, 0)
    row = cell[:behind_row]
    column, _ = split_component(cell, behind_row)
    first, stop = row + _BEGIN, row + _STOP
    for locked, _ in mirror.between(first, stop):
        if _observed(locked, len(row)) == column:
            return True
    cursor = storage.cursor()
    try:
        cursor.seek(W + first)
        while (entry := cursor.item())[0] < W + stop:
            key, value = entry
            noted = key[1:-TIMESTAMP_BYTES]
            kind = value[WRITE_KIND_OFFSET]
            if kind == KIND_LOCK_ONLY:
                cursor.next()
                continue
            if (
                kind != KIND_DELETE
                and _observed(noted, len(row)) == column
                and tells_of_a_dead_letter(noted_value(storage, noted, kind, value))
            ):
                return True
            # Older versions no longer matter, and there may be thousands.
            cursor.seek(W + after_component(noted))
        return False
    finally:
        cursor.close()


def _observed(hidden: bytes, row_bytes: int) -> bytes | None:
    """The column that a hidden cell refers to."""
    return observed_column(split_component(hidden, row_bytes)[0])


def noted_value(storage: Storage[Any], noted: bytes, kind: int, record: bytes) -> bytes:
    """The value that a write record of a hidden cell stands for."""
    if kind != KIND_PUT_IN_DATA:
        return record[WRITE_HEADER_BYTES:]
    start = int.from_bytes(record[:START_TIMESTAMP_BYTES], "big")
    return storage.get(D + noted + inverted(start)) or b""
