"""Compares an index with its column, and mends it: rows may be older than the index."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from percolator import aio
from percolator.either import AsyncReads
from percolator.errors import SchemaError
from percolator.recipes.index_entries import ENTRY, INDEXED, IndexEntries
from percolator.schema import Row

K = TypeVar("K")
T = TypeVar("T")
W = TypeVar("W")
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

    # ------------------------------------------------------------------ mending

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
        """Those of the values, by row, for which there is an entry: a cell may record more."""
        column = self._entries.entry
        asked = {ENTRY + part + row: (row, part) for row in parts for part in parts[row]}
        present: dict[bytes, set[bytes]] = {row: set() for row in parts}
        for some in _portions(list(asked), READ_ENTRIES):
            for entry in await tx.get_many(self._table, some, [column]):
                if column in entry:
                    row, part = asked[entry.key]
                    present[row].add(part)
        return {row: frozenset(values) for row, values in present.items()}

    # ------------------------------------------------------------------ comparing

    async def problems(self, reads: AsyncReads) -> list[str]:
        """What differs between column and index, the first lines of it."""
        problems: list[str] = []
        for found in (self._missing(reads), self._extra(reads)):
            async with aclosing(found):
                async for some in found:
                    problems += some
                    if len(problems) >= _SHOWN_MAX:
                        return problems[:_SHOWN_MAX]
        return problems

    async def _missing(self, reads: AsyncReads) -> AsyncGenerator[list[str], None]:
        """What the column has, and the index lacks; and rows that cannot be indexed."""
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
        """What the index has, and the column lacks."""
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
    """What can be read at once, one after the other."""
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
