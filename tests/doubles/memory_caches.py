"""Caches of tablets in memory, with files as LevelDB has them: tables, a list of the finished ones,
and tables that a compaction has begun to write."""

from __future__ import annotations

import marshal
from collections.abc import Awaitable, Callable, Collection, Mapping

from percolator.errors import StoreFault, StoreUnusable
from percolator.services.tabletserver.bucket_store import Cache
from percolator.services.tabletserver.storage import fault_of
from percolator.testing.memory_storage import DurableMemory, MemoryStorage
from percolator.world import Random

CURRENT = "CURRENT"
_TABLES_MAX = 2
"""With more, they are compacted into one."""
_COMPACTION_WRITES = 4
"""A compaction lasts so many writes."""

Changes = dict[bytes, bytes | None]


class CacheDisk(DurableMemory):
    """One cache on the disk of a machine: it survives the end of a process."""

    def __init__(self, step: Callable[[str], Awaitable[None]]) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        """Tables, finished or not."""
        self.finished: list[str] = []
        """Tables, the oldest first."""
        self.log: Changes = {}
        """Changes that are in no table."""
        self._number = 0
        self.step = step
        self._compacting: tuple[str, bytes] | None = None
        """The table that is being written, and its content in the end."""
        self._merging = 0
        """How many tables it replaces."""
        self._writes_left = 0

    async def sync(self) -> None:
        await self.step("append")

    async def heard(self) -> None:
        await self.step("hear")

    def settle(self, *, kept: bool) -> None:
        if kept and self.in_doubt is not None:
            self.log.update(self.in_doubt)
        super().settle(kept=kept)
        self._compact_a_bit()

    def load(self, files: Mapping[str, bytes]) -> None:
        """Takes the files of a snapshot."""
        try:
            finished = list(marshal.loads(files[CURRENT]))
            tables = {name: files[name] for name in finished}
            durable = {key: value for key, value in _merged(tables).items() if value is not None}
        except (KeyError, ValueError, EOFError, TypeError) as error:
            raise StoreUnusable(f"no cache: {error!r}", fault=StoreFault.DAMAGED) from error
        self.finished, self.files, self.durable = finished, tables, durable
        self._number = max((int(name[:6]) for name in finished), default=0)

    def flush(self) -> None:
        """Moves the log into a table."""
        if self.log:
            name = self._next_name()
            self.files[name] = marshal.dumps(self.log)
            self.finished.append(name)
            self.log = {}

    def _compact_a_bit(self) -> None:
        """Begins, or ends, to write a table in place of all others."""
        if self._compacting is not None:
            self._writes_left -= 1
            if self._writes_left:
                return
            name, content = self._compacting
            self.files[name] = content
            for old in self.finished[: self._merging]:
                del self.files[old]
            self.finished[: self._merging] = [name]
            self._compacting = None
        elif len(self.finished) > _TABLES_MAX:
            self._merging = len(self.finished)
            content = marshal.dumps(_merged({name: self.files[name] for name in self.finished}))
            name = self._next_name()
            self.files[name] = content[: len(content) // 2]
            self._compacting = name, content
            self._writes_left = _COMPACTION_WRITES

    def _next_name(self) -> str:
        self._number += 1
        return f"{self._number:06}.ldb"


def _merged(tables: Mapping[str, bytes]) -> Changes:
    found: Changes = {}
    for data in tables.values():
        found.update(marshal.loads(data))
    return found


class MemorySnapshot:
    """A snapshot of a `MemoryCache`."""

    def __init__(self, tables: Mapping[str, bytes], finished: list[str]) -> None:
        self._tables = tables
        self.small = {CURRENT: marshal.dumps(finished)}
        self.sizes = {name: len(data) for name, data in tables.items()}

    async def read(self, name: str) -> bytes:
        return self._tables[name]

    def close(self) -> None:
        self._tables = {}


class MemoryCache(MemoryStorage):
    """An open cache."""

    disk: CacheDisk

    def __init__(self, disk: CacheDisk) -> None:
        super().__init__(disk)

    async def snapshot(self) -> MemorySnapshot:
        self._check()
        await self.disk.heard()
        self._check()
        disk = self.disk
        disk.flush()
        return MemorySnapshot({name: disk.files[name] for name in disk.finished}, disk.finished[:])

    def fault(self, error: Exception) -> StoreFault:
        return fault_of(error)

    def abandon(self) -> None:
        self.crash()


class MemoryCaches:
    """The caches of one machine, as one of its processes has them."""

    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(
        self,
        disks: dict[int, CacheDisk],
        random: Random,
        step: Callable[[str], Awaitable[None]],
    ) -> None:
        """`step` is awaited where an operation takes time, with its name; it may raise."""
        self._disks = disks
        self._random = random
        self._step = step
        self.found = 0
        """How many caches were used again, or were tried."""

    async def find(self, tablet_id: int, *, open_tablets: int) -> Cache | None:
        disk = self._disks.get(tablet_id)
        if disk is None:
            return None
        self.found += 1
        disk.step = self._step
        disk.settle(kept=self._random.random() < 1 / 2)
        return MemoryCache(disk)

    async def begin(self, tablet_id: int) -> NewMemoryCache:
        await self._step("create")
        disk = self._disks[tablet_id] = CacheDisk(self._step)
        return NewMemoryCache(disk)

    async def drop_idle(self, in_use: Collection[int]) -> None:
        for tablet_id in [one for one in self._disks if one not in in_use]:
            if self._random.random() < 1 / 2:
                del self._disks[tablet_id]


class NewMemoryCache:
    """A cache that is being filled."""

    def __init__(self, disk: CacheDisk) -> None:
        self._disk = disk
        self._files: dict[str, bytes] = {}

    async def put(self, name: str, data: bytes) -> None:
        await self._disk.sync()
        self._files[name] = data

    async def open(self, *, open_tablets: int) -> Cache:
        if self._files:
            self._disk.load(self._files)
        return MemoryCache(self._disk)
