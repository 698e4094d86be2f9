"""Servers whose tablets are in one bucket in memory, for tests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from structlog.stdlib import BoundLogger
from structlog.testing import CapturingLogger

from percolator.bucket.bucket import Bucket
from percolator.bucket.checkpoint import TABLETS
from percolator.bucket.port import Stored
from percolator.services.tabletserver.bucket_store import (
    BucketOwnership,
    BucketStorage,
    BucketTabletStore,
    LogSettings,
)
from percolator.services.tabletserver.storage import Ancestry
from percolator.tablet.state import TabletIdentity
from percolator.tasks import Tasks
from percolator.world import Storage
from tests.doubles.bucket_in_memory import BucketFaults, BucketInMemory
from tests.doubles.memory_caches import CacheDisk, MemoryCaches
from tests.simulation.virtual_time import VirtualClock

NEW = Ancestry()
EVERYTHING = (b"", b"")


class WatchedBucket(BucketInMemory):
    """Counts what is read, and stops answering on demand."""

    def __init__(self, tasks: Tasks, faults: BucketFaults | None, seed: int) -> None:
        clock = VirtualClock(asyncio.get_running_loop())
        super().__init__(clock, Random(seed), tasks, faults)
        self.reads: Counter[str] = Counter()
        self.answers = asyncio.Event()
        self.answers.set()

    async def read(self, key: str) -> Stored | None:
        self.reads[key.split("/")[2] if key.startswith(TABLETS) else key] += 1
        return await super().read(key)

    async def _attempt(self, *arguments: Any, **options: Any) -> Any:
        await self.answers.wait()
        return await super()._attempt(*arguments, **options)

    def keys(self, kind: str) -> list[str]:
        """Keys of tables, checkpoints or entries."""
        return [key for key in self.objects if f"/{kind}/" in key]


class Machine:
    """A machine with its disk, on which one server after another runs."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.disks: dict[int, CacheDisk] = {}
        self.failure: OSError | None = None
        """The error of everything that writes to the disk."""
        self.start()

    def start(self) -> None:
        """Another process."""
        scene = self._scene
        self.caches = MemoryCaches(self.disks, Random(3), self._step)
        self.store = BucketTabletStore(
            Bucket(
                scene.objects, scene.clock, Random(4), attempt_seconds=1.0, seconds=scene.seconds
            ),
            self.caches,
            scene.clock,
            scene.random,
            scene.log,
            scene.settings,
        )

    async def _step(self, operation: str) -> None:
        await asyncio.sleep(0)
        if self.failure is not None and operation != "hear":
            raise self.failure

    async def own(
        self,
        tablet_id: int = 1,
        epoch: int = 1,
        ancestry: Ancestry = NEW,
        bounds: tuple[bytes, bytes] = EVERYTHING,
    ) -> BucketOwnership:
        """Takes over a tablet."""
        return await self.store.take_over(TabletIdentity(1, tablet_id, epoch, *bounds), ancestry)

    async def open(self, ownership: BucketOwnership) -> BucketStorage:
        return await self.store.open(ownership, open_tablets=1)

    async def serve(
        self, tablet_id: int = 1, epoch: int = 1, ancestry: Ancestry = NEW
    ) -> BucketStorage:
        """Takes over a tablet, and opens it."""
        return await self.open(await self.own(tablet_id, epoch, ancestry))


class Scene:
    """A bucket, and machines."""

    def __init__(
        self, tasks: Tasks, faults: BucketFaults | None, seed: int, settings: LogSettings
    ) -> None:
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.random = Random(seed)
        self.objects = WatchedBucket(tasks, faults, seed)
        self.settings = settings
        self.seconds = 10.0
        """How long a call to the bucket is repeated."""
        self.said = CapturingLogger()
        self.log = BoundLogger(self.said, [], {})

    def machine(self) -> Machine:
        return Machine(self)

    def logged(self, event: str) -> list[Any]:
        return [call for call in self.said.calls if call.kwargs.get("event") == event]


MANY = LogSettings()
FEW = LogSettings(bytes_max=10_000, entries_max=10, entries_at_close_max=3)


@asynccontextmanager
async def scene(
    faults: BucketFaults | None = None, seed: int = 1, settings: LogSettings = MANY
) -> AsyncIterator[Scene]:
    """Ends with everything that is on its way in the bucket."""
    tasks = Tasks()
    try:
        yield Scene(tasks, faults, seed, settings)
    finally:
        await tasks.cancel()


async def put(storage: Storage[Any], **entries: str) -> None:
    """Writes a batch."""
    batch = storage.batch()
    for key, value in entries.items():
        batch.put(key.encode(), value.encode())
    await storage.write(batch)


def content(storage: Storage[Any]) -> dict[str, str]:
    """Everything in a storage."""
    found = storage.iterate(b"", b"\xfe")
    return {key.decode(): value.decode() for key, value in found}


async def quiet(storage: BucketStorage) -> None:
    """Waits until nothing goes on in the background."""
    assert await storage._tasks.drain(3_600.0)
