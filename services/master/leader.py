"""One term of a leading master over tablets: everything that it does, until it no longer leads."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from percolator.codecs.names import CodecNames
from percolator.errors import InvalidArgument, PercolatorError, StoreFault, StoreUnusable
from percolator.formats.records import LockRecord
from percolator.services.chassis.coordinator import Leadership, Trouble
from percolator.services.master.assignment import Assignment
from percolator.services.master.cluster_map import ClusterMap, Table, Tablet, ttls_of
from percolator.services.master.collection import Collection, CollectionTimes, OracleTime
from percolator.services.master.map_store import MapStore
from percolator.services.master.registry import Registry
from percolator.services.master.server_watch import ServerWatch, WatchTimes
from percolator.services.master.table_changes import Creation, TableChanges
from percolator.services.master.tablet_changes import Balance, BalanceLimits, TabletChanges
from percolator.services.master.tablet_collection import TabletCollecting, scan_locks
from percolator.services.master.tablet_data import TabletData
from percolator.services.master.term import Term
from percolator.v1.cluster_pb2 import Server, ServiceKind
from percolator.world import Clock, World


class Tables(TableChanges[ClusterMap]):
    """A change is made when every tablet is served, and judges under the new version."""

    def __init__(
        self,
        clock: Clock,
        store: MapStore,
        assignment: Assignment,
        oracle_time: OracleTime,
        *,
        tablets_max: int,
        retention_min_seconds: float,
    ) -> None:
        super().__init__(clock, store, oracle_time, retention_min_seconds=retention_min_seconds)
        self._assignment = assignment
        self._tablets_max = tablets_max

    def _with_new_table(self, current: ClusterMap, creation: Creation) -> tuple[ClusterMap, Table]:
        request = creation.request
        if len(current.tablets) + len(request.splits) + 1 > self._tablets_max:
            raise InvalidArgument(
                "splits", f"the cluster would have more than {self._tablets_max} tablets"
            )
        return current.with_new_table(
            request.name,
            request.splits,
            request.options.retention_milliseconds,
            request.options.split_bytes,
            creation.created_at,
            change_feed=request.options.change_feed,
            ttls=ttls_of(request.options.ttls),
            codecs=CodecNames().declared(request.name, request.codecs),
        )

    def _taken_out(self, current: ClusterMap, table: Table) -> ClusterMap:
        """Its tablets get new epochs, which only callers that resolve locks are told. Calls with
        the old epochs are refused as soon as the tablets were taken over."""
        tablets = [
            one.given_to(one.server_id, one.address)
            for one in current.of_tables[table.table_id]
            if one.epoch
        ]
        return current.with_tables(table).with_tablets(tablets)

    async def _until_current(self, table: Table, deadline: float) -> None:
        tablets = self._store.current.of_tables.get(table.table_id, ())
        await self._assignment.until_served([one.tablet_id for one in tablets], deadline)

    def _are_in_use(self, name: str) -> bool:
        return bool(self._assignment.used_by_former_owners(name))

    async def _until_out_of_use(self, name: str, deadline: float) -> None:
        await self._assignment.until_out_of_use(name, deadline)


_log = structlog.get_logger("percolator.master")

_ROUND_SECONDS = 1.0


class Removal:
    """Removes what is left of deleted tables and split tablets, once it can no longer be needed.

    `run` has to run while this master leads.

    A deleted table is dropped when no lock in another table has its primary there: until then its
    cells are the only evidence of those transactions' outcomes. The data of tablets are removed
    after the map no longer names them.
    """

    def __init__(
        self, world: World, data: TabletData, store: MapStore, assignment: Assignment
    ) -> None:
        self._world = world
        self._data = data
        self._store = store
        self._assignment = assignment
        self._needed: set[int] = set()
        """Deleted tables that had to be kept in the last round."""
        self._troubles = [
            Trouble(_log, "deleted tables are not cleared up yet", level=logging.INFO),
            Trouble(_log, "what tablets have left is not removed yet", level=logging.INFO),
        ]

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._world.clock.sleep(_ROUND_SECONDS)
            # Separately: data are removed even while a tablet cannot be asked for locks.
            work = (self._drop_tables, self._remove_retired)
            for clear_up, trouble in zip(work, self._troubles, strict=True):
                try:
                    await clear_up()
                except (PercolatorError, OSError) as error:
                    trouble.lasts(error)
                else:
                    trouble.is_over()

    async def _drop_tables(self) -> None:
        current, taken_over = self._store.current, self._assignment.is_taken_over
        # At their new epochs nothing can begin in these tables, so no lock that points into them
        # appears after the scan. This also holds for a tablet that is damaged.
        closed = {
            table_id
            for table_id, table in current.tables.items()
            if table.deleting and all(map(taken_over, current.of_tables[table_id]))
        }
        if not closed:
            return
        needed: set[int] = set()
        for tablet in list(current.tablets.values()):
            if not current.tables[tablet.table_id].deleting:
                needed |= await self._primaries(tablet) & closed
        for table_id in closed - needed:

            def decide(
                current: ClusterMap, table_id: int = table_id
            ) -> tuple[ClusterMap, Table | None]:
                gone = current.tables.get(table_id)
                return (current.without_table(table_id) if gone else current), gone

            table = await self._store.change(decide)
            if table is not None:
                _log.info("table deleted", table=table.name, table_id=table_id)
                self._assignment.wake()
        for table_id in needed - self._needed:
            _log.info("a deleted table is kept until locks are resolved", table_id=table_id)
        self._needed = needed

    async def _primaries(self, tablet: Tablet) -> set[int]:
        """The tables in which locks of this tablet have their primaries."""
        locks = scan_locks(self._world.network, self._store.current, tablet)
        return {LockRecord.decode(cell.value).primary.table_id async for cell in locks}

    async def _remove_retired(self) -> None:
        current = self._store.current
        removed = await self._data.remove(
            current.retired, current.named_tablets, self._store.leadership.check
        )
        if not removed:
            return

        def decide(current: ClusterMap) -> tuple[ClusterMap, None]:
            left = tuple(one for one in current.retired if one not in removed)
            return replace(current, retired=left), None

        await self._store.change(decide)


_FORGET_SECONDS = 5.0


@dataclass(frozen=True)
class MasterTimes:
    """How soon a leading master acts, and how often."""

    watch: WatchTimes = field(default_factory=WatchTimes)
    balance: BalanceLimits = field(default_factory=BalanceLimits)
    collection: CollectionTimes = field(default_factory=CollectionTimes)
    gather_seconds: float = 1.0
    """How long tablets without an owner wait for more servers after the first has appeared."""


USUAL_TIMES = MasterTimes()


class Leader(Term[ClusterMap]):
    """A term over tablets."""

    def __init__(
        self,
        world: World,
        data: TabletData,
        store: MapStore,
        registry: Registry,
        times: MasterTimes,
        *,
        tablets_max: int,
    ) -> None:
        super().__init__(world, store, registry)
        self.store = store
        self.watch = ServerWatch(
            world, times.watch, self._changed, newest_timestamp=lambda: self.oracle_time.newest
        )
        self.assignment = Assignment(
            world, store, self.watch, self.start, gather_seconds=times.gather_seconds
        )
        self.tables: Tables = Tables(
            world.clock,
            store,
            self.assignment,
            self.oracle_time,
            tablets_max=tablets_max,
            retention_min_seconds=times.collection.retention_min_seconds,
        )
        self.changes = TabletChanges(
            world, store, self.watch, self.assignment, tablets_max=tablets_max
        )
        self.balance = Balance(
            world, store, self.watch, self.assignment, self.changes, times.balance
        )
        self.collection = Collection(
            world,
            store,
            registry,
            self.oracle_time,
            times.collection,
            partial(TabletCollecting, world, store),
        )
        self._removal = Removal(world, data, store, self.assignment)
        self._forgotten_at = self.now()

    def _start_work(self) -> None:
        for tablet in self.store.current.tablets.values():
            if tablet.server_id:
                self.watch.watch(tablet.server_id, tablet.address)
        self.start("assign tablets", self.assignment.run())
        self.start("balance", self.balance.run())
        self.start("clear up", self._removal.run())
        self.start("forget drained servers", self.changes.forget_drained())
        self.start("collect history", self.collection.run())

    async def _close(self) -> None:
        await self.watch.close()

    def _changed(self) -> None:
        self.assignment.wake()

    def registered(self, server: Server) -> None:
        if server.kind == ServiceKind.SERVICE_KIND_TABLET_SERVER:
            self.watch.watch(server.server_id, server.address)

    def _tick(self) -> None:
        """Also forgets servers that are gone for good."""
        self.watch.tick()
        if self.now() - self._forgotten_at >= _FORGET_SECONDS:
            self._forgotten_at = self.now()
            needed = {one.server_id for one in self.store.current.tablets.values()}
            self.watch.forget(set(self.watch.servers) - needed)


async def begin_tablet_term(
    world: World,
    data: TabletData,
    registry: Registry,
    leadership: Leadership,
    *,
    times: MasterTimes = USUAL_TIMES,
    tablets_max: int = 100_000,
) -> Leader:
    """A term over tablets, with the map that the previous leader left."""
    store = await MapStore.load(leadership)
    await _refuse_to_forget_tables(data, store)
    return Leader(world, data, store, registry, times, tablets_max=tablets_max)


async def _refuse_to_forget_tables(data: TabletData, store: MapStore) -> None:
    """A map that is missing, or older than the tables: with it, they would be gone without an
    error, and new tables would get their ids, and then find their cells."""
    place = await data.newer_than(store.current.next_id)
    if place is not None:
        # Or it is of the next master's map, if this one was paused since it read its.
        await store.leadership.check()
        raise StoreUnusable(
            f"{place} is of a table that is newer than the master's map, which is missing or from "
            "an older copy: restore it, or move these data away",
            fault=StoreFault.DAMAGED,
        )
