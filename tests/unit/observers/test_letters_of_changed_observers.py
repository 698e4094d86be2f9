"""Dead letters outlive the definition of their observer: what no worker runs is not notified."""

from __future__ import annotations

from typing import Any

import pytest

from percolator import SchemaError, observes
from percolator.observers.dead_letters import DeadLetterBox
from percolator.observers.registration import remove_observer

from .observed_cluster import Observed, copy, docs, observed, source

other = docs.column("other", source.codec)


@observes(source, other, name="both", attempts=1)
async def failing(tx: Any, row: str) -> None:
    raise ValueError("not yet")


@observes(source, name="both")
async def narrower(tx: Any, row: str) -> None:
    await tx.set(row, copy, 1)


async def two_letters(world: Observed) -> None:
    """Has the changes of two columns put aside."""
    async with world.db.run_observers([failing]), world.db.transaction() as tx:
        await tx.set("a", {source: 1, other: 1})
    async with world.db.run_observers([failing]):
        await world.until_nothing_waits()
    await remove_observer(world.context, docs.name, "both")


async def test_the_change_of_a_column_that_is_no_longer_watched_is_not_retried() -> None:
    """Its notification would wait forever, and so would everyone who waits for observers. Another
    change of the same row is retried: commands choose letters by row, and could not retry it."""
    async with observed() as world:
        await two_letters(world)
        async with world.db.run_observers([narrower]):
            letters = await world.dead_letters()
            expected = "'both' no longer watches row 'a', column 'other' of table 'docs'"
            with pytest.raises(SchemaError, match=f"^1 of 2 dead letters .*{expected}"):
                await DeadLetterBox(world.context).retry(letters)
            await world.until_copied("a", 1)
            (left,) = await world.dead_letters()
            assert left.column == other.name
            assert await world.waiting() == []
            with pytest.raises(SchemaError, match=f"^observer {expected}"):
                await DeadLetterBox(world.context).retry([left])


async def test_the_change_of_a_removed_observer_is_not_retried() -> None:
    async with observed() as world:
        await two_letters(world)
        expected = "^2 of 2 dead letters .*'docs' no longer has an observer 'both'"
        with pytest.raises(SchemaError, match=expected):
            await DeadLetterBox(world.context).retry(await world.dead_letters())
        assert await world.waiting() == []
