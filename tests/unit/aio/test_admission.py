"""Under overload, transactions are refused before they begin, and those that begin end in time."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Iterator

import pytest

from percolator import Limits, RetryPolicy
from percolator.aio import Database, Transaction
from percolator.aio.observing import ObserverTransaction
from percolator.errors import Overloaded, UsageError
from percolator.retries import (
    ASKED_SECONDS_MAX,
    BUSY_MIN,
    FORESIGHT_SECONDS,
    LOOK_SECONDS,
    SHARE,
    Admission,
    Calls,
)
from tests.unit.connected import balance

RATE = 1_000
"""Transactions per second that the model of a cluster can do."""
DEADLINE_SECONDS = 1.0
SECONDS = 4.0


def now() -> float:
    return asyncio.get_running_loop().time()


class Served:
    """Transactions of a cluster that does one at a time, in the order in which they begin."""

    def __init__(self, busy_max: int = 1_024, rate: float = RATE) -> None:
        self.admission = Admission(busy_max, now)
        self.rate = rate
        self.server = asyncio.Lock()
        self.began: list[int] = []
        self.answers: Counter[str] = Counter()
        self.longest_seconds = 0.0

    async def run(self, seconds: float = DEADLINE_SECONDS, number: int = 0) -> None:
        arrived = now()
        deadline = arrived + seconds
        answer = "in time"
        try:
            await self.admission.enter(deadline)
            self.began.append(number)
            with Calls(self.admission):
                async with self.server:
                    await asyncio.sleep(1 / self.rate)
        except Overloaded:
            answer = "refused"
        else:
            self.admission.note_end()
        if now() > deadline + LOOK_SECONDS:
            answer += ", late"
        self.longest_seconds = max(self.longest_seconds, now() - arrived)
        self.answers[answer] += 1

    async def arrivals(self, rate: float, seconds: float = SECONDS) -> None:
        """Transactions that arrive at this rate, until the last one has its answer."""
        async with asyncio.TaskGroup() as group:
            for number in range(round(rate * seconds)):
                group.create_task(self.run(number=number))
                await asyncio.sleep(1 / rate)


@pytest.mark.parametrize(
    ("times", "busy_max"), [(1.5, 1_024), (2.0, 1_024), (5.0, 1_024), (2.0, 8), (2.0, 1)]
)
async def test_what_begins_under_overload_ends_in_time_and_loses_no_throughput(
    times: float, busy_max: int
) -> None:
    served = Served(busy_max)
    await served.arrivals(times * RATE, DEADLINE_SECONDS)  # until the rate is known
    served.answers.clear()
    served.longest_seconds = 0.0
    await served.arrivals(times * RATE)
    assert served.answers["in time"] > 0.95 * RATE * SECONDS
    assert set(served.answers) == {"in time", "refused"}
    assert served.longest_seconds < DEADLINE_SECONDS * (SHARE + 0.1)


async def test_without_overload_nothing_is_refused() -> None:
    served = Served()
    await served.arrivals(0.95 * RATE)
    assert set(served.answers) == {"in time"}


async def test_after_an_overload_the_next_transaction_is_as_fast_as_ever() -> None:
    served = Served()
    await served.arrivals(2 * RATE)
    began = now()
    await served.run()
    assert now() - began == pytest.approx(1 / RATE)


async def test_the_rate_is_known_to_have_fallen_before_many_have_ended() -> None:
    served = Served()
    filling = asyncio.create_task(served.arrivals(2 * RATE))
    await asyncio.sleep(1.0)
    served.admission.require(now() + 3.0)
    served.rate = RATE / 10
    await asyncio.sleep(0.5)
    with pytest.raises(Overloaded):
        served.admission.require(now() + 3.0)
    filling.cancel()


async def test_few_transactions_are_never_refused_however_long_they_take() -> None:
    served = Served(rate=1)
    await asyncio.gather(*(served.run() for _ in range(BUSY_MIN)))
    assert "refused" not in served.answers


@pytest.mark.parametrize(("long", "rate"), [(70, 50), (200, 100), (1_000, 500)])
async def test_nothing_is_refused_because_of_others_that_take_long_by_themselves(
    long: int, rate: int
) -> None:
    """For instance long scans, or transactions that wait for a server that does not answer."""
    served = Served()

    async def take_long() -> None:
        while True:
            with Calls(served.admission):
                await asyncio.sleep(60)
            served.admission.note_end()

    others = [asyncio.create_task(take_long()) for _ in range(long)]
    await asyncio.sleep(DEADLINE_SECONDS)
    await served.arrivals(rate, 20.0)
    assert served.answers == {"in time": 20 * rate}
    for task in others:
        task.cancel()


async def test_those_above_the_limit_wait_and_begin_in_order() -> None:
    served = Served(busy_max=100)
    patient = [served.run(60.0, number) for number in range(2 * RATE)]
    tasks = [asyncio.create_task(one) for one in patient]
    while not all(task.done() for task in tasks):
        assert served.admission.busy <= 100
        await asyncio.sleep(0.01)
    assert served.began == list(range(2 * RATE))
    assert served.answers == {"in time": 2 * RATE}


async def test_one_that_waits_is_refused_when_it_would_not_end_in_time() -> None:
    served = Served(busy_max=100)
    seconds = FORESIGHT_SECONDS + 1
    count = round(2 * seconds * RATE)
    await asyncio.gather(*(served.run(seconds) for _ in range(count)))
    assert served.answers["in time"] > RATE
    assert served.answers["refused"] > RATE
    assert set(served.answers) == {"in time", "refused"}


@pytest.mark.parametrize("busy_max", [1_024, 1])
async def test_a_burst_after_idleness_is_not_judged_by_the_rate_of_idleness(busy_max: int) -> None:
    served = Served(busy_max)
    for _ in range(200):
        await served.run()
        await asyncio.sleep(0.1)
    await asyncio.gather(*(served.run() for _ in range(RATE // 2)))
    assert set(served.answers) == {"in time"}


async def test_a_refusal_while_hardly_anything_ends_asks_for_no_pause_of_minutes() -> None:
    admission = Admission(1_024, now)
    admission.busy = 1_000
    for _ in range(200):
        await asyncio.sleep(0.01)
        admission.note_end()
    await asyncio.sleep(4.0)
    with pytest.raises(Overloaded, match=r"1,000 transactions ahead; retry after 30 s$") as refused:
        admission.require(now() + DEADLINE_SECONDS)
    assert refused.value.retry_after_seconds == ASKED_SECONDS_MAX


async def test_nothing_waits_beyond_its_deadline_if_nothing_ends() -> None:
    admission = Admission(1, now)
    with Calls(admission), pytest.raises(Overloaded, match="retry after"):
        await admission.enter(now() + 10.0)
    assert 10.0 <= now() < 10.0 + 2 * LOOK_SECONDS


@pytest.mark.parametrize("is_let_in", [False, True])
async def test_a_cancelled_caller_leaves_its_place_to_the_next(*, is_let_in: bool) -> None:
    admission = Admission(1, now)
    held = Calls(admission)
    held.__enter__()
    first = asyncio.create_task(admission.enter(now() + 60.0))
    second = asyncio.create_task(admission.enter(now() + 60.0))
    await asyncio.sleep(0)
    if is_let_in:
        held.__exit__(None, None, None)
        first.cancel()
    else:
        first.cancel()
        await asyncio.sleep(0)
        held.__exit__(None, None, None)
    await second
    assert first.cancelled()
    assert admission.busy == 0


async def test_a_transaction_counts_once_and_only_while_it_waits_in_calls() -> None:
    admission = Admission(10, now)
    calls = Calls(admission)
    with calls, calls:
        assert admission.busy == 1
    assert admission.busy == 0


# ------------------------------------------------------------------ transactions


async def overloaded(db: Database) -> Admission:
    """Makes it look as if there were a thousand transactions, of which a hundred end per second."""
    admission = db.internal.engine.admission
    admission.busy = 1_000
    for _ in range(200):
        await asyncio.sleep(0.01)
        admission.note_end()
    return admission


async def unused(tx: Transaction) -> None:
    raise AssertionError("it was begun")


async def increment(tx: Transaction) -> None:
    await tx.set("bob", balance, await tx.get("bob", balance, default=0) + 1)


async def test_run_refuses_at_once_and_does_not_call_its_function(db: Database) -> None:
    await overloaded(db)
    began = now()
    with pytest.raises(Overloaded, match=r"overloaded.*retry after") as caught:
        await db.run(unused, retry=RetryPolicy(deadline_seconds=1.0))
    assert now() == began
    assert caught.value.retry_after_seconds == pytest.approx(10.0, rel=0.1)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """No garbage is collected during the test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("limits", [Limits(transactions_busy_max=1)])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.usefixtures("without_collector")
async def test_a_refusal_leaves_nothing_to_the_garbage_collector(
    db: Database, *, waits: bool
) -> None:
    """Thousands of refusals in a second left so many cycles that a fifth of the time went into
    collecting them."""
    refusals: list[weakref.ref[Overloaded]] = []

    async def refused() -> None:
        try:
            await db.run(increment, retry=RetryPolicy(deadline_seconds=1.0))
        except Overloaded as error:
            refusals.append(weakref.ref(error))

    if waits:
        with Calls(db.internal.engine.admission):
            await asyncio.gather(refused(), refused())
    else:
        await overloaded(db)
        await refused()
        await refused()
    assert [one() for one in refusals] == [None, None]


async def test_reads_and_commits_are_refused_before_anything_is_sent(db: Database) -> None:
    await db.get("bob", balance)
    await overloaded(db)
    with pytest.raises(Overloaded):
        await db.get("bob", balance, timeout=1.0)
    with pytest.raises(Overloaded):
        async with db.snapshot(timeout=1.0) as snapshot:
            await snapshot.get("bob", balance)
    with pytest.raises(Overloaded):
        async with db.transaction(timeout=1.0) as tx:
            await tx.set("bob", balance, 1)


async def test_a_transaction_that_has_begun_is_not_refused(db: Database) -> None:
    async with db.transaction(timeout=1.0) as tx:
        await tx.get("bob", balance)
        await overloaded(db)
        await tx.set("bob", balance, await tx.get("joe", balance, default=0))


@pytest.mark.parametrize("limits", [Limits(call_seconds=1.0)])
async def test_run_with_time_left_tries_again_after_the_pause_it_was_asked_for(
    db: Database,
) -> None:
    admission = await overloaded(db)
    asyncio.get_running_loop().call_later(5.0, setattr, admission, "busy", 0)
    began = now()
    await db.run(increment, retry=RetryPolicy(deadline_seconds=60.0))
    assert 10.0 <= now() - began < 15.0
    assert await db.get("bob", balance) == 1


async def test_the_run_of_an_observer_is_not_refused(db: Database) -> None:
    await overloaded(db)
    async with ObserverTransaction(db.internal.engine) as tx:
        await tx.get("bob", balance, timeout=1.0)


@pytest.mark.parametrize("limits", [Limits(transactions_busy_max=1)])
async def test_transactions_that_wait_to_begin_fail_when_the_database_is_closed(
    db: Database,
) -> None:
    with Calls(db.internal.engine.admission):
        waiting = asyncio.create_task(db.get("bob", balance))
        await asyncio.sleep(0.01)
        await db.close()
        with pytest.raises(UsageError, match="closed"):
            await waiting


async def test_all_calls_of_a_transaction_are_counted(db: Database) -> None:
    admission = db.internal.engine.admission
    async with db.transaction() as tx:
        await increment(tx)
    async with db.snapshot() as snapshot:
        reads = asyncio.gather(*(snapshot.get(row, balance) for row in ("bob", "joe", "ann")))
        await asyncio.sleep(0)
        assert admission.busy == 1
        await reads
        await snapshot.get_many([("bob", balance)])
    assert admission.busy == 0
