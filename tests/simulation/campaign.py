"""Runs many seeds in several processes, and adds up the results."""

from __future__ import annotations

import gc
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.simulation import bucket, cluster
from tests.simulation.cluster import RESTRICTED
from tests.simulation.disks import DISK_FULL, FSYNC_FAILED, HELD_UP, TORN
from tests.simulation.disruptions import CLIENT_STEPS, FAR_AHEAD, FAR_BEHIND, far_off
from tests.simulation.network import PERFECT, Fault, Link, Wire
from tests.simulation.programs import MASTER, ORACLE, STANDBY_ORACLE
from tests.simulation.rows import (
    COLLECTED_FROM_ROWS,
    MASTERS_REPLACED,
    ON_ROWS,
    ORACLES_REPLACED,
    WHOLLY_ON_ROWS,
)
from tests.simulation.run import IN_ONE_ROUND, LOCK_HELD, Verdict, simulate
from tests.simulation.scenario import Kind, Scenario, harsh, needs_master, scenario_of
from tests.simulation.sessions import JOINED
from tests.simulation.workloads.drops import DROP_REPEATED, DROPPED, RENEWED
from tests.simulation.workloads.jobs import LOST_TO_ANOTHER

_SEEDS_PER_PROCESS = 32
"""Each leaves 5 MB that only Python's collector would find. The end of a process is cheaper."""


class Totals:
    """The totals of all seeds so far."""

    def __init__(self) -> None:
        self.seeds = self.transactions = self.committed = self.messages = 0
        self.virtual_seconds = 0.0
        self.cpu_seconds = 0.0
        self.occurred: Counter[str] = Counter()
        self.failed: list[int] = []

    def add(self, verdict: Verdict, cpu_seconds: float) -> None:
        self.seeds += 1
        self.transactions += verdict.transactions
        self.committed += verdict.committed
        self.messages += verdict.messages
        self.virtual_seconds += verdict.virtual_seconds
        self.cpu_seconds += cpu_seconds
        self.occurred += verdict.occurred
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


# What has to occur now and then: a run of many seeds proves less if something never occurred.

SEEDS_FOR_EVERYTHING = 200


EXPECTED = (
    *(kind.value for kind in Kind),
    *(fault.value for fault in Fault),
    DISK_FULL,
    FSYNC_FAILED,
    HELD_UP,
    TORN,
    IN_ONE_ROUND,
    LOCK_HELD,
    JOINED,
    RENEWED,
    LOST_TO_ANOTHER,
    DROPPED,
    DROP_REPEATED,
    ON_ROWS,
    RESTRICTED,
    WHOLLY_ON_ROWS,
    MASTERS_REPLACED,
    ORACLES_REPLACED,
    COLLECTED_FROM_ROWS,
    bucket.IN_A_BUCKET,
    bucket.MASTERS_REPLACED,
    bucket.ORACLES_REPLACED,
    *map(bucket.misled, bucket.FAULTS),
    bucket.TABLETS_IN_A_BUCKET,
    bucket.CACHE_FOUND,
    bucket.CHECKPOINTS,
    *(f"client killed at: {step}" for step in CLIENT_STEPS),
    FAR_AHEAD,
    FAR_BEHIND,
    *map(far_off, (ORACLE, STANDBY_ORACLE, MASTER, "tablets-0:7003")),
)


def missing(occurred: Counter[str], seeds: int) -> list[str]:
    """Faults that never occurred in enough seeds to expect them."""
    if seeds < SEEDS_FOR_EVERYTHING:
        return []
    return [name for name in EXPECTED if not occurred[name]]


# Makes a failing scenario small: fewer disruptions, a better network, fewer sessions, less work.
#
# Everything that can be left out while the run still fails is left out, one thing after another,
# until nothing more can. The result may fail in a different way, but it fails.

RUNS_MAX = 120

Fails = Callable[[Scenario], bool]


def minimised(scenario: Scenario, fails: Fails, *, runs_max: int = RUNS_MAX) -> Scenario:
    """The smallest scenario that was found within so many runs; `scenario` itself fails."""
    runs = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(scenario):
            if runs >= runs_max:
                return scenario
            runs += 1
            if fails(candidate):
                scenario, smaller = candidate, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios to try, starting with the smallest."""
    if scenario.disruptions:
        yield replace(scenario, disruptions=())
    if scenario.network is not PERFECT:
        yield replace(scenario, network=PERFECT)
    if scenario.roles_in_bucket:
        yield replace(scenario, roles_in_bucket=False)
    if scenario.tablets_in_bucket:
        yield replace(scenario, tablets_in_bucket=False)
    if scenario.bucket_badness:
        yield replace(scenario, bucket_badness=0.0)
    if scenario.with_master and not needs_master(scenario):
        yield replace(scenario, with_master=False)
    disruptions = scenario.disruptions
    middle = len(disruptions) // 2
    if middle > 1:
        yield replace(scenario, disruptions=disruptions[:middle])
        yield replace(scenario, disruptions=disruptions[middle:])
    for place in range(len(disruptions)):
        yield replace(scenario, disruptions=disruptions[:place] + disruptions[place + 1 :])
    for name in ("slow", "duplicate", "drop_request", "drop_reply", "break_connection"):
        if getattr(scenario.network, name):
            yield replace(scenario, network=replace(scenario.network, **{name: 0.0}))
    if scenario.transactions_per_session > 1:
        yield replace(scenario, transactions=scenario.transactions // 2)
    if scenario.burst_seconds:
        yield replace(scenario, burst_seconds=0.0)
    yield from _fewer_sessions(scenario)


def _fewer_sessions(scenario: Scenario) -> Iterator[Scenario]:
    """Half of them, and then all but one."""
    sessions = scenario.sessions
    middle = len(sessions) // 2
    parts = [sessions[:middle], sessions[middle:]] if middle > 1 else []
    if len(sessions) > 1:
        parts += [(session,) for session in sessions]
    for without in parts:
        yield replace(scenario, without_sessions=scenario.without_sessions | set(without))


# `python -m tests.simulation.campaign DIRECTORY`: writes down the courses of a few harsh scenarios.
#
# There is a file for each scenario, and a line for each message: the time, the sender, the
# receiver, the content, and the fault. If two processes write different files, something depends
# on more than the seed.

_TRANSACTIONS = 60
_OBJECTS_PER_HASH_SEED = 20_011


def _scenario(
    seed: int, *kinds: Kind, workload: str, seconds_max: float, with_master: bool = True
) -> Scenario:
    found = harsh(seed, kinds, workload=workload, seconds_max=seconds_max)
    return replace(found, with_master=with_master, transactions=_TRANSACTIONS)


SCENARIOS = {
    "killed": _scenario(1, Kind.PAUSE, Kind.CRASH, workload="chains", seconds_max=5.0),
    "cut off": _scenario(
        6, Kind.PAUSE, Kind.ONE_WAY, workload="chains", seconds_max=15.0, with_master=False
    ),
    "taken over": _scenario(0, Kind.TAKEOVER, Kind.PAUSE, workload="bank", seconds_max=5.0),
    "everything": _scenario(3, *Kind, workload="loads", seconds_max=3.0),
}
"""Mostly with pauses: a late process gives up much at once, and the order shows in what follows."""


class _WatchedWire(Wire):
    """A wire that writes down everything that it carries."""

    lines: list[str]

    def fate(self, link: Link, path: str, payload: bytes, *, is_reply: bool) -> Fault | None:
        fault = super().fate(link, path, payload, is_reply=is_reply)
        content = f"{len(payload)} bytes {zlib.crc32(payload):08x}"
        self.lines.append(f"{self.loop.now!r} {link} {path} {is_reply=} {content}: {fault}")
        return fault

    def carry(
        self,
        link: Link,
        arrive: Callable[..., None],
        *arguments: object,
        late: bool = False,
        not_before: float = 0.0,
    ) -> float:
        arrival = super().carry(link, arrive, *arguments, late=late, not_before=not_before)
        self.lines.append(f"{self.loop.now!r} {link} {arrive.__name__} at {arrival!r}")
        return arrival


def course(scenario: Scenario) -> list[str]:
    """All messages of a run, and the verdict."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_WatchedWire, "lines", lines, raising=False)
        patch.setattr(cluster, "Wire", _WatchedWire)
        verdict = simulate(scenario)
    return [*lines, *map(repr, verdict.history), *verdict.problems]


def main() -> None:
    directory = Path(sys.argv[1])
    # Otherwise two processes would have the same memory layout, and the same order of their sets.
    held = [object() for _ in range(int(os.environ["PYTHONHASHSEED"]) * _OBJECTS_PER_HASH_SEED)]
    del held[::3]
    for name, scenario in SCENARIOS.items():
        directory.joinpath(name).write_text("\n".join(course(scenario)))


if __name__ == "__main__":
    main()
