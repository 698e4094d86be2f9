"""Cost of a simulated seed: `python -m benchmarks.simulation [SEEDS]`.

CPU time of one process, for everything a seed includes: faults, final reads, checker and audit.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from dataclasses import replace

from benchmarks.report import Report
from percolator.errors import InvariantViolation
from tests.simulation.campaign import timed
from tests.simulation.network import PERFECT
from tests.simulation.scenario import Scenario, scenario_of
from tests.simulation.workloads.catalogue import WORKLOADS

SEEDS = 40
FIRST_SEED = 5_000
CROWD = "crowd"


def _cost(scenarios: Iterable[Scenario]) -> tuple[float, float, float]:
    """Returns seeds, transactions and messages per second."""
    seeds = transactions = messages = 0
    seconds = 0.0
    gc.collect()
    for scenario in scenarios:
        verdict, took = timed(scenario)
        seconds += took
        if verdict.failed:
            raise InvariantViolation(f"{scenario} failed: {verdict.problems}")
        seeds += 1
        transactions += verdict.transactions
        messages += verdict.messages
    return seeds / seconds, transactions / seconds, messages / seconds


def main() -> int:
    """Measures and reports."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS
    shown = Report("simulation")
    names = [name for name in sorted(WORKLOADS) if name != CROWD]
    gc.disable()  # as in the processes of a campaign, which are short-lived
    timed(scenario_of(0))
    seeds = [
        scenario_of(FIRST_SEED + number, workload=names[number % len(names)])
        for number in range(count)
    ]
    rate, transactions, messages = _cost(seeds)
    shown.add("seeds of 200 transactions, with faults", rate, "/s")
    shown.add("    transactions in them", transactions, "/s")
    shown.add("    messages in them", messages, "/s")
    calm = [replace(seed, disruptions=(), network=PERFECT) for seed in seeds]
    shown.add("seeds of 200 transactions, without faults", _cost(calm)[0], "/s")
    crowds = [scenario_of(FIRST_SEED + n, workload=CROWD) for n in range(max(count // 4, 1))]
    _, transactions, _ = _cost(crowds)
    shown.add("transactions of a crowd, with faults", transactions, "/s")
    return shown.finish()


if __name__ == "__main__":
    raise SystemExit(main())
