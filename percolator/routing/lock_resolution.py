"""Has tablets resolve the locks that this client meets, for tokens with rights to some tables only.

Such a client may neither ask nor change the cells that decide; the server that has a lock does. A
request that is not answered is not repeated here: whoever has met the lock asks again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

from percolator.errors import (
    CellAddress,
    ExecutionUnknown,
    NotExecuted,
    TabletLocation,
    TabletMoved,
)
from percolator.limits import Limits
from percolator.routing.catalog import TabletMap
from percolator.routing.cells import ResolvedLocks
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.methods import RESOLVE_LOCKS
from percolator.world import World

_LOCKS_MAX = 1_000
"""The most locks of one request."""

MetLocks = list[tuple[CellAddress, int]]


class LockResolution:
    """The requests of one client. Belongs to one event loop."""

    def __init__(self, world: World, tablets: TabletMap, limits: Limits) -> None:
        self._world = world
        self._tablets = tablets
        self._limits = limits

    async def resolve(
        self,
        met: Sequence[tuple[CellAddress, int]],
        *,
        read_at: int,
        waited_seconds: float,
        deadline: float,
        remove: bool = False,
    ) -> ResolvedLocks:
        """See `percolator.routing.cells.ResolvesLocks`."""
        by_tablet: dict[TabletLocation, MetLocks] = defaultdict(list)
        for lock in met:
            cell, _ = lock
            by_tablet[await self._tablets.located(cell.table_id, cell.row)].append(lock)
        waited = min(max(int(waited_seconds * 1000), 1), 2**32 - 1) if waited_seconds > 0 else 0
        asking = []
        for location, locks in by_tablet.items():
            left = iter(locks)
            while part := list(islice(left, _LOCKS_MAX)):
                request = pb.ResolveLocksRequest(
                    target=pb.TabletTarget(tablet_id=location.tablet_id, epoch=location.epoch),
                    rows=[cell.row for cell, _ in part],
                    columns=[cell.column for cell, _ in part],
                    start_timestamps=[start for _, start in part],
                    read_at=read_at,
                    waited_milliseconds=waited,
                    remove=remove,
                )
                asking.append(self._ask(location, request, deadline))
        found = ResolvedLocks({}, set())
        for answer in await asyncio.gather(*asking):
            decided = zip(answer.start_timestamps, answer.commit_timestamps, strict=True)
            found.verdicts.update(decided)
            found.passable.update(answer.passable)
        return found

    async def _ask(
        self, location: TabletLocation, request: pb.ResolveLocksRequest, deadline: float
    ) -> pb.ResolveLocksResponse:
        left = deadline - self._world.clock.monotonic_seconds()
        seconds = min(max(left, 0.001), self._limits.attempt_seconds_max)
        try:
            return await self._world.network.unary(location.address, RESOLVE_LOCKS)(
                request, seconds
            )
        except TabletMoved as moved:
            self._tablets.learn(moved.locations)
            await self._tablets.try_refresh(location.table_id, request.rows[0])
        except (NotExecuted, ExecutionUnknown):
            pass  # where the tablet is by then is found out when the cell is read or locked again
        return pb.ResolveLocksResponse()
