"""The stock of start timestamps: who is given one, and when it is filled again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from percolator.errors import InvalidArgument, PercolatorError, Unavailable
from percolator.protocol.early_starts import (
    AGE_SECONDS_MAX,
    REST_MAX,
    REST_MIN,
    STOCK_MAX,
    STOCK_MIN,
    EarlyStarts,
)
from percolator.routing.table_info import NO_OBSERVERS, TableInfo


class Oracle:
    """Keeps what was asked for until the test answers it."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, int]] = []
        self.next = 100
        self.refuses: PercolatorError | None = None

    def give(self, taker: Any, count: int, timeout_seconds: float) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.asked.append((taker, count))

    def answer(self) -> int:
        """Answers the oldest request. Returns how many timestamps it was for."""
        taker, count = self.asked.pop(0)
        first, self.next = self.next, self.next + count
        taker.set_result(first)
        return count


class Message:
    """The first message of a transaction, as far as the stock knows it."""

    def __init__(self, left: list[Message]) -> None:
        self._left = left
        self.start = 0
        self.is_cancelled = False

    def done(self) -> bool:
        return self.is_cancelled

    def set_result(self, start: int) -> None:
        self.start = start
        self._left.append(self)


class Client:
    """A client that writes without reading."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.oracle = Oracle()
        self.stock = EarlyStarts(self.oracle, lambda: self.now)  # type: ignore[arg-type]
        self.left: list[Message] = []
        self.begun: list[Message] = []

    def write(self, *tables: TableInfo) -> int:
        message = Message(self.left)
        self.begun.append(message)
        return self.stock.begin(message, tables)  # type: ignore[arg-type]


def with_stock() -> Client:
    """One whose stock has just come."""
    client = Client()
    assert client.write() == 0
    client.oracle.answer()
    return client


async def test_the_first_transaction_fetches_its_own_start_and_those_after_it_need_not() -> None:
    client = Client()
    assert client.write() == 0
    assert client.write() == 0, "the stock is on its way"
    assert [count for _, count in client.oracle.asked] == [STOCK_MIN]
    client.oracle.answer()
    assert [client.write() for _ in range(3)] == [100, 101, 102]


async def test_messages_leave_in_the_next_turn_in_their_order_but_not_those_that_are_given_up() -> (
    None
):
    client = with_stock()
    starts = [client.write() for _ in range(4)]
    client.begun[-2].is_cancelled = True
    assert not client.left
    await asyncio.sleep(0)
    assert [message.start for message in client.left] == [starts[0], starts[1], starts[3]]
    client.write()
    await asyncio.sleep(0)
    assert len(client.left) == 4


async def test_no_start_is_handed_out_twice_however_the_stock_is_filled() -> None:
    client = Client()
    given: list[int] = []
    for number in range(5_000):
        given.append(client.write())
        if number % 7 == 0 and client.oracle.asked:
            client.oracle.answer()
        if number % 500 == 0:
            client.stock.met_obstacle(given[-1])
    early = [start for start in given if start]
    assert len(early) == len(set(early)) > 2_500


async def test_a_stock_is_asked_for_once_when_half_of_it_is_left() -> None:
    client = with_stock()
    for _ in range(8):
        assert client.write()
    assert not client.oracle.asked
    while client.write():
        assert len(client.oracle.asked) <= 1
    assert len(client.oracle.asked) == 1
    client.oracle.answer()
    assert client.write()


@pytest.mark.parametrize("taken_per_answer", [1, 30, 400])
async def test_a_stock_comes_to_be_four_times_what_is_taken_while_one_is_on_its_way(
    taken_per_answer: int,
) -> None:
    client = with_stock()
    counts = []
    for _ in range(60):
        while not client.oracle.asked:
            client.write()
        for _ in range(taken_per_answer - 1):
            client.write()
        counts.append(client.oracle.answer())
    wanted = 4 * taken_per_answer
    assert max(STOCK_MIN, 0.8 * wanted) <= counts[-1] <= max(STOCK_MIN + 2, 1.2 * wanted)
    assert all(client.write() for _ in range(taken_per_answer)), "there are enough"


async def test_a_stock_is_never_larger_than_its_limit() -> None:
    client = Client()
    for _ in range(STOCK_MAX * 2):
        client.write()
    client.oracle.answer()
    client.now += AGE_SECONDS_MAX * 0.6
    client.write()
    assert client.oracle.answer() == STOCK_MAX


async def test_an_ageing_stock_is_replaced_and_an_old_one_is_not_used() -> None:
    client = with_stock()
    client.now += AGE_SECONDS_MAX * 0.6
    assert client.write() == 100, "it is still young enough"
    client.oracle.answer()
    replaced = client.write()
    assert replaced == 100 + STOCK_MIN, "what is younger meets fewer obstacles"
    client.now += AGE_SECONDS_MAX * 1.1
    assert client.write() == 0
    client.oracle.answer()
    assert client.write() > replaced


async def test_a_client_that_does_not_write_asks_for_nothing() -> None:
    client = with_stock()
    client.now += 3600.0
    await asyncio.sleep(0)
    assert not client.oracle.asked


async def test_a_table_that_is_younger_than_the_start_is_not_written_with_it() -> None:
    client = with_stock()
    older, younger = (TableInfo(1, name, NO_OBSERVERS, at) for name, at in (("a", 100), ("b", 101)))
    assert client.write(older, younger) == 0
    assert client.write(older) == 100
    assert client.write(older, younger) == 101


def _rests(client: Client) -> int:
    """How many transactions fetch their own starts before one begins early again."""
    rested = 0
    while not client.write():
        rested += 1
        while client.oracle.asked:
            client.oracle.answer()
    return rested - 1  # the last one has asked for the stock


async def test_after_an_obstacle_transactions_fetch_their_own_starts_for_a_while() -> None:
    client = with_stock()
    start = client.write()
    client.stock.met_obstacle(start)
    assert _rests(client) == REST_MIN


async def test_each_further_obstacle_makes_the_rest_twice_as_long_up_to_a_limit() -> None:
    client = with_stock()
    rests = []
    for _ in range(10):
        client.stock.met_obstacle(client.oracle.next - 1)
        rests.append(_rests(client))
    assert rests[:3] == [REST_MIN, REST_MIN * 2, REST_MIN * 4]
    assert rests[-1] == REST_MAX


async def test_a_stock_that_meets_no_obstacle_makes_the_next_rest_short_again() -> None:
    client = with_stock()
    for _ in range(3):
        client.stock.met_obstacle(client.oracle.next - 1)
        _rests(client)
    while not client.oracle.asked:
        client.write()
    client.oracle.answer()
    client.stock.met_obstacle(client.oracle.next - 1)
    assert _rests(client) == REST_MIN


async def test_many_obstacles_of_one_stock_and_those_of_an_earlier_one_count_as_one() -> None:
    client = with_stock()
    starts = [client.write() for _ in range(5)]
    for start in starts:
        client.stock.met_obstacle(start)
    assert _rests(client) == REST_MIN
    client.stock.met_obstacle(starts[0])
    assert client.write(), "it has rested for that one"


@pytest.mark.parametrize("refused_at_once", [False, True])
async def test_without_a_stock_transactions_fetch_their_own_starts_and_it_is_tried_again(
    *, refused_at_once: bool
) -> None:
    client = Client()
    if refused_at_once:
        client.oracle.refuses = InvalidArgument("count", "is above the limit")
        assert client.write() == 0
        client.oracle.refuses = None
    else:
        assert client.write() == 0
        taker, _ = client.oracle.asked.pop()
        taker.set_exception(Unavailable("connection refused"))
    assert _rests(client) == REST_MIN
