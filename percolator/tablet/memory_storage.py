"""A `Storage` in memory that forgets what a disk would forget.

Of a crash survives what `write` acknowledged. What was being written when the crash, or an error
of the disk, struck is in doubt: it may be there when the disk is opened again, whole, or not at
all. Both happen on real disks, so both can be asked for here.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Iterator

from percolator.errors import InvariantViolation, StoreFault


class MemoryBatch:
    """Changes of a `MemoryStorage`: None deletes."""

    def __init__(self) -> None:
        self.changes: dict[bytes, bytes | None] = {}

    def put(self, key: bytes, value: bytes) -> None:
        self.changes[key] = value

    def delete(self, key: bytes) -> None:
        self.changes[key] = None


class MemoryDisk:
    """What outlives a crash. Open one `MemoryStorage` on it at a time."""

    def __init__(self) -> None:
        self.durable: dict[bytes, bytes] = {}
        self.in_doubt: dict[bytes, bytes | None] | None = None
        """The write that neither succeeded nor failed for certain, until `settle`."""

    async def sync(self) -> None:
        """Where a write waits for the disk. A test or a simulation replaces it to take time, or to
        fail with an `OSError`."""
        await asyncio.sleep(0)

    def settle(self, *, kept: bool) -> None:
        """Decides whether the write in doubt reached the disk."""
        if kept and self.in_doubt is not None:
            _apply(self.durable, self.in_doubt)
        self.in_doubt = None


class MemoryStorage:
    """An ordered map over a `MemoryDisk`."""

    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self.disk = disk or MemoryDisk()
        if self.disk.in_doubt is not None:
            raise InvariantViolation("a write is in doubt: settle it before opening")
        self._entries = dict(self.disk.durable)
        self._keys = sorted(self._entries)
        self._shared = False
        """Whether a cursor or an iterator may still look at `_entries` and `_keys`."""
        self._writing = False
        self._broken: str | None = None

    def fault(self, error: Exception) -> StoreFault:
        return StoreFault.INPUT_OUTPUT

    def get(self, key: bytes) -> bytes | None:
        self._check()
        return self._entries.get(key)

    def cursor(self) -> MemoryCursor:
        self._check()
        self._shared = True
        return MemoryCursor(self._entries, self._keys)

    def iterate(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._check()
        self._shared = True
        return _range(self._entries, self._keys, start, stop)

    def batch(self) -> MemoryBatch:
        return MemoryBatch()

    async def write(self, batch: MemoryBatch) -> None:
        self._check()
        if self._writing:
            raise InvariantViolation("two writes at a time")
        self._writing = True
        self.disk.in_doubt = batch.changes
        try:
            await self.disk.sync()
        except BaseException:
            self._broken = "a write failed"
            raise
        finally:
            self._writing = False
        # A crash may have struck, and been settled, while this write waited for the disk.
        self._check()
        self.disk.settle(kept=True)
        self._show(batch.changes)

    def approximate_bytes(self, start: bytes, stop: bytes) -> int:
        return sum(
            len(key) + len(value) for key, value in _range(self._entries, self._keys, start, stop)
        )

    async def compact(self, start: bytes, stop: bytes) -> None:
        """A map in memory keeps nothing of what was deleted."""
        self._check()

    async def close(self) -> None:
        self._broken = "closed"

    def crash(self) -> None:
        """Loses everything but the disk, at this instant."""
        self._broken = "crashed"

    def _check(self) -> None:
        if self._broken is not None:
            raise OSError(f"the storage cannot be used: {self._broken}")

    def _show(self, changes: dict[bytes, bytes | None]) -> None:
        if self._shared:
            self._entries = dict(self._entries)
            self._keys = list(self._keys)
            self._shared = False
        keys = self._keys
        for key, value in changes.items():
            if value is None:
                if key in self._entries:
                    del keys[bisect_left(keys, key)]
            elif key not in self._entries:
                insort(keys, key)
        _apply(self._entries, changes)


class MemoryCursor:
    """A cursor over the map as it was when the cursor was made: writers copy what it shares."""

    def __init__(self, entries: dict[bytes, bytes], keys: list[bytes]) -> None:
        self._entries = entries
        self._keys = keys
        self._at = len(keys)

    def seek(self, key: bytes) -> None:
        self._at = bisect_left(self._keys, key)

    def seek_to_last(self) -> None:
        self._at = len(self._keys) - 1

    def valid(self) -> bool:
        return 0 <= self._at < len(self._keys)

    def key(self) -> bytes:
        return self._keys[self._standing()]

    def item(self) -> tuple[bytes, bytes]:
        key = self._keys[self._standing()]
        return key, self._entries[key]

    def next(self) -> None:
        self._at = self._standing() + 1

    def prev(self) -> None:
        self._at = self._standing() - 1

    def close(self) -> None:
        self._entries, self._keys = {}, []

    def _standing(self) -> int:
        at = self._at
        if not 0 <= at < len(self._keys):
            raise InvariantViolation("the cursor stands on no entry")
        return at


def _range(
    entries: dict[bytes, bytes], keys: list[bytes], start: bytes, stop: bytes
) -> Iterator[tuple[bytes, bytes]]:
    for at in range(bisect_left(keys, start), len(keys)):
        key = keys[at]
        if key >= stop:
            return
        yield key, entries[key]


def _apply(entries: dict[bytes, bytes], changes: dict[bytes, bytes | None]) -> None:
    for key, value in changes.items():
        if value is None:
            entries.pop(key, None)
        else:
            entries[key] = value
