"""The right to serve a tablet where no disk tells about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class MemoryOwnership:
    """An `Ownership` that stands while a function says so; by default, forever."""

    def __init__(self, is_owner: Callable[[], bool] = lambda: True) -> None:
        self._is_owner = is_owner

    def look(self) -> bool:
        return self._is_owner()

    async def stands(self) -> bool:
        await asyncio.sleep(0)
        return self._is_owner()
