"""Clients that know nothing of each other pause, so that the oldest gets through."""

from __future__ import annotations

import random

import pytest

from percolator.errors import CellAddress
from percolator.protocol.contention import (
    HALF_AGE_SECONDS,
    HALF_LIFE_SECONDS,
    REMEMBERED_CELLS_MAX,
    Rivals,
    conflict_pause_seconds,
)

BOB = CellAddress(1, b"bob", b"balance")


def test_the_older_a_transaction_the_shorter_its_pauses() -> None:
    def mean(age: float) -> float:
        chance = random.Random(1)
        return sum(conflict_pause_seconds(chance, 1.0, age) for _ in range(1_000)) / 1_000

    assert mean(0.0) == pytest.approx(0.5, rel=0.1)
    assert mean(HALF_AGE_SECONDS) == pytest.approx(0.25, rel=0.1)
    assert mean(9 * HALF_AGE_SECONDS) == pytest.approx(0.05, rel=0.1)


def test_one_who_paused_pauses_before_the_next_transaction_too() -> None:
    rivals = Rivals()
    rivals.note_loss(BOB, "a function", 0.5, 10.0)
    assert rivals.longest_seconds(BOB, "a function", 10.0) == 0.5
    assert rivals.longest_seconds(BOB, "one that only reads", 10.0) == 0.0
    assert rivals.longest_seconds(BOB._replace(row=b"joe"), "a function", 10.0) == 0.0


def test_the_longest_pause_counts_until_it_is_forgotten() -> None:
    rivals = Rivals()
    rivals.note_loss(BOB, "a function", 0.5, 10.0)
    rivals.note_loss(BOB, "a function", 0.1, 10.0 + HALF_LIFE_SECONDS)
    assert rivals.longest_seconds(BOB, "a function", 10.0 + HALF_LIFE_SECONDS) == 0.25
    rivals.note_loss(BOB, "a function", 0.7, 10.0 + HALF_LIFE_SECONDS)
    assert rivals.longest_seconds(BOB, "a function", 10.0 + HALF_LIFE_SECONDS) == 0.7


def test_rivals_that_have_gone_are_forgotten() -> None:
    rivals = Rivals()
    rivals.note_loss(BOB, "a function", 1.0, 10.0)
    assert rivals.longest_seconds(BOB, "a function", 10.0 + 10 * HALF_LIFE_SECONDS) == 0.0
    assert BOB not in rivals.contended


def test_only_so_many_cells_are_remembered() -> None:
    rivals = Rivals()
    for number in range(REMEMBERED_CELLS_MAX + 5):
        rivals.note_loss(BOB._replace(row=b"%d" % number), "a function", 1.0, 10.0)
    assert len(rivals) == REMEMBERED_CELLS_MAX
    assert BOB._replace(row=b"4") not in rivals.contended
