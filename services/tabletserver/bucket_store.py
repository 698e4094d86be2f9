"""Tablets whose logs are in a bucket. The LevelDB on the local disk is a cache.

BucketTabletStore  all tablets of a server
BucketOwnership    one of them, owned by its log (see `percolator/bucket/log.py`)
BucketStorage      one open tablet: each write is appended to the log, then applied to the cache
Caches, Cache      what is on the local disk (see `leveldb_cache.py`)

Nothing on the local disk is needed: a tablet is rebuilt from a checkpoint and the entries after it.

Rules, each with the failure that it prevents:

- A batch is applied to the cache only once it is known to be in the log. Otherwise a read shows
  what a later owner does not have, and a checkpoint carries it to everybody.
- An append that succeeds proves the ownership, and a read asks the bucket for the next entry. A
  bucket that is silent proves nothing: the tablet is kept, and no answer leaves.
- After an append whose outcome is unknown nothing is written or read until the tablet is opened
  again. That is a takeover at the same epoch, which finds the entry or keeps it out.
- A cache is used again only if the log has the entry that it was at last (`Position`), and only
  while the machine runs: a batch is not synced, and a power cut can lose one and keep a later one.
  A cache that has failed is not used again.
- A checkpoint includes only entries that were applied before the copy of the cache began. Those are
  deleted soon after.
- A tablet that was split off begins with the checkpoint and the entries of its parent, whose log is
  sealed first. Otherwise the parent acknowledges commits that no child has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from structlog.stdlib import BoundLogger

from percolator.bucket.bucket import Bucket
from percolator.bucket.checkpoint import (
    NO_FILES,
    POSITION_KEY,
    Checkpoint,
    Checkpoints,
    LoggedBatch,
    Position,
    Snapshot,
    download,
    put_changes,
    read_checkpoint,
    tablet_folder,
)
from percolator.bucket.log import NOTHING, Base, LogMoved, Segment, TabletLog
from percolator.errors import NotReady, PercolatorError, StoreFault, StoreUnusable, TabletMoved
from percolator.services.chassis.coordinator import Trouble
from percolator.services.chassis.epoch_directory import SharedLook
from percolator.services.tabletserver.storage import MEBIBYTE, Ancestry, fault_of
from percolator.tablet.state import Ownership, TabletIdentity
from percolator.tasks import Tasks
from percolator.wire.backoff import Backoff
from percolator.world import Clock, Cursor, Random, Storage

# The cache of a tablet, and the place where a server has all of them.


class Cache(Storage[Any], Protocol):
    """An ordered map on the local disk. Nothing of it has to be durable."""

    async def snapshot(self) -> Snapshot:
        """Files with everything that was written before, and perhaps more."""

    def abandon(self) -> None:
        """Closes it at once."""


class NewCache(Protocol):
    """A cache that is being filled with files."""

    async def put(self, name: str, data: bytes) -> None: ...

    async def open(self, *, open_tablets: int) -> Cache:
        """Raises `StoreUnusable`. Without any files, it is empty."""


class Caches(Protocol):
    """The caches of one server. They belong to one process alone."""

    failures: tuple[type[Exception], ...]
    """Errors of any of these methods if the disk fails."""

    async def find(self, tablet_id: int, *, open_tablets: int) -> Cache | None:
        """The cache of the tablet, from this life of the machine. None if it cannot be opened."""

    async def begin(self, tablet_id: int) -> NewCache:
        """A new one, in place of any other."""

    async def drop_idle(self, in_use: Collection[int]) -> None:
        """Deletes caches of tablets that are not in use, except for the latest."""


# Ownership.

_AGAIN_SECONDS = 0.1


class BucketOwnership:
    """One server's ownership of a tablet, which is that of its log."""

    def __init__(self, identity: TabletIdentity, log: TabletLog) -> None:
        self.identity = identity
        self.log = log
        self.is_in_doubt = False
        """The outcome of an append is unknown: only a takeover tells it."""
        self.is_in_use = True
        """It is being opened, or open."""
        self.is_cache_sound = True
        """Its cache may be used again."""
        self._given_up = False
        self._shared = SharedLook(self._look)

    @property
    def is_lost(self) -> bool:
        """True if a later owner is known."""
        return self._given_up or self.log.is_lost

    def give_up(self) -> None:
        """A later owner was met."""
        self._given_up = True

    def is_held_blocking(self) -> bool:
        """True unless it is known to be lost: what was appended to the log has proved it."""
        return not self.is_lost

    async def is_held(self) -> bool:
        """True if nobody had taken over before. Raises `NotReady` if the bucket does not say."""
        return not self.is_lost and (self.log.has_lease() or await self._shared())

    async def _look(self) -> bool:
        try:
            return await self.log.is_held()
        except PercolatorError as error:
            raise NotReady(
                f"whether {self.identity} has a later owner is unknown: {error}",
                retry_after_seconds=_AGAIN_SECONDS,
            ) from error


# One open tablet.


@dataclass(frozen=True)
class LogSettings:
    """How the log of a tablet is written, and how much of it an owner leaves to the next one."""

    bytes_max: int = 32 * MEBIBYTE
    """So many bytes of entries after the last checkpoint, and another one is made. With fewer, the
    same rows are uploaded more often."""
    entries_max: int = 2048
    """So many entries, each of which is read by a call of its own."""
    entries_at_close_max: int = 64
    """A tablet that is closed leaves at most so many, if the bucket answers."""
    interval_seconds: float = 0.0
    """The least time between two entries."""
    lease_seconds: float = 0.0
    """How long a tablet is read without a look at the bucket; 0: never."""


@dataclass(frozen=True)
class Environment:
    """Objects that all tablets of a server share."""

    bucket: Bucket
    clock: Clock
    random: Random
    log: BoundLogger
    settings: LogSettings


class NotAppended(Exception):
    """A batch is not known to be in the log, and is not in the cache."""


class _Count(NamedTuple):
    """Entries of the log since the last published checkpoint, or a part of them."""

    entries: int = 0
    bytes: int = 0


class _Ready(NamedTuple):
    """A checkpoint that was uploaded, and that the next entry publishes."""

    base: Base
    checkpoint: Checkpoint
    included: _Count


_RETRY_SECONDS_MIN = 1.0
_RETRY_SECONDS_MAX = 60.0


class BucketStorage:
    """One open tablet."""

    is_cache = True

    def __init__(
        self,
        ownership: BucketOwnership,
        cache: Cache,
        environment: Environment,
        published: Checkpoint,
        since: _Count,
    ) -> None:
        """The cache is at the last entry of the log. `published` is its last checkpoint, after
        which `since` follow."""
        self.failures: tuple[type[Exception], ...] = (*cache.failures, NotAppended)
        self._troubles: tuple[type[Exception], ...] = (*self.failures, PercolatorError, LogMoved)
        self._ownership = ownership
        self._cache = cache
        self._settings = environment.settings
        self._clock = environment.clock
        self._random = environment.random
        self._log = environment.log.bind(tablet=ownership.identity.tablet_id)
        # The cache's own methods: a Python function around them would double the cost.
        self.get: Callable[[bytes], bytes | None] = cache.get
        self.cursor: Callable[[], Cursor] = cache.cursor
        self._applied = ownership.log.number
        """The last entry that was applied to the cache."""
        self._since = since
        self._checkpoints = Checkpoints(
            environment.bucket,
            self._random,
            ownership.log.folder,
            ownership.log.writer,
            published,
        )
        self._ready: _Ready | None = None
        self._broken: str | None = None
        self._tasks = Tasks()
        self._checkpointing: asyncio.Task[None] | None = None
        self._trimming: asyncio.Task[None] | None = None
        self._closed = False

    def fault(self, error: Exception) -> StoreFault:
        """Nothing is lost with a cache: it is never damaged for good."""
        if isinstance(error, NotAppended):
            return StoreFault.INPUT_OUTPUT
        self._ownership.is_cache_sound = False
        found = self._cache.fault(error)
        return StoreFault.INPUT_OUTPUT if found is StoreFault.DAMAGED else found

    def iterate(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._cache.iterate(start, stop)

    def batch(self) -> LoggedBatch:
        return LoggedBatch(self._cache.batch())

    async def write(self, batch: LoggedBatch, then: Callable[[], bool] | None = None) -> bool:
        """As every `Storage`. False, or an error without `then`, if there is a later owner: then
        nothing was written."""
        ready = self._ready
        body = batch.body()
        try:
            number = await self._append(body, ready.base if ready else None)
        except LogMoved as moved:
            if then is None:
                raise NotAppended(str(moved)) from moved
            return False
        await self._apply(batch, number, body)
        if ready is not None:
            self._published(ready)
        self._count(len(body))
        return then is None or then()

    async def _append(self, body: bytes, base: Base | None) -> int:
        if self._broken is not None:
            raise NotAppended(self._broken)
        try:
            return await self._ownership.log.append(body, base)
        except LogMoved as moved:
            self._broken = str(moved)
            raise
        except PercolatorError as error:
            self._ownership.is_in_doubt = True
            self._broken = str(error)
            raise NotAppended(f"whether an entry is in the log is unknown: {error}") from error
        except BaseException:
            self._ownership.is_in_doubt = True
            self._broken = "an append was given up"
            raise

    async def _apply(self, batch: LoggedBatch, number: int, body: bytes) -> None:
        log = self._ownership.log
        position = Position.of(log.folder, number, log.writer, body)
        batch.writes.put(POSITION_KEY, position.encode())
        try:
            await self._cache.write(batch.writes)
        except BaseException as error:
            # The log has the entry. What the cache has, nobody knows.
            self._ownership.is_cache_sound = False
            self._broken = f"the cache failed: {error}"
            raise
        self._applied = number

    def approximate_bytes(self, start: bytes, stop: bytes) -> int:
        return self._cache.approximate_bytes(start, stop)

    async def compact(self, start: bytes, stop: bytes) -> None:
        await self._cache.compact(start, stop)

    async def close(self) -> None:
        """Makes a checkpoint, if opening the tablet elsewhere would take long without it."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._tasks.cancel()
            if self._broken is None and not self._ownership.is_lost:
                await self._leave_checkpoint()
        except self._troubles as error:
            # It was only to save time: the log has everything.
            self._log.info("closed without a checkpoint", reason=str(error))
        finally:
            try:
                await self._cache.close()
            finally:
                self._ownership.is_in_use = False

    # ------------------------------------------------------------------ checkpoints

    def _count(self, size: int) -> None:
        entries, total = self._since
        self._since = _Count(entries + 1, total + size)
        idle = self._checkpointing is None or self._checkpointing.done()
        if self._is_due and self._ready is None and idle:
            self._checkpointing = self._tasks.start(self._checkpoint())

    @property
    def _is_due(self) -> bool:
        entries, total = self._since
        settings = self._settings
        # What was split off depends on its parent's log until it has a checkpoint of its own.
        is_child = bool(self._ownership.log.base.segments)
        return entries > settings.entries_max or total > settings.bytes_max or is_child

    async def _checkpoint(self) -> None:
        """Makes a checkpoint while the tablet serves: until it succeeds."""
        backoff = Backoff(self._clock, self._random, _RETRY_SECONDS_MIN, _RETRY_SECONDS_MAX)
        trouble = Trouble(
            self._log, "no checkpoint can be made: the log grows", "a checkpoint was made again"
        )
        while self._broken is None and not self._ownership.is_lost:
            try:
                self._ready = await self._uploaded()
            except self._troubles as error:
                trouble.lasts(error)
            else:
                trouble.is_over()
                return
            await self._clock.sleep(backoff.next_seconds())

    async def _uploaded(self) -> _Ready:
        # These before the cache is flushed: it may get more meanwhile, but has all of this.
        number, included = self._applied, self._since
        snapshot = await self._cache.snapshot()
        try:
            key, checkpoint = await self._checkpoints.upload(snapshot, number)
        finally:
            snapshot.close()
        return _Ready(Base(key, (), number), checkpoint, included)

    def _published(self, ready: _Ready) -> None:
        self._ready = None
        self._checkpoints.publish(ready.checkpoint)
        entries, total = self._since
        included = ready.included
        self._since = _Count(entries - included.entries, total - included.bytes)
        if self._trimming is None or self._trimming.done():
            self._trimming = self._tasks.start(self._trim())

    async def _trim(self) -> None:
        try:
            await self._ownership.log.trim()
        except PercolatorError as error:
            # The next checkpoint's trim deletes these as well.
            self._log.warning("entries of the log not deleted", error=str(error))

    async def _leave_checkpoint(self) -> None:
        ready = self._ready
        if ready is None:
            if self._since.entries <= self._settings.entries_at_close_max and not self._is_due:
                return
            ready = await self._uploaded()
        number = await self._append(b"", ready.base)
        # With the number of an entry that is not deleted, this server can use its cache again.
        await self._apply(self.batch(), number, b"")


# All tablets of a server.


_REPLAYED_TOGETHER_BYTES = MEBIBYTE


class BucketTabletStore:
    """A `TabletStore`. Belongs to one event loop."""

    def __init__(
        self,
        bucket: Bucket,
        caches: Caches,
        clock: Clock,
        random: Random,
        log: BoundLogger,
        settings: LogSettings = LogSettings(),
    ) -> None:
        self._bucket = bucket
        self._caches = caches
        self._log = log
        self._environment = Environment(bucket, clock, random, log, settings)
        self._owned: dict[int, BucketOwnership] = {}
        self._tidying = asyncio.Lock()
        """Held while idle caches are deleted, and while one of them begins to be used."""

    async def take_over(self, tablet: TabletIdentity, ancestry: Ancestry) -> BucketOwnership:
        settings = self._environment.settings
        log = TabletLog(
            self._bucket,
            self._environment.random,
            tablet_folder(tablet.tablet_id),
            tablet.epoch,
            interval_seconds=settings.interval_seconds,
            lease_seconds=settings.lease_seconds,
        )
        try:
            first = await self._inherited(log, tablet, ancestry)
            served_epoch = ancestry.served_epoch
            if ancestry.must_exist and first is NOTHING:
                served_epoch = max(served_epoch, 1)
            await log.take_over(first, served_epoch=served_epoch)
        except LogMoved as moved:
            raise TabletMoved(
                f"cannot own tablet {tablet.tablet_id} at epoch {tablet.epoch}: {moved}",
                tablet_id=tablet.tablet_id,
                epoch=tablet.epoch,
                highest_epoch=moved.epoch,
            ) from moved
        except PercolatorError as error:
            raise _unusable(f"cannot take over {tablet}", error) from error
        ownership = self._owned[tablet.tablet_id] = BucketOwnership(tablet, log)
        return ownership

    async def _inherited(self, log: TabletLog, tablet: TabletIdentity, ancestry: Ancestry) -> Base:
        """The state with which a tablet begins that was split off, and has no log of its own."""
        if not ancestry.origin_tablet_id:
            return NOTHING
        if await log.end() is not None:
            return NOTHING  # its own log says where it begins; its parent's may be deleted
        folder, epoch = tablet_folder(ancestry.origin_tablet_id), ancestry.origin_epoch
        parent = TabletLog(self._bucket, self._environment.random, folder, epoch)
        try:
            last = await parent.seal()
        except LogMoved as moved:
            raise StoreUnusable(
                f"{tablet} was split off from tablet {ancestry.origin_tablet_id} at epoch {epoch}, "
                f"but {moved}",
                fault=StoreFault.DAMAGED,
            ) from moved
        rest = Segment(folder, last.base.number, last.number)
        return Base(last.base.checkpoint, (*last.base.segments, rest))

    async def open(self, ownership: Ownership, *, open_tablets: int) -> BucketStorage:
        if not isinstance(ownership, BucketOwnership):
            raise TypeError(f"not an ownership of this store: {ownership!r}")
        async with self._tidying:
            ownership.is_in_use = True
            # It was forgotten if other tablets were opened since it was closed.
            self._owned[ownership.identity.tablet_id] = ownership
        storage = None
        try:
            if ownership.is_in_doubt:
                await ownership.log.take_over()
                ownership.is_in_doubt = False
            storage = await self._opened(ownership, open_tablets)
        except LogMoved as moved:
            ownership.give_up()
            raise StoreUnusable(
                f"{ownership.identity} cannot be opened again: {moved}",
                fault=StoreFault.INPUT_OUTPUT,
            ) from moved
        except PercolatorError as error:
            raise _unusable(f"cannot open {ownership.identity}", error) from error
        except self._caches.failures as error:
            ownership.is_cache_sound = False
            raise StoreUnusable(
                f"the cache of {ownership.identity} cannot be made: {error}",
                fault=fault_of(error),
            ) from error
        finally:
            ownership.is_in_use = storage is not None
        return storage

    async def remove_superseded(self, tablet: TabletIdentity) -> None:
        """Former owners leave nothing here but their caches. Objects in the bucket may still be
        needed by other tablets."""
        async with self._tidying:
            self._owned = {key: one for key, one in self._owned.items() if one.is_in_use}
            try:
                await self._caches.drop_idle(self._owned)
            except self._caches.failures as error:
                raise StoreUnusable(
                    f"cannot delete idle caches: {error}", fault=fault_of(error)
                ) from error

    # ------------------------------------------------------------------ opening

    async def _opened(self, ownership: BucketOwnership, open_tablets: int) -> BucketStorage:
        start = await self._found(ownership, open_tablets)
        if start is None:
            ownership.is_cache_sound = False
            start = await self._made(ownership, open_tablets)
            ownership.is_cache_sound = True
        try:
            replayed = await self._replay(ownership.log, start)
        except BaseException:
            start.cache.abandon()
            raise
        since = _Count(start.applied + replayed.entries, replayed.bytes)
        return BucketStorage(ownership, start.cache, self._environment, start.published, since)

    async def _found(self, ownership: BucketOwnership, open_tablets: int) -> _Start | None:
        """The cache that is there, if it is a prefix of the log, and not older than the base."""
        log = ownership.log
        if not ownership.is_cache_sound:
            return None
        cache = await self._caches.find(ownership.identity.tablet_id, open_tablets=open_tablets)
        if cache is None:
            return None
        try:
            number = await self._proved(cache, log)
            if number:
                rest = Segment(log.folder, number, log.number)
                published = await self._checkpoint(log.base)
                return _Start(cache, published, number - log.base.number, (rest,))
        except BaseException:
            cache.abandon()
            raise
        cache.abandon()
        return None

    async def _proved(self, cache: Cache, log: TabletLog) -> int:
        """The last entry in a cache that is a prefix of the log; 0 if nothing proves that it is."""
        try:
            record = cache.get(POSITION_KEY)
        except cache.failures:
            return 0  # it is made again, which costs time, and loses nothing
        position = None if record is None else Position.decode(record)
        if position is None or position.folder != log.folder:
            return 0
        number = position.number
        if not log.base.number < number <= log.number:
            return 0
        async with aclosing(log.entries(Segment(log.folder, number - 1, number))) as entries:
            async for entry in entries:
                found = Position.of(log.folder, number, entry.writer, entry.body)
                return number if found == position else 0
        return 0

    async def _checkpoint(self, base: Base) -> Checkpoint:
        if not base.checkpoint:
            return NO_FILES
        return await read_checkpoint(self._bucket, base.checkpoint)

    async def _made(self, ownership: BucketOwnership, open_tablets: int) -> _Start:
        """A new cache, with the checkpoint that the log names."""
        log, base = ownership.log, ownership.log.base
        new = await self._caches.begin(ownership.identity.tablet_id)
        published = NO_FILES
        if base.checkpoint:
            published = await download(self._bucket, base.checkpoint, new.put)
        cache = await new.open(open_tablets=open_tablets)
        own = Segment(log.folder, base.number, log.number)
        return _Start(cache, published, 0, (*base.segments, own))

    async def _replay(self, log: TabletLog, start: _Start) -> _Count:
        """Applies entries that the cache may lack. Applying one again changes nothing, as long as
        those after it follow: an entry says what a key has, not how it changes."""
        cache = start.cache
        writes, waiting, count, total = cache.batch(), 0, 0, 0
        for segment in start.rest:
            async with aclosing(log.entries(segment)) as entries:
                async for entry in entries:
                    count += 1
                    total += len(entry.body)
                    waiting += len(entry.body)
                    put_changes(entry.body, writes)
                    is_last = entry.number == segment.through
                    if waiting and (is_last or waiting >= _REPLAYED_TOGETHER_BYTES):
                        position = Position.of(
                            segment.folder, entry.number, entry.writer, entry.body
                        )
                        writes.put(POSITION_KEY, position.encode())
                        await cache.write(writes)
                        writes, waiting = cache.batch(), 0
        return _Count(count, total)


class _Start(NamedTuple):
    """A cache, and what it may lack."""

    cache: Cache
    published: Checkpoint
    applied: int
    """Entries after the checkpoint that it has. Another server would have to read them, too."""
    rest: Sequence[Segment]


def _unusable(what: str, error: PercolatorError) -> StoreUnusable:
    fault = error.fault if isinstance(error, StoreUnusable) else StoreFault.INPUT_OUTPUT
    return StoreUnusable(f"{what}: {error.message}", fault=fault)
