"""Every tablet is served by a living server: the loop that makes what is so what was decided.

It compares the map with what the servers report, over and over: a tablet of a dead server is given
to a living one, durably, before that one hears of it; a tablet that its server does not serve is
ordered there; one that is served by somebody else is ordered to be closed. Every order may be lost,
late or repeated: the epoch directories decide what it can still do. So a restarted master has
nothing to recover but the map.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Collection

import structlog

from percolator.errors import (
    NotReady,
    PercolatorError,
    StoreUnusable,
    TabletMoved,
)
from percolator.v1 import tabletserver_pb2 as wire
from percolator.v1.cells_pb2 import RowRange
from percolator.wire import methods
from percolator.world import World
from services.master.closing import Closing, Start
from services.master.cluster_map import ClusterMap, Tablet
from services.master.map_store import MapStore
from services.master.server_watch import ServerWatch, WatchedServer

_ROUND_SECONDS = 0.5
"""The longest pause between two comparisons; news shorten it."""
_ORDER_SECONDS = 10.0
_ORDERS_PER_SERVER = 8
_RETRY_SECONDS_MIN = 0.1
_RETRY_SECONDS_MAX = 10.0
_POLL_SECONDS = 0.02
_BROKEN_AFTER_FAILURES = 5
"""In a row, within about three seconds."""

_log = structlog.get_logger("percolator.master")


class Assignment:
    """`run` has to run while this master leads."""

    def __init__(
        self,
        world: World,
        store: MapStore,
        watch: ServerWatch,
        start: Start,
        *,
        gather_seconds: float,
    ) -> None:
        """For `gather_seconds` after the first server is there, tablets without an owner wait, so
        that not all of them go to the one that happens to register first."""
        self._world = world
        self._store = store
        self._watch = watch
        self._start = start
        self._gather_seconds = gather_seconds
        self._gathered_at: float | None = None
        """None while there is no server."""
        self._news = asyncio.Event()
        self._ordered: set[tuple[int, int]] = set()
        """(tablet, epoch) whose order is on its way. One to a server that is silent may take long,
        and is over when the tablet is given to another one."""
        self._used_up: set[tuple[int, int]] = set()
        """(tablet, epoch) that cannot be opened any more."""
        self._retries: dict[int, tuple[int, float]] = {}
        """Per tablet: failed orders in a row, and when the next one may go out."""
        self._limits: dict[str, asyncio.Semaphore] = {}
        self._held: set[int] = set()
        self.closing = Closing(world, store, watch, start, self._held)
        self.errors: dict[int, PercolatorError] = {}
        """Why a tablet is not served, by id."""

    # ------------------------------------------------------------------------- questions

    def is_served(self, tablet: Tablet) -> bool:
        """Its owner has said so, at this epoch and under the present schema."""
        server = self._watch.servers.get(tablet.server_id)
        if server is None or server.is_dead():
            return False
        reported = server.reported.get(tablet.tablet_id)
        table = self._store.current.tables[tablet.table_id]
        return (
            reported is not None
            and reported.epoch == tablet.epoch
            and reported.schema_version >= table.schema_version
            and not reported.HasField("error")
        )

    def is_broken(self, tablet: Tablet) -> bool:
        """Its orders fail again and again: nobody knows when it will be served."""
        return self._retries.get(tablet.tablet_id, (0, 0.0))[0] >= _BROKEN_AFTER_FAILURES

    def usable(self) -> list[WatchedServer]:
        """The living servers that take tablets."""
        draining = self._store.current.draining
        return [one for one in self._watch.alive() if one.server_id not in draining]

    def preferred(self) -> list[WatchedServer]:
        """Those of them that do not come and go, if there are any."""
        usable = self.usable()
        steady = {one.server_id for one in self._watch.steady()}
        return [one for one in usable if one.server_id in steady] or usable

    def load(self) -> Counter[str]:
        """Tablets by server id."""
        return Counter(tablet.server_id for tablet in self._store.current.tablets.values())

    async def until_served(self, tablet_ids: Collection[int], deadline: float) -> None:
        """Returns when all that are still there are served; `NotReady` names one that is not."""
        self.wake()
        while True:
            tablets = self._store.current.tablets
            missing = [
                one for key in tablet_ids if (one := tablets.get(key)) and not self.is_served(one)
            ]
            if not missing:
                return
            if self._world.clock.monotonic_seconds() >= deadline:
                reason = self.errors.get(missing[0].tablet_id, "no server has opened it yet")
                raise NotReady(
                    f"{len(missing)} tablets are not served, such as {missing[0].tablet_id}: "
                    f"{reason}; it goes on in the background"
                )
            await self._world.clock.sleep(_POLL_SECONDS)

    def wake(self) -> None:
        """Something has changed: compare at once."""
        self._news.set()

    def hold(self, tablet_id: int) -> None:
        """Somebody is changing this tablet by hand: no orders. Only once at a time."""
        if tablet_id in self._held:
            raise NotReady(f"tablet {tablet_id} is being moved or split", retry_after_seconds=0.1)
        self._held.add(tablet_id)

    def let_go(self, tablet_id: int) -> None:
        self._held.discard(tablet_id)
        self.wake()

    # ------------------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Until cancelled, or until this master has been deposed."""
        while True:
            self._news.clear()
            try:
                await self._note_existing()
                await self._assign_orphans()
            except StoreUnusable as error:
                _log.error("no tablet can be assigned", error=str(error))
            self._order()
            self.closing.close_strays()
            try:
                async with asyncio.timeout(_ROUND_SECONDS):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _note_existing(self) -> None:
        """What was served may not begin empty any more, whatever became of its directory."""
        new = [one for one in self._store.current.tablets.values() if not one.exists]
        if not any(map(self.is_served, new)):
            return

        def decide(current: ClusterMap) -> tuple[ClusterMap, None]:
            found = [one for one in current.tablets.values() if not one.exists]
            return current.with_existing([one for one in found if self.is_served(one)]), None

        await self._store.change(decide)

    async def _assign_orphans(self) -> None:
        if not self._are_gathered():
            return
        if not any(map(self._is_orphan, self._store.current.tablets.values())):
            return

        def decide(current: ClusterMap) -> tuple[ClusterMap, int]:
            orphans = [one for one in current.tablets.values() if self._is_orphan(one)]
            given = self._given(orphans)
            return current.with_tablets(given) if given else current, len(given)

        count = await self._store.change(decide)
        _log.info("tablets assigned", tablets=count)

    def _are_gathered(self) -> bool:
        now = self._world.clock.monotonic_seconds()
        if not self.usable():
            self._gathered_at = None
            return False
        if self._gathered_at is None:
            self._gathered_at = now + self._gather_seconds
        return now >= self._gathered_at

    def _is_orphan(self, tablet: Tablet) -> bool:
        if tablet.tablet_id in self._held:
            return False
        return (
            not tablet.server_id
            or self._watch.is_dead(tablet.server_id)
            or (tablet.tablet_id, tablet.epoch) in self._used_up
        )

    def _given(self, orphans: list[Tablet]) -> list[Tablet]:
        """Each to the server that has the fewest by then."""
        load = self.load()
        heap = [(load[one.server_id], one.address, one.server_id) for one in self.preferred()]
        heapq.heapify(heap)
        given: list[Tablet] = []
        for tablet in orphans:
            if not heap:
                break
            count, address, server_id = heap[0]
            heapq.heapreplace(heap, (count + 1, address, server_id))
            given.append(tablet.given_to(server_id, address))
        return given

    # ------------------------------------------------------------------------- orders

    def _order(self) -> None:
        now = self._world.clock.monotonic_seconds()
        for tablet in self._store.current.tablets.values():
            key, order = tablet.tablet_id, (tablet.tablet_id, tablet.epoch)
            if order in self._ordered or key in self._held or self.is_served(tablet):
                continue
            if self._watch.is_dead(tablet.server_id):
                continue
            if self._retries.get(key, (0, 0.0))[1] > now:
                continue
            self._ordered.add(order)
            self._start(f"open tablet {key}", self._open(tablet))

    async def _open(self, tablet: Tablet) -> None:
        limit = self._limits.setdefault(tablet.server_id, asyncio.Semaphore(_ORDERS_PER_SERVER))
        try:
            async with limit:
                await self._ask_to_open(tablet)
        except PercolatorError as error:
            if self._is_current(tablet):
                self._refused(tablet, error)
        else:
            self.errors.pop(tablet.tablet_id, None)
            self._retries.pop(tablet.tablet_id, None)
        finally:
            self._ordered.discard((tablet.tablet_id, tablet.epoch))
            self.wake()

    def _is_current(self, tablet: Tablet) -> bool:
        """Nobody else was given it meanwhile."""
        found = self._store.current.tablets.get(tablet.tablet_id)
        return found is not None and found.epoch == tablet.epoch

    async def _ask_to_open(self, tablet: Tablet) -> None:
        current = self._store.current
        if current.tablets.get(tablet.tablet_id) != tablet:
            return
        # An ex-leader that was paused tells nobody anything.
        self._store.leadership.check()
        order = wire.OpenTabletRequest(
            table_id=tablet.table_id,
            tablet_id=tablet.tablet_id,
            epoch=tablet.epoch,
            schema_version=current.tables[tablet.table_id].schema_version,
            range=RowRange(start=tablet.start, end=tablet.end),
            must_exist=tablet.exists,
            origin_tablet_id=tablet.origin_tablet_id,
            origin_epoch=tablet.origin_epoch,
        )
        call = self._world.network.unary(tablet.address, methods.OPEN_TABLET)
        opened = (await call(order, _ORDER_SECONDS)).tablet
        server = self._watch.servers.get(tablet.server_id)
        if server is not None:
            server.reported[tablet.tablet_id] = wire.ReportedTablet(
                tablet_id=opened.tablet_id,
                epoch=opened.epoch,
                schema_version=opened.schema_version,
            )

    def _refused(self, tablet: Tablet, error: PercolatorError) -> None:
        if isinstance(error, TabletMoved):
            self._used_up.add((tablet.tablet_id, tablet.epoch))
        else:
            self.errors[tablet.tablet_id] = error
        failures, _ = self._retries.get(tablet.tablet_id, (0, 0.0))
        pause = min(_RETRY_SECONDS_MIN * 2**failures, _RETRY_SECONDS_MAX)
        at = self._world.clock.monotonic_seconds() + pause
        self._retries[tablet.tablet_id] = (min(failures + 1, 30), at)
        _log.warning(
            "tablet not opened",
            tablet=tablet.tablet_id,
            epoch=tablet.epoch,
            address=tablet.address,
            error=str(error),
        )
