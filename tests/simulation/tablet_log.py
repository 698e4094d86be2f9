"""A tablet's content as files of its epoch directory: a table of everything, and a log after it.

    000003.ldb   everything that was there when the directory was opened last
    000004.log   every batch written since, each with its length and checksum

The names are those of LevelDB, so that the real clone carries the files to the next epoch. The
promises are LevelDB's: a batch is durable when its write returns; after a crash or a failed write
it is there as a whole or not at all; what opening found is made durable before anything is served.
"""

from __future__ import annotations

import marshal
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from percolator.errors import StoreFault, StoreUnusable
from percolator.formats.records import START_TIMESTAMP_BYTES
from percolator.services.chassis.files import OpenFile
from percolator.tablet.keys import LOAD_FENCE_PREFIX, W, split_component, timestamp_of
from percolator.tablet.memory.load_fences import LoadFence
from percolator.testing.memory_storage import DurableMemory, MemoryStorage
from tests.simulation.disks import SimulatedFiles

TORN = "torn batch dropped at opening"

_HEADER = struct.Struct(">II")
_BYTES_MAX = 1 << 26


async def open_tablet(
    files: SimulatedFiles, directory: Path, struck: Counter[str], collected: dict[int, int]
) -> MemoryStorage:
    """Replays what the directory holds, makes it durable, and begins a new log.

    Adds to `collected` the transactions whose commit records were deleted, and their timestamps.
    """
    try:
        names = sorted(await files.list(directory))
        numbers = [int(name[:6]) for name in names if name.endswith((".ldb", ".log"))]
        content = await _replayed(files, directory, names, struck)
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
    files: SimulatedFiles, directory: Path, names: list[str], struck: Counter[str]
) -> dict[bytes, bytes]:
    """The newest table, and the logs above it."""
    tables = [name for name in names if name.endswith(".ldb")]
    newest = tables[-1:]
    logs = [name for name in names if name.endswith(".log") and name[:6] > (newest or [""])[0][:6]]
    content: dict[bytes, bytes] = {}
    for name in newest + logs:
        data = await files.read(directory / name, bytes_max=_BYTES_MAX)
        for batch in _batches(data, struck):
            for key, value in batch.items():
                if value is None:
                    content.pop(key, None)
                else:
                    content[key] = value
    return content


def _framed(batch: dict[bytes, bytes] | dict[bytes, bytes | None]) -> bytes:
    payload = marshal.dumps(batch)
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def _batches(data: bytes, struck: Counter[str]) -> Iterator[dict[bytes, bytes | None]]:
    """All batches before the first that is torn: nothing after that was ever acknowledged."""
    at = 0
    while at < len(data):
        if at + _HEADER.size > len(data):
            struck[TORN] += 1
            return
        size, checksum = _HEADER.unpack_from(data, at)
        payload = data[at + _HEADER.size : at + _HEADER.size + size]
        if not size or len(payload) < size or zlib.crc32(payload) != checksum:
            struck[TORN] += 1
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
            gone = [
                key
                for key, value in self.in_doubt.items()
                if value is None and key.startswith(W) and key in self.durable
            ]
            undone = self._loads_under_way() if gone else []
            for key in gone:
                row = split_component(key, 1)[0]
                if not any(load.covers(row) for load in undone):
                    start = int.from_bytes(self.durable[key][:START_TIMESTAMP_BYTES], "big")
                    self._collected[start] = timestamp_of(key)
            await self._log.append(_framed(self.in_doubt))
            await self._log.fsync()

    async def heard(self) -> None:
        await self._files.heard()

    def _loads_under_way(self) -> list[LoadFence]:
        """Nothing is committed behind their fences yet, so nothing deleted there is history."""
        fences = [
            LoadFence.of_record(key, record)
            for key, record in self.durable.items()
            if key.startswith(LOAD_FENCE_PREFIX)
        ]
        return [fence for fence in fences if not fence.commit_timestamp]
