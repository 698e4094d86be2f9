"""What the last run has read of the row of its change is read together with the next change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from percolator import aio, observes
from percolator.observers.registration import register

from .observed_cluster import Observed, copy, docs, observed, source, total

Read = Callable[[aio.Transaction, str], Awaitable[list[int | None]]]


async def one_by_one(tx: aio.Transaction, row: str) -> list[int | None]:
    return [await tx.get(row, copy), await tx.get(row, total)]


async def as_cells(tx: aio.Transaction, row: str) -> list[int | None]:
    return await tx.get_many([(row, copy), (row, total)])


async def as_rows(tx: aio.Transaction, row: str) -> list[int | None]:
    (found,) = await tx.get_many(docs, [row], [copy, total])
    return [found.get(copy), found.get(total)]


WAYS = [one_by_one, as_cells, as_rows]


class Run:
    """Runs of an observer that reads twice, with what it saw and how often it asked the cluster."""

    def __init__(self, world: Observed, read: Read) -> None:
        self._world = world
        self._read = read
        self.seen: list[list[int | None]] = []
        self.round_trips = 0

        @observes(source, name="reads")
        async def reads(tx: aio.Transaction, row: str) -> None:
            before = tx.statistics.round_trips
            self.seen = [await self._read(tx, row), await self._read(tx, row)]
            self.round_trips = tx.statistics.round_trips - before

        self._observer = reads

    async def prepare(self) -> None:
        (self._watched,) = await register(self._world.context, [self._observer])

    async def change(self, row: str) -> list[int | None]:
        """Runs for a change of the row; returns what it saw."""
        commit = await self._world.put(row, 1)
        work = self._world.work_of_row(self._watched, row)
        work.timestamps.add(commit)
        run = self._world.run_of(work)
        assert await run.begin()
        await self._observer(run.transaction, row)
        await run.commit()
        assert self.seen[0] == self.seen[1]
        return self.seen[0]


async def put(world: Observed, row: str, **values: int) -> None:
    async with world.db.transaction() as tx:
        for name, value in values.items():
            await tx.set(row, {"copy": copy, "total": total}[name], value)


@pytest.mark.parametrize("read", WAYS)
async def test_the_second_run_asks_for_nothing_that_the_first_has_read(read: Read) -> None:
    async with observed() as world:
        run = Run(world, read)
        await run.prepare()
        await put(world, "a", copy=2)
        await put(world, "b", copy=3, total=4)
        assert await run.change("a") == [2, None]
        assert run.round_trips > 0
        assert await run.change("b") == [3, 4]
        assert run.round_trips == 0


@pytest.mark.parametrize("read", WAYS)
async def test_each_run_sees_the_cells_of_its_own_snapshot(read: Read) -> None:
    async with observed() as world:
        run = Run(world, read)
        await run.prepare()
        await put(world, "a", copy=2, total=3)
        assert await run.change("a") == [2, 3]
        await put(world, "a", copy=4)
        async with world.db.transaction() as tx:
            await tx.delete("a", total)
        assert await run.change("a") == [4, None]


@pytest.mark.parametrize("read", WAYS)
async def test_a_run_sees_its_own_writes_before_what_is_known_of_the_row(read: Read) -> None:
    async def writes_and_reads(tx: aio.Transaction, row: str) -> list[int | None]:
        await read(tx, row)
        await tx.set(row, copy, 7)
        await tx.delete(row, total)
        return await read(tx, row)

    async with observed() as world:
        run = Run(world, writes_and_reads)
        await run.prepare()
        await put(world, "a", copy=2, total=3)
        for _ in range(2):
            assert await run.change("a") == [7, None]


@pytest.mark.parametrize("read", WAYS)
async def test_cells_of_other_rows_are_not_taken_for_those_of_the_change(read: Read) -> None:
    async def reads_another(tx: aio.Transaction, row: str) -> list[int | None]:
        await read(tx, row)
        return await read(tx, "other")

    async with observed() as world:
        run = Run(world, reads_another)
        await run.prepare()
        await put(world, "a", copy=2, total=3)
        await put(world, "other", copy=5, total=6)
        for _ in range(2):
            assert await run.change("a") == [5, 6]


async def test_columns_that_are_no_longer_read_are_no_longer_fetched() -> None:
    reading = True

    async def reads_while_told(tx: Any, row: str) -> list[int | None]:
        return await one_by_one(tx, row) if reading else []

    async with observed() as world:
        run = Run(world, reads_while_told)
        await run.prepare()
        await run.change("a")
        assert list(run._watched.columns_read) == [copy.name, total.name]
        reading = False
        await run.change("a")
        assert not run._watched.columns_read
