"""Storages in memory for tests of reading: one shows a batch early, one counts what is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from percolator.testing.memory_storage import MemoryBatch, MemoryStorage


class LingeringStorage(MemoryStorage):
    """Shows a batch a while before the write returns, as LevelDB does in its thread."""

    lingering = False

    async def write(self, batch: MemoryBatch, then: Callable[[], bool] | None = None) -> bool:
        owned = await super().write(batch, then)
        if self.lingering:
            await asyncio.sleep(1)
        return owned


class ValueCountingStorage(MemoryStorage):
    """Counts the values that are read from it."""

    values_read = 0

    def get(self, key: bytes) -> bytes | None:
        self.values_read += 1
        return super().get(key)

    def iterate(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        for entry in super().iterate(start, stop):
            self.values_read += 1
            yield entry
