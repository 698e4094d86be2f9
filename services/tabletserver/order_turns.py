"""One order about a tablet after another; orders about different tablets do not wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class _Turns:
    """The orders about one tablet that are under way or wait."""

    __slots__ = ("lock", "orders")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.orders = 0


class OrderTurns:
    """Belongs to one event loop. Keeps nothing of a tablet without orders: a server sees any number
    of tablets in its life, and any number in orders to close what it does not have."""

    def __init__(self) -> None:
        self._tablets: dict[int, _Turns] = {}

    def __len__(self) -> int:
        return len(self._tablets)

    @asynccontextmanager
    async def turn(self, tablet_id: int) -> AsyncIterator[None]:
        """The block runs once the tablet's earlier orders have ended, in the order of arrival."""
        turns = self._tablets.setdefault(tablet_id, _Turns())
        turns.orders += 1
        try:
            async with turns.lock:
                yield
        finally:
            turns.orders -= 1
            if not turns.orders:
                del self._tablets[tablet_id]
