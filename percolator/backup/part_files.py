"""The files that hold cells, in either format: written piece by piece, and read back in order.

Parquet holds cells as they are stored. A piece is a row group, and values are stored without a
dictionary, so that a row group's size shows how much memory it needs. pyarrow is imported for
Parquet only.

Lines of JSON hold rows as people read them, one for each row, as `percolator --json scan` shows it:

    {"row": ["eu", 17], "columns": {"stock": 12, "name": "trap"}}

Keys and values are written and read by the codecs that the manifest names. A row whose cells exceed
a piece continues on the next line. Nothing else about the files is different: the manifest has
their checksums, and a line that is not as it was written is refused, with its number.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from percolator import codecs
from percolator.aio.bulk_load import LoadedCell
from percolator.backup.export_files import (
    DamagedExport,
    Export,
    ExportedCodecs,
    ExportedTable,
    ExportFormat,
    ExportPart,
)
from percolator.codecs import Codec, readable
from percolator.codecs.readable import HEX, counted, row_bytes, row_text
from percolator.errors import InvalidArgument, UsageError
from percolator.routing.cells import CellPage

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

PIECE_CELLS = 65_536
PIECE_BYTES = 16 << 20
READ_CELLS = 16_384
"""The most cells that are read at a time."""


class Piece:
    """Pages of a scan, one after another, which are written to a file together.

    A piece is limited in bytes as well as in cells: values may be megabytes long, and both writers
    and readers hold a piece in memory, for several files at a time.
    """

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

    def column_names(self) -> set[bytes]:
        return {column for page in self._pages for column in page.columns}

    def entries(self, name: str) -> list[Any]:
        """One of the pages' parallel lists, of all pages."""
        return [entry for page in self._pages for entry in getattr(page, name)]

    def each(self) -> Iterator[LoadedCell]:
        """Its cells, in order."""
        for page in self._pages:
            yield from zip(page.rows, page.columns, page.values, strict=True)


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
    return cells_in(path)


def _follow(last: LoadedCell | None, cells: Sequence[LoadedCell]) -> bool:
    """The addresses of the cells strictly ascend, from `last` on."""
    all_of_them = cells if last is None else [last, *cells]
    return all(
        one[0] < other[0] or (one[0] == other[0] and one[1] < other[1])
        for one, other in itertools.pairwise(all_of_them)
    )


def cells_schema() -> pa.Schema:
    """The columns of a Parquet file."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("row", pa.binary(), nullable=False),
            pa.field("column", pa.binary(), nullable=False),
            pa.field("value", pa.binary(), nullable=False),
            # Signed, because Spark has no unsigned 64-bit integers. No timestamp is too large.
            pa.field("commit_timestamp", pa.int64(), nullable=False),
        ]
    )


class CellsFile:
    """A Parquet file that is being written. Each piece becomes a row group."""

    def __init__(self, path: Path | IO[bytes]) -> None:
        import pyarrow.parquet as pq

        self._schema = cells_schema()
        self._file = pq.ParquetWriter(
            path, self._schema, compression="zstd", use_dictionary=["row", "column"]
        )

    def write(self, piece: Piece) -> None:
        """Adds cells, as Arrow arrays that are made without an object for each cell."""
        import pyarrow as pa

        lists = ("rows", "columns", "values", "commit_timestamps")
        arrays = [
            pa.array(piece.entries(name), field.type)
            for name, field in zip(lists, self._schema, strict=True)
        ]
        self._file.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        self._file.close()


def cells_in(path: Path) -> Iterator[list[LoadedCell]]:
    """Yields the cells of a file, in batches. Raises `DamagedExport`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if not file.schema_arrow.equals(cells_schema()):
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


_LEVELS_MAX = 100
"""Deeper values are written as bytes. How deep JSON may be for whoever reads it differs between
programs, and in Python with the version and with how many functions are being run."""


class RecordForms:
    """Row keys and values of one table as JSON, exactly: what is written is read as the same bytes.

    A value is written as its codec reads it: a number, a text, a list. A value that JSON cannot
    hold exactly, or that the codec would write in another way, is the text "hex:" with its bytes;
    so is everything that no codec here can read. A value without a codec is text, or such bytes. As
    on the command line, a text that begins with "hex:" always means bytes, and so is itself written
    as bytes.
    """

    def __init__(self, kept: ExportedCodecs | None) -> None:
        kept = ExportedCodecs("", ()) if kept is None else kept
        self._key_name = kept.key
        self._key = readable.key_codec(kept.key)
        self._names = {bytes.fromhex(column): codec for column, codec in kept.columns}
        self._codecs = {column: readable.value_codec(name) for column, name in self._names.items()}

    def row_data(self, row: bytes) -> object:
        if self._key is None and self._key_name:
            return HEX + row.hex()
        shown = readable.key_data(self._key, row)
        return shown if self._is_read_as(row, shown) else HEX + row.hex()

    def _is_read_as(self, row: bytes, shown: object) -> bool:
        try:
            return self.row_bytes(shown) == row
        except InvalidArgument:
            return False

    def row_bytes(self, written: object) -> bytes:
        """Raises `InvalidArgument` about the row."""
        if isinstance(written, str) and written.startswith(HEX):
            return row_bytes("row", written)
        if self._key is None and self._key_name:
            raise _expected("row", HEX, written)
        return readable.key_from_data("row", self._key, written)

    def value_data(self, column: bytes, value: bytes) -> object:
        codec = self._codecs.get(column)
        if codec is None and column in self._names:
            return HEX + value.hex()
        shown = _shown(codec, value)
        if _is_deeper(shown, _LEVELS_MAX) or not _is_read_as(codec, value, shown):
            return HEX + value.hex()
        return shown

    def cell(self, name: str, written: object) -> tuple[bytes, bytes]:
        """The column and the stored bytes. Raises `InvalidArgument` about the column."""
        column = row_bytes("column", name)
        field = f"column {name!r}"
        if not column or column[0] == 0:
            raise InvalidArgument(field, "is not the name of a column")
        if isinstance(written, str) and written.startswith(HEX):
            return column, row_bytes(field, written)
        codec = self._codecs.get(column)
        if codec is None and column in self._names:
            raise _expected(field, HEX, written)
        return column, readable.value_from_data(field, codec, written)


def _shown(codec: Codec[Any] | None, value: bytes) -> object:
    if codec is codecs.text:
        # JSON can hold every text, even one of several lines; a terminal cannot.
        try:
            return value.decode()
        except UnicodeDecodeError:
            return HEX + value.hex()
    return readable.value_data(codec, value)


def _is_deeper(shown: object, levels: int) -> bool:
    """Lists and objects are nested in more levels than that."""
    if not isinstance(shown, dict | list):
        return False
    parts = shown.values() if isinstance(shown, dict) else shown
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in parts)


def _is_read_as(codec: Codec[Any] | None, value: bytes, shown: object) -> bool:
    if isinstance(shown, float) and not math.isfinite(shown):
        return False
    try:
        if isinstance(shown, str) and shown.startswith(HEX):
            return row_bytes("value", shown) == value
        return readable.value_from_data("value", codec, shown) == value
    except InvalidArgument:
        return False


def _expected(field: str, what: str, written: object) -> InvalidArgument:
    return InvalidArgument(field, f"expected {what}..., found {str(written)[:80]!r}")


_NO_LINES = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
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
