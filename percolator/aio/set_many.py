"""Writes many rows quickly, in many small transactions at a time."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from typing import Any, Protocol

from percolator.aio.transaction import Outcome, Transaction
from percolator.arguments import require_function, require_whole
from percolator.errors import InvalidArgument, OutcomeUnknown

IN_FLIGHT_MAX = 100_000
"""The most transactions at a time. Each is a task, and more than servers accept would only wait."""

_END = object()
"""The end of an asynchronous source. None may come from one, and is refused like any other row that
is no pair."""

BulkRow = tuple[Any, Mapping[Any, Any]]
BulkRows = Iterable[BulkRow] | AsyncIterable[BulkRow]


class TransactionRunner(Protocol):
    """Runner of the transactions: `percolator.aio.Database`."""

    async def run(
        self,
        function: Callable[[Transaction, object, Mapping[Any, Any]], Awaitable[None]],
        /,
        *arguments: object,
    ) -> None: ...

    async def resolve(self, error: OutcomeUnknown) -> Outcome: ...


class BulkWriter:
    """A fixed number of tasks that share one source of rows."""

    def __init__(
        self,
        database: TransactionRunner,
        in_flight_max: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        require_whole(in_flight_max, "in_flight_max", least=1)
        if in_flight_max > IN_FLIGHT_MAX:
            raise InvalidArgument("in_flight_max", f"expected at most {IN_FLIGHT_MAX}")
        if progress is not None:
            require_function(progress, "progress")
        self._database = database
        self._in_flight_max = in_flight_max
        self._progress = progress
        self._written = 0

    async def write(self, rows: BulkRows) -> int:
        if isinstance(rows, AsyncIterable):
            source, taking = aiter(rows), asyncio.Lock()
            work = [self._take_from(source, taking) for _ in range(self._in_flight_max)]
        else:
            shared = source_of(rows)
            work = [self._write_all(shared) for _ in range(self._in_flight_max)]
        workers = [asyncio.create_task(one) for one in work]
        ended: list[asyncio.Task[None]] = []
        for worker in workers:
            worker.add_done_callback(ended.append)
        try:
            await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for worker in ended:
                worker.result()  # raises the first error: several may fail before this task runs
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return self._written

    async def _write_all(self, shared: Iterator[BulkRow]) -> None:
        """Writes rows from an iterator that many tasks share."""
        for taken in shared:
            await self._write_one(*_pair(taken))

    async def _take_from(self, source: AsyncIterator[BulkRow], taking: asyncio.Lock) -> None:
        while True:
            async with taking:  # an asynchronous generator serves one at a time
                taken = await anext(source, _END)
            if taken is _END:
                return
            await self._write_one(*_pair(taken))

    async def _write_one(self, row: object, values: Mapping[Any, Any]) -> None:
        await self._write(row, values)
        self._written += 1
        if self._progress is not None:
            self._progress(self._written)

    async def _write(self, row: object, values: Mapping[Any, Any]) -> None:
        while True:
            try:
                await self._database.run(_set, row, values)
            except OutcomeUnknown as error:
                if await self._database.resolve(error) is Outcome.ABORTED:
                    continue
            return


def source_of(rows: Iterable[BulkRow]) -> Iterator[BulkRow]:
    """An iterator over the rows. Refuses anything that cannot be pairs."""
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise InvalidArgument("rows", f"expected pairs, got {type(rows).__name__}")
    return iter(rows)


def _pair(taken: object) -> BulkRow:
    if not isinstance(taken, tuple | list) or len(taken) != 2 or not isinstance(taken[1], Mapping):
        raise InvalidArgument(
            "rows", "expected pairs of a row key and a mapping from columns to values"
        )
    return taken[0], taken[1]


async def _set(tx: Transaction, row: object, values: Mapping[Any, Any]) -> None:
    for column, value in values.items():
        tx.set(row, column, value)
