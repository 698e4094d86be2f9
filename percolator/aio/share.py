"""A task's share of a shared transaction: what one attempt at it writes. `shared.py` says how."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from percolator.aio.awaiting import DONE, Awaits, Later, LateWrites, Written, must_be_awaited
from percolator.aio.engine import Engine
from percolator.aio.tickets import Receipt, Ticket
from percolator.errors import (
    CellAddress,
    InvalidArgument,
    PercolatorError,
    UsageError,
    WrittenTwice,
)
from percolator.formats.records import KIND_DELETE, KIND_PUT
from percolator.protocol.shared.attempt import Attempt
from percolator.protocol.shared.keeping import Keeper
from percolator.protocol.shared.names import check_task
from percolator.protocol.write_set import Write
from percolator.routing.catalog import TableInfo
from percolator.schema import Column, encoded_key, encoded_value

K = TypeVar("K")
T = TypeVar("T")

REPLACE_AFTER_SECONDS = 10.0
"""How long a later attempt waits before it replaces a finished one, on top of its time-out."""
FLUSH_CELLS = 4_096
FLUSH_BYTES = 4 << 20


class Share(Awaits):
    """What one attempt at one task writes. Leaving its block without `finish` rolls it back."""

    _called = "share"

    def __init__(
        self,
        engine: Engine,
        ticket: Ticket,
        task: str,
        generation: int,
        timeout_seconds: float,
        replace_after_seconds: float,
        chosen: Set[int] = frozenset(),
        only_changes: bool = False,
    ) -> None:
        if not isinstance(ticket, Ticket):
            raise UsageError(f"expected a Ticket, got {type(ticket).__name__}")
        check_task(task, generation)
        self._engine = engine
        self._ticket = ticket
        self._task = task
        self._timeout_seconds = timeout_seconds
        self._attempt = Attempt(
            engine.env,
            engine.groups,
            engine.cleanup,
            ticket.job,
            task,
            generation,
            replace_after_seconds=replace_after_seconds,
            chosen=chosen,
            only_changes=only_changes,
        )
        self._keeper = Keeper(engine.env, ticket.job)
        self._buffer: dict[CellAddress, Write] = {}
        self._buffer_bytes = 0
        self._tables: dict[str, TableInfo] = {}
        self._receipt: Receipt | None = None
        self._is_open = False
        self._ending = ""
        """Why nothing more can be written, once the attempt is about to end."""
        self._late = LateWrites(engine.now)
        self._turn = asyncio.Lock()
        """Held by the one call that uses the attempt."""

    @property
    def kept(self) -> int:
        """How many of the cells that it has locked had their values already."""
        return self._attempt.kept

    async def begin(self) -> None:
        """Begins the attempt, and keeps it alive from now on."""
        self._engine.require_usable()
        if self._is_open or self._receipt is not None:
            raise UsageError("the attempt has begun already")
        self._is_open = True
        self._engine.open_starts.add(self, self._ticket.unchanged_since or self._ticket.began)
        self._engine.beats.add(self._attempt)
        self._engine.beats.add(self._keeper)

    def set(self, row: K, column: Column[T, K], value: T) -> Written:
        """Writes a value. It is locked now or later, and visible when the driver has committed.

        It takes effect at the call. Whoever writes much should await it: when much is waiting to be
        locked, it is locked then, and otherwise stays in memory until `finish`.
        """
        _require_column(column)
        data = encoded_value(column, row, value)
        if len(data) > self._engine.limits.value_bytes_max:
            raise InvalidArgument(
                "value", f"has {len(data)} bytes, at most {self._engine.limits.value_bytes_max}"
            )
        return self._write(row, column, (KIND_PUT, data))

    def delete(self, row: K, column: Column[Any, K]) -> Written:
        """Deletes the cell, if it exists. It takes effect at the call, as `set` does."""
        _require_column(column)
        return self._write(row, column, (KIND_DELETE, b""))

    async def write(self, cells: Mapping[CellAddress, Write]) -> None:
        """Locks cells of known tables: for other parts of the library."""
        self._require_open()
        await self._late.settle(self._deadline())
        async with self._turn:
            await self._lock_buffered()
            await self._attempt.prewrite(cells, self._deadline())

    @must_be_awaited
    async def finish(self) -> Receipt:
        """Locks what is left, and returns what the driver needs to commit it. Nothing can be
        written afterwards. Raises `ConflictError` if another attempt has replaced this one."""
        self._require_open()
        await self._late.settle(self._deadline())
        self._require_open()
        # Before anything is awaited: a write that came later would succeed, and be lost.
        self._ending = "is being finished, or could not be finished: begin a new attempt"
        async with self._turn:
            await self._lock_buffered()
            parts = await self._attempt.finish(self._deadline())
            self._receipt = Receipt(
                self._ticket.row,
                self._task,
                tuple(parts),
                self._attempt.cells,
                self._attempt.announced,
                tuple(sorted(self._attempt.tables)),
            )
            self._leave()
        return self._receipt

    async def abandon(self) -> None:
        """Rolls back what it has locked."""
        if not self._is_open:
            return
        self._ending = "is being abandoned"
        async with self._turn:
            if self._is_open:  # a call that was under way may have finished it
                self._leave()
                await self._attempt.abandon(self._deadline())

    def _write(self, row: object, column: Column[Any], write: Write) -> Written:
        stored = encoded_key(column.table, row, column=column)
        self._engine.require_row("row", stored)
        self._require_open()
        info = self._tables.get(column.table.name)
        if (
            info is None
            or self._late
            or (write[0] == KIND_PUT and not info.codecs.is_declared(column))
        ):
            find = partial(self._found, column, stored, write[0])
            return self._late.add(find, partial(self._keep, write=write), self._deadline_of_write)
        info.codecs.require_key(column.table)
        self._keep(CellAddress(info.table_id, stored, column.name), write)
        if len(self._buffer) >= FLUSH_CELLS or self._buffer_bytes >= FLUSH_BYTES:
            return Later(self._flush)
        return DONE

    async def _found(
        self, column: Column[Any], row: bytes, kind: int, deadline: float
    ) -> CellAddress:
        with self._one_failure_ends_it():
            info = await self._table(column)
            if kind == KIND_PUT and not info.codecs.is_declared(column):
                await self._engine.catalog.declare(info, column, deadline)
        info.codecs.require_key(column.table)
        self._require_open()
        return CellAddress(info.table_id, row, column.name)

    def _keep(self, address: CellAddress, write: Write) -> None:
        known = self._buffer.get(address)
        if known is not None and known != write:
            cell = self._engine.env.described(address)
            raise WrittenTwice(f"task {self._task!r} writes {cell} twice", cell=address)
        self._buffer[address] = write
        self._buffer_bytes += len(write[1])

    async def _flush(self) -> None:
        async with self._turn:
            await self._lock_buffered()

    async def _lock_buffered(self) -> None:
        if self._buffer:
            cells, self._buffer, self._buffer_bytes = self._buffer, {}, 0
            await self._attempt.prewrite(cells, self._deadline())

    @contextmanager
    def _one_failure_ends_it(self) -> Iterator[None]:
        """Whoever went on after a write that has failed would commit the others without it."""
        try:
            yield
        except PercolatorError:
            self._ending = self._ending or "has failed to write a cell: begin a new attempt"
            raise

    async def _table(self, column: Column[Any]) -> TableInfo:
        name = column.table.name
        info = self._tables.get(name)
        if info is None:
            info = await self._engine.catalog.table(name, self._deadline())
            # Under the snapshot that it is compared with, or the beginning of the transaction.
            info.require_older_than(self._ticket.unchanged_since or self._ticket.began)
            self._tables[name] = info
        return info

    def _leave(self) -> None:
        self._is_open = False
        self._engine.beats.discard(self._attempt)
        self._engine.beats.discard(self._keeper)
        self._engine.open_starts.discard(self)

    def _require_open(self) -> None:
        self._engine.require_usable()
        if not self._is_open:
            raise UsageError("the attempt has not begun, or is over")
        if self._ending:
            raise UsageError(f"the attempt {self._ending}")

    def _deadline_of_write(self) -> float:
        self._require_open()
        return self._deadline()

    def _deadline(self) -> float:
        return self._engine.now() + self._timeout_seconds

    async def __aenter__(self) -> Share:
        await self.begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._leave_block(kind, self._left)

    async def _left(self, kind: type[BaseException] | None) -> None:
        try:
            await self.abandon()
        except PercolatorError:
            if kind is None:  # otherwise the first error says more; the parts expire by themselves
                raise
        finally:
            self._forget_calls(self._engine.loop)


def _require_column(column: object) -> None:
    if not isinstance(column, Column):
        raise UsageError(f"expected a Column, got {type(column).__name__}")
