"""The content of a tablet in a bucket: batches of changes, and checkpoints.

    <folder>/checkpoint/<writer>-<entry>-<token>-<n>     names the files of an ordered map, and
                                                         holds small ones
    <folder>/table/<writer>-<entry>-<token>-<n>-<file>   one large file

A tablet applies its log to an ordered map on the local disk (`services/tabletserver/
bucket_store.py`). That map is a cache. A checkpoint is a copy of it from which another server
starts.

Rules, each with the failure that it prevents:

- A key is written once. Its name has a token of the one who uploads, which nobody else has: two
  owners of a tablet, or two caches of one owner, give different files the same name.
- A key says which writer of the log has uploaded it, and after which entry. By that, a sweep knows
  whether an object that no log names may still be published (`percolator/bucket/sweep.py`).
- A checkpoint counts once an entry of the log names it (`Base`). One that was uploaded is only a
  hint, which a deposed owner can leave as well.
- A tablet shares files by key: its next checkpoint names those of its last one that are still
  there, and so does a tablet that was split off. So whatever deletes objects has to ask every log.
- Every object is checked by its size and checksum before anything is read from it. A truncated one
  would be a tablet that lacks rows.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from percolator.bucket.bucket import Bucket
from percolator.errors import StoreFault, StoreUnusable
from percolator.world import Random, StorageBatch

# Changes of a batch, as the body of a log's entry.
#
#     length of the key 4, length of the value 4, key, value

_LENGTHS = struct.Struct("<II")
_pack_lengths = _LENGTHS.pack
_DELETED = 0xFFFFFFFF
"""In place of a value's length."""


class LoggedBatch:
    """A batch for a cache, which can also be written to a log."""

    __slots__ = ("_parts", "writes")

    def __init__(self, writes: StorageBatch) -> None:
        self.writes = writes
        """The changes as the cache takes them."""
        self._parts: list[bytes] = []

    def put(self, key: bytes, value: bytes) -> None:
        self._parts += (_pack_lengths(len(key), len(value)), key, value)
        self.writes.put(key, value)

    def delete(self, key: bytes) -> None:
        self._parts += (_pack_lengths(len(key), _DELETED), key)
        self.writes.delete(key)

    def body(self) -> bytes:
        """The changes, in order, for the log."""
        return b"".join(self._parts)


def put_changes(body: bytes, writes: StorageBatch) -> int:
    """Adds the changes of an entry to a batch. Returns how many there are."""
    at = count = 0
    while at < len(body):
        key_bytes, value_bytes = _LENGTHS.unpack_from(body, at)
        at += _LENGTHS.size
        key = body[at : at + key_bytes]
        at += key_bytes
        if value_bytes == _DELETED:
            writes.delete(key)
        else:
            writes.put(key, body[at : at + value_bytes])
            at += value_bytes
        count += 1
    return count


TABLETS = "tablets"
_DIGITS = 20


def tablet_folder(tablet_id: int) -> str:
    """The folder of a tablet. They are in the order of the ids."""
    return f"{TABLETS}/{tablet_id:0{_DIGITS}d}"


POSITION_KEY = b"\xffposition"
"""Key of the position in a cache: above all keys of a tablet."""


class Position(NamedTuple):
    """The entry of a log up to which a cache has applied it. It is stored with the changes of that
    entry: so the cache is a prefix of the log if the log has this entry."""

    folder: str
    number: int
    writer: str
    checksum: int
    """Checksum of the entry's body."""

    @classmethod
    def of(cls, folder: str, number: int, writer: str, body: bytes) -> Position:
        return cls(folder, number, writer, zlib.crc32(body))

    def encode(self) -> bytes:
        return f"{self.number} {self.checksum} {self.writer} {self.folder}".encode()

    @classmethod
    def decode(cls, record: bytes) -> Position | None:
        """The position; None for any other bytes."""
        try:
            number, checksum, writer, folder = record.decode().split(" ", 3)
            return cls(folder, int(number), writer, int(checksum))
        except ValueError:
            return None


# Checkpoints.


class StoredFile(NamedTuple):
    """A file of a checkpoint that is an object of its own."""

    key: str
    size: int
    checksum: int


_KEY = re.compile(rf"{TABLETS}/[0-9]+/(?:table|checkpoint)/([0-9a-f]+)-([0-9]+)-.*")


class FileKey(NamedTuple):
    """Facts in the key of a file or checkpoint."""

    writer: str
    """The writer of the log, who has uploaded it."""
    number: int
    """The entry of the log after which the upload began."""

    @classmethod
    def parse(cls, key: str) -> FileKey | None:
        """None for any other key."""
        match = _KEY.fullmatch(key)
        return None if match is None else cls(match[1], int(match[2]))


class Checkpoint(NamedTuple):
    """The files of an ordered map, by name."""

    files: Mapping[str, StoredFile]
    small: Mapping[str, bytes]
    """Files that are part of the checkpoint itself."""

    def encode(self) -> bytes:
        about = json.dumps(
            {"files": self.files, "small": {name: len(self.small[name]) for name in self.small}}
        ).encode()
        content = about + b"".join(self.small.values())
        return _HEADER.pack(_MAGIC, zlib.crc32(content), len(content), len(about)) + content

    @classmethod
    def decode(cls, data: bytes, where: str) -> Checkpoint:
        """The checkpoint that was encoded; `StoreUnusable` for any other bytes."""
        try:
            magic, checksum, size, about_size = _HEADER.unpack_from(data)
            content = data[_HEADER.size :]
            if magic == _MAGIC and len(content) == size and zlib.crc32(content) == checksum:
                about = json.loads(content[:about_size])
                files = {name: StoredFile(*one) for name, one in about["files"].items()}
                small, at = {}, about_size
                for name, length in about["small"].items():
                    small[name] = content[at : at + length]
                    at += length
                return cls(files, small)
        except (struct.error, ValueError, KeyError, TypeError):
            pass  # reported below, as any other damage
        raise StoreUnusable(f"{where} is damaged: it is no checkpoint", fault=StoreFault.DAMAGED)


_MAGIC = b"PCK1"
_HEADER = struct.Struct("<4sIQI")
"""Magic, checksum and size of the rest, size of the JSON."""

NO_FILES = Checkpoint({}, {})
_AT_ONCE = 8
"""Files that are uploaded, or downloaded, at the same time."""


class Snapshot(Protocol):
    """The files of an ordered map at one instant, which stay readable until it is closed."""

    @property
    def small(self) -> Mapping[str, bytes]:
        """Files that say what the others are."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The others, and how large they are. No file is ever changed under its name."""

    async def read(self, name: str) -> bytes:
        """One of the others."""

    def close(self) -> None: ...


class Checkpoints:
    """The checkpoints of one tablet while it is open: uploaded, to be published."""

    def __init__(
        self,
        bucket: Bucket,
        random: Random,
        folder: str,
        writer: str,
        published: Checkpoint = NO_FILES,
    ) -> None:
        """`writer` is that of the tablet's log. `published` is the checkpoint from which the map
        was made, or of which it is a later state: files of one name are the same file."""
        self._bucket = bucket
        self._folder = folder
        self._writer = writer
        self._published = published
        self._token = f"{random.getrandbits(64):016x}"
        self._sequence = 0
        self._uploaded: dict[str, StoredFile] = {}
        """Files that no published checkpoint names yet."""
        self.bytes_uploaded = 0

    async def upload(self, snapshot: Snapshot, number: int) -> tuple[str, Checkpoint]:
        """Uploads what is new in a copy that has the entries of the log up to `number`. Returns the
        checkpoint with its key, to be published. After an error, another attempt goes on with what
        this one has uploaded."""
        at_once = asyncio.Semaphore(_AT_ONCE)
        await all_done(
            self._upload(name, snapshot, number, at_once)
            for name, size in snapshot.sizes.items()
            if self._known(name, size) is None
        )
        files = {}
        for name, size in snapshot.sizes.items():
            file = self._known(name, size)
            if file is None:
                raise StoreUnusable(
                    f"{name} of a checkpoint of {self._folder} has no longer {size} bytes",
                    fault=StoreFault.DAMAGED,
                )
            files[name] = file
        checkpoint = Checkpoint(files, snapshot.small)
        key = self._key("checkpoint", number)
        await self._create(key, checkpoint.encode())
        return key, checkpoint

    def publish(self, checkpoint: Checkpoint) -> None:
        """Notes that the log names this checkpoint. What it does not name never will be."""
        self._published = checkpoint
        self._uploaded.clear()

    def _key(self, kind: str, number: int) -> str:
        self._sequence += 1
        who = f"{self._writer}-{number}-{self._token}-{self._sequence}"
        return f"{self._folder}/{kind}/{who}"

    def _known(self, name: str, size: int) -> StoredFile | None:
        for files in (self._uploaded, self._published.files):
            file = files.get(name)
            if file is not None and file.size == size:
                return file
        return None

    async def _upload(
        self, name: str, snapshot: Snapshot, number: int, at_once: asyncio.Semaphore
    ) -> None:
        async with at_once:
            data = await snapshot.read(name)
            key = f"{self._key('table', number)}-{name}"
            await self._create(key, data)
        self._uploaded[name] = StoredFile(key, len(data), zlib.crc32(data))

    async def _create(self, key: str, data: bytes) -> None:
        written = await self._bucket.create(key, data)
        if not written.is_own:
            raise StoreUnusable(
                f"{self._bucket.name}: {key} is there already, with other content",
                fault=StoreFault.INPUT_OUTPUT,
            )
        self.bytes_uploaded += len(data)


async def all_done(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Does everything, or raises the first error when nothing of it is under way any more."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


Put = Callable[[str, bytes], Awaitable[None]]


async def download(bucket: Bucket, key: str, put: Put) -> Checkpoint:
    """Puts the files of a checkpoint, the most recent first. `StoreUnusable` names an object that
    is missing or damaged."""
    checkpoint = await read_checkpoint(bucket, key)
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def fetch(name: str, file: StoredFile) -> None:
        async with at_once:
            await put(name, await _read_file(bucket, file))

    names = sorted(checkpoint.files, reverse=True)
    await all_done(fetch(name, checkpoint.files[name]) for name in names)
    for name, data in checkpoint.small.items():
        await put(name, data)
    return checkpoint


async def read_checkpoint(bucket: Bucket, key: str) -> Checkpoint:
    """The checkpoint; `StoreUnusable` if it is missing or damaged."""
    found = await bucket.read(key)
    where = f"{bucket.name}: {key}"
    if found is None:
        raise StoreUnusable(f"{where}, a checkpoint, is missing", fault=StoreFault.DAMAGED)
    return Checkpoint.decode(found.data, where)


async def _read_file(bucket: Bucket, file: StoredFile) -> bytes:
    found = await bucket.read(file.key)
    where = f"{bucket.name}: {file.key}"
    if found is None:
        raise StoreUnusable(f"{where}, part of a checkpoint, is missing", fault=StoreFault.DAMAGED)
    if len(found.data) != file.size:
        raise StoreUnusable(
            f"{where} is damaged: {len(found.data)} bytes instead of {file.size}",
            fault=StoreFault.DAMAGED,
        )
    if zlib.crc32(found.data) != file.checksum:
        raise StoreUnusable(
            f"{where} is damaged: its checksum is not the one in the checkpoint",
            fault=StoreFault.DAMAGED,
        )
    return found.data
