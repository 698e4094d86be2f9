"""Pauses double up to the longest, and randomness spreads callers out."""

from __future__ import annotations

import asyncio
import random

import pytest

from percolator.wire.backoff import Backoff, pause_seconds
from tests.simulation.virtual_time import VirtualClock


class Chance(random.Random):
    """Always the same number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def random(self) -> float:
        return self.number


@pytest.mark.parametrize(("chance", "share"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
async def test_pauses_double_up_to_the_longest_and_up_to_half_is_random(
    chance: float, share: float
) -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    backoff = Backoff(clock, Chance(chance), 0.1, 1.0)
    pauses = [backoff.next_seconds() for _ in range(6)]
    assert pauses == pytest.approx([share * pause for pause in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0)])
    assert backoff.rounds == 6


def test_after_any_number_of_attempts_the_pause_is_the_longest() -> None:
    for doublings in (10, 100, 10_000, 10**9):
        assert pause_seconds(Chance(1.0), 0.1, 1.0, doublings=doublings) == 1.0


def test_a_longer_pause_that_a_server_asked_for_is_kept() -> None:
    def pause(asked_seconds: float) -> float:
        return pause_seconds(Chance(1.0), 0.1, 1.0, doublings=2, asked_seconds=asked_seconds)

    assert [pause(0.0), pause(0.3), pause(7.0)] == [0.4, 0.4, 7.0]


async def test_a_pause_ends_at_the_deadline_and_no_attempt_follows() -> None:
    loop = asyncio.get_running_loop()
    backoff = Backoff(VirtualClock(loop), Chance(1.0), 1.0, 8.0)
    assert await backoff.pause(2.5)
    assert not await backoff.pause(2.5)
    assert loop.time() == 2.5
    assert not await backoff.pause(2.5)
    assert loop.time() == 2.5
