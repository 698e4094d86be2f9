"""Locks with primaries in a table that is being deleted, or is gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from percolator import (
    ConflictError,
    Limits,
    Outcome,
    OutcomeUnknown,
    RetryPolicy,
    SchemaError,
    Table,
    codecs,
)
from percolator.aio import Database, Transaction
from percolator.aio.connecting import connect_to
from percolator.protocol import commit
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock

deleted = Table("deleted")
kept = Table("kept")
primary = deleted.column("c", codecs.integer)
other = kept.column("c", codecs.integer)

READ_SECONDS_MAX = 5.0
"""Half of the time that a call may take: a reader that waits without success takes all of it."""


class Cluster(ClusterInMemory):
    """Can remove deleted tables that are still needed, which neither a master nor its base does."""

    def drop(self) -> None:
        for table_id in self._deleting:
            for tablet in self._tablets_of(table_id):
                del self.tablets[tablet.identity.tablet_id]
        self._deleting.clear()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Database, Database, Cluster]]:
    """Two clients: one that writes and dies, and one that comes after it."""
    clock = VirtualClock(asyncio.get_running_loop())
    cluster = Cluster(clock)

    async def client() -> Database:
        world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
        return await connect_to(world, [ADDRESS], Limits(), RetryPolicy())

    async with await client() as one, await client() as two:
        await one.create_table(deleted)
        await one.create_table(kept)
        yield one, two, cluster


async def left_behind(
    db: Database, monkeypatch: pytest.MonkeyPatch, *, committed: bool
) -> Transaction:
    """A transaction whose client died right before or after its commit point."""

    async def never(*_: object) -> int:
        await asyncio.get_running_loop().create_future()
        return 0

    tx = db.transaction()
    await tx.set("a", primary, 1)
    await tx.set("a", other, 1)
    with monkeypatch.context() as patch:
        patch.setattr(commit, "commit_secondaries", never)
        patch.setattr(commit, "roll_back_all", never)
        if committed:
            await tx.commit()
        else:
            patch.setattr(commit.Commit, "commit_primary", never)
            patch.setattr(db.internal.engine.heartbeats, "add", lambda _: None)
            stuck = asyncio.create_task(tx.commit())
            await asyncio.sleep(1.0)
            stuck.cancel()
            await asyncio.wait([stuck])
    return tx


@pytest.mark.parametrize("committed", [True, False])
async def test_a_lock_whose_primary_is_being_deleted_is_settled_as_the_primary_says(
    monkeypatch: pytest.MonkeyPatch, *, committed: bool
) -> None:
    async with connected() as (dead, db, _):
        await left_behind(dead, monkeypatch, committed=committed)
        await db.drop_table(deleted)
        async with db.snapshot(timeout=READ_SECONDS_MAX) as snapshot:
            assert await snapshot.get("a", other) == (1 if committed else None)
        async with db.transaction(timeout=READ_SECONDS_MAX) as tx:
            await tx.set("a", other, 2)


async def test_a_lock_whose_primary_is_gone_for_good_is_rolled_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A master removes no table that holds the primary of a committed transaction's lock."""
    async with connected() as (dead, db, cluster):
        await left_behind(dead, monkeypatch, committed=False)
        await db.drop_table(deleted)
        cluster.drop()
        async with db.snapshot(timeout=READ_SECONDS_MAX) as snapshot:
            assert await snapshot.get("a", other) is None


async def test_what_is_known_of_a_transaction_outlasts_the_table_of_its_primary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is decided after a reader has met its lock, and the table is gone before the reader asks
    the primary."""
    async with connected() as (dead, db, cluster):
        left = await left_behind(dead, monkeypatch, committed=False)
        await db.drop_table(deleted)
        cluster.drop()
        env, start = db.internal.engine.env, left.start_timestamp
        assert env.deleted_tables is not None
        assert start is not None
        ask = env.deleted_tables.mutate

        async def decided(*arguments: Any) -> Any:
            env.verdicts.put(start, start + 1)
            return await ask(*arguments)

        monkeypatch.setattr(env.deleted_tables, "mutate", decided)
        async with db.snapshot(timeout=READ_SECONDS_MAX) as snapshot:
            await snapshot.get("a", other)
        assert env.verdicts.get(start) == start + 1


async def test_a_transaction_is_not_taken_for_rolled_back_because_its_primary_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was committed and rolled forward after a reader had met its lock, and the table was
    removed before the reader asked."""
    async with connected() as (one, db, cluster):
        tx = await left_behind(one, monkeypatch, committed=True)
        await db.drop_table(deleted)
        env = db.internal.engine.env
        assert env.deleted_tables is not None
        ask = env.deleted_tables.mutate

        async def late(*arguments: Any) -> Any:
            async with one.transaction() as resolving:
                await resolving.lock("a", other)  # waits until the cell is rolled forward
            cluster.drop()
            return await ask(*arguments)

        monkeypatch.setattr(env.deleted_tables, "mutate", late)
        async with db.snapshot(timeout=READ_SECONDS_MAX) as snapshot:
            assert await snapshot.get("a", other) == 1
        assert tx.start_timestamp is not None
        # Whoever repeats the commit would be told the verdict, and its answer contradict it.
        assert env.verdicts.get(tx.start_timestamp) is None


async def test_the_outcome_can_be_learned_while_the_primarys_table_is_being_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected() as (dead, db, cluster):
        committed = await left_behind(dead, monkeypatch, committed=True)
        await db.drop_table(deleted)
        assert committed.start_timestamp is not None
        unknown = OutcomeUnknown(
            "no answer",
            start_timestamp=committed.start_timestamp,
            primary=next(iter(committed.internal.writes.cells)),
        )
        assert await db.resolve(unknown) is Outcome.COMMITTED
        cluster.drop()
        with pytest.raises(OutcomeUnknown):  # the record went with the table
            await db.resolve(unknown)


async def test_a_transaction_that_cannot_commit_to_a_deleted_table_leaves_no_lock_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected() as (db, other_db, cluster):
        locked = asyncio.Event()
        reach = commit.Commit.commit_primary

        async def slowly(point: commit.Commit, deadline: float) -> int:
            locked.set()
            await asyncio.sleep(0.1)
            return await reach(point, deadline)

        monkeypatch.setattr(commit.Commit, "commit_primary", slowly)
        tx = db.transaction()
        await tx.set("a", primary, 1)
        await tx.set("a", other, 1)
        committing = asyncio.create_task(tx.commit())
        await locked.wait()
        await other_db.drop_table(deleted)
        with pytest.raises(SchemaError):
            await committing
        assert tx.outcome is Outcome.ABORTED
        await asyncio.sleep(1.0)
        assert [tablet.statistics().locks for tablet in cluster.tablets.values()] == [0, 0]


async def test_the_map_for_settling_locks_leads_no_write_to_a_deleted_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected() as (dead, db, _):
        await left_behind(dead, monkeypatch, committed=True)
        async with db.transaction() as tx:
            await tx.set("b", primary, 1)  # from now on it knows the table
        await dead.drop_table(deleted)
        async with db.snapshot() as snapshot:
            assert await snapshot.get("a", other) == 1
        with pytest.raises((SchemaError, ConflictError)):
            async with db.transaction() as tx:
                await tx.set("c", primary, 1)
