"""Readers among the locks of a shared transaction: what they pay does not grow with its rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from percolator import Limits, Timestamp, observes
from percolator.aio import Database
from percolator.aio.replacing import rest_deleted
from percolator.aio.shared import Receipt, SharedTransaction
from percolator.errors import CellAddress, ConflictError, SchemaError
from percolator.protocol.roll_forward import MANY as LOCKS_TOLD
from percolator.protocol.shared.attempt import Attempt
from percolator.protocol.write_set import Write
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.aio.shared_attempts import (
    ROWS,
    TTL_SECONDS,
    dies,
    receipt_of,
    set_value,
    share_of,
    values_of,
)
from tests.unit.connected import Cluster, accounts, balance, connected, put, written_out

PATIENCE = Limits().push_after_seconds
FEW, MANY = 50, 2_500
TASKS = ("a", "z")
MESSAGES_MAX = 4 * len(TASKS)
"""A question and a push for each part, and one of each again if it was begun anew."""


class Counted:
    """Mutations that the cluster was asked for since this was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[pb.Mutation] = []
        self.messages = 0
        mutate = Cluster.mutate

        async def counting(cluster: Cluster, request: pb.MutateRequest) -> pb.MutateResponse:
            self.messages += 1
            for batch in request.batches:
                self.asked += written_out(batch)
            return await mutate(cluster, request)

        monkeypatch.setattr(Cluster, "mutate", counting)


def _rows(task: str, count: int) -> dict[str, int]:
    return {f"{task}{number:05}": number for number in range(count)}


@asynccontextmanager
async def _job(db: Database, rows: int, *, finished: bool) -> AsyncIterator[SharedTransaction]:
    """A shared transaction with a lock on each row, before its commit."""
    async with db.shared_transaction() as shared:
        shares = [await share_of(db, shared.ticket, task, **_rows(task, rows)) for task in TASKS]
        if finished:
            for share in shares:
                await share.finish()
        yield shared


FEW_VALUES = _rows("a", FEW) | _rows("z", FEW)


def _now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("rows", [FEW, MANY])
async def test_a_scan_pays_for_parts_and_not_for_locks(
    monkeypatch: pytest.MonkeyPatch, rows: int, finished: bool, db: Database
) -> None:
    async with _job(db, rows, finished=finished):
        counted, began = Counted(monkeypatch), _now()
        async with db.snapshot() as snapshot:
            assert [row async for row in snapshot.scan(accounts)] == []
            assert len(counted.asked) <= MESSAGES_MAX
            assert _now() - began < 2 * PATIENCE
            # The same snapshot knows it by now.
            asked, began = len(counted.asked), _now()
            assert [row async for row in snapshot.scan(accounts)] == []
            assert await snapshot.get_many(accounts, list(_rows("a", rows)), [balance])
            assert len(counted.asked) == asked
            assert _now() - began < PATIENCE / 2


@pytest.mark.parametrize("rows", [FEW, MANY])
async def test_reading_many_rows_pays_for_parts_and_not_for_locks(
    monkeypatch: pytest.MonkeyPatch, rows: int, db: Database
) -> None:
    async with _job(db, rows, finished=True):
        counted, began = Counted(monkeypatch), _now()
        keys = [row for task in TASKS for row in _rows(task, rows)]
        found = await db.snapshot().get_many(accounts, keys, [balance])
        assert [row.get(balance) for row in found] == [None] * len(keys)
        assert len(counted.asked) <= MESSAGES_MAX
        assert _now() - began < 2 * PATIENCE


@pytest.mark.parametrize("limits", [Limits(page_rows_max=100)])
async def test_a_scan_in_small_pages_asks_once(db: Database) -> None:
    """Pages behind the first pass the locks: they are not met again."""
    async with _job(db, 1000, finished=True), db.snapshot() as snapshot:
        assert [row async for row in snapshot.scan(accounts)] == []
        assert snapshot.statistics.retries <= 2 * len(TASKS)
        assert len(snapshot.statistics.lock_waits) == len(TASKS)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("limit", [None, 1, 150, 299])
@pytest.mark.parametrize("limits", [Limits(page_rows_max=7)])
async def test_a_scan_that_begins_again_behind_a_page_leaves_nothing_out(
    reverse: bool, limit: int | None, db: Database
) -> None:
    before = {f"k{number:03}": number for number in range(300)}
    await put(db, balance, **before)
    async with db.shared_transaction() as shared:
        for task in range(10):
            rows = {f"k{number:03}": -1 for number in range(task * 30, task * 30 + 20)}
            await share_of(db, shared.ticket, str(task), **rows)
        scan = db.snapshot().scan(accounts, reverse=reverse, limit=limit)
        found = [(row.key, row[balance]) async for row in scan]
    assert found == sorted(before.items(), reverse=reverse)[:limit]


async def test_a_part_that_is_being_written_is_pushed_at_once(db: Database) -> None:
    await set_value(db, "ann", 0)
    async with db.shared_transaction() as shared:
        share = await share_of(db, shared.ticket, "1", ann=1)
        for _ in range(20):
            began = _now()
            assert await values_of(db) == {"ann": 0}
            assert _now() - began < PATIENCE / 2
        commit = await shared.commit([await share.finish()])
    assert commit is not None
    assert await values_of(db) == {"ann": 1}


async def test_a_finished_part_is_pushed_when_the_snapshot_is_as_old_as_readers_wait(
    db: Database,
) -> None:
    await set_value(db, "ann", 0)
    async with db.shared_transaction() as shared:
        await receipt_of(db, shared.ticket, "1", ann=1)
        await asyncio.sleep(0.01)
        at, began = await db.timestamp(), _now()
        assert await values_of(db, at) == {"ann": 0}
        assert PATIENCE * 0.9 <= _now() - began < PATIENCE * 1.5
        old = await db.timestamp()
        await asyncio.sleep(PATIENCE)
        began = _now()
        assert await values_of(db, old) == {"ann": 0}
        assert _now() - began < PATIENCE / 2


async def test_a_crowd_of_readers_does_not_hold_up_the_commit(db: Database) -> None:
    await set_value(db, "ann", 0)
    has_ended = False

    async def reads() -> None:
        while not has_ended:
            assert await values_of(db) in ({"ann": 0}, {"ann": 1})
            await asyncio.sleep(0.004)

    async with db.shared_transaction() as shared:
        share = await share_of(db, shared.ticket, "1", ann=1)
        readers = [asyncio.ensure_future(reads()) for _ in range(10)]
        await asyncio.sleep(0.2)
        receipt = await share.finish()
        began = _now()
        commit = await shared.commit([receipt])
        took = _now() - began
    has_ended = True
    await asyncio.gather(*readers)
    assert commit is not None
    assert took < 4 * PATIENCE


async def _committed_job(db: Database, values: dict[str, int]) -> SharedTransaction:
    """A job whose rows are still locked: nobody has met them since its commit."""
    async with db.shared_transaction() as shared:
        receipts = [
            await receipt_of(
                db, shared.ticket, task, **{r: v for r, v in values.items() if r[0] == task}
            )
            for task in "az"
        ]
        await shared.commit(receipts)
    return shared


async def test_what_was_committed_is_read_before_its_locks_are_gone(
    db: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tablet that is slow to roll cells forward holds up no reader."""
    await set_value(db, "a00000", -1)
    before = await db.timestamp()
    await _committed_job(db, FEW_VALUES)
    mutate = Cluster.mutate

    async def slow(cluster: Cluster, request: pb.MutateRequest) -> pb.MutateResponse:
        await asyncio.sleep(1.0)
        return await mutate(cluster, request)

    monkeypatch.setattr(Cluster, "mutate", slow)
    written, began = FEW_VALUES, _now()
    assert await values_of(db) == written
    async with db.snapshot() as snapshot:
        found = await snapshot.get_many(accounts, list(written), [balance])
        assert [row[balance] for row in found] == list(written.values())
        assert await snapshot.get("a00007", balance) == 7
    assert await values_of(db, before) == {"a00000": -1}
    assert _now() - began < 0.5
    monkeypatch.setattr(Cluster, "mutate", mutate)
    await db.internal.engine.env.background.drain(10.0)
    counted = Counted(monkeypatch)
    assert await values_of(db) == written
    assert counted.asked == [], "the locks are gone"


async def test_timestamps_of_values_that_are_read_from_locks_are_those_of_the_commit(
    db: Database,
) -> None:
    async with db.shared_transaction() as shared:
        receipt = await receipt_of(db, shared.ticket, "1", ann=1)
        commit = await shared.commit([receipt])
    pages = db.snapshot().scan_cells(accounts)
    assert [at async for page in pages for at in page.commit_timestamps] == [commit]


async def test_a_value_that_is_read_from_a_lock_expires_as_any_other(
    db: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A snapshot sees the same before and after the cell is rolled forward."""
    await db.set_ttl(balance, timedelta(seconds=2))
    await _committed_job(db, FEW_VALUES)
    young = await db.timestamp()
    await asyncio.sleep(3.0)
    old = await db.timestamp()
    written = FEW_VALUES
    mutate = Cluster.mutate

    async def never(cluster: Cluster, request: pb.MutateRequest) -> pb.MutateResponse:
        await asyncio.sleep(3_600)
        return await mutate(cluster, request)

    async def point_reads(at: Timestamp) -> list[int | None]:
        async with db.snapshot(at=at) as snapshot:
            alone = await snapshot.get("a00007", balance)
            together = await snapshot.get_many(accounts, ["a00007", "z00001"], [balance])
            return [alone, *(row.get(balance) for row in together)]

    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "mutate", never)
        assert await values_of(db, old) == {}
        assert await point_reads(old) == [None, None, None]
        assert await values_of(db, young) == written
        assert await point_reads(young) == [7, 7, 1]
        await db.internal.engine.env.background.cancel()
    assert await values_of(db, old) == {}
    assert await values_of(db, young) == written
    await db.internal.engine.env.background.drain(10.0)
    assert await values_of(db, old) == {}
    assert await point_reads(old) == [None, None, None]
    assert await values_of(db, young) == written


async def test_a_feed_tells_of_what_was_committed_before_its_locks_are_gone(db: Database) -> None:
    """Unlike a read, it needs the records: a stream that takes what there is would stop short."""
    await db.set_change_feed(accounts, on=True)
    before = await db.timestamp()
    await _committed_job(db, FEW_VALUES)
    newest = await db.newest_change(accounts, after=before)
    assert newest is not None
    found = [one.key async for one in db.changes(accounts, after=before, until=newest)]
    assert len(found) == len(TASKS) * FEW


# What a dead shared transaction has locked is settled in batches, by whoever meets it first.

DEAD_ROWS_OF_A_TASK = 1_500
DEAD_ROWS = 2 * DEAD_ROWS_OF_A_TASK
SETTLING_MESSAGES_MAX = DEAD_ROWS // 100
"""Far fewer than locks: one round trip for each would stop a reader of a large job for minutes."""


@asynccontextmanager
async def _left_behind(*, committed: bool) -> AsyncIterator[Database]:
    """A table whose rows are locked by two tasks of a job that nobody keeps alive."""
    async with connected() as (db, _):
        shared = db.shared_transaction()
        shared._tell_tablets = _untold  # type: ignore[assignment, method-assign]
        await shared.begin()
        receipts = [
            await receipt_of(db, shared.ticket, task, **_rows(task, DEAD_ROWS_OF_A_TASK))
            for task in ("a", "z")
        ]
        if committed:
            await shared.commit(receipts)
        else:
            dies(shared)
            await asyncio.sleep(TTL_SECONDS + 1.0)
        # What this client knows of the job would spare it the questions.
        verdicts = db.internal.engine.env.verdicts
        verdicts._newer.clear()
        verdicts._older.clear()
        yield db


async def _untold(_: int) -> None:
    """The driver: it has not told the tablets of its commit."""


@pytest.mark.parametrize("committed", [False, True])
async def test_a_scan_settles_all_locks_with_few_messages(
    monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    # Tablets that are told of the commit do it without any.
    monkeypatch.setattr("percolator.protocol.roll_forward.MANY", DEAD_ROWS)
    async with _left_behind(committed=committed) as db:
        counted = Counted(monkeypatch)
        found = await values_of(db)
        assert found == (
            _rows("a", DEAD_ROWS_OF_A_TASK) | _rows("z", DEAD_ROWS_OF_A_TASK) if committed else {}
        )
        assert counted.messages <= SETTLING_MESSAGES_MAX
        await db.internal.engine.env.background.drain(10.0)
        assert len(counted.asked) >= DEAD_ROWS, "the locks were settled, not passed"
        settled = counted.messages
        assert await values_of(db) == found
        assert counted.messages == settled


@pytest.mark.parametrize("committed", [False, True])
async def test_a_writer_settles_the_locks_of_all_its_rows_with_few_messages(
    monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    async with _left_behind(committed=committed) as db:
        counted = Counted(monkeypatch)
        written = dict.fromkeys(_rows("a", DEAD_ROWS_OF_A_TASK), -1)
        async with db.transaction() as tx:
            for row in written:
                await tx.set(row, balance, -1)
        assert counted.messages <= SETTLING_MESSAGES_MAX
        rest = _rows("z", DEAD_ROWS_OF_A_TASK) if committed else {}
        assert await values_of(db) == written | rest


# Replacing a table: what the tasks of a shared transaction write appears as the rest goes.

on_both_engines = pytest.mark.usefixtures("engine_of_cells")

NOTE = accounts.column("note", balance.codec)


async def _rest(db: Database, shared: SharedTransaction, *receipts: Receipt) -> Receipt:
    return await rest_deleted(
        db.internal,
        shared.ticket,
        receipts,
        db.snapshot(),
        accounts,
        columns=(balance.name,),
        task="rest",
        timeout=10.0,
    )


async def _replaces(db: Database, **values: int) -> Timestamp | None:
    async with db.shared_transaction() as shared:
        receipt = await receipt_of(db, shared.ticket, "0", **values)
        return await shared.commit([receipt, await _rest(db, shared, receipt)])


@on_both_engines
async def test_readers_see_the_old_rows_or_the_new_ones(db: Database) -> None:
    await put(db, balance, **dict.fromkeys(ROWS, 1))
    async with db.shared_transaction() as shared:
        receipts = [
            await receipt_of(db, shared.ticket, "0", ann=2),
            await receipt_of(db, shared.ticket, "1", mia=2, zoe=2),
        ]
        rest = await _rest(db, shared, *receipts)
        assert rest.cells == 2  # bob and joe; the others are written over
        assert await values_of(db) == dict.fromkeys(ROWS, 1)
        commit = await shared.commit([*receipts, rest])
    assert commit is not None
    assert await values_of(db, Timestamp(commit - 1)) == dict.fromkeys(ROWS, 1)
    assert await values_of(db, commit) == {"ann": 2, "mia": 2, "zoe": 2}


async def test_cells_that_the_job_writes_over_are_not_locked_again(
    db: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would cost as much as one that goes, although it is only refused."""
    await put(db, balance, **dict.fromkeys(ROWS, 1))
    async with db.shared_transaction() as shared:
        receipts = [
            await receipt_of(db, shared.ticket, "0", ann=2),
            await receipt_of(db, shared.ticket, "1", mia=2, zoe=2),
        ]
        asked: set[bytes] = set()
        prewrite = Attempt.prewrite

        async def noting(
            attempt: Attempt, writes: Mapping[CellAddress, Write], deadline: float
        ) -> None:
            asked.update(cell.row for cell in writes)
            await prewrite(attempt, writes, deadline)

        monkeypatch.setattr(Attempt, "prewrite", noting)
        rest = await _rest(db, shared, *receipts)
        assert asked == {b"bob", b"joe"}
        await shared.commit([*receipts, rest])
    assert await values_of(db) == {"ann": 2, "mia": 2, "zoe": 2}


@on_both_engines
async def test_a_table_is_replaced_again_and_again_and_emptied(db: Database) -> None:
    for number in range(4):
        values = {"mia": number, ROWS[number]: number}
        await _replaces(db, **values)
        assert await values_of(db) == values
    async with db.shared_transaction() as shared:
        await shared.commit([await _rest(db, shared)])
    assert await values_of(db) == {}


@on_both_engines
async def test_other_columns_stay(db: Database) -> None:
    async with db.transaction() as tx:
        await tx.set("bob", NOTE, 5)
        await tx.set("bob", balance, 1)
    await _replaces(db, ann=2)
    assert await db.get("bob", balance) is None
    assert await db.get("bob", NOTE) == 5


@on_both_engines
async def test_what_an_attempt_that_was_not_chosen_has_locked_is_deleted(db: Database) -> None:
    """Its row is an old one, and would stay if its lock counted as the job's."""
    await put(db, balance, bob=1, joe=1)
    async with db.shared_transaction() as shared:
        await share_of(db, shared.ticket, "0", joe=7)  # it still runs
        await receipt_of(db, shared.ticket, "0", bob=7)  # its receipt was lost
        chosen = await receipt_of(db, shared.ticket, "0", ann=2)
        await shared.commit([chosen, await _rest(db, shared, chosen)])
    assert await values_of(db) == {"ann": 2}


@on_both_engines
async def test_a_row_that_others_write_before_the_rest_is_read_goes_and_later_ones_stay(
    db: Database, shared: SharedTransaction
) -> None:
    receipt = await receipt_of(db, shared.ticket, "0", ann=2)
    await set_value(db, "bob", 1)
    rest = await _rest(db, shared, receipt)
    await set_value(db, "joe", 1)
    await shared.commit([receipt, rest])
    assert await values_of(db) == {"ann": 2, "joe": 1}


@on_both_engines
async def test_a_job_that_is_given_up_leaves_the_old_rows(db: Database) -> None:
    await put(db, balance, **dict.fromkeys(ROWS, 1))
    async with db.shared_transaction() as shared:
        receipt = await receipt_of(db, shared.ticket, "0", ann=2)
        rest = await _rest(db, shared, receipt)
        await shared.abort()
    assert await values_of(db) == dict.fromkeys(ROWS, 1)
    async with db.internal.shared_transaction(None, None, 1.0, shared.ticket) as again:
        with pytest.raises(ConflictError, match="none of it is committed"):
            await again.commit([receipt, rest])
    await put(db, balance, **dict.fromkeys(ROWS, 3))  # nothing is in the way


@on_both_engines
async def test_a_driver_that_dies_leaves_the_old_rows_and_its_locks_expire(db: Database) -> None:
    await set_value(db, "bob", 1)
    shared = db.shared_transaction()
    await shared.begin()
    await _rest(db, shared, await receipt_of(db, shared.ticket, "0", ann=2))
    shared._end("has died")
    assert await values_of(db) == {"bob": 1}
    await asyncio.sleep(20.0)
    await set_value(db, "bob", 3)
    assert await values_of(db) == {"bob": 3}


@on_both_engines
async def test_a_table_that_was_made_again_meanwhile_is_not_replaced(
    db: Database, shared: SharedTransaction
) -> None:
    await db.drop_table(accounts)
    await db.create_table(accounts)
    await set_value(db, "bob", 1)
    with pytest.raises(SchemaError, match="younger"):
        await _rest(db, shared)
    assert await values_of(db) == {"bob": 1}


# Tablets roll the locks of a committed job forward: its driver tells them, or who meets many.

ROWS_OF_A_TABLET = 1_500
"""In each of the two tablets."""
VALUES = {f"{task}{number:05}": number for task in "az" for number in range(ROWS_OF_A_TABLET)}


class Watched(Cluster):
    """Counts what it is told and sent."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.told: list[pb.RollForwardRequest] = []
        self.mutations = 0

    async def roll_forward(self, request: pb.RollForwardRequest) -> pb.RollForwardResponse:
        self.told.append(request)
        return await super().roll_forward(request)

    async def mutate(self, request: pb.MutateRequest) -> pb.MutateResponse:
        self.mutations += sum(len(written_out(batch)) for batch in request.batches)
        return await super().mutate(request)

    def locks(self) -> int:
        return sum(len(tablet._state.mirror) for tablet in self.tablets.values())


async def _settled(cluster: Watched) -> None:
    """Returns once the tablets have done what they were told."""
    for _ in range(1_000):
        if not cluster.locks():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{cluster.locks()} locks are left")


@pytest.mark.parametrize("kind_of_cluster", [Watched])
async def test_the_driver_tells_all_tablets(db: Database, cluster: Watched) -> None:
    sent_before = cluster.mutations
    shared = await _committed_job(db, VALUES)
    await shared.told(1.0)
    assert len(cluster.told) == 2
    await _settled(cluster)
    assert cluster.mutations - sent_before < len(VALUES) * 1.1, "more than the prewrites"
    assert await values_of(db) == VALUES


@pytest.mark.parametrize("kind_of_cluster", [Watched])
async def test_the_driver_knows_what_to_tell_from_receipts_that_can_be_read_only_once(
    db: Database, cluster: Watched, shared: SharedTransaction
) -> None:
    receipts: Any = iter([await receipt_of(db, shared.ticket, "1", ann=1, zoe=2)])
    await shared.commit(receipts)
    await shared.told(1.0)
    await _settled(cluster)
    assert await values_of(db) == {"ann": 1, "zoe": 2}


@pytest.mark.parametrize("kind_of_cluster", [Watched])
async def test_a_reader_of_many_locks_tells_their_tablet(
    monkeypatch: pytest.MonkeyPatch, db: Database, cluster: Watched
) -> None:
    """Also if its driver died right after the commit."""
    monkeypatch.setattr(SharedTransaction, "_tell_tablets", _dead)
    await _committed_job(db, VALUES)
    sent_before = cluster.mutations
    assert cluster.locks() == len(VALUES)
    assert await values_of(db) == VALUES
    await _settled(cluster)
    assert 2 <= len(cluster.told) <= 6, "one for each page would be no better than before"
    assert cluster.mutations - sent_before < len(VALUES) / 100
    assert await values_of(db) == VALUES


async def _dead(self: SharedTransaction, commit: int) -> None:
    """The process has ended."""


@pytest.mark.parametrize("kind_of_cluster", [Watched])
async def test_few_locks_are_rolled_forward_one_by_one(
    monkeypatch: pytest.MonkeyPatch, db: Database, cluster: Watched
) -> None:
    monkeypatch.setattr(SharedTransaction, "_tell_tablets", _dead)
    values = {f"{task}{number}": number for task in "az" for number in range(LOCKS_TOLD // 2)}
    await _committed_job(db, values)
    assert await values_of(db) == values
    await _settled(cluster)
    assert not cluster.told


@pytest.mark.parametrize("kind_of_cluster", [Watched])
async def test_observers_are_told_even_under_a_newer_schema(db: Database, cluster: Watched) -> None:
    """One that was registered while the job wrote, by another client."""
    async with db.shared_transaction() as shared:
        receipts = [await receipt_of(db, shared.ticket, "a", **_rows("a", LOCKS_TOLD))]
        schema = db.internal.engine.catalog
        stale = {info: schema.get(info) for info in _tables(receipts)}
        await db.register_observers([_index])
        for table_id, known in stale.items():
            assert known is not None
            schema._by_id[table_id] = known  # as the driver's process knows it
        await shared.commit(receipts)
        await shared.told(1.0)
    await _settled(cluster)
    written = sum(tablet.statistics().notifications_written for tablet in cluster.tablets.values())
    assert written == LOCKS_TOLD


def _tables(receipts: Iterable[object]) -> set[int]:
    return {table for one in receipts for table in one.tables}  # type: ignore[attr-defined]


@observes(balance)
def _index(tx: object, row: str) -> None:
    """Is only registered."""
