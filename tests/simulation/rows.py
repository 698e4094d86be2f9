"""The row store of a simulation: a service that others run, in place of the tablet servers.

It never loses what it has answered. It may be silent, slow, or gone for a while, as all processes
may, and calls may be lost, late or doubled on their way, as all messages may.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from google.protobuf.descriptor import ServiceDescriptor

from percolator.aio import Database
from percolator.aio.engine import Rows
from percolator.bigtable.admin import create_table, delete_table, require_table
from percolator.bigtable.messages import (
    CHECK_AND_MUTATE_ROW,
    CREATE_TABLE,
    DELETE_TABLE,
    GET_TABLE,
    MUTATE_ROWS,
    READ_ROWS,
)
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.errors import NotReady, PercolatorError
from percolator.formats.records import START_TIMESTAMP_BYTES
from percolator.history.rows import Decided, RowHistory
from percolator.routing.catalog import TableSchema
from percolator.rowstore.adapter import stored_cells
from percolator.rowstore.identity import TABLE_ID
from percolator.rowstore.intents import BUCKETS, INTENTS_TABLE, intent_of, key_from
from percolator.rowstore.layout import LOCK_ONLY, WRITES, Times
from percolator.rowstore.port import Selection
from percolator.services.chassis import cluster_store
from percolator.services.chassis.cluster_store import RowClusterStore
from percolator.services.chassis.coordinator import CoordinatorTimes
from percolator.services.chassis.records import RowRecords
from percolator.services.master.cluster_map import (
    Catalogue,
    Table,
    decode_catalogue,
    encode_catalogue,
    table_message,
)
from percolator.services.master.collection import history_needs
from percolator.services.master.map_store import KEY, decoded_catalogue
from percolator.services.master.master import ROLE as MASTER_ROLE
from percolator.services.master.row_term import RowLoads
from percolator.services.master.service import MasterSettings, master_service
from percolator.services.oracle.oracle import ROLE as ORACLE_ROLE
from percolator.services.oracle.service import OracleSettings, oracle_service
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import bigtable_pb2 as pb
from percolator.v1 import cluster_pb2, master_pb2
from percolator.v1.cells_pb2 import SPACE_NOTIFY, SPACE_WRITE, Cell
from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.wire import methods
from percolator.world import Network, World
from tests.doubles.memory_files import MemoryDisk
from tests.isolation.store_audit import StoredTable
from tests.simulation.disks import SimulatedFiles
from tests.simulation.process import Incarnation
from tests.simulation.programs import (
    LOCK_SERVICE,
    ORACLE,
    POLL_SECONDS,
    cluster_id_of,
    failure,
    host_for,
    needing_the_store,
    register,
)
from tests.simulation.virtual_time import WALL_MILLISECONDS

ROW_STORE = "bigtable:443"
ON_ROWS = "run on a row store"
WHOLLY_ON_ROWS = "run whose masters and oracles are on a row store, too"
PLACE = Place(ROW_STORE, "simulated", "simulated")
_RECORDS = PLACE.table(TABLE_ID)
"""Table of the cluster's own records, without cells of its tables."""
EPOCH_MILLISECONDS = WALL_MILLISECONDS - 60_000
_TIMES = Times(EPOCH_MILLISECONDS)
_CHUNK_BYTES = 40
"""Far less than Bigtable's, so that most records come in several parts."""
_SECONDS = 10.0


_SERVED = (CHECK_AND_MUTATE_ROW, MUTATE_ROWS, READ_ROWS, CREATE_TABLE, DELETE_TABLE, GET_TABLE)


class _Method(NamedTuple):
    name: str


@dataclass(frozen=True)
class _Service:
    """Description of a service for the simulated network: only the messages of Google's API are
    installed."""

    full_name: str
    methods: list[_Method]
    handler: object

    @property
    def descriptor(self) -> ServiceDescriptor:
        return cast("ServiceDescriptor", self)


class _Watched(BigtableInMemory):
    """Remembers which commit records were collected."""

    def __init__(self, collected: dict[int, int]) -> None:
        super().__init__(chunk_bytes=_CHUNK_BYTES)
        self.times = _TIMES
        self._collected = collected

    async def check_and_mutate_row(
        self, request: pb.BigtableCheckAndMutateRowRequest
    ) -> pb.BigtableCheckAndMutateRowResponse:
        table = self._table(request.table_name)
        before = table.rows.get(request.row_key, {})
        response = await super().check_and_mutate_row(request)
        if request.table_name == _RECORDS:
            return response
        for cell in before.keys() - table.rows.get(request.row_key, {}).keys():
            family, _, time = cell
            if family in (WRITES, LOCK_ONLY):
                start = int.from_bytes(before[cell][:START_TIMESTAMP_BYTES], "big")
                self._collected[start] = self.times.timestamp(time)
        return response


class RowStoreProgram:
    """The store, and what survives every crash of its process."""

    def __init__(self, collected: dict[int, int]) -> None:
        """Adds to `collected` the transactions whose commit records were collected, and their
        timestamps."""
        self._model = _Watched(collected)

    @property
    def times(self) -> Times:
        """Times of the cluster whose cells it has."""
        return self._model.times

    @times.setter
    def times(self, times: Times) -> None:
        self._model.times = times

    async def serve(self, incarnation: Incarnation) -> None:
        services: dict[str, list[_Method]] = {}
        for method in _SERVED:
            _, service, name = method.path.split("/")
            services.setdefault(service, []).append(_Method(name))
        incarnation.listen(
            _Service(service, names, self._model) for service, names in services.items()
        )
        await incarnation.wire.loop.create_future()

    def directly(self) -> Network:
        """A way to it on which nothing goes wrong, for those who look at a run from outside."""
        return InProcessNetwork({ROW_STORE: self._model})

    async def create(self, table_id: int) -> None:
        await create_table(self.directly(), PLACE, table_id, _SECONDS)

    async def stored(self, table_id: int, name: str) -> StoredTable:
        """Everything that a table holds."""
        store = BigtableStore(self.directly(), PLACE)
        cells = [cell async for cell in stored_cells(store, table_id, self.times, _SECONDS)]
        cells += [cell async for cell in _notifications(store, table_id, cells)]
        return StoredTable(table_id, name, cells)


async def _notifications(
    store: BigtableStore, table_id: int, cells: Sequence[Cell]
) -> AsyncGenerator[Cell, None]:
    """The intents of changes that were committed, as the notifications that a tablet has."""
    commits = {
        (cell.row, cell.column, cell.value[:START_TIMESTAMP_BYTES]): cell.timestamp
        for cell in cells
        if cell.space == SPACE_WRITE
    }
    stream = store.scan(
        INTENTS_TABLE,
        key_from(BUCKETS[0]),
        b"",
        [Selection(WRITES)],
        rows_max=0,
        reverse=False,
        timeout_seconds=_SECONDS,
    )
    async with aclosing(stream) as rows:
        async for row in rows:
            for stored in row.cells:
                intent = intent_of(row, stored.column, stored.value)
                start = intent.timestamp.to_bytes(START_TIMESTAMP_BYTES, "big")
                commit = commits.get((intent.row, intent.column, start))
                timestamp = intent.timestamp if intent.is_certain else commit
                if intent.table_id == table_id and timestamp is not None:
                    yield Cell(
                        space=SPACE_NOTIFY,
                        row=intent.row,
                        column=intent.column,
                        timestamp=timestamp,
                        qualifier=intent.observer,
                    )


def rows_over(network: Network, times: Times = _TIMES) -> Rows:
    """The store as a client reaches it."""
    return Rows(BigtableStore(network, PLACE), times)


async def make_table(network: Network, table_id: int) -> None:
    await require_table(network, PLACE, table_id, _SECONDS)


async def drop_table(network: Network, table_id: int) -> None:
    await delete_table(network, PLACE, table_id, _SECONDS)


def row_step(payload: bytes) -> str:
    """The step of the protocol that a call to the store makes, as disruptions.py names
    it."""
    request = pb.BigtableCheckAndMutateRowRequest.FromString(payload)
    changed = {
        change.set_cell.family_name
        for change in (*request.true_mutations, *request.false_mutations)
        if change.HasField("set_cell")
    }
    if "r" in changed:
        return "rollback"
    if changed & {"w", "o"}:
        return "commit of the primary" if _sees_min_commit(request) else "commit of others"
    return "prewrite" if request.false_mutations else "heartbeat or push"


def _sees_min_commit(request: pb.BigtableCheckAndMutateRowRequest) -> bool:
    """True if the lock has to be as it was seen: only the commit point asks for more than whose it
    is."""
    return any(
        len(one.value_range_filter.start_value_closed) > START_TIMESTAMP_BYTES
        for one in request.predicate_filter.chain.filters
    )


# A cluster that keeps everything in the simulated row store: the real masters and oracles.
#
# There is no disk. Who leads is decided by rows, and so are the oracle's mark, the catalogue and
# its epoch. A process that finds the store silent when it starts ends, and is started again.

MASTERS_REPLACED = "master replaced on a row store"
ORACLES_REPLACED = "oracle replaced on a row store"
_SILENCE_SECONDS = 1.0
"""Soon, so that a run sees many leaders: even a busy one is replaced now and then."""
_COLLECTION_SECONDS = 0.7
_AGAIN_SECONDS = 0.2
_ROW_CLUSTER_TIMES = CoordinatorTimes()


class RowCluster:
    """Its programs, and what they have recorded."""

    def __init__(
        self, store: RowStoreProgram, masters: Sequence[str], occurred: Counter[str]
    ) -> None:
        self._store = store
        self._masters = tuple(masters)
        self._occurred = occurred

    async def master(self, incarnation: Incarnation) -> None:
        """The program of a master: one leads, the others wait."""
        incarnation.wire.wake(incarnation.address)  # it asks the store before it listens
        settings = MasterSettings(
            store=str(PLACE),
            server_silence_seconds=5.0,
            collection_seconds=_COLLECTION_SECONDS,
            retention_seconds=1.5,
            retention_min_seconds=1.0,
            leader_silence_seconds=_SILENCE_SECONDS,
        )
        kind = cluster_pb2.SERVICE_KIND_MASTER
        host = host_for(incarnation, self._no_files(incarnation), settings, kind, "")
        store = _opened(incarnation)
        async with (
            needing_the_store(),
            master_service(host, store, poll_seconds=POLL_SECONDS) as exposed,
        ):
            incarnation.listen(exposed)
            await host.failed.wait()
        raise failure(host, incarnation)

    async def oracle(self, incarnation: Incarnation) -> None:
        """The program of an oracle."""
        incarnation.wire.wake(incarnation.address)
        settings = OracleSettings(
            store=str(PLACE),
            standby=True,
            masters=self._masters,
            leader_silence_seconds=_SILENCE_SECONDS,
        )
        kind = cluster_pb2.SERVICE_KIND_ORACLE
        cluster_id = await cluster_id_of(incarnation.world, self._masters)
        host = host_for(incarnation, self._no_files(incarnation), settings, kind, cluster_id)
        store = _opened(incarnation)
        async with needing_the_store():
            await store.refuse_other_cluster(cluster_id)
            async with oracle_service(host, store, poll_seconds=POLL_SECONDS) as exposed:
                incarnation.listen(exposed)
                host.background(
                    "register", register(incarnation, self._masters, host.announced, forever=True)
                )
                await host.failed.wait()
        raise failure(host, incarnation)

    def _no_files(self, incarnation: Incarnation) -> SimulatedFiles:
        """An empty disk, which no disruption hits: these services write nothing to it."""
        answers = asyncio.Event()
        answers.set()
        return SimulatedFiles(
            incarnation.wire.loop,
            MemoryDisk(),
            incarnation.world.random,
            self._occurred,
            0.0,
            answers,
        )

    # ------------------------------------------------------------------ looks from outside

    async def learn_times(self, world: World) -> None:
        """Waits for the origin of times, which the first master writes."""
        while True:
            found = await cluster_store.read(RowRecords(self._seen(world).store, world), str(PLACE))
            if found is not None:
                self._store.times = Times(found.epoch_milliseconds)
                return
            await asyncio.sleep(_AGAIN_SECONDS)

    async def catalogue(self, world: World) -> Catalogue:
        """As the last leader has recorded it."""
        recorded = self._seen(world).coordinator(_ROW_CLUSTER_TIMES)
        return decoded_catalogue(await recorded.read(MASTER_ROLE, KEY))

    async def count_leaders(self, world: World) -> None:
        """Counts how often another leader took over."""
        recorded = self._seen(world).coordinator(_ROW_CLUSTER_TIMES)
        for role, name in ((MASTER_ROLE, MASTERS_REPLACED), (ORACLE_ROLE, ORACLES_REPLACED)):
            leader = await recorded.leader(role)
            self._occurred[name] += 0 if leader is None else leader.epoch - 1

    def _seen(self, world: World) -> RowClusterStore:
        return RowClusterStore(self._store.directly(), PLACE, world)


def _opened(incarnation: Incarnation) -> RowClusterStore:
    return RowClusterStore(incarnation.world.network, PLACE, incarnation.world)


# Whoever collects the history of a row store, beside all workloads: like the master, a process
# that is killed, paused and cut off as any other.

COLLECTOR = "collector:1"
COLLECTED_FROM_ROWS = "history collected from rows"


@dataclass(frozen=True)
class CollectorTimes:
    """How much history is kept."""

    round_seconds: float = 0.7
    retention_seconds: float = 1.5


_COLLECTION = CollectorTimes()


class RowCollectorProgram:
    """The collector, and what it has decided: that outlives it."""

    def __init__(
        self,
        connected: Callable[[World], Awaitable[Database]],
        table_ids: Callable[[], Iterable[int]],
        *,
        keeps_snapshots: bool,
    ) -> None:
        """With `keeps_snapshots`, only evidence of ended transactions is collected, and the history
        around it stays."""
        self._connected = connected
        self._table_ids = table_ids
        self._keeps_snapshots = keeps_snapshots
        self.decided = Decided()

    async def serve(self, incarnation: Incarnation) -> None:
        """The program."""
        incarnation.listen([])
        world = incarnation.world
        database = await self._connected(world)
        rows, env = rows_over(world.network), database.internal.engine.env

        async def registered() -> dict[int, TableSchema]:
            deadline = env.now() + env.limits.call_seconds
            return {one: await env.schemas.refresh(one, deadline) for one in self._table_ids()}

        history = RowHistory(env, rows.store, rows.times, world, registered, share=0.5)
        while True:
            await world.clock.sleep(_COLLECTION.round_seconds)
            try:
                await history.collect(await self._decide(world, database))
            except PercolatorError:
                continue  # the next round tries again

    async def _decide(self, world: World, database: Database) -> Decided:
        """As the master does: written down, and then the sessions are looked at again."""
        needs = await history_needs(world.network, [LOCK_SERVICE])
        now = await database.internal.engine.env.timestamps.get()
        wanted = now - (int(_COLLECTION.retention_seconds * 1000) << SEQUENCE_BITS)
        wanted = max(min(wanted, needs.oldest or now), self.decided.transactions)
        reads = 0 if self._keeps_snapshots else wanted
        self.decided = Decided(dict.fromkeys(self._table_ids(), reads), wanted)
        again = await history_needs(world.network, [LOCK_SERVICE])
        if 0 < again.oldest < wanted:
            raise NotReady("a session that began meanwhile needs history")
        return self.decided


# Bulk loads into the row store of a simulation: the real master's decisions, in the stand-in.

_FIRST_ID = 1_000
"""Above those of the tables that are there from the beginning."""
_CALL_SECONDS = 3.0


@dataclass
class LoadedTables:
    """Tables of bulk loads, which survive every crash of the stand-in."""

    current: Catalogue = field(default_factory=lambda: Catalogue(_FIRST_ID))

    async def change(self, decide: Callable[[Catalogue], tuple[Catalogue, Any]]) -> Any:
        """As a leader changes its catalogue."""
        changed, result = decide(self.current)
        self.current = decode_catalogue(encode_catalogue(changed))
        return result

    def published(self) -> list[master_pb2.Table]:
        return [table_message(one) for one in self.current.tables.values() if one.is_used]


class Loading:
    """One life of the stand-in."""

    def __init__(self, world: World, tables: LoadedTables) -> None:
        self._world = world
        self._tables = tables
        kept, here = cast("Any", tables), cast("Any", self)
        self._loads = RowLoads(world.clock, kept, here, here, retention_min_seconds=0.0)

    async def begin(self, request: master_pb2.BeginLoadRequest) -> master_pb2.BeginLoadResponse:
        table = await self._loads.begin_load(request, self._deadline())
        return master_pb2.BeginLoadResponse(table=None if table is None else table_message(table))

    async def publish(
        self, request: master_pb2.PublishLoadsRequest
    ) -> master_pb2.PublishLoadsResponse:
        tables = await self._loads.publish_loads(request, self._deadline())
        return master_pb2.PublishLoadsResponse(tables=map(table_message, tables))

    async def abandon(
        self, request: master_pb2.AbandonLoadRequest
    ) -> master_pb2.AbandonLoadResponse:
        return await self._loads.abandon_load(request, self._deadline())

    async def remove_dropped(self) -> None:
        """Deletes the store's tables of runs that were given up, as collection does."""
        for table in list(self._tables.current.tables.values()):
            if table.deleting:
                await self._remove(table)

    async def _remove(self, table: Table) -> None:
        try:
            await drop_table(self._world.network, table.table_id)
        except PercolatorError:
            return  # the next round tries again
        self._tables.current = self._tables.current.without_table(table.table_id)

    def _deadline(self) -> float:
        return self._world.clock.monotonic_seconds() + _CALL_SECONDS

    # ------------------------------------------------------------------ oracle and store

    name = "the simulated store"

    def source(self) -> Loading:
        return self

    async def get(self, *, timeout_seconds: float) -> int:
        ask = self._world.network.unary(ORACLE, methods.GET_TIMESTAMPS)
        return (await ask(GetTimestampsRequest(count=1), timeout_seconds)).first

    async def create_table(self, table_id: int) -> None:
        await make_table(self._world.network, table_id)

    async def require_empty(self, table_id: int) -> None:
        """Does nothing: no one else creates tables here."""
