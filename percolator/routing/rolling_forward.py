"""Tells the tablets of a table to roll the locks of committed transactions forward.

Each is told once, and answers at once, or when it is ahead of the caller. What a tablet does not
hear, or forgets, is left to those who meet the locks, so nothing is sent again but to a tablet that
has moved.
"""

from __future__ import annotations

import asyncio

from percolator.errors import TabletLocation, TabletMoved
from percolator.limits import Limits
from percolator.routing.catalog import TabletMap
from percolator.routing.cells import RollForward
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.methods import ROLL_FORWARD
from percolator.world import World

_ATTEMPTS = 3


class RollForwardOrders:
    """The orders of one client."""

    def __init__(self, world: World, tablets: TabletMap, limits: Limits) -> None:
        self._world = world
        self._tablets = tablets
        self._limits = limits

    async def give(self, order: RollForward, deadline: float) -> None:
        """See `percolator.routing.cells.RollsForward`."""
        first = order.row or b""
        tablets = [await self._tablets.located(order.table_id, first)]
        while order.row is None and tablets[-1].end:
            tablets.append(await self._tablets.located(order.table_id, tablets[-1].end))
        telling = (self._tell(order, one, max(first, one.start), deadline) for one in tablets)
        answers = await asyncio.gather(*telling, return_exceptions=True)
        for answer in answers:
            if answer is not None:
                raise answer

    async def _tell(
        self, order: RollForward, location: TabletLocation, row: bytes, deadline: float
    ) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            left = deadline - self._world.clock.monotonic_seconds()
            seconds = min(max(left, 0.001), self._limits.attempt_seconds_max)
            call = self._world.network.unary(location.address, ROLL_FORWARD)
            try:
                await call(_request(order, location, row), seconds)
            except TabletMoved as moved:
                if attempt == _ATTEMPTS:
                    raise
                self._tablets.learn(moved.locations)
                await self._tablets.try_refresh(order.table_id, row)
                location = await self._tablets.located(order.table_id, row)
            else:
                return


def _request(order: RollForward, location: TabletLocation, row: bytes) -> pb.RollForwardRequest:
    return pb.RollForwardRequest(
        target=pb.TabletTarget(
            tablet_id=location.tablet_id,
            epoch=location.epoch,
            schema_version=order.schema_version,
        ),
        start_timestamps=order.commits.keys(),
        commit_timestamps=order.commits.values(),
        observed=[
            pb.ObservedColumn(column=column, observers=names)
            for column, names in order.observers.items()
        ],
        row=row,
        await_cells=order.await_cells,
    )
