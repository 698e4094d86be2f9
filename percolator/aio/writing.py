"""What a transaction writes: cells, several of a row, sums, and weak notifications."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from percolator.aio.awaiting import DONE, LateWrites, Written, must_be_awaited
from percolator.aio.reading_in_turn import ReadingInTurn
from percolator.errors import CellAddress, InvalidArgument, SchemaError, UsageError
from percolator.protocol.weak_notifying import notify_weak_observers
from percolator.protocol.write_set import WriteSet
from percolator.schema import Column, Table, encoded_value

K = TypeVar("K")
T = TypeVar("T")
A = TypeVar("A")


class Writing(ReadingInTurn):
    """Checks what a transaction is to write, and keeps it until the commit."""

    _writes: WriteSet
    _update_lock: asyncio.Lock | None = None
    _weak: set[CellAddress] | None = None
    """The cells whose weak observers are notified once it has committed."""

    def _updating(self) -> asyncio.Lock:
        """Held from the read to the write of what depends on it.

        Calls on one transaction may be gathered. Between its read and its write, one would let the
        next read the same value, and the first of both writes would be lost.
        """
        if self._update_lock is None:
            self._update_lock = asyncio.Lock()
        return self._update_lock

    @must_be_awaited
    async def delete_row(self, table: Table[K], row: K, *, timeout: float | None = None) -> None:
        """Deletes all cells that the row has in this snapshot, or that the transaction has set.

        A column that another transaction sets at the same time may stay: only cells conflict. To
        rule it out, have both write or lock one cell of the row.

        >>> await tx.delete_row(accounts, "bob")
        """
        try:
            (found,) = await self.get_many(table, [row], timeout=timeout)
            names = list(found)
        except InvalidArgument as error:
            if not error.field.startswith("reads["):
                raise
            names = await self._names_in_pages(table, row, timeout)
        info = await self._info(table, self._deadline(timeout))
        stored = self._row(table, row)
        self._writes.write_together(
            [(CellAddress(info.table_id, stored, name), None) for name in names]
        )

    async def _names_in_pages(self, table: Table[K], row: K, timeout: float | None) -> list[bytes]:
        """The names of a row's cells, which are together too large for one answer."""
        stored = self._row(table, row)
        pages = self._found_pages(table, row, None, None, None, limit=1, timeout=timeout)
        async with aclosing(pages):
            return [
                name
                async for page in pages
                for key, cells in page
                if key == stored
                for name in cells
            ]

    @must_be_awaited
    async def increment(
        self, row: K, column: Column[int, K], by: int = 1, *, timeout: float | None = None
    ) -> int:
        """Adds to the number in a cell, and returns the sum. A cell without a value counts as 0.

        It reads and writes the cell, so it can conflict on either account. Where many transactions
        add to one cell, use `percolator.recipes.CombineQueue` or `ShardedCounter`.

        >>> await tx.increment("bob", visits)
        """
        if isinstance(by, bool) or not isinstance(by, int):
            raise InvalidArgument("by", f"expected an int, got {type(by).__name__}")
        async with self._updating():
            old: object = await self.get(row, column, 0, timeout=timeout)
            if isinstance(old, bool) or not isinstance(old, int):
                raise SchemaError(
                    f"{column!r}, row {row!r:.100}: only integers can be incremented, "
                    f"found {type(old).__name__}"
                )
            address = await self._target(row, column, self._deadline(timeout))
            self._put(address, row, column, old + by)
            return old + by

    def _set_row(self, row: object, values: object) -> Written:
        """Sets all the values, or none if one of them is refused."""
        if not isinstance(values, Mapping):
            raise InvalidArgument(
                "value", "is missing: expected set(row, column, value) or set(row, {column: value})"
            )
        found, data = list[CellAddress](), list[bytes]()
        for column, value in values.items():
            address = self._known_target(row, column)
            if address is not None:
                found.append(address)
            data.append(self._encoded(row, column, value))
        if len({column.table.name for column in values}) > 1:
            raise InvalidArgument("column", "expected columns of one table: the row is in one")

        async def find(deadline: float) -> list[CellAddress]:
            return [await self._target(row, column, deadline) for column in values]

        def write(addresses: list[CellAddress]) -> None:
            self._writes.write_together(list(zip(addresses, data, strict=True)))

        return self._write(found if len(found) == len(data) else None, find, write)

    def _write(
        self,
        found: A | None,
        find: Callable[[float], Awaitable[A]],
        write: Callable[[A], object],
    ) -> Written:
        """Writes at once, if it is known where, and nothing waits that was written before."""
        if found is not None and not self._late:
            write(found)
            return DONE
        if self._late is None:
            self._late = LateWrites(self._engine.now)
        deadline = partial(self._deadline, None)
        return self._late.add(find, write, deadline, found=found, waits=self._waits)

    @must_be_awaited
    async def _write_together(
        self,
        puts: Sequence[tuple[object, Column[Any], Any]],
        deletes: Sequence[tuple[object, Column[Any]]],
    ) -> None:
        """Writes all, or nothing if one of them is refused."""
        checked: list[tuple[CellAddress, bytes | None]] = []
        deadline = self._deadline(None)
        if self._late:
            await self._late.settle(deadline)
        for row, column, value in puts:
            address = self._known_target(row, column) or await self._target(row, column, deadline)
            checked.append((address, self._encoded(row, column, value)))
        for row, column in deletes:
            address = await self._written_address(row, column, deadline)
            checked.append((address, None))
        self._writes.write_together(checked)

    def _known_target(self, row: object, column: Column[Any]) -> CellAddress | None:
        """The address of a cell that may be written, if nothing has to be asked for that."""
        if not isinstance(column, Column):
            raise UsageError(f"expected a Column, got {type(column).__name__}")
        table = column.table
        stored = self._row(table, row, column)
        info = self._bound(table.name)
        if info is None:
            return None
        codecs = info.codecs
        if codecs.writable.get(column.name) is not column and not codecs.is_declared(column):
            return None
        return CellAddress(info.table_id, stored, column.name)

    async def _target(self, row: object, column: Column[Any], deadline: float) -> CellAddress:
        """The address of a cell, whose column from now on has this codec."""
        info = await self._info(column.table, deadline)
        address = CellAddress(info.table_id, self._row(column.table, row, column), column.name)
        if not info.codecs.is_declared(column):
            await self._engine.catalog.declare(info, column, deadline)
        # A commit that began meanwhile would leave the write out.
        self._require_open()
        return address

    def _known_written(self, row: object, column: Column[Any]) -> CellAddress | None:
        """As `_known_address`, for a cell that is to be written: a bad key is refused at once."""
        address = self._known_address(row, column)
        if address is None:
            self._row(column.table, row, column)
        return address

    async def _written_address(
        self, row: object, column: Column[Any], deadline: float
    ) -> CellAddress:
        """The address of a cell that is to be written, but not set."""
        address = self._known_address(row, column)
        if address is None:
            address = await self._address(row, column, deadline)
            self._require_open()  # see above
        return address

    def _put(self, address: CellAddress, row: object, column: Column[T], value: T) -> None:
        self._writes.put(address, self._encoded(row, column, value))

    def _encoded(self, row: object, column: Column[T], value: T) -> bytes:
        data = encoded_value(column, row, value)
        if len(data) > self._engine.limits.value_bytes_max:
            raise InvalidArgument(
                "value",
                f"has {len(data)} bytes, at most {self._engine.limits.value_bytes_max}",
            )
        return data

    # ------------------------------------------------------------------ weak notifications
    # They carry no data, take no lock, and decide nothing.

    def notify(self, row: K, column: Column[Any, K]) -> Written:
        """Notifies the column's weak observers of the row, once this transaction has committed.

        It takes effect at the call. Whoever awaits it is told if there is no weak observer; else
        the commit is refused.
        """
        self._require_open()
        address = self._known_written(row, column)
        if address is not None:
            schema = self._engine.env.schemas.get(address.table_id)
            if schema is None or column.name not in schema.weak_observers:
                address = None
        return self._write(address, partial(self._notified, row, column), self._notify_cell)

    async def _notified(self, row: object, column: Column[Any], deadline: float) -> CellAddress:
        """A cell that has a weak observer: its first one may have been registered since."""
        address = await self._written_address(row, column, deadline)
        schema = await self._engine.env.schemas.refresh(address.table_id, deadline)
        self._require_open()  # a commit that began meanwhile would leave it out
        if column.name not in schema.weak_observers:
            raise UsageError(f"{column!r} has no weak observer")
        return address

    def _notify_cell(self, address: CellAddress) -> None:
        if self._weak is None:
            self._weak = set()
        if len(self._weak) >= self._engine.limits.transaction_cells_max:
            raise InvalidArgument(
                "notify", f"more than {self._engine.limits.transaction_cells_max}"
            )
        self._weak.add(address)

    async def _only_notify(self, deadline: float) -> int:
        """Writes only notifications, at a fresh timestamp: no locks, and nothing to decide."""
        env = self._engine.env
        left = max(deadline - self._engine.now(), 0.001)
        now = await env.timestamps.get(timeout_seconds=left)
        self.statistics.round_trips += 1
        cells = sorted(self._weak or ())
        await notify_weak_observers(env, cells, now, deadline, self.statistics)
        return now
