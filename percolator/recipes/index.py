"""Indexes that observers keep: from values of a column to the rows that have them.

by_word = Index("documents by word", on=text, value=codecs.text, values=str.split)

by_word.create(db)                          # a worker runs by_word.observer()
tx.set("readme", text, "to be or not")
by_word.find(snapshot, "be")                # ["readme"], a few milliseconds later
by_word.range(snapshot, "n", "p")           # [("not", "readme"), ("or", "readme")]
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from typing import Any, Generic, TypeVar, overload

from percolator import aio, codecs
from percolator.arguments import require_function
from percolator.blocking.api import Database
from percolator.codecs import KeyCodec
from percolator.codecs.values import after_prefix, is_key_codec
from percolator.decorators import (
    AsyncReads,
    BlockingReads,
    observes,
    on_database,
    on_reads,
)
from percolator.errors import InvalidArgument, SchemaError
from percolator.limits import Limits
from percolator.observers.definition import Observer
from percolator.schema import OBSERVER_BYTES_MAX, Column, Row, Table

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

    A worker runs its `observer`, which follows whatever programs write. So it lags, by milliseconds
    as long as a worker runs: a look-up may lead to rows that have just changed, and miss others.
    Read the column before relying on it. Rows that were there before the index are indexed, too,
    once its observer is registered. An index of the columns' own values, which never lags, is
    declared with the table: `Table.index`.

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
        if len(name.encode()) > _OBSERVED_BYTES_MAX:
            # If its observer's name were cut off, two indexes might have the same observer.
            raise InvalidArgument(
                "name", f"expected at most {_OBSERVED_BYTES_MAX} bytes, got {name!r}"
            )

    @overload
    def create(
        self, database: aio.Database, *, exist_ok: bool = False
    ) -> Coroutine[Any, Any, None]: ...
    @overload
    def create(self, database: Database, *, exist_ok: bool = False) -> None: ...
    def create(self, database: Any, *, exist_ok: bool = False) -> Any:
        """Creates the table, and registers the observer. The indexed table exists."""

        async def body(database: aio.Database) -> None:
            await database.create_table(self.table, exist_ok=exist_ok)
            await database.register_observers([self.observer()])

        return on_database(database, body)

    def observer(self) -> Observer:
        """The observer that keeps the index, for a worker."""

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
        last = after_prefix(ENTRY) if end is None else ENTRY + self._entries.value_part(end)
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

        Call it when its observer is registered. Programs may be at work meanwhile. It mends
        whatever is wrong, and can be repeated: what is right costs reads.
        It stops at a row that cannot be indexed, which `check` reports.
        """
        return on_database(database, self._mending.backfill)

    @overload
    def check(self, reads: AsyncReads) -> Coroutine[Any, Any, list[str]]: ...
    @overload
    def check(self, reads: BlockingReads) -> list[str]: ...
    def check(self, reads: Any) -> Any:
        """Differences between column and index at one snapshot, at most 1,000 lines.

        What the observer has not handled yet is reported, too: call it when nothing is left to do.
        """
        return on_reads(reads, self._mending.problems)


"""Keys of the indexed table."""
"""Values of its column."""
"""Values in the index."""

ENTRY, INDEXED = b"i", b"r"
_ROW_BYTES_MAX = Limits().row_bytes_max


class IndexEntries(Generic[K, T, W]):
    """Makes, reads and writes the rows of one index: one transaction brings those of one row up to
    date.

    i VALUE KEY     an entry: the row with this key has this value r KEY           the values for
    which the row has entries
    """

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
    ) -> None:
        """Brings the index entries of one row up to date: all of them, or none.

        A cell per row records its current entries, and every update writes that cell. So an
        observer run and a backfill conflict, and `values` may be redefined.

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
            await tx.internal.write_together(added, removed)
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
        """A value of a row, if an entry can hold both."""
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


R = TypeVar("R")

BACKFILL_ROWS = 200
MENDED_VALUES = 10_000
"""How many values one transaction mends, unless a single row has more."""
READ_ENTRIES = 10_000
"""How many entries are read at once: rows may have any number of values. They are in the order of
values, so that those of one row are far apart, and what a row costs is paid once for each time."""
READ_ROWS = 1_000
_SHOWN_MAX = 1_000


class IndexMending(Generic[K, T, W]):
    """Backfill and check of one index."""

    def __init__(self, entries: IndexEntries[K, T, W]) -> None:
        self._entries = entries
        self._column = entries.column
        self._table = entries.table

    async def backfill(self, database: aio.Database) -> int:
        """Mends all rows, a few in each transaction. Returns how many have the column."""
        entries, count = self._entries, 0
        async with database.snapshot() as snapshot:
            pages = snapshot.scan_pages(self._column.table, columns=[self._column])
            async for keys in _few(pages, BACKFILL_ROWS):
                await self._mend(database, keys)
                count += len(keys)
            # Also rows that no longer have a value.
            recorded = snapshot.scan_pages(self._table, prefix=INDEXED, columns=[entries.indexed])
            async for rows in _few(recorded, BACKFILL_ROWS):
                await self._mend(database, [entries.recorded_key(row) for row in rows])
            # Also entries that no row's cell records.
            listed = snapshot.scan_pages(self._table, prefix=ENTRY, columns=[entries.entry])
            async for rows in _few(listed, READ_ENTRIES):
                stray = await self._not_recorded(database, rows)
                await self._mend(database, [key for key, _ in stray], stray)
        return count

    async def _not_recorded(
        self, database: aio.Database, listed: Sequence[bytes]
    ) -> list[tuple[K, frozenset[bytes]]]:
        """Rows with those of the entries that their cell does not record. Most are recorded: a row
        that was mended once for each of its values would cost their square."""
        entries = self._entries
        stray: list[tuple[K, frozenset[bytes]]] = []
        async with database.snapshot() as snapshot:
            for some in _portions(self._by_row(listed), READ_ROWS):
                asked = [INDEXED + entries.row_part(key) for key, _ in some]
                known = await snapshot.get_many(self._table, asked, [entries.indexed])
                for (key, values), there in zip(some, known, strict=True):
                    recorded = entries.parts_in(there.get(entries.indexed, b""))
                    if not values <= recorded:
                        stray.append((key, values - recorded))
        return stray

    def _by_row(self, listed: Sequence[bytes]) -> list[tuple[K, frozenset[bytes]]]:
        """The keys to which these entries lead, with the values of the entries."""
        entries = self._entries
        keys: dict[bytes, K] = {}
        values: dict[bytes, set[bytes]] = {}
        for entry in listed:
            value, key = entries.entry_of(entry)
            row = entries.row_part(key)
            keys[row] = key
            values.setdefault(row, set()).add(entries.value_part(value))
        return [(key, frozenset(values[row])) for row, key in keys.items()]

    async def _mend(
        self,
        database: aio.Database,
        keys: Sequence[K],
        stray: Sequence[tuple[K, frozenset[bytes]]] = (),
    ) -> None:
        """Mends the rows with these keys, in as many transactions as their values take. `stray` are
        entries of them that may be there, besides those that are recorded or wanted."""
        seen = {self._entries.row_part(key): values for key, values in stray}
        for some in _portions(keys, BACKFILL_ROWS):
            rest = some
            while rest:
                rest = rest[await database.run(self._refresh, rest, seen) :]

    async def _refresh(
        self, tx: aio.Transaction, keys: Sequence[K], seen: Mapping[bytes, frozenset[bytes]]
    ) -> int:
        """Mends the first rows with these keys; returns how many."""
        entries = self._entries
        parts = [entries.row_part(key) for key in keys]
        found = await tx.get_many(self._column.table, keys, [self._column])
        known = await tx.get_many(self._table, [INDEXED + row for row in parts], [entries.indexed])
        recorded, wanted = dict[bytes, frozenset[bytes]](), dict[bytes, frozenset[bytes]]()
        asked: dict[bytes, frozenset[bytes]] = {}
        done = values = 0
        for part, row, there in zip(parts, found, known, strict=True):
            recorded[part] = entries.parts_in(there.get(entries.indexed, b""))
            wanted[part] = entries.parts(row.key, row.get(self._column))
            asked[part] = wanted[part] | recorded[part] | seen.get(part, frozenset())
            done, values = done + 1, values + len(asked[part])
            if values >= MENDED_VALUES:
                break
        present = await self._present(tx, asked)
        for part, row in zip(parts[:done], found, strict=False):
            if not wanted[part] == recorded[part] == present[part]:
                # Its writer must not change the column between this snapshot and the commit.
                tx.lock(row.key, self._column)
                await entries.write(tx, row.key, row.get(self._column), present[part])
        return done

    async def _present(
        self, tx: aio.Transaction, parts: dict[bytes, frozenset[bytes]]
    ) -> dict[bytes, frozenset[bytes]]:
        """Values, by row, for which there is an entry: a cell may record more."""
        column = self._entries.entry
        asked = {ENTRY + part + row: (row, part) for row in parts for part in parts[row]}
        present: dict[bytes, set[bytes]] = {row: set() for row in parts}
        for some in _portions(list(asked), READ_ENTRIES):
            for entry in await tx.get_many(self._table, some, [column]):
                if column in entry:
                    row, part = asked[entry.key]
                    present[row].add(part)
        return {row: frozenset(values) for row, values in present.items()}

    async def problems(self, reads: AsyncReads) -> list[str]:
        """Differences between column and index, the first lines of them."""
        problems: list[str] = []
        for found in (self._missing(reads), self._extra(reads)):
            async with aclosing(found):
                async for some in found:
                    problems += some
                    if len(problems) >= _SHOWN_MAX:
                        return problems[:_SHOWN_MAX]
        return problems

    async def _missing(self, reads: AsyncReads) -> AsyncGenerator[list[str], None]:
        """Entries that the index lacks; and rows that cannot be indexed."""
        entries = self._entries
        pages = reads.scan_pages(self._column.table, columns=[self._column])
        async with aclosing(pages):
            async for page in pages:
                problems: list[str] = []
                wanted: dict[bytes, K] = {}
                for row in page:
                    try:
                        parts = entries.parts(row.key, row[self._column])
                    except SchemaError as error:
                        problems.append(error.message)
                        continue
                    for part in sorted(parts):
                        wanted[ENTRY + part + entries.row_part(row.key)] = row.key
                for some in _portions(list(wanted), READ_ENTRIES):
                    problems += [
                        f"row {wanted[row.key]!r} is missing for {entries.entry_of(row.key)[0]!r}"
                        for row in await reads.get_many(self._table, some, [entries.entry])
                        if entries.entry not in row
                    ]
                yield problems

    async def _extra(self, reads: AsyncReads) -> AsyncGenerator[list[str], None]:
        """Entries whose values the column lacks."""
        pages = reads.scan_pages(self._table, prefix=ENTRY, columns=[self._entries.entry])
        async for listed in _few(pages, READ_ENTRIES):
            problems: list[str] = []
            for some in _portions(self._by_row(listed), READ_ROWS):
                rows = await reads.get_many(
                    self._column.table, [key for key, _ in some], [self._column]
                )
                for (key, values), row in zip(some, rows, strict=True):
                    for part in sorted(self._extra_of(key, values, row.get(self._column))):
                        entry = ENTRY + part + self._entries.row_part(key)
                        value, _ = self._entries.entry_of(entry)
                        problems.append(
                            f"row {key!r} is indexed for {value!r}, which it does not have"
                        )
            yield problems

    def _extra_of(self, key: K, values: frozenset[bytes], stored: T | None) -> frozenset[bytes]:
        try:
            return values - self._entries.parts(key, stored)
        except SchemaError:  # such a row has been reported itself
            return frozenset()


def _portions(listed: Sequence[R], most: int) -> Iterator[Sequence[R]]:
    """Portions that can be read at once, one after the other."""
    for at in range(0, len(listed), most):
        yield listed[at : at + most]


async def _few(
    pages: AsyncGenerator[list[Row[R]], None], most: int
) -> AsyncGenerator[list[R], None]:
    """The keys of a scan's rows, so many at a time."""
    few: list[R] = []
    async with aclosing(pages):
        async for page in pages:
            for row in page:
                few.append(row.key)
                if len(few) == most:
                    yield few
                    few = []
    if few:
        yield few
