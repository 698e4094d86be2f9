"""Section 2.2: what happens when a client dies, at each possible point."""

from __future__ import annotations

import asyncio

from percolator.errors import ConflictError, Unavailable
from percolator.v1 import tabletserver_pb2 as pb

from .small_cluster import (
    Client,
    SmallCluster,
    accounts,
    balance,
    balances,
    commits,
    put,
    transfer,
)


async def _opened() -> tuple[SmallCluster, Client]:
    cluster = SmallCluster()
    client = await cluster.opened()
    await put(client, Bob=10, Joe=2)
    await client.db._engine.env.background.drain(1.0)
    return cluster, client


def _later(cluster: SmallCluster, seconds: float) -> None:
    """The oracle's clock advances, so that locks expire."""
    cluster.next_timestamp += round(seconds * 1000) << 18


async def _crashing(client: Client, *, after_the_commit_point: bool) -> asyncio.Task[None]:
    """A transfer whose client dies at its commit point."""

    async def crash(request: pb.MutateRequest) -> None:
        if commits(request):
            client.crash()

    if after_the_commit_point:
        client.after = crash
    else:
        client.before = crash
    task = asyncio.create_task(transfer(client, 7))
    await asyncio.sleep(1.0)
    return task


async def test_a_transaction_that_died_before_its_commit_point_is_rolled_back() -> None:
    """ "if the primary lock has been replaced by a write record, the transaction which wrote the
    lock must have committed and the lock must be rolled forward, otherwise it should be rolled back
    (since we always commit the primary first, we can be sure that it is safe to roll back if the
    primary is not committed)" """
    cluster, dying = await _opened()
    task = await _crashing(dying, after_the_commit_point=False)
    assert [len(columns["lock"]) for columns in (await cluster.cells()).values()] == [1, 1]
    _later(cluster, 5.0)
    survivor = await cluster.client()
    assert await balances(survivor) == {"Bob": 10, "Joe": 2}
    cells = await cluster.cells()
    assert [len(columns["lock"]) for columns in cells.values()] == [0, 0]
    assert 10 in cells["Bob"]["data"].values()
    assert 3 not in cells["Bob"]["data"].values(), "what was never committed is gone"
    task.cancel()


async def test_a_transaction_that_died_after_its_commit_point_is_rolled_forward() -> None:
    """ "When a client crashes during the second phase of commit, a transaction will be past the
    commit point (it has written at least one write record) but will still have locks outstanding.
    We must perform roll-forward on these transactions." """
    cluster, dying = await _opened()
    task = await _crashing(dying, after_the_commit_point=True)
    cells = await cluster.cells()
    assert cells["Bob"]["lock"] == {}
    assert len(cells["Joe"]["lock"]) == 1
    survivor = await cluster.client()
    assert await balances(survivor) == {"Bob": 3, "Joe": 9}, (
        "at once: a dead owner is not waited for"
    )
    assert (await cluster.cells())["Joe"]["lock"] == {}
    task.cancel()


async def test_only_one_of_commit_and_cleanup_succeeds() -> None:
    """ "Performing either a cleanup or commit operation requires modifying the primary lock; since
    this modification is performed under a Bigtable row transaction, only one of the cleanup or
    commit operations will succeed." """
    cluster, slow = await _opened()
    held = asyncio.Event()

    async def hold(request: pb.MutateRequest) -> None:
        if commits(request):
            await held.wait()

    slow.before = hold
    transferring = asyncio.create_task(transfer(slow, 7))
    await asyncio.sleep(0.1)
    slow.db._engine.heartbeats.close()  # "a worker that is live, but not working"
    _later(cluster, 10.0)
    survivor = await cluster.client()
    assert await balances(survivor) == {"Bob": 10, "Joe": 2}
    held.set()
    problems = await asyncio.gather(transferring, return_exceptions=True)
    assert isinstance(problems[0], ConflictError)
    assert await balances(survivor) == {"Bob": 10, "Joe": 2}


async def test_a_prewrite_that_arrives_after_the_cleanup_changes_nothing() -> None:
    """The paper erases locks; here a marker replaces them. Otherwise, a message in flight would
    lock the cell again, and the client would commit what was rolled back."""
    cluster, slow = await _opened()
    held = asyncio.Event()

    async def hold(request: pb.MutateRequest) -> None:
        if held.is_set() or len(request.batches) == 1:
            return
        # Joe's lock arrives at once, Bob's (the primary) much later.
        late = pb.MutateRequest(batches=[request.batches.pop(0)])
        await cluster.mutate(request)
        request.ClearField("batches")
        await held.wait()
        request.MergeFrom(late)
        raise Unavailable("the answer was lost")

    slow.before = hold
    transferring = asyncio.create_task(transfer(slow, 7))
    await asyncio.sleep(0.1)
    _later(cluster, 10.0)
    survivor = await cluster.client()
    assert await balances(survivor) == {"Bob": 10, "Joe": 2}
    held.set()
    problems = await asyncio.gather(transferring, return_exceptions=True)
    assert isinstance(problems[0], ConflictError)
    assert [len(columns["lock"]) for columns in (await cluster.cells()).values()] == [0, 0]


async def test_lost_replies_are_requested_again_and_nothing_happens_twice() -> None:
    cluster, client = await _opened()
    lost = 0

    async def lose_the_first_two(request: pb.MutateRequest) -> None:
        nonlocal lost
        lost += 1
        if lost in {1, 3}:  # the answers to the prewrite and to the commit
            raise Unavailable("the answer was lost")

    client.after = lose_the_first_two
    await transfer(client, 7)
    await client.db._engine.env.background.drain(1.0)
    assert lost >= 4
    assert await balances(client) == {"Bob": 3, "Joe": 9}
    assert [len(columns["write"]) for columns in (await cluster.cells()).values()] == [2, 2]


async def test_a_long_commit_is_not_cleaned_up_while_its_owner_works_on_it() -> None:
    """ "To handle long-running commit operations, workers periodically update this wall time while
    committing." """
    cluster, slow = await _opened()

    async def take_time(request: pb.MutateRequest) -> None:
        if commits(request):
            slow.before = None
            for _ in range(8):  # longer than a lock lasts without heartbeats
                await asyncio.sleep(0.5)
                _later(cluster, 0.5)

    slow.before = take_time
    transferring = asyncio.create_task(transfer(slow, 7))
    await asyncio.sleep(0.5)
    survivor = await cluster.client()
    async with survivor.db.transaction() as tx:
        (bob,) = await tx.get_many(accounts, ["Bob"])
        assert bob[balance] == 10
    await transferring
    assert await balances(survivor) == {"Bob": 3, "Joe": 9}
