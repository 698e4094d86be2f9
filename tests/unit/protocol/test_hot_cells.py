"""Transactions that have lost at a cell take turns: the oldest first, and none forever."""

from __future__ import annotations

import asyncio
import random

from percolator.errors import CellAddress
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT
from percolator.protocol.contention import (
    CELLS_MAX,
    KEPT_SECONDS,
    TURN_SECONDS,
    Baton,
    Contender,
    HotCells,
)
from percolator.routing.cells import FollowedCommit, FoundCell

BOB, JOE, ANN = (CellAddress(1, row, b"balance") for row in (b"bob", b"joe", b"ann"))


def contender(lines: HotCells, since: float, *cells: CellAddress) -> Contender:
    """Work that began at `since` and has lost at these cells."""
    made = Contender(lines, "a function", since)
    for cell in cells:
        made.lost_at(cell)
    return made


async def test_the_first_in_line_waits_for_nothing() -> None:
    lines = HotCells()
    assert contender(lines, 1.0, BOB).stand_in_line().done()


async def test_a_line_ends_a_moment_after_the_last_one_has_left() -> None:
    lines = HotCells()
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


async def test_one_who_leaves_the_line_gets_no_turn_and_holds_up_no_one() -> None:
    lines = HotCells()
    one, two, three = (contender(lines, since, BOB) for since in (1.0, 2.0, 3.0))
    one.stand_in_line()
    second, third = two.stand_in_line(), three.stand_in_line()
    two.leave()
    one.leave()
    assert second.cancelled()
    assert third.done()
    assert not third.cancelled()


async def test_a_turn_that_lasts_too_long_ends_and_the_next_one_is_twice_as_long() -> None:
    lines, now = HotCells(), asyncio.get_running_loop().time
    slow, patient = contender(lines, 1.0, BOB), contender(lines, 2.0, BOB)
    began = now()
    slow.stand_in_line()
    await patient.stand_in_line()
    assert now() - began == TURN_SECONDS
    again = slow.stand_in_line()
    patient.leave()
    await again
    began = now()
    await patient.stand_in_line()
    assert now() - began == 2 * TURN_SECONDS


async def test_one_who_lost_at_two_cells_has_its_turn_at_both_or_at_none() -> None:
    lines = HotCells()
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


async def test_those_who_want_the_same_cells_in_any_order_never_wait_for_each_other() -> None:
    """With one turn while waiting for another, three such contenders would wait forever."""
    lines = HotCells()
    pairs = (BOB, JOE), (JOE, ANN), (ANN, BOB)
    waiting = [contender(lines, float(at), *pair) for at, pair in enumerate(pairs)]
    turns = [one.stand_in_line() for one in waiting]
    for one, turn in zip(waiting, turns, strict=True):
        assert turn.done()
        one.leave()


async def test_one_who_lost_at_many_cells_stands_in_line_at_the_last_few() -> None:
    lines = HotCells()
    cells = [CellAddress(1, b"%d" % number, b"c") for number in range(CELLS_MAX + 3)]
    many = contender(lines, 1.0, *cells)
    many.stand_in_line()
    assert [cell in lines.lines for cell in cells] == [False] * 3 + [True] * CELLS_MAX


async def test_only_a_function_that_has_lost_at_a_cell_is_known_there() -> None:
    lines = HotCells()
    contender(lines, 1.0, BOB).stand_in_line()
    assert lines.has_lost("a function", BOB)
    assert not lines.has_lost("another function", BOB)
    assert not lines.has_lost("a function", JOE)


async def test_whatever_they_do_everyone_gets_a_turn_and_no_cell_has_two_at_once() -> None:
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
            await asyncio.sleep(chance.random() * TURN_SECONDS)
            busy.difference_update(cells)
            one.lost_at(chance.choice([BOB, JOE, ANN]))
        one.leave()

    await asyncio.gather(*(compete(number) for number in range(30)))
    assert turns > 200
    assert len(lines) == 0


BATON = Baton(101, {BOB: (KIND_PUT, b"7")})


async def test_the_next_reader_in_line_takes_the_baton_and_only_one_does() -> None:
    lines = HotCells()
    winner = contender(lines, 1.0, BOB)
    winner.stand_in_line()
    following = [contender(lines, since, BOB) for since in (2.0, 3.0)]
    second, third = (one.stand_in_line(is_reading=True) for one in following)
    assert winner.is_followed
    winner.leave(BATON)
    assert second.result() is BATON
    following[0].leave()
    assert third.result() is None


async def test_one_that_has_yet_to_read_takes_no_baton() -> None:
    """Its snapshot has to show what it waits for before it reads."""
    lines = HotCells()
    winner, other = contender(lines, 1.0, BOB), contender(lines, 2.0, BOB)
    winner.stand_in_line()
    turn = other.stand_in_line()
    assert not winner.is_followed
    winner.leave(BATON)
    assert turn.result() is None


async def test_one_that_came_after_the_commit_was_sent_takes_no_baton() -> None:
    lines = HotCells()
    winner, follower, older = (contender(lines, since, BOB) for since in (1.0, 3.0, 2.0))
    winner.stand_in_line()
    follower.stand_in_line(is_reading=True)
    assert winner.is_followed
    late = older.stand_in_line(is_reading=True)
    winner.leave(BATON)
    assert late.result() is None


async def test_whose_turn_is_over_is_followed_by_no_one() -> None:
    lines = HotCells()
    winner = contender(lines, 1.0, BOB)
    winner.stand_in_line()
    contender(lines, 2.0, BOB).stand_in_line(is_reading=True)
    await asyncio.sleep(TURN_SECONDS + 0.1)
    assert not winner.is_followed


def test_a_baton_is_made_only_of_a_commit_with_a_timestamp_set_aside() -> None:
    assert Baton.after(100, {}) is None
    baton = Baton.after(FollowedCommit(100), {})
    assert baton is not None
    assert baton.start == 101


def test_a_baton_shows_what_was_put_and_deleted_and_not_what_was_locked() -> None:
    writes = {BOB: (KIND_PUT, b"7"), JOE: (KIND_DELETE, b""), ANN: (KIND_LOCK_ONLY, b"")}
    baton = Baton(101, writes)
    bob, joe = baton.known(BOB), baton.known(JOE)
    assert bob is not None
    assert bob[BOB.column] == FoundCell(100, b"7")
    assert joe is not None
    assert joe[JOE.column] == FoundCell(100, None)
    assert baton.known(ANN) is None
    assert baton.known(CellAddress(1, b"eve", b"balance")) is None
