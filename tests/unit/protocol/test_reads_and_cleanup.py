"""Readers meet locks: resolved, passed, pushed or waited for, and never ignored."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import (
    CellAddress,
    ConflictError,
    InvariantViolation,
    Retry,
    SnapshotTooOld,
)
from percolator.formats.records import KIND_LOCK_ONLY
from percolator.limits import Limits
from percolator.protocol.environment import ROLLED_BACK, Statistics, Verdicts
from percolator.protocol.read import PASSING_MAX, read_rows
from percolator.routing.cells import CellMutation, RowRequest
from percolator.v1.tabletserver_pb2 import RowRead

from .cells_and_steps import (
    PATIENT,
    A,
    B,
    address,
    left_behind,
    locked,
    put,
    puts,
    settled,
    world,
)
from .naive_cells import NOTIFY, WRITE
from .protocol_world import OBSERVED, OBSERVER

NEVER_PUSHING = Limits(push_after_seconds=1e6)


async def test_a_commit_is_visible_at_its_timestamp_but_not_below() -> None:
    here = world()
    client = here.client()
    commit = await client.write({A: put(b"1")})
    assert await client.read(A, commit) == b"1"
    assert await client.read(A, commit - 1) is None


async def test_a_reader_rolls_forward_what_was_committed_and_left_behind() -> None:
    here = world()
    observed = CellAddress(2, b"z", OBSERVED)
    await left_behind(here, A, B, observed, committed=True)
    reader = here.client(PATIENT)
    timestamp = await reader.start_timestamp()
    assert await reader.read(B, timestamp) == b"pending"
    assert await reader.read(observed, timestamp) == b"pending"
    await settled(reader)
    assert here.store.lock_of(B) is None
    ((commit, _),) = here.store.commits(A)
    assert [at for at, _ in here.store.commits(observed)] == [commit]
    assert (NOTIFY, OBSERVER, commit) in here.store.cells[observed]


async def test_a_reader_rolls_back_what_was_not_committed_on_the_primary_first() -> None:
    here = world()
    start = await left_behind(here, A, B, committed=False)
    reader = here.client(PATIENT)
    assert await reader.read(B, await reader.start_timestamp()) is None
    assert here.store.lock_of(A) is None
    assert here.store.lock_of(B) is None
    assert reader.env.verdicts.get(start) == ROLLED_BACK
    marked = [address(step) for step in reader.network.steps if step.message().changes]
    assert marked == [A, B]


async def test_locks_with_one_primary_are_settled_together() -> None:
    """Ten locks of one dead transaction cost one question: they say what their cells hold."""
    here = world()
    cells = [CellAddress(1, b"row", b"%d" % i) for i in range(10)]
    await left_behind(here, A, *cells, committed=True)
    reader = here.client(PATIENT)
    timestamp = await reader.start_timestamp()
    statistics = Statistics()
    request = RowRequest(1, RowRead(row=b"row", all_columns=True, timestamp=timestamp))
    (answer,) = await read_rows(
        reader.env, reader.cleanup, [request], reader.deadline(), statistics
    )
    assert len(answer.found) == 10
    assert statistics.round_trips == 1
    await settled(reader)
    assert not any(here.store.lock_of(cell) for cell in cells)
    asked = [step for step in reader.network.steps if not step.message().changes]
    assert len(asked) == 1


async def test_a_reader_waits_for_a_live_writer() -> None:
    here = world()
    writer, reader = here.client(PATIENT), here.client(NEVER_PUSHING)
    commit = await locked(writer, A, B)
    timestamp = await reader.start_timestamp()
    reading = asyncio.ensure_future(reader.read(B, timestamp))
    await asyncio.sleep(0.5)
    assert not reading.done()
    await commit.commit_primary(writer.deadline())
    assert await reading is None  # it committed above the reader
    assert commit.begin_two_phases().commit > timestamp


async def test_waiting_for_a_lock_ends_with_the_deadline_and_names_its_holder() -> None:
    here = world()
    writer, reader = here.client(PATIENT), here.client(NEVER_PUSHING)
    writer.heartbeats.add((await locked(writer, A)).begin_two_phases())
    timestamp = await reader.start_timestamp()
    request = RowRequest(1, RowRead(row=b"a", columns=[b"x"], timestamp=timestamp))
    statistics = Statistics()
    with pytest.raises(ConflictError, match="is locked by transaction") as caught:
        await read_rows(
            reader.env,
            reader.cleanup,
            [request],
            reader.deadline(1.0),
            statistics,
        )
    assert caught.value.retry is Retry.SAFE
    (wait,) = statistics.lock_waits
    assert (wait.row, wait.column) == (b"a", b"x")
    assert wait.seconds > 0.5
    writer.heartbeats.close()


async def test_a_reader_pushes_a_live_writer_instead_of_waiting_for_its_end() -> None:
    here = world()
    writer, reader = here.client(PATIENT), here.client(PATIENT)
    await locked(writer, A, B)
    timestamp = await reader.start_timestamp()
    before = here.clock.monotonic_seconds()
    assert await reader.read(B, timestamp) is None  # the lock in the way is not the primary's
    assert PATIENT.push_after_seconds < here.clock.monotonic_seconds() - before < 0.5
    lock = here.store.lock_of(A)
    assert lock is not None
    assert lock.min_commit_timestamp == timestamp + 1
    unchanged = here.store.lock_of(B)
    assert unchanged is not None
    assert unchanged.min_commit_timestamp == lock.start_timestamp + 1


@pytest.mark.parametrize("fate", ["committed above the reader", "pushed", "rolled back"])
async def test_more_locks_than_a_read_can_name_do_not_block_readers(fate: str) -> None:
    """One row, whose cells are locked by more transactions than fit into a read's list."""
    here = world()
    many = PASSING_MAX + 10
    columns = [b"%d" % i for i in range(many)]
    owner, reader = here.client(PATIENT), here.client(Limits(lock_ttl_seconds=3.0))
    commits = [
        await locked(owner, CellAddress(1, b"primaries", column), CellAddress(1, b"row", column))
        for column in columns
    ]
    timestamp = await reader.start_timestamp()
    if fate == "committed above the reader":
        for commit in commits:
            await commit.commit_primary(owner.deadline())
    elif fate == "rolled back":
        owner.crash()
    request = RowRequest(1, RowRead(row=b"row", all_columns=True, timestamp=timestamp))
    (answer,) = await read_rows(
        reader.env, reader.cleanup, [request], reader.deadline(2.0), Statistics()
    )
    assert (answer.found, answer.locks) == ({}, [])
    assert len(request.read.passing) <= PASSING_MAX
    for commit in commits:
        if fate == "pushed":
            assert await commit.settle(owner.deadline()) > timestamp


async def test_each_row_is_read_again_with_the_locks_that_it_had_itself() -> None:
    here = world()
    owner, reader = here.client(PATIENT), here.client(PATIENT)
    rows = [b"%d" % i for i in range(PASSING_MAX + 10)]
    for row in rows:
        await locked(owner, CellAddress(1, row, b"a"), CellAddress(1, row, b"b"))
    timestamp = await reader.start_timestamp()
    requests = [
        RowRequest(1, RowRead(row=row, columns=[b"b"], timestamp=timestamp)) for row in rows
    ]
    statistics = Statistics()
    await read_rows(reader.env, reader.cleanup, requests, reader.deadline(), statistics)
    assert {len(request.read.passing) for request in requests} == {1}


async def test_a_lock_younger_than_the_reader_is_not_seen() -> None:
    here = world()
    reader = here.client(NEVER_PUSHING)
    timestamp = await reader.start_timestamp()
    await locked(here.client(PATIENT), A)
    assert await reader.read(A, timestamp) is None


async def test_a_lock_only_lock_does_not_block_readers() -> None:
    here = world()
    client = here.client(PATIENT)
    await client.write({A: put(b"1")})
    lock = client.commit(await client.start_timestamp(), {A: (KIND_LOCK_ONLY, b"")})
    await lock.prewrite(client.deadline())
    reader = here.client(NEVER_PUSHING)
    assert await reader.read(A, await reader.start_timestamp()) == b"1"


async def test_a_transaction_without_a_trace_on_its_primary_is_not_dead() -> None:
    """Prewrites travel in parallel: the secondary may be there before the primary."""
    here = world()
    writer, reader = here.client(PATIENT), here.client(NEVER_PUSHING)

    async def slow(step: CellMutation) -> None:
        if address(step) == A and puts(step, 1):
            await asyncio.sleep(1.0)

    writer.network.before_send = slow
    writing = asyncio.ensure_future(writer.write({A: put(b"1"), B: put(b"2")}))
    await asyncio.sleep(0.5)
    timestamp = await reader.start_timestamp()
    reading = asyncio.ensure_future(reader.read(B, timestamp))
    commit = await writing
    assert commit > timestamp
    assert await reading is None
    assert [record.value for _, record in here.store.commits(B)] == [b"2"]


async def test_a_late_prewrite_after_the_cleanup_is_refused() -> None:
    here = world()
    writer, reader = here.client(PATIENT), here.client(PATIENT)
    writer.network.session_id = b"gone" * 4
    held: list[CellMutation] = []

    async def keep(step: CellMutation) -> None:
        if address(step) == A and puts(step, 1):
            held.append(step)
            await asyncio.sleep(3600.0)

    writer.network.before_send = keep
    writing = asyncio.ensure_future(writer.write({A: put(b"1"), B: put(b"2")}))
    await asyncio.sleep(4.0)  # its time to live has passed
    assert await reader.read(B, await reader.start_timestamp()) is None
    answer = here.store.apply(held[0])
    assert getattr(answer, "condition", None) == 1, "the marker stops it"
    assert here.store.lock_of(A) is None
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await writer.env.background.drain(0.0)


async def test_a_heartbeat_proves_the_owner_alive_until_the_last_moment() -> None:
    """The lock has changed since it was judged, so nothing is rolled back."""
    here = world()
    writer, reader = here.client(PATIENT), here.client(PATIENT)
    writer.network.session_id = None
    commit = await locked(writer, A)
    await asyncio.sleep(3.2)

    async def beat_first(step: CellMutation) -> None:
        if step.message().changes:
            reader.network.before_send = None
            beat = commit.begin_two_phases().heartbeat()
            answer = here.store.apply(beat.step)
            commit.begin_two_phases().after_heartbeat(beat, answer, 0.0)

    reader.network.before_send = beat_first
    timestamp = await reader.start_timestamp()
    assert await reader.read(A, timestamp) is None
    at = await commit.commit_primary(writer.deadline())
    assert at > timestamp


async def test_own_commits_are_known_at_once() -> None:
    """The next transaction of the same process does not ask about its own locks."""
    here = world()
    client = here.client(PATIENT)

    async def slow(step: CellMutation) -> None:
        if address(step) == B and puts(step, WRITE):
            await asyncio.sleep(1.0)

    client.network.before_send = slow
    await client.write({A: put(b"1"), B: put(b"2")})
    client.network.before_send = None
    sent = len(client.network.steps)
    assert await client.read(B, await client.start_timestamp()) == b"2"
    assert all(step.message().changes for step in client.network.steps[sent:])
    await settled(client)


async def test_two_outcomes_of_one_transaction_are_an_invariant_violation() -> None:
    verdicts = Verdicts(entries_max=2)
    verdicts.put(5, 9)
    verdicts.put(5, 9)
    with pytest.raises(InvariantViolation, match="two outcomes"):
        verdicts.put(5, ROLLED_BACK)
    verdicts.put(6, 10)
    verdicts.put(7, ROLLED_BACK)
    assert verdicts.get(5) is None  # forgotten: there are three


async def test_a_snapshot_below_the_safe_point_is_refused() -> None:
    here = world()
    client = here.client()
    timestamp = await client.start_timestamp()
    here.store.safe_point = timestamp + 1
    with pytest.raises(SnapshotTooOld):
        await client.read(A, timestamp)
    with pytest.raises(SnapshotTooOld):
        await client.commit(timestamp, {A: put(b"1")}).run(client.deadline())
