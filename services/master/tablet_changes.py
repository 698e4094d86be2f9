"""Moving and splitting tablets, draining a server, and balancing servers.

Moves and splits first close the tablet, so that its log is flushed and clients learn at once that
it is moving. That is only for speed. They are safe because the map is changed in one durable step,
and because a server that opens a tablet seals the previous owner's directory: acknowledged writes
are in the clone, and later ones are not acknowledged. After a crash before the step the former
tablet is opened again; after a crash behind it, the new ones are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import structlog

from percolator.codecs.readable import quoted
from percolator.errors import (
    InvalidArgument,
    NotReady,
    PercolatorError,
    StoreUnusable,
)
from percolator.services.master.assignment import Assignment
from percolator.services.master.cluster_map import ClusterMap, Tablet
from percolator.services.master.map_store import MapStore
from percolator.services.master.server_watch import ServerWatch, WatchedServer
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import methods
from percolator.wire.table_options import SPLIT_ROW_BYTES_MAX
from percolator.world import World

_PROPOSE_SECONDS = 10.0
_MOVES_AT_ONCE = 4
_POLL_SECONDS = 0.02
_LOOK_SECONDS = 60.0
_LOOKS_UNTIL_FORGOTTEN = 60
"""Looks are counted rather than time: a master that was paused has not looked."""

_log = structlog.get_logger("percolator.master")


class TabletChanges:
    """Changes that the leading master makes to tablets that are served."""

    def __init__(
        self,
        world: World,
        store: MapStore,
        watch: ServerWatch,
        assignment: Assignment,
        *,
        tablets_max: int,
    ) -> None:
        self._world = world
        self._store = store
        self._watch = watch
        self._assignment = assignment
        self._tablets_max = tablets_max

    async def move(self, tablet_id: int, server: str, deadline: float) -> Tablet:
        """Returns when that server (if empty: the least loaded one) serves the tablet."""
        await self._give(tablet_id, server)
        await self._assignment.until_served([tablet_id], deadline)
        return self._tablet(tablet_id)

    async def _give(self, tablet_id: int, server: str) -> None:
        """Makes the decision durable, and leaves the rest to the assignment."""
        target = self._target(server, self._tablet(tablet_id))
        self._assignment.hold(tablet_id)
        try:
            tablet = self._tablet(tablet_id)
            if tablet.server_id == target.server_id:
                return
            await self._close(tablet)

            def decide(current: ClusterMap) -> tuple[ClusterMap, None]:
                found = _unchanged(current, tablet)
                # Chosen again: other moves may have filled the chosen server meanwhile.
                chosen = self._target(server, found)
                given = found.given_to(chosen.server_id, chosen.address)
                return current.with_tablets([given]), None

            await self._store.change(decide)
        finally:
            self._assignment.let_go(tablet_id)

    async def split(
        self, tablet_id: int, row: bytes | None, deadline: float
    ) -> tuple[Tablet, Tablet]:
        """Returns when both halves are served. Clients notice nothing but a short pause."""
        self._assignment.hold(tablet_id)
        try:
            if not self._tablet(tablet_id).exists:
                # It may have been served for so short a time that the map does not know it yet.
                await self._assignment.note_served()
            parent = self._tablet(tablet_id)
            if not parent.exists or not self._assignment.is_served(parent):
                raise NotReady(f"tablet {tablet_id} is not served", retry_after_seconds=1.0)
            if len(self._store.current.tablets) >= self._tablets_max:
                raise InvalidArgument(
                    "tablet_id", f"the cluster has {self._tablets_max} tablets, the limit"
                )
            cut = _checked(row, parent) if row is not None else await self._propose(parent)
            await self._close(parent)

            def decide(current: ClusterMap) -> tuple[ClusterMap, tuple[Tablet, Tablet]]:
                _unchanged(current, parent)
                changed, lower, upper = current.with_split(parent, cut)
                return changed, (lower, upper)

            halves = await self._store.change(decide)
        finally:
            self._assignment.let_go(tablet_id)
        _log.info("tablet split", tablet=tablet_id, into=[half.tablet_id for half in halves])
        await self._assignment.until_served([half.tablet_id for half in halves], deadline)
        lower, upper = (self._tablet(half.tablet_id) for half in halves)
        return lower, upper

    async def drain(self, name: str, *, undo: bool, deadline: float) -> None:
        """Returns when the server has no tablets, and gets no more."""
        server = self._watch.find(name)
        if server is None:
            raise InvalidArgument("server", f"no tablet server {name!r} is alive")
        await self._mark_draining(server, undo=undo)
        if undo:
            return
        moved = await self._empty(server, deadline)
        served = self._assignment.is_served
        while self._assignment.usable() and self._world.clock.monotonic_seconds() < deadline:
            tablets = self._store.current.tablets
            if all(served(one) for key in moved if (one := tablets.get(key))):
                return
            await self._world.clock.sleep(_POLL_SECONDS)
        raise NotReady(f"{server.address} has no tablets, but not all are served elsewhere yet")

    async def forget_drained(self) -> None:
        """Forgets drained servers that have been gone for an hour. Runs until cancelled.

        A server is drained whenever it is stopped, and each process has an id of its own: the map
        would grow with every restart.
        """
        gone: dict[str, int] = {}
        while True:
            await self._world.clock.sleep(_LOOK_SECONDS)
            absent = self._store.current.draining - self._watch.servers.keys()
            gone = {server_id: gone.get(server_id, 0) + 1 for server_id in absent}
            forgotten = {one for one, looks in gone.items() if looks >= _LOOKS_UNTIL_FORGOTTEN}
            if not forgotten:
                continue
            try:
                await self._store.change(partial(_without_drained, forgotten))
            except StoreUnusable as error:
                _log.warning("drained servers that are gone are not forgotten", error=str(error))

    async def _empty(self, server: WatchedServer, deadline: float) -> set[int]:
        """Gives every tablet of the server to another one, and returns which they were."""
        moved: set[int] = set()
        while tablets := self._tablets_of(server):
            moved.update(one.tablet_id for one in tablets)
            if self._world.clock.monotonic_seconds() >= deadline:
                raise NotReady(
                    f"{len(tablets)} tablets are left on {server.address}; it gets no new ones"
                )
            # One that is being moved or split is looked at again: it may stay here, or its halves.
            free = [one.tablet_id for one in tablets if not self._assignment.is_held(one.tablet_id)]
            batch = free[:_MOVES_AT_ONCE]
            if not batch:
                await self._world.clock.sleep(_POLL_SECONDS)
            # Not one by one until served: a server that takes them may be drained next.
            await asyncio.gather(*map(self._give_away, batch))
        return moved

    async def _give_away(self, tablet_id: int) -> None:
        # Another call may hold it by now, such as another drain of the same server.
        if not self._assignment.is_held(tablet_id):
            await self._give(tablet_id, "")

    async def _mark_draining(self, server: WatchedServer, *, undo: bool) -> None:
        def decide(current: ClusterMap) -> tuple[ClusterMap, None]:
            if undo:
                draining = current.draining - {server.server_id}
            else:
                others = {one.server_id for one in self._assignment.usable()} - {server.server_id}
                if not others:
                    raise InvalidArgument(
                        "server", f"{server.address} is the last server that can serve tablets"
                    )
                draining = current.draining | {server.server_id}
            return replace(current, draining=draining), None

        await self._store.change(decide)

    def _tablets_of(self, server: WatchedServer) -> list[Tablet]:
        tablets = self._store.current.tablets.values()
        return [one for one in tablets if one.server_id == server.server_id]

    def _tablet(self, tablet_id: int) -> Tablet:
        found = self._store.current.tablets.get(tablet_id)
        if found is None:
            raise InvalidArgument("tablet_id", f"there is no tablet {tablet_id}")
        return found

    def _target(self, name: str, tablet: Tablet) -> WatchedServer:
        usable = self._assignment.usable()
        if not name:
            load = self._assignment.load()
            preferred = self._assignment.preferred()
            others = _without(tablet.server_id, preferred) or _without(tablet.server_id, usable)
            others = others or usable
            if not others:
                raise NotReady("no tablet server is alive", retry_after_seconds=1.0)
            return min(others, key=lambda one: (load[one.server_id], one.address))
        for server in usable:
            if name in (server.address, server.server_id):
                return server
        raise InvalidArgument("server", f"no tablet server {name!r} is alive and takes tablets")

    async def _propose(self, tablet: Tablet) -> bytes:
        call = self._world.network.unary(tablet.address, methods.PROPOSE_SPLIT)
        target = pb.TabletTarget(
            tablet_id=tablet.tablet_id,
            epoch=tablet.epoch,
            schema_version=self._store.current.tables[tablet.table_id].schema_version,
        )
        proposing = call(pb.ProposeSplitRequest(target=target), _PROPOSE_SECONDS)
        answer = await self._watch.answer(tablet.server_id, proposing)
        if not answer.HasField("row") or not _is_inside(answer.row, tablet):
            raise InvalidArgument(
                "row", f"tablet {tablet.tablet_id} has too few rows to be split by size"
            )
        return answer.row

    async def _close(self, tablet: Tablet) -> None:
        if self._watch.is_dead(tablet.server_id):
            return
        try:
            close = self._assignment.close(tablet.address, tablet.tablet_id, tablet.epoch)
            await self._watch.answer(tablet.server_id, close)
        except PercolatorError as error:
            # Harmless: the next owner replays what was not flushed.
            _log.info(
                "tablet not closed before a change", tablet=tablet.tablet_id, error=str(error)
            )


def _unchanged(current: ClusterMap, tablet: Tablet) -> Tablet:
    """The tablet, of which more may be known by now: that it is served, and at which epoch. Raises
    `NotReady` if it was given to another server meanwhile."""
    found = current.tablets.get(tablet.tablet_id)
    if found is None or found.epoch != tablet.epoch:
        raise NotReady(f"tablet {tablet.tablet_id} was given to another server meanwhile")
    return found


def _without_drained(server_ids: set[str], current: ClusterMap) -> tuple[ClusterMap, None]:
    return replace(current, draining=current.draining - server_ids), None


def _without(server_id: str, servers: list[WatchedServer]) -> list[WatchedServer]:
    return [one for one in servers if one.server_id != server_id]


def _is_inside(row: bytes, tablet: Tablet) -> bool:
    return row > tablet.start and (not tablet.end or row < tablet.end)


def _checked(row: bytes, tablet: Tablet) -> bytes:
    if not _is_inside(row, tablet):
        raise InvalidArgument(
            "row", f"{quoted(row)} is not inside tablet {tablet.tablet_id}, above its first row"
        )
    if len(row) > SPLIT_ROW_BYTES_MAX:
        raise InvalidArgument("row", f"is longer than {SPLIT_ROW_BYTES_MAX} bytes")
    return row


_DESCRIBE_SECONDS = 5.0

_CHANGE_SECONDS = 30.0


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
    """Keeps the numbers of tablets on servers about equal, and tablets below their maximum size.

    `run` has to run while this master leads.

    Tablets are moved one at a time. None is moved while another is on its way to a server, soon
    after a server came or went (it may come back), or for a difference that is not worth a move.
    This does not wait for a tablet that cannot be served, for example because its directory is
    damaged.
    """

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
