"""Observers that deletes do not wake: no run, and nothing of the notification is left."""

from __future__ import annotations

from typing import Any

import pytest

from percolator import InvalidArgument, observes
from percolator.observers.definition import Observer
from percolator.observers.registration import register
from percolator.testing import run_observers_async

from .observed_cluster import Observed, copy, observed, source

runs: list[str] = []


@pytest.fixture(autouse=True)
def no_runs() -> None:
    runs.clear()


@observes(source, name="consuming", deletes=False)
async def consuming(tx: Any, row: str) -> None:
    runs.append(row)
    await tx.set(row, copy, await tx.get(row, source))
    await tx.delete(row, source)


@observes(source, name="consuming", deletes=False)
def consuming_in_a_thread(tx: Any, row: str) -> None:
    runs.append(row)
    tx.set(row, copy, tx.get(row, source))
    tx.delete(row, source)


@observes(source, name="weak", weak=True, deletes=False)
async def weak(tx: Any, row: str) -> None:
    runs.append(row)
    await tx.delete(row, source)


async def notify(world: Observed, row: str) -> None:
    async with world.db.transaction() as tx:
        await tx.notify(row, source)


@pytest.mark.parametrize("observer", [consuming, consuming_in_a_thread])
async def test_an_observer_that_deletes_its_trigger_runs_once_for_each_change(
    observer: Observer,
) -> None:
    async with observed() as world, world.db.run_observers([observer]) as worker:
        for value in (1, 2):
            await world.put("a", value)
            await world.until_copied("a", value)
            await world.until_nothing_waits()
        assert runs == ["a", "a"]
        (counters,) = worker.counters.values()
        assert (counters.runs, counters.commits) == (2, 2)


async def test_a_change_that_was_deleted_before_its_run_wakes_nothing() -> None:
    async with observed() as world:
        await register(world.context, [consuming])
        await world.put("a", 1)
        await world.delete("a")
        async with world.db.run_observers([consuming]):
            await world.until_nothing_waits()
        assert runs == []


async def test_a_deleted_cell_that_is_written_again_wakes_it() -> None:
    async with observed() as world:
        await register(world.context, [consuming])
        await world.put("a", 1)
        await world.delete("a")
        await world.put("a", 3)
        async with world.db.run_observers([consuming]):
            await world.until_nothing_waits()
        assert runs == ["a"]
        assert await world.get("a") == 3


async def test_a_weak_observer_does_not_run_for_a_cell_without_a_value() -> None:
    async with observed() as world:
        await register(world.context, [weak])
        await world.put("a", 1)
        await notify(world, "a")
        async with world.db.run_observers([weak]):
            await world.until_nothing_waits()
            await notify(world, "a")
            await notify(world, "never written")
            await world.until_nothing_waits()
        assert runs == ["a"]


async def test_a_cell_that_is_deleted_after_its_backfill_wakes_nothing() -> None:
    async with observed() as world:
        await world.put("kept", 1)
        await world.put("deleted", 2)
        await register(world.context, [consuming])
        assert await world.db.backfill(consuming) == 2
        await world.delete("deleted")
        async with world.db.run_observers([consuming]):
            await world.until_nothing_waits()
        assert runs == ["kept"]
        assert await world.db.backfill(consuming, again=True) == 0


@observes(source, name="picky", deletes=False, attempts=1)
async def picky(tx: Any, row: str) -> None:
    runs.append(row)
    raise ValueError(row)


async def test_a_delete_takes_the_dead_letter_of_what_it_deleted_away_without_a_run() -> None:
    async with observed() as world, world.db.run_observers([picky]):
        await world.put("a", 1)
        await world.until_nothing_waits()
        assert len(await world.dead_letters()) == 1
        await world.delete("a")
        await world.until_nothing_waits()
        assert await world.dead_letters() == []
        assert runs == ["a"]
        await world.put("a", 2)
        await world.until_nothing_waits()
        assert len(await world.dead_letters()) == 1


async def test_run_observers_of_the_test_kit_leaves_deletes_out_too() -> None:
    async with observed() as world:
        await world.put("before", 1)
        assert await run_observers_async(world.db, [consuming]) == 1
        await world.put("a", 1)
        await world.delete("a")
        assert await run_observers_async(world.db, [consuming]) == 0
        assert await world.waiting() == []
        assert runs == ["before"]


async def test_deletes_is_a_bool() -> None:
    with pytest.raises(InvalidArgument, match="deletes"):
        observes(source, deletes=0)  # type: ignore[arg-type]
