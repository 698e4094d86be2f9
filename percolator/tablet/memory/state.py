"""The state that the parts of an open tablet share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from percolator.errors import (
    CellAddress,
    PercolatorError,
    SchemaChanged,
    StoreUnusable,
    TabletMoved,
)
from percolator.tablet.identity import TabletIdentity
from percolator.tablet.keys import TIMESTAMP_MAX
from percolator.tablet.lifetimes import FOREVER, Lifetimes
from percolator.tablet.limits import TabletLimits
from percolator.tablet.memory.change_feed import ChangeFeed
from percolator.tablet.memory.held_cells import HeldCells
from percolator.tablet.memory.last_change import LastChanges
from percolator.tablet.memory.load_fences import LoadFences
from percolator.tablet.memory.lock_mirror import LockMirror
from percolator.tablet.memory.notification_watch import NotificationWatch
from percolator.tablet.memory.notify_index import NotifyIndex
from percolator.tablet.memory.read_locks import ReadLocks
from percolator.tablet.memory.recent_writes import RecentWrites
from percolator.tablet.memory.statistics import TabletCounts
from percolator.tablet.memory.timestamp_guard import TimestampGuard
from percolator.tablet.memory.tombstones import Tombstones
from percolator.tablet.ownership import Ownership
from percolator.tablet.safe_points import SafePoints
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Clock, Storage


@dataclass(frozen=True)
class Collected:
    """The result of one pass of collection (collection.py)."""

    below: int = 0
    cells: int = 0
    """The number of cells deleted."""
    bytes: int = 0
    history_bytes: int = 0
    """The size of superseded versions that stay because they are above the safe point."""
    spared: bool = False
    """Whether deletions stayed because an observer has yet to be notified of them."""
    more_at: int = TIMESTAMP_MAX
    """Once the safe point has reached this timestamp, a value that stayed has expired."""
    missed_load: bool = False
    """Whether a bulk load was opened since the pass began. What it has stored may lie below, since
    its commit timestamp is as old as the load is long."""


CommitTimestamps = Callable[[int], Awaitable[int]]
"""Fetches that many consecutive timestamps, all handed out after the call; returns the first."""

Commits = Callable[[Sequence[tuple[CellAddress, int]]], Awaitable[Sequence[int]]]
"""Asks the primaries of transactions, given with their start timestamps, when these have committed;
0 for each that is not known to have."""


class TabletState:
    """One tablet's environment, its memory, and its reasons to refuse requests."""

    def __init__(
        self,
        identity: TabletIdentity,
        *,
        schema_version: int,
        storage: Storage[Any],
        clock: Clock,
        ownership: Ownership,
        on_closed: Callable[[PercolatorError], None],
        limits: TabletLimits,
        guard: TimestampGuard,
        timestamps: CommitTimestamps | None = None,
        commits: Commits | None = None,
        lifetimes: Lifetimes = FOREVER,
    ) -> None:
        self.identity = identity
        self.schema_version = schema_version
        self.lifetimes = lifetimes
        """Who reads takes them once, together with its cursor. They are replaced together with the
        schema's version, and while nothing is being written (upkeep.py)."""
        self.storage = storage
        self.clock = clock
        self.limits = limits
        self.mirror = LockMirror()
        self.held = HeldCells()
        self.index = NotifyIndex(limits.notifications_indexed_max)
        self.recent = RecentWrites(limits.recent_writes_max)
        self.last_changes = LastChanges(limits.recent_writes_max)
        self.read_locks = ReadLocks(limits.recent_writes_max)
        self.counters = TabletCounts(clock)
        self.guard = guard
        self.timestamps = timestamps
        """Without it, no transaction commits in one round."""
        self.commits = commits
        """Without it, no locks are rolled forward on the word of a client."""
        self.is_loaded = False
        """Memory has what the storage has. Until then, its counts are not those of the tablet."""
        self.counted_rows = (b"", b"")
        """The rows whose cells are stored here and counted: more than the tablet's own until it
        is trimmed. An empty end means up to the last row."""
        self.safe_points = SafePoints()
        self.collected = Collected()
        """The last complete pass since the tablet was opened."""
        self.tombstones = Tombstones()
        self.watch: NotificationWatch | None = None
        """Receives new notifications once they are durable."""
        self.load_fences = LoadFences()
        self.feed = ChangeFeed()
        self.closed_because: PercolatorError | None = None
        self._ownership = ownership
        self._on_closed = on_closed

    def require_open(self) -> None:
        if self.closed_because is not None:
            raise self.closed_because

    def require_target(self, target: pb.TabletTarget) -> None:
        """Refuses a request unless its target is this tablet at this epoch and schema version."""
        self.require_tablet(target)
        if target.schema_version != self.schema_version:
            raise self.schema_changed()

    def require_tablet(self, target: pb.TabletTarget) -> None:
        self.require_open()
        identity = self.identity
        if target.tablet_id != identity.tablet_id or target.epoch != identity.epoch:
            raise TabletMoved(
                f"asked for tablet {target.tablet_id} epoch {target.epoch}, this is {identity}",
                tablet_id=target.tablet_id,
                epoch=target.epoch,
            )

    async def require_ownership(self) -> None:
        """Call this after the work and before sending its response: if the directory still stands
        now, no newer owner had served anything when the work was done. Otherwise this closes the
        tablet and raises."""
        self.require_open()
        self._heard(stands=await self._ownership.stands())
        self.require_open()

    async def owned(self) -> bool:
        """Like `require_ownership`, for callers that answer *unknown* instead of raising."""
        if self.closed_because is None:
            self._heard(stands=await self._ownership.stands())
        return self.closed_because is None

    async def write_owned(self, batch: Any) -> bool:  # noqa: ANN401 - the storage's own type
        """Writes the batch durably, then returns whether this server still owns the tablet. The
        check happens while waiting for the disk anyway. Raises the storage's `failures`."""
        self._heard(stands=await self.storage.write(batch, self._ownership.look))
        return self.closed_because is None

    def _heard(self, *, stands: bool) -> None:
        if not stands:
            self.stop(self.moved("lost to a newer owner"))

    def stop(self, error: PercolatorError) -> None:
        """Closes the tablet to all requests and informs the server. The first reason counts."""
        if self.closed_because is None:
            self.closed_because = error
            self._on_closed(error)

    async def write(self, batch: Any) -> None:  # noqa: ANN401 - the storage's own type
        """Writes the batch durably. If it raises `StoreUnusable`, the tablet is closed."""
        try:
            await self.storage.write(batch)
        except self.storage.failures as error:
            raise self.storage_failed(error) from error

    def storage_failed(self, error: Exception) -> StoreUnusable:
        """Closes the tablet: after a failure, only the log, read at reopening, is reliable."""
        unusable = StoreUnusable(
            f"the storage of {self.identity} failed: {error}", fault=self.storage.fault(error)
        )
        unusable.__cause__ = error
        self.stop(unusable)
        return unusable

    def unreadable(self, error: Exception) -> StoreUnusable:
        """The error for a failed read. It fails only the request: other rows may be fine."""
        return StoreUnusable(
            f"{self.identity} cannot be read: {error}", fault=self.storage.fault(error)
        )

    def moved(self, how: str) -> TabletMoved:
        identity = self.identity
        return TabletMoved(
            f"{identity} was {how}", tablet_id=identity.tablet_id, epoch=identity.epoch
        )

    def require_lifetimes(self, lifetimes: Lifetimes) -> None:
        """Call this if a value that lies apart from its record is missing, with the times to live
        by which it was visible. If shorter ones have replaced them since, it may have expired and
        been collected, and has to be asked for again."""
        if lifetimes is not self.lifetimes:
            raise self.schema_changed()

    def schema_changed(self) -> SchemaChanged:
        return SchemaChanged(
            f"the schema is at version {self.schema_version}",
            table_id=self.identity.table_id,
            schema_version=self.schema_version,
        )
