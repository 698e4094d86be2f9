"""Where tablets are kept, and how a server becomes the owner of one.

`TabletStore` is the interface that the rest of a tablet server uses. `SharedDirectoryStore` is its
only implementation: LevelDB directories below a store root that every server of the cluster can
open, owned by epoch (see `epoch_directory`). A store that replicates each tablet's log would be
another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from percolator.errors import StoreFault, StoreUnusable
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
from percolator.services.tabletserver.leveldb_clone import CURRENT, clone_leveldb, lacks_current
from percolator.services.tabletserver.leveldb_storage import (
    WRITE_BUFFERS_BYTES,
    LevelDBOptions,
    LevelDBStorage,
    fault_of,
    write_buffer_bytes,
)
from percolator.tablet.identity import TabletIdentity
from percolator.tablet.ownership import Ownership
from percolator.world import Storage

MEBIBYTE = 1024 * 1024
OPEN_FILES_MIN = 74
"""LevelDB accepts no fewer."""


@dataclass(frozen=True)
class Ancestry:
    """What a tablet starts with. One that has had no owner: by default with nothing."""

    must_exist: bool = False
    """Whether it has had an owner: then finding nothing is damage."""
    origin_tablet_id: int = 0
    origin_epoch: int = 0
    """The epoch of the tablet of the same table that was split; 0 for none."""
    served_epoch: int = 0
    """The last one at which it is known to have been served: finding only older ones is damage."""


class TabletStore(Protocol):
    """Everything that survives a tablet server. Raises `StoreUnusable` if the disk fails."""

    async def take_over(self, tablet: TabletIdentity, ancestry: Ancestry) -> Ownership:
        """Becomes the only owner of the tablet, at its epoch; `TabletMoved` if it is too late."""
        ...

    async def open(self, ownership: Ownership, *, open_tablets: int) -> Storage[Any]:
        """Opens the tablet that is owned; memory is shared among `open_tablets`."""
        ...

    async def remove_superseded(self, tablet: TabletIdentity) -> None:
        """Deletes what former owners left and what is not needed. For an owner that serves."""
        ...


@dataclass(frozen=True)
class Budget:
    """What all LevelDBs of one process may use together."""

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
