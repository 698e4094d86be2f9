"""Changes of a table's indexes, and what they keep other changes from: for masters, and for their
doubles in tests. A bad request changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from percolator.codecs.indexes import (
    ENTRY,
    INDEX_BYTES_MAX,
    INDEX_COLUMNS_MAX,
    INDEXES_MAX,
    IndexDefinition,
    indexes_of,
    require_indexable,
)
from percolator.codecs.names import COLUMNS_KEPT_MAX, CodecNames, require_columns
from percolator.codecs.readable import quoted
from percolator.errors import InvalidArgument, SchemaError
from percolator.schema import INTERNAL_PREFIX
from percolator.v1 import master_pb2 as pb
from percolator.v1.tabletserver_pb2 import ColumnTtl
from percolator.wire.table_options import by_column

ENTRIES_PREFIX = INTERNAL_PREFIX + "index/"
"""Names of the tables that have the entries of indexes begin with it."""
_CREATE = "create it with db.create_index(...) or percolator index create"


def entries_name(table_id: int, index: str) -> str:
    """The name of the table that has the entries of an index."""
    return f"{ENTRIES_PREFIX}{table_id}/{index}"


def require_indexes(field: str, indexes: Sequence[pb.Index]) -> tuple[IndexDefinition, ...]:
    """The indexes that are asked for. Raises `InvalidArgument`, or `SchemaError` for a column that
    cannot be indexed."""
    if len(indexes) > INDEXES_MAX:
        raise InvalidArgument(field, f"{len(indexes)} indexes, at most {INDEXES_MAX} allowed")
    names: set[str] = set()
    for number, one in enumerate(indexes):
        where = f"{field}[{number}]"
        _require_name(f"{where}.name", one.name)
        if one.name in names:
            raise InvalidArgument(f"{where}.name", f"{one.name!r} is given twice")
        names.add(one.name)
        if not 1 <= len(one.columns) <= INDEX_COLUMNS_MAX:
            raise InvalidArgument(
                f"{where}.columns", f"{len(one.columns)} columns; expected 1 to {INDEX_COLUMNS_MAX}"
            )
        require_columns(f"{where}.columns", one.columns)
        for column in one.columns:
            require_indexable(column.codec, column.column)
    return tuple(replace(IndexDefinition.of(one), table_id=0, ready_at=0) for one in indexes)


def _require_name(field: str, name: str) -> None:
    if not 1 <= len(name.encode()) <= INDEX_BYTES_MAX:
        raise InvalidArgument(field, f"expected 1 to {INDEX_BYTES_MAX} bytes")
    if not name.isprintable() or name != name.strip():
        raise InvalidArgument(
            field, f"{name!r} has unprintable characters, or a space at either end"
        )


class ChangedIndexes(NamedTuple):
    """The indexes of a table after a change."""

    kept: tuple[IndexDefinition, ...]
    """Indexes that it had before, and still has."""
    added: tuple[IndexDefinition, ...]
    """Indexes that it gets: each needs a table for its entries."""


def changed_indexes(
    table: pb.Table, request: pb.ChangeIndexesRequest, entries: Collection[str] = ()
) -> ChangedIndexes:
    """The indexes of a table after a change. `entries` are the names of all tables that have
    entries for it: an index that an earlier attempt has removed may be removed again as long as its
    own is there. Raises `InvalidArgument` or `SchemaError`."""
    require_no_entries(table.name, table.index_of)
    wanted = require_indexes("add", request.add)
    known = {one.name: one for one in indexes_of(table.indexes)}
    for number, gone in enumerate(request.remove):
        if any(one.name == gone.name for one in wanted):
            raise InvalidArgument(f"remove[{number}]", f"index {gone.name!r} is to be added, too")
        is_left = gone.name in known or entries_name(table.table_id, gone.name) in entries
        if not gone.table_id and not is_left:
            raise no_index(table.name, gone.name)
    for one in wanted:
        if one.name in known and not known[one.name].declares_same(one):
            raise SchemaError(
                f"table {table.name!r} has another index {one.name!r}, {described(known[one.name])}"
                f", not {described(one)}; drop it first, or choose another name",
                table=table.name,
            )
    removed = {(one.name, one.table_id) for one in request.remove}
    kept = tuple(one for one in known.values() if (one.name, one.table_id) not in removed)
    added = tuple(one for one in wanted if one.name not in known)
    if len(kept) + len(added) > INDEXES_MAX:
        raise InvalidArgument("add", f"{table.name!r} would have more than {INDEXES_MAX} indexes")
    with_index_codecs(table.name, CodecNames.of(table.codecs), added)
    return ChangedIndexes(kept, added)


def no_index(table: str, index: str) -> SchemaError:
    """The error about an index that does not exist."""
    return SchemaError(f"table {table!r} has no index {index!r}", table=table)


def described(index: IndexDefinition) -> str:
    """Its columns and their codecs, for errors and operators."""
    columns = ", ".join(f"{quoted(column)} ({codec})" for column, codec in index.columns)
    return f"{'unique ' * index.unique}over {columns}"


def require_same_indexes(
    table: str, found: Iterable[IndexDefinition], wanted: Iterable[IndexDefinition]
) -> None:
    """Raises `SchemaError` unless a table that exists has all the indexes that were asked for."""
    known = {one.name: one for one in found}
    for one in wanted:
        has = known.get(one.name)
        if has is None:
            raise SchemaError(
                f"table {table!r} exists without the index {one.name!r}: {_CREATE}", table=table
            )
        if not has.declares_same(one):
            raise SchemaError(
                f"table {table!r} exists with another index {one.name!r}, {described(has)}, not "
                f"{described(one)}: drop that one, and {_CREATE}",
                table=table,
            )


def with_index_codecs(
    table: str, codecs: CodecNames, indexes: Iterable[IndexDefinition]
) -> CodecNames:
    """The codecs of a table that gets these indexes. Raises `SchemaError` if a column has another
    one."""
    for one in indexes:
        codecs = codecs.declared(table, pb.Codecs(columns=one.message().columns))
        for column in one.names:
            if column not in codecs.columns:
                raise SchemaError(
                    f"table {table!r} keeps the codecs of {COLUMNS_KEPT_MAX} columns, and no more: "
                    f"index {one.name!r} needs that of column {quoted(column)}",
                    table=table,
                )
    return codecs


def require_codecs_kept(table: str, indexes: Iterable[IndexDefinition], codecs: CodecNames) -> None:
    """Raises `SchemaError` unless indexed columns keep their codecs: entries are made with them."""
    for one in indexes:
        for column, codec in one.columns:
            if codecs.columns.get(column) != codec:
                raise SchemaError(
                    f"table {table!r}: the index {one.name!r} needs the codec {codec} of column "
                    f"{quoted(column)}; drop the index first",
                    table=table,
                )


def entries_ttls(index: IndexDefinition, ttls: Iterable[ColumnTtl]) -> list[ColumnTtl]:
    """The time to live of an index's entries: the shortest one of its columns
    (protocol/indexes.py)."""
    found = [one.ttl_milliseconds for one in ttls if one.column in index.names]
    return [ColumnTtl(column=ENTRY, ttl_milliseconds=min(found))] if found else []


def require_ttls_kept(
    table: str,
    indexes: Iterable[IndexDefinition],
    before: Iterable[ColumnTtl],
    after: Iterable[ColumnTtl],
) -> None:
    """Raises `SchemaError` unless indexed columns keep their times to live: entries were written,
    or left out, by them."""
    found, wanted = by_column(before), by_column(after)
    for one in indexes:
        for column in one.names:
            if found.get(column) != wanted.get(column):
                raise SchemaError(
                    f"table {table!r}: the time to live of column {quoted(column)} cannot be "
                    f"changed, since the entries of the index {one.name!r} live by it; drop the "
                    "index first, and create it again afterwards",
                    table=table,
                )


def require_no_entries(table: str, index_of: int) -> None:
    """Raises `SchemaError` for a table that has the entries of an index."""
    if index_of:
        raise SchemaError(
            f"table {table!r} has the entries of an index: only dropping the index, or its table, "
            "changes it",
            table=table,
        )
