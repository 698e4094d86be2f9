"""Section 2.2: what happens when a client dies, at each possible point."""

from __future__ import annotations

import asyncio
import random
from typing import Any
from unittest.mock import Mock

import pytest

from percolator import observes
from percolator.errors import ConflictError, Unavailable
from percolator.observers.registration import register
from percolator.observers.watched_cell import Acknowledgement, look
from percolator.services.oracle.oracle import Oracle, OracleHandler, OracleLimits
from percolator.timestamps import Timestamp
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.oracle_pb2 import GetTimestampsResponse
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import UnaryMethod, World
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.simulation.virtual_time import VirtualClock
from tests.unit.observers.observed_cluster import Observed, copy, observed, source, total
from tests.unit.oracle.marks import open_mark
from tests.unit.unary_network import UnaryNetwork

from .small_cluster import (
    Cells,
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


# Section 2.2: what snapshot isolation promises, and what it does not.


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


# Section 2.3 of the paper, "Timestamps", sentence by sentence.


async def started(files: MemoryFiles) -> Oracle:
    """An oracle on this disk, just started."""
    clock = VirtualClock(asyncio.get_running_loop())
    mark = await open_mark(files, clock)
    oracle = Oracle(clock, mark, mark.leadership.is_held, OracleLimits())
    await oracle.extend()
    return oracle


class Wire(UnaryNetwork):
    """Carries requests to one oracle, each in 10 ms, and remembers them."""

    def __init__(self, oracle: Oracle) -> None:
        self._handler = OracleHandler(Mock(term=oracle))
        self.counts: list[int] = []
        self.pending = 0
        self.pending_most = 0

    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> GetTimestampsResponse:
        self.counts.append(request.count)
        self.pending += 1
        self.pending_most = max(self.pending_most, self.pending)
        await asyncio.sleep(0.005)
        response = await self._handler.get_timestamps(request)
        await asyncio.sleep(0.005)
        self.pending -= 1
        return response


async def test_strictly_increasing() -> None:
    """ "The timestamp oracle is a server that hands out timestamps in strictly increasing
    order." """
    oracle = await started(MemoryFiles(MemoryDisk()))
    handed_out = [await oracle.get_timestamps(1) for _ in range(10_000)]
    assert handed_out == sorted(set(handed_out))


async def test_strictly_from_memory() -> None:
    """ "... given an allocated range of timestamps, the oracle can satisfy future requests strictly
    from memory." """
    files = MemoryFiles(MemoryDisk())
    oracle = await started(files)
    files.faults.operations.clear()
    for _ in range(10_000):
        await oracle.get_timestamps(1)
    # Only a directory entry is looked at, which the system holds in memory.
    assert set(files.faults.operations) == {"stat"}


async def test_jumps_forward_on_restart_but_never_backwards() -> None:
    """ "If the oracle restarts, the timestamps will jump forward to the maximum allocated timestamp
    (but will never go backwards)." """
    files = MemoryFiles(MemoryDisk())
    oracle = await started(files)
    last = await oracle.get_timestamps(1)
    files.kill()
    restarted = await started(MemoryFiles(files.disk))
    first = await restarted.get_timestamps(1)
    assert first > last
    assert first == oracle.mark_milliseconds << 18


async def test_one_pending_rpc_and_batching_that_grows_with_load() -> None:
    """ "Each Percolator worker batches timestamp requests across transactions by maintaining only
    one pending RPC to the oracle. As the oracle becomes more loaded, the batching naturally
    increases to compensate." """
    wire = Wire(await started(MemoryFiles(MemoryDisk())))
    clock = VirtualClock(asyncio.get_running_loop())
    source = TimestampSource(World(clock, wire, random.Random(1)), ["oracle:1"])

    async def transactions(per_second: int) -> float:
        """The mean number of timestamps in a request at this load."""
        before = len(wire.counts)
        asked = []
        for _ in range(per_second // 5):
            asked.append(source.get())
            await asyncio.sleep(1 / per_second)
        await asyncio.gather(*asked)
        sent = wire.counts[before:]
        return sum(sent) / len(sent)

    assert await transactions(50) == 1
    assert 9 <= await transactions(1_000) <= 11
    assert 90 <= await transactions(10_000) <= 110
    assert wire.pending_most == 1


async def test_batching_does_not_affect_the_guarantees() -> None:
    """ "Batching increases the scalability of the oracle but does not affect the timestamp
    guarantees." """
    wire = Wire(await started(MemoryFiles(MemoryDisk())))
    clock = VirtualClock(asyncio.get_running_loop())
    workers = [
        TimestampSource(World(clock, wire, random.Random(seed)), ["oracle:1"]) for seed in range(3)
    ]
    received = [0]

    async def transaction(number: int) -> None:
        await asyncio.sleep(number * 0.001)
        largest_received = max(received)
        timestamp = await workers[number % 3].get()
        assert timestamp > largest_received
        received.append(timestamp)

    await asyncio.gather(*(transaction(number) for number in range(300)))
    assert len(set(received)) == 301


# Section 2.4: "Percolator applications are structured as a series of observers."


@observes(source, name="document-processor")
async def process(tx: Any, row: str) -> None:
    await tx.set(row, copy, await tx.get(row, source))


async def acknowledged(world: Observed, row: str) -> Acknowledgement:
    """The content of the acknowledgement column, which only observers see."""
    (watched,) = await register(world.context, [process])
    work = world.work_of_row(watched, row)
    transaction = world.context.begin(None)
    start = await transaction.timestamp()
    (found,) = await look(world.context, [work], transaction, start)
    return found.acknowledged


async def test_each_observer_creates_more_work_for_downstream_observers() -> None:
    # "each observer completes a task and creates more work for "downstream" observers by writing
    # to the table."
    @observes(copy, name="downstream")
    async def downstream(tx: Any, row: str) -> None:
        await tx.set(row, total, await tx.get(row, copy))

    async with observed() as world, world.db.run_observers([process, downstream]):
        await world.put("a", 5)

        async def is_done() -> bool:
            return await world.get("a", total) == 5

        await world.until(is_done)


async def test_at_most_one_observers_transaction_commits_for_each_change() -> None:
    # "at most one observer's transaction will commit for each change of an observed column."
    # "if Percolator accidentally starts two transactions concurrently for a particular
    # notification, they will both see the dirty notification and run the observer, but one will
    # abort because they will conflict on the acknowledgment column."
    async with observed() as world:
        await register(world.context, [process])
        await world.put("a", 1)
        work = await world.work_for(process)
        first, second = world.run_of(work), world.run_of(work)
        assert await first.begin()
        assert await second.begin()
        await first.commit()
        with pytest.raises(ConflictError) as lost:
            await second.commit()
        assert lost.value.cell == work.watched.acknowledgement(b"a", b"source")


async def test_multiple_writes_may_cause_an_observer_to_be_invoked_only_once() -> None:
    # "multiple writes to an observed column may cause the corresponding observer to be invoked
    # only once. We call this feature message collapsing"
    async with observed() as world:
        await register(world.context, [process])
        for value in range(10):
            await world.put("a", value)
        async with world.db.run_observers([process]) as worker:
            await world.until_copied("a", 9)
            await world.until_nothing_waits()
            assert worker.counters["docs", "document-processor"].runs == 1


async def test_the_acknowledgment_column_holds_the_latest_start_timestamp_of_the_observer() -> None:
    # "each observed column has an accompanying "acknowledgment" column for each observer,
    # containing the latest start timestamp at which the observer ran."
    async with observed() as world:
        await register(world.context, [process])
        changed = await world.put("a", 1)
        assert await acknowledged(world, "a") == Acknowledgement(0)
        async with world.db.run_observers([process]):
            await world.until_copied("a", 1)
        async with world.db.snapshot() as snapshot:
            now = await snapshot.timestamp()
        assert changed < (await acknowledged(world, "a")).start < now


async def test_the_notify_cell_is_set_with_the_write_and_removed_after_the_observer() -> None:
    # "When a transaction writes an observed cell, it also sets the corresponding notify cell."
    # "After the observer is triggered and the transaction commits, we remove the notify cell."
    async with observed() as world:
        await register(world.context, [process])
        changed = await world.put("a", 1)
        (waiting,) = await world.waiting()
        assert (waiting.row, waiting.column) == (b"a", b"source")
        assert waiting.observer == b"document-processor"
        assert waiting.timestamps == (changed,)
        async with world.db.run_observers([process]):
            await world.until_copied("a", 1)
            await world.until_nothing_waits()


async def test_a_weak_notification_needs_no_write() -> None:
    # A weak notification triggers an observer without a write to the observed column, and without
    # conflicts among transactions that trigger the same one.
    ran: list[str] = []

    @observes(copy, name="cleaner", weak=True)
    async def clean(tx: Any, row: str) -> None:
        ran.append(row)

    async with observed() as world, world.db.run_observers([clean]):
        first, second = world.db.transaction(), world.db.transaction()
        for tx in (first, second):
            await tx.timestamp()
            await tx.notify("a", copy)
        await first.commit()
        await second.commit()
        await world.until_nothing_waits()
        assert set(ran) == {"a"}


# Figure 4: "The transaction transfers 7 dollars from Bob to Joe."


async def test_the_cells_after_each_step_of_figure_4() -> None:
    cluster = SmallCluster()
    client = await cluster.opened()
    cluster.next_timestamp = 5
    assert await put(client, Bob=10, Joe=2) == 6
    await client.db._engine.env.background.drain(1.0)
    cluster.next_timestamp = 7

    steps: list[Cells] = [await cluster.cells()]

    async def look() -> None:
        steps.append(await cluster.cells())

    cluster.after_batch = look
    await transfer(client, 7)
    await client.db._engine.env.background.drain(1.0)
    initial, bob_locked, joe_locked, commit_point, completed = steps

    # The first picture is the initial state. "Joe's account contains $2 dollars, Bob's $10."
    assert initial == {
        "Bob": {"data": {5: 10}, "lock": {}, "write": {6: "data @ 5"}},
        "Joe": {"data": {5: 2}, "lock": {}, "write": {6: "data @ 5"}},
    }
    # "The transfer transaction begins by locking Bob's account balance by writing the lock column.
    # This lock is the primary for the transaction. The transaction also writes data at its start
    # timestamp, 7."
    assert bob_locked["Bob"] == {
        "data": {5: 10, 7: 3},
        "lock": {7: "primary"},
        "write": {6: "data @ 5"},
    }
    assert bob_locked["Joe"] == initial["Joe"]
    # "The transaction now locks Joe's account and writes Joe's new balance (again, at the start
    # timestamp). The lock is a secondary for the transaction and contains a reference to the
    # primary lock".
    assert joe_locked["Joe"] == {
        "data": {5: 2, 7: 9},
        "lock": {7: "primary @ Bob.bal"},
        "write": {6: "data @ 5"},
    }
    assert joe_locked["Bob"] == bob_locked["Bob"]
    # "The transaction has now reached the commit point: it erases the primary lock and replaces it
    # with a write record at a new timestamp (called the commit timestamp): 8. The write record
    # contains a pointer to the timestamp where the data is stored."
    assert commit_point["Bob"] == {
        "data": {5: 10, 7: 3},
        "lock": {},
        "write": {6: "data @ 5", 8: "data @ 7"},
    }
    assert commit_point["Joe"] == joe_locked["Joe"]
    # "The transaction completes by adding write records and deleting locks at the secondary cells."
    assert completed["Joe"] == {
        "data": {5: 2, 7: 9},
        "lock": {},
        "write": {6: "data @ 5", 8: "data @ 7"},
    }
    assert completed["Bob"] == commit_point["Bob"]

    # "Future readers of the column "bal" in row "Bob" will now see the value $3."
    assert await balances(client) == {"Bob": 3, "Joe": 9}
