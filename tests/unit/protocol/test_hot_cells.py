"""Transactions that have lost at a cell take turns: the oldest first, and none forever."""

from __future__ import annotations

import asyncio
import random

from percolator.errors import CellAddress
from percolator.protocol.hot_cells import CELLS_MAX, TURN_SECONDS, Contender, HotCells

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


async def test_a_cell_has_a_line_only_while_there_is_someone_in_it() -> None:
    lines = HotCells()
    one, two = contender(lines, 1.0, BOB), contender(lines, 2.0, BOB, JOE)
    one.stand_in_line()
    two.stand_in_line()
    assert len(lines) == 2
    one.leave()
    two.leave()
    assert len(lines) == 0
    assert BOB not in lines


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
    assert [cell in lines for cell in cells] == [False] * 3 + [True] * CELLS_MAX


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
