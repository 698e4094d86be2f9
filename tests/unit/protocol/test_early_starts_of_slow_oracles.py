"""The stock of start timestamps, while an oracle is slow to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from percolator.protocol.early_starts import FETCH_SECONDS, EarlyStarts
from percolator.wire.timestamp_source import TimestampSource
from tests.unit.wire.fake_oracles import Oracles, silent, source_of


class Message:
    """The first message of a transaction. It notes where that begins."""

    def __init__(self, source: TimestampSource, given: list[int]) -> None:
        self._source = source
        self._given = given
        self._has_left = False

    def done(self) -> bool:
        return self._has_left

    def ask(self) -> None:
        self._has_left = True
        fetched = self._source.get(timeout_seconds=60.0)
        fetched.add_done_callback(lambda _: self._given.append(fetched.result()))

    def begin_early(self, start: int, received_seconds: float) -> None:
        self._has_left = True
        self._given.append(start)


def taking(seconds: float, oracles: Oracles) -> Callable[[int], Awaitable[int]]:
    async def slow(count: int) -> int:
        await asyncio.sleep(seconds)
        first, oracles.next = oracles.next, oracles.next + count
        return first

    return slow


async def test_no_start_is_another_transaction_s_although_a_request_was_answered_too_late() -> None:
    oracles = Oracles()
    oracles.behaviours["a:1"] = taking(FETCH_SECONDS * 0.75, oracles)
    source = source_of(oracles)
    stock = EarlyStarts(source, asyncio.get_running_loop().time)
    stock.rest = 1  # it asks again at once
    given: list[int] = []
    source.get(timeout_seconds=60.0)  # the stock is asked for while this is on its way
    await asyncio.sleep(0.01)
    for number in range(400):
        for _ in range(number % 40):
            stock.begin(Message(source, given))
        await asyncio.sleep(0.02)
    await asyncio.sleep(10.0)
    assert len(given) == sum(number % 40 for number in range(400))
    assert len(set(given)) == len(given)


async def test_what_an_oracle_has_not_answered_in_time_is_no_longer_asked_for() -> None:
    oracles = Oracles()
    oracles.behaviours["a:1"] = silent
    source = source_of(oracles)
    stock = EarlyStarts(source, asyncio.get_running_loop().time)
    stock.rest = 0
    for _ in range(40):
        message: Any = Message(source, [])
        message.ask = lambda: None
        stock.begin(message)
        await asyncio.sleep(FETCH_SECONDS * 1.1)
    del oracles.behaviours["a:1"]
    assert await source.get(timeout_seconds=60.0)
    assert oracles.counts()[-1] < 40
