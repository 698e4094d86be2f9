"""The operating system's files: every call in a thread that may wait for the disk."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from percolator.services.chassis.store.disk_threads import DiskThreads
from percolator.services.chassis.store.files import FileLock, FileStatus, OpenFile
from percolator.services.chassis.store.mounts import device_waits, file_system_of

P = ParamSpec("P")
T = TypeVar("T")

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
