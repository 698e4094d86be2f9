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

The tablet that stores a record fills in its `last_change`; percolator/tablet/memory/last_change.py
says why. A client sends the record without it, and records in the earlier format have none.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from percolator.errors import CellAddress, InvariantViolation


class RecordKind(IntEnum):
    """What a lock will do to its cell when it is committed, and what a write record did."""

    PUT = 1
    PUT_IN_DATA = 2
    DELETE = 3
    LOCK_ONLY = 4


KIND_PUT = 1
KIND_PUT_IN_DATA = 2
KIND_DELETE = 3
KIND_LOCK_ONLY = 4
KIND_READ_LOCK = 5
"""Only in write sets: the cluster gets and stores LOCK_ONLY, in a hidden cell (hidden_cells.py)."""
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


def timestamp_bytes(timestamp: int) -> bytes:
    """A timestamp as encoded in records and in conditions on their prefixes."""
    return timestamp.to_bytes(8, "big")


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
