"""Readers among the locks of a shared transaction: what they pay does not grow with its rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from percolator import Limits, Timestamp
from percolator.aio import Database
from percolator.aio.shared import Receipt, SharedTransaction
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.aio.shared_attempts import receipt_of, set_value, share_of, values_of
from tests.unit.connected import Cluster, accounts, balance, connected, written_out

PATIENCE = Limits().push_after_seconds
FEW, MANY = 50, 2_500
TASKS = ("a", "z")
MESSAGES_MAX = 4 * len(TASKS)
"""A question and a push for each part, and one of each again if it was begun anew."""


class Counted:
    """What the cluster was asked since this was made: mutations, and messages with reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[pb.Mutation] = []
        mutate = Cluster.mutate

        async def counting(cluster: Cluster, request: pb.MutateRequest) -> pb.MutateResponse:
            for batch in request.batches:
                self.asked += written_out(batch)
            return await mutate(cluster, request)

        monkeypatch.setattr(Cluster, "mutate", counting)


def _rows(task: str, count: int) -> dict[str, int]:
    return {f"{task}{number:05}": number for number in range(count)}


@asynccontextmanager
async def _job(db: Database, rows: int, *, finished: bool) -> AsyncIterator[SharedTransaction]:
    """A shared transaction with a lock on each row, before its commit."""
    async with db.shared_transaction() as whole:
        shares = [await share_of(db, whole.ticket, task, **_rows(task, rows)) for task in TASKS]
        if finished:
            for share in shares:
                await share.finish()
        yield whole


def _now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("rows", [FEW, MANY])
async def test_a_scan_pays_for_parts_and_not_for_locks(
    monkeypatch: pytest.MonkeyPatch, rows: int, finished: bool
) -> None:
    async with connected() as (db, _), _job(db, rows, finished=finished):
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
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    async with connected() as (db, _), _job(db, rows, finished=True):
        counted, began = Counted(monkeypatch), _now()
        keys = [row for task in TASKS for row in _rows(task, rows)]
        async with db.snapshot() as snapshot:
            found = await snapshot.get_many(accounts, keys, [balance])
        assert [row.get(balance) for row in found] == [None] * len(keys)
        assert len(counted.asked) <= MESSAGES_MAX
        assert _now() - began < 2 * PATIENCE


async def test_a_scan_in_small_pages_asks_once() -> None:
    """Pages behind the first pass the locks: they are not met again."""
    async with (
        connected(Limits(page_rows_max=100)) as (db, _),
        _job(db, 1_000, finished=True),
        db.snapshot() as snapshot,
    ):
        assert [row async for row in snapshot.scan(accounts)] == []
        assert snapshot.statistics.retries <= 2 * len(TASKS)
        assert len(snapshot.statistics.lock_waits) == len(TASKS)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("limit", [None, 1, 150, 299])
async def test_a_scan_that_begins_again_behind_a_page_leaves_nothing_out(
    reverse: bool, limit: int | None
) -> None:
    async with connected(Limits(page_rows_max=7)) as (db, _):
        before = {f"k{number:03}": number for number in range(300)}
        async with db.transaction() as tx:
            for row, value in before.items():
                await tx.set(row, balance, value)
        async with db.shared_transaction() as whole:
            for task in range(10):
                rows = {f"k{number:03}": -1 for number in range(task * 30, task * 30 + 20)}
                await share_of(db, whole.ticket, str(task), **rows)
            async with db.snapshot() as snapshot:
                scan = snapshot.scan(accounts, reverse=reverse, limit=limit)
                found = [(row.key, row[balance]) async for row in scan]
        assert found == sorted(before.items(), reverse=reverse)[:limit]


async def test_a_part_that_is_being_written_is_pushed_at_once() -> None:
    async with connected() as (db, _):
        await set_value(db, "ann", 0)
        async with db.shared_transaction() as whole:
            share = await share_of(db, whole.ticket, "1", ann=1)
            for _ in range(20):
                began = _now()
                assert await values_of(db) == {"ann": 0}
                assert _now() - began < PATIENCE / 2
            commit = await whole.commit([await share.finish()])
        assert commit is not None
        assert await values_of(db) == {"ann": 1}


async def test_a_finished_part_is_pushed_when_the_snapshot_is_as_old_as_readers_wait() -> None:
    async with connected() as (db, _):
        await set_value(db, "ann", 0)
        async with db.shared_transaction() as whole:
            await receipt_of(db, whole.ticket, "1", ann=1)
            await asyncio.sleep(0.01)
            at, began = await db.timestamp(), _now()
            assert await values_of(db, at) == {"ann": 0}
            assert PATIENCE * 0.9 <= _now() - began < PATIENCE * 1.5
            old = await db.timestamp()
            await asyncio.sleep(PATIENCE)
            began = _now()
            assert await values_of(db, old) == {"ann": 0}
            assert _now() - began < PATIENCE / 2


async def test_a_crowd_of_readers_does_not_hold_up_the_commit() -> None:
    async with connected() as (db, _):
        await set_value(db, "ann", 0)
        has_ended = False

        async def reads() -> None:
            while not has_ended:
                assert await values_of(db) in ({"ann": 0}, {"ann": 1})
                await asyncio.sleep(0.004)

        async with db.shared_transaction() as whole:
            share = await share_of(db, whole.ticket, "1", ann=1)
            readers = [asyncio.ensure_future(reads()) for _ in range(10)]
            await asyncio.sleep(0.2)
            receipt = await share.finish()
            began = _now()
            commit = await whole.commit([receipt])
            took = _now() - began
        has_ended = True
        await asyncio.gather(*readers)
        assert commit is not None
        assert took < 4 * PATIENCE


async def _committed(db: Database, rows: int) -> None:
    """A job whose rows are still locked: nobody has met them since its commit."""
    async with db.shared_transaction() as whole:
        receipts: Sequence[Receipt] = [
            await receipt_of(db, whole.ticket, task, **_rows(task, rows)) for task in TASKS
        ]
        await whole.commit(receipts)


async def test_what_was_committed_is_read_before_its_locks_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tablet that is slow to roll cells forward holds up no reader."""
    async with connected() as (db, _):
        await set_value(db, "a00000", -1)
        before = await db.timestamp()
        await _committed(db, FEW)
        mutate = Cluster.mutate

        async def slow(cluster: Cluster, request: pb.MutateRequest) -> pb.MutateResponse:
            await asyncio.sleep(1.0)
            return await mutate(cluster, request)

        monkeypatch.setattr(Cluster, "mutate", slow)
        written, began = _rows("a", FEW) | _rows("z", FEW), _now()
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


async def test_timestamps_of_values_that_are_read_from_locks_are_those_of_the_commit() -> None:
    async with connected() as (db, _):
        async with db.shared_transaction() as whole:
            receipt = await receipt_of(db, whole.ticket, "1", ann=1)
            commit = await whole.commit([receipt])
        async with db.snapshot() as snapshot:
            pages = snapshot.scan_cells(accounts)
            assert [at async for page in pages for at in page.commit_timestamps] == [commit]


async def test_a_deletion_and_a_long_value_are_read_past_their_locks() -> None:
    async with connected(Limits(value_inline_bytes_max=1)) as (db, _):
        await set_value(db, "ann", 1)
        async with db.shared_transaction() as whole, db.share(whole.ticket, task="1") as share:
            await share.delete("ann", balance)
            await share.set("bob", balance, 123_456_789)
            await whole.commit([await share.finish()])
        assert await values_of(db) == {"bob": 123_456_789}


async def test_a_value_that_is_read_from_a_lock_expires_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A snapshot sees the same before and after the cell is rolled forward."""
    async with connected() as (db, _):
        await db.set_ttl(balance, timedelta(seconds=2))
        await _committed(db, FEW)
        young = await db.timestamp()
        await asyncio.sleep(3.0)
        old = await db.timestamp()
        written = _rows("a", FEW) | _rows("z", FEW)
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


async def test_a_feed_tells_of_what_was_committed_before_its_locks_are_gone() -> None:
    """Unlike a read, it needs the records: a stream that takes what there is would stop short."""
    async with connected() as (db, _):
        await db.set_change_feed(accounts, on=True)
        before = await db.timestamp()
        await _committed(db, FEW)
        newest = await db.newest_change(accounts, after=before)
        assert newest is not None
        found = [one.key async for one in db.changes(accounts, after=before, until=newest)]
        assert len(found) == len(TASKS) * FEW
