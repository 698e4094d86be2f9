"""What the masters know, as far as this process has asked: tables, their schemas, their tablets.

Asked when something is unknown or turned out to be old, and then remembered. Masters are not needed
for anything else: while none answers, transactions on known tables go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    NotReady,
    PercolatorError,
    SchemaError,
    TabletLocation,
)
from percolator.v1 import master_pb2 as wire
from percolator.v1.cells_pb2 import RowRange
from percolator.wire import methods
from percolator.wire.backoff import Backoff
from percolator.wire.lanes import SchemaVersions
from percolator.wire.status import location_from_wire
from percolator.wire.tablet_map import TabletMap
from percolator.world import RequestT, ResponseT, UnaryMethod, World

_TABLETS_PER_PAGE = 1_000
_SEARCH_SECONDS = 5.0
"""For one search for tablets; whoever waits for it tries again until his own deadline."""
_RETRY_SECONDS_MIN = 0.02
_RETRY_SECONDS_MAX = 0.5
_ATTEMPT_SECONDS_MAX = 2.0


@dataclass(frozen=True)
class TableSchema:
    """Which columns of a table notify whom."""

    version: int = 0
    observers: Mapping[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    """By column: who is notified by the commit of a put or delete."""
    weak_observers: Mapping[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    """By column: who is notified by `notify` only."""

    @classmethod
    def of(cls, version: int, observers: Sequence[wire.Observer]) -> TableSchema:
        strong: dict[bytes, tuple[bytes, ...]] = {}
        weak: dict[bytes, tuple[bytes, ...]] = {}
        for observer in observers:
            by_column = weak if observer.weak else strong
            for column in observer.columns:
                by_column[column] = (*by_column.get(column, ()), observer.name.encode())
        return cls(version, strong, weak)


@dataclass(frozen=True)
class TableInfo:
    """A table that exists."""

    table_id: int
    name: str
    schema: TableSchema


class Masters:
    """Calls to whichever master answers; a standby sends us on."""

    def __init__(self, world: World, addresses: Sequence[str]) -> None:
        self._world = world
        self._addresses = addresses
        self._turn = 0

    async def call(
        self,
        method: UnaryMethod[RequestT, ResponseT],
        request: RequestT,
        deadline: float,
        *,
        attempt_seconds_max: float = _ATTEMPT_SECONDS_MAX,
    ) -> ResponseT:
        """Until the deadline. What is called here may be repeated without harm."""
        clock = self._world.clock
        backoff = Backoff(clock, self._world.random, _RETRY_SECONDS_MIN, _RETRY_SECONDS_MAX)
        while True:
            left = deadline - clock.monotonic_seconds()
            address = self._addresses[self._turn % len(self._addresses)]
            try:
                call = self._world.network.unary(address, method)
                return await call(request, min(max(left, 0.001), attempt_seconds_max))
            except (ExecutionUnknown, NotReady) as error:
                problem: PercolatorError = error
            self._turn += 1
            if self._turn % len(self._addresses) == 0 and not await backoff.pause(deadline):
                raise DeadlineExceeded(
                    f"no master answered in time; at last: {problem.message}", where=problem.where
                )


class Catalog:
    """Tables by name, schemas and tablets by table id."""

    def __init__(
        self, world: World, masters: Sequence[str], tablets: TabletMap, versions: SchemaVersions
    ) -> None:
        self._clock = world.clock
        self._masters = Masters(world, masters)
        self._tablets = tablets
        self._versions = versions
        self._by_name: dict[str, TableInfo] = {}
        self._by_id: dict[int, TableSchema] = {}

    # ------------------------------------------------------------------ tables

    def known(self, name: str) -> TableInfo | None:
        return self._by_name.get(name)

    async def table(self, name: str, deadline: float) -> TableInfo:
        """Raises `SchemaError` when there is no such table."""
        known = self._by_name.get(name)
        if known is not None:
            return known
        request = wire.DescribeTableRequest(name=name)
        response = await self._masters.call(methods.DESCRIBE_TABLE, request, deadline)
        return self._learn(response.table)

    async def tables(self, deadline: float) -> list[TableInfo]:
        """All tables, by name."""
        found = await self.describe_all(deadline)
        return [self._by_name[table.name] for table in found if not table.deleting]

    async def create(
        self,
        name: str,
        splits: Sequence[bytes],
        options: wire.TableOptions,
        *,
        exist_ok: bool,
        deadline: float,
    ) -> TableInfo:
        request = wire.CreateTableRequest(
            name=name, splits=splits, options=options, exist_ok=exist_ok
        )
        # In one attempt, as long as many tablets may take: a second one would find the table that
        # the first has made, and say that there is one already.
        response = await self._masters.call(
            methods.CREATE_TABLE, request, deadline, attempt_seconds_max=inf
        )
        return self._learn(response.table)

    async def describe(self, name: str, deadline: float) -> wire.Table:
        """The table with its observers, as it is now. Raises `SchemaError` when there is none."""
        request = wire.DescribeTableRequest(name=name)
        response = await self._masters.call(methods.DESCRIBE_TABLE, request, deadline)
        self._learn(response.table)
        return response.table

    async def describe_all(self, deadline: float) -> list[wire.Table]:
        """All tables with their observers, by name, as they are now."""
        request = wire.ListTablesRequest()
        response = await self._masters.call(methods.LIST_TABLES, request, deadline)
        for table in response.tables:
            if not table.deleting:
                self._learn(table)
        return list(response.tables)

    async def describe_collection(self, deadline: float) -> wire.DescribeCollectionResponse:
        """How far back history goes, in all tables."""
        request = wire.DescribeCollectionRequest()
        return await self._masters.call(methods.DESCRIBE_COLLECTION, request, deadline)

    async def change_observers(
        self, request: wire.ChangeObserversRequest, deadline: float
    ) -> wire.Table:
        """Returns when every commit notifies those that were added."""
        response = await self._masters.call(
            methods.CHANGE_OBSERVERS, request, deadline, attempt_seconds_max=inf
        )
        self._learn(response.table)
        return response.table

    async def delete(self, name: str, *, missing_ok: bool, deadline: float) -> bool:
        request = wire.DeleteTableRequest(name=name, missing_ok=missing_ok)
        response = await self._masters.call(methods.DELETE_TABLE, request, deadline)
        known = self._by_name.get(name)
        if known is not None:
            self.forget(known.table_id)
        return response.deleted

    def forget(self, table_id: int) -> None:
        """It is gone, or may be: ask again. A new table of that name has another id."""
        self._by_id.pop(table_id, None)
        self._tablets.forget(table_id)
        for name in [n for n, info in self._by_name.items() if info.table_id == table_id]:
            del self._by_name[name]

    def _learn(self, table: wire.Table) -> TableInfo:
        schema = TableSchema.of(table.schema_version, table.observers)
        self._learn_schema(table.table_id, schema)
        info = TableInfo(table.table_id, table.name, self._by_id[table.table_id])
        self._by_name[table.name] = info
        return info

    # ------------------------------------------------------------------ schemas

    def get(self, table_id: int) -> TableSchema | None:
        return self._by_id.get(table_id)

    async def refresh(self, table_id: int, deadline: float) -> TableSchema:
        """Asks for the schema as it is now."""
        request = wire.DescribeTableRequest(table_id=table_id)
        try:
            response = await self._masters.call(methods.DESCRIBE_TABLE, request, deadline)
        except SchemaError:
            self.forget(table_id)
            raise
        return self._learn(response.table).schema

    def _learn_schema(self, table_id: int, schema: TableSchema) -> None:
        known = self._by_id.get(table_id)
        if known is None or known.version < schema.version:  # answers may overtake each other
            self._by_id[table_id] = schema
            self._versions.of_table[table_id] = schema.version

    # ------------------------------------------------------------------ tablets

    async def find(self, table_id: int, row: bytes) -> list[TabletLocation]:
        """Where the row is, and what lies behind it. Raises `SchemaError`."""
        try:
            response = await self._locate(table_id, row, even_deleting=False)
        except SchemaError:
            self.forget(table_id)
            raise
        schema = TableSchema.of(response.schema_version, response.observers)
        self._learn_schema(table_id, schema)
        return [location_from_wire(location) for location in response.locations]

    async def find_even_deleted(self, table_id: int, row: bytes) -> list[TabletLocation]:
        """As `find`, while anything of the table is left. Nothing of it is remembered."""
        response = await self._locate(table_id, row, even_deleting=True)
        return [location_from_wire(location) for location in response.locations]

    async def _locate(
        self, table_id: int, row: bytes, *, even_deleting: bool
    ) -> wire.LocateTabletsResponse:
        request = wire.LocateTabletsRequest(
            table_id=table_id,
            range=RowRange(start=row),
            limit=_TABLETS_PER_PAGE,
            even_deleting=even_deleting,
        )
        deadline = self._clock.monotonic_seconds() + _SEARCH_SECONDS
        return await self._masters.call(methods.LOCATE_TABLETS, request, deadline)

    async def all_tablets(self, table_id: int, deadline: float) -> list[TabletLocation]:
        """Every tablet of the table, as it is now."""
        found: list[TabletLocation] = []
        rest: RowRange | None = RowRange()
        while rest is not None:
            request = wire.LocateTabletsRequest(
                table_id=table_id, range=rest, limit=_TABLETS_PER_PAGE
            )
            response = await self._masters.call(methods.LOCATE_TABLETS, request, deadline)
            found += [location_from_wire(location) for location in response.locations]
            rest = response.rest if response.HasField("rest") else None
        self._tablets.replace(table_id, found)
        return found
