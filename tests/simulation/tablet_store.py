"""The store of a simulated tablet server: the real one, except for LevelDB itself.

Claims, seals, clones and checks are the real ones, system call by system call. What is opened in an
epoch directory is a `tablet_log`.
"""

from __future__ import annotations

from collections import Counter

from percolator.services.chassis.epoch_directory import EpochDirectory
from percolator.services.chassis.files import DiskThreads
from percolator.services.tabletserver.tablet_store import Ancestry, SharedDirectoryStore
from percolator.tablet.identity import TabletIdentity
from percolator.tablet.ownership import Ownership
from percolator.testing.memory_storage import MemoryStorage
from tests.simulation.disks import ROOT, SimulatedFiles
from tests.simulation.tablet_log import open_tablet


class SimulatedTabletStore:
    """A `TabletStore`."""

    def __init__(
        self, files: SimulatedFiles, struck: Counter[str], collected: dict[int, int]
    ) -> None:
        self._files = files
        self._struck = struck
        self._collected = collected
        # Without any threads: nothing that would need one is called.
        self._directories = SharedDirectoryStore(files, ROOT, DiskThreads(0, "none"))

    async def take_over(self, tablet: TabletIdentity, ancestry: Ancestry) -> EpochDirectory:
        return await self._directories.take_over(tablet, ancestry)

    async def open(self, ownership: Ownership, *, open_tablets: int) -> MemoryStorage:
        if not isinstance(ownership, EpochDirectory):
            raise TypeError(f"not an ownership of this store: {ownership!r}")
        return await open_tablet(self._files, ownership.path, self._struck, self._collected)

    async def remove_superseded(self, tablet: TabletIdentity) -> None:
        await self._directories.remove_superseded(tablet)
