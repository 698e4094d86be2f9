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
    UsageError,
    WrongCluster,
)
from percolator.testing.virtual_time import run_virtually
from services.chassis.memory_disk import MemoryDisk
from services.chassis.memory_files import MemoryFiles, run_until_killed
from services.oracle.ledger import Ledger
from services.oracle.mark import Mark
from tests.unit.oracle.ledgers import STORE, open_ledger

ROLE = STORE / "coordinator" / "oracle"
FORMER = STORE / "oracle"


async def another(files: MemoryFiles, *, cluster_id: str = "") -> Ledger:
    """Of the next process, after the one of `files` was killed."""
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
    """It was only silent: nobody killed it, and its lock is its own."""
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
    assert not former.is_still_ours()
    assert successor.is_still_ours()
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
    """An oracle that served alone is adopted; one that belonged somewhere is not anybody's."""
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
    assert ledger.is_still_ours()
    await files.rename(ROLE / "e1", ROLE / "elsewhere")
    assert not ledger.is_still_ours()
    await files.rename(ROLE / "elsewhere", ROLE / "e1")
    assert not ledger.is_still_ours(), "once deposed, always"


# ------------------------------------------------------------- marks of releases before


async def former_store(content: bytes) -> MemoryFiles:
    """As an oracle of an older release left it."""
    files = MemoryFiles(MemoryDisk())
    files.disk.make_durable_directory(FORMER)
    for name, data in (("mark", content), ("lock", b"process 12 on host-a")):
        async with await files.create(FORMER / name) as file:
            await file.append(data)
            await file.fsync()
    await files.fsync_directory(FORMER)
    return files


async def test_the_mark_of_an_older_release_is_taken_over_and_that_one_never_starts_again() -> None:
    """It finds a name in its lock and no mark, and takes that for a loss."""
    files = await former_store(Mark(77, "c").encode())
    assert (await open_ledger(files, cluster_id="c")).mark_milliseconds == 77
    assert await files.list(FORMER) == ["lock", "mark.moved"]
    assert (await another(files, cluster_id="c")).mark_milliseconds == 77


def test_no_crash_while_a_former_mark_is_taken_over_loses_it() -> None:
    for seed in range(4):
        for call in range(50):
            assert run_virtually(_mark_after_a_crash(call, seed)) == 77, (call, seed)


async def _mark_after_a_crash(call: int, seed: int) -> int:
    """Before so many system calls; with a seed, the power fails too."""
    files = await former_store(Mark(77, "c").encode())
    files.faults.kill_at(files.faults.calls + call)
    await run_until_killed(files, open_ledger(files))
    files.kill()
    if seed:
        files.disk.cut_power(random.Random(seed))
    return (await open_ledger(MemoryFiles(files.disk))).mark_milliseconds


async def test_an_oracle_of_an_older_release_that_still_serves_is_in_the_way() -> None:
    files = await former_store(Mark(77, "c").encode())
    held = await MemoryFiles(files.disk).lock(FORMER / "lock")
    with pytest.raises(UsageError, match="older release"):
        await open_ledger(files)
    held.release()
    assert (await another(files)).mark_milliseconds == 77


async def test_a_former_mark_that_is_damaged_missing_or_anothers_is_refused() -> None:
    with pytest.raises(StoreUnusable, match="oracle/mark is damaged"):
        await open_ledger(await former_store(b"percolator-oracle-mark 1\n"))
    with pytest.raises(WrongCluster):
        await open_ledger(await former_store(Mark(77, "c").encode()), cluster_id="d")
    files = await former_store(b"")
    await files.unlink(FORMER / "mark")
    with pytest.raises(StoreUnusable, match=r"missing, though .* \(process 12 on host-a\)"):
        await open_ledger(files)
