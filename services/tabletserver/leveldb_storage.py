"""`Storage` on LevelDB: the only module that uses plyvel.

A tablet relies on this behaviour of LevelDB's `DBImpl::Write` (1.22, 1.23):

* A synced batch is appended to the log and fsynced, then inserted into the memtable, and only then
  is the database's last sequence number raised, under its mutex. `Get`, and an iterator when it is
  created, look at the last sequence number. So no part of a batch is visible before all of it is
  durable, although the insertion runs in another thread while the event loop reads.
* An iterator stays at the sequence number of its creation.
* After a failed append or fsync the batch "may or may not show up when the DB is re-opened". So
  nothing more is written here after a failure: the owner closes this object and opens another.

Only writes, the closing flush and compaction run outside the event loop's thread.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import plyvel

from percolator.errors import StoreFault, StoreUnusable
from percolator.services.chassis.files import DiskThreads
from percolator.tasks import Tasks

KIBIBYTE = 1024
MEBIBYTE = 1024 * KIBIBYTE
WRITE_BUFFERS_BYTES = 256 * MEBIBYTE
"""The write buffers of all open tablets together."""

_BEYOND_ALL_KEYS = b"\xff" * 8


@dataclass(frozen=True)
class LevelDBOptions:
    """How one tablet's LevelDB is opened."""

    write_buffer_bytes: int = 8 * MEBIBYTE
    block_cache_bytes: int = 32 * MEBIBYTE
    block_bytes: int = 4 * KIBIBYTE
    bloom_bits_per_key: int = 10
    open_files_max: int = 500
    compressed: bool = False
    """Uncompressed blocks are read in place, through the memory map of their file. With 1,000,000
    rows of 100 random bytes a random seek took 4 us instead of 17, writing took half the CPU, and
    the files were 7 % larger. Compressible values gain as much, but take more disk space."""


def write_buffer_bytes(open_tablets: int, together_bytes: int = WRITE_BUFFERS_BYTES) -> int:
    """The write buffer of each of `open_tablets`: 1 to 8 MiB, but at most `together_bytes`."""
    share = together_bytes // max(1, open_tablets)
    return max(min(1 * MEBIBYTE, together_bytes), min(share, 8 * MEBIBYTE))


class LevelDBStorage:
    """One open LevelDB directory. Never fork while one is open: that loses LevelDB's lock."""

    failures: tuple[type[Exception], ...] = (plyvel.Error, OSError)

    def __init__(
        self,
        directory: Path,
        threads: DiskThreads,
        options: LevelDBOptions = LevelDBOptions(),
        *,
        create: bool = False,
        slow: DiskThreads | None = None,
    ) -> None:
        """Opens the database in an existing directory: replays the log, 7.5 ms per MB. Blocks.

        `create` allows a new database if there is none. In `slow` run compactions and the
        closing flush, which may take seconds, instead of in `threads`. Raises `StoreUnusable`.
        """
        self._directory = directory
        self._threads = threads
        self._slow = slow or threads
        try:
            self._database = plyvel.DB(
                # LevelDB creates the directory that it is given, whatever its options say. No
                # directory can be created at a path that ends in "/.". Without it, a deposed owner,
                # whose directory was renamed, would leave a ghost under the live name.
                f"{directory}/.",
                create_if_missing=create,
                write_buffer_size=options.write_buffer_bytes,
                lru_cache_size=options.block_cache_bytes,
                block_size=options.block_bytes,
                bloom_filter_bits=options.bloom_bits_per_key,
                max_open_files=options.open_files_max,
                compression="snappy" if options.compressed else None,
            )
        except self.failures as error:
            raise StoreUnusable(
                f"LevelDB cannot open {directory}: {_why(directory, error)}",
                fault=self.fault(error),
            ) from error
        # Bound methods of LevelDB itself: a Python function around them would double the cost.
        self.get = self._database.get
        # Closing LevelDB while a thread compacts it would crash the process.
        self._compacting = asyncio.Lock()
        self._tasks = Tasks()
        self._abandoned = False
        self.cursor = self._database.raw_iterator

    def fault(self, error: Exception) -> StoreFault:
        return fault_of(error)

    def iterate(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        entries: Iterator[tuple[bytes, bytes]] = self._database.iterator(start=start, stop=stop)
        return entries

    def batch(self) -> plyvel.WriteBatch:
        return self._database.write_batch(sync=True)

    async def write(self, batch: plyvel.WriteBatch, then: Callable[[], bool] | None = None) -> bool:
        return await self._threads.run(partial(_write, batch, then))

    def approximate_bytes(self, start: bytes, stop: bytes) -> int:
        return int(self._database.approximate_size(start, stop))

    async def compact(self, start: bytes, stop: bytes) -> None:
        # Not in the threads for writes, for which other tablets wait: this may take seconds.
        compact = partial(self._database.compact_range, start=start, stop=stop)
        await self._tasks.run_to_the_end(self._alone(compact))

    async def close(self) -> None:
        """Flushes the memtable, so that only a crash leaves a log to replay, and closes."""
        if self._database.closed:
            return
        try:
            await self._tasks.run_to_the_end(self._alone(self._flush))
        finally:
            async with self._compacting:
                self._database.close()

    def abandon(self) -> None:
        """Closes without a flush, after a failed write or when another owner has taken over."""
        self._abandoned = True
        if not self._compacting.locked():
            self._database.close()

    async def _alone(self, work: Callable[[], None]) -> None:
        async with self._compacting:
            if not self._database.closed and not self._abandoned:
                await self._slow.run(work)
            # Not before: that would close the database under the compaction.
            if self._abandoned:
                self._database.close()

    def _flush(self) -> None:
        # LevelDB flushes its memtable before any manual compaction; this one finds no table.
        self._database.compact_range(start=_BEYOND_ALL_KEYS, stop=_BEYOND_ALL_KEYS + b"\xff")


def _write(batch: plyvel.WriteBatch, then: Callable[[], bool] | None) -> bool:
    batch.write()
    return then is None or then()


def _why(directory: Path, error: Exception) -> str:
    """LevelDB's reason; for a lock, where that is only "temporarily unavailable", who holds it."""
    if "LOCK: Resource temporarily unavailable" not in str(error):
        return str(error)
    holder = _lock_holder(directory / "LOCK")
    return f"{f'process {holder}' if holder else 'another process'} has it open"


def _lock_holder(path: Path) -> str | None:
    """The process id of the holder from the kernel's list, if there is one that we may see."""
    try:
        inode = str(path.stat().st_ino)
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for lock in locks:  # 1: POSIX  ADVISORY  WRITE 4711 fe:00:262146 0 EOF
        fields = lock.split()
        if len(fields) == 8 and fields[1] == "POSIX" and fields[5].rpartition(":")[2] == inode:
            return fields[4] if int(fields[4]) > 0 else None  # in another container: unknown
    return None


def fault_of(error: Exception) -> StoreFault:
    """What an error of LevelDB or of the operating system means for the store."""
    if isinstance(error, plyvel.CorruptionError):
        return StoreFault.DAMAGED
    text = str(error)
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text or "quota" in text:
        return StoreFault.DISK_FULL
    if number in (errno.EROFS, errno.EACCES) or "Read-only" in text or "denied" in text:
        return StoreFault.READ_ONLY
    return StoreFault.INPUT_OUTPUT
