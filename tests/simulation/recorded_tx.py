"""A transaction that is written down for the checker while it runs, and the cells of workloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from percolator.aio import Transaction
from percolator.aio.snapshot import Snapshot
from percolator.codecs import raw
from percolator.formats.records import KIND_DELETE, KIND_PUT
from percolator.routing.range_scan import JoinedPage, SentPage
from percolator.schema import Column, Family, Table
from percolator.world import Random
from tests.isolation.history import CellKey, Found, RecordedTransaction, Scan


@dataclass(frozen=True)
class Cells:
    """A table with one column of bytes, which is what most workloads need."""

    name: str
    splits: tuple[bytes, ...] = ()

    @property
    def table(self) -> Table[bytes]:
        return Table(self.name, key=raw)

    def column(self, name: str = "v") -> Column[bytes]:
        return self.table.column(name, raw)


class RecordedTx:
    """A transaction together with its record."""

    def __init__(
        self, transaction: Transaction, recorded: RecordedTransaction, joined: JoinedScans
    ) -> None:
        self._transaction = transaction
        self._recorded = recorded
        self._joined = joined

    @property
    def itself(self) -> Transaction:
        """For cells that the workload judges itself, and the checker does not."""
        return self._transaction

    def note_writes(self) -> None:
        """Records everything that `itself` has written and announced so far. Call it once, at the
        end of the body."""
        tables = table_names(self._transaction)
        for address, (kind, value) in self._transaction.internal.writes.cells.items():
            key = (tables[address.table_id], address.row, address.column)
            if kind == KIND_PUT:
                self._recorded.put(key, value)
            elif kind == KIND_DELETE:
                self._recorded.delete(key)
        for address in sorted(self._transaction._buffer.weak or ()):
            self._recorded.notify((tables[address.table_id], address.row, address.column))

    async def get(self, row: bytes, column: Column[bytes]) -> bytes | None:
        value = await self._transaction.get(row, column)
        self.note_start()
        self._recorded.read(_key(row, column), value)
        return value

    async def get_many(
        self, rows: Sequence[bytes], column: Column[bytes]
    ) -> dict[bytes, bytes | None]:
        found = await self._transaction.get_many(column.table, rows, [column])
        self.note_start()
        values = {row: one.get(column) for row, one in zip(rows, found, strict=True)}
        for row, value in values.items():
            self._recorded.read(_key(row, column), value)
        return values

    async def get_family(
        self, row: bytes, family: Family[bytes], columns: Sequence[Column[bytes]]
    ) -> None:
        """Reads a family of a row, whose columns are these."""
        (found,) = await self._transaction.get_many(family.table, [row], [family])
        self.note_start()
        values = {family.column(name).name: value for name, value in found.family(family).items()}
        for column in columns:
            self._recorded.read(_key(row, column), values.pop(column.name, None))
        if values:
            raise RuntimeError(f"columns that are in no family: {sorted(values)}")

    def note_start(self) -> None:
        """Records the timestamp if the first read has fetched it, before what it has read."""
        start = self._transaction.start_timestamp
        if start is not None and not self._recorded.record.start_ts:
            self._recorded.began(start)

    async def set(self, row: bytes, column: Column[bytes], value: bytes) -> None:
        self._transaction.set(row, column, value)  # it takes effect, although it is not awaited
        self._recorded.put(_key(row, column), value)

    async def delete(self, row: bytes, column: Column[bytes]) -> None:
        self._transaction.delete(row, column)
        self._recorded.delete(_key(row, column))

    async def lock(self, row: bytes, column: Column[bytes], *, shared: bool = False) -> None:
        self._transaction.lock(row, column, shared=shared)
        note = self._recorded.read_lock if shared else self._recorded.lock
        note(_key(row, column))

    async def notify(self, row: bytes, column: Column[bytes]) -> None:
        await self._transaction.notify(row, column)
        self._recorded.notify(_key(row, column))

    async def scan(
        self,
        table: Table[bytes],
        start: bytes = b"",
        stop: bytes = b"",
        *,
        reverse: bool = False,
        limit: int = 0,
    ) -> dict[bytes, dict[bytes, bytes]]:
        """All columns of a range of rows, including the transaction's own writes.

        Some ranges are read as joined pages, too: before that, when locks may be in the way, and
        again after it.
        """
        has_written = self._transaction.internal.writes.cells or self._transaction._reader.late
        also_joined = self._joined.is_due() and not has_written
        if also_joined:
            await self._scan_joined(table, start, stop)
        found: list[Found] = []
        rows = self._transaction.scan(
            table,
            start=start or None,
            end=stop or None,
            reverse=reverse,
            limit=limit or None,
        )
        async for row in rows:
            found.extend(Found(row.key, *cell) for cell in sorted(row.raw().items()))
        self.note_start()
        self._recorded.scan(
            Scan(table.name, start, stop, tuple(found), reverse=reverse, row_limit=limit)
        )
        if also_joined:
            await self._scan_joined(table, start, stop)
        by_row: dict[bytes, dict[bytes, bytes]] = {}
        for one in found:
            by_row.setdefault(one.row, {})[one.column] = one.value
        return by_row

    async def _scan_joined(self, table: Table[bytes], start: bytes, stop: bytes) -> None:
        """Only snapshots can be scanned like this: nothing must have been written yet."""
        at = await self._transaction.timestamp()
        self.note_start()
        async with Snapshot(self._transaction._engine, at, None) as snapshot:
            self._recorded.scan(await self._joined.scan(snapshot, table, start, stop))


Body = Callable[[RecordedTx], Awaitable[None]]


def table_names(transaction: Transaction) -> dict[int, str]:
    """The names of the tables that a transaction has used, by their ids."""
    return {info.table_id: name for name, info in transaction._reader.tables.items()}


def _key(row: bytes, column: Column[bytes]) -> CellKey:
    return (column.table.name, row, column.name)


# Scans whose pages may be joined to blocks of memory, as a batch reader asks for them.

JOINED = "page of joined cells"
_COLUMNS = (None, None, (b"v",), (b"v", b"w"))
"""Which columns are asked for: rows have the same ones more often if there is only one."""


class JoinedScans:
    """Which scans of a session are made with joined pages, too."""

    def __init__(self, share: float, random: Random, occurred: Counter[str]) -> None:
        self._share = share
        self._random = random
        self._occurred = occurred

    def is_due(self) -> bool:
        """True if the next scan is made with joined pages, too."""
        return self._share > 0 and self._random.random() < self._share

    async def scan(
        self, snapshot: Snapshot, table: Table[bytes], start: bytes = b"", stop: bytes = b""
    ) -> Scan:
        """The rows of the range, in all columns or in some of them."""
        columns = self._random.choice(_COLUMNS)
        found: list[Found] = []
        pages = snapshot.scan_joined(table, start=start, end=stop, columns=columns)
        async with aclosing(pages):
            async for page in pages:
                self._occurred[JOINED] += isinstance(page, JoinedPage)
                found.extend(_cells(page))
        return Scan(table.name, start, stop, tuple(found), columns)


def _cells(page: SentPage) -> Iterator[Found]:
    if not isinstance(page, JoinedPage):
        yield from map(Found, page.rows, page.columns, page.values)
        return
    columns = {name: values.cut() for name, values in page.columns.items()}
    for at, row in enumerate(page.rows.cut()):
        for name, values in columns.items():
            yield Found(row, name, values[at])
