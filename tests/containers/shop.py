"""Orders that are placed from outside while containers are killed; observers answer each once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from percolator import Column, aio
from percolator.errors import PercolatorError
from tests.integration.observed_orders import orders, packed, placed, shipped

PAUSE_SECONDS = 0.1
ANSWERED_SECONDS = 60.0


class Shop:
    """Places one order after the other, each in a row of its own."""

    def __init__(self, database: aio.Database) -> None:
        self._database = database
        self._next = 0
        self._stopping = False

    @property
    def placed(self) -> int:
        """Orders that may have been placed."""
        return self._next

    async def open(self) -> None:
        await self._database.create_table(orders, splits=["5"])

    async def work(self) -> None:
        """Until told to stop. An order of which nothing is known is simply placed again."""
        while not self._stopping:
            row = f"{self._next % 10}-{self._next}"
            try:
                async with self._database.transaction() as tx:
                    if await tx.get(row, placed) is None:
                        await tx.set(row, placed, self._next)
            except PercolatorError:
                continue
            self._next += 1
            await asyncio.sleep(PAUSE_SECONDS)

    def stop(self) -> None:
        self._stopping = True

    async def problems(self) -> list[str]:
        """After all observers had their time: which orders were not answered exactly once."""
        deadline = time.monotonic() + ANSWERED_SECONDS
        while True:
            counts = {column.name: await self._counts(column) for column in (packed, shipped)}
            if all(sum(found.values()) == self._next for found in counts.values()):
                break
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(PAUSE_SECONDS)
        return [
            f"{name!r}: {dict(found)} times, of {self._next} orders"
            for name, found in counts.items()
            if found != {1: self._next}
        ]

    async def _counts(self, column: Column[int]) -> Counter[int]:
        """How many orders have which count."""
        async with self._database.snapshot() as snapshot:
            return Counter([row[column] async for row in snapshot.scan(orders, columns=[column])])
