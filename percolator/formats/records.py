"""The bytes of the lock record and of the write record (docs/formats.md).

    lock   start_ts 8 | min_commit_ts 8 | ttl_ms 4 | kind 1 | session length 1, session
           | primary: table id 8, row length 4, row, column length 2, column | value if kind is PUT
    write  start_ts 8 | kind 1 | value if kind is PUT; last_change 8 if kind is LOCK_ONLY

Numbers are big-endian and unsigned, so that conditions can match a record by its prefix: the first
eight bytes of either are its transaction's start timestamp. A tablet knows the fixed offsets, and
where the value in a lock begins; only the protocol interprets the rest. The kind byte means the
same in both, so that a commit turns a lock into its write record without a decision:

    PUT          the value follows
    PUT_IN_DATA  the value is in SPACE_DATA, at the start timestamp
    DELETE       the cell ceases to exist: not the same as an empty value
    LOCK_ONLY    nothing changed; readers want the version below it, writers conflict with it

The tablet that stores a record fills in its `last_change`; percolator/tablet/cells.py says why. A
client sends the record without it. Where finding it would take too long, the tablet stores the
record without it, too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum, auto

from percolator.errors import CellAddress, InvariantViolation, SnapshotTooOld
from percolator.timestamps import Timestamp


class RecordKind(IntEnum):
    """The change that a lock will make to its cell, or that a write record made."""

    PUT = 1
    PUT_IN_DATA = 2
    DELETE = 3
    LOCK_ONLY = 4


KIND_PUT = 1
KIND_PUT_IN_DATA = 2
KIND_DELETE = 3
KIND_LOCK_ONLY = 4
KIND_READ_LOCK = 5
"""Only in write sets: the cluster gets and stores LOCK_ONLY, in a hidden cell (below)."""
KINDS = frozenset((KIND_PUT, KIND_PUT_IN_DATA, KIND_DELETE, KIND_LOCK_ONLY))
"""The kinds as plain integers: comparing with a member of an enum costs ten times as much."""

LOCK_HEADER = struct.Struct(">QQIB")
"""start_ts, min_commit_ts, ttl in milliseconds, kind."""
LOCK_HEADER_BYTES = LOCK_HEADER.size
LOCK_KIND_OFFSET = 20

WRITE_HEADER = struct.Struct(">QB")
"""start_ts, kind."""
WRITE_HEADER_BYTES = WRITE_HEADER.size
WRITE_KIND_OFFSET = 8

LAST_CHANGE = struct.Struct(">Q")
_LAST_CHANGE_END = WRITE_HEADER_BYTES + LAST_CHANGE.size

START_TIMESTAMP_BYTES = 8

TTL_MILLISECONDS_MAX = 2**32 - 1

_PRIMARY_ROW = struct.Struct(">QI")
_COLUMN_LENGTH = struct.Struct(">H")


timestamp_bytes: Callable[[int], bytes] = struct.Struct(">Q").pack
"""Encodes a timestamp as it is in records and in conditions on their prefixes."""


@dataclass(frozen=True, slots=True)
class LockRecord:
    """The lock that a transaction holds on a cell between prewrite and commit."""

    start_timestamp: int
    min_commit_timestamp: int
    ttl_milliseconds: int
    kind: RecordKind
    session: bytes
    """The owner's session; empty when it has none and only the time to live counts."""
    primary: CellAddress
    value: bytes = b""
    """Only for kind PUT."""

    @property
    def prefix(self) -> bytes:
        """The bytes by which this lock is recognised as it was seen (`lock_prefix`)."""
        return lock_prefix(self.start_timestamp, self.min_commit_timestamp, self.ttl_milliseconds)

    def encode(self) -> bytes:
        return b"".join(
            (
                LOCK_HEADER.pack(
                    self.start_timestamp,
                    self.min_commit_timestamp,
                    self.ttl_milliseconds,
                    self.kind,
                ),
                shared_part(self.session, self.primary),
                self.value,
            )
        )

    @classmethod
    def decode(cls, record: bytes) -> LockRecord:
        try:
            start, min_commit, ttl, kind = LOCK_HEADER.unpack_from(record)
            session_end = LOCK_HEADER_BYTES + 1 + record[LOCK_HEADER_BYTES]
            table_id, row_length = _PRIMARY_ROW.unpack_from(record, session_end)
            row_start = session_end + _PRIMARY_ROW.size
            row_end = row_start + row_length
            (column_length,) = _COLUMN_LENGTH.unpack_from(record, row_end)
            column_start = row_end + _COLUMN_LENGTH.size
            column_end = column_start + column_length
            if column_end > len(record):
                raise InvariantViolation("a lock record ends before its primary's column does")
            return cls(
                start_timestamp=start,
                min_commit_timestamp=min_commit,
                ttl_milliseconds=ttl,
                kind=RecordKind(kind),
                session=record[LOCK_HEADER_BYTES + 1 : session_end],
                primary=CellAddress(
                    table_id, record[row_start:row_end], record[column_start:column_end]
                ),
                value=record[column_end:],
            )
        except (struct.error, IndexError, ValueError) as error:
            raise InvariantViolation(f"not a lock record: {error}") from error


def shared_part(session: bytes, primary: CellAddress) -> bytes:
    """The part that all locks of a transaction share, between the header and the value."""
    return b"".join(
        (
            len(session).to_bytes(1, "big"),
            session,
            _PRIMARY_ROW.pack(primary.table_id, len(primary.row)),
            primary.row,
            _COLUMN_LENGTH.pack(len(primary.column)),
            primary.column,
        )
    )


ATTEMPT_OPEN = b"open"
"""The value of the lock on the primary of a participant in a shared transaction, while its attempt
writes."""
ATTEMPT_FINISHED = b"finished"
"""Its value once the attempt has locked all of its cells, and waits for the driver's decision."""


def value_offset(lock: bytes) -> int:
    """Where the value in an encoded lock begins."""
    try:
        session_end = LOCK_HEADER_BYTES + 1 + lock[LOCK_HEADER_BYTES]
        row_start = session_end + _PRIMARY_ROW.size
        row_end = row_start + int.from_bytes(lock[row_start - 4 : row_start], "big")
        column_start = row_end + _COLUMN_LENGTH.size
        offset = column_start + int.from_bytes(lock[row_end:column_start], "big")
    except IndexError as error:
        raise InvariantViolation(f"not a lock record: {error}") from error
    if offset > len(lock):
        raise InvariantViolation("a lock record ends before its primary's column does")
    return offset


def lock_prefix(start_timestamp: int, min_commit_timestamp: int, ttl_milliseconds: int) -> bytes:
    """The bytes by which a heartbeat, a push or a rollback identifies the lock that it has seen."""
    return start_timestamp.to_bytes(8, "big") + _SEEN.pack(min_commit_timestamp, ttl_milliseconds)


_SEEN = struct.Struct(">QI")


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """One commit of one cell; its commit timestamp is in its key."""

    start_timestamp: int
    kind: RecordKind
    value: bytes = b""
    """Only for kind PUT."""
    last_change: int | None = None
    """Only for kind LOCK_ONLY: the commit timestamp of the newest put or deletion below it, or 0 if
    there was none. None when the record does not say."""

    def encode(self) -> bytes:
        record = WRITE_HEADER.pack(self.start_timestamp, self.kind) + self.value
        return record if self.last_change is None else record + LAST_CHANGE.pack(self.last_change)

    @classmethod
    def decode(cls, record: bytes) -> WriteRecord:
        try:
            start, kind = WRITE_HEADER.unpack_from(record)
            if kind == KIND_LOCK_ONLY:
                return cls(start, RecordKind.LOCK_ONLY, last_change=last_change(record))
            return cls(start, RecordKind(kind), record[WRITE_HEADER_BYTES:])
        except (struct.error, ValueError) as error:
            raise InvariantViolation(f"not a write record: {error}") from error


def last_change(lock_only: bytes) -> int | None:
    """The `last_change` of an encoded lock-only record: see `WriteRecord.last_change`."""
    if len(lock_only) != _LAST_CHANGE_END:
        return None
    return int.from_bytes(lock_only[WRITE_HEADER_BYTES:], "big")


# Hidden cells of a row: what observers and transactions note next to its other cells
# (docs/formats.md).
#
#     column   00 "ack" 00 | length of the observer's name 2 | the observer's name | observed column
#     value    start_ts 8 | 01, if a change of the cell was put aside as a dead letter
#
# Observers write acknowledgements: which changes of a cell they have seen. Collection reads them
# too, because a cell that is put aside has to stay.
#
#     column   00 "read" 00 | length of the locked column 2 | the locked column | start_ts 8
#
# Transactions write read locks, as lock-only records. Since each has a column of its own, they
# never conflict with each other; tablets keep them apart from the writers of the locked cell.

ACKNOWLEDGEMENTS = b"\x00ack\x00"
"""The prefix of the names of these columns."""
PUT_ASIDE = b"\x01"
ACKNOWLEDGED_BYTES = 8

READ_LOCKS = b"\x00read\x00"
"""The prefix of the names of these columns."""

_LENGTH_BYTES = 2
_START_BYTES = 8


def acknowledgement_column(observer: bytes, column: bytes) -> bytes:
    """The column in which an observer records what it has seen of another column."""
    return ACKNOWLEDGEMENTS + len(observer).to_bytes(_LENGTH_BYTES, "big") + observer + column


def observed_column(acknowledgement: bytes) -> bytes | None:
    """The observed column of a name that `acknowledgement_column` made; None for other names."""
    if not acknowledgement.startswith(ACKNOWLEDGEMENTS):
        return None
    begin = len(ACKNOWLEDGEMENTS) + _LENGTH_BYTES
    length = int.from_bytes(acknowledgement[begin - _LENGTH_BYTES : begin], "big")
    return acknowledgement[begin + length :]


def acknowledging_observer(acknowledgement: bytes) -> bytes:
    """The observer in a name that `acknowledgement_column` made."""
    begin = len(ACKNOWLEDGEMENTS) + _LENGTH_BYTES
    length = int.from_bytes(acknowledgement[begin - _LENGTH_BYTES : begin], "big")
    return acknowledgement[begin : begin + length]


def acknowledged_start(acknowledged: bytes) -> int:
    """The start timestamp in the value of such a cell: that of the observer's last run."""
    return int.from_bytes(acknowledged[:ACKNOWLEDGED_BYTES], "big")


def tells_of_a_dead_letter(acknowledged: bytes) -> bool:
    """True if the value of such a cell says that a change was put aside."""
    return acknowledged[ACKNOWLEDGED_BYTES:] == PUT_ASIDE


def read_lock_column(column: bytes, start_timestamp: int) -> bytes:
    """The column in which the transaction that began then holds its read lock of another column."""
    start = start_timestamp.to_bytes(_START_BYTES, "big")
    return read_locks_of(column) + start


def read_locks_of(column: bytes) -> bytes:
    """The prefix of the names of all read locks of this column, which sort by start timestamp."""
    return READ_LOCKS + len(column).to_bytes(_LENGTH_BYTES, "big") + column


def locked_column(read_lock: bytes) -> bytes | None:
    """The locked column of a name that `read_lock_column` made; None for other names."""
    begin = len(READ_LOCKS) + _LENGTH_BYTES
    if not read_lock.startswith(READ_LOCKS) or len(read_lock) < begin + _START_BYTES:
        return None
    column = read_lock[begin:-_START_BYTES]
    length = int.from_bytes(read_lock[begin - _LENGTH_BYTES : begin], "big")
    return column if len(column) == length else None


# Which versions of a cell are out of reach: the rule of all collection, in tablets and in rows.
#
# Assume a safe point below which no read, prewrite or commit is admitted, and below which no table
# has a lock left. Then nothing can read versions of a cell that are older than the newest put or
# deletion at or below the safe point, nor that deletion itself once everything older is gone.
#
# Lock-only records and rollback markers are part of no snapshot. They are evidence of the outcome
# of their transaction. So they need not stay as long as snapshots do: they are deleted once no
# transaction that began below them is still running in any table, which may be much earlier. They
# are not deleted before that, even if the cell has a newer commit. A newer commit excludes the same
# transactions, but does not show the outcome of the earlier one.


class Fate(Enum):
    """Decision of collection about one version."""

    NEWER = auto()
    """It stays: it lies above the safe point."""
    STAYS = auto()
    """It stays: it is what a read at the safe point sees."""
    GOES = auto()
    GOES_LAST = auto()
    """It is a deletion, and goes with the last version below it, or later: removing it alone would
    bring back what it has deleted."""


class Reach:
    """Walks over the versions of cells, the newest of each first."""

    __slots__ = ("_below", "_ended_below", "_hidden")

    def __init__(self, below: int, ended_below: int) -> None:
        """`below` is the safe point of snapshots, `ended_below` that of transactions."""
        self._below = below
        self._ended_below = max(below, ended_below)
        self._hidden = False
        """True once the newest put or deletion at or below the safe point was found: everything
        after it in this cell is out of reach."""

    def next_cell(self) -> None:
        self._hidden = False

    def fate(self, kind: int, timestamp: int) -> Fate:
        """The fate of the next version."""
        if timestamp > self._below:
            is_over = kind == KIND_LOCK_ONLY and timestamp < self._ended_below
            return Fate.GOES if is_over else Fate.NEWER
        if kind == KIND_LOCK_ONLY or self._hidden:
            return Fate.GOES
        self._hidden = True
        return Fate.GOES_LAST if kind == KIND_DELETE else Fate.STAYS

    def drops_marker(self, start_timestamp: int) -> bool:
        """True if a rollback marker is dropped: it stops late prewrites, which are refused
        anyway."""
        return start_timestamp < self._ended_below


def too_old(timestamp: int, safe_point: int) -> SnapshotTooOld:
    """The refusal of what is below a safe point."""
    return SnapshotTooOld(
        f"timestamp {timestamp} ({Timestamp(timestamp).describe()}) is older than the history "
        f"that is kept, which goes back to {safe_point} ({Timestamp(safe_point).describe()}); a "
        "transaction, snapshot or pin keeps older history only while its session lives, and not "
        "beyond the cluster's limit (client_held_seconds_max)",
        timestamp=timestamp,
        safe_point=safe_point,
    )
