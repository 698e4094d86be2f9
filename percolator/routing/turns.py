"""Asks tablets for turns at cells: places in the queues of percolator/tablet/turns.py.

A queue is advice, so nothing is repeated but what has not reached the tablet, and only
where it is known to have moved.
"""

from __future__ import annotations

import asyncio

from percolator.errors import CellAddress, PercolatorError, TabletLocation, TabletMoved
from percolator.limits import Limits
from percolator.routing.catalog import TabletMap
from percolator.routing.cells import FoundCell, Turn
from percolator.routing.lanes import SchemaVersions
from percolator.tasks import Tasks
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.methods import AWAIT_TURN, END_TURN
from percolator.world import World

_ATTEMPTS = 3
_ANSWER_SECONDS = 0.5
"""How long an answer may take beyond the wait for the turn."""
_END_SECONDS = 1.0
_WAIT_MILLISECONDS_MAX = 2**32 - 1


class TurnCalls:
    """The calls of one client."""

    def __init__(
        self, world: World, tablets: TabletMap, versions: SchemaVersions, limits: Limits
    ) -> None:
        self._world = world
        self._tablets = tablets
        self._versions = versions
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._ending = Tasks()
        self._closed = False

    async def await_turn(
        self, cell: CellAddress, place: int, start: int, wait_seconds: float, hold_seconds: float
    ) -> Turn:
        """See `percolator.routing.cells.Turns`."""
        until = self._world.clock.monotonic_seconds() + wait_seconds
        for attempt in range(1, _ATTEMPTS + 1):
            location = await self._tablets.located(cell.table_id, cell.row)
            left = max(until - self._world.clock.monotonic_seconds(), 0.001)
            request = pb.AwaitTurnRequest(
                target=self._target(cell, location),
                row=cell.row,
                column=cell.column,
                place=place,
                start_timestamp=start,
                wait_milliseconds=min(int(left * 1000), _WAIT_MILLISECONDS_MAX),
                hold_milliseconds=int(hold_seconds * 1000),
            )
            call = self._world.network.unary(location.address, AWAIT_TURN)
            try:
                return _turn(await call(request, left + _ANSWER_SECONDS), start)
            except TabletMoved as moved:
                if attempt == _ATTEMPTS:
                    raise
                self._tablets.learn(moved.locations)
                await self._tablets.try_refresh(cell.table_id, cell.row)
        raise AssertionError("unreachable")

    def end_turn(self, cell: CellAddress, place: int) -> None:
        """See `percolator.routing.cells.Turns`."""
        try:
            is_in_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_in_loop = False
        if is_in_loop:
            self._start_to_end(cell, place)  # at once: it may ask anew
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._start_to_end, cell, place)

    def _start_to_end(self, cell: CellAddress, place: int) -> None:
        location = self._tablets.locate(cell.table_id, cell.row)
        if location is not None and not self._closed:
            self._ending.start(self._end(cell, place, location))

    async def _end(self, cell: CellAddress, place: int, location: TabletLocation) -> None:
        request = pb.EndTurnRequest(
            target=self._target(cell, location), row=cell.row, column=cell.column, place=place
        )
        try:
            await self._world.network.unary(location.address, END_TURN)(request, _END_SECONDS)
        except PercolatorError:
            return  # then it ends by itself

    def _target(self, cell: CellAddress, location: TabletLocation) -> pb.TabletTarget:
        version = self._versions.get(cell.table_id, location.tablet_id)
        return pb.TabletTarget(
            tablet_id=location.tablet_id, epoch=location.epoch, schema_version=version
        )

    async def close(self) -> None:
        self._closed = True
        await self._ending.cancel()


def _turn(response: pb.AwaitTurnResponse, start: int) -> Turn:
    found, is_known = None, False
    read = response.found
    if read.reads == 1 and not read.locks and not read.refused:
        is_known, cells = True, read.found
        if cells.columns:
            value = None if cells.deletes else cells.values[0]
            found = FoundCell(cells.commit_timestamps[0], value)
    return Turn(
        response.in_turn, response.contended, response.start_timestamp or start, found, is_known
    )
