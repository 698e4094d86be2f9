"""Bugs of tablets whose logs are in a bucket, which a simulation has to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from percolator.bucket.bucket import Bucket
from percolator.bucket.checkpoint import (
    POSITION_KEY,
    Checkpoints,
    LoggedBatch,
    Position,
    StoredFile,
)
from percolator.bucket.log import Entry, TabletLog
from percolator.services.master.assignment import Assignment
from percolator.services.master.cluster_map import Tablet as MapTablet
from percolator.services.master.server_watch import WatchedServer
from percolator.services.master.tablet_changes import TabletChanges
from percolator.services.tabletserver.bucket_store import (
    BucketOwnership,
    BucketStorage,
    BucketTabletStore,
    Cache,
    _Ready,
)
from percolator.tablet.state import Ownership
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Random
from tests.doubles.memory_caches import MemoryCache, MemorySnapshot
from tests.patching import in_place_of
from tests.simulation.bucket import BucketOfTablets
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def read_without_a_look_at_the_bucket(patch: Patch) -> None:
    """A deposed owner answers from what it knew."""

    @in_place_of(patch, BucketOwnership, "is_held")
    async def wrong(self: BucketOwnership) -> bool:
        return not self.is_lost


def shown_before_it_is_in_the_log(patch: Patch) -> None:
    """What is read may be refused after all, and a checkpoint carries it to everybody. A cache with
    it would be thrown away, were it not for its position."""
    cache_used_again_that_is_no_prefix(patch)
    correct = BucketStorage.write

    @in_place_of(patch, BucketStorage, "write")
    async def wrong(
        self: BucketStorage, batch: LoggedBatch, then: Callable[[], bool] | None = None
    ) -> bool:
        if self._broken is None:
            await self._apply(batch, self._ownership.log.number + 1, b"")
        return await correct(self, batch, then)


def unfinished_table_uploaded(patch: Patch) -> None:
    """All tables of the directory are part of a checkpoint, and known by their names."""

    @in_place_of(patch, MemoryCache, "snapshot")
    async def wrong(self: MemoryCache) -> MemorySnapshot:
        self._check()
        self.disk.flush()
        return MemorySnapshot(dict(self.disk.files), self.disk.finished[:])

    @in_place_of(patch, Checkpoints, "_known")
    def by_name(self: Checkpoints, name: str, size: int) -> StoredFile | None:
        return self._uploaded.get(name) or self._published.files.get(name)


def checkpoint_claims_what_was_written_during_its_upload(patch: Patch) -> None:
    """Entries are deleted that it does not include."""
    correct = BucketStorage._uploaded

    @in_place_of(patch, BucketStorage, "_uploaded")
    async def wrong(self: BucketStorage) -> _Ready:
        ready = await correct(self)
        return ready._replace(base=ready.base._replace(number=self._applied))


def cache_used_again_that_is_no_prefix(patch: Patch) -> None:
    """It lacks what another owner has written and put into a checkpoint."""

    @in_place_of(patch, BucketTabletStore, "_proved")
    async def wrong(self: BucketTabletStore, cache: Cache, log: TabletLog) -> int:
        record = cache.get(POSITION_KEY)
        position = None if record is None else Position.decode(record)
        if position is None or position.folder != log.folder:
            return 0
        return max(position.number, log.base.number)


def cache_used_again_after_a_power_cut(patch: Patch) -> None:
    """It lacks a batch in the middle, although it has later ones."""

    @in_place_of(patch, BucketOfTablets, "lose_power")
    def tear(self: BucketOfTablets, address: str) -> None:
        chance = Random(f"torn {self.bucket.loop.now}")
        for disk in self.caches.get(address, {}).values():
            for key in sorted(disk.log.keys() - {POSITION_KEY}):
                if chance.random() < 1 / 3:
                    disk.durable.pop(key, None)
                    del disk.log[key]


def child_begins_before_its_parent_is_sealed(patch: Patch) -> None:
    """The parent goes on acknowledging commits that no child has. A master has it closed as well,
    unless its server does not hear that: then the seal alone has to end it."""

    @in_place_of(patch, TabletLog, "seal")
    async def wrong(self: TabletLog) -> Entry | None:
        return await self.end()

    @in_place_of(patch, TabletChanges, "_close")
    async def leave_it_open(self: TabletChanges, tablet: MapTablet) -> None:
        """Its server does not hear the order."""

    @in_place_of(patch, Assignment, "_is_stray")
    def overlook(self: Assignment, server: WatchedServer, reported: pb.ReportedTablet) -> bool:
        return False


def child_deletes_its_parents_entries_before_its_first_checkpoint(patch: Patch) -> None:
    """Its sister, and its own next owner, begin with them."""
    correct = BucketTabletStore.open

    @in_place_of(patch, BucketTabletStore, "open")
    async def wrong(
        self: BucketTabletStore, ownership: Ownership, *, open_tablets: int
    ) -> BucketStorage:
        storage = await correct(self, ownership, open_tablets=open_tablets)
        assert isinstance(ownership, BucketOwnership)
        bucket: Bucket = self._bucket
        for segment in ownership.log.base.segments:
            for number in range(segment.after + 1, segment.through + 1):
                await bucket.delete(f"{segment.folder}/log/{number:020d}")
        return storage


BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
    (read_without_a_look_at_the_bucket, (Kind.TAKEOVER,), False),
    (shown_before_it_is_in_the_log, (Kind.STALL, Kind.CRASH, Kind.TAKEOVER), False),
    (unfinished_table_uploaded, (Kind.TAKEOVER,), False),
    (checkpoint_claims_what_was_written_during_its_upload, (Kind.TAKEOVER,), False),
    (cache_used_again_that_is_no_prefix, (Kind.TAKEOVER, Kind.CRASH), False),
    (cache_used_again_after_a_power_cut, (Kind.POWER, Kind.CRASH), False),
    (child_begins_before_its_parent_is_sealed, (Kind.SPLIT,), True),
    (child_deletes_its_parents_entries_before_its_first_checkpoint, (Kind.SPLIT,), True),
)
"""The bugs, with the disruptions that reveal them, and whether they need the real master."""
