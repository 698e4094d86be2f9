"""All workloads, by name."""

from __future__ import annotations

from tests.simulation.workloads.appends import Appends
from tests.simulation.workloads.arrivals import Arrivals
from tests.simulation.workloads.bank import Bank
from tests.simulation.workloads.blind import Blind
from tests.simulation.workloads.chains import Chains
from tests.simulation.workloads.changing_ttls import ChangingTtls
from tests.simulation.workloads.counters import Counters
from tests.simulation.workloads.crowd import Crowd
from tests.simulation.workloads.deciders import Deciders
from tests.simulation.workloads.drops import Drops
from tests.simulation.workloads.expiring import Expiring
from tests.simulation.workloads.expiring_index import ExpiringIndex
from tests.simulation.workloads.feeds import Feeds
from tests.simulation.workloads.hubs import Hubs
from tests.simulation.workloads.jobs import Jobs
from tests.simulation.workloads.large import Large
from tests.simulation.workloads.loaders import Loaders
from tests.simulation.workloads.loads import Loads
from tests.simulation.workloads.lock_order import LockOrder
from tests.simulation.workloads.long_fork import LongFork
from tests.simulation.workloads.mixed import Mixed
from tests.simulation.workloads.newcomers import Newcomers
from tests.simulation.workloads.predicates import Predicates
from tests.simulation.workloads.recipes import Recipes
from tests.simulation.workloads.recreations import Recreations
from tests.simulation.workloads.registers import Registers
from tests.simulation.workloads.renewals import Renewals
from tests.simulation.workloads.sequential import Sequential
from tests.simulation.workloads.sets import Sets
from tests.simulation.workloads.successors import Successors
from tests.simulation.workloads.workload import MakeWorkload

ON_ROWS: dict[str, MakeWorkload] = {
    "loads": Arrivals,
    "successors": lambda: Mixed([Successors(), Drops(pause_seconds_max=0.4)]),
}
"""What workloads are on a row store, if it differs."""

WITH_MASTER: dict[str, MakeWorkload] = {
    "expiring": lambda: Mixed(
        [Expiring(), ExpiringIndex(), Renewals(), ChangingTtls(), Deciders()]
    ),
    "loads": lambda: Mixed([Loads(), Loaders()]),
    "successors": lambda: Mixed([Successors(), Recreations()]),
    "newcomers": lambda: Newcomers(creates=True),
}
"""What workloads are on tablets under the real master, if it differs."""

UNDRAWN: dict[str, MakeWorkload] = {
    "blind": Blind,
    "changing ttls": ChangingTtls,
    "deciders": Deciders,
    "drops": Drops,
    "loaders": Loaders,
    "recreations": Recreations,
    "newcomers": Newcomers,
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
    "expiring": lambda: Mixed([Expiring(), ExpiringIndex()]),
    "feeds": Feeds,
    "chains": Chains,
    "crowd": Crowd,
    "recipes": Recipes,
    "jobs": Jobs,
    "successors": Successors,
    "mixed": lambda: Mixed([Bank(), Registers(), Predicates(), Counters(), Blind()]),
}
