"""Arrivals at a fixed rate, whatever is answered: a part of make bench-loads.

*Saturation* is the rate of transfers with 1,000 in flight, each begun when another has ended. It is
measured before and after each level, because neighbours on the machine move it; the level is a
share of the measurement before it, and its ratios refer to the mean of both. At a level, transfers
arrive at equal distances, each with a deadline of one second from its arrival, as `RetryPolicy`.
What is answered after the first second and before the last arrival counts, so neither the filling
nor the emptying of a queue does. Answers are *in time*, *late*, or refused as `Overloaded`; the
rest had begun, and ran out of time: in line for a cell (`ConflictError`), waiting for an answer
(`DeadlineExceeded`), or for that to the commit (`OutcomeUnknown`). A latency begins at the arrival,
even if the program was busy then and began later. CPU is that of all processes, and says the same
as the rates where neighbours on the machine take a varying part of it. The generator shares its
process with the client: how far it fell behind is printed, and what it costs is part of what is
measured.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import mean, median

from benchmarks.report import Report
from benchmarks.tablet_traffic import process_clock
from benchmarks.transaction_traffic import Accounts, row_key
from benchmarks.watched_memory import WatchedMemory
from percolator import RetryPolicy, aio
from percolator.errors import Overloaded, PercolatorError

LEVELS = (25, 50, 75, 90, 150, 200)
"""In percent of saturation."""
DEADLINE_SECONDS = 1.0
SATURATION_SECONDS = 2.0
LEVEL_SECONDS = 5.0
UNCOUNTED_SECONDS = 1.0
IN_FLIGHT = 1_000
NORMAL_RATE = 50.0
"""Arrivals per second that load nothing."""
PAUSE_SECONDS = 5.0
"""Between the end of the load and the first look at whether latency is normal again."""
_TICK_SECONDS = 0.001

IN_TIME, LATE, REFUSED = ANSWERS = "in time", "late", Overloaded.__name__
MUST = 0.8

Transfer = Callable[[], Awaitable[None]]


@dataclass
class Level:
    """Outcomes of the arrivals of one level in one run."""

    offered: float
    """Per second."""
    saturation: float = 0.0
    seconds: float = 0.0
    all_in_time: int = 0
    """Also those that are not counted below."""
    answers: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    """Seconds of the transfers that were committed, late ones included."""
    refusals: list[float] = field(default_factory=list)
    """Seconds until `Overloaded` was raised."""
    micros: float = 0.0
    """CPU of all processes for each transfer in time, including what was spent on all others."""
    saturation_micros: float = 0.0
    behind: float = 0.0
    """The most seconds by which an arrival began too late."""

    def rate(self, answer: str) -> float:
        return self.answers[answer] / self.seconds


class Overload:
    """The levels of all runs."""

    def __init__(self) -> None:
        self.levels: defaultdict[int, list[Level]] = defaultdict(list)
        self.normal: list[float] = []
        self.afterwards: list[float] = []
        """Latencies before the levels, and some time after the highest."""
        self.memory: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        """MiB of each process before the levels of a run, and at most."""

    async def measure(
        self, address: str, accounts: Accounts, pids: dict[str, int], servers: dict[str, int]
    ) -> None:
        """One run. `pids`: the processes of the cluster, whose CPU counts. `servers`: those whose
        memory is watched, besides this one's."""
        clocks = [time.CLOCK_PROCESS_CPUTIME_ID, *map(process_clock, pids.values())]
        chance = random.Random(1)
        balance = accounts.balance
        policy = RetryPolicy(deadline_seconds=DEADLINE_SECONDS)

        async def transfer(tx: aio.Transaction, source: str, target: str) -> None:
            tx.set(source, balance, await tx.get(source, balance, default=0) - 1)
            tx.set(target, balance, await tx.get(target, balance, default=0) + 1)

        def pair() -> list[str]:
            return [row_key(number) for number in chance.sample(range(accounts.rows), 2)]

        async with aio.connect(address) as db:

            async def patient() -> None:
                await db.run(transfer, *pair())

            async def saturation() -> tuple[float, float]:
                """Transfers per second with 1,000 in flight, and CPU of each."""
                before = _cpu_micros(clocks)
                ended = max(await transfers_in_flight(patient), 1)  # 0 if the machine stood still
                return ended / SATURATION_SECONDS, (_cpu_micros(clocks) - before) / ended

            async def impatient() -> None:
                await db.run(transfer, *pair(), retry=policy)

            await saturation()  # not measured: connections and the tablet map
            with WatchedMemory({"the client": os.getpid()} | servers) as memory:
                self.normal += (await arrivals(impatient, NORMAL_RATE)).latencies
                before = await saturation()
                for percent in LEVELS:
                    cpu = _cpu_micros(clocks)
                    level = await arrivals(impatient, before[0] * percent / 100)
                    level.micros = (_cpu_micros(clocks) - cpu) / max(level.all_in_time, 1)
                    if percent == LEVELS[-1]:
                        await asyncio.sleep(PAUSE_SECONDS)
                        self.afterwards += (await arrivals(impatient, NORMAL_RATE)).latencies
                    after = await saturation()
                    level.saturation, level.saturation_micros = map(
                        mean, zip(before, after, strict=True)
                    )
                    before = after
                    self.levels[percent].append(level)
            for name, first in memory.first.items():
                self.memory[name].append((first, memory.most[name]))


def _cpu_micros(clocks: list[int]) -> float:
    return sum(map(time.clock_gettime, clocks)) * 1e6


async def transfers_in_flight(transfer: Transfer) -> int:
    """Runs 1,000 at a time; returns how many have ended in time."""
    until = time.perf_counter() + SATURATION_SECONDS
    ended = 0

    async def work() -> None:
        nonlocal ended
        while time.perf_counter() < until:
            await transfer()
            ended += time.perf_counter() < until

    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    return ended


async def arrivals(transfer: Transfer, rate: float) -> Level:
    """Transfers that arrive at this rate."""
    level = Level(rate, seconds=LEVEL_SECONDS - UNCOUNTED_SECONDS)
    began = time.perf_counter()
    counted_from, counted_until = began + UNCOUNTED_SECONDS, began + LEVEL_SECONDS
    total = round(rate * LEVEL_SECONDS)
    tasks: set[asyncio.Task[None]] = set()

    async def one(arrived: float) -> None:
        level.behind = max(level.behind, time.perf_counter() - arrived)
        answer = IN_TIME
        try:
            await transfer()
        except PercolatorError as error:
            answer = type(error).__name__
        now = time.perf_counter()
        level.all_in_time += answer == IN_TIME and now <= arrived + DEADLINE_SECONDS
        if answer == IN_TIME and now > arrived + DEADLINE_SECONDS:
            answer = LATE
        if counted_from <= now < counted_until:
            level.answers[answer] += 1
            if answer in (IN_TIME, LATE):
                level.latencies.append(now - arrived)
            elif answer == REFUSED:
                level.refusals.append(now - arrived)

    begun = 0
    while begun < total:
        due = min(int((time.perf_counter() - began) * rate) + 1, total)
        for number in range(begun, due):
            task = asyncio.create_task(one(began + number / rate))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        begun = due
        await asyncio.sleep(_TICK_SECONDS)
    while tasks:
        await asyncio.wait(tasks)
    return level


def fill_in(report: Report, overload: Overload) -> None:
    """Both sides of each ratio, and how the arrivals of each level fared."""
    for percent, levels in overload.levels.items():
        name = f"transfers arriving at {percent} % of saturation"
        report.add(name, median(level.offered for level in levels), "/s")
        report.add("    saturation", median(level.saturation for level in levels), "/s")
        for answer in ANSWERS:
            report.add(f"    {answer}", median(level.rate(answer) for level in levels), "/s")
        others = sum((level.answers for level in levels), Counter[str]())
        for answer in sorted(others.keys() - ANSWERS):
            report.add(f"    {answer}, in all runs", others[answer], "")
        _percentiles(report, f"latency, {name}", [s for level in levels for s in level.latencies])
        refusals = [s for level in levels for s in level.refusals]
        if refusals:
            report.add("    until a refusal, median", median(refusals) * 1e3, "ms")
        behind = max(level.behind for level in levels)
        report.add("    generator behind, at most", behind * 1e3, "ms")
        if percent > 100:
            ratio = median(level.rate(IN_TIME) / level.saturation for level in levels)
            must = MUST if percent == LEVELS[-1] else None
            report.add(f"rate: {name}, in time / saturation", ratio, "×", must=must, at_least=True)
            micros = median(level.micros for level in levels)
            report.add(f"CPU, {name}, for each in time", micros, "µs")
            report.add("    at saturation", median(one.saturation_micros for one in levels), "µs")
            ratio = median(level.micros / level.saturation_micros for level in levels)
            report.add(f"CPU: {name}, for each in time / saturation", ratio, "×")
    load = f"latency at {NORMAL_RATE:.0f} transfers/s"
    _percentiles(report, f"{load}, before the levels", overload.normal)
    _percentiles(report, f"{load}, {PAUSE_SECONDS:.0f} s after {LEVELS[-1]} %", overload.afterwards)
    for name, sizes in overload.memory.items():
        report.add(f"memory of {name} before the levels", median(size for size, _ in sizes), "MiB")
        report.add("    at most", max(size for _, size in sizes), "MiB")


def _percentiles(report: Report, name: str, seconds: list[float]) -> None:
    if not seconds:
        return
    ordered = sorted(seconds)
    report.add(f"{name}, median", median(ordered) * 1e3, "ms")
    for title, share in (("90 of 100", 0.9), ("99 of 100", 0.99), ("999 of 1,000", 0.999)):
        report.add(f"    {title}", ordered[int(len(ordered) * share)] * 1e3, "ms")
