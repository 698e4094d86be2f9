"""Tables, columns and rows, as programs declare and read them.

    accounts = Table("accounts")                            # rows are str
    balance = accounts.column("balance", codecs.integer)    # Column[int, str]

Nothing here talks to a cluster: a table is a name and a codec for its row keys, and a column is a
name and a codec for its values. Tables must be created; columns exist once something is written to
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

from percolator import codecs
from percolator.codecs import Codec, KeyCodec
from percolator.codecs.indexes import (
    INDEX_BYTES_MAX,
    INDEX_COLUMNS_MAX,
    IndexDefinition,
    require_indexable,
)
from percolator.codecs.names import COLUMN_BYTES_MAX
from percolator.codecs.readable import quoted
from percolator.codecs.values import after_prefix, require_key_codec
from percolator.conditions import Condition, compared, listed_operands
from percolator.errors import InvalidArgument, SchemaError, UsageError
from percolator.v1.cells_pb2 import RowFilter

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
K = TypeVar("K")
D = TypeVar("D")
# The row keys of a column's table: `Column[int]` is a column of any table. Type checkers know
# defaults, and `typing` does only from Python 3.13 on.
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    R = TypeVarWithDefault("R", default=Any)
else:
    R = TypeVar("R")

ROW_BYTES_MAX = 64 << 10
"""The longest row that a tablet server stores, however it is configured."""
OBSERVER_BYTES_MAX = 64
TABLE_BYTES_MAX = 255
INTERNAL_PREFIX = "percolator."
"""Names of Percolator's own tables begin with it. Only Percolator creates such tables."""
DEAD_LETTERS_NAME = INTERNAL_PREFIX + "dead-letters"
SHARED_NAME = INTERNAL_PREFIX + "shared"
CATALOGUES_NAME = INTERNAL_PREFIX + "catalogues"
SINKS_NAME = INTERNAL_PREFIX + "sinks"
INTERNAL_TABLES = frozenset({CATALOGUES_NAME, DEAD_LETTERS_NAME, SHARED_NAME, SINKS_NAME})


def _require_flag(where: str, name: str, flag: object) -> None:
    """Refuses what is no bool: a text such as "no" would count as true."""
    if not isinstance(flag, bool):
        raise SchemaError(f"{where}: {name} must be a bool, got {type(flag).__name__}")


def _name(what: str, name: object, bytes_max: int) -> bytes:
    try:
        encoded = name.encode() if isinstance(name, str) else name
    except UnicodeEncodeError as error:
        raise SchemaError(
            f"the {what} name {name!r} cannot be encoded as UTF-8: {error.reason}"
        ) from None
    if not isinstance(encoded, bytes) or not 1 <= len(encoded) <= bytes_max:
        article = "an" if what == "index" else "a"
        shown = quoted(name) if isinstance(name, bytes) else repr(name)
        raise SchemaError(f"{article} {what} name must have 1 to {bytes_max} bytes, got {shown}")
    return encoded


class Table(Generic[K]):
    """A table, identified by its name: two objects with the same name mean the same table.

    >>> accounts = Table("accounts")                      # rows are text
    >>> events = Table("events", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
    """

    __slots__ = ("indexes", "key", "name")

    key: KeyCodec[K]
    indexes: dict[str, Index[K]]
    """By name: those that the program has declared. A table is created with them."""

    @overload
    def __init__(self: Table[str], name: str) -> None: ...
    @overload
    def __init__(self, name: str, *, key: KeyCodec[K]) -> None: ...
    def __init__(self, name: Any, *, key: Any = codecs.text) -> None:
        if not isinstance(name, str):
            raise SchemaError(f"a table name must be a str, got {type(name).__name__}")
        _name("table", name, TABLE_BYTES_MAX)
        require_key_codec(key, f"table {name!r}")
        self.name = name
        self.key = key
        self.indexes = {}

    def column(
        self,
        name: str | bytes,
        codec: Codec[T],
        *,
        indexed: bool = False,
        unique: bool = False,
    ) -> Column[T, K]:
        """A column of this table, whose values `codec` reads and writes.

        If it is `indexed`, the table has an index over it, of the same name. If it is `unique`, no
        two rows have the same value in it, and it is indexed, too.
        """
        column: Column[T, K] = Column(self, name, codec)
        _require_flag(f"column {name!r}", "indexed", indexed)
        _require_flag(f"column {name!r}", "unique", unique)
        if indexed or unique:
            try:
                text = column.name.decode()
            except UnicodeDecodeError:
                raise SchemaError(
                    f"column {column.name!r} cannot give its name to an index, since it is not "
                    "text: use table.index"
                ) from None
            self.index(text, column, unique=unique)
        return column

    def index(self, name: str, *columns: Column[Any], unique: bool = False) -> Index[K]:
        """An index of this table over one or several columns, in the order in which values are
        compared. If it is `unique`, no two rows have the same values in all of them.

        >>> by_city = customers.index("by city", city, joined)
        """
        made = Index(self, name, columns, unique=unique)
        known = self.indexes.setdefault(name, made)
        if not known.definition().declares_same(made.definition()):
            raise SchemaError(
                f"table {self.name!r} has another index {name!r}: {known!r}, not {made!r}"
            )
        return known

    def family(self, prefix: str | bytes, codec: Codec[T]) -> Family[T]:
        """All columns of this table whose names begin with `prefix`, and whose values `codec` reads
        and writes."""
        return Family(self, prefix, codec)

    def __repr__(self) -> str:
        return f"Table({self.name!r}, key={self.key!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class Readable(Generic[T_co, R]):
    """A column for reading: a column of `int` is accepted where one of `int | None` is expected."""

    __slots__ = ("codec", "is_of_family", "name", "table")

    if not TYPE_CHECKING:

        def __class_getitem__(cls, types: object) -> object:
            """`Column[int]` in an annotation that is evaluated: see `R`."""
            return super().__class_getitem__(types if isinstance(types, tuple) else (types, Any))

    table: Table[Any]
    name: bytes
    codec: Codec[Any]
    is_of_family: bool
    """Made by a family: its name is data, so that there may be any number of them."""


class Column(Readable[T, R], Generic[T, R]):
    """A column of a table: a name of 1 to 255 bytes ("money:balance" is just a name)."""

    __slots__ = ()

    def __init__(self, table: Table[Any], name: str | bytes, codec: Codec[T]) -> None:
        self.table = table
        self.is_of_family = False
        self.name = _name("column", name, COLUMN_BYTES_MAX)
        if self.name[0] == 0:
            raise SchemaError(
                f"column {self.name!r} is reserved: a name must not begin with a zero byte"
            )
        if not isinstance(codec, Codec):
            raise SchemaError(f"a column's codec must be a Codec, got {codec!r}")
        self.codec = codec

    # Conditions, for `where` in scans. `==` compares columns, since they are keys of dictionaries.

    def __lt__(self, value: T) -> Condition:
        return compared(self, RowFilter.KIND_LESS, (value,))

    def __le__(self, value: T) -> Condition:
        return compared(self, RowFilter.KIND_AT_MOST, (value,))

    def __gt__(self, value: T) -> Condition:
        return compared(self, RowFilter.KIND_GREATER, (value,))

    def __ge__(self, value: T) -> Condition:
        return compared(self, RowFilter.KIND_AT_LEAST, (value,))

    def equals(self, value: T) -> Condition:
        """Holds for rows with this value in the column."""
        return compared(self, RowFilter.KIND_EQUAL, (value,))

    def differs_from(self, value: T) -> Condition:
        """Holds for rows with another value in the column; not for rows without one."""
        return compared(self, RowFilter.KIND_NOT_EQUAL, (value,))

    def is_in(self, values: Iterable[T]) -> Condition:
        """Holds for rows with one of these values in the column."""
        return compared(self, RowFilter.KIND_ONE_OF, listed_operands(values))

    def startswith(self, prefix: T) -> Condition:
        """Holds for rows whose text, or raw bytes, in the column begin with `prefix`."""
        return compared(self, RowFilter.KIND_PREFIX, (prefix,))

    def is_null(self) -> Condition:
        """Holds for rows without a value in the column."""
        return compared(self, RowFilter.KIND_NULL, ())

    def is_not_null(self) -> Condition:
        """Holds for rows with a value in the column."""
        return compared(self, RowFilter.KIND_NOT_NULL, ())

    def __repr__(self) -> str:
        return f"Column({self.table.name!r}, {self.name!r}, {self.codec!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Column) and other.name == self.name and other.table == self.table

    def __hash__(self) -> int:
        return hash((self.table.name, self.name))


class Index(Generic[K]):
    """An index of a table, which leads from values of columns to the rows that have them.

    A program declares it with `Table.column` or `Table.index`. Rows without a value in one of the
    columns are not in it.
    """

    __slots__ = ("columns", "name", "table", "unique")

    def __init__(
        self,
        table: Table[K],
        name: str,
        columns: Sequence[Column[Any]],
        *,
        unique: bool = False,
    ) -> None:
        if not isinstance(name, str):
            raise SchemaError(f"an index name must be a str, got {type(name).__name__}")
        _name("index", name, INDEX_BYTES_MAX)
        if not name.isprintable() or name != name.strip():
            raise SchemaError(
                f"the index name {name!r} has unprintable characters, or a space at either end"
            )
        _require_flag(f"index {name!r}", "unique", unique)
        if not 1 <= len(columns) <= INDEX_COLUMNS_MAX:
            raise SchemaError(
                f"index {name!r}: expected 1 to {INDEX_COLUMNS_MAX} columns, got {len(columns)}"
            )
        listed: Sequence[object] = columns
        for place, column in enumerate(listed):
            if not isinstance(column, Column) or column.table != table:
                raise SchemaError(
                    f"index {name!r}: {column!r} is not a column of table {table.name!r}"
                )
            if column.is_of_family:
                raise SchemaError(
                    f"index {name!r}: {column!r} is of a family, and only single columns can be "
                    "indexed"
                )
            if column in listed[:place]:
                raise SchemaError(f"index {name!r}: column {quoted(column.name)} is named twice")
            require_indexable(column.codec.name, column.name)
        self.table = table
        self.name = name
        self.columns = tuple(columns)
        self.unique = unique

    def definition(self) -> IndexDefinition:
        """The index as a table's schema keeps it."""
        columns = tuple((column.name, column.codec.name) for column in self.columns)
        return IndexDefinition(self.name, columns, self.unique)

    def __repr__(self) -> str:
        names = ", ".join(repr(column.name) for column in self.columns)
        return f"Index({self.table.name!r}, {self.name!r}, {names}{', unique' * self.unique})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and other.name == self.name and other.table == self.table

    def __hash__(self) -> int:
        return hash((self.table.name, self.name))


class Family(Generic[T]):
    """The columns of a table whose names begin with one prefix, with values of one type.

    Reads take it in place of a column, for rows whose columns are not known in advance: a column
    for each edge, say.

    >>> edges = graph.family("edge:", codecs.integer)
    >>> tx.set("hub", edges.column("bob"), 3)             # the column "edge:bob"
    >>> for row in tx.scan(graph, columns=[edges]):
    ...     print(row.key, row.family(edges))             # hub {'bob': 3}
    """

    __slots__ = ("codec", "prefix", "table")

    def __init__(self, table: Table[Any], prefix: str | bytes, codec: Codec[T]) -> None:
        first = Column(table, prefix, codec)  # which refuses what no column's name can be
        self.table = table
        self.prefix = first.name
        self.codec = codec

    def column(self, name: str | bytes) -> Column[T]:
        """The column whose name is the prefix and then this."""
        rest = _name("column", name, COLUMN_BYTES_MAX)
        made = Column(self.table, self.prefix + rest, self.codec)
        made.is_of_family = True
        return made

    def __repr__(self) -> str:
        return f"Family({self.table.name!r}, {self.prefix!r}, {self.codec!r})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Family) and other.prefix == self.prefix and other.table == self.table
        )

    def __hash__(self) -> int:
        return hash((self.table.name, self.prefix))


# To bytes and back.
#
# A codec knows only the value, and its "expected str, got int" is of little use to a program that
# writes hundreds of cells: these functions add the table, the row and the column.

_SHOWN_MAX = 100


def encoded_value(column: Readable[T], row: object, value: T) -> bytes:
    """The stored bytes of a value. Raises `SchemaError` if it does not fit the column."""
    try:
        data: bytes = column.codec.encode(value)
    except SchemaError as error:
        raise _at(error, column.table, "row", row, column) from None
    return data


def decoded_value(column: Readable[T], row: object, data: bytes) -> T:
    """The value of stored bytes. Raises `SchemaError` if another codec has written them."""
    try:
        value: T = column.codec.decode(data)
    except SchemaError as error:
        raise _at(error, column.table, "row", row, column) from None
    return value


def encoded_key(
    table: Table[K], key: K, *, field: str = "row", column: Readable[Any] | None = None
) -> bytes:
    """The row of a key. Raises `SchemaError` if the key does not fit the table."""
    try:
        return table.key.encode(key)
    except SchemaError as error:
        raise _at(error, table, field, key, column) from None


def encoded_prefix(table: Table[K], prefix: K) -> bytes:
    """The bytes with which rows begin. Raises `SchemaError` if it does not fit the table."""
    try:
        return table.key.encode_prefix(prefix)
    except SchemaError as error:
        raise _at(error, table, "prefix", prefix) from None


def decoded_key(table: Table[K], row: bytes) -> K:
    """The key of a row. Raises `SchemaError` if another codec has written it."""
    try:
        return table.key.decode(row)
    except SchemaError as error:
        raise _at(error, table, "row", row) from None


def _at(
    error: SchemaError,
    table: Table[Any],
    field: str,
    shown: object,
    column: Readable[Any] | None = None,
) -> SchemaError:
    try:
        text = repr(shown)
    except ValueError:  # Python shows no number with more than 4,300 digits
        text = f"({type(shown).__name__})"
    if len(text) > _SHOWN_MAX:
        text = f"{text[:_SHOWN_MAX]}..."
    where = f"table {table.name!r}, {field} {text}"
    if column is not None:
        where += f", column {column.name.decode(errors='backslashreplace')!r}"
    return SchemaError(f"{where}: {error.message}")


Columns = Sequence[Column[Any] | Family[Any]]
Range = tuple[bytes, bytes]


def stored_names(
    table: Table[Any], columns: Columns | None
) -> tuple[list[bytes] | None, tuple[bytes, ...]]:
    """The names of the columns, None for all, and the prefixes of the families."""
    if columns is None:
        return None, ()
    for column in columns:
        if column.table.name != table.name:
            raise SchemaError(f"{column!r} is not a column of table {table.name!r}")
    names = [column.name for column in columns if isinstance(column, Column)]
    return names, tuple(column.prefix for column in columns if isinstance(column, Family))


def stored_range(table: Table[K], start: K | None, end: K | None, prefix: K | None) -> Range:
    """The rows from the first one, and before the last one: empty if there is no last one."""
    first = b"" if start is None else encoded_key(table, start, field="start")
    last = b"" if end is None else _end(encoded_key(table, end, field="end"))
    if prefix is not None:
        begin = encoded_prefix(table, prefix)
        after = after_prefix(begin)
        first = max(first, begin)
        last = min(last, after) if last and after else last or after
    return first, last


def _end(row: bytes) -> bytes:
    """Refuses an empty row as the end of a range: it would mean "to the last row"."""
    if not row:
        raise InvalidArgument("end", "is empty, and no row is before the empty row")
    return row


# Rows.


class KnownCodecs(Protocol):
    """The codecs of a table, as its schema keeps them (percolator/routing/table_codecs.py)."""

    readable: dict[bytes, Readable[Any]]

    def require_readable(self, column: Readable[Any]) -> None:
        """Raises `SchemaError` if another codec has written the column."""
        ...

    def require_family(self, family: Family[Any], names: Iterable[bytes]) -> None:
        """Raises `SchemaError` if another codec has written one of the family's columns."""
        ...


class Row(Generic[K]):
    """One row of a snapshot: a value for each column that has one.

    >>> row = snapshot.get_many(accounts, ["bob"])[0]
    >>> row.key, row[balance], row.get(owner, "unknown"), balance in row
    """

    __slots__ = ("_cells", "_codecs", "_columns", "_table", "key")

    def __init__(
        self,
        table: Table[K],
        key: K,
        cells: Mapping[bytes, bytes],
        columns: Sequence[Column[Any] | Family[Any]] | None = None,
        codecs: KnownCodecs | None = None,
    ) -> None:
        """`columns` are those that were asked for; None if they were all. `codecs` are those of the
        table, if they are known."""
        self._codecs = codecs
        self._table = table
        self.key = key
        self._cells = cells
        self._columns = columns

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what knows the codecs: that is the connection's, and checks them there."""
        return Row, (self._table, self.key, dict(self._cells), self._columns)

    def __getitem__(self, column: Readable[T]) -> T:
        """The value. Raises `KeyError` if the row has no such cell."""
        self._check(column)
        try:
            data = self._cells[column.name]
        except KeyError:
            raise KeyError(f"row {self.key!r} has no {column!r}") from None
        return decoded_value(column, self.key, data)

    @overload
    def get(self, column: Readable[T]) -> T | None: ...
    @overload
    def get(self, column: Readable[T], default: D) -> T | D: ...
    def get(self, column: Readable[T], default: Any = None) -> Any:
        """The value, or `default` if the row has no such cell."""
        self._check(column)
        data = self._cells.get(column.name)
        return default if data is None else decoded_value(column, self.key, data)

    def __contains__(self, column: Readable[Any]) -> bool:
        self._check(column)
        return column.name in self._cells

    def __iter__(self) -> Iterator[bytes]:
        """The names of the columns that have a value."""
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def __bool__(self) -> bool:
        """True if the row has any cell."""
        return bool(self._cells)

    def items(self) -> list[tuple[Column[Any], Any]]:
        """The columns that have a value, and their values, in the order in which they were read.

        Raises `UsageError` for a row that was read without `columns`: it knows no codecs for its
        cells.
        """
        if self._columns is None:
            raise UsageError(
                "the row was read without columns, so their types are not known: pass columns to "
                "get_many or scan, or use raw()"
            )
        found: dict[Column[Any], bytes] = {}
        for asked in self._columns:
            for column in self._of_family(asked) if isinstance(asked, Family) else (asked,):
                if column.name in self._cells:
                    found.setdefault(column, self._cells[column.name])
        return [(column, decoded_value(column, self.key, data)) for column, data in found.items()]

    def family(self, family: Family[T]) -> dict[str, T]:
        """The values of a family's columns by what follows the prefix in their names, in order.

        Raises `SchemaError` if that is not text: `items()` has such columns, too.
        """
        self._check(family, Family)
        found: dict[str, T] = {}
        for column in self._of_family(family):
            try:
                name = column.name[len(family.prefix) :].decode()
            except UnicodeDecodeError:
                raise SchemaError(
                    f"table {self._table.name!r}, row {self.key!r}: the name of column "
                    f"{column.name!r} is not text after {family.prefix!r}; use items()"
                ) from None
            found[name] = decoded_value(column, self.key, self._cells[column.name])
        return found

    def _of_family(self, family: Family[T]) -> list[Column[T]]:
        """The family's columns that have a value, in order."""
        names = sorted(name for name in self._cells if name.startswith(family.prefix))
        if self._codecs is not None:
            self._codecs.require_family(family, names)
        return [Column(family.table, name, family.codec) for name in names]

    def raw(self) -> dict[bytes, bytes]:
        """The stored bytes by column name, for programs that do not know the columns."""
        return dict(self._cells)

    def _check(self, asked: object, kind: type[Column[Any] | Family[Any]] = Column) -> None:
        if not isinstance(asked, kind) or asked.table.name != self._table.name:
            raise SchemaError(
                f"{asked!r} is not a {kind.__name__.lower()} of table {self._table.name!r}"
            )
        codecs = self._codecs
        if codecs is None or not isinstance(asked, Column):
            return
        if codecs.readable.get(asked.name) is not asked:
            codecs.require_readable(asked)

    def __repr__(self) -> str:
        return f"Row({self.key!r}, {sorted(self._cells)})"
