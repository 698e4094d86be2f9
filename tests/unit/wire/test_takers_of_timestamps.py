"""What goes on with a timestamp in the turn in which it comes, instead of waiting for a future."""

from __future__ import annotations

import asyncio
import random

from percolator import errors
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock
from tests.unit.wire.fake_oracles import ROUND_TRIP_SECONDS, Oracles, silent, source_of


class _Taker:
    """Asks for another timestamp as soon as it has one."""

    def __init__(self, source: TimestampSource) -> None:
        self._source = source
        self.found: list[int] = []
        self.errors: list[errors.PercolatorError] = []
        self.is_gone = False

    def done(self) -> bool:
        return self.is_gone

    def set_result(self, timestamp: int, /) -> None:
        self.found.append(timestamp)
        if len(self.found) < 2:
            self._source.give(self)

    def set_exception(self, error: errors.PercolatorError, /) -> None:
        self.errors.append(error)
        self.is_gone = True


async def test_what_takes_a_timestamp_has_it_in_the_turn_in_which_it_comes() -> None:
    oracles = Oracles()
    source = source_of(oracles)
    first, gone = _Taker(source), _Taker(source)
    source.give(first)
    source.give(gone, 3)
    last = source.get()
    gone.is_gone = True
    assert await last == 1004
    assert (first.found, gone.found) == ([1000], [])
    await asyncio.sleep(ROUND_TRIP_SECONDS * 2)
    assert first.found == [1000, 1005]
    assert oracles.counts() == [5, 1]


class _CtrlC(BaseException):
    """A `KeyboardInterrupt` would end the test's loop."""


class _Interrupted(_Taker):
    """Ctrl-C comes while it goes on with its timestamp."""

    def set_result(self, timestamp: int, /) -> None:
        self.is_gone = True
        raise _CtrlC


async def test_nobody_is_forgotten_although_ctrl_c_came_while_timestamps_were_handed_out() -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)
    source = source_of(Oracles())
    before, interrupted = source.get(), _Interrupted(source)
    source.give(interrupted)
    behind = [source.get(), source.get()]
    assert await before == 1000
    assert await source.get() == 1006
    assert [await one for one in behind] == [1004, 1005]
    loop.set_exception_handler(None)


async def test_what_takes_a_timestamp_hears_that_none_comes() -> None:
    oracles = Oracles()
    oracles.behaviours["a:1"] = silent
    source = TimestampSource(
        World(VirtualClock(asyncio.get_running_loop()), oracles, random.Random(1)), ["a:1"]
    )
    taker = _Taker(source)
    source.give(taker, timeout_seconds=1.0)
    await asyncio.sleep(1.1)
    assert [type(error) for error in taker.errors] == [errors.DeadlineExceeded]
    last = _Taker(source)
    source.give(last)
    await source.close()
    assert [type(error) for error in last.errors] == [errors.UsageError]
