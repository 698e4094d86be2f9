"""The oracle on virtual time: its window, a slow or failing disk, a jumping clock.

The allocator: blocks of numbers, for any requests and any time.

The physical part of timestamps, under clocks that jump.

The durable mark: one oracle at a time, and never a guess in place of a lost mark.

The bytes of the mark.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from unittest.mock import Mock

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from percolator.errors import (
    InvalidArgument,
    InvariantViolation,
    NotReady,
    Overloaded,
    PermissionDenied,
    StoreFault,
    StoreUnusable,
    UsageError,
    WrongCluster,
)
from percolator.limits import Limits
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.settings import load
from percolator.services.oracle.candidate import Candidate, Site
from percolator.services.oracle.oracle import (
    LEADING_SPEED,
    Allocator,
    DurableMark,
    HandedOut,
    Mark,
    Oracle,
    OracleHandler,
    OracleLimits,
    PhysicalTime,
)
from percolator.services.oracle.service import OracleMetrics, OracleSettings
from percolator.timestamps import PHYSICAL_MILLISECONDS_MAX, SEQUENCES_PER_MILLISECOND
from percolator.v1.oracle_pb2 import CheckTimestampsRequest, GetTimestampsRequest
from percolator.wire.timestamp_source import ATTEMPT_SECONDS_MAX
from percolator.wire.tokens import Rights
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.restricted import NAME, token
from tests.simulation.virtual_time import VirtualClock
from tests.unit.oracle.marks import STORE, HandClock, open_mark
from tests.unit.refusals import refused


@pytest.fixture
@asynccontextmanager
async def files() -> AsyncIterator[MemoryFiles]:
    """The files of an empty disk."""
    yield MemoryFiles(MemoryDisk())


HOUR = 3_600_000
LIMITS = OracleLimits()


async def always() -> bool:
    return True


class Bench:
    """One oracle, its disk and its clock."""

    def __init__(self, clock: VirtualClock, files: MemoryFiles, mark: DurableMark) -> None:
        self.clock = clock
        self.files = files
        self.mark = mark
        self.may_answer: bool | StoreUnusable = True
        self.oracle = Oracle(clock, mark, self._may_answer, LIMITS)
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
    made = Bench(clock, files, await open_mark(files, clock))
    await made.oracle.extend()
    extending = asyncio.ensure_future(made.oracle.keep_extended())
    yield made
    extending.cancel()
    await asyncio.wait([extending])


@pytest.fixture
def at() -> AbstractAsyncContextManager[Bench]:
    """An oracle on virtual time, on files in memory."""
    return bench()


def fsyncs(files: MemoryFiles) -> int:
    return sum(call.startswith("fsync") for call in files.faults.operations)


async def test_nothing_is_served_before_the_first_mark_is_durable(files: MemoryFiles) -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    mark = await open_mark(files, clock)
    oracle = Oracle(clock, mark, always, LIMITS)
    asked = asyncio.ensure_future(oracle.get_timestamps(1))
    await asyncio.sleep(0.1)
    assert not asked.done()
    await oracle.extend()
    assert await asked == clock.wall_milliseconds() << 18


async def test_it_waits_for_the_disk_at_most_once_a_second_and_no_request_does(at: Bench) -> None:
    before = fsyncs(at.files)
    extensions = at.oracle.counts.extensions
    await at.ask_for(100)
    assert 0 < fsyncs(at.files) - before <= 100
    assert (at.oracle.counts.waits, at.oracle.counts.timestamps) == (0, 10_000)
    # One fsync for the file and one for its directory.
    extensions = at.oracle.counts.extensions - extensions
    assert fsyncs(at.files) - before == extensions * 2


async def test_an_idle_oracle_answers_at_once_whenever_it_is_asked(at: Bench) -> None:
    await asyncio.sleep(1000)
    started = at.clock.monotonic_seconds()
    assert await at.ask() == at.clock.wall_milliseconds() << 18
    assert at.clock.monotonic_seconds() == started


async def test_no_request_waits_for_a_disk_that_takes_most_of_a_second(at: Bench) -> None:
    at.files.before_fsync = lambda: asyncio.sleep(0.8)
    await at.ask_for(60)
    assert at.oracle.counts.waits == 0


async def test_an_even_slower_disk_makes_requests_wait_but_not_fail(at: Bench) -> None:
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


async def test_when_the_mark_cannot_be_written_it_refuses_and_it_recovers(at: Bench) -> None:
    """The rest of the window may be served, then nothing until a mark is durable again."""
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
async def test_the_refusal_names_the_fault(at: Bench, number: int, fault: StoreFault) -> None:
    at.fail(number)
    await asyncio.sleep(10)
    with pytest.raises(StoreUnusable) as refused:
        await at.ask()
    assert refused.value.fault is fault


async def test_a_burst_is_bounded_by_the_time_and_delays_other_requests_only_briefly(
    at: Bench,
) -> None:
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
async def test_a_count_outside_its_limits_is_refused_by_name(at: Bench, count: int) -> None:
    with refused("count"):
        await at.oracle.get_timestamps(count)
    assert await at.ask() == at.clock.wall_milliseconds() << 18


async def test_timestamps_increase_while_the_wall_clock_is_set_back_an_hour(at: Bench) -> None:
    await at.ask_for(5)
    before = at.highest >> 18
    at.clock.set_wall_back(HOUR)
    await at.ask_for(10)
    assert 9_800 <= (at.highest >> 18) - before <= 10_000
    assert at.oracle.wall_lead_seconds < -3_500


async def test_a_small_jump_forward_is_followed_after_one_wait_for_the_disk(at: Bench) -> None:
    at.clock.set_wall_back(-59_000)
    started = at.clock.monotonic_seconds()
    assert await at.ask() >= at.clock.wall_milliseconds() << 18
    assert at.clock.monotonic_seconds() == started  # this disk takes no time
    assert at.oracle.counts.waits == 1
    await at.ask_for(10)
    assert at.oracle.counts.waits == 1


async def test_a_deposed_oracle_no_longer_answers(at: Bench) -> None:
    """Not even with timestamps allocated before: it may have been paused since."""
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


async def test_an_absurd_clock_at_the_start_is_refused_unless_it_is_confirmed(
    files: MemoryFiles,
) -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    mark = await open_mark(files, clock)
    await Oracle(clock, mark, always, LIMITS).extend()
    clock.set_wall_back(-400 * 24 * HOUR)
    with pytest.raises(UsageError, match=r"400 days above .* --follow-clock-jumps"):
        Oracle(clock, mark, always, LIMITS)
    await Oracle(clock, mark, always, OracleLimits(follow_jumps=True)).extend()
    assert mark.mark_milliseconds >= clock.wall_milliseconds()


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


async def test_a_store_that_does_not_even_say_who_leads_keeps_the_mark_from_being_durable(
    at: Bench,
) -> None:
    """As a row store that is down: its operators are told what those of a failing disk are."""
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


START = 1_800_000_000_000
LEAD, WHOLE = 400, SEQUENCES_PER_MILLISECOND

steps = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 5_000_000)),
    st.tuples(st.just("time"), st.integers(-5_000, 5_000)),
    st.tuples(st.just("extend"), st.integers(0, 3_000)),
)


@given(st.lists(steps, max_size=60))
def test_blocks_never_overlap_and_stay_between_the_time_and_the_limit(
    script: list[tuple[str, int]],
) -> None:
    allocator = Allocator(START, lead_milliseconds_max=LEAD)
    now = limit = START
    highest = (START << 18) - 1
    for step, amount in script:
        if step == "time":
            now += amount
        elif step == "extend":
            limit += amount
            allocator.extend(limit)
        else:
            try:
                first = allocator.allocate(amount, now)
            except Overloaded:
                continue
            if first is None:
                continue
            assert first > highest
            assert first >= now << 18
            highest = first + amount - 1
            assert highest < limit << 18
            assert highest <= now + LEAD << 18


@pytest.mark.parametrize(
    ("limit", "blocks"),
    [
        (
            START + 1,
            {SEQUENCES_PER_MILLISECOND + 1: None, SEQUENCES_PER_MILLISECOND: START, 1: None},
        ),
        (START + 100, {SEQUENCES_PER_MILLISECOND: START, 1: START + 1}),
    ],
    ids=["a refused block takes nothing", "when the sequence overflows, physical time advances"],
)
def test_blocks_begin_where_the_last_one_that_was_handed_out_has_ended(
    limit: int, blocks: dict[int, int | None]
) -> None:
    allocator = Allocator(START, lead_milliseconds_max=LEAD)
    allocator.extend(limit)
    for count, milliseconds in blocks.items():
        expected = None if milliseconds is None else milliseconds << 18
        assert allocator.allocate(count, START) == expected


def test_a_greedy_client_cannot_push_time_ahead_of_the_clock() -> None:
    """Otherwise it would make all locks expire."""
    allocator = Allocator(START, lead_milliseconds_max=LEAD)
    allocator.extend(START + 10_000)
    assert allocator.allocate(LEAD * SEQUENCES_PER_MILLISECOND, START) is not None
    with pytest.raises(Overloaded) as refused:
        allocator.allocate(1, START)
    later = START + round(refused.value.retry_after_seconds * 1000)
    assert allocator.allocate(1, later) is not None


@pytest.mark.parametrize("mark", [START - 1, PHYSICAL_MILLISECONDS_MAX + 1])
def test_the_mark_never_goes_back_and_always_fits_a_timestamp(mark: int) -> None:
    with pytest.raises(InvariantViolation):
        Allocator(START, lead_milliseconds_max=LEAD).extend(mark)


def physical_time(
    clock: HandClock,
    *,
    not_before: int = 0,
    follow_jumps: bool = False,
    leading_speed: float = LEADING_SPEED,
) -> PhysicalTime:
    return PhysicalTime(
        clock,
        begin_milliseconds=max(clock.wall, not_before),
        leading_speed=leading_speed,
        jump_seconds_max=60,
        follow_jumps=follow_jumps,
    )


def test_it_is_the_wall_clock_while_that_behaves() -> None:
    clock = HandClock()
    time = physical_time(clock)
    for _ in range(1000):
        clock.go_on(0.0137)
        assert abs(time.now_milliseconds() - clock.wall) <= 1
    assert abs(time.wall_lead_seconds) < 0.002


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(-10 * HOUR, 10 * HOUR)), max_size=30),
    st.booleans(),
)
def test_it_never_goes_back(moves: list[tuple[float, int]], follow_jumps: bool) -> None:
    clock = HandClock()
    time = physical_time(clock, follow_jumps=follow_jumps)
    last = time.now_milliseconds()
    for seconds, jump in moves:
        clock.go_on(seconds)
        clock.wall += jump
        now = time.now_milliseconds()
        assert now >= last
        last = now


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(60_001, HOUR)), max_size=30))
def test_jumps_above_a_minute_are_not_followed(moves: list[tuple[float, int]]) -> None:
    """Following one would expire every lock and all history, and could not be undone."""
    clock = HandClock()
    time = physical_time(clock)
    started, elapsed = time.now_milliseconds(), 0.0
    for seconds, jump in moves:
        clock.go_on(seconds)
        clock.wall += jump
        elapsed += seconds * 1000
        assert abs(time.now_milliseconds() - started - elapsed) <= 1
        assert time.is_ignoring_a_jump


def test_a_clock_that_comes_back_from_a_jump_is_followed_again() -> None:
    clock = HandClock()
    time = physical_time(clock)
    clock.wall += 2 * HOUR
    clock.go_on(10)
    time.now_milliseconds()
    assert time.is_ignoring_a_jump
    clock.wall -= 2 * HOUR
    clock.go_on(10)
    assert abs(time.now_milliseconds() - clock.wall) <= 1
    assert not time.is_ignoring_a_jump


@pytest.mark.parametrize(
    ("jump", "follow_jumps"),
    [(60_000, False), (1000 * HOUR, True)],
    ids=["up to a minute", "any, if that is configured"],
)
def test_a_jump_is_followed_at_once(jump: int, follow_jumps: bool) -> None:
    clock = HandClock()
    time = physical_time(clock, follow_jumps=follow_jumps)
    clock.wall += jump
    assert time.now_milliseconds() == clock.wall


@pytest.mark.parametrize(
    ("lead", "speed", "steps", "seconds"),
    [(2_900, LEADING_SPEED, 310, 1.0), (2 * HOUR, 0.5, 4 * 60 + 1, 60.0)],
    ids=["left by a restart", "hours, as fast as it is told"],
)
def test_a_lead_shrinks_to_nothing_and_time_never_stands_still(
    lead: int, speed: float, steps: int, seconds: float
) -> None:
    """Otherwise the leads of many restarts would add up. And this is the way to get rid of hours
    that timestamps have run ahead, without handing one out twice."""
    clock = HandClock()
    time = physical_time(clock, not_before=clock.wall + lead, leading_speed=speed)
    last = time.now_milliseconds()
    assert last == clock.wall + lead
    for _ in range(steps):
        clock.go_on(seconds)
        before, last = last, time.now_milliseconds()
        assert last > before
    assert abs(last - clock.wall) <= 1


def test_it_begins_above_the_mark_wherever_the_wall_clock_is() -> None:
    clock = HandClock()
    assert physical_time(clock, not_before=clock.wall + HOUR).now_milliseconds() == (
        clock.wall + HOUR
    )
    assert physical_time(clock, not_before=clock.wall - HOUR).now_milliseconds() == clock.wall


ROLE = STORE / "coordinator" / "oracle"


async def another(files: MemoryFiles, *, cluster_id: str = "") -> DurableMark:
    """The mark of the next process, after the process of `files` was killed."""
    files.kill()
    return await open_mark(MemoryFiles(files.disk), cluster_id=cluster_id)


async def test_a_mark_survives_a_power_cut(files: MemoryFiles) -> None:
    mark = await open_mark(files)
    assert mark.mark_milliseconds == 0
    await mark.write(17)
    for chance in (None, *map(random.Random, range(10))):
        files.disk.cut_power(chance)
        assert (await open_mark(MemoryFiles(files.disk))).mark_milliseconds == 17


async def test_the_former_oracle_can_neither_write_nor_answer_once_another_has_read(
    files: MemoryFiles,
) -> None:
    """It was only silent, not killed, and still holds its lock."""
    former = await open_mark(files)
    await former.write(5)
    silent = asyncio.Event()
    files.before_fsync = silent.wait
    late = asyncio.ensure_future(former.write(6))
    await asyncio.sleep(0)
    successor = await open_mark(MemoryFiles(files.disk))
    assert successor.mark_milliseconds == 5
    silent.set()
    with pytest.raises(NotReady):
        await late
    assert not await former.leadership.is_held()
    assert await successor.leadership.is_held()
    with pytest.raises(NotReady):
        await former.write(7)


async def test_a_missing_mark_is_not_taken_for_a_new_store(files: MemoryFiles) -> None:
    await (await open_mark(files)).write(1)
    await files.unlink(ROLE / "e1" / "mark")
    with pytest.raises(StoreUnusable, match=r"'mark' .* is missing") as refused:
        await another(files)
    assert refused.value.fault is StoreFault.DAMAGED


async def test_a_damaged_mark_is_refused_and_left_as_it_is(files: MemoryFiles) -> None:
    await (await open_mark(files)).write(1)
    async with await files.create(ROLE / "e1" / "mark", exclusive=False) as file:
        await file.append(b"percolator-oracle-mark 1\ncluster=\nmilliseconds=0\ncrc32=00000000\n")
    for _ in range(2):
        with pytest.raises(StoreUnusable, match="damaged"):
            await another(files)
        files = MemoryFiles(files.disk)


async def test_the_mark_of_another_cluster_is_refused(files: MemoryFiles) -> None:
    await (await open_mark(files, cluster_id="a")).write(1)
    with pytest.raises(WrongCluster, match="belongs to cluster a, not to b"):
        await another(files, cluster_id="b")


async def test_a_store_keeps_the_cluster_that_it_once_belonged_to(files: MemoryFiles) -> None:
    """A mark without a cluster is adopted by the first one; after that, another one is refused."""
    for cluster_id in ("", "a", ""):
        files = MemoryFiles(files.disk)
        await (await open_mark(files, cluster_id=cluster_id)).write(1)
        files.kill()
    with pytest.raises(WrongCluster):
        await open_mark(MemoryFiles(files.disk), cluster_id="b")


async def test_the_mark_never_goes_back() -> None:
    mark = await open_mark(MemoryFiles(MemoryDisk()))
    await mark.write(2)
    with pytest.raises(InvariantViolation):
        await mark.write(1)


async def test_a_write_costs_two_fsyncs(files: MemoryFiles) -> None:
    mark = await open_mark(files)
    await mark.write(1)
    before = files.fsyncs
    await mark.write(2)
    assert files.fsyncs - before == 2


async def test_a_failed_write_leaves_the_old_mark_in_force(files: MemoryFiles) -> None:
    mark = await open_mark(files)
    await mark.write(1)
    files.faults.fail("append", number=errno.ENOSPC)
    with pytest.raises(StoreUnusable, match="No space left") as refused:
        await mark.write(2)
    assert refused.value.fault is StoreFault.DISK_FULL
    assert mark.mark_milliseconds == 1
    await mark.write(3)
    assert (await another(files)).mark_milliseconds == 3


async def test_an_oracle_whose_directory_was_taken_away_notices(files: MemoryFiles) -> None:
    mark = await open_mark(files)
    await mark.write(1)
    assert await mark.leadership.is_held()
    await files.rename(ROLE / "e1", ROLE / "elsewhere")
    assert not await mark.leadership.is_held()
    with pytest.raises(NotReady):
        await mark.leadership.check()
    await files.rename(ROLE / "elsewhere", ROLE / "e1")
    assert not await mark.leadership.is_held(), "once deposed, always"


MARK = Mark(1_795_252_739_606, "0123456789abcdef0123456789abcdef")


@given(
    st.integers(0, PHYSICAL_MILLISECONDS_MAX),
    st.text("0123456789abcdef-", max_size=128),
)
def test_a_mark_is_read_as_it_was_written(milliseconds: int, cluster_id: str) -> None:
    mark = Mark(milliseconds, cluster_id)
    assert Mark.decode(mark.encode(), "mark") == mark


def test_the_format_is_the_documented_one() -> None:
    assert MARK.encode() == (
        b"percolator-oracle-mark 1\n"
        b"cluster=0123456789abcdef0123456789abcdef\n"
        b"milliseconds=1795252739606\n"
        b"crc32=1bef8fb2\n"
    )


def test_no_damaged_mark_is_believed() -> None:
    """Every bit flipped, every length cut short, and the contents of torn or empty files."""
    good = MARK.encode()
    damaged = [
        good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :]
        for at in range(len(good))
        for bit in range(8)
    ]
    damaged += [good[:length] for length in range(len(good))]
    damaged += [b"\0" * len(good), good + b"\n", good * 2, b"\xff" * 4096]
    for data in damaged:
        with pytest.raises((StoreUnusable, WrongCluster)) as refused:
            Mark.decode(data, "coordinator/oracle/e1/mark")
        assert "coordinator/oracle/e1/mark" in str(refused.value)
        assert "\n" not in str(refused.value)


@given(st.binary(max_size=200))
def test_garbage_is_damage(data: bytes) -> None:
    with pytest.raises(StoreUnusable) as refused:
        Mark.decode(data, "mark")
    assert refused.value.fault is StoreFault.DAMAGED


def test_an_epoch_is_kept_and_a_mark_without_one_has_the_first_format() -> None:
    raised = replace(MARK, epoch=7)
    assert Mark.decode(raised.encode(), "mark") == raised
    assert raised.encode().startswith(b"percolator-oracle-mark 2\n")
    assert MARK.encode().startswith(b"percolator-oracle-mark 1\n")


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (b"percolator-oracle-mark 3\nwhatever", WrongCluster, "format 3, this one knows 2"),
        (Mark(PHYSICAL_MILLISECONDS_MAX + 1, "").encode(), StoreUnusable, "mark"),
    ],
    ids=["a newer format", "beyond what a timestamp can hold"],
)
def test_a_mark_that_cannot_be_used_is_refused(
    data: bytes, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        Mark.decode(data, "mark")


def test_a_cluster_id_that_could_not_be_read_again_is_not_written() -> None:
    for cluster_id in ("two\nlines", "x" * 129, "ä"):
        with pytest.raises(InvalidArgument):
            Mark(1, cluster_id)


# The settings and the metrics of the oracle.


def settings(*flags: str) -> OracleSettings:
    return load(OracleSettings, ["--store", "/store", *flags], {})


def test_the_defaults_of_the_settings_are_those_of_the_core() -> None:
    assert settings().limits() == OracleLimits()


def test_every_limit_can_be_set() -> None:
    flags = {
        "--window-seconds": "1.5",
        "--count-max": "10",
        "--wait-seconds-max": "1",
        "--clock-jump-seconds-max": "5",
        "--leading-speed": "0.5",
    }
    given = [part for flag in flags.items() for part in flag]
    assert settings(*given, "--follow-clock-jumps").limits() == OracleLimits(
        window_seconds=1.5,
        count_max=10,
        wait_seconds_max=1,
        jump_seconds_max=5,
        leading_speed=0.5,
        follow_jumps=True,
    )


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--window-seconds", "3"),  # as long as locks live: a crash would expire fresh ones
        ("--window-seconds", "0.1"),
        ("--count-max", "0"),
        ("--request-bytes-max", "1048577"),
        ("--wait-seconds-max", "0"),
        ("--wait-seconds-max", "2"),  # the caller would have given up before it hears the reason
        ("--clock-jump-seconds-max", "-1"),
        ("--leading-speed", "0"),  # time would stand still, and no lock expire
        ("--leading-speed", "1"),  # leads would add up over restarts
        ("--store", ""),
    ],
)
def test_a_bad_value_is_refused_by_name_in_one_line(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        settings(flag, value)
    assert exited.value.code == 2
    said = capsys.readouterr().err
    assert flag.removeprefix("--").replace("-", "_") in said
    assert len(said.splitlines()) == 1


def test_the_store_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(OracleSettings, [], {})
    assert "store" in capsys.readouterr().err


async def test_the_metrics_count_what_happened_under_stable_names(files: MemoryFiles) -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    files.disk.make_durable_directory(STORE)
    site = Site(clock, str(STORE), "me:1", "", OracleLimits())
    candidate = Candidate(site, DirectoryCoordinator(files, clock, STORE))
    registry = CollectorRegistry()
    registry.register(OracleMetrics(candidate, files))
    assert collected(registry)[("percolator_oracle_leading",)] == 0
    await candidate.lead_within(1)
    oracle = candidate.candidacy.serving()
    await oracle.get_timestamps(1000)
    with pytest.raises(InvalidArgument):
        await oracle.get_timestamps(0)
    clock.set_wall_back(10_000)
    await oracle.get_timestamps(1)
    assert collected(registry) == {
        ("percolator_oracle_timestamps_total",): 1001,
        ("percolator_oracle_mark_extensions_total",): 1,
        ("percolator_oracle_mark_extension_failures_total",): 0,
        ("percolator_oracle_fsyncs_total",): files.fsyncs,
        ("percolator_oracle_waits_total",): 0,
        ("percolator_oracle_refused_total", "InvalidArgument"): 1,
        ("percolator_oracle_leading",): 1,
        ("percolator_oracle_wall_clock_lead_seconds",): -10,
        ("percolator_oracle_mark_timestamp_seconds",): 1_800_000_002.9,
    }


def collected(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }


# What was handed out to tokens with rights to some tables only.


def test_an_oracle_knows_what_it_has_handed_out_to_a_token() -> None:
    known = HandedOut()
    known.note("shop", 10, 3)
    known.note("shop", 20, 1)
    known.note("other", 13, 7)
    known.note("shop", 14, 1)  # answered later than it was executed
    found = [at for at in range(9, 23) if known.has("shop", at)]
    assert found == [10, 11, 12, 14, 20]
    assert [at for at in range(9, 23) if known.has("other", at)] == [*range(13, 20)]
    assert not known.has("unheard", 10)


def test_who_asks_for_many_timestamps_takes_none_from_others() -> None:
    known = HandedOut(blocks_max=100)
    known.note("quiet", 1, 1)
    for at in range(2, 1_000):
        known.note("busy", 2 * at, 1)
    assert known.has("quiet", 1)
    assert known.has("busy", 2 * 999)
    assert not known.has("busy", 4)


async def test_servers_ask_for_the_timestamps_of_a_token_and_about_them(at: Bench) -> None:
    handler = OracleHandler(Mock(term=at.oracle, serving=lambda: at.oracle))
    own = (await handler.get_timestamps(GetTimestampsRequest(count=1, token=NAME))).first
    with token(Rights()):
        also_own = (await handler.get_timestamps(GetTimestampsRequest(count=1))).first
    of_another = (await handler.get_timestamps(GetTimestampsRequest(count=1, token="other"))).first
    of_nobody = (await handler.get_timestamps(GetTimestampsRequest(count=1))).first
    about = CheckTimestampsRequest(token=NAME, timestamps=[own, also_own, of_another, of_nobody])
    answer = await handler.check_timestamps(about)
    assert [*answer.handed_out] == [True, True, False, False]
    at.may_answer = False
    with pytest.raises(NotReady):
        await handler.check_timestamps(about)


@pytest.mark.parametrize("rights", [None, Rights()])
async def test_only_servers_ask_for_timestamps_of_another_token(
    at: Bench, rights: Rights | None
) -> None:
    handler = OracleHandler(Mock(term=at.oracle))
    with token(rights), pytest.raises(PermissionDenied, match="only servers"):
        await handler.get_timestamps(GetTimestampsRequest(count=1, token="other"))
