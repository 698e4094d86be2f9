"""Found cells column by column, joined to blocks of memory.

For readers that make blocks of them anyway, this costs either side a fraction of lists: neither
has to make or read a field of a message for each value.
"""

from __future__ import annotations

import sys
from array import array
from itertools import accumulate

from percolator.v1 import tabletserver_pb2 as pb


def join_cells(
    rows: list[bytes],
    columns: list[bytes],
    values: list[bytes],
    found: pb.JoinedCells,
) -> bool:
    """Fills in the cells of a page, given row by row. Returns False, and does nothing, if not all
    rows have the same columns."""
    if not rows:
        return False
    width = next((at for at, row in enumerate(rows) if row != rows[0]), len(rows))
    names = columns[:width]
    distinct = rows[::width]
    if columns != [*names] * len(distinct):
        return False
    if any(rows[at::width] != distinct for at in range(1, width)):
        return False
    _join(distinct, found.rows)
    for at, name in enumerate(names):
        _join(values[at::width], found.columns.add(name=name).values)
    return True


def _join(values: list[bytes], found: pb.JoinedBytes) -> None:
    offsets = array("i", accumulate(map(len, values), initial=0))
    if sys.byteorder == "big":
        offsets.byteswap()
    found.block = b"".join(values)
    found.offsets = offsets.tobytes()
