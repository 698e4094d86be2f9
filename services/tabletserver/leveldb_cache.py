"""Caches of tablets on LevelDB (see `bucket_store.py`).

LevelDBCaches  the caches of a server
LevelDBCache   one of them, open
Manifest       contents of LevelDB's MANIFEST

Rules, each with the failure that it prevents:

- No two caches ever have the same path. Otherwise a process that was given up and still compacts
  writes into the cache of the next one, and what it writes is uploaded.
- A cache from another life of the machine is deleted. LevelDB's log is not synced, so a power cut
  may have lost a block in the middle of it, which LevelDB skips silently.
- A snapshot has only tables that the copied MANIFEST names. Others may be unfinished: a compaction
  still writes them.
- A snapshot is refused unless its MANIFEST says that all logs from before it are in tables. What a
  checkpoint includes is deleted from the tablet's log, and LevelDB says nothing when a flush fails,
  or when it has skipped one: that happens if it groups the flush with a write.
"""

from __future__ import annotations

import asyncio
import os
import re
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from percolator.bucket.checkpoint import Snapshot
from percolator.errors import StoreFault, StoreUnusable
from percolator.services.chassis.files import DiskThreads
from percolator.services.tabletserver.bucket_store import Cache, NewCache
from percolator.services.tabletserver.storage import CURRENT, MEBIBYTE, Budget, LevelDBStorage
from percolator.tasks import outlasting
from percolator.world import Random

_NAME = re.compile(r"([0-9]+)-[0-9a-f]+")
_FILE = re.compile(r"CURRENT|MANIFEST-[0-9]+|[0-9]+\.ldb")
IDLE_BYTES_MAX = 4096 * MEBIBYTE


def boot_id() -> str:
    """Name of this life of the machine; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class LevelDBCaches:
    """Directories on the local disk: `<root>/<life of the machine>/<tablet>-<token>`.

    No two directories ever have the same path. Otherwise, a process that was given up and still
    compacts would write into the cache of the next one.
    """

    failures: tuple[type[Exception], ...] = LevelDBStorage.failures

    def __init__(
        self,
        root: Path,
        threads: DiskThreads,
        random: Random,
        *,
        slow: DiskThreads | None = None,
        budget: Budget | None = None,
        boot: str | None = None,
        idle_bytes_max: int = IDLE_BYTES_MAX,
    ) -> None:
        """`root` exists, and belongs to this process. Without `boot`, the name of a life of the
        machine, this process has one of its own: then it uses no cache of another one."""
        self._threads = threads
        self._random = random
        self._slow = slow or threads
        self._budget = budget or Budget()
        self._root = root
        self._place = root / (boot or self._token())
        self._idle_bytes_max = idle_bytes_max

    async def find(self, tablet_id: int, *, open_tablets: int) -> Cache | None:
        for directory in await self._slow.run(lambda: self._of(tablet_id)):
            with suppress(StoreUnusable):
                return await self._open(directory, open_tablets, create=False)
        return None

    async def begin(self, tablet_id: int) -> NewCache:
        directory = self._place / f"{tablet_id}-{self._token()}"
        await self._slow.run(lambda: self._make(tablet_id, directory))
        return _NewLevelDBCache(self, directory)

    async def drop_idle(self, in_use: Collection[int]) -> None:
        await self._slow.run(lambda: self._drop_idle(set(in_use)))

    async def write(self, path: Path, data: bytes) -> None:
        """Writes a file of a cache that is not open."""
        await self._slow.run(lambda: path.write_bytes(data))

    async def _open(self, directory: Path, open_tablets: int, *, create: bool) -> LevelDBCache:
        opening = partial(
            LevelDBCache,
            directory,
            self._threads,
            self._budget.options(open_tablets),
            create=create,
            slow=self._slow,
            synced=False,
        )
        return await self._slow.run(opening)

    def _token(self) -> str:
        return f"{self._random.getrandbits(64):016x}"

    # What follows blocks.

    def _all(self) -> dict[Path, int]:
        """The tablets of all caches, by directory."""
        try:
            names = os.listdir(self._place)
        except FileNotFoundError:
            return {}
        return {self._place / name: int(one[1]) for name in names if (one := _NAME.fullmatch(name))}

    def _of(self, tablet_id: int) -> list[Path]:
        return [path for path, found in self._all().items() if found == tablet_id]

    def _make(self, tablet_id: int, directory: Path) -> None:
        for path in self._of(tablet_id):
            rmtree(path)
        directory.mkdir(parents=True)

    def _drop_idle(self, in_use: set[int]) -> None:
        for path in self._root.iterdir():
            if path != self._place:
                rmtree(path)
        idle = [path for path, tablet_id in self._all().items() if tablet_id not in in_use]
        idle.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        left = self._idle_bytes_max
        for path in idle:
            left -= sum(file.stat().st_size for file in path.iterdir())
            if left < 0:
                rmtree(path)


class _NewLevelDBCache:
    def __init__(self, caches: LevelDBCaches, directory: Path) -> None:
        self._caches = caches
        self._directory = directory
        self._is_empty = True

    async def put(self, name: str, data: bytes) -> None:
        if not _FILE.fullmatch(name):
            raise StoreUnusable(
                f"a checkpoint has a file {name!r}, which is none of LevelDB's",
                fault=StoreFault.DAMAGED,
            )
        self._is_empty = False
        await self._caches.write(self._directory / name, data)

    async def open(self, *, open_tablets: int) -> Cache:
        return await self._caches._open(self._directory, open_tablets, create=self._is_empty)


_FLUSHES_MAX = 100


class LevelDBCache(LevelDBStorage):
    """A LevelDB that is not synced."""

    async def snapshot(self) -> Snapshot:
        taking = self._tasks.start(self._alone(self._take))
        try:
            snapshot = await outlasting(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(_close_files)
            raise
        if snapshot is None:
            raise OSError("the cache is closed")
        return snapshot

    def _take(self) -> LevelDBSnapshot:
        """Blocks."""
        logs = self._logs()
        for _ in range(_FLUSHES_MAX):
            self._flush()
            with suppress(FileNotFoundError):  # a table was compacted away meanwhile
                found = LevelDBSnapshot(self._directory, self._slow)
                if all(number < found.first_log for number in logs):
                    return found
                found.close()
        raise OSError("LevelDB has not flushed what was written to it")

    def _logs(self) -> list[int]:
        names = (name.partition(".") for name in os.listdir(self._directory))
        return [int(number) for number, _, kind in names if kind == "log"]


def _close_files(taking: asyncio.Task[LevelDBSnapshot | None]) -> None:
    if not taking.cancelled() and taking.exception() is None and (found := taking.result()):
        found.close()


class LevelDBSnapshot:
    """The tables that a copied MANIFEST names, kept open: LevelDB deletes them at any time."""

    def __init__(self, directory: Path, threads: DiskThreads) -> None:
        """Blocks. Raises `FileNotFoundError` if LevelDB has deleted one meanwhile."""
        self._threads = threads
        current = (directory / CURRENT).read_bytes()
        name = current.decode().strip()
        manifest = parse_manifest((directory / name).read_bytes())
        self.first_log = manifest.first_log
        self.small = {name: manifest.whole, CURRENT: current}
        self.sizes = {f"{number:06}.ldb": size for number, size in manifest.tables.items()}
        self._open: dict[str, int] = {}
        try:
            for table in self.sizes:
                self._open[table] = os.open(directory / table, os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise

    async def read(self, name: str) -> bytes:
        return await self._threads.run(lambda: _read_all(self._open[name], self.sizes[name]))

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def _read_all(file: int, size: int) -> bytes:
    parts, at = [], 0
    while at < size:
        part = os.pread(file, size - at, at)
        if not part:
            break
        parts.append(part)
        at += len(part)
    return b"".join(parts)


# LevelDB's MANIFEST: a log of changes to the set of tables.
#
#     block    32 KiB of records; a record does not begin in its last 6 bytes
#     record   checksum 4, length 2, kind 1 (whole, first, middle, last), part of a change
#     change   fields of a tag and what belongs to it, as variable-length integers and strings

_BLOCK_BYTES = 32768
_RECORD = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_COMPARATOR, _LOG_NUMBER, _NEXT_FILE, _LAST_SEQUENCE = 1, 2, 3, 4
_COMPACT_POINTER, _DELETED_FILE, _NEW_FILE, _PREVIOUS_LOG = 5, 6, 7, 9


class Manifest(NamedTuple):
    """Contents of a MANIFEST."""

    whole: bytes
    """Its bytes, without a change at its end that is still being written."""
    first_log: int
    """Everything in logs with lower numbers is in tables."""
    tables: dict[int, int]
    """Sizes of the finished tables, by number. Others may be there, unfinished."""


def parse_manifest(data: bytes) -> Manifest:
    """Reads a MANIFEST to which LevelDB may be appending. Raises `StoreUnusable`."""
    first_log, end = 0, 0
    tables: dict[int, int] = {}
    try:
        for change, change_end in _changes(data):
            end, at = change_end, 0
            while at < len(change):
                tag, at = _varint(change, at)
                if tag == _COMPARATOR:
                    at = _after_string(change, at)
                elif tag == _LOG_NUMBER:
                    first_log, at = _varint(change, at)
                elif tag in (_NEXT_FILE, _LAST_SEQUENCE, _PREVIOUS_LOG):
                    _, at = _varint(change, at)
                elif tag == _COMPACT_POINTER:
                    _, at = _varint(change, at)
                    at = _after_string(change, at)
                elif tag == _DELETED_FILE:
                    _, at = _varint(change, at)
                    number, at = _varint(change, at)
                    tables.pop(number, None)
                elif tag == _NEW_FILE:
                    _, at = _varint(change, at)
                    number, at = _varint(change, at)
                    tables[number], at = _varint(change, at)
                    at = _after_string(change, _after_string(change, at))
                else:
                    raise _unreadable(f"it has the tag {tag}")
    except IndexError as error:
        raise _unreadable("a change is cut off") from error
    return Manifest(data[:end], first_log, tables)


def _unreadable(why: str) -> StoreUnusable:
    return StoreUnusable(f"LevelDB's MANIFEST: {why}", fault=StoreFault.INPUT_OUTPUT)


def _changes(data: bytes) -> Iterator[tuple[bytes, int]]:
    """The whole changes, and where each ends."""
    parts: list[bytes] = []
    at = 0
    while True:
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _RECORD.size:
            at += left
            continue
        if at + _RECORD.size > len(data):
            return
        _, length, kind = _RECORD.unpack_from(data, at)
        part = data[at + _RECORD.size : at + _RECORD.size + length]
        if len(part) < length or kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST):
            return
        at += _RECORD.size + length
        if kind in (_WHOLE, _FIRST):
            parts.clear()
        parts.append(part)
        if kind in (_WHOLE, _LAST):
            yield b"".join(parts), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _after_string(data: bytes, at: int) -> int:
    length, at = _varint(data, at)
    return at + length
