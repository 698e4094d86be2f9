"""Section 2.2: what snapshot isolation promises, and what it does not."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import ConflictError
from percolator.timestamps import Timestamp
from percolator.v1 import tabletserver_pb2 as pb

from .small_cluster import SmallCluster, accounts, balance, commits, put


async def test_of_concurrent_transactions_that_write_one_cell_at_most_one_commits() -> None:
    """ "if transactions A and B, running concurrently, write to the same cell, at most one will
    commit" """
    client = await SmallCluster().opened()
    outcomes = []
    transactions = [client.db.transaction() for _ in range(5)]
    for number, tx in enumerate(transactions):
        await tx.get("Bob", balance)
        await tx.set("Bob", balance, number)
    for tx in transactions:
        try:
            await tx.commit()
            outcomes.append(True)
        except ConflictError:
            outcomes.append(False)
    assert outcomes.count(True) == 1


async def test_a_write_record_after_the_start_timestamp_aborts_the_transaction() -> None:
    """ "If the transaction sees another write record after its start timestamp, it aborts" """
    client = await SmallCluster().opened()
    tx = client.db.transaction()
    start = await tx.timestamp()
    newer = await put(client, Bob=1)
    await tx.set("Bob", balance, 2)
    with pytest.raises(ConflictError) as caught:
        await tx.commit()
    assert start < caught.value.other_commit_timestamp == newer


async def test_snapshots_are_subject_to_write_skew() -> None:
    """ "Snapshot isolation does not provide serializability; in particular, transactions running
    under snapshot isolation are subject to write skew." """
    client = await SmallCluster().opened()
    await put(client, Bob=1, Joe=1)
    one, other = client.db.transaction(), client.db.transaction()
    for tx, goes in ((one, "Bob"), (other, "Joe")):
        on_call = [row.key async for row in tx.scan(accounts) if row[balance]]
        assert len(on_call) == 2, "each believes that the other stays"
        await tx.set(goes, balance, 0)
    await one.commit()
    await other.commit()
    async with client.db.snapshot() as snapshot:
        assert [row.key async for row in snapshot.scan(accounts) if row[balance]] == []


async def test_a_commit_is_visible_to_a_snapshot_at_its_very_timestamp() -> None:
    """ "Get() reads the latest write record in that timestamp range", which is closed above."""
    client = await SmallCluster().opened()
    commit = await put(client, Bob=1)
    await put(client, Bob=2)
    async with client.db.snapshot(at=Timestamp(commit)) as snapshot:
        assert await snapshot.get("Bob", balance) == 1
    async with client.db.snapshot(at=Timestamp(commit - 1)) as snapshot:
        assert await snapshot.get("Bob", balance) is None


async def test_a_reader_waits_for_a_lock_and_then_sees_what_was_committed_before_it() -> None:
    """ "R's Get() will see either the fully-committed write record or the lock, in which case W
    will block until the lock is released. Either way, W's write is visible to R's Get()." """
    cluster = SmallCluster()
    writer = await cluster.opened()
    reader = await cluster.client()
    held = asyncio.Event()

    async def hold(request: pb.MutateRequest) -> None:
        if commits(request):
            await held.wait()

    writer.before = hold  # with a commit timestamp in hand, and nothing written yet
    writing = asyncio.create_task(put(writer, Bob=1))
    await asyncio.sleep(0.01)

    async def read() -> tuple[int, int | None]:
        async with reader.db.snapshot() as snapshot:
            return await snapshot.timestamp(), await snapshot.get("Bob", balance)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.02)
    assert not reading.done()
    held.set()
    timestamp, value = await reading
    assert await writing < timestamp
    assert value == 1


async def test_a_lock_above_the_snapshot_does_not_stop_it() -> None:
    """ "The Get() operation first checks for a lock in the timestamp range [0, start_timestamp]",
    and in no other."""
    cluster = SmallCluster()
    writer = await cluster.opened()
    reader = await cluster.client()
    await put(writer, Bob=1)
    snapshot = reader.db.snapshot()
    await snapshot.timestamp()
    stopped = asyncio.Event()

    async def stop(request: pb.MutateRequest) -> None:
        if commits(request):
            stopped.set()
            writer.crash()

    writer.before = stop
    writing = asyncio.create_task(put(writer, Bob=2))
    await stopped.wait()
    assert await snapshot.get("Bob", balance) == 1
    assert snapshot.statistics.lock_waits == []
    writing.cancel()
