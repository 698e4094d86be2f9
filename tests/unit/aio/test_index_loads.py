"""Two bulk loads of one table with an index, at the same time."""

from __future__ import annotations

import asyncio

import pytest

from percolator import DeadlineExceeded, Table, codecs
from percolator.aio import Database
from percolator.aio.bulk_load import PATIENCE_SECONDS, BulkLoad, LoadPlan, LoadTimestamps
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.connected import Cluster


class LoadedCluster(Cluster):
    """Also takes bulk loads."""

    async def fence(self, request: pb.FenceRequest) -> pb.FenceResponse:
        return await self._serving(request.target).fence(request)

    async def load(self, request: pb.LoadRequest) -> pb.LoadResponse:
        return await self._serving(request.target).load(request)


@pytest.fixture
def kind_of_cluster() -> type[Cluster]:
    return LoadedCluster


people = Table("people")
city = people.column("city", codecs.text, indexed=True)

Begun = tuple[BulkLoad, LoadTimestamps]


async def begun(db: Database, name: str, start: bytes, end: bytes) -> Begun:
    """A load that has loaded two rows."""
    load = BulkLoad(db, LoadPlan("people", name, start, end, notify=False))
    timestamps = await load.begin()
    await load.load([(start + row, city.name, b"Rome") for row in (b"1", b"2")], timestamps)
    return load, timestamps


async def both(db: Database) -> tuple[Begun, Begun]:
    await db.create_table(people, ["m"])
    return await begun(db, "first", b"a", b"c"), await begun(db, "second", b"p", b"r")


async def require_whole(db: Database) -> None:
    async with db.snapshot() as snapshot:
        found = [row.key async for row in snapshot.find(city, "Rome")]
    assert found == ["a1", "a2", "p1", "p2"]
    assert await db.check_index(city) == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("seconds", [0.0, PATIENCE_SECONDS / 2])
async def test_an_index_is_complete_when_two_loads_have_ended(
    db: Database, order: tuple[int, int], seconds: float
) -> None:
    loads = await both(db)
    (first, began), (second, began_too) = (loads[place] for place in order)
    ending = asyncio.ensure_future(first.finish(began))
    await db.internal.engine.world.clock.sleep(seconds)
    await second.finish(began_too)
    await ending
    await require_whole(db)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_a_load_that_cannot_build_an_index_for_another_load_says_so(
    db: Database, order: tuple[int, int]
) -> None:
    loads = await both(db)
    (first, began), (second, began_too) = (loads[place] for place in order)
    with pytest.raises(DeadlineExceeded) as caught:
        await first.finish(began)
    other = ("second", "first")[order[0]]
    assert caught.value.message == (
        "the rows are loaded, but an index is incomplete: no page came in time; last error: the "
        f"rows are closed for the bulk load {other!r}; the next load of the table that ends "
        "completes it, or db.create_index(...)"
    )
    await second.finish(began_too)
    await require_whole(db)
