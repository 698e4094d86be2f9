"""Keeps the numbers of tablets on servers about equal, and tablets below their maximum size.

Tablets are moved one at a time. None is moved while another is on its way to a server, soon after
a server came or went (it may come back), or for a difference that is not worth a move. This does
not wait for a tablet that cannot be served, for example because its directory is damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog

from percolator.errors import PercolatorError
from percolator.services.master.map.cluster_map import ClusterMap, Tablet
from percolator.services.master.map.map_store import MapStore
from percolator.services.master.tablets.assignment import Assignment
from percolator.services.master.tablets.server_watch import ServerWatch
from percolator.services.master.tablets.tablet_changes import TabletChanges
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import methods
from percolator.world import World

_DESCRIBE_SECONDS = 5.0
_CHANGE_SECONDS = 30.0

_log = structlog.get_logger("percolator.master")


@dataclass(frozen=True)
class BalanceLimits:
    """When tablets are moved or split."""

    round_seconds: float = 5.0
    quiet_seconds: float = 10.0
    """How long the set of servers must be unchanged before the first move."""
    difference_part: float = 0.1
    """Share of the mean. A smaller difference between servers is left, and 1 tablet always."""
    moves_per_round: int = 4
    split_bytes: int = 1 << 30
    """For tables without a value of their own."""


def next_move(
    tablets: Iterable[Tablet], usable: Iterable[str], limits: BalanceLimits
) -> tuple[Tablet, str] | None:
    """The tablet to move next, and the id of the server that it goes to."""
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
        self.statistics: Mapping[int, pb.TabletStatistics] = {}
        """By tablet id, as of the last round."""

    async def run(self) -> None:
        """Runs until cancelled."""
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
                # The change failed or continues in the background: look again next round.
                _log.info("not balanced", error=str(error))

    def _at_rest(self) -> ClusterMap | None:
        """The map, if every tablet that can be served is served."""
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
            # Servers that come and go keep their tablets: moving them is one more change.
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
                # A tablet with too few rows must not keep others from being split or moved.
                _log.info("tablet not split", tablet=tablet_id, error=str(error))

    async def _measure(self) -> None:
        found: dict[int, pb.TabletStatistics] = {}
        for server in self._watch.alive():
            call = self._world.network.unary(server.address, methods.DESCRIBE_TABLETS)
            try:
                answer = await call(pb.DescribeTabletsRequest(), _DESCRIBE_SECONDS)
            except PercolatorError as error:
                _log.info("tablets not measured", address=server.address, error=str(error))
                continue
            for one in answer.tablets:
                tablet = self._store.current.tablets.get(one.tablet_id)
                if tablet is not None and tablet.epoch == one.epoch:
                    found[one.tablet_id] = one.statistics
        self.statistics = found
