"""What a row store's engine tells those who divide work, and operators who look at stored cells."""

from __future__ import annotations

import pytest

from percolator import Timestamp
from percolator.cli.values import SPACES, first_cells, stored_cells
from percolator.routing.ranges import TableRange
from percolator.rowstore import cells as sampled
from percolator.rowstore.port import Sample
from percolator.v1.cells_pb2 import Space
from tests.unit.history.row_site import ONE, OTHER, SECONDS, VALUE, Site, site

ROWS = [f"{number:03}" for number in range(40)]


async def _filled(here: Site) -> TableRange:
    for row in ROWS:
        await here.set(row, 1)
    return TableRange(await here.table_id(ONE), b"", b"")


async def test_a_small_table_is_one_range_and_parts_cover_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site() as here:
        whole = await _filled(here)
        engine = here.database.internal.engine
        deadline = engine.now() + SECONDS
        assert await engine.ranges.of_table(whole.table_id, deadline) == [whole]
        inner = await engine.ranges.cut(whole, 1, SECONDS)
        assert inner == [f"{number:03}".encode() for number in (7, 15, 23, 31, 39)]
        part = whole._replace(start=b"010", end=b"031")
        assert await engine.ranges.cut(part, 1, SECONDS) == [b"015", b"023"]
        assert await engine.ranges.cut(part, 1 << 30, SECONDS) == []
        monkeypatch.setattr(sampled, "RANGE_BYTES", 300)
        several = await engine.ranges.of_table(whole.table_id, deadline)
        assert len(several) > 2
        assert [one.start for one in several[1:]] == [one.end for one in several[:-1]]
        assert (several[0].start, several[-1].end) == (b"", b"")


async def test_samples_that_repeat_or_are_empty_make_no_empty_ranges() -> None:
    samples = [Sample(b"a", 5), Sample(b"a", 9), Sample(b"b", 9), Sample(b"c", 20), Sample(b"", 30)]
    assert list(sampled._borders(samples, 5)) == [b"a", b"c"]


async def test_stored_cells_of_each_space_are_listed_in_order() -> None:
    async with site() as here:
        for value in (1, 2):
            await here.set("a", value)
            await here.set("b", value)
        engine = here.database.internal.engine
        info = await engine.catalog.table(ONE.name, engine.now() + SECONDS)
        cells = stored_cells(here.database, info, [Space.SPACE_WRITE, Space.SPACE_LOCK], b"a", b"b")
        found = [cell async for cell in cells]
        assert [(cell.row, cell.column) for cell in found] == [(b"a", VALUE.name)] * 2
        assert found[0].timestamp > found[1].timestamp
        first = await first_cells(
            here.database, info, [Space.SPACE_WRITE], b"", b"", [VALUE.name], 3, SECONDS
        )
        assert [cell.row for cell in first] == [b"a", b"a", b"b"]


async def test_stored_cells_do_not_include_notes_of_collection() -> None:
    async with site() as here:
        await here.set("a", 1)
        await here.set("a", 2)
        await here.history.collect(await here.decided(await here.now()))
        engine = here.database.internal.engine
        for table in (ONE, OTHER):
            info = await engine.catalog.table(table.name, engine.now() + SECONDS)
            cells = [cell async for cell in stored_cells(here.database, info, list(SPACES))]
            assert [cell.space for cell in cells] == [Space.SPACE_WRITE]
            assert Timestamp(cells[0].timestamp) < await here.now()
