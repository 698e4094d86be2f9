"""The rows of an index, and how they are kept: one transaction brings those of one row up to date.

i VALUE KEY     an entry: the row with this key has this value
r KEY           the values for which the row has entries
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from percolator import aio, codecs
from percolator.codecs import KeyCodec
from percolator.errors import InvalidArgument, SchemaError
from percolator.limits import Limits
from percolator.schema import Column, Table

K = TypeVar("K")
"""Keys of the indexed table."""
T = TypeVar("T")
"""Values of its column."""
W = TypeVar("W")
"""Values in the index."""

ENTRY, INDEXED = b"i", b"r"
_ROW_BYTES_MAX = Limits().row_bytes_max


class IndexEntries(Generic[K, T, W]):
    """Makes, reads and writes the rows of one index."""

    def __init__(
        self,
        name: str,
        column: Column[T],
        value: KeyCodec[W],
        values: Callable[[T], Iterable[W]] | None,
    ) -> None:
        self.column = column
        self.table = Table(name, key=codecs.raw)
        self.entry = self.table.column("entry", codecs.raw)
        self.indexed = self.table.column("indexed", codecs.raw)
        self._value = value
        self._values = values

    async def recorded(self, tx: aio.Transaction, row: K) -> frozenset[bytes]:
        """The values that the row has in the index, as its cell there records them."""
        indexed = INDEXED + self.row_part(row)
        return self.parts_in(await tx.get(indexed, self.indexed, default=b""))

    async def write(
        self,
        tx: aio.Transaction,
        row: K,
        value: T | None,
        before: frozenset[bytes],
        puts: Sequence[tuple[object, Column[Any], Any]] = (),
        deletes: Sequence[tuple[object, Column[Any]]] = (),
    ) -> None:
        """Brings the index entries of one row up to date, together with these cells.

        All is written, or nothing: a column without its entries could be committed. A cell per row
        records its current entries, and every update writes that cell. So an observer run, a
        backfill and a writer conflict, and `values` may be redefined.

        An entry that stays is not written, unless entries expire: it would be gone before the
        column, whose time begins anew.
        """
        key, after = self.row_part(row), self.parts(row, value)
        indexed = INDEXED + key
        stays = before
        if not after.isdisjoint(before) and await tx.internal.expires(self.entry):
            stays = frozenset()
        added: list[tuple[object, Column[Any], Any]] = [
            (ENTRY + part + key, self.entry, b"") for part in sorted(after - stays)
        ]
        removed: list[tuple[object, Column[Any]]] = [
            (ENTRY + part + key, self.entry) for part in sorted(before - after)
        ]
        if after:
            added.append((indexed, self.indexed, b"".join(sorted(after))))
        else:
            removed.append((indexed, self.indexed))
        try:
            await tx.internal.write_together([*puts, *added], [*deletes, *removed])
        except InvalidArgument as error:
            raise InvalidArgument(error.field, f"{error.reason} ({self._named(row)})") from None

    # ------------------------------------------------------------------ rows and values as bytes

    def row_part(self, row: K) -> bytes:
        """The key of an indexed row, as it stands in the index."""
        try:
            part: bytes = self.column.table.key.encode_part(row)
        except SchemaError as error:
            raise SchemaError(f"{self._named(row)}: {error.message}") from None
        return part

    def _named(self, row: K) -> str:
        return f"index {self.table.name!r}, row {row!r:.100}"

    def value_part(self, value: W) -> bytes:
        """A value, as it stands in the index."""
        try:
            part: bytes = self._value.encode_part(value)
        except SchemaError as error:
            raise SchemaError(
                f"index {self.table.name!r}, value {value!r:.100}: {error.message}"
            ) from None
        return part

    def parts(self, row: K, value: T | None) -> frozenset[bytes]:
        """The values of a row, as they stand in the index."""
        if value is None:
            return frozenset()
        values: Any = (value,)
        if self._values is not None:
            try:
                values = self._values(value)
            except Exception as error:  # whatever the program's function raises
                cause = f"{type(error).__name__}: {error}"
                raise SchemaError(f"{self._named(row)}: values raised {cause:.200}") from error
        # A text is an iterable, too: of its letters, which nobody wants to look up.
        if not isinstance(values, Iterable) or isinstance(values, str | bytes):
            raise SchemaError(
                f"{self._named(row)}: values returned {values!r:.100}, not several values"
            )
        return frozenset(self._part_for(row, one) for one in values)

    def _part_for(self, row: K, value: W) -> bytes:
        """A value of a row, if an entry has room for both."""
        try:
            part = self.value_part(value)
        except SchemaError as error:
            raise SchemaError(f"row {row!r:.100}: {error.message}") from None
        length = len(ENTRY) + len(part) + len(self.row_part(row))
        if length > _ROW_BYTES_MAX:
            raise SchemaError(
                f"{self._named(row)}, value {value!r:.100}: "
                f"the entry has {length} bytes, at most {_ROW_BYTES_MAX}"
            )
        return part

    def parts_in(self, stored: bytes) -> frozenset[bytes]:
        """The values that stand one after the other in a row's cell."""
        parts, start = [], 0
        while start < len(stored):
            _, end = self._value.decode_part(stored, start)
            parts.append(stored[start:end])
            start = end
        return frozenset(parts)

    def entry_of(self, row: bytes) -> tuple[W, K]:
        """The value and the key of an entry."""
        value, end = self._value.decode_part(row, len(ENTRY))
        key, _ = self.column.table.key.decode_part(row, end)
        return value, key

    def recorded_key(self, row: bytes) -> K:
        """The key in a row that records what a row is indexed for."""
        key: K = self.column.table.key.decode_part(row, len(INDEXED))[0]
        return key
