"""A leak is seen; noise, peaks, teeth, steps and rises that slow down are not taken for one."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log
from random import Random

import pytest

from tests.soak.levelling import POINTS_MIN, Tolerance, judge

POINTS = 120
LEVEL = 100.0
TOLERANCE = Tolerance(share=0.03, floor=1.0)
SEEDS = range(100)
Shape = Callable[[float, Random], float]
"""A value at a moment between 0 and 1, and some chance."""


def grows(shape: Shape, seed: int = 0, *, points: int = POINTS) -> bool:
    chance = Random(seed)
    values = [shape(number / points, chance) for number in range(points)]
    return judge(values, TOLERANCE).grows


def seen(shape: Shape, points: int = POINTS) -> int:
    """In how many of a hundred runs the series is said to grow."""
    return sum(grows(shape, seed, points=points) for seed in SEEDS)


def test_a_leak_is_seen() -> None:
    assert grows(lambda at, _: LEVEL + 15 * at)


@pytest.mark.parametrize("points", [60, 120, 360])
def test_a_leak_in_noise_is_seen(points: int) -> None:
    assert seen(lambda at, chance: LEVEL + 20 * at + chance.gauss(0, 2), points) >= 95


def test_a_leak_that_begins_late_is_seen() -> None:
    assert grows(lambda at, chance: LEVEL + 30 * max(0.0, at - 0.4) + chance.gauss(0, 0.5))


def test_a_leak_under_the_teeth_of_a_collector_is_seen() -> None:
    assert seen(lambda at, chance: LEVEL + 20 * at + 10 * (at * 40 % 1) + chance.gauss(0, 1)) >= 95


def test_a_leak_of_one_descriptor_at_a_time_is_seen() -> None:
    assert grows(lambda at, _: float(20 + int(30 * at)))


@pytest.mark.parametrize("noise", [0.0, 1.0, 10.0, 50.0])
def test_noise_is_not_a_leak(noise: float) -> None:
    assert seen(lambda _, chance: LEVEL + chance.gauss(0, noise)) <= 2


def test_noise_that_remembers_is_hardly_ever_a_leak() -> None:
    """As load that comes and goes: each value is close to the last one."""
    found = 0
    for seed in SEEDS:
        chance, value, values = Random(seed), 0.0, []
        for _ in range(POINTS):
            value = 0.9 * value + chance.gauss(0, 2)
            values.append(LEVEL + value)
        found += judge(values, TOLERANCE).grows
    assert found <= 6


def test_peaks_are_not_a_leak() -> None:
    assert seen(lambda _, chance: LEVEL + (500 if chance.random() < 0.1 else 0)) == 0


@pytest.mark.parametrize("teeth", [3, 10, 40])
def test_teeth_are_not_a_leak(teeth: int) -> None:
    assert seen(lambda at, chance: LEVEL + 30 * (at * teeth % 1) + chance.gauss(0, 1)) <= 2


@pytest.mark.parametrize("at_moment", [0.2, 0.4, 0.5, 0.6, 0.7, 0.95])
def test_a_step_is_not_a_leak(at_moment: float) -> None:
    assert seen(lambda at, chance: LEVEL + 20 * (at > at_moment) + chance.gauss(0, 1)) <= 2


def test_what_fills_up_and_is_full_is_not_a_leak() -> None:
    assert not grows(lambda at, _: LEVEL * (1 - exp(-8 * at)))


def test_a_rise_that_slows_down_is_not_a_leak() -> None:
    """As a heap that fragments: each doubling of the time adds as much as the one before."""
    assert seen(lambda at, chance: LEVEL + 3 * log(1 + 100 * at) + chance.gauss(0, 0.2)) == 0


def test_what_falls_is_not_a_leak() -> None:
    assert not grows(lambda at, _: LEVEL - 50 * at)


def test_a_rise_within_the_tolerance_is_not_a_leak() -> None:
    assert not grows(lambda at, _: LEVEL + 8 * at)
    assert grows(lambda at, _: LEVEL + 10 * at)


def test_near_zero_the_floor_decides() -> None:
    assert not grows(lambda at, _: 2.5 * at)
    assert grows(lambda at, _: 5.0 * at)


def test_what_is_too_short_is_not_judged() -> None:
    values = [float(number) for number in range(POINTS_MIN)]
    assert judge(values, TOLERANCE).grows
    short = judge(values[:-1], TOLERANCE)
    assert not short.is_judged
    assert not short.grows
