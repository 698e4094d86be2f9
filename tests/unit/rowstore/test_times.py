"""Timestamps as times of a row store."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import InvalidArgument, Unavailable
from percolator.rowstore.layout import SPACING, SpacedTimestamps, Times
from percolator.timestamps import SEQUENCE_BITS

EPOCH = 1_700_000_000_000
FIRST = EPOCH << SEQUENCE_BITS
TIMES = Times(EPOCH)
_SEVENTY_YEARS = 70 * 365 * 86_400_000


@pytest.mark.parametrize("number", [0, 1, 4095, 4096, _SEVENTY_YEARS << 12])
def test_a_timestamp_comes_back_from_its_time(number: int) -> None:
    timestamp = FIRST + number * SPACING
    time = TIMES.time(timestamp)
    assert time % 1_000 == 0
    assert 0 < time < 2**63
    assert TIMES.timestamp(time) == timestamp
    assert TIMES.at_or_above(timestamp) == time
    assert TIMES.at_or_above(timestamp + 1) == time + 1_000
    assert TIMES.at_or_above(timestamp - 1) == time


@pytest.mark.parametrize("timestamp", [FIRST + 1, FIRST - SPACING, 0, 2**64 - SPACING])
def test_what_cannot_be_stored_is_refused(timestamp: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{timestamp} cannot be stored"):
        TIMES.time(timestamp)


def test_bounds_of_any_timestamp_are_in_the_range_of_times() -> None:
    assert TIMES.at_or_above(0) == TIMES.time(FIRST), "an end of 0 would mean that there is none"
    assert 0 < TIMES.at_or_above(2**64 - 1) < 2**63


class _Oracle:
    catalogue_epoch = 0

    def __init__(self, first: int) -> None:
        self.next = first
        self.error: Exception | None = None

    def get(self, count: int = 1, timeout_seconds: float | None = None) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self.next)
        self.next += count
        return future


@pytest.mark.parametrize("first", [FIRST, FIRST + 1, FIRST + SPACING - 1])
async def test_each_timestamp_is_among_the_numbers_that_were_handed_out_for_it(first: int) -> None:
    oracle = _Oracle(first)
    source = SpacedTimestamps(oracle)
    for _ in range(3):
        begin = oracle.next
        timestamp = await source.get()
        assert begin <= timestamp < oracle.next
        assert timestamp % SPACING == 0


async def test_errors_and_cancellations_pass() -> None:
    oracle = _Oracle(FIRST)
    source = SpacedTimestamps(oracle)
    oracle.error = Unavailable("no oracle")
    with pytest.raises(Unavailable):
        await source.get()
    given_up = source.get()
    given_up.cancel()
    await asyncio.sleep(0)
    with pytest.raises(InvalidArgument, match="count"):
        source.get(2)
