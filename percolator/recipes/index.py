"""Secondary indexes: from values of a column to the rows that have them.

by_city = Index("customers by city", on=city, value=codecs.text)

by_city.create(db)
by_city.set(tx, "ann", "Rome")              # the column and the index, in one transaction
by_city.find(snapshot, "Rome")              # ["ann"]
by_city.range(snapshot, "A", "N")           # [("Bern", "bob"), ...]
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar, overload

from percolator import aio, codecs
from percolator.arguments import require_function
from percolator.blocking.database import Database
from percolator.blocking.transaction import Transaction
from percolator.codecs import KeyCodec
from percolator.decorators import observes
from percolator.either import (
    AsyncReads,
    BlockingReads,
    on_database,
    on_reads,
    on_transaction,
)
from percolator.errors import InvalidArgument, UsageError
from percolator.key_codec import is_key_codec
from percolator.observers.definition import Observer
from percolator.recipes.index_entries import ENTRY, IndexEntries
from percolator.recipes.index_mending import IndexMending
from percolator.schema import OBSERVER_BYTES_MAX, Column

K = TypeVar("K")
"""Keys of the indexed table."""
T = TypeVar("T")
"""Values of its column."""
W = TypeVar("W")
"""Values in the index."""

_OBSERVER_PREFIX = "index "
_OBSERVED_BYTES_MAX = OBSERVER_BYTES_MAX - len(_OBSERVER_PREFIX)


class Index(Generic[K, T, W]):
    """A table that leads from values of a column to the keys of the rows that have them.

    `by_observer` says which of two ways it is kept in:

    - *In the same transaction* (False): programs write the column with `set` and `delete` of the
      index, and never otherwise. Then the index is exact at every snapshot, and in the transaction
      itself. Writers of different rows do not conflict. After a plain `tx.set`, `tx.delete` or
      `tx.delete_row`, look-ups miss the row's new value and find its old one, until `backfill`:
      the index learns only from `set` and `delete` what the column held before.
    - *By an observer* (True): programs write the column as they like, and a worker runs `observer`,
      which follows within milliseconds. Then a look-up may lead to rows that have just changed:
      read the column before relying on it. `set` and `delete` are refused. Rows that were there
      before the index are indexed, too, once its observer is registered.

    `values` computes a row's values (none, one or many) from its column; by default there is one,
    the column's own. Rows without the column are not in the index.

    `backfill` builds the index over rows that were written before, while programs are at work, and
    `check` compares both; `percolator index backfill` and `percolator index check` are the same as
    commands.
    """

    def __init__(
        self,
        name: str,
        *,
        on: Column[T],
        value: KeyCodec[W],
        values: Callable[[T], Iterable[W]] | None = None,
        by_observer: bool = False,
    ) -> None:
        """`name` is the name of the index's own table, which nothing else may write."""
        if not isinstance(on, Column):
            raise InvalidArgument("on", f"expected a Column, got {type(on).__name__}")
        if not is_key_codec(value):
            raise InvalidArgument("value", f"expected a codec for row keys, got {value!r:.80}")
        if values is not None:
            require_function(values, "values")
        self._entries = IndexEntries[K, T, W](name, on, value, values)
        self._mending = IndexMending(self._entries)
        self.column = on
        self.table = self._entries.table
        """Its table, whose rows are its own business."""
        self.is_kept_by_observer = by_observer
        if by_observer and len(name.encode()) > _OBSERVED_BYTES_MAX:
            # If its observer's name were cut off, two indexes might have the same observer.
            raise InvalidArgument(
                "name",
                f"expected at most {_OBSERVED_BYTES_MAX} bytes for an index that is kept by an "
                f"observer, got {name!r}",
            )

    @overload
    def create(
        self, database: aio.Database, *, exist_ok: bool = False
    ) -> Coroutine[Any, Any, None]: ...
    @overload
    def create(self, database: Database, *, exist_ok: bool = False) -> None: ...
    def create(self, database: Any, *, exist_ok: bool = False) -> Any:
        """Creates the table; registers the observer, if there is one. The indexed table exists."""

        async def body(database: aio.Database) -> None:
            await database.create_table(self.table, exist_ok=exist_ok)
            if self.is_kept_by_observer:
                await database.register_observers([self.observer()])

        return on_database(database, body)

    # ------------------------------------------------------------------ writing

    @overload
    def set(self, tx: aio.Transaction, row: K, value: T) -> Coroutine[Any, Any, None]: ...
    @overload
    def set(self, tx: Transaction, row: K, value: T) -> None: ...
    def set(self, tx: Any, row: K, value: T) -> Any:
        """Writes the column of a row, and the index."""
        self._require_same_transaction("set")
        return on_transaction(tx, self._set, row, value)

    async def _set(self, tx: aio.Transaction, row: K, value: T) -> None:
        async with tx.internal.updating():
            indexed = await self._entries.recorded(tx, row)
            await self._entries.write(tx, row, value, indexed, [(row, self.column, value)])

    @overload
    def delete(self, tx: aio.Transaction, row: K) -> Coroutine[Any, Any, None]: ...
    @overload
    def delete(self, tx: Transaction, row: K) -> None: ...
    def delete(self, tx: Any, row: K) -> Any:
        """Deletes the column of a row, and the row from the index."""
        self._require_same_transaction("delete")
        return on_transaction(tx, self._delete, row)

    async def _delete(self, tx: aio.Transaction, row: K) -> None:
        async with tx.internal.updating():
            indexed = await self._entries.recorded(tx, row)
            await self._entries.write(tx, row, None, indexed, deletes=[(row, self.column)])

    def _require_same_transaction(self, method: str) -> None:
        if self.is_kept_by_observer:
            raise UsageError(
                f"index {self.table.name!r} is kept by an observer: write the column with tx, "
                f"not with {method} of the index"
            )

    def observer(self) -> Observer:
        """The observer that keeps the index, for a worker."""
        if not self.is_kept_by_observer:
            raise UsageError(
                f"index {self.table.name!r} is kept in the transactions that write the column: "
                "it has no observer"
            )

        @observes(self.column, name=_OBSERVER_PREFIX + self.table.name)
        async def keep(tx: aio.Transaction, row: K) -> None:
            value = await tx.get(row, self.column)
            await self._entries.write(tx, row, value, await self._entries.recorded(tx, row))

        return keep

    # ------------------------------------------------------------------ looking up

    @overload
    def find(
        self, reads: AsyncReads, value: W, *, limit: int | None = None
    ) -> Coroutine[Any, Any, list[K]]: ...
    @overload
    def find(self, reads: BlockingReads, value: W, *, limit: int | None = None) -> list[K]: ...
    def find(self, reads: Any, value: W, *, limit: int | None = None) -> Any:
        """The keys of the rows that have the value, in order."""
        return on_reads(reads, self._find, value, limit)

    async def _find(self, reads: AsyncReads, value: W, limit: int | None) -> list[K]:
        prefix = ENTRY + self._entries.value_part(value)
        rows = reads.scan(self.table, prefix=prefix, columns=[self._entries.entry], limit=limit)
        return [self._entries.entry_of(row.key)[1] async for row in rows]

    @overload
    def range(
        self,
        reads: AsyncReads,
        start: W | None = None,
        end: W | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Coroutine[Any, Any, list[tuple[W, K]]]: ...
    @overload
    def range(
        self,
        reads: BlockingReads,
        start: W | None = None,
        end: W | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> list[tuple[W, K]]: ...
    def range(
        self,
        reads: Any,
        start: W | None = None,
        end: W | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Any:
        """Values from `start` (inclusive) to `end` (exclusive) with the keys of their rows."""
        first = ENTRY if start is None else ENTRY + self._entries.value_part(start)
        last = codecs.after_prefix(ENTRY) if end is None else ENTRY + self._entries.value_part(end)
        return on_reads(reads, self._range, first, last, reverse=reverse, limit=limit)

    async def _range(
        self, reads: AsyncReads, first: bytes, last: bytes, *, reverse: bool, limit: int | None
    ) -> list[tuple[W, K]]:
        rows = reads.scan(
            self.table,
            start=first,
            end=last,
            columns=[self._entries.entry],
            reverse=reverse,
            limit=limit,
        )
        return [self._entries.entry_of(row.key) async for row in rows]

    # ------------------------------------------------------------------ backfill and check

    @overload
    def backfill(self, database: aio.Database) -> Coroutine[Any, Any, int]: ...
    @overload
    def backfill(self, database: Database) -> int: ...
    def backfill(self, database: Any) -> Any:
        """Builds the index over rows that were written before; returns how many there are.

        Call it when all programs keep the index, or its observer is registered. Programs may be at
        work meanwhile. It mends whatever is wrong, and can be repeated: what is right costs reads.
        It stops at a row that cannot be indexed, which `check` reports.
        """
        return on_database(database, self._mending.backfill)

    @overload
    def check(self, reads: AsyncReads) -> Coroutine[Any, Any, list[str]]: ...
    @overload
    def check(self, reads: BlockingReads) -> list[str]: ...
    def check(self, reads: Any) -> Any:
        """What differs between column and index at one snapshot, at most 1,000 lines.

        If an observer keeps the index, what it has not handled yet is reported, too: call it when
        nothing is left to do.
        """
        return on_reads(reads, self._mending.problems)
