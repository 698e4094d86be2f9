"""What LevelDB's own repair leaves in a tablet's directory does not stay there forever."""

from __future__ import annotations

from pathlib import Path

from percolator.services.chassis.epoch_directory import remove_superseded, take_over
from percolator.services.tabletserver.storage import clone_leveldb
from tests.doubles.memory_files import MemoryDisk, MemoryFiles

TABLET = Path("/store/1/7")


async def add(files: MemoryFiles, path: Path) -> None:
    async with await files.create(path) as file:
        await file.append(b"content")


async def test_a_repaired_epoch_is_removed_as_any_other() -> None:
    """A repair moves what it has replaced into `lost`. Later epochs would have stayed, too."""
    disk = MemoryDisk()
    disk.make_durable_directory(TABLET)
    files = MemoryFiles(disk)
    damaged = (await take_over(files, TABLET, 1, clone_leveldb)).path
    disk.make_durable_directory(damaged / "lost")
    for name in ("CURRENT", "MANIFEST-000001", "000004.ldb", "lost/000003.log"):
        await add(files, damaged / name)
    for epoch in (2, 3, 4):
        await take_over(files, TABLET, epoch, clone_leveldb)
    assert await files.list(TABLET / "e4") == ["000004.ldb", "CURRENT", "MANIFEST-000001"]
    await remove_superseded(files, TABLET, 4)
    assert await files.list(TABLET) == ["e3.sealed", "e4"]
