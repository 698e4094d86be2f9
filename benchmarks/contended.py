"""The programs of the contention benchmark: increments of few cells, and the observer of one."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from multiprocessing import get_context

import percolator
from percolator import ConflictError, Limits, RetryPolicy, Table, aio, codecs, observes
from percolator.wire.backoff import pause_seconds

fought = Table("fought")
count = fought.column("count", codecs.integer)

documents = Table("documents")
contents = documents.column("contents", codecs.integer)
total = documents.column("total", codecs.integer)
TOTAL_ROW = "~total"

graph = Table("graph")
is_open = graph.column("open", codecs.boolean)
weight = graph.column("weight", codecs.integer)
HUB = "hub"

_POLICY = RetryPolicy(attempts_max=1_000_000, deadline_seconds=600.0)
_QUIET = Limits(slow_transaction_seconds=600.0)
_PAUSES_SECONDS = (0.002, 1.0)


@dataclass
class Waits:
    """How long transactions took, from their first attempt to their commit."""

    seconds: list[float] = field(default_factory=list)
    attempts: int = 0

    def add(self, other: Waits) -> None:
        self.seconds += other.seconds
        self.attempts += other.attempts


def increments_by_threads(
    address: str, threads: int, increments: int, cells: int, *, lines: bool
) -> Waits:
    """Threads of one process increment cells picked at random.

    Without `lines`, each thread tries by itself, and pauses longer after each conflict.
    """
    waits = Waits()
    with percolator.connect(address, retry=_POLICY, limits=_QUIET) as db:

        def increment(tx: percolator.Transaction, row: str) -> None:
            waits.attempts += 1
            tx.set(row, count, tx.get(row, count, default=0) + 1)

        def by_itself(row: str) -> None:
            conflicts = 0
            while True:
                try:
                    with db.transaction() as tx:
                        return increment(tx, row)
                except ConflictError:
                    # The pauses of db.run before losers took turns: the other side of the ratio.
                    time.sleep(pause_seconds(chance, *_PAUSES_SECONDS, doublings=conflicts))
                    conflicts += 1

        def work(rows: list[str]) -> None:
            for row in rows:
                began = time.perf_counter()
                if lines:
                    db.run(increment, row)
                else:
                    by_itself(row)
                waits.seconds.append(time.perf_counter() - began)

        chance = random.Random(1)
        rows = [str(chance.randrange(cells)) for _ in range(increments)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, [rows[first::threads] for first in range(threads)]))
    return waits


def increments_by_clients(
    address: str, processes: int, connections: int, tasks: int, cells: int, seconds: float
) -> Waits:
    """Clients that increment cells picked at random, one transaction after another, for a time.

    Each of the processes has so many connections, and each connection so many tasks. Transactions
    that are under way at the end are waited for.
    """
    work = partial(_one_process, address, connections, tasks, cells, seconds)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(work, range(processes)))
    return Waits(
        list(chain.from_iterable(one.seconds for one in found)),
        sum(one.attempts for one in found),
    )


def _one_process(
    address: str, connections: int, tasks: int, cells: int, seconds: float, number: int
) -> Waits:
    return asyncio.run(_connections(address, connections, tasks, cells, seconds, number))


async def _connections(
    address: str, connections: int, tasks: int, cells: int, seconds: float, number: int
) -> Waits:
    waits = Waits()
    chance = random.Random(number)

    async def increment(tx: aio.Transaction, row: str) -> None:
        waits.attempts += 1
        tx.set(row, count, await tx.get(row, count, default=0) + 1)

    async def client(run: Callable[..., Awaitable[None]], until: float) -> None:
        while (began := time.perf_counter()) < until:
            await run(increment, str(chance.randrange(cells)))
            waits.seconds.append(time.perf_counter() - began)

    opened = [await aio.connect(address, retry=_POLICY, limits=_QUIET) for _ in range(connections)]
    until = time.perf_counter() + seconds
    await asyncio.gather(*(client(db.run, until) for db in opened for _ in range(tasks)))
    for db in opened:
        await db.close()
    return waits


def edges_at_a_hub(address: str, adders: int, *, shared: bool) -> int:
    """Adds edges at one node at the same time, each by a transaction that depends on the node.
    Returns how often they ran."""
    runs = 0

    async def add(tx: aio.Transaction, number: int) -> None:
        nonlocal runs
        runs += 1
        tx.lock(HUB, is_open, shared=shared)
        if not await tx.get(HUB, is_open):
            raise RuntimeError("the node is closed")
        tx.set(f"{HUB}-{number}", weight, 1)

    async def add_all() -> None:
        async with aio.connect(address, retry=_POLICY, limits=_QUIET) as db:
            await asyncio.gather(*(db.run(add, number) for number in range(adders)))

    asyncio.run(add_all())
    return runs


async def create_graph(db: aio.Database) -> None:
    await db.create_table(graph)
    await db.set_many([(HUB, {is_open: True})])


@observes(contents, backfill=False)
async def add_up(tx: aio.Transaction, row: str) -> None:
    """Counts every document in one cell."""
    tx.set(TOTAL_ROW, total, await tx.get(TOTAL_ROW, total, default=0) + 1)


observers = [add_up]
