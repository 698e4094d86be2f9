"""The allocator: blocks of numbers, for any requests and any time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.errors import InvariantViolation, Overloaded
from percolator.services.oracle.oracle import Allocator
from percolator.timestamps import PHYSICAL_MILLISECONDS_MAX, SEQUENCES_PER_MILLISECOND

START = 1_800_000_000_000
LEAD = 400

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


def test_nothing_is_handed_out_before_a_mark_is_durable() -> None:
    assert Allocator(START, lead_milliseconds_max=LEAD).allocate(1, START) is None


def test_a_refused_block_takes_nothing() -> None:
    allocator = Allocator(START, lead_milliseconds_max=LEAD)
    allocator.extend(START + 1)
    assert allocator.allocate(SEQUENCES_PER_MILLISECOND + 1, START) is None
    assert allocator.allocate(SEQUENCES_PER_MILLISECOND, START) == START << 18
    assert allocator.allocate(1, START) is None


def test_when_the_sequence_overflows_the_physical_part_advances() -> None:
    allocator = Allocator(START, lead_milliseconds_max=LEAD)
    allocator.extend(START + 100)
    assert allocator.allocate(SEQUENCES_PER_MILLISECOND, START) == START << 18
    assert allocator.allocate(1, START) == START + 1 << 18


def test_a_greedy_client_cannot_push_time_ahead_of_the_clock() -> None:
    """Otherwise it would make all locks expire."""
    allocator = Allocator(START, lead_milliseconds_max=LEAD)
    allocator.extend(START + 10_000)
    assert allocator.allocate(LEAD * SEQUENCES_PER_MILLISECOND, START) is not None
    with pytest.raises(Overloaded) as refused:
        allocator.allocate(1, START)
    later = START + round(refused.value.retry_after_seconds * 1000)
    assert allocator.allocate(1, later) is not None


def test_the_mark_never_goes_back_and_always_fits_a_timestamp() -> None:
    allocator = Allocator(START, lead_milliseconds_max=LEAD)
    with pytest.raises(InvariantViolation):
        allocator.extend(START - 1)
    with pytest.raises(InvariantViolation):
        allocator.extend(PHYSICAL_MILLISECONDS_MAX + 1)
