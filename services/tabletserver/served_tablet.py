"""One tablet on this server, through everything that may happen to it.

It is opened, serves, may fail, and is opened again by itself: after an I/O error nobody knows what
the last batch left, so that LevelDB is closed and its log decides. A tablet whose directory no
longer stands is let go. Meanwhile every request gets the error that says which of these it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from structlog.stdlib import BoundLogger

from percolator.errors import NotReady, PercolatorError, StoreFault, StoreUnusable, TabletMoved
from percolator.tablet.limits import TabletLimits
from percolator.tablet.notification_watch import NotificationWatch
from percolator.tablet.tablet import Tablet, TabletIdentity
from percolator.v1 import tabletserver_pb2 as wire
from percolator.wire.status import to_detail
from percolator.world import Clock
from services.tabletserver.tablet_store import Ownership, TabletStore

REOPEN_SECONDS_MIN = 0.05
REOPEN_SECONDS_MAX = 5.0
OPENING_RETRY_SECONDS = 0.05


class Background(Protocol):
    """Runs work that nobody waits for; a failure there is not lost."""

    def __call__(self, name: str, work: Coroutine[Any, Any, object], /) -> asyncio.Task[Any]: ...


@dataclass
class TabletEvents:
    """What happened to all tablets of this process, those that have left it included."""

    reopened: int = 0
    """After an I/O error."""
    lost: int = 0
    """To a later owner, without an order to close."""
    cells_trimmed: int = 0
    """Of other tablets' rows, after splits."""


@dataclass(frozen=True)
class SharedByTablets:
    """What every tablet of a server shares."""

    store: TabletStore
    clock: Clock
    limits: TabletLimits
    background: Background
    log: BoundLogger
    open_tablets: Callable[[], int]
    watch: NotificationWatch
    events: TabletEvents = field(default_factory=TabletEvents)
    trimming: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One tablet at a time: each takes its share of this process's time."""


class ServedTablet:
    """Lives on one event loop."""

    def __init__(
        self,
        identity: TabletIdentity,
        schema_version: int,
        ownership: Ownership,
        shared: SharedByTablets,
        on_lost: Callable[[ServedTablet], None],
    ) -> None:
        self.identity = identity
        self.schema_version = schema_version
        """Acknowledged: nothing is judged under an older one, and what was is answered."""
        self._ordered_version = schema_version
        """The highest one asked for: under it the tablet judges once it is open."""
        self._ownership = ownership
        self._shared = shared
        self._on_lost = on_lost
        self._log = shared.log.bind(tablet=identity.tablet_id, epoch=identity.epoch)
        self._tablet: Tablet | None = None
        self._ended: Tablet | None = None
        """Serves no more, and is not closed yet: until then its LevelDB is open."""
        self._notifications_written = 0
        """Before the tablet was opened the last time: who compares counts relies on their never
        shrinking within an epoch."""
        self._error: PercolatorError | None = NotReady(
            f"tablet {identity.tablet_id} is being opened",
            retry_after_seconds=OPENING_RETRY_SECONDS,
        )
        # Opening, reopening and closing exclude each other: LevelDB is open at most once.
        self._changing = asyncio.Lock()
        self._closed = False
        self._reopening: asyncio.Task[Any] | None = None

    def serving(self) -> Tablet:
        """The open tablet, or the error that says why there is none."""
        if self._tablet is None:
            error = self._error or NotReady(f"tablet {self.identity.tablet_id} is closed")
            if not self._ownership.stands():
                # However long it may still be opened here: whoever asks has to go elsewhere.
                error = self._moved()
            # The same object for every request: without this its traceback grows with each.
            raise error.with_traceback(None)
        return self._tablet

    @property
    def error(self) -> PercolatorError | None:
        """Why it is not served; None while it is."""
        return None if self._tablet is not None else self._error

    async def open(self) -> None:
        """Serves from now on; `StoreUnusable` stays the error of every request."""
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

    async def set_schema_version(self, schema_version: int) -> None:
        """Judges under this version once it returns; a lower one is ignored. While the tablet is
        not open, that is acknowledged only by opening it."""
        ordered = self._ordered_version = max(self._ordered_version, schema_version)
        if self._tablet is not None:
            await self._tablet.set_schema_version(ordered)
            self.schema_version = max(self.schema_version, ordered)

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
            f"tablet {self.identity.tablet_id} is not served here any more",
            tablet_id=self.identity.tablet_id,
            epoch=self.identity.epoch,
        )

    def describe(self) -> wire.TabletDescription:
        """What it is, and how it fares."""
        if self._tablet is not None:
            description = self._tablet.describe()
            description.schema_version = self.schema_version
            return description
        description = wire.TabletDescription(
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

    def report(self) -> wire.ReportedTablet:
        """What the master has to know several times a second, and no more."""
        reported = wire.ReportedTablet(
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
            schema_version=self._ordered_version,
            storage=storage,
            clock=self._shared.clock,
            still_owner=self._ownership.stands,
            on_closed=lambda error: self._stopped_by_itself(tablet, error),
            limits=self._shared.limits,
            watch=self._shared.watch,
            notifications_written=self._notifications_written,
        )
        try:
            await tablet.open()
            while tablet.schema_version < self._ordered_version:
                # Ordered while it was being opened. Nobody has judged anything yet.
                await tablet.set_schema_version(self._ordered_version)
        except BaseException:
            await self._close(tablet)
            raise
        seconds = self._shared.clock.monotonic_seconds() - started
        self._log.info("tablet open", seconds=round(seconds, 3))
        return tablet

    async def _trim(self, tablet: Tablet) -> None:
        """After a split. Whatever ends it, the next owner, or the next opening, begins anew."""
        async with self._shared.trimming:
            try:
                cells = await tablet.trim()
            except PercolatorError as error:
                self._log.info("not trimmed to its end", reason=str(error))
                return
        self._shared.events.cells_trimmed += cells
        self._log.info("trimmed to its range", cells=cells)

    async def _close(self, tablet: Tablet) -> None:
        try:
            await tablet.close()
        except StoreUnusable as error:
            # It is closed anyway, and whatever was acknowledged is in its log.
            self._log.warning("tablet not closed cleanly", error=str(error))

    async def _close_ended(self) -> None:
        """Whoever changes the tablet next, while nobody else does; if that is broken off, whoever
        comes then waits for the same end."""
        if self._ended is not None:
            await self._close(self._ended)
            self._ended = None

    def _stopped_by_itself(self, tablet: Tablet, error: PercolatorError) -> None:
        if self._tablet is not tablet:
            # Failed while being opened or closed: whoever does that is told by an exception.
            return
        self._tablet, self._ended = None, tablet
        self._error = error
        # What the failed batch has notified may be there or not: one more says that it may.
        self._notifications_written = tablet.statistics().notifications_written + 1
        if isinstance(error, StoreUnusable):
            self._log.error("tablet closed itself, opening it again", error=str(error))
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
        pause = REOPEN_SECONDS_MIN
        while not self._closed:
            if not self._ownership.stands():
                # What is found there, if anything, is another owner's business.
                self._log.warning("tablet lost to a later owner before it could be opened again")
                self._lose()
                return
            try:
                await self.open()
            except StoreUnusable as error:
                if error.fault is StoreFault.DAMAGED:
                    self._log.error("tablet is damaged and stays closed", error=str(error))
                    return
                self._log.warning("tablet cannot be opened yet", error=str(error), pause=pause)
            else:
                self._shared.events.reopened += 1
                return
            await self._shared.clock.sleep(pause)
            pause = min(2 * pause, REOPEN_SECONDS_MAX)

    def _stop_waiting(self) -> None:
        # Called while nothing else changes this tablet, so that only a pause is cut short.
        if self._reopening is not None and self._reopening is not asyncio.current_task():
            self._reopening.cancel()
            self._reopening = None
