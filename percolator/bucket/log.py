"""The log of one tablet in a bucket: numbered objects, each created once.

    <folder>/log/<number>   an entry: a group commit, a takeover, or a seal
    <folder>/floor          entries up to this number may have been deleted

The state of a tablet is a function of its log: a checkpoint, and the entries after it. Each entry
names the base to start from, so the last one says where everything is.

Rules, each with the failure that it prevents:

- An entry is created under the next number, and only if that number is free. Otherwise two owners
  both acknowledge their commits under one number, and one of them is lost.
- A takeover is itself the next entry. The former owner's next entry is then refused, and a look at
  its next number finds the takeover. No clock and no other service decides who owns the tablet.
- An owner has one creation in flight, and repeats it with the same bytes until its outcome is
  known. If it gives up, it appends nothing more: the entry may still arrive, and with another one
  under the next number there would be a hole. The tablet is opened again, by a takeover.
- A takeover or seal is never deleted. A former owner's creation that was sent long ago is for the
  number of the takeover that deposed it: were that free again, the creation would succeed, and the
  former owner would acknowledge a commit that nobody reads.
- The floor is raised before any entry is deleted, and a claimant looks at it after its takeover was
  created. Otherwise one that was paused takes over at a number that was used and deleted long ago,
  and everything that it acknowledges is lost.
- An entry is deleted only when a later one names a base that includes it. Otherwise a restart finds
  a hole.
- A base is published by an entry. So a deposed owner publishes none, and bases never go back.
- A sealed log gets no more entries. Otherwise a tablet that was split acknowledges commits that its
  children do not have.
"""

from __future__ import annotations

import asyncio
import json
import struct
import zlib
from collections.abc import AsyncIterator, Iterable
from enum import Enum
from typing import NamedTuple

from percolator.bucket.bucket import Bucket
from percolator.errors import PercolatorError, StoreFault, StoreUnusable, Unavailable
from percolator.world import Random

_MAGIC = b"PLG1"
_HEADER = struct.Struct("<4s1sQQII")
"""Magic, kind, epoch, number, length of the JSON, checksum of JSON and body."""
_NUMBER_DIGITS = 20
_READ_AHEAD = 16
"""How many entries are read at the same time."""
_DELETED_TOGETHER = 16


class Kind(Enum):
    """The kind of an entry."""

    BATCH = b"B"
    TAKEOVER = b"T"
    SEAL = b"S"


class Segment(NamedTuple):
    """Entries of a log: after one number, up to another."""

    folder: str
    after: int
    through: int


class Base(NamedTuple):
    """The state at which a log starts: everything that is not in its entries after `number`."""

    checkpoint: str = ""
    """The key of a checkpoint; empty for a state without any data."""
    segments: tuple[Segment, ...] = ()
    """Entries of other logs, sealed ones, that follow the checkpoint, in this order."""
    number: int = 0
    """Included up to this number of the log that names the base."""


class Entry(NamedTuple):
    """An entry as it is stored."""

    number: int
    kind: Kind
    epoch: int
    writer: str
    """Who created it: unique for each takeover's claimant."""
    base: Base
    body: bytes


NOTHING = Base()


class LogMoved(Exception):
    """Another owner has taken over, or the log was sealed."""

    def __init__(self, message: str, epoch: int) -> None:
        super().__init__(message)
        self.epoch = epoch
        """The epoch of the later owner, or of the seal."""


class TabletLog:
    """The log of a tablet, as its owner writes it. Belongs to one event loop."""

    def __init__(self, bucket: Bucket, random: Random, folder: str, epoch: int) -> None:
        """`folder` is that of the tablet."""
        self._bucket = bucket
        self._random = random
        self.folder = folder
        self.epoch = epoch
        self.writer = f"{random.getrandbits(128):032x}"
        self._sequence = 0
        self.number = 0
        """The last entry that is known to be stored."""
        self.base = NOTHING
        """The last base that was published."""
        self._kept: set[int] = set()
        """Numbers of takeovers, which are not deleted, above the floor, as far as they are known.
        """
        self._known_from = 1
        """The first number from which on `_kept` is complete."""
        self._appending: asyncio.Future[None] | None = None
        self._lost: LogMoved | None = None
        self._broken: PercolatorError | None = None
        self.looks = 0
        """How often the store was asked whether another owner has taken over."""

    # ------------------------------------------------------------------ taking over

    async def take_over(self, first: Base = NOTHING, *, served_epoch: int = 0) -> None:
        """Becomes the owner, by an entry. Raises `LogMoved` if a later owner is there.

        `first` is the base of a log that has no entry yet. `served_epoch` is the last one at which
        the tablet is known to have been served: finding only earlier ones is `StoreUnusable`, for
        then entries are missing. May be called again by an owner whose last outcome is unknown.
        """
        floor = (await self._floor())[0]
        while True:
            last = await self._last(floor)
            self._refuse(last, served_epoch)
            base = first if last is None else last.base
            number = floor + 1 if last is None else last.number + 1
            found = await self._create(number, Kind.TAKEOVER, base, b"")
            while found is not None:  # the former owner or another claimant was faster
                self._refuse(found, served_epoch)
                base, number = found.base, number + 1
                found = await self._create(number, Kind.TAKEOVER, base, b"")
            floor = (await self._floor())[0]
            if number > floor:
                break
            # The number was used and deleted before: nobody looks there. Begin above the floor.
        self.number, self.base = number, base
        self._kept, self._known_from = {number}, number
        self._lost = self._broken = None

    async def seal(self) -> Entry:
        """The last entry of the log, which gets no more from now on. May be called by anybody.

        Raises `LogMoved` if there is an owner with a later epoch than this object's.
        """
        floor = (await self._floor())[0]
        last = await self._last(floor)
        while True:
            if last is None:
                raise StoreUnusable(
                    f"{self._bucket.name}: the log {self.folder} has no entries, though its tablet "
                    "was served",
                    fault=StoreFault.DAMAGED,
                )
            if last.kind is Kind.SEAL:
                return last
            if last.epoch > self.epoch:
                raise LogMoved(f"{self.folder} has an owner at epoch {last.epoch}", last.epoch)
            number, base = last.number + 1, last.base
            found = await self._create(number, Kind.SEAL, base, b"")
            if found is not None:
                last = found
                continue
            floor = (await self._floor())[0]
            if number > floor:
                return Entry(number, Kind.SEAL, self.epoch, self.writer, base, b"")
            last = await self._last(floor)

    def _refuse(self, last: Entry | None, served_epoch: int) -> None:
        """Raises unless this claimant may follow an entry, or none."""
        epoch = last.epoch if last else 0
        if last and last.kind is Kind.SEAL:
            raise LogMoved(f"{self.folder} is sealed since epoch {epoch}", epoch)
        if last and (epoch > self.epoch or (epoch == self.epoch and last.writer != self.writer)):
            raise LogMoved(f"{self.folder} has an owner at epoch {epoch}", epoch)
        if epoch < served_epoch:
            raise StoreUnusable(
                f"{self._bucket.name}: the log {self.folder} ends at epoch {epoch}, but its tablet "
                f"was served at epoch {served_epoch}",
                fault=StoreFault.DAMAGED,
            )

    async def _last(self, floor: int) -> Entry | None:
        """The last entry above the floor that is found; there may be later ones."""
        last = floor
        while True:
            # Kept takeovers below the floor are not listed.
            page = await self._bucket.list(f"{self.folder}/log", after=self._key(last))
            if not page:
                break
            last = int(page[-1].rpartition("/")[2])
        if last == floor:
            # The floor is the number of a base, which an entry above it has published. A list may
            # lack that entry, or the log has none.
            return None if not floor else await self._after(floor)
        return await self._require(last)

    async def _after(self, floor: int) -> Entry:
        """The entry after the floor, which has to be there."""
        return await self._require(floor + 1)

    # ------------------------------------------------------------------ as the owner

    async def append(self, body: bytes, base: Base | None = None) -> int:
        """Stores a batch, and perhaps publishes a base. Returns the number when it is durable and
        this owner has proved to be one. Raises `LogMoved`; after any other error, the outcome is
        unknown until the next takeover.
        """
        if self._lost:
            raise self._lost
        if self._broken:
            raise self._broken
        if self._appending is not None:
            raise RuntimeError(f"two entries of {self.folder} are appended at the same time")
        self._appending = asyncio.get_running_loop().create_future()
        try:
            named = base or self.base
            found = await self._create(self.number + 1, Kind.BATCH, named, body)
        except BaseException as error:
            self._broken = (
                error
                if isinstance(error, PercolatorError)
                else Unavailable(f"an entry of {self.folder} was given up")
            )
            raise
        finally:
            self._appending.set_result(None)
            self._appending = None
        if found is not None:
            self._lost = LogMoved(f"{self.folder} has an owner at epoch {found.epoch}", found.epoch)
            raise self._lost
        self.number += 1
        self.base = named
        return self.number

    @property
    def is_lost(self) -> bool:
        """True if another owner is known to have taken over."""
        return self._lost is not None

    async def is_held(self) -> bool:
        """True if nobody had taken over when this was called. Callers share a call (`SharedLook`).
        Raises an error of the store if it does not say."""
        while self._lost is None:
            if self._broken:
                raise self._broken
            number = self.number
            self.looks += 1
            if await self._bucket.head(self._key(number + 1)) is None:
                return True
            if self._appending is not None:
                # The object may be one's own, whose answer is not there yet.
                await asyncio.wait([self._appending])
            elif self.number == number and not self._broken:
                entry = await self._require(number + 1)
                self._lost = LogMoved(
                    f"{self.folder} has an owner at epoch {entry.epoch}", entry.epoch
                )
        return False

    async def trim(self) -> int:
        """Deletes entries that the published base includes. Returns how many it deleted."""
        through = self.base.number
        floor = await self._raise_floor(through)
        unknown = range(floor + 1, min(self._known_from, through + 1))
        async for entry in self._present(unknown):
            if entry.kind is not Kind.BATCH:
                self._kept.add(entry.number)
        self._known_from = min(self._known_from, floor + 1)
        numbers = [one for one in range(floor + 1, through + 1) if one not in self._kept]
        for first in range(0, len(numbers), _DELETED_TOGETHER):
            some = numbers[first : first + _DELETED_TOGETHER]
            await asyncio.gather(*(self._bucket.delete(self._key(one)) for one in some))
        self._kept = {one for one in self._kept if one > through}
        self._known_from = max(self._known_from, through + 1)
        return len(numbers)

    # ------------------------------------------------------------------ reading

    async def entries(self, segment: Segment) -> AsyncIterator[Entry]:
        """Entries of a log, in order. `StoreUnusable` if one is missing or damaged."""
        numbers = range(segment.after + 1, segment.through + 1)
        async for entry in self._read(segment.folder, numbers):
            if segment.folder == self.folder and entry.kind is not Kind.BATCH:
                self._kept.add(entry.number)
            yield entry
        if segment.folder == self.folder and segment.through + 1 >= self._known_from:
            self._known_from = min(self._known_from, segment.after + 1)

    async def _read(self, folder: str, numbers: Iterable[int]) -> AsyncIterator[Entry]:
        ahead: list[asyncio.Task[Entry]] = []
        left = iter(numbers)
        try:
            while True:
                for number in left:
                    ahead.append(asyncio.create_task(self._require(number, folder)))
                    if len(ahead) >= _READ_AHEAD:
                        break
                if not ahead:
                    return
                yield await ahead.pop(0)
        finally:
            for task in ahead:
                task.cancel()

    async def _present(self, numbers: Iterable[int]) -> AsyncIterator[Entry]:
        """Entries that have not been deleted yet."""
        for number in numbers:
            key = self._key(number)
            found = await self._bucket.read(key)
            if found is not None:
                yield decode(found.data, number, self._where(key))

    async def _require(self, number: int, folder: str = "") -> Entry:
        key = _key(folder or self.folder, number)
        found = await self._bucket.read(key)
        if found is None:
            raise StoreUnusable(
                f"{self._where(key)} is missing: the log has a hole", fault=StoreFault.DAMAGED
            )
        return decode(found.data, number, self._where(key))

    # ------------------------------------------------------------------ objects

    async def _create(self, number: int, kind: Kind, base: Base, body: bytes) -> Entry | None:
        """Creates an entry. Returns the one that is there instead; None if it was created."""
        self._sequence += 1
        entry = Entry(number, kind, self.epoch, self.writer, base, body)
        key = self._key(number)
        written = await self._bucket.create(key, encode(entry, self._sequence))
        if written.is_own:
            return None
        if written.found is None:
            raise StoreUnusable(
                f"{self._where(key)} is refused, and is not there", fault=StoreFault.INPUT_OUTPUT
            )
        return decode(written.found.data, number, self._where(key))

    async def _floor(self) -> tuple[int, str]:
        """The floor, and the tag of its object; 0 and "" if there is none."""
        key = f"{self.folder}/floor"
        found = await self._bucket.read(key)
        if found is None:
            return 0, ""
        try:
            floor = json.loads(found.data)["floor"]
        except (ValueError, KeyError, TypeError):
            floor = None
        if type(floor) is not int or floor < 1:
            raise StoreUnusable(
                f"{self._where(key)} is damaged: {found.data[:64]!r}", fault=StoreFault.DAMAGED
            )
        return floor, found.tag

    async def _raise_floor(self, to: int) -> int:
        """Raises the floor to a number, unless it is higher. Returns what it was."""
        key = f"{self.folder}/floor"
        former: int | None = None
        while True:
            floor, tag = await self._floor()
            former = floor if former is None else former
            if floor >= to:
                return former
            self._sequence += 1
            data = json.dumps({"floor": to, "by": f"{self.writer}-{self._sequence}"}).encode()
            if tag:
                await self._bucket.replace(key, data, tag)
            else:
                await self._bucket.create(key, data)

    def _key(self, number: int) -> str:
        return _key(self.folder, number)

    def _where(self, key: str) -> str:
        return f"{self._bucket.name}: {key}"


def _key(folder: str, number: int) -> str:
    return f"{folder}/log/{number:0{_NUMBER_DIGITS}d}"


def encode(entry: Entry, sequence: int) -> bytes:
    """The bytes of an entry. `sequence` is a number that its writer uses once: the same bytes are
    never written twice, so that an object that is found is known to be of one call."""
    about = json.dumps({"writer": entry.writer, "sequence": sequence, "base": entry.base}).encode()
    checked = zlib.crc32(entry.body, zlib.crc32(about))
    header = _HEADER.pack(_MAGIC, entry.kind.value, entry.epoch, entry.number, len(about), checked)
    return header + about + entry.body


def decode(data: bytes, number: int, where: str) -> Entry:
    """The entry that was written; `StoreUnusable` for any other bytes."""
    try:
        magic, kind, epoch, found, length, checked = _HEADER.unpack_from(data)
        about = data[_HEADER.size : _HEADER.size + length]
        body = data[_HEADER.size + length :]
        is_whole = zlib.crc32(body, zlib.crc32(about)) == checked
        if magic == _MAGIC and found == number and is_whole:
            header = json.loads(about)
            checkpoint, segments, included = header["base"]
            base = Base(checkpoint, tuple(Segment(*one) for one in segments), included)
            return Entry(number, Kind(kind), epoch, header["writer"], base, body)
    except (struct.error, ValueError, KeyError, TypeError):
        pass  # reported below, as any other damage
    raise StoreUnusable(
        f"{where} is damaged: it is not entry {number} of a log", fault=StoreFault.DAMAGED
    )
