"""The file of a part as lines of JSON, one for each row, as `percolator --json scan` shows it.

    {"row": ["eu", 17], "columns": {"stock": 12, "name": "trap"}}

Keys and values are written by the codecs that the manifest names (`record_forms.py`), so that
people and other programs can read them, and are read by the same codecs. A row whose cells exceed a
piece continues on the next line. Nothing else about the files is different: the manifest has their
checksums, and a line that is not as it was written is refused, with its number.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from percolator.aio.bulk_load import LoadedCell
from percolator.backup.exported import ExportedTable
from percolator.backup.layout import DamagedExport
from percolator.backup.pieces import PIECE_BYTES, READ_CELLS, Piece
from percolator.backup.record_forms import RecordForms
from percolator.errors import InvalidArgument
from percolator.row_text import row_text

_NO_LINES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "\x85\u2028\u2029"}
"""JSON escapes other ends of lines by itself. Many programs take these for ends of lines, too."""


class RecordsFile:
    """A file that is being written."""

    def __init__(self, path: Path, table: ExportedTable) -> None:
        self._forms = RecordForms(table.codecs)
        self._file = path.open("w", encoding="utf-8", newline="\n")

    def write(self, piece: Piece) -> None:
        """Adds the rows of a piece, a line for each."""
        for row, cells in itertools.groupby(piece.each(), key=lambda cell: cell[0]):
            columns = {
                row_text(column): self._forms.value_data(column, value)
                for _, column, value in cells
            }
            record = {"row": self._forms.row_data(row), "columns": columns}
            line = json.dumps(record, ensure_ascii=False, allow_nan=False)
            self._file.write(line.translate(_NO_LINES) + "\n")

    def close(self) -> None:
        self._file.close()


def records_in(path: Path, table: ExportedTable) -> Iterator[list[LoadedCell]]:
    """Yields the cells of a file, in batches.

    Raises `DamagedExport`, which names file, line, table and column, if a line is no record of this
    table.
    """
    forms = RecordForms(table.codecs)
    batch: list[LoadedCell] = []
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                cells = _cells(line, forms)
            except (ValueError, RecursionError) as error:
                raise _wrong(
                    path, number, table, f"is not JSON as it was written: {error}"
                ) from error
            except InvalidArgument as error:
                raise _wrong(path, number, table, f"{error.field}: {error.reason}") from error
            batch += cells
            size += len(line)
            if len(batch) >= READ_CELLS or size >= PIECE_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _wrong(path: Path, number: int, table: ExportedTable, what: str) -> DamagedExport:
    return DamagedExport(f"{path}, line {number}, table {table.name!r}: {what}")


def _cells(line: bytes, forms: RecordForms) -> list[LoadedCell]:
    record = json.loads(line.decode(), parse_constant=_no_number, object_pairs_hook=_once)
    if not isinstance(record, dict) or set(record) != {"row", "columns"}:
        raise InvalidArgument("line", 'expected {"row": ..., "columns": {...}} and nothing else')
    columns = record["columns"]
    if not isinstance(columns, dict) or not columns:
        raise InvalidArgument("columns", "expected the columns of the row, by name")
    row = forms.row_bytes(record["row"])
    cells = []
    for name, written in columns.items():
        column, value = forms.cell(name, written)
        cells.append((row, column, value))
    return sorted(cells)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name appears twice in an object")
    return found
