"""What becomes of a part's file if something goes wrong while it is written."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, cast

import pytest

from percolator.aio.database import Database
from percolator.aio.pin import Pin
from percolator.backup import export_files, exporter, importer, part_files
from percolator.backup.export_files import Export, ExportedTable, ExportPart, file_of
from percolator.backup.part_files import CellsFile, Piece
from percolator.errors import InvalidArgument, UsageError
from percolator.routing.cells import CellPage

pytestmark = pytest.mark.real_time

AT = 5
PART = ExportPart("table/part-00000.parquet", "", "")
TABLE = ExportedTable("table", 1, 0, 0, (), (PART,))
CELLS = 2_000


def piece() -> Piece:
    made = Piece()
    rows = [b"%05d" % at for at in range(CELLS)]
    lists = rows, [b"c"] * CELLS, [1] * CELLS, [b"v" * 50] * CELLS
    made.add(CellPage(*lists, [], [], b"", b""))
    return made


class Exported(exporter._Exporter):
    """Exports one part of ten batches, without a database."""

    def __init__(self, directory: Path) -> None:
        nothing = cast("Any", None)
        super().__init__(
            cast("Database", nothing), directory, Export(1, ()), cast("Pin", nothing), print
        )
        self.scan_is_open = False

    async def _pieces(self, table: str, planned: ExportPart) -> AsyncGenerator[Piece, None]:
        self.scan_is_open = True
        try:
            for _ in range(10):
                yield piece()
        finally:
            self.scan_is_open = False


class HeldFile:
    """A file whose first write blocks until the test lets it continue."""

    def __init__(self) -> None:
        self.writing, self.go_on = threading.Event(), threading.Event()
        self.done: list[str] = []

    def write(self, _piece: object) -> None:
        self.writing.set()
        assert self.go_on.wait(30)
        self.done.append("written")

    def close(self) -> None:
        self.done.append("closed")


class FullDisk(io.RawIOBase):
    """Accepts some bytes, and then is full."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(28, "No space left on device")
        return len(data)


def full_after(room: int) -> Callable[..., CellsFile]:
    return lambda *_: CellsFile(cast("IO[bytes]", FullDisk(room)))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
async def test_a_disk_that_fills_up_at_any_point_is_reported_and_leaves_no_part(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = io.BytesIO()
    file = CellsFile(whole)
    for _ in range(10):
        file.write(piece())
    file.close()
    exported = Exported(tmp_path)
    monkeypatch.setattr(part_files, "create", full_after(int(len(whole.getvalue()) * share) - 1))
    threads = threading.active_count()
    with pytest.raises(InvalidArgument, match=r"part-00000.*cannot be written.*No space") as told:
        await exported._export(TABLE, PART)
    assert told.value.field == "directory"
    assert not (tmp_path / PART.file).exists()
    assert not exported.scan_is_open
    assert threading.active_count() == threads


async def test_a_table_whose_directory_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "table").write_text("a file")
    with pytest.raises(InvalidArgument, match="cannot be written"):
        await Exported(tmp_path)._export(TABLE, PART)


@pytest.mark.parametrize(
    "name",
    ["表" * 85, "." * 85, "n" * 255, "." * 255],
    ids=["signs", "dots", "letters", "most dots"],
)
async def test_a_table_of_the_longest_name_has_a_directory_of_its_own(
    name: str, tmp_path: Path
) -> None:
    """The master accepts names of 255 bytes, each of which may take three in a path."""
    file = file_of(name, 0)
    assert len({file, file_of(name[:-1] + "x", 0), file_of(name[:-1], 0)}) == 3
    part = ExportPart(file, "", "")
    assert export_files.read_part(tmp_path, part, AT) is None
    done = await Exported(tmp_path)._export(TABLE, part)
    export_files.write_part(tmp_path, done, AT)
    assert export_files.read_part(tmp_path, part, AT) == done
    table = replace(TABLE, name=name, parts=(done,))
    export_files.write_export(tmp_path / export_files.MANIFEST, Export(1, (table,)))
    assert export_files.read_manifest(tmp_path).parts == [done]


@pytest.mark.parametrize(
    "other", [{"start": "61"}, {"end": "7a"}, {"file": "t/part-00000.parquet"}]
)
async def test_the_record_of_another_part_does_not_say_that_this_one_is_done(
    other: dict[str, str], tmp_path: Path
) -> None:
    """As of another export, from which files were copied: its rows would be missing here."""
    done = await Exported(tmp_path)._export(TABLE, PART)
    record = (tmp_path / PART.file).with_suffix(".json")
    export_files.write_record(record, asdict(done) | other | {"at": AT})
    with pytest.raises(export_files.DamagedExport, match="is about another part"):
        export_files.read_part(tmp_path, PART, AT)


@pytest.mark.parametrize("other", [{"at": 6}, {}], ids=["another", "one of an earlier release"])
async def test_the_record_of_another_export_with_the_same_ranges_does_not_say_so_either(
    other: dict[str, int], tmp_path: Path
) -> None:
    done = await Exported(tmp_path)._export(TABLE, PART)
    export_files.write_record((tmp_path / PART.file).with_suffix(".json"), asdict(done) | other)
    with pytest.raises(export_files.DamagedExport, match="is not known to be of this export"):
        export_files.read_part(tmp_path, PART, AT)


def test_an_export_that_named_a_table_twice_is_resumed_by_the_same_command(tmp_path: Path) -> None:
    planned = Export(1, (TABLE,))
    export_files.write_export(tmp_path / export_files.PLAN, planned)
    assert exporter._interrupted(tmp_path, None, ["table", "table"], None) == planned
    with pytest.raises(InvalidArgument, match=r"tables: .* was started with table"):
        exporter._interrupted(tmp_path, None, ["table", "other"], None)


async def test_an_export_cancelled_twice_does_not_close_a_file_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the second cancellation, only the file's own thread still waits for it to be closed."""
    file = HeldFile()

    class Last(ThreadPoolExecutor):
        def __exit__(self, *raised: Any) -> None:
            assert file.done == []
            file.go_on.set()
            super().__exit__(*raised)

    monkeypatch.setattr(part_files, "create", lambda *_: file)
    monkeypatch.setattr(exporter, "ThreadPoolExecutor", Last)
    exported = Exported(tmp_path)
    export = asyncio.create_task(exported._export(TABLE, PART))
    assert await asyncio.to_thread(file.writing.wait, 30)
    for _ in range(2):
        export.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await export
    assert file.done == ["written", "closed"]
    assert not exported.scan_is_open
    assert not (tmp_path / PART.file).exists()


async def test_an_exception_while_a_batch_is_written_propagates_and_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(HeldFile):
        def write(self, _piece: object) -> None:
            raise ValueError("a bug")

    file = Wrong()
    monkeypatch.setattr(part_files, "create", lambda *_: file)
    exported = Exported(tmp_path)
    with pytest.raises(ValueError, match="a bug"):
        await exported._export(TABLE, PART)
    assert file.done == ["closed"]
    assert not exported.scan_is_open


async def test_two_exports_into_one_directory_cannot_run_at_the_same_time(tmp_path: Path) -> None:
    with (
        export_files.locked(tmp_path, "exporting to"),
        pytest.raises(UsageError, match="another process is exporting to"),
    ):
        await exporter.export(cast("Database", None), tmp_path)


async def test_a_directory_that_cannot_be_seen_is_named(tmp_path: Path) -> None:
    """As without permission, which does not stop the account that runs some tests."""
    unseen = tmp_path / ("x" * 300)
    with pytest.raises(InvalidArgument, match=r"cannot be read: .*File name too long"):
        await exporter.export(cast("Database", None), unseen)
    with pytest.raises(InvalidArgument, match=r"cannot be read: .*File name too long"):
        importer.verify(unseen)


async def test_a_slow_disk_stops_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the pin would not be renewed while a large file is made durable, and would be lost."""
    loop_thread, correct = threading.get_ident(), os.fsync
    synced: list[bool] = []

    def fsync(descriptor: int) -> None:
        synced.append(threading.get_ident() == loop_thread)
        correct(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    await Exported(tmp_path)._export(TABLE, PART)
    assert len(synced) > 1
    assert not any(synced)
