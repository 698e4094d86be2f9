"""`kill -9` under load, torn logs, damage: no acknowledged write is lost, the rest is served."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from percolator.errors import PercolatorError, StoreFault, StoreUnusable
from tests.integration.tabletserver_client import TabletServer, acknowledged, puts, tablet_server

pytestmark = pytest.mark.integration

TABLET = 7
KILLS = 3
LOAD_SECONDS = 0.4
WRITERS = 4
ROWS_PER_BATCH = 20


class Load:
    """Writers that never stop, and record what was acknowledged."""

    def __init__(self) -> None:
        self.sent: dict[bytes, bytes] = {}
        self.acknowledged: dict[bytes, bytes] = {}
        self._numbers = itertools.count()

    async def run(self, server: TabletServer, epoch: int) -> None:
        await asyncio.gather(*(self._write(server, epoch) for _ in range(WRITERS)))

    async def _write(self, server: TabletServer, epoch: int) -> None:
        while True:
            numbers = list(itertools.islice(self._numbers, ROWS_PER_BATCH))
            rows = {b"%08d" % (n * 7919 % 100_000_000): b"value %d" % n for n in numbers}
            self.sent |= rows
            try:
                (result,) = await server.mutate(puts(TABLET, epoch, rows))
            except PercolatorError:
                return
            assert acknowledged(result) == len(rows)
            self.acknowledged |= rows


async def test_every_acknowledged_write_survives_kill_9(tmp_path: Path) -> None:
    load = Load()
    async with tablet_server(tmp_path) as server:
        for epoch in range(1, 2 * KILLS, 2):
            await server.open(TABLET, epoch)
            before = len(load.acknowledged)
            running = asyncio.create_task(load.run(server, epoch))
            await asyncio.sleep(LOAD_SECONDS)
            server.kill()
            await running
            assert len(load.acknowledged) > before, "the load did nothing before the kill"
            await server.start()
            await server.open(TABLET, epoch + 1)
            found = await server.rows(TABLET, epoch + 1)
            assert load.acknowledged.items() <= found.items() <= load.sent.items()


def newest_log(store: Path, tablet: int) -> Path:
    return max((store / "3" / str(tablet) / "e1").glob("*.log"))


async def test_a_log_torn_behind_what_was_acknowledged_opens_with_all_of_it(
    tmp_path: Path,
) -> None:
    """The torn batch is lost as a whole: no part of it is ever visible, wherever it was torn."""
    early = {b"early %d" % n: b"x" * 50 for n in range(30)}
    late = {b"late %d" % n: b"y" * 50 for n in range(30)}
    torn = (1, 2, 3)
    async with tablet_server(tmp_path) as server:
        complete = {}
        for tablet in torn:
            await server.open(tablet, 1)
            await server.put(tablet, 1, early)
            complete[tablet] = newest_log(server.store, tablet).stat().st_size
            await server.put(tablet, 1, late)
        server.kill()
        for tablet in torn:
            log = newest_log(server.store, tablet)
            whole = log.stat().st_size
            cuts = (complete[tablet] + 1, (complete[tablet] + whole) // 2, whole - 1)
            with log.open("r+b") as file:
                file.truncate(cuts[tablet - 1])
        await server.start()
        for tablet in torn:
            await server.open(tablet, 2)
            assert await server.rows(tablet, 2) == early


async def test_a_damaged_tablet_is_reported_and_the_others_serve(tmp_path: Path) -> None:
    async with tablet_server(tmp_path) as server:
        for tablet in (1, 2):
            await server.open(tablet, 1)
            await server.put(tablet, 1, {b"row": b"value"})
    (tmp_path / "store" / "3" / "1" / "e1" / "CURRENT").write_text("MANIFEST-999999\n")
    async with tablet_server(tmp_path) as server:
        with pytest.raises(StoreUnusable) as refusal:
            await server.open(1, 2)
        assert refusal.value.fault in (StoreFault.DAMAGED, StoreFault.INPUT_OUTPUT)
        await server.open(2, 2)
        assert await server.rows(2, 2) == {b"row": b"value"}
        damaged, whole = await server.describe()
        assert damaged.tablet_id == 1
        assert damaged.HasField("error")
        assert not whole.HasField("error")
        refused = await server.read(1, 2, b"row")
        assert refused.HasField("error")
