"""The bucket of a simulation: a service that others run, in which roles are, or tablets, or both.

It never loses what it has answered. Its answers may be lost, late or wrong, and a request may
arrive when the process that sent it is paused, dead, or does not expect it any more.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

from percolator.bucket.bucket import Bucket
from percolator.bucket.checkpoint import LoggedBatch
from percolator.bucket.port import Attempts, Doubtful, Head, Refused, Stored
from percolator.bucket.settings import Settings
from percolator.services.chassis.cluster_store import BucketClusterStore
from percolator.services.chassis.coordinator import CoordinatorTimes
from percolator.services.master.master import ROLE as MASTER_ROLE
from percolator.services.oracle.oracle import ROLE as ORACLE_ROLE
from percolator.services.tabletserver.bucket_store import (
    BucketStorage,
    BucketTabletStore,
    LogSettings,
    _Ready,
)
from percolator.tablet.state import Ownership
from percolator.tasks import Tasks
from percolator.testing.memory_storage import MemoryBatch
from percolator.world import Random, World
from tests.doubles.bucket_in_memory import BucketFaults, BucketInMemory, Page
from tests.doubles.memory_caches import CacheDisk, MemoryCache, MemoryCaches
from tests.simulation.disks import DISK_FULL, ROOT, SimulatedFiles, note_collected
from tests.simulation.loop import SimulationLoop
from tests.simulation.process import Incarnation
from tests.simulation.virtual_time import VirtualClock

T = TypeVar("T")

IN_A_BUCKET = "run whose masters and oracles lead by a bucket"
MASTERS_REPLACED = "master replaced in a bucket"
ORACLES_REPLACED = "oracle replaced in a bucket"
_CALL_SECONDS = 0.005
_GOOD = BucketFaults(call_seconds=_CALL_SECONDS)


FAULTS = (
    "lost_request",
    "lost_answer",
    "late_request",
    "late_answer",
    "failed_before",
    "failed_after_success",
    "list_delay_seconds",
)


def misled(fault: str) -> str:
    """The name under which a fault of the bucket is counted."""
    return f"bucket: {fault.replace('_', ' ')}"


class SimulatedBucket:
    """The bucket, and how processes reach it."""

    def __init__(self, loop: SimulationLoop, seed: int) -> None:
        self.loop = loop
        self.calls: Counter[str] = Counter()
        """Attempts of all processes, by what they ask for."""
        self.model = BucketInMemory(VirtualClock(loop), Random(f"bucket {seed}"), Tasks(), _GOOD)
        self.fates = Random(f"fates {seed}")

    def misbehave(self, badness: float) -> None:
        """From now on, each fault strikes this share of the calls."""
        self.model.faults = BucketFaults(
            lost_request=badness,
            lost_answer=badness,
            late_request=badness,
            late_answer=badness,
            failed_before=badness,
            failed_after_success=badness,
            late_seconds=3.0,
            call_seconds=_CALL_SECONDS,
            list_delay_seconds=1.0 if badness else 0.0,
        )

    def opened(self, incarnation: Incarnation, files: SimulatedFiles) -> BucketClusterStore:
        """The store as one incarnation reaches it. It stalls when the process's files do."""
        return BucketClusterStore(_Reached(self, files), incarnation.world)

    def reached(self, files: SimulatedFiles) -> Attempts:
        """The attempts of one incarnation that keeps tablets in it. They stall when its files do,
        and those of one stall are all made, or all lost."""
        return _Reached(self, files, loses=True)

    def heal(self) -> None:
        """Ends all faults."""
        self.model.faults = _GOOD

    async def count(self, world: World, occurred: Counter[str]) -> None:
        """Counts the faults, and how often another leader took over."""
        for fault, times in self.model.struck.items():
            occurred[misled(fault)] += times
        recorded = BucketClusterStore(self.model, world).coordinator(CoordinatorTimes())
        for role, name in ((MASTER_ROLE, MASTERS_REPLACED), (ORACLE_ROLE, ORACLES_REPLACED)):
            leader = await recorded.leader(role)
            occurred[name] += 0 if leader is None else leader.epoch - 1


class _Reached:
    """The attempts of one incarnation."""

    def __init__(
        self, bucket: SimulatedBucket, files: SimulatedFiles, *, loses: bool = False
    ) -> None:
        self._bucket = bucket
        self._model = bucket.model
        self._files = files
        self._loses = loses
        self._loses_in_stall: bool | None = None

    @property
    def name(self) -> str:
        return "the simulated bucket"

    async def create(self, key: str, data: bytes) -> str:
        return await self._asked("create", self._model.create(key, data))

    async def replace(self, key: str, data: bytes, tag: str) -> str:
        return await self._asked("replace", self._model.replace(key, data, tag))

    async def read(self, key: str) -> Stored | None:
        return await self._asked("read", self._model.read(key))

    async def head(self, key: str) -> Head | None:
        return await self._asked("head", self._model.head(key))

    async def list(self, folder: str, after: str, limit: int) -> Page:
        return await self._asked("list", self._model.list(folder, after, limit))

    async def delete(self, key: str) -> None:
        await self._asked("delete", self._model.delete(key))

    async def settings(self) -> Settings:
        return await self._asked("settings", self._model.settings())

    async def _asked(self, verb: str, call: Coroutine[Any, Any, T]) -> T:
        if self._is_lost():
            call.close()
            await self._bucket.loop.create_future()
        self._bucket.calls[verb] += 1
        # In no process's context: what was sent arrives, even if its sender is paused or killed.
        doing = self._bucket.loop.create_task(_outcome(call), context=contextvars.Context())
        outcome = await asyncio.shield(doing)
        await self._files.until_the_store_answers()
        if isinstance(outcome, Refused | Doubtful):
            raise outcome
        return outcome

    def _is_lost(self) -> bool:
        """True if an attempt does not reach the store, whatever the store does."""
        if not self._files.survives("send", ROOT):
            return True  # the clean-up of a process that was killed
        if not (self._loses and self._files.stalls):
            self._loses_in_stall = None
        elif self._loses_in_stall is None:
            self._loses_in_stall = self._bucket.fates.random() < 1 / 2
        return bool(self._loses_in_stall)


async def _outcome(call: Coroutine[Any, Any, T]) -> T | Refused | Doubtful:
    """Nobody may be left to hear of an error."""
    try:
        return await call
    except (Refused, Doubtful) as error:
        return error


# Tablets in the bucket: the real store of a tablet server, except for LevelDB itself.

TABLETS_IN_A_BUCKET = "run whose tablets are in a bucket"
CACHE_FOUND = "cache of a tablet found by the next process"
CHECKPOINTS = "checkpoint of a tablet published"
_ATTEMPT_SECONDS = 0.3
_SECONDS = 2.0
"""How long a call is repeated. It is short, so that outcomes stay unknown now and then."""
_STEP_SECONDS_MAX = 0.0003


class BucketOfTablets:
    """The bucket of all tablets, and what the machines of servers have on their own disks."""

    def __init__(self, bucket: SimulatedBucket, occurred: Counter[str], seed: int) -> None:
        self.bucket = bucket
        self.occurred = occurred
        self.random = Random(f"tablets in a bucket {seed}")
        self.caches: dict[str, dict[int, CacheDisk]] = {}
        """By the address of the server."""
        # Different in each run: with few entries, nearly every restart meets a checkpoint.
        self.settings = LogSettings(
            bytes_max=self.random.choice((3_000, 30_000)),
            entries_max=self.random.choice((3, 10, 40)),
            entries_at_close_max=self.random.choice((0, 5)),
            interval_seconds=self.random.choice((0.0, 0.0, 0.01)),
            lease_seconds=self.random.choice((0.0, 0.0, 0.3)),
        )

    def lose_power(self, address: str) -> None:
        """The caches of another life of a machine are never used."""
        self.caches.pop(address, None)


class SimulatedBucketStore(BucketTabletStore):
    """The tablets of one incarnation of a tablet server."""

    def __init__(
        self,
        tablets: BucketOfTablets,
        incarnation: Incarnation,
        files: SimulatedFiles,
        collected: dict[int, int],
    ) -> None:
        """Adds to `collected` the transactions whose commit records were deleted."""
        self._tablets = tablets
        self._files = files
        self._collected = collected
        world = incarnation.world
        bucket = Bucket(
            tablets.bucket.reached(files),
            world.clock,
            world.random,
            attempt_seconds=_ATTEMPT_SECONDS,
            seconds=_SECONDS,
        )
        disks = tablets.caches.setdefault(incarnation.address, {})
        self._disks = MemoryCaches(disks, world.random, self._step)
        log = structlog.stdlib.get_logger("simulated")
        super().__init__(bucket, self._disks, world.clock, world.random, log, tablets.settings)

    async def open(self, ownership: Ownership, *, open_tablets: int) -> BucketStorage:
        storage = await super().open(ownership, open_tablets=open_tablets)
        self._tablets.occurred[CACHE_FOUND] += self._disks.found
        self._disks.found = 0
        cache = storage._cache
        assert isinstance(cache, MemoryCache)
        correct, publish, disk = storage.write, storage._published, cache.disk

        async def write(batch: LoggedBatch, then: Callable[[], bool] | None = None) -> bool:
            assert isinstance(batch.writes, MemoryBatch)
            note_collected(batch.writes.changes, disk.durable, self._collected)
            return await correct(batch, then)

        def published(ready: _Ready) -> None:
            self._tablets.occurred[CHECKPOINTS] += 1
            publish(ready)

        storage.write = write  # type: ignore[method-assign]
        storage._published = published  # type: ignore[method-assign]
        return storage

    async def _step(self, operation: str) -> None:
        """A step of the local disk."""
        if operation == "hear":
            await self._files.heard()
            return
        await self._tablets.bucket.loop.sleep(self._tablets.random.random() * _STEP_SECONDS_MAX)
        if self._files.is_full:
            self._tablets.occurred[DISK_FULL] += 1
            self._files.faults.fail(operation, number=errno.ENOSPC)
        if not self._files.survives(operation, ROOT):
            await self._tablets.bucket.loop.create_future()
