"""The table of intents: which cells are about to change, for whom, and by which transaction.

A tablet stores a notification with the commit of a cell, and keeps an index of them. A row store
can do neither: nothing is atomic over rows, and what is dirty among a million clean rows cannot be
found. So a transaction announces its observed cells in a table of their own, *before* it can
commit; percolator/observers/intent_notifications.py says why nothing is lost by that.

    key      bucket 1 | timestamp 8 | hash 16
    column   table 8 | observer
    value    kind 1 | length of the row 4 | row | observed column
    time     the timestamp

An *intent* has the start timestamp of its transaction, of which it says nothing more. What is
certain already (a weak notification, a backfilled cell) has a timestamp of its own. Keys are
hashes, since a row, a column and an observer together may be longer than a key can be. Buckets
spread the writes, which would all be at the end of the table otherwise.

The first rows hold marks, which change whenever handled intents are about to be deleted.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Hashable, Sequence
from contextlib import aclosing
from hashlib import blake2b
from typing import Final, NamedTuple

from percolator.errors import CellAddress, InvariantViolation
from percolator.limits import Limits
from percolator.rowstore.layout import WRITES, Times
from percolator.rowstore.patience import Part, Patience, cells_locked_by, scanned_part
from percolator.rowstore.port import (
    TIME_UNIT,
    Change,
    DeleteCell,
    RowChange,
    RowStore,
    Selection,
    SetCell,
    StoredRow,
    can_be_named,
)
from percolator.world import World

# Rows that several callers write at the same time, in one call: one leads, and makes it for all.
#
# Only for rows that may be written again and again: if the call fails, each of the others writes
# its own rows by itself, whatever became of them. So nobody is told that something is written
# before a call with it was answered.
#
# The deadline is that of whoever leads: only those join that have as much time or more.

ROWS_MAX: Final = 100
"""Larger calls would hardly save more, and everybody waits for the slowest row."""

Write = Callable[[Sequence[RowChange], float], Awaitable[None]]
"""Writes rows until the deadline. Raises if any of them may not be written."""


class SharedWrites:
    """The writes of one table. Belongs to one event loop."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._open: _Call | None = None
        """The call that others can still join."""

    async def write(self, rows: Sequence[RowChange], deadline: float) -> None:
        """Returns when these rows are written."""
        call = self._open
        if call is not None and call.admits(rows, deadline):
            if not await call.follow(rows):
                await self._write(rows, deadline)
            return
        call = self._open = _Call(rows, deadline)
        is_written = False
        try:
            try:
                await asyncio.sleep(0)  # whoever is ready to write, writes
            finally:
                if self._open is call:
                    self._open = None
            await self._write(list(call.rows.values()), deadline)
            is_written = True
        finally:
            call.end(is_written)


class _Call:
    """The rows of a call that is not sent yet."""

    def __init__(self, rows: Sequence[RowChange], deadline: float) -> None:
        self.rows = {row.key: row for row in rows}
        self._deadline = deadline
        self._answer: asyncio.Future[bool] | None = None
        """Only if somebody follows: many calls are made by one for itself."""

    def admits(self, rows: Sequence[RowChange], deadline: float) -> bool:
        """True if these rows can be added. No call changes a row twice."""
        is_early = self._deadline <= deadline
        is_small = len(self.rows) + len(rows) <= ROWS_MAX
        return is_early and is_small and all(self.rows.get(row.key, row) == row for row in rows)

    async def follow(self, rows: Sequence[RowChange]) -> bool:
        """Waits for the call, which includes these rows; true if it was answered."""
        self.rows.update((row.key, row) for row in rows)
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
        answer = self._answer
        await asyncio.wait([answer])  # a caller that is cancelled does not cancel the others
        return answer.result()

    def end(self, is_written: bool) -> None:
        if self._answer is not None:
            self._answer.set_result(is_written)


INTENTS_TABLE: Final = -1
"""No table that a program creates has it: those are counted from one."""
BUCKETS: Final = range(1, 9)

_TABLE_BYTES = 8
_TIMESTAMP_BYTES = 8
_LENGTH_BYTES = 4
_HASH_BYTES = 16
_UNDECIDED, _CERTAIN = b"i", b"n"
_MARK = b"mark"
_MARKS = 16
_MARK_BYTES = 12
_ROWS_AT_ONCE_MAX = 1_000
_ROWS_PER_PAGE = 256


class Intent(NamedTuple):
    """An announced change of a cell, for one observer."""

    table_id: int
    row: bytes
    column: bytes
    observer: bytes
    timestamp: int
    """The start of the transaction; or, if it is certain, what stands for the change's commit."""
    is_certain: bool

    @property
    def key(self) -> bytes:
        about = blake2b(digest_size=_HASH_BYTES)
        for part in (self.row, self.column, self.observer):
            about.update(len(part).to_bytes(_LENGTH_BYTES, "big") + part)
        about.update(self.table_id.to_bytes(_TABLE_BYTES, "big"))
        digest = about.digest()
        bucket = BUCKETS[digest[0] % len(BUCKETS)]
        return key_from(bucket, self.timestamp) + digest


def key_from(bucket: int, timestamp: int = 0) -> bytes:
    """The first key of a bucket's intents at or above the timestamp."""
    return bytes([bucket]) + timestamp.to_bytes(_TIMESTAMP_BYTES, "big")


def column_of(table_id: int, observer: bytes = b"") -> bytes:
    """Column of an observer's intents; without observer, the prefix of all those of the table."""
    return table_id.to_bytes(_TABLE_BYTES, "big") + observer


class Intents:
    """The table of intents of one store. Belongs to one event loop."""

    def __init__(self, store: RowStore, times: Times, world: World, limits: Limits) -> None:
        self._store = store
        self._times = times
        self._world = world
        self._limits = limits
        self._shared = SharedWrites(self._write)

    async def announce(
        self, start: int, cells: Sequence[tuple[CellAddress, bytes]], deadline: float
    ) -> None:
        """Says that the transaction that began then may change these cells, each for an observer.
        Returns when that is durable. Repeating it does no harm."""
        intents = [Intent(*cell, observer, start, is_certain=False) for cell, observer in cells]
        await self.write(intents, deadline)

    async def announce_locked(
        self,
        table_id: int,
        observed: Collection[tuple[bytes, bytes]],
        starts: Collection[int],
        deadline: float,
    ) -> None:
        """As `announce`, for all cells in these observed columns that the transactions with these
        starts have locked in a table."""
        observers: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for column, observer in sorted(observed):  # as they are sent: in every process alike
            observers[column].append(observer)
        patience = Patience(self._world, self._limits, deadline)
        pages = cells_locked_by(self._store, self._times, table_id, observers, starts, patience)
        async with aclosing(pages) as found:
            async for page in found:
                intents = [
                    Intent(*cell, observer, start, is_certain=False)
                    for start, cell in page
                    for observer in observers[cell.column]
                ]
                if intents:  # a store refuses a call that writes nothing
                    await self.write(intents, deadline)

    async def write(self, intents: Sequence[Intent], deadline: float) -> None:
        if len(intents) < ROWS_MAX:
            rows = {one.key: RowChange(one.key, (self._set(one),)) for one in intents}
            await self._shared.write(list(rows.values()), deadline)
        else:
            await self._change(intents, self._set, deadline)

    async def delete(self, intents: Sequence[Intent], deadline: float) -> None:
        await self._change(intents, self._deleted, deadline)

    async def page(
        self, first: bytes, end: bytes, columns: Sequence[tuple[bytes, bytes]], deadline: float
    ) -> tuple[list[Intent], bytes]:
        """Some intents whose keys are in [first, end), and whose columns are in one of these
        ranges, in order; and the key from which on there may be more, or nothing."""
        selections = [Selection(WRITES, *bounds) for bounds in columns]
        names_all = can_be_named(selections, self._store.check_bytes_max)
        if not names_all:
            selections = [Selection(WRITES)]
        part = await self._part(first, end, selections, _ROWS_PER_PAGE, deadline)
        found = [
            intent_of(row, cell.column, cell.value)
            for row in part.rows
            for cell in row.cells
            if names_all or any(begin <= cell.column < stop for begin, stop in columns)
        ]
        return found, part.rest

    async def all_of(
        self, table_id: int, observers: Sequence[bytes], deadline: Callable[[], float]
    ) -> AsyncGenerator[list[Intent], None]:
        """Every intent of a table, or of some of its observers."""
        columns = [exactly(table_id, one) for one in observers] or [
            (column_of(table_id), column_of(table_id + 1))
        ]
        at = key_from(BUCKETS[0])
        while at:
            found, at = await self.page(at, b"", columns, deadline())
            yield found

    # ------------------------------------------------------------------ marks

    async def touch(self, deadline: float) -> None:
        """Changes the mark. To be answered before handled intents are deleted.

        Each attempt writes another value: otherwise, a late copy of one without an answer could
        bring back a mark that somebody has seen before others changed it.
        """
        random = self._world.random

        def changed() -> list[RowChange]:
            key = bytes([0, random.randrange(_MARKS)])
            value = random.randbytes(_MARK_BYTES)
            return [RowChange(key, (SetCell(WRITES, _MARK, TIME_UNIT, value),))]

        await self._attempted(changed, deadline)

    async def mark(self, deadline: float) -> Hashable:
        """The mark: another one after `touch`."""
        first, end = b"\0", key_from(BUCKETS[0])
        rows: list[StoredRow] = []
        while first:
            part = await self._part(first, end, [Selection(WRITES)], _MARKS + 1, deadline)
            rows += part.rows
            first = part.rest
        return tuple((row.key, row.cells[0].value) for row in rows)

    # ------------------------------------------------------------------ calls

    def _set(self, intent: Intent) -> Change:
        kind = _CERTAIN if intent.is_certain else _UNDECIDED
        length = len(intent.row).to_bytes(_LENGTH_BYTES, "big")
        column = column_of(intent.table_id, intent.observer)
        time = self._times.time(intent.timestamp)
        return SetCell(WRITES, column, time, kind + length + intent.row + intent.column)

    def _deleted(self, intent: Intent) -> Change:
        column = column_of(intent.table_id, intent.observer)
        return DeleteCell(WRITES, column, self._times.time(intent.timestamp))

    async def _change(
        self, intents: Sequence[Intent], change: Callable[[Intent], Change], deadline: float
    ) -> None:
        rows = {one.key: RowChange(one.key, (change(one),)) for one in intents}
        left = list(rows.values())
        for at in range(0, len(left), _ROWS_AT_ONCE_MAX):
            await self._write(left[at : at + _ROWS_AT_ONCE_MAX], deadline)

    async def _write(self, rows: Sequence[RowChange], deadline: float) -> None:
        """Tries until the deadline: what was written before is written again, and is the same."""
        await self._attempted(lambda: rows, deadline)

    async def _attempted(self, rows: Callable[[], Sequence[RowChange]], deadline: float) -> None:
        patience = Patience(self._world, self._limits, deadline)
        await patience.repeated(lambda seconds: self._store.write(INTENTS_TABLE, rows(), seconds))

    async def _part(
        self,
        first: bytes,
        end: bytes,
        selections: Sequence[Selection],
        rows_max: int,
        deadline: float,
    ) -> Part:
        patience = Patience(self._world, self._limits, deadline)
        return await scanned_part(
            self._store, INTENTS_TABLE, first, end, selections, rows_max, patience
        )


def exactly(table_id: int, observer: bytes) -> tuple[bytes, bytes]:
    """The bounds of one observer's column."""
    column = column_of(table_id, observer)
    return column, column + b"\0"


def intent_of(row: StoredRow, column: bytes, value: bytes) -> Intent:
    kind, begin = value[:1], 1 + _LENGTH_BYTES
    end = begin + int.from_bytes(value[1:begin], "big")
    if kind not in (_UNDECIDED, _CERTAIN) or len(value) < end:
        raise InvariantViolation(f"the table of intents has {value!r} at {row.key!r}")
    return Intent(
        int.from_bytes(column[:_TABLE_BYTES], "big"),
        value[begin:end],
        value[end:],
        column[_TABLE_BYTES:],
        int.from_bytes(row.key[1 : 1 + _TIMESTAMP_BYTES], "big"),
        kind == _CERTAIN,
    )
