"""A worker and observers that misbehave: each does what is documented, and holds up no other."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
from prometheus_client import CollectorRegistry

from percolator import Limits, Table, aio, codecs, observes
from percolator.aio import Transaction
from percolator.errors import (
    ConflictError,
    ExecutionUnknown,
    InvalidArgument,
    NotReady,
    PermissionDenied,
    SchemaError,
    SnapshotTooOld,
    Unavailable,
)
from percolator.observers.backfill import backfill_owed
from percolator.observers.dead_letters import DEAD_LETTERS, DeadLetterBox
from percolator.observers.quiet import wait_until_quiet
from percolator.observers.registration import Registrations, register
from percolator.observers.watched import Counters
from percolator.observers.worker import Worker, WorkerLimits, start_in_advance, start_when_ready
from percolator.services.worker.service import WorkerMetrics
from percolator.v1 import master_pb2
from percolator.v1.master_pb2 import ChangeObserversRequest
from tests.simulation.virtual_time import VirtualClock
from tests.unit.connected import Cluster, balance, connected_to
from tests.unit.observers.observed_cluster import Observed, copy, docs, observed, source, total


@observes(source, name="copying")
async def copying(tx: Any, row: str) -> None:
    await tx.set(row, copy, await tx.get(row, source))


def counted(worker: Worker, name: str) -> Counters:
    return worker.counters["docs", name]


async def test_changes_are_handled_within_milliseconds_when_tablets_announce_them(
    world: Observed,
) -> None:
    async with world.db.run_observers([copying]) as worker:
        await world.until_copied("none", None)
        await world.put_and_copy("a", 1)
        await world.until_nothing_waits()
        counters = counted(worker, "copying")
        assert (counters.runs, counters.commits, counters.failures) == (1, 1, 0)
        assert sum(counters.latencies) == 1
        assert worker.backlog == {("docs", "copying"): 0}


async def test_notifications_written_while_no_worker_ran_are_found_by_scanning(
    world: Observed,
) -> None:
    await register(world.context, [copying])
    for number in range(40):
        await world.put(f"{number}", number)
    async with world.db.run_observers([copying]) as worker:
        await world.until_nothing_waits()
        assert counted(worker, "copying").commits == 40


async def test_two_workers_share_a_backlog_and_handle_each_change_once(world: Observed) -> None:
    runs: list[str] = []

    @observes(source, name="once")
    async def once(tx: Any, row: str) -> None:
        before = await tx.get(row, total, default=0)
        await tx.set(row, total, before + 1)
        runs.append(row)

    await register(world.context, [once])
    rows = [f"{number}" for number in range(30)]
    for row in rows:
        await world.put(row, 1)
    limits = WorkerLimits(concurrency_max=3, queue_rows_max=4)
    one = world.db.run_observers([once], limits=limits)
    other = world.db.run_observers([once], limits=limits)
    async with one, other:
        await world.until_nothing_waits()
        assert [await world.get(row, total) for row in rows] == [1] * len(rows)
        assert counted(one, "once").commits + counted(other, "once").commits == len(rows)


async def test_a_row_whose_observer_raises_is_put_aside_and_other_rows_continue(
    world: Observed,
) -> None:
    @observes(source, name="picky", attempts=3)
    async def picky(tx: Any, row: str) -> None:
        if await tx.get(row, source) == 13:
            raise ValueError("thirteen")
        await tx.set(row, copy, 1)

    async with world.db.run_observers([picky]) as worker:
        await world.put("bad", 13)
        await world.put_and_copy("good", 1)
        await world.until_nothing_waits()
        (letter,) = await world.dead_letters()
        assert (letter.observer, letter.row, letter.attempts) == ("picky", b"bad", 3)
        assert letter.error == "ValueError: thirteen"
        assert (counted(worker, "picky").failures, counted(worker, "picky").dead_letters) == (3, 1)

        await world.put("bad", 14)
        await world.until_copied("bad", 1)
        assert await world.dead_letters() == []


async def test_a_weak_notification_that_comes_during_the_last_attempt_is_not_put_aside(
    world: Observed,
) -> None:
    """As a put into a queue whose exporter fails slowly: its bucket has to be looked at again."""
    began, may_fail = asyncio.Event(), asyncio.Event()

    @observes(source, name="slow", weak=True, attempts=1)
    async def slow(tx: Any, row: str) -> None:
        if (value := await tx.get(row, source)) is None:
            began.set()
            await may_fail.wait()
            raise ValueError("nothing there")
        await tx.set(row, copy, value)

    async with world.db.run_observers([slow]) as worker:
        async with world.db.transaction() as tx:
            await tx.notify("a", source)
        await began.wait()
        async with world.db.transaction() as tx:
            await tx.set("a", source, 7)
            await tx.notify("a", source)
        may_fail.set()
        await world.until_nothing_waits()
        assert await world.get("a") == 7
        assert await world.dead_letters() == []
        assert counted(worker, "slow").dead_letters == 1


async def test_a_dead_letter_is_retried_on_request_and_deleted_once_that_succeeds(
    world: Observed,
) -> None:
    broken = True

    @observes(source, name="fixed", attempts=1)
    async def fixed(tx: Any, row: str) -> None:
        if broken:
            raise ValueError("not yet")
        await tx.set(row, copy, 1)

    async with world.db.run_observers([fixed]):
        await world.put("a", 1)
        await world.until_nothing_waits()
        box = DeadLetterBox(world.context)
        letters = await world.dead_letters()
        assert len(letters) == 1
        broken = False
        await box.retry(letters)
        await world.until_copied("a", 1)
        assert await world.dead_letters() == []


async def test_after_a_dead_letter_is_cleared_only_a_new_change_is_handled(world: Observed) -> None:
    broken = True

    @observes(source, name="later", attempts=1)
    async def later(tx: Any, row: str) -> None:
        if broken:
            raise ValueError("not yet")
        await tx.set(row, copy, 1)

    async with world.db.run_observers([later]):
        await world.put("a", 1)
        await world.until_nothing_waits()
        letters = await world.dead_letters()
        assert await DeadLetterBox(world.context).clear(letters) == 1
        assert await DeadLetterBox(world.context).clear(letters) == 0
        broken = False
        await world.context.world.clock.sleep(20.0)
        assert await world.get("a") is None
        await world.put("a", 2)
        await world.until_copied("a", 1)


async def test_a_change_whose_observer_writes_too_much_is_put_aside() -> None:
    @observes(source, name="greedy", attempts=2)
    async def greedy(tx: Any, row: str) -> None:
        for number in range(100):
            await tx.set(f"{number}", total, number)

    async with (
        observed(limits=Limits(transaction_cells_max=50)) as world,
        world.db.run_observers([greedy, copying]) as worker,
    ):
        await world.put_and_copy("a", 1)
        await world.until_nothing_waits()
        (letter,) = await world.dead_letters()
        assert letter.error == "TransactionTooLarge: a transaction can write at most 50 cells"
        assert counted(worker, "greedy").commits == 0


async def test_a_hanging_asynchronous_observer_is_given_up_and_holds_up_no_other(
    world: Observed,
) -> None:
    @observes(source, name="hanging", deadline=1.0, attempts=2, concurrency=1)
    async def hanging(tx: Any, row: str) -> None:
        await tx.set(row, total, 1)
        await asyncio.Event().wait()

    async with world.db.run_observers([hanging, copying]) as worker:
        await world.put_and_copy("a", 1)
        await world.until_nothing_waits()
        (letter,) = await world.dead_letters()
        assert letter.error == "TookTooLong: it did not return within 1 s"
        assert counted(worker, "hanging").abandoned == 2
        assert await world.get("a", total) is None


async def test_conflicts_are_not_failures_and_are_retried_until_they_end(world: Observed) -> None:
    conflicts = 20

    @observes(source, name="unlucky", attempts=2)
    async def unlucky(tx: Any, row: str) -> None:
        nonlocal conflicts
        if conflicts:
            conflicts -= 1
            raise ConflictError("as if another one had been first")
        await tx.set(row, copy, 1)

    async with world.db.run_observers([unlucky]) as worker:
        await world.put_and_copy("a", 1)
        assert counted(worker, "unlucky").conflicts == 20
        assert await world.dead_letters() == []


async def test_a_paused_observer_runs_when_it_is_resumed(world: Observed) -> None:
    async with world.db.run_observers([copying]) as worker:
        change = world.context.catalog.change_observers
        deadline = world.context.env.deadline() + 100
        await change(ChangeObserversRequest(table="docs", pause=["copying"]), deadline)
        await world.context.world.clock.sleep(5.0)
        await world.put("a", 1)
        await world.context.world.clock.sleep(20.0)
        assert counted(worker, "copying").runs == 0
        assert len(await world.waiting()) == 1
        await change(ChangeObserversRequest(table="docs", resume=["copying"]), deadline)
        await world.until_copied("a", 1)


async def test_a_running_worker_does_not_register_a_removed_observer_again(world: Observed) -> None:
    async with world.db.run_observers([copying]) as worker:
        await world.context.catalog.change_observers(
            ChangeObserversRequest(table="docs", remove=["copying"]), world.context.env.deadline()
        )
        await world.context.world.clock.sleep(5.0)
        await world.put("a", 1)
        await world.context.world.clock.sleep(20.0)
        assert counted(worker, "copying").runs == 0
        assert not (await world.context.describe("docs")).observers


@pytest.mark.parametrize("fails", [True, False])
async def test_work_that_comes_back_from_a_run_of_an_observer_removed_meanwhile_is_forgotten(
    world: Observed, *, fails: bool
) -> None:
    """It would count as backlog, and its lock would be kept, for as long as the worker runs."""
    began, may_end = asyncio.Event(), asyncio.Event()

    @observes(source, name="slow")
    async def slow(tx: Any, row: str) -> None:
        began.set()
        await may_end.wait()
        if fails:
            raise ValueError("no")

    async with world.db.run_observers([slow]) as worker:
        await world.put("a", 1)
        await began.wait()
        await world.put("a", 2)
        await world.context.world.clock.sleep(5.0)
        await world.context.catalog.change_observers(
            ChangeObserversRequest(table="docs", remove=["slow"]), world.context.env.deadline()
        )
        await world.context.world.clock.sleep(5.0)
        may_end.set()
        await world.context.world.clock.sleep(20.0)
        assert worker.backlog == {("docs", "slow"): 0}
        assert counted(worker, "slow").runs == 1


async def test_a_running_worker_ignores_a_new_table_of_the_same_name(world: Observed) -> None:
    watched = await register(world.context, [copying])
    deadline = world.context.env.deadline()
    await world.context.catalog.delete("docs", missing_ok=False, deadline=deadline)
    await world.db.create_table(copying.table)
    await register(world.context, [copying])
    registrations = Registrations(world.context, watched)
    await registrations.refresh()
    assert registrations.active == []


async def test_a_worker_leaves_notifications_of_unknown_observers_alone(world: Observed) -> None:
    @observes(source, name="elsewhere")
    async def elsewhere(tx: Any, row: str) -> None: ...

    await register(world.context, [elsewhere])
    async with world.db.run_observers([copying]):
        await world.put_and_copy("a", 1)
        await world.context.world.clock.sleep(20.0)
        assert [one.observer for one in await world.waiting()] == [b"elsewhere"]


async def test_another_definition_under_the_same_name_is_refused(world: Observed) -> None:
    @observes(copy, name="copying")
    async def namesake(tx: Any, row: str) -> None: ...

    @observes(source, name="copying", weak=True)
    async def weak_namesake(tx: Any, row: str) -> None: ...

    await register(world.context, [copying])
    for other, means in ((namesake, "copy"), (weak_namesake, r"source \(weak\)")):
        text = f"'copying': it is registered for source, but this program's is for {means}"
        with pytest.raises(InvalidArgument, match=text):
            await world.db.run_observers([other]).start()


async def test_a_running_worker_leaves_a_namesake_that_was_registered_later_to_others(
    caplog: pytest.LogCaptureFixture, world: Observed
) -> None:
    """It would take each notification of the weak one for a change that was handled before."""

    @observes(source, name="copying", weak=True)
    async def weak_namesake(tx: Any, row: str) -> None: ...

    async with world.db.run_observers([copying]) as worker:
        await world.context.catalog.change_observers(
            ChangeObserversRequest(table="docs", remove=["copying"]), world.context.env.deadline()
        )
        await register(world.context, [weak_namesake])
        await world.context.world.clock.sleep(5.0)
        async with world.db.transaction() as tx:
            await tx.notify("a", source)
        await world.context.world.clock.sleep(20.0)
        assert len(await world.waiting()) == 1
        assert counted(worker, "copying").acknowledged == 0
        (said,) = [one.getMessage() for one in caplog.records if "copying" in one.getMessage()]
        assert "registered anew, for source (weak), but this worker's is for source." in said


async def test_a_missing_table_is_named(world: Observed) -> None:
    @observes(Table("nowhere").column("text", codecs.text), name="lost")
    async def lost(tx: Any, row: str) -> None: ...

    with pytest.raises(SchemaError, match="there is no table 'nowhere'"):
        await world.db.run_observers([lost]).start()


async def test_of_several_observers_none_is_registered_if_one_is_refused(world: Observed) -> None:
    """Its backfill would wait for a worker forever, and so would `percolator wait`."""
    elsewhere = Table("elsewhere")
    watched = elsewhere.column("text", codecs.text)

    @observes(watched, name="late")
    async def late(tx: Any, row: str) -> None: ...

    @observes(watched, name="late", weak=True)
    async def other(tx: Any, row: str) -> None: ...

    with pytest.raises(SchemaError, match="there is no table 'elsewhere'"):
        await world.db.register_observers([copying, late])
    await world.db.create_table(elsewhere)
    await world.db.register_observers([other])
    with pytest.raises(InvalidArgument, match="has another observer 'late'"):
        await start_in_advance(world.db.run_observers([copying, late]))
    assert not (await world.context.describe("docs")).observers


async def test_a_worker_that_waits_is_refused_if_another_one_means_something_else() -> None:
    elsewhere = Table("elsewhere")

    def waiting(column: str) -> Worker:
        @observes(elsewhere.column(column, codecs.text), name="late")
        async def late(tx: Any, row: str) -> None: ...

        return world.db.run_observers([late])

    async with observed() as world:
        earlier, later = waiting("text"), waiting("title")
        for worker in (earlier, later):
            with pytest.raises(SchemaError, match="there is no table 'elsewhere'"):
                await start_in_advance(worker)
        text = "^observers: table 'elsewhere' already has another observer 'late', for 'title'; "
        with pytest.raises(InvalidArgument, match=text):
            await start_in_advance(earlier)


async def test_a_changed_choice_of_backfill_is_reported_and_has_no_effect(
    caplog: pytest.LogCaptureFixture, world: Observed
) -> None:
    @observes(source, name="late", backfill=False)
    async def late(tx: Any, row: str) -> None: ...

    @observes(source, name="late")
    async def changed(tx: Any, row: str) -> None: ...

    for _ in range(2):
        await world.db.register_observers([late])
    assert "has no effect" not in caplog.text
    await world.db.register_observers([changed])
    assert "was registered with backfill=False, and stays so; backfill=True" in caplog.text
    (there,) = (await world.context.describe("docs")).observers
    assert not there.backfill
    assert not there.HasField("owed")


async def test_a_worker_that_is_stopped_finishes_its_runs_and_starts_no_more(
    world: Observed,
) -> None:
    began, may_end = asyncio.Event(), asyncio.Event()

    @observes(source, name="slow", concurrency=1)
    async def slow(tx: Any, row: str) -> None:
        began.set()
        await may_end.wait()
        await tx.set(row, copy, 1)

    worker = world.db.run_observers([slow])
    await worker.start()
    await world.put("a", 1)
    await world.put("b", 1)
    await began.wait()
    stopping = asyncio.ensure_future(worker.stop(drain_seconds=5.0))
    await asyncio.sleep(0.1)
    may_end.set()
    assert await stopping
    await worker.wait()
    assert [await world.get("a"), await world.get("b")].count(1) == 1
    assert len(await world.waiting()) == 1


@pytest.mark.parametrize("seconds", [-1, math.nan, "1", True])
async def test_stopping_refuses_what_is_no_time_and_stops_nothing(
    world: Observed, seconds: Any
) -> None:
    async with world.db.run_observers([copying]) as worker:
        with pytest.raises(InvalidArgument, match="drain_seconds: expected a"):
            await worker.stop(drain_seconds=seconds)
        await world.put_and_copy("a", 1)


async def test_a_run_that_does_not_end_in_time_is_given_up_and_left_to_the_next_worker(
    world: Observed,
) -> None:
    hangs = True

    @observes(source, name="once-hanging")
    async def once_hanging(tx: Any, row: str) -> None:
        if hangs:
            await asyncio.Event().wait()
        await tx.set(row, copy, 1)

    worker = world.db.run_observers([once_hanging])
    await worker.start()
    await world.put("a", 1)
    await asyncio.sleep(0.1)
    assert not await worker.stop(drain_seconds=0.5)
    hangs = False
    async with world.db.run_observers([once_hanging]):
        await world.until_copied("a", 1)


async def test_the_lock_of_an_owner_that_died_while_committing_becomes_a_notification(
    world: Observed,
) -> None:
    await register(world.context, [copying])
    tx = world.db.transaction()
    tx._only_two_phases = True  # only they leave locks
    await tx.set("a", total, 1)
    await tx.set("z", source, 7)
    background = world.db.internal.engine.env.background
    with patch.object(background, "start", lambda work: work.close()):
        await tx.commit()
    async with world.db.run_observers([copying]):
        await world.until_copied("z", 7)


async def test_rows_of_any_length_can_be_put_aside(world: Observed) -> None:
    long = "x" * 4_000

    @observes(source, name="failing", attempts=1)
    async def failing(tx: Any, row: str) -> None:
        raise ValueError("e" * 10_000)

    async with world.db.run_observers([failing]):
        await world.put(long, 1)
        await world.until_nothing_waits()
        (letter,) = await world.dead_letters()
        assert letter.row == long.encode()
        assert len(letter.error) < 2_001


async def test_dead_letters_are_a_table_that_a_worker_creates(world: Observed) -> None:
    assert await world.dead_letters() == []
    async with world.db.run_observers([copying]):
        assert DEAD_LETTERS.name in await world.db.tables()


async def test_closing_a_database_ends_its_workers(world: Observed) -> None:
    worker = world.db.run_observers([copying])
    await worker.start()
    await world.db.close()
    await worker.wait()


async def test_options_of_a_worker_are_checked() -> None:
    async with observed() as world:
        wrong: dict[str, Any] = {"limits": 7, "drain_seconds": 0}
        for field, value in wrong.items():
            with pytest.raises(InvalidArgument) as refused:
                world.db.run_observers([copying], **{field: value})
            assert refused.value.field == field
    with pytest.raises(InvalidArgument, match="threads_max: expected at least 1, got 0"):
        WorkerLimits(threads_max=0)


# ---------------------------------------------------------------------------- backfills


async def test_live_changes_do_not_wait_for_a_long_backfill(world: Observed) -> None:
    """Few of its cells are notified at a time, so the queue has room for others."""
    waiting_most = 0

    @observes(source, name="slow", concurrency=1)
    async def slow(tx: Any, row: str) -> None:
        nonlocal waiting_most
        waiting_most = max(waiting_most, len(await world.waiting()))
        await asyncio.sleep(0.1)
        await tx.set(row, copy, await tx.get(row, source))

    for number in range(200):
        await world.put(f"{number:03}", number)
    limits = WorkerLimits(queue_rows_max=50)
    async with world.db.run_observers([slow], limits=limits) as worker:
        await asyncio.sleep(2.0)
        began = asyncio.get_running_loop().time()
        await world.put_and_copy("z", 1)
        assert asyncio.get_running_loop().time() - began < 4.0
        assert counted(worker, "slow").commits < 200
        await wait_until_quiet(world.context, 60.0)
    assert counted(worker, "slow").commits == 201
    assert waiting_most <= 50 // 5 + 50 // 20 + 1


async def test_a_backfill_is_done_by_one_worker_and_followed_by_another_when_that_dies(
    world: Observed,
) -> None:
    @observes(source, name="slow", concurrency=1)
    async def slow(tx: Any, row: str) -> None:
        await asyncio.sleep(0.1)
        await tx.set(row, copy, await tx.get(row, source))

    async def rows_left() -> bytes:
        (observer,) = (await world.context.describe("docs")).observers
        return bytes(observer.owed.row)

    for number in range(100):
        await world.put(f"{number:03}", number)
    limits = WorkerLimits(queue_rows_max=50)
    async with world.db.run_observers([slow], limits=limits):
        await asyncio.sleep(5.0)
    reached = await rows_left()
    assert b"000" < reached < b"099"
    async with world.db.run_observers([slow], limits=limits) as worker:
        await wait_until_quiet(world.context, 60.0)
    assert counted(worker, "slow").commits < 100
    assert [await world.get(f"{number:03}") for number in range(100)] == list(range(100))


async def test_a_paused_observer_is_not_notified_of_older_cells_until_it_is_resumed(
    world: Observed,
) -> None:
    await world.put("a", 1)
    change, deadline = world.context.catalog.change_observers, world.context.env.deadline()
    add = ChangeObserversRequest(table="docs", pause=["copying"])
    add.add.add(name="copying", columns=[source.name], backfill=True)
    await change(add, deadline)
    async with world.db.run_observers([copying]):
        await asyncio.sleep(10.0)
        assert await world.waiting() == []
        await change(ChangeObserversRequest(table="docs", resume=["copying"]), deadline)
        await world.until_copied("a", 1)


async def test_a_backfill_that_is_interrupted_says_why_and_goes_on(
    world: Observed,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await world.put("a", 1)
    with patch.object(
        world.context.catalog, "report_backfill", side_effect=Unavailable("no master")
    ):
        async with world.db.run_observers([copying]):
            await asyncio.sleep(1.0)
    assert "observer copying of table docs: backfill was interrupted" in caplog.text
    assert "no master" in caplog.text
    async with world.db.run_observers([copying]):
        await world.until_copied("a", 1)


async def test_a_backfill_ends_with_its_table_or_its_observer(world: Observed) -> None:
    await world.put("a", 1)
    (watched,) = await register(world.context, [copying])
    change = world.context.catalog.change_observers
    await change(
        ChangeObserversRequest(table="docs", remove=["copying"]), world.context.env.deadline()
    )
    await backfill_owed(world.context, watched)
    assert await world.waiting() == []
    (watched,) = await register(world.context, [copying])
    await world.db.drop_table(Table("docs"))
    with pytest.raises(SchemaError):
        await backfill_owed(world.context, watched)


async def test_a_worker_that_lost_its_lock_ends_a_backfill_that_another_has_completed(
    world: Observed,
) -> None:
    steps = 0

    async def go_on(progress: Any) -> bool:
        nonlocal steps
        steps += 1
        if steps == 1:
            (other,) = await register(world.context, [copying])
            await backfill_owed(world.context, other)
        await asyncio.sleep(0.6)
        return True

    for number in range(6):
        await world.put(f"{number}", number)
    (watched,) = await register(world.context, [copying])
    await backfill_owed(world.context, watched, rows_at_once=1, go_on=go_on)
    assert watched.owed is None
    assert steps <= 2


async def test_a_backfill_goes_on_at_a_later_snapshot_if_history_is_collected(
    world: Observed,
) -> None:
    for number in range(6):
        await world.put(f"{number}", number)
    (watched,) = await register(world.context, [copying])
    scan, scanned = world.context.env.cells.scan, 0

    async def scan_that_breaks_off(request: Any, seconds: float) -> Any:
        nonlocal scanned
        scanned += 1
        async for page in scan(request._replace(row_limit=2), seconds):
            yield page
            if scanned == 1:
                raise SnapshotTooOld("collected")

    with patch.object(world.context.env.cells, "scan", scan_that_breaks_off):
        await backfill_owed(world.context, watched)
    assert scanned > 1
    assert {one.row for one in await world.waiting()} == {b"%d" % n for n in range(6)}
    assert watched.owed is None


class Refused:
    """A worker whose first attempts to start are refused with these errors."""

    def __init__(self, *errors: Exception) -> None:
        self.left = list(errors)

    async def start(self, in_advance: dict[str, None] | None) -> None:
        assert in_advance is not None
        if self.left:
            raise self.left.pop(0)


async def _said(worker: Refused) -> list[str]:
    said: list[str] = []
    clock = VirtualClock(asyncio.get_running_loop())
    await start_when_ready(
        Mock(spec=[], _start=worker.start, _registered_in_advance={}), clock, said.append
    )
    return said


async def test_what_may_come_is_waited_for_and_each_reason_is_told_once() -> None:
    missing = SchemaError("there is no table 'notes'", table="notes")
    worker = Refused(missing, missing, NotReady("no master leads"), ExecutionUnknown("?"), missing)
    said = await _said(worker)
    assert worker.left == []
    assert [text.split(" (")[0] for text in said] == [
        "there is no table 'notes'",
        "no master leads",
        "?",
        "there is no table 'notes'",
    ]


async def test_what_no_waiting_mends_is_raised() -> None:
    worker = Refused(InvalidArgument("observers", "another definition"), SchemaError("never"))
    with pytest.raises(InvalidArgument, match="another definition"):
        await _said(worker)


class Guarded(Cluster):
    """Refuses what needs the role `admin`, while a test wants it to."""

    operator = True

    def _require_operator(self) -> None:
        if not self.operator:
            raise PermissionDenied("the caller has the role CLIENT, but it needs ADMIN")

    async def create_table(
        self, request: master_pb2.CreateTableRequest
    ) -> master_pb2.CreateTableResponse:
        self._require_operator()
        return await super().create_table(request)

    async def change_observers(
        self, request: master_pb2.ChangeObserversRequest
    ) -> master_pb2.ChangeObserversResponse:
        self._require_operator()
        return await super().change_observers(request)


@observes(balance)
async def look(tx: aio.Transaction, row: str) -> None:
    await tx.get(row, balance)


async def test_the_first_worker_needs_no_operators_token_if_its_observers_are_registered() -> None:
    async with connected_to(Guarded) as (db, cluster):
        await db.register_observers([look])
        cluster.operator = False
        async with db.run_observers([look]) as worker:
            assert worker.is_running


async def test_observers_that_are_not_registered_are_refused_without_one() -> None:
    async with connected_to(Guarded) as (db, cluster):
        cluster.operator = False
        with pytest.raises(PermissionDenied):
            await db.register_observers([look])


@observes(source, name="copies")
async def copies(tx: Transaction, row: str) -> None:
    await tx.set(row, copy, 1)


async def _create_again(world: Observed) -> None:
    await world.db.drop_table(docs)
    await world.db.create_table(docs)


async def test_what_a_run_writes_does_not_get_into_the_next_table(world: Observed) -> None:
    """Its acknowledgement is in the table of the change, so what it writes there is, too."""
    await register(world.context, [copies])
    async with world.db.transaction() as tx:
        await tx.set("z", copy, 0)  # the cluster keeps its codec: nobody has to ask later
    await world.put("a", 1)
    run = world.run_of(await world.work_for(copies))
    assert await run.begin()
    await _create_again(world)
    transaction = cast(Transaction, run.transaction)
    await transaction.set("a", copy, 1)
    with pytest.raises(SchemaError, match="was dropped"):
        await transaction.get("b", copy)
    with pytest.raises(SchemaError, match="was dropped"):
        await run.commit()
    assert [row.key async for row in world.db.snapshot().scan(docs)] == []


async def test_a_change_in_a_table_that_is_gone_is_not_looked_for_in_the_next_one(
    world: Observed,
) -> None:
    await register(world.context, [copies])
    await world.put("a", 1)
    work = await world.work_for(copies)
    await _create_again(world)
    await world.put("a", 2)
    with pytest.raises(SchemaError):
        await world.run_of(work).begin()


@pytest.mark.parametrize("is_created_again", [False, True])
async def test_an_observer_that_stops_because_its_table_was_dropped_says_so_once(
    world: Observed, caplog: pytest.LogCaptureFixture, *, is_created_again: bool
) -> None:
    registrations = Registrations(world.context, await register(world.context, [copies]))
    await world.db.drop_table(docs)
    if is_created_again:
        await world.db.create_table(docs)
    await registrations.refresh()
    await registrations.refresh()
    said = [one.getMessage() for one in caplog.records if "copies" in one.getMessage()]
    assert said == [
        "observer copies of table docs has stopped: the table was dropped. For another table "
        "of this name, restart the worker"
    ]


async def test_a_dead_letter_of_a_table_that_is_gone_is_not_retried_in_the_next_one(
    world: Observed,
) -> None:
    """No run there would delete it, however often it was retried."""
    broken = True

    @observes(source, name="fixed", attempts=1)
    async def fixed(tx: Transaction, row: str) -> None:
        if broken:
            raise ValueError("not yet")
        await tx.set(row, copy, 1)

    box = DeadLetterBox(world.context)
    async with world.db.run_observers([fixed]):
        await world.put("a", 1)
        await world.until_nothing_waits()
    await _create_again(world)
    async with world.db.run_observers([fixed]):
        await world.put("b", 1)
        await world.until_nothing_waits()
        former, _ = sorted(await world.dead_letters(), key=lambda one: one.row)
        broken = False
        for _ in range(2):
            with pytest.raises(SchemaError, match="put aside in a table 'docs' that was dropped"):
                await box.retry(await world.dead_letters())
            await world.until_copied("b", 1)
            assert await world.dead_letters() == [former]
        assert await box.clear([former]) == 1
        assert await world.dead_letters() == []


# What the worker service reports to Prometheus about its observers.

OF_INDEX: dict[str, Any] = {"table": "docs", "observer": "index"}


def test_every_counter_of_every_observer_is_reported() -> None:
    counters = Counters()
    counters.runs, counters.conflicts, counters.hung = 7, 2, 1
    for seconds in (0.001, 0.004, 400.0, None):
        counters.committed(seconds)
    name = OF_INDEX["table"], OF_INDEX["observer"]
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(Mock(counters={name: counters}, backlog={name: 3})))

    def told(metric: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"percolator_observer_{metric}", {**OF_INDEX, **labels})

    expected = {
        "runs_total": 7,
        "commits_total": 4,
        "conflicts_total": 2,
        "failures_total": 0,
        "hung_threads": 1,
        "backlog": 3,
        "latency_seconds_count": 3,
        "latency_seconds_sum": 400.005,
    }
    assert {metric: told(metric) for metric in expected} == expected
    buckets = {"0.002": 1, "0.005": 2, "300.0": 2, "+Inf": 3}
    assert {le: told("latency_seconds_bucket", le=le) for le in buckets} == buckets
    assert counters.commits == 4
