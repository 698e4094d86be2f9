"""The ledger: one oracle at a time, and never a guess in place of a lost mark."""

from __future__ import annotations

import asyncio
import errno
import random
from pathlib import Path

import pytest

from percolator.errors import InvariantViolation, StoreUnusable, UsageError, WrongCluster
from services.chassis.memory_disk import MemoryDisk
from services.chassis.memory_files import MemoryFiles
from services.oracle.ledger import Ledger

STORE = Path("/store")


async def open_ledger(files: MemoryFiles, *, cluster_id: str = "", holder: str = "me") -> Ledger:
    return await Ledger.open(files, STORE, holder=holder, cluster_id=cluster_id)


async def test_a_mark_survives_a_power_cut() -> None:
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files)
    assert ledger.mark_milliseconds == 0
    await ledger.write(17)
    for chance in (None, *map(random.Random, range(10))):
        files.disk.cut_power(chance)
        after = await open_ledger(MemoryFiles(files.disk))
        assert after.mark_milliseconds == 17


async def test_a_second_oracle_is_refused_and_told_who_is_there() -> None:
    files = MemoryFiles(MemoryDisk())
    first = await open_ledger(files, holder="process 12 on host-a")
    with pytest.raises(UsageError, match="another oracle, which is just starting"):
        await open_ledger(files)
    await first.write(1)
    with pytest.raises(UsageError, match=r"/store/oracle is in use .* process 12 on host-a"):
        await open_ledger(files)
    await first.close()
    second = await open_ledger(files, holder="process 13 on host-a")
    with pytest.raises(UsageError, match="process 13"):
        await open_ledger(files)
    assert second.mark_milliseconds == 1


async def test_a_missing_mark_is_not_taken_for_a_new_store() -> None:
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files)
    await ledger.write(1)
    await ledger.close()
    await files.unlink(STORE / "oracle" / "mark")
    with pytest.raises(StoreUnusable, match="mark is missing"):
        await open_ledger(files)


async def test_a_damaged_mark_is_refused_and_left_as_it_is() -> None:
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files)
    await ledger.write(1)
    await ledger.close()
    async with await files.create(STORE / "oracle" / "mark", exclusive=False) as file:
        await file.append(b"percolator-oracle-mark 1\ncluster=\nmilliseconds=0\ncrc32=00000000\n")
    for _ in range(2):
        with pytest.raises(StoreUnusable, match="damaged"):
            await open_ledger(files)


async def test_the_mark_of_another_cluster_is_refused() -> None:
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files, cluster_id="a")
    await ledger.write(1)
    await ledger.close()
    with pytest.raises(WrongCluster, match="belongs to cluster a, not to b"):
        await open_ledger(files, cluster_id="b")


async def test_a_store_keeps_the_cluster_that_it_once_belonged_to() -> None:
    """An oracle that served alone is adopted; one that belonged somewhere is not anybody's."""
    files = MemoryFiles(MemoryDisk())
    for cluster_id in ("", "a", ""):
        ledger = await open_ledger(files, cluster_id=cluster_id)
        await ledger.write(1)
        await ledger.close()
    with pytest.raises(WrongCluster):
        await open_ledger(files, cluster_id="b")


async def test_the_mark_never_goes_back() -> None:
    ledger = await open_ledger(MemoryFiles(MemoryDisk()))
    await ledger.write(2)
    with pytest.raises(InvariantViolation):
        await ledger.write(1)


async def test_a_write_costs_two_fsyncs_as_the_metrics_say() -> None:
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files)
    await ledger.write(1)
    before = ledger.fsyncs
    await ledger.write(2)
    assert ledger.fsyncs - before == 2
    made = [call for call in files.faults.operations if call.startswith("fsync")]
    assert len(made) == ledger.fsyncs
    files.faults.fail("fsync", number=errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        await ledger.write(3)
    assert ledger.fsyncs - before == 3, "one that fails is waited for, too"


async def test_a_failed_write_leaves_the_old_mark_in_force() -> None:
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files)
    await ledger.write(1)
    files.faults.fail("append", number=errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        await ledger.write(2)
    assert ledger.mark_milliseconds == 1
    await ledger.write(3)
    await ledger.close()
    assert (await open_ledger(files)).mark_milliseconds == 3


async def test_the_next_oracle_is_let_in_only_after_a_write_on_its_way_has_ended() -> None:
    """Else the old one's rename could put a lower mark in the place of the new one's."""
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files)
    await ledger.write(1)
    files.before_fsync = lambda: asyncio.sleep(5.0)
    writing = asyncio.ensure_future(ledger.write(2))
    await asyncio.sleep(1)
    writing.cancel()
    closing = asyncio.ensure_future(ledger.close())
    await asyncio.sleep(1)
    with pytest.raises(UsageError):
        await open_ledger(files)
    await closing
    assert (await open_ledger(files)).mark_milliseconds == 2


async def test_an_oracle_whose_directory_was_taken_away_notices() -> None:
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files)
    await ledger.write(1)
    assert ledger.is_still_ours()
    await files.unlink(STORE / "oracle" / "lock")
    assert not ledger.is_still_ours()
    await open_ledger(files)
    assert not ledger.is_still_ours()


async def test_a_store_that_cannot_be_looked_at_is_not_known_to_be_ours() -> None:
    files = MemoryFiles(MemoryDisk())
    ledger = await open_ledger(files)
    await ledger.write(1)
    files.faults.fail("stat", number=errno.EIO)
    assert not ledger.is_still_ours()
    assert ledger.is_still_ours()
