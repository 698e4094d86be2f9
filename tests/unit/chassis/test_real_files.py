"""A mount that hangs delays only its own callers, not the event loop or other callers.

Threads that wait for the disk: results, errors, equal shares, and an orderly end.

What a machine offers, read from the texts that it gives.

Values of a leader whose caller does not wait for the end of the write.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from operator import floordiv
from pathlib import Path
from typing import Any

import pytest

from percolator.errors import StoreUnusable
from percolator.services.chassis import files
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.files import (
    DiskThreads,
    RealFiles,
    device_waits,
    file_system_of,
    file_system_type,
    is_network,
    waits,
)
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.patching import in_place_of
from tests.simulation.virtual_time import VirtualClock

pytestmark = pytest.mark.real_time

SLOW = "slow"


@asynccontextmanager
async def hanging(monkeypatch: pytest.MonkeyPatch, name: str) -> AsyncIterator[None]:
    """A system call hangs for paths named `slow`, for as long as this lasts."""
    gate = threading.Event()
    correct: Callable[..., Any] = getattr(os, name)

    @in_place_of(monkeypatch, os, name)
    def wrong(path: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(os.fsdecode(path)).name == SLOW:
            gate.wait(30)
        return correct(path, *args, **kwargs)

    try:
        yield
    finally:
        gate.set()


CALLS: dict[str, Callable[[RealFiles, Path], Any]] = {
    "mkdir": lambda files, path: files.make_directory(path),
    "rmdir": lambda files, path: files.remove_directory(path),
    "link": lambda files, path: files.link(path, path.with_name("other")),
    "unlink": lambda files, path: files.unlink(path),
    "stat": lambda files, path: files.stat(path),
    "listdir": lambda files, path: files.list(path),
    "open": lambda files, path: files.create(path),
    "statvfs": lambda files, path: files.free_bytes(path),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_that_hangs_stops_only_its_caller(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files, others = RealFiles("hanging"), RealFiles("others")
    async with hanging(monkeypatch, name):
        waiting = asyncio.ensure_future(CALLS[name](files, tmp_path / SLOW))
        # The loop keeps running, and so do callers with other threads.
        async with asyncio.timeout(10):
            await others.list(tmp_path)
            await others.stat(tmp_path)
        assert not waiting.done()
    await asyncio.gather(waiting, return_exceptions=True)
    files.close()
    others.close()


async def test_a_lock_whose_caller_left_is_free_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise a candidate that stopped waiting would keep all others from the role."""
    files = RealFiles()
    async with hanging(monkeypatch, "open"):
        waiting = asyncio.ensure_future(files.lock(tmp_path / SLOW))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    # In its order behind the one that was given up, and behind what gives it back.
    await files.list(tmp_path)
    await files.list(tmp_path)
    (await files.lock(tmp_path / SLOW)).release()
    files.close()


async def test_every_job_has_its_own_result_or_error() -> None:
    with DiskThreads(2, "test") as threads:
        results = await asyncio.gather(
            *(threads.run(partial(floordiv, 10, n)) for n in (5, 0, 2)), return_exceptions=True
        )
    assert results[0] == 2
    assert isinstance(results[1], ZeroDivisionError)
    assert results[2] == 5


async def test_what_one_round_asks_for_is_dealt_out_to_all_threads_in_order() -> None:
    done: dict[str, list[int]] = {}
    both = threading.Barrier(2)

    def job(number: int) -> None:
        name = threading.current_thread().name
        if name not in done:
            both.wait(10)
        done.setdefault(name, []).append(number)

    with DiskThreads(2, "test") as threads:
        await asyncio.gather(*(threads.run(partial(job, n)) for n in range(8)))
    assert sorted(done.values()) == [[0, 1, 2, 3], [4, 5, 6, 7]]


async def test_what_is_asked_for_while_all_are_busy_is_done_afterwards() -> None:
    gate = threading.Event()
    with DiskThreads(1, "test") as threads:
        first = threads.run(lambda: gate.wait(10))
        await asyncio.sleep(0)
        rest = [threads.run(partial(int, n)) for n in range(3)]
        await asyncio.sleep(0)
        assert not any(future.done() for future in rest)
        gate.set()
        assert await first
        assert await asyncio.gather(*rest) == [0, 1, 2]


async def test_a_cancelled_caller_does_not_harm_others() -> None:
    gate = threading.Event()
    with DiskThreads(1, "test") as threads:
        abandoned = threads.run(lambda: gate.wait(10))
        await asyncio.sleep(0)
        abandoned.cancel()
        gate.set()
        assert await threads.run(lambda: 7) == 7


async def test_closing_waits_for_what_was_given_out() -> None:
    finished = []
    with DiskThreads(1, "test") as threads:
        future = threads.run(lambda: finished.append(1))
        await asyncio.sleep(0)
    assert finished == [1]
    await future


async def test_a_stuck_call_holds_up_no_other_where_shares_are_single_calls() -> None:
    gate = threading.Event()
    with DiskThreads(2, "test", share_max=1) as threads:
        stuck = threads.run(lambda: gate.wait(10))
        assert await asyncio.gather(*(threads.run(partial(int, n)) for n in range(20)))
        assert not stuck.done()
        gate.set()
        assert await stuck


async def test_another_thread_takes_the_place_of_those_that_are_all_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "STUCK_SECONDS", 0.01)
    gate = threading.Event()
    with DiskThreads(1, "test", threads_max=3, share_max=1) as threads:
        stuck = [threads.run(lambda: gate.wait(10)) for _ in range(2)]
        assert await threads.run(lambda: 7) == 7
        gate.set()
        assert await asyncio.gather(*stuck) == [True, True]


async def test_a_stuck_thread_is_left_behind_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CLOSE_SECONDS", 0.01)
    gate = threading.Event()
    threads = DiskThreads(1, "test")
    stuck = threads.run(gate.wait)
    await asyncio.sleep(0)
    threads.close()
    assert not stuck.done()
    gate.set()
    assert await stuck


MOUNTS = r"""
overlay / overlay rw 0 0
/dev/sda1 /data ext4 rw 0 0
server:/export /data/shared nfs4 rw 0 0
/dev/sdb1 /data/shared/local xfs rw 0 0
server:/two /mnt/two\040words cifs rw 0 0
/dev/sdc1 /over ext4 rw 0 0
server:/over /over nfs rw 0 0
short line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "overlay"),
        ("/database", "overlay"),
        ("/data", "ext4"),
        ("/data/store", "ext4"),
        ("/data/shared", "nfs4"),
        ("/data/shared/store", "nfs4"),
        ("/data/shared/local/store", "xfs"),
        ("/mnt/two words/store", "cifs"),
        ("/over/store", "nfs"),
    ],
)
def test_the_innermost_and_last_mount_decides(path: str, kind: str) -> None:
    assert file_system_type(Path(path), MOUNTS) == kind


NETWORK_IN_USER_SPACE = {"fuse.ceph-fuse", "fuse.glusterfs", "fuse.sshfs", "fuse.unknown", "fuse"}
"""Their names are free, and new ones come: a list of those that lose writes is never whole."""
LOCAL = {"ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", ""}
LOCAL_IN_USER_SPACE = {"fuseblk", "fuse.fuse-overlayfs", "fuse.ntfs-3g"}


def test_the_ones_that_lose_writes_are_known_and_in_user_space_all_are_that_are_not_known() -> None:
    lose_writes = {"nfs", "nfs4", "cifs", "9p", "virtiofs"} | NETWORK_IN_USER_SPACE
    assert set(filter(is_network, lose_writes | LOCAL | LOCAL_IN_USER_SPACE)) == lose_writes


def test_a_path_that_is_not_there_yet_is_on_the_file_system_above_it(tmp_path: Path) -> None:
    assert file_system_of(tmp_path / "not" / "there") == file_system_of(tmp_path)


MOUNTINFO = """
22 27 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 27 8:17 / /data rw,relatime - xfs /dev/sdb1 rw
24 27 0:55 / /mnt rw,relatime - fuse.glusterfs server rw
25 27 0:56 / /cloud rw,relatime shared:7 master:2 - nfs4 server:/ rw
"""


@pytest.mark.parametrize(
    ("device", "may_wait"),
    [((8, 1), False), ((8, 17), False), ((0, 55), True), ((0, 56), True), ((9, 9), True)],
)
def test_only_of_known_local_devices_a_stat_needs_no_thread(
    device: tuple[int, int], may_wait: bool
) -> None:
    """Unknown devices, such as those that btrfs invents, may wait."""
    assert waits(os.makedev(*device), MOUNTINFO) is may_wait


def test_what_this_machine_mounts_is_looked_up(tmp_path: Path) -> None:
    assert isinstance(device_waits(tmp_path.stat().st_dev), bool)
    assert device_waits(os.makedev(4095, 4095))


STORE = Path("/store")


class SlowFiles(MemoryFiles):
    """Creating a file takes a second, and fails while the disk is full."""

    slow = False
    full = False

    async def create(self, path: Path, *, exclusive: bool = True) -> Any:
        if self.slow:
            await asyncio.sleep(1.0)
        if self.full:
            raise OSError(errno.ENOSPC, "disk full")
        return await super().create(path, exclusive=exclusive)


@pytest.mark.parametrize("full", [False, True])
async def test_a_write_whose_caller_leaves_is_not_torn_and_fails_silently(
    full: bool,
) -> None:
    """conftest.py refuses what the event loop would log."""
    disk = MemoryDisk()
    disk.make_durable_directory(STORE)
    files = SlowFiles(disk)
    coordinator = DirectoryCoordinator(files, VirtualClock(asyncio.get_running_loop()), STORE)
    leadership = await coordinator.campaign("baker", "a:1")
    await leadership.put("key", b"before")
    files.slow, files.full = True, full
    writing = asyncio.create_task(leadership.put("key", b"after"))
    await asyncio.sleep(0.5)
    writing.cancel()
    await asyncio.wait([writing])
    await asyncio.sleep(3.0)
    files.slow = files.full = False
    assert await leadership.get("key") == (b"before" if full else b"after")
    files.full = True
    with pytest.raises(StoreUnusable):
        await leadership.put("key", b"later")
    files.full = False
    await leadership.resign()
    await coordinator.close()
