"""Changes that programs read from the feed of a table, over all of its tablets."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import Change, ChangeKind, Table, Timestamp, codecs
from percolator.aio import Database
from percolator.aio.changes import Changes
from percolator.errors import InvalidArgument, SchemaError, SnapshotTooOld, UsageError
from percolator.routing.cells import StoredChange
from percolator.routing.change_scan import merged
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


@pytest.fixture
@asynccontextmanager
async def db() -> AsyncIterator[Database]:
    """A client of a cluster with the table `orders` in three tablets."""
    async with shop() as (db, _):
        yield db


@pytest.fixture
@asynccontextmanager
async def start(db: Database) -> AsyncIterator[Timestamp]:
    yield await db.timestamp()


async def put(db: Database, **prices: int) -> Timestamp:
    async with db.transaction() as tx:
        for row, value in prices.items():
            await tx.set(row, price, value)
    return await db.timestamp()


async def read(db: Database, after: Timestamp, **fields: Any) -> list[Change[str]]:
    until = fields.pop("until", None) or await db.timestamp()
    return [change async for change in db.changes(orders, after=after, until=until, **fields)]


async def test_changes_come_in_the_order_of_commits_over_all_tablets(
    db: Database, start: Timestamp
) -> None:
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


async def test_it_goes_on_after_the_last_commit_that_was_handled(
    db: Database, start: Timestamp
) -> None:
    for number in range(5):
        await put(db, a=number, z=number)
    found_first = await read(db, start)
    for place, change in enumerate(found_first, 1):
        if change.ends_commit:
            assert [one.raw_value for one in await read(db, change.commit_timestamp)] == [
                one.raw_value for one in found_first[place:]
            ]


async def test_what_was_before_is_told_on_request(db: Database, start: Timestamp) -> None:
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


async def test_a_column_of_another_table_is_refused(db: Database, start: Timestamp) -> None:
    await put(db, a=1)
    [change] = await read(db, start)
    assert change.is_of(price)
    assert not change.is_of(state)
    with pytest.raises(SchemaError):
        change.value(state)
    with pytest.raises(SchemaError):
        change.is_of(accounts.column("price", codecs.integer))


async def test_a_follower_hears_of_what_is_committed_while_it_waits(db: Database) -> None:
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


async def test_the_newest_change_tells_how_far_there_is_something_to_read(
    db: Database, start: Timestamp
) -> None:
    await put(db, a=1)
    newest = await db.newest_change(orders, after=start)
    assert newest is not None
    [change] = await read(db, start, until=newest)
    assert change.commit_timestamp == newest
    assert await db.newest_change(orders, after=newest) is None


async def test_history_is_kept_from_where_the_reader_is(db: Database, start: Timestamp) -> None:
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


async def test_a_transaction_under_way_is_waited_for(db: Database, start: Timestamp) -> None:
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


async def test_a_feed_can_be_switched_on_and_is_complete_from_then_on(db: Database) -> None:
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


async def test_bad_bounds_are_refused(db: Database) -> None:
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


# Changes that are closed while a task waits for the next one, and tasks that wait together.


@pytest.fixture(name="small_db")
@asynccontextmanager
async def small_shop() -> AsyncIterator[Database]:
    async with connected() as (db, _):
        await db.create_table(orders, change_feed=True)
        yield db


def oldest(db: Database) -> int:
    return db.internal.engine.open_starts.oldest()


async def test_closing_ends_an_iteration_that_waits(small_db: Database) -> None:
    changes = small_db.changes(orders)

    async def follow() -> list[str]:
        return [change.key async for change in changes]

    following = asyncio.ensure_future(follow())
    await asyncio.sleep(3)
    await put(small_db, a=1)
    await asyncio.sleep(3)
    assert oldest(small_db) > 0
    await changes.close()
    assert await following == ["a"]
    assert oldest(small_db) == 0


async def test_closing_ends_an_iteration_over_pages_that_waits(small_db: Database) -> None:
    changes = small_db.changes(orders)

    async def follow() -> int:
        return len([page async for page in changes.pages()])

    following = asyncio.ensure_future(follow())
    await asyncio.sleep(3.3)
    await changes.close()
    assert await following > 0
    assert [page async for page in changes.pages()] == []


async def test_closing_ends_an_iteration_that_has_just_begun(small_db: Database) -> None:
    for turns in range(20):
        changes = small_db.changes(orders)
        first = asyncio.ensure_future(anext(changes, None))
        for _ in range(turns):
            await asyncio.sleep(0)
        await changes.close()
        assert await first is None
        assert oldest(small_db) == 0


async def test_changes_end_where_they_were_closed_and_closing_again_does_nothing(
    small_db: Database,
) -> None:
    start = await small_db.timestamp()
    await put(small_db, a=1)
    await put(small_db, b=1)
    changes = small_db.changes(orders, after=start)
    assert (await anext(changes)).key == "a"
    reached = changes.reached
    await asyncio.gather(changes.close(), changes.close())
    await changes.close()
    for _ in range(2):
        assert await anext(changes, None) is None
    assert changes.reached == reached


async def test_a_second_task_that_waits_is_refused_and_the_first_goes_on(
    small_db: Database,
) -> None:
    for changes in (small_db.changes(orders), small_db.changes(orders).pages()):
        first = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="another call waits for the next"):
            await anext(changes)
        await put(small_db, a=1)
        assert await first is not None
        await changes.aclose()


async def test_what_was_closed_before_the_block_keeps_no_history(small_db: Database) -> None:
    changes = small_db.changes(orders)
    await changes.close()
    with pytest.raises(UsageError, match="the changes of table 'orders' were closed"):
        async with changes:
            pass
    assert oldest(small_db) == 0


async def test_pages_that_were_asked_for_before_single_changes_skip_none_of_them(
    small_db: Database,
) -> None:
    start = await small_db.timestamp()
    await put(small_db, a=1)
    changes = small_db.changes(orders, after=start)
    pages = changes.pages()
    await anext(changes)
    with pytest.raises(UsageError, match="single changes have already been read"):
        await anext(pages)
    await changes.close()


@pytest.mark.parametrize("in_pages", [False, True])
async def test_no_change_is_skipped_whenever_a_call_is_cancelled(
    small_db: Database, in_pages: bool
) -> None:
    start = await small_db.timestamp()
    await put(small_db, a=1)
    outcomes = set()
    for turns in range(1, 100):
        changes = small_db.changes(orders, after=start)
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
            assert oldest(small_db) == 0
        await changes.close()
    assert outcomes == {True, False}


@pytest.mark.parametrize("in_pages", [False, True])
async def test_a_follower_that_is_cancelled_twice_ends_as_if_it_was_once(
    small_db: Database, in_pages: bool
) -> None:
    start = await small_db.timestamp()
    await put(small_db, a=1)

    async def follow() -> None:
        async with small_db.changes(orders, after=start) as changes:
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
            assert oldest(small_db) == 0


# How far a follower of changes has come, and how following ends.


async def test_a_quiet_follower_moves_and_goes_on_there_after_a_restart(
    db: Database,
) -> None:
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


async def test_a_change_is_behind_the_position_once_more_is_asked_for(
    db: Database,
) -> None:
    start = await db.timestamp()
    one, other = await put(db, a=1, z=1), await put(db, a=2)
    until = await db.timestamp()
    changes = db.changes(orders, after=start, until=until)
    seen = [(change.key, changes.reached) async for change in changes]
    assert [key for key, _ in seen] == ["a", "z", "a"]
    assert start <= seen[0][1] <= seen[1][1] < one <= seen[2][1] < other
    assert changes.reached == until


async def test_pages_say_from_where_to_go_on_also_when_nothing_changes(
    db: Database,
) -> None:
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


async def test_without_a_position_they_begin_at_the_call(db: Database) -> None:
    changes = db.changes(orders)
    with pytest.raises(UsageError, match="not known yet"):
        _ = changes.reached
    await put(db, a=1)
    assert (await anext(changes)).key == "a"
    await changes.close()


async def test_what_only_the_cluster_knows_is_told_on_entering(db: Database) -> None:
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


async def test_closing_the_database_is_said_to_its_followers(db: Database) -> None:
    changes = db.changes(orders)
    waiting = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(3)
    await db.close()
    with pytest.raises(UsageError, match="database was closed while the changes of table 'orders'"):
        await waiting
    with pytest.raises(UsageError, match="database is closed"):
        db.changes(orders)


async def test_after_an_error_it_does_not_look_as_if_the_end_was_reached(
    db: Database,
) -> None:
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


async def test_history_is_no_longer_kept_for_who_has_left(db: Database) -> None:
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


async def test_errors_of_codecs_name_table_row_and_column(db: Database) -> None:
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
