"""All workloads, by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from percolator.aio import Database
from tests.simulation.sessions import Cells, Session
from tests.simulation.workloads.drops import (
    ChangingTtls,
    Drops,
    Expiring,
    Recreations,
    Renewals,
    Successors,
)
from tests.simulation.workloads.indexes import (
    ExpiringIndexed,
    Indexed,
    IndexedRows,
    IndexedTasks,
)
from tests.simulation.workloads.jobs import Deciders, IndexedJobs, Jobs
from tests.simulation.workloads.loads import Arrivals, Feeds, Loaders, Loads
from tests.simulation.workloads.observers import Chains, Inverted, Newcomers, Recipes
from tests.simulation.workloads.transactions import (
    Appends,
    Bank,
    Blind,
    Counters,
    Crowd,
    Hubs,
    Large,
    LockOrder,
    LongFork,
    OnDuty,
    Predicates,
    Queues,
    Registers,
    Sequential,
    Sets,
)
from tests.simulation.workloads.workload import Ending, MakeWorkload, Workload

# Several workloads at once on one cluster: their tables share the same servers and clients.


class Mixed(Workload):
    """The promises of all its parts."""

    def __init__(self, parts: Sequence[Workload]) -> None:
        self._parts = parts
        self.cells = parts[0].cells
        self.ttls = {column: ttl for part in parts for column, ttl in part.ttls.items()}
        self.leaves_behind = any(part.leaves_behind for part in parts)

    @property
    def tables(self) -> tuple[Cells, ...]:
        return tuple(table for part in self._parts for table in part.tables)

    async def create(self, database: Database) -> None:
        for part in self._parts:
            await part.create(database)

    async def load(self, session: Session) -> None:
        for part in self._parts:
            await part.load(session)

    async def rest(self, session: Session) -> None:
        for part in self._parts:
            await part.rest(session)

    async def step(self, session: Session) -> None:
        await session.random.choice(self._parts).step(session)

    def check(self, ending: Ending) -> Iterable[str]:
        for part in self._parts:
            yield from part.check(ending)


ON_ROWS: dict[str, MakeWorkload] = {
    "chains": lambda: Chains(gathers=False),
    "indexes": IndexedRows,
    "inverted": lambda: Inverted(gathers=False),
    "loads": Arrivals,
    "successors": lambda: Mixed([Successors(), Drops(pause_seconds_max=0.4)]),
}
"""Variants of workloads on a row store."""

WITH_MASTER: dict[str, MakeWorkload] = {
    "expiring": lambda: Mixed([Expiring(), Renewals(), ChangingTtls(), Deciders()]),
    "loads": lambda: Mixed([Loads(), Loaders()]),
    "successors": lambda: Mixed([Successors(), Recreations()]),
    "newcomers": lambda: Newcomers(creates=True),
}
"""Variants of workloads on tablets under the real master."""

UNDRAWN: dict[str, MakeWorkload] = {
    "blind": Blind,
    "changing ttls": ChangingTtls,
    "deciders": Deciders,
    "drops": Drops,
    "expiring indexes": ExpiringIndexed,
    "indexed jobs": IndexedJobs,
    "indexed tasks": IndexedTasks,
    "indexes": Indexed,
    "inverted": Inverted,
    "loaders": Loaders,
    "recreations": Recreations,
    "newcomers": Newcomers,
    "on duty": OnDuty,
    "queues": Queues,
}
"""Workloads that are not drawn by themselves, as they are part of others, or are run by some of the
seeds that draw another one. Bugs are planted in them."""

WORKLOADS: dict[str, MakeWorkload] = {
    "bank": Bank,
    "counters": Counters,
    "appends": Appends,
    "registers": Registers,
    "sets": Sets,
    "long fork": LongFork,
    "sequential": Sequential,
    "predicates": Predicates,
    "lock order": LockOrder,
    "hubs": Hubs,
    "large": Large,
    "loads": Loads,
    "expiring": Expiring,
    "feeds": Feeds,
    "chains": Chains,
    "crowd": Crowd,
    "recipes": Recipes,
    "jobs": Jobs,
    "successors": Successors,
    "mixed": lambda: Mixed([Bank(), Registers(), Predicates(), Counters(), Blind()]),
}
