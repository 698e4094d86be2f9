"""The disks of the simulated cluster: one store root, seen by each process through its own files.

Every system call takes a little virtual time, so that a pause, a kill or another process's call can
come between any two of them. Faults that occur are counted here.
"""

from __future__ import annotations

import asyncio
import errno
import marshal
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from percolator.errors import StoreFault, StoreUnusable
from percolator.formats.records import START_TIMESTAMP_BYTES
from percolator.services.chassis.epoch_directory import EpochDirectory
from percolator.services.chassis.files import DiskThreads, FileStatus, OpenFile
from percolator.services.tabletserver.storage import Ancestry, SharedDirectoryStore
from percolator.tablet.cells import LOAD_FENCE_PREFIX, W, split_component, timestamp_of
from percolator.tablet.state import LoadFence, Ownership, TabletIdentity
from percolator.testing.memory_storage import DurableMemory, MemoryStorage
from percolator.world import Random
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.simulation.loop import SimulationLoop

ROOT = Path("/store")
FSYNC_FAILED = "fsync failed"
DISK_FULL = "disk full"
HELD_UP = "system call held up by a store that stalls"
_CALL_SECONDS_MAX = 0.0003
_HEARD_SECONDS_MAX = 0.01
_SEEN_SHARE = 0.5
"""The share of looks, begun while the store stalls, that see the present and are answered late. The
others see what is there when the store answers again."""

_TROUBLE = {errno.ENOSPC: DISK_FULL, errno.EIO: FSYNC_FAILED}


class SimulatedFiles(MemoryFiles):
    """The store root as one incarnation of one process sees it."""

    def __init__(
        self,
        loop: SimulationLoop,
        disk: MemoryDisk,
        random: Random,
        occurred: Counter[str],
        fsync_seconds_max: float,
        store_answers: asyncio.Event,
    ) -> None:
        """While `store_answers` is not set, the store stalls for all processes; while `answers` is
        not set, for this one."""
        super().__init__(disk)
        self._store_answers = store_answers
        self.is_full = False
        """True if appends find no space; the process also sees it as free bytes."""
        self._loop = loop
        self._random = random
        self._occurred = occurred
        self.fsync_seconds_max = fsync_seconds_max

    async def step(self, operation: str, path: Path) -> None:
        limit = self.fsync_seconds_max if operation == "fsync" else _CALL_SECONDS_MAX
        await self._loop.sleep(self._random.random() * limit)
        if self.stalls and not (operation == "stat" and self._random.random() < _SEEN_SHARE):
            await self.until_the_store_answers()
        if self.is_full and operation in ("append", "create"):
            self.faults.fail(operation, number=errno.ENOSPC)
        try:
            survives = self.survives(operation, path)
        except OSError as error:
            if error.errno in _TROUBLE:
                self._occurred[_TROUBLE[error.errno]] += 1
            raise
        if not survives:
            await self._loop.create_future()

    async def stat(self, path: Path) -> FileStatus:
        """The answer to a look may be as old as the stall, and tells nothing of its end."""
        found = await super().stat(path)
        if self.stalls:
            await self.until_the_store_answers()
            if not self.survives("hear", path):
                await self._loop.create_future()
        return found

    @property
    def stalls(self) -> bool:
        """True while the store does not answer this process."""
        return not (self.answers.is_set() and self._store_answers.is_set())

    async def until_the_store_answers(self) -> None:
        """Returns when the store does not stall, at once if it does not now."""
        self._occurred[HELD_UP] += self.stalls
        while self.stalls:
            await self.answers.wait()
            await self._store_answers.wait()

    async def heard(self) -> None:
        """Takes the time between the end of a write in a thread and when the event loop
        hears of it. Both a short and a long while are likely."""
        seconds = _HEARD_SECONDS_MAX * self._random.random() ** 4
        await self._loop.sleep(seconds)
        if not self.survives("hear", ROOT):
            await self._loop.create_future()

    async def free_bytes(self, path: Path) -> int:
        found = await super().free_bytes(path)
        return 0 if self.is_full else found


# A tablet's content as files of its epoch directory: a table of everything, and a log after it.
#
#     000003.ldb   everything that was there when the directory was opened last
#     000004.log   every batch written since, each with its length and checksum
#
# The names are those of LevelDB, so that the real clone carries the files to the next epoch. The
# promises are LevelDB's: a batch is durable when its write returns; after a crash or a failed write
# it is there as a whole or not at all; what opening found is made durable before anything is
# served.

TORN = "torn batch dropped at opening"

_HEADER = struct.Struct(">II")
_BYTES_MAX = 1 << 26


async def open_tablet(
    files: SimulatedFiles, directory: Path, occurred: Counter[str], collected: dict[int, int]
) -> MemoryStorage:
    """Replays what the directory holds, makes it durable, and begins a new log.

    Adds to `collected` the transactions whose commit records were deleted, and their timestamps.
    """
    try:
        names = sorted(await files.list(directory))
        numbers = [int(name[:6]) for name in names if name.endswith((".ldb", ".log"))]
        content = await _replayed(files, directory, names, occurred)
        table = max(numbers, default=0) + 1
        unfinished = directory / f"{table:06}.tmp"
        async with await files.create(unfinished, exclusive=False) as file:
            await file.append(_framed(content))
            await file.fsync()
        await files.rename(unfinished, directory / f"{table:06}.ldb")
        log = await files.create(directory / f"{table + 1:06}.log")
        await files.fsync_directory(directory)
        for name in names:
            await files.unlink(directory / name)
    except OSError as error:
        raise StoreUnusable(f"cannot open {directory}: {error}", fault=_fault(error)) from error
    return MemoryStorage(_TabletDisk(files, log, content, collected))


async def _replayed(
    files: SimulatedFiles, directory: Path, names: list[str], occurred: Counter[str]
) -> dict[bytes, bytes]:
    """The newest table, and the logs above it."""
    tables = [name for name in names if name.endswith(".ldb")]
    newest = tables[-1:]
    logs = [name for name in names if name.endswith(".log") and name[:6] > (newest or [""])[0][:6]]
    content: dict[bytes, bytes] = {}
    for name in newest + logs:
        data = await files.read(directory / name, bytes_max=_BYTES_MAX)
        for batch in _batches(data, occurred):
            for key, value in batch.items():
                if value is None:
                    content.pop(key, None)
                else:
                    content[key] = value
    return content


def _framed(batch: dict[bytes, bytes] | dict[bytes, bytes | None]) -> bytes:
    payload = marshal.dumps(batch)
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def _batches(data: bytes, occurred: Counter[str]) -> Iterator[dict[bytes, bytes | None]]:
    """All batches before the first that is torn: nothing after that was ever acknowledged."""
    at = 0
    while at < len(data):
        if at + _HEADER.size > len(data):
            occurred[TORN] += 1
            return
        size, checksum = _HEADER.unpack_from(data, at)
        payload = data[at + _HEADER.size : at + _HEADER.size + size]
        if not size or len(payload) < size or zlib.crc32(payload) != checksum:
            occurred[TORN] += 1
            return
        yield marshal.loads(payload)  # written by this very process
        at += _HEADER.size + size


def _fault(error: OSError) -> StoreFault:
    full = error.errno == 28
    return StoreFault.DISK_FULL if full else StoreFault.INPUT_OUTPUT


class _TabletDisk(DurableMemory):
    """The disk below a tablet's `MemoryStorage`: its open log."""

    def __init__(
        self,
        files: SimulatedFiles,
        log: OpenFile,
        content: dict[bytes, bytes],
        collected: dict[int, int],
    ) -> None:
        super().__init__()
        self.durable = content
        self._files = files
        self._log = log
        self._collected = collected

    async def sync(self) -> None:
        if self.in_doubt is not None:
            note_collected(self.in_doubt, self.durable, self._collected)
            await self._log.append(_framed(self.in_doubt))
            await self._log.fsync()

    async def heard(self) -> None:
        await self._files.heard()


def note_collected(
    changes: dict[bytes, bytes | None], before: dict[bytes, bytes], collected: dict[int, int]
) -> None:
    """Adds the transactions whose commit records a batch deletes, and their timestamps."""
    gone = [
        key
        for key, value in changes.items()
        if value is None and key.startswith(W) and key in before
    ]
    undone = _loads_under_way(before) if gone else []
    for key in gone:
        row = split_component(key, 1)[0]
        if not any(load.covers(row) for load in undone):
            start = int.from_bytes(before[key][:START_TIMESTAMP_BYTES], "big")
            collected[start] = timestamp_of(key)


def _loads_under_way(entries: dict[bytes, bytes]) -> list[LoadFence]:
    """Nothing is committed behind their fences yet, so nothing deleted there is history."""
    fences = [
        LoadFence.of_record(key, record)
        for key, record in entries.items()
        if key.startswith(LOAD_FENCE_PREFIX)
    ]
    return [fence for fence in fences if not fence.commit_timestamp]


# The store of a simulated tablet server: the real one, except for LevelDB itself.
#
# Claims, seals, clones and checks are the real ones, system call by system call. What is opened in
# an epoch directory is a table and a log.


class SimulatedTabletStore:
    """A `TabletStore`."""

    def __init__(
        self, files: SimulatedFiles, occurred: Counter[str], collected: dict[int, int]
    ) -> None:
        self._files = files
        self._occurred = occurred
        self._collected = collected
        # Without any threads: nothing that would need one is called.
        self._directories = SharedDirectoryStore(files, ROOT, DiskThreads(0, "none"))

    async def take_over(self, tablet: TabletIdentity, ancestry: Ancestry) -> EpochDirectory:
        return await self._directories.take_over(tablet, ancestry)

    async def open(self, ownership: Ownership, *, open_tablets: int) -> MemoryStorage:
        if not isinstance(ownership, EpochDirectory):
            raise TypeError(f"not an ownership of this store: {ownership!r}")
        return await open_tablet(self._files, ownership.path, self._occurred, self._collected)

    async def remove_superseded(self, tablet: TabletIdentity) -> None:
        await self._directories.remove_superseded(tablet)
