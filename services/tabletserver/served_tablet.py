"""One tablet on this server, through everything that may happen to it.

It is opened, serves, may fail, and is reopened automatically: after an I/O error it is not known
what the last batch left, so LevelDB is closed and its log decides. A tablet whose directory no
longer stands is released. Meanwhile every request gets the error that says which case it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from structlog.stdlib import BoundLogger

from percolator.errors import NotReady, PercolatorError, StoreFault, StoreUnusable, TabletMoved
from percolator.services.chassis.coordinator import Trouble
from percolator.services.tabletserver.tablet_store import TabletStore
from percolator.tablet.identity import TabletIdentity
from percolator.tablet.lifetimes import Ttls
from percolator.tablet.limits import TabletLimits
from percolator.tablet.memory.notification_watch import NotificationWatch
from percolator.tablet.memory.state import Commits, CommitTimestamps
from percolator.tablet.memory.timestamp_guard import TimestampGuard
from percolator.tablet.ownership import Ownership
from percolator.tablet.tablet import Tablet
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.backoff import Backoff
from percolator.wire.status import to_detail
from percolator.world import Clock, Random

REOPEN_SECONDS_MIN = 0.05
REOPEN_SECONDS_MAX = 5.0
OPENING_RETRY_SECONDS = 0.05


class Background(Protocol):
    """Runs work in the background; a failure there is not lost."""

    def __call__(self, name: str, work: Coroutine[Any, Any, object], /) -> asyncio.Task[Any]: ...


class Schema(NamedTuple):
    """What a tablet has to know of its table's schema."""

    version: int
    change_feed: bool = False
    ttls: Ttls = ()


@dataclass
class TabletEvents:
    """What happened to all tablets of this process, including those that have left it."""

    reopened: int = 0
    """How often a tablet was reopened after an I/O error."""
    lost: int = 0
    """How many tablets were lost to a later owner, without an order to close."""
    cells_trimmed: int = 0
    """How many cells were deleted after splits because their rows belong to other tablets."""


@dataclass(frozen=True)
class SharedByTablets:
    """What every tablet of a server shares."""

    store: TabletStore
    clock: Clock
    random: Random
    limits: TabletLimits
    background: Background
    log: BoundLogger
    open_tablets: Callable[[], int]
    watch: NotificationWatch
    guard: TimestampGuard
    timestamps: CommitTimestamps | None = None
    commits: Commits | None = None
    events: TabletEvents = field(default_factory=TabletEvents)
    trimming: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held to trim a tablet, one at a time: each takes its share of this process's time."""


class ServedTablet:
    """One tablet of this server. Belongs to one event loop."""

    def __init__(
        self,
        identity: TabletIdentity,
        schema: Schema,
        ownership: Ownership,
        shared: SharedByTablets,
        on_lost: Callable[[ServedTablet], None],
    ) -> None:
        self.identity = identity
        self.schema_version = schema.version
        """The acknowledged version: nothing is judged under an older one any longer, and everything
        that was judged under one has been answered."""
        self._ordered = schema
        """The newest schema that was requested: the tablet judges under it once it is open."""
        self._ownership = ownership
        self._shared = shared
        self._on_lost = on_lost
        self._log = shared.log.bind(tablet=identity.tablet_id, epoch=identity.epoch)
        self._tablet: Tablet | None = None
        self._ended: Tablet | None = None
        """A tablet that no longer serves, and is not closed yet: until then its LevelDB is open."""
        self._notifications_written = 0
        """Those of before the tablet was last opened. Comparing counts works only if they never
        shrink within an epoch."""
        self._error: PercolatorError | None = NotReady(
            f"tablet {identity.tablet_id} is being opened",
            retry_after_seconds=OPENING_RETRY_SECONDS,
        )
        # Opening, reopening and closing exclude each other: LevelDB is open at most once.
        self._changing = asyncio.Lock()
        self._closed = False
        self._reopening: asyncio.Task[Any] | None = None

    async def serving(self) -> Tablet:
        """The open tablet, or the error that says why there is none."""
        if self._tablet is None:
            error = self._error or NotReady(f"tablet {self.identity.tablet_id} is closed")
            if not await self._ownership.stands():
                # Even if it is still being opened here, the caller has to go elsewhere.
                error = self._moved()
            # All requests get the same object: without this, its traceback would grow with each.
            raise error.with_traceback(None)
        return self._tablet

    @property
    def error(self) -> PercolatorError | None:
        """Why it is not served; None while it is."""
        return None if self._tablet is not None else self._error

    async def open(self) -> None:
        """Serves from now on; after `StoreUnusable`, every request gets that error."""
        async with self._changing:
            if self._closed or self._tablet is not None:
                return
            await self._close_ended()
            try:
                self._tablet = await self._opened()
            except StoreUnusable as error:
                self._error = error
                raise
            self.schema_version = self._tablet.schema_version
            self._error = None
            if self._tablet.needs_trimming:
                name = f"trim tablet {self.identity.tablet_id}"
                self._shared.background(name, self._trim(self._tablet))

    async def set_schema(self, schema: Schema) -> None:
        """Once this returns, the tablet judges under this schema; an older one is ignored. While
        the tablet is not open, only opening it acknowledges the schema."""
        ordered = self._ordered = max(self._ordered, schema)
        if self._tablet is not None:
            await self._follow(self._tablet, ordered)
            self.schema_version = max(self.schema_version, ordered.version)

    @staticmethod
    async def _follow(tablet: Tablet, schema: Schema) -> None:
        await tablet.set_schema_version(
            schema.version, change_feed=schema.change_feed, ttls=schema.ttls
        )

    async def close(self) -> None:
        """Lets the running batch finish, flushes, and never opens again."""
        self._closed = True
        async with self._changing:
            self._stop_waiting()
            self._error = self._moved()
            if self._tablet is not None:
                self._ended, self._tablet = self._tablet, None
            await self._close_ended()

    def _moved(self) -> TabletMoved:
        return TabletMoved(
            f"tablet {self.identity.tablet_id} is no longer served here",
            tablet_id=self.identity.tablet_id,
            epoch=self.identity.epoch,
        )

    def describe(self) -> pb.TabletDescription:
        """What it is, and its current state."""
        if self._tablet is not None:
            description = self._tablet.describe()
            description.schema_version = self.schema_version
            return description
        description = pb.TabletDescription(
            table_id=self.identity.table_id,
            tablet_id=self.identity.tablet_id,
            epoch=self.identity.epoch,
            schema_version=self.schema_version,
        )
        description.range.start = self.identity.start
        description.range.end = self.identity.end
        if self._error is not None:
            description.error.CopyFrom(to_detail(self._error))
        return description

    def report(self) -> pb.ReportedTablet:
        """What the master needs to know several times a second, and no more."""
        reported = pb.ReportedTablet(
            tablet_id=self.identity.tablet_id,
            epoch=self.identity.epoch,
            schema_version=self.schema_version,
        )
        if self._tablet is None and self._error is not None:
            reported.error.CopyFrom(to_detail(self._error))
        return reported

    async def _opened(self) -> Tablet:
        started = self._shared.clock.monotonic_seconds()
        storage = await self._shared.store.open(
            self._ownership, open_tablets=self._shared.open_tablets()
        )
        tablet = Tablet(
            self.identity,
            schema_version=self._ordered.version,
            change_feed=self._ordered.change_feed,
            ttls=self._ordered.ttls,
            storage=storage,
            clock=self._shared.clock,
            ownership=self._ownership,
            on_closed=lambda error: self._stopped_by_itself(tablet, error),
            limits=self._shared.limits,
            guard=self._shared.guard,
            watch=self._shared.watch,
            timestamps=self._shared.timestamps,
            commits=self._shared.commits,
            notifications_written=self._notifications_written,
        )
        try:
            await tablet.open()
            while tablet.schema_version < self._ordered.version:
                # Ordered while it was being opened. Nothing has been judged yet.
                await self._follow(tablet, self._ordered)
        except BaseException:
            await self._close(tablet)
            raise
        seconds = self._shared.clock.monotonic_seconds() - started
        self._log.info("tablet open", seconds=round(seconds, 3))
        return tablet

    async def _trim(self, tablet: Tablet) -> None:
        """Trims after a split. If this is interrupted, the next owner or the next opening starts it
        again."""
        async with self._shared.trimming:
            try:
                cells = await tablet.trim()
            except PercolatorError as error:
                self._log.info("trimming was interrupted", reason=str(error))
                return
        self._shared.events.cells_trimmed += cells
        self._log.info("trimmed to its range", cells=cells)

    async def _close(self, tablet: Tablet) -> None:
        try:
            await tablet.close()
        except StoreUnusable as error:
            # It is closed anyway, and everything that was acknowledged is in its log.
            self._log.warning("tablet not closed cleanly", error=str(error))

    async def _close_ended(self) -> None:
        """Closes a tablet that no longer serves. The next change of the tablet does this, under the
        lock. If it is cancelled, the change after it closes the same one."""
        if self._ended is not None:
            await self._close(self._ended)
            self._ended = None

    def _stopped_by_itself(self, tablet: Tablet, error: PercolatorError) -> None:
        if self._tablet is not tablet:
            # Failed while being opened or closed: that operation raises the error.
            return
        self._tablet, self._ended = None, tablet
        self._error = error
        # The notifications of the failed batch may exist or not: one more says that they may.
        self._notifications_written = tablet.statistics().notifications_written + 1
        if isinstance(error, StoreUnusable):
            self._log.error("tablet closed itself, reopening it", error=str(error))
        else:
            self._log.warning("tablet lost to a later owner", error=str(error))
        self._reopening = self._shared.background(
            f"tablet {self.identity.tablet_id} after {type(error).__name__}",
            self._after(error),
        )

    async def _after(self, error: PercolatorError) -> None:
        async with self._changing:
            await self._close_ended()
        if isinstance(error, StoreUnusable):
            await self._reopen()
        else:
            self._lose()

    def _lose(self) -> None:
        self._closed = True
        self._shared.events.lost += 1
        self._on_lost(self)

    async def _reopen(self) -> None:
        shared = self._shared
        # Partly random: a failed disk has closed all tablets of this server at once.
        backoff = Backoff(shared.clock, shared.random, REOPEN_SECONDS_MIN, REOPEN_SECONDS_MAX)
        trouble = Trouble(self._log, "tablet cannot be opened yet")
        while not self._closed:
            if not await self._ownership.stands():
                # What is found there, if anything, belongs to another owner.
                self._log.warning("tablet lost to a later owner before it could be reopened")
                self._lose()
                return
            try:
                await self.open()
            except StoreUnusable as error:
                if error.fault is StoreFault.DAMAGED:
                    self._log.error("tablet is damaged and stays closed", error=str(error))
                    return
                pause = backoff.next_seconds()
                trouble.lasts(error)
            else:
                shared.events.reopened += 1
                return
            await shared.clock.sleep(pause)

    def _stop_waiting(self) -> None:
        # Called while nothing else changes this tablet, so that this cuts short only a pause.
        if self._reopening is not None and self._reopening is not asyncio.current_task():
            self._reopening.cancel()
            self._reopening = None
