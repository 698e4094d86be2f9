"""Commits whose answer never comes, or whose caller does not wait for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from percolator.errors import ConflictError, OutcomeUnknown, Retry, Unavailable
from percolator.formats.records import lock_prefix
from percolator.protocol import steps
from percolator.protocol.commit import Commit
from percolator.routing.cells import APPLIED, CellMutation

from .cells_and_steps import A, B, address, put, puts, settled, world
from .naive_cells import LOCK, WRITE
from .protocol_world import NO_FAULTS, Client, Faults, World


async def test_without_an_answer_before_the_deadline_the_outcome_is_unknown() -> None:
    here = world()
    client = here.client()
    client.network.loses_answer = lambda step: puts(step, WRITE)
    commit = client.commit(await client.start_timestamp(), {A: put(b"1"), B: put(b"2")})
    with pytest.raises(OutcomeUnknown) as caught:
        await commit.run(client.deadline(1.0))
    assert caught.value.primary == A
    assert caught.value.retry is Retry.UNKNOWN
    client.network.loses_answer = lambda step: False
    at = await commit.settle(client.deadline())
    await settled(client)
    assert [at for at, _ in here.store.commits(B)] == [at]


async def test_an_unknown_outcome_may_turn_out_to_be_rolled_back() -> None:
    here = world()
    client = here.client()

    async def cut_off(step: CellMutation) -> None:
        if puts(step, WRITE):
            await asyncio.sleep(3600.0)

    commit = client.commit(await client.start_timestamp(), {A: put(b"1")})
    client.network.before_send = cut_off
    client.network.session_id = None
    waiting = asyncio.ensure_future(commit.run(client.deadline(10.0)))
    await asyncio.sleep(5.0)  # its time to live has passed, and no heartbeat arrived
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    client.network.before_send = None
    client.heartbeats.close()
    here.store.apply(commit._write.roll_back(A))
    with pytest.raises(ConflictError, match="presumed"):
        await commit.settle(client.deadline())


async def test_an_unanswered_prewrite_fails_as_safe_to_retry() -> None:
    here = World(0, Faults(1.0, 0, 0, 0, 0, 0))
    client = here.client()
    start = await client.start_timestamp()
    with pytest.raises(Unavailable) as caught:
        await client.commit(start, {A: put(b"1")}, alone=True).run(client.deadline(1.0))
    assert caught.value.retry is Retry.SAFE
    await settled(client)


async def test_a_caller_cancelled_during_prewrite_leaves_no_locks_behind() -> None:
    here = world()
    client = here.client()

    async def slow(step: CellMutation) -> None:
        if address(step) == B and puts(step, LOCK):
            await asyncio.sleep(0.5)

    client.network.before_send = slow
    start = await client.start_timestamp()
    running = asyncio.ensure_future(
        client.commit(start, {A: put(b"1"), B: put(b"2")}).run(client.deadline())
    )
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(1.0)
    await settled(client)
    assert here.store.lock_of(A) is None
    assert here.store.lock_of(B) is None
    assert here.store.commits(A) == []


async def test_a_caller_cancelled_after_the_commit_was_sent_is_committed_nevertheless() -> None:
    here = world()
    client = here.client()
    sent = asyncio.Event()

    async def note(step: CellMutation) -> None:
        if puts(step, WRITE):
            sent.set()

    client.network.before_send = note
    commit = client.commit(await client.start_timestamp(), {A: put(b"1"), B: put(b"2")})
    running = asyncio.ensure_future(commit.run(client.deadline()))
    await sent.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await settled(client)
    await settled(client)
    assert len(here.store.commits(A)) == len(here.store.commits(B)) == 1


async def _left_with_the_commit_on_its_way(here: World, client: Client) -> Commit:
    """A commit that was sent but not answered, and whose lock a reader has pushed since."""
    commit = client.commit(await client.start_timestamp(), {A: put(b"1"), B: put(b"2")})
    sent = asyncio.Event()

    async def hang(step: CellMutation) -> None:
        if puts(step, WRITE):
            sent.set()
            await asyncio.Event().wait()

    client.network.before_send = hang
    running = asyncio.ensure_future(commit.run(client.deadline()))
    await sent.wait()
    client.network.before_send = None
    lock = here.store.lock_of(A)
    assert lock is not None
    seen = lock_prefix(lock.start_timestamp, lock.min_commit_timestamp, lock.ttl_milliseconds)
    pushed = replace(lock, min_commit_timestamp=here.oracle.next() + 1)
    push = steps.replace_lock(A.row, A.column, seen, pushed.encode())
    assert here.store.apply(CellMutation(A.table_id, push)) is APPLIED
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    return commit


async def test_all_who_settle_a_commit_learn_one_timestamp_and_all_cells_have_it() -> None:
    """Its caller was cancelled, so it is being settled in the background when others ask too."""
    for seed in range(20):
        here = World(seed, NO_FAULTS)
        client = here.client()
        commit = await _left_with_the_commit_on_its_way(here, client)
        told = await asyncio.gather(*(commit.settle(client.deadline()) for _ in range(2)))
        await settled(client)
        stored = [at for cell in (A, B) for at, _ in here.store.commits(cell)]
        assert [*told, *stored] == [told[0]] * 4
        attempts = [step for step in client.network.steps if puts(step, WRITE)]
        assert len([step for step in attempts if address(step) == A]) == 2


async def test_settling_continues_when_its_caller_is_cancelled() -> None:
    here = world()
    client = here.client()
    commit = await _left_with_the_commit_on_its_way(here, client)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(commit.settle(client.deadline()), 0.0001)
    at = await commit.settle(client.deadline())
    await settled(client)
    assert [at for at, _ in here.store.commits(A)] == [at]


async def test_settling_ends_for_each_caller_at_its_own_deadline() -> None:
    here = world()
    client = here.client()
    commit = await _left_with_the_commit_on_its_way(here, client)

    async def slow(step: CellMutation) -> None:
        await asyncio.sleep(5.0)

    client.network.before_send = slow
    began = here.clock.monotonic_seconds()
    with pytest.raises(OutcomeUnknown):
        await commit.settle(client.deadline(1.0))
    assert here.clock.monotonic_seconds() - began == pytest.approx(1.0)
    assert await commit.settle(client.deadline()) > 0
    await settled(client)
