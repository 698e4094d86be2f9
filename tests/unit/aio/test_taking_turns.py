"""`db.run`: transactions that have lost at a cell stand in line there; others notice nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from math import inf
from statistics import median, quantiles
from typing import Any

import pytest

from percolator import ConflictError, Limits, RetryPolicy, Timestamp, aio, codecs, observes
from percolator.aio import Database, Transaction
from percolator.aio.connecting import connect_to
from percolator.aio.replacing import rest_deleted
from percolator.aio.shared import Receipt, Share, Ticket
from percolator.errors import (
    CellAddress,
    DeadlineExceeded,
    PercolatorError,
    Retry,
    Unauthenticated,
    WrittenTwice,
)
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.commit import Commit
from percolator.protocol.conflicts import MetLock
from percolator.protocol.contention import GRANT_SECONDS, WRITTEN_MIN, Contender
from percolator.protocol.environment import Environment
from percolator.protocol.shared import attempt
from percolator.protocol.write_set import Write
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import oracle_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.master_pb2 import SetTtlsRequest
from percolator.v1.tabletserver_pb2 import ColumnTtl
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock
from tests.unit.aio.shared_attempts import dies, set_value, share_of, values_of
from tests.unit.connected import Cluster, DistantMaster, accounts, balance, put

INCREMENTS = 50


def now() -> float:
    return asyncio.get_running_loop().time()


async def cell(db: Database, row: str = "bob") -> CellAddress:
    engine = db.internal.engine
    table = await engine.table(accounts, engine.now() + 1.0)
    return CellAddress(table.table_id, row.encode(), balance.name)


async def held_turn(db: Database, row: str = "bob", *, caller: object = None) -> Contender:
    """A transaction that is the first in line at the cell, and does nothing."""
    owner = Contender(db.internal.engine.env.hot_cells, caller, 0.0)
    owner.lost_at(await cell(db, row))
    await owner.stand_in_line()
    return owner


class Increments:
    """Increments that count their attempts."""

    def __init__(self) -> None:
        self.attempts = 0
        self.committed: list[int] = []

    async def add(self, tx: Transaction, row: str, number: int) -> None:
        self.attempts += 1
        await tx.set(row, balance, await tx.get(row, balance, default=0) + 1)

    async def run(self, db: Database, row: str, number: int) -> None:
        await db.run(self.add, row, number)
        self.committed.append(number)


@pytest.fixture
def increments() -> Increments:
    return Increments()


async def set_balance(db: Database, value: int) -> None:
    await put(db, balance, bob=value)


async def lose_once(db: Database, tx: Transaction, lost: list[int]) -> None:
    """Reads and writes; at the first attempt, another transaction commits in between."""
    value = await tx.get("bob", balance, default=0)
    if not lost:
        lost.append(value)
        await set_balance(db, value + 10)
    await tx.set("bob", balance, value + 1)


async def test_increments_of_one_cell_lose_once_at_most(
    db: Database, increments: Increments
) -> None:
    await asyncio.gather(*(increments.run(db, "bob", n) for n in range(INCREMENTS)))
    assert await db.get("bob", balance) == INCREMENTS
    assert increments.attempts <= 2 * INCREMENTS
    assert len(db.internal.engine.env.hot_cells) == 0


@pytest.mark.parametrize("limits", [Limits()])
async def test_the_next_in_line_begins_above_the_winner_without_a_timestamp_and_a_read(
    db: Database,
) -> None:
    trips: list[int] = []

    async def add(tx: Transaction) -> None:
        await tx.set("bob", balance, await tx.get("bob", balance, default=0) + 1)
        trips.append(tx.statistics.round_trips)

    owner = await held_turn(db, caller=add.__code__)
    tasks = [asyncio.create_task(db.run(add)) for _ in range(INCREMENTS)]
    await asyncio.sleep(0.1)
    owner.leave()
    await asyncio.gather(*tasks)
    assert trips == [2, *[0] * (INCREMENTS - 1)]
    assert await db.get("bob", balance) == INCREMENTS


async def test_the_oldest_commit_first_and_newcomers_last(
    db: Database, increments: Increments
) -> None:
    owner = await held_turn(db, caller=Increments.add.__code__)
    tasks = []
    for number in range(INCREMENTS):
        tasks.append(asyncio.create_task(increments.run(db, "bob", number)))
        await asyncio.sleep(0.001)
    assert increments.committed == []
    owner.leave()
    await asyncio.gather(*tasks)
    assert increments.committed == list(range(INCREMENTS))
    assert increments.attempts == INCREMENTS


async def test_one_that_lost_to_its_own_client_tries_again_without_a_pause(db: Database) -> None:
    began, lost = now(), list[int]()
    await db.run(lambda tx: lose_once(db, tx, lost))
    assert lost
    assert now() == began


async def test_without_contention_there_is_no_line_and_no_pause(
    db: Database, increments: Increments
) -> None:
    began = now()
    for number in range(INCREMENTS):
        await increments.run(db, "bob", number)
    assert increments.attempts == INCREMENTS
    assert now() == began


async def test_cells_that_are_not_hot_are_not_held_up(db: Database, increments: Increments) -> None:
    await held_turn(db, "joe", caller=Increments.add.__code__)
    began = now()
    await increments.run(db, "bob", 1)
    assert now() == began


async def test_a_function_that_only_reads_a_hot_cell_does_not_wait(db: Database) -> None:
    await held_turn(db, caller=Increments.add.__code__)
    began = now()

    async def read(tx: Transaction) -> int:
        return await tx.get("bob", balance, default=0)

    assert await db.run(read) == 0
    async with db.snapshot() as snapshot, db.transaction() as tx:
        assert await snapshot.get("bob", balance) is None
        assert await tx.get("bob", balance) is None
    assert now() == began


async def test_the_deadline_is_obeyed_in_line(db: Database) -> None:
    await held_turn(db)
    began, lost = now(), list[int]()
    with pytest.raises(ConflictError):
        await db.run(lambda tx: lose_once(db, tx, lost), retry=RetryPolicy(deadline_seconds=0.5))
    assert now() == began + 0.5
    assert len(db.internal.engine.env.hot_cells) == 1  # the one that does nothing


async def test_a_newcomer_waits_for_half_of_its_time_at_most(
    db: Database, increments: Increments
) -> None:
    await held_turn(db, caller=Increments.add.__code__)
    began = now()
    await db.run(increments.add, "bob", 1, retry=RetryPolicy(deadline_seconds=0.5))
    assert now() == began + 0.25


async def test_one_that_is_cancelled_leaves_the_line(db: Database, increments: Increments) -> None:
    owner = await held_turn(db, caller=Increments.add.__code__)
    first, second = (asyncio.create_task(increments.run(db, "bob", number)) for number in (1, 2))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait([first])
    owner.leave()
    await second
    assert increments.committed == [2]
    assert len(db.internal.engine.env.hot_cells) == 0


async def test_one_that_dies_as_the_first_in_line_lets_the_next_go_at_once(db: Database) -> None:
    lost = list[int]()

    async def fail_at_last(tx: Transaction) -> None:
        had_lost = bool(lost)
        await lose_once(db, tx, lost)
        if had_lost:
            assert await cell(db) in db.internal.engine.env.hot_cells.lines
            raise ValueError("a mistake of the program")

    with pytest.raises(ValueError, match="a mistake"):
        await db.run(fail_at_last)
    assert len(db.internal.engine.env.hot_cells) == 0


async def test_one_that_waits_for_something_else_holds_up_those_in_line_for_a_while(
    db: Database, increments: Increments
) -> None:
    lost, forever = list[int](), asyncio.Event()

    async def hang(tx: Transaction) -> None:
        had_lost = bool(lost)
        await lose_once(db, tx, lost)
        if had_lost:
            await forever.wait()

    hanging = asyncio.create_task(db.run(hang))
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.001)
    owner = await cell(db)
    assert owner in db.internal.engine.env.hot_cells.lines
    began = now()
    other = Contender(db.internal.engine.env.hot_cells, None, 0.0)
    other.lost_at(owner)
    await other.stand_in_line()
    other.leave()
    assert now() - began == pytest.approx(GRANT_SECONDS, abs=0.01)
    await increments.run(db, "bob", 1)
    forever.set()
    await hanging  # it loses, and then has its turn again


async def test_transfers_between_two_hot_cells_stand_in_line_at_both(db: Database) -> None:
    attempts = 0

    async def transfer(tx: Transaction, source: str, target: str) -> None:
        nonlocal attempts
        attempts += 1
        await tx.set(source, balance, await tx.get(source, balance, default=0) - 1)
        await tx.set(target, balance, await tx.get(target, balance, default=0) + 1)

    ways = [("bob", "joe"), ("joe", "bob"), ("joe", "ann"), ("ann", "bob")]
    await asyncio.gather(*(db.run(transfer, *ways[n % 4]) for n in range(2 * INCREMENTS)))
    rows = [row[balance] async for row in db.snapshot().scan(accounts)]
    assert sum(rows) == 0
    assert attempts <= 4 * 2 * INCREMENTS
    assert len(db.internal.engine.env.hot_cells) == 0


# Clients that know nothing of each other, and write the same two cells all the time.

CLIENTS = 10
SECONDS = 2.0
"""In virtual time: about 1,300 transactions, whose waits do not differ from those of 8 s. What
costs more CPU can miss the wall-clock limit of a test on a machine that has little time for it."""
ROWS = ("bob", "joe")
WAIT_TIMES_MAX = 5.0
"""How much longer than most the unluckiest of a hundred may wait."""
ATTEMPTS_MAX = 1.2


class Distant(ClusterInMemory):
    """Answers as late as a cluster of processes does."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self._delays = random.Random(1)

    async def get_timestamps(
        self, request: oracle_pb2.GetTimestampsRequest
    ) -> oracle_pb2.GetTimestampsResponse:
        await self._delay(0.001)
        return await super().get_timestamps(request)

    async def read(self, request: pb.ReadRequest) -> pb.ReadResponse:
        await self._delay(0.001)
        return await super().read(request)

    async def await_turn(self, request: pb.AwaitTurnRequest) -> pb.AwaitTurnResponse:
        await self._delay(0.001)
        return await super().await_turn(request)

    async def mutate(self, request: pb.MutateRequest) -> pb.MutateResponse:
        await self._delay(0.003)
        return await super().mutate(request)

    async def commit_transactions(
        self, request: pb.CommitTransactionsRequest
    ) -> pb.CommitTransactionsResponse:
        await self._delay(0.003)
        return await super().commit_transactions(request)

    async def _delay(self, seconds: float) -> None:
        await asyncio.sleep(seconds * (0.5 + self._delays.random()))


@asynccontextmanager
async def clients(number: int) -> AsyncIterator[list[Database]]:
    clock = VirtualClock(asyncio.get_running_loop())
    network = InProcessNetwork({ADDRESS: Distant(clock)})
    policy = RetryPolicy(deadline_seconds=600.0)
    async with AsyncExitStack() as stack:
        opened = []
        for seed in range(number):
            world = World(clock, network, random.Random(seed))
            db = await connect_to(world, [ADDRESS], Limits(), policy)
            opened.append(await stack.enter_async_context(db))
        await opened[0].create_table(accounts)
        yield opened


async def test_the_unluckiest_wait_hardly_longer_than_most() -> None:
    """With pauses after conflicts alone, winners go on winning, and the others wait for seconds."""
    chance, attempts, waits = random.Random(1), 0, list[float]()
    now = asyncio.get_running_loop().time

    async def increment(tx: Transaction, row: str) -> None:
        nonlocal attempts
        attempts += 1
        await tx.set(row, balance, await tx.get(row, balance, default=0) + 1)

    async def work(db: Database, until: float) -> None:
        while (began := now()) < until:
            await db.run(increment, chance.choice(ROWS))
            waits.append(now() - began)

    async with clients(CLIENTS) as opened:
        until = now() + SECONDS
        await asyncio.gather(*(work(db, until) for db in opened))
        found = await opened[0].snapshot().get_many(accounts, ROWS, [balance])
    assert sum(row[balance] for row in found) == len(waits)
    assert quantiles(waits, n=100)[98] <= WAIT_TIMES_MAX * median(waits)
    assert attempts <= ATTEMPTS_MAX * len(waits)


# While the oracle answers nothing, a transaction has done nothing, and its policy decides.


class Paused(Cluster):
    """A cluster whose oracle answers nothing until a given time."""

    until = 0.0

    async def get_timestamps(
        self, request: oracle_pb2.GetTimestampsRequest
    ) -> oracle_pb2.GetTimestampsResponse:
        if asyncio.get_running_loop().time() < self.until:
            await asyncio.sleep(1.0)
            raise DeadlineExceeded("silence")
        return await super().get_timestamps(request)


async def read(tx: Transaction) -> int | None:
    return await tx.get("a", balance)


async def write(tx: Transaction) -> None:
    await tx.set("a", balance, 1)


@pytest.mark.parametrize("work", [read, write])
@pytest.mark.parametrize("kind_of_cluster", [Paused])
async def test_a_transaction_is_tried_until_its_own_deadline(
    work: object, db: Database, cluster: Paused
) -> None:
    await db.run(write)
    began, cluster.until = now(), inf
    with pytest.raises(DeadlineExceeded, match="gave up after") as late:
        await db.run(work, retry=RetryPolicy(deadline_seconds=20.0))  # type: ignore[arg-type]
    assert late.value.retry is Retry.SAFE
    assert 19.0 < now() - began < 21.0
    cluster.until = 0.0


@pytest.mark.parametrize("kind_of_cluster", [Paused])
async def test_a_transaction_outlasts_a_pause_that_is_shorter_than_its_deadline(
    db: Database, cluster: Paused
) -> None:
    await db.run(write)
    cluster.until = now() + 15.0
    assert await db.run(read, retry=RetryPolicy(deadline_seconds=20.0)) == 1


@pytest.mark.parametrize("kind_of_cluster", [Paused])
async def test_several_readers_are_told_that_a_missing_timestamp_is_harmless(
    db: Database, cluster: Paused
) -> None:
    await db.run(write)
    cluster.until = inf
    tx = db.transaction(timeout=2.0)
    errors = await asyncio.gather(
        tx.get("a", balance), tx.get("b", balance), return_exceptions=True
    )
    assert [(type(one), getattr(one, "retry", None)) for one in errors] == [
        (DeadlineExceeded, Retry.SAFE)
    ] * 2
    tx.rollback()
    cluster.until = 0.0


@pytest.mark.parametrize(
    "call",
    [
        lambda db, at: db.timestamp(timeout=2.0),
        lambda db, at: db.snapshot(at=at, timeout=2.0).get("a", balance),
        lambda db, at: db.pin(timeout=2.0).set(),
    ],
    ids=["timestamp", "snapshot of the past", "pin"],
)
@pytest.mark.parametrize("kind_of_cluster", [Paused])
async def test_whatever_only_misses_a_timestamp_can_be_repeated(
    call: Callable[[Database, Timestamp], Awaitable[object]], db: Database, cluster: Paused
) -> None:
    await db.run(write)
    at = await db.timestamp()
    cluster.until = inf
    with pytest.raises(DeadlineExceeded) as late:
        await call(db, at)
    assert late.value.retry is Retry.SAFE
    cluster.until = 0.0


@pytest.mark.parametrize(
    "call",
    [
        lambda db: db.timestamp(),
        lambda db: db.transaction().get("a", balance),
        lambda db: db.run(write),
    ],
    ids=["timestamp", "read", "write"],
)
@pytest.mark.parametrize("kind_of_cluster", [Paused])
async def test_an_error_of_the_oracle_is_not_its_own_cause(
    call: Callable[[Database], Awaitable[object]], db: Database, cluster: Paused
) -> None:
    """Programs that follow causes to the first one would never get there."""
    await db.run(write)

    async def refuses(request: oracle_pb2.GetTimestampsRequest) -> object:
        raise Unauthenticated("who are you?")

    cluster.get_timestamps = refuses  # type: ignore[assignment, method-assign]
    with pytest.raises(Unauthenticated, match="who are you") as refused:
        await call(db)
    assert refused.value.__cause__ is None


# A shared transaction that writes only changes: cells that have their values already are locked,
# and stay what they are.

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
    async with db.shared_transaction() as shared:
        return await shared.commit([await _receipt(db, shared.ticket, **values)])


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


async def test_only_changed_cells_are_committed_anew_and_notify(db: Database) -> None:
    runs: list[str] = []

    @observes(balance)
    async def noting(tx: aio.Transaction, row: str) -> None:
        runs.append(row)

    async with db.run_observers([noting]):
        await put(db, balance, ann=1, bob=1, joe=1)
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


async def test_an_overwrite_leaves_kept_cells_alone_and_deletes_others(db: Database) -> None:
    await put(db, balance, ann=1, bob=1, joe=1)
    before = await _commits(db)
    async with db.shared_transaction() as shared:
        receipt = await _receipt(db, shared.ticket, ann=1, bob=2)
        rest = await rest_deleted(
            db.internal,
            shared.ticket,
            [receipt],
            db.snapshot(),
            accounts,
            task="rest",
            timeout=10.0,
        )
        assert rest.cells == 1  # joe
        commit = await shared.commit([receipt, rest])
    assert await values_of(db) == {"ann": 1, "bob": 2}
    assert await _commits(db) == {"ann": before["ann"], "bob": commit}


@pytest.mark.parametrize("newer", [1, 5])
async def test_a_cell_that_was_committed_since_it_was_read_is_written_in_full(
    db: Database, meanwhile: Any, newer: int
) -> None:
    """Also if it has the same value again: nobody has looked."""
    await put(db, balance, ann=1, bob=1)
    before = await _commits(db)
    meanwhile(lambda: set_value(db, "ann", newer))
    commit = await _writes(db, ann=1, bob=1)
    assert await values_of(db) == {"ann": 1, "bob": 1}
    assert await _commits(db) == {"ann": commit, "bob": before["bob"]}


async def test_a_cell_that_another_job_commits_before_it_is_locked_is_written_in_full(
    db: Database, meanwhile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of the other job makes the attempt begin another part, above that job's commit."""
    await set_value(db, "ann", 1)
    async with db.shared_transaction() as other:
        locked: list[Share] = []

        async def locks() -> None:
            locked.append(await share_of(db, other.ticket, "0", ann=5))

        replace = attempt.Attempt._replace_others

        async def commits(self: attempt.Attempt, met: Sequence[MetLock], deadline: float) -> float:
            if other.commit_timestamp is None:
                await other.commit([await locked[0].finish()])
            return await replace(self, met, deadline)

        meanwhile(locks)
        monkeypatch.setattr(attempt.Attempt, "_replace_others", commits)
        commit = await _writes(db, ann=1)
        assert other.commit_timestamp is not None
    assert await values_of(db) == {"ann": 1}
    assert await _commits(db) == {"ann": commit}


async def test_unchanged_since_holds_for_kept_cells_too(db: Database, meanwhile: Any) -> None:
    await set_value(db, "ann", 1)
    since = await db.timestamp()
    meanwhile(lambda: set_value(db, "ann", 1))
    async with db.shared_transaction(unchanged_since=since) as shared:
        with pytest.raises(ConflictError, match="was committed at"):
            await _receipt(db, shared.ticket, ann=1)


@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 2), (2, 1), (2, 2)])
async def test_a_cell_that_is_written_twice_must_have_one_value(
    db: Database, first: int, second: int
) -> None:
    """Whichever of them it has already."""
    await set_value(db, "ann", 1)
    async with db.shared_transaction() as shared:
        share = _changing(db, shared.ticket)
        await share.begin()
        await share.set("ann", balance, first)
        await share._flush()
        await share.set("ann", balance, second)
        if first != second:
            with pytest.raises(WrittenTwice):
                await share.finish()
            return
        await shared.commit([await share.finish()])
    assert await values_of(db) == {"ann": first}


async def test_a_later_attempt_replaces_one_that_has_kept_cells(db: Database) -> None:
    await put(db, balance, ann=1, bob=1)
    async with db.shared_transaction() as shared:
        first = _changing(db, shared.ticket)
        await first.begin()
        await first.set("ann", balance, 1)
        await first.set("bob", balance, 2)
        await first._flush()
        dies(first)
        await shared.commit([await _receipt(db, shared.ticket, ann=2, bob=1)])
    assert await values_of(db) == {"ann": 2, "bob": 1}


async def test_another_transaction_cannot_commit_a_kept_cell_before_the_job(db: Database) -> None:
    await set_value(db, "ann", 1)
    async with db.shared_transaction() as shared:
        receipt = await _receipt(db, shared.ticket, ann=1)
        writing = asyncio.ensure_future(set_value(db, "ann", 5))
        await asyncio.sleep(1.0)
        assert not writing.done()
        await shared.commit([receipt])
        with pytest.raises(ConflictError, match="was committed"):
            await writing
    assert await values_of(db) == {"ann": 1}


async def test_values_that_expire_are_written_again(db: Database) -> None:
    await set_value(db, "ann", 1)
    await db.set_ttl(balance, timedelta(seconds=60))
    await asyncio.sleep(50.0)
    await _writes(db, ann=1)
    await asyncio.sleep(50.0)
    assert await values_of(db) == {"ann": 1}


@pytest.mark.parametrize("kind_of_cluster", [DistantMaster])
async def test_values_that_expire_since_another_program_said_so_are_written_again(
    db: Database, cluster: DistantMaster
) -> None:
    """The client has learned the schema before, and hears of the newer one only as it reads."""
    await _writes(db, ann=1)
    await asyncio.sleep(1.0)  # its locks are rolled forward
    ttl = ColumnTtl(column=b"balance", ttl_milliseconds=60_000)
    await cluster.set_ttls(SetTtlsRequest(table="accounts", ttls=[ttl]))
    await asyncio.sleep(50.0)
    await _writes(db, ann=1)
    await asyncio.sleep(50.0)
    assert await values_of(db) == {"ann": 1}


async def test_long_values_are_compared_too(db: Database) -> None:
    await put(db, TEXT, ann="x" * 5000, bob="x" * 5000)
    before = await _commits(db)
    async with db.shared_transaction() as shared, _changing(db, shared.ticket) as share:
        await share.set("ann", TEXT, "x" * 5_000)
        await share.set("bob", TEXT, "x" * 4_999 + "y")
        receipt = await share.finish()
        assert (receipt.cells, share.kept) == (2, 1)
        commit = await shared.commit([receipt])
    assert await _commits(db) == {"ann": before["ann"], "bob": commit}


async def test_cells_that_are_left_to_a_chosen_attempt_are_counted_by_that_one_alone(
    db: Database,
) -> None:
    await put(db, balance, ann=1, bob=1)
    async with db.shared_transaction() as shared:
        chosen = await _receipt(db, shared.ticket, ann=1)
        starts = frozenset(part.start for part in chosen.parts)
        share = db.internal.share(shared.ticket, "rest", 1, None, 0.0, starts, only_changes=True)
        async with share:
            await share.set("ann", balance, 1)
            await share.set("bob", balance, 1)
            rest = await share.finish()
        assert (chosen.cells, rest.cells, share.kept) == (1, 1, 1)
        await shared.commit([chosen, rest])
    assert await values_of(db) == {"ann": 1, "bob": 1}


async def test_a_repeated_message_finds_its_own_kept_cell(
    monkeypatch: pytest.MonkeyPatch, db: Database, cluster: Cluster
) -> None:
    await set_value(db, "ann", 1)
    before = await _commits(db)
    async with db.shared_transaction() as shared:
        share = _changing(db, shared.ticket)
        await share.begin()
        await share.set("bob", balance, 1)
        await share._flush()  # its part has begun
        await share.set("ann", balance, 1)
        cluster.answers_lost = True
        asyncio.get_running_loop().call_later(0.5, _found_again, cluster)
        await shared.commit([await share.finish()])
    assert await values_of(db) == {"ann": 1, "bob": 1}
    assert (await _commits(db))["ann"] == before["ann"]


def _found_again(cluster: Cluster) -> None:
    cluster.answers_lost = False


async def test_all_cells_are_written_unless_only_changes_are_asked_for(db: Database) -> None:
    await set_value(db, "ann", 1)
    async with db.shared_transaction() as shared:
        share = await share_of(db, shared.ticket, "0", ann=1)
        commit = await shared.commit([await share.finish()])
    assert await _commits(db) == {"ann": commit}


# Transactions of functions that write all that they read hold the cells that they have read.


class Transfers:
    """Transfers that count their attempts, and may pause after their first read."""

    def __init__(self) -> None:
        self.attempts = 0

    async def move(self, tx: Transaction, source: str, target: str, seconds: float = 0.0) -> None:
        self.attempts += 1
        left = await tx.get(source, balance, default=0) - 1
        await asyncio.sleep(seconds)
        await tx.set(target, balance, await tx.get(target, balance, default=0) + 1)
        await tx.set(source, balance, left)

    async def known(self, db: Database) -> None:
        """Commits until the function is known to write what it reads."""
        for _ in range(WRITTEN_MIN):
            await db.run(self.move, "known", "as well")
        self.attempts = 0


@pytest.fixture
def transfers() -> Transfers:
    return Transfers()


async def both(db: Database, *runs: Awaitable[object]) -> float:
    """Runs them at the same time, each a little after the one before it. Returns the seconds."""
    began, tasks = now(), []
    for run in runs:
        tasks.append(asyncio.ensure_future(run))
        await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)
    hot_cells = db.internal.engine.env.hot_cells
    assert not hot_cells.holders
    assert len(hot_cells) == 0
    return now() - began


async def test_one_that_would_begin_with_a_held_cell_waits_for_it(
    db: Database, transfers: Transfers
) -> None:
    await transfers.known(db)
    slow = db.run(transfers.move, "bob", "joe", 0.1)
    await both(db, slow, db.run(transfers.move, "bob", "ann"))
    assert transfers.attempts == 2
    assert await db.get("bob", balance) == -2


async def test_one_that_meets_a_held_cell_later_begins_again_when_it_can_hold_all(
    db: Database, transfers: Transfers
) -> None:
    await transfers.known(db)
    commits = db.internal.engine.env.tally.commits
    slow = db.run(transfers.move, "joe", "bob", 0.1)
    given_way = db.run(transfers.move, "ann", "joe")
    # It begins with a cell that the other one has held until it gave way.
    await both(db, slow, given_way, db.run(transfers.move, "ann", "eve", 0.05))
    assert transfers.attempts == 4
    assert db.internal.engine.env.tally.conflicts == 1
    assert db.internal.engine.env.tally.commits == commits + 3
    assert await db.get("joe", balance) == 0


async def test_transactions_that_hold_cells_seldom_lose_at_their_commit(
    db: Database, transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await transfers.known(db)
    chance, given_up = random.Random(1), 0
    give_up = Commit._give_up

    async def counted(self: Commit, problem: PercolatorError, deadline: float) -> int:
        nonlocal given_up
        given_up += 1
        return await give_up(self, problem, deadline)

    monkeypatch.setattr(Commit, "_give_up", counted)
    ways = [chance.sample(["bob", "joe", "ann", "eve", "tom"], 2) for _ in range(INCREMENTS)]
    await both(db, *(db.run(transfers.move, *way, chance.random() / 10) for way in ways))
    # Where another one had committed between their first read and their second. Without holding
    # cells it is two thirds of them.
    assert given_up <= INCREMENTS / 4
    assert transfers.attempts <= 2 * INCREMENTS


async def test_a_cell_is_held_for_a_limited_time_once_another_one_waits(
    db: Database, transfers: Transfers
) -> None:
    await transfers.known(db)
    forever = db.run(transfers.move, "bob", "joe", 10.0)
    slow = asyncio.create_task(both(db, forever))
    await asyncio.sleep(5.0)
    began = now()
    await db.run(transfers.move, "bob", "ann")
    assert now() - began == pytest.approx(GRANT_SECONDS, abs=0.01)
    await slow


async def test_one_that_has_waited_does_not_give_way_again(
    db: Database, transfers: Transfers
) -> None:
    """Otherwise, one that reads other cells at each attempt might never commit."""
    await transfers.known(db)
    rows = iter(["joe", "ann"])

    async def wandering(tx: Transaction) -> None:
        await transfers.move(tx, "eve", next(rows))

    hot_cells = db.internal.engine.env.hot_cells
    written = hot_cells.written_by(Transfers.move.__code__)
    hot_cells.written_by(wandering.__code__).update(written)
    slow = [db.run(transfers.move, row, f"{row} too", 0.5) for row in ("joe", "ann")]
    await both(db, *slow, db.run(wandering))
    assert next(rows, None) is None  # two attempts: at the second, the slow one has lost
    assert transfers.attempts == 5


async def test_a_function_that_only_reads_some_cells_holds_none(
    db: Database, transfers: Transfers
) -> None:
    async def look(tx: Transaction, number: int) -> None:
        await tx.get("rates", balance)
        await asyncio.sleep(0.1)
        await tx.set(f"{number}", balance, await tx.get(f"{number}", balance, default=0) + 1)

    for number in range(WRITTEN_MIN):
        await db.run(look, number)
    began = now()
    await asyncio.gather(*(db.run(look, number) for number in range(INCREMENTS)))
    assert now() - began == pytest.approx(0.1, abs=0.01)


async def test_those_who_wait_for_a_cell_that_is_not_written_all_go_at_once(
    db: Database,
) -> None:
    writes = True

    async def look(tx: Transaction, row: str, number: int) -> None:
        found = await tx.get(row, balance, default=0)
        await asyncio.sleep(0.1)
        if writes:
            await tx.set(row, balance, found + 1)
        else:
            await tx.set(f"{number}", balance, found)

    for _ in range(WRITTEN_MIN):
        await db.run(look, "known", 0)
    writes = False
    began = now()
    await asyncio.gather(*(db.run(look, "rates", number) for number in range(INCREMENTS)))
    assert now() - began == pytest.approx(0.2, abs=0.01)


async def test_a_transaction_that_is_tried_once_does_not_give_way(
    db: Database, transfers: Transfers
) -> None:
    await transfers.known(db)
    slow = asyncio.create_task(db.run(transfers.move, "joe", "bob", 0.1))
    await asyncio.sleep(0.01)
    await db.run(transfers.move, "ann", "joe", retry=RetryPolicy(attempts_max=1))
    await slow  # it has lost to the other one
    assert transfers.attempts == 3


async def test_a_function_that_writes_now_and_then_holds_no_cells(db: Database) -> None:
    """Its transactions that only read would wait for each other."""

    async def look(tx: Transaction, *, writes: bool) -> None:
        found = await tx.get("bob", balance, default=0)
        await asyncio.sleep(0.1)
        if writes:
            await tx.set("bob", balance, found + 1)

    for _ in range(WRITTEN_MIN):
        await db.run(look, keywords={"writes": True})
        await db.run(look, keywords={"writes": False})
    began = now()
    reading = db.run(look, keywords={"writes": False})
    await asyncio.gather(reading, db.run(look, keywords={"writes": False}))
    assert now() - began == pytest.approx(0.1, abs=0.01)


async def test_a_transaction_that_fails_holds_nothing_any_more(
    db: Database, transfers: Transfers
) -> None:
    await transfers.known(db)

    async def fail() -> None:
        with pytest.raises(TypeError):
            await db.run(transfers.move, "bob", "joe", "not a number")

    assert await both(db, fail(), db.run(transfers.move, "bob", "ann")) < 0.1
