"""Hidden cells of a row: what observers have seen of the cells beside them (docs/formats.md).

    column   00 "ack" 00 | length of the observer's name 2 | the observer's name | observed column
    value    start_ts 8 | 01, if a change of the cell was put aside as a dead letter

Observers write them; collection looks at them, since what was put aside has to stay.
"""

from __future__ import annotations

ACKNOWLEDGEMENTS = b"\x00ack\x00"
"""How the names of these columns begin."""
PUT_ASIDE = b"\x01"
ACKNOWLEDGED_BYTES = 8

_LENGTH_BYTES = 2


def acknowledgement_column(observer: bytes, column: bytes) -> bytes:
    """Where an observer notes what it has seen of a column."""
    return ACKNOWLEDGEMENTS + len(observer).to_bytes(_LENGTH_BYTES, "big") + observer + column


def observed_column(acknowledgement: bytes) -> bytes | None:
    """Whose name `acknowledgement_column` made this of; None for any other name."""
    if not acknowledgement.startswith(ACKNOWLEDGEMENTS):
        return None
    begin = len(ACKNOWLEDGEMENTS) + _LENGTH_BYTES
    length = int.from_bytes(acknowledgement[begin - _LENGTH_BYTES : begin], "big")
    return acknowledgement[begin + length :]


def tells_of_a_dead_letter(acknowledged: bytes) -> bool:
    """The value of such a cell."""
    return acknowledged[ACKNOWLEDGED_BYTES:] == PUT_ASIDE
