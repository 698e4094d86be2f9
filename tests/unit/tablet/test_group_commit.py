"""The rules of group commit, each with the failure that it prevents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    Overloaded,
    PercolatorError,
    SchemaChanged,
    StoreUnusable,
    TabletMoved,
)
from percolator.tablet.judge import JudgedBatch
from percolator.tablet.state import TimestampGuard
from percolator.testing.memory_storage import MemoryBatch, MemoryStorage
from percolator.v1 import tabletserver_pb2 as pb
from tests.simulation.virtual_time import VirtualClock
from tests.unit.refusals import refused
from tests.unit.tablet.tablets import (
    ABSENT,
    APPLIED,
    LOCK,
    NOT_EXECUTED,
    REFUSED,
    ROLLBACK,
    TARGET,
    UNKNOWN,
    WRITE,
    Rig,
    SlowDisk,
    batch,
    commit,
    condition,
    lock_record,
    mutation,
    no_own_write,
    not_executed,
    outcomes,
    own,
    prewrite,
    put,
    roll_back,
    started,
    under_way,
    write_record,
    written,
)

# ---------------------------------------------------------------- when answers leave


async def test_a_refusal_leaves_with_its_batch_and_not_before(rig: Rig) -> None:
    """A refusal may reveal a commit in the same batch. If it left early and the power failed, a
    client would have acted on a commit that never happened."""
    await rig.apply(written(b"taken", 5, 6))
    applied = started(rig, written(b"a", 10, 20))
    refused = started(rig, mutation(b"taken", conditions=[condition(WRITE, ABSENT)]))
    await asyncio.sleep(0.5)  # the write takes a second
    assert not applied.done()
    assert not refused.done()
    assert await outcomes(refused) == [REFUSED]
    assert applied.done()


async def test_nothing_is_judged_against_what_is_not_durable(rig: Rig) -> None:
    """A late prewrite arrives while the rollback of its transaction is being written. If it were
    judged then, it would pass, and a transaction reported as rolled back would commit."""
    rollback = await under_way(rig.mutate(roll_back(b"a", 10)))
    late = started(rig, prewrite(b"a", 10))
    assert await outcomes(rollback) == [APPLIED]
    [result] = await late
    assert (result.outcome, result.cell.space, result.cell.timestamp) == (REFUSED, ROLLBACK, 10)


async def test_readers_neither_see_nor_wait_for_what_is_not_durable(rig: Rig) -> None:
    """A power cut must undo nothing that was read, and an fsync must not stop reads."""
    await rig.apply(written(b"a", 5, 6, b"old"))
    started_at = asyncio.get_running_loop().time()
    writing = await under_way(rig.mutate(written(b"a", 10, 20, b"new"), prewrite(b"b", 11)))
    assert await rig.value(b"a", 30) == b"old"
    assert not (await rig.read(b"b", 30)).locks
    assert asyncio.get_running_loop().time() - started_at < 0.6
    await writing
    assert await rig.value(b"a", 30) == b"new"
    assert len((await rig.read(b"b", 30)).locks) == 1


async def test_a_lock_stays_in_the_way_until_its_commit_is_durable(rig: Rig) -> None:
    """If memory dropped the lock earlier, a reader would find neither the lock nor the commit."""
    await rig.apply(prewrite(b"a", 10, b"value"))
    committing = await under_way(rig.mutate(commit(b"a", 10, 20, b"value")))
    assert len((await rig.read(b"a", 30)).locks) == 1
    await committing
    assert await rig.value(b"a", 30) == b"value"


async def test_one_synced_write_serves_all_requests_that_came_meanwhile(
    rig: Rig, disk: SlowDisk
) -> None:
    before = disk.writes
    first = await under_way(rig.mutate(written(b"first", 10, 20)))
    others = [started(rig, written(b"%d" % number, 10, 20)) for number in range(50)]
    await asyncio.gather(first, *others)
    assert disk.writes == before + 2


# ---------------------------------------------------------------- one cell twice


async def test_the_second_mutation_of_a_cell_is_judged_after_the_first_is_durable(
    rig: Rig, disk: SlowDisk
) -> None:
    """Judged in the same batch, both prewrites would find the cell free."""
    before = disk.writes
    first, second, third = await rig.mutate(
        prewrite(b"a", 10), prewrite(b"a", 11), prewrite(b"b", 12)
    )
    assert [first.outcome, second.outcome, third.outcome] == [APPLIED, REFUSED, APPLIED]
    assert second.cell.space == LOCK
    assert second.cell.value.startswith(own(10))
    assert disk.writes == before + 1  # the second batch was a refusal


async def test_mutations_of_one_cell_keep_their_order_across_requests_and_batches() -> None:
    rig = await Rig(commit_mutations_max=2).open()
    tasks = []
    for number in range(10, 20):
        marker = mutation(
            b"a",
            put(WRITE, write_record(number), number + 1),
            conditions=[condition(WRITE, ABSENT, from_timestamp=number + 1)],
        )
        tasks.append(started(rig, marker, written(b"%d" % number, 1, 2)))
    for task in tasks:
        assert await outcomes(task) == [APPLIED, APPLIED]


async def test_a_condition_after_a_change_in_the_same_request_sees_the_change(rig: Rig) -> None:
    applied, question = await rig.mutate(
        written(b"a", 10, 20), mutation(b"a", conditions=[no_own_write(10)])
    )
    assert applied.outcome == APPLIED
    assert (question.outcome, question.cell.timestamp) == (REFUSED, 20)


# ---------------------------------------------------------------- waiting


async def test_what_waited_beyond_its_deadline_is_dropped_and_says_so(rig: Rig) -> None:
    """If it were executed after its caller gave up, it would leave locks without an owner."""
    first = await under_way(rig.mutate(written(b"a", 10, 20)), seconds=0.1)
    late = asyncio.ensure_future(rig.mutate(written(b"b", 10, 20), within_seconds=0.5))
    await first
    [result] = await late
    assert not_executed(result).retry == 1  # RETRY_SAFETY_SAFE
    assert await rig.value(b"b", 30) is None


async def test_what_was_given_up_while_waiting_is_not_executed(rig: Rig) -> None:
    first = await under_way(rig.mutate(written(b"a", 10, 20)), seconds=0.1)
    given_up = started(rig, written(b"b", 10, 20))
    await asyncio.sleep(0.1)
    given_up.cancel()
    await first
    await rig.apply(written(b"c", 10, 20))
    assert await rig.value(b"b", 30) is None


async def test_a_full_queue_refuses_and_says_when_to_retry() -> None:
    rig = await Rig(queue_bytes_max=3000).open()
    first = await under_way(rig.mutate(written(b"a", 10, 20)), seconds=0.1)
    fits = started(rig, written(b"b", 10, 20, b"v" * 500))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await rig.mutate(written(b"c", 10, 20, b"v" * 3000))
    assert caught.value.retry_after_seconds > 0
    assert await outcomes(first) == await outcomes(fits) == [APPLIED]
    await rig.apply(written(b"c", 10, 20, b"v" * 3000))  # an empty queue takes anything


@pytest.mark.parametrize(
    ("limits", "count", "value", "batches"),
    [
        ({"commit_mutations_max": 10, "slice_rows": 3}, 35, b"", 4),
        ({"commit_bytes_max": 1000, "slice_rows": 1}, 4, b"v" * 600, 2),
    ],
    ids=["many mutations", "large values"],
)
async def test_a_long_request_is_cut_into_batches_and_answered_as_one(
    disk: SlowDisk, limits: dict[str, Any], count: int, value: bytes, batches: int
) -> None:
    rig = await Rig(disk=disk, **limits).open()
    before = disk.writes
    await rig.apply(*(written(b"%d" % number, 10, 20, value) for number in range(count)))
    assert disk.writes == before + batches


# ---------------------------------------------------------------- schema versions


async def test_the_schema_version_counts_when_a_mutation_is_judged(rig: Rig) -> None:
    """If the schema were checked on arrival, a commit could wait while it changes, and then commit
    an observed cell without a notification."""
    first = await under_way(rig.mutate(written(b"a", 10, 20)), seconds=0.1)
    waiting = started(rig, written(b"b", 10, 20))
    await asyncio.sleep(0.1)
    changed = await under_way(rig.tablet.set_schema_version(4), seconds=0.1)
    assert not changed.done()  # what was judged under version 3 is not durable yet
    await changed
    assert first.done()
    [result] = await waiting
    assert (result.outcome, result.error.schema_changed.schema_version) == (NOT_EXECUTED, 4)
    with pytest.raises(SchemaChanged):
        await rig.mutate(written(b"c", 10, 20))
    answer = await rig.tablet.mutate(batch([written(b"c", 10, 20)], 4), deadline_seconds=1e9)
    assert (answer.mutations, len(answer.unapplied)) == (1, 0)


async def test_the_schema_version_never_goes_back(rig: Rig) -> None:
    await rig.tablet.set_schema_version(5)
    await rig.tablet.set_schema_version(4)
    assert rig.tablet.schema_version == 5


# Group commit when the disk fails, the tablet is taken away, or the tablet is closed meanwhile.

# ---------------------------------------------------------------- failing disks


@pytest.mark.parametrize("kept", [False, True])
async def test_after_a_failed_write_everything_in_its_batch_is_unknown(
    rig: Rig, disk: SlowDisk, kept: bool
) -> None:
    """A failed fsync does not mean that nothing was written: if a transfer were reported as failed
    and the user repeated it, it would happen twice. And a refusal may reveal what is in doubt."""
    await rig.apply(written(b"taken", 5, 6))
    disk.failure = OSError("the disk is on fire")
    writing = await under_way(
        rig.mutate(written(b"a", 10, 20), mutation(b"taken", conditions=[condition(WRITE, ABSENT)]))
    )
    waiting = started(rig, written(b"b", 10, 20))
    for result in await writing:
        assert result.outcome == UNKNOWN
        assert result.error.HasField("outcome_unknown")
    [result] = await waiting
    assert not_executed(result).HasField("store_unusable")

    assert [type(error) for error in rig.closed] == [StoreUnusable]
    for call in (rig.mutate(written(b"c", 10, 20)), rig.read(b"taken", 30), rig.scan(30)):
        with pytest.raises(StoreUnusable):
            await call
    await rig.tablet.close()

    disk.failure = None
    disk.settle(kept=kept)
    reopened = await Rig(disk=disk).open()
    assert await reopened.value(b"a", 30) == (b"" if kept else None)
    assert await reopened.value(b"b", 30) is None


class ForgetfulStorage(MemoryStorage):
    """Raises an error that no disk raises, as a bug would."""

    broken = False

    async def write(self, batch: MemoryBatch, then: Callable[[], bool] | None = None) -> bool:
        if self.broken:
            raise RuntimeError("a bug")
        return await super().write(batch, then)


async def test_a_bug_leaves_no_caller_waiting_for_an_answer() -> None:
    storage = ForgetfulStorage(SlowDisk())
    rig = await Rig(storage=storage).open()
    seen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    storage.broken = True
    assert await outcomes(rig.mutate(written(b"a", 10, 20))) == [UNKNOWN]
    assert rig.closed
    with pytest.raises(PercolatorError):
        await rig.read(b"a", 30)


async def test_a_bug_after_the_write_stops_the_tablet_and_leaves_its_batch_unknown(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes that memory only half knows must be neither judged nor read: a lock that
    the mirror does not know would block no one."""
    asyncio.get_running_loop().set_exception_handler(lambda _, context: None)

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(JudgedBatch, "publish", broken)
    async with asyncio.timeout(10):
        [result] = await rig.mutate(prewrite(b"a", 10))
    assert result.outcome == UNKNOWN
    assert rig.closed
    with pytest.raises(PercolatorError):
        await rig.read(b"a", 30)
    reopened = await rig.reopened()
    assert len((await reopened.read(b"a", 30)).locks) == 1


# ---------------------------------------------------------------- lost ownership


async def test_an_owner_deposed_during_the_write_answers_unknown(rig: Rig) -> None:
    """The new owner may have cloned the directory before the write, or after it."""
    await rig.apply(written(b"taken", 5, 6))
    writing = await under_way(
        rig.mutate(written(b"a", 10, 20), mutation(b"taken", conditions=[condition(WRITE, ABSENT)]))
    )
    waiting = started(rig, written(b"b", 10, 20))
    rig.owner = False
    assert await outcomes(writing) == [UNKNOWN, UNKNOWN]
    [result] = await waiting
    assert not_executed(result).HasField("tablet_moved")
    assert [type(error) for error in rig.closed] == [TabletMoved]
    with pytest.raises(TabletMoved):
        await rig.mutate(written(b"c", 10, 20))


async def test_a_batch_of_refusals_writes_nothing_but_still_checks_the_ownership(
    rig: Rig, disk: SlowDisk
) -> None:
    """Otherwise, a deposed owner would answer "not committed" about its successor's commits."""
    await rig.apply(written(b"taken", 5, 6))
    writes, checks = disk.writes, rig.owner_checks
    question = mutation(b"taken", conditions=[condition(WRITE, ABSENT)])
    assert [result.outcome for result in await rig.mutate(question)] == [REFUSED]
    assert (disk.writes, rig.owner_checks) == (writes, checks + 1)
    rig.owner = False
    assert [result.outcome for result in await rig.mutate(question)] == [UNKNOWN]


async def test_refusals_are_unknown_while_the_store_does_not_say_who_owns_the_tablet(
    rig: Rig,
) -> None:
    """A refusal may tell of the caller's own commit, which "not executed" would deny."""
    await rig.apply(written(b"taken", 5, 6))
    question = mutation(b"taken", conditions=[condition(WRITE, ABSENT)])
    rig.store_is_silent = True
    assert [result.outcome for result in await rig.mutate(question)] == [UNKNOWN]
    with pytest.raises(NotReady):
        await rig.read(b"taken", 30)
    assert rig.closed == []
    rig.store_is_silent = False
    assert [result.outcome for result in await rig.mutate(question)] == [REFUSED]


async def test_a_deposed_owner_answers_neither_reads_nor_pages(rig: Rig) -> None:
    await rig.apply(written(b"a", 5, 6), written(b"b", 5, 6))
    pages = rig.tablet.scan(
        pb.ScanRequest(target=TARGET, all_columns=True, timestamp=30, page_rows_max=1)
    )
    assert list((await anext(pages)).found.rows) == [b"a"]
    other = await Rig().open()
    for deposed, asked in ((rig, anext(pages)), (other, other.read(b"a", 30))):
        deposed.owner = False
        with pytest.raises(TabletMoved):
            await asked
        assert len(deposed.closed) == 1


# ---------------------------------------------------------------- closing


async def test_closing_lets_the_current_batch_finish_and_refuses_the_rest(
    rig: Rig, disk: SlowDisk
) -> None:
    first = await under_way(rig.mutate(written(b"a", 10, 20)), seconds=0.1)
    waiting = started(rig, written(b"b", 10, 20))
    closing = asyncio.ensure_future(rig.tablet.close())
    assert await outcomes(first) == [APPLIED]
    [result] = await waiting
    assert result.outcome == NOT_EXECUTED
    await closing
    await rig.tablet.close()
    assert rig.closed == []  # the close was requested
    with pytest.raises(TabletMoved):
        await rig.mutate(written(b"c", 10, 20))
    reopened = await Rig(disk=disk).open()
    assert (await reopened.value(b"a", 30), await reopened.value(b"b", 30)) == (b"", None)


async def test_a_disk_failure_while_closing_is_reported_and_the_storage_is_closed(
    rig: Rig, disk: SlowDisk
) -> None:
    disk.failure = OSError("the disk is on fire")
    with pytest.raises(StoreUnusable):
        await rig.tablet.close()
    assert rig.closed == []  # the error tells the caller that closed it
    disk.settle(kept=False)
    disk.failure = None
    reopened = await Rig(disk=disk).open()
    assert (await reopened.read(b"a", 30)).found.values == []


async def test_what_was_not_synced_at_a_crash_was_never_acknowledged(disk: SlowDisk) -> None:
    storage = MemoryStorage(disk)
    rig = await Rig(disk=disk, storage=storage).open()
    await rig.apply(prewrite(b"a", 10, b"value"))
    committing = await under_way(rig.mutate(commit(b"a", 10, 20, b"value")))
    storage.crash()
    disk.settle(kept=False)
    assert await outcomes(committing) == [UNKNOWN]
    reopened = await Rig(disk=disk).open()
    assert len((await reopened.read(b"a", 30)).locks) == 1


class ClosableStorage(MemoryStorage):
    """Counts calls after it was closed, for which LevelDB raises an error."""

    is_closed = False
    touched_after_close = 0

    async def close(self) -> None:
        await super().close()
        self.is_closed = True

    def batch(self) -> MemoryBatch:
        self.touched_after_close += self.is_closed
        return super().batch()


async def test_what_waited_when_the_tablet_was_closed_leaves_its_storage_alone() -> None:
    storage = ClosableStorage(SlowDisk())
    rig = await Rig(storage=storage).open()
    running = await under_way(rig.mutate(prewrite(b"a", 10)))
    closing = asyncio.ensure_future(rig.tablet.close())
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(rig.mutate(prewrite(b"b", 10)))
    await closing
    assert [(await work)[0].outcome for work in (running, waiting)] == [APPLIED, NOT_EXECUTED]
    await asyncio.sleep(1)
    assert storage.touched_after_close == 0


# Timestamps are admitted if the oracle has issued them, whatever any clock says, or refused.

SECOND = 1_000 << 18
HOUR = 3_600 * SECOND
DAY = 24 * HOUR
YEAR = 365 * DAY
NOW = 1_800_000_000_000 << 18  # the virtual clock's


class Oracle:
    """Hands out timestamps, unless it is cut off."""

    def __init__(self, now: int = NOW) -> None:
        self.now = now
        self.asked = 0
        self.is_cut_off = False

    async def __call__(self) -> int:
        self.asked += 1
        await asyncio.sleep(0.001)
        if self.is_cut_off:
            raise DeadlineExceeded("no answer in time")
        return self.hand_out()

    def hand_out(self) -> int:
        self.now += 1
        return self.now


class Server:
    """A server: its clock, its guard, and tablets that share the guard."""

    def __init__(self, *, clock_back: int = 0) -> None:
        self.oracle = Oracle()
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.clock.set_wall_back(clock_back >> 18)
        self.guard = TimestampGuard(self.oracle, self.clock)

    async def tablet(self) -> Rig:
        return await Rig(clock=self.clock, guard=self.guard).open()


@pytest.fixture
@asynccontextmanager
async def server() -> AsyncIterator[Server]:
    """A server whose clock is right."""
    yield Server()


@pytest.mark.parametrize("clock_back", [-3 * YEAR, -2 * HOUR, 0, 2 * HOUR, 3 * YEAR])
@pytest.mark.parametrize("jump", [0, 2 * HOUR, 40 * DAY, 100 * YEAR])
async def test_a_timestamp_issued_just_now_is_admitted_whatever_the_servers_clock_says(
    clock_back: int, jump: int
) -> None:
    server = Server(clock_back=clock_back)
    tablet = await server.tablet()
    await tablet.apply(written(b"a", 5, server.oracle.hand_out()))
    server.oracle.now += jump
    await tablet.apply(written(b"a", 6, server.oracle.hand_out(), b"value"))
    server.oracle.now += jump
    assert await tablet.value(b"a", server.oracle.hand_out()) == b"value"
    server.oracle.now += jump
    [page] = await tablet.scan(server.oracle.hand_out())
    assert list(page.found.values) == [b"value"]


@pytest.mark.parametrize("clock_back", [-3 * YEAR, 0, 3 * YEAR])
async def test_timestamps_far_above_the_oracle_are_refused_by_field_and_nothing_is_done(
    clock_back: int,
) -> None:
    server = Server(clock_back=clock_back)
    tablet = await server.tablet()
    absurd = NOW + HOUR + SECOND
    for field, call in (
        (
            "mutations[1].changes[0].timestamp",
            tablet.mutate(written(b"a", 5, 6), written(b"a", 5, absurd)),
        ),
        ("reads[0].timestamp", tablet.read(b"a", absurd)),
        ("timestamp", tablet.scan(absurd)),
    ):
        with refused(field, "was not handed out by the oracle"):
            await call
    assert await tablet.value(b"a", 6) is None
    assert server.guard.refused == 3


@pytest.mark.parametrize("lies_in", ["start", "min_commit"])
async def test_a_lock_from_the_future_is_refused(lies_in: str) -> None:
    """Such a lock would never expire or never be committed, and would block its cell."""
    tablet = await Server().tablet()
    absurd = NOW + 2 * HOUR
    record = lock_record(absurd if lies_in == "start" else 5, min_commit_timestamp=absurd)
    with refused("mutations[0].changes[0].value", "was not handed out"):
        await tablet.mutate(mutation(b"a", put(LOCK, record), not_below=5))


@pytest.mark.parametrize("field", ["run", "commit_timestamp"])
async def test_a_bulk_load_from_the_future_is_refused(field: str) -> None:
    tablet = await Server().tablet()
    fence = pb.LoadFence(name="load", run=5)
    setattr(fence, field, NOW + 2 * HOUR)
    request = pb.FenceRequest(target=TARGET, action=pb.FenceRequest.ACTION_RAISE, fence=fence)
    with refused(f"fence.{field}"):
        await tablet.tablet.fence(request)


async def test_callers_cannot_creep_into_the_future_step_by_step(server: Server) -> None:
    """An admitted timestamp says nothing about the oracle's time."""
    tablet = await server.tablet()
    await tablet.apply(written(b"a", 5, NOW + HOUR))
    with pytest.raises(InvalidArgument):
        await tablet.mutate(written(b"a", 5, NOW + HOUR + HOUR // 2))


async def test_while_the_oracle_does_not_answer_the_caller_is_told_to_retry(server: Server) -> None:
    tablet = await server.tablet()
    server.oracle.is_cut_off = True
    handed_out = server.oracle.hand_out()
    with pytest.raises(NotReady, match=r"cannot tell whether .* no answer in time") as caught:
        await tablet.mutate(written(b"a", 5, handed_out))
    assert caught.value.retry_after_seconds > 0
    server.oracle.is_cut_off = False
    await tablet.apply(written(b"a", 5, handed_out))


async def test_the_masters_word_is_enough_where_the_oracle_cannot_be_reached(
    server: Server,
) -> None:
    tablet = await server.tablet()
    server.oracle.is_cut_off = True
    handed_out = server.oracle.hand_out()
    waiting = await under_way(tablet.mutate(written(b"a", 5, handed_out)), seconds=0)
    server.guard.heard(handed_out)
    assert [one.outcome for one in await waiting] == [pb.OUTCOME_APPLIED]
    asked = server.oracle.asked
    assert await tablet.value(b"a", server.oracle.hand_out()) == b""
    assert server.oracle.asked == asked


async def test_a_server_that_cannot_reach_the_oracle_keeps_serving_while_time_runs_steadily(
    server: Server,
) -> None:
    tablet = await server.tablet()
    server.guard.heard(server.oracle.hand_out())
    server.oracle.is_cut_off = True
    for _ in range(10):
        await asyncio.sleep(86_400)
        server.oracle.now += DAY
        await tablet.apply(written(b"a", 5, server.oracle.hand_out()))
    assert not server.oracle.asked


async def test_a_new_tablet_knows_what_its_server_knows_and_asks_nothing() -> None:
    server = Server(clock_back=2 * HOUR)
    for _ in range(2):
        await (await server.tablet()).apply(written(b"a", 5, server.oracle.hand_out()))
        assert server.oracle.asked == 1


async def test_a_tablet_that_is_closed_while_the_oracle_is_asked_executes_nothing(
    server: Server,
) -> None:
    tablet = await server.tablet()
    waiting = started(tablet, written(b"a", 5, server.oracle.hand_out()))
    reading = await under_way(tablet.read(b"a", server.oracle.hand_out()), seconds=0)
    await tablet.tablet.close()
    for task in (waiting, reading):
        with pytest.raises(TabletMoved):
            await task
