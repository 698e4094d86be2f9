"""A commit that takes long stays alive, however often readers push its lock meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import CellAddress
from percolator.formats.records import LockRecord
from percolator.limits import Limits
from percolator.protocol.cleanup import push_step
from percolator.protocol.commit import STEPS_AT_ONCE_MAX
from percolator.protocol.write_set import LEAD_SECONDS_MAX
from percolator.routing.cells import Answer, CellMutation, Refused
from percolator.timestamps import SEQUENCE_BITS

from .cells_and_steps import PATIENT, A, B, address, locked, put, puts
from .naive_cells import WRITE
from .protocol_world import NO_FAULTS, World

SHORT_LIVED = Limits(lock_ttl_seconds=0.3, heartbeat_seconds=0.1)
TRIP_SECONDS = 0.02
"""How long a heartbeat takes to the tablet."""
PUSH_EVERY_SECONDS = 0.01
LONG_SECONDS = 2.0


async def push_again_and_again(here: World) -> None:
    """As readers of ever younger snapshots do, all of whom have waited before they pushed."""
    while True:
        read_at = here.oracle.next()
        await asyncio.sleep(PUSH_EVERY_SECONDS)
        lock = here.store.lock_of(A)
        if lock is not None and lock.min_commit_timestamp <= read_at:
            here.store.apply(push_step(A, lock, read_at + 1))


@pytest.mark.parametrize("slow", ["waiting for a lock", "the commit"])
async def test_readers_that_push_do_not_let_a_live_transaction_expire(slow: str) -> None:
    here = World(1, NO_FAULTS)
    writer, rival, other = (here.client(limits) for limits in (SHORT_LIVED, SHORT_LIVED, PATIENT))
    writer.network.session_id = None
    if slow == "waiting for a lock":
        await locked(other, B)

    async def travel(step: CellMutation) -> None:
        commits = slow == "the commit" and puts(step, WRITE)
        await asyncio.sleep(LONG_SECONDS if commits else TRIP_SECONDS)

    writer.network.before_send = travel
    pushing = asyncio.ensure_future(push_again_and_again(here))
    writing = asyncio.ensure_future(writer.write({A: put(b"1"), B: put(b"2")}))
    await asyncio.sleep(0.2)
    meeting = asyncio.ensure_future(rival.write_stubbornly({A: put(b"3")}))
    await asyncio.sleep(LONG_SECONDS / 2)
    assert here.buried_alive == 0
    pushing.cancel()
    other.crash()
    commit = await writing
    assert commit in [at for at, _ in here.store.commits(A)]
    await meeting


MANY = [CellAddress(1, b"%06d" % number, b"x") for number in range(2 * STEPS_AT_ONCE_MAX)]


@pytest.mark.parametrize(
    ("cells", "slow"),
    [([A, B], B), (MANY, MANY[-1])],
    ids=["another cell of the first message", "a cell of a later message"],
)
async def test_a_primary_is_kept_alive_while_other_cells_are_still_being_locked(
    cells: list[CellAddress], slow: CellAddress
) -> None:
    here = World(1, NO_FAULTS)
    writer, rival = here.client(SHORT_LIVED), here.client(SHORT_LIVED)
    writer.network.session_id = None

    async def travel(step: CellMutation) -> None:
        await asyncio.sleep(LONG_SECONDS if address(step) == slow else TRIP_SECONDS)

    writer.network.before_send = travel
    writing = asyncio.ensure_future(writer.write({cell: put(b"1") for cell in cells}))
    await asyncio.sleep(0.2)
    meeting = asyncio.ensure_future(rival.write_stubbornly({cells[0]: put(b"2")}))
    await writing
    await meeting
    assert here.buried_alive == 0


async def test_a_lock_that_arrives_after_its_first_heartbeats_is_kept_alive_by_the_later_ones() -> (
    None
):
    """That a heartbeat finds no lock proves nothing while the prewrite is on its way."""
    here = World(1, NO_FAULTS)
    writer, rival = here.client(SHORT_LIVED), here.client(SHORT_LIVED)
    writer.network.session_id = None
    seconds = {A: LONG_SECONDS / 2, B: LONG_SECONDS}

    async def travel(step: CellMutation) -> None:
        await asyncio.sleep(seconds.pop(address(step), TRIP_SECONDS))

    writer.network.before_send = travel
    writing = asyncio.ensure_future(writer.write({A: put(b"1"), B: put(b"2")}))
    await asyncio.sleep(LONG_SECONDS * 3 / 4)
    meeting = asyncio.ensure_future(rival.write_stubbornly({A: put(b"3")}))
    await writing
    await meeting
    assert here.buried_alive == 0


async def test_a_heartbeat_that_overtakes_the_prewrite_does_not_end_the_later_ones() -> None:
    """It finds no lock, and that is heard of only when the prewrite has been answered."""
    here = World(1, NO_FAULTS)
    writer, rival = here.client(SHORT_LIVED), here.client(SHORT_LIVED)
    writer.network.session_id = None
    primary, last = MANY[0], MANY[-1]
    seconds = {primary: LONG_SECONDS / 2, last: LONG_SECONDS}
    overtaking = 0

    async def travel(step: CellMutation) -> None:
        await asyncio.sleep(seconds.pop(address(step), TRIP_SECONDS))

    async def back(step: CellMutation, answer: Answer) -> None:
        nonlocal overtaking
        if address(step) == primary and isinstance(answer, Refused):
            overtaking += 1
            await asyncio.sleep(LONG_SECONDS / 2)

    writer.network.before_send, writer.network.before_answer = travel, back
    writing = asyncio.ensure_future(writer.write({cell: put(b"1") for cell in MANY}))
    await asyncio.sleep(LONG_SECONDS)
    assert overtaking
    meeting = asyncio.ensure_future(rival.write_stubbornly({primary: put(b"3")}))
    await writing
    await meeting
    assert here.buried_alive == 0


async def test_a_commit_in_progress_is_not_overtaken_by_its_own_heartbeats() -> None:
    """The lock is pushed once, so heartbeats raise it; but no higher than the commit timestamp."""
    here = World(1, NO_FAULTS)
    client = here.client(SHORT_LIVED)

    async def wait(step: CellMutation) -> None:
        if puts(step, WRITE):
            await asyncio.sleep(LONG_SECONDS)

    client.network.before_send = wait
    began = here.clock.monotonic_seconds()
    read_at = here.oracle.next()
    writing = asyncio.ensure_future(client.write({A: put(b"1"), B: put(b"2")}))
    await asyncio.sleep(0.25)
    lock = here.store.lock_of(A)
    assert lock is not None
    here.store.apply(push_step(A, lock, max(read_at, lock.min_commit_timestamp) + 1))
    await writing
    assert here.clock.monotonic_seconds() - began < 2 * LONG_SECONDS + 1.0, "sent at most twice"


async def test_a_late_heartbeat_does_not_shorten_the_time_to_live() -> None:
    here = World(1, NO_FAULTS)
    client = here.client(PATIENT)
    point = (await locked(client, A)).begin_two_phases()

    def stored() -> LockRecord:
        lock = here.store.lock_of(A)
        assert lock is not None
        return lock

    def push() -> None:
        here.store.apply(push_step(A, stored(), stored().min_commit_timestamp + 1))

    push()
    refused = point.heartbeat()
    assert point.after_heartbeat(refused, here.store.apply(refused.step), TRIP_SECONDS)
    late = point.heartbeat()
    await asyncio.sleep(1.0)
    for _ in range(2):
        beat = point.heartbeat()
        point.after_heartbeat(beat, here.store.apply(beat.step), TRIP_SECONDS)
        assert stored().ttl_milliseconds == beat.ttl > late.ttl
        here.store.apply(late.step)
        assert stored().ttl_milliseconds == beat.ttl


async def test_a_commit_waits_until_the_oracle_is_above_what_a_heartbeat_has_set() -> None:
    here = World(1, NO_FAULTS)
    client = here.client(PATIENT)
    commit = await locked(client, A)
    point = commit.begin_two_phases()
    lock = here.store.lock_of(A)
    assert lock is not None
    here.store.apply(push_step(A, lock, here.oracle.next() + 1))
    refused = point.heartbeat()
    assert point.after_heartbeat(refused, here.store.apply(refused.step), 1.0)
    beat = point.heartbeat()
    assert not point.after_heartbeat(beat, here.store.apply(beat.step), 1.0)
    assert point.min_commit > here.oracle.next() + (1_000 << SEQUENCE_BITS)
    assert await commit.commit_primary(client.deadline()) >= beat.min_commit


async def test_two_committers_do_not_raise_a_lock_ever_higher() -> None:
    """As of a gateway that took over: each loses to what the other has raised, not to readers."""
    here = World(1, NO_FAULTS)
    clients = here.client(PATIENT), here.client(PATIENT)
    start = await clients[0].start_timestamp()
    commits = [client.commit(start, {A: put(b"1")}) for client in clients]
    points = []
    for client, commit in zip(clients, commits, strict=True):
        await commit.prewrite(client.deadline())
        points.append(commit.begin_two_phases())
    await asyncio.sleep(1.0)
    lock = here.store.lock_of(A)
    assert lock is not None
    here.store.apply(push_step(A, lock, here.oracle.next() + 1))
    for _ in range(20):
        for point in points:
            beat = point.heartbeat()
            point.after_heartbeat(beat, here.store.apply(beat.step), 1.0)
    lock = here.store.lock_of(A)
    assert lock is not None
    limit = LEAD_SECONDS_MAX + 1.0
    assert lock.min_commit_timestamp < here.oracle.next() + (int(limit * 1000) << SEQUENCE_BITS)
    found = [
        await commit.commit_primary(client.deadline())
        for client, commit in zip(clients, commits, strict=True)
    ]
    assert found[0] == found[1] > lock.min_commit_timestamp
