"""Leading a role: the leader owns the role's epoch directory, and only the leader writes in it.

    coordinator/<role>/lock      locked by the leader while it lives; its content is the epoch
    coordinator/<role>/e7/       the present leader's; e6.sealed is what the previous leader left
        leader                   the name that the leader has given itself
        beat                     changes for as long as the leader runs
        <key>                    a value

Invariants:
- The directory is taken over before anything is read from it: seal first, read second.
- A value counts only if the directory still stood after the value was durable.
- Lock and beat only decide *when* another process takes over; no mistake there can lose a value.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import structlog

from percolator.errors import InvalidArgument, NotReady, StoreUnusable
from percolator.services.chassis.coordinator import stored_value
from percolator.services.chassis.coordinator.interface import VALUE_BYTES_MAX, check_name
from percolator.services.chassis.store.epoch_directory import EpochDirectory
from percolator.services.chassis.store.files import FileLock, Files, fault_of, replace_durably
from percolator.services.chassis.trouble import Trouble
from percolator.tasks import Tasks
from percolator.world import Clock

LOCK = "lock"
LEADER = "leader"
BEAT = "beat"
UNFINISHED = ".new"
_OF_THE_LEADER = frozenset({LEADER, BEAT})

_log = structlog.get_logger("percolator.coordinator")


async def clone_values(files: Files, source: Path, target: Path) -> None:
    """Copies what a new leader starts with: all values, but not the files about a single leader."""
    for name in await files.list(source):
        if name in _OF_THE_LEADER or name.endswith(UNFINISHED):
            continue
        data = await files.read(source / name, bytes_max=2 * VALUE_BYTES_MAX)
        async with await files.create(target / name) as file:
            await file.append(data)
            await file.fsync()


class DirectoryLeadership:
    """A leadership in a directory, made by `DirectoryCoordinator.campaign`."""

    def __init__(
        self,
        files: Files,
        clock: Clock,
        role: str,
        epoch: int,
        directory: EpochDirectory,
        lock: FileLock | None,
        *,
        beat_seconds: float,
    ) -> None:
        self._files = files
        self._clock = clock
        self._role = role
        self._epoch = epoch
        self._directory = directory
        self._beat_path = directory.path / BEAT
        self._beat_unfinished = directory.path / (BEAT + UNFINISHED)
        self._lock = lock
        self._beat_seconds = beat_seconds
        self._deposed = False
        self._writing = asyncio.Lock()
        self._tasks = Tasks()
        self._beating: asyncio.Task[None] | None = None
        self._trouble = Trouble(
            _log,
            "cannot show that this leader lives",
            "this leader shows again that it lives",
            role=role,
        )

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and nothing of it is left to do."""
        beats = self._beating is not None and not self._beating.done()
        return self._deposed and not beats and self._lock is None

    async def stands(self) -> bool:
        if not self._deposed and not await self._directory.stands() and not self._deposed:
            self._deposed = True
            _log.warning("deposed by a later leader", role=self._role, epoch=self._epoch)
        return not self._deposed

    async def check(self) -> None:
        if not await self.stands():
            raise NotReady(f"this process no longer leads as {self._role}")

    async def get(self, key: str) -> bytes | None:
        check_name("key", key)
        try:
            value: bytes | None = await stored_value.read(self._files, self._directory.path / key)
        except FileNotFoundError:
            value = None
        except OSError as error:
            raise self._unusable(key, error) from error
        # Even if nothing was found: a deposed leader finds nothing at all.
        await self.check()
        return value

    async def put(self, key: str, value: bytes) -> None:
        check_name("key", key)
        if len(value) > VALUE_BYTES_MAX:
            raise InvalidArgument("value", f"{len(value)} bytes are more than {VALUE_BYTES_MAX}")
        await self.check()
        # Not torn by a cancellation, and one after another: two concurrent writes of one key would
        # use the same temporary file.
        await self._tasks.run_to_the_end(self._put(key, stored_value.encode(value)))

    async def begin(self, holder: str) -> None:
        """Starts the signs of life. Call it once, before this leadership is made known."""
        await self._sign_lock()
        await self.put(LEADER, holder.encode())
        self._beating = asyncio.create_task(self._keep_beating(), name=f"lead as {self._role}")

    async def resign(self) -> None:
        self._deposed = True
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        # A write in progress has to end before the next leader may begin.
        async with self._writing:
            self.abandon()

    def abandon(self) -> None:
        """Resigns without waiting for a write in progress, which may hang: whether it succeeds or
        not, it is never reported as done."""
        self._deposed = True
        if self._beating is not None:
            self._beating.cancel()
        self._release_lock()

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    async def _put(self, key: str, data: bytes) -> None:
        async with self._writing:
            try:
                await replace_durably(self._files, self._directory.path / key, data)
            except FileNotFoundError as error:
                await self.check()
                raise self._unusable(key, error) from error
            except OSError as error:
                raise self._unusable(key, error) from error
            await self.check()

    async def _keep_beating(self) -> None:
        for count in itertools.count(1):
            await self._clock.sleep(self._beat_seconds)
            try:
                await self._beat(count)
            except OSError as error:
                if not await self.stands():
                    # The present leader needs the lock, so that its own death is seen at once.
                    self._release_lock()
                    return
                # Others may take over: they cannot tell a full disk from a dead leader.
                self._trouble.lasts(error)
            else:
                self._trouble.is_over()

    async def _beat(self, count: int) -> None:
        """Writes a sign of life. It is not durable: after a power cut it means nothing."""
        async with self._writing:
            async with await self._files.create(self._beat_unfinished, exclusive=False) as file:
                await file.append(str(count).encode())
            await self._files.rename(self._beat_unfinished, self._beat_path)
        if self._lock is None:
            await self._take_lock()

    async def _take_lock(self) -> None:
        """Tries to get the lock from the previous leader, which was only silent, and kept it."""
        try:
            self._lock = await self._files.lock(self._directory.path.parent / LOCK)
        except BlockingIOError:
            return
        await self._sign_lock()

    async def _sign_lock(self) -> None:
        """Records whose death it means if the lock is free."""
        if self._lock is None:
            return
        path = self._directory.path.parent / LOCK
        async with await self._files.create(path, exclusive=False) as file:
            await file.append(str(self._epoch).encode())

    def _unusable(self, key: str, error: OSError) -> StoreUnusable:
        return StoreUnusable(
            f"{self._role}/{key} cannot be read or made durable: {error}",
            fault=fault_of(error),
        )
