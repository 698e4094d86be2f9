"""Two servers and one tablet: the former owner acknowledges nothing that the next one lacks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from percolator.errors import PercolatorError, TabletMoved
from percolator.v1 import tabletserver_pb2 as pb
from tests.integration.tabletserver_client import acknowledged, puts, tablet_server

pytestmark = pytest.mark.integration

TABLET = 7


def epochs(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "3" / str(TABLET)).iterdir())


async def test_a_cut_off_owner_acknowledges_nothing_that_is_lost(tmp_path: Path) -> None:
    """It can still reach its clients, but does not learn that the tablet has moved."""
    store = tmp_path / "store"
    async with (
        tablet_server(tmp_path, name="former", store=store) as former,
        tablet_server(tmp_path, name="next", store=store) as successor,
    ):
        await former.open(TABLET, 1)
        known: dict[bytes, bytes] = {}
        refusals: list[pb.MutationBatchResult] = []

        async def write(writer: int) -> None:
            for number in range(100_000):
                rows = {b"%d/%06d/%d" % (writer, number, n): b"v" for n in range(10)}
                (result,) = await former.mutate(puts(TABLET, 1, rows))
                if acknowledged(result) < len(rows):
                    refusals.append(result)
                    return
                known.update(rows)

        writing = asyncio.gather(*(write(writer) for writer in range(4)))
        await asyncio.sleep(0.3)
        await successor.open(TABLET, 2)
        await asyncio.wait_for(writing, 10)
        assert known.items() <= (await successor.rows(TABLET, 2)).items()
        assert len(known) > 0
        for result in refusals:
            moved = result.error if result.HasField("error") else result.unapplied[0].result.error
            assert moved.ByteSize() > 0
        answer = await former.read(TABLET, 1, b"0/000000/0")
        assert answer.error.HasField("tablet_moved")
        assert [described.tablet_id for described in await former.describe()] == []


async def test_a_paused_owner_comes_back_and_answers_nothing_from_its_old_state(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    async with (
        tablet_server(tmp_path, name="former", store=store) as former,
        tablet_server(tmp_path, name="next", store=store) as successor,
    ):
        await former.open(TABLET, 1)
        await former.put(TABLET, 1, {b"row": b"old"})
        former.process.pause()
        late_write = asyncio.create_task(former.mutate(puts(TABLET, 1, {b"late": b"x"})))
        late_read = asyncio.create_task(former.read(TABLET, 1, b"row"))
        await asyncio.sleep(0.1)
        await successor.open(TABLET, 2)
        former.process.resume()
        (written,) = await late_write
        assert acknowledged(written) == 0
        assert (await late_read).HasField("error")
        assert await successor.rows(TABLET, 2) == {b"row": b"old"}


async def test_a_tablet_moves_with_a_close_and_its_epoch_is_never_used_again(
    tmp_path: Path,
) -> None:
    async with tablet_server(tmp_path) as server:
        await server.open(TABLET, 5)
        await server.put(TABLET, 5, {b"row": b"value"})
        # A repeated request to open a tablet that is open changes nothing.
        await server.open(TABLET, 5)
        with pytest.raises(TabletMoved):
            await server.open(TABLET, 4)
        await server.open(TABLET, 6)
        assert await server.rows(TABLET, 6) == {b"row": b"value"}
        (stale,) = await server.mutate(puts(TABLET, 5, {b"row": b"stale"}))
        assert stale.error.HasField("tablet_moved")
        await server.close(TABLET, 6)
        await server.close(TABLET, 6)
        with pytest.raises(PercolatorError):
            await server.open(TABLET, 6)
        await server.open(TABLET, 7)
        assert await server.rows(TABLET, 7) == {b"row": b"value"}
        # Cleaning up continues after the response.
        for _ in range(1_000):
            if epochs(server.store) == ["e6.sealed", "e7"]:
                break
            await asyncio.sleep(0.01)
        assert epochs(server.store) == ["e6.sealed", "e7"]
