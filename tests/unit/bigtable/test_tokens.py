"""Access tokens: fetched once for all, early, beside the event loop, and again if refused."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from percolator.bigtable.tokens import Token, Tokens
from percolator.errors import NotReady, PercolatorError, Retry, Unauthenticated, UsageError

pytestmark = pytest.mark.real_time

HOUR = 3600.0


class Source:
    """A source of tokens that tells who asks, and can be slow or fail."""

    def __init__(self) -> None:
        self.count = 0
        self.threads: set[int] = set()
        self.error: PercolatorError | None = None
        self.seconds = HOUR
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self) -> Token:
        self.threads.add(threading.get_ident())
        self.count += 1
        number = self.count
        assert self.may_go_on.wait(10)
        if self.error is not None:
            raise self.error
        return Token(f"token-{number}", self.seconds, "quota")


class Clock:
    """The time, as the test sets it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@asynccontextmanager
async def tokens_of(source: Source, clock: Clock) -> AsyncIterator[Tokens]:
    made = Tokens(source, clock)
    yield made
    source.may_go_on.set()
    await made.close()


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what it waits for is in another thread)
            await asyncio.sleep(0.001)


async def test_many_callers_wait_for_one_fetch_beside_the_event_loop(
    source: Source, clock: Clock
) -> None:
    async with tokens_of(source, clock) as tokens:
        source.may_go_on.clear()
        waiting = [asyncio.create_task(tokens.metadata(10)) for _ in range(50)]
        await _until(lambda: source.count)
        await asyncio.sleep(0)  # the loop goes on while the fetch is blocked
        source.may_go_on.set()
        found = await asyncio.gather(*waiting)
        assert set(found) == {
            (("authorization", "Bearer token-1"), ("x-goog-user-project", "quota"))
        }
        assert source.count == 1
        assert threading.get_ident() not in source.threads


async def test_a_token_is_replaced_before_it_ends_while_calls_go_on_with_it(
    source: Source, clock: Clock
) -> None:
    async with tokens_of(source, clock) as tokens:
        first = await tokens.metadata(10)
        clock.now = HOUR - 301
        assert tokens.current() is first
        assert source.count == 1
        clock.now = HOUR - 299
        source.may_go_on.clear()
        assert tokens.current() is first
        assert tokens.current() is first
        await _until(lambda: source.count == 2)
        source.may_go_on.set()
        await _until(lambda: tokens.current() is not first)
        assert source.count == 2


async def test_while_a_token_lasts_nobody_waits_for_an_account_that_fails(
    source: Source, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with tokens_of(source, clock) as tokens:
        first = await tokens.metadata(10)
        source.error = NotReady("the network is down")
        clock.now = HOUR - 200
        with caplog.at_level(logging.WARNING, "percolator.bigtable"):
            assert await tokens.metadata(10) is first
            await _until(lambda: caplog.messages)
        assert "the network is down" in caplog.text
        assert tokens.current() is first
        assert source.count == 2, "it is asked again after a pause only"
        clock.now += 11
        tokens.current()
        await _until(lambda: source.count == 3)
        clock.now = HOUR - 5  # too late for a call to arrive
        assert tokens.current() is None
        with pytest.raises(NotReady) as caught:
            await tokens.metadata(10)
        assert caught.value.retry is Retry.SAFE


async def test_each_waiter_is_told_what_prevents_a_token_and_the_next_asks_again(
    source: Source, clock: Clock
) -> None:
    async with tokens_of(source, clock) as tokens:
        source.error = Unauthenticated("there are no usable Google credentials")
        found = await asyncio.gather(
            *(tokens.metadata(10) for _ in range(3)), return_exceptions=True
        )
        assert [str(error) for error in found] == ["there are no usable Google credentials"] * 3
        assert len(set(map(id, found))) == 3
        source.error = None
        assert (await tokens.metadata(10))[0] == ("authorization", "Bearer token-2")


async def test_a_fetch_that_takes_too_long_was_no_call(source: Source, clock: Clock) -> None:
    async with tokens_of(source, clock) as tokens:
        source.may_go_on.clear()
        with pytest.raises(NotReady, match=r"no access token within 0\.01 s") as caught:
            await tokens.metadata(0.01)
        assert caught.value.retry is Retry.SAFE


async def test_a_refused_token_is_replaced_and_a_later_refusal_of_it_changes_nothing(
    source: Source, clock: Clock
) -> None:
    async with tokens_of(source, clock) as tokens:
        first = await tokens.metadata(10)
        tokens.refused(first)
        assert tokens.current() is None
        second = await tokens.metadata(10)
        tokens.refused(first)
        assert tokens.current() is second


async def test_a_short_token_is_replaced_in_the_middle_of_its_life(
    source: Source, clock: Clock
) -> None:
    async with tokens_of(source, clock) as tokens:
        source.seconds = 20.0
        first = await tokens.metadata(10)
        clock.now = 9.0
        assert tokens.current() is first
        assert source.count == 1
        clock.now = 11.0
        assert tokens.current() is first
        await _until(lambda: source.count == 2)


async def test_closing_does_not_wait_for_a_fetch(source: Source, clock: Clock) -> None:
    async with tokens_of(source, clock) as tokens:
        source.may_go_on.clear()
        waiting = asyncio.create_task(tokens.metadata(10))
        await _until(lambda: source.count)
        async with asyncio.timeout(5):
            await tokens.close()
        with pytest.raises(UsageError, match="closed"):
            await waiting


async def test_after_the_close_a_token_is_used_while_it_lasts_and_no_other_is_fetched(
    source: Source, clock: Clock
) -> None:
    async with tokens_of(source, clock) as tokens:
        first = await tokens.metadata(10)
        await tokens.close()
        clock.now = HOUR - 200.0  # it would be replaced by now
        assert await tokens.metadata(10) is first
        clock.now = HOUR
        with pytest.raises(UsageError, match="the network of this client is closed"):
            await tokens.metadata(10)
        assert source.count == 1
