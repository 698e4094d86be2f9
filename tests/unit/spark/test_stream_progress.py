"""How far the batches of a stream go, and that they lose and double nothing."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import Limits, RetryPolicy
from percolator.aio import Database
from percolator.aio.connecting import connect_to
from percolator.errors import InvalidArgument, SnapshotTooOld
from percolator.protocol.change_reader import ChangeReader
from percolator.routing.cells import ChangesSeen, FoundCell, StoredChange
from percolator.spark.change_rows import Cells, RowImage, RowImages, Values
from percolator.spark.chosen_rows import ALL_ROWS, RowRanges, RowsBetween
from percolator.spark.stream_progress import IDLE_SECONDS, Offset
from percolator.testing.cluster_in_memory import ADDRESS
from percolator.timestamps import Timestamp, is_expired
from tests.unit.refusals import refused
from tests.unit.spark.streams import (
    Checkpoint,
    Query,
    all_changes,
    orders,
    price,
    put,
    shop,
    snapshot_cells,
    state,
)


@pytest.fixture
def db() -> AbstractAsyncContextManager[Database]:
    """A database with a table of orders and its change feed."""
    return shop()


@pytest.fixture
def kept() -> Checkpoint:
    """The checkpoint of a new query."""
    return Checkpoint()


async def test_it_begins_with_a_snapshot_and_goes_on_with_what_is_committed_afterwards(
    db: Database, kept: Checkpoint
) -> None:
    await put(db, a=1, k=2, z=3)
    query = Query(db, kept)
    assert await query.trigger()
    assert kept.planned[0].snapshot
    at = kept.planned[0].timestamp
    assert kept.sink[0] == await snapshot_cells(db, at)
    assert not await query.trigger()
    await put(db, a=4, z=None)
    assert await query.trigger()
    assert kept.sink[1] == await all_changes(db, at)
    assert not await query.trigger()


async def test_now_means_when_the_first_batch_was_planned_also_after_a_restart(
    db: Database, kept: Checkpoint
) -> None:
    await put(db, a=1)
    await Query(db, kept, starting_from="now").trigger(killed_at=3)
    await put(db, b=2)
    await Query(db, kept, starting_from="now").until_idle()
    assert [row for _, row, _, _ in kept.rows()] == [b"b"]


async def test_it_begins_at_an_instant(db: Database, kept: Checkpoint) -> None:
    await put(db, a=1)
    await db.internal.engine.world.clock.sleep(1.0)
    since = await db.timestamp()
    await put(db, b=2)
    await Query(db, kept, starting_from=since).until_idle()
    assert [row for _, row, _, _ in kept.rows()] == [b"b"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [(1 << 62, "in the future"), (1, "before table 'orders' was created")],
)
async def test_an_instant_that_is_not_in_the_history_of_the_table_is_refused(
    db: Database, given: int, reason: str
) -> None:
    with refused("starting_from", reason):
        await Query(db, Checkpoint(), starting_from=Timestamp(given)).trigger()


@pytest.mark.parametrize("rows_max", [1, 2, 3, 7])
async def test_limits_are_kept_without_cutting_a_commit(
    db: Database, kept: Checkpoint, rows_max: int
) -> None:
    start = await db.timestamp()
    for number in range(6):
        await put(db, **{f"{letter}{number}": number for letter in "akz"[: 1 + number % 3]})
    await Query(db, kept, rows_max, starting_from=start).until_idle()
    assert kept.rows() == await all_changes(db, start)
    last: set[int] = set()
    for number, rows in kept.sink.items():
        commits = {commit for commit, _, _, _ in rows}
        assert not commits & last, "a commit is in one batch"
        last = commits
        assert len(rows) <= rows_max or len(commits) == 1
        following = kept.sink.get(number + 1)
        if following:
            first = [row for row in following if row[0] == following[0][0]]
            assert len(rows) + len(first) > rows_max, "a batch is not smaller than it must be"


async def test_a_limit_counts_rows_of_the_stream(db: Database) -> None:
    """With a catalogue, a row of which a commit changes two cells is one row."""
    start = await db.timestamp()
    for row in "abcd":
        async with db.transaction() as tx:
            await tx.set(row, price, 1)
            await tx.set(row, state, "new")
    for columns, batches in ((None, 4), ((b"price", b"state"), 2), ((b"price",), 2), ((), 1)):
        kept = Checkpoint()
        chosen = None if columns is None else frozenset(columns)
        query = Query(db, kept, 2, starting_from=start, columns=chosen)
        await query.until_idle()
        assert len(kept.sink) == batches
        assert kept.rows() == await all_changes(db, start)
    only = Checkpoint()
    query = Query(db, only, 2, starting_from=start, rows=RowRanges([RowsBetween.only(b"b")]))
    assert await query.trigger()
    assert not await query.trigger(), "rows that are not wanted do not count"


async def test_available_now_ends_with_what_was_committed_when_it_began(
    db: Database, kept: Checkpoint
) -> None:
    start = await db.timestamp()
    for number in range(5):
        await put(db, a=number, z=number)
    expected = await all_changes(db, start)
    query = Query(db, kept, 4, starting_from=start)
    await query.progress.end_here()
    triggers = 0
    while await query.trigger():
        triggers += 1
        await put(db, k=99)
    assert (triggers, kept.rows()) == (3, expected)
    following = Query(db, kept)
    await following.progress.end_here()
    await following.until_idle()
    assert kept.rows() == await all_changes(db, start)


async def test_available_now_with_a_snapshot_is_one_batch(db: Database, kept: Checkpoint) -> None:
    await put(db, a=1)
    query = Query(db, kept)
    await query.progress.end_here()
    await put(db, b=1)
    assert await query.trigger()
    assert not await query.trigger()
    assert [row for _, row, _, _ in kept.rows()] == [b"a"]


async def test_a_batch_ends_where_everything_is_settled(
    db: Database, kept: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tablet has newer changes than another one, which has a lock, is settled up to."""
    settled = ChangeReader.settled

    start = await db.timestamp()
    await put(db, a=1)
    reached = await db.timestamp()
    await put(db, k=2)

    async def locked(reader: ChangeReader, until: int, seconds: float) -> ChangesSeen:
        seen = await settled(reader, until, seconds)
        return seen._replace(reached=min(seen.reached, reached))

    query = Query(db, kept, starting_from=start)
    with monkeypatch.context() as patched:
        patched.setattr(ChangeReader, "settled", locked)
        assert await query.trigger()
        assert [row for _, row, _, _ in kept.rows()] == [b"a"]
        assert not await query.trigger()
    assert await query.trigger()
    assert kept.rows() == await all_changes(db, start)


async def test_an_idle_stream_asks_seldom(db: Database, kept: Checkpoint) -> None:
    """Spark asks again as soon as it has an answer."""
    query = Query(db, kept)
    await query.trigger()
    clock = db.internal.engine.world.clock
    began = clock.monotonic_seconds()
    for _ in range(100):
        assert not await query.trigger()
    assert clock.monotonic_seconds() - began >= 98 * IDLE_SECONDS


@pytest.mark.parametrize("seed", range(8))
async def test_a_query_that_is_killed_at_any_step_loses_and_doubles_nothing(
    db: Database, kept: Checkpoint, seed: int
) -> None:
    chance = random.Random(seed)
    numbers = itertools.count(1)
    begin = await db.timestamp()
    rows_max = chance.choice([1, 3, 50])
    query = Query(db, kept, rows_max, starting_from=begin)
    for _ in range(40):
        for _ in range(chance.randrange(3)):
            rows = chance.sample("abhkpz", chance.randrange(1, 4))
            await put(db, **{row: chance.choice([None, next(numbers)]) for row in rows})
        step = chance.choice([99, 1, 2, 3, 4, 5, 6])
        await query.trigger(killed_at=step)
        if step != 99:
            query = Query(db, kept, rows_max, starting_from=begin)
    await query.until_idle()
    assert kept.rows() == await all_changes(db, begin)
    assert len(kept.rows()) > 20


@pytest.mark.parametrize("planned", [False, True])
async def test_to_be_away_for_too_long_fails_loudly(
    db: Database, kept: Checkpoint, planned: bool
) -> None:
    await put(db, a=1)
    query = Query(db, kept)
    await query.trigger()
    await put(db, b=2)
    if planned:
        await query.trigger(killed_at=2)
    # Without its feed for a moment, the table has no history from which a stream can continue.
    await db.set_change_feed(orders, on=False)
    await put(db, c=3)
    await db.set_change_feed(orders, on=True)
    await put(db, d=4)
    with pytest.raises(SnapshotTooOld, match="failOnDataLoss=false"):
        await Query(db, kept).trigger()

    tolerant = Query(db, kept, fail_on_data_loss=False)
    await tolerant.until_idle()
    await put(db, a=None)
    await tolerant.until_idle()
    copy = {row: value for _, row, _, value in kept.rows()}
    held = await snapshot_cells(db, await db.timestamp())
    assert {row: value for row, value in copy.items() if value is not None} == {
        row: value for _, row, _, value in held
    }


async def test_another_table_of_the_same_name_is_not_taken_for_the_old_one(
    db: Database, kept: Checkpoint
) -> None:
    await put(db, a=1)
    await Query(db, kept).trigger()
    await db.drop_table(orders)
    await db.create_table(orders, change_feed=True)
    await put(db, b=2)
    with pytest.raises(SnapshotTooOld, match="start a new checkpoint"):
        await Query(db, kept).trigger()
    await Query(db, kept, fail_on_data_loss=False).trigger()
    assert kept.planned[-1].snapshot
    assert [row for _, row, _, _ in kept.sink[1]] == [b"b"]


async def test_a_query_that_runs_while_its_table_is_replaced_begins_again_if_it_may(
    db: Database,
) -> None:
    """It remembers the old table, of which no master knows any more."""
    world = db.internal.engine.world
    async with await connect_to(world, [ADDRESS], Limits(), RetryPolicy()) as other:
        kept = Checkpoint()
        query = Query(db, kept, fail_on_data_loss=False)
        await query.trigger()
        await other.drop_table(orders)
        await other.create_table(orders, change_feed=True)
        await put(other, b=2)
        await query.until_idle()
        assert kept.planned[1].snapshot
        assert [row for _, row, _, _ in kept.rows()] == [b"b"]


async def test_a_query_that_must_not_lose_anything_says_that_its_table_was_replaced(
    db: Database,
) -> None:
    world = db.internal.engine.world
    async with await connect_to(world, [ADDRESS], Limits(), RetryPolicy()) as other:
        query = Query(db, Checkpoint())
        await query.trigger()
        await other.drop_table(orders)
        await other.create_table(orders, change_feed=True)
        with pytest.raises(SnapshotTooOld, match="start a new checkpoint"):
            await query.trigger()


async def test_a_query_that_ends_with_what_was_there_begins_again_with_a_table_made_later(
    db: Database,
) -> None:
    world = db.internal.engine.world
    async with await connect_to(world, [ADDRESS], Limits(), RetryPolicy()) as other:
        kept = Checkpoint()
        query = Query(db, kept, fail_on_data_loss=False)
        await query.trigger()
        await query.progress.end_here()
        await other.drop_table(orders)
        await other.create_table(orders, change_feed=True)
        await put(other, b=2)
        await query.until_idle()
        await Query(db, kept, fail_on_data_loss=False).until_idle()
        assert [row for _, row, _, _ in kept.rows()] == [b"b"]


async def test_a_table_without_a_feed_is_refused(db: Database, kept: Checkpoint) -> None:
    await db.set_change_feed(orders, on=False)
    query = Query(db, kept, starting_from=str(int(await db.timestamp())))
    await put(db, a=1)
    with pytest.raises(InvalidArgument, match="no change feed"):
        await query.trigger()


@pytest.mark.parametrize(
    "offset",
    [Offset(), Offset(7, 3), Offset(7, 3, snapshot=True), Offset(2**63 - 1, 3, after=6)],
)
def test_an_offset_comes_back_as_it_was_and_its_text_does_not_change(offset: Offset) -> None:
    text = json.dumps(offset.json())
    assert Offset.parse(json.loads(text)) == offset
    assert json.dumps(Offset.parse(json.loads(text)).json()) == text


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"offset": 3},
        {"timestamp": "7"},
        {"timestamp": True},
        {"timestamp": 7, "x": 1},
        7,  # such as the source `rate` has
        None,
        ["timestamp"],
    ],
)
def test_the_checkpoint_of_another_source_is_refused(found: object) -> None:
    with pytest.raises(InvalidArgument, match="not an offset of a stream from percolator"):
        Offset.parse(found)


COLUMNS = (b"price", b"state")
T = TypeVar("T")

writes = st.dictionaries(
    st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.sampled_from([*COLUMNS, b"other"])),
    st.one_of(st.none(), st.sampled_from([b"1", b"2"])),
    min_size=1,
)


class History:
    """A table and its feed: what each commit has written, in the order of commits, one of them in
    each millisecond. `ttls` has milliseconds by column."""

    def __init__(
        self,
        commits: Sequence[dict[tuple[bytes, bytes], bytes | None]],
        ttls: Mapping[bytes, int] | None = None,
    ) -> None:
        self.ttls = ttls or {}
        self.changes = [
            StoredChange(Timestamp.of(at), row, column, value, None)
            for at, written in enumerate(commits, 1)
            for (row, column), value in sorted(written.items())
        ]

    def cells(self, at: int, row: bytes) -> Cells:
        """Cells of the row in a snapshot."""
        newest: dict[bytes, FoundCell] = {}
        for commit, changed, column, value, _ in self.changes:
            if changed == row and commit <= at:
                newest[column] = FoundCell(commit, value)
        return tuple(self._visible(at, column, newest.get(column)) for column in COLUMNS)

    def _visible(self, at: int, column: bytes, cell: FoundCell | None) -> FoundCell | None:
        if cell is None or cell.value is None:
            return None
        ttl = self.ttls.get(column)
        return None if ttl and is_expired(cell.commit_timestamp, at, ttl) else cell

    def values(self, at: int, row: bytes) -> Values:
        return tuple(None if cell is None else cell.value for cell in self.cells(at, row))

    async def read(self, at: int, rows: Sequence[bytes]) -> dict[bytes, Cells]:
        found = {row: self.cells(at, row) for row in rows}
        return {row: cells for row, cells in found.items() if any(cells)}

    def expected(self, after: int) -> list[RowImage]:
        found = []
        touched = {c[:2] for c in self.changes if c.commit_timestamp > after}
        wanted = {c[:2] for c in self.changes if c.column in COLUMNS}
        for commit, row in sorted(touched & wanted):
            before, values = self.values(commit - 1, row), self.values(commit, row)
            if not any(before) and not any(values):
                continue
            kind = "delete" if not any(values) else "update" if any(before) else "insert"
            found.append(RowImage(commit, row, kind, values))
        return found


async def images(
    history: History, pages: list[list[StoredChange]], rows: RowRanges = ALL_ROWS
) -> list[RowImage]:
    async def given_pages() -> AsyncIterator[list[StoredChange]]:
        for page in pages:
            yield page

    made = RowImages(rows, COLUMNS, history.read, history.ttls).of(given_pages())
    return [image async for some in made for image in some]


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


@pytest.mark.parametrize("ttls", [{}, {b"price": 1}, {b"price": 1, b"state": 2}])
@given(st.lists(writes, max_size=8), st.integers(0, 8), st.lists(st.integers(0, 24)))
def test_an_image_is_what_a_snapshot_at_its_commit_shows_wherever_pages_are_cut(
    ttls: dict[bytes, int],
    commits: list[dict[tuple[bytes, bytes], bytes | None]],
    after: int,
    cuts: list[int],
) -> None:
    history = History(commits, ttls)
    begin = Timestamp.of(min(after, len(commits)))
    changes = [change for change in history.changes if change.commit_timestamp > begin]
    bounds = [0, *sorted(min(cut, len(changes)) for cut in cuts), len(changes)]
    pages = [changes[first:last] for first, last in itertools.pairwise(bounds)]
    assert at_once(images(history, pages)) == history.expected(begin)


async def test_rows_that_were_not_chosen_are_left_out() -> None:
    history = History([{(b"a", b"price"): b"1", (b"b", b"price"): b"1"}])
    chosen = RowRanges([RowsBetween.only(b"b")])
    assert [one.row for one in await images(history, [history.changes], chosen)] == [b"b"]
