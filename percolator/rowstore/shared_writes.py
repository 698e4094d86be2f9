"""Rows that several callers write at the same time, in one call: one leads, and makes it for all.

Only for rows that may be written again and again: if the call fails, each of the others writes its
own rows by itself, whatever became of them. So nobody is told that something is written before a
call with it was answered.

The deadline is that of whoever leads: only those join that have as much time or more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from percolator.rowstore.port import RowChange

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
        """Whether these rows can be added. No call changes a row twice."""
        is_early = self._deadline <= deadline
        has_room = len(self.rows) + len(rows) <= ROWS_MAX
        return is_early and has_room and all(self.rows.get(row.key, row) == row for row in rows)

    async def follow(self, rows: Sequence[RowChange]) -> bool:
        """Whether the call, which also has these rows, was answered."""
        self.rows.update((row.key, row) for row in rows)
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
        answer = self._answer
        await asyncio.wait([answer])  # a caller that is cancelled does not cancel the others
        return answer.result()

    def end(self, is_written: bool) -> None:
        if self._answer is not None:
            self._answer.set_result(is_written)
