"""What the rest of the library needs from a transaction, and programs do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, TypeVar

from percolator.aio.one_message import OneMessage
from percolator.errors import CellAddress
from percolator.protocol.known_row import KnownRow
from percolator.protocol.scan import FoundRow
from percolator.routing.cells import FoundCell
from percolator.routing.table_info import NO_OBSERVERS, TableInfo
from percolator.schema import Column, Readable, Table

K = TypeVar("K")
T = TypeVar("T")


class TransactionInternals:
    """What the rest of the library needs from a transaction.

    It is a view that is made for each use: if the transaction kept it, there would be a reference
    cycle for the garbage collector to find.
    """

    __slots__ = ("_transaction", "writes")

    def __init__(self, transaction: OneMessage) -> None:
        self._transaction = transaction
        self.writes = transaction._writes

    def known_address(self, row: object, column: Readable[Any]) -> CellAddress | None:
        """The cell's address, if its table was used before, and no earlier write waits for a table.
        Works in any thread."""
        if self._transaction._late:
            return None
        return self._transaction._known_address(row, column)

    def known_target(self, row: object, column: Column[Any]) -> CellAddress | None:
        """As `known_address`, for a cell that is to be set: None also if the column's codec has to
        be declared first."""
        if self._transaction._late:
            return None
        return self._transaction._known_target(row, column)

    def put(self, address: CellAddress, row: object, column: Column[T], value: T) -> None:
        """As `set`, for a cell whose table is known. Works in any one thread at a time."""
        self._transaction._put(address, row, column, value)

    def updating(self) -> asyncio.Lock:
        """To be held from a read to the write that depends on it: calls may be gathered."""
        return self._transaction._updating()

    async def write_together(
        self,
        puts: Sequence[tuple[object, Column[Any], Any]],
        deletes: Sequence[tuple[object, Column[Any]]],
    ) -> None:
        """As `set` and `delete` of each of them, or nothing if one is refused."""
        await self._transaction._write_together(puts, deletes)

    async def expires(self, column: Column[Any], timeout: float | None = None) -> bool:
        """Whether values of the column expire. Ask after reading from its table: only then is it
        known whether the client's schema is the newest."""
        transaction = self._transaction
        deadline = transaction._deadline(timeout)
        table_id = (await transaction._info(column.table, deadline)).table_id
        schema = await transaction._env.schema_of_reads(table_id, deadline)
        return column.name in schema.expiring

    def notify_cell(self, address: CellAddress) -> None:
        """As `notify`, for a column that is known to have a weak observer."""
        self._transaction._notify_cell(address)

    def found_pages(
        self, table: Table[K], start: K, end: K, columns: Sequence[Column[Any]]
    ) -> AsyncGenerator[list[FoundRow], None]:
        """Scans rows as they are stored, with the commit timestamps of their cells."""
        return self._transaction._found_pages(table, start, end, None, columns)

    def bind(self, table: str, table_id: int) -> None:
        """Fixes which table the name means in this transaction, before it is used."""
        transaction = self._transaction
        known = transaction._engine.catalog.known(table)
        if known is None or known.table_id != table_id:
            known = TableInfo(table_id, table, NO_OBSERVERS)
        transaction._bind(known)

    def know(self, row: KnownRow) -> None:
        """Cells as they are at the transaction's timestamp, so that they need not be read."""
        self._transaction._known = row

    async def versions(
        self, cells: Iterable[CellAddress], deadline: float
    ) -> dict[CellAddress, FoundCell]:
        """The newest versions of these cells at its timestamp, deletions among them."""
        return await self._transaction._versions(cells, deadline)

    def resume(self, start: int, started_seconds: float) -> None:
        """Continues a transaction that was begun elsewhere. Call it before anything else.

        A gateway calls this, because its client keeps the start timestamp. `started_seconds` is
        when that was handed out, by this machine's monotonic clock: locks live from then on.
        """
        self._transaction._resume(start, started_seconds)
