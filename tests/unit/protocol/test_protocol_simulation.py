"""Snapshot isolation and atomicity under every fault of a network, over random schedules."""

from __future__ import annotations

import pytest

from .protocol_run import run
from .protocol_world import IMPATIENT, NO_FAULTS, SLOW, Faults

SEEDS_PER_TEST = 15


@pytest.mark.parametrize("one_round_share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("first_seed", range(0, 60, SEEDS_PER_TEST))
def test_transactions_are_atomic_and_isolated_whatever_the_network_does(
    first_seed: int, one_round_share: float
) -> None:
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        ended = run(seed, one_round_share=one_round_share)
        assert ended.violations == [], f"seed {seed}"


def test_without_faults_most_transactions_commit() -> None:
    runs = [run(seed, NO_FAULTS) for seed in range(10)]
    assert [violation for one in runs for violation in one.violations] == []
    committed = sum(one.committed for one in runs)
    assert committed > sum(one.aborted for one in runs)


def test_owners_that_are_always_declared_dead_only_abort() -> None:
    """Liveness is a hint: believing a wrong one costs work, never correctness."""
    for seed in range(1_000, 1_010):
        assert run(seed, Faults(wrongly_dead=1.0)).violations == [], f"seed {seed}"


@pytest.mark.parametrize("one_round_share", [0.0, 0.7])
@pytest.mark.parametrize("first_seed", range(0, 45, SEEDS_PER_TEST))
def test_all_who_ask_for_an_outcome_get_the_same_true_answer(
    first_seed: int, one_round_share: float
) -> None:
    """A commit is settled in the background and by two callers at the same time."""
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        ended = run(seed, IMPATIENT, second_committers=0, one_round_share=one_round_share)
        assert ended.violations == [], f"seed {seed}"


def test_no_live_owner_is_presumed_dead_while_its_heartbeats_arrive() -> None:
    """This holds however slow its commit is, and however often its prewrites are repeated."""
    for seed in range(2_000, 2_020):
        ended = run(seed, SLOW, second_committers=0)
        assert (ended.violations, ended.buried_alive) == ([], 0), f"seed {seed}"


def test_one_seed_always_takes_the_same_course() -> None:
    assert run(7) == run(7)
