"""The coordinator on the store root: `coordinator/<role>` and `coordinator/sessions`.

A candidate waits until the leader is gone. The leader is gone if its lock is free (so a killed
process is noticed at once), or if its beat has not changed for the grace period, by the candidate's
own clock (a paused process, or one on a machine that is cut off). Then the candidate takes the
directory over at the next epoch, exactly as a tablet is taken over.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import structlog

from percolator.errors import InvalidArgument, NotReady, StoreUnusable, TabletMoved
from percolator.services.chassis import coordinator, epoch_directory
from percolator.services.chassis.coordinator import (
    USUAL_TIMES,
    VALUE_BYTES_MAX,
    BeatingSession,
    CoordinatorTimes,
    KnownLeader,
    OwnProcess,
    Silence,
    SilentSessions,
    Trouble,
    check_name,
    no_lost_leader,
    value_of,
)
from percolator.services.chassis.epoch_directory import (
    EpochDirectory,
    EpochName,
    Inheritance,
    Stage,
    remove_superseded,
    take_over,
)
from percolator.services.chassis.files import (
    FileLock,
    Files,
    fault_of,
    make_durable_directory,
    replace_durably,
)
from percolator.tasks import Tasks
from percolator.world import Clock

_UNFINISHED = ".new"


class SessionFile:
    """The file of one session."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._path = path
        self._unfinished = path.with_name(path.name + _UNFINISHED)

    async def put(self, content: bytes) -> None:
        """Writes a heartbeat. It is not durable: a session does not survive a power cut."""
        async with await self._files.create(self._unfinished, exclusive=False) as file:
            await file.append(coordinator.encode(content))
        await self._files.rename(self._unfinished, self._path)

    async def remove(self) -> None:
        await self._files.unlink(self._path)


class DirectorySessions:
    """The sessions as one reader knows them."""

    def __init__(
        self, files: Files, clock: Clock, directory: Path, *, grace_seconds: float
    ) -> None:
        self._files = files
        self._directory = directory
        self._silent = SilentSessions(clock, grace_seconds)

    async def alive(self, prefix: str) -> Mapping[str, bytes]:
        """The live sessions by name, with the value that each was opened with."""
        if prefix:
            check_name("prefix", prefix)
        now = self._silent.tick()
        judged = self._silent.judge(now, prefix, await self._contents(prefix))
        for name in judged.forgotten:
            await self._forget(name)
        alive = {}
        for name, content in judged.alive.items():
            with suppress(StoreUnusable):  # torn by a power cut: it does not change any more
                alive[name] = value_of(coordinator.decode(content, name))
        return alive

    async def _contents(self, prefix: str) -> dict[str, bytes]:
        """The bytes of the files, whether or not they can be decoded: else one that nobody can read
        would never become silent, and stay."""
        found = {}
        for name in await self._files.list(self._directory):
            if not name.startswith(prefix) or name.endswith(_UNFINISHED):
                continue
            with suppress(FileNotFoundError):
                path = self._directory / name
                found[name] = await self._files.read(path, bytes_max=VALUE_BYTES_MAX)
        return found

    async def _forget(self, name: str) -> None:
        with suppress(FileNotFoundError):
            await self._files.unlink(self._directory / name)


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
    """A leadership in a directory, made by `DirectoryCoordinator.campaign`.

    The leader owns the epoch directory of its role, and only the leader writes in it.

        coordinator/<role>/lock      locked by the leader while it lives; its content is the epoch
        coordinator/<role>/e7/       the present leader's; e6.sealed is the previous leader's
            leader                   the name that the leader has given itself
            beat                     changes for as long as the leader runs
            <key>                    a value

    Invariants:
    - The directory is taken over before anything is read from it: seal first, read second.
    - A value counts only if the directory still stood after the value was durable.
    - Lock and beat only decide *when* another process takes over; no mistake there can lose a
      value.
    """

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
        self.epoch = epoch
        self._directory = directory
        self._beat_path = directory.path / BEAT
        self._beat_unfinished = directory.path / (BEAT + UNFINISHED)
        self._lock = lock
        self._beat_seconds = beat_seconds
        # The directory's own method: an oracle asks before each answer.
        self.is_held = self.was_held = directory.is_held
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
    def is_over(self) -> bool:
        """True if it has ended, and nothing of it is left to do."""
        beats = self._beating is not None and not self._beating.done()
        return self._deposed and not beats and self._lock is None

    async def check(self) -> None:
        if await self._is_deposed():
            raise NotReady(f"this process no longer leads as {self._role}")

    async def _is_deposed(self) -> bool:
        """Once it is, it stays so."""
        if not await self.is_held() and not self._deposed:
            self._give_up()
            _log.warning("deposed by a later leader", role=self._role, epoch=self.epoch)
        return self._deposed

    def _give_up(self) -> None:
        self._deposed = True
        self._directory.give_up()

    async def get(self, key: str) -> bytes | None:
        check_name("key", key)
        try:
            value: bytes | None = await coordinator.read(self._files, self._directory.path / key)
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
        await self._tasks.run_to_the_end(self._put(key, coordinator.encode(value)))

    async def begin(self, holder: str) -> None:
        """Starts the heartbeats. Call it once, before this leadership is made known."""
        await self._sign_lock()
        await self.put(LEADER, holder.encode())
        self._beating = asyncio.create_task(self._keep_beating(), name=f"lead as {self._role}")

    async def resign(self) -> None:
        self._give_up()
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        # A write in progress has to end before the next leader may begin.
        async with self._writing:
            self.abandon()

    def abandon(self) -> None:
        """Resigns without waiting for a write in progress, which may hang: whether it succeeds or
        not, it is never reported as done."""
        self._give_up()
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
                if await self._is_deposed():
                    # The present leader needs the lock, so that its own death is seen at once.
                    self._release_lock()
                    return
                # Others may take over: they cannot tell a full disk from a dead leader.
                self._trouble.lasts(error)
            else:
                self._trouble.is_over()

    async def _beat(self, count: int) -> None:
        """Writes a heartbeat. It is not durable: after a power cut it means nothing."""
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
            await file.append(str(self.epoch).encode())

    def _unusable(self, key: str, error: OSError) -> StoreUnusable:
        return StoreUnusable(
            f"{self._role}/{key} cannot be read or made durable: {error}",
            fault=fault_of(error),
        )


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
            files, clock, self._directory / SESSIONS, grace_seconds=times.session_grace_seconds
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
            names = epoch_directory.parse_all(await self._files.list(directory))
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
                names = epoch_directory.parse_all(await self._files.list(directory))
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
                return newest.epoch, await coordinator.read(self._files, path)
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
