"""Commits, step by step: what is sent when, and what is concluded from the answers."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import CellAddress, ConflictError, Retry
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY
from percolator.limits import Limits
from percolator.protocol.environment import ROLLED_BACK, Statistics
from percolator.routing.catalog import TableSchema
from percolator.routing.cells import CellMutation
from percolator.timestamps import SEQUENCE_BITS

from .cells_and_steps import PATIENT, A, B, C, address, put, puts, settled, world
from .naive_cells import DATA, LOCK, NOTIFY, ROLLBACK, WRITE
from .protocol_world import LIMITS, OBSERVED, OBSERVER


async def test_a_commit_is_prewrite_then_timestamp_then_primary_then_the_rest() -> None:
    here = world()
    client = here.client()
    commit = await client.write({B: put(b"2"), A: put(b"1"), C: put(b"3")})
    await settled(client)
    kinds = [
        (address(step), "lock" if puts(step, LOCK) else "commit") for step in client.network.steps
    ]
    assert sorted(kinds[:3]) == [(A, "lock"), (B, "lock"), (C, "lock")]
    assert kinds[3] == (A, "commit")
    assert sorted(kinds[4:]) == [(B, "commit"), (C, "commit")]
    for cell, value in ((A, b"1"), (B, b"2"), (C, b"3")):
        ((at, record),) = here.store.commits(cell)
        assert (at, record.value) == (commit, value)
        assert here.store.lock_of(cell) is None


async def test_the_commit_timestamp_is_fetched_after_the_last_prewrite_was_answered() -> None:
    here = world()
    client = here.client()
    start = await client.start_timestamp()

    async def slow(step: CellMutation) -> None:
        if address(step) == B and puts(step, LOCK):
            await asyncio.sleep(1.0)
            at_last_prewrite.append(here.oracle.next())

    at_last_prewrite: list[int] = []
    client.network.before_send = slow
    commit = await client.commit(start, {A: put(b"1"), B: put(b"2")}).run(client.deadline())
    assert commit > at_last_prewrite[0] > start


async def test_the_least_cell_that_carries_a_lock_is_the_primary() -> None:
    client = world().client()
    commit = client.commit(5, {C: put(b""), B: (KIND_LOCK_ONLY, b""), A: (KIND_DELETE, b"")})
    assert commit._write.primary == A


async def test_an_unanswered_commit_is_repeated_with_the_same_timestamp() -> None:
    here = world()
    client = here.client()
    lost = iter([True, True])
    client.network.loses_answer = lambda step: puts(step, WRITE) and next(lost, False)
    commit = await client.write({A: put(b"1")})
    attempts = [step for step in client.network.steps if puts(step, WRITE)]
    assert len(attempts) == 3
    assert {change.timestamp for s in attempts for change in s.message().changes} == {0, commit}


async def test_an_unanswered_prewrite_that_was_applied_counts_as_done() -> None:
    here = world()
    client = here.client()
    lost = iter([True])
    client.network.loses_answer = lambda step: puts(step, LOCK) and next(lost, False)
    commit = await client.write({A: put(b"1")})
    assert [at for at, _ in here.store.commits(A)] == [commit]


async def test_a_pushed_lock_makes_the_commit_take_a_later_timestamp() -> None:
    here = world()
    writer, reader = here.client(PATIENT), here.client()

    async def wait(step: CellMutation) -> None:
        if puts(step, WRITE) and not waited.is_set():
            waited.set()
            await asyncio.sleep(0.5)

    waited = asyncio.Event()
    writer.network.before_send = wait
    writing = asyncio.ensure_future(writer.write({A: put(b"1")}))
    await waited.wait()
    timestamp = await reader.start_timestamp()
    assert await reader.read(A, timestamp) is None  # passes the live writer, having pushed it
    assert not writing.done()
    commit = await writing
    assert commit > timestamp
    assert await reader.read(A, timestamp) is None


async def test_aborting_touches_nothing_before_the_marker_on_the_primary_is_durable() -> None:
    here = world()
    client = here.client()
    start = await client.start_timestamp()
    await here.client().write({C: put(b"newer")})
    marked = asyncio.Event()

    async def slow(step: CellMutation) -> None:
        if puts(step, ROLLBACK) and address(step) == A:
            await asyncio.sleep(1.0)
            marked.set()
        elif puts(step, ROLLBACK):
            assert marked.is_set()

    client.network.before_send = slow
    with pytest.raises(ConflictError):
        await client.commit(start, {A: put(b"1"), B: put(b"2"), C: put(b"3")}).run(
            client.deadline()
        )
    assert marked.is_set(), "reported as aborted before the marker was durable"
    assert client.env.verdicts.get(start) == ROLLED_BACK
    await settled(client)
    assert here.store.lock_of(A) is here.store.lock_of(B) is here.store.lock_of(C) is None


async def test_a_marker_that_meets_the_commit_record_reports_committed() -> None:
    """Another client committed the same transaction while this one was giving up."""
    here = world()
    slow, quick, stranger = here.client(PATIENT), here.client(PATIENT), here.client(PATIENT)
    start = await slow.start_timestamp()
    writes = {A: put(b"1"), B: put(b"2")}
    in_the_way = stranger.commit(await stranger.start_timestamp(), {B: put(b"younger")})
    await in_the_way.prewrite(stranger.deadline())

    async def let_the_other_finish(step: CellMutation) -> None:
        if puts(step, ROLLBACK):
            slow.network.before_send = None
            with pytest.raises(ConflictError):
                await in_the_way._give_up(ConflictError("gone"), stranger.deadline())
            committed.append(await quick.commit(start, writes).run(quick.deadline()))

    committed: list[int] = []
    slow.network.before_send = let_the_other_finish
    assert await slow.commit(start, writes).run(slow.deadline()) == committed[0]
    assert [at for at, _ in here.store.commits(A)] == committed


async def test_a_conflict_names_the_cell_and_the_other_transaction() -> None:
    here = world()
    client = here.client()
    start = await client.start_timestamp()
    other = await here.client().write({A: put(b"other")})
    with pytest.raises(ConflictError) as caught:
        await client.commit(start, {A: put(b"mine")}).run(client.deadline())
    error = caught.value
    assert (error.cell, error.start_timestamp, error.other_commit_timestamp) == (A, start, other)
    assert start < error.other_start_timestamp < other
    assert error.retry is Retry.SAFE


async def test_a_primary_lost_to_a_newer_commit_needs_no_marker() -> None:
    here = world()
    client = here.client()
    start = await client.start_timestamp()
    await here.client().write({A: put(b"other")})
    with pytest.raises(ConflictError):
        await client.commit(start, {A: put(b"mine")}).run(client.deadline())
    await settled(client)
    assert not any(puts(step, ROLLBACK) for step in client.network.steps)


async def test_the_older_transaction_does_not_wait_for_the_younger() -> None:
    here = world()
    old, young = here.client(PATIENT), here.client(PATIENT)
    start = await old.start_timestamp()
    locked = young.commit(await young.start_timestamp(), {A: put(b"young")})
    await locked.prewrite(young.deadline())
    before = here.clock.monotonic_seconds()
    with pytest.raises(ConflictError, match="is locked by"):
        await old.commit(start, {A: put(b"old")}).run(old.deadline())
    assert here.clock.monotonic_seconds() - before < 0.05


async def test_the_younger_waits_for_the_older_to_end() -> None:
    here = world()
    old, young = here.client(PATIENT), here.client(PATIENT)
    locked = old.commit(await old.start_timestamp(), {A: put(b"old")})
    await locked.prewrite(old.deadline())
    statistics = Statistics()
    waiting = asyncio.ensure_future(
        young.commit(await young.start_timestamp(), {A: put(b"young")}, statistics=statistics).run(
            young.deadline()
        )
    )
    await asyncio.sleep(0.5)
    assert not waiting.done()
    with pytest.raises(ConflictError):
        await locked._give_up(ConflictError("changed its mind"), old.deadline())
    assert await waiting
    (wait,) = statistics.lock_waits
    assert wait.holder_start_timestamp == locked._write.start
    assert 0.3 < wait.seconds < 0.7


async def test_an_orphan_lock_is_cleaned_up_by_a_writer_that_reads_nothing() -> None:
    here = world()
    dead = here.client(PATIENT)
    orphan = dead.commit(await dead.start_timestamp(), {A: put(b"orphan"), B: put(b"orphan")})
    await orphan.prewrite(dead.deadline())
    dead.crash()
    writer = here.client(PATIENT)
    before = here.clock.monotonic_seconds()
    await writer.write({B: put(b"new")})
    # Its session says that it is gone, so the time to live of three seconds is not waited for.
    assert here.clock.monotonic_seconds() - before < 0.2
    assert [record.value for _, record in here.store.commits(B)] == [b"new"]


async def test_an_orphan_lock_without_a_session_is_cleaned_up_after_its_time_to_live() -> None:
    here = world()
    dead = here.client(PATIENT)
    dead.network.session_id = None
    orphan = dead.commit(await dead.start_timestamp(), {A: put(b"orphan")})
    await orphan.prewrite(dead.deadline())
    dead.crash()
    writer = here.client(PATIENT)
    before = here.clock.monotonic_seconds()
    await writer.write({A: put(b"new")})
    assert 2.8 < here.clock.monotonic_seconds() - before < 3.5


async def test_heartbeats_keep_a_slow_commit_alive() -> None:
    here = world()
    limits = Limits(lock_ttl_seconds=0.3, heartbeat_seconds=0.1)
    slow, impatient = here.client(limits), here.client(limits)
    slow.network.session_id = None

    async def wait(step: CellMutation) -> None:
        if puts(step, WRITE):
            await asyncio.sleep(2.0)

    slow.network.before_send = wait
    writing = asyncio.ensure_future(slow.write({A: put(b"1")}))
    await asyncio.sleep(0.2)
    meeting = asyncio.ensure_future(impatient.write_stubbornly({A: put(b"2")}))
    commit = await writing
    assert here.store.commits(A)[0][0] == commit
    await meeting


async def test_heartbeats_continue_after_a_prewrite_whose_answer_was_lost() -> None:
    """The lock has the time to live of the first attempt, not of the attempt that found it."""
    here = world()
    client = here.client(Limits(lock_ttl_seconds=0.3, heartbeat_seconds=0.1))
    lost = iter([True])
    client.network.loses_answer = lambda step: puts(step, LOCK) and next(lost, False)

    async def wait(step: CellMutation) -> None:
        if puts(step, WRITE):
            await asyncio.sleep(2.0)

    client.network.before_send = wait
    writing = asyncio.ensure_future(client.write({A: put(b"1")}))
    await asyncio.sleep(1.5)
    lock = here.store.lock_of(A)
    assert lock is not None
    assert lock.ttl_milliseconds > 1_500
    await writing


async def test_a_time_to_live_counts_from_the_start_of_the_transaction() -> None:
    """A program that took five seconds before its commit must not write expired locks."""
    here = world()
    client = here.client(PATIENT)
    start = await client.start_timestamp()
    commit = client.commit(start, {A: put(b"1")})
    await asyncio.sleep(5.0)
    await commit.prewrite(client.deadline())
    lock = here.store.lock_of(A)
    assert lock is not None
    age = (here.oracle.next() >> SEQUENCE_BITS) - (start >> SEQUENCE_BITS)
    assert lock.ttl_milliseconds - age == pytest.approx(3000, abs=20)


async def test_long_values_are_stored_apart_and_removed_by_a_rollback() -> None:
    here = world()
    client = here.client()
    long = bytes(LIMITS.value_inline_bytes_max + 1)
    start = await client.start_timestamp()
    await client.commit(start, {A: put(long)}).run(client.deadline())
    assert here.store.cells[A][(DATA, b"", start)] == long
    ((_, record),) = here.store.commits(A)
    assert record.value == b""
    start = await client.start_timestamp()
    commit = client.commit(start, {B: put(long)})
    await commit.prewrite(client.deadline())
    with pytest.raises(ConflictError):
        await commit._give_up(ConflictError("no"), client.deadline())
    assert (DATA, b"", start) not in here.store.cells[B]


async def test_a_commit_under_an_old_schema_is_sent_again_with_the_new_notifications() -> None:
    here = world()
    client = here.client()
    cell = CellAddress(1, b"a", OBSERVED)
    here.store.schema_versions[1] = 2

    class Stale:
        schema = TableSchema(1)

        def get(self, table_id: int) -> TableSchema:
            return self.schema

        async def refresh(self, table_id: int, deadline: float) -> TableSchema:
            self.schema = TableSchema(2, {OBSERVED: (OBSERVER,)})
            return self.schema

    object.__setattr__(client.env, "schemas", Stale())
    commit = await client.write({cell: put(b"1")})
    assert (NOTIFY, OBSERVER, commit) in here.store.cells[cell]


async def test_a_lock_only_write_notifies_no_observer() -> None:
    here = world()
    cell = CellAddress(1, b"a", OBSERVED)
    commit = await here.client().write({cell: (KIND_LOCK_ONLY, b"")})
    assert (NOTIFY, OBSERVER, commit) not in here.store.cells[cell]


async def test_a_large_transaction_is_sent_in_portions_and_is_still_one() -> None:
    here = world()
    client = here.client()
    cells = {CellAddress(1, b"%06d" % i, b"x"): put(b"") for i in range(9_000)}
    start = await client.start_timestamp()
    statistics = Statistics()
    commit = await client.commit(start, cells, statistics=statistics).run(client.deadline(600))
    await settled(client)
    assert {at for cell in cells for at, _ in here.store.commits(cell)} == {commit}
    assert statistics.round_trips == 3 + 1 + 1


async def test_with_too_much_background_work_committers_wait_for_their_own() -> None:
    here = world()
    client = here.client(Limits(background_tasks_max=1))

    async def slow(step: CellMutation) -> None:
        if puts(step, WRITE) and address(step) == B:
            await asyncio.sleep(5.0)

    client.network.before_send = slow
    await client.write({A: put(b"1"), B: put(b"2")})
    before = here.clock.monotonic_seconds()
    c = CellAddress(1, b"c", b"x")
    d = CellAddress(1, b"d", b"x")
    await client.write({c: put(b"1"), d: put(b"2")})
    assert here.store.lock_of(d) is None, "left to the background although that is full"
    assert here.clock.monotonic_seconds() - before < 1.0
