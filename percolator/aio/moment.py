"""The timestamp at which a snapshot or a transaction reads, and what names of cells mean then."""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop
from typing import Any

from percolator.aio.awaiting import Awaits, must_be_awaited
from percolator.aio.engine import Engine
from percolator.arguments import require_seconds, require_table
from percolator.errors import CellAddress, InvalidArgument, PercolatorError, UsageError, harmless
from percolator.protocol.statistics import Statistics
from percolator.routing.table_info import TableInfo
from percolator.schema import Column, Readable, Table, encoded_key
from percolator.timestamps import Timestamp


async def fresh_timestamp(engine: Engine, timeout_seconds: float) -> int:
    """A timestamp from the oracle, for a call that has done nothing yet."""
    try:
        return await engine.env.timestamps.get(timeout_seconds=timeout_seconds)
    except PercolatorError as error:
        raise harmless(error)  # noqa: B904 - it has its cause already


class Moment(Awaits):
    """One instant of the store. From its first use to its end, it keeps history from collection."""

    _kind = "transaction"
    _start = 0
    _started_seconds = 0.0
    """When that was received, on the monotonic clock."""
    _starting: asyncio.Future[int] | None = None
    """The request for the timestamp, shared by all reads that arrive while it is in flight."""
    _at: Timestamp | None = None
    """The timestamp of a snapshot of the past."""
    _ended = ""
    """Why it can no longer be used, for errors, such as "is closed"; empty while it is open. A
    commit in progress sets it, too."""
    _finished = False
    """No part of it is still in progress, so it must no longer hold back collection."""

    def __init__(self, engine: Engine, timeout_seconds: float | None) -> None:
        self._engine = engine
        self._env = engine.env
        self._timeout_seconds = timeout_seconds or engine.limits.call_seconds
        self._bound_tables: dict[str, TableInfo] = {}
        """The tables used so far. A name keeps its meaning to the end: after the table was dropped
        and created again, the transaction would read nothing and write into the new one."""
        self.statistics = Statistics()
        """The cost so far: round trips, retries, and the locks waited for, with their owners."""

    @must_be_awaited
    async def timestamp(self) -> Timestamp:
        """The timestamp at which it reads. It is fetched now if nothing was read yet."""
        deadline = self._deadline(None)
        return Timestamp(self._start or await self._begin(deadline))

    async def _begin(self, deadline: float) -> int:
        """Fetches the timestamp. Never before the first use, so that all earlier commits show.

        Fetched in the background on entering the block, it would be of no known moment: the program
        could not tell which commits of other clients come before it.
        """
        if self._at is not None:
            return await self._begin_in_the_past(self._at, deadline)
        while True:
            starting = self._starting
            if starting is None:
                self.statistics.round_trips += 1
                left = max(deadline - self._engine.now(), 0.001)
                starting = self._engine.timestamps.get(timeout_seconds=left)
                self._starting = starting
            try:
                start = await starting
            except asyncio.CancelledError:
                self._starting = None
                task = asyncio.current_task()
                if task is None or task.cancelling() or not starting.cancelled():
                    raise
                continue  # another reader of this transaction was cancelled, not this one
            except PercolatorError as error:
                self._starting = None
                raise harmless(error)  # noqa: B904 - it has its cause already
            if not self._start:
                self._set_start(start)
            self._require_older_tables()
            if self._engine.asks_for_drops:
                await self._engine.require_tables(self._bound_tables.values(), deadline)
            return self._start

    async def _begin_in_the_past(self, at: Timestamp, deadline: float) -> int:
        self.statistics.round_trips += 1
        left = max(deadline - self._engine.now(), 0.001)
        now = await fresh_timestamp(self._engine, left)
        if at > now:
            # Later commits below it would appear in a snapshot that was already read.
            raise InvalidArgument(
                "at", f"{at} is in the future: the oracle is at {Timestamp(now).describe()}"
            )
        self._set_start(at)
        self._require_older_tables()
        if self._engine.asks_for_drops:
            await self._engine.require_tables(self._bound_tables.values(), deadline)
        return at

    def _set_start(self, start: int) -> None:
        if self._finished:  # while the timestamp was fetched: nothing would remove it again
            self.require_not_ended()
        engine = self._engine
        self._start = start
        self._started_seconds = engine.now()
        self._starting = None
        engine.open_starts.add(self, start)

    # ------------------------------------------------------------------ tables and cells

    def _bound(self, name: str) -> TableInfo | None:
        """The table that has this name here; None if a master has to be asked."""
        info = self._bound_tables.get(name) or self._engine.catalog.known(name)
        if info is None or (self._engine.asks_for_drops and not self._engine.is_current(info)):
            return None
        return self._bind(info)

    def _bind(self, info: TableInfo) -> TableInfo:
        """Gives the name its meaning, if it has none yet. Raises `SchemaError` if the table is
        younger than the snapshot."""
        if info.created_at > self._start > 0:
            info.require_older_than(self._start)
        return self._bound_tables.setdefault(info.name, info)

    def _require_older_tables(self) -> None:
        """Called once the timestamp is known: tables may have been used before."""
        for info in self._bound_tables.values():
            info.require_older_than(self._start)

    def _known_address(self, row: object, column: Readable[Any]) -> CellAddress | None:
        """The cell's address, if its table was used before."""
        if not isinstance(column, Column):
            raise UsageError(f"expected a Column, got {type(column).__name__}")
        table = column.table
        info = self._bound(table.name)
        if info is None:
            return None
        if info.codecs.readable.get(column.name) is not column:
            info.codecs.require_readable(column)
        return CellAddress(info.table_id, self._row(table, row, column), column.name)

    async def _address(self, row: object, column: Readable[Any], deadline: float) -> CellAddress:
        table = column.table
        info = await self._info(table, deadline)
        info.codecs.require_readable(column)
        return CellAddress(info.table_id, self._row(table, row, column), column.name)

    async def _info(self, table: Table[Any], deadline: float) -> TableInfo:
        require_table(table)
        found = self._bound(table.name)
        if found is None:
            used = self._bound_tables.get(table.name)
            if used is not None:
                await self._engine.require_tables((used,), deadline)
                return used
            found = self._bind(await self._engine.table(table, deadline))
        return found

    def _row(self, table: Table[Any], key: object, column: Readable[Any] | None = None) -> bytes:
        row = encoded_key(table, key, column=column)
        self._engine.require_row("row", row)
        return row

    # ------------------------------------------------------------------ checks

    def _deadline(self, timeout: float | None) -> float:
        """The deadline of a call that begins now. Also checks the call, as every call must be."""
        if self._ended or self._engine.closed or get_running_loop() is not self._engine.loop:
            self._require_open()  # raises the error that says what is wrong
        if timeout is None:
            return self._engine.now() + self._timeout_seconds
        require_seconds(timeout)
        return self._engine.now() + timeout

    def _require_open(self) -> None:
        if self._ended or self._engine.closed or get_running_loop() is not self._engine.loop:
            self._engine.require_usable()
            self.require_not_ended()

    @property
    def ended(self) -> bool:
        """Whether it has ended, or begun to end."""
        return bool(self._ended)

    def require_not_ended(self) -> None:
        """Raises `UsageError` if it has ended, or the database was closed. Works in any thread."""
        if self._engine.closed:
            raise UsageError("the database is closed")
        if self._ended:
            raise UsageError(f"this {self._kind} {self._ended}; begin a new one")
