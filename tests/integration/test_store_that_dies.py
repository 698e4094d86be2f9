"""A tablet server whose file system hangs, answers again, is shut down and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.tabletserver_client import puts, said, tablet_server
from tests.mounted_file_system import MAY_MOUNT, FileSystem

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not MAY_MOUNT, reason="needs root, loop devices and mkfs.ext4"),
]

TABLET = 7


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[FileSystem]:
    found = FileSystem(tmp_path)
    found.make()
    found.mount()
    yield found
    found.unmount_in_any_case()


async def test_it_waits_while_its_store_hangs_and_ends_when_the_store_is_gone(
    file_system: FileSystem, tmp_path: Path
) -> None:
    store = file_system.point / "store"
    async with tablet_server(tmp_path, store=store) as server:
        await server.open(TABLET, 1)
        await server.put(TABLET, 1, {b"before": b"1"})
        file_system.freeze()
        try:
            writing = asyncio.ensure_future(server.mutate(puts(TABLET, 1, {b"during": b"2"})))
            await said(server, "the store hangs")
            # The event loop goes on: what needs no disk is answered, and nothing is acknowledged.
            assert [one.tablet_id for one in await server.describe()] == [TABLET]
            assert await server.rows(TABLET, 1) == {b"before": b"1"}
            assert not writing.done()
        finally:
            file_system.thaw()
        await said(server, "the store answers again")
        await asyncio.gather(writing, return_exceptions=True)
        await server.put(TABLET, 1, {b"after": b"3"})
        file_system.shut_down()
        assert await asyncio.to_thread(server.process.wait_stopped) == 1
        await said(server, "the store is gone")
    file_system.unmount()
    file_system.mount()
    async with tablet_server(tmp_path, name="next", store=store) as server:
        await server.open(TABLET, 2)
        assert {b"before", b"after"} <= set(await server.rows(TABLET, 2))
