"""The physical part of timestamps, under clocks that jump."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from percolator.services.oracle.oracle import LEADING_SPEED, PhysicalTime
from tests.unit.oracle.hand_clock import HandClock

HOUR = 3_600_000


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


def test_a_jump_of_up_to_a_minute_is_followed_at_once() -> None:
    clock = HandClock()
    time = physical_time(clock)
    clock.wall += 60_000
    assert time.now_milliseconds() == clock.wall


def test_any_jump_is_followed_when_that_is_configured() -> None:
    clock = HandClock()
    time = physical_time(clock, follow_jumps=True)
    clock.wall += 1000 * HOUR
    assert time.now_milliseconds() == clock.wall


def test_time_goes_on_while_the_wall_clock_is_an_hour_behind() -> None:
    """If it stood still, no lock would expire for an hour."""
    clock = HandClock()
    time = physical_time(clock)
    started = time.now_milliseconds()
    clock.wall -= HOUR
    for _ in range(100):
        clock.go_on(0.1)
        time.now_milliseconds()
    assert 9_890 <= time.now_milliseconds() - started <= 10_000
    assert -3_600.0 <= time.wall_lead_seconds < -3_599.0


def test_a_lead_left_by_a_restart_shrinks_to_nothing() -> None:
    """Otherwise the leads of many restarts would add up."""
    clock = HandClock()
    time = physical_time(clock, not_before=clock.wall + 2_900)
    assert time.now_milliseconds() == clock.wall + 2_900
    for _ in range(310):
        clock.go_on(1.0)
        time.now_milliseconds()
    assert abs(time.now_milliseconds() - clock.wall) <= 1


def test_it_begins_above_the_mark_wherever_the_wall_clock_is() -> None:
    clock = HandClock()
    assert physical_time(clock, not_before=clock.wall + HOUR).now_milliseconds() == (
        clock.wall + HOUR
    )
    assert physical_time(clock, not_before=clock.wall - HOUR).now_milliseconds() == clock.wall


def test_a_lead_shrinks_as_fast_as_it_is_told_and_time_never_stands_still() -> None:
    """The way to get rid of hours that timestamps have run ahead, without handing one out twice."""
    clock = HandClock()
    time = physical_time(clock, not_before=clock.wall + 2 * HOUR, leading_speed=0.5)
    last = time.now_milliseconds()
    for _ in range(4 * 60 + 1):
        clock.go_on(60.0)
        now = time.now_milliseconds()
        assert now > last
        last = now
    assert abs(last - clock.wall) <= 1
