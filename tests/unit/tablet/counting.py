"""Counting instead of timing: how often a storage is read, or a method is called."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from percolator.testing.memory_storage import DurableMemory, MemoryCursor, MemoryStorage


class CountingCursor(MemoryCursor):
    """Counts what is expensive: steps, and seeks by the space that they go to."""

    counts: Counter[str]

    def seek(self, key: bytes) -> None:
        self.counts[f"seek {key[:1].decode()}"] += 1
        super().seek(key)

    def next(self) -> None:
        self.counts["step"] += 1
        super().next()

    def prev(self) -> None:
        self.counts["step"] += 1
        super().prev()


class CountingStorage(MemoryStorage):
    def __init__(self, disk: DurableMemory) -> None:
        super().__init__(disk)
        self.counts: Counter[str] = Counter()

    def cursor(self) -> MemoryCursor:
        cursor = CountingCursor(self._view)
        cursor.counts = self.counts
        return cursor

    def get(self, key: bytes) -> bytes | None:
        self.counts[f"get {key[:1].decode()}"] += 1
        return super().get(key)


def counted(patch: pytest.MonkeyPatch, owner: type, method: str) -> list[object]:
    """Notes each call of a method in the list that it returns."""
    correct = getattr(owner, method)
    calls: list[object] = []

    def noting(self: object, *arguments: Any) -> Any:
        calls.append(self)
        return correct(self, *arguments)

    patch.setattr(owner, method, noting)
    return calls
