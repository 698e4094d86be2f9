"""Leading a role: the owner of its epoch directory, the only one that writes in it.

    coordinator/<role>/lock      locked by the leader while it lives; its content is the epoch
    coordinator/<role>/e7/       the present leader's; e6.sealed is what the one before it left
        leader                   how the leader named itself
        beat                     changes for as long as the leader runs
        <key>                    a value

Invariants:
- The directory was taken over before anything was read from it: sealed first, read second.
- A value counts only if the directory still stood after it was durable.
- Lock and beat only decide *when* another one takes over; what it may not lose, it cannot lose.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import structlog

from percolator.errors import InvalidArgument, NotReady, StoreUnusable
from percolator.world import Clock
from services.chassis.coordinator import stored_value
from services.chassis.coordinator.interface import VALUE_BYTES_MAX, check_name
from services.chassis.epoch_directory import EpochDirectory
from services.chassis.files import FileLock, Files, fault_of, replace_durably

LOCK = "lock"
LEADER = "leader"
BEAT = "beat"
UNFINISHED = ".new"
_OF_THE_LEADER = frozenset({LEADER, BEAT})

_log = structlog.get_logger("percolator.coordinator")


async def clone_values(files: Files, source: Path, target: Path) -> None:
    """What a new leader begins with: every value, and nothing of what concerns a leader alone."""
    for name in await files.list(source):
        if name in _OF_THE_LEADER or name.endswith(UNFINISHED):
            continue
        data = await files.read(source / name, bytes_max=2 * VALUE_BYTES_MAX)
        async with await files.create(target / name) as file:
            await file.append(data)
            await file.fsync()


class DirectoryLeadership:
    """Made by `DirectoryCoordinator.campaign`."""

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
        self._beating: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    def stands(self) -> bool:
        if not self._deposed and not self._directory.stands():
            self._deposed = True
            _log.warning("deposed by a later leader", role=self._role, epoch=self._epoch)
        return not self._deposed

    def check(self) -> None:
        if not self.stands():
            raise NotReady(f"this process does not lead as {self._role} any more")

    async def get(self, key: str) -> bytes | None:
        check_name("key", key)
        try:
            value: bytes | None = await stored_value.read(self._files, self._directory.path / key)
        except FileNotFoundError:
            value = None
        except OSError as error:
            raise self._unusable(key, error) from error
        # Also when nothing was found: a deposed leader finds nothing at all.
        self.check()
        return value

    async def put(self, key: str, value: bytes) -> None:
        check_name("key", key)
        if len(value) > VALUE_BYTES_MAX:
            raise InvalidArgument("value", f"{len(value)} bytes are more than {VALUE_BYTES_MAX}")
        self.check()
        # Not torn by a cancellation, and one after another: two of one key at once would write
        # into the same temporary file.
        await asyncio.shield(asyncio.ensure_future(self._put(key, stored_value.encode(value))))

    async def begin(self, holder: str) -> None:
        """To be called once, before anybody hears of this leadership."""
        await self._sign_lock()
        await self.put(LEADER, holder.encode())
        self._beating = asyncio.create_task(self._keep_beating(), name=f"lead as {self._role}")

    async def resign(self) -> None:
        self._deposed = True
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        # A write on its way ends before the next leader may begin at once.
        async with self._writing:
            self.abandon()

    def abandon(self) -> None:
        """Resigns without waiting for a write on its way, which may hang: whether it is done or
        not, nobody is told that it was."""
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
                self.check()
                raise self._unusable(key, error) from error
            except OSError as error:
                raise self._unusable(key, error) from error
            self.check()

    async def _keep_beating(self) -> None:
        for count in itertools.count(1):
            await self._clock.sleep(self._beat_seconds)
            try:
                await self._beat(count)
            except OSError as error:
                if not self.stands():
                    # Whoever leads now is to have the lock, so that its own death is seen at once.
                    self._release_lock()
                    return
                # Others may take over: they cannot tell a full disk from a dead leader.
                _log.warning(
                    "cannot show that this leader lives", role=self._role, error=str(error)
                )

    async def _beat(self, count: int) -> None:
        """Not durable: it means nothing to anybody after a power cut."""
        async with self._writing:
            async with await self._files.create(self._beat_unfinished, exclusive=False) as file:
                await file.append(str(count).encode())
            await self._files.rename(self._beat_unfinished, self._beat_path)
        if self._lock is None:
            await self._take_lock()

    async def _take_lock(self) -> None:
        """The leader before was only silent when it was deposed, and held the lock."""
        try:
            self._lock = await self._files.lock(self._directory.path.parent / LOCK)
        except BlockingIOError:
            return
        await self._sign_lock()

    async def _sign_lock(self) -> None:
        """Tells whose death it means when the lock is free."""
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
