"""Which cells of a task go into one transaction: so many that it can commit with one message.

A transaction in one tablet commits in one round, at half the cost of two phases, unless it has more
cells or bytes than one message. So a transaction ends at the border of a tablet, too. Borders may
be out of date: then it takes two phases, or is repeated. A few cells before a border are not worth
a message of their own, and go on with those of the next tablet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from percolator.errors import CellAddress
from percolator.formats.records import KIND_DELETE, KIND_PUT
from percolator.limits import Limits
from percolator.protocol.write_steps import Write
from percolator.spark.connections import BATCH_ROWS_MAX

if TYPE_CHECKING:  # it needs pyspark, and what a task is cut into does not
    from percolator.spark.shapes.fields import Cell

CELLS_MAX = BATCH_ROWS_MAX
BYTES_MAX = Limits().batch_bytes_max // 2
FEW_CELLS = 16

_row = itemgetter(0)


def cut(
    cells: list[Cell], table_id: int, rows_max: int, borders: Sequence[bytes]
) -> Iterator[dict[CellAddress, Write]]:
    """The writes of each transaction in turn, sorted by row; no row is in two of them.

    `borders` are the first rows of all tablets but the first, in order. Of cells that are written
    twice, the last one counts.
    """
    cells.sort(key=_row)  # stable
    writes: dict[CellAddress, Write] = {}
    rows = size = first = passed = 0
    while first < len(cells):
        row = cells[first][0]
        after = first + 1
        while after < len(cells) and cells[after][0] == row:
            after += 1
        of_row = cells[first:after]
        row_size = sum(len(value) for _, _, value in of_row if value is not None)
        is_full = (
            rows >= rows_max or len(writes) + len(of_row) > CELLS_MAX or size + row_size > BYTES_MAX
        )
        is_past_border = False
        while passed < len(borders) and row >= borders[passed]:
            passed += 1
            is_past_border = True
        if writes and (is_full or (is_past_border and len(writes) >= FEW_CELLS)):
            yield writes
            writes, rows, size = {}, 0, 0
        for _, column, value in of_row:
            write = (KIND_DELETE, b"") if value is None else (KIND_PUT, value)
            writes[CellAddress(table_id, row, column)] = write
        rows += 1
        size += row_size
        first = after
    if writes:
        yield writes
