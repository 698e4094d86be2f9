"""The coordinator on the store root: `coordinator/<role>` and `coordinator/sessions`.

A candidate waits until the leader is gone. The leader is gone if its lock is free (so a killed
process is noticed at once), or if its beat has not changed for the grace period, by the candidate's
own clock (a paused process, or one on a machine that is cut off). Then the candidate takes the
directory over at the next epoch, exactly as a tablet is taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from percolator.errors import InvalidArgument, NotReady, StoreUnusable, TabletMoved
from percolator.services.chassis.coordinator import stored_value
from percolator.services.chassis.coordinator.beating_session import BeatingSession
from percolator.services.chassis.coordinator.directory_leadership import (
    BEAT,
    LEADER,
    LOCK,
    DirectoryLeadership,
    clone_values,
)
from percolator.services.chassis.coordinator.directory_sessions import (
    DirectorySessions,
    SessionFile,
)
from percolator.services.chassis.coordinator.interface import (
    KnownLeader,
    check_name,
    no_lost_leader,
)
from percolator.services.chassis.coordinator.own_process import OwnProcess
from percolator.services.chassis.coordinator.silence import Silence
from percolator.services.chassis.coordinator.times import USUAL_TIMES, CoordinatorTimes
from percolator.services.chassis.store import epoch_names
from percolator.services.chassis.store.epoch_directory import (
    Inheritance,
    remove_superseded,
    take_over,
)
from percolator.services.chassis.store.epoch_names import EpochName, Stage
from percolator.services.chassis.store.files import (
    FileLock,
    Files,
    fault_of,
    make_durable_directory,
)
from percolator.world import Clock

DIRECTORY = "coordinator"
SESSIONS = "sessions"
_LOOKS_MAX = 20
_SMALL_BYTES_MAX = 4096
_PATHS_MAX = 1024

_log = structlog.get_logger("percolator.coordinator")


class DirectoryCoordinator(OwnProcess[DirectoryLeadership]):
    """The coordinator for one process. Belongs to one event loop."""

    def __init__(
        self, files: Files, clock: Clock, root: Path, times: CoordinatorTimes = USUAL_TIMES
    ) -> None:
        super().__init__(clock, times)
        self._files = files
        self._directory = root / DIRECTORY
        self._sessions = DirectorySessions(
            files, clock, self._directory / SESSIONS, grace_seconds=times.grace_seconds
        )
        self._paths: dict[tuple[str, ...], Path] = {}
        """Kept, because a process that waits for a leader checks the same few again and again."""
        self._made: set[str] = set()
        """Roles whose directories exist: a candidate does not create them at every check."""

    async def campaign(
        self, role: str, holder: str, lost: Callable[[], str] = no_lost_leader
    ) -> DirectoryLeadership:
        check_name("role", role)
        if role == SESSIONS:
            raise InvalidArgument("role", f"{SESSIONS!r} is not a role")
        silence = Silence(self._clock, self._times.grace_seconds)
        while True:
            try:
                leadership = await self._try(await self._role(role), role, silence, lost)
            except OSError as error:
                self._made.discard(role)  # it may be gone
                raise _cannot_lead(role, error) from error
            if leadership is not None:
                try:
                    await leadership.begin(holder)
                except NotReady:
                    await leadership.resign()
                    continue
                except OSError as error:
                    leadership.abandon()
                    raise _cannot_lead(role, error) from error
                except BaseException:
                    leadership.abandon()
                    raise
                return self._leads(role, leadership)
            await self._clock.sleep(self._times.poll_seconds)

    async def leader(self, role: str) -> KnownLeader | None:
        found = await self._read(role, LEADER, live_only=True)
        return None if found is None else KnownLeader(found[0], found[1].decode(errors="replace"))

    async def read(self, role: str, key: str) -> bytes | None:
        found = await self._read(role, key, live_only=False)
        return None if found is None else found[1]

    async def open_session(self, name: str, value: bytes) -> BeatingSession:
        check_name("name", name)
        directory = await self._role(SESSIONS)
        return await self._begin_session(SessionFile(self._files, directory / name), name, value)

    async def sessions(self, prefix: str) -> Mapping[str, bytes]:
        await self._role(SESSIONS)
        try:
            return await self._sessions.alive(prefix)
        except FileNotFoundError:
            # The store was removed and another one created.
            self._made.discard(SESSIONS)
            await self._role(SESSIONS)
            return await self._sessions.alive(prefix)

    # ------------------------------------------------------------------------- candidates

    async def _try(
        self, directory: Path, role: str, silence: Silence, lost: Callable[[], str]
    ) -> DirectoryLeadership | None:
        """None while there is a leader that may be alive, or if another candidate was faster."""
        lock = await self._try_lock(role)
        leadership = None
        try:
            names = epoch_names.parse_all(await self._files.list(directory))
            live = max((n.epoch for n in names if n.stage is Stage.LIVE), default=0)
            if live and not await self._is_gone(role, live, lock, silence):
                if not lost():
                    return None
                leader = await self.leader(role)
                if leader is None or leader.epoch != live or leader.holder != lost():
                    return None
            epoch = max((name.epoch for name in names), default=0) + 1
            # Signed when that epoch's directory was durable, so it or a later one is still there.
            inheritance = Inheritance(served_epoch=await self._signed(role))
            owned = await take_over(self._files, directory, epoch, clone_values, inheritance)
            await self._clear_up(role, directory, epoch)
            leadership = DirectoryLeadership(
                self._files,
                self._clock,
                role,
                epoch,
                owned,
                lock,
                beat_seconds=self._times.beat_seconds,
            )
        except TabletMoved:
            return None
        finally:
            if leadership is None and lock is not None:
                lock.release()
        return leadership

    async def _clear_up(self, role: str, directory: Path, epoch: int) -> None:
        try:
            await remove_superseded(self._files, directory, epoch)
        except OSError as error:
            # The only cost is space. It might be as impossible for every other candidate.
            _log.warning("leftovers of former leaders not deleted", role=role, error=str(error))

    async def _try_lock(self, role: str) -> FileLock | None:
        try:
            return await self._files.lock(self._path(role, LOCK))
        except BlockingIOError:
            return None

    async def _is_gone(
        self, role: str, epoch: int, lock: FileLock | None, silence: Silence
    ) -> bool:
        # The lock is free. If this very leader had it last, the leader is dead. If another one had,
        # this leader took over from one that was only silent, and does not have it yet.
        if lock is not None and await self._signed(role) == epoch:
            return True
        beat = self._path(role, str(EpochName(epoch, Stage.LIVE)), BEAT)
        return silence.lasts((epoch, await self._small(beat)))

    async def _signed(self, role: str) -> int:
        """The epoch of the last leader that had the lock; 0 if a power cut left none."""
        signed = await self._small(self._path(role, LOCK))
        return int(signed) if signed.isdigit() else 0

    async def _small(self, path: Path) -> bytes:
        try:
            return await self._files.read(path, bytes_max=_SMALL_BYTES_MAX)
        except FileNotFoundError:
            return b""

    # ------------------------------------------------------------------------- readers

    async def _read(self, role: str, key: str, *, live_only: bool) -> tuple[int, bytes] | None:
        check_name("role", role)
        check_name("key", key)
        directory = self._path(role)
        for _ in range(_LOOKS_MAX):
            try:
                names = epoch_names.parse_all(await self._files.list(directory))
            except FileNotFoundError:
                return None
            stages = (Stage.LIVE,) if live_only else (Stage.LIVE, Stage.SEALED)
            held = [name for name in names if name.stage in stages]
            if not held:
                return None
            newest = held[-1]
            name = str(newest)
            try:
                path = self._path(role, name, key)
                return newest.epoch, await stored_value.read(self._files, path)
            except FileNotFoundError:
                # Either there is no such value, or the directory has just been sealed.
                if name in await self._files.list(directory):
                    return None
        raise NotReady(f"the leaders of {role} change too fast")

    async def _role(self, role: str) -> Path:
        path = self._path(role)
        if role not in self._made:
            for directory in (self._directory, path):
                await make_durable_directory(self._files, directory)
            self._made.add(role)
        return path

    def _path(self, *names: str) -> Path:
        path = self._paths.get(names)
        if path is None:
            if len(self._paths) >= _PATHS_MAX:
                self._paths.clear()
            path = self._paths[names] = self._directory.joinpath(*names)
        return path


def _cannot_lead(role: str, error: OSError) -> StoreUnusable:
    return StoreUnusable(f"cannot lead as {role}: {error}", fault=fault_of(error))
