"""A claimant that comes too late is told which epoch it would have to be above."""

from __future__ import annotations

from pathlib import Path

import pytest

from percolator.errors import TabletMoved
from percolator.services.chassis.epoch_directory import EPOCH_MAX, take_over
from percolator.services.tabletserver.storage import clone_leveldb
from percolator.wire.status import from_detail, to_detail
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.unit.tabletserver.memory_store import Machine

TABLET = Path("/store/1/7")


async def refusal(epoch: int, *names: str) -> TabletMoved:
    """What a claimant at `epoch` is told where these directories are."""
    disk = MemoryDisk()
    disk.make_durable_directory(TABLET)
    files = MemoryFiles(disk)
    for name in names:
        await files.make_directory(TABLET / name)
    with pytest.raises(TabletMoved) as refused:
        await take_over(files, TABLET, epoch, clone_leveldb)
    return refused.value


@pytest.mark.parametrize("highest", ["e90", "e90.sealed", "e90.tmp", "e90.withdrawn"])
async def test_the_highest_epoch_in_the_store_is_told_and_reaches_the_master(highest: str) -> None:
    error = await refusal(3, "e2.sealed", "e5.sealed", highest, "e7")
    told = from_detail(to_detail(error))
    assert isinstance(told, TabletMoved)
    assert (told.epoch, told.highest_epoch) == (3, 90)


async def test_a_name_that_no_master_gave_out_is_not_told_as_an_epoch() -> None:
    assert (await refusal(3, f"e{EPOCH_MAX}")).highest_epoch == EPOCH_MAX
    assert (await refusal(3, f"e{EPOCH_MAX + 1}")).highest_epoch == 0


async def test_a_server_that_serves_a_higher_epoch_tells_it() -> None:
    machine = Machine()
    await machine.open(1, epoch=9)
    with pytest.raises(TabletMoved) as refused:
        await machine.open(1, epoch=3)
    assert refused.value.highest_epoch == 9
