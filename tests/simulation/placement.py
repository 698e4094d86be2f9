"""A stand-in for the master, for simulations that are about transactions: cheap and simple.

It keeps tables and placements in a record that outlives it, and regularly asks the servers what
they serve. A tablet that no server serves is given to a living server at the next epoch, which is
recorded before that server is told. It does anything that may happen to an owner at any time:
orders that come late or twice, and takeovers from living owners.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from google.protobuf.descriptor import ServiceDescriptor

from percolator.codecs.names import CodecNames
from percolator.errors import PercolatorError, SchemaError
from percolator.observers.observer_change import changed_observers, report_backfill
from percolator.services.chassis.rpc import caller_identity
from percolator.v1 import cluster_pb2, master_pb2, oracle_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from percolator.v1.errors_pb2 import TabletLocation
from percolator.wire import methods
from percolator.world import World
from tests.simulation.process import Incarnation
from tests.simulation.programs import CLUSTER_ID, LOCK_SERVICE, MASTER, ORACLE
from tests.simulation.rows import LoadedTables, Loading

_ROUND_SECONDS = 0.4
_ASK_SECONDS = 0.4
_ORDER_SECONDS = 3.0
_ORACLE_SECONDS = 0.5
_AGAIN_SECONDS = 0.1
_SCHEMA_VERSION = 1


@dataclass
class Placed:
    """A tablet, and the server that is to serve it."""

    location: TabletLocation
    served_epoch: int = 0
    """The last epoch at which it was served: an owner that finds nothing on disk, or only older
    epochs, has lost it."""


@dataclass
class Placements:
    """State that survives every crash of the stand-in."""

    servers: Sequence[str]
    tables: dict[str, master_pb2.Table] = field(default_factory=dict)
    tablets: list[Placed] = field(default_factory=list)
    epoch: int = 0
    """The catalogue's."""
    loaded: LoadedTables = field(default_factory=LoadedTables)
    """Tables that bulk loads into a row store have created."""
    moves: list[int] = field(default_factory=list)
    """Indexes in `tablets` of those that shall get another owner."""

    def add_table(
        self,
        name: str,
        splits: Sequence[bytes],
        observers: Sequence[master_pb2.Observer] = (),
        *,
        change_feed: bool = False,
        ttls: Mapping[bytes, int] = MappingProxyType({}),
    ) -> None:
        options = master_pb2.TableOptions(change_feed=change_feed)
        for column, ttl in ttls.items():
            options.ttls.add(column=column, ttl_milliseconds=ttl)
        table = master_pb2.Table(
            table_id=len(self.tables) + 1,
            name=name,
            schema_version=_SCHEMA_VERSION,
            tablets=len(splits) + 1,
            observers=observers,
            options=options,
        )
        self.tables[name] = table
        for start, end in itertools.pairwise([b"", *splits, b""]):
            location = TabletLocation(
                table_id=table.table_id,
                tablet_id=len(self.tablets) + 100,
                range=RowRange(start=start, end=end),
            )
            self.tablets.append(Placed(location))

    def all_tables(self) -> list[master_pb2.Table]:
        """Tables that clients can use."""
        return [*self.tables.values(), *self.loaded.published()]

    async def serve(self, incarnation: Incarnation) -> None:
        """The program of the stand-in."""
        master = _StandIn(incarnation.world, self)
        incarnation.listen(
            [
                _Part(cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"], master),
                _Part(master_pb2.DESCRIPTOR.services_by_name["MasterService"], master),
            ]
        )
        await master.place_forever()


@dataclass(frozen=True)
class _Part:
    """The part of a service that the stand-in answers."""

    descriptor: ServiceDescriptor
    handler: object


class _StandIn:
    """One life of the stand-in."""

    def __init__(self, world: World, placements: Placements) -> None:
        self._world = world
        self._placements = placements
        self._loading = Loading(world, placements.loaded)
        self._serving: dict[str, dict[int, int]] = {}
        """The tablets and epochs of each server that answered recently."""

    # ------------------------------------------------------------------ answers

    async def describe(self, request: cluster_pb2.DescribeRequest) -> cluster_pb2.DescribeResponse:
        kinds = {
            MASTER: cluster_pb2.SERVICE_KIND_MASTER,
            ORACLE: cluster_pb2.SERVICE_KIND_ORACLE,
            LOCK_SERVICE: cluster_pb2.SERVICE_KIND_LOCK_SERVICE,
        }
        return cluster_pb2.DescribeResponse(
            cluster_id=CLUSTER_ID,
            route=cluster_pb2.ROUTE_DIRECT,
            servers=[cluster_pb2.Server(kind=kind, address=one) for one, kind in kinds.items()],
            restricted=caller_identity().rights is not None,
        )

    async def register(self, request: cluster_pb2.RegisterRequest) -> cluster_pb2.RegisterResponse:
        return cluster_pb2.RegisterResponse(cluster_id=CLUSTER_ID)

    async def describe_table(
        self, request: master_pb2.DescribeTableRequest
    ) -> master_pb2.DescribeTableResponse:
        return master_pb2.DescribeTableResponse(table=self._table(request.name, request.table_id))

    async def list_tables(
        self, request: master_pb2.ListTablesRequest
    ) -> master_pb2.ListTablesResponse:
        return master_pb2.ListTablesResponse(tables=self._placements.all_tables())

    async def begin_load(
        self, request: master_pb2.BeginLoadRequest
    ) -> master_pb2.BeginLoadResponse:
        return await self._loading.begin(request)

    async def publish_loads(
        self, request: master_pb2.PublishLoadsRequest
    ) -> master_pb2.PublishLoadsResponse:
        return await self._loading.publish(request)

    async def abandon_load(
        self, request: master_pb2.AbandonLoadRequest
    ) -> master_pb2.AbandonLoadResponse:
        return await self._loading.abandon(request)

    async def change_observers(
        self, request: master_pb2.ChangeObserversRequest
    ) -> master_pb2.ChangeObserversResponse:
        """Only on a row store, where no tablet has to be told: the catalogue first, then the
        epoch."""
        table = self._table(request.table, 0)
        change = changed_observers(table, request)
        del table.observers[:]
        table.observers.extend(change.observers)
        table.schema_version += change.raises_version
        self._placements.epoch += 1
        raised = oracle_pb2.AdvanceEpochRequest(catalogue_epoch=self._placements.epoch)
        await self._advance(raised)
        return master_pb2.ChangeObserversResponse(table=table)

    async def _advance(self, raised: oracle_pb2.AdvanceEpochRequest) -> None:
        """Asks again like a master: a message to an oracle that is just starting is lost."""
        advance = self._world.network.unary(ORACLE, methods.ADVANCE_EPOCH)
        clock = self._world.clock
        deadline = clock.monotonic_seconds() + _ORDER_SECONDS
        while True:
            try:
                await advance(raised, _ORACLE_SECONDS)
            except PercolatorError:
                if clock.monotonic_seconds() >= deadline:
                    raise
                await clock.sleep(_AGAIN_SECONDS)
            else:
                return

    async def declare_codecs(
        self, request: master_pb2.DeclareCodecsRequest
    ) -> master_pb2.DeclareCodecsResponse:
        table = self._table("", request.table_id)
        declared = CodecNames.of(table.codecs).declared(table.name, request.codecs)
        table.codecs.CopyFrom(declared.message())
        return master_pb2.DeclareCodecsResponse(table=table)

    async def report_backfill(
        self, request: master_pb2.ReportBackfillRequest
    ) -> master_pb2.ReportBackfillResponse:
        return report_backfill(self._table("", request.table_id), request)

    async def locate_tablets(
        self, request: master_pb2.LocateTabletsRequest
    ) -> master_pb2.LocateTabletsResponse:
        table = self._table("", request.table_id)
        start = request.range.start
        found = [
            placed.location
            for placed in self._placements.tablets
            if placed.location.table_id == table.table_id
            and (not placed.location.range.end or placed.location.range.end > start)
        ]
        return master_pb2.LocateTabletsResponse(
            locations=found, schema_version=table.schema_version, observers=table.observers
        )

    def _table(self, name: str, table_id: int) -> master_pb2.Table:
        for table in self._placements.all_tables():
            if table.name == name or table.table_id == table_id:
                return table
        raise SchemaError(f"there is no table {name or table_id}", table=name)

    # ------------------------------------------------------------------ placement

    async def place_forever(self) -> None:
        while True:
            await asyncio.gather(*map(self._ask, self._placements.servers))
            if self._serving:
                await self._place()
            await self._loading.remove_dropped()
            await asyncio.sleep(_ROUND_SECONDS)

    async def _ask(self, server: str) -> None:
        ask = self._world.network.unary(server, methods.REPORT)
        try:
            answer = await ask(pb.ReportRequest(), _ASK_SECONDS)
        except PercolatorError:
            self._serving.pop(server, None)
            return
        # As the real master does: a tablet that could not be opened is ordered to open again.
        self._serving[server] = {
            one.tablet_id: one.epoch for one in answer.tablets if not one.HasField("error")
        }

    async def _place(self) -> None:
        moves, self._placements.moves = self._placements.moves, []
        orders = []
        for index, placed in enumerate(self._placements.tablets):
            location = placed.location
            served = self._serving.get(location.address, {}).get(location.tablet_id)
            if served != location.epoch or not location.epoch or index in moves:
                orders.append(self._order(placed))
        await asyncio.gather(*orders)

    async def _order(self, placed: Placed) -> None:
        """Records the next owner, then tells it. The next round sees the result."""
        location = placed.location
        living = sorted(self._serving)
        others = [server for server in living if server != location.address] or living
        location.epoch += 1
        location.address = self._world.random.choice(others)
        options = self._table("", location.table_id).options
        request = pb.OpenTabletRequest(
            table_id=location.table_id,
            tablet_id=location.tablet_id,
            epoch=location.epoch,
            schema_version=_SCHEMA_VERSION,
            range=location.range,
            must_exist=placed.served_epoch > 0,
            served_epoch=placed.served_epoch,
            change_feed=options.change_feed,
            ttls=options.ttls,
        )
        try:
            await self._world.network.unary(location.address, methods.OPEN_TABLET)(
                request, _ORDER_SECONDS
            )
        except PercolatorError:
            # Silent, full, or overtaken: the next round gives the tablet to another server.
            self._serving.get(location.address, {}).pop(location.tablet_id, None)
        else:
            placed.served_epoch = request.epoch
