"""How clients of a row store scale: a part of `make bench-bigtable`.

Each client has a store in its own process, so that they share nothing but the oracle. What counts
is the CPU that they use: with two cores, four clients and an oracle take turns, so throughput alone
would say how many cores there are. Nor is a second of CPU always the same: it does less while a
neighbour works on the same core. So each client does a fixed piece of work between its transfers,
and the CPU of one is divided by that of the other.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import defaultdict
from statistics import mean, median
from typing import NamedTuple

from benchmarks.report import Report
from benchmarks.row_traffic import BANK, SECONDS, connected, transfers
from percolator import tune_garbage_collector
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.bigtable.tables import create_table
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from services.local.cluster import LocalCluster

SCALING_MUST = 0.9

_CLIENTS = (1, 2, 4)
_TRANSFERS = 900
_SLICE = 100
_OBJECTS = 100_000
_ROUNDS = 3


async def client(master: str, epoch: int) -> None:
    """One of several clients, with a store of its own: prints what a `Pace` has."""
    tune_garbage_collector()
    place = Place("instant:1", "bench-project", "bench-instance")
    network = InProcessNetwork({place.address: BigtableInMemory()})
    db = await connected(master, BigtableStore(network, place), epoch)
    info = await db.internal.engine.table(BANK, db.internal.engine.now() + SECONDS)
    await create_table(network, place, info.table_id, SECONDS)
    chance = random.Random()
    await transfers(db, 100, chance)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    began, spent, spun = time.perf_counter(), 0.0, 0.0
    for _ in range(0, _TRANSFERS, _SLICE):
        cpu = time.process_time()
        await transfers(db, _SLICE, chance)
        done = time.process_time()
        _fixed_work()
        spent, spun = spent + done - cpu, spun + time.process_time() - done
    print(_TRANSFERS / (time.perf_counter() - began), _TRANSFERS / spent, spent / spun)
    await db.close()
    await network.close()


def _fixed_work() -> dict[int, tuple[int, str]]:
    """Creates objects, as clients do: more than a cache holds."""
    return {number: (number, str(number)) for number in range(_OBJECTS)}


class Pace(NamedTuple):
    """How fast a client was."""

    per_second: float
    per_cpu_second: float
    cost: float
    """The CPU of its transfers, by that of a fixed piece of work in between. A core is slower when
    its neighbours work, or when more processes than cores take turns: both feel that alike."""


def paces(cluster: LocalCluster, epoch: int, number: int) -> list[Pace]:
    """Those of so many clients that work at the same time."""
    command = [sys.executable, "-m", "benchmarks.row_scaling", cluster.address, str(epoch)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(number)
    ]
    for process in started:
        if process.stdout is None or process.stdout.readline() != "ready\n":
            raise RuntimeError("a client did not start")
    for process in started:  # all of them at the same time
        if process.stdin is not None:
            process.stdin.write("go\n")
            process.stdin.flush()
    return [Pace(*map(float, process.communicate()[0].split())) for process in started]


def scaling(cluster: LocalCluster, epoch: int, report: Report) -> None:
    """Transfers of 1, 2 and 4 client processes, in turns."""
    rates: defaultdict[int, list[float]] = defaultdict(list)
    per_cpu: defaultdict[int, list[float]] = defaultdict(list)
    costs_of: defaultdict[int, list[float]] = defaultdict(list)
    for _ in range(_ROUNDS):
        for number in _CLIENTS:
            found = paces(cluster, epoch, number)
            rates[number].append(sum(one.per_second for one in found))
            per_cpu[number].append(mean(one.per_cpu_second for one in found))
            costs_of[number].append(mean(one.cost for one in found))
    for number in _CLIENTS:
        report.add(f"{number} clients: transfers", median(rates[number]), "1/s")
        report.add(f"{number} clients: transfers", median(per_cpu[number]), "1/s of client CPU")
    for number in _CLIENTS[1:]:
        report.add(
            f"{number} clients / 1, per core that they use",
            median(one / many for one, many in zip(costs_of[1], costs_of[number], strict=True)),
            "×",
            must=SCALING_MUST,
            at_least=True,
        )


if __name__ == "__main__":
    master, epoch_milliseconds = sys.argv[1:]
    asyncio.run(client(master, int(epoch_milliseconds)))
