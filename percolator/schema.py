"""Tables, columns and rows, as programs name them.

    accounts = Table("accounts")                            # rows are str
    balance = accounts.column("balance", codecs.integer)    # Column[int]

Nothing here talks to a cluster: a table is a name and a codec for its row keys, a column a name and
a codec for its values. Tables have to be created; columns exist when something is written to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar, overload

from percolator import codecs
from percolator.codecs import Codec, KeyCodec
from percolator.errors import SchemaError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
K = TypeVar("K")
D = TypeVar("D")

COLUMN_BYTES_MAX = 255
OBSERVER_BYTES_MAX = 64
TABLE_BYTES_MAX = 255


def _name(what: str, name: object, bytes_max: int) -> bytes:
    encoded = name.encode() if isinstance(name, str) else name
    if not isinstance(encoded, bytes) or not 1 <= len(encoded) <= bytes_max:
        raise SchemaError(f"a {what}'s name has 1 to {bytes_max} bytes, not {name!r}")
    return encoded


class Table(Generic[K]):
    """A table by its name. Two of the same name mean the same table.

    >>> accounts = Table("accounts")                      # rows are text
    >>> events = Table("events", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
    """

    __slots__ = ("key", "name")

    key: KeyCodec[K]

    @overload
    def __init__(self: Table[str], name: str) -> None: ...
    @overload
    def __init__(self, name: str, *, key: KeyCodec[K]) -> None: ...
    def __init__(self, name: Any, *, key: Any = codecs.text) -> None:
        if not isinstance(name, str):
            raise SchemaError(f"a table's name is a str, not {type(name).__name__}")
        _name("table", name, TABLE_BYTES_MAX)
        self.name = name
        self.key = key

    def column(self, name: str | bytes, codec: Codec[T]) -> Column[T]:
        """A column of this table, whose values `codec` reads and writes."""
        return Column(self, name, codec)

    def __repr__(self) -> str:
        return f"Table({self.name!r}, key={self.key!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class Readable(Generic[T_co]):
    """A column, as far as reading goes: one of `int` will do where `int | None` is asked for."""

    __slots__ = ("codec", "name", "table")

    table: Table[Any]
    name: bytes
    codec: Codec[Any]


class Column(Readable[T], Generic[T]):
    """A column of a table: a name of 1 to 255 bytes ("money:balance" is just a name)."""

    __slots__ = ()

    def __init__(self, table: Table[Any], name: str | bytes, codec: Codec[T]) -> None:
        self.table = table
        self.name = _name("column", name, COLUMN_BYTES_MAX)
        if self.name[0] == 0:
            raise SchemaError(f"a column's name does not begin with 00: {self.name!r} is reserved")
        if not isinstance(codec, Codec):
            raise SchemaError(f"a column's codec is a Codec, not {codec!r}")
        self.codec = codec

    def __repr__(self) -> str:
        return f"Column({self.table.name!r}, {self.name!r}, {self.codec!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Column) and other.name == self.name and other.table == self.table

    def __hash__(self) -> int:
        return hash((self.table.name, self.name))


class Row(Generic[K]):
    """What a snapshot shows of one row: a value per column that has one.

    >>> row = snapshot.get_many(accounts, ["bob"])[0]
    >>> row.key, row[balance], row.get(owner, "nobody"), balance in row
    """

    __slots__ = ("_cells", "_table", "key")

    def __init__(self, table: Table[K], key: K, cells: Mapping[bytes, bytes]) -> None:
        self._table = table
        self.key = key
        self._cells = cells

    def __getitem__(self, column: Readable[T]) -> T:
        """Raises `KeyError` when the row has no such cell."""
        self._check(column)
        try:
            data = self._cells[column.name]
        except KeyError:
            raise KeyError(f"row {self.key!r} has no {column!r}") from None
        value: T = column.codec.decode(data)
        return value

    @overload
    def get(self, column: Readable[T]) -> T | None: ...
    @overload
    def get(self, column: Readable[T], default: D) -> T | D: ...
    def get(self, column: Readable[T], default: Any = None) -> Any:
        """The value, or `default` when the row has no such cell."""
        self._check(column)
        data = self._cells.get(column.name)
        return default if data is None else column.codec.decode(data)

    def __contains__(self, column: Readable[Any]) -> bool:
        self._check(column)
        return column.name in self._cells

    def __iter__(self) -> Iterator[bytes]:
        """The names of the columns that have a value."""
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def __bool__(self) -> bool:
        """Whether there is anything in the row."""
        return bool(self._cells)

    def raw(self) -> dict[bytes, bytes]:
        """The stored bytes by column name, for programs that do not know the columns."""
        return dict(self._cells)

    def _check(self, column: object) -> None:
        if not isinstance(column, Column) or column.table.name != self._table.name:
            raise SchemaError(f"{column!r} is not a column of table {self._table.name!r}")

    def __repr__(self) -> str:
        return f"Row({self.key!r}, {sorted(self._cells)})"
