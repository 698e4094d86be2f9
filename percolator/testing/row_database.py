"""A database whose cells are in a row store: in a model of Bigtable, or in an emulator of it.

All else of the cluster is in this process, as in `local_database.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from percolator import aio
from percolator.aio.connecting import connect_to
from percolator.aio.engine import Rows
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.blocking.database import Database
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.rowstore.times import Times
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.cluster_in_memory import ADDRESS
from percolator.testing.cluster_over_rows import ClusterOverRows
from percolator.testing.in_process_network import InProcessNetwork
from percolator.world import MachineClock, Network, World

MODEL = Place("bigtable:1", "model-project", "model-instance")
_DAY_MILLISECONDS = 86_400_000


def connect_over_model(
    limits: Limits | None = None, model: BigtableInMemory | None = None
) -> Database:
    """A new, empty database over the model. A test that gives one can look into it."""
    there = BigtableInMemory() if model is None else model

    async def start() -> aio.Database:
        return await _connected(InProcessNetwork({MODEL.address: there}), MODEL, limits)

    return Database.over(start)


def connect_over(
    network: Callable[[], Network], place: Place, limits: Limits | None = None
) -> Database:
    """The same over an emulator at that place, where nothing may be yet: a new cluster counts its
    tables from one. `network` is called in the database's event loop."""

    async def start() -> aio.Database:
        return await _connected(network(), place, limits)

    return Database.over(start)


async def _connected(network: Network, place: Place, limits: Limits | None) -> aio.Database:
    clock = MachineClock()
    cluster = ClusterOverRows(clock, network, place)
    here = InProcessNetwork({ADDRESS: cluster})
    world = World(clock=clock, network=here, random=random.Random())  # noqa: S311 - for a test
    rows = Rows(BigtableStore(network, place), Times(clock.wall_milliseconds() - _DAY_MILLISECONDS))
    return await connect_to(world, [ADDRESS], limits or Limits(), RetryPolicy(), rows=rows)
