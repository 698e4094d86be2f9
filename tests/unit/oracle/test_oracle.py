"""The oracle on virtual time: its window, a slow or failing disk, a jumping clock."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog

from percolator.errors import (
    InvalidArgument,
    NotReady,
    Overloaded,
    StoreFault,
    StoreUnusable,
    UsageError,
)
from percolator.limits import Limits
from percolator.services.oracle.oracle import Ledger, Oracle, OracleLimits
from percolator.wire.timestamp_source import ATTEMPT_SECONDS_MAX
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles
from tests.simulation.virtual_time import VirtualClock
from tests.unit.oracle.ledgers import open_ledger

HOUR = 3_600_000
LIMITS = OracleLimits()


async def always() -> bool:
    return True


class Bench:
    """One oracle, its disk and its clock."""

    def __init__(self, clock: VirtualClock, files: MemoryFiles, ledger: Ledger) -> None:
        self.clock = clock
        self.files = files
        self.ledger = ledger
        self.may_answer: bool | StoreUnusable = True
        self.oracle = Oracle(clock, ledger, self._may_answer, LIMITS)
        self.highest = 0

    async def _may_answer(self) -> bool:
        if isinstance(self.may_answer, StoreUnusable):
            raise self.may_answer
        return self.may_answer

    async def ask(self, count: int = 1) -> int:
        first = await self.oracle.get_timestamps(count)
        assert first > self.highest
        self.highest = first + count - 1
        return first

    async def ask_for(self, seconds: float, *, every: float = 0.01) -> None:
        for _ in range(round(seconds / every)):
            await self.ask()
            await asyncio.sleep(every)

    def fail(self, number: int | None) -> None:
        self.files.faults.heal()
        if number is not None:
            self.files.faults.fail("fsync", times=10**9, number=number)


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    clock = VirtualClock(asyncio.get_running_loop())
    files = MemoryFiles(MemoryDisk())
    made = Bench(clock, files, await open_ledger(files, clock))
    await made.oracle.extend()
    extending = asyncio.ensure_future(made.oracle.keep_extended())
    yield made
    extending.cancel()
    await asyncio.wait([extending])


def fsyncs(files: MemoryFiles) -> int:
    return sum(call.startswith("fsync") for call in files.faults.operations)


async def test_nothing_is_served_before_the_first_mark_is_durable() -> None:
    files = MemoryFiles(MemoryDisk())
    clock = VirtualClock(asyncio.get_running_loop())
    ledger = await open_ledger(files, clock)
    oracle = Oracle(clock, ledger, always, LIMITS)
    asked = asyncio.ensure_future(oracle.get_timestamps(1))
    await asyncio.sleep(0.1)
    assert not asked.done()
    await oracle.extend()
    assert await asked == clock.wall_milliseconds() << 18


async def test_it_waits_for_the_disk_at_most_once_a_second_and_no_request_does() -> None:
    async with bench() as at:
        before = fsyncs(at.files)
        extensions = at.oracle.counts.extensions
        await at.ask_for(100)
        assert 0 < fsyncs(at.files) - before <= 100
        assert at.oracle.counts.waits == 0
        assert at.oracle.counts.timestamps == 10_000
        # One fsync for the file and one for its directory.
        extensions = at.oracle.counts.extensions - extensions
        assert fsyncs(at.files) - before == extensions * 2


async def test_an_idle_oracle_answers_at_once_whenever_it_is_asked() -> None:
    async with bench() as at:
        await asyncio.sleep(1000)
        started = at.clock.monotonic_seconds()
        assert await at.ask() == at.clock.wall_milliseconds() << 18
        assert at.clock.monotonic_seconds() == started


async def test_no_request_waits_for_a_disk_that_takes_most_of_a_second() -> None:
    async with bench() as at:
        at.files.before_fsync = lambda: asyncio.sleep(0.8)
        await at.ask_for(60)
        assert at.oracle.counts.waits == 0


async def test_an_even_slower_disk_makes_requests_wait_but_not_fail() -> None:
    async with bench() as at:
        at.files.before_fsync = lambda: asyncio.sleep(1.8)
        await at.ask_for(60)
        assert at.oracle.counts.waits > 0
        assert not at.oracle.counts.refused


async def test_requests_are_refused_in_time_when_the_disk_hangs() -> None:
    async with bench() as at:
        at.files.before_fsync = lambda: asyncio.sleep(10**6)
        await asyncio.sleep(5)
        started = at.clock.monotonic_seconds()
        with pytest.raises(NotReady, match=r"longer than 1\.5 s"):
            await at.ask()
        assert at.clock.monotonic_seconds() - started == pytest.approx(1.5)
    assert LIMITS.wait_seconds_max < ATTEMPT_SECONDS_MAX, "the caller would give up before"


async def test_when_the_mark_cannot_be_written_it_refuses_and_it_recovers() -> None:
    """The rest of the window may be served, then nothing until a mark is durable again."""
    async with bench() as at:
        await at.ask_for(3)
        at.fail(errno.ENOSPC)
        mark = at.oracle.mark_milliseconds
        while at.clock.wall_milliseconds() < mark:
            await at.ask_for(0.01)
        for _ in range(100):
            with pytest.raises(StoreUnusable) as refused:
                await at.ask()
            assert refused.value.fault is StoreFault.DISK_FULL
            await asyncio.sleep(0.1)
        assert at.highest < mark << 18
        assert at.oracle.counts.refused == {"StoreUnusable": 100}
        assert at.oracle.counts.extension_failures > 0
        at.fail(None)
        await asyncio.sleep(0.3)
        await at.ask_for(10)


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (errno.EROFS, StoreFault.READ_ONLY),
        (errno.EIO, StoreFault.INPUT_OUTPUT),
        (errno.EDQUOT, StoreFault.DISK_FULL),
    ],
)
async def test_the_refusal_names_the_fault(number: int, fault: StoreFault) -> None:
    async with bench() as at:
        at.fail(number)
        await asyncio.sleep(10)
        with pytest.raises(StoreUnusable) as refused:
            await at.ask()
        assert refused.value.fault is fault


async def test_a_burst_is_bounded_by_the_time_and_delays_other_requests_only_briefly() -> None:
    async with bench() as at:
        await at.ask_for(1)
        retry_after_seconds = 0.0
        for _ in range(1000):
            try:
                await at.ask(1_000_000)
            except Overloaded as refused:
                retry_after_seconds = refused.retry_after_seconds
        assert retry_after_seconds > 0
        lead = (at.highest >> 18) - at.clock.wall_milliseconds()
        assert 0 < lead <= 0.15 * LIMITS.window_seconds * 1000
        await asyncio.sleep(retry_after_seconds)
        await at.ask(1_000_000)
        assert at.oracle.counts.waits == 0


@pytest.mark.parametrize("count", [0, -1, 1_000_001, 2**32])
async def test_a_count_outside_its_limits_is_refused_by_name(count: int) -> None:
    async with bench() as at:
        with pytest.raises(InvalidArgument) as refused:
            await at.oracle.get_timestamps(count)
        assert refused.value.field == "count"
        assert await at.ask() == at.clock.wall_milliseconds() << 18


async def test_timestamps_increase_while_the_wall_clock_is_set_back_an_hour() -> None:
    async with bench() as at:
        await at.ask_for(5)
        before = at.highest >> 18
        at.clock.set_wall_back(HOUR)
        await at.ask_for(10)
        assert 9_800 <= (at.highest >> 18) - before <= 10_000
        assert at.oracle.wall_lead_seconds < -3_500


async def test_a_small_jump_forward_is_followed_after_one_wait_for_the_disk() -> None:
    async with bench() as at:
        at.clock.set_wall_back(-59_000)
        started = at.clock.monotonic_seconds()
        assert await at.ask() >= at.clock.wall_milliseconds() << 18
        assert at.clock.monotonic_seconds() == started  # this disk takes no time
        assert at.oracle.counts.waits == 1
        await at.ask_for(10)
        assert at.oracle.counts.waits == 1


async def test_a_jump_of_an_hour_is_not_followed() -> None:
    async with bench() as at:
        await at.ask_for(1)
        before = at.highest >> 18
        at.clock.set_wall_back(-HOUR)
        await at.ask_for(10)
        assert (at.highest >> 18) - before <= 10_010
        assert at.oracle.wall_lead_seconds > 3_500


async def test_a_deposed_oracle_no_longer_answers() -> None:
    """Not even with timestamps allocated before: it may have been paused since."""
    async with bench() as at:
        await at.ask()
        at.may_answer = False
        with pytest.raises(NotReady):
            await at.ask()
        at.may_answer = True
        with pytest.raises(NotReady):
            await at.ask()
        before = fsyncs(at.files)
        with pytest.raises(NotReady):
            await at.oracle.keep_extended()
        assert fsyncs(at.files) == before


async def test_an_absurd_clock_at_the_start_is_refused_unless_it_is_confirmed() -> None:
    files = MemoryFiles(MemoryDisk())
    clock = VirtualClock(asyncio.get_running_loop())
    ledger = await open_ledger(files, clock)
    await Oracle(clock, ledger, always, LIMITS).extend()
    clock.set_wall_back(-400 * 24 * HOUR)
    with pytest.raises(UsageError, match=r"400 days above .* --follow-clock-jumps"):
        Oracle(clock, ledger, always, LIMITS)
    await Oracle(clock, ledger, always, OracleLimits(follow_jumps=True)).extend()
    assert ledger.mark_milliseconds >= clock.wall_milliseconds()


def test_a_crash_makes_no_fresh_lock_expire() -> None:
    """A crash may make time jump by a window; a lock lives longer than that."""
    assert LIMITS.window_seconds < Limits().lock_ttl_seconds


async def test_a_wall_clock_that_disagrees_is_logged_once_and_once_more_when_it_agrees() -> None:
    async with bench() as at:
        with structlog.testing.capture_logs() as log:
            at.clock.set_wall_back(-HOUR)
            await at.ask_for(10)
            at.clock.set_wall_back(HOUR)
            await at.ask_for(10)
            at.clock.set_wall_back(HOUR)
            await at.ask_for(10)
    assert [entry["log_level"] for entry in log] == ["warning", "info", "warning"]
    assert "restart the oracle, or set --follow-clock-jumps" in log[0]["event"]
    assert "agrees" in log[1]["event"]
    assert "lags" in log[2]["event"]
    assert log[0]["wall_lead_seconds"] == pytest.approx(3_600, abs=1)
    assert log[2]["wall_lead_seconds"] == pytest.approx(-3_600, abs=1)


async def test_a_disk_that_fails_for_long_is_logged_once_and_its_recovery_once() -> None:
    async with bench() as at:
        with structlog.testing.capture_logs() as log:
            at.fail(errno.EIO)
            await asyncio.sleep(60)
            at.fail(None)
            await asyncio.sleep(60)
    assert at.oracle.counts.extension_failures > 10
    assert [entry["event"] for entry in log] == [
        "the mark cannot be made durable",
        "the mark is durable again",
    ]


async def test_a_store_that_does_not_even_say_who_leads_keeps_the_mark_from_being_durable() -> None:
    """As a row store that is down: its operators are told what those of a failing disk are."""
    async with bench() as at:
        with structlog.testing.capture_logs() as log:
            await at.ask_for(1)
            at.may_answer = StoreUnusable("the row store: no answer", fault=StoreFault.INPUT_OUTPUT)
            await asyncio.sleep(10)
            assert at.oracle.counts.extension_failures > 1
            with pytest.raises(StoreUnusable, match="no answer"):
                await at.ask()
            at.may_answer = True
            await asyncio.sleep(1)
            await at.ask_for(10)
        assert [line["event"] for line in log] == [
            "the mark cannot be made durable",
            "the mark is durable again",
        ]
