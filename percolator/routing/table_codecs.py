"""The codecs of one table, as far as this client knows them, and which columns agree with them.

A column is compared by name once, and from then on recognised by identity: each read and write
costs one look into a dictionary. A master is asked only before the first write to a column that has
no codec yet. So no two programs write one column with different codecs, whichever begins first.

`codecs.raw` reads every column, since bytes as they are cannot be misread. `codecs.stored` and
other codecs without a name are neither kept nor refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from percolator.codecs.names import COLUMNS_KEPT_MAX, CodecNames, other_codec
from percolator.codecs.values import name_of
from percolator.errors import SchemaError
from percolator.schema import INTERNAL_PREFIX, Column, Family, Readable, Table
from percolator.v1 import master_pb2 as pb

_RAW = "raw"


class TableCodecs:
    """Codecs of the columns of one table, until an operator changes it."""

    __slots__ = (
        "__weakref__",
        "_are_kept",
        "_on_refused",
        "names",
        "readable",
        "table",
        "writable",
    )

    def __init__(
        self, table: str, names: CodecNames, on_refused: Callable[[], None] = lambda: None
    ) -> None:
        """`on_refused` is called, in any thread, when a program declares another codec: what is
        known here may be older than a change, of which no tablet tells who never gets there."""
        self._on_refused = on_refused
        self.table = table
        """Its name, for errors."""
        self._are_kept = True
        self.names = names
        self.readable: dict[bytes, Readable[Any]] = {}
        """By name: a column that agrees with its codec, or has none to agree with."""
        self.writable: dict[bytes, Readable[Any]] = {}
        """By name: a column that agrees with its codec, and needs no declaration."""

    @classmethod
    def unknown(cls) -> TableCodecs:
        """Codecs of a table whose codecs do not matter."""
        codecs = cls("", CodecNames())
        codecs._are_kept = False
        return codecs

    def learn(self, names: CodecNames) -> None:
        """Adds what was declared meanwhile. Nothing that is known becomes different."""
        more = CodecNames(self.names.key or names.key, {**names.columns, **self.names.columns})
        if more != self.names:
            self.names = more
            self.readable.clear()  # some may have been read before anything was declared

    def require_key(self, table: Table[Any]) -> None:
        """Raises `SchemaError` if the program reads row keys that another codec has written."""
        declared, known = name_of(table.key), self.names.key
        if known and declared not in ("", known, _RAW):
            raise self._other(None, known, declared)

    def require_readable(self, column: Readable[Any]) -> None:
        """Raises `SchemaError` if the program reads what another codec has written."""
        self.require_key(column.table)
        declared, known = column.codec.name, self.names.columns.get(column.name)
        if known is not None and declared not in ("", known, _RAW):
            raise self._other(column.name, known, declared)
        self._remember(self.readable, column)

    def require_family(self, family: Family[Any], names: Iterable[bytes]) -> None:
        """Raises `SchemaError` if a program reads as a family what was declared as a column, with
        another codec. Columns that were written as a family's have none that is kept."""
        self.require_key(family.table)
        declared = family.codec.name
        if declared in ("", _RAW):
            return
        for name in self.names.columns.keys() & set(names):
            if self.names.columns[name] != declared:
                raise self._other(name, self.names.columns[name], declared)

    def require(self, table: Table[Any], columns: Iterable[object] | None) -> None:
        """Raises `SchemaError` if other codecs have written the row keys or any of the columns."""
        self.require_key(table)
        for column in columns or ():
            if isinstance(column, Column):
                self.require_readable(column)

    def is_declared(self, column: Readable[Any]) -> bool:
        """True if the column may be written; if not, its codec has to be declared first.

        Raises `SchemaError` if it has another codec.
        """
        more = self.undeclared(column)
        if more is None:
            self._remember(self.writable, column)
        return more is None

    def undeclared(self, column: Readable[Any]) -> pb.Codecs | None:
        """The codec to declare before the column is written; None if there is nothing."""
        key, name = name_of(column.table.key), column.codec.name
        known_key, known = self.names.key, self.names.columns.get(column.name)
        if key and known_key and key != known_key:
            raise self._other(None, known_key, key)
        if name and known is not None and name != known:
            raise self._other(column.name, known, name)
        if not self._are_kept or self.table.startswith(INTERNAL_PREFIX):
            return None
        more = pb.Codecs(key="" if known_key else key)
        is_kept = not column.is_of_family and len(self.names.columns) < COLUMNS_KEPT_MAX
        if name and known is None and is_kept:
            more.columns.add(column=column.name, codec=name)
        return more if more.key or more.columns else None

    def require_unchanged(self, now: TableCodecs, columns: set[bytes]) -> None:
        """Raises `SchemaError` if what was written under these names has other names now."""
        if self.names.key and now.names.key and self.names.key != now.names.key:
            raise self._changed("the codec of the row keys", self.names.key, now.names.key)
        for column in columns:
            before, after = self.names.columns.get(column), now.names.columns.get(column)
            if before and after and before != after:
                what = f"the codec of column {column.decode(errors='backslashreplace')!r}"
                raise self._changed(what, before, after)

    def _other(self, column: bytes | None, known: str, declared: str) -> SchemaError:
        self._on_refused()
        return other_codec(self.table, column, known, declared)

    def _changed(self, what: str, before: str, after: str) -> SchemaError:
        return SchemaError(
            f"table {self.table!r}: {what} was changed from {before} to {after} while the "
            "transaction was running; nothing was committed"
        )

    @staticmethod
    def _remember(known: dict[bytes, Readable[Any]], column: Readable[Any]) -> None:
        if len(known) >= COLUMNS_KEPT_MAX:
            known.clear()  # names of columns may be data
        known[column.name] = column
