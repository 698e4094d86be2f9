"""Hidden cells of a row: what observers and transactions note beside its other cells
(docs/formats.md).

    column   00 "ack" 00 | length of the observer's name 2 | the observer's name | observed column
    value    start_ts 8 | 01, if a change of the cell was put aside as a dead letter

Observers write acknowledgements: which changes of a cell they have seen. Collection reads them too,
because a cell that is put aside has to stay.

    column   00 "read" 00 | length of the locked column 2 | the locked column | start_ts 8

Transactions write read locks, as lock-only records. Since each has a column of its own, they never
conflict with each other; tablets keep them apart from the writers of the locked cell.
"""

from __future__ import annotations

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


def tells_of_a_dead_letter(acknowledged: bytes) -> bool:
    """Whether the value of such a cell says that a change was put aside."""
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
