"""The ledger: one oracle at a time, and never a guess in place of a lost mark."""

from __future__ import annotations

import asyncio
import errno
import random

import pytest

from percolator.errors import (
    InvariantViolation,
    NotReady,
    StoreFault,
    StoreUnusable,
    WrongCluster,
)
from percolator.services.oracle.oracle import Ledger
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles
from tests.unit.oracle.ledgers import STORE, open_ledger

ROLE = STORE / "coordinator" / "oracle"


async def another(files: MemoryFiles, *, cluster_id: str = "") -> Ledger:
    """The ledger of the next process, after the process of `files` was killed."""
    files.kill()
    return await open_ledger(MemoryFiles(files.disk), cluster_id=cluster_id)


async def test_a_mark_survives_a_power_cut() -> None:
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files)
    assert ledger.mark_milliseconds == 0
    await ledger.write(17)
    for chance in (None, *map(random.Random, range(10))):
        files.disk.cut_power(chance)
        after = await open_ledger(MemoryFiles(files.disk))
        assert after.mark_milliseconds == 17


async def test_the_former_oracle_can_neither_write_nor_answer_once_another_has_read() -> None:
    """It was only silent, not killed, and still holds its lock."""
    files = MemoryFiles(MemoryDisk())
    former = await open_ledger(files)
    await former.write(5)
    silent = asyncio.Event()
    files.before_fsync = silent.wait
    late = asyncio.ensure_future(former.write(6))
    await asyncio.sleep(0)
    successor = await open_ledger(MemoryFiles(files.disk))
    assert successor.mark_milliseconds == 5
    silent.set()
    with pytest.raises(NotReady):
        await late
    assert not await former.is_still_ours()
    assert await successor.is_still_ours()
    with pytest.raises(NotReady):
        await former.write(7)


async def test_a_missing_mark_is_not_taken_for_a_new_store() -> None:
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files)
    await ledger.write(1)
    await files.unlink(ROLE / "e1" / "mark")
    with pytest.raises(StoreUnusable, match=r"'mark' .* is missing") as refused:
        await another(files)
    assert refused.value.fault is StoreFault.DAMAGED


async def test_a_damaged_mark_is_refused_and_left_as_it_is() -> None:
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files)
    await ledger.write(1)
    async with await files.create(ROLE / "e1" / "mark", exclusive=False) as file:
        await file.append(b"percolator-oracle-mark 1\ncluster=\nmilliseconds=0\ncrc32=00000000\n")
    for _ in range(2):
        with pytest.raises(StoreUnusable, match="damaged"):
            await another(files)
        files = MemoryFiles(files.disk)


async def test_the_mark_of_another_cluster_is_refused() -> None:
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files, cluster_id="a")
    await ledger.write(1)
    with pytest.raises(WrongCluster, match="belongs to cluster a, not to b"):
        await another(files, cluster_id="b")


async def test_a_store_keeps_the_cluster_that_it_once_belonged_to() -> None:
    """A mark without a cluster is adopted by the first one; after that, another one is refused."""
    files = MemoryFiles(MemoryDisk())
    for cluster_id in ("", "a", ""):
        files = MemoryFiles(files.disk)
        ledger = await open_ledger(files, cluster_id=cluster_id)
        await ledger.write(1)
        files.kill()
    with pytest.raises(WrongCluster):
        await open_ledger(MemoryFiles(files.disk), cluster_id="b")


async def test_the_mark_never_goes_back() -> None:
    ledger = await open_ledger(MemoryFiles(MemoryDisk()))
    await ledger.write(2)
    with pytest.raises(InvariantViolation):
        await ledger.write(1)


async def test_a_write_costs_two_fsyncs() -> None:
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files)
    await ledger.write(1)
    before = files.fsyncs
    await ledger.write(2)
    assert files.fsyncs - before == 2


async def test_a_failed_write_leaves_the_old_mark_in_force() -> None:
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files)
    await ledger.write(1)
    files.faults.fail("append", number=errno.ENOSPC)
    with pytest.raises(StoreUnusable, match="No space left") as refused:
        await ledger.write(2)
    assert refused.value.fault is StoreFault.DISK_FULL
    assert ledger.mark_milliseconds == 1
    await ledger.write(3)
    assert (await another(files)).mark_milliseconds == 3


async def test_an_oracle_whose_directory_was_taken_away_notices() -> None:
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files)
    await ledger.write(1)
    assert await ledger.is_still_ours()
    await files.rename(ROLE / "e1", ROLE / "elsewhere")
    assert not await ledger.is_still_ours()
    await files.rename(ROLE / "elsewhere", ROLE / "e1")
    assert not await ledger.is_still_ours(), "once deposed, always"
