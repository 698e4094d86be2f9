"""The disks of the simulated cluster: one store root, seen by each process through its own files.

Every system call takes a little virtual time, so that a pause, a kill or another process's call can
strike between any two of them. What strikes is counted here.
"""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path

from percolator.testing.simulated_loop import SimulationLoop
from percolator.world import Random
from services.chassis.memory_disk import MemoryDisk
from services.chassis.memory_files import MemoryFiles

ROOT = Path("/store")
FSYNC_FAILED = "fsync failed"
DISK_FULL = "disk full"
_CALL_SECONDS_MAX = 0.0003
_TROUBLE = {errno.ENOSPC: DISK_FULL, errno.EIO: FSYNC_FAILED}


class SimulatedFiles(MemoryFiles):
    """What one incarnation of one process sees of the store root."""

    def __init__(
        self,
        loop: SimulationLoop,
        disk: MemoryDisk,
        random: Random,
        struck: Counter[str],
        fsync_seconds_max: float,
    ) -> None:
        super().__init__(disk)
        self.is_full = False
        """Whether appends find no room; shown to the process as free bytes, too."""
        self._loop = loop
        self._random = random
        self._struck = struck
        self.fsync_seconds_max = fsync_seconds_max

    async def step(self, operation: str, path: Path) -> None:
        limit = self.fsync_seconds_max if operation == "fsync" else _CALL_SECONDS_MAX
        await self._loop.sleep(self._random.random() * limit)
        if self.is_full and operation in ("append", "create"):
            self.faults.fail(operation, number=errno.ENOSPC)
        try:
            survives = self.survives(operation, path)
        except OSError as error:
            if error.errno in _TROUBLE:
                self._struck[_TROUBLE[error.errno]] += 1
            raise
        if not survives:
            await self._loop.create_future()

    def free_bytes(self) -> int:
        return 0 if self.is_full else 1 << 40
