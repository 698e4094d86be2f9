"""Writing many rows quickly: many small transactions at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from percolator.aio.transaction import Outcome, Transaction
from percolator.errors import InvalidArgument, OutcomeUnknown
from percolator.schema import Column

if TYPE_CHECKING:
    from percolator.aio.database import Database

BulkRow = tuple[Any, Mapping[Column[Any], Any]]
BulkRows = Iterable[BulkRow] | AsyncIterable[BulkRow]

_ROWS_PER_TURN = 64
"""Taken from a plain iterable before other tasks get their turn."""


class BulkWriter:
    """A fixed number of tasks that share one source of rows."""

    def __init__(
        self, database: Database, in_flight_max: int, progress: Callable[[int], None] | None
    ) -> None:
        if in_flight_max < 1:
            raise InvalidArgument("in_flight_max", f"expected at least 1, got {in_flight_max}")
        self._database = database
        self._in_flight_max = in_flight_max
        self._progress = progress
        self._written = 0

    async def write(self, rows: BulkRows) -> int:
        source = _as_async(rows)
        taking = asyncio.Lock()
        workers = [
            asyncio.create_task(self._work(source, taking)) for _ in range(self._in_flight_max)
        ]
        try:
            done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for worker in done:
                worker.result()  # raises the first error
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return self._written

    async def _work(self, source: AsyncIterator[BulkRow], taking: asyncio.Lock) -> None:
        while True:
            async with taking:
                try:
                    row, values = await anext(source)
                except StopAsyncIteration:
                    return
            await self._write(row, values)
            self._written += 1
            if self._progress is not None:
                self._progress(self._written)

    async def _write(self, row: object, values: Mapping[Column[Any], Any]) -> None:
        while True:
            try:
                await self._database.run(_set, row, values)
            except OutcomeUnknown as error:
                if await self._database.resolve(error) is Outcome.ABORTED:
                    continue
            return


async def _set(tx: Transaction, row: object, values: Mapping[Column[Any], Any]) -> None:
    for column, value in values.items():
        await tx.set(row, column, value)


async def _as_async(rows: BulkRows) -> AsyncIterator[BulkRow]:
    if isinstance(rows, AsyncIterable):
        async for one in rows:
            yield one
        return
    for count, one in enumerate(rows, start=1):
        yield one
        if count % _ROWS_PER_TURN == 0:
            await asyncio.sleep(0)
