"""The files of parts, in either format: written piece by piece, and read back in order.

Parquet holds cells as they are stored (`cells_file.py`), lines of JSON hold rows as people read
them (`records_file.py`). pyarrow is imported for Parquet only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from percolator.aio.bulk_load import LoadedCell
from percolator.backup.exported import Export, ExportedTable, ExportFormat, ExportPart
from percolator.backup.layout import DamagedExport
from percolator.backup.pieces import Piece
from percolator.backup.records_file import RecordsFile, records_in
from percolator.counts import counted
from percolator.errors import UsageError


class PartFile(Protocol):
    """A file that is being written, by one thread at a time."""

    def write(self, piece: Piece) -> None: ...

    def close(self) -> None: ...


def require_readers(form: ExportFormat) -> None:
    """Raises `UsageError` if this installation lacks what the format needs."""
    if form is ExportFormat.PARQUET:
        try:
            import pyarrow.parquet  # noqa: F401 - only whether it is there
        except ImportError:
            raise UsageError(
                "these exports are Parquet files: pip install 'percolator-store[export]'"
            ) from None


def create(path: Path, export: Export, table: ExportedTable) -> PartFile:
    """A new file for cells of this table."""
    if export.form is ExportFormat.JSONL:
        return RecordsFile(path, table)
    from percolator.backup.cells_file import CellsFile

    return CellsFile(path)


def cells_of(
    directory: Path, export: Export, table: ExportedTable, part: ExportPart
) -> Iterator[list[LoadedCell]]:
    """Yields the cells of a part, in batches.

    Raises `DamagedExport` unless there are as many as were written, in order.
    """
    path = directory / part.file
    found = 0
    last: LoadedCell | None = None
    start, end = bytes.fromhex(part.start), bytes.fromhex(part.end)
    try:
        for cells in _cells_in(path, export, table):
            if not _follow(last, cells) or cells[0][0] < start or (end and cells[-1][0] >= end):
                raise DamagedExport(f"{path} has rows out of order, or of other parts")
            last = cells[-1]
            found += len(cells)
            yield cells
    except FileNotFoundError:
        raise DamagedExport(f"{path} is missing") from None
    except OSError as error:
        raise DamagedExport(f"{path} cannot be read: {error}") from error
    if found != part.cells:
        raise DamagedExport(f"{path} has {counted(found, 'cell')} instead of {part.cells}")


def _cells_in(path: Path, export: Export, table: ExportedTable) -> Iterator[list[LoadedCell]]:
    if export.form is ExportFormat.JSONL:
        return records_in(path, table)
    from percolator.backup.cells_file import cells_in

    return cells_in(path)


def _follow(last: LoadedCell | None, cells: Sequence[LoadedCell]) -> bool:
    """Whether the addresses of the cells strictly ascend, from `last` on."""
    all_of_them = cells if last is None else [last, *cells]
    return all(
        one[0] < other[0] or (one[0] == other[0] and one[1] < other[1])
        for one, other in itertools.pairwise(all_of_them)
    )
