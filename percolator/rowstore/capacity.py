"""How many checks with changes a store makes in a second, and how long each takes."""

from __future__ import annotations

import asyncio
import math
from statistics import quantiles
from typing import NamedTuple

from percolator.rowstore.layout import LOCKS
from percolator.rowstore.port import TIME_UNIT, Check, DeleteCell, RowStore, Selection, SetCell
from percolator.world import Clock

_KEYS = 1_000
CALLS_OF_A_TRANSFER = 6
"""Of a transaction that reads and writes two rows: two reads, two prewrites, two commits."""
_LOAD_MAX = 0.7
"""The share of a node's capacity that Google advises to use at most, in a single cluster."""
_HOURS_OF_A_MONTH = 730


class Measured(NamedTuple):
    """What was measured, by one client."""

    calls: int
    seconds: float
    median_seconds: float
    late_seconds: float
    """Within which 99 of 100 calls were answered."""

    @property
    def per_second(self) -> float:
        return self.calls / self.seconds


class Verdict(NamedTuple):
    """What a number of transactions needs."""

    nodes: int
    cost_per_month: float
    """0 if no price was given."""


async def measured(
    store: RowStore,
    table_id: int,
    run: bytes,
    clock: Clock,
    *,
    seconds: float,
    in_flight: int,
    timeout_seconds: float,
) -> Measured:
    """Locks and unlocks rows, spread over many keys, with `in_flight` calls at a time. Nothing is
    left of it. Raises what prevents a call."""
    latencies: list[float] = []
    lock = SetCell(LOCKS, b"c", TIME_UNIT, b"measured")
    steps = (
        (Check((Selection(LOCKS),), found=False), lock),
        (Check((Selection(LOCKS),), found=True), DeleteCell(*lock[:3])),
    )
    began = clock.monotonic_seconds()

    async def work(first: int) -> None:
        number = first
        while clock.monotonic_seconds() < began + seconds:
            key = run + b"%05d" % (number * 7919 % _KEYS) + b"-%d" % first
            number += 1
            for check, change in steps:
                sent = clock.monotonic_seconds()
                await store.check_and_mutate(table_id, key, check, [change], timeout_seconds)
                latencies.append(clock.monotonic_seconds() - sent)

    await asyncio.gather(*(work(first) for first in range(in_flight)))
    cuts = quantiles(latencies, n=100)
    took = clock.monotonic_seconds() - began
    return Measured(len(latencies), took, cuts[49], cuts[98])


def verdict(
    found: Measured, nodes: int, transfers_per_second: float, price_per_node_hour: float
) -> Verdict:
    """What it would need to carry so many transfers, if `nodes` nodes carry what was measured."""
    per_node = found.per_second / nodes * _LOAD_MAX
    needed = max(math.ceil(transfers_per_second * CALLS_OF_A_TRANSFER / per_node), 1)
    return Verdict(needed, needed * price_per_node_hour * _HOURS_OF_A_MONTH)
