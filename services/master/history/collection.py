"""Collection of old versions: in rounds, in the only order that loses nothing.

1. Decide how far: as far as each table's retention allows, but nothing that a session or pin needs.
2. Write the decision down, and look at the sessions again. A pin that was set meanwhile wins: the
   tables whose history it would lose are left alone.
3. Only now is anything collected: by tablets (tablet_collecting.py), or row by row
   (row_collecting.py).

A round that fails at any step has deleted nothing that is needed, and the next one starts over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from percolator.errors import NotReady, PercolatorError
from percolator.protocol.environment import Timestamps
from percolator.services.master.history import safe_points
from percolator.services.master.history.collecting import Collecting, TableCollected
from percolator.services.master.history.history_needs import HistoryNeeds, history_needs
from percolator.services.master.history.safe_points import ClusterSafePoints
from percolator.services.master.map.catalogue import Table
from percolator.services.master.map.map_store import StoredMap
from percolator.services.master.oracle_time import OracleTime
from percolator.services.master.registry import Registry
from percolator.timestamps import SEQUENCE_BITS, seconds_between
from percolator.v1 import cluster_pb2
from percolator.v1.lockservice_pb2 import HistoryLimits
from percolator.world import World

_TIMESTAMP_SECONDS = 5.0

_log = structlog.get_logger("percolator.master")


@dataclass(frozen=True)
class CollectionTimes:
    """How much history is kept."""

    round_seconds: float = 60.0
    retention_seconds: float = 3600.0
    """For tables without a value of their own."""
    retention_min_seconds: float = 60.0
    """No table may keep less. Longer than any transaction may take."""
    client_held_seconds_max: float = 3 * 86_400.0
    """How much older than the longest retention the history is that a session or pin may hold
    back. Also for those of servers, which act for clients."""
    admin_held_seconds_max: float = 0.0
    """The same for those of administrators; 0 means without limit."""


class Collection:
    """`run` has to run while this master leads."""

    def __init__(
        self,
        world: World,
        store: StoredMap[Any],
        registry: Registry,
        oracle_time: OracleTime,
        times: CollectionTimes,
        collecting: Callable[[Timestamps], Collecting],
    ) -> None:
        """`collecting` makes what collects: it resolves old locks with these timestamps."""
        self._world = world
        self._store = store
        self._registry = registry
        self.times = times
        self._oracle_time = oracle_time
        self._lock_services: list[str] = []
        self._missed_since: dict[str, float] = {}
        """Lock services that have gone, by address, and when that was noticed."""
        self._began_at = world.clock.monotonic_seconds()
        self._make_collecting = collecting
        self._collecting: Collecting | None = None
        self._safe_points: ClusterSafePoints | None = None
        self._wanted: dict[int, int] = {}
        """The tables' safe points if no session or pin needed history."""
        self.now = 0
        """The oracle's time when the last round began."""
        self.needs = HistoryNeeds()
        self.error: PercolatorError | None = None
        """Why the last round failed; None if it succeeded."""
        self.finished_at: float | None = None
        self.rounds = 0
        self.failures = 0

    @property
    def safe_points(self) -> ClusterSafePoints:
        """As they are written down. Raises `NotReady` before they have been read: a caller that was
        told that there are none would believe that all history is still there."""
        if self._safe_points is None:
            raise NotReady(
                "this master has just begun to lead: it is still reading the safe points"
            )
        return self._safe_points

    def known_safe_point(self, table_id: int) -> int:
        """0 if none of the table's history has been given up, or if it is not known yet."""
        return 0 if self._safe_points is None else self._safe_points.reads.get(table_id, 0)

    @property
    def held_seconds(self) -> float:
        """By how much the history that a session or pin needs is older than what any table would
        keep without it."""
        newest = max(self._wanted.values(), default=0)
        return seconds_between(self.needs.oldest, newest) if 0 < self.needs.oldest < newest else 0.0

    @property
    def held(self) -> bool:
        """Whether a session or pin holds back history that a table's retention would give up."""
        return self.held_seconds > 0

    @property
    def old_locks_resolved(self) -> int:
        return 0 if self._collecting is None else self._collecting.locks_resolved

    def collected(self, table_id: int) -> TableCollected:
        """What is known of the collection of a table."""
        found = self._collecting
        return TableCollected() if found is None else found.collected(table_id)

    async def run(self) -> None:
        """Runs until cancelled."""
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
        self._learn_lock_services()
        timestamps = self._oracle_time.source()
        self.now = await timestamps.get(timeout_seconds=_TIMESTAMP_SECONDS)
        decided = await self._decide()
        await safe_points.store(self._store.leadership, decided)
        self._safe_points = decided
        self.needs = needs = await self._needs()
        ordered = decided.allowed_by(needs.oldest)
        if decided.reads and not ordered.reads:
            who = needs.description or "a session"
            raise NotReady(f"{who} needs history since {needs.oldest}, in all tables")
        if self._collecting is None:
            self._collecting = self._make_collecting(timestamps)
        await self._collecting.collect(ordered)
        self.error = None
        self.rounds += 1
        self.finished_at = self._world.clock.monotonic_seconds()

    async def _decide(self) -> ClusterSafePoints:
        """Never below an earlier decision, even one that no tablet heard of."""
        self._wanted = {
            table.table_id: self._ago(self._retention_seconds(table))
            for table in self._store.current.tables.values()
        }
        self.needs = needs = await self._needs()
        self._require_all_reported(needs.ttl_seconds_max)
        oldest = needs.oldest or self.now
        return self.safe_points.raised({one: min(at, oldest) for one, at in self._wanted.items()})

    async def _needs(self) -> HistoryNeeds:
        times = self.times
        tables = self._store.current.tables.values()
        longest = max(map(self._retention_seconds, tables), default=times.retention_seconds)
        limits = HistoryLimits(clients_since=self._ago(longest + times.client_held_seconds_max))
        if times.admin_held_seconds_max:
            limits.admins_since = self._ago(longest + times.admin_held_seconds_max)
        return await history_needs(self._world.network, self._lock_services, limits)

    def _retention_seconds(self, table: Table) -> float:
        return table.retention_milliseconds / 1000 or self.times.retention_seconds

    def _ago(self, seconds: float) -> int:
        """The timestamp of so long before this round."""
        return max(0, self.now - (int(seconds * 1000) << SEQUENCE_BITS))

    # ------------------------------------------------------------------------- servers

    def _learn_lock_services(self) -> None:
        present = [
            one.address
            for one in self._registry.servers()
            if one.kind == cluster_pb2.SERVICE_KIND_LOCK_SERVICE
        ]
        now = self._world.clock.monotonic_seconds()
        for address in self._lock_services:
            if address not in present:
                self._missed_since[address] = now
        for address in present:
            self._missed_since.pop(address, None)
        self._lock_services[:] = present

    def _require_all_reported(self, ttl_seconds_max: float) -> None:
        """Living sessions of a lost lock service report to another one within the longest time to
        live. A leader that has just begun does not know which lock services were lost before."""
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

    async def _close(self) -> None:
        if self._collecting is not None:
            await self._collecting.close()
