"""Transactions that have lost at a cell stand in line: the oldest first, and none forever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest

from percolator.errors import CellAddress
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT, LockRecord
from percolator.limits import Limits
from percolator.protocol.cleanup import push_step
from percolator.protocol.commit import STEPS_AT_ONCE_MAX
from percolator.protocol.contention import (
    CELLS_MAX,
    GRANT_SECONDS,
    HALF_AGE_SECONDS,
    HALF_LIFE_SECONDS,
    KEPT_SECONDS,
    REMEMBERED_CELLS_MAX,
    Contender,
    Handover,
    HotCells,
    Rivals,
    conflict_pause_seconds,
)
from percolator.protocol.environment import CELLS_MAX as TALLIED_CELLS_MAX
from percolator.protocol.environment import ContendedCells, Tally
from percolator.protocol.write_set import MARGIN_SECONDS_MAX
from percolator.routing.cells import Answer, CellMutation, FollowedCommit, FoundCell, Refused
from percolator.timestamps import SEQUENCE_BITS
from tests.unit.protocol.naive_cells import WRITE
from tests.unit.protocol.protocol_world import (
    NO_FAULTS,
    PATIENT,
    A,
    B,
    Client,
    World,
    address,
    locked,
    put,
    puts,
)


@pytest.fixture
@asynccontextmanager
async def here() -> AsyncIterator[World]:
    """A store, and clients of it, over a network without faults."""
    yield World(1, NO_FAULTS)


@pytest.fixture
@asynccontextmanager
async def lines() -> AsyncIterator[HotCells]:
    """Cells at which nothing has lost yet."""
    yield HotCells()


BOB, JOE, ANN = (CellAddress(1, row, b"balance") for row in (b"bob", b"joe", b"ann"))


def contender(lines: HotCells, since: float, *cells: CellAddress) -> Contender:
    """Work that began at `since` and has lost at these cells."""
    made = Contender(lines, "a function", since)
    for cell in cells:
        made.lost_at(cell)
    return made


async def test_the_first_in_line_waits_for_nothing(lines: HotCells) -> None:
    assert contender(lines, 1.0, BOB).stand_in_line().done()


async def test_a_line_ends_soon_after_the_last_one_has_left(lines: HotCells) -> None:
    one, two = contender(lines, 1.0, BOB), contender(lines, 2.0, BOB, JOE)
    one.stand_in_line()
    two.stand_in_line()
    assert len(lines) == 2
    one.leave()
    two.leave()
    assert len(lines) == 0
    assert lines.has_lost("a function", BOB)  # so the next two to come do not collide
    three = contender(lines, 3.0, JOE)
    three.stand_in_line()
    await asyncio.sleep(KEPT_SECONDS + 0.1)
    assert BOB not in lines.lines
    assert JOE in lines.lines
    three.leave()
    await asyncio.sleep(KEPT_SECONDS + 0.1)
    assert JOE not in lines.lines


async def test_the_oldest_goes_first_whenever_it_came() -> None:
    lines, order = HotCells(), []
    first = contender(lines, 9.0, BOB)
    first.stand_in_line()

    async def take_turn(since: float) -> None:
        one = contender(lines, since, BOB)
        await one.stand_in_line()
        order.append(since)
        one.leave()

    tasks = [asyncio.create_task(take_turn(since)) for since in (5.0, 2.0, 8.0, 1.0)]
    await asyncio.sleep(0)
    first.leave()
    await asyncio.gather(*tasks)
    assert order == [1.0, 2.0, 5.0, 8.0]


async def test_one_who_leaves_the_line_is_never_first_and_holds_up_no_one(lines: HotCells) -> None:
    one, two, three = (contender(lines, since, BOB) for since in (1.0, 2.0, 3.0))
    one.stand_in_line()
    second, third = two.stand_in_line(), three.stand_in_line()
    two.leave()
    one.leave()
    assert second.cancelled()
    assert third.done()
    assert not third.cancelled()


async def test_one_who_is_first_for_too_long_is_passed_and_has_twice_as_long_next_time() -> None:
    lines, now = HotCells(), asyncio.get_running_loop().time
    slow, patient = contender(lines, 1.0, BOB), contender(lines, 2.0, BOB)
    began = now()
    slow.stand_in_line()
    await patient.stand_in_line()
    assert now() - began == GRANT_SECONDS
    again = slow.stand_in_line()
    patient.leave()
    await again
    began = now()
    await patient.stand_in_line()
    assert now() - began == 2 * GRANT_SECONDS


async def test_one_who_lost_at_two_cells_goes_first_at_both_or_at_none(lines: HotCells) -> None:
    at_bob, at_joe = contender(lines, 1.0, BOB), contender(lines, 2.0, JOE)
    at_bob.stand_in_line()
    at_joe.stand_in_line()
    both = contender(lines, 3.0, BOB, JOE)
    turn = both.stand_in_line()
    at_bob.leave()
    assert not turn.done()
    # Bob is free, but promised to an older one: or it would wait until no one else wants either.
    younger = contender(lines, 4.0, BOB)
    assert not younger.stand_in_line().done()
    at_joe.leave()
    assert turn.done()
    both.leave()
    assert younger.stand_in_line().done()


async def test_those_who_want_the_same_cells_in_any_order_never_wait_for_each_other(
    lines: HotCells,
) -> None:
    """If each were first at one cell and waited at another, three contenders would wait forever."""
    pairs = (BOB, JOE), (JOE, ANN), (ANN, BOB)
    waiting = [contender(lines, float(at), *pair) for at, pair in enumerate(pairs)]
    turns = [one.stand_in_line() for one in waiting]
    for one, turn in zip(waiting, turns, strict=True):
        assert turn.done()
        one.leave()


async def test_one_who_lost_at_many_cells_stands_in_line_at_the_last_few(lines: HotCells) -> None:
    cells = [CellAddress(1, b"%d" % number, b"c") for number in range(CELLS_MAX + 3)]
    contender(lines, 1.0, *cells).stand_in_line()
    assert [cell in lines.lines for cell in cells] == [False] * 3 + [True] * CELLS_MAX


async def test_only_a_function_that_has_lost_at_a_cell_is_known_there(lines: HotCells) -> None:
    contender(lines, 1.0, BOB).stand_in_line()
    assert lines.has_lost("a function", BOB)
    assert not lines.has_lost("another function", BOB)
    assert not lines.has_lost("a function", JOE)


async def test_whatever_they_do_everyone_comes_first_once_and_no_cell_has_two_at_once() -> None:
    chance = random.Random(1)
    lines = HotCells()
    busy: set[CellAddress] = set()
    turns = 0

    async def compete(number: int) -> None:
        nonlocal turns
        one = contender(
            lines, float(number), *chance.sample([BOB, JOE, ANN], chance.choice([1, 2]))
        )
        for _ in range(10):
            turn = one.stand_in_line()
            if chance.random() < 0.2:  # it is cancelled, or its time is up
                await asyncio.wait([turn], timeout=chance.random())
                one.leave()
                continue
            await turn
            cells = {cell for cell in (BOB, JOE, ANN) if cell in one._cells}
            assert busy.isdisjoint(cells)
            busy.update(cells)
            turns += 1
            await asyncio.sleep(chance.random() * GRANT_SECONDS)
            busy.difference_update(cells)
            one.lost_at(chance.choice([BOB, JOE, ANN]))
        one.leave()

    await asyncio.gather(*(compete(number) for number in range(30)))
    assert turns > 200
    assert len(lines) == 0


HANDOVER = Handover(101, {BOB: (KIND_PUT, b"7")})


async def test_the_next_reader_in_line_follows_the_commit_and_only_one_does(
    lines: HotCells,
) -> None:
    winner = contender(lines, 1.0, BOB)
    winner.stand_in_line()
    following = [contender(lines, since, BOB) for since in (2.0, 3.0)]
    second, third = (one.stand_in_line(is_reading=True) for one in following)
    assert winner.is_followed
    winner.leave(HANDOVER)
    assert second.result() is HANDOVER
    following[0].leave()
    assert third.result() is None


async def test_one_that_has_yet_to_read_follows_no_commit(lines: HotCells) -> None:
    """Its snapshot has to show what it waits for before it reads."""
    winner, other = contender(lines, 1.0, BOB), contender(lines, 2.0, BOB)
    winner.stand_in_line()
    turn = other.stand_in_line()
    assert not winner.is_followed
    winner.leave(HANDOVER)
    assert turn.result() is None


async def test_one_that_came_after_the_commit_was_sent_does_not_follow_it(lines: HotCells) -> None:
    winner, follower, older = (contender(lines, since, BOB) for since in (1.0, 3.0, 2.0))
    winner.stand_in_line()
    follower.stand_in_line(is_reading=True)
    assert winner.is_followed
    late = older.stand_in_line(is_reading=True)
    winner.leave(HANDOVER)
    assert late.result() is None


async def test_one_who_was_passed_is_followed_by_no_one(lines: HotCells) -> None:
    winner = contender(lines, 1.0, BOB)
    winner.stand_in_line()
    contender(lines, 2.0, BOB).stand_in_line(is_reading=True)
    await asyncio.sleep(GRANT_SECONDS + 0.1)
    assert not winner.is_followed


def test_only_a_commit_with_a_timestamp_set_aside_is_followed() -> None:
    assert Handover.after(100, {}) is None
    handover = Handover.after(FollowedCommit(100), {})
    assert handover is not None
    assert handover.start == 101


def test_a_follower_knows_what_was_put_and_deleted_and_not_what_was_locked() -> None:
    writes = {BOB: (KIND_PUT, b"7"), JOE: (KIND_DELETE, b""), ANN: (KIND_LOCK_ONLY, b"")}
    handover = Handover(101, writes)
    bob, joe = handover.known(BOB), handover.known(JOE)
    assert bob is not None
    assert bob[BOB] == FoundCell(100, b"7")
    assert joe is not None
    assert joe[JOE] == FoundCell(100, None)
    assert (handover.known(ANN), handover.known(CellAddress(1, b"eve", b"balance"))) == (None, None)


# Clients that know nothing of each other pause, so that the oldest gets through.


def test_the_older_a_transaction_the_shorter_its_pauses() -> None:
    def mean(age: float) -> float:
        chance = random.Random(1)
        return sum(conflict_pause_seconds(chance, 1.0, age) for _ in range(1_000)) / 1_000

    assert mean(0.0) == pytest.approx(0.5, rel=0.1)
    assert mean(HALF_AGE_SECONDS) == pytest.approx(0.25, rel=0.1)
    assert mean(9 * HALF_AGE_SECONDS) == pytest.approx(0.05, rel=0.1)


def test_one_who_paused_pauses_before_the_next_transaction_too() -> None:
    rivals = Rivals()
    rivals.note_loss(BOB, "a function", 0.5, 10.0)
    assert rivals.longest_seconds(BOB, "a function", 10.0) == 0.5
    assert rivals.longest_seconds(BOB, "one that only reads", 10.0) == 0.0
    assert rivals.longest_seconds(BOB._replace(row=b"joe"), "a function", 10.0) == 0.0


def test_the_longest_pause_counts_until_it_is_forgotten() -> None:
    rivals = Rivals()
    rivals.note_loss(BOB, "a function", 0.5, 10.0)
    rivals.note_loss(BOB, "a function", 0.1, 10.0 + HALF_LIFE_SECONDS)
    assert rivals.longest_seconds(BOB, "a function", 10.0 + HALF_LIFE_SECONDS) == 0.25
    rivals.note_loss(BOB, "a function", 0.7, 10.0 + HALF_LIFE_SECONDS)
    assert rivals.longest_seconds(BOB, "a function", 10.0 + HALF_LIFE_SECONDS) == 0.7


def test_rivals_that_have_gone_are_forgotten() -> None:
    rivals = Rivals()
    rivals.note_loss(BOB, "a function", 1.0, 10.0)
    assert rivals.longest_seconds(BOB, "a function", 10.0 + 10 * HALF_LIFE_SECONDS) == 0.0
    assert BOB not in rivals.contended


def test_only_so_many_cells_are_remembered() -> None:
    rivals = Rivals()
    for number in range(REMEMBERED_CELLS_MAX + 5):
        rivals.note_loss(BOB._replace(row=b"%d" % number), "a function", 1.0, 10.0)
    assert len(rivals) == REMEMBERED_CELLS_MAX
    assert BOB._replace(row=b"4") not in rivals.contended


# Conflicts are counted by cell, in bounded memory.


def _cell(number: int) -> CellAddress:
    return CellAddress(1, b"%d" % number, b"c")


def test_the_cell_with_most_conflicts_stays_first_however_many_others_there_are() -> None:
    cells = ContendedCells()
    for number in range(10 * TALLIED_CELLS_MAX):
        cells.lost_at(_cell(number))
        if number % 10 == 0:
            cells.lost_at(_cell(-1))
    [(hottest, count), *others] = cells.most(10 * TALLIED_CELLS_MAX)
    assert (hottest, count) == (_cell(-1), TALLIED_CELLS_MAX)
    assert len(others) < TALLIED_CELLS_MAX


def test_a_conflict_without_a_cell_is_counted_too() -> None:
    tally = Tally()
    tally.lost_at(None)
    tally.lost_at(_cell(1))
    assert (tally.conflicts, tally.cells.most(5)) == (2, [(_cell(1), 1)])


# A commit that takes long stays alive, however often readers push its lock meanwhile.

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
async def test_readers_that_push_do_not_let_a_live_transaction_expire(
    here: World, slow: str
) -> None:
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
    assert await writing in [at for at, _ in here.store.commits(A)]
    await meeting


MANY = [CellAddress(1, b"%06d" % number, b"x") for number in range(2 * STEPS_AT_ONCE_MAX)]


@pytest.mark.parametrize(
    ("cells", "seconds", "met_after"),
    [
        ([A, B], {B: LONG_SECONDS}, 0.2),
        (MANY, {MANY[-1]: LONG_SECONDS}, 0.2),
        ([A, B], {A: LONG_SECONDS / 2, B: LONG_SECONDS}, LONG_SECONDS * 3 / 4),
    ],
    ids=[
        "while another cell of the first message is being locked",
        "while a cell of a later message is being locked",
        "also by later heartbeats than those that it has missed, which found no lock",
    ],
)
async def test_a_primary_is_kept_alive(
    here: World, cells: list[CellAddress], seconds: dict[CellAddress, float], met_after: float
) -> None:
    """That a heartbeat finds no lock proves nothing while the prewrite is on its way."""
    writer = _with_slow_prewrites(here, seconds)
    writing = asyncio.ensure_future(writer.write({cell: put(b"1") for cell in cells}))
    await asyncio.sleep(met_after)
    await _met_by_a_rival(here, cells[0], writing)


def _with_slow_prewrites(here: World, seconds: dict[CellAddress, float]) -> Client:
    """A client without a session; the first steps at these cells take so long."""
    writer, left = here.client(SHORT_LIVED), dict(seconds)
    writer.network.session_id = None

    async def travel(step: CellMutation) -> None:
        await asyncio.sleep(left.pop(address(step), TRIP_SECONDS))

    writer.network.before_send = travel
    return writer


async def _met_by_a_rival(here: World, primary: CellAddress, writing: Awaitable[int]) -> None:
    rival = here.client(SHORT_LIVED)
    meeting = asyncio.ensure_future(rival.write_stubbornly({primary: put(b"3")}))
    await writing
    await meeting
    assert here.buried_alive == 0


async def test_a_heartbeat_that_overtakes_the_prewrite_does_not_end_the_later_ones(
    here: World,
) -> None:
    """It finds no lock, and that is heard of only when the prewrite has been answered."""
    primary, last = MANY[0], MANY[-1]
    writer = _with_slow_prewrites(here, {primary: LONG_SECONDS / 2, last: LONG_SECONDS})
    overtaking = 0

    async def back(step: CellMutation, answer: Answer) -> None:
        nonlocal overtaking
        if address(step) == primary and isinstance(answer, Refused):
            overtaking += 1
            await asyncio.sleep(LONG_SECONDS / 2)

    writer.network.before_answer = back
    writing = asyncio.ensure_future(writer.write({cell: put(b"1") for cell in MANY}))
    await asyncio.sleep(LONG_SECONDS)
    assert overtaking
    await _met_by_a_rival(here, primary, writing)


async def test_a_commit_in_progress_is_not_overtaken_by_its_own_heartbeats(here: World) -> None:
    """The lock is pushed once, so heartbeats raise it; but no higher than the commit timestamp."""
    client = here.client(SHORT_LIVED)
    client.network.slow(LONG_SECONDS, WRITE)
    began = here.clock.monotonic_seconds()
    read_at = here.oracle.next()
    writing = asyncio.ensure_future(client.write({A: put(b"1"), B: put(b"2")}))
    await asyncio.sleep(0.25)
    lock = here.lock(A)
    here.store.apply(push_step(A, lock, max(read_at, lock.min_commit_timestamp) + 1))
    await writing
    assert here.clock.monotonic_seconds() - began < 2 * LONG_SECONDS + 1.0, "sent at most twice"


async def test_a_late_heartbeat_does_not_shorten_the_time_to_live(
    here: World, patient: Client
) -> None:
    point = (await locked(patient, A)).begin_two_phases()

    def stored() -> LockRecord:
        return here.lock(A)

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


async def test_a_commit_waits_until_the_oracle_is_above_what_a_heartbeat_has_set(
    here: World, patient: Client
) -> None:
    commit = await locked(patient, A)
    point = commit.begin_two_phases()
    lock = here.lock(A)
    here.store.apply(push_step(A, lock, here.oracle.next() + 1))
    refused = point.heartbeat()
    assert point.after_heartbeat(refused, here.store.apply(refused.step), 1.0)
    beat = point.heartbeat()
    assert not point.after_heartbeat(beat, here.store.apply(beat.step), 1.0)
    assert point.min_commit > here.oracle.next() + (1_000 << SEQUENCE_BITS)
    assert await commit.commit_primary(patient.deadline()) >= beat.min_commit


async def test_two_committers_do_not_raise_a_lock_ever_higher(here: World) -> None:
    """As of a gateway that took over: each loses to what the other has raised, not to readers."""
    clients = here.client(PATIENT), here.client(PATIENT)
    start = await clients[0].start_timestamp()
    commits = [client.commit(start, {A: put(b"1")}) for client in clients]
    points = []
    for client, commit in zip(clients, commits, strict=True):
        await commit.prewrite(client.deadline())
        points.append(commit.begin_two_phases())
    await asyncio.sleep(1.0)
    lock = here.lock(A)
    here.store.apply(push_step(A, lock, here.oracle.next() + 1))
    for _ in range(20):
        for point in points:
            beat = point.heartbeat()
            point.after_heartbeat(beat, here.store.apply(beat.step), 1.0)
    lock = here.lock(A)
    limit = MARGIN_SECONDS_MAX + 1.0
    assert lock.min_commit_timestamp < here.oracle.next() + (int(limit * 1000) << SEQUENCE_BITS)
    found = [
        await commit.commit_primary(client.deadline())
        for client, commit in zip(clients, commits, strict=True)
    ]
    assert found[0] == found[1] > lock.min_commit_timestamp
