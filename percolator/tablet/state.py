"""What the parts of one tablet share while it is open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from percolator.errors import (
    PercolatorError,
    SchemaChanged,
    SnapshotTooOld,
    StoreUnusable,
    TabletMoved,
)
from percolator.tablet.limits import TabletLimits
from percolator.tablet.load_fences import LoadFences
from percolator.tablet.lock_mirror import LockMirror
from percolator.tablet.notification_watch import NotificationWatch
from percolator.tablet.notify_index import NotifyIndex
from percolator.tablet.recent_writes import RecentWrites
from percolator.tablet.statistics import Counters
from percolator.tablet.timestamp_guard import TimestampGuard
from percolator.tablet.tombstones import Tombstones
from percolator.timestamps import Timestamp
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Clock, Storage


@dataclass(frozen=True)
class TabletIdentity:
    """Which tablet this is, and of which term of ownership."""

    table_id: int
    tablet_id: int
    epoch: int
    start: bytes
    end: bytes
    """Rows from start (included) to end (excluded); an empty end means to the last row."""

    def __str__(self) -> str:
        return f"tablet {self.tablet_id} epoch {self.epoch}"


class SafePoints(NamedTuple):
    """Below them nothing is answered any more; stored before it is promised, and never lowered."""

    reads: int = 0
    """Of snapshots: what is superseded below it may be gone."""
    transactions: int = 0
    """Of prewrites and commits: the highest one of all tables, since a transaction's evidence may
    lie in another table than its locks."""
    collected: int = 0
    """Of roll-backs: it is raised when something is collected, and then all locks below it are
    settled, in all tables. A roll-back that was sent before that and comes late would find no
    commit, because that was collected, and mark what was committed as rolled back."""

    def raised_to(self, asked: SafePoints) -> SafePoints:
        return SafePoints(*map(max, self, asked))


@dataclass(frozen=True)
class Collected:
    """What one pass of collection found and did (collection.py)."""

    below: int = 0
    cells: int = 0
    """Deleted."""
    bytes: int = 0
    history_bytes: int = 0
    """Of superseded versions that stay, because they lie above the safe point."""
    spared: bool = False
    """Whether deletions stayed because somebody is still to be notified of them."""


class TabletState:
    """One tablet's surroundings, memory, and reasons to refuse."""

    def __init__(
        self,
        identity: TabletIdentity,
        *,
        schema_version: int,
        storage: Storage[Any],
        clock: Clock,
        still_owner: Callable[[], bool],
        on_closed: Callable[[PercolatorError], None],
        limits: TabletLimits,
    ) -> None:
        self.identity = identity
        self.schema_version = schema_version
        self.storage = storage
        self.clock = clock
        self.limits = limits
        self.mirror = LockMirror()
        self.index = NotifyIndex(limits.notifications_indexed_max)
        self.recent = RecentWrites(limits.recent_writes_max)
        self.counters = Counters(clock)
        self.guard = TimestampGuard(clock, limits.timestamp_lead_milliseconds)
        self.counted_rows = (b"", b"")
        """The rows whose cells are stored here, and counted: more than the tablet's own until it
        was trimmed. An empty end means to the last row."""
        self.safe_points = SafePoints()
        self.collected = Collected()
        """The last whole pass since the tablet was opened."""
        self.tombstones = Tombstones()
        self.watch: NotificationWatch | None = None
        """Told of what was notified, once it is durable."""
        self.load_fences = LoadFences()
        self.closed_because: PercolatorError | None = None
        self._still_owner = still_owner
        self._on_closed = on_closed

    def require_open(self) -> None:
        if self.closed_because is not None:
            raise self.closed_because

    def require_target(self, target: pb.TabletTarget) -> None:
        """Of a request: refuses it unless it means this tablet, this epoch and this schema."""
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

    def require_ownership(self) -> None:
        """After the work, before its answer leaves: if the directory still stands now, no newer
        owner had served anything when the work was done. Closes the tablet otherwise."""
        self.require_open()
        if not self._still_owner():
            self.stop(self.moved("lost to a newer owner"))
            self.require_open()

    def owned(self) -> bool:
        """As `require_ownership`, for whoever has to answer *unknown* instead."""
        if self.closed_because is None and not self._still_owner():
            self.stop(self.moved("lost to a newer owner"))
        return self.closed_because is None

    def stop(self, error: PercolatorError) -> None:
        """Closes the tablet to everybody and tells the server. The first reason counts."""
        if self.closed_because is None:
            self.closed_because = error
            self._on_closed(error)

    async def write(self, batch: Any) -> None:  # noqa: ANN401 - the storage's own type
        """Durable when it returns, unless it raises `StoreUnusable`: then the tablet is closed."""
        try:
            await self.storage.write(batch)
        except self.storage.failures as error:
            raise self.storage_failed(error) from error

    def storage_failed(self, error: Exception) -> StoreUnusable:
        """Closes the tablet: after a failure only the log, read at reopening, tells the truth."""
        unusable = StoreUnusable(
            f"the storage of {self.identity} failed: {error}", fault=self.storage.fault(error)
        )
        unusable.__cause__ = error
        self.stop(unusable)
        return unusable

    def moved(self, how: str) -> TabletMoved:
        identity = self.identity
        return TabletMoved(
            f"{identity} was {how}", tablet_id=identity.tablet_id, epoch=identity.epoch
        )

    def schema_changed(self) -> SchemaChanged:
        return SchemaChanged(
            f"the schema is at version {self.schema_version}",
            table_id=self.identity.table_id,
            schema_version=self.schema_version,
        )

    def too_old(self, timestamp: int, safe_point: int) -> SnapshotTooOld:
        return SnapshotTooOld(
            f"timestamp {timestamp} ({Timestamp(timestamp).describe()}) is older than the history "
            f"that is kept, which goes back to {safe_point} ({Timestamp(safe_point).describe()})",
            timestamp=timestamp,
            safe_point=safe_point,
        )
