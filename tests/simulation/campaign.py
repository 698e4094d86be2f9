"""Many seeds, in several processes, and what they add up to."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.simulation.run import Verdict, simulate
from tests.simulation.scenario import scenario_of


class Totals:
    """Of all seeds so far."""

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
    if jobs == 1 or len(seeds) == 1:
        yield from map(simulated, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            yield from pool.map(simulated, seeds, chunksize=min(8, -(-len(seeds) // jobs)))
        finally:
            pool.shutdown(cancel_futures=True)


def simulated(seed: int) -> tuple[Verdict, float]:
    """A verdict, and the CPU time it took. Without the history, which is large."""
    began = time.process_time()
    verdict = simulate(scenario_of(seed))
    verdict.history.transactions.clear()
    return verdict, time.process_time() - began
