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
- A takeover or seal is never deleted, nor is the entry before it. A former owner's last creation is
  for one of these two numbers. Were the first free again, that creation would succeed, and the
  former owner would acknowledge a commit that nobody reads. Were the second free again, its look
  would find nothing, and it would answer a read without its successor's commits.
- The floor is raised before any entry is deleted. Whoever concludes something from an entry that a
  list has shown, or from its own creation of one, looks at the floor afterwards, and begins again
  if the entry is not above it. Otherwise a claimant that was paused takes over at a number that was
  used and deleted long ago, and everything that it acknowledges is lost; or it leaves a takeover or
  seal there, which another one believes.
- A list says only where to begin reading: the end of the log is the first number above the floor
  that is not there. Otherwise a list that lags makes a tablet look older than it is.
- An entry is deleted only when a later one names a base that includes it, or when the log is sealed
  and no other log needs it (`percolator/bucket/sweep.py`). Otherwise a restart finds a hole.
- A base is published by an entry. So a deposed owner publishes none, and bases never go back.
- A sealed log gets no more entries. Otherwise a tablet that was split acknowledges commits that its
  children do not have.

With a lease, an owner answers reads without asking the store while the lease runs:

- It begins when the last successful creation or look began: these prove that there was no successor
  then, or later. Counted from their ends, it would include time in which there was one.
- Each entry names it. A successor acknowledges nothing and confirms no read before the lease that
  the last entry names has run out, from its own takeover on. A takeover names the longest of its
  own and that of the entry before it: its claimant may die before the former owner's has run out.
- Only the rates of two clocks are compared, and differ by less than `CLOCK_RATES_RATIO_MAX`. That
  excludes machines that are suspended, and virtual ones that are paused with their clocks.
"""

from __future__ import annotations

import asyncio
import json
import struct
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from copy import copy
from enum import Enum
from itertools import count, islice
from math import inf
from typing import NamedTuple

from percolator.bucket.bucket import Bucket
from percolator.bucket.port import LISTED_MAX
from percolator.errors import PercolatorError, StoreFault, StoreUnusable, Unavailable
from percolator.tasks import stop_waiting_for
from percolator.world import Random

CLOCK_RATES_RATIO_MAX = 1.1
"""The fastest clock gains less than this on the slowest: a successor waits so much longer than the
lease of the former owner. Clocks that are being adjusted differ by a thousandth."""
_MAGIC = b"PLG1"
_HEADER = struct.Struct("<4s1sQQII")
"""Magic, kind, epoch, number, length of the JSON, checksum of JSON and body."""
_NUMBER_DIGITS = 20
_READ_TOGETHER = 16
_WALKED_TOGETHER = 3
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
    """Name of its creator: unique for each claimant."""
    base: Base
    body: bytes
    lease_seconds: float
    """Whoever takes over after this entry serves only after so long."""


class Floor(NamedTuple):
    """How far entries may have been deleted, apart from those that are kept."""

    number: int = 0
    deleted: int = 0
    """So far, they have been."""
    tag: str = ""


NOTHING = Base()


class LogMoved(Exception):
    """Another owner has taken over, or the log was sealed."""

    def __init__(self, message: str, epoch: int) -> None:
        super().__init__(message)
        self.epoch = epoch
        """The epoch of the later owner, or of the seal."""


class TabletLog:
    """The log of a tablet, as its owner writes it. Belongs to one event loop."""

    def __init__(
        self,
        bucket: Bucket,
        random: Random,
        folder: str,
        epoch: int,
        *,
        interval_seconds: float = 0.0,
        lease_seconds: float = 0.0,
    ) -> None:
        """`folder` is that of the tablet. Creations begin at least `interval_seconds` apart. The
        lease is optional: 0 for none."""
        self._bucket = bucket
        self._clock = bucket.clock
        self._random = random
        self.folder = folder
        self.epoch = epoch
        self.writer = f"{random.getrandbits(128):032x}"
        self._interval_seconds = interval_seconds
        self._lease_seconds = lease_seconds
        self.number = 0
        """The last entry that is known to be stored; 0 until this is the owner."""
        self.base = NOTHING
        """The last base that was published."""
        self._kept: set[int] = set()
        """Numbers of takeovers and seals, as far as they are known."""
        self._known_from = 1
        """The first number from which on `_kept` is complete."""
        self._appending: asyncio.Future[None] | None = None
        self._successor: Entry | None = None
        """The entry by which another owner has taken over, or the seal."""
        self._broken: PercolatorError | None = Unavailable(f"{folder} is not taken over")
        """Why this is not known to be the owner, although no successor is known."""
        self._sequence = 0
        """How many objects this has begun to write."""
        self._proved = 0
        """Which of them was the last one whose creation has succeeded."""
        self._created_at = -inf
        """When the last creation began."""
        self._serves_at = -inf
        """When the former owner's lease has run out."""
        self._leased_until = -inf
        self.looks = 0
        """How often the store was asked whether another owner has taken over."""

    # ------------------------------------------------------------------ taking over

    async def take_over(self, first: Base = NOTHING, *, served_epoch: int = 0) -> None:
        """Becomes the owner, by an entry. Raises `LogMoved` if a later owner is there.

        `first` is the base of a log that has no entry yet. `served_epoch` is the last one at which
        the tablet is known to have been served: finding only earlier ones is `StoreUnusable`, for
        then entries are missing.

        After an error of the store, the same object may try again, also one that was the owner:
        another object with this epoch might be refused. Then the state has to be read again, which
        may have a batch whose outcome was unknown.
        """
        if self._appending is not None:
            raise RuntimeError(f"{self.folder} is taken over while an entry is appended")
        self._broken = Unavailable(f"{self.folder} is being taken over")

        def claim(last: Entry | None) -> Entry:
            self._require_successor(last, served_epoch)
            return self._entry(
                last.number + 1 if last else 1,
                Kind.TAKEOVER,
                last.base if last else first,
                lease_seconds=max(self._lease_seconds, last.lease_seconds if last else 0.0),
            )

        last, entry = await self._follow(claim)
        self._wait_for_lease(last)
        self.number, self.base = entry.number, entry.base
        self._kept, self._known_from = {entry.number}, entry.number
        self._successor = self._broken = None

    async def seal(self) -> Entry:
        """The last entry of the log, which gets no more from now on. May be called by anybody.

        Raises `LogMoved` if there is an owner with a later epoch than this object's. Returns when
        the last owner's lease has run out.
        """

        def close(last: Entry | None) -> Entry:
            if last is None:
                raise StoreUnusable(
                    f"{self._bucket.name}: the log {self.folder} has no entries, though its tablet "
                    "was served",
                    fault=StoreFault.DAMAGED,
                )
            if last.kind is Kind.SEAL or last.epoch > self.epoch:
                raise self._moved(last)
            lease_seconds = last.lease_seconds
            if last.writer == self.writer and last.kind is Kind.BATCH:
                # The owner itself: it gives its lease up, and the former one's has run out.
                lease_seconds = self._lease_seconds = 0.0
                self._leased_until = -inf
            return self._entry(last.number + 1, Kind.SEAL, last.base, lease_seconds=lease_seconds)

        try:
            _, seal = await self._follow(close)
        except LogMoved:
            last = await self.end()
            if last is None or last.kind is not Kind.SEAL:
                raise
            seal = last
        self._wait_for_lease(seal)
        await self._reach(self._serves_at)
        return seal

    async def end(self) -> Entry | None:
        """The last entry, after which there was none during this call; None if the log had none.
        May be called by anybody."""
        floor = (await self.floor()).number
        while True:
            begin = await self._listed(floor)
            last = await self._walk(begin)
            floor = (await self.floor()).number
            if (last.number if last else begin) > floor:
                break
            # What was found may have been created after it was deleted, and what was not found may
            # have been deleted.
        if last is None and begin > 1:
            raise self._hole(self.folder, begin)
        return last

    async def clear(self) -> None:
        """Deletes the entries of a sealed log that nobody needs, except for those that are kept."""
        last = await self.end()
        if last is None or last.kind is not Kind.SEAL:
            raise RuntimeError(f"{self.folder} is cleared, and is not sealed")
        self._kept, self._known_from = {last.number}, last.number
        await self._delete_through(last.number - 1)

    async def _follow(self, make: Callable[[Entry | None], Entry]) -> tuple[Entry | None, Entry]:
        """Creates what `make` returns for the last entry. Returns both. `make` raises if nothing
        may follow."""
        last, is_sure = await self.end(), True
        while True:
            try:
                entry = make(last)
            except (LogMoved, StoreUnusable):
                if is_sure:
                    raise
                last, is_sure = await self.end(), True
                continue
            found = await self._create(entry)
            if found is None and entry.number > (await self.floor()).number:
                return last, entry
            if found is not None:
                # Another one was faster, perhaps an owner that never pauses. It would be so again
                # and again if this looked at the floor before its next try, too.
                last, is_sure = await self._walk(entry.number), False
            if found is None or last is None:
                # The number was used and deleted before: nobody looks there.
                last, is_sure = await self.end(), True

    def _require_successor(self, last: Entry | None, served_epoch: int) -> None:
        """Raises unless this claimant may follow an entry, or none."""
        epoch = last.epoch if last else 0
        if last and (
            last.kind is Kind.SEAL
            or epoch > self.epoch
            or (epoch == self.epoch and last.writer != self.writer)
        ):
            raise self._moved(last)
        if epoch < served_epoch:
            raise StoreUnusable(
                f"{self._bucket.name}: the log {self.folder} ends at epoch {epoch}, but its tablet "
                f"was served at epoch {served_epoch}",
                fault=StoreFault.DAMAGED,
            )

    async def _walk(self, begin: int) -> Entry | None:
        """The last entry from a number on; None if there is none under that number."""
        last = None
        async with aclosing(self._read(self.folder, count(begin), _WALKED_TOGETHER)) as found:
            async for _, entry in found:
                if entry is None:
                    break
                last = entry
        return last

    async def _listed(self, floor: int) -> int:
        """The last entry above the floor that lists show, or the one after the floor. It is there
        unless it was the first of all: the floor is the number of a base that an entry above it
        has published."""
        number = floor
        while True:
            # Entries below the floor that are kept are not listed.
            page = await self._bucket.list(f"{self.folder}/log", after=self._key(number))
            if page:
                number = self._number(page[-1].key)
            if len(page) < LISTED_MAX:
                return max(number, floor + 1)

    def _wait_for_lease(self, last: Entry | None) -> None:
        """From now on, the lease that the last entry names may run for its whole length."""
        if last is not None and last.lease_seconds:
            seconds = last.lease_seconds * CLOCK_RATES_RATIO_MAX
            self._serves_at = max(self._serves_at, self._now() + seconds)

    # ------------------------------------------------------------------ as the owner

    async def append(self, body: bytes, base: Base | None = None) -> int:
        """Stores a batch, and perhaps publishes a base. Returns the number when it is durable and
        this owner has proved to be one. After `LogMoved`, it is not stored and never will be; after
        any other error, that is unknown until the next takeover.
        """
        if self._appending is not None:
            raise RuntimeError(f"two entries of {self.folder} are appended at the same time")
        named = base or self.base
        if not self.base.number <= named.number <= self.number:
            raise RuntimeError(
                f"a base of {self.folder} includes {named.number}, expected one from "
                f"{self.base.number} to {self.number}"
            )
        self._appending = asyncio.get_running_loop().create_future()
        try:
            await self._reach(max(self._serves_at, self._created_at + self._interval_seconds))
            self._require_ownership()
            entry = self._entry(
                self.number + 1, Kind.BATCH, named, body, lease_seconds=self._lease_seconds
            )
            found = await self._append(entry)
            if found is not None:
                self._successor = found
                raise self._moved(found)
            self.number, self.base = entry.number, named
            return entry.number
        finally:
            self._appending.set_result(None)
            self._appending = None

    async def _append(self, entry: Entry) -> Entry | None:
        try:
            return await self._create(entry)
        except BaseException as error:
            self._broken = (
                error
                if isinstance(error, PercolatorError)
                else Unavailable(f"an entry of {self.folder} was given up")
            )
            raise

    def _require_ownership(self) -> None:
        """Raises if this is known not to be the owner, or not known to be the owner."""
        if self._successor is not None:
            raise self._moved(self._successor)
        if self._broken is not None:
            raise copy(self._broken)

    def _moved(self, successor: Entry) -> LogMoved:
        epoch = successor.epoch
        what = "is sealed" if successor.kind is Kind.SEAL else "has an owner"
        return LogMoved(f"{self.folder} {what} at epoch {epoch}", epoch)

    @property
    def is_lost(self) -> bool:
        """True if another owner is known to have taken over."""
        return self._successor is not None

    def has_lease(self) -> bool:
        """True if no other owner has served until now. To be asked after the reading."""
        return (
            self._successor is None
            and self._broken is None
            and self._serves_at <= self._now() < self._leased_until
        )

    async def is_held(self) -> bool:
        """True if no other owner had served when this was called. Callers share a call
        (`SharedLook`). Raises an error of the store if it does not say."""
        await self._reach(self._serves_at)
        return self.has_lease() or await self._look()

    async def _look(self) -> bool:
        """True if nobody had taken over when this was called."""
        called = self._sequence
        while self._successor is None:
            self._require_ownership()
            if self._proved > called:
                return True
            number, began = self.number, self._now()
            self.looks += 1
            is_free = await self._bucket.head(self._key(number + 1)) is None
            if is_free:
                # Even if a successor had read and trimmed an entry of this owner's that is still
                # without an answer, it would be there.
                self._begin_lease(began)
                return True
            if self._appending is not None:
                # The object may be one's own, whose answer is not there yet.
                await asyncio.wait([self._appending])
            elif self.number == number and self._broken is None:
                self._successor = await self._require(self.folder, number + 1)
        return False

    def _begin_lease(self, began: float) -> None:
        """`began`: when a creation or look began that has succeeded."""
        self._leased_until = max(self._leased_until, began + self._lease_seconds)

    async def trim(self) -> int:
        """Deletes entries that the published base includes. Returns how many it deleted."""
        return await self._delete_through(self.base.number)

    async def _delete_through(self, through: int) -> int:
        deleted = (await self._raise_floor(through)).deleted
        # The entry after the last that is deleted may be a takeover, too.
        unknown = range(deleted + 1, min(self._known_from, through + 2))
        kept = set(self._kept)
        async with aclosing(self._read(self.folder, unknown)) as found:
            async for number, entry in found:
                if entry is not None and entry.kind is not Kind.BATCH:
                    kept.add(number)
        numbers = [
            one
            for one in range(deleted + 1, through + 1)
            if one not in kept and one + 1 not in kept
        ]
        for first in range(0, len(numbers), _DELETED_TOGETHER):
            some = numbers[first : first + _DELETED_TOGETHER]
            await asyncio.gather(*(self._bucket.delete(self._key(one)) for one in some))
        await self._raise_floor(through, deleted=through)
        return len(numbers)

    # ------------------------------------------------------------------ reading

    async def entries(self, segment: Segment) -> AsyncGenerator[Entry, None]:
        """Entries of a log, in order. `StoreUnusable` if one is missing or damaged; `LogMoved` if
        it is missing because another owner needs it no more. Close it (`contextlib.aclosing`)."""
        kept = set[int]()
        numbers = range(segment.after + 1, segment.through + 1)
        async with aclosing(self._read(segment.folder, numbers)) as found:
            async for number, entry in found:
                if entry is None:
                    if self.number and not await self._look():
                        self._require_ownership()
                    raise self._hole(segment.folder, number)
                if entry.kind is not Kind.BATCH:
                    kept.add(number)
                yield entry
        if segment.folder == self.folder and segment.through + 1 >= self._known_from:
            self._kept |= kept
            self._known_from = min(self._known_from, segment.after + 1)

    async def _read(
        self, folder: str, numbers: Iterable[int], together: int = _READ_TOGETHER
    ) -> AsyncGenerator[tuple[int, Entry | None], None]:
        """Entries in order, `together` of which are read at the same time."""
        left = iter(numbers)
        ahead: list[tuple[int, asyncio.Task[Entry | None]]] = []
        try:
            while True:
                ahead.extend(
                    (number, asyncio.create_task(self._find(number, folder)))
                    for number in islice(left, together - len(ahead))
                )
                if not ahead:
                    return
                number, task = ahead[0]
                entry = await task
                del ahead[0]
                yield number, entry
        finally:
            for _, task in ahead:
                task.cancel()
                stop_waiting_for(task)

    async def _require(self, folder: str, number: int) -> Entry:
        entry = await self._find(number, folder)
        if entry is None:
            raise self._hole(folder, number)
        return entry

    async def _find(self, number: int, folder: str = "") -> Entry | None:
        key = _key(folder or self.folder, number)
        found = await self._bucket.read(key)
        return None if found is None else decode(found.data, number, self._where(key))

    def _hole(self, folder: str, number: int) -> StoreUnusable:
        return StoreUnusable(
            f"{self._where(_key(folder, number))} is missing: the log has a hole",
            fault=StoreFault.DAMAGED,
        )

    # ------------------------------------------------------------------ objects

    def _entry(
        self, number: int, kind: Kind, base: Base, body: bytes = b"", *, lease_seconds: float
    ) -> Entry:
        return Entry(number, kind, self.epoch, self.writer, base, body, lease_seconds)

    async def _create(self, entry: Entry) -> Entry | None:
        """Creates an entry. Returns the one that is there instead; None if it was created."""
        self._sequence += 1
        sequence, began = self._sequence, self._now()
        self._created_at = began
        key = self._key(entry.number)
        written = await self._bucket.create(key, encode(entry, sequence))
        if written.is_own:
            self._proved = sequence
            self._begin_lease(began)
            return None
        if written.found is None:
            raise StoreUnusable(
                f"{self._where(key)} is refused, and is not there", fault=StoreFault.INPUT_OUTPUT
            )
        return decode(written.found.data, entry.number, self._where(key))

    async def floor(self) -> Floor:
        """How far entries may have been deleted. May be called by anybody."""
        key = f"{self.folder}/floor"
        found = await self._bucket.read(key)
        if found is None:
            return Floor()
        try:
            about = json.loads(found.data)
            floor = Floor(about["floor"], about["deleted"], found.tag)
            if type(floor.number) is type(floor.deleted) is int and (
                0 <= floor.deleted <= floor.number
            ):
                return floor
        except (ValueError, KeyError, TypeError):
            pass  # reported below, as any other damage
        raise StoreUnusable(
            f"{self._where(key)} is damaged: {found.data[:64]!r}", fault=StoreFault.DAMAGED
        )

    async def _raise_floor(self, number: int, *, deleted: int = 0) -> Floor:
        """Raises the floor, unless it is as high. Returns what it was."""
        key = f"{self.folder}/floor"
        while True:
            floor = await self.floor()
            new = floor._replace(
                number=max(floor.number, number), deleted=max(floor.deleted, deleted)
            )
            if new == floor:
                return floor
            self._sequence += 1
            about = {"floor": new.number, "deleted": new.deleted}
            data = json.dumps({**about, "by": f"{self.writer}-{self._sequence}"}).encode()
            if floor.tag:
                written = await self._bucket.replace(key, data, floor.tag)
            else:
                written = await self._bucket.create(key, data)
            if written.is_own:
                return floor

    def _now(self) -> float:
        return self._clock.monotonic_seconds()

    async def _reach(self, instant: float) -> None:
        while (seconds := instant - self._now()) > 0:
            await self._clock.sleep(seconds)

    def _key(self, number: int) -> str:
        return _key(self.folder, number)

    def _number(self, key: str) -> int:
        name = key.rpartition("/")[2]
        if len(name) != _NUMBER_DIGITS or not name.isdigit():
            raise StoreUnusable(
                f"{self._where(key)} is no entry of a log", fault=StoreFault.DAMAGED
            )
        return int(name)

    def _where(self, key: str) -> str:
        return f"{self._bucket.name}: {key}"


def _key(folder: str, number: int) -> str:
    return f"{folder}/log/{number:0{_NUMBER_DIGITS}d}"


def encode(entry: Entry, sequence: int) -> bytes:
    """The bytes of an entry. `sequence` is a number that its writer uses once: the same bytes are
    never written twice, so that an object that is found is known to be of one call."""
    header = {
        "writer": entry.writer,
        "sequence": sequence,
        "base": entry.base,
        "lease_seconds": entry.lease_seconds,
    }
    about = json.dumps(header).encode()
    checked = zlib.crc32(entry.body, zlib.crc32(about))
    fixed = _HEADER.pack(_MAGIC, entry.kind.value, entry.epoch, entry.number, len(about), checked)
    return fixed + about + entry.body


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
            lease_seconds = float(header["lease_seconds"])
            if 0.0 <= lease_seconds < inf:
                return Entry(number, Kind(kind), epoch, header["writer"], base, body, lease_seconds)
    except (struct.error, ValueError, KeyError, TypeError):
        pass  # reported below, as any other damage
    raise StoreUnusable(
        f"{where} is damaged: it is not entry {number} of a log", fault=StoreFault.DAMAGED
    )
