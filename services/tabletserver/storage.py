"""Where tablets are kept, how a server becomes the owner of one, and the space on its disk.

clone_leveldb         copies what a former owner may still be writing to
LevelDBStorage        one open tablet
SharedDirectoryStore  all tablets of a server, each owned by epoch
DiskSpace             refuses writes before the disk is full

`TabletStore` is the interface that the rest of a tablet server uses. `SharedDirectoryStore` has
LevelDB directories below a store root that every server of the cluster can open, owned by epoch
(see `epoch_directory`). `BucketTabletStore` (bucket_store.py) has each tablet's log in a bucket.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from structlog.stdlib import BoundLogger

from percolator.errors import (
    StoreFault,
    StoreUnusable,
)
from percolator.services.chassis.coordinator import Trouble
from percolator.services.chassis.epoch_directory import (
    EpochDirectory,
    EpochName,
    Inheritance,
    Stage,
    make_tablet_directory,
    remove_superseded,
    take_over,
)
from percolator.services.chassis.files import DiskThreads, Files
from percolator.services.tabletserver import leveldb
from percolator.tablet.state import Ownership, TabletIdentity
from percolator.tasks import Tasks
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_ROLLBACK
from percolator.world import Clock, Storage

T = TypeVar("T")

# Cloning a LevelDB directory whose former owner may still be writing into it.
#
# The former owner was cut off by a rename, but its process may still run: its open log and its open
# compaction output keep growing. Contract: the clone holds everything that was written before the
# rename, and shares no file that either side may still write.
#
# CURRENT, MANIFEST and the logs are copied first, so that every table that the copied MANIFEST
# names still exists when its turn comes. Tables numbered below the smallest log are finished, and
# are hard-linked. Later ones are copied: the new owner restores its counter of file numbers from
# the same MANIFEST, so through a link it would truncate a table that the former owner is still
# writing. LOCK and the information logs are left behind.

FILE_BYTES_MAX = 1 << 30
"""Larger files are not copied: LevelDB's logs and tables are a few MiB, its MANIFEST less."""

_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP})
"""The file system has no hard links between these two places, or allows no more of them."""

CURRENT = "CURRENT"
"""Every database has this file, from its creation on."""

_MANIFEST = re.compile(r"MANIFEST-[0-9]+")
_LOG = re.compile(r"([0-9]+)\.log")
_TABLE = re.compile(r"([0-9]+)\.(?:ldb|sst)")


@dataclass(frozen=True)
class ClonePlan:
    """How to copy the files of a LevelDB directory."""

    copied_first: tuple[str, ...]
    linked: tuple[str, ...]
    copied_last: tuple[str, ...]


def plan_clone(names: Iterable[str]) -> ClonePlan:
    """Decides by the names alone. If there is no log, no table counts as finished."""
    present = sorted(names)
    logs = {name: int(match[1]) for name in present if (match := _LOG.fullmatch(name))}
    smallest_log = min(logs.values(), default=0)
    tables = {name: int(match[1]) for name in present if (match := _TABLE.fullmatch(name))}
    current = [name for name in present if name == CURRENT]
    manifests = [name for name in present if _MANIFEST.fullmatch(name)]
    return ClonePlan(
        copied_first=(*current, *manifests, *logs),
        linked=tuple(name for name, number in tables.items() if number < smallest_log),
        copied_last=tuple(name for name, number in tables.items() if number >= smallest_log),
    )


def lacks_current(names: Iterable[str]) -> bool:
    """True if there is data that LevelDB would not find: that is damage, never the result of a
    crash during creation."""
    present = set(names)
    return CURRENT not in present and any(
        _LOG.fullmatch(name) or _TABLE.fullmatch(name) for name in present
    )


async def clone_leveldb(files: Files, source: Path, target: Path) -> None:
    """Clones `source` into the empty directory `target`, with every copy durable.

    `FileNotFoundError` if `source` changed meanwhile: then `target` has to be emptied, and
    everything done again. The caller makes the names durable.
    """
    plan = plan_clone(await files.list(source))
    for name in plan.copied_first:
        await _copy(files, source / name, target / name)
    for name in plan.linked:
        try:
            await files.link(source / name, target / name)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            await _copy(files, source / name, target / name)
    for name in plan.copied_last:
        await _copy(files, source / name, target / name)


async def _copy(files: Files, source: Path, target: Path) -> None:
    data = await files.read(source, bytes_max=FILE_BYTES_MAX)
    async with await files.create(target) as file:
        await file.append(data)
        # Make the content durable here; publishing the clone makes the names durable.
        await file.fsync()


KIBIBYTE = 1024
_MIB = 1024 * KIBIBYTE
WRITE_BUFFERS_BYTES = 256 * _MIB
"""The write buffers of all open tablets together."""

_BEYOND_ALL_KEYS = b"\xff" * 8


@dataclass(frozen=True)
class LevelDBOptions:
    """How one tablet's LevelDB is opened."""

    write_buffer_bytes: int = 8 * _MIB
    block_cache_bytes: int = 32 * _MIB
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
    return max(min(1 * _MIB, together_bytes), min(share, 8 * _MIB))


class LevelDBStorage:
    """One open LevelDB directory. Never fork while one is open: that loses LevelDB's lock.

    A tablet relies on this behaviour of LevelDB's `DBImpl::Write` (1.22, 1.23):

    - A synced batch is appended to the log and fsynced, then inserted into the memtable, and only
      then is the database's last sequence number raised, under its mutex. `Get`, and an iterator
      when it is created, look at the last sequence number. So no part of a batch is visible before
      all of it is durable, although the insertion runs in another thread while the event loop
      reads.
    - An iterator stays at the sequence number of its creation.
    - After a failed append or fsync the batch "may or may not show up when the DB is re-opened". So
      nothing more is written here after a failure: the owner closes this object and opens another.

    Only writes, the closing flush and compaction run outside the event loop's thread.
    """

    failures: tuple[type[Exception], ...] = (leveldb.Error, OSError)
    is_cache = False

    def __init__(
        self,
        directory: Path,
        threads: DiskThreads,
        options: LevelDBOptions = LevelDBOptions(),
        *,
        create: bool = False,
        slow: DiskThreads | None = None,
        synced: bool = True,
    ) -> None:
        """Opens the database in an existing directory: replays the log, 7.5 ms per MB. Blocks.

        `create` allows a new database if there is none. In `slow` run compactions and the
        closing flush, which may take seconds, instead of in `threads`. Unless it is `synced`, a
        batch survives the end of the process, but not of the machine, and a damaged log is refused
        instead of read as far as it goes. Raises `StoreUnusable`.
        """
        self._directory = directory
        self._threads = threads
        self._slow = slow or threads
        try:
            self._database = leveldb.DB(
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
                paranoid_checks=not synced,
            )
        except self.failures as error:
            raise StoreUnusable(
                f"LevelDB cannot open {directory}: {_why(directory, error)}",
                fault=self.fault(error),
            ) from error
        # LevelDB's own methods: a Python function around them would double the cost.
        self.get = self._database.get
        self.cursor = self._database.raw_iterator
        self.batch = partial(self._database.write_batch, sync=synced)
        # Closing LevelDB while a thread compacts it would crash the process.
        self._compacting = asyncio.Lock()
        self._tasks = Tasks()
        self._abandoned = False

    def fault(self, error: Exception) -> StoreFault:
        return fault_of(error)

    def iterate(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        entries: Iterator[tuple[bytes, bytes]] = self._database.iterator(start=start, stop=stop)
        return entries

    async def write(
        self, batch: leveldb.WriteBatch, then: Callable[[], bool] | None = None
    ) -> bool:
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

    async def _alone(self, work: Callable[[], T]) -> T | None:
        """The result; None if the database was closed before."""
        async with self._compacting:
            done = None
            if not self._database.closed and not self._abandoned:
                done = await self._slow.run(work)
            # Not before: that would close the database under the compaction.
            if self._abandoned:
                self._database.close()
            return done

    def _flush(self) -> None:
        # LevelDB flushes its memtable before any manual compaction; this one finds no table.
        self._database.compact_range(start=_BEYOND_ALL_KEYS, stop=_BEYOND_ALL_KEYS + b"\xff")


def _write(batch: leveldb.WriteBatch, then: Callable[[], bool] | None) -> bool:
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
    """The fault of the store behind an error of LevelDB or of the operating system."""
    if isinstance(error, leveldb.CorruptionError):
        return StoreFault.DAMAGED
    text = str(error)
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text or "quota" in text:
        return StoreFault.DISK_FULL
    if number in (errno.EROFS, errno.EACCES) or "Read-only" in text or "denied" in text:
        return StoreFault.READ_ONLY
    return StoreFault.INPUT_OUTPUT


MEBIBYTE = 1024 * 1024
OPEN_FILES_MIN = 74
"""LevelDB accepts no fewer."""


@dataclass(frozen=True)
class Ancestry:
    """The data that a tablet starts with: by default none, for one that has had no owner."""

    must_exist: bool = False
    """True if it has had an owner: then finding nothing is damage."""
    origin_tablet_id: int = 0
    origin_epoch: int = 0
    """The epoch of the tablet of the same table that was split; 0 for none."""
    served_epoch: int = 0
    """The last one at which it is known to have been served: finding only older ones is damage."""


class TabletStore(Protocol):
    """Everything that survives a tablet server. Raises `StoreUnusable` if the disk fails."""

    async def take_over(self, tablet: TabletIdentity, ancestry: Ancestry) -> Ownership:
        """Becomes the only owner of the tablet, at its epoch; `TabletMoved` if it is too late."""

    async def open(self, ownership: Ownership, *, open_tablets: int) -> Storage[Any]:
        """Opens the tablet that is owned; memory is shared among `open_tablets`."""

    async def remove_superseded(self, tablet: TabletIdentity) -> None:
        """Deletes what former owners left and what is not needed. For an owner that serves."""


@dataclass(frozen=True)
class Budget:
    """The resources that all LevelDBs of one process may use together."""

    write_buffers_bytes: int = WRITE_BUFFERS_BYTES
    block_caches_bytes: int = 128 * MEBIBYTE
    descriptors: int = 16_384
    """A quarter of them is left for connections and everything else."""

    def options(self, open_tablets: int) -> LevelDBOptions:
        """The share of one tablet of `open_tablets`."""
        share = max(1, open_tablets)
        cache = self.block_caches_bytes // share
        files = self.descriptors * 3 // 4 // share
        return LevelDBOptions(
            write_buffer_bytes=write_buffer_bytes(open_tablets, self.write_buffers_bytes),
            block_cache_bytes=max(1 * MEBIBYTE, min(cache, 48 * MEBIBYTE)),
            open_files_max=max(OPEN_FILES_MIN, min(files, 500)),
        )


class SharedDirectoryStore:
    """One directory per tablet and epoch below a store root. Belongs to one event loop."""

    def __init__(
        self,
        files: Files,
        root: Path,
        threads: DiskThreads,
        *,
        owned: Files | None = None,
        slow: DiskThreads | None = None,
        budget: Budget | None = None,
    ) -> None:
        """`files` are for takeovers, `owned` and `threads` for tablets that are served: a call that
        is stuck in one of them holds up none of the others. In `slow` databases are opened, flushed
        and compacted. By default what is not given is shared."""
        self._files = files
        self._owned = owned or files
        self._root = root
        self._threads = threads
        self._slow = slow or threads
        self._budget = budget or Budget()

    async def take_over(self, tablet: TabletIdentity, ancestry: Ancestry) -> EpochDirectory:
        origin = None
        if ancestry.origin_tablet_id:
            name = EpochName(ancestry.origin_epoch, Stage.LIVE)
            parent = self._root / str(tablet.table_id) / str(ancestry.origin_tablet_id)
            origin = parent / str(name)
        inheritance = Inheritance(origin, ancestry.must_exist, ancestry.served_epoch)
        try:
            directory = await make_tablet_directory(
                self._files, self._root, tablet.table_id, tablet.tablet_id
            )
            return await take_over(
                self._files,
                directory,
                tablet.epoch,
                clone_leveldb,
                inheritance,
                owner=self._owned,
            )
        except OSError as error:
            raise StoreUnusable(
                f"cannot take over tablet {tablet.tablet_id} at epoch {tablet.epoch}: {error}",
                fault=fault_of(error),
            ) from error

    async def open(self, ownership: Ownership, *, open_tablets: int) -> LevelDBStorage:
        if not isinstance(ownership, EpochDirectory):
            raise TypeError(f"not an ownership of this store: {ownership!r}")
        try:
            names = await self._files.list(ownership.path)
        except OSError as error:
            raise StoreUnusable(
                f"cannot list {ownership.path}: {error}", fault=fault_of(error)
            ) from error
        create = CURRENT not in names
        if create and (ownership.must_exist or lacks_current(names)):
            # LevelDB would treat it as a new database, and delete what is there.
            raise StoreUnusable(
                f"{ownership.path} has no CURRENT, though the tablet was served before",
                fault=StoreFault.DAMAGED,
            )
        options = self._budget.options(open_tablets)
        # Replaying a log takes milliseconds per MiB: the event loop keeps running meanwhile.
        return await self._slow.run(
            partial(
                LevelDBStorage,
                ownership.path,
                self._threads,
                options,
                create=create,
                slow=self._slow,
            )
        )

    async def remove_superseded(self, tablet: TabletIdentity) -> None:
        directory = self._root / str(tablet.table_id) / str(tablet.tablet_id)
        try:
            await remove_superseded(self._files, directory, tablet.epoch)
        except OSError as error:
            raise StoreUnusable(
                f"cannot clean up {directory}: {error}", fault=fault_of(error)
            ) from error


CHECK_SECONDS = 1.0


class DiskSpace:
    """Watches the free bytes of one disk: refuses writes before they run out, and accepts them
    again without help. Lives on one event loop.

    LevelDB needs some space to delete data (compaction writes before it deletes), and even to open.
    Thanks to a reserve, writes to a full disk get a refusal that is safe to repeat, instead of
    failing with an unknown outcome, and reads continue.

    Half of the reserve is for roll-backs, of a few bytes each. Without them a client could not say
    whether a transaction that met the full disk is aborted, and its locks would stay.
    """

    def __init__(
        self,
        free_bytes: Callable[[], Awaitable[int]],
        clock: Clock,
        log: BoundLogger,
        *,
        reserve_bytes: int,
        store_trouble: Callable[[], str] = lambda: "",
    ) -> None:
        """`store_trouble` says why nothing can be written at the moment, for another reason than
        the reserve; it is empty while something can."""
        self._free_bytes = free_bytes
        self._clock = clock
        self._log = log
        self._reserve_bytes = reserve_bytes
        self.store_trouble = store_trouble
        self._trouble = Trouble(
            log, "the free space of the disk is unknown", "the free space of the disk is known"
        )
        self.bytes_free = 0
        self.full: StoreUnusable | None = None
        """The error with which writes are refused; None while there is space."""

    def refuses(self, mutation: pb.Mutation) -> bool:
        """True if there is no disk space for this mutation."""
        if self.full is None:
            return False
        if self.bytes_free < self._reserve_bytes // 2:
            return bool(mutation.changes)
        return not all(map(_frees_or_marks, mutation.changes))

    def trouble(self) -> StoreUnusable | None:
        """Why the server can store nothing; None while it can."""
        if self.full is None and (trouble := self.store_trouble()):
            return StoreUnusable(trouble, fault=StoreFault.INPUT_OUTPUT)
        return self.full

    async def check(self) -> None:
        """Checks once."""
        was_full = self.full is not None
        self.bytes_free = await self._free_bytes()
        if self.bytes_free >= self._reserve_bytes:
            self.full = None
        else:
            self.full = StoreUnusable(
                f"{self.bytes_free >> 20} MiB are free on the disk, and "
                f"{self._reserve_bytes >> 20} MiB are kept in reserve",
                fault=StoreFault.DISK_FULL,
            )
        if was_full != (self.full is not None):
            say = self._log.info if was_full else self._log.error
            say(
                "writes are accepted again" if was_full else "the disk is full: refusing writes",
                bytes_free=self.bytes_free,
                reserve_bytes=self._reserve_bytes,
            )

    async def watch(self) -> None:
        """Checks every second. Never returns."""
        while True:
            await self._clock.sleep(CHECK_SECONDS)
            try:
                await self.check()
            except OSError as error:
                # The watch of the store decides whether it is gone.
                self._trouble.lasts(error)
            else:
                self._trouble.is_over()


def _frees_or_marks(change: pb.Change) -> bool:
    """True if it deletes something, or is a roll-back marker."""
    return change.kind != pb.Change.KIND_PUT or (
        change.space == SPACE_ROLLBACK and not change.value
    )
