"""Changes that are closed while a task waits for the next one, and tasks that wait together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from percolator import Table, codecs
from percolator.aio import Database
from percolator.errors import UsageError
from tests.unit.connected import connected

orders = Table("orders")
price = orders.column("price", codecs.integer)


@asynccontextmanager
async def shop() -> AsyncIterator[Database]:
    async with connected() as (db, _):
        await db.create_table(orders, change_feed=True)
        yield db


async def put(db: Database, row: str) -> None:
    async with db.transaction() as tx:
        await tx.set(row, price, 1)


def oldest(db: Database) -> int:
    return db.internal.engine.open_starts.oldest()


async def test_closing_ends_an_iteration_that_waits() -> None:
    async with shop() as db:
        changes = db.changes(orders)

        async def follow() -> list[str]:
            return [change.key async for change in changes]

        following = asyncio.ensure_future(follow())
        await asyncio.sleep(3)
        await put(db, "a")
        await asyncio.sleep(3)
        assert oldest(db) > 0
        await changes.close()
        assert await following == ["a"]
        assert oldest(db) == 0


async def test_closing_ends_an_iteration_over_pages_that_waits() -> None:
    async with shop() as db:
        changes = db.changes(orders)

        async def follow() -> int:
            return len([page async for page in changes.pages()])

        following = asyncio.ensure_future(follow())
        await asyncio.sleep(3.3)
        await changes.close()
        assert await following > 0
        assert [page async for page in changes.pages()] == []


async def test_closing_ends_an_iteration_that_has_just_begun() -> None:
    async with shop() as db:
        for turns in range(20):
            changes = db.changes(orders)
            first = asyncio.ensure_future(anext(changes, None))
            for _ in range(turns):
                await asyncio.sleep(0)
            await changes.close()
            assert await first is None
            assert oldest(db) == 0


async def test_changes_end_where_they_were_closed_and_closing_again_does_nothing() -> None:
    async with shop() as db:
        start = await db.timestamp()
        await put(db, "a")
        await put(db, "b")
        changes = db.changes(orders, after=start)
        assert (await anext(changes)).key == "a"
        reached = changes.reached
        await asyncio.gather(changes.close(), changes.close())
        await changes.close()
        for _ in range(2):
            assert await anext(changes, None) is None
        assert changes.reached == reached


async def test_a_second_task_that_waits_is_refused_and_the_first_goes_on() -> None:
    async with shop() as db:
        for changes in (db.changes(orders), db.changes(orders).pages()):
            first = asyncio.ensure_future(anext(changes))
            await asyncio.sleep(0)
            with pytest.raises(UsageError, match="another call waits for the next"):
                await anext(changes)
            await put(db, "a")
            assert await first is not None
            await changes.aclose()


async def test_what_was_closed_before_the_block_keeps_no_history() -> None:
    async with shop() as db:
        changes = db.changes(orders)
        await changes.close()
        with pytest.raises(UsageError, match="the changes of table 'orders' were closed"):
            async with changes:
                pass
        assert oldest(db) == 0


async def test_pages_that_were_asked_for_before_single_changes_skip_none_of_them() -> None:
    async with shop() as db:
        start = await db.timestamp()
        await put(db, "a")
        changes = db.changes(orders, after=start)
        pages = changes.pages()
        await anext(changes)
        with pytest.raises(UsageError, match="single changes have already been read"):
            await anext(pages)
        await changes.close()


@pytest.mark.parametrize("in_pages", [False, True])
async def test_no_change_is_skipped_whenever_a_call_is_cancelled(in_pages: bool) -> None:
    async with shop() as db:
        start = await db.timestamp()
        await put(db, "a")
        outcomes = set()
        for turns in range(1, 100):
            changes = db.changes(orders, after=start)
            reader = changes.pages() if in_pages else changes
            first = asyncio.ensure_future(anext(reader))
            for _ in range(turns):
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            outcomes.add(first.cancelled())
            if first.cancelled():  # also when the page had come, and only this task slept still
                with pytest.raises(UsageError, match="because of an earlier error or cancellation"):
                    await asyncio.wait_for(anext(reader), 5)
                assert oldest(db) == 0
            await changes.close()
        assert outcomes == {True, False}


@pytest.mark.parametrize("in_pages", [False, True])
async def test_a_follower_that_is_cancelled_twice_ends_as_if_it_was_once(in_pages: bool) -> None:
    async with shop() as db:
        start = await db.timestamp()
        await put(db, "a")

        async def follow() -> None:
            async with db.changes(orders, after=start) as changes:
                async for _ in changes.pages() if in_pages else changes:
                    pass

        for turns in range(1, 60):
            for turns_between in range(5):
                following = asyncio.ensure_future(follow())
                for wait in (turns, turns_between):
                    for _ in range(wait):
                        await asyncio.sleep(0)
                    following.cancel()
                await asyncio.wait([following])
                assert following.cancelled(), following.exception()
                assert oldest(db) == 0
