"""A deletion that was put aside can be retried, however long ago it was."""

from __future__ import annotations

from typing import Any

import pytest

from percolator import observes
from percolator.aio import Transaction
from percolator.cli.values import stored_cells
from percolator.errors import SchemaError
from percolator.formats.records import RecordKind, WriteRecord
from percolator.observers.dead_letters import DeadLetterBox
from percolator.observers.registration import remove_observer
from percolator.tablet.state import SafePoints
from percolator.v1.cells_pb2 import Space

from .observed_cluster import Observed, copy, docs, observed, source


async def collect(world: Observed) -> None:
    """Collects as if everything stored by now were older than the retention."""
    below = await world.db.timestamp()
    for tablet in world.cluster.tablets.values():
        await tablet.raise_safe_points(SafePoints(below, below))
        await tablet.collect(below)


async def newest_kind(world: Observed, row: bytes) -> RecordKind | None:
    """The kind of the newest stored record of the source; None if there is none."""
    info = await world.db.internal.engine.table(docs, world.context.deadline())
    cells = stored_cells(world.db, info, [Space.SPACE_WRITE], row, row + b"\0")
    found = [cell async for cell in cells if cell.column == source.name]
    return WriteRecord.decode(found[0].value).kind if found else None


async def test_a_deletion_that_was_put_aside_can_be_retried_after_collection() -> None:
    broken = True

    @observes(source, name="careful", attempts=1)
    async def careful(tx: Transaction, row: str) -> None:
        if await tx.get(row, source) is not None:
            await tx.set(row, copy, 1)
        elif broken:
            raise ValueError("deletions are not understood yet")
        else:
            await tx.delete(row, copy)

    async with observed() as world, world.db.run_observers([careful]):
        await world.put("a", 1)
        await world.until_copied("a", 1)
        await world.delete("a")

        async def is_put_aside() -> bool:
            return len(await world.dead_letters()) == 1

        await world.until(is_put_aside)
        await world.until_nothing_waits()
        await collect(world)
        assert await world.get("a") == 1
        assert await newest_kind(world, b"a") is RecordKind.DELETE
        broken = False
        await DeadLetterBox(world.context).retry(await world.dead_letters())
        await world.until_copied("a", None)
        assert await world.dead_letters() == []
        await collect(world)
        assert await newest_kind(world, b"a") is None


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
