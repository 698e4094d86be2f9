"""Tables and tablets: what the master decides, as an immutable value.

Invariants:
- The tablets of a table cover every row exactly once.
- Each epoch of a tablet is given to one server, and epochs only grow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Self

from google.protobuf.message import DecodeError

from percolator.codecs.indexes import IndexDefinition, indexes_of
from percolator.codecs.names import CodecNames
from percolator.errors import (
    InvalidArgument,
    InvariantViolation,
    SchemaError,
    StoreFault,
    StoreUnusable,
)
from percolator.v1 import errors_pb2, master_pb2, master_records_pb2
from percolator.v1 import master_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from percolator.v1.tabletserver_pb2 import ColumnTtl

DELETIONS_KEPT = 100
FIRST_VERSION = 1
"""The version of the schema of a new table."""


@dataclass(frozen=True)
class OwedBackfill:
    """The cells of which an observer has yet to be notified, since they are older than it."""

    version: int
    """The version of the schema since which it is owed."""
    columns: tuple[bytes, ...]
    row: bytes = b""
    """Everything before this row is done."""
    cells: int = 0
    """The number of cells that were notified so far."""


@dataclass(frozen=True)
class Observer:
    """An observer, and the columns whose changes it is notified of."""

    name: str
    columns: tuple[bytes, ...]
    weak: bool = False
    paused: bool = False
    """Not run for now, though notifications are still written for it."""
    backfill: bool = False
    """It was registered to handle older cells, too."""
    owed: OwedBackfill | None = None
    """The backfill that is not finished yet."""


@dataclass(frozen=True)
class TableLoad:
    """The bulk load that creates a table."""

    name: str
    run: int
    """Identifies the attempt: a timestamp of the oracle that nothing else has."""
    commit_timestamp: int = 0
    """The commit timestamp of all that was loaded; 0 until the table is published."""


@dataclass(frozen=True)
class Table:
    """A table, without its tablets."""

    table_id: int
    name: str
    schema_version: int = FIRST_VERSION
    retention_milliseconds: int = 0
    split_bytes: int = 0
    observers: tuple[Observer, ...] = ()
    deleting: bool = False
    created_at: int = 0
    """A timestamp of the oracle: no snapshot below it may use the table."""
    change_feed: bool = False
    ttls: tuple[tuple[bytes, int], ...] = ()
    """The columns whose values expire, by name, with their milliseconds."""
    codecs: CodecNames = field(default_factory=CodecNames)
    """The codecs that programs have declared."""
    load: TableLoad | None = None
    """Only in a cluster on a row store."""
    created_by: bytes = b""
    """The id of the request that created it; empty if that had none."""
    indexes: tuple[IndexDefinition, ...] = ()
    """Ordered by name."""
    index_of: int = 0
    """The table for whose index it has the entries; 0 for others."""

    def dropped(self) -> Table:
        """As it is from being deleted on."""
        return replace(self, deleting=True, schema_version=self.schema_version + 1)

    @property
    def is_hidden(self) -> bool:
        """True if only a bulk load knows the table."""
        return self.load is not None and not self.load.commit_timestamp

    @property
    def is_used(self) -> bool:
        """True if transactions may use the table."""
        return not self.deleting and not self.is_hidden


@dataclass(frozen=True)
class Catalogue:
    """The tables of a cluster. Each change makes a new one. Ids only grow, and are not used again
    after a deletion."""

    next_id: int = 1
    tables: Mapping[int, Table] = field(default_factory=lambda: MappingProxyType({}))
    load_floor: int = field(default=0, kw_only=True)
    """The latest run of a bulk load that was ended; none up to it begins again."""
    deletions: tuple[bytes, ...] = field(default=(), kw_only=True)
    """The ids of the requests that deleted tables, as far as they had any; the latest last."""
    awaited: Mapping[str, tuple[Observer, ...]] = field(
        default_factory=lambda: MappingProxyType({}), kw_only=True
    )
    """Observers of tables that do not exist yet, by the name of the table."""

    def tablets_of(self, table: Table) -> int:
        """How many tablets a table has: none, where a row store has its cells."""
        return 0

    def named(self, name: str) -> Table | None:
        """The table of that name. One that is being deleted no longer has a name, and one that is
        being loaded has none yet."""
        used = (table for table in self.tables.values() if table.is_used)
        return next((table for table in used if table.name == name), None)

    def deleted(self, name: str) -> list[Table]:
        """The tables that had that name, and of which something is left."""
        return [
            one
            for one in self.tables.values()
            if one.name == name and one.deleting and not one.is_hidden
        ]

    def table(self, name: str) -> Table:
        """The table of that name. Raises `SchemaError` if there is none."""
        found = self.named(name)
        if found is None:
            raise SchemaError(f"there is no table {name!r}")
        return found

    def entries(self, table_id: int) -> list[Table]:
        """The tables that have, or have had, the entries of its indexes."""
        return [one for one in self.tables.values() if one.index_of == table_id]

    def without_table(self, table_id: int) -> Self:
        """The tables without this one, of which nothing is left."""
        return replace(
            self, tables={key: one for key, one in self.tables.items() if key != table_id}
        )

    def with_deletion(self, request_id: bytes) -> Self:
        """The tables after that request has deleted one."""
        if not request_id:
            return self
        return replace(self, deletions=(*self.deletions, request_id)[-DELETIONS_KEPT:])

    def with_awaited(self, name: str, observers: tuple[Observer, ...]) -> Self:
        """The tables, with these observers of one that does not exist yet."""
        awaited = {**self.awaited, name: observers}
        return replace(self, awaited={key: found for key, found in awaited.items() if found})

    def with_tables(self, *tables: Table) -> Self:
        return replace(self, tables={**self.tables, **{table.table_id: table for table in tables}})


LOCATIONS_MAX = 1_000


def list_tables(current: Catalogue) -> pb.ListTablesResponse:
    known = (table for table in current.tables.values() if not table.is_hidden)
    tables = sorted(known, key=lambda table: (table.name, table.table_id))
    return pb.ListTablesResponse(
        tables=[_message(current, table) for table in tables],
        awaited=[one for one in awaited_messages(current) if current.named(one.name) is None],
    )


def describe_table(
    current: Catalogue, request: pb.DescribeTableRequest
) -> pb.DescribeTableResponse:
    if request.name and request.table_id:
        raise InvalidArgument("table_id", "give a name or an id, not both")
    if not request.name and not request.table_id:
        raise InvalidArgument("name", "is missing")
    if request.name:
        table = current.table(request.name)
    else:
        table = _by_id(current, request.table_id, even_deleting=False)
    require_knows_indexes(table, knows=request.knows_indexes)
    return pb.DescribeTableResponse(table=_message(current, table))


def require_knows_indexes(table: Table, *, knows: bool) -> None:
    """Raises `SchemaError` for a client of an earlier release, which would commit without entries
    under whatever schema it is given."""
    if table.indexes and not knows:
        raise SchemaError(
            f"table {table.name!r} has indexes, which this client's release does not keep: upgrade "
            "the client",
            table=table.name,
            table_id=table.table_id,
        )


def locate_tablets(
    current: ClusterMap,
    request: pb.LocateTabletsRequest,
    is_assigned: Callable[[Tablet], bool],
) -> pb.LocateTabletsResponse:
    """The tablets of a range. A tablet whose server is known to be gone has no address."""
    table = _by_id(current, request.table_id, even_deleting=request.even_deleting)
    require_knows_indexes(table, knows=request.knows_indexes or request.even_deleting)
    start, end = request.range.start, request.range.end
    if end and start >= end:
        raise InvalidArgument("range", f"expected the start {start!r} below the end {end!r}")
    limit = min(request.limit or LOCATIONS_MAX, LOCATIONS_MAX)
    found = current.overlapping(table.table_id, start, end)
    page = found[:limit]
    answer = pb.LocateTabletsResponse(
        locations=[location_message(one, served=is_assigned(one)) for one in page],
        schema_version=table.schema_version,
        observers=observer_messages(table.observers),
        codecs=codecs_message(table),
        ttls=ttl_messages(table),
        indexes=index_messages(table),
    )
    if len(found) > len(page):
        answer.rest.CopyFrom(RowRange(start=page[-1].end, end=end))
    return answer


def tablets_page(current: ClusterMap, request: pb.ListTabletsRequest) -> tuple[list[Tablet], bool]:
    """One page of tablets by id, and whether there are more."""
    wanted = current.table(request.table).table_id if request.table else None
    found = sorted(
        (
            one
            for one in current.tablets.values()
            if one.tablet_id > request.after_tablet_id and wanted in (None, one.table_id)
        ),
        key=lambda one: one.tablet_id,
    )
    limit = min(request.limit or LOCATIONS_MAX, LOCATIONS_MAX)
    return found[:limit], len(found) > limit


def _by_id(current: Catalogue, table_id: int, *, even_deleting: bool) -> Table:
    table = current.tables.get(table_id)
    if table is None or table.is_hidden or (table.deleting and not even_deleting):
        raise SchemaError(f"there is no table with the id {table_id}")
    return table


def _message(current: Catalogue, table: Table) -> pb.Table:
    return table_message(table, tablets=current.tablets_of(table))


def encode(current: ClusterMap) -> bytes:
    """The bytes of the value "map"."""
    record = master_records_pb2.MapRecord(
        next_id=current.next_id,
        tables=[table_message(table) for table in current.tables.values()],
        tablets=[_tablet_record(tablet) for tablet in current.tablets.values()],
        draining=sorted(current.draining),
        retired=[
            master_records_pb2.RetiredTablet(table_id=table, tablet_id=tablet)
            for table, tablet in current.retired
        ],
        deletions=current.deletions,
        awaited=awaited_messages(current),
    )
    return record.SerializeToString(deterministic=True)


def decode(data: bytes) -> ClusterMap:
    """Raises `StoreUnusable` or `InvariantViolation` if `encode` cannot have written it."""
    record = _parsed(data)
    return ClusterMap(
        next_id=record.next_id,
        tables={table.table_id: _table(table) for table in record.tables},
        tablets={tablet.tablet_id: _tablet(tablet) for tablet in record.tablets},
        draining=frozenset(record.draining),
        retired=tuple((one.table_id, one.tablet_id) for one in record.retired),
        deletions=tuple(record.deletions),
        awaited=_awaited(record),
    )


def encode_catalogue(current: Catalogue) -> bytes:
    """The catalogue of a cluster without tablets, encoded."""
    record = master_records_pb2.MapRecord(
        next_id=current.next_id,
        tables=[table_message(table) for table in current.tables.values()],
        load_floor=current.load_floor,
        deletions=current.deletions,
        awaited=awaited_messages(current),
    )
    return record.SerializeToString(deterministic=True)


def decode_catalogue(data: bytes) -> Catalogue:
    """Raises `StoreUnusable` if `encode_catalogue` cannot have written it."""
    record = _parsed(data)
    tables = {table.table_id: _table(table) for table in record.tables}
    return Catalogue(
        record.next_id,
        tables,
        load_floor=record.load_floor,
        deletions=tuple(record.deletions),
        awaited=_awaited(record),
    )


def _parsed(data: bytes) -> master_records_pb2.MapRecord:
    try:
        return master_records_pb2.MapRecord.FromString(data)
    except DecodeError as error:
        raise StoreUnusable(
            f"the master's map is damaged: {error}", fault=StoreFault.DAMAGED
        ) from None


def table_message(table: Table, tablets: int = 0) -> master_pb2.Table:
    """A table as clients see it."""
    return master_pb2.Table(
        table_id=table.table_id,
        name=table.name,
        schema_version=table.schema_version,
        options=options_message(table),
        observers=observer_messages(table.observers),
        tablets=tablets,
        deleting=table.deleting,
        created_at=table.created_at,
        codecs=codecs_message(table),
        load=_load_message(table),
        created_by=table.created_by,
        indexes=index_messages(table),
        index_of=table.index_of,
    )


def index_messages(table: Table) -> list[master_pb2.Index]:
    return [one.message() for one in table.indexes]


def _load_message(table: Table) -> master_pb2.TableLoad | None:
    if table.load is None:
        return None
    name, run, commit = table.load.name, table.load.run, table.load.commit_timestamp
    return master_pb2.TableLoad(name=name, run=run, commit_timestamp=commit)


def codecs_message(table: Table) -> master_pb2.Codecs | None:
    """The codecs that were declared; absent if none were."""
    return table.codecs.message() if table.codecs else None


def options_message(table: Table) -> master_pb2.TableOptions:
    return master_pb2.TableOptions(
        retention_milliseconds=table.retention_milliseconds,
        split_bytes=table.split_bytes,
        change_feed=table.change_feed,
        ttls=ttl_messages(table),
    )


def ttl_messages(table: Table) -> list[ColumnTtl]:
    return [ColumnTtl(column=column, ttl_milliseconds=ttl) for column, ttl in table.ttls]


def ttls_of(messages: Iterable[ColumnTtl]) -> tuple[tuple[bytes, int], ...]:
    """Ordered by column, as tables keep them."""
    return tuple(sorted((one.column, one.ttl_milliseconds) for one in messages))


def observer_messages(observers: Iterable[Observer]) -> list[master_pb2.Observer]:
    return [
        master_pb2.Observer(
            name=one.name,
            columns=one.columns,
            weak=one.weak,
            paused=one.paused,
            backfill=one.backfill,
            owed=None
            if one.owed is None
            else master_pb2.OwedBackfill(
                version=one.owed.version,
                columns=one.owed.columns,
                row=one.owed.row,
                cells=one.owed.cells,
            ),
        )
        for one in observers
    ]


def observers_of(messages: Iterable[master_pb2.Observer]) -> tuple[Observer, ...]:
    return tuple(
        Observer(
            one.name,
            tuple(one.columns),
            one.weak,
            one.paused,
            one.backfill,
            OwedBackfill(one.owed.version, tuple(one.owed.columns), one.owed.row, one.owed.cells)
            if one.HasField("owed")
            else None,
        )
        for one in messages
    )


def awaited_messages(current: Catalogue) -> list[master_pb2.Table]:
    """The observers of tables that do not exist yet, by the name of the table."""
    return [
        master_pb2.Table(name=name, observers=observer_messages(observers))
        for name, observers in sorted(current.awaited.items())
    ]


def _awaited(record: master_records_pb2.MapRecord) -> dict[str, tuple[Observer, ...]]:
    return {table.name: observers_of(table.observers) for table in record.awaited}


def location_message(tablet: Tablet, *, served: bool = True) -> errors_pb2.TabletLocation:
    """Where a tablet is; without an address if no server serves it."""
    return errors_pb2.TabletLocation(
        table_id=tablet.table_id,
        tablet_id=tablet.tablet_id,
        epoch=tablet.epoch,
        range=RowRange(start=tablet.start, end=tablet.end),
        address=tablet.address if served else "",
    )


def _table(table: master_pb2.Table) -> Table:
    return Table(
        table_id=table.table_id,
        name=table.name,
        schema_version=table.schema_version,
        retention_milliseconds=table.options.retention_milliseconds,
        split_bytes=table.options.split_bytes,
        observers=observers_of(table.observers),
        deleting=table.deleting,
        created_at=table.created_at,
        change_feed=table.options.change_feed,
        ttls=ttls_of(table.options.ttls),
        codecs=CodecNames.of(table.codecs),
        load=_load(table),
        created_by=table.created_by,
        indexes=indexes_of(table.indexes),
        index_of=table.index_of,
    )


def _load(table: master_pb2.Table) -> TableLoad | None:
    if not table.HasField("load"):
        return None
    return TableLoad(table.load.name, table.load.run, table.load.commit_timestamp)


def _tablet_record(tablet: Tablet) -> master_records_pb2.TabletRecord:
    return master_records_pb2.TabletRecord(
        tablet_id=tablet.tablet_id,
        table_id=tablet.table_id,
        epoch=tablet.epoch,
        range=RowRange(start=tablet.start, end=tablet.end),
        server_id=tablet.server_id,
        address=tablet.address,
        exists=tablet.exists,
        origin_tablet_id=tablet.origin_tablet_id,
        origin_epoch=tablet.origin_epoch,
        served_epoch=tablet.served_epoch,
    )


def _tablet(record: master_records_pb2.TabletRecord) -> Tablet:
    return Tablet(
        tablet_id=record.tablet_id,
        table_id=record.table_id,
        start=record.range.start,
        end=record.range.end,
        epoch=record.epoch,
        server_id=record.server_id,
        address=record.address,
        exists=record.exists,
        origin_tablet_id=record.origin_tablet_id,
        origin_epoch=record.origin_epoch,
        served_epoch=record.served_epoch,
    )


@dataclass(frozen=True)
class Tablet:
    """A range of rows, and the server that it was given to."""

    tablet_id: int
    table_id: int
    start: bytes
    end: bytes
    """Excluded. Empty means to the last row."""
    epoch: int = 0
    """The last epoch given to a server; 0 if it was never assigned."""
    server_id: str = ""
    """The server that this epoch was given to; empty if it is still to be assigned."""
    address: str = ""
    exists: bool = False
    """True if an owner has reported that it serves it: from then on it may hold data."""
    origin_tablet_id: int = 0
    origin_epoch: int = 0
    """The tablet that the first owner clones; 0 for none, or when that is done."""
    served_epoch: int = 0
    """The last epoch at which an owner has reported that it serves it; 0 if none is known."""

    def given_to(self, server_id: str, address: str, used_up: int = 0) -> Tablet:
        """At the next epoch, since the current one may have been used already. `used_up` is an
        epoch that is known to have been used, whatever this map says."""
        epoch = max(self.epoch, used_up) + 1
        return replace(self, epoch=epoch, server_id=server_id, address=address)

    def holds(self, row: bytes) -> bool:
        return self.start <= row and (not self.end or row < self.end)


@dataclass(frozen=True)
class ClusterMap(Catalogue):
    """Everything that the master decides. Each change makes a new map."""

    tablets: Mapping[int, Tablet] = field(default_factory=lambda: MappingProxyType({}))
    draining: frozenset[str] = frozenset()
    """Ids of servers that get no more tablets."""
    retired: tuple[tuple[int, int], ...] = ()
    """(table, tablet) of directories that are no longer needed."""

    def __post_init__(self) -> None:
        for table_id, tablets in self.of_tables.items():
            if table_id not in self.tables:
                raise InvariantViolation(
                    f"there are tablets of table {table_id}, which does not exist"
                )
            end: bytes | None = b""
            for tablet in tablets:
                if tablet.start != end or tablet.tablet_id >= self.next_id:
                    raise InvariantViolation(f"tablet {tablet.tablet_id} overlaps or leaves a gap")
                end = tablet.end or None
            if end is not None:
                raise InvariantViolation(f"the last rows of table {table_id} are in no tablet")

    @cached_property
    def of_tables(self) -> Mapping[int, Sequence[Tablet]]:
        """The tablets of each table, in order of their rows."""
        found: dict[int, list[Tablet]] = {table_id: [] for table_id in self.tables}
        for tablet in self.tablets.values():
            found.setdefault(tablet.table_id, []).append(tablet)
        for tablets in found.values():
            tablets.sort(key=lambda tablet: tablet.start)
        return found

    @cached_property
    def named_tablets(self) -> frozenset[int]:
        """The ids of all tablets, and of the parents with whose data some of them begin."""
        parents = {tablet.origin_tablet_id for tablet in self.tablets.values()} - {0}
        return frozenset(parents | self.tablets.keys())

    @cached_property
    def _starts(self) -> Mapping[int, list[bytes]]:
        return {table: [one.start for one in found] for table, found in self.of_tables.items()}

    def overlapping(self, table_id: int, start: bytes, end: bytes) -> Sequence[Tablet]:
        """The tablets of a table that hold rows of [start, end), in order."""
        tablets = self.of_tables[table_id]
        first = bisect_right(self._starts[table_id], start) - 1
        last = first
        while last < len(tablets) and (not end or tablets[last].start < end):
            last += 1
        return tablets[first : max(last, first + 1)]

    def tablets_of(self, table: Table) -> int:
        # None of a table that was dropped while a call waited until it could be used.
        return len(self.of_tables.get(table.table_id, ()))

    # ------------------------------------------------------------------------- changes

    def with_tablets(self, tablets: Iterable[Tablet]) -> ClusterMap:
        changed = {tablet.tablet_id: tablet for tablet in tablets}
        return replace(self, tablets={**self.tablets, **changed})

    def with_new_table(
        self,
        name: str,
        splits: Sequence[bytes],
        retention_milliseconds: int,
        split_bytes: int,
        created_at: int = 0,
        *,
        change_feed: bool = False,
        ttls: tuple[tuple[bytes, int], ...] = (),
        codecs: CodecNames | None = None,
    ) -> tuple[ClusterMap, Table]:
        """A table whose tablets are to be assigned."""
        table = Table(
            self.next_id,
            name,
            retention_milliseconds=retention_milliseconds,
            split_bytes=split_bytes,
            created_at=created_at,
            change_feed=change_feed,
            ttls=ttls,
            codecs=codecs or CodecNames(),
        )
        bounds = [b"", *splits, b""]
        made = {
            self.next_id + number: Tablet(
                self.next_id + number, table.table_id, bounds[number - 1], bounds[number]
            )
            for number in range(1, len(bounds))
        }
        changed = replace(
            self,
            next_id=self.next_id + len(bounds),
            tables={**self.tables, table.table_id: table},
            tablets={**self.tablets, **made},
        )
        return changed, table

    def with_split(self, parent: Tablet, row: bytes) -> tuple[ClusterMap, Tablet, Tablet]:
        """The parent's range in two tablets, which begin as clones of it, on the same server."""
        lower, upper = (
            Tablet(
                self.next_id + number,
                parent.table_id,
                start,
                end,
                epoch=1,
                server_id=parent.server_id,
                address=parent.address,
                origin_tablet_id=parent.tablet_id,
                origin_epoch=parent.epoch,
            )
            for number, (start, end) in enumerate([(parent.start, row), (row, parent.end)])
        )
        rest = {key: tablet for key, tablet in self.tablets.items() if key != parent.tablet_id}
        children = {lower.tablet_id: lower, upper.tablet_id: upper}
        changed = replace(self, next_id=self.next_id + 2, tablets={**rest, **children})
        return changed, lower, upper

    def with_existing(self, served: Iterable[Tablet]) -> ClusterMap:
        """The map after these tablets were served: their own directories hold all of their data."""
        settled = [
            replace(
                tablet,
                exists=True,
                origin_tablet_id=0,
                origin_epoch=0,
                served_epoch=tablet.epoch,
            )
            for tablet in served
        ]
        changed = self.with_tablets(settled)
        needed = {tablet.origin_tablet_id for tablet in changed.tablets.values()}
        parents = {
            (tablet.table_id, tablet.origin_tablet_id)
            for tablet in served
            if tablet.origin_tablet_id and tablet.origin_tablet_id not in needed
        }
        return replace(changed, retired=(*changed.retired, *sorted(parents)))

    def without_table(self, table_id: int) -> ClusterMap:
        """The map without the table, whose directories are no longer needed."""
        gone = [tablet for tablet in self.tablets.values() if tablet.table_id == table_id]
        origins = {tablet.origin_tablet_id for tablet in gone if tablet.origin_tablet_id}
        retired = sorted({tablet.tablet_id for tablet in gone} | origins)
        return replace(
            self,
            tables={key: table for key, table in self.tables.items() if key != table_id},
            tablets={key: one for key, one in self.tablets.items() if one.table_id != table_id},
            retired=(*self.retired, *((table_id, tablet_id) for tablet_id in retired)),
        )
