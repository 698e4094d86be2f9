"""The Parquet file of a part: cells as they are stored, ordered by row and column.

A piece is a row group. Values are stored without a dictionary, so that a row group's size shows how
much memory it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from percolator.aio.bulk_load import LoadedCell
from percolator.backup.layout import DamagedExport
from percolator.backup.pieces import PIECE_BYTES, READ_CELLS, Piece

SCHEMA = pa.schema(
    [
        pa.field("row", pa.binary(), nullable=False),
        pa.field("column", pa.binary(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
        # Signed, because Spark has no unsigned 64-bit integers. No timestamp is too large for it.
        pa.field("commit_timestamp", pa.int64(), nullable=False),
    ]
)


class CellsFile:
    """A Parquet file that is being written. Each piece becomes a row group."""

    def __init__(self, path: Path | IO[bytes]) -> None:
        self._file = pq.ParquetWriter(
            path, SCHEMA, compression="zstd", use_dictionary=["row", "column"]
        )

    def write(self, piece: Piece) -> None:
        """Adds cells, as Arrow arrays that are made without an object for each cell."""
        lists = ("rows", "columns", "values", "commit_timestamps")
        arrays = [
            pa.array(piece.entries(name), field.type)
            for name, field in zip(lists, SCHEMA, strict=True)
        ]
        self._file.write_batch(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))

    def close(self) -> None:
        self._file.close()


def cells_in(path: Path) -> Iterator[list[LoadedCell]]:
    """Yields the cells of a file, in batches. Raises `DamagedExport`."""
    try:
        with pq.ParquetFile(path) as file:
            if not file.schema_arrow.equals(SCHEMA):
                raise DamagedExport(f"{path} has other columns than an export: {file.schema_arrow}")
            yield from _read(file)
    except pa.ArrowException as error:
        raise DamagedExport(f"{path} cannot be read: {error}") from error


def _read(file: pq.ParquetFile) -> Iterator[list[LoadedCell]]:
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        each = max(1, group.total_byte_size // max(1, group.num_rows))
        at_a_time = max(1, min(READ_CELLS, PIECE_BYTES // each))
        columns = ["row", "column", "value"]
        for batch in file.iter_batches(at_a_time, row_groups=[number], columns=columns):
            yield list(zip(*(column.to_pylist() for column in batch), strict=True))
