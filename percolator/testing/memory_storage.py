"""A `Storage` in memory that forgets what a disk would forget.

What `write` acknowledged survives a crash. If a crash or a disk error occurs during a write, that
write is in doubt: when the disk is opened again, the write may be there as a whole, or not at all.
Both happen on real disks, so a test can ask for either.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from percolator.errors import InvariantViolation, StoreFault


class MemoryOwnership:
    """The right to serve a tablet. It is held while a function says so; by default, forever."""

    def __init__(self, is_owner: Callable[[], bool] = lambda: True) -> None:
        self._is_owner = is_owner

    def is_held_blocking(self) -> bool:
        return self._is_owner()

    async def is_held(self) -> bool:
        await asyncio.sleep(0)
        return self._is_owner()


_CLOSED = "closed"


class MemoryBatch:
    """Changes to a `MemoryStorage`, by key; None deletes."""

    def __init__(self) -> None:
        self.changes: dict[bytes, bytes | None] = {}

    def put(self, key: bytes, value: bytes) -> None:
        self.changes[key] = value

    def delete(self, key: bytes) -> None:
        self.changes[key] = None


class DurableMemory:
    """The part that survives a crash. Open only one `MemoryStorage` on it at a time."""

    def __init__(self) -> None:
        self.durable: dict[bytes, bytes] = {}
        self.in_doubt: dict[bytes, bytes | None] | None = None
        """The write of which it is not certain, until `settle`, whether it succeeded."""

    async def sync(self) -> None:
        """Waits for the disk. A test or a simulation replaces it to take time, or to fail with an
        `OSError`."""
        await asyncio.sleep(0)

    async def heard(self) -> None:
        """Waits until the writer hears that its write has ended. Readers see it already, as with
        a database that is written in a thread. A simulation replaces it to take time."""

    def settle(self, *, kept: bool) -> None:
        """Decides whether the write in doubt reached the disk."""
        if kept and self.in_doubt is not None:
            _apply(self.durable, self.in_doubt)
        self.in_doubt = None


class MemoryStorage:
    """An ordered map over a `DurableMemory`."""

    failures: tuple[type[Exception], ...] = (OSError,)
    is_cache = False

    def __init__(self, disk: DurableMemory | None = None) -> None:
        self.disk = disk or DurableMemory()
        if self.disk.in_doubt is not None:
            raise InvariantViolation("a write is in doubt: settle it before opening")
        self._view = View(dict(self.disk.durable), sorted(self.disk.durable))
        self._writing = False
        self._broken: str | None = None

    def fault(self, error: Exception) -> StoreFault:
        return StoreFault.INPUT_OUTPUT

    def get(self, key: bytes) -> bytes | None:
        self._check()
        return self._view.entries.get(key)

    def cursor(self) -> MemoryCursor:
        self._check()
        return MemoryCursor(self._view)

    def iterate(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._check()
        # Never lowered again: nothing reports when an iterator is dropped.
        self._view.lookers += 1
        return _range(self._view, start, stop)

    def batch(self) -> MemoryBatch:
        return MemoryBatch()

    async def write(self, batch: MemoryBatch, then: Callable[[], bool] | None = None) -> bool:
        self._check()
        if self._writing:
            raise InvariantViolation("two writes at the same time")
        self._writing = True
        self.disk.in_doubt = batch.changes
        try:
            await self.disk.sync()
        except BaseException:
            self._broken = "a write failed"
            raise
        finally:
            self._writing = False
        # A crash may have occurred, and been settled, while this write waited for the disk.
        self._check()
        self.disk.settle(kept=True)
        self._show(batch.changes)
        owned = then is None or then()
        await self.disk.heard()
        return owned

    def approximate_bytes(self, start: bytes, stop: bytes) -> int:
        return sum(len(key) + len(value) for key, value in _range(self._view, start, stop))

    async def compact(self, start: bytes, stop: bytes) -> None:
        """Does nothing: a map in memory keeps nothing of what was deleted."""
        self._check()

    async def close(self) -> None:
        self._broken = _CLOSED

    def crash(self) -> None:
        """Loses everything but the disk, immediately."""
        self._broken = "crashed"

    def _check(self) -> None:
        if self._broken == _CLOSED:
            raise RuntimeError("the storage is closed")  # as LevelDB's: who asks has a bug
        if self._broken is not None:
            raise OSError(f"the storage cannot be used: {self._broken}")

    def _show(self, changes: dict[bytes, bytes | None]) -> None:
        if self._view.lookers:
            self._view = View(dict(self._view.entries), list(self._view.keys))
        entries, keys = self._view.entries, self._view.keys
        for key, value in changes.items():
            if value is None:
                if entries.pop(key, None) is not None:
                    del keys[bisect_left(keys, key)]
            else:
                if key not in entries:
                    insort(keys, key)
                entries[key] = value


class View:
    """The map as cursors and iterators see it: while any of them uses it, it does not change."""

    def __init__(self, entries: dict[bytes, bytes], keys: list[bytes]) -> None:
        self.entries = entries
        self.keys = keys
        self.lookers = 0


_NOWHERE = View({}, [])
"""The view of a closed cursor."""


class MemoryCursor:
    """A cursor over the map as it was when the cursor was created: until it is closed, writers
    copy the view that it uses.

    A position outside all entries is always the one behind the last entry, where Python finds
    nothing either.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        view.lookers += 1
        self._entries = view.entries
        self._keys = view.keys
        self._at = len(view.keys)

    def seek(self, key: bytes) -> None:
        self._at = bisect_left(self._keys, key)

    def valid(self) -> bool:
        return self._at < len(self._keys)

    def key(self) -> bytes:
        try:
            return self._keys[self._at]
        except IndexError:
            raise _outside() from None

    def item(self) -> tuple[bytes, bytes]:
        try:
            key = self._keys[self._at]
        except IndexError:
            raise _outside() from None
        return key, self._entries[key]

    def next(self) -> None:
        if self._at >= len(self._keys):
            raise _outside()
        self._at += 1

    def prev(self) -> None:
        if self._at >= len(self._keys):
            raise _outside()
        self._at = self._at - 1 if self._at else len(self._keys)

    def close(self) -> None:
        self._view.lookers -= 1
        self._view = _NOWHERE
        self._entries, self._keys = _NOWHERE.entries, _NOWHERE.keys


def _outside() -> InvariantViolation:
    return InvariantViolation("the cursor is not on an entry")


def _range(view: View, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
    entries, keys = view.entries, view.keys
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
