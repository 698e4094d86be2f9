"""Where the cells of the transaction layer lie in the rows of a row store.

    family   time       value             what it is
    l        start      lock record       a lock: at its start, so that deleting one's own lock is
                                          deleting one version, and another's lock is another one
    w        commit     write record      puts and deletions
    o        commit     write record      lock-only commits: apart from `w`, so that "the newest put
                                          or deletion at or below s" is a filter of the store
    d        start      value             values too long for their record
    r        start      nothing           rollback markers, and proofs (below)
    g        safe point nothing           notes: history was collected here (collection.py)

Every table of the cluster is a table of the store. A row's key is its name; only rows of nothing
but zero bytes get one more of these, since a store has no row with an empty name. A column's name
begins with `c`, or with `h` if it is hidden (percolator/formats/records.py), so that all
columns but the hidden ones are one range; or, for the proof about a cell, with `p`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Final, Protocol

from percolator.codecs.readable import quoted
from percolator.errors import InvalidArgument, InvariantViolation
from percolator.rowstore.port import TIME_UNIT, DeleteCell, Selection, SetCell, StoredCell
from percolator.timestamps import SEQUENCE_BITS

LOCKS: Final = "l"
WRITES: Final = "w"
LOCK_ONLY: Final = "o"
DATA: Final = "d"
ROLLBACKS: Final = "r"
COLLECTED: Final = "g"
FAMILIES: Final = (LOCKS, WRITES, LOCK_ONLY, DATA, ROLLBACKS, COLLECTED)

KEY_BYTES_MAX: Final = 4_096
"""The longest key that a store of rows has to accept: Bigtable's limit."""

_COLUMN = b"c"
_HIDDEN = b"h"
_PROOF = b"p"
_ZERO = b"\0"

ALL_COLUMNS: Final = (_COLUMN, b"d")
"""Bounds of all columns that are not hidden: the first stored name, and the end."""
EVERY_COLUMN: Final = (b"", b"")
"""Bounds of all columns, hidden ones included."""


def row_key(row: bytes) -> bytes:
    """The key of a row. Keys have the order of rows."""
    return row if row.strip(_ZERO) else row + _ZERO


def row_of(key: bytes) -> bytes:
    """The row of a key."""
    return key if key.strip(_ZERO) else key[:-1]


def stored_column(column: bytes) -> bytes:
    return (_HIDDEN if column.startswith(_ZERO) else _COLUMN) + column


def column_of(stored: bytes) -> bytes:
    if stored[:1] not in (_COLUMN, _HIDDEN):
        raise InvariantViolation(f"the row store has a column {quoted(stored)}, which nobody wrote")
    return stored[1:]


def written_by_others(row: bytes, error: Exception) -> InvariantViolation:
    """The error for a row with a cell that makes no sense: a store has other users, too."""
    return InvariantViolation(
        f"row {quoted(row)} has a cell that no transaction writes ({error}): another program has "
        "changed the table in the store"
    )


def proof_column(column: bytes) -> bytes:
    """The stored name of the column that has the proofs about a column."""
    return _PROOF + column


def column_bounds(column: bytes) -> tuple[bytes, bytes]:
    """The stored name of a column, and the first name behind it."""
    stored = stored_column(column)
    return stored, stored + _ZERO


# Timestamps of the oracle as times of a row store, and the other way round.
#
# A store's times are signed 64-bit microseconds in multiples of a thousand: 2^53 of them.
# Timestamps are `milliseconds << 18 | sequence`, which do not fit. So here only every 64th
# timestamp is used, and counted from an epoch that belongs to the store: 4,096 in a millisecond,
# for seventy years.

_SPACING_BITS = 6
SPACING = 1 << _SPACING_BITS
"""Timestamps that are stored are multiples of this."""
_TIMES_MAX = (2**63 - 1) // TIME_UNIT


class Times:
    """The correspondence of one store."""

    def __init__(self, epoch_milliseconds: int) -> None:
        """Nothing older than the epoch is stored. It must never change."""
        self._before_first = (epoch_milliseconds << (SEQUENCE_BITS - _SPACING_BITS)) - 1

    def time(self, timestamp: int) -> int:
        """The time of a timestamp that is stored, or looked for."""
        units, between = divmod(timestamp, SPACING)
        units -= self._before_first
        if between or not 0 < units <= _TIMES_MAX:
            raise InvalidArgument(
                "timestamp",
                f"{timestamp} cannot be stored: in a row store, timestamps are multiples of "
                f"{SPACING} from {(self._before_first + 1) * SPACING} on",
            )
        return units * TIME_UNIT

    def at_or_above(self, timestamp: int) -> int:
        """The least time of all timestamps at or above this one, stored or not."""
        units = -(-timestamp // SPACING) - self._before_first
        return min(max(units, 1), _TIMES_MAX) * TIME_UNIT

    def timestamp(self, time: int) -> int:
        units, between = divmod(time, TIME_UNIT)
        if between or not 0 < units <= _TIMES_MAX:
            raise InvariantViolation(f"the row store has a cell at {time}, which nobody wrote")
        return (units + self._before_first) * SPACING


class Numbers(Protocol):
    """A source of numbers: each call gets the first of `count`, above all earlier ones."""

    @property
    def catalogue_epoch(self) -> int: ...

    def get(self, count: int = 1, timeout_seconds: float | None = None) -> asyncio.Future[int]: ...


class SpacedTimestamps:
    """Only such timestamps of the oracle as can be stored.

    Of any 64 consecutive numbers, one is a multiple of 64, and nobody else is given these 64: so
    the timestamps are unique, and in the order of the requests, as those of the oracle are.
    """

    def __init__(self, oracle: Numbers) -> None:
        self._oracle = oracle

    @property
    def catalogue_epoch(self) -> int:
        """The highest that came with a timestamp."""
        return self._oracle.catalogue_epoch

    def get(self, count: int = 1, timeout_seconds: float | None = None) -> asyncio.Future[int]:
        """A future timestamp, as that of `percolator.wire.timestamp_source.TimestampSource`."""
        if count != 1:
            raise InvalidArgument("count", f"{count}: here, each timestamp is asked for by itself")
        numbers = self._oracle.get(SPACING, timeout_seconds)
        timestamp: asyncio.Future[int] = numbers.get_loop().create_future()
        numbers.add_done_callback(partial(_pass_on, timestamp))
        timestamp.add_done_callback(partial(_cancel_too, numbers))
        return timestamp


def _pass_on(timestamp: asyncio.Future[int], numbers: asyncio.Future[int]) -> None:
    if numbers.cancelled():
        timestamp.cancel()
        return
    error = numbers.exception()
    if timestamp.done():
        return
    if error is not None:
        timestamp.set_exception(error)
    else:
        timestamp.set_result(-(-numbers.result() // SPACING) * SPACING)


def _cancel_too(numbers: asyncio.Future[int], timestamp: asyncio.Future[int]) -> None:
    if timestamp.cancelled():
        numbers.cancel()


# Proofs: what says that a cell has neither a commit nor a marker of a transaction.
#
# A check finds cells, or finds that there are none; it cannot do both at once. Where cells have to
# be found, a proof makes it possible to find, too, that something else is not there (mutations.py).
#
# A proof is put under the condition that the cell has neither. Whatever puts one of them deletes
# the proof in the same change: every rollback does, and so do groups with those that they have
# counted. It lies among the markers, at the start of the transaction, and is collected as they are:
# once no transaction that began then can still be running, with a note that says so.


def proof(column: bytes, start: int, times: Times) -> SetCell:
    """Puts the proof about a transaction in a cell."""
    return SetCell(ROLLBACKS, proof_column(column), times.time(start), b"")


def no_proof(column: bytes, start: int, times: Times) -> DeleteCell:
    """Deletes it, if it is there."""
    return DeleteCell(ROLLBACKS, proof_column(column), times.time(start))


def proof_selected(column: bytes, start: int, times: Times) -> Selection:
    """Finds it."""
    stored, time = proof_column(column), times.time(start)
    return Selection(ROLLBACKS, stored, stored + b"\0", time, time + TIME_UNIT)


def is_proof(cell: StoredCell) -> bool:
    return cell.family == ROLLBACKS and cell.column.startswith(_PROOF)


# Notes in rows of which history was collected: what is not there proves nothing any more.
#
# A tablet knows the safe point of all its rows. A row store changes one row at a time, so each row
# has a safe point of its own: a note, written in the very change that deletes. Two things rest on
# it:
#
#     reads          a snapshot below it may miss versions, and is refused
#     transactions   a prewrite of a transaction that began below it may miss a later commit, or its
#                    own marker; a rollback may miss its own commit. Both are refused
#
# A row that holds a lock of a transaction is never collected above its start (collecting.py).
#
# A note stays when nothing else of its row does. Otherwise an old snapshot would take the row for
# one that never existed.

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
