"""Reads of single cells that come as parallel lists: each stands for a `RowRead` of one column."""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import InvalidArgument
from percolator.v1 import tabletserver_pb2 as pb


class CellRead:
    """A read of one cell. Plain attributes: reading a field of a message takes longer."""

    __slots__ = ("columns", "row", "timestamp")

    all_columns = False
    column_prefixes = ()
    report_deletes = False
    passing = ()

    def __init__(self, row: bytes, column: bytes, timestamp: int) -> None:
        self.row = row
        self.columns = (column,)
        self.timestamp = timestamp


AskedRead = pb.RowRead | CellRead


def asked_reads(batch: pb.ReadBatch) -> Sequence[AskedRead]:
    """The reads of a batch: rows first, then single cells. Raises `InvalidArgument`."""
    if not batch.HasField("cells"):
        return batch.reads
    cells = batch.cells
    rows, columns, timestamps = cells.rows, cells.columns, cells.timestamps
    if not len(rows) == len(columns) == len(timestamps):
        raise InvalidArgument("cells", "rows, columns and timestamps differ in number")
    return [*batch.reads, *map(CellRead, rows, columns, timestamps)]
