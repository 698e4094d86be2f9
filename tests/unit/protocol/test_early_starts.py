"""The stock of start timestamps: who is given one, and when it is filled again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from percolator.errors import InvalidArgument, PercolatorError, Unavailable
from percolator.protocol.early_starts import (
    AGE_SECONDS_MAX,
    REST,
    REST_MAX,
    STOCK_MAX,
    STOCK_MIN,
    EarlyStarts,
)


class Oracle:
    """Keeps what was asked for until the test answers it."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, int]] = []
        self.next = 100
        self.refuses: PercolatorError | None = None

    def give(self, taker: Any, count: int = 1, timeout_seconds: float | None = None) -> None:
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

    def __init__(self) -> None:
        self.start = 0
        self.received_seconds = 0.0
        self.has_asked = False
        """It fetches its own start."""

    def done(self) -> bool:
        return self.start > 0

    def ask(self) -> None:
        self.has_asked = True

    def begin_early(self, start: int, received_seconds: float) -> None:
        self.start, self.received_seconds = start, received_seconds


class Client:
    """A client that writes without reading."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.oracle = Oracle()
        self.stock = EarlyStarts(self.oracle, lambda: self.now)

    async def write(self, count: int = 1) -> list[Message]:
        """So many transactions write in one turn of the event loop."""
        messages = [Message() for _ in range(count)]
        for message in messages:
            self.stock.begin(message)
        assert not any(message.start or message.has_asked for message in messages)
        await asyncio.sleep(0)
        assert all(bool(message.start) is not message.has_asked for message in messages)
        return messages

    async def starts(self, count: int = 1) -> list[int]:
        """Where so many transactions begin early; 0 for those that fetch their own."""
        return [message.start for message in await self.write(count)]

    def answered(self) -> None:
        while self.oracle.asked:
            self.oracle.answer()


async def with_stock() -> Client:
    """One whose stock has just come."""
    client = Client()
    assert await client.starts() == [0]
    client.oracle.answer()
    return client


async def test_the_first_transaction_fetches_its_own_start_and_those_after_it_need_not() -> None:
    client = Client()
    assert await client.starts() == [0]
    assert await client.starts() == [0], "the stock is on its way"
    assert [count for _, count in client.oracle.asked] == [STOCK_MIN]
    client.oracle.answer()
    assert await client.starts(3) == [100, 101, 102]


async def test_messages_of_one_turn_begin_early_in_their_order() -> None:
    client = await with_stock()
    assert await client.starts(4) == [100, 101, 102, 103]
    assert await client.starts(2) == [104, 105]


@pytest.mark.parametrize("has_stock", [False, True])
async def test_messages_leave_once_although_ctrl_c_came_while_one_of_them_was_being_sent(
    *, has_stock: bool
) -> None:
    class Interrupted(BaseException):
        """A `KeyboardInterrupt` would end the test's loop."""

    class InterruptedMessage(Message):
        """Ctrl-C comes before it has left."""

        came = False

        def come(self) -> None:
            came, self.came = self.came, True
            if not came:
                raise Interrupted

        def ask(self) -> None:
            self.come()
            super().ask()

        def begin_early(self, start: int, received_seconds: float) -> None:
            self.come()
            super().begin_early(start, received_seconds)

    client = await with_stock() if has_stock else Client()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)
    messages = [Message(), InterruptedMessage(), Message(), Message()]
    for message in messages:
        client.stock.begin(message)
    await asyncio.sleep(0)
    messages += await client.write()
    loop.set_exception_handler(None)
    if has_stock:
        assert [message.start for message in messages] == [100, 102, 103, 104, 105]
    else:
        assert [message.has_asked for message in messages] == [True] * 5


async def test_those_of_one_turn_stay_together_if_the_stock_is_too_small_for_all() -> None:
    client = await with_stock()
    assert await client.starts(STOCK_MIN + 1) == [0] * (STOCK_MIN + 1)
    client.oracle.answer()
    assert all(await client.starts(STOCK_MIN + 1))


async def test_each_is_told_when_its_start_was_received() -> None:
    client = await with_stock()
    client.now += AGE_SECONDS_MAX * 0.9
    (message,) = await client.write()
    assert (message.start, message.received_seconds) == (100, 1000.0)


async def test_no_start_is_handed_out_twice_however_the_stock_is_filled() -> None:
    client = Client()
    given: list[int] = []
    for number in range(2_000):
        given += await client.starts(number % 5)
        if number % 7 == 0 and client.oracle.asked:
            client.oracle.answer()
        if number % 500 == 0:
            client.stock.met_obstacle(client.oracle.next - 1)
    early = [start for start in given if start]
    assert len(early) == len(set(early)) > 1_000


async def test_a_stock_is_asked_for_once_when_half_of_it_is_left() -> None:
    client = Client()
    for _ in range(3):  # until it knows how many are wanted
        await client.starts(4)
        client.answered()
    assert all(await client.starts(4))
    assert not client.oracle.asked
    while all(await client.starts(4)):
        assert len(client.oracle.asked) == 1
    client.oracle.answer()
    assert all(await client.starts(4))


@pytest.mark.parametrize("in_one_turn", [1, 30, 400])
@pytest.mark.parametrize("turns_per_answer", [0, 1, 7])
async def test_a_stock_is_large_enough_for_what_is_wanted_until_the_next_one_and_not_much_larger(
    in_one_turn: int, turns_per_answer: int
) -> None:
    client = Client()
    count = 0
    for _ in range(20):
        while not client.oracle.asked:
            await client.write(in_one_turn)
        for _ in range(turns_per_answer):
            await client.write(in_one_turn)
        count = client.oracle.answer()
    wanted = in_one_turn * max(turns_per_answer, 1)
    assert max(STOCK_MIN, 2 * wanted) <= count <= max(STOCK_MIN, 4 * wanted) or count == STOCK_MAX
    if wanted * 4 > STOCK_MAX:
        return
    for _ in range(5):
        while not client.oracle.asked:
            assert all(await client.starts(in_one_turn))
        for _ in range(turns_per_answer):
            assert all(await client.starts(in_one_turn))
        client.oracle.answer()


async def test_a_stock_is_never_larger_than_its_limit() -> None:
    client = Client()
    await client.write(STOCK_MAX * 2)
    assert client.oracle.answer() == STOCK_MAX


async def test_an_ageing_stock_is_replaced_and_an_old_one_is_not_used() -> None:
    client = await with_stock()
    client.now += AGE_SECONDS_MAX * 0.6
    assert await client.starts() == [100], "it is still young enough"
    client.oracle.answer()
    assert await client.starts() == [100 + STOCK_MIN], "what is younger meets fewer obstacles"
    client.now += AGE_SECONDS_MAX * 1.1
    assert await client.starts() == [0]
    client.oracle.answer()
    assert await client.starts() == [100 + 2 * STOCK_MIN]


async def test_a_client_that_does_not_write_asks_for_nothing() -> None:
    client = await with_stock()
    client.now += 3600.0
    await asyncio.sleep(0)
    assert not client.oracle.asked


async def _rests(client: Client) -> int:
    """How many transactions fetch their own starts before one begins early again."""
    rested = 0
    while await client.starts() == [0]:
        rested += 1
        client.answered()
    return rested - 1  # the last one has asked for the stock


async def test_after_an_obstacle_transactions_fetch_their_own_starts_for_a_while() -> None:
    client = await with_stock()
    (start,) = await client.starts()
    client.stock.met_obstacle(start)
    assert await _rests(client) == REST


async def test_each_obstacle_makes_the_rest_longer_up_to_a_limit() -> None:
    client = await with_stock()
    starts = await client.starts(3)
    for start in starts:
        client.stock.met_obstacle(start)
    assert await _rests(client) == 3 * REST
    for _ in range(1_000):
        client.stock.met_obstacle(client.oracle.next - 1)
    assert await _rests(client) == REST_MAX


async def test_the_rest_passes_as_fast_with_many_transactions_in_one_turn() -> None:
    client = await with_stock()
    client.stock.met_obstacle(100)
    assert await client.starts(REST - 1) == [0] * (REST - 1)
    assert await client.starts(10) == [0] * 10
    await client.write()
    client.answered()
    assert all(await client.starts(10))


@pytest.mark.parametrize("refused_at_once", [False, True])
async def test_without_a_stock_transactions_fetch_their_own_starts_and_it_is_tried_again(
    *, refused_at_once: bool
) -> None:
    client = Client()
    if refused_at_once:
        client.oracle.refuses = InvalidArgument("count", "is above the limit")
        assert await client.starts() == [0]
        client.oracle.refuses = None
    else:
        assert await client.starts() == [0]
        taker, _ = client.oracle.asked.pop()
        taker.set_exception(Unavailable("connection refused"))
    assert await _rests(client) == REST
