"""Hidden cells of a row: which changes of its other cells observers have seen (docs/formats.md).

    column   00 "ack" 00 | length of the observer's name 2 | the observer's name | observed column
    value    start_ts 8 | 01, if a change of the cell was put aside as a dead letter

Observers write them. Collection reads them too, because a cell that is put aside has to stay.
"""

from __future__ import annotations

ACKNOWLEDGEMENTS = b"\x00ack\x00"
"""The prefix of the names of these columns."""
PUT_ASIDE = b"\x01"
ACKNOWLEDGED_BYTES = 8

_LENGTH_BYTES = 2


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


def tells_of_a_dead_letter(acknowledged: bytes) -> bool:
    """Whether the value of such a cell says that a change was put aside."""
    return acknowledged[ACKNOWLEDGED_BYTES:] == PUT_ASIDE
