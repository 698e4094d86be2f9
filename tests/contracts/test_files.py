"""The file system of a simulation behaves like the real one, except after a crash."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest

from percolator.services.chassis.files import Files, RealFiles, replace_durably
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles

# The real ones wait for the disk in a thread, which virtual time knows nothing of.
pytestmark = pytest.mark.real_time


@pytest.fixture(params=["real", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Files]:
    if request.param == "real":
        found: Files = RealFiles()
    else:
        disk = MemoryDisk()
        disk.make_durable_directory(tmp_path)
        found = MemoryFiles(disk)
    yield found
    found.close()


async def write(files: Files, path: Path, data: bytes, *, exclusive: bool = True) -> None:
    async with await files.create(path, exclusive=exclusive) as file:
        await file.append(data)


async def read(files: Files, path: Path) -> bytes:
    return await files.read(path, bytes_max=1000)


async def failure(call: Awaitable[Any]) -> int | None:
    with pytest.raises(OSError) as caught:  # noqa: PT011  # its errno is what the tests compare
        await call
    return caught.value.errno


async def test_what_is_appended_is_read(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with await files.create(path) as file:
        await file.append(b"one")
        await file.fsync()
        await file.append(b"two")
    assert await read(files, path) == b"onetwo"
    assert (await files.stat(path)).size_bytes == 6


async def test_each_wait_for_the_disk_is_counted(files: Files, tmp_path: Path) -> None:
    await replace_durably(files, tmp_path / "mark", b"1")
    assert files.fsyncs == 2
    with pytest.raises(FileNotFoundError):
        await files.fsync_directory(tmp_path / "none")
    assert files.fsyncs == 3


async def test_reading_is_bounded(files: Files, tmp_path: Path) -> None:
    await write(files, tmp_path / "log", b"12345")
    assert await files.read(tmp_path / "log", bytes_max=5) == b"12345"
    assert await failure(files.read(tmp_path / "log", bytes_max=4)) == errno.EFBIG


async def test_exclusive_creation_has_one_winner(files: Files, tmp_path: Path) -> None:
    await write(files, tmp_path / "cluster.json", b"first")
    assert await failure(files.create(tmp_path / "cluster.json")) == errno.EEXIST
    assert await read(files, tmp_path / "cluster.json") == b"first"


async def test_creation_that_is_not_exclusive_empties_the_file(
    files: Files, tmp_path: Path
) -> None:
    await write(files, tmp_path / "a", b"long content")
    await write(files, tmp_path / "a", b"x", exclusive=False)
    assert await read(files, tmp_path / "a") == b"x"


async def test_a_directory_is_made_once(files: Files, tmp_path: Path) -> None:
    await files.make_directory(tmp_path / "e5")
    assert await failure(files.make_directory(tmp_path / "e5")) == errno.EEXIST
    assert (await files.stat(tmp_path / "e5")).is_directory
    assert await failure(files.make_directory(tmp_path / "none" / "e5")) == errno.ENOENT


async def test_a_directory_lists_its_names_in_order(files: Files, tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        await write(files, tmp_path / name, b"")
    await files.unlink(tmp_path / "a")
    await files.make_directory(tmp_path / "d")
    assert await files.list(tmp_path) == ["b", "c", "d"]


async def test_renaming_a_directory_keeps_its_identity(files: Files, tmp_path: Path) -> None:
    await files.make_directory(tmp_path / "e5")
    await write(files, tmp_path / "e5" / "log", b"content")
    before = await files.stat(tmp_path / "e5")
    await files.rename(tmp_path / "e5", tmp_path / "e5.sealed")
    after = await files.stat(tmp_path / "e5.sealed")
    assert (before.inode, before.device) == (after.inode, after.device)
    assert await read(files, tmp_path / "e5.sealed" / "log") == b"content"
    assert await failure(files.stat(tmp_path / "e5")) == errno.ENOENT


async def test_a_directory_made_again_under_a_name_is_another_one(
    files: Files, tmp_path: Path
) -> None:
    await files.make_directory(tmp_path / "e5")
    before = await files.stat(tmp_path / "e5")
    await files.rename(tmp_path / "e5", tmp_path / "e5.sealed")
    await files.make_directory(tmp_path / "e5")
    assert (await files.stat(tmp_path / "e5")).inode != before.inode


async def test_an_open_file_survives_the_renaming_of_its_directory(
    files: Files, tmp_path: Path
) -> None:
    await files.make_directory(tmp_path / "e5")
    async with await files.create(tmp_path / "e5" / "log") as file:
        await file.append(b"before ")
        await files.rename(tmp_path / "e5", tmp_path / "e5.sealed")
        await file.append(b"after")
    assert await read(files, tmp_path / "e5.sealed" / "log") == b"before after"


async def test_a_file_renamed_onto_another_replaces_it(files: Files, tmp_path: Path) -> None:
    await write(files, tmp_path / "new", b"new")
    await write(files, tmp_path / "old", b"old")
    await files.rename(tmp_path / "new", tmp_path / "old")
    assert await files.list(tmp_path) == ["old"]
    assert await read(files, tmp_path / "old") == b"new"


async def test_renaming_refuses_what_would_lose_something(files: Files, tmp_path: Path) -> None:
    await files.make_directory(tmp_path / "full")
    await write(files, tmp_path / "full" / "x", b"")
    await files.make_directory(tmp_path / "other")
    await write(files, tmp_path / "file", b"")
    full, other, file = tmp_path / "full", tmp_path / "other", tmp_path / "file"
    assert await failure(files.rename(other, full)) == errno.ENOTEMPTY
    assert await failure(files.rename(file, full)) == errno.EISDIR
    assert await failure(files.rename(other, file)) == errno.ENOTDIR
    assert await failure(files.rename(file, other / "file")) == errno.EXDEV
    assert await failure(files.rename(tmp_path / "none", file)) == errno.ENOENT
    await files.rename(full, other)
    assert await files.list(other) == ["x"]


async def test_a_linked_file_has_one_content_under_two_names(files: Files, tmp_path: Path) -> None:
    async with await files.create(tmp_path / "a") as file:
        await file.append(b"1")
        await files.link(tmp_path / "a", tmp_path / "b")
        await file.append(b"2")
    assert await read(files, tmp_path / "b") == b"12"
    await files.unlink(tmp_path / "b")
    assert await read(files, tmp_path / "a") == b"12"


async def test_a_link_replaces_nothing(files: Files, tmp_path: Path) -> None:
    await write(files, tmp_path / "a", b"1")
    await write(files, tmp_path / "b", b"2")
    await files.make_directory(tmp_path / "d")
    assert await failure(files.link(tmp_path / "a", tmp_path / "b")) == errno.EEXIST
    assert await failure(files.link(tmp_path / "d", tmp_path / "e")) == errno.EPERM
    assert await failure(files.link(tmp_path / "none", tmp_path / "e")) == errno.ENOENT


async def test_only_empty_directories_are_removed(files: Files, tmp_path: Path) -> None:
    await files.make_directory(tmp_path / "d")
    await write(files, tmp_path / "d" / "x", b"")
    assert await failure(files.remove_directory(tmp_path / "d")) == errno.ENOTEMPTY
    await files.unlink(tmp_path / "d" / "x")
    await files.remove_directory(tmp_path / "d")
    assert await failure(files.list(tmp_path / "d")) == errno.ENOENT


async def test_files_and_directories_are_not_mistaken(files: Files, tmp_path: Path) -> None:
    await files.make_directory(tmp_path / "d")
    await write(files, tmp_path / "f", b"")
    assert await failure(files.unlink(tmp_path / "d")) == errno.EISDIR
    assert await failure(files.remove_directory(tmp_path / "f")) == errno.ENOTDIR
    assert await failure(files.read(tmp_path / "d", bytes_max=1)) == errno.EISDIR
    assert await failure(files.list(tmp_path / "f")) == errno.ENOTDIR
    assert await failure(files.stat(tmp_path / "f" / "x")) == errno.ENOTDIR
    assert await failure(files.fsync_directory(tmp_path / "f")) == errno.ENOTDIR


async def test_what_is_not_there_is_not_found(files: Files, tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert await failure(files.unlink(none)) == errno.ENOENT
    assert await failure(files.stat(none)) == errno.ENOENT
    assert await failure(files.read(none, bytes_max=1)) == errno.ENOENT
    assert await failure(files.fsync_directory(none)) == errno.ENOENT
    assert await failure(files.create(none / "x")) == errno.ENOENT
    assert await failure(files.lock(none / "LOCK")) == errno.ENOENT


async def test_a_lock_has_one_holder_until_it_is_released(files: Files, tmp_path: Path) -> None:
    held = await files.lock(tmp_path / "LOCK")
    with pytest.raises(BlockingIOError):
        await files.lock(tmp_path / "LOCK")
    held.release()
    held.release()
    again = await files.lock(tmp_path / "LOCK")
    held.release()
    with pytest.raises(BlockingIOError):
        await files.lock(tmp_path / "LOCK")
    again.release()


async def test_reading_a_locked_file_keeps_the_lock(files: Files, tmp_path: Path) -> None:
    held = await files.lock(tmp_path / "LOCK")
    assert await read(files, tmp_path / "LOCK") == b""
    with pytest.raises(BlockingIOError):
        await files.lock(tmp_path / "LOCK")
    held.release()


async def test_a_file_is_replaced_as_a_whole(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "mark"
    await replace_durably(files, path, b"old and long")
    await replace_durably(files, path, b"new")
    assert await read(files, path) == b"new"
    assert await files.list(tmp_path) == ["mark"]


async def test_the_event_loop_goes_on_during_an_fsync(tmp_path: Path) -> None:
    """It matters only for the real files: another task runs while one waits for the disk."""
    files = RealFiles()
    ran = asyncio.Event()
    try:
        async with await files.create(tmp_path / "log") as file:
            await file.append(b"x")
            asyncio.get_running_loop().call_soon(ran.set)
            await file.fsync()
    finally:
        files.close()
    assert ran.is_set()
