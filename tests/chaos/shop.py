"""Orders that are placed while processes are killed; workers' observers handle each once."""

from __future__ import annotations

import asyncio
import time

from percolator import Row, aio
from percolator.errors import PercolatorError
from tests.integration.observed_orders import orders, packed, placed, shipped

PAUSE_SECONDS = 0.1
ANSWERED_SECONDS = 60.0
_POLL_SECONDS = 0.02


class Shop:
    """Places one order after another, each in its own row."""

    def __init__(self, database: aio.Database) -> None:
        self._database = database
        self._next = 0
        self._placed: set[str] = set()
        """The rows of orders whose transactions are known to have committed."""
        self._stopping = False

    @property
    def placed(self) -> int:
        """The number of orders that are known to have been placed."""
        return len(self._placed)

    async def open(self) -> None:
        await self._database.create_table(orders, splits=["5"])

    async def work(self) -> None:
        """Places orders until told to stop."""
        while not self._stopping:
            await self.place()
            await asyncio.sleep(PAUSE_SECONDS)

    async def place(self) -> str:
        """Places the next order and returns its row. One of unknown outcome is placed again."""
        row = f"{self._next % 10}-{self._next}"
        number = self._next
        self._next += 1
        while True:
            try:
                async with self._database.transaction() as tx:
                    if await tx.get(row, placed) is None:
                        await tx.set(row, placed, number)
            except PercolatorError:
                await asyncio.sleep(_POLL_SECONDS)
            else:
                self._placed.add(row)
                return row

    async def handled(self, row: str) -> None:
        """Returns when both observers, one after the other, have handled the order."""
        while True:
            try:
                async with self._database.snapshot() as snapshot:
                    if await snapshot.get(row, shipped) is not None:
                        return
            except PercolatorError:
                pass  # the probe goes on: what matters is how long it takes
            await asyncio.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        self._stopping = True

    async def problems(self) -> list[str]:
        """Which orders are lost, or not handled exactly once, when the observers have finished.

        A probe that was cancelled at the end may or may not have placed its order: it counts if it
        is stored.
        """
        deadline = time.monotonic() + ANSWERED_SECONDS
        while unhandled := _unhandled(found := await self._stored()):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(PAUSE_SECONDS)
        stored = {row.key for row in found if placed in row}
        return [
            *(f"order {row} was placed and is not stored" for row in self._placed - stored),
            *(
                f"order {row.key} is handled and was never placed"
                for row in found
                if row.key not in stored | self._placed
            ),
            *(
                f"order {row}: packed and shipped {times} times, of {len(found)} orders"
                for row, times in unhandled.items()
            ),
        ]

    async def _stored(self) -> list[Row[str]]:
        columns = [placed, packed, shipped]
        async with self._database.snapshot() as snapshot:
            return [row async for row in snapshot.scan(orders, columns=columns)]


def _unhandled(found: list[Row[str]]) -> dict[str, tuple[int, int]]:
    """The orders that were not handled once, with how often each observer handled them."""
    times = {row.key: (row.get(packed, 0), row.get(shipped, 0)) for row in found}
    return {row: both for row, both in times.items() if both != (1, 1)}
