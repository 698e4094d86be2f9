"""Lines of JSON hold what is stored exactly, are readable, and are refused where they are wrong."""

from __future__ import annotations

import datetime
import json
import random
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from percolator import codecs
from percolator.aio.bulk_load import LoadedCell
from percolator.backup import export_files, part_files
from percolator.backup.export_files import (
    DamagedExport,
    Export,
    ExportedCodecs,
    ExportedIndex,
    ExportedTable,
    ExportFormat,
    ExportPart,
    file_of,
)
from percolator.backup.part_files import CellsFile, Piece
from percolator.codecs.values import TupleCodec, name_of
from percolator.errors import InvalidArgument, UsageError
from percolator.routing.cells import CellPage

FILE = "t/part-00000.jsonl"
COLUMNS: dict[str, str] = {
    "bytes": "raw",
    "name": "text",
    "stock": "integer",
    "weight": "float",
    "sold": "boolean",
    "at": "timestamp",
    "day": "date",
    "id": "uuid",
    "tags": "json",
    "price": "decimal(10,2)",
    "shape": "model(Shape)",
    "sent": "message(Sent)",
}
KEYS: list[Any] = [
    codecs.text,
    codecs.raw,
    codecs.uuid,
    codecs.ordered_integer,
    codecs.ordered_timestamp,
    codecs.tuple_of(codecs.text, codecs.ordered_integer, codecs.raw),
    codecs.hashed(codecs.text),
    codecs.tuple_of(codecs.text, codecs.hashed(codecs.ordered_date)),
]
EU_17 = codecs.tuple_of(codecs.text, codecs.ordered_integer).encode(("eu", 17))


def table_of(key: str, cells: int = 0) -> tuple[Export, ExportedTable, ExportPart]:
    kept = ExportedCodecs(key, tuple((name.encode().hex(), one) for name, one in COLUMNS.items()))
    part = ExportPart(FILE, "", "", cells)
    table = ExportedTable("t", 1, 0, 0, (), (part,), codecs=kept)
    return Export(7, (table,), ExportFormat.JSONL), table, part


def written(directory: Path, key: str, cells: list[LoadedCell], at_a_time: int = 3) -> list[Any]:
    """Writes cells, as an export does, and returns the lines."""
    export, table, _ = table_of(key)
    (directory / FILE).parent.mkdir(exist_ok=True)
    file = part_files.create(directory / FILE, export, table)
    for begin in range(0, len(cells), at_a_time):
        rows, columns, values = map(list, zip(*cells[begin : begin + at_a_time], strict=True))
        piece = Piece()
        piece.add(CellPage(rows, columns, [1] * len(rows), values, [], [], b"", b""))
        file.write(piece)
    file.close()
    return [json.loads(line) for line in (directory / FILE).read_text().splitlines()]


def read(directory: Path, key: str, cells: int) -> list[LoadedCell]:
    export, table, part = table_of(key, cells)
    batches = part_files.cells_of(directory, export, table, part)
    return [cell for batch in batches for cell in batch]


def _text(chance: random.Random) -> str:
    return "".join(chance.choice('aé"\\\n\0 \u2028😀x:') for _ in range(chance.randrange(6)))


def _of_codec(name: str, chance: random.Random) -> bytes:
    """The bytes of some value that a program stores with this codec."""
    nested = [None, True, -1.5, 10**30, {_text(chance): [_text(chance)]}]
    when = datetime.datetime(2026, 11, 1, 1, 2, 3, chance.randrange(10**6), datetime.UTC)
    made: dict[str, bytes] = {
        "raw": chance.choice((b"hex:00", b"", b"text", chance.randbytes(5))),
        "text": chance.choice(("hex:00", "", _text(chance))).encode(),
        "integer": codecs.integer.encode(chance.choice((0, -1, 2**63 - 1, -(2**63)))),
        "float": codecs.float.encode(
            chance.choice((0.0, -0.0, 0.1, 1e308, float("nan"), float("-inf"), 5e-324))
        ),
        "boolean": codecs.boolean.encode(chance.random() < 0.5),
        "timestamp": codecs.timestamp.encode(when),
        "date": codecs.date.encode(when.date()),
        "uuid": codecs.uuid.encode(uuid.UUID(int=chance.getrandbits(128))),
        "json": codecs.json.encode(chance.choice((*nested, nested, "hex:00", "NaN", ""))),
        "decimal(10,2)": codecs.decimal(10, 2).encode(Decimal(chance.randrange(-999, 999)) / 100),
        "model(Shape)": codecs.json.encode({"sides": chance.randrange(9)}),
        "message(Sent)": chance.choice((b"", b"readable", b"\x08\x01")),
    }
    return made[name]


def _cells(key: Any, chance: random.Random) -> list[LoadedCell]:
    """Cells of some rows; one in five is nothing that its codec has written."""
    keys: dict[str, Any] = {
        "text": lambda: _text(chance) or "hex:7",
        "raw": lambda: chance.choice((b"hex:", b"a", chance.randbytes(4) + b"!")),
        "uuid": lambda: uuid.UUID(int=chance.getrandbits(128)),
        "ordered_integer": lambda: chance.randrange(-(2**63), 2**63),
        "ordered_timestamp": lambda: datetime.datetime.fromtimestamp(
            chance.randrange(10**9), datetime.UTC
        ),
        "ordered_date": lambda: datetime.date.fromordinal(chance.randrange(1, 10**6)),
    }

    def made(codec: Any) -> Any:
        if isinstance(codec, TupleCodec):
            return tuple(made(part) for part in codec.parts)
        return made(codec.keys) if name_of(codec).startswith("hashed") else keys[name_of(codec)]()

    found: dict[tuple[bytes, bytes], bytes] = {}
    for _ in range(chance.randrange(1, 6)):
        row = key.encode(made(key)) if chance.random() < 0.8 else chance.randbytes(6) + b"-"
        for column in [*chance.sample(list(COLUMNS), 4), "of no codec", "\xff"]:
            known = COLUMNS.get(column, "raw")
            wrong = chance.random() < 0.2
            value = chance.randbytes(chance.randrange(9)) if wrong else _of_codec(known, chance)
            found[row, column.encode("latin-1")] = value
    return [(row, column, value) for (row, column), value in sorted(found.items())]


@pytest.mark.parametrize("key", KEYS, ids=name_of)
def test_whatever_is_stored_is_read_back_as_the_same_bytes(key: Any, tmp_path: Path) -> None:
    chance = random.Random(name_of(key))
    for _ in range(150):
        cells = _cells(key, chance)
        written(tmp_path, name_of(key), cells, at_a_time=chance.randrange(1, 9))
        assert read(tmp_path, name_of(key), len(cells)) == cells


def test_numbers_are_numbers_and_keys_of_several_parts_are_lists(tmp_path: Path) -> None:
    values = {
        "at": codecs.timestamp.encode(datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC)),
        "bytes": b"\xff",
        "day": codecs.date.encode(datetime.date(2026, 1, 2)),
        "name": b"two\nlines",
        "note": b"without a codec",
        "price": codecs.decimal(10, 2).encode(Decimal("1.50")),
        "sold": codecs.boolean.encode(True),
        "shape": b'{"sides":3}',
        "stock": codecs.integer.encode(12345678),
        "tags": codecs.json.encode(["a", 1]),
        "weight": codecs.float.encode(0.5),
    }
    cells = sorted((EU_17, name.encode(), value) for name, value in values.items())
    lines = written(tmp_path, "tuple_of(text, ordered_integer)", cells, at_a_time=99)
    columns = {
        "at": "2026-01-02T03:04:00+00:00",
        "bytes": "hex:ff",
        "day": "2026-01-02",
        "name": "two\nlines",
        "note": "without a codec",
        "price": "1.50",
        "sold": True,
        "shape": {"sides": 3},
        "stock": 12345678,
        "tags": ["a", 1],
        "weight": 0.5,
    }
    assert lines == [{"row": ["eu", 17], "columns": columns}]


def test_what_is_nested_deeply_is_read_back_however_deep_the_stack_is(tmp_path: Path) -> None:
    def later(frames: int) -> list[LoadedCell]:
        return later(frames - 1) if frames else read(tmp_path, "text", len(cells))

    def nested(levels: int) -> bytes:
        return b'{"a":[' * (levels // 2) + b"]}" * (levels // 2)

    cells = [(b"%03d" % levels, b"tags", nested(levels)) for levels in range(98, 1000, 2)]
    cells.append((b"text", b"tags", b'"%s"' % (b"[" * 500)))
    lines = written(tmp_path, "text", cells)
    assert later(300) == cells
    shown = [not str(line["columns"]["tags"]).startswith("hex:") for line in lines]
    assert shown == [True, True, *[False] * (len(cells) - 3), True]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('{"row": ["eu", 17], "columns": {"stock": "12"}}', "column 'stock': expected integer"),
        ('{"row": ["eu", 17], "columns": {"stock": true}}', "column 'stock': expected integer"),
        ('{"row": ["eu", 17], "columns": {"stock": 1e3}}', "column 'stock': expected integer"),
        ('{"row": ["eu", 17], "columns": {"stock": 9223372036854775808}}', "expected integer"),
        ('{"row": ["eu", 17], "columns": {"weight": 1e999}}', "expected float"),
        ('{"row": ["eu", 17], "columns": {"weight": NaN}}', "NaN is not a number"),
        ('{"row": ["eu", 17], "columns": {"tags": [1e999]}}', "expected json"),
        ('{"row": ["eu", 17], "columns": {"sold": 1}}', "expected boolean"),
        ('{"row": ["eu", 17], "columns": {"day": 20260102}}', "expected date"),
        ('{"row": ["eu", 17], "columns": {"id": "7"}}', "expected uuid"),
        ('{"row": ["eu", 17], "columns": {"price": 1.5}}', "expected decimal"),
        ('{"row": ["eu", 17], "columns": {"name": 5}}', "column 'name': expected text"),
        ('{"row": ["eu", 17], "columns": {"name": "\\ud800"}}', "cannot be encoded"),
        ('{"row": ["eu", 17], "columns": {"name": "hex:0"}}', "pairs of hexadecimal digits"),
        ('{"row": ["eu", 17], "columns": {"sent": "text"}}', "column 'sent': expected hex:"),
        ('{"row": ["eu", 17], "columns": {"none": 5}}', "column 'none': expected text"),
        ('{"row": ["eu", "17"], "columns": {"stock": 1}}', r"row: expected tuple_of\(text"),
        ('{"row": ["eu", true], "columns": {"stock": 1}}', "row: expected tuple_of"),
        ('{"row": ["eu"], "columns": {"stock": 1}}', "row: expected tuple_of"),
        ('{"row": "eu", "columns": {"stock": 1}}', "row: expected tuple_of"),
        ('{"row": ["eu", 17], "columns": {}}', "columns: expected the columns"),
        ('{"row": ["eu", 17], "columns": {"": "a"}}', "is not the name of a column"),
        ('{"row": ["eu", 17], "columns": {"a": "b", "a": "b"}}', "appears twice"),
        ('{"row": ["eu", 17], "columns": {"a": "b"}, "at": 1}', "and nothing else"),
        ('{"row": ["eu", 17]}', "and nothing else"),
        ("[]", "and nothing else"),
        ("", "is not JSON"),
        ('{"row": ["eu", 17], "columns": {"a": "b"}', "is not JSON"),
        ("\udcff", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("1" * 10_000, "is not JSON"),
    ],
)
def test_a_line_that_does_not_fit_is_refused_with_its_place(
    line: str, wrong: str, tmp_path: Path
) -> None:
    good = '{"row": ["eu", 16], "columns": {"stock": 1}}\n'
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_bytes(good.encode() + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(DamagedExport, match=wrong) as refused:
        read(tmp_path, "tuple_of(text, ordered_integer)", 2)
    assert f"{FILE}, line 2, table 't': " in str(refused.value)


def test_rows_out_of_order_missing_or_twice_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "", [(row, b"c", b"1") for row in (b"a", b"b")])
    path = tmp_path / FILE
    first, second = path.read_text().splitlines(keepends=True)
    for content, wrong in (
        (second + first, "out of order"),
        (first + first, "out of order"),
        (first, "has 1 cell instead of 2"),
        (None, "is missing"),
    ):
        path.unlink()
        if content is not None:
            path.write_text(content)
        with pytest.raises(DamagedExport, match=wrong):
            read(tmp_path, "", 2)


def test_a_row_of_many_cells_takes_several_lines_and_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_files, "READ_CELLS", 4)
    cells = [(b"a", b"%02d" % column, b"v") for column in range(20)]
    assert len(written(tmp_path, "", cells, at_a_time=5)) == 4
    export, table, part = table_of("", 20)
    batches = list(part_files.cells_of(tmp_path, export, table, part))
    assert [len(batch) for batch in batches] == [5, 5, 5, 5]
    assert [cell for batch in batches for cell in batch] == cells


PART = ExportPart("t/part-00000.parquet", "", "")


def page(*cells: tuple[bytes, bytes, bytes]) -> CellPage:
    rows, columns, values = map(list, zip(*cells, strict=True))
    return CellPage(rows, columns, [1] * len(cells), values, [], [], b"", b"")


def written_of_cells_file(directory: Path, *pages: CellPage) -> ExportPart:
    """Writes pages to a file, as the exporter does."""
    path = directory / PART.file
    path.parent.mkdir(exist_ok=True)
    file, piece, cells = CellsFile(path), Piece(), 0
    for one in pages:
        piece.add(one)
        if piece.is_full:
            file.write(piece)
            cells, piece = cells + piece.cells, Piece()
    if piece.cells:
        file.write(piece)
    file.close()
    return ExportPart(PART.file, "", "", cells + piece.cells)


def _read(directory: Path, part: ExportPart) -> Iterator[list[LoadedCell]]:
    export = export_of(part)
    return part_files.cells_of(directory, export, export.tables[0], part)


def test_long_values_make_small_row_groups_that_are_read_in_small_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_files, "PIECE_BYTES", 100_000)
    # All values are equal: a dictionary of them would be small, but what is read would not.
    pages = [page((b"%03d" % row, b"c", b"v" * 30_000)) for row in range(20)]
    part = written_of_cells_file(tmp_path, *pages)
    groups = pq.ParquetFile(tmp_path / part.file).num_row_groups
    batches = list(_read(tmp_path, part))
    assert groups == 5
    assert max(map(len, batches)) <= 4
    assert [cell for batch in batches for cell in batch] == [
        (one.rows[0], one.columns[0], one.values[0]) for one in pages
    ]


def test_a_value_larger_than_a_piece_forms_its_own_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_files, "PIECE_BYTES", 1_000)
    part = written_of_cells_file(
        tmp_path, page((b"a", b"c", b"v" * 5_000)), page((b"b", b"c", b""))
    )
    assert [len(batch) for batch in _read(tmp_path, part)] == [1, 1]


@pytest.mark.parametrize(
    "cells",
    [
        [],
        [(b"", b"c", b"")],
        [(b"\x00", b"\x01", b"\xff"), (b"\x00\x00", b"\xff" * 255, b""), (b"\xff", b"c", b"\x00")],
        [(b"a", b"b", b"1"), (b"a", b"c", b"2")],
    ],
)
def test_any_bytes_are_read_back_unchanged(
    cells: list[tuple[bytes, bytes, bytes]], tmp_path: Path
) -> None:
    part = written_of_cells_file(tmp_path, *[page(cell) for cell in cells])
    assert [cell for batch in _read(tmp_path, part) for cell in batch] == cells


@pytest.mark.parametrize(
    ("cells", "wrong"),
    [
        ([(b"b", b"c", b""), (b"a", b"c", b"")], "out of order"),
        ([(b"a", b"c", b""), (b"a", b"c", b"")], "out of order"),
        ([(b"a", b"c", b""), (b"z", b"c", b"")], "of other parts"),
    ],
)
def test_cells_out_of_order_or_of_another_part_are_refused(
    cells: list[tuple[bytes, bytes, bytes]], wrong: str, tmp_path: Path
) -> None:
    part = written_of_cells_file(tmp_path, page(*cells))
    clipped = ExportPart(part.file, "", b"m".hex(), part.cells)
    with pytest.raises(DamagedExport, match=wrong):
        list(_read(tmp_path, clipped))


def test_a_file_that_has_other_columns_or_ends_early_is_refused(tmp_path: Path) -> None:
    part = written_of_cells_file(tmp_path, page((b"a", b"c", b"")))
    path = tmp_path / part.file
    whole = path.read_bytes()
    spoiled: list[tuple[Callable[[], object], str]] = [
        (lambda: path.write_bytes(whole[:-1]), "cannot be read"),
        (lambda: pq.write_table(pa.table({"row": [1]}), path), "other columns"),
        (path.unlink, "is missing"),
    ]
    for spoil, said in spoiled:
        spoil()
        with pytest.raises(DamagedExport, match=said):
            list(_read(tmp_path, part))
    path.write_bytes(whole)
    with pytest.raises(DamagedExport, match="1 cell instead of 2"):
        list(_read(tmp_path, ExportPart(part.file, "", "", 2)))


# ---------------------------------------------------------------------------- the manifest


def export_of(part: ExportPart) -> Export:
    return Export(7, (ExportedTable("t", 1, 0, 0, (), (part,)),))


@pytest.mark.parametrize("file", ["../other.parquet", "/etc/passwd", "u/part-00000.parquet"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(file: str, tmp_path: Path) -> None:
    export_files.write_export(tmp_path / export_files.MANIFEST, export_of(ExportPart(file, "", "")))
    with pytest.raises(DamagedExport, match=f"names '{file}', which is no file"):
        export_files.read_manifest(tmp_path)


@pytest.mark.parametrize("content", [{"format": 1}, {"format": 1, "at": 7, "tables": [{}]}])
def test_a_malformed_manifest_is_damaged_and_another_format_is_named(
    content: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / export_files.MANIFEST
    export_files.write_record(path, content)
    with pytest.raises(DamagedExport, match="is not the record of an export"):
        export_files.read_manifest(tmp_path)
    for other in (6, True, "1", None):
        export_files.write_record(path, content | {"format": other})
        with pytest.raises(InvalidArgument, match=f"is of format {other}; this release reads 1"):
            export_files.read_manifest(tmp_path)


INDEX = ExportedIndex("a", (("61", "text"),), unique=False)


@pytest.mark.parametrize(
    ("options", "form", "number"),
    [
        ({}, ExportFormat.PARQUET, 1),
        ({"ttls": (("61", 5),)}, ExportFormat.PARQUET, 3),
        ({"ttls": (("61", 5),)}, ExportFormat.JSONL, 2),
        ({"ttls": (("61", 5),), "indexes": (INDEX,)}, ExportFormat.PARQUET, 4),
        ({"indexes": (INDEX,)}, ExportFormat.JSONL, 5),
    ],
)
def test_an_export_has_the_format_that_its_contents_need(
    options: dict[str, Any], form: ExportFormat, number: int, tmp_path: Path
) -> None:
    part = ExportPart(file_of("t", 0, form), "", "")
    export = Export(7, (ExportedTable("t", 1, 0, 0, (), (part,), **options),), form)
    export_files.write_export(tmp_path / export_files.MANIFEST, export)
    assert export_files.read_record(tmp_path / export_files.MANIFEST)["format"] == number
    assert export_files.read_manifest(tmp_path) == export


def test_a_directory_is_used_by_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        export_files.locked(tmp_path, "exporting to"),
        pytest.raises(UsageError, match="another process is exporting to"),
        export_files.locked(tmp_path, "exporting to"),
    ):
        pass
    with export_files.locked(tmp_path, "exporting to"):
        pass


def test_a_record_of_endlessly_nested_lists_is_damaged_too(tmp_path: Path) -> None:
    (tmp_path / export_files.MANIFEST).write_text("[" * 100_000)
    with pytest.raises(DamagedExport, match=export_files.MANIFEST):
        export_files.read_manifest(tmp_path)
