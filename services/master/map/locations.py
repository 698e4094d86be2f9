"""Answers from a map: tables, and where their tablets are. Leaders and standbys share it."""

from __future__ import annotations

from collections.abc import Callable

from percolator.errors import InvalidArgument, SchemaError
from percolator.services.master.map.catalogue import Catalogue, Table
from percolator.services.master.map.cluster_map import ClusterMap, Tablet
from percolator.services.master.map.map_record import (
    awaited_messages,
    codecs_message,
    location_message,
    observer_messages,
    table_message,
    ttl_messages,
)
from percolator.v1 import master_pb2 as pb
from percolator.v1.cells_pb2 import RowRange

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
    return pb.DescribeTableResponse(table=_message(current, table))


def locate_tablets(
    current: ClusterMap,
    request: pb.LocateTabletsRequest,
    is_assigned: Callable[[Tablet], bool],
) -> pb.LocateTabletsResponse:
    """The tablets of a range. A tablet whose server is known to be gone has no address."""
    table = _by_id(current, request.table_id, even_deleting=request.even_deleting)
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
