"""How far a follower of changes has come, and how following ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from percolator import Change, Table, Timestamp, codecs
from percolator.aio import Database
from percolator.aio.changes import Changes
from percolator.errors import InvalidArgument, SchemaError, SnapshotTooOld, UsageError
from tests.unit.connected import accounts, connected

orders = Table("orders")
price = orders.column("price", codecs.integer)


@asynccontextmanager
async def shop() -> AsyncIterator[Database]:
    async with connected() as (db, _):
        await db.create_table(orders, splits=["h"], change_feed=True)
        yield db


async def put(db: Database, **prices: int) -> Timestamp:
    async with db.transaction() as tx:
        for row, value in prices.items():
            await tx.set(row, price, value)
    assert tx.commit_timestamp is not None
    return tx.commit_timestamp


def oldest(db: Database) -> int:
    return db.internal.engine.open_starts.oldest()


async def test_a_quiet_follower_moves_and_goes_on_there_after_a_restart() -> None:
    async with shop() as db:
        start = await db.timestamp()
        async with db.changes(orders, after=start) as changes:
            assert changes.reached == start
            first = asyncio.ensure_future(anext(changes))
            await asyncio.sleep(10)
            reached = changes.reached
            assert start < reached
            assert (await db.timestamp()).physical_milliseconds - reached.physical_milliseconds < (
                2_000
            )
            assert oldest(db) == reached
            await put(db, a=1)
            assert (await first).value(price) == 1
        async with db.changes(orders, after=reached) as again:
            assert (await anext(again)).value(price) == 1


async def test_a_change_is_behind_the_position_once_more_is_asked_for() -> None:
    async with shop() as db:
        start = await db.timestamp()
        one, other = await put(db, a=1, z=1), await put(db, a=2)
        until = await db.timestamp()
        changes = db.changes(orders, after=start, until=until)
        seen = [(change.key, changes.reached) async for change in changes]
        assert [key for key, _ in seen] == ["a", "z", "a"]
        assert start <= seen[0][1] <= seen[1][1] < one <= seen[2][1] < other
        assert changes.reached == until


async def test_pages_say_from_where_to_go_on_also_when_nothing_changes() -> None:
    async with shop() as db:
        start = await db.timestamp()
        async with db.changes(orders, after=start) as changes:
            pages = changes.pages()
            idle = await anext(pages)
            assert idle.changes == []
            assert start < idle.reached
            commit = await put(db, a=1, z=2)
            found: list[Change[str]] = []
            page = idle
            while len(found) < 2:
                page = await anext(pages)
                found += page.changes
                assert changes.reached < commit
                assert (page.reached >= commit) == (len(found) == 2)
            assert [(one.key, one.ends_commit) for one in found] == [("a", False), ("z", True)]
            await anext(pages)
            assert changes.reached == page.reached
            await pages.aclose()
        async with db.changes(orders, after=start) as changes:
            await anext(changes)
            with pytest.raises(UsageError, match="single changes"):
                await anext(changes.pages())


async def test_without_a_position_they_begin_at_the_call() -> None:
    async with shop() as db:
        changes = db.changes(orders)
        with pytest.raises(UsageError, match="not known yet"):
            _ = changes.reached
        await put(db, a=1)
        assert (await anext(changes)).key == "a"
        await changes.close()


async def test_an_end_before_the_beginning_is_refused() -> None:
    async with shop() as db:
        old = await db.timestamp()
        now = await db.timestamp()
        with pytest.raises(InvalidArgument, match=r"^until: .* is before after, "):
            db.changes(orders, after=now, until=old)
        with pytest.raises(InvalidArgument, match=r"^until: .* is before after, "):
            await anext(db.changes(orders, until=old))
        with pytest.raises(InvalidArgument, match=r"^until: "):
            async with db.changes(orders, until=old):
                pass


async def test_what_only_the_cluster_knows_is_told_on_entering() -> None:
    async with shop() as db:
        now = await db.timestamp()
        with pytest.raises(InvalidArgument, match="'accounts' has no change feed") as refused:
            async with db.changes(accounts):
                pass
        assert refused.value.field == "table"
        assert "set_change_feed" in refused.value.reason
        with pytest.raises(InvalidArgument, match=r"^table: 'accounts' has no change feed"):
            await db.newest_change(accounts, after=now)
        with pytest.raises(InvalidArgument, match=r"^after: .* in the future"):
            async with db.changes(orders, after=Timestamp(now + (60_000 << 18))):
                pass
        with pytest.raises(SchemaError, match=r"'orders' did not exist yet at .* begin at"):
            async with db.changes(orders, after=Timestamp(1)):
                pass
        await db.set_change_feed(accounts, on=True)
        column = accounts.column("c", codecs.integer)
        async with db.transaction() as tx:
            await tx.set("a", column, 1)
        await db.set_change_feed(accounts, on=False)
        await db.set_change_feed(accounts, on=True)
        with pytest.raises(SnapshotTooOld, match="scan it in a new snapshot, and then read its"):
            async with db.changes(accounts, after=now):
                pass
        assert oldest(db) == 0


async def test_closing_the_database_is_said_to_its_followers() -> None:
    async with shop() as db:
        changes = db.changes(orders)
        waiting = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(3)
        await db.close()
        with pytest.raises(
            UsageError, match="database was closed while the changes of table 'orders'"
        ):
            await waiting
        with pytest.raises(UsageError, match="database is closed"):
            db.changes(orders)


async def test_after_an_error_it_does_not_look_as_if_the_end_was_reached() -> None:
    async with shop() as db:
        changes = db.changes(orders)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(changes), 5)
        for _ in range(2):
            with pytest.raises(UsageError, match=r"no longer followed.*after="):
                await anext(changes)
        assert oldest(db) == 0
        pages = db.changes(accounts).pages()
        with pytest.raises(InvalidArgument, match="no change feed"):
            await anext(pages)
        start = await db.timestamp()
        await put(db, a=1)
        closed = db.changes(orders, after=start)
        await anext(closed)
        await closed.close()
        assert [one async for one in closed] == []


async def test_history_is_no_longer_kept_for_who_has_left() -> None:
    async with shop() as db:
        start = await db.timestamp()
        await put(db, a=1)

        def forgotten() -> Changes[str]:
            return db.changes(orders, after=start)

        async with db.changes(orders, after=start):
            assert oldest(db) == start
        assert oldest(db) == 0
        gc.disable()
        try:
            changes = forgotten()
            await anext(changes)
            assert oldest(db) == start
            del changes
            await asyncio.sleep(0.1)
            assert oldest(db) == 0
        finally:
            gc.enable()


async def test_errors_of_codecs_name_table_row_and_column() -> None:
    async with shop() as db:
        start = await db.timestamp()
        async with db.transaction() as tx:
            await tx.set("a", orders.column("price", codecs.stored), b"ten")
        until = await db.timestamp()
        [change] = [one async for one in db.changes(orders, after=start, until=until, before=True)]
        where = "table 'orders', row 'a', column 'price': "
        with pytest.raises(SchemaError, match=where):
            change.value(price)
        assert change.before(price) is None
        keyed = Table("orders", key=codecs.ordered_integer)
        with pytest.raises(SchemaError, match="table 'orders', row b'a': "):
            await anext(db.changes(keyed, after=start, until=until))
