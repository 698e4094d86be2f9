"""Notes in rows of which history was collected: what is not there proves nothing any more.

A tablet knows the safe point of all its rows. A row store changes one row at a time, so each row
has a safe point of its own: a note, written in the very change that deletes. Two things rest on it:

    reads          a snapshot below it may miss versions, and is refused
    transactions   a prewrite of a transaction that began below it may miss a later commit, or its
                   own marker; a rollback may miss its own commit. Both are refused

A row that holds a lock of a transaction is never collected above its start (collecting.py).

A note stays when nothing else of its row does. Otherwise an old snapshot would take the row for one
that never existed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from percolator.rowstore.layout import COLLECTED
from percolator.rowstore.port import Selection, StoredCell
from percolator.rowstore.times import Times

READS: Final = b"reads"
TRANSACTIONS: Final = b"transactions"
"""The columns of the two notes. A note stands at its safe point, and has no value."""

LOADED: Final = b"loaded"
"""The column of a third one, at the timestamp of a bulk load (loading.py): of such a row, deletions
are never collected."""


def reads_collected_above(timestamp: int, times: Times) -> Selection:
    """The note because of which a read at this timestamp is refused."""
    return _note_above(READS, timestamp, times)


def transactions_collected_above(timestamp: int, times: Times) -> Selection:
    """The note because of which a step of a transaction is refused that began then."""
    return _note_above(TRANSACTIONS, timestamp, times)


def _note_above(column: bytes, timestamp: int, times: Times) -> Selection:
    from_time = times.at_or_above(timestamp + 1)
    return Selection(COLLECTED, column, column + b"\0", from_time, newest=True)


def newest_note(cells: Iterable[StoredCell], times: Times) -> int:
    """The safe point that the notes among these cells name; 0 if there is none."""
    found = [cell.time for cell in cells if cell.family == COLLECTED and cell.column != LOADED]
    return times.timestamp(max(found)) if found else 0
