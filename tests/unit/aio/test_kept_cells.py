"""A shared transaction that writes only changes: cells that have their values already are locked,
and stay what they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest

from percolator import Timestamp, aio, codecs, observes
from percolator.aio import Database
from percolator.aio.replacing import rest_deleted
from percolator.aio.shared import Receipt, Share, Ticket
from percolator.errors import CellAddress, ConflictError, WrittenTwice
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import Environment
from percolator.protocol.shared import attempt
from percolator.protocol.write_set import Write
from percolator.v1.master_pb2 import SetTtlsRequest
from percolator.v1.tabletserver_pb2 import ColumnTtl
from tests.unit.aio.shared_attempts import dies, set_value, share_of, values_of
from tests.unit.connected import Cluster, DistantMaster, accounts, balance, connected, connected_to

TEXT = accounts.column("text", codecs.text)


def _changing(db: Database, ticket: Ticket) -> Share:
    return db.internal.share(ticket, "0", 0, None, only_changes=True)


async def _receipt(db: Database, ticket: Ticket, **values: int | None) -> Receipt:
    """Of an attempt that writes only changes; None deletes."""
    async with _changing(db, ticket) as share:
        for row, value in values.items():
            if value is None:
                await share.delete(row, balance)
            else:
                await share.set(row, balance, value)
        return await share.finish()


async def _writes(db: Database, **values: int | None) -> Timestamp | None:
    async with db.shared_transaction() as whole:
        return await whole.commit([await _receipt(db, whole.ticket, **values)])


async def _commits(db: Database) -> dict[str, int]:
    """When each cell was committed."""
    async with db.snapshot() as snapshot:
        found: dict[str, int] = {}
        async for page in snapshot.scan_cells(accounts):
            found |= dict(zip(map(bytes.decode, page.rows), page.commit_timestamps, strict=True))
        return found


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Something happens after an attempt has read its cells, and before it locks them."""

    correct = attempt.with_kept_cells

    def given(happens: Callable[[], Coroutine[Any, Any, object]]) -> None:
        async def read(
            env: Environment,
            cleanup: Cleanup,
            writes: Mapping[CellAddress, Write],
            read_at: int,
            deadline: float,
        ) -> dict[CellAddress, Write]:
            found = await correct(env, cleanup, writes, read_at, deadline)
            await happens()
            return found

        monkeypatch.setattr(attempt, "with_kept_cells", read)

    return given


async def test_only_changed_cells_are_committed_anew_and_notify() -> None:
    runs: list[str] = []

    @observes(balance)
    async def noting(tx: aio.Transaction, row: str) -> None:
        runs.append(row)

    async with connected() as (db, _), db.run_observers([noting]):
        for row in ("ann", "bob", "joe"):
            await set_value(db, row, 1)
        await db.wait_for_observers()
        runs.clear()
        before = await _commits(db)
        commit = await _writes(db, ann=1, bob=2, joe=None, mia=None, zoe=3)
        for row in ("ann", "mia"):  # no reader meets their locks
            async with db.transaction() as tx:
                await tx.lock(row, balance)
        await db.wait_for_observers()
        assert sorted(runs) == ["bob", "joe", "zoe"]
        assert await values_of(db) == {"ann": 1, "bob": 2, "zoe": 3}
        assert await _commits(db) == {"ann": before["ann"], "bob": commit, "zoe": commit}


async def test_an_overwrite_leaves_kept_cells_alone_and_deletes_others() -> None:
    async with connected() as (db, _):
        for row in ("ann", "bob", "joe"):
            await set_value(db, row, 1)
        before = await _commits(db)
        async with db.shared_transaction() as whole:
            receipt = await _receipt(db, whole.ticket, ann=1, bob=2)
            async with db.snapshot() as snapshot:
                rest = await rest_deleted(
                    db.internal,
                    whole.ticket,
                    [receipt],
                    snapshot,
                    accounts,
                    task="rest",
                    timeout=10.0,
                )
            assert rest.cells == 1  # joe
            commit = await whole.commit([receipt, rest])
        assert await values_of(db) == {"ann": 1, "bob": 2}
        assert await _commits(db) == {"ann": before["ann"], "bob": commit}


@pytest.mark.parametrize("newer", [1, 5])
async def test_a_cell_that_was_committed_since_it_was_read_is_written_in_full(
    meanwhile: Any, newer: int
) -> None:
    """Also if it has the same value again: nobody has looked."""
    async with connected() as (db, _):
        for row in ("ann", "bob"):
            await set_value(db, row, 1)
        before = await _commits(db)
        meanwhile(lambda: set_value(db, "ann", newer))
        commit = await _writes(db, ann=1, bob=1)
        assert await values_of(db) == {"ann": 1, "bob": 1}
        assert await _commits(db) == {"ann": commit, "bob": before["bob"]}


async def test_a_cell_that_another_job_commits_before_it_is_locked_is_written_in_full(
    meanwhile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of the other job makes the attempt begin another part, above that job's commit."""
    async with connected() as (db, _):
        await set_value(db, "ann", 1)
        async with db.shared_transaction() as other:
            locked: list[Share] = []

            async def locks() -> None:
                locked.append(await share_of(db, other.ticket, "0", ann=5))

            replace = attempt.Attempt._replace_others

            async def commits(
                self: attempt.Attempt, met: Sequence[MetLock], deadline: float
            ) -> float:
                if other.commit_timestamp is None:
                    await other.commit([await locked[0].finish()])
                return await replace(self, met, deadline)

            meanwhile(locks)
            monkeypatch.setattr(attempt.Attempt, "_replace_others", commits)
            commit = await _writes(db, ann=1)
            assert other.commit_timestamp is not None
        assert await values_of(db) == {"ann": 1}
        assert await _commits(db) == {"ann": commit}


async def test_unchanged_since_holds_for_kept_cells_too(meanwhile: Any) -> None:
    async with connected() as (db, _):
        await set_value(db, "ann", 1)
        since = await db.timestamp()
        meanwhile(lambda: set_value(db, "ann", 1))
        async with db.shared_transaction(unchanged_since=since) as whole:
            with pytest.raises(ConflictError, match="was committed at"):
                await _receipt(db, whole.ticket, ann=1)


@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 2), (2, 1), (2, 2)])
async def test_a_cell_that_is_written_twice_must_have_one_value(first: int, second: int) -> None:
    """Whichever of them it has already."""
    async with connected() as (db, _):
        await set_value(db, "ann", 1)
        async with db.shared_transaction() as whole:
            share = _changing(db, whole.ticket)
            await share.begin()
            await share.set("ann", balance, first)
            await share._flush()
            await share.set("ann", balance, second)
            if first != second:
                with pytest.raises(WrittenTwice):
                    await share.finish()
                return
            await whole.commit([await share.finish()])
        assert await values_of(db) == {"ann": first}


async def test_a_later_attempt_replaces_one_that_has_kept_cells() -> None:
    async with connected() as (db, _):
        await set_value(db, "ann", 1)
        await set_value(db, "bob", 1)
        async with db.shared_transaction() as whole:
            first = _changing(db, whole.ticket)
            await first.begin()
            await first.set("ann", balance, 1)
            await first.set("bob", balance, 2)
            await first._flush()
            dies(first)
            await whole.commit([await _receipt(db, whole.ticket, ann=2, bob=1)])
        assert await values_of(db) == {"ann": 2, "bob": 1}


async def test_another_transaction_cannot_commit_a_kept_cell_before_the_job() -> None:
    async with connected() as (db, _):
        await set_value(db, "ann", 1)
        async with db.shared_transaction() as whole:
            receipt = await _receipt(db, whole.ticket, ann=1)
            writing = asyncio.ensure_future(set_value(db, "ann", 5))
            await asyncio.sleep(1.0)
            assert not writing.done()
            await whole.commit([receipt])
            with pytest.raises(ConflictError, match="was committed"):
                await writing
        assert await values_of(db) == {"ann": 1}


async def test_values_that_expire_are_written_again() -> None:
    async with connected() as (db, _):
        await set_value(db, "ann", 1)
        await db.set_ttl(balance, timedelta(seconds=60))
        await asyncio.sleep(50.0)
        await _writes(db, ann=1)
        await asyncio.sleep(50.0)
        assert await values_of(db) == {"ann": 1}


async def test_values_that_expire_since_another_program_said_so_are_written_again() -> None:
    """The client has learned the schema before, and hears of the newer one only as it reads."""
    async with connected_to(DistantMaster) as (db, cluster):
        await _writes(db, ann=1)
        await asyncio.sleep(1.0)  # its locks are rolled forward
        ttl = ColumnTtl(column=b"balance", ttl_milliseconds=60_000)
        await cluster.set_ttls(SetTtlsRequest(table="accounts", ttls=[ttl]))
        await asyncio.sleep(50.0)
        await _writes(db, ann=1)
        await asyncio.sleep(50.0)
        assert await values_of(db) == {"ann": 1}


async def test_long_values_are_compared_too() -> None:
    async with connected() as (db, _):
        async with db.transaction() as tx:
            await tx.set("ann", TEXT, "x" * 5_000)
            await tx.set("bob", TEXT, "x" * 5_000)
        before = await _commits(db)
        async with db.shared_transaction() as whole, _changing(db, whole.ticket) as share:
            await share.set("ann", TEXT, "x" * 5_000)
            await share.set("bob", TEXT, "x" * 4_999 + "y")
            receipt = await share.finish()
            assert (receipt.cells, share.kept) == (2, 1)
            commit = await whole.commit([receipt])
        assert await _commits(db) == {"ann": before["ann"], "bob": commit}


async def test_cells_that_are_left_to_a_chosen_attempt_are_counted_by_that_one_alone() -> None:
    async with connected() as (db, _):
        for row in ("ann", "bob"):
            await set_value(db, row, 1)
        async with db.shared_transaction() as whole:
            chosen = await _receipt(db, whole.ticket, ann=1)
            starts = frozenset(part.start for part in chosen.parts)
            share = db.internal.share(whole.ticket, "rest", 1, None, 0.0, starts, only_changes=True)
            async with share:
                await share.set("ann", balance, 1)
                await share.set("bob", balance, 1)
                rest = await share.finish()
            assert (chosen.cells, rest.cells, share.kept) == (1, 1, 1)
            await whole.commit([chosen, rest])
        assert await values_of(db) == {"ann": 1, "bob": 1}


async def test_a_repeated_message_finds_its_own_kept_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as (db, cluster):
        await set_value(db, "ann", 1)
        before = await _commits(db)
        async with db.shared_transaction() as whole:
            share = _changing(db, whole.ticket)
            await share.begin()
            await share.set("bob", balance, 1)
            await share._flush()  # its part has begun
            await share.set("ann", balance, 1)
            cluster.answers_lost = True
            asyncio.get_running_loop().call_later(0.5, _found_again, cluster)
            await whole.commit([await share.finish()])
        assert await values_of(db) == {"ann": 1, "bob": 1}
        assert (await _commits(db))["ann"] == before["ann"]


def _found_again(cluster: Cluster) -> None:
    cluster.answers_lost = False


async def test_all_cells_are_written_unless_only_changes_are_asked_for() -> None:
    async with connected() as (db, _):
        await set_value(db, "ann", 1)
        async with db.shared_transaction() as whole:
            share = await share_of(db, whole.ticket, "0", ann=1)
            commit = await whole.commit([await share.finish()])
        assert await _commits(db) == {"ann": commit}
