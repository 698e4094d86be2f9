"""The cost of a slice of transactions: wall time, and CPU time by kind of process.

The CPU time of a process includes all its threads. All processes of the cluster count, even those
that a slice never calls, because running the cluster means paying for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from benchmarks.tablet_traffic import process_clock
from percolator.services.local.cluster import LocalCluster

CLIENT = "client"
TABLET_SERVERS = "tablet servers"
ORACLE = "oracle"
OTHERS = "master and lock service"
KINDS = (CLIENT, TABLET_SERVERS, ORACLE, OTHERS)


@dataclass
class Cost:
    """The cost of one slice."""

    operations: int = 0
    seconds: float = 0.0
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    """CPU by kind of process."""

    @property
    def rate(self) -> float:
        """Operations per second of wall time."""
        return self.operations / self.seconds

    @property
    def cpu_micros(self) -> float:
        """CPU of all processes per operation."""
        return sum(self.cpu_seconds.values()) / self.operations * 1e6

    def micros_of(self, kind: str) -> float:
        return self.cpu_seconds[kind] / self.operations * 1e6


class Costs:
    """The costs of the same slice in several runs."""

    def __init__(self) -> None:
        self._costs: list[Cost] = []

    def add(self, cost: Cost) -> None:
        self._costs.append(cost)

    @property
    def rate(self) -> float:
        return median(cost.rate for cost in self._costs)

    @property
    def cpu_micros(self) -> float:
        return median(cost.cpu_micros for cost in self._costs)

    def micros_of(self, kind: str) -> float:
        return median(cost.micros_of(kind) for cost in self._costs)

    @property
    def cores_used(self) -> float:
        return median(sum(cost.cpu_seconds.values()) / cost.seconds for cost in self._costs)


class Meter:
    """Reads the CPU clocks of the cluster's processes and of this process."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._clocks: dict[str, list[int]] = {kind: [] for kind in KINDS}
        self._clocks[CLIENT].append(time.CLOCK_PROCESS_CPUTIME_ID)
        for name, process in cluster.processes.items():
            self._clocks[_kind(name)].append(process_clock(process.pid))

    @contextmanager
    def measured(self, operations: int) -> Iterator[Cost]:
        """Fills in the cost when the block ends."""
        cost = Cost(operations)
        cpu, began = self._read(), time.perf_counter()
        yield cost
        cost.seconds = time.perf_counter() - began
        cost.cpu_seconds = {kind: now - cpu[kind] for kind, now in self._read().items()}

    def _read(self) -> dict[str, float]:
        return {
            kind: sum(time.clock_gettime(clock) for clock in clocks)
            for kind, clocks in self._clocks.items()
        }


def _kind(name: str) -> str:
    if name.startswith("tabletserver"):
        return TABLET_SERVERS
    return ORACLE if name == "oracle" else OTHERS
