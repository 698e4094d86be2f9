"""A tablet server on a file system in user space whose program stalls, dies and is started again.

Such file systems are refused as network ones, unless the settings permit them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path

import pytest

from percolator.services.chassis.store_watch import PROBE
from percolator.services.local.process import LocalClusterError
from tests.integration.tabletserver_client import puts, said, tablet_server

MAY_MOUNT = os.geteuid() == 0 and os.path.exists("/dev/fuse") and find_library("fuse3")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not MAY_MOUNT, reason="needs root, /dev/fuse and libfuse 3"),
]

SECONDS = 20.0
TABLET = 7
PERMITTED = "--store-unsafe"


class FileSystem:
    """A directory, shown at another place by a process of its own."""

    def __init__(self, directory: Path) -> None:
        self.point = directory / "mounted"
        self.point.mkdir()
        self._source = directory / "source"
        self._source.mkdir()
        self._program: subprocess.Popen[bytes] | None = None

    def mount(self) -> None:
        self._program = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.integration.passthrough"),
                *(str(self._source), str(self.point)),
            ]
        )
        deadline = time.monotonic() + SECONDS
        while not self.point.is_mount():
            assert self._program.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        assert self._program is not None
        self._program.send_signal(number)

    def die(self) -> None:
        assert self._program is not None
        self._program.kill()
        self._program.wait(SECONDS)

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.point)], check=True, capture_output=True)


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[FileSystem]:
    found = FileSystem(tmp_path)
    found.mount()
    yield found
    # However far the test came.
    found.die()
    subprocess.run(["umount", "-l", str(found.point)], check=False, capture_output=True)


async def test_it_waits_while_its_store_stalls_and_ends_when_its_program_dies(
    file_system: FileSystem, tmp_path: Path
) -> None:
    store = file_system.point / "store"
    async with tablet_server(tmp_path, PERMITTED, store=store) as server:
        await server.open(TABLET, 1)
        await server.put(TABLET, 1, {b"before": b"1"})
        file_system.signal(signal.SIGSTOP)
        try:
            writing = asyncio.ensure_future(server.mutate(puts(TABLET, 1, {b"during": b"2"})))
            reading = asyncio.ensure_future(server.read(TABLET, 1, b"before"))
            await said(server, "the store hangs")
            assert "the store hangs" in (await server.report()).writes_refused.message
            # The event loop goes on. Nothing is answered whose owner cannot be looked up.
            assert [one.tablet_id for one in await server.describe()] == [TABLET]
            assert not writing.done()
            assert not reading.done()
        finally:
            file_system.signal(signal.SIGCONT)
        await said(server, "the store answers again")
        await asyncio.gather(writing, reading, return_exceptions=True)
        await server.put(TABLET, 1, {b"after": b"3"})
        assert not (await server.report()).HasField("writes_refused")
        file_system.die()
        assert await asyncio.to_thread(server.process.wait_stopped) == 1
        await said(server, "the store is gone")
    file_system.unmount()
    file_system.mount()
    async with tablet_server(tmp_path, PERMITTED, name="next", store=store) as server:
        await server.open(TABLET, 2)
        assert {b"before", b"after"} <= set(await server.rows(TABLET, 2))


async def test_it_ends_when_its_store_is_unmounted_though_its_files_are_still_open(
    file_system: FileSystem, tmp_path: Path
) -> None:
    store = file_system.point / "store"
    async with tablet_server(tmp_path, PERMITTED, store=store) as server:
        await server.open(TABLET, 1)
        await server.put(TABLET, 1, {b"before": b"1"})
        file_system.unmount()
        assert await asyncio.to_thread(server.process.wait_stopped) == 1
        await said(server, "the store is gone")
    assert not list(file_system.point.iterdir())


async def test_a_store_that_is_itself_a_mount_point_is_gone_when_it_is_unmounted(
    file_system: FileSystem, tmp_path: Path
) -> None:
    """The directory below the mount point is there all the same."""
    async with tablet_server(tmp_path, PERMITTED, store=file_system.point) as server:
        file_system.unmount()
        assert await asyncio.to_thread(server.process.wait_stopped) == 1
        await said(server, "the store is gone")
    # A check that was under way may have found the store, and write its probe a moment later.
    assert {one.name for one in file_system.point.iterdir()} <= {PROBE}


async def test_it_is_refused_unless_the_settings_permit_it(
    file_system: FileSystem, tmp_path: Path
) -> None:
    with pytest.raises(LocalClusterError, match=r"network file system \(fuse\.passthrough\)"):
        async with tablet_server(tmp_path, store=file_system.point / "store"):
            pass
