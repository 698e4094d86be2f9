"""One term of a leading master over a row store. It has tables and servers, and no tablets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import structlog

from percolator.codecs.names import CodecNames
from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    PercolatorError,
    SchemaError,
)
from percolator.history.rows import Decided, RowHistory, TableProgress
from percolator.limits import Limits
from percolator.protocol.environment import Environment, Timestamps, Verdicts
from percolator.routing.catalog import TableSchema
from percolator.rowstore.adapter import DroppedTables, RowStoreCells
from percolator.rowstore.intents import Intents
from percolator.rowstore.layout import Numbers, SpacedTimestamps, Times
from percolator.services.chassis.cluster_store import RowClusterStore
from percolator.services.chassis.coordinator import Leadership
from percolator.services.master.cluster_map import (
    FIRST_VERSION,
    Catalogue,
    Observer,
    OwedBackfill,
    Table,
    TableLoad,
    observer_messages,
)
from percolator.services.master.collection import (
    ClusterSafePoints,
    Collection,
    CollectionTimes,
    NoOwners,
    OracleTime,
    TableCollected,
)
from percolator.services.master.map_store import CatalogueStore
from percolator.services.master.registry import Registry
from percolator.services.master.table_changes import Creation, TableChanges
from percolator.services.master.term import Term
from percolator.v1 import master_pb2 as pb
from percolator.world import Clock, World

_ORACLE_SECONDS = 10.0

_log = structlog.get_logger("percolator.master")


class RowDrops:
    """Drops tables of a row store for good, during one term.

    The cells of a dropped table are the only evidence of what became of transactions with their
    primary there, and no tablet refuses a client that still knows the table. So the store's table
    goes last:

    1. The catalogue says durably that the table is dropped, and its epoch is raised. Whoever gets a
       timestamp from then on, and wants to commit a cell of the table, hears that it is gone, and
       does not commit (percolator/protocol/announcing.py).
    2. A timestamp R is taken.
    3. A round has resolved all locks below P, in all tables, where P is above R. Whoever could
       still commit a cell of the table had got its commit timestamp before R, and held all of its
       locks by then. So all that it locked is decided and settled, in every table.
    4. The store's table is deleted, and then the catalogue's.

    A lock that comes after 3, with its primary in the table, is of a transaction that never
    commits. Whoever meets it finds no table, and rolls it back (percolator/rowstore/adapter.py).

    All of this stays true once it is, and ids are not used again. So a leader that was replaced
    does no harm by going on, and a new one begins with 1.
    """

    def __init__(
        self, clock: Clock, catalogue: CatalogueStore, rows: RowClusterStore, oracle: OracleTime
    ) -> None:
        self._clock = clock
        self._catalogue = catalogue
        self._rows = rows
        self._oracle = oracle
        self._refused_from: dict[int, int] = {}
        """By table: no commit timestamp from here on commits a cell of it."""

    async def begin(self) -> None:
        """Sees to it that no new commit reaches the tables that were dropped by now."""
        for table_id in sorted(self._dropped()):
            # Whoever deleted it could not say so any more.
            if not await self._rows.has_table(table_id):
                await self._forget(table_id)
        fresh = self._dropped() - self._refused_from.keys()
        if not fresh:
            return
        await self._oracle.raise_epoch(self._clock.monotonic_seconds() + _ORACLE_SECONDS)
        now = await self._oracle.source().get(timeout_seconds=_ORACLE_SECONDS)
        self._refused_from.update(dict.fromkeys(fresh, now))

    async def finish(self, resolved_below: int) -> None:
        """All locks below this were resolved, in all tables."""
        for table_id in sorted(self._dropped()):
            refused_from = self._refused_from.get(table_id)
            if refused_from is None or refused_from >= resolved_below:
                continue
            await self._rows.delete_table(table_id)
            await self._forget(table_id)

    async def _forget(self, table_id: int) -> None:
        def decide(current: Catalogue) -> tuple[Catalogue, None]:
            return current.without_table(table_id), None

        await self._catalogue.change(decide)
        self._refused_from.pop(table_id, None)
        _log.info("table deleted", table_id=table_id)

    def _dropped(self) -> set[int]:
        return {one.table_id for one in self._catalogue.current.tables.values() if one.deleting}


class RowCollecting:
    """Walks over the rows, for as long as this master leads."""

    def __init__(
        self, history: RowHistory, table_ids: Callable[[], Iterable[int]], drops: RowDrops
    ) -> None:
        """`table_ids` returns all tables: old locks are resolved even in those whose history a pin
        keeps, or that are being dropped."""
        self._history = history
        self._table_ids = table_ids
        self._drops = drops

    @property
    def locks_resolved(self) -> int:
        return self._history.locks_resolved

    async def collect(self, ordered: ClusterSafePoints) -> None:
        await self._drops.begin()
        reads = {one: ordered.reads.get(one, 0) for one in self._table_ids()}
        await self._history.collect(Decided(reads, ordered.transactions))
        await self._drops.finish(ordered.transactions)

    def collected(self, table_id: int) -> TableCollected:
        found = self._history.tables.get(table_id, TableProgress())
        return TableCollected(below=found.below, cells=found.collected.cells)

    async def close(self) -> None:
        """Nothing is held."""


def row_collecting(
    world: World,
    catalogue: CatalogueStore,
    rows: RowClusterStore,
    drops: RowDrops,
    oracle: Numbers,
) -> RowCollecting:
    """A client of the cluster's store that resolves old locks, and walks over the rows."""
    times, limits = Times(rows.identity.epoch_milliseconds), Limits()
    timestamps: Timestamps = SpacedTimestamps(oracle)
    intents = Intents(rows.store, times, world, limits)
    schemas = _Schemas(catalogue)
    env = Environment(
        cells=RowStoreCells(rows.store, intents, times, world, limits),
        timestamps=timestamps,
        owners=NoOwners(),
        schemas=schemas,
        clock=world.clock,
        random=world.random,
        limits=limits,
        verdicts=Verdicts(limits.verdicts_max),
        deleted_tables=DroppedTables(schemas.refresh),
    )

    async def registered() -> dict[int, TableSchema]:
        await catalogue.leadership.check()
        return {
            one.table_id: _schema_of(one)
            for one in catalogue.current.tables.values()
            if one.is_used
        }

    history = RowHistory(env, rows.store, times, world, registered)
    return RowCollecting(history, lambda: list(catalogue.current.tables), drops)


class _Schemas:
    """`Schemas` that are read from the catalogue itself."""

    def __init__(self, catalogue: CatalogueStore) -> None:
        self._catalogue = catalogue

    def get(self, table_id: int) -> TableSchema | None:
        table = self._catalogue.current.tables.get(table_id)
        return None if table is None else _schema_of(table)

    async def refresh(self, table_id: int, deadline: float) -> TableSchema:
        schema = self.get(table_id)
        if schema is None:
            raise SchemaError(f"table {table_id} is gone", table_id=table_id)
        return schema


def _schema_of(table: Table) -> TableSchema:
    return TableSchema.of(table.schema_version, observer_messages(table.observers))


class RowTables(TableChanges[Catalogue]):
    """Tables whose cells are in a row store: each is a table of the store, named by its id.

    The store divides its tables by itself: splits, and sizes of tablets, are not used.

    An id is used up, durably, before the store's table is made, and the table of the cluster is
    recorded after it. So a master that ends in between leaves an empty table of the store that
    nobody ever uses, and no table of the cluster without one.
    """

    def __init__(
        self,
        clock: Clock,
        store: CatalogueStore,
        oracle_time: OracleTime,
        rows: RowClusterStore,
        *,
        retention_min_seconds: float,
    ) -> None:
        super().__init__(clock, store, oracle_time, retention_min_seconds=retention_min_seconds)
        self._rows = rows
        self._creating = asyncio.Lock()
        self._told: set[int] = set()
        """The deleted tables of whose deletion the oracle was told in this term."""

    async def create(self, request: pb.CreateTableRequest, deadline: float) -> tuple[Table, bool]:
        self._require_possible(request)
        async with self._alone(deadline):
            return await super().create(request, deadline)

    def _require_possible(self, request: pb.CreateTableRequest) -> None:
        if request.options.change_feed:
            raise InvalidArgument(
                "options.change_feed", f"tables in {self._rows.name} have no change feeds"
            )
        if request.options.ttls:
            raise InvalidArgument("options.ttls", f"no value in {self._rows.name} expires")

    @asynccontextmanager
    async def _alone(self, deadline: float) -> AsyncIterator[None]:
        """Lets one of two that create a table of the same name find the other's."""
        left = deadline - self._clock.monotonic_seconds()
        try:
            async with asyncio.timeout(left):
                await self._creating.acquire()
        except TimeoutError:
            raise NotReady("other tables are being created") from None
        try:
            yield
        finally:
            self._creating.release()

    async def change_indexes(self, request: pb.ChangeIndexesRequest, deadline: float) -> Table:
        async with self._alone(deadline):
            return await super().change_indexes(request, deadline)

    async def _until_registered(self, table: Table, deadline: float) -> None:
        await self._oracle_time.raise_epoch(deadline)

    async def _prepared(self, request: pb.CreateTableRequest, deadline: float) -> Creation:
        creation = await super()._prepared(request, deadline)
        return await self._with_tables(creation, 1 + len(request.indexes))

    async def _prepared_entries(self, count: int, deadline: float) -> Creation:
        return await self._with_tables(await super()._prepared_entries(count, deadline), count)

    async def _with_tables(self, creation: Creation, count: int) -> Creation:
        """With so many new tables of the store."""

        def decide(current: Catalogue) -> tuple[Catalogue, int]:
            return replace(current, next_id=current.next_id + count), current.next_id

        first = await self._store.change(decide)
        table_ids = tuple(range(first, first + count))
        for table_id in table_ids:
            await self._rows.create_table(table_id)
            await self._rows.require_empty(table_id)
        return creation._replace(table_ids=table_ids)

    def _with_new_table(self, current: Catalogue, creation: Creation) -> tuple[Catalogue, Table]:
        request = creation.request
        require_not_loading(current, request.name)
        table = Table(
            creation.table_ids[0],
            request.name,
            retention_milliseconds=request.options.retention_milliseconds,
            split_bytes=request.options.split_bytes,
            created_at=creation.created_at,
            codecs=CodecNames().declared(request.name, request.codecs),
        )
        return current.with_tables(table), table

    def _taken_out(self, current: Catalogue, table: Table) -> Catalogue:
        return current.with_tables(table)

    async def _until_current(self, table: Table, deadline: float) -> None:
        """It can be used: the store's table was there before it."""

    def _are_in_use(self, name: str) -> bool:
        return bool(self._untold(name))

    async def _until_out_of_use(self, name: str, deadline: float) -> None:
        """Makes every transaction learn, before it commits, that these tables are gone."""
        untold = self._untold(name)
        if not untold:
            return
        try:
            await self._oracle_time.raise_epoch(deadline)
        except PercolatorError as error:
            raise DeadlineExceeded(error.message) from error
        self._told |= untold

    def _untold(self, name: str) -> set[int]:
        return {one.table_id for one in self._store.current.deleted(name)} - self._told


def require_not_loading(current: Catalogue, name: str, load: str = "") -> None:
    """Raises `InvalidArgument` if a table of that name is being loaded, by another load."""
    for table in current.tables.values():
        if table.name == name and table.is_hidden and not table.deleting and table.load is not None:
            other = table.load.name
            if other != load:
                raise InvalidArgument(
                    "name",
                    f"table {name!r} is being loaded by the bulk load {other!r}: wait until it is "
                    "complete, or abandon it",
                )


LOAD_BYTES_MAX = 255


class RowLoads(RowTables):
    """`RowTables` with bulk loads into tables of a row store: each run fills a table that nobody
    else can see.

    A row store changes rows without looking at who asks, so a process that was given up, or a call
    that is late, may write at any time. It does no harm in a table of its own: the table is
    published, under its name, by the run that has filled it, or it is dropped. Publishing is one
    change of the catalogue, for any number of tables, so all of them appear at once.

    * A published table is as young as its publication: snapshots from before it are refused, as
      with every table that is created. So nobody has read or written it at a timestamp at which its
      rows are there.
    * A later run drops the table of an earlier one. Ids are never used again.
    * No run begins again up to the latest that was ended: a late call to begin would create a table
      that nobody ends.
    """

    async def begin_load(self, request: pb.BeginLoadRequest, deadline: float) -> Table | None:
        """The table of this run. With `resume`, None if there is none."""
        self._require_valid(request.table)
        self._require_possible(request.table)
        if request.table.indexes:
            raise InvalidArgument(
                "table.indexes", "a load fills a table without indexes: create them afterwards"
            )
        _require_named(request.load, request.run)
        if request.resume:
            return _of_run(self._store.current, request)
        async with self._alone(deadline):
            decide = partial(_begun, request)
            table = await self._store.change(partial(decide, None))
            if table is None:
                creation = await self._prepared(request.table, deadline)
                _require_past(request.run, creation)
                table = await self._store.change(partial(decide, self._made(creation)))
        _log.info("bulk load begun", table=request.table.name, load=request.load)
        return table

    def _made(self, creation: Creation) -> Table:
        _, table = self._with_new_table(Catalogue(), creation)
        return table

    async def publish_loads(
        self, request: pb.PublishLoadsRequest, deadline: float
    ) -> Sequence[Table]:
        """The tables, which can be used now."""
        return await self._decided(
            partial(self._published, request), self._timestamped, pb.CreateTableRequest(), deadline
        )

    def _published(
        self, request: pb.PublishLoadsRequest, creation: Creation, current: Catalogue
    ) -> tuple[Catalogue, list[Table] | None]:
        """None if a timestamp above the last deletion is needed first."""
        found = [_loaded(current, one) for one in request.loads]
        if not any(table.is_hidden for table in found):
            return current, found  # an earlier call was executed
        if creation.deletions != self._deletions:
            return current, None
        floor = max(current.load_floor, *(one.run for one in request.loads))
        changed = [
            replace(
                table,
                created_at=creation.created_at,
                load=replace(table.load, commit_timestamp=one.commit_timestamp),
                observers=_of_loaded_cells(current.awaited.get(table.name, ())),
            )
            if table.is_hidden and table.load is not None
            else table
            for table, one in zip(found, request.loads, strict=True)
        ]
        published = current.with_tables(*changed)
        return replace(published, load_floor=floor), changed

    async def abandon_load(
        self, request: pb.AbandonLoadRequest, deadline: float
    ) -> pb.AbandonLoadResponse:
        """Drops what the runs up to this one have loaded, unless it was published."""
        _require_named(request.load, request.run)
        _require_past(request.run, await self._timestamped(pb.CreateTableRequest(), deadline))
        return await self._store.change(partial(_abandoned, request))


def _of_loaded_cells(awaited: Sequence[Observer]) -> tuple[Observer, ...]:
    """The observers that waited for the table. What was loaded has notified none of them."""
    return tuple(
        replace(one, owed=OwedBackfill(FIRST_VERSION, one.columns)) if one.backfill else one
        for one in awaited
    )


def _begun(
    request: pb.BeginLoadRequest, made: Table | None, current: Catalogue
) -> tuple[Catalogue, Table | None]:
    """The catalogue with the table of the run; None if it has to be `made` first."""
    name, run = request.table.name, request.run
    if current.named(name) is not None:
        raise InvalidArgument("name", f"table {name!r} exists")
    require_not_loading(current, name, request.load)
    known = _of_load(current, name, request.load)
    for table, load in known:
        if load.run == run:
            return current, table
    if run <= max([current.load_floor, *(load.run for _, load in known)]):
        raise _taken_over(request.load, run)
    if made is None:
        return current, None
    earlier = [table.dropped() for table, _ in known]
    table = replace(made, load=TableLoad(request.load, run))
    return current.with_tables(*earlier, table), table


def _of_run(current: Catalogue, request: pb.BeginLoadRequest) -> Table | None:
    known = _of_load(current, request.table.name, request.load)
    return next((table for table, load in known if load.run == request.run), None)


def _loaded(current: Catalogue, asked: pb.PublishLoadsRequest.Loaded) -> Table:
    """Raises `InvalidArgument` unless the table is still that of this run."""
    if not 0 < asked.run < asked.commit_timestamp:
        raise InvalidArgument("commit_timestamp", "expected one above the run, which is above 0")
    table = current.tables.get(asked.table_id)
    load = None if table is None or table.deleting else table.load
    if table is None or load is None or load.run != asked.run:
        raise _taken_over("" if load is None else load.name, asked.run)
    if load.commit_timestamp not in (0, asked.commit_timestamp):
        raise InvalidArgument("commit_timestamp", "the load was published at another one")
    return table


def _abandoned(
    request: pb.AbandonLoadRequest, current: Catalogue
) -> tuple[Catalogue, pb.AbandonLoadResponse]:
    known = [
        one for one in _of_load(current, request.table, request.load) if one[1].run <= request.run
    ]
    response = pb.AbandonLoadResponse(
        found=bool(known), complete=any(load.commit_timestamp for _, load in known)
    )
    gone = [table.dropped() for table, load in known if not load.commit_timestamp]
    floor = max(current.load_floor, request.run)
    return replace(current.with_tables(*gone), load_floor=floor), response


def _of_load(current: Catalogue, name: str, load: str) -> list[tuple[Table, TableLoad]]:
    """The tables of all runs of a load."""
    return [
        (table, table.load)
        for table in current.tables.values()
        if table.name == name
        and not table.deleting
        and table.load is not None
        and table.load.name == load
    ]


def _require_named(load: str, run: int) -> None:
    if not 1 <= len(load.encode()) <= LOAD_BYTES_MAX:
        raise InvalidArgument("load", f"expected 1 to {LOAD_BYTES_MAX} bytes")
    if not run:
        raise InvalidArgument("run", "missing")


def _require_past(run: int, creation: Creation) -> None:
    """Otherwise no load could begin before the oracle has come to this run."""
    if run >= creation.created_at:
        raise InvalidArgument("run", "expected a timestamp that the oracle has given out")


def _taken_over(load: str, run: int) -> InvalidArgument:
    return InvalidArgument(
        "run",
        f"the load {load!r} has no table of run {run}: it was ended, or another run has taken the "
        "load over",
    )


class RowTerm(Term[Catalogue]):
    """A term over a row store."""

    def __init__(
        self,
        world: World,
        store: CatalogueStore,
        registry: Registry,
        rows: RowClusterStore,
        times: CollectionTimes,
    ) -> None:
        super().__init__(world, store, registry)
        self.tables: RowLoads = RowLoads(
            world.clock,
            store,
            self.oracle_time,
            rows,
            retention_min_seconds=times.retention_min_seconds,
        )
        self.collection = Collection(
            world,
            store,
            registry,
            self.oracle_time,
            times,
            partial(
                row_collecting,
                world,
                store,
                rows,
                RowDrops(world.clock, store, rows, self.oracle_time),
            ),
        )

    def _start_work(self) -> None:
        """The store serves its tables."""
        self.start("collect history", self.collection.run())


async def begin_row_term(
    world: World,
    registry: Registry,
    rows: RowClusterStore,
    times: CollectionTimes,
    leadership: Leadership,
) -> RowTerm:
    """A term over a row store, with the catalogue that the previous leader left."""
    return RowTerm(world, await CatalogueStore.load(leadership), registry, rows, times)
