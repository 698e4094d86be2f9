"""Cells in the model of a row store, for tests of the way there."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from percolator.bigtable.admin import create_table
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.limits import Limits
from percolator.rowstore.cells import RowStoreCells
from percolator.rowstore.intents import Intents
from percolator.rowstore.layout import Times
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.timestamps import SEQUENCE_BITS
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock

PLACE = Place("bigtable:1", "some-project", "some-instance")
EPOCH_MILLISECONDS = 1_000
TABLE = 7
SECONDS = 60.0
TIMES = Times(EPOCH_MILLISECONDS)


def at(number: int) -> int:
    """The timestamp of that number: the first ones that can be stored."""
    return (EPOCH_MILLISECONDS << SEQUENCE_BITS) + number * 64


class ModelStore:
    """A table in the model, and how to get at it."""

    def __init__(self, **limits: Any) -> None:
        self.model = BigtableInMemory(chunk_bytes=7)
        self.network = InProcessNetwork({PLACE.address: self.model})
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.store = BigtableStore(self.network, PLACE)
        self.world = World(self.clock, self.network, random.Random(1))
        self.limits = Limits(**limits)
        self.intents = Intents(self.store, TIMES, self.world, self.limits)
        self.cells = RowStoreCells(self.store, self.intents, TIMES, self.world, self.limits)

    @property
    def deadline(self) -> float:
        return self.clock.monotonic_seconds() + SECONDS

    async def opened(self) -> ModelStore:
        await create_table(self.network, PLACE, TABLE, SECONDS)
        return self
