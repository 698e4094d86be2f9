"""A cache of what the masters know: tables, their schemas, their tablets.

A master is asked when something is unknown or proved to be out of date, and the answer is kept.
Transactions need masters for nothing else: while none answers, those on known tables continue.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from typing import Any, NamedTuple

from percolator.codecs.indexes import IndexDefinition, indexes_of
from percolator.codecs.names import CodecNames
from percolator.codecs.readable import quoted
from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    NotExecuted,
    NotReady,
    PercolatorError,
    PermissionDenied,
    Retry,
    SchemaError,
    TabletLocation,
    Unavailable,
)
from percolator.routing.lanes import SchemaVersions
from percolator.routing.table_codecs import TableCodecs
from percolator.schema import Readable
from percolator.tasks import Tasks, outlasting
from percolator.timestamps import Timestamp
from percolator.v1 import master_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from percolator.v1.cluster_pb2 import DescribeRequest
from percolator.v1.tabletserver_pb2 import ColumnTtl
from percolator.wire import methods
from percolator.wire.backoff import Backoff
from percolator.wire.status import location_from_wire
from percolator.wire.table_indexes import require_same_indexes
from percolator.wire.table_options import REQUEST_ID_BYTES, require_options
from percolator.world import RequestT, ResponseT, UnaryMethod, World

# What a client knows of one table: who it is, whom its columns notify, and what encodes them.


@dataclass(frozen=True)
class TableSchema:
    """Which columns of a table notify which observers, and what encodes them."""

    version: int = 0
    observers: Mapping[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    """By column: the observers notified when a put or delete commits."""
    weak_observers: Mapping[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    """By column: the observers notified by `notify` only."""
    codecs: TableCodecs = field(default_factory=TableCodecs.unknown, compare=False)
    """Codecs of the table; one object until one of them is changed on purpose."""
    expiring: frozenset[bytes] = frozenset()
    """The columns whose values expire. Tablets judge which have; a client has to write these again
    even if they hold their values already."""
    indexes: tuple[IndexDefinition, ...] = ()
    """Commits keep their entries. The same object as long as they stay the same."""

    @classmethod
    def of(
        cls,
        version: int,
        observers: Sequence[pb.Observer],
        codecs: TableCodecs | None = None,
        ttls: Iterable[ColumnTtl] = (),
        indexes: tuple[IndexDefinition, ...] = (),
    ) -> TableSchema:
        strong: dict[bytes, tuple[bytes, ...]] = {}
        weak: dict[bytes, tuple[bytes, ...]] = {}
        for observer in observers:
            by_column = weak if observer.weak else strong
            for column in observer.columns:
                by_column[column] = (*by_column.get(column, ()), observer.name.encode())
        expiring = frozenset(one.column for one in ttls)
        return cls(version, strong, weak, codecs or TableCodecs.unknown(), expiring, indexes)

    @cached_property
    def indexed(self) -> frozenset[bytes]:
        """The columns of its indexes."""
        return frozenset(column for one in self.indexes for column in one.names)


NO_OBSERVERS = TableSchema()


@dataclass(frozen=True)
class TableInfo:
    """A table that exists."""

    table_id: int
    name: str
    schema: TableSchema
    created_at: int = 0
    """The table is younger than snapshots below this. 0 if it is older than any."""

    @property
    def codecs(self) -> TableCodecs:
        """Codecs of its columns, as of when it was looked up."""
        return self.schema.codecs

    def require_older_than(self, snapshot: int) -> None:
        """Raises `SchemaError` if the table was created after a snapshot at this timestamp."""
        if self.created_at > snapshot:
            raise SchemaError(
                f"table {self.name!r} is younger than the snapshot: it was created at "
                f"{Timestamp(self.created_at).describe()}, and the snapshot is at "
                f"{Timestamp(snapshot).describe()}; begin a new transaction or snapshot to use it",
                table=self.name,
                table_id=self.table_id,
            )


# Which tablet holds a row, and which server serves it, as far as this process knows.
#
# The map may be out of date: every request names tablet and epoch, and a server that does not own
# the tablet executes nothing and says what it knows. So a wrong map costs a round trip, never a
# wrong result.

Finder = Callable[[int, bytes], Awaitable[Sequence[TabletLocation]]]
"""Asks a master where a row of a table is served. The answer may cover more of the table than that
row. Raises `SchemaError` for a table that does not exist."""


class Searched(NamedTuple):
    """The rows that an answer of a master was about; an empty end is that of the table."""

    start: bytes
    end: bytes

    def has(self, row: bytes) -> bool:
        return self.start <= row and (not self.end or row < self.end)


EVERYTHING = Searched(b"", b"")


class _Table:
    """The known tablets of one table, by their first rows. There may be gaps, but no overlaps."""

    __slots__ = ("locations", "starts")

    def __init__(self) -> None:
        self.starts: list[bytes] = []
        self.locations: list[TabletLocation] = []

    def overlapping(self, location: TabletLocation) -> slice:
        """Where the tablets are that have rows of this one. There may be thousands of others."""
        starts = self.starts
        first = bisect_right(starts, location.start) - 1
        if first < 0 or self._ends_before(first, location.start):
            first += 1
        end = location.end
        return slice(first, max(first, bisect_left(starts, end) if end else len(starts)))

    def _ends_before(self, index: int, row: bytes) -> bool:
        end = self.locations[index].end
        return bool(end) and end <= row


class TabletMap:
    """The known tablets of all tables."""

    def __init__(self, find: Finder | None = None) -> None:
        self._find = find
        self._tables: dict[int, _Table] = {}
        self._searches: dict[int, asyncio.Task[Searched]] = {}
        self._tasks = Tasks()

    def locate(self, table_id: int, row: bytes) -> TabletLocation | None:
        """The tablet that holds the row; None when that is not known."""
        table = self._tables.get(table_id)
        if table is None:
            return None
        index = bisect_right(table.starts, row) - 1
        if index < 0:
            return None
        location = table.locations[index]
        return location if not location.end or row < location.end else None

    def locate_below(self, table_id: int, end: bytes) -> TabletLocation | None:
        """The tablet that holds the last rows below `end` (empty: the last rows of the table)."""
        table = self._tables.get(table_id)
        if table is None or not table.starts:
            return None
        index = (bisect_left(table.starts, end) if end else len(table.starts)) - 1
        if index < 0:
            return None
        location = table.locations[index]
        if not location.end:
            return location
        return location if end and end <= location.end else None

    def tablets(self, table_id: int) -> list[TabletLocation]:
        """All known tablets of the table, in row order."""
        table = self._tables.get(table_id)
        return [] if table is None else list(table.locations)

    def learn(self, locations: Iterable[TabletLocation]) -> None:
        """Takes over locations that a response mentioned; they replace only older ones."""
        for location in locations:
            table = self._tables.setdefault(location.table_id, _Table())
            replaced = table.overlapping(location)
            # Tablet ids and epochs only grow: a split has new ids, a move a new epoch.
            if all(_age(old) <= _age(location) for old in table.locations[replaced]):
                # Without an address, no server serves it at the moment.
                found = [location] if location.address else []
                table.locations[replaced] = found
                table.starts[replaced] = [one.start for one in found]

    def replace(self, table_id: int, locations: Iterable[TabletLocation]) -> None:
        """Takes over a master's answer about a whole table."""
        self.forget(table_id)
        self.learn(locations)

    def doubt(self, location: TabletLocation) -> None:
        """Drops a location that led nowhere, so that the next request asks a master."""
        table = self._tables.get(location.table_id)
        if table is not None and location in table.locations:
            index = table.locations.index(location)
            del table.locations[index], table.starts[index]

    def forget(self, table_id: int) -> None:
        """Drops everything about a table that was deleted."""
        self._tables.pop(table_id, None)

    async def located(self, table_id: int, row: bytes) -> TabletLocation:
        """The tablet that holds a row; asks for it if it is not known. Raises `Unavailable` if
        nobody knows it."""
        location = self.locate(table_id, row)
        if location is None:
            await self.refresh(table_id, row)
            location = self.locate(table_id, row)
        if location is None:
            raise Unavailable(f"no tablet is known to hold row {quoted(row)} of table {table_id}")
        return location

    async def refresh(self, table_id: int, row: bytes) -> Searched:
        """Asks where the row is now; returns for which rows that is known now.

        There is one request at a time for each table. Concurrent callers share its answer if it is
        about their rows: for a large table, it is about a part of it.
        """
        while (search := self._searches.get(table_id)) is not None:
            searched = await outlasting(search)
            if searched.has(row):
                return searched
        search = self._searches[table_id] = self._tasks.start(self._search(table_id, row))
        return await outlasting(search)

    async def try_refresh(self, table_id: int, row: bytes) -> None:
        """As `refresh`. If no master answers, the map stays as it is, since it is all we have."""
        try:
            await self.refresh(table_id, row)
        except (NotExecuted, ExecutionUnknown):
            return

    async def refresh_server(self, address: str) -> None:
        """Asks where the tablets of a server are now that has fallen silent.

        Otherwise, for each of its tablets, some request would have to time out to find that out.
        An answer is about many tablets, but not about all of a large table.
        """
        tables = [
            table_id
            for table_id, table in self._tables.items()
            if any(location.address == address for location in table.locations)
        ]
        await asyncio.gather(*(self._refresh_all(table_id, address) for table_id in tables))

    async def _refresh_all(self, table_id: int, address: str) -> None:
        try:
            row = self._first_at(address, table_id, b"")
            while row is not None:
                searched = await self.refresh(table_id, row)
                row = self._first_at(address, table_id, searched.end) if searched.end else None
        except SchemaError:
            # The caller may want another table. A caller that wants this one searches, and gets
            # the error.
            self.forget(table_id)

    def _first_at(self, address: str, table_id: int, row: bytes) -> bytes | None:
        """The first row of the first tablet of this server that begins at `row` or above."""
        for location in self.tablets(table_id):
            if location.address == address and location.start >= row:
                return location.start
        return None

    async def _search(self, table_id: int, row: bytes) -> Searched:
        try:
            found = [] if self._find is None else await self._find(table_id, row)
        finally:
            # Before the task is done: a caller that asks about other rows would otherwise find a
            # task that is done, await it over and over, and block the event loop.
            del self._searches[table_id]
        self.learn(found)
        return _searched(row, found) if self._find is not None else EVERYTHING


def _age(location: TabletLocation) -> tuple[int, int]:
    return location.tablet_id, location.epoch


def _searched(row: bytes, found: Sequence[TabletLocation]) -> Searched:
    """Range that this answer to a search for a row covers."""
    start, end = (min(found[0].start, row), found[-1].end) if found else (row, b"")
    return Searched(start, end if row < end else b"")


# Calls to the masters, of which one leads and the others stand by.

_RETRY_SECONDS_MIN = 0.02
_RETRY_SECONDS_MAX = 0.5
_ATTEMPT_SECONDS_MAX = 2.0
_AGAIN_SECONDS_MIN = 0.5
"""With less time left, a change that a master has made, and waited for in vain, is not requested
again. A master answers 0.2 s before the caller's deadline, and after a minute at the latest."""


class Masters:
    """Calls any master that answers: one that does not lead says so, and the next is tried."""

    def __init__(self, world: World, addresses: Sequence[str]) -> None:
        self._world = world
        self._addresses = addresses
        self._next = 0

    async def call(
        self,
        method: UnaryMethod[RequestT, ResponseT],
        request: RequestT,
        deadline: float,
        *,
        attempt_seconds_max: float = _ATTEMPT_SECONDS_MAX,
    ) -> ResponseT:
        """Calls until one answers or the deadline passes. Repeating these calls does no harm.

        One that is given all of the time is a change: at the end, the error says what the master
        has said of it, such as that the change was made.
        """
        clock = self._world.clock
        backoff = Backoff(clock, self._world.random, _RETRY_SECONDS_MIN, _RETRY_SECONDS_MAX)
        failed = 0
        while True:
            left = deadline - clock.monotonic_seconds()
            asked = self._next
            address = self._addresses[asked % len(self._addresses)]
            try:
                call = self._world.network.unary(address, method)
                return await call(request, min(max(left, 0.001), attempt_seconds_max))
            except (ExecutionUnknown, NotReady) as error:
                problem: PercolatorError = error
            if attempt_seconds_max == inf and not isinstance(problem, (NotReady, Unavailable)):
                left = deadline - clock.monotonic_seconds()
                if left < _AGAIN_SECONDS_MIN:
                    raise DeadlineExceeded(problem.message, where=problem.where) from problem
            failed += 1
            if self._next == asked:  # if several calls fail together, only the first moves on
                self._next += 1
            if failed % len(self._addresses) == 0 and not await backoff.pause(deadline):
                raise DeadlineExceeded(
                    f"no master answered in time; last error: {problem.message}",
                    where=problem.where,
                )


_TABLETS_PER_PAGE = 1_000
_SEARCH_SECONDS = 5.0
"""The time for one search for tablets; its callers search again until their own deadlines."""


def with_remedy(error: SchemaError, table: str) -> SchemaError:
    """The error about a table that does not exist, with how to create it."""
    return SchemaError(
        f"{error.message}: create it with db.create_table, or with "
        f"`percolator tables create {table}`",
        table=table,
        where=error.where,
    )


class Catalog:
    """Tables by name, schemas and tablets by table id."""

    def __init__(
        self, world: World, masters: Sequence[str], tablets: TabletMap, versions: SchemaVersions
    ) -> None:
        self._clock = world.clock
        self._random = world.random
        self._masters = Masters(world, masters)
        self._tablets = tablets
        self._versions = versions
        self._by_name: dict[str, TableInfo] = {}
        self._by_id: dict[int, TableSchema] = {}
        self._declaring = asyncio.Lock()
        self._asking: dict[str, asyncio.Lock] = {}
        """Held by the one call that asks about a table of this name."""
        self.on_codec_refused: Callable[[int], None] | None = None
        """Called, in any thread, with the id of a table of which a program declares another codec
        than is known here."""
        self._unanswered: dict[str, pb.DeleteTableRequest] = {}
        """Deletions that ran out of time, by the table's name."""
        self._names: dict[int, str] = {}
        """Also those of tables that are gone, for errors."""

    # ------------------------------------------------------------------ tables

    def known(self, name: str) -> TableInfo | None:
        return self._by_name.get(name)

    async def table(self, name: str, deadline: float) -> TableInfo:
        """The table of this name, cached. Raises `SchemaError` when there is no such table."""
        known = self._by_name.get(name)
        if known is not None:
            return known
        # One at a time: a program often begins with a thousand transactions at once.
        asking = self._asking.setdefault(name, asyncio.Lock())
        try:
            async with asyncio.timeout(max(deadline - self._clock.monotonic_seconds(), 0.0)):
                await asking.acquire()
        except TimeoutError:
            late = DeadlineExceeded(f"no master has described table {name!r} in time")
            late.retry = Retry.SAFE
            raise late from None
        try:
            known = self._by_name.get(name)
            if known is not None:
                return known
            request = pb.DescribeTableRequest(name=name, knows_indexes=True)
            response = await self._masters.call(methods.DESCRIBE_TABLE, request, deadline)
            return self._learn(response.table)
        finally:
            asking.release()
            self._asking.pop(name, None)

    async def tables(self, deadline: float) -> list[TableInfo]:
        """All tables, by name."""
        found = await self.describe_all(deadline)
        return [self._by_name[table.name] for table in found if not table.deleting]

    async def create(
        self,
        name: str,
        splits: Sequence[bytes],
        options: pb.TableOptions,
        *,
        exist_ok: bool,
        deadline: float,
        codecs: pb.Codecs | None = None,
        indexes: Iterable[IndexDefinition] = (),
    ) -> TableInfo:
        request = pb.CreateTableRequest(
            name=name,
            splits=splits,
            options=options,
            exist_ok=exist_ok,
            codecs=codecs,
            indexes=(one.message() for one in indexes),
            knows_indexes=True,
            request_id=self._random.randbytes(REQUEST_ID_BYTES),
        )
        # No limit for one attempt, since many tablets may take long. After a master's end in the
        # middle, the id tells the next one that the table it finds is ours; one of an earlier
        # release would report that it exists.
        try:
            response = await self._masters.call(
                methods.CREATE_TABLE, request, deadline, attempt_seconds_max=inf
            )
        except PermissionDenied:
            found = await self._named(name, deadline) if exist_ok else None
            if found is None:
                raise
            # A program's token does not allow to create tables, but there is nothing to create.
            require_options(name, found.options, options)
            known, wanted = indexes_of(found.indexes), indexes_of(request.indexes)
            require_same_indexes(name, known, wanted)
            return self._learn(found)
        return self._learn(response.table)

    async def _named(self, name: str, deadline: float) -> pb.Table | None:
        try:
            return await self.describe(name, deadline)
        except SchemaError:
            return None

    async def describe(self, name: str, deadline: float) -> pb.Table:
        """The table with its observers, as of now. Raises `SchemaError` when there is none."""
        request = pb.DescribeTableRequest(name=name, knows_indexes=True)
        response = await self._masters.call(methods.DESCRIBE_TABLE, request, deadline)
        self._learn(response.table)
        return response.table

    async def describe_all(self, deadline: float) -> list[pb.Table]:
        """All tables with their observers, by name, as of now."""
        request = pb.ListTablesRequest()
        response = await self._masters.call(methods.LIST_TABLES, request, deadline)
        for table in response.tables:
            if not table.deleting:
                self._learn(table)
        return list(response.tables)

    async def cluster_id(self, deadline: float) -> str:
        """The id of the cluster, by which it differs from every other one."""
        response = await self._masters.call(methods.DESCRIBE, DescribeRequest(), deadline)
        return response.cluster_id

    async def describe_collection(self, deadline: float) -> pb.DescribeCollectionResponse:
        """How far back history goes, in all tables."""
        request = pb.DescribeCollectionRequest()
        return await self._masters.call(methods.DESCRIBE_COLLECTION, request, deadline)

    async def change_observers(
        self, request: pb.ChangeObserversRequest, deadline: float
    ) -> pb.Table:
        """Changes a table's observers. Returns when every commit notifies the new ones."""
        response = await self._masters.call(
            methods.CHANGE_OBSERVERS, request, deadline, attempt_seconds_max=inf
        )
        self._learn(response.table)
        return response.table

    async def await_table(self, request: pb.ChangeObserversRequest, deadline: float) -> bool:
        """Registers observers with a table, or keeps them until it is created. Returns whether it
        exists."""
        response = await self._masters.call(
            methods.CHANGE_OBSERVERS, request, deadline, attempt_seconds_max=inf
        )
        return bool(response.table.table_id)

    async def report_backfill(self, request: pb.ReportBackfillRequest, deadline: float) -> pb.Table:
        """Begins a backfill, or tells how far it has come. Returns the table as it is then."""
        response = await self._masters.call(methods.REPORT_BACKFILL, request, deadline)
        self._learn(response.table)
        return response.table

    async def awaited(self, deadline: float) -> list[pb.Table]:
        """Tables that do not exist yet, with the observers that are registered for them."""
        response = await self._masters.call(methods.LIST_TABLES, pb.ListTablesRequest(), deadline)
        return list(response.awaited)

    async def set_change_feed(self, name: str, *, on: bool, deadline: float) -> None:
        """Switches a table's change feed. Returns when every tablet follows."""
        request = pb.SetChangeFeedRequest(table=name, change_feed=on)
        response = await self._masters.call(
            methods.SET_CHANGE_FEED, request, deadline, attempt_seconds_max=inf
        )
        self._learn(response.table)

    async def set_ttls(self, name: str, ttls: Sequence[ColumnTtl], deadline: float) -> None:
        """Changes times to live; 0 removes one. Returns when every tablet judges by them."""
        request = pb.SetTtlsRequest(table=name, ttls=ttls)
        response = await self._masters.call(
            methods.SET_TTLS, request, deadline, attempt_seconds_max=inf
        )
        self._learn(response.table)

    async def change_indexes(
        self,
        name: str,
        add: Iterable[IndexDefinition] = (),
        remove: Iterable[pb.RemovedIndex] = (),
        *,
        deadline: float,
    ) -> TableInfo:
        """Adds indexes, which the caller has to build, and removes others. Returns when all commits
        keep them."""
        request = pb.ChangeIndexesRequest(
            table=name, add=(one.message() for one in add), remove=remove
        )
        response = await self._masters.call(
            methods.CHANGE_INDEXES, request, deadline, attempt_seconds_max=inf
        )
        return self._learn(response.table)

    async def declare(self, info: TableInfo, column: Readable[Any], deadline: float) -> None:
        """Makes the cluster keep the codec of a column that is to be written. Raises `SchemaError`
        if it has another one by now."""
        left = deadline - self._clock.monotonic_seconds()
        try:
            async with asyncio.timeout(max(left, 0.001)), self._declaring:
                # Of many tasks that begin with the same column, one asks.
                more = info.codecs.undeclared(column)
                if more is not None:
                    await self._declare(info, more, deadline)
        except (TimeoutError, DeadlineExceeded) as error:
            late = DeadlineExceeded(
                f"no master could keep the codec of {column!r}, which is needed before the first "
                f"write: {str(error) or 'no answer in time'}"
            )
            late.retry = Retry.SAFE  # nothing was written, and to declare it twice is harmless
            raise late from error

    async def _declare(self, info: TableInfo, more: pb.Codecs, deadline: float) -> None:
        request = pb.DeclareCodecsRequest(table_id=info.table_id, codecs=more)
        try:
            response = await self._masters.call(methods.DECLARE_CODECS, request, deadline)
        except SchemaError:
            await self.refresh(info.table_id, deadline)  # raises if the table is gone
            raise
        else:
            self._learn(response.table)
            info.codecs.learn(CodecNames.of(more))

    async def change_codecs(self, request: pb.ChangeCodecsRequest, deadline: float) -> pb.Table:
        """Changes codecs on purpose. Returns when every tablet follows."""
        response = await self._masters.call(
            methods.CHANGE_CODECS, request, deadline, attempt_seconds_max=inf
        )
        self._learn(response.table)
        return response.table

    async def delete(self, name: str, *, missing_ok: bool, deadline: float) -> bool:
        """Returns when nobody can use the table. False if there was none."""
        request = pb.DeleteTableRequest(
            name=name, missing_ok=missing_ok, request_id=self._random.randbytes(REQUEST_ID_BYTES)
        )
        try:
            deleted = await self._delete(request, deadline)
        except SchemaError:
            # There is none, perhaps because of an earlier call that has run out of time.
            earlier = self._unanswered.get(name)
            if earlier is None:
                raise
            deleted = await self._delete(earlier, deadline)
        self._unanswered.pop(name, None)
        known = self._by_name.get(name)
        if known is not None:
            self.forget(known.table_id)
        return deleted

    async def _delete(self, request: pb.DeleteTableRequest, deadline: float) -> bool:
        try:
            # As to create one: another attempt would find no table, or one created meanwhile.
            response = await self._masters.call(
                methods.DELETE_TABLE, request, deadline, attempt_seconds_max=inf
            )
        except DeadlineExceeded:
            self._unanswered[request.name] = request
            raise
        return response.deleted

    # ------------------------------------------------------------------ bulk loads

    async def begin_load(self, request: pb.BeginLoadRequest, deadline: float) -> pb.Table | None:
        """The table of a run of a load, which only that run uses. None if there is none."""
        response = await self._masters.call(
            methods.BEGIN_LOAD, request, deadline, attempt_seconds_max=inf
        )
        return response.table if response.HasField("table") else None

    async def publish_loads(self, request: pb.PublishLoadsRequest, deadline: float) -> None:
        """Returns when the loaded tables can be used."""
        response = await self._masters.call(methods.PUBLISH_LOADS, request, deadline)
        for table in response.tables:
            self._learn(table)

    async def abandon_load(
        self, request: pb.AbandonLoadRequest, deadline: float
    ) -> pb.AbandonLoadResponse:
        return await self._masters.call(methods.ABANDON_LOAD, request, deadline)

    # ------------------------------------------------------------------ forgetting

    def forget(self, table_id: int) -> None:
        """Drops a table that is gone, or may be, so that a master is asked again. A new table of
        the same name has another id."""
        self._by_id.pop(table_id, None)
        self._tablets.forget(table_id)
        for name in [n for n, info in self._by_name.items() if info.table_id == table_id]:
            del self._by_name[name]

    def _learn(self, table: pb.Table) -> TableInfo:
        self._names[table.table_id] = table.name
        self._learn_schema(
            table.table_id,
            table.schema_version,
            table.observers,
            table.codecs,
            table.options.ttls,
            table.indexes,
        )
        schema = self._by_id[table.table_id]
        info = TableInfo(table.table_id, table.name, schema, table.created_at)
        self._by_name[table.name] = info
        return info

    # ------------------------------------------------------------------ schemas

    def name_of(self, table_id: int) -> str:
        """The table's name, even if it is gone; empty if it was never looked up by name."""
        return self._names.get(table_id, "")

    def get(self, table_id: int) -> TableSchema | None:
        return self._by_id.get(table_id)

    async def refresh(self, table_id: int, deadline: float) -> TableSchema:
        """Asks a master for the current schema."""
        request = pb.DescribeTableRequest(table_id=table_id, knows_indexes=True)
        try:
            response = await self._masters.call(methods.DESCRIBE_TABLE, request, deadline)
        except SchemaError as error:
            raise self._gone(table_id, error) from error
        return self._learn(response.table).schema

    def _gone(self, table_id: int, error: SchemaError) -> SchemaError:
        """Forgets a table that no master knows; returns an error that names it, if possible."""
        self.forget(table_id)
        name = self._names.get(table_id)
        if name is None:
            return error
        gone = SchemaError(
            f"table {name!r} was dropped while it was in use; if it was created again, begin a new "
            "transaction or snapshot",
            table=name,
            table_id=table_id,
        )
        gone.was_dropped = True
        return gone

    def _learn_schema(
        self,
        table_id: int,
        version: int,
        observers: Sequence[pb.Observer],
        codecs: pb.Codecs,
        ttls: Sequence[ColumnTtl],
        indexes: Iterable[pb.Index],
    ) -> None:
        known = self._by_id.get(table_id)
        if known is not None and version < known.version:
            return  # answers may overtake each other
        names, name = CodecNames.of(codecs), self.name_of(table_id)
        if known is None or (version > known.version and known.codecs.names.contradicts(names)):
            kept = TableCodecs(name, names, partial(self._codec_was_refused, table_id))
        else:
            kept = known.codecs
            kept.learn(names)
            kept.table = kept.table or name
        if known is None or version > known.version:
            found = indexes_of(indexes, ttls)
            if known is not None and known.indexes == found:
                found = known.indexes
            schema = TableSchema.of(version, observers, kept, ttls, found)
            self._by_id[table_id] = schema
            self._versions.of_table[table_id] = version
            info = self._by_name.get(name)
            if info is not None and info.table_id == table_id:
                self._by_name[name] = replace(info, schema=schema)

    def _codec_was_refused(self, table_id: int) -> None:
        if self.on_codec_refused is not None:
            self.on_codec_refused(table_id)

    # ------------------------------------------------------------------ tablets

    async def find(self, table_id: int, row: bytes) -> list[TabletLocation]:
        """The tablet of the row, and those that follow it. Raises `SchemaError`."""
        try:
            response = await self._locate(table_id, row, even_deleting=False)
        except SchemaError as error:
            raise self._gone(table_id, error) from error
        self._learn_schema(
            table_id,
            response.schema_version,
            response.observers,
            response.codecs,
            response.ttls,
            response.indexes,
        )
        return [location_from_wire(location) for location in response.locations]

    async def find_even_deleted(self, table_id: int, row: bytes) -> list[TabletLocation]:
        """Like `find`, as long as anything is left of the table. The answer is not cached."""
        response = await self._locate(table_id, row, even_deleting=True)
        return [location_from_wire(location) for location in response.locations]

    async def _locate(
        self, table_id: int, row: bytes, *, even_deleting: bool
    ) -> pb.LocateTabletsResponse:
        request = pb.LocateTabletsRequest(
            table_id=table_id,
            range=RowRange(start=row),
            limit=_TABLETS_PER_PAGE,
            even_deleting=even_deleting,
            knows_indexes=True,
        )
        deadline = self._clock.monotonic_seconds() + _SEARCH_SECONDS
        return await self._masters.call(methods.LOCATE_TABLETS, request, deadline)

    async def all_tablets(self, table_id: int, deadline: float) -> list[TabletLocation]:
        """Every tablet of the table, as of now."""
        found: list[TabletLocation] = []
        rest: RowRange | None = RowRange()
        while rest is not None:
            request = pb.LocateTabletsRequest(
                table_id=table_id, range=rest, limit=_TABLETS_PER_PAGE, knows_indexes=True
            )
            response = await self._masters.call(methods.LOCATE_TABLETS, request, deadline)
            found += [location_from_wire(location) for location in response.locations]
            rest = response.rest if response.HasField("rest") else None
        self._tablets.replace(table_id, found)
        return found
