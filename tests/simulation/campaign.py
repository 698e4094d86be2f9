"""Runs many seeds in several processes, and adds up the results."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.simulation.run import Verdict, simulate
from tests.simulation.scenario import Scenario, scenario_of

_SEEDS_PER_PROCESS = 32
"""Each leaves 5 MB that only Python's collector would find. The end of a process is cheaper."""


class Totals:
    """The totals of all seeds so far."""

    def __init__(self) -> None:
        self.seeds = self.transactions = self.committed = self.messages = 0
        self.virtual_seconds = 0.0
        self.cpu_seconds = 0.0
        self.struck: Counter[str] = Counter()
        self.failed: list[int] = []

    def add(self, verdict: Verdict, cpu_seconds: float) -> None:
        self.seeds += 1
        self.transactions += verdict.transactions
        self.committed += verdict.committed
        self.messages += verdict.messages
        self.virtual_seconds += verdict.virtual_seconds
        self.cpu_seconds += cpu_seconds
        self.struck += verdict.struck
        if verdict.failed:
            self.failed.append(verdict.scenario.seed)


def results(seeds: range, jobs: int) -> Iterator[tuple[Verdict, float]]:
    if len(seeds) == 1:
        yield simulated(seeds[0])
        return
    # The modules are imported once, by the process from which the others are forked.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    at_once = jobs * _SEEDS_PER_PROCESS
    for first in range(0, len(seeds), at_once):
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=gc.disable) as pool:
            try:
                yield from pool.map(simulated, seeds[first : first + at_once])
            finally:
                pool.shutdown(cancel_futures=True)


def simulated(seed: int) -> tuple[Verdict, float]:
    """A verdict without its history, which is large, and the CPU time it took."""
    verdict, seconds = timed(scenario_of(seed))
    verdict.history.transactions.clear()
    return verdict, seconds


def timed(scenario: Scenario) -> tuple[Verdict, float]:
    """A verdict, and the CPU time it took."""
    began = time.process_time()
    return simulate(scenario), time.process_time() - began
