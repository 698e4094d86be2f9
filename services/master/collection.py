"""Collection of old versions: round after round, in the one order that loses nothing.

1. Decide how far: what the retention of each table gives up, and no session and no pin needs.
2. Write it down, and look at the sessions again: a pin that was set meanwhile wins, and the tables
   in which it would lose are left alone.
3. Raise the safe points of every tablet of every table. When all have acknowledged, nobody can
   begin, read or commit below them.
4. Settle every older lock in every table. Since step 3 there are no new ones.
5. Only now let the tablets delete.

A round that fails anywhere has deleted nothing that matters, and the next one begins anew.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from percolator.errors import NotReady, PercolatorError
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import cluster_pb2
from percolator.v1 import tabletserver_pb2 as wire
from percolator.wire import methods
from percolator.wire.liveness import Liveness, LivenessQuestions
from percolator.wire.lock_service import LockServiceCalls
from percolator.wire.status import from_detail
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import World
from services.master import safe_points
from services.master.cluster_map import Tablet
from services.master.history_needs import HistoryNeeds, history_needs
from services.master.map_store import MapStore
from services.master.old_locks import OldLocks
from services.master.registry import Registry
from services.master.safe_points import ClusterSafePoints

_ORDER_SECONDS = 30.0
_TIMESTAMP_SECONDS = 5.0
_TABLETS_AT_A_TIME = 8

_log = structlog.get_logger("percolator.master")


@dataclass(frozen=True)
class CollectionTimes:
    """How much of the past is kept."""

    round_seconds: float = 60.0
    retention_seconds: float = 3600.0
    """Of tables that do not say otherwise."""
    retention_min_seconds: float = 60.0
    """No table may keep less: above the longest time of a transaction."""


class Collection:
    """`run` has to run while this master leads."""

    def __init__(
        self, world: World, store: MapStore, registry: Registry, times: CollectionTimes
    ) -> None:
        self._world = world
        self._store = store
        self._registry = registry
        self.times = times
        self._oracles: list[str] = []
        self._lock_services: list[str] = []
        self._missed_since: dict[str, float] = {}
        """Lock services that were there and are gone, and when that was noticed."""
        self._began_at = world.clock.monotonic_seconds()
        self._owners = _Owners(world, self._lock_services)
        self._timestamps: TimestampSource | None = None
        self._old_locks: OldLocks | None = None
        self._safe_points: ClusterSafePoints | None = None
        self._wanted: dict[int, int] = {}
        """Safe points of the tables, if nobody needed anything."""
        self.now = 0
        """The oracle's time when the last round began."""
        self.needs = HistoryNeeds()
        self.tablets: dict[int, wire.RaisedSafePoint] = {}
        """What each tablet said last."""
        self.error: PercolatorError | None = None
        """Why the last round did not come to its end."""
        self.finished_at: float | None = None
        self.rounds = 0
        self.failures = 0

    @property
    def safe_points(self) -> ClusterSafePoints:
        """As they are written down. Raises `NotReady` before they have been read: whoever then was
        told that there are none would believe that all of the past is still there."""
        if self._safe_points is None:
            raise NotReady("this master has just begun to lead: safe points are being read")
        return self._safe_points

    def known_safe_point(self, table_id: int) -> int:
        """0 when nothing of the table has been given up, or that is not known yet."""
        return 0 if self._safe_points is None else self._safe_points.reads.get(table_id, 0)

    @property
    def held(self) -> bool:
        """Whether a session or pin keeps a table from giving up what its retention would."""
        return 0 < self.needs.oldest < max(self._wanted.values(), default=0)

    @property
    def old_locks_settled(self) -> int:
        return 0 if self._old_locks is None else self._old_locks.settled

    async def run(self) -> None:
        """Until cancelled."""
        self._safe_points = await safe_points.load(self._store.leadership)
        try:
            while True:
                await self._world.clock.sleep(self.times.round_seconds)
                try:
                    await self.collect()
                except PercolatorError as error:
                    self.error = error
                    self.failures += 1
                    _log.info("history not collected", error=str(error))
        finally:
            await self._close()

    async def collect(self) -> None:
        """One round."""
        self._learn_servers()
        timestamps = self._timestamp_source()
        self.now = await timestamps.get(timeout_seconds=_TIMESTAMP_SECONDS)
        decided = await self._decide()
        await safe_points.store(self._store.leadership, decided)
        self._safe_points = decided
        self.needs = needs = await history_needs(self._world.network, self._lock_services)
        ordered = decided.allowed_by(needs.oldest)
        if decided.reads and not ordered.reads:
            who = needs.description or "a session"
            raise NotReady(f"{who} needs history since {needs.oldest}, in all tables")
        await self._every_tablet(lambda tablets: self._order(tablets, ordered, collect=False))
        if self._old_locks is None:
            self._old_locks = OldLocks(self._world, self._store, timestamps, self._owners)
        old_locks = self._old_locks
        await self._every_tablet(
            _one_by_one(lambda tablet: old_locks.settle(tablet, ordered.transactions))
        )
        tablets = self._tablets()
        await self._order(tablets, ordered, collect=True)
        present = {one.tablet_id for one in tablets}
        self.tablets = {one: said for one, said in self.tablets.items() if one in present}
        self.error = None
        self.rounds += 1
        self.finished_at = self._world.clock.monotonic_seconds()

    async def _decide(self) -> ClusterSafePoints:
        """Never below what was decided before, even where nobody was told of that."""
        self.needs = needs = await history_needs(self._world.network, self._lock_services)
        self._require_all_reported(needs.ttl_seconds_max)
        self._wanted = {}
        for table in self._store.current.tables.values():
            retention = table.retention_milliseconds or self.times.retention_seconds * 1000
            self._wanted[table.table_id] = max(0, self.now - (int(retention) << SEQUENCE_BITS))
        oldest = needs.oldest or self.now
        return self.safe_points.raised({one: min(at, oldest) for one, at in self._wanted.items()})

    # ------------------------------------------------------------------------- tablets

    def _tablets(self) -> list[Tablet]:
        """Of all tables. Those of a deleted one answer nobody, and go as a whole."""
        current = self._store.current
        return [
            one for one in current.tablets.values() if not current.tables[one.table_id].deleting
        ]

    async def _every_tablet(
        self, work: Callable[[list[Tablet]], Coroutine[Any, Any, None]]
    ) -> None:
        """Also those that come to be by splits meanwhile. A move changes nothing: what a tablet
        has acknowledged is in its storage."""
        done: set[int] = set()
        while left := [one for one in self._tablets() if one.tablet_id not in done]:
            await work(left)
            done |= {one.tablet_id for one in left}

    async def _order(
        self, tablets: Iterable[Tablet], ordered: ClusterSafePoints, *, collect: bool
    ) -> None:
        """Raises `NotReady`, or what a tablet says, unless all have acknowledged."""
        by_address: defaultdict[str, list[Tablet]] = defaultdict(list)
        for tablet in tablets:
            if not tablet.server_id:
                raise NotReady(f"tablet {tablet.tablet_id} is not served at the moment")
            by_address[tablet.address].append(tablet)
        self._store.leadership.check()
        await asyncio.gather(
            *(
                self._order_server(address, found, ordered, collect)
                for address, found in by_address.items()
            )
        )

    async def _order_server(
        self, address: str, tablets: list[Tablet], ordered: ClusterSafePoints, collect: bool
    ) -> None:
        orders = []
        for tablet in tablets:
            reads = ordered.reads.get(tablet.table_id, 0)
            orders.append(
                wire.SafePoint(
                    tablet_id=tablet.tablet_id,
                    epoch=tablet.epoch,
                    reads=reads,
                    transactions=ordered.transactions,
                    collect_below=reads if collect else 0,
                )
            )
        call = self._world.network.unary(address, methods.RAISE_SAFE_POINTS)
        answer = await call(wire.RaiseSafePointsRequest(safe_points=orders), _ORDER_SECONDS)
        if len(answer.safe_points) != len(tablets):
            raise NotReady(f"{address} has not answered for every tablet")
        for tablet, raised in zip(tablets, answer.safe_points, strict=True):
            if raised.HasField("error"):
                raise from_detail(raised.error)
            self.tablets[tablet.tablet_id] = raised

    # ------------------------------------------------------------------------- servers

    def _learn_servers(self) -> None:
        servers = self._registry.servers()
        self._oracles[:] = [
            one.address for one in servers if one.kind == cluster_pb2.SERVICE_KIND_ORACLE
        ] or self._oracles
        present = [
            one.address for one in servers if one.kind == cluster_pb2.SERVICE_KIND_LOCK_SERVICE
        ]
        now = self._world.clock.monotonic_seconds()
        for address in self._lock_services:
            if address not in present:
                self._missed_since[address] = now
        for address in present:
            self._missed_since.pop(address, None)
        self._lock_services[:] = present

    def _require_all_reported(self, ttl_seconds_max: float) -> None:
        """Sessions of a lock service that was lost report to another one, if they live: within the
        longest time to live. A leader that has just begun does not know which ones were lost."""
        now = self._world.clock.monotonic_seconds()
        for address, since in list(self._missed_since.items()):
            if now - since < ttl_seconds_max:
                raise NotReady(
                    f"the lock service at {address} is gone: its sessions may still report to "
                    "another one"
                )
            del self._missed_since[address]
        if now - self._began_at < ttl_seconds_max:
            raise NotReady(
                "this master has just begun to lead: sessions of a lock service that was lost "
                "before may still report to another one"
            )

    def _timestamp_source(self) -> TimestampSource:
        if self._timestamps is None:
            if not self._oracles:
                raise NotReady("no oracle is known")
            self._timestamps = TimestampSource(self._world, self._oracles)
        return self._timestamps

    async def _close(self) -> None:
        for one in (self._old_locks, self._timestamps, self._owners):
            if one is not None:
                await one.close()


class _Owners:
    """Whether the owners of old locks live. This master holds none itself."""

    session_id = None

    def __init__(self, world: World, lock_services: list[str]) -> None:
        self._questions = LivenessQuestions(
            LockServiceCalls(world.network, lock_services), timeout_seconds=1.0
        )

    async def liveness(self, session_ids: Sequence[bytes]) -> list[Liveness]:
        return await self._questions.ask(session_ids)

    async def close(self) -> None:
        await self._questions.close()


def _one_by_one(
    work: Callable[[Tablet], Coroutine[Any, Any, None]],
) -> Callable[[list[Tablet]], Coroutine[Any, Any, None]]:
    """Each tablet on its own, a few at a time."""

    async def of_all(tablets: list[Tablet]) -> None:
        limit = asyncio.Semaphore(_TABLETS_AT_A_TIME)

        async def limited(tablet: Tablet) -> None:
            async with limit:
                await work(tablet)

        await asyncio.gather(*map(limited, tablets))

    return of_all
