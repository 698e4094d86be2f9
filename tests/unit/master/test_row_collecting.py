"""The master's rounds over a row store: what they are told, and what they tell."""

from __future__ import annotations

from percolator.services.master.collection import ClusterSafePoints
from percolator.services.master.row_term import RowCollecting
from tests.unit.history.row_site import ONE, OTHER, site


class NoDrops:
    """Nothing was dropped."""

    async def begin(self) -> None:
        pass

    async def finish(self, resolved_below: int) -> None:
        pass


async def test_a_table_that_a_pin_keeps_is_told_to_keep_everything() -> None:
    async with site() as here:
        for value in (1, 2, 3):
            await here.set("a", value)
        one, other = await here.table_id(ONE), await here.table_id(OTHER)
        collecting = RowCollecting(here.history, lambda: (one, other), NoDrops())
        below = await here.now()
        # As `ClusterSafePoints.allowed_by` leaves it when a pin keeps the other table.
        await collecting.collect(ClusterSafePoints({one: below}, below))
        assert collecting.collected(one).cells == 2
        assert collecting.collected(one).below == below
        assert collecting.collected(other).cells == 0
        assert collecting.collected(other).below == 0
        assert collecting.locks_resolved == 0
        assert collecting.collected(99).below == 0, "a table that was created since"


async def test_a_table_that_is_gone_is_forgotten() -> None:
    async with site() as here:
        await here.set("a", 1)
        one, other = await here.table_id(ONE), await here.table_id(OTHER)
        tables = [one, other]
        collecting = RowCollecting(here.history, lambda: tables, NoDrops())
        below = await here.now()
        await collecting.collect(ClusterSafePoints({one: below, other: below}, below))
        assert collecting.collected(other).below == below
        tables.remove(other)
        await collecting.collect(ClusterSafePoints({one: below}, below))
        assert set(here.history.tables) == {one}
