"""All tablets of this server: opened and closed as the master says, found by every request.

One tablet that fails to open, or fails later, is listed with its error, and only it: the others
serve on. Orders about one tablet happen one after another.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from structlog.stdlib import BoundLogger

from percolator.errors import InvalidArgument, StoreUnusable, TabletMoved
from percolator.tablet.limits import TabletLimits
from percolator.tablet.notification_watch import NotificationWatch
from percolator.tablet.tablet import Tablet, TabletIdentity
from percolator.tablet.to_the_end import ToTheEnd
from percolator.v1 import tabletserver_pb2 as wire
from percolator.world import Clock
from services.tabletserver.served_tablet import (
    Background,
    ServedTablet,
    SharedByTablets,
    TabletEvents,
)
from services.tabletserver.tablet_store import Ancestry, TabletStore


class Tablets:
    """Lives on one event loop."""

    def __init__(
        self,
        store: TabletStore,
        clock: Clock,
        limits: TabletLimits,
        background: Background,
        log: BoundLogger,
        *,
        tablets_warn: int,
    ) -> None:
        self._served: dict[int, ServedTablet] = {}
        self._leaving: dict[ServedTablet, None] = {}
        """Let go, and not closed yet."""
        self._orders: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._to_the_end = ToTheEnd()
        """Orders, although whoever gave them has left: broken off in the middle, a tablet would be
        "being opened" for ever, and one that takes longer to open than its master waits would never
        be open."""
        self._store = store
        self._background = background
        self._log = log
        self._tablets_warn = tablets_warn
        self.watch = NotificationWatch()
        """Who is told of notifications in any of the tablets."""
        self._shared = SharedByTablets(
            store, clock, limits, background, log, lambda: len(self._served), self.watch
        )

    @property
    def events(self) -> TabletEvents:
        """What happened since the process began."""
        return self._shared.events

    def serving(self, target: wire.TabletTarget) -> Tablet:
        """The open tablet that a request means; the tablet itself compares epoch and schema."""
        served = self._served.get(target.tablet_id)
        if served is None:
            raise _not_here(target.tablet_id, target.epoch)
        return served.serving()

    def all(self) -> list[ServedTablet]:
        """Every tablet, whether it can be served or not."""
        return list(self._served.values())

    async def open(
        self, identity: TabletIdentity, schema_version: int, ancestry: Ancestry
    ) -> ServedTablet:
        """Serves the tablet at this epoch from now on. Repeating it is harmless."""
        _check(identity)
        return await self._to_the_end.run(self._open(identity, schema_version, ancestry))

    async def _open(
        self, identity: TabletIdentity, schema_version: int, ancestry: Ancestry
    ) -> ServedTablet:
        async with self._orders[identity.tablet_id]:
            present = self._served.get(identity.tablet_id)
            if present is not None and present.identity.epoch >= identity.epoch:
                return await self._open_again(present, identity, schema_version)
            if present is not None:
                # The next owner is this very process: two open LevelDBs of one tablet are not
                # kept apart by anything but this.
                await self._let_go(present)
            ownership = await self._store.take_over(identity, ancestry)
            served = ServedTablet(identity, schema_version, ownership, self._shared, self._on_lost)
            self._served[identity.tablet_id] = served
            self._warn_of_many()
            await served.open()
            self._background(
                f"clear up behind tablet {identity.tablet_id}", self._clear_up(identity)
            )
            return served

    async def close(self, tablet_id: int, epoch: int) -> None:
        """Flushes and closes the tablet. One that is not here at this epoch is closed already."""
        await self._to_the_end.run(self._close(tablet_id, epoch))

    async def _close(self, tablet_id: int, epoch: int) -> None:
        async with self._orders[tablet_id]:
            present = self._served.get(tablet_id)
            if present is None or present.identity.epoch < epoch:
                return
            if present.identity.epoch > epoch:
                raise _not_here(tablet_id, epoch)
            await self._let_go(present)

    async def close_all(self) -> None:
        """At the end of the process: what is flushed needs no replay."""
        await self._to_the_end.give_up()
        await asyncio.gather(*map(self._let_go, [*self.all(), *self._leaving]))

    def describe(self, tablet_ids: Iterable[int]) -> list[wire.TabletDescription]:
        """These tablets, or all; unknown ones are left out."""
        wanted = set(tablet_ids)
        return [
            served.describe()
            for tablet_id, served in sorted(self._served.items())
            if not wanted or tablet_id in wanted
        ]

    async def _open_again(
        self, present: ServedTablet, identity: TabletIdentity, schema_version: int
    ) -> ServedTablet:
        if present.identity.epoch > identity.epoch:
            raise _not_here(identity.tablet_id, identity.epoch)
        if present.identity != identity:
            raise InvalidArgument(
                "range", f"tablet {identity.tablet_id} is open here at this epoch as another one"
            )
        await present.set_schema_version(schema_version)
        await present.open()
        return present

    async def _let_go(self, served: ServedTablet) -> None:
        # Unlisted first: new requests learn at once that it moves.
        self._on_lost(served)
        self._leaving[served] = None
        await served.close()
        self._leaving.pop(served, None)
        self._log.info("tablet closed", tablet=served.identity.tablet_id)

    def _on_lost(self, served: ServedTablet) -> None:
        if self._served.get(served.identity.tablet_id) is served:
            del self._served[served.identity.tablet_id]

    def _warn_of_many(self) -> None:
        if len(self._served) > self._tablets_warn:
            self._log.warning(
                "many tablets on one server: each costs an fsync per batch",
                tablets=len(self._served),
                tablets_warn=self._tablets_warn,
            )

    async def _clear_up(self, identity: TabletIdentity) -> None:
        try:
            await self._store.remove_superseded(identity)
        except StoreUnusable as error:
            # Costs space until the next owner clears up, and nothing else.
            self._log.warning("not cleared up", tablet=identity.tablet_id, error=str(error))


def _not_here(tablet_id: int, epoch: int) -> TabletMoved:
    return TabletMoved(
        f"tablet {tablet_id} is not served here at epoch {epoch}", tablet_id=tablet_id, epoch=epoch
    )


def _check(identity: TabletIdentity) -> None:
    for field in ("table_id", "tablet_id", "epoch"):
        if getattr(identity, field) < 1:
            raise InvalidArgument(field, "expected 1 or more, found 0")
    if identity.end and identity.start >= identity.end:
        raise InvalidArgument("range", "expected the start below the end")
