"""A run of an observer whose table is dropped, and created again, under it."""

from __future__ import annotations

from typing import cast

import pytest

from percolator import SchemaError, observes
from percolator.aio import Transaction
from percolator.observers.dead_letters import DeadLetterBox
from percolator.observers.registration import Registrations, register

from .observed_cluster import Observed, copy, docs, observed, source


@observes(source, name="copies")
async def copies(tx: Transaction, row: str) -> None:
    await tx.set(row, copy, 1)


async def _create_again(world: Observed) -> None:
    await world.db.drop_table(docs)
    await world.db.create_table(docs)


async def test_what_a_run_writes_does_not_get_into_the_next_table() -> None:
    """Its acknowledgement is in the table of the change, so what it writes there is, too."""
    async with observed() as world:
        await register(world.context, [copies])
        async with world.db.transaction() as tx:
            await tx.set("z", copy, 0)  # the cluster keeps its codec: nobody has to ask later
        await world.put("a", 1)
        run = world.run_of(await world.work_for(copies))
        assert await run.begin()
        await _create_again(world)
        transaction = cast(Transaction, run.transaction)
        await transaction.set("a", copy, 1)
        with pytest.raises(SchemaError, match="was dropped"):
            await transaction.get("b", copy)
        with pytest.raises(SchemaError, match="was dropped"):
            await run.commit()
        async with world.db.snapshot() as snapshot:
            assert [row.key async for row in snapshot.scan(docs)] == []


async def test_a_change_in_a_table_that_is_gone_is_not_looked_for_in_the_next_one() -> None:
    async with observed() as world:
        await register(world.context, [copies])
        await world.put("a", 1)
        work = await world.work_for(copies)
        await _create_again(world)
        await world.put("a", 2)
        with pytest.raises(SchemaError):
            await world.run_of(work).begin()


@pytest.mark.parametrize("is_created_again", [False, True])
async def test_an_observer_that_stops_because_its_table_was_dropped_says_so_once(
    caplog: pytest.LogCaptureFixture, *, is_created_again: bool
) -> None:
    async with observed() as world:
        registrations = Registrations(world.context, await register(world.context, [copies]))
        await world.db.drop_table(docs)
        if is_created_again:
            await world.db.create_table(docs)
        await registrations.refresh()
        await registrations.refresh()
        said = [one.getMessage() for one in caplog.records if "copies" in one.getMessage()]
        assert said == [
            "observer copies of table docs has stopped: the table was dropped. For another table "
            "of this name, restart the worker"
        ]


async def test_a_dead_letter_of_a_table_that_is_gone_is_not_retried_in_the_next_one() -> None:
    """No run there would delete it, however often it was retried."""
    broken = True

    @observes(source, name="fixed", attempts=1)
    async def fixed(tx: Transaction, row: str) -> None:
        if broken:
            raise ValueError("not yet")
        await tx.set(row, copy, 1)

    async with observed() as world:
        box = DeadLetterBox(world.context)
        async with world.db.run_observers([fixed]):
            await world.put("a", 1)
            await world.until_nothing_waits()
        await _create_again(world)
        async with world.db.run_observers([fixed]):
            await world.put("b", 1)
            await world.until_nothing_waits()
            former, _ = sorted(await world.dead_letters(), key=lambda one: one.row)
            broken = False
            for _ in range(2):
                with pytest.raises(
                    SchemaError, match="put aside in a table 'docs' that was dropped"
                ):
                    await box.retry(await world.dead_letters())
                await world.until_copied("b", 1)
                assert await world.dead_letters() == [former]
            assert await box.clear([former]) == 1
            assert await world.dead_letters() == []
