"""Building, checking and retiring an index while programs are at work.

The index is in the schema already, so that all commits keep its entries. What is left are the rows
that nobody writes meanwhile:

    1. wait until locks are gone that were set before (protocol/indexes.py says why)
    2. delete entries of values that were replaced by commits which did not know the index
    3. read all rows of one snapshot, and add the entries that are missing, a few rows at a time
    4. say in the table of entries that the index is complete, unless a bulk load has said since
       that it is not: then begin again

Any number of programs may do so at once, or one after the other: what is done stays done.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

from percolator.aio.engine import Engine
from percolator.aio.reader import Reader
from percolator.aio.transaction import Transaction
from percolator.codecs.indexes import ENTRY, IndexDefinition
from percolator.codecs.readable import quoted
from percolator.errors import CellAddress, SchemaError, UniqueViolation
from percolator.protocol import indexes
from percolator.protocol.read import FoundRow, scan_pages
from percolator.routing.cells import FoundCell, RangeRequest

T = TypeVar("T")

ROWS_AT_ONCE = 200
PROBLEMS_MAX = 1_000


class TransactionRunner(Protocol):
    """Runner of the transactions: `percolator.aio.Database`."""

    async def run(
        self,
        function: Callable[[Transaction, Sequence[bytes]], Awaitable[None]],
        rows: Sequence[bytes],
        /,
    ) -> None: ...


class IndexBuild:
    """One index of one table."""

    def __init__(
        self,
        database: TransactionRunner,
        engine: Engine,
        table_id: int,
        index: IndexDefinition,
        timeout: float,
    ) -> None:
        """The timeout applies to each page, and to each wait for a lock."""
        self._database = database
        self._engine = engine
        self._table_id = table_id
        self._index = index
        self._timeout = timeout

    @property
    def index(self) -> IndexDefinition:
        return self._index

    async def build(self, progress: Callable[[int], None] | None = None) -> int:
        """Returns the number of rows, once each has its entry. `progress` is called with how many
        were read so far.

        Raises `UniqueViolation` if two rows have the same values in a unique index, and
        `SchemaError` for a value that cannot be indexed. Mend the row, and build again.
        """
        try:
            return await self._build(progress)
        except SchemaError as error:
            # Without the index, its entries have no table, of which the error knows only the id.
            deadline = self._engine.now() + self._timeout
            schema = await self._engine.env.schemas.refresh(self._table_id, deadline)
            if self._index.table_id in (one.table_id for one in schema.indexes):
                raise
            raise SchemaError(
                f"{self._named()}: index {self._index.name!r} was dropped while it was built"
            ) from error

    async def _build(self, progress: Callable[[int], None] | None) -> int:
        engine = self._engine
        while True:
            known = await self._marked()
            await indexes.until_unlocked(
                engine.env, engine.cleanup, self._table_id, self._index.names, self._timeout
            )
            if known is None or known.value != indexes.READY:
                await self._delete_extra()
            count = await self._add_all(progress)
            if await self.mark(indexes.READY, since=known.commit_timestamp if known else 0):
                return count
            if await self.state() == indexes.DROPPED:
                raise SchemaError(
                    f"{self._named()}: index {self._index.name!r} is being dropped; drop it again "
                    "before you create it"
                )

    async def _add_all(self, progress: Callable[[int], None] | None) -> int:
        """Adds the entries that are missing in one snapshot; returns the number of rows."""
        index, count = self._index, 0
        async with aclosing(self._pages(self._reader(), self._table_id, index.names)) as pages:
            async for page in pages:
                for some in _portions(page):
                    await self._database.run(self._add_missing, [row for row, _ in some])
                count += len(page)
                if progress is not None:
                    progress(count)
        return count

    async def _delete_extra(self) -> None:
        """Deletes entries of values that were replaced by commits which did not know the index."""
        pages = self._pages(self._reader(), self._index.table_id, (ENTRY,))
        async with aclosing(pages):
            async for page in pages:
                for some in _portions(page):
                    await self._database.run(self._delete_if_extra, [entry for entry, _ in some])

    async def _delete_if_extra(self, tx: Transaction, entries: Sequence[bytes]) -> None:
        """Whoever gives a row these values meanwhile writes the entry: both conflict there."""
        deadline, most = self._engine.now() + self._timeout, self._engine.row_bytes_max
        cells = [CellAddress(self._index.table_id, entry, ENTRY) for entry in entries]
        found = await tx.internal.versions(cells, deadline)
        rows = {cell: known.value for cell, known in found.items() if known.value is not None}
        stored = await tx.internal.versions(self._cells([*rows.values()]), deadline)
        for cell, row in rows.items():
            values = self._values(row, stored)
            if indexes.entry_before(self._index, row, values, most) != cell.row:
                tx.internal.writes.delete(cell)

    def _reader(self) -> Reader:
        return Reader(self._engine, self._timeout, "snapshot")

    async def _pages(
        self, reader: Reader, table_id: int, columns: Sequence[bytes]
    ) -> AsyncGenerator[list[FoundRow], None]:
        """The rows that have one of the columns, in one snapshot, which ends with them."""
        engine = self._engine
        try:
            start = await reader.begin(engine.now() + self._timeout)
            request = RangeRequest(table_id, b"", b"", tuple(columns), start)
            found = scan_pages(
                engine.env, engine.cleanup, request, None, self._timeout, reader.statistics
            )
            async with aclosing(found) as pages:
                async for page in pages:
                    yield page
        finally:
            reader.finish("is closed")

    async def state(self) -> bytes | None:
        """State that readers are told; None before anybody has said anything."""
        known = await self._marked()
        return None if known is None else known.value

    async def _marked(self) -> FoundCell | None:
        cell, reader = self._state_cell(), self._reader()
        try:
            return (await reader.stored([cell], self._engine.now() + self._timeout)).get(cell)
        finally:
            reader.finish("is closed")

    def _state_cell(self) -> CellAddress:
        return CellAddress(self._index.table_id, indexes.STATE_ROW, indexes.STATE)

    async def mark(self, state: bytes, *, since: int | None = None) -> bool:
        """Says to readers whether they may use the index, from this commit on.

        Returns False if it leaves the state as it is: the index is being dropped, so it is no
        longer kept, or will not be in a moment; or it was marked as incomplete by a commit other
        than the one of `since`, so a build that began after that one has not seen all rows.
        """
        cell = self._state_cell()
        is_left = False

        async def write(tx: Transaction, _: Sequence[bytes]) -> None:
            nonlocal is_left
            deadline = self._engine.now() + self._timeout
            known = (await tx.internal.versions([cell], deadline)).get(cell)
            is_left = known is not None and (
                known.value == indexes.DROPPED
                or (known.value == indexes.BUILDING and since not in (None, known.commit_timestamp))
            )
            if not is_left:
                tx.internal.writes.put(cell, state)

        await self._database.run(write, ())
        return not is_left

    async def _add_missing(self, tx: Transaction, rows: Sequence[bytes]) -> None:
        """Whoever changes one of the rows meanwhile deletes the entry: both conflict there."""
        deadline = self._engine.now() + self._timeout

        async def read(cells: list[CellAddress]) -> Mapping[CellAddress, FoundCell]:
            return await tx.internal.versions(cells, deadline)

        stored = await read(self._cells(rows))
        wanted: dict[CellAddress, bytes] = {}
        for row in rows:
            entry = self._entry(row, stored)
            if entry is not None:
                other = wanted.setdefault(entry, row)
                if other != row:
                    raise self._violation(row, other)
        known = await read([*wanted])
        others = {
            entry: indexes.Owner(self._index, self._table_id, found.value)
            for entry, found in known.items()
            if found.value not in (None, wanted[entry])
        }
        expired = await indexes.expired(others, read, self._engine.row_bytes_max)
        for entry, row in wanted.items():
            if entry in others and entry not in expired:
                raise self._violation(row, others[entry].row)
            if not self._is_kept(known.get(entry), row, stored):
                tx.internal.writes.put(entry, row)

    def _is_kept(
        self, entry: FoundCell | None, row: bytes, stored: Mapping[CellAddress, FoundCell]
    ) -> bool:
        """True if the entry is there, and will be as long as the row has these values."""
        if entry is None or entry.value != row:
            return False
        written = (stored[cell].commit_timestamp for cell in self._cells([row]))
        return not self._index.expiring or entry.commit_timestamp >= max(written)

    def _entry(self, row: bytes, stored: Mapping[CellAddress, FoundCell]) -> CellAddress | None:
        try:
            entry = self._required_entry(row, self._values(row, stored))
        except SchemaError as error:
            raise SchemaError(
                f"{self._named()}, row {self._key(row)}: index {self._index.name!r}: "
                f"{error.message}"
            ) from None
        return None if entry is None else CellAddress(self._index.table_id, entry, ENTRY)

    def _required_entry(self, row: bytes, values: Mapping[bytes, bytes | None]) -> bytes | None:
        return indexes.required_entry(self._index, row, values, self._engine.row_bytes_max)

    def _values(
        self, row: bytes, stored: Mapping[CellAddress, FoundCell]
    ) -> dict[bytes, bytes | None]:
        return indexes.values_of(self._index, self._table_id, row, stored)

    def _cells(self, rows: Sequence[bytes]) -> list[CellAddress]:
        """The indexed cells of these rows."""
        return [
            CellAddress(self._table_id, row, column) for row in rows for column in self._index.names
        ]

    def _violation(self, row: bytes, other: bytes) -> UniqueViolation:
        names = ", ".join(map(quoted, self._index.names))
        return UniqueViolation(
            f"{self._named()}: rows {self._key(row)} and {self._key(other)} have the same "
            f"value in {names}, and index {self._index.name!r} is unique",
            index=self._index.name,
            rows=(row, other),
        )

    def _key(self, row: bytes) -> str:
        """A row as the table's programs know it."""
        return self._engine.env.row_named(self._table_id, row)

    def _named(self) -> str:
        return f"table {self._engine.catalog.name_of(self._table_id)!r}"

    # ------------------------------------------------------------------ check

    async def problems(self) -> list[str]:
        """Differences between the table and the index; the first of them, if there are many. If the
        index is not complete, that comes first, since it explains most of them."""
        # Read before the snapshot: a build that ends meanwhile leaves nothing to explain.
        state = await self.state()
        problems = await self._differences()
        if problems and (state == indexes.BUILDING or (state is None and not self._index.ready_at)):
            problems.insert(
                0,
                f"index {self._index.name!r} is not complete: it is being built by "
                "db.create_index(...) or `percolator index create`; run either again if it was "
                "interrupted",
            )
        return problems

    async def _differences(self) -> list[str]:
        problems: list[str] = []
        for table_id, columns, check in (
            (self._table_id, self._index.names, self._missing),
            (self._index.table_id, (ENTRY,), self._extra),
        ):
            reader = self._reader()
            async with aclosing(self._pages(reader, table_id, columns)) as pages:
                async for page in pages:
                    for some in _portions(page):
                        problems += await check(reader, some)
                    if len(problems) >= PROBLEMS_MAX:
                        return problems[:PROBLEMS_MAX]
        return problems

    async def _missing(self, reader: Reader, page: Sequence[FoundRow]) -> list[str]:
        """Rows without their entry, and values that cannot be indexed."""
        wanted: list[tuple[CellAddress, bytes]] = []  # two rows may want one unique entry
        problems: list[str] = []
        for row, cells in page:
            values = {column: cell.value for column, cell in cells.items()}
            try:
                entry = self._required_entry(row, values)
            except SchemaError as error:
                problems.append(f"row {self._key(row)}: {error.message}")
                continue
            if entry is not None:
                wanted.append((CellAddress(self._index.table_id, entry, ENTRY), row))
        entries = dict.fromkeys(cell for cell, _ in wanted)
        found = await reader.stored(entries, self._engine.now() + self._timeout)
        return problems + [
            f"row {self._key(row)} has no entry"
            for cell, row in wanted
            if cell not in found or found[cell].value != row
        ]

    async def _extra(self, reader: Reader, page: Sequence[FoundRow]) -> list[str]:
        """Entries whose row has other values, unless it had theirs until they expired."""
        rows = [cells[ENTRY].value or b"" for _, cells in page]
        stored = await reader.stored(self._cells(rows), self._engine.now() + self._timeout)
        most = self._engine.row_bytes_max
        return [
            f"row {self._key(row)} has an entry for values that it does not have"
            for (entry, cells), row in zip(page, rows, strict=True)
            if indexes.entry_before(self._index, row, self._values(row, stored), most) != entry
            and not self._may_have_expired(cells[ENTRY].commit_timestamp, row, stored)
        ]

    def _may_have_expired(
        self, since: int, row: bytes, stored: Mapping[CellAddress, FoundCell]
    ) -> bool:
        """True if a value that the row had then may have expired."""
        for column in self._index.expiring:
            found = stored.get(CellAddress(self._table_id, row, column))
            if found is None or found.value is None or found.commit_timestamp > since:
                return True
        return False


def _portions(listed: Sequence[T]) -> Iterator[Sequence[T]]:
    """Portions that are read and written at once."""
    for at in range(0, len(listed), ROWS_AT_ONCE):
        yield listed[at : at + ROWS_AT_ONCE]
