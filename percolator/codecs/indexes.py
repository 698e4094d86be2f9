"""Secondary indexes, as a table's schema keeps them, and the entries that they consist of.

An index has a table of its own. Each row of the indexed table that has a value in every column of
the index has one entry there:

    row      each value, in a form whose bytes have the order of the values, one after the other;
             then the row key, unless the index is unique
    column   `ENTRY`
    value    the row key

Any client can make entries from stored bytes alone, since the schema names the codecs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, partial
from typing import Any

from percolator import codecs
from percolator.codecs.readable import quoted, value_codec
from percolator.errors import SchemaError
from percolator.v1 import master_pb2 as pb
from percolator.v1.tabletserver_pb2 import ColumnTtl

INDEX_BYTES_MAX = 64
"""The longest name of an index."""
INDEX_COLUMNS_MAX = 16
INDEXES_MAX = 64
"""The most indexes of one table."""
ENTRY = b"row"
"""The one column of an index's table."""

_SIGN = 1 << 63
_ALL = (1 << 64) - 1
_DECIMAL_BYTES = 16


@dataclass(frozen=True)
class IndexDefinition:
    """An index of a table: the columns whose values lead to rows."""

    name: str
    columns: tuple[tuple[bytes, str], ...]
    """Each with the name of its codec."""
    unique: bool = False
    """No two rows have the same values."""
    table_id: int = 0
    """The table that has its entries."""
    ready_at: int = 0
    """When it was created together with its table: then it is complete from the beginning. 0 for
    one that was added: a cell among its entries says when it is complete (protocol/indexes.py)."""
    expiring: frozenset[bytes] = frozenset()
    """Its columns whose values expire, as clients know from the times to live of the table."""

    @classmethod
    def of(cls, message: pb.Index, ttls: Iterable[ColumnTtl] = ()) -> IndexDefinition:
        """As it is stored and sent, in a table with these times to live."""
        columns = tuple((one.column, one.codec) for one in message.columns)
        expiring = frozenset(one.column for one in ttls).intersection(name for name, _ in columns)
        return cls(
            message.name, columns, message.unique, message.table_id, message.ready_at, expiring
        )

    def message(self) -> pb.Index:
        """As it is stored and sent."""
        return pb.Index(
            name=self.name,
            columns=[pb.ColumnCodec(column=column, codec=codec) for column, codec in self.columns],
            unique=self.unique,
            table_id=self.table_id,
            ready_at=self.ready_at,
        )

    @cached_property
    def names(self) -> tuple[bytes, ...]:
        """The names of its columns."""
        return tuple(column for column, _ in self.columns)

    def declares_same(self, other: IndexDefinition) -> bool:
        """True if both have the same columns, codecs and uniqueness."""
        return (self.columns, self.unique) == (other.columns, other.unique)

    def parts(self, values: Sequence[bytes]) -> bytes:
        """The part of an entry's row that stands for these stored values of its first columns.

        Raises `SchemaError` for bytes that a column's codec cannot read.
        """
        return b"".join(
            [
                entry_part(codec, value, column)
                for (column, codec), value in zip(self.columns, values, strict=False)
            ]
        )

    def entry(self, row: bytes, cells: Mapping[bytes, bytes | None]) -> bytes | None:
        """The row of the entry for a row with these stored values by column. None if it has none,
        since one of the values is missing."""
        values: list[bytes] = []
        for column in self.names:
            value = cells.get(column)
            if value is None:
                return None
            values.append(value)
        parts = self.parts(values)
        return parts if self.unique else parts + row


def entry_part(codec: str, value: bytes, column: bytes) -> bytes:
    """A stored value in a form whose bytes have the order of values, and show where they end."""
    convert = _converter(codec)
    if convert is None:
        raise SchemaError(f"column {quoted(column)}: values of codec {codec} cannot be indexed")
    try:
        return convert(value)
    except SchemaError as error:
        raise SchemaError(f"column {quoted(column)}: {error.message}") from None


def require_indexable(codec: str, column: bytes) -> None:
    """Refuses a column whose values have no order that an index could keep."""
    if not codec:
        raise SchemaError(f"column {quoted(column)} has no codec that a schema could keep")
    if _converter(codec) is None:
        raise SchemaError(
            f"column {quoted(column)}: values of codec {codec} have no order, so they cannot be "
            "indexed; an index kept by an observer (percolator.recipes.Index) can compute values"
        )


def _converter(codec: str) -> Callable[[bytes], bytes] | None:
    known = _CONVERTERS.get(codec)
    if known is None and codec.startswith("decimal("):
        found = value_codec(codec)
        known = None if found is None else partial(_decimal_part, found)
    return known


def _checked(codec: codecs.Codec[Any], value: bytes) -> bytes:
    codec.decode(value)
    return value


def _number_part(codec: codecs.Codec[Any], value: bytes) -> bytes:
    """A signed number: negative ones first."""
    codec.decode(value)
    return (int.from_bytes(value, "big") ^ _SIGN).to_bytes(8, "big")


def _float_part(value: bytes) -> bytes:
    """Negative numbers in the opposite order of their bytes, and before the others."""
    number = codecs.float.decode(value)
    bits = int.from_bytes(struct.pack(">d", number + 0.0), "big")  # -0.0 equals 0.0
    return (bits ^ (_ALL if bits & _SIGN else _SIGN)).to_bytes(8, "big")


def _decimal_part(codec: codecs.Codec[Decimal], value: bytes) -> bytes:
    sign, digits, _ = codec.decode(value).as_tuple()  # always with all places
    number = int("".join(map(str, digits))) * (-1 if sign else 1)
    return (number + (1 << (8 * _DECIMAL_BYTES - 1))).to_bytes(_DECIMAL_BYTES, "big")


_CONVERTERS: dict[str, Callable[[bytes], bytes]] = {
    "raw": codecs.raw.encode_part,
    "text": lambda value: codecs.text.encode_part(codecs.text.decode(value)),
    "integer": partial(_number_part, codecs.integer),
    "timestamp": partial(_number_part, codecs.timestamp),
    "date": partial(_number_part, codecs.date),
    "float": _float_part,
    "boolean": partial(_checked, codecs.boolean),
    "uuid": partial(_checked, codecs.uuid),
}


def indexes_of(
    messages: Iterable[pb.Index], ttls: Sequence[ColumnTtl] = ()
) -> tuple[IndexDefinition, ...]:
    """Ordered by name, as tables keep them."""
    found = (IndexDefinition.of(one, ttls) for one in messages)
    return tuple(sorted(found, key=lambda one: one.name))
