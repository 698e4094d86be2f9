"""Rows by the values of an index: the entries of a range, in order, and the rows that they lead to.

Entries and rows are read in one snapshot, in which they agree. A transaction's own writes get their
entries only at its commit; so the rows that it has written are judged by what it would read, and
take their places among the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

from percolator.aio.reader import Reader
from percolator.arguments import require_bool, require_whole
from percolator.codecs.indexes import ENTRY, IndexDefinition
from percolator.codecs.readable import quoted
from percolator.codecs.values import after_prefix
from percolator.errors import (
    CellAddress,
    InvalidArgument,
    InvariantViolation,
    SchemaError,
    UsageError,
)
from percolator.protocol import indexes
from percolator.protocol.read import scan_pages
from percolator.routing.catalog import TableInfo
from percolator.routing.cells import FoundCell, RangeRequest
from percolator.schema import Column, Columns, Index, encoded_value, stored_names
from percolator.timestamps import Timestamp
from percolator.wire.table_indexes import described

T = TypeVar("T")

ROWS_AT_ONCE = 200
"""Rows that are read at a time, besides the ones that the caller has."""

FoundValues = tuple[bytes, dict[bytes, bytes]]
"""A row, and its values by column."""


class Search(NamedTuple):
    """The index and the values that a program looks for."""

    by: Index[Any] | Column[Any, Any]
    values: Sequence[object]
    """Values of its first columns."""
    start: object = None
    end: object = None
    prefix: object = None
    """These three are about the column after those."""
    reverse: bool = False
    limit: int | None = None


async def found_rows(
    reader: Reader, search: Search, columns: Columns | None, timeout: float | None
) -> AsyncGenerator[list[FoundValues], None]:
    """Yields the rows that match, in the order of the index, some at a time."""
    deadline = reader.deadline(timeout)
    require_bool(search.reverse, "reverse")
    if search.limit is not None:
        require_whole(search.limit, "limit", least=0)
    if reader.read_locks is not None:
        raise UsageError(
            "a serializable transaction cannot look up an index: a row that another transaction "
            "adds has no cell to lock yet; read cells by key"
        )
    index = declared_index(search.by)
    names, prefixes = stored_names(index.table, columns)
    info = await reader.info(index.table, deadline)
    info.codecs.require(index.table, columns)
    definition = await known_index(reader, info, index, deadline)
    first, last = _bounds(definition, index, search)
    if reader.late:
        await reader.late.settle(deadline)
    if search.limit == 0 or (last and first >= last):
        return
    wanted = None if names is None else list(dict.fromkeys((*names, *definition.names)))
    lookup = _Lookup(reader, info, definition, wanted, prefixes, deadline)
    own = await lookup.own_rows(first, last)
    own.sort(reverse=search.reverse)
    written = frozenset(row for _, row, _ in own) | lookup.unmatched
    left = search.limit
    request = RangeRequest(
        definition.table_id,
        first,
        last,
        (ENTRY,),
        reader.start or await reader.begin(deadline),
        reverse=search.reverse,
        row_limit=0 if left is None else left + len(written),
    )
    seconds = timeout or reader.timeout_seconds
    engine = reader.engine
    entries = scan_pages(engine.env, engine.cleanup, request, None, seconds, reader.statistics)
    is_known = True
    async with aclosing(entries):
        reading = asyncio.ensure_future(anext(entries, None))
        try:
            await require_ready(reader, definition, deadline)
            page = await reading
        except BaseException as error:
            reading.cancel()
            # A generator that runs cannot be closed.
            await asyncio.gather(reading, return_exceptions=True)
            if not isinstance(error, SchemaError):
                raise
            schema = await reader.env.schemas.refresh(info.table_id, deadline)
            if definition in schema.indexes:
                raise
            is_known = False
            page = None
        while page is not None:
            for at in range(0, len(page), ROWS_AT_ONCE):
                some = _listed(page[at : at + ROWS_AT_ONCE], written)
                lookup.deadline = reader.deadline(timeout)
                found = await lookup.rows(some)
                reader.require_open()
                rows = [*_merged(own, found, reverse=search.reverse)][:left]
                if rows:
                    yield [(row, _shown(cells, names, prefixes)) for _, row, cells in rows]
                if left is not None:
                    left -= len(rows)
                    if not left:
                        return
            page = await anext(entries, None)
    if not is_known:  # it was dropped, and may have been made again
        async with aclosing(found_rows(reader, search, columns, timeout)) as pages:
            async for found_page in pages:
                yield found_page
    elif own:
        yield [(row, _shown(cells, names, prefixes)) for _, row, cells in own[:left]]


def declared_index(index: object) -> Index[Any]:
    """The index that is meant: a column stands for the index of that column alone."""
    if isinstance(index, Index):
        return index
    if not isinstance(index, Column):
        raise InvalidArgument(
            "index", f"expected an Index or an indexed Column, got {type(index).__name__}"
        )
    name = index.name.decode(errors="replace")
    return index.table.indexes.get(name) or Index(index.table, name, (index,))


async def known_index(
    reader: Reader, info: TableInfo, index: Index[Any], deadline: float
) -> IndexDefinition:
    """The index as the cluster has it. Raises `SchemaError` if it has none, or another one."""
    schemas = reader.env.schemas
    for schema in (schemas.get(info.table_id), None):
        schema = schema or await schemas.refresh(info.table_id, deadline)
        for one in schema.indexes:
            if one.name == index.name:
                declared = index.definition()
                if one.columns != declared.columns:
                    raise SchemaError(
                        f"table {info.name!r}: index {one.name!r} is {described(one)}, and "
                        f"the program declares one {described(declared)}"
                    )
                return one
    raise SchemaError(
        f"table {info.name!r} has no index {index.name!r}: declare it before the table is created, "
        f"or add it with db.create_index(...) or `percolator index create`"
    )


async def require_ready(reader: Reader, index: IndexDefinition, deadline: float) -> None:
    """Raises `SchemaError` if the index does not have all rows in this snapshot."""
    cell = CellAddress(index.table_id, indexes.STATE_ROW, indexes.STATE)
    found: FoundCell | None = (await reader.stored([cell], deadline)).get(cell)
    state = None if found is None else found.value
    if state == indexes.READY or (state is None and 0 < index.ready_at <= reader.start):
        return
    if state == indexes.DROPPED:
        raise SchemaError(f"index {index.name!r} was dropped")
    if state is None and index.ready_at:
        raise SchemaError(
            f"index {index.name!r} is younger than the snapshot, which is at "
            f"{Timestamp(reader.start).describe()}"
        )
    raise SchemaError(
        f"index {index.name!r} is not complete at {Timestamp(reader.start).describe()}: it is "
        "being built by db.create_index(...) or `percolator index create`; run either again if it "
        "was interrupted"
    )


def _bounds(index: IndexDefinition, declared: Index[Any], search: Search) -> tuple[bytes, bytes]:
    """The entries from the first one, and before the last one; an empty end means no end."""
    columns, values = declared.columns, search.values
    if len(values) > len(columns):
        raise InvalidArgument("values", f"index {index.name!r} has {len(columns)} columns")
    has_range = not search.start is search.end is search.prefix is None
    if has_range and len(values) == len(columns):
        raise InvalidArgument(
            "start", f"index {index.name!r} has no column after the values that are given"
        )

    def part(count: int, *last: object) -> bytes:
        given = zip(columns, (*values[:count], *last), strict=False)
        return index.parts([encoded_value(column, "(index)", value) for column, value in given])

    base = part(len(values))
    first, last = base, after_prefix(base) if base else b""
    if not has_range:
        return first, last
    if search.prefix is not None:
        column = columns[len(values)]
        if column.codec.name not in ("raw", "text"):
            raise InvalidArgument("prefix", f"values of codec {column.codec.name} have no prefixes")
        begin = part(len(values), search.prefix)[: -len(_PART_END)]
        first, last = begin, after_prefix(begin)
    if search.start is not None:
        first = max(first, part(len(values), search.start))
    if search.end is not None:
        end = part(len(values), search.end)
        last = min(last, end) if last else end
    return first, last


_PART_END = b"\x00\x00"
"""The end of a text in an entry (codecs/values.py)."""

_Match = tuple[bytes, bytes, dict[bytes, bytes]]
"""An entry, the row that it leads to, and the values of that row by column."""


class _Lookup:
    """Reads the rows to which entries lead."""

    def __init__(
        self,
        reader: Reader,
        info: TableInfo,
        index: IndexDefinition,
        names: list[bytes] | None,
        prefixes: tuple[bytes, ...],
        deadline: float,
    ) -> None:
        self._reader = reader
        self._info = info
        self._index = index
        self._names = names
        self._prefixes = prefixes
        self.deadline = deadline
        self.unmatched: frozenset[bytes] = frozenset()
        """Rows that the transaction has written, and that do not match."""

    async def own_rows(self, first: bytes, last: bytes) -> list[_Match]:
        """The rows that match and that the transaction has written."""
        own = self._reader.own
        if own is None or not own.cells:
            return []
        rows = indexes.written_rows(own, self._info.table_id, self._index)
        if not rows:
            return []
        found: list[_Match] = []
        for row, cells in zip(rows, await self._read(rows), strict=True):
            entry = self._index.entry(row, cells)
            if entry is not None and first <= entry and (not last or entry < last):
                found.append((entry, row, cells))
        self.unmatched = frozenset(rows) - {row for _, row, _ in found}
        return found

    async def rows(self, entries: Sequence[tuple[bytes, bytes]]) -> list[_Match]:
        """The rows of these entries. All of them must be there: the snapshot has both."""
        found = await self._read([row for _, row in entries])
        most = self._reader.engine.row_bytes_max
        for (entry, row), cells in zip(entries, found, strict=True):
            if indexes.entry_before(self._index, row, cells, most) != entry:
                raise InvariantViolation(
                    f"index {self._index.name!r} of table {self._info.name!r} leads to row "
                    f"{quoted(row)}, which does not have these values; check it with `percolator "
                    "index check`"
                )
        return [(entry, row, cells) for (entry, row), cells in zip(entries, found, strict=True)]

    async def _read(self, rows: list[bytes]) -> list[dict[bytes, bytes]]:
        if not rows:
            return []
        found = self._reader.stored_rows
        table_id = self._info.table_id
        return await found(table_id, rows, self._names, self._prefixes, self.deadline)


def _listed(
    page: Sequence[tuple[bytes, dict[bytes, FoundCell]]], left_out: frozenset[bytes]
) -> list[tuple[bytes, bytes]]:
    """The entries of a page, with the rows to which they lead."""
    listed = []
    for entry, cells in page:
        row = cells[ENTRY].value
        if row is not None and row not in left_out:
            listed.append((entry, row))
    return listed


def _merged(own: list[_Match], found: list[_Match], *, reverse: bool) -> list[_Match]:
    """The matches of a page in order, with those of the own ones that come before its last."""
    rows: list[_Match] = []
    for one in found:
        while own and (own[0][:2] > one[:2] if reverse else own[0][:2] < one[:2]):
            rows.append(own.pop(0))
        rows.append(one)
    return rows


def _shown(
    cells: dict[bytes, bytes], names: list[bytes] | None, prefixes: tuple[bytes, ...]
) -> dict[bytes, bytes]:
    """The values that were asked for."""
    if names is None:
        return cells
    return {
        name: value for name, value in cells.items() if name in names or name.startswith(prefixes)
    }
