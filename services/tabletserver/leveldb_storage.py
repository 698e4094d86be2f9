"""`Storage` on LevelDB: the one place that knows plyvel.

What a tablet relies on, from LevelDB's `DBImpl::Write` (1.22, 1.23):

* A synced batch is appended to the log and fsynced, then inserted into the memtable, and only then
  is the database's last sequence number raised, under its mutex. `Get`, and an iterator when it is
  made, look at the last sequence number. So nothing of a batch is visible before all of it is
  durable, although the insertion runs in another thread while the event loop reads.
* An iterator stays at the sequence number of its creation.
* After a failed append or fsync the batch "may or may not show up when the DB is re-opened". Here
  nothing more is written after a failure: the owner closes this object and opens another.

Only the write, the closing flush and compaction run outside of the event loop's thread.
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
from services.tabletserver.disk_threads import DiskThreads

KIBIBYTE = 1024
MEBIBYTE = 1024 * KIBIBYTE
WRITE_BUFFERS_BYTES = 256 * MEBIBYTE
"""Of all open tablets together."""

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
    """Blocks that are not compressed are read in place, through the memory map of their file.
    With 1,000,000 rows of 100 random bytes a random seek took 4 us instead of 17, writing took half
    the CPU, and the files were 7 % larger; compressible values pay with disk for the same gain."""


def write_buffer_bytes(open_tablets: int, together_bytes: int = WRITE_BUFFERS_BYTES) -> int:
    """The write buffer of each of so many tablets: between 1 and 8 MiB, or all there is."""
    share = together_bytes // max(1, open_tablets)
    return max(min(1 * MEBIBYTE, together_bytes), min(share, 8 * MEBIBYTE))


class LevelDBStorage:
    """One open LevelDB directory. Never fork while one is open: LevelDB's lock is lost by it."""

    failures: tuple[type[Exception], ...] = (plyvel.Error, OSError)

    def __init__(
        self,
        directory: Path,
        threads: DiskThreads,
        options: LevelDBOptions = LevelDBOptions(),
    ) -> None:
        """Opens the directory, or creates it: replays the log, 7.5 ms per MB. Blocks.

        Raises `StoreUnusable`.
        """
        self._directory = directory
        self._threads = threads
        try:
            self._database = plyvel.DB(
                str(directory),
                create_if_missing=True,
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
        # Bound methods of LevelDB itself: a Python function around them would cost as much again.
        self.get = self._database.get
        # Closing LevelDB under a thread that compacts is a crash of the process.
        self._compacting = asyncio.Lock()
        self._abandoned = False
        self.cursor = self._database.raw_iterator

    def fault(self, error: Exception) -> StoreFault:
        return fault_of(error)

    def iterate(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        entries: Iterator[tuple[bytes, bytes]] = self._database.iterator(start=start, stop=stop)
        return entries

    def batch(self) -> plyvel.WriteBatch:
        return self._database.write_batch(sync=True)

    async def write(self, batch: plyvel.WriteBatch) -> None:
        await self._threads.run(batch.write)

    def approximate_bytes(self, start: bytes, stop: bytes) -> int:
        return int(self._database.approximate_size(start, stop))

    async def compact(self, start: bytes, stop: bytes) -> None:
        # Not among the writes, which other tablets wait for: this may take seconds.
        await asyncio.shield(
            self._alone(partial(self._database.compact_range, start=start, stop=stop))
        )

    async def close(self) -> None:
        """Writes the memtable out, so that only a crash leaves a log to replay, and closes."""
        if self._database.closed:
            return
        try:
            await asyncio.shield(self._alone(self._flush))
        finally:
            async with self._compacting:
                self._database.close()

    def abandon(self) -> None:
        """Closes without a flush: after a failed write, or when another owner has taken over."""
        self._abandoned = True
        if not self._compacting.locked():
            self._database.close()

    async def _alone(self, work: Callable[[], None]) -> None:
        async with self._compacting:
            if not self._database.closed and not self._abandoned:
                await asyncio.to_thread(work)
            # Not before: it would pull the database away from under the compaction.
            if self._abandoned:
                self._database.close()

    def _flush(self) -> None:
        # LevelDB writes out its memtable before any manual compaction; this one finds no table.
        self._database.compact_range(start=_BEYOND_ALL_KEYS, stop=_BEYOND_ALL_KEYS + b"\xff")


def _why(directory: Path, error: Exception) -> str:
    """As LevelDB says it; of a lock, it only says that it is "temporarily unavailable"."""
    if "LOCK: Resource temporarily unavailable" not in str(error):
        return str(error)
    holder = _lock_holder(directory / "LOCK")
    return f"{f'process {holder}' if holder else 'another process'} has it open"


def _lock_holder(path: Path) -> str | None:
    """Its process id, from the kernel's list, where there is one and it is shown to us."""
    try:
        inode = str(path.stat().st_ino)
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for lock in locks:  # 1: POSIX  ADVISORY  WRITE 4711 fe:00:262146 0 EOF
        fields = lock.split()
        if len(fields) == 8 and fields[1] == "POSIX" and fields[5].rpartition(":")[2] == inode:
            return fields[4] if int(fields[4]) > 0 else None  # of another container: none
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
