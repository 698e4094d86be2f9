"""Keeps servers about equally loaded by count, and tablets below their size: slowly, one at a time.

Damping: nothing is moved while a tablet is on its way to a server, nor soon after a server came or
went (it may be coming back), and nothing for a difference that is not worth a move. A tablet that
cannot be served, for whatever is wrong with its directory, is not waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog

from percolator.errors import PercolatorError
from percolator.v1 import tabletserver_pb2 as wire
from percolator.wire import methods
from percolator.world import World
from services.master.assignment import Assignment
from services.master.cluster_map import ClusterMap, Tablet
from services.master.map_store import MapStore
from services.master.server_watch import ServerWatch
from services.master.tablet_changes import TabletChanges

_DESCRIBE_SECONDS = 5.0
_CHANGE_SECONDS = 30.0

_log = structlog.get_logger("percolator.master")


@dataclass(frozen=True)
class BalanceLimits:
    """When something is moved or split."""

    round_seconds: float = 5.0
    quiet_seconds: float = 10.0
    """Without any change of the servers, before the first move."""
    difference_part: float = 0.1
    """Of the mean: a smaller difference between two servers stays, and one of 1 always."""
    moves_per_round: int = 4
    split_bytes: int = 1 << 30
    """Of tables that do not say otherwise."""


def next_move(
    tablets: Iterable[Tablet], usable: Iterable[str], limits: BalanceLimits
) -> tuple[Tablet, str] | None:
    """The tablet to be moved next, and the server id that it goes to."""
    by_server: dict[str, list[Tablet]] = {server_id: [] for server_id in usable}
    stranded: list[Tablet] = []
    for tablet in tablets:
        by_server.get(tablet.server_id, stranded).append(tablet)
    if not by_server:
        return None
    least = min(by_server, key=lambda one: (len(by_server[one]), one))
    if stranded:
        return min(stranded, key=lambda one: one.tablet_id), least
    most = max(by_server, key=lambda one: (len(by_server[one]), one))
    difference = len(by_server[most]) - len(by_server[least])
    mean = sum(map(len, by_server.values())) / len(by_server)
    if difference < 2 or difference <= limits.difference_part * mean:
        return None
    return min(by_server[most], key=lambda one: one.tablet_id), least


class Balance:
    """`run` has to run while this master leads."""

    def __init__(
        self,
        world: World,
        store: MapStore,
        watch: ServerWatch,
        assignment: Assignment,
        changes: TabletChanges,
        limits: BalanceLimits,
    ) -> None:
        self._world = world
        self._store = store
        self._watch = watch
        self._assignment = assignment
        self._changes = changes
        self._limits = limits
        self._usable: frozenset[str] = frozenset()
        self._changed_at = world.clock.monotonic_seconds()
        self.statistics: Mapping[int, wire.TabletStatistics] = {}
        """By tablet, as of the last round."""

    async def run(self) -> None:
        """Until cancelled."""
        clock = self._world.clock
        while True:
            await clock.sleep(self._limits.round_seconds)
            await self._measure()
            usable = frozenset(one.server_id for one in self._assignment.preferred())
            if usable != self._usable:
                self._usable, self._changed_at = usable, clock.monotonic_seconds()
            try:
                await self._split_large()
                if clock.monotonic_seconds() - self._changed_at >= self._limits.quiet_seconds:
                    await self._move_some()
            except PercolatorError as error:
                # It was not done, or half of it goes on in the background: look again.
                _log.info("not balanced", error=str(error))

    def _at_rest(self) -> ClusterMap | None:
        """The map, when all of it is served that can be."""
        current, assignment = self._store.current, self._assignment
        at_rest = all(
            assignment.is_served(one) or assignment.is_broken(one)
            for one in current.tablets.values()
        )
        return current if at_rest else None

    async def _move_some(self) -> None:
        for _ in range(self._limits.moves_per_round):
            current = self._at_rest()
            if current is None:
                return
            preferred = {one.server_id for one in self._assignment.preferred()}
            # Those that come and go keep what they have: taking it away is one more change.
            left_alone = {one.server_id for one in self._assignment.usable()} - preferred
            tablets = [
                one
                for one in current.tablets.values()
                if one.server_id not in left_alone and self._assignment.is_served(one)
            ]
            move = next_move(tablets, preferred, self._limits)
            if move is None:
                return
            tablet, server_id = move
            deadline = self._world.clock.monotonic_seconds() + _CHANGE_SECONDS
            _log.info("moving a tablet", tablet=tablet.tablet_id, to=server_id)
            await self._changes.move(tablet.tablet_id, server_id, deadline)

    async def _split_large(self) -> None:
        for tablet_id, statistics in sorted(self.statistics.items()):
            tablet = self._store.current.tablets.get(tablet_id)
            if tablet is None or not self._assignment.is_served(tablet):
                continue
            table = self._store.current.tables[tablet.table_id]
            if statistics.bytes < (table.split_bytes or self._limits.split_bytes):
                continue
            deadline = self._world.clock.monotonic_seconds() + _CHANGE_SECONDS
            try:
                await self._changes.split(tablet_id, None, deadline)
            except PercolatorError as error:
                # One that has too few rows keeps no other from being split, or moved.
                _log.info("tablet not split", tablet=tablet_id, error=str(error))

    async def _measure(self) -> None:
        found: dict[int, wire.TabletStatistics] = {}
        for server in self._watch.alive():
            call = self._world.network.unary(server.address, methods.DESCRIBE_TABLETS)
            try:
                answer = await call(wire.DescribeTabletsRequest(), _DESCRIBE_SECONDS)
            except PercolatorError as error:
                _log.info("tablets not measured", address=server.address, error=str(error))
                continue
            for one in answer.tablets:
                tablet = self._store.current.tablets.get(one.tablet_id)
                if tablet is not None and tablet.epoch == one.epoch:
                    found[one.tablet_id] = one.statistics
        self.statistics = found
