"""All tablets of this server: opened and closed as the master orders, looked up by every request.

If a tablet fails to open, or fails later, it is listed with its error; the others keep serving.
Orders about one tablet are carried out one after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from structlog.stdlib import BoundLogger

from percolator.errors import InvalidArgument, StoreUnusable, TabletMoved
from percolator.services.chassis.epoch_directory import EPOCH_MAX
from percolator.services.tabletserver.order_turns import OrderTurns
from percolator.services.tabletserver.served_tablet import (
    Background,
    Schema,
    ServedTablet,
    SharedByTablets,
    TabletEvents,
)
from percolator.services.tabletserver.tablet_store import Ancestry, TabletStore
from percolator.tablet.identity import TabletIdentity
from percolator.tablet.limits import TabletLimits
from percolator.tablet.memory.notification_watch import NotificationWatch
from percolator.tablet.memory.state import Commits, CommitTimestamps
from percolator.tablet.memory.timestamp_guard import TimestampGuard
from percolator.tablet.tablet import Tablet
from percolator.tasks import Tasks
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Clock, Random


class Tablets:
    """All tablets of this server. Belongs to one event loop."""

    def __init__(
        self,
        store: TabletStore,
        clock: Clock,
        random: Random,
        limits: TabletLimits,
        background: Background,
        log: BoundLogger,
        *,
        guard: TimestampGuard,
        timestamps: CommitTimestamps | None = None,
        commits: Commits | None = None,
        tablets_warn: int,
    ) -> None:
        self._served: dict[int, ServedTablet] = {}
        self._leaving: dict[ServedTablet, None] = {}
        """Tablets that were released, but are not closed yet."""
        self._orders = OrderTurns()
        self._under_way = Tasks()
        """Orders, which continue even if their caller has gone. If one were cancelled half-way, a
        tablet would be "being opened" forever, and one that takes longer to open than its master
        waits would never be open."""
        self._store = store
        self._background = background
        self._log = log
        self._tablets_warn = tablets_warn
        self._warn_above = tablets_warn
        """The number of tablets above which the log says it, or says it again."""
        self.watch = NotificationWatch()
        """The streams that receive notifications from any of the tablets."""
        self.guard = guard
        """What is known of the oracle's time, for all tablets."""
        self._shared = SharedByTablets(
            store,
            clock,
            random,
            limits,
            background,
            log,
            lambda: len(self._served),
            self.watch,
            guard,
            timestamps,
            commits,
        )

    @property
    def events(self) -> TabletEvents:
        """What has happened since the process started."""
        return self._shared.events

    async def serving(self, target: pb.TabletTarget) -> Tablet:
        """The open tablet that a request names; the tablet itself checks epoch and schema."""
        served = self._served.get(target.tablet_id)
        if served is None:
            raise _not_here(target.tablet_id, target.epoch)
        return await served.serving()

    def all(self) -> list[ServedTablet]:
        """Every tablet, whether it can be served or not."""
        return list(self._served.values())

    async def open(
        self, identity: TabletIdentity, schema: Schema, ancestry: Ancestry
    ) -> ServedTablet:
        """Serves the tablet at this epoch from now on. Repeating the order is harmless."""
        _check(identity)
        return await self._under_way.run_to_the_end(self._open(identity, schema, ancestry))

    async def _open(
        self, identity: TabletIdentity, schema: Schema, ancestry: Ancestry
    ) -> ServedTablet:
        async with self._orders.turn(identity.tablet_id):
            present = self._served.get(identity.tablet_id)
            if present is not None and present.identity.epoch >= identity.epoch:
                return await self._open_again(present, identity, schema)
            if present is not None:
                # The next owner is this very process, and nothing else would keep apart two open
                # LevelDBs of one tablet.
                await self._let_go(present)
            ownership = await self._store.take_over(identity, ancestry)
            served = ServedTablet(identity, schema, ownership, self._shared, self._on_lost)
            self._served[identity.tablet_id] = served
            self._warn_of_many()
            await self._opened(served)
            return served

    async def close(self, tablet_id: int, epoch: int) -> None:
        """Flushes and closes the tablet. One that is not here at this epoch is closed already."""
        await self._under_way.run_to_the_end(self._close(tablet_id, epoch))

    async def _close(self, tablet_id: int, epoch: int) -> None:
        async with self._orders.turn(tablet_id):
            present = self._served.get(tablet_id)
            if present is None or present.identity.epoch < epoch:
                return
            if present.identity.epoch > epoch:
                raise _not_here(tablet_id, epoch)
            await self._let_go(present)

    async def close_all(self) -> None:
        """Closes all tablets at the end of the process: what is flushed needs no replay."""
        await self._under_way.cancel()
        await asyncio.gather(*map(self._let_go, [*self.all(), *self._leaving]))

    def describe(self, tablet_ids: Iterable[int]) -> list[pb.TabletDescription]:
        """Describes these tablets, or all; unknown ones are left out."""
        wanted = set(tablet_ids)
        return [
            served.describe()
            for tablet_id, served in sorted(self._served.items())
            if not wanted or tablet_id in wanted
        ]

    async def _open_again(
        self, present: ServedTablet, identity: TabletIdentity, schema: Schema
    ) -> ServedTablet:
        if present.identity.epoch > identity.epoch:
            raise _not_here(identity.tablet_id, identity.epoch, present.identity.epoch)
        if present.identity != identity:
            raise InvalidArgument(
                "range",
                f"tablet {identity.tablet_id} is open here at this epoch with another identity",
            )
        await present.set_schema(schema)
        if present.error is not None:
            # It failed to open before, or it is just being opened again after an I/O error.
            await self._opened(present)
        return present

    async def _opened(self, served: ServedTablet) -> None:
        identity = served.identity
        await served.open()
        if served.error is None:  # or it was closed meanwhile
            name = f"clear up behind tablet {identity.tablet_id}"
            self._background(name, self._clear_up(identity))

    async def _let_go(self, served: ServedTablet) -> None:
        # Unlist it first: new requests learn at once that it moves.
        self._on_lost(served)
        self._leaving[served] = None
        await served.close()
        self._leaving.pop(served, None)
        self._log.info("tablet closed", tablet=served.identity.tablet_id)

    def _on_lost(self, served: ServedTablet) -> None:
        if self._served.get(served.identity.tablet_id) is served:
            del self._served[served.identity.tablet_id]

    def _warn_of_many(self) -> None:
        if len(self._served) <= self._tablets_warn:
            self._warn_above = self._tablets_warn
        elif len(self._served) > self._warn_above:
            # Not with each tablet: one server may be given hundreds within seconds.
            self._warn_above = 2 * len(self._served)
            self._log.warning(
                "many tablets on one server: each costs an fsync per batch",
                tablets=len(self._served),
                tablets_warn=self._tablets_warn,
            )

    async def _clear_up(self, identity: TabletIdentity) -> None:
        try:
            await self._store.remove_superseded(identity)
        except StoreUnusable as error:
            # The only cost is space, until the next owner cleans up.
            self._log.warning(
                "leftovers of former owners not deleted",
                tablet=identity.tablet_id,
                error=str(error),
            )


def _not_here(tablet_id: int, epoch: int, highest_epoch: int = 0) -> TabletMoved:
    return TabletMoved(
        f"tablet {tablet_id} is not served here at epoch {epoch}",
        tablet_id=tablet_id,
        epoch=epoch,
        highest_epoch=highest_epoch,
    )


def _check(identity: TabletIdentity) -> None:
    for field in ("table_id", "tablet_id", "epoch"):
        if getattr(identity, field) < 1:
            raise InvalidArgument(field, "expected 1 or more, found 0")
    if identity.epoch > EPOCH_MAX:
        # No later owner could have a higher one: the tablet would be lost to all but this server.
        raise InvalidArgument("epoch", f"expected at most {EPOCH_MAX}, found {identity.epoch}")
    if identity.end and identity.start >= identity.end:
        raise InvalidArgument("range", "expected the start below the end")
