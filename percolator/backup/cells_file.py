"""The Parquet file of a part: cells ordered by row and column, in pieces of bounded size.

A piece is a row group. It is limited in bytes as well as in cells: values may be megabytes long,
and both the writer and the reader hold a piece in memory, for several files at a time. Values are
stored without a dictionary, so that a row group's size shows how much memory it needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from percolator.aio.bulk_load import LoadedCell
from percolator.backup.layout import DamagedExport, ExportPart
from percolator.routing.cells import CellPage

SCHEMA = pa.schema(
    [
        pa.field("row", pa.binary(), nullable=False),
        pa.field("column", pa.binary(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
        # Signed, because Spark has no unsigned 64-bit integers. No timestamp is too large for it.
        pa.field("commit_timestamp", pa.int64(), nullable=False),
    ]
)
PIECE_CELLS = 65_536
PIECE_BYTES = 16 << 20
READ_CELLS = 16_384
"""The most cells that are read at a time."""


class Piece:
    """Collects pages of a scan until there are enough for a row group."""

    def __init__(self) -> None:
        self._pages: list[CellPage] = []
        self.cells = 0
        self._bytes = 0

    def add(self, page: CellPage) -> None:
        self._pages.append(page)
        self.cells += len(page.rows)
        self._bytes += sum(map(len, page.rows)) + sum(map(len, page.values))

    @property
    def is_full(self) -> bool:
        return self.cells >= PIECE_CELLS or self._bytes >= PIECE_BYTES

    def batch(self) -> pa.RecordBatch:
        """The pages as an Arrow batch, made without an object for each cell."""
        lists = ("rows", "columns", "values", "commit_timestamps")
        arrays = [
            pa.array([entry for page in self._pages for entry in getattr(page, name)], field.type)
            for name, field in zip(lists, SCHEMA, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def writer(path: Path) -> pq.ParquetWriter:
    """A writer for the file of a part. Each batch written becomes a row group."""
    return pq.ParquetWriter(path, SCHEMA, compression="zstd", use_dictionary=["row", "column"])


def cells_of(directory: Path, part: ExportPart) -> Iterator[list[LoadedCell]]:
    """Yields the cells of a part, in batches.

    Raises `DamagedExport` unless there are as many as were written, in order.
    """
    path = directory / part.file
    found = 0
    last: LoadedCell | None = None
    start, end = bytes.fromhex(part.start), bytes.fromhex(part.end)
    try:
        with pq.ParquetFile(path) as file:
            if not file.schema_arrow.equals(SCHEMA):
                raise DamagedExport(f"{path} has other columns than an export: {file.schema_arrow}")
            for cells in _read(file):
                if not _follow(last, cells) or cells[0][0] < start or (end and cells[-1][0] >= end):
                    raise DamagedExport(f"{path} has rows out of order, or of other parts")
                last = cells[-1]
                found += len(cells)
                yield cells
    except FileNotFoundError:
        raise DamagedExport(f"{path} is missing") from None
    except (OSError, pa.ArrowException) as error:
        raise DamagedExport(f"{path} cannot be read: {error}") from error
    if found != part.cells:
        raise DamagedExport(f"{path} has {found} cells instead of {part.cells}")


def _read(file: pq.ParquetFile) -> Iterator[list[LoadedCell]]:
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        each = max(1, group.total_byte_size // max(1, group.num_rows))
        at_a_time = max(1, min(READ_CELLS, PIECE_BYTES // each))
        columns = ["row", "column", "value"]
        for batch in file.iter_batches(at_a_time, row_groups=[number], columns=columns):
            yield list(zip(*(column.to_pylist() for column in batch), strict=True))


def _follow(last: LoadedCell | None, cells: Sequence[LoadedCell]) -> bool:
    """Whether the addresses of the cells strictly ascend, from `last` on."""
    all_of_them = cells if last is None else [last, *cells]
    return all(
        one[0] < other[0] or (one[0] == other[0] and one[1] < other[1])
        for one, other in itertools.pairwise(all_of_them)
    )
