"""A shared look: no caller gets one that began before its call, and none is forgotten."""

from __future__ import annotations

import asyncio

import pytest

from percolator.services.chassis.files import SharedLook


class Store:
    """Answers with the number of the look, once it is let."""

    def __init__(self) -> None:
        self.looks = 0
        self.answers = asyncio.Event()
        self.error: Exception | None = None

    async def look(self) -> int:
        self.looks += 1
        number = self.looks
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return number


async def test_all_who_ask_in_one_round_share_one_look() -> None:
    store = Store()
    store.answers.set()
    look = SharedLook(store.look)
    assert await asyncio.gather(*(look() for _ in range(50))) == [1] * 50


async def test_a_caller_that_comes_during_a_look_gets_the_next_one() -> None:
    """The one under way may have seen a moment before the work of this caller was done."""
    store = Store()
    look = SharedLook(store.look)
    first = look()
    await asyncio.sleep(0)
    late = [look(), look()]
    store.answers.set()
    assert await first == 1
    assert await asyncio.gather(*late) == [2, 2]


async def test_cancelling_one_caller_does_not_affect_the_others() -> None:
    store = Store()
    look = SharedLook(store.look)
    leaving, staying = look(), look()
    await asyncio.sleep(0)
    leaving.cancel()
    store.answers.set()
    assert await staying == 1
    assert await look() == 2


async def test_an_error_reaches_all_who_wait_and_the_next_look_is_made() -> None:
    store = Store()
    store.error = RuntimeError("a bug")
    look = SharedLook(store.look)
    first = look()
    await asyncio.sleep(0)
    second = look()
    store.answers.set()
    for future in (first, second):
        with pytest.raises(RuntimeError):
            await future
    store.error = None
    assert await look() == 2
