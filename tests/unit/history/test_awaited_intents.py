"""Intents for which nobody asks: they hold up no collection, and go only if that loses nothing."""

from __future__ import annotations

import pytest

from percolator.errors import NotReady
from percolator.protocol import steps
from percolator.protocol.steps import OWN_ROLLBACK
from percolator.routing.cells import CellMutation, Refused
from percolator.rowstore.intents import Intent
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_WRITE
from tests.unit.history.row_site import ONE, OTHER, SECONDS, VALUE, Site, site

LONG = 600_000


async def test_a_removed_observer_holds_up_no_deletion() -> None:
    async with site() as here:
        await here.set("a", 1)
        await here.change_observers(add="observer")
        await _delete(here, "a")
        await here.change_observers(remove="observer")
        await here.history.collect(await here.decided(await here.now()))
        assert not await here.cells(ONE, SPACE_WRITE)
        assert await here.all_intents() == []
        assert here.history.awaited.cleared == 1


async def test_a_dropped_table_holds_up_no_deletion_in_another() -> None:
    async with site() as here:
        await here.change_observers(add="observer")
        await here.set("a", 1)
        async with here.database.transaction() as tx:
            await tx.delete_row(OTHER, "a")
        decided = await here.decided(await here.now())
        await here.database.drop_table(ONE)
        await here.history.collect(decided)
        assert not await here.cells(OTHER, SPACE_WRITE)
        assert await here.all_intents() == []


async def test_other_observers_are_awaited_as_before() -> None:
    async with site() as here:
        await here.change_observers(add="removed")
        await here.set("a", 1)
        await here.change_observers(remove="removed")
        await here.change_observers(add="observer")
        await here.set("b", 1)
        (mine,) = [one for one in await here.all_intents() if one.observer == b"observer"]
        assert await here.history.awaited.oldest(await here.now()) == mine.timestamp
        assert mine in await here.all_intents()


async def test_an_intent_stays_while_its_transaction_may_commit() -> None:
    async with site() as here:
        start = await here.lock(b"a", ttl_milliseconds=LONG)
        await _announce(here, start)
        assert await here.history.awaited.oldest(await here.now()) == 0
        assert len(await here.all_intents()) == 1
        assert await here.cells(ONE, SPACE_LOCK) == 1


async def test_an_intent_above_the_safe_point_stays() -> None:
    """Its transaction may be about to lock its cells, and would be rolled back in vain."""
    async with site() as here:
        start = await here.now()
        await _announce(here, start)
        assert await here.history.awaited.oldest(start) == 0
        assert len(await here.all_intents()) == 1


async def test_a_marker_keeps_a_late_prewrite_out_before_its_intent_goes() -> None:
    async with site() as here:
        start = await here.now()
        await _announce(here, start)
        await here.history.awaited.oldest(await here.now())
        assert await here.all_intents() == []
        prewrite = steps.prewrite(b"a", VALUE.name, start, b"lock", None)
        answer = await here.answer(CellMutation(await here.table_id(ONE), prewrite))
        assert isinstance(answer, Refused)
        assert answer.condition == OWN_ROLLBACK


async def test_a_lock_that_comes_before_the_marker_stays() -> None:
    """It may be one of many, of a transaction that commits: it would lose this write."""
    async with site() as here:
        start = await here.now()
        await _announce(here, start)

        async def late() -> None:
            here.store.before_change = None
            await here.lock(b"a", ttl_milliseconds=LONG, start=start)

        here.store.before_change = late
        await here.history.awaited.oldest(await here.now())
        assert await here.cells(ONE, SPACE_LOCK) == 1
        assert len(await here.all_intents()) == 1


async def test_an_observer_that_is_registered_meanwhile_is_awaited() -> None:
    async with site() as here:
        await _change_for_a_removed_observer(here)

        async def register() -> None:
            here.asked = again

        async def again() -> None:
            here.asked = None
            await here.change_observers(add="observer")

        here.asked = register
        await here.history.awaited.oldest(await here.now())
        assert len(await here.all_intents()) == 1


async def test_who_does_not_lead_any_more_clears_nothing() -> None:
    """A later leader may have registered the observer."""
    async with site() as here:
        await _change_for_a_removed_observer(here)

        async def first() -> None:
            here.asked = second

        async def second() -> None:
            raise NotReady("another one leads")

        here.asked = first
        with pytest.raises(NotReady, match="another one leads"):
            await here.history.awaited.oldest(await here.now())
        assert len(await here.all_intents()) == 1


async def _change_for_a_removed_observer(here: Site) -> None:
    await here.change_observers(add="observer")
    await here.set("a", 1)
    await here.change_observers(remove="observer")


async def _delete(here: Site, row: str) -> None:
    async with here.database.transaction() as tx:
        await tx.delete(row, VALUE)


async def _announce(here: Site, start: int) -> None:
    one = await here.table_id(ONE)
    intent = Intent(one, b"a", VALUE.name, b"nobody", start, is_certain=False)
    await here.intents.write([intent], here.env.now() + SECONDS)
