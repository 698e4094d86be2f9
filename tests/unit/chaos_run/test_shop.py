"""The shop tells which orders were lost or handled wrongly, and blames nothing else."""

from __future__ import annotations

import asyncio

import pytest

from percolator import aio
from tests.chaos import shop as shops
from tests.chaos.shop import Shop
from tests.integration.observed_orders import orders, packed, placed, shipped
from tests.unit.connected import connected


async def handle(database: aio.Database, row: str, times: int = 1) -> None:
    async with database.transaction() as tx:
        await tx.set(row, packed, times)
        await tx.set(row, shipped, times)


async def test_an_order_whose_placing_was_cancelled_is_not_missed() -> None:
    async with connected() as (database, cluster):
        shop = Shop(database)
        await shop.open()
        await handle(database, await shop.place())
        cluster.silent = True
        cancelled = asyncio.create_task(shop.place())
        await asyncio.sleep(0.1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        cluster.silent = False
        assert cancelled.cancelled()
        assert shop.placed == 1
        assert await shop.problems() == []


async def test_an_order_that_is_no_longer_stored_is_lost() -> None:
    async with connected() as (database, _):
        shop = Shop(database)
        await shop.open()
        row = await shop.place()
        async with database.transaction() as tx:
            await tx.delete(row, placed)
        assert await shop.problems() == [f"order {row} was placed and is not stored"]


@pytest.mark.parametrize("times", [0, 2])
async def test_an_order_must_be_handled_once(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shops, "ANSWERED_SECONDS", 0.2)
    async with connected() as (database, _):
        shop = Shop(database)
        await shop.open()
        await handle(database, await shop.place())
        row = await shop.place()
        if times:
            await handle(database, row, times)
        assert await shop.problems() == [
            f"order {row}: packed and shipped {(times, times)} times, of 2 orders"
        ]


async def test_an_order_that_is_handled_and_was_never_placed_is_told() -> None:
    async with connected() as (database, _):
        shop = Shop(database)
        await shop.open()
        await handle(database, "3-3")
        async with database.snapshot() as snapshot:
            assert [row.key async for row in snapshot.scan(orders)] == ["3-3"]
        assert await shop.problems() == ["order 3-3 is handled and was never placed"]
