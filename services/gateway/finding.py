"""Rows by the values of an index, for callers that name it, and give and get stored bytes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from percolator.aio.engine import Engine
from percolator.aio.find import EntryRange, Match, Wanted, bounds, found_matches, index_named
from percolator.aio.reader import Reader
from percolator.codecs.indexes import IndexDefinition, entry_part
from percolator.errors import InvalidArgument, SchemaError
from percolator.routing.catalog import TableInfo
from percolator.v1 import gateway_pb2 as pb
from percolator.wire.table_indexes import no_index


async def found_rows(
    engine: Engine, request: pb.FindRowsRequest, info: TableInfo, seconds: float
) -> AsyncGenerator[list[Match], None]:
    """Yields the rows that match, in the order of the index, some at a time."""
    reader = Reader(engine, seconds, "snapshot")

    async def range_of_entries() -> EntryRange:
        deadline = reader.deadline(None)
        index = await index_named(engine.env, info.table_id, request.index, deadline)
        if index is None:
            raise no_index(info.name, request.index)
        return _range_of_entries(index, request)

    names = [*request.columns] if request.columns or request.column_prefixes else None
    prefixes, limit = tuple(request.column_prefixes), request.row_limit or None
    wanted = Wanted(names, prefixes, request.reverse, limit)
    reader.set_start(request.start_timestamp)
    try:
        entries = await range_of_entries()
        pages = found_matches(reader, info, entries, range_of_entries, wanted, None)
        async with aclosing(pages):
            async for page in pages:
                yield page
    finally:
        reader.finish("is closed")


def _range_of_entries(index: IndexDefinition, request: pb.FindRowsRequest) -> EntryRange:
    limits = (
        request.start if request.HasField("start") else None,
        request.end if request.HasField("end") else None,
        request.prefix if request.HasField("prefix") else None,
    )

    def checked(place: int, field: str, value: bytes) -> bytes:
        column, codec = index.columns[place]
        try:
            entry_part(codec, value, column)
        except SchemaError as error:
            raise InvalidArgument(field, error.message) from error
        return value

    first, last = bounds(index, request.values, limits, checked)
    if request.after and request.reverse:
        last = min(last, request.after) if last else request.after
    elif request.after:
        first = max(first, request.after + b"\0")
    return EntryRange(index, first, last)
