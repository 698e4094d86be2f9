"""Files in memory after a power cut, a kill, and with a failing disk."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from percolator.services.chassis.files import replace_durably
from tests.doubles.memory_files import MemoryDisk, MemoryFiles, run_until_killed

STORE = Path("/store")


def new_disk() -> tuple[MemoryDisk, MemoryFiles]:
    """An empty disk, and the first process that uses it."""
    disk = MemoryDisk()
    disk.make_durable_directory(STORE)
    return disk, MemoryFiles(disk)


async def write(files: MemoryFiles, name: str, data: bytes, *, fsync: bool) -> None:
    async with await files.create(STORE / name) as file:
        await file.append(data)
        if fsync:
            await file.fsync()


async def write_durably(files: MemoryFiles, name: str, data: bytes) -> None:
    await write(files, name, data, fsync=True)
    await files.fsync_directory(STORE)


async def after_power_cut(
    disk: MemoryDisk, chance: random.Random | None = None
) -> dict[str, bytes]:
    """Files that a process finds which starts after a power cut."""
    disk.cut_power(chance)
    files = MemoryFiles(disk)
    return {name: await files.read(STORE / name, bytes_max=100) for name in await files.list(STORE)}


async def test_a_name_that_was_not_fsynced_is_lost_with_its_content() -> None:
    disk, files = new_disk()
    await write(files, "log", b"data", fsync=True)
    assert await after_power_cut(disk) == {}


async def test_a_content_that_was_not_fsynced_is_lost_under_its_name() -> None:
    disk, files = new_disk()
    await write(files, "log", b"data", fsync=False)
    await files.fsync_directory(STORE)
    assert await after_power_cut(disk) == {"log": b""}


async def test_what_was_made_durable_stays() -> None:
    disk, files = new_disk()
    await write_durably(files, "log", b"data")
    assert await after_power_cut(disk) == {"log": b"data"}
    assert await after_power_cut(disk) == {"log": b"data"}


async def test_a_removal_that_was_not_fsynced_is_undone() -> None:
    disk, files = new_disk()
    await write_durably(files, "log", b"data")
    await files.unlink(STORE / "log")
    assert await after_power_cut(disk) == {"log": b"data"}


async def test_a_renaming_is_lost_or_kept_as_a_whole() -> None:
    seen = set()
    for seed in range(30):
        disk, files = new_disk()
        await write_durably(files, "old", b"data")
        await files.rename(STORE / "old", STORE / "new")
        seen.add(tuple(await after_power_cut(disk, random.Random(seed))))
    assert seen == {("old",), ("new",)}


async def test_an_append_is_torn_anywhere_but_keeps_what_was_durable() -> None:
    seen = set()
    for seed in range(300):
        disk, files = new_disk()
        async with await files.create(STORE / "log") as file:
            await file.append(b"sure")
            await file.fsync()
            await files.fsync_directory(STORE)
            await file.append(b"new")
        seen.add((await after_power_cut(disk, random.Random(seed)))["log"])
    assert {b"sure", b"suren", b"surene", b"surenew"} <= seen
    assert b"surene\x00" in seen, "the size may be there before the data"
    assert all(content.startswith(b"sure") for content in seen)


async def test_the_names_of_one_directory_survive_in_the_order_they_were_made() -> None:
    seen = set()
    for seed in range(100):
        disk, files = new_disk()
        for name in ("1", "2", "3"):
            await write(files, name, b"", fsync=True)
        seen.add(tuple(await after_power_cut(disk, random.Random(seed))))
    assert seen == {(), ("1",), ("1", "2"), ("1", "2", "3")}


async def test_the_same_seed_loses_the_same() -> None:
    results = []
    for _ in range(2):
        disk, files = new_disk()
        for number in range(10):
            await write(files, f"{number}", b"x" * number, fsync=number % 2 == 0)
        results.append(await after_power_cut(disk, random.Random(1)))
    assert results[0] == results[1]


async def test_after_a_failed_fsync_a_later_one_saves_nothing() -> None:
    disk, files = new_disk()
    async with await files.create(STORE / "log") as file:
        await files.fsync_directory(STORE)
        await file.append(b"data")
        files.faults.fail("fsync")
        with pytest.raises(OSError, match="Input/output error"):
            await file.fsync()
        await file.fsync()
    assert await files.read(STORE / "log", bytes_max=10) == b"data"
    assert await after_power_cut(disk) == {"log": b""}


async def test_a_full_disk_takes_a_part() -> None:
    _, files = new_disk()
    files.faults.fail("append", nth=2, times=2, number=errno.ENOSPC)
    async with await files.create(STORE / "log") as file:
        await file.append(b"1234")
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                await file.append(b"5678")
        await file.append(b".")
    assert await files.read(STORE / "log", bytes_max=10) == b"12345656."


async def test_a_killed_process_does_nothing_more_and_its_lock_is_free() -> None:
    disk, files = new_disk()
    await files.lock(STORE / "LOCK")
    with pytest.raises(BlockingIOError):
        await MemoryFiles(disk).lock(STORE / "LOCK")
    files.kill()
    await run_until_killed(files, files.make_directory(STORE / "e1"))
    assert files.killed.is_set()
    next_process = MemoryFiles(disk)
    await next_process.lock(STORE / "LOCK")
    assert await next_process.list(STORE) == ["LOCK"]


async def test_a_process_of_before_the_power_cut_is_dead() -> None:
    disk, files = new_disk()
    disk.cut_power()
    await run_until_killed(files, files.make_directory(STORE / "e1"))
    assert files.killed.is_set()
    assert await MemoryFiles(disk).list(STORE) == []


async def test_a_kill_loses_nothing_that_was_written() -> None:
    disk, files = new_disk()
    await write(files, "log", b"data", fsync=False)
    files.kill()
    assert await MemoryFiles(disk).read(STORE / "log", bytes_max=10) == b"data"


@pytest.mark.parametrize("seed", range(20))
async def test_replacing_a_file_leaves_the_old_or_the_new_whatever_call_it_dies_at(
    seed: int,
) -> None:
    """Killed before each of its system calls in turn, and then the power fails."""
    calls = 0
    outcomes = set()
    while True:
        disk, before = new_disk()
        await replace_durably(before, STORE / "mark", b"old")
        files = MemoryFiles(disk)
        files.faults.kill_at(calls)
        await run_until_killed(files, replace_durably(files, STORE / "mark", b"new"))
        finished = not files.killed.is_set()
        found = (await after_power_cut(disk, random.Random(seed)))["mark"]
        assert found in ({b"new"} if finished else {b"old", b"new"})
        outcomes.add(found)
        if finished:
            break
        calls += 1
    assert calls == 5, "create, append, fsync, rename, fsync_directory"
    assert outcomes == {b"old", b"new"}


async def test_without_the_fsync_of_the_content_replacing_would_lose_both() -> None:
    """The test above can fail: this is the mistake that it has to find."""
    seen = set()
    for seed in range(50):
        disk, files = new_disk()
        await replace_durably(files, STORE / "mark", b"old")
        await write(files, "mark.new", b"new", fsync=False)
        await files.rename(STORE / "mark.new", STORE / "mark")
        await files.fsync_directory(STORE)
        seen.add((await after_power_cut(disk, random.Random(seed)))["mark"])
    assert b"" in seen


async def test_a_file_that_was_overwritten_is_the_old_one_or_a_part_of_the_new() -> None:
    seen = set()
    for seed in range(200):
        disk, files = new_disk()
        await write_durably(files, "mark", b"old")
        async with await files.create(STORE / "mark", exclusive=False) as file:
            await file.append(b"new")
        seen.add((await after_power_cut(disk, random.Random(seed)))["mark"])
    assert {b"old", b"", b"n", b"ne", b"new"} <= seen
