"""Orders about one tablet come one after another, and leave nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from percolator.services.tabletserver.tablets import OrderTurns


async def test_orders_about_a_tablet_run_one_after_another_in_their_order() -> None:
    turns, log = OrderTurns(), []

    async def order(tablet: int, name: str) -> None:
        async with turns.turn(tablet):
            log.append(f"{name} begins")
            await asyncio.sleep(1)
            log.append(f"{name} ends")

    await asyncio.gather(order(7, "first"), order(7, "second"), order(8, "other"))
    assert [one for one in log if "other" not in one] == [
        "first begins",
        "first ends",
        "second begins",
        "second ends",
    ]
    assert log.index("other begins") < log.index("first ends")
    assert len(turns) == 0


async def test_an_order_that_fails_or_is_cancelled_while_it_waits_leaves_nothing_behind() -> None:
    turns = OrderTurns()

    async def fail() -> None:
        async with turns.turn(7):
            await asyncio.sleep(1)
            raise LookupError

    async def wait() -> None:
        async with turns.turn(7):
            raise AssertionError("it was cancelled before its turn")

    failing, waiting = asyncio.create_task(fail()), asyncio.create_task(wait())
    await asyncio.sleep(0.5)
    waiting.cancel()
    with pytest.raises(LookupError):
        await failing
    assert waiting.cancelled()
    assert len(turns) == 0
