"""The rows of a stream: those of a batch read, and what has happened to them.

    with a catalogue      its fields (after the change; null after a delete), change_kind,
                          commit_timestamp: one row for each row that a commit has changed
    raw cells             row, column, value (null after a delete), change_kind, commit_timestamp:
                          one row for each cell that a commit has changed

`change_kind` is insert, update or delete; it is snapshot for what a stream begins with.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.types import LongType, StringType, StructField, StructType

from percolator.errors import InvalidArgument, SchemaError
from percolator.routing.cells import CellPage, FoundCell, StoredChange
from percolator.spark.chosen_rows import RowRanges
from percolator.spark.options import ReadOptions
from percolator.spark.shapes import (
    COLUMN,
    COMMITTED,
    ROW,
    VALUE,
    RawCells,
    TypedRows,
    by_field,
    field_named,
    require_nullable,
    type_name,
)
from percolator.spark.values import of_bytes, of_numbers, of_texts
from percolator.timestamps import is_expired

INSERT, UPDATE, DELETE = "insert", "update", "delete"

Values = tuple[bytes | None, ...]
"""The values of a row in the columns of the stream; None where it has no cell."""

Cells = tuple[FoundCell | None, ...]
"""The values of a row, with their commits."""

BaseReader = Callable[[int, Sequence[bytes]], Awaitable[dict[bytes, Cells]]]
"""Reads rows at a timestamp. Rows that have none of the columns may be missing in the answer."""

_commit_and_row = itemgetter(0, 1)


class RowImage(NamedTuple):
    """A row after a commit."""

    commit_timestamp: int
    row: bytes
    kind: str
    values: Values


class RowImages:
    """Makes images of the rows that a stream wants.

    The feed has the cells that a commit has written. The other cells of the row are read from a
    snapshot just below the first commit of a page of changes, for all rows of the page together;
    the changes are then applied in their order. Every image is what a snapshot at its commit shows,
    so it does not depend on where pages begin.
    """

    def __init__(
        self,
        rows: RowRanges,
        columns: Sequence[bytes],
        read: BaseReader,
        ttls: Mapping[bytes, int],
    ) -> None:
        """`ttls` has the times to live of columns, in milliseconds: what was there at the beginning
        of a page may have expired at a later commit of it."""
        self._rows = rows
        self._places = {column: place for place, column in enumerate(columns)}
        self._ttls = [ttls.get(column) for column in columns]
        self._expires = any(self._ttls)
        self._nothing: Values = (None,) * len(columns)
        self._no_cells: Cells = (None,) * len(columns)
        self._read = read
        self._last_commit = 0
        """The last commit of which there were images."""

    async def of(
        self, pages: AsyncIterator[list[StoredChange]]
    ) -> AsyncGenerator[list[RowImage], None]:
        """Yields the images, in pages. A row may be cut by the end of a page of changes."""
        held: list[StoredChange] = []
        async for page in pages:
            held += self._wanted(page)
            if not held:
                continue
            last = _commit_and_row(held[-1])
            whole = len(held)
            while whole and _commit_and_row(held[whole - 1]) == last:
                whole -= 1
            if whole:
                yield await self._images(held[:whole])
                held = held[whole:]
        if held:
            yield await self._images(held)

    def _wanted(self, page: list[StoredChange]) -> list[StoredChange]:
        places, contains = self._places, self._rows.contains
        return [one for one in page if one.column in places and contains(one.row)]

    async def _images(self, changes: list[StoredChange]) -> list[RowImage]:
        known = await self._before(changes)
        found = []
        self._last_commit = changes[-1].commit_timestamp
        for (commit_ts, row), cells in groupby(changes, _commit_and_row):
            after = list(known.get(row, self._no_cells))
            existed = self._values(after, commit_ts - 1) != self._nothing
            for one in cells:
                cell = None if one.value is None else FoundCell(commit_ts, one.value)
                after[self._places[one.column]] = cell
            known[row] = tuple(after)
            values = self._values(after, commit_ts)
            exists = values != self._nothing
            if exists:
                found.append(RowImage(commit_ts, row, UPDATE if existed else INSERT, values))
            elif existed:
                found.append(RowImage(commit_ts, row, DELETE, values))
        return found

    def _values(self, cells: Sequence[FoundCell | None], at: int) -> Values:
        """The cells that a snapshot at this timestamp sees, given the newest cells below it."""
        if not self._expires:
            return tuple([None if cell is None else cell.value for cell in cells])
        return tuple(
            None if cell is None or (ttl and is_expired(cell.commit_timestamp, at, ttl))
            else cell.value
            for cell, ttl in zip(cells, self._ttls, strict=True)
        )  # fmt: skip

    async def _before(self, changes: list[StoredChange]) -> dict[bytes, Cells]:
        """The rows as they were before these changes."""
        first = changes[0].commit_timestamp
        rows = list(dict.fromkeys(one.row for one in changes))
        if first != self._last_commit:
            return await self._read(first - 1, rows)
        # The pages before have rows of the first commit, too, which later commits may change again.
        now = {one.row for one in changes if one.commit_timestamp == first}
        known = await self._read(first - 1, [row for row in rows if row in now])
        if later := [row for row in rows if row not in now]:
            known |= await self._read(first, later)
        return known


KIND = "change_kind"
SNAPSHOT_KIND = "snapshot"
_ADDED = StructType(
    [
        StructField(KIND, StringType(), nullable=False),
        StructField(COMMITTED, LongType(), nullable=False),
    ]
)


def stream_schema(options: ReadOptions) -> StructType:
    """The schema of a stream. Raises `InvalidArgument` if the catalogue has fields of its own with
    the names that a stream adds."""
    if options.catalog is None:
        cells = RawCells().schema(None).fields
        kept = [StructField(f.name, f.dataType, f.name == VALUE) for f in cells]
        return StructType([field for field in kept if field.name != COMMITTED] + _ADDED.fields)
    shape = TypedRows(options.catalog)
    for field in shape.schema(None).fields:
        if field_named(_ADDED, field.name) is not None:
            raise InvalidArgument(
                "catalog", f"a field is named {field.name!r}, which a stream adds to its rows"
            )
    return StructType(shape.schema(options.columns).fields + _ADDED.fields)


def _of_table(schema: StructType) -> StructType:
    """The fields that are not added by the stream, after a check of those that are."""
    for field in schema.fields:
        known = field_named(_ADDED, field.name)
        if known is not None and known.dataType != field.dataType:
            raise SchemaError(
                f"field {field.name!r} is {type_name(field.dataType)}; a stream has "
                f"{type_name(known.dataType)}"
            )
    kept = [field for field in schema.fields if field_named(_ADDED, field.name) is None]
    return StructType(kept)


class CellChanges:
    """The rows of a stream without a catalogue."""

    def __init__(self, options: ReadOptions, schema: StructType, target: pa.Schema) -> None:
        RawCells().check_read(_of_table(schema))
        value = field_named(schema, VALUE)
        if value is not None:
            require_nullable(value)  # it is null after a delete
        self._target = target
        self._rows = options.rows
        self.columns = RawCells().stored(schema, options.columns)
        self.needs_before = field_named(schema, KIND) is not None
        """True if it matters whether there was a value before."""

    def of_snapshot(self, page: CellPage) -> pa.RecordBatch:
        """The rows for the cells of a snapshot."""
        kinds = [SNAPSHOT_KIND] * len(page.rows)
        return self._batch(page.rows, page.columns, page.values, kinds, page.commit_timestamps)

    def of_changes(self, page: Sequence[StoredChange]) -> pa.RecordBatch:
        """The rows for changes of cells."""
        wanted = [one for one in page if self._wants(one)]
        return self._batch(
            [one.row for one in wanted],
            [one.column for one in wanted],
            [one.value for one in wanted],
            [_kind(one) for one in wanted],
            [one.commit_timestamp for one in wanted],
        )

    def _wants(self, change: StoredChange) -> bool:
        chosen = self.columns is None or change.column in self.columns
        return chosen and self._rows.contains(change.row)

    def _batch(
        self,
        rows: list[bytes],
        columns: list[bytes],
        values: Sequence[bytes | None],
        kinds: list[str],
        commits: list[int],
    ) -> pa.RecordBatch:
        lists: dict[str, Sequence[bytes | None]] = {ROW: rows, COLUMN: columns, VALUE: values}
        arrays = [
            of_bytes(lists[field.name.lower()], field.type)
            if field.name.lower() in lists
            else _added(field, kinds, commits)
            for field in self._target
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._target)


class RowChanges:
    """The rows of a stream with a catalogue."""

    def __init__(self, options: ReadOptions, schema: StructType, target: pa.Schema) -> None:
        if options.catalog is None:
            raise InvalidArgument("catalog", "missing")
        self._shape = TypedRows(options.catalog)
        kept = _of_table(schema)
        self._shape.check_read(kept)
        self._fields = self._shape.read_fields(kept)
        self._target = target
        self._target_of_table = pa.schema(
            [field for field in target if field_named(kept, field.name) is not None]
        )
        self.columns = self._shape.stored(kept, options.columns) or ()

    def of_snapshot(self, page: CellPage) -> pa.RecordBatch:
        """The rows for the cells of a snapshot. Each has the timestamp of its newest cell."""
        rows, values = by_field(page, self._fields)
        commits = dict.fromkeys(rows, 0)
        for row, commit_ts in zip(page.rows, page.commit_timestamps, strict=True):
            commits[row] = max(commits[row], commit_ts)
        return self._batch(rows, values, [SNAPSHOT_KIND] * len(rows), list(commits.values()))

    def of_images(self, images: Sequence[RowImage]) -> pa.RecordBatch:
        """The rows for images of rows."""
        places = range(len(self._fields))
        return self._batch(
            [one.row for one in images],
            [[one.values[place] for one in images] for place in places],
            [one.kind for one in images],
            [one.commit_timestamp for one in images],
        )

    def _batch(
        self,
        rows: list[bytes],
        values: Sequence[list[bytes | None]],
        kinds: list[str],
        commits: list[int],
    ) -> pa.RecordBatch:
        of_table = self._shape.arrays(rows, values, self._fields, self._target_of_table)
        by_name = dict(zip(self._target_of_table.names, of_table, strict=True))
        arrays = [
            by_name[field.name] if field.name in by_name else _added(field, kinds, commits)
            for field in self._target
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._target)


def _added(field: pa.Field, kinds: list[str], commits: list[int]) -> pa.Array:
    """The field, if the stream adds it to its rows."""
    if field.name.lower() == KIND:
        return of_texts(kinds, field.type)
    return of_numbers(commits, field.type)


def _kind(change: StoredChange) -> str:
    if change.value is None:
        return DELETE
    return INSERT if change.before is None else UPDATE
