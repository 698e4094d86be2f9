"""What programs read from the change feed of a table, over all of its tablets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import Change, ChangeKind, Table, codecs
from percolator.aio import Database
from percolator.errors import InvalidArgument, SchemaError, SnapshotTooOld, UsageError
from percolator.routing.cells import StoredChange
from percolator.routing.change_scan import merged
from percolator.timestamps import Timestamp
from percolator.v1 import tabletserver_pb2 as pb
from tests.simulation.virtual_time import run_virtually
from tests.unit.connected import Cluster, accounts, connected

orders = Table("orders")
price = orders.column("price", codecs.integer)
state = orders.column("state", codecs.text)


@asynccontextmanager
async def shop() -> AsyncIterator[tuple[Database, Cluster]]:
    async with connected() as (db, cluster):
        await db.create_table(orders, splits=["h", "p"], change_feed=True)
        yield db, cluster


async def put(db: Database, **prices: int) -> Timestamp:
    async with db.transaction() as tx:
        for row, value in prices.items():
            await tx.set(row, price, value)
    return await db.timestamp()


async def read(db: Database, after: Timestamp, **fields: Any) -> list[Change[str]]:
    until = fields.pop("until", None) or await db.timestamp()
    return [change async for change in db.changes(orders, after=after, until=until, **fields)]


async def test_changes_come_in_the_order_of_commits_over_all_tablets() -> None:
    async with shop() as (db, _):
        start = await db.timestamp()
        await put(db, a=1, k=2, z=3)
        await put(db, z=4)
        async with db.transaction() as tx:
            await tx.delete("a", price)
            await tx.set("a", state, "gone")
        found = await read(db, start)
        assert [(one.key, one.column, one.ends_commit) for one in found] == [
            ("a", b"price", False),
            ("k", b"price", False),
            ("z", b"price", True),
            ("z", b"price", True),
            ("a", b"price", False),
            ("a", b"state", True),
        ]
        assert [one.kind for one in found] == [ChangeKind.PUT] * 4 + [
            ChangeKind.DELETE,
            ChangeKind.PUT,
        ]
        commits = [one.commit_timestamp for one in found]
        assert commits == sorted(commits)
        assert len(set(commits)) == 3
        async with db.snapshot(at=commits[-1]) as snapshot:
            assert await snapshot.get("a", state) == found[-1].value(state) == "gone"


async def test_it_goes_on_after_the_last_commit_that_was_handled() -> None:
    async with shop() as (db, _):
        start = await db.timestamp()
        for number in range(5):
            await put(db, a=number, z=number)
        whole = await read(db, start)
        for place, change in enumerate(whole, 1):
            if change.ends_commit:
                assert [one.raw_value for one in await read(db, change.commit_timestamp)] == [
                    one.raw_value for one in whole[place:]
                ]


async def test_what_was_before_is_told_on_request() -> None:
    async with shop() as (db, _):
        start = await db.timestamp()
        await put(db, a=1)
        await put(db, a=2)
        async with db.transaction() as tx:
            await tx.delete("a", price)
        found = await read(db, start, before=True)
        assert [(one.kind, one.before(price), one.value(price)) for one in found] == [
            (ChangeKind.INSERT, None, 1),
            (ChangeKind.UPDATE, 1, 2),
            (ChangeKind.DELETE, 2, None),
        ]
        [unknown, *_] = await read(db, start)
        with pytest.raises(UsageError, match="before=True"):
            unknown.before(price)


async def test_a_column_of_another_table_is_refused() -> None:
    async with shop() as (db, _):
        start = await db.timestamp()
        await put(db, a=1)
        [change] = await read(db, start)
        assert change.is_of(price)
        assert not change.is_of(state)
        with pytest.raises(SchemaError):
            change.value(state)
        with pytest.raises(SchemaError):
            change.is_of(accounts.column("price", codecs.integer))


async def test_a_follower_hears_of_what_is_committed_while_it_waits() -> None:
    async with shop() as (db, _):
        seen: list[int | None] = []

        async def follow() -> None:
            async with aclosing(db.changes(orders)) as changes:
                async for change in changes:
                    seen.append(change.value(price))
                    if len(seen) == 3:
                        return

        following = asyncio.ensure_future(follow())
        for number in range(3):
            await asyncio.sleep(7)
            assert len(seen) == number
            await put(db, b=number)
        await following
        assert seen == [0, 1, 2]


async def test_an_idle_table_is_not_read() -> None:
    async with shop() as (db, cluster):
        calls = {"scan": 0, "look": 0}
        scan, look = cluster.scan_changes, cluster.look_for_changes

        def scanned(request: pb.ScanChangesRequest) -> AsyncIterator[pb.ScanChangesResponse]:
            calls["scan"] += 1
            return scan(request)

        async def looked(request: pb.LookForChangesRequest) -> pb.LookForChangesResponse:
            calls["look"] += 1
            return await look(request)

        cluster.scan_changes = scanned  # type: ignore[method-assign]
        cluster.look_for_changes = looked  # type: ignore[method-assign]
        start = await db.timestamp()
        assert await read(db, start) == []
        assert await db.newest_change(orders, after=start) is None
        assert calls == {"scan": 0, "look": 3}  # beginning to follow is a look, too
        await put(db, k=1)
        assert await db.newest_change(orders, after=start) is not None
        assert len(await read(db, start)) == 1
        assert calls == {"scan": 1, "look": 6}  # only the tablet with a change


async def test_the_newest_change_tells_how_far_there_is_something_to_read() -> None:
    async with shop() as (db, _):
        start = await db.timestamp()
        await put(db, a=1)
        newest = await db.newest_change(orders, after=start)
        assert newest is not None
        [change] = await read(db, start, until=newest)
        assert change.commit_timestamp == newest
        assert await db.newest_change(orders, after=newest) is None


async def test_history_is_kept_from_where_the_reader_is() -> None:
    async with shop() as (db, _):
        start = await db.timestamp()
        for number in range(3):
            await put(db, a=number)
        held: list[int] = []
        engine = db.internal.engine
        changes = db.changes(orders, after=start, until=await db.timestamp())
        async with aclosing(changes):
            async for change in changes:
                held.append(engine.open_starts.oldest())
                assert held[-1] < change.commit_timestamp
        assert held[0] == start
        assert engine.open_starts.oldest() == 0


async def test_a_transaction_under_way_is_waited_for() -> None:
    async with shop() as (db, _):
        start = await db.timestamp()
        tx = db.transaction()
        await tx.set("a", price, 1)
        await tx.set("z", price, 1)
        committing = asyncio.ensure_future(tx.commit())
        await asyncio.sleep(0)
        until = await db.timestamp()
        found = await read(db, start, until=until)
        await committing
        later = await read(db, until)
        assert len(found) + len(later) == 2
        assert len(found) in (0, 2)


async def test_a_feed_can_be_switched_on_and_is_complete_from_then_on() -> None:
    async with connected() as (db, _):
        column = accounts.column("c", codecs.integer)
        old = await db.timestamp()
        async with db.transaction() as tx:
            await tx.set("a", column, 1)
        with pytest.raises(InvalidArgument, match="no change feed"):
            await anext(db.changes(accounts, after=old, until=await db.timestamp()))
        await db.set_change_feed(accounts, on=True)
        on = await db.timestamp()
        async with db.transaction() as tx:
            await tx.set("a", column, 2)
        until = await db.timestamp()
        found = [one async for one in db.changes(accounts, after=on, until=until, before=True)]
        assert [(one.before(column), one.value(column)) for one in found] == [(1, 2)]
        with pytest.raises(SnapshotTooOld):
            await anext(db.changes(accounts, after=old, until=until))
        await db.set_change_feed(accounts, on=False)
        with pytest.raises(InvalidArgument, match="no change feed"):
            await anext(db.changes(accounts, after=on, until=until))


async def test_bad_moments_are_refused() -> None:
    async with shop() as (db, _):
        now = await db.timestamp()
        future = Timestamp(now + (60_000 << 18))
        with pytest.raises(InvalidArgument, match="future"):
            await anext(db.changes(orders, after=future))
        with pytest.raises(InvalidArgument, match="before after"):
            await anext(db.changes(orders, after=now, until=Timestamp(now - 1)))
        with pytest.raises(UsageError):
            await anext(db.changes(orders, after="yesterday"))  # type: ignore[arg-type]
        with pytest.raises(SchemaError):
            await anext(db.changes(Table("nothing"), after=now))
        assert [one async for one in db.changes(orders, after=now, until=now)] == []
        long_ago = datetime(2020, 1, 1, tzinfo=UTC)
        with pytest.raises(SchemaError, match="did not exist yet"):
            await anext(db.changes(orders, after=long_ago))


def change(commit: int, row: bytes) -> StoredChange:
    return StoredChange(commit, row, b"c", b"v", None)


STREAMS = st.lists(
    st.lists(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), max_size=4), max_size=4),
    max_size=4,
)


@given(drawn=STREAMS)
def test_merging_keeps_every_change_in_order(drawn: list[list[list[tuple[int, int]]]]) -> None:
    streams: list[list[list[StoredChange]]] = []
    for number, pages in enumerate(drawn):
        ordered = sorted({entry for page in pages for entry in page})
        sizes = [len(page) for page in pages]
        changes = [change(commit, b"%d %d" % (number, row)) for commit, row in ordered]
        streams.append([])
        for size in sizes:
            if changes[:size]:
                streams[-1].append(changes[:size])
            changes = changes[size:]
        if changes:
            streams[-1].append(changes)

    async def source(pages: list[list[StoredChange]]) -> AsyncGenerator[list[StoredChange], None]:
        for page in pages:
            await asyncio.sleep(0)
            yield page

    async def run() -> list[StoredChange]:
        return [one async for page in merged([source(one) for one in streams]) for one in page]

    expected = sorted(one for pages in streams for page in pages for one in page)
    assert run_virtually(run()) == expected
