"""The files of an export have pieces of bounded size, and any other file is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from percolator.aio.bulk_load import LoadedCell
from percolator.backup import export_files, part_files
from percolator.backup.export_files import (
    DamagedExport,
    Export,
    ExportedTable,
    ExportFormat,
    ExportPart,
    file_of,
)
from percolator.backup.part_files import CellsFile, Piece
from percolator.errors import InvalidArgument, UsageError
from percolator.routing.cells import CellPage

PART = ExportPart("t/part-00000.parquet", "", "")


def page(*cells: tuple[bytes, bytes, bytes]) -> CellPage:
    rows, columns, values = map(list, zip(*cells, strict=True))
    return CellPage(rows, columns, [1] * len(cells), values, [], [], b"", b"")


def written(directory: Path, *pages: CellPage) -> ExportPart:
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
    monkeypatch.setattr(part_files, "PIECE_BYTES", 100_000)
    # All values are equal: a dictionary of them would be small, but what is read would not.
    pages = [page((b"%03d" % row, b"c", b"v" * 30_000)) for row in range(20)]
    part = written(tmp_path, *pages)
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
    part = written(tmp_path, page((b"a", b"c", b"v" * 5_000)), page((b"b", b"c", b"")))
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
    part = written(tmp_path, *[page(cell) for cell in cells])
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
    part = written(tmp_path, page(*cells))
    clipped = ExportPart(part.file, "", b"m".hex(), part.cells)
    with pytest.raises(DamagedExport, match=wrong):
        list(_read(tmp_path, clipped))


def test_a_file_that_has_other_columns_or_ends_early_is_refused(tmp_path: Path) -> None:
    part = written(tmp_path, page((b"a", b"c", b"")))
    path = tmp_path / part.file
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DamagedExport, match="cannot be read"):
        list(_read(tmp_path, part))
    pq.write_table(pa.table({"row": [1]}), path)
    with pytest.raises(DamagedExport, match="other columns"):
        list(_read(tmp_path, part))
    path.unlink()
    with pytest.raises(DamagedExport, match="is missing"):
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
    for other in (4, True, "1", None):
        export_files.write_record(path, content | {"format": other})
        with pytest.raises(InvalidArgument, match=f"is of format {other}; this release reads 1"):
            export_files.read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("ttls", "form", "number"),
    [
        ((), ExportFormat.PARQUET, 1),
        ((("61", 5),), ExportFormat.PARQUET, 3),
        ((("61", 5),), ExportFormat.JSONL, 2),
    ],
)
def test_what_an_earlier_release_cannot_import_is_named_by_its_format_and_is_not_damaged(
    ttls: tuple[tuple[str, int], ...], form: ExportFormat, number: int, tmp_path: Path
) -> None:
    part = ExportPart(file_of("t", 0, form), "", "")
    export = Export(7, (ExportedTable("t", 1, 0, 0, (), (part,), ttls=ttls),), form)
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
