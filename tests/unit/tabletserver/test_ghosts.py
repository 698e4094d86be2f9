"""Directories under a live name whose epoch was sealed: created by a deposed owner."""

from __future__ import annotations

from pathlib import Path

import pytest

from percolator.errors import StoreFault, StoreUnusable
from percolator.services.chassis.epoch_directory import Inheritance, remove_superseded, take_over
from percolator.services.chassis.files import DiskThreads, RealFiles
from percolator.services.tabletserver.storage import Ancestry, SharedDirectoryStore, clone_leveldb
from percolator.tablet.state import TabletIdentity
from tests.doubles.memory_files import MemoryDisk, MemoryFiles

TABLET = Path("/store/1/7")
CHILD = Path("/store/1/8")


async def write(files: MemoryFiles, path: Path) -> None:
    async with await files.create(path) as file:
        await file.append(path.name.encode())


async def haunted() -> MemoryFiles:
    """Owned at epoch 1 and sealed by a claimant that died; then `e1` was created again."""
    disk = MemoryDisk()
    for directory in (TABLET, CHILD):
        disk.make_durable_directory(directory)
    files = MemoryFiles(disk)
    owner = await take_over(files, TABLET, 1, clone_leveldb)
    for name in ("CURRENT", "000003.log"):
        await write(files, owner.path / name)
    await files.rename(TABLET / "e1", TABLET / "e1.sealed")
    await make_ghost(files)
    return files


async def make_ghost(files: MemoryFiles) -> None:
    await files.make_directory(TABLET / "e1")
    await write(files, TABLET / "e1" / "LOCK")


async def test_a_ghost_is_put_aside_and_what_was_sealed_is_inherited() -> None:
    files = await haunted()
    owner = await take_over(files, TABLET, 2, clone_leveldb)
    assert await files.list(owner.path) == ["000003.log", "CURRENT"]
    assert await files.list(TABLET) == ["e1.sealed", "e1.withdrawn", "e2"]
    await remove_superseded(files, TABLET, 2)
    assert await files.list(TABLET) == ["e1.sealed", "e2"]


async def test_a_second_ghost_is_put_aside_as_the_first_was() -> None:
    """The claimant that renamed the first ghost died before it removed it."""
    files = await haunted()
    await take_over(files, TABLET, 2, clone_leveldb)
    await make_ghost(files)
    owner = await take_over(files, TABLET, 3, clone_leveldb)
    assert await files.list(owner.path) == ["000003.log", "CURRENT"]


async def test_a_child_is_cloned_from_what_was_sealed_and_not_from_the_ghost() -> None:
    files = await haunted()
    inheritance = Inheritance(origin=TABLET / "e1")
    owner = await take_over(files, CHILD, 1, clone_leveldb, inheritance)
    assert await files.list(owner.path) == ["000003.log", "CURRENT"]


@pytest.mark.real_time
async def test_no_database_is_created_for_a_tablet_that_was_served_before(tmp_path: Path) -> None:
    """A sealed epoch that holds nothing: serving it as an empty tablet would hide the loss."""
    files = RealFiles()
    tablet = TabletIdentity(table_id=1, tablet_id=7, epoch=2, start=b"", end=b"")
    (tmp_path / "1" / "7" / "e1.sealed").mkdir(parents=True)
    with DiskThreads(1, "leveldb") as threads:
        store = SharedDirectoryStore(files, tmp_path, threads)
        owned = await store.take_over(tablet, Ancestry(must_exist=True))
        with pytest.raises(StoreUnusable, match="no CURRENT") as caught:
            await store.open(owned, open_tablets=1)
    assert caught.value.fault is StoreFault.DAMAGED
    files.close()


@pytest.mark.real_time
async def test_a_deposed_owner_leaves_no_directory_behind_when_it_opens(tmp_path: Path) -> None:
    files = RealFiles()
    tablet = TabletIdentity(table_id=1, tablet_id=7, epoch=1, start=b"", end=b"")
    directory = tmp_path / "1" / "7"
    with DiskThreads(1, "leveldb") as threads:
        store = SharedDirectoryStore(files, tmp_path, threads)
        owned = await store.take_over(tablet, Ancestry())
        listed = files.list

        async def sealed_just_then(path: Path) -> list[str]:
            names = await listed(path)
            (directory / "e1").rename(directory / "e1.sealed")
            return names

        files.list = sealed_just_then  # type: ignore[method-assign]
        with pytest.raises(StoreUnusable):
            await store.open(owned, open_tablets=1)
    assert [path.name for path in directory.iterdir()] == ["e1.sealed"]
    files.close()
