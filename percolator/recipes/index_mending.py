"""Compares an index with its column, and mends it: rows may be older than the index."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
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
            async for keys in _few(pages):
                await database.run(self._refresh, keys)
                count += len(keys)
            # Also rows that no longer have a value.
            recorded = snapshot.scan_pages(self._table, prefix=INDEXED, columns=[entries.indexed])
            async for rows in _few(recorded):
                await database.run(self._refresh, [entries.recorded_key(row) for row in rows])
            # Also entries that no row's cell records.
            listed = snapshot.scan_pages(self._table, prefix=ENTRY, columns=[entries.entry])
            async for rows in _few(listed):
                await database.run(self._refresh, [], rows)
        return count

    async def _refresh(
        self, tx: aio.Transaction, keys: Sequence[K], listed: Sequence[bytes] = ()
    ) -> None:
        """Mends the rows with these keys, and the rows that these entries lead to."""
        entries = self._entries
        seen: dict[bytes, set[bytes]] = {}
        rows = {entries.row_part(key): key for key in keys}
        for entry in listed:
            value, key = entries.entry_of(entry)
            rows[entries.row_part(key)] = key
            seen.setdefault(entries.row_part(key), set()).add(entries.value_part(value))
        found = await tx.get_many(self._column.table, list(rows.values()), [self._column])
        known = await tx.get_many(self._table, [INDEXED + row for row in rows], [entries.indexed])
        recorded, wanted = dict[bytes, frozenset[bytes]](), dict[bytes, frozenset[bytes]]()
        for part, row, there in zip(rows, found, known, strict=True):
            recorded[part] = entries.parts_in(there.get(entries.indexed, b""))
            wanted[part] = entries.parts(row.key, row.get(self._column))
        present = await self._present(
            tx, {part: wanted[part] | recorded[part] | seen.get(part, set()) for part in rows}
        )
        for part, row in zip(rows, found, strict=True):
            if not wanted[part] == recorded[part] == present[part]:
                # Its writer must not change the column between this snapshot and the commit.
                await tx.lock(row.key, self._column)
                await entries.write(tx, row.key, row.get(self._column), present[part])

    async def _present(
        self, tx: aio.Transaction, parts: dict[bytes, frozenset[bytes]]
    ) -> dict[bytes, frozenset[bytes]]:
        """Those of the values, by row, for which there is an entry: a cell may record more."""
        column = self._entries.entry
        asked = [(row, part) for row, values in parts.items() for part in values]
        found = await tx.get_many(
            self._table, [ENTRY + part + row for row, part in asked], [column]
        )
        present: dict[bytes, set[bytes]] = {row: set() for row in parts}
        for (row, part), entry in zip(asked, found, strict=True):
            if column in entry:
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
                found = await reads.get_many(self._table, list(wanted), [entries.entry])
                problems += [
                    f"row {wanted[entry.key]!r} is missing for {entries.entry_of(entry.key)[0]!r}"
                    for entry in found
                    if entries.entry not in entry
                ]
                yield problems

    async def _extra(self, reads: AsyncReads) -> AsyncGenerator[list[str], None]:
        """What the index has, and the column lacks."""
        pages = reads.scan_pages(self._table, prefix=ENTRY, columns=[self._entries.entry])
        async with aclosing(pages):
            async for page in pages:
                pairs = [self._entries.entry_of(entry.key) for entry in page]
                rows = await reads.get_many(
                    self._column.table, [key for _, key in pairs], [self._column]
                )
                yield [
                    f"row {key!r} is indexed for {value!r}, which it does not have"
                    for (value, key), row in zip(pairs, rows, strict=True)
                    if self._is_extra(key, value, row.get(self._column))
                ]

    def _is_extra(self, key: K, value: W, stored: T | None) -> bool:
        try:
            return self._entries.value_part(value) not in self._entries.parts(key, stored)
        except SchemaError:  # such a row has been reported itself
            return False


async def _few(pages: AsyncGenerator[list[Row[R]], None]) -> AsyncGenerator[list[R], None]:
    """The keys of a scan's rows, as many at a time as one transaction mends."""
    async with aclosing(pages):
        async for page in pages:
            for at in range(0, len(page), BACKFILL_ROWS):
                yield [row.key for row in page[at : at + BACKFILL_ROWS]]
