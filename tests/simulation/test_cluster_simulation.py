"""A few seeds of the whole cluster. `make simulate` runs as many as there is time for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.minimise import minimised
from tests.simulation.network import PERFECT
from tests.simulation.run import simulate
from tests.simulation.scenario import scenario_of
from tests.simulation.workloads.catalogue import WORKLOADS

# It only ends what hangs: virtual time takes as long as the machine needs for it.
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_nothing_is_wrong_among_faults(workload: str) -> None:
    seed = sorted(WORKLOADS).index(workload) + 700
    verdict = simulate(scenario_of(seed, workload=workload, transactions=80))
    assert verdict.problems == [], f"{verdict.scenario}"
    assert verdict.committed > 0


def test_without_faults_all_is_done_quickly_and_nothing_is_given_up() -> None:
    calm = replace(scenario_of(1, workload="sets"), strikes=(), network=PERFECT)
    verdict = simulate(calm)
    assert verdict.problems == []
    assert verdict.transactions > calm.transactions
    assert verdict.virtual_seconds < 5


def test_a_seed_takes_the_same_course_again() -> None:
    first, again = (simulate(scenario_of(5, transactions=60)) for _ in range(2))
    assert first.struck == again.struck
    assert first.messages == again.messages
    assert list(map(repr, first.history)) == list(map(repr, again.history))


def test_a_failing_scenario_is_made_small() -> None:
    """Everything that does not matter for the failure is left out."""
    scenario = next(found for found in map(scenario_of, range(100)) if len(found.strikes) >= 5)
    needed = scenario.strikes[3]
    small = minimised(scenario, lambda one: needed in one.strikes and 2 in one.sessions)
    assert small.strikes == (needed,)
    assert small.sessions == (2,)
    assert small.network is PERFECT
    assert small.transactions_per_session == 1
