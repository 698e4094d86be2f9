"""The disks of the simulated cluster: one store root, seen by each process through its own files.

Every system call takes a little virtual time, so that a pause, a kill or another process's call can
come between any two of them. Faults that strike are counted here.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from pathlib import Path

from percolator.services.chassis.files import FileStatus
from percolator.world import Random
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles
from tests.simulation.loop import SimulationLoop

ROOT = Path("/store")
FSYNC_FAILED = "fsync failed"
DISK_FULL = "disk full"
HELD_UP = "system call held up by a store that stalls"
_CALL_SECONDS_MAX = 0.0003
_HEARD_SECONDS_MAX = 0.01
_SEEN_SHARE = 0.5
"""The share of looks, begun while the store stalls, that see the present and are answered late. The
others see what is there when the store answers again."""

_TROUBLE = {errno.ENOSPC: DISK_FULL, errno.EIO: FSYNC_FAILED}


class SimulatedFiles(MemoryFiles):
    """The store root as one incarnation of one process sees it."""

    def __init__(
        self,
        loop: SimulationLoop,
        disk: MemoryDisk,
        random: Random,
        struck: Counter[str],
        fsync_seconds_max: float,
        store_answers: asyncio.Event,
    ) -> None:
        """While `store_answers` is not set, the store stalls for all processes; while `answers` is
        not set, for this one."""
        super().__init__(disk)
        self._store_answers = store_answers
        self.is_full = False
        """Whether appends find no space; the process also sees it as free bytes."""
        self._loop = loop
        self._random = random
        self._struck = struck
        self.fsync_seconds_max = fsync_seconds_max

    async def step(self, operation: str, path: Path) -> None:
        limit = self.fsync_seconds_max if operation == "fsync" else _CALL_SECONDS_MAX
        await self._loop.sleep(self._random.random() * limit)
        if self._stalls and not (operation == "stat" and self._random.random() < _SEEN_SHARE):
            await self._store_answering()
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

    async def stat(self, path: Path) -> FileStatus:
        """The answer to a look may be as old as the stall, and tells nothing of its end."""
        found = await super().stat(path)
        if self._stalls:
            await self._store_answering()
            if not self.survives("hear", path):
                await self._loop.create_future()
        return found

    @property
    def _stalls(self) -> bool:
        return not (self.answers.is_set() and self._store_answers.is_set())

    async def _store_answering(self) -> None:
        self._struck[HELD_UP] += 1
        while self._stalls:
            await self.answers.wait()
            await self._store_answers.wait()

    async def heard(self) -> None:
        """Takes the time between the end of a write in a thread and the moment when the event loop
        hears of it. Both a moment and a long while are likely."""
        seconds = _HEARD_SECONDS_MAX * self._random.random() ** 4
        await self._loop.sleep(seconds)
        if not self.survives("hear", ROOT):
            await self._loop.create_future()

    async def free_bytes(self, path: Path) -> int:
        found = await super().free_bytes(path)
        return 0 if self.is_full else found
