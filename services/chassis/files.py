"""Files, system call by system call: what a service stores, other than LevelDB, goes through here.

Every operation is one step that either happens or does not, and a crash may strike between any
two. Nothing is durable by itself: the content of a file after its `fsync`, a name (created,
renamed, removed) after `fsync_directory` of the directory it is in. A failed `fsync` means that
the content may never become durable, whatever a later one says: write another file.

The operations are coroutines. In the real implementation those that wait for the disk run in one
thread of their own, in the order in which they were asked for, so that the event loop goes on; the
quick ones (stat, list, mkdir, link) run at once, without suspending. A simulation stops between
any two.

Errors are `OSError`s with their errno, as the operating system gives them.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, ParamSpec, Protocol, Self, TypeVar

from percolator.errors import StoreFault

P = ParamSpec("P")
T = TypeVar("T")


class FileStatus(NamedTuple):
    """What `stat` tells. Two that are equal in inode and device are the same file."""

    inode: int
    device: int
    is_directory: bool
    size_bytes: int


class OpenFile(Protocol):
    """A file open for appending."""

    async def append(self, data: bytes) -> None:
        """All of `data` is written behind what is there, or an `OSError` says that some may be."""
        ...

    async def fsync(self) -> None: ...

    async def close(self) -> None:
        """Closes without making anything durable. Closing twice is harmless."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class FileLock(Protocol):
    """Held until released, or until the process ends, however it ends."""

    def release(self) -> None: ...


class Files(Protocol):
    """The file system as one process sees it."""

    @property
    def fsyncs(self) -> int:
        """Waits for the disk so far, of files and of directories, failed ones too."""
        ...

    async def make_directory(self, path: Path) -> None:
        """Fails if anything has that name: the one who made it is the only one."""
        ...

    async def remove_directory(self, path: Path) -> None:
        """Only an empty one."""
        ...

    async def rename(self, source: Path, target: Path) -> None:
        """Atomic; a file replaces a file, a directory an empty one. Within one directory only."""
        ...

    async def link(self, source: Path, target: Path) -> None:
        """A second name for a file; fails if anything has that name."""
        ...

    async def unlink(self, path: Path) -> None: ...

    async def stat(self, path: Path) -> FileStatus: ...

    def stat_now(self, path: Path) -> FileStatus:
        """The same, for the one look between work that is done and the answer that leaves."""
        ...

    async def list(self, path: Path) -> list[str]:
        """The names in a directory, sorted."""
        ...

    async def read(self, path: Path, *, bytes_max: int) -> bytes:
        """The whole content; `OSError` EFBIG when it is longer than `bytes_max`."""
        ...

    async def create(self, path: Path, *, exclusive: bool = True) -> OpenFile:
        """A new, empty file. Unless `exclusive`, one that is there is emptied."""
        ...

    async def open_to_append(self, path: Path) -> OpenFile:
        """A file that is there."""
        ...

    async def fsync_directory(self, path: Path) -> None:
        """Makes the names in it durable, and their absence."""
        ...

    async def lock(self, path: Path) -> FileLock:
        """Locks a file, made if it is not there; `BlockingIOError` when somebody else holds it."""
        ...

    def close(self) -> None: ...


async def replace_durably(files: Files, path: Path, data: bytes) -> None:
    """Makes `data` the content of `path`, all or nothing, and returns when it is durable.

    An `OSError` leaves the old content or the new one, and which of them a restart finds is not
    known. Only one process may do this to a path at a time.
    """
    temporary = path.with_name(path.name + ".new")
    async with await files.create(temporary, exclusive=False) as file:
        await file.append(data)
        # Without this a crash may leave the new name on an empty file.
        await file.fsync()
    await files.rename(temporary, path)
    await files.fsync_directory(path.parent)


async def make_durable_directory(files: Files, path: Path) -> None:
    """A directory that is there, also after a power cut; its parent exists."""
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
    """What an error of the operating system means for a store."""
    return _FAULTS.get(error.errno or 0, StoreFault.INPUT_OUTPUT)


class RealFiles:
    """The operating system's files."""

    def __init__(self, threads: int = 1) -> None:
        # One thread: the order in which things were asked for stays. Several are for whoever does
        # many things at once that do not depend on each other.
        self._thread = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="files")
        self.fsyncs = 0

    async def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    async def remove_directory(self, path: Path) -> None:
        await self.waiting(os.rmdir, path)

    async def rename(self, source: Path, target: Path) -> None:
        if source.parent != target.parent:
            raise OSError(errno.EXDEV, "renaming into another directory", str(target))
        await self.waiting(os.rename, source, target)

    async def link(self, source: Path, target: Path) -> None:
        os.link(source, target, follow_symlinks=False)

    async def unlink(self, path: Path) -> None:
        await self.waiting(os.unlink, path)

    async def stat(self, path: Path) -> FileStatus:
        return self.stat_now(path)

    def stat_now(self, path: Path) -> FileStatus:
        found = os.stat(path)
        return FileStatus(
            inode=found.st_ino,
            device=found.st_dev,
            is_directory=stat.S_ISDIR(found.st_mode),
            size_bytes=found.st_size,
        )

    async def list(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    async def read(self, path: Path, *, bytes_max: int) -> bytes:
        return await self.waiting(_read, path, bytes_max)

    async def create(self, path: Path, *, exclusive: bool = True) -> OpenFile:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        flags |= os.O_EXCL if exclusive else os.O_TRUNC
        return _RealOpenFile(self, os.open(path, flags, 0o644))

    async def open_to_append(self, path: Path) -> OpenFile:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        return _RealOpenFile(self, descriptor)

    async def fsync_directory(self, path: Path) -> None:
        self.fsyncs += 1
        await self.waiting(_fsync_directory, path)

    async def lock(self, path: Path) -> FileLock:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Not lockf: its lock is lost as soon as anything in the process closes the file.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        return _RealFileLock(descriptor)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    async def waiting(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls it in the thread that waits for the disk."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))


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
            os.close(descriptor)

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
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


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
