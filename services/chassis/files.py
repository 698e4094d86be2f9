"""Files, system call by system call: what a service stores, other than LevelDB, goes through here.

Every operation is one step that either happens or does not, and a crash may come between any two.
Nothing is durable by itself: the content of a file is durable after its `fsync`, a name (created,
renamed, removed) after `fsync_directory` of its directory. A failed `fsync` means that the content
may never become durable, whatever a later one says: write another file.

The operations are coroutines: in the real implementation (`RealFiles`) each waits in a thread, so
that a slow or dead mount only stops its callers, and never the event loop. A simulation may stop
between any two.

Errors are `OSError`s with their errno, as the operating system gives them.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Protocol, Self, TypeVar

from structlog.stdlib import BoundLogger

from percolator.errors import InvalidArgument, StoreFault
from percolator.services.chassis.settings import StoreSettings


class FileStatus(NamedTuple):
    """The result of `stat`. Two with the same inode and device are the same file."""

    inode: int
    device: int
    is_directory: bool
    size_bytes: int


class OpenFile(Protocol):
    """A file open for appending."""

    async def append(self, data: bytes) -> None:
        """Appends all of `data`; after an `OSError`, a part of it may have been appended."""

    async def fsync(self) -> None: ...

    async def close(self) -> None:
        """Closes without making anything durable. Closing twice is harmless."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class FileLock(Protocol):
    """Held until released, or until the process ends, however it ends."""

    def release(self) -> None:
        """Releases it. Returns at once; another process can take it soon after."""


class Files(Protocol):
    """The file system as one process sees it."""

    @property
    def fsyncs(self) -> int:
        """The number of fsyncs so far, of files and directories, including failed ones."""

    async def make_directory(self, path: Path) -> None:
        """Fails if anything has that name, so that only one process can create it."""

    async def remove_directory(self, path: Path) -> None:
        """Removes an empty directory."""

    async def rename(self, source: Path, target: Path) -> None:
        """Atomic; a file replaces a file, a directory an empty one. Within one directory only."""

    async def link(self, source: Path, target: Path) -> None:
        """A second name for a file; fails if anything has that name."""

    async def unlink(self, path: Path) -> None: ...

    async def stat(self, path: Path) -> FileStatus: ...

    def stat_now(self, path: Path) -> FileStatus:
        """Like `stat`, but it blocks: for a thread that may wait for the disk."""

    async def stat_waits(self, device: int) -> bool:
        """True if a `stat` of a known name on this device may have to wait for anything."""

    async def list(self, path: Path) -> list[str]:
        """The names in a directory, sorted."""

    async def read(self, path: Path, *, bytes_max: int) -> bytes:
        """The whole content; `OSError` EFBIG if it is longer than `bytes_max`."""

    async def create(self, path: Path, *, exclusive: bool = True) -> OpenFile:
        """Creates an empty file. Unless `exclusive`, an existing one is emptied."""

    async def fsync_directory(self, path: Path) -> None:
        """Makes its names durable, and the absence of those that were removed."""

    async def lock(self, path: Path) -> FileLock:
        """Locks a file, created if missing; `BlockingIOError` if another holder has it."""

    async def free_bytes(self, path: Path) -> int:
        """How many bytes an unprivileged process may still write to the file system of `path`."""

    async def file_system(self, path: Path) -> str:
        """The type of the file system that holds `path`, which need not be there yet, as
        /proc/mounts names it; empty where there is none."""

    def close(self) -> None: ...


async def replace_durably(files: Files, path: Path, data: bytes) -> None:
    """Makes `data` the content of `path`, all or nothing, and returns when it is durable.

    After an `OSError` it is not known whether a restart will find the old content or the new one.
    Only one process at a time may do this to a path.
    """
    temporary = path.with_name(path.name + ".new")
    async with await files.create(temporary, exclusive=False) as file:
        await file.append(data)
        # Without this a crash may leave the new name on an empty file.
        await file.fsync()
    await files.rename(temporary, path)
    await files.fsync_directory(path.parent)


async def make_durable_directory(files: Files, path: Path) -> None:
    """Makes a directory that is still there after a power cut; its parent has to exist."""
    try:
        await files.make_directory(path)
    except FileExistsError:
        return
    await files.fsync_directory(path.parent)


_FAULTS = {
    errno.ENOSPC: StoreFault.DISK_FULL,
    errno.EDQUOT: StoreFault.DISK_FULL,
    errno.EROFS: StoreFault.READ_ONLY,
    errno.EACCES: StoreFault.READ_ONLY,
    errno.EPERM: StoreFault.READ_ONLY,
}


def fault_of(error: OSError) -> StoreFault:
    """The error of a store for an error of the operating system."""
    return _FAULTS.get(error.errno or 0, StoreFault.INPUT_OUTPUT)


T = TypeVar("T")

STUCK_SECONDS = 1.0
"""If no thread has reported for this long and calls are waiting, another thread is started."""

_CLOSE_SECONDS = 2.0
"""A thread that is stuck in a call is left behind. It is a daemon, and ends with the process."""

_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]
_Result = tuple["asyncio.Future[Any]", Any, BaseException | None]


class DiskThreads:
    """Threads that wait for the disk, so that the event loop does not have to.

    The pool belongs to the event loop that first asks for something.

    Waking a thread, and being woken by it, costs more than the rest of a small write. So all work
    that the event loop asks for in one of its rounds is distributed together: each idle thread gets
    an equal share, does it in order, and reports once. Work that arrives while all threads are busy
    waits, and is distributed when the first thread is done. In this way many tablets cost few
    wake-ups.

    A call may hang, on a mount that is gone or slow. If that must not hold up other calls, a share
    is a single call (`share_max`), and when all threads have been stuck for a second, one more is
    started, up to `threads_max`.
    """

    def __init__(
        self,
        threads: int,
        name: str,
        *,
        threads_max: int | None = None,
        share_max: int | None = None,
    ) -> None:
        """`threads_max` includes threads that replace stuck ones; None: they are not replaced."""
        self._name = name
        self._threads_max = threads_max or threads
        self._share_max = share_max
        self._waiting: deque[_Job] = deque()
        self._dealing = False
        self._idle = [_DiskThread(f"{name}-{number}") for number in range(threads)]
        self._threads = list(self._idle)
        self._reports = 0
        self._watching = False

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Runs `work` in one of the threads; the future has its result, or its exception."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._waiting.append((work, done))
        if self._idle:
            if not self._dealing:
                self._dealing = True
                # At the end of this round of the loop, so that all it asks for goes together.
                loop.call_soon(self._deal, loop)
        elif not self._watching and len(self._threads) < self._threads_max:
            self._watch(loop)
        return done

    def close(self) -> None:
        """Lets the threads end once they have done their work."""
        for thread in self._threads:
            thread.shares.put(None)
        patience_seconds = _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(patience_seconds)
            if thread.is_alive():
                # The others have had the same time.
                patience_seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _deal(self, loop: asyncio.AbstractEventLoop) -> None:
        self._dealing = False
        while self._waiting and self._idle:
            share = -(-len(self._waiting) // len(self._idle))
            if self._share_max is not None:
                share = min(share, self._share_max)
            jobs = [self._waiting.popleft() for _ in range(share)]
            thread = self._idle.pop()
            thread.shares.put((jobs, loop, self._done))
        if self._waiting and not self._watching and len(self._threads) < self._threads_max:
            self._watch(loop)

    def _done(
        self,
        thread: _DiskThread,
        results: list[_Result],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._idle.append(thread)
        self._reports += 1
        for future, result, error in results:
            if future.done():
                # Its caller was cancelled and no longer waits for the result.
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        if self._waiting and not self._dealing:
            self._deal(loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watching = True
        loop.call_later(STUCK_SECONDS, self._relieve, loop, self._reports)

    def _relieve(self, loop: asyncio.AbstractEventLoop, reports: int) -> None:
        self._watching = False
        if not self._waiting or self._idle:
            return
        if reports == self._reports:
            thread = _DiskThread(f"{self._name}-{len(self._threads)}")
            self._threads.append(thread)
            self._idle.append(thread)
            self._deal(loop)
        elif len(self._threads) < self._threads_max:
            self._watch(loop)


_Report = Callable[["_DiskThread", list[_Result], asyncio.AbstractEventLoop], None]
_Share = tuple[list[_Job], asyncio.AbstractEventLoop, _Report]


class _DiskThread(threading.Thread):
    """Does one share of work after another."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.shares: SimpleQueue[_Share | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while (share := self.shares.get()) is not None:
            jobs, loop, report = share
            results = [_attempted(work, future) for work, future in jobs]
            try:
                loop.call_soon_threadsafe(report, self, results, loop)
            except RuntimeError:
                # The loop is closed: the process ended while this thread was stuck.
                return


def _attempted(work: Callable[[], Any], future: asyncio.Future[Any]) -> _Result:
    try:
        return future, work(), None
    except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
        return future, None, error


_NEVER_WAITS = frozenset({"ext2", "ext3", "ext4", "tmpfs", "xfs"})
"""These are local and in the kernel: a name that was looked up before is in memory, with all that
`stat` reports, and the kernel looks it up without a lock, even if the disk is frozen, slow or
gone."""

_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


def file_system_type(path: Path, mounts: str) -> str:
    """The type of the file system that holds `path`, by the text of /proc/mounts.

    Of nested mounts the innermost counts, of several on one point the last, which hides the others.
    Empty when no line matches.
    """
    found_point, found_type = "", ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = _unescape(fields[1])
        if _is_within(str(path), point) and len(point) >= len(found_point):
            found_point, found_type = point, fields[2]
    return found_type


def file_system_of(path: Path) -> str:
    """As above, on this machine. Empty if there is no /proc/mounts (not Linux)."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return ""
    return file_system_type(path.resolve(), mounts)


def waits(device: int, mountinfo: str) -> bool:
    """True if a `stat` on this device may have to wait, for a network, a program or a disk.

    Decided by the text of /proc/self/mountinfo. A device that is not listed there may have to.
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        mount, _, file_system = line.partition(" - ")
        if mount.split(" ")[2:3] == [number]:
            return file_system.split(" ")[0] not in _NEVER_WAITS
    return True


def device_waits(device: int) -> bool:
    """As above, on this machine."""
    try:
        path = Path("/proc/self/mountinfo")
        mountinfo = path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return True
    return waits(device, mountinfo)


def _is_within(path: str, point: str) -> bool:
    return point == "/" or path == point or path.startswith(point.rstrip("/") + "/")


def _unescape(field: str) -> str:
    for escape, character in _ESCAPES:
        field = field.replace(escape, character)
    return field


NETWORK_FILE_SYSTEMS = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "davfs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "moosefs",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "smb3",
        "smbfs",
        "virtiofs",
    }
)
"""Names as in the third column of /proc/mounts."""

_LOCAL_IN_USER_SPACE = frozenset(
    {
        "fuse.bindfs",
        "fuse.ext2",
        "fuse.ext4",
        "fuse.fuse-overlayfs",
        "fuse.lxcfs",
        "fuse.mergerfs",
        "fuse.ntfs-3g",
        "fuse.zfs",
    }
)
"""Any name may follow `fuse.`, and most that do are those of network file systems."""


def is_network(kind: str) -> bool:
    """True if a type of file system is a network one, as far as its name tells.

    A FUSE file system is one unless it is known to be local (`fuseblk` always is).
    """
    if kind in NETWORK_FILE_SYSTEMS:
        return True
    in_user_space = kind == "fuse" or kind.startswith("fuse.")
    return in_user_space and kind not in _LOCAL_IN_USER_SPACE


async def refuse_network(
    files: Files, root: Path, settings: StoreSettings, log: BoundLogger
) -> None:
    """Raises `InvalidArgument` if `root`, which need not exist yet, would be on a network.

    The type of file system that a store is on, and which types are refused.

    Contract: a store needs coherent metadata, since an owner is fenced by a rename, which it has to
    see with its next `stat`. A network file system may answer that from a cache, and then two
    owners would acknowledge writes; and some lose acknowledged writes. So every service refuses
    network file systems before it opens anything.
    """
    kind = await files.file_system(root)
    if not is_network(kind):
        return
    if not settings.store_unsafe:
        raise InvalidArgument(
            "store",
            f"{root} is on a network file system ({kind}), which can lose acknowledged writes; "
            "use a local one, or give --store-unsafe",
        )
    log.warning("the store is on a network file system", kind=kind, store=str(root))


P = ParamSpec("P")

_THREADS_MAX = 32
"""Including those that replace stuck ones."""


class RealFiles:
    """Files with a pool of threads of their own: a call that is stuck does not affect others."""

    def __init__(self, name: str = "files", threads: int = 1) -> None:
        """One thread, unless it is stuck, keeps the order of calls. Several are for callers that do
        many independent things at once."""
        self._threads = DiskThreads(threads, name, threads_max=_THREADS_MAX, share_max=1)
        # Separate threads, because responses wait for them: they must not wait behind an fsync.
        self._looks = DiskThreads(1, f"{name}-looks", threads_max=_THREADS_MAX)
        self._waiting_devices: dict[int, bool] = {}
        self.fsyncs = 0

    async def make_directory(self, path: Path) -> None:
        await self.waiting(os.mkdir, path)

    async def remove_directory(self, path: Path) -> None:
        await self.waiting(os.rmdir, path)

    async def rename(self, source: Path, target: Path) -> None:
        if source.parent != target.parent:
            raise OSError(errno.EXDEV, "renaming into another directory", str(target))
        await self.waiting(os.rename, source, target)

    async def link(self, source: Path, target: Path) -> None:
        await self.waiting(os.link, source, target, follow_symlinks=False)

    async def unlink(self, path: Path) -> None:
        await self.waiting(os.unlink, path)

    async def stat(self, path: Path) -> FileStatus:
        return await self._looks.run(partial(self.stat_now, path))

    def stat_now(self, path: Path) -> FileStatus:
        found = os.stat(path)
        return FileStatus(
            inode=found.st_ino,
            device=found.st_dev,
            is_directory=stat.S_ISDIR(found.st_mode),
            size_bytes=found.st_size,
        )

    async def stat_waits(self, device: int) -> bool:
        if device not in self._waiting_devices:
            self._waiting_devices[device] = await self.waiting(device_waits, device)
        return self._waiting_devices[device]

    async def list(self, path: Path) -> list[str]:
        return sorted(await self.waiting(os.listdir, path))

    async def read(self, path: Path, *, bytes_max: int) -> bytes:
        return await self.waiting(_read, path, bytes_max)

    async def create(self, path: Path, *, exclusive: bool = True) -> OpenFile:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        flags |= os.O_EXCL if exclusive else os.O_TRUNC
        return _RealOpenFile(self, await self._descriptor(partial(os.open, path, flags, 0o644)))

    async def fsync_directory(self, path: Path) -> None:
        self.fsyncs += 1
        await self.waiting(_fsync_directory, path)

    async def lock(self, path: Path) -> FileLock:
        return _RealFileLock(self, await self._descriptor(partial(_lock, path)))

    async def free_bytes(self, path: Path) -> int:
        status = await self.waiting(os.statvfs, path)
        return status.f_bavail * status.f_frsize

    async def file_system(self, path: Path) -> str:
        return await self.waiting(file_system_of, path)

    def close(self) -> None:
        self._threads.close()
        self._looks.close()

    async def waiting(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls the function in a thread that waits for the disk."""
        return await self._threads.run(partial(function, *args, **kwargs))

    def close_soon(self, descriptor: int) -> None:
        """Closes it without waiting for that."""
        try:
            self._threads.run(partial(os.close, descriptor)).add_done_callback(_forget)
        except RuntimeError:
            # The event loop is gone, so this holds nothing up.
            os.close(descriptor)

    async def _descriptor(self, opening: Callable[[], int]) -> int:
        """Opens a file, and closes it again if its caller has gone before it was open."""
        opened = self._threads.run(opening)
        try:
            return await asyncio.shield(opened)
        except asyncio.CancelledError:
            opened.add_done_callback(self._close_unwanted)
            raise

    def _close_unwanted(self, opened: asyncio.Future[int]) -> None:
        if not opened.cancelled() and opened.exception() is None:
            self.close_soon(opened.result())


class _RealOpenFile:
    def __init__(self, files: RealFiles, descriptor: int) -> None:
        self._files = files
        self._descriptor = descriptor

    async def append(self, data: bytes) -> None:
        await self._files.waiting(_write_all, self._descriptor, data)

    async def fsync(self) -> None:
        self._files.fsyncs += 1
        await self._files.waiting(os.fsync, self._descriptor)

    async def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            await self._files.waiting(os.close, descriptor)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class _RealFileLock:
    def __init__(self, files: RealFiles, descriptor: int) -> None:
        self._files = files
        self._descriptor = descriptor

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._files.close_soon(descriptor)


def _forget(done: asyncio.Future[None]) -> None:
    """Ignores the result of closing: the content was made durable before, or is not needed."""
    if not done.cancelled():
        done.exception()


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # Not lockf: its lock is lost as soon as anything in the process closes the file.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read(path: Path, bytes_max: int) -> bytes:
    with open(path, "rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"longer than {bytes_max} bytes", str(path))
    return data


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
