"""How clients of a row store scale: a part of `make bench-bigtable`.

Each client has a store in its own process, which answers at once, so that they share nothing but
the oracle. With two cores, four clients and an oracle take turns, so throughput alone would say how
many cores there are. CPU alone would say how much of the cores' caches is left to a client: each
loses its part whenever another one has its turn. So between these transfers, each client makes
others with an oracle of its own, and the CPU of the former is divided by that of the latter.
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

from benchmarks.hollow_store import HollowNetwork
from benchmarks.report import Report
from benchmarks.row_traffic import BANK, connected, transfers
from percolator import aio, tune_garbage_collector
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.services.local.cluster import LocalCluster
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.wire.channels import GrpcNetwork
from percolator.world import MachineClock, Network

SCALING_MUST = 0.9

_CLIENTS = (1, 2, 4)
_TRANSFERS = 900
_SLICE = 100
_ROUNDS = 3


async def client(master: str, epoch: int) -> None:
    """One of several clients, with a store of its own: prints what a `Pace` has."""
    tune_garbage_collector()
    sharing = await _connected(GrpcNetwork(), master, epoch)
    alone = await _connected(
        InProcessNetwork({ADDRESS: ClusterInMemory(MachineClock())}), ADDRESS, epoch
    )
    await alone.create_table(BANK)
    chance = random.Random()
    for db in (sharing, alone):
        await transfers(db, _SLICE, chance)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    began, spent, spent_alone = time.perf_counter(), 0.0, 0.0
    for _ in range(0, _TRANSFERS, _SLICE):
        cpu = time.process_time()
        await transfers(sharing, _SLICE, chance)
        done = time.process_time()
        await transfers(alone, _SLICE, chance)
        spent, spent_alone = spent + done - cpu, spent_alone + time.process_time() - done
    rate = 2 * _TRANSFERS / (time.perf_counter() - began)
    print(rate, _TRANSFERS / spent, spent / spent_alone)
    await sharing.close()
    await alone.close()


async def _connected(network: Network, master: str, epoch: int) -> aio.Database:
    store = BigtableStore(HollowNetwork(), Place("instant:1", "bench-project", "bench-instance"))
    return await connected(master, store, epoch, network)


class Pace(NamedTuple):
    """How fast a client was."""

    per_second: float
    per_cpu_second: float
    cost: float
    """The CPU of its transfers, by that of transfers with an oracle of its own. A core is slower
    when its neighbours work, or when more processes than cores take turns: both feel that alike."""


def paces(cluster: LocalCluster, epoch: int, number: int) -> list[Pace]:
    """Figures of so many clients that work at the same time."""
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
