"""The names of a table's codecs, as its schema keeps them: for masters, clients and test databases.

The store knows only bytes. A name that is kept for a column stops a program that would read, or
overwrite, what another codec has written. The first program that writes a column declares its
codec; `percolator tables alter` changes it on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from percolator.codecs.readable import quoted
from percolator.errors import InvalidArgument, SchemaError
from percolator.v1 import master_pb2 as pb

CODEC_BYTES_MAX = 255
COLUMN_BYTES_MAX = 255
"""The longest name of a column."""
COLUMNS_KEPT_MAX = 1_000
"""The most columns whose codecs are kept, in one table. Names of columns may be data, so there may
be any number of them, and every client learns those that are kept."""

_NO_COLUMNS: Mapping[bytes, str] = MappingProxyType({})


@dataclass(frozen=True)
class CodecNames:
    """The codec of a table's row keys, and those of its columns."""

    key: str = ""
    """Empty if no program has declared it."""
    columns: Mapping[bytes, str] = field(default_factory=lambda: _NO_COLUMNS)

    @classmethod
    def of(cls, message: pb.Codecs) -> CodecNames:
        """As they are stored and sent."""
        return cls(message.key, {one.column: one.codec for one in message.columns})

    def message(self) -> pb.Codecs:
        """As they are stored and sent."""
        columns = sorted(self.columns.items())
        return pb.Codecs(
            key=self.key,
            columns=[pb.ColumnCodec(column=column, codec=codec) for column, codec in columns],
        )

    def __bool__(self) -> bool:
        return bool(self.key or self.columns)

    def declared(self, table: str, more: pb.Codecs) -> CodecNames:
        """With what a program declares. Raises `SchemaError` if something has another codec."""
        require_columns("codecs.columns", more.columns)
        if more.key:
            _check_codec("codecs.key", more.key)
        if self.key and more.key and self.key != more.key:
            raise other_codec(table, None, self.key, more.key)
        columns = dict(self.columns)
        for index, one in enumerate(more.columns):
            if not one.codec:
                raise InvalidArgument(f"codecs.columns[{index}].codec", "is missing")
            known = columns.get(one.column)
            if known is not None and known != one.codec:
                raise other_codec(table, one.column, known, one.codec)
            if known is not None or len(columns) < COLUMNS_KEPT_MAX:
                columns[one.column] = one.codec
        return CodecNames(self.key or more.key, columns)

    def changed(self, request: pb.ChangeCodecsRequest) -> CodecNames:
        """With what an operator changes on purpose."""
        require_columns("columns", request.columns)
        key = self.key
        if request.HasField("key"):
            if request.key:
                _check_codec("key", request.key)
            key = request.key
        columns = dict(self.columns)
        for one in request.columns:
            if one.codec:
                columns[one.column] = one.codec
            else:
                columns.pop(one.column, None)
        if len(columns) > COLUMNS_KEPT_MAX:
            raise InvalidArgument(
                "columns", f"{request.table!r} would keep more than {COLUMNS_KEPT_MAX}"
            )
        return CodecNames(key, columns)

    def contradicts(self, other: CodecNames) -> bool:
        """True if something that has a codec here has another, or none, there."""
        if self.key and self.key != other.key:
            return True
        return any(other.columns.get(column) != codec for column, codec in self.columns.items())


def other_codec(table: str, column: bytes | None, known: str, declared: str) -> SchemaError:
    """The error about a program that declares another codec than the table has."""
    if column is None:
        what, option = "row keys", f"--key '{declared}'"
    else:
        name = column.decode(errors="backslashreplace")
        what, option = f"column {name!r}", f"--column '{name}={declared}'"
    return SchemaError(
        f"table {table!r}, {what}: the program declares the codec {declared}, but the table has "
        f"{known}; if the program is right, run `percolator tables alter {table} {option}`"
    )


def require_columns(field: str, columns: Iterable[pb.ColumnCodec]) -> None:
    """Raises `InvalidArgument` unless these are codecs, or none, of different columns."""
    seen: set[bytes] = set()
    for index, one in enumerate(columns):
        where = f"{field}[{index}]"
        if not 0 < len(one.column) <= COLUMN_BYTES_MAX or one.column[0] == 0:
            raise InvalidArgument(
                f"{where}.column",
                f"expected 1 to {COLUMN_BYTES_MAX} bytes, of which the first is not zero",
            )
        if one.column in seen:
            raise InvalidArgument(f"{where}.column", f"{quoted(one.column)} appears twice")
        seen.add(one.column)
        if one.codec:
            _check_codec(f"{where}.codec", one.codec)


def _check_codec(field: str, name: str) -> None:
    if len(name.encode()) > CODEC_BYTES_MAX:
        raise InvalidArgument(field, f"expected at most {CODEC_BYTES_MAX} bytes")
    if not name.isprintable() or name != name.strip():
        raise InvalidArgument(
            field, f"{name!r} has unprintable characters, or a space at either end"
        )
