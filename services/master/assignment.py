"""The loop that gets every tablet served by a living server, as the map says.

It compares the map with what the servers report, over and over. A tablet of a dead server is given
to a living one, durably, before that server hears of it. A server is ordered to open each tablet
that it was given and does not serve, and to close each one that was given to another server. An
order may be lost, late or repeated: the epoch directories decide what it can still do. So a
restarted master has nothing to recover but the map.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import structlog

from percolator.codecs.readable import counted
from percolator.errors import (
    DeadlineExceeded,
    NotReady,
    PercolatorError,
    StoreUnusable,
    TabletMoved,
)
from percolator.services.chassis.coordinator import Trouble
from percolator.services.chassis.epoch_directory import EPOCH_MAX
from percolator.services.master.cluster_map import ClusterMap, Tablet, ttl_messages
from percolator.services.master.map_store import MapStore
from percolator.services.master.server_watch import ServerWatch, WatchedServer
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from percolator.wire import methods
from percolator.wire.backoff import pause_seconds
from percolator.world import World

_log = structlog.get_logger("percolator.master")

_CLOSE_SECONDS = 10.0


Start = Callable[[str, Coroutine[Any, Any, object]], asyncio.Task[Any]]
"""Runs background work for as long as this master leads."""


_ROUND_SECONDS = 0.5
"""The longest pause between two comparisons. `wake` ends it early."""
_ANSWER_SECONDS = (1.0, 2.0, 7.0)
"""How long the first order, the second and the third wait for an answer. An order that was lost
costs a second. One whose tablet takes longer to open is there already, and repeating it does no
harm; the third waits long enough that those to a slow server do not pile up there."""
_ORDERS_PER_SERVER = 8
_RETRY_SECONDS_MIN = 0.1
_RETRY_SECONDS_MAX = 10.0
_POLL_SECONDS = 0.02
_BROKEN_AFTER_FAILURES = 5
"""Consecutive failures. With the pauses between them, this takes about two seconds."""


class _Retry(NamedTuple):
    """The failures of the orders to open a tablet."""

    failures: int
    """Consecutive ones."""
    at: float
    """When the next order may be sent."""
    server_id: str
    """To this server, or to any if empty. Another one may be able to open it at once."""


_NO_RETRY = _Retry(0, 0.0, "")


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
        """For `gather_seconds` after the first server has appeared, tablets without an owner wait.
        Otherwise all of them would go to the server that happens to register first."""
        self._world = world
        self._store = store
        self._watch = watch
        self._start = start
        self._gather_seconds = gather_seconds
        self._gathered_at: float | None = None
        """None while there is no server."""
        self._news = asyncio.Event()
        self._woken = asyncio.Event()
        """Set, and replaced, for calls that wait for a change."""
        self._ordered: set[tuple[int, int]] = set()
        """Orders to open that are in progress, by (tablet, epoch). One to a silent server may take
        long, but no longer matters once the tablet is given to another, at the next epoch."""
        self._used_up: dict[int, int] = {}
        """By tablet: the highest epoch known to be used, at which it cannot be opened again. If the
        map was damaged, this may be far above the map's epoch. The next epoch is above both."""
        self._retries: dict[int, _Retry] = {}
        """By tablet."""
        self._limits: dict[str, asyncio.Semaphore] = {}
        self._held: set[int] = set()
        self._trouble = Trouble(
            _log, "no tablet can be assigned", "tablets can be assigned again", level=logging.ERROR
        )
        self._note_epochs_at = 0.0
        """When served epochs may be noted again: one change of the map notes many."""
        self._not_opened: dict[int, Trouble] = {}
        """By tablet."""
        self._closing: set[tuple[str, int, int]] = set()
        """Orders to close that are in progress, by (server, tablet, epoch)."""
        self.errors: dict[int, PercolatorError] = {}
        """By tablet id: why it is not served."""

    # ------------------------------------------------------------------------- questions

    def is_served(self, tablet: Tablet) -> bool:
        """True if its owner reports it at this epoch and under the current schema."""
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

    def is_taken_over(self, tablet: Tablet) -> bool:
        """True if its owner reports it at this epoch, even if it cannot be opened: no former owner
        accepts anything from then on. One that has had no owner needs none."""
        if not tablet.epoch:
            return True
        server = self._watch.servers.get(tablet.server_id)
        reported = server.reported.get(tablet.tablet_id) if server is not None else None
        return reported is not None and reported.epoch == tablet.epoch

    def used_by_former_owners(self, name: str) -> list[Tablet]:
        """The tablets of deleted tables of that name that a former owner may still serve."""
        current = self._store.current
        return [
            one
            for table in current.deleted(name)
            for one in current.of_tables[table.table_id]
            if not self.is_taken_over(one)
        ]

    def is_broken(self, tablet: Tablet) -> bool:
        """True if its orders keep failing, so that it may not be served for a long time."""
        return self._retries.get(tablet.tablet_id, _NO_RETRY).failures >= _BROKEN_AFTER_FAILURES

    def usable(self) -> list[WatchedServer]:
        """The living servers that accept tablets."""
        draining = self._store.current.draining
        return [one for one in self._watch.alive() if one.server_id not in draining]

    def preferred(self) -> list[WatchedServer]:
        """The usable servers that do not come and go, or all of them if none is steady."""
        usable = self.usable()
        steady = {one.server_id for one in self._watch.steady()}
        return [one for one in usable if one.server_id in steady] or usable

    def load(self) -> Counter[str]:
        """The number of tablets by server id."""
        return Counter(tablet.server_id for tablet in self._store.current.tablets.values())

    async def until_served(self, tablet_ids: Collection[int], deadline: float) -> None:
        """Returns when all that still exist are served. `DeadlineExceeded` names one that is not:
        unlike after `NotReady`, the change that waits for them was made."""

        def missing() -> list[Tablet]:
            tablets = self._store.current.tablets
            return [
                one for key in tablet_ids if (one := tablets.get(key)) and not self.is_served(one)
            ]

        left = await self._until_none(missing, deadline)
        if left:
            reason = self.errors.get(left[0].tablet_id, "no server has opened it yet")
            raise DeadlineExceeded(
                f"{counted(len(left), 'tablet is', 'tablets are')} not served, such as "
                f"{left[0].tablet_id}: {reason}; opening continues in the background"
            )

    async def until_out_of_use(self, name: str, deadline: float) -> None:
        """Returns when no former owner accepts anything in the deleted tables of that name."""
        left = await self._until_none(partial(self.used_by_former_owners, name), deadline)
        if left:
            reason = self.errors.get(left[0].tablet_id, "its server has not confirmed it")
            raise DeadlineExceeded(
                f"{counted(len(left), 'tablet', 'tablets')} may still be used at former owners, "
                f"such as {left[0].tablet_id}: {reason}"
            )

    async def _until_none(
        self, waited_for: Callable[[], list[Tablet]], deadline: float
    ) -> list[Tablet]:
        """Waits until there are none of these tablets. Returns the ones that are left at the
        deadline."""
        self.wake()
        while (left := waited_for()) and self._world.clock.monotonic_seconds() < deadline:
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._woken.wait()
        return left

    def wake(self) -> None:
        """To be called when something has changed: the next comparison begins at once."""
        self._news.set()
        self._woken.set()
        self._woken = asyncio.Event()

    def hold(self, tablet_id: int) -> None:
        """Stops orders for a tablet while it is moved or split, which only one call may do."""
        if tablet_id in self._held:
            raise NotReady(f"tablet {tablet_id} is being moved or split", retry_after_seconds=0.1)
        self._held.add(tablet_id)

    def is_held(self, tablet_id: int) -> bool:
        return tablet_id in self._held

    def let_go(self, tablet_id: int) -> None:
        self._held.discard(tablet_id)
        self.wake()

    # ------------------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Runs until cancelled, or until this master is deposed."""
        while True:
            self._news.clear()
            try:
                await self.note_served()
                await self._assign_orphans()
            except StoreUnusable as error:
                self._trouble.lasts(error)
            else:
                self._trouble.is_over()
            self._forget_failures()
            self._order()
            self._close_strays()
            try:
                async with asyncio.timeout(_ROUND_SECONDS):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def note_served(self) -> None:
        """Notes which tablets hold data, and at which epoch: from now on, it is a loss if this
        epoch and all later ones are missing."""
        now = self._world.clock.monotonic_seconds()
        due = now >= self._note_epochs_at
        served = self._served_later_than_noted(self._store.current)
        if not any(due or not one.exists for one in served):
            return
        self._note_epochs_at = now + _ROUND_SECONDS

        def decide(current: ClusterMap) -> tuple[ClusterMap, None]:
            found = self._served_later_than_noted(current)
            return current.with_existing(found) if found else current, None

        await self._store.change(decide)

    def _served_later_than_noted(self, current: ClusterMap) -> list[Tablet]:
        tablets = current.tablets.values()
        return [one for one in tablets if one.served_epoch < one.epoch and self.is_served(one)]

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
        if not tablet.epoch and self._store.current.tables[tablet.table_id].deleting:
            return False
        return (
            not tablet.server_id
            or self._watch.is_dead(tablet.server_id)
            or tablet.epoch <= self._used_up.get(tablet.tablet_id, 0)
        )

    def _given(self, orphans: list[Tablet]) -> list[Tablet]:
        """Gives each orphan to the server that has the fewest tablets by then."""
        load = self.load()
        heap = [(load[one.server_id], one.address, one.server_id) for one in self.preferred()]
        heapq.heapify(heap)
        given: list[Tablet] = []
        for tablet in orphans:
            if not heap:
                break
            count, address, server_id = heap[0]
            heapq.heapreplace(heap, (count + 1, address, server_id))
            used_up = self._used_up.get(tablet.tablet_id, 0)
            given.append(tablet.given_to(server_id, address, used_up))
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
            retry = self._retries.get(key, _NO_RETRY)
            if retry.at > now and retry.server_id in ("", tablet.server_id):
                continue
            self._ordered.add(order)
            self._start(f"open tablet {key}", self._open(tablet))

    def _forget_failures(self) -> None:
        """Forgets failures of tablets that are served, with or without a further order: the next
        failure is the first one again. And of those that are gone."""
        for key in list(self._retries):
            tablet = self._store.current.tablets.get(key)
            if tablet is not None and not self.is_served(tablet):
                continue
            del self._retries[key]
            self.errors.pop(key, None)
            trouble = self._not_opened.pop(key, None)
            if trouble is not None and tablet is not None:
                trouble.is_over()

    async def _open(self, tablet: Tablet) -> None:
        limit = self._limits.setdefault(tablet.server_id, asyncio.Semaphore(_ORDERS_PER_SERVER))
        try:
            async with limit:
                await self._ask_to_open(tablet)
        except PercolatorError as error:
            if self._is_current(tablet):
                self._refused(tablet, error)
        finally:
            self._ordered.discard((tablet.tablet_id, tablet.epoch))
            self.wake()

    def _is_current(self, tablet: Tablet) -> bool:
        """True if the tablet was not given to another server meanwhile."""
        found = self._store.current.tablets.get(tablet.tablet_id)
        return found is not None and found.epoch == tablet.epoch

    async def _ask_to_open(self, tablet: Tablet) -> None:
        # A former leader that was paused must not send orders.
        await self._store.leadership.check()
        current = self._store.current
        if current.tablets.get(tablet.tablet_id) != tablet:
            return
        table = current.tables[tablet.table_id]
        order = pb.OpenTabletRequest(
            table_id=tablet.table_id,
            tablet_id=tablet.tablet_id,
            epoch=tablet.epoch,
            schema_version=table.schema_version,
            change_feed=table.change_feed,
            ttls=ttl_messages(table),
            range=RowRange(start=tablet.start, end=tablet.end),
            must_exist=tablet.exists,
            origin_tablet_id=tablet.origin_tablet_id,
            origin_epoch=tablet.origin_epoch,
            served_epoch=tablet.served_epoch,
        )
        opened = (await self._answer(tablet, order)).tablet
        server = self._watch.servers.get(tablet.server_id)
        if server is not None:
            server.reported[tablet.tablet_id] = pb.ReportedTablet(
                tablet_id=opened.tablet_id,
                epoch=opened.epoch,
                schema_version=opened.schema_version,
            )

    async def _answer(self, tablet: Tablet, order: pb.OpenTabletRequest) -> pb.OpenTabletResponse:
        """Repeats an order that is not answered: if it was lost, nobody serves the tablet."""
        call = self._world.network.unary(tablet.address, methods.OPEN_TABLET)
        *first, last = _ANSWER_SECONDS
        for seconds in first:
            try:
                return await call(order, seconds)
            except DeadlineExceeded:
                if not self._is_current(tablet):
                    raise
                await self._store.leadership.check()
        return await call(order, last)

    def _refused(self, tablet: Tablet, error: PercolatorError) -> None:
        if isinstance(error, TabletMoved):
            known = self._used_up.get(tablet.tablet_id, 0)
            # None lies above the highest: an answer that says so is wrong, and following it would
            # lead to an epoch that the map cannot hold, and so end this master.
            highest = error.highest_epoch if error.highest_epoch < EPOCH_MAX else 0
            self._used_up[tablet.tablet_id] = max(known, tablet.epoch, highest)
            # The next epoch may be another server's, and be used as well.
            server_id = ""
        else:
            self.errors[tablet.tablet_id] = error
            server_id = tablet.server_id
        failures = self._retries.get(tablet.tablet_id, _NO_RETRY).failures
        pause = pause_seconds(
            self._world.random, _RETRY_SECONDS_MIN, _RETRY_SECONDS_MAX, doublings=failures
        )
        at = self._world.clock.monotonic_seconds() + pause
        self._retries[tablet.tablet_id] = _Retry(failures + 1, at, server_id)
        trouble = self._not_opened.get(tablet.tablet_id)
        if trouble is None:
            trouble = Trouble(_log, "tablet not opened", "tablet opened", tablet=tablet.tablet_id)
            self._not_opened[tablet.tablet_id] = trouble
        trouble.lasts(f"at {tablet.address}: {error}")

    # ------------------------------------------------------------------------- closing

    def _close_strays(self) -> None:
        """Starts closing tablets on servers that the map does not name.

        Such a tablet was given to another server while this one was away, or its table was deleted.
        It no longer acknowledges anything, closed or not.
        """
        for server in self._watch.alive():
            for reported in list(server.reported.values()):
                key = (server.server_id, reported.tablet_id, reported.epoch)
                if key in self._closing or reported.tablet_id in self._held:
                    continue
                if self._is_stray(server, reported):
                    self._closing.add(key)
                    name = f"close tablet {reported.tablet_id}"
                    self._start(name, self._close_stray(server, reported, key))

    def _is_stray(self, server: WatchedServer, reported: pb.ReportedTablet) -> bool:
        tablet = self._store.current.tablets.get(reported.tablet_id)
        if tablet is None:
            return True
        if tablet.epoch == reported.epoch:
            return tablet.server_id != server.server_id
        return reported.epoch < tablet.epoch and tablet.server_id != server.server_id

    async def _close_stray(
        self, server: WatchedServer, reported: pb.ReportedTablet, key: tuple[str, int, int]
    ) -> None:
        try:
            await self.close(server.address, reported.tablet_id, reported.epoch)
        except PercolatorError as error:
            _log.info("stray tablet not closed", tablet=reported.tablet_id, error=str(error))
        finally:
            self._closing.discard(key)

    async def close(self, address: str, tablet_id: int, epoch: int) -> None:
        """Asks a server to flush and close a tablet."""
        await self._store.leadership.check()
        call = self._world.network.unary(address, methods.CLOSE_TABLET)
        await call(pb.CloseTabletRequest(tablet_id=tablet_id, epoch=epoch), _CLOSE_SECONDS)
