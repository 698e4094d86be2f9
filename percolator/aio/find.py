"""Rows by the values of an index: the entries of a range, in order, and the rows that they lead to.

Entries and rows are read in one snapshot, in which they agree; only an entry that expires may still
be there when its row no longer has the values. A transaction's own writes get their entries only at
its commit; so the rows that it has written are judged by what it would read, and take their places
among the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

from percolator.aio.reader import Reader
from percolator.arguments import require_bool, require_whole
from percolator.codecs.indexes import ENTRY, IndexDefinition
from percolator.codecs.readable import counted, for_bytes, quoted
from percolator.codecs.values import after_prefix
from percolator.errors import (
    CellAddress,
    InvalidArgument,
    InvariantViolation,
    SchemaError,
    UsageError,
)
from percolator.protocol import indexes
from percolator.protocol.environment import Environment
from percolator.protocol.read import FoundRow, scan_pages
from percolator.protocol.write_set import Write
from percolator.routing.catalog import TableInfo
from percolator.routing.cells import FoundCell, RangeRequest
from percolator.schema import Column, Columns, Index, Table, encoded_value, stored_names
from percolator.timestamps import Timestamp
from percolator.wire.table_indexes import described

T = TypeVar("T")

ROWS_AT_ONCE = 200
"""Rows that are read at a time, besides the ones that the caller has."""
BYTES_AT_ONCE = 16 << 20
"""Fewer rows are read at a time if they have more, and one at least."""

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

    async def range_of_entries() -> EntryRange:
        definition = await known_index(reader, info, index, reader.deadline(timeout))

        def encoded(place: int, _: str, value: object) -> bytes:
            return encoded_value(index.columns[place], "(index)", value)

        limits = (search.start, search.end, search.prefix)
        return EntryRange(definition, *bounds(definition, search.values, limits, encoded))

    first = await range_of_entries()
    if reader.late:
        await reader.late.settle(deadline)
    if search.limit == 0:
        return
    wanted = Wanted(names, prefixes, search.reverse, search.limit)
    pages = found_matches(reader, info, first, range_of_entries, wanted, timeout)
    async with aclosing(pages):
        async for page in pages:
            yield [(one.row, _values(one.cells)) for one in page]


class EntryRange(NamedTuple):
    """The entries of an index from the first one, and before the last one."""

    definition: IndexDefinition
    first: bytes
    last: bytes
    """Empty if there is no end."""


class Wanted(NamedTuple):
    """The columns and the rows that are to be found."""

    names: list[bytes] | None
    """None means all columns."""
    prefixes: tuple[bytes, ...]
    reverse: bool
    limit: int | None


Entry = tuple[bytes, bytes]
"""An entry, and the row to which it leads."""


class Match(NamedTuple):
    """A row that was found."""

    entry: bytes
    row: bytes
    cells: Mapping[bytes, FoundCell | None]
    """By column; those without a value are among them."""


async def found_matches(
    reader: Reader,
    info: TableInfo,
    entries: EntryRange,
    again: Callable[[], Awaitable[EntryRange]],
    wanted: Wanted,
    timeout: float | None,
) -> AsyncGenerator[list[Match], None]:
    """Yields the rows to which the entries lead, in their order, some at a time, each with the
    wanted columns. `again` says what to look for if the index was dropped and made again."""
    deadline = reader.deadline(timeout)
    start = reader.start or await reader.begin(deadline)
    while not entries.last or entries.first < entries.last:
        index, first, last = entries
        request = RangeRequest(
            index.table_id,
            first,
            last,
            (ENTRY,),
            start,
            reverse=wanted.reverse,
            row_limit=wanted.limit or 0,
        )
        seconds = timeout or reader.timeout_seconds
        engine = reader.engine
        scan = scan_pages(engine.env, engine.cleanup, request, None, seconds, reader.statistics)
        async with aclosing(scan):
            try:
                page = await _first_page(reader, index, scan, deadline)
            except SchemaError:
                schema = await reader.env.schemas.refresh(info.table_id, deadline)
                if index in schema.indexes or engine.now() >= deadline:
                    raise
                entries = await again()
                continue
            lookup = _Lookup(reader, info, entries, wanted)
            lookup.deadline = reader.deadline(timeout)
            own, written = await lookup.own_entries(None)
            left = wanted.limit
            while page is not None or own:
                listed = _merged(own, page, written, reverse=wanted.reverse)
                while listed:
                    lookup.deadline = reader.deadline(timeout)
                    before = listed.copy()
                    found = await lookup.rows(listed, left)
                    reader.require_open()
                    if found:
                        yield found
                    if left is not None:
                        left -= len(found)
                        if not left:
                            return
                    if lookup.has_written_more():
                        place = before[-len(listed) - 1]
                        own, written = await lookup.own_entries(place)
                        rest = page and [
                            (entry, cells)
                            for entry, cells in page
                            if lookup.is_behind(place, (entry, cells[ENTRY].value or b""))
                        ]
                        listed = _merged(own, rest, written, reverse=wanted.reverse)
                page = None if page is None else await anext(scan, None)
            return


async def _first_page(
    reader: Reader,
    index: IndexDefinition,
    scan: AsyncGenerator[list[FoundRow], None],
    deadline: float,
) -> list[FoundRow] | None:
    """The first page of a scan of entries, if there is any. Raises `SchemaError` unless the index
    has all rows in this snapshot, which is asked meanwhile."""
    reading = asyncio.ensure_future(anext(scan, None))
    try:
        await require_ready(reader, index, deadline)
        return await reading
    except BaseException:
        reading.cancel()
        # A generator that runs cannot be closed.
        await asyncio.gather(reading, return_exceptions=True)
        raise


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


def declared_for_bytes(table: Table[bytes], index: IndexDefinition) -> Index[bytes]:
    """The index, for a program that looks up stored bytes."""
    columns = tuple(table.column(column, for_bytes(codec)) for column, codec in index.columns)
    return Index(table, index.name, columns)


async def known_index(
    reader: Reader, info: TableInfo, index: Index[Any], deadline: float
) -> IndexDefinition:
    """The index as the cluster has it. Raises `SchemaError` if it has none, or another one."""
    one = await index_named(reader.env, info.table_id, index.name, deadline)
    if one is not None:
        require_same_index(info.name, one, index)
        return one
    raise SchemaError(
        f"table {info.name!r} has no index {index.name!r}: declare it before the table is created, "
        f"or add it with db.create_index(...) or `percolator index create`"
    )


def require_same_index(
    table: str, one: IndexDefinition, index: Index[Any], *, says_all: bool = False
) -> None:
    """Raises `SchemaError` unless the cluster's index has the columns that the program declares;
    and, if the program `says_all`, is unique where it says so."""
    declared = index.definition()
    if one.columns != declared.columns or (says_all and one.unique != declared.unique):
        raise SchemaError(
            f"table {table!r}: index {one.name!r} is {described(one)}, and the program declares "
            f"one {described(declared)}",
            table=table,
        )


async def index_named(
    env: Environment, table_id: int, name: str, deadline: float
) -> IndexDefinition | None:
    """The index of this name as the cluster has it; None if the table has none."""
    for schema in (env.schemas.get(table_id), None):
        schema = schema or await env.schemas.refresh(table_id, deadline)
        for one in schema.indexes:
            if one.name == name:
                return one
    return None


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
    if await _newest_state(reader, cell, deadline) == indexes.READY:
        raise SchemaError(
            f"index {index.name!r} was completed after the snapshot, which is at "
            f"{Timestamp(reader.start).describe()}: look it up in a newer one"
        )
    raise SchemaError(
        f"index {index.name!r} is not complete at {Timestamp(reader.start).describe()}: it is "
        "being built by db.create_index(...) or `percolator index create`; run either again if it "
        "was interrupted"
    )


async def _newest_state(reader: Reader, cell: CellAddress, deadline: float) -> bytes | None:
    newest = Reader(reader.engine, reader.timeout_seconds, "snapshot")
    try:
        found: FoundCell | None = (await newest.stored([cell], deadline)).get(cell)
    finally:
        newest.finish("is closed")
    return None if found is None else found.value


def bounds(
    index: IndexDefinition,
    values: Sequence[T],
    limits: tuple[T | None, T | None, T | None],
    encoded: Callable[[int, str, T], bytes],
) -> tuple[bytes, bytes]:
    """The entries from the first one, and before the last one; an empty end means no end.

    `values` are those of the first columns; `limits`, which are start, end and prefix, are about
    the next one. `encoded` is called with the place of a column in the index, the name of what is
    given for it, and the value.
    """
    columns, (start, end, prefix) = index.columns, limits
    if len(values) > len(columns):
        reason = (
            f"index {index.name!r} has {counted(len(columns), 'column')}, got {len(values)} values"
        )
        raise InvalidArgument("values", reason)
    given = dict(zip(("start", "end", "prefix"), limits, strict=True))
    ranges = [name for name, limit in given.items() if limit is not None]
    if ranges and len(values) == len(columns):
        raise InvalidArgument(
            ranges[0], f"index {index.name!r} has no column after the values that are given"
        )
    parts = [encoded(place, f"values[{place}]", value) for place, value in enumerate(values)]

    def part(name: str, value: T) -> bytes:
        return index.parts([*parts, encoded(len(parts), name, value)])

    base = index.parts(parts)
    first, last = base, after_prefix(base) if base else b""
    if not ranges:
        return first, last
    if prefix is not None:
        _, codec = columns[len(values)]
        if codec not in ("raw", "text"):
            raise InvalidArgument("prefix", f"values of codec {codec} have no prefixes")
        begin = part("prefix", prefix)[: -len(_PART_END)]
        first, last = begin, after_prefix(begin)
    if start is not None:
        first = max(first, part("start", start))
    if end is not None:
        before = part("end", end)
        last = min(last, before) if last else before
    return first, last


_PART_END = b"\x00\x00"
"""The end of a text in an entry (codecs/values.py)."""


class _Lookup:
    """Reads the rows to which entries lead."""

    def __init__(
        self,
        reader: Reader,
        info: TableInfo,
        entries: EntryRange,
        wanted: Wanted,
    ) -> None:
        self._reader = reader
        self._info = info
        self._index = entries.definition
        self._entries = entries
        self._shown = wanted.names
        self._names = None
        if wanted.names is not None:
            self._names = list(dict.fromkeys((*wanted.names, *self._index.names)))
        self._prefixes = wanted.prefixes
        self._reverse = wanted.reverse
        self.deadline = 0.0
        self._at_once = ROWS_AT_ONCE
        self._written: dict[CellAddress, Write] = {}
        """The writes of the transaction when its entries were last asked for."""
        self._seen: set[bytes] = set()
        """In a transaction, the rows that were shown: one that gets a new place by its caller's
        writes is not shown again there, or a look-up might never end."""

    async def own_entries(self, last: Entry | None) -> tuple[deque[Entry], frozenset[bytes]]:
        """The entries in the range, behind the last one, that rows will have which the transaction
        has written, in order; and all of these rows, of which what is stored does not matter.

        Only rows with columns of the index that the transaction has not written, and that may be in
        the range all the same, are read for this.
        """
        own, index, table_id = self._reader.own, self._index, self._info.table_id
        if own is None or not own.cells:
            return deque(), frozenset()
        self._written = self._own_cells()
        found: list[Entry] = []
        unclear: list[bytes] = []
        written = indexes.written_rows(own, table_id, index)
        for row in written:
            if row in self._seen:
                continue
            values = {
                column: known.value
                for column in index.names
                if (known := own.own_value(CellAddress(table_id, row, column))) is not None
            }
            if len(values) == len(index.names):
                self._take(found, row, values)
            elif self._may_match(values):
                unclear.append(row)
        for at in range(0, len(unclear), ROWS_AT_ONCE):
            some = unclear[at : at + ROWS_AT_ONCE]
            cells = await self._reader.stored_cells(
                table_id, some, [*index.names], (), self.deadline
            )
            for row, stored in zip(some, cells, strict=True):
                self._take(found, row, _values(stored))
        found = [one for one in found if last is None or self.is_behind(last, one)]
        return deque(sorted(found, reverse=self._reverse)), frozenset(written)

    def is_behind(self, last: Entry, one: Entry) -> bool:
        """True if the look-up comes to this one after the last one. Until its commit, a transaction
        may have given one unique entry to several rows."""
        return one < last if self._reverse else one > last

    def has_written_more(self) -> bool:
        """True if the transaction has written columns of the index since its entries were last
        asked for."""
        return self._reader.own is not None and self._own_cells() != self._written

    def _own_cells(self) -> dict[CellAddress, Write]:
        own, names, table_id = self._reader.own, self._index.names, self._info.table_id
        return {
            cell: write
            for cell, write in (own.cells if own is not None else {}).items()
            if cell.table_id == table_id and cell.column in names
        }

    def _take(self, found: list[Entry], row: bytes, values: Mapping[bytes, bytes | None]) -> None:
        """Adds the entry of a row with these values, if it has one and it is in the range."""
        _, first, last = self._entries
        entry = self._index.entry(row, values)
        if entry is not None and first <= entry and (not last or entry < last):
            found.append((entry, row))

    def _may_match(self, values: Mapping[bytes, bytes | None]) -> bool:
        """True if a row of which some values are known may have an entry in the range."""
        if None in values.values():
            return False
        _, first, last = self._entries
        begin = self._index.parts(
            [values[name] or b"" for name in takewhile(values.__contains__, self._index.names)]
        )
        return not (last and begin >= last) and (begin >= first or first.startswith(begin))

    async def rows(self, listed: list[Entry], most: int | None) -> list[Match]:
        """The rows of the first of these entries, `most` of them or as many as may be read at once;
        takes them off the list. All of them must be there, since the snapshot has both, unless
        their values have expired, or the transaction has changed them meanwhile."""
        some = listed[: self._at_once][:most]
        bytes_max = BYTES_AT_ONCE if len(some) > 1 else 0
        try:
            read = await self._read([row for _, row in some], bytes_max)
        except InvalidArgument as error:
            if error.field != "rows" or not bytes_max:
                raise
            self._at_once = len(some) // 2
            return await self.rows(listed, most)
        del listed[: len(some)]
        found: list[Match] = []
        for (entry, row), cells in zip(some, read, strict=True):
            if self._is_entry_of(row, cells, entry):
                found.append(self._match(entry, row, cells))
                if self._reader.own is not None:
                    self._seen.add(row)
            elif not (self._index.expiring or self._has_written(row)):
                raise InvariantViolation(
                    f"index {self._index.name!r} of table {self._info.name!r} leads to row "
                    f"{quoted(row)}, which does not have these values; check it with `percolator "
                    "index check`"
                )
        return found

    def _is_entry_of(
        self, row: bytes, cells: Mapping[bytes, FoundCell | None], entry: bytes
    ) -> bool:
        names, most = self._index.names, self._reader.engine.row_bytes_max
        values = {name: cell.value for name in names if (cell := cells.get(name)) is not None}
        return indexes.entry_before(self._index, row, values, most) == entry

    def _has_written(self, row: bytes) -> bool:
        own, table_id = self._reader.own, self._info.table_id
        return own is not None and any(
            own.own_value(CellAddress(table_id, row, name)) is not None
            for name in self._index.names
        )

    async def _read(
        self, rows: list[bytes], bytes_max: int = 0
    ) -> list[Mapping[bytes, FoundCell | None]]:
        return await self._reader.stored_cells(
            self._info.table_id,
            rows,
            self._names,
            self._prefixes,
            self.deadline,
            bytes_max=bytes_max,
        )

    def _match(self, entry: bytes, row: bytes, cells: Mapping[bytes, FoundCell | None]) -> Match:
        """The row with the columns that were asked for."""
        names = self._shown
        if names is not None:
            cells = {
                name: cell
                for name, cell in cells.items()
                if name in names or name.startswith(self._prefixes)
            }
        return Match(entry, row, cells)


def _merged(
    own: deque[Entry], page: list[FoundRow] | None, written: frozenset[bytes], *, reverse: bool
) -> list[Entry]:
    """The entries of a page in order, without those of rows that were written, and with the own
    ones that come before its last. Without a page, the own ones that are left."""
    merged: list[Entry] = []
    for entry, cells in page or ():
        row = cells[ENTRY].value
        if row is not None and row not in written:
            one = (entry, row)
            while own and (own[0] > one if reverse else own[0] < one):
                merged.append(own.popleft())
            merged.append(one)
    if page is None:
        merged += own
        own.clear()
    return merged


def _values(cells: Mapping[bytes, FoundCell | None]) -> dict[bytes, bytes]:
    """The values that there are."""
    return {
        column: cell.value
        for column, cell in cells.items()
        if cell is not None and cell.value is not None
    }
