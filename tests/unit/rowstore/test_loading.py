"""Bulk loads into a row store: when they appear, and that nothing else of them ever does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import cast

import pytest

from percolator import Table, codecs
from percolator.aio.bulk_load import LoadComplete, LoadPlan, LoadTimestamps, NotEmpty
from percolator.aio.row_load import RowLoad, TableExists, finish_together
from percolator.errors import ExecutionUnknown, InvalidArgument, SchemaError, UsageError
from percolator.history.rows import Decided, RowHistory
from percolator.routing.catalog import TableSchema
from percolator.rowstore import collection, loading
from percolator.rowstore.loading import RowLoader
from percolator.rowstore.port import RowChange
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.row_database import MODEL
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import master_pb2 as pb
from tests.unit.rowstore.model_store import Loading
from tests.unit.rowstore.model_store import loading as loading_site


@pytest.fixture
def at() -> AbstractAsyncContextManager[Loading]:
    """A database into which a test loads rows."""
    return loading_site()


T, OTHER = Table("t"), Table("other")
V, W = T.column("v", codecs.text), OTHER.column("v", codecs.text)
LONG = "long" * 1_000


def cells(*rows: str, value: str = "1") -> list[tuple[bytes, bytes, bytes]]:
    return [(row.encode(), b"v", value.encode()) for row in sorted(rows)]


def load_of(at: Loading, name: str = "load", table: str = "t") -> RowLoad:
    return RowLoad(at.database, LoadPlan(table, name, start=b"", end=b"", notify=False))


async def begun(load: RowLoad, *rows: str, value: str = "1") -> LoadTimestamps:
    """Begins, and loads these rows."""
    timestamps = await load.begin()
    await load.load(cells(*rows, value=value), timestamps)
    return timestamps


async def loaded(at: Loading, *rows: str, value: str = "1") -> tuple[RowLoad, LoadTimestamps]:
    """A load of these rows that is complete."""
    load = load_of(at)
    timestamps = await begun(load, *rows, value=value)
    await load.finish(timestamps)
    return load, timestamps


async def rows_of(at: Loading, table: Table[str] = T) -> dict[str, str]:
    column = table.column("v", codecs.text)
    async with at.database.snapshot() as snapshot:
        return {row.key: row[column] async for row in snapshot.scan(table)}


async def collect(at: Loading) -> None:
    """Everything that is older than now."""
    engine = at.database.internal.engine
    rows = engine._rows
    assert rows is not None

    async def registered() -> dict[int, TableSchema]:
        used = [one for one in at.cluster.kept.current.tables.values() if one.is_used]
        return {one.table_id: TableSchema.of(one.schema_version, ()) for one in used}

    history = RowHistory(engine.env, rows.store, rows.times, engine.world, registered, share=1.0)
    below = await engine.env.timestamps.get()
    await history.collect(Decided(dict.fromkeys(await registered(), below), below))


async def test_rows_appear_together_when_the_load_is_finished(at: Loading) -> None:
    load = load_of(at)
    timestamps = await begun(load, "a", "b", value=LONG)
    before = at.database.snapshot()
    await before.timestamp()
    assert await at.database.tables() == []
    with pytest.raises(SchemaError, match="there is no table 't'"):
        await rows_of(at)
    await load.load(cells("c"), timestamps)
    await load.finish(timestamps)
    assert await rows_of(at) == {"a": LONG, "b": LONG, "c": "1"}
    with pytest.raises(SchemaError, match="'t' is younger than the snapshot"):
        await before.get("a", V)
    async with at.database.snapshot() as snapshot:
        async for page in snapshot.scan_cells(T):
            assert set(page.commit_timestamps) == {timestamps.commit}
    async with at.database.transaction() as tx:
        await tx.set("a", V, await tx.get("b", V, default="") + "!")
    assert (await rows_of(at))["a"] == LONG + "!"


async def test_tables_of_several_loads_appear_at_the_same_moment(at: Loading) -> None:
    one, other = load_of(at), load_of(at, table="other")
    begins = [(one, await begun(one, "a")), (other, await begun(other, "b"))]
    await finish_together(begins)
    tables = at.cluster.kept.current
    assert tables.table("t").created_at == tables.table("other").created_at
    assert (await rows_of(at), await rows_of(at, OTHER)) == ({"a": "1"}, {"b": "1"})
    await finish_together(begins)  # the answer of the first call may have been lost
    assert await rows_of(at) == {"a": "1"}


async def test_a_load_that_was_taken_over_publishes_nothing_of_any_table(at: Loading) -> None:
    one, other = load_of(at), load_of(at, table="other")
    begins = [(one, await begun(one, "a")), (other, await begun(other, "b"))]
    await load_of(at).begin()
    with pytest.raises(InvalidArgument, match="another run has taken the load over"):
        await finish_together(begins)
    assert await at.database.tables() == []


async def test_what_a_former_run_still_writes_is_seen_by_nobody(at: Loading) -> None:
    former, later = load_of(at), load_of(at)
    old = await begun(former, "a", "b", value="old")
    new = await begun(later, "b", value="new")
    await former.load(cells("c", value="old"), old)
    await later.finish(new)
    await former.load(cells("b", "d", value="old"), old)
    assert await rows_of(at) == {"b": "new"}
    assert not await former.resume(old)
    await at.cluster.remove_dropped()
    with pytest.raises(SchemaError):
        await former.load(cells("e", value="old"), old)
    assert await rows_of(at) == {"b": "new"}


async def test_an_interrupted_run_is_resumed_until_it_is_complete(at: Loading) -> None:
    timestamps = await begun(load_of(at), "a")
    again = load_of(at)
    assert await again.resume(timestamps)
    await again.load(cells("b"), timestamps)
    await again.finish(timestamps)
    assert await rows_of(at) == {"a": "1", "b": "1"}
    with pytest.raises(LoadComplete, match="the load 'load' is complete"):
        await load_of(at).resume(timestamps)
    with pytest.raises(LoadComplete):
        await load_of(at).undo(timestamps)


async def test_an_abandoned_load_leaves_nothing(at: Loading) -> None:
    timestamps = await begun(load_of(at), "a")
    assert not await load_of(at).abandon()
    assert not await load_of(at).resume(timestamps)
    assert not await load_of(at).undo(timestamps)
    await at.cluster.remove_dropped()
    assert not at.cluster.kept.current.tables
    await loaded(at, "b")
    assert await load_of(at).abandon()
    assert await rows_of(at) == {"b": "1"}


async def test_a_run_from_the_future_is_refused(at: Loading) -> None:
    """Otherwise no load could begin until the oracle has come there."""
    future = at.cluster.newest_timestamp + (3_600_000 << SEQUENCE_BITS)
    table = pb.CreateTableRequest(name="t")
    for asking in (
        at.cluster.begin_load(pb.BeginLoadRequest(table=table, load="load", run=future)),
        at.cluster.abandon_load(pb.AbandonLoadRequest(table="t", load="load", run=future)),
    ):
        with pytest.raises(InvalidArgument, match="run: expected a timestamp that the oracle has"):
            await asking
    await loaded(at, "a")
    assert await rows_of(at) == {"a": "1"}


async def test_undoing_one_run_leaves_a_later_one_alone(at: Loading) -> None:
    former, later = load_of(at), load_of(at)
    old, new = await begun(former, "a"), await begun(later, "b")
    assert not await former.undo(old)
    await later.finish(new)
    assert await rows_of(at) == {"b": "1"}


async def test_a_late_call_to_begin_creates_no_table(at: Loading) -> None:
    """Nobody would ever end that load."""
    load = load_of(at)
    timestamps = await begun(load, "a")
    await load.abandon()
    late = pb.BeginLoadRequest(
        table=pb.CreateTableRequest(name="t"), load="load", run=timestamps.start
    )
    with pytest.raises(InvalidArgument, match="it was ended, or another run has taken"):
        await at.cluster.begin_load(late)


async def test_a_table_that_exists_is_not_loaded(at: Loading) -> None:
    await at.database.create_table(T)
    with pytest.raises(TableExists, match="table 't' exists: in a row store") as refused:
        await load_of(at).begin()
    assert isinstance(refused.value, NotEmpty)
    assert refused.value.commit_timestamp == 0


async def test_a_table_that_is_being_loaded_is_not_created(at: Loading) -> None:
    load = load_of(at)
    timestamps = await begun(load, "a")
    for beginning in (at.database.create_table(T), load_of(at, "another").begin()):
        with pytest.raises(InvalidArgument, match="'t' is being loaded by the bulk load 'load'"):
            await beginning
    await load.finish(timestamps)
    with pytest.raises(TableExists) as refused:
        await load_of(at, "another").begin()
    assert refused.value.commit_timestamp == timestamps.commit


async def test_what_cannot_be_loaded_is_refused(at: Loading) -> None:
    for start, notify, what in (
        (b"a", False, "a whole table is loaded in bulk, not a range"),
        (b"", True, "which has no observers to notify"),
    ):
        with pytest.raises(UsageError, match=what):
            RowLoad(at.database, LoadPlan("t", "load", start=start, end=b"", notify=notify))
    plan = LoadPlan("t", "load", start=b"", end=b"", notify=False)
    for options, what in (
        (pb.TableOptions(change_feed=True), "have no change feeds"),
        (pb.TableOptions(ttls=[{"column": b"v", "ttl_milliseconds": 1}]), "expires"),
    ):
        with pytest.raises(InvalidArgument, match=what):
            await RowLoad(at.database, plan, options).begin()
    index = pb.Index(name="v", columns=[pb.ColumnCodec(column=b"v", codec="text")])
    table = pb.CreateTableRequest(name="t", indexes=[index])
    with pytest.raises(InvalidArgument, match=r"indexes: a load fills a table without indexes"):
        await at.cluster.begin_load(pb.BeginLoadRequest(table=table, load="load", run=1))
    load = load_of(at)
    timestamps = await load.begin()
    for bad in ((b"a" * 5_000, b"v", b""), (b"a", b"", b""), (b"a", b"v", bytes(5 << 20))):
        with pytest.raises(InvalidArgument):
            await load.load([bad], timestamps)


async def test_a_call_without_an_answer_is_made_again(
    at: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct, lost = at.store.write, [2]

    async def write(table_id: int, rows: Sequence[RowChange], timeout_seconds: float) -> None:
        await correct(table_id, rows, timeout_seconds)
        if lost[0]:
            lost[0] -= 1
            raise ExecutionUnknown("the answer was lost")

    monkeypatch.setattr(at.store, "write", write)
    await loaded(at, "a")
    assert lost == [0]
    assert await rows_of(at) == {"a": "1"}


async def test_many_cells_are_many_calls_of_bounded_size(
    at: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_CALL_CHANGES_MAX", 10)
    correct, sizes, open_calls = at.store.write, [], [0, 0]

    async def write(table_id: int, rows: Sequence[RowChange], timeout_seconds: float) -> None:
        open_calls[0] += 1
        open_calls[1] = max(open_calls)
        sizes.append(sum(len(row.changes) for row in rows))
        await correct(table_id, rows, timeout_seconds)
        open_calls[0] -= 1

    monkeypatch.setattr(at.store, "write", write)
    load = load_of(at)
    timestamps = await load.begin()
    many = [(b"a" if at < 50 else b"%03d" % at, b"v%d" % at, b"1") for at in range(200)]
    await load.load(sorted(many), timestamps)
    await load.finish(timestamps)
    assert len(sizes) > 20
    assert max(sizes) <= 11
    assert open_calls[1] <= loading.CALLS_IN_FLIGHT
    async with at.database.snapshot() as snapshot:
        found = [row async for row in snapshot.scan(T)]
    assert len(found) == 151


async def test_a_load_may_be_repeated_however_often_it_has_failed(
    at: Loading,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With each failure, a call is about to begin that is cancelled before it has."""
    monkeypatch.setattr(loading, "_CALL_CHANGES_MAX", 2)
    load = load_of(at)
    timestamps = await load.begin()
    many = [(b"%03d" % number, b"v", b"1") for number in range(20)]

    async def refuse(table_id: int, rows: Sequence[RowChange], timeout_seconds: float) -> None:
        await asyncio.sleep(0.1)
        raise InvalidArgument("rows", "refused")

    for _ in range(2 * loading.CALLS_IN_FLIGHT):
        with monkeypatch.context() as patch:
            patch.setattr(at.store, "write", refuse)
            with pytest.raises(InvalidArgument, match="refused"):
                await asyncio.wait_for(load.load(many, timestamps), 60.0)
    await asyncio.wait_for(load.load(many, timestamps), 60.0)
    await load.finish(timestamps)
    assert len(await rows_of(at)) == 20


async def delete_and_collect(at: Loading) -> RowLoader:
    """Loads, deletes and collects a row; then a late call of the load comes."""
    load, timestamps = await loaded(at, "a", "b", "c", value=LONG)
    async with at.database.transaction() as tx:
        await tx.delete("a", V)
        await tx.set("b", V, "new")
    for _ in range(2):
        await collect(at)
    await load.load(cells("a", "b", "c", value=LONG), timestamps)
    return load._loader


async def test_a_late_call_brings_nothing_back_that_was_deleted_and_collected(at: Loading) -> None:
    await delete_and_collect(at)
    for _ in range(2):
        assert await rows_of(at) == {"b": "new", "c": LONG}
        await collect(at)


async def test_without_the_deletion_it_would_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    monkeypatch.setattr(collection, "LOADED", b"another")
    async with loading_site() as at:
        await delete_and_collect(at)
        assert await rows_of(at) == {"a": LONG, "b": "new", "c": LONG}


async def test_deletions_in_other_rows_of_a_loaded_table_are_collected(at: Loading) -> None:
    await loaded(at, "a")
    async with at.database.transaction() as tx:
        await tx.set("x", V, "1")
    async with at.database.transaction() as tx:
        await tx.delete("x", V)
        await tx.delete("a", V)
    await collect(at)
    table_id = at.cluster.kept.current.table("t").table_id
    model = cast("BigtableInMemory", at.network.handlers[MODEL.address])
    (table,) = [rows for name, rows in model.tables.items() if name.endswith(f"-{table_id}")]
    families = {key: sorted({family for family, _, _ in row}) for key, row in table.rows.items()}
    assert families == {b"a": ["g", "w"], b"x": ["g"]}
