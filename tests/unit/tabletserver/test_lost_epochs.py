"""A tablet whose newest epoch was deleted, or is missing in a restored copy, is not served."""

from __future__ import annotations

from pathlib import Path

import pytest

from percolator.errors import StoreFault, StoreUnusable
from percolator.services.chassis.epoch_directory import take_over
from percolator.services.chassis.files import DiskThreads
from percolator.services.tabletserver.storage import Ancestry, SharedDirectoryStore, clone_leveldb
from percolator.tablet.state import TabletIdentity
from tests.doubles.memory_files import MemoryDisk, MemoryFiles

ROOT = Path("/store")
TABLET = ROOT / "1" / "7"


async def served_at_2() -> MemoryFiles:
    """Owned at epoch 1, and then at epoch 2, which acknowledged more."""
    disk = MemoryDisk()
    disk.make_durable_directory(TABLET)
    files = MemoryFiles(disk)
    await take_over(files, TABLET, 1, clone_leveldb)
    await add(files, "CURRENT")
    await take_over(files, TABLET, 2, clone_leveldb)
    await add(files, "000003.log")
    return files


async def add(files: MemoryFiles, name: str) -> None:
    live = max(one for one in await files.list(TABLET) if one in ("e1", "e2"))
    async with await files.create(TABLET / live / name) as file:
        await file.append(b"content")


async def owned(files: MemoryFiles, epoch: int, served_epoch: int) -> list[str]:
    """What the owner at `epoch` serves."""
    store = SharedDirectoryStore(files, ROOT, DiskThreads(0, "none"))
    tablet = TabletIdentity(table_id=1, tablet_id=7, epoch=epoch, start=b"", end=b"")
    ancestry = Ancestry(must_exist=True, served_epoch=served_epoch)
    return await files.list((await store.take_over(tablet, ancestry)).path)


@pytest.mark.parametrize("epoch", [2, 3], ids=["the owner that lost it", "the next owner"])
async def test_a_tablet_never_goes_back_to_an_epoch_before_the_last_one_that_was_served(
    epoch: int,
) -> None:
    files = await served_at_2()
    await files.rename(TABLET / "e2", TABLET / "elsewhere")
    with pytest.raises(StoreUnusable, match=r"e2 was in use, but .* e1\.sealed lacks") as e:
        await owned(files, epoch, served_epoch=2)
    assert e.value.fault is StoreFault.DAMAGED
    assert await files.list(TABLET) == ["e1.sealed", "elsewhere"], "nothing was changed"
    await files.rename(TABLET / "elsewhere", TABLET / "e2")
    assert await owned(files, 3, served_epoch=2) == ["000003.log", "CURRENT"]


async def test_without_any_epoch_it_is_refused_too() -> None:
    files = await served_at_2()
    for name in await files.list(TABLET):
        await files.rename(TABLET / name, TABLET / f"lost-{name}")
    with pytest.raises(StoreUnusable, match=r"e2 was in use, but .* none is left"):
        await owned(files, 3, served_epoch=2)


async def test_who_gives_the_last_epoch_up_gives_its_name_to_the_one_before() -> None:
    """docs/formats.md tells operators to do this."""
    files = await served_at_2()
    await files.rename(TABLET / "e2", TABLET / "elsewhere")
    await files.rename(TABLET / "e1.sealed", TABLET / "e2.sealed")
    assert await owned(files, 3, served_epoch=2) == ["CURRENT"]


@pytest.mark.parametrize("served_epoch", [0, 1, 2])
async def test_epochs_that_were_used_and_never_served_are_not_missed(served_epoch: int) -> None:
    files = await served_at_2()
    for withdrawn in ("e3.tmp", "e4.withdrawn"):
        await files.make_directory(TABLET / withdrawn)
    assert await owned(files, 5, served_epoch) == ["000003.log", "CURRENT"]
