"""A disk in memory that loses what was not made durable, and fails or crashes on demand.

It keeps two states: what processes see, and what is on the platter. A crash may strike at any call:
before it had its effect, or after. What becomes of the rest then is `Unsynced`: a real disk
promises none of these.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

from services.chassis.files import FileLock, FileStatus, OpenFile


class Crash(BaseException):
    """The machine lost its power: nobody may catch this."""


class Unsynced(Enum):
    """What becomes of bytes and names that were not made durable."""

    KEPT = "all of it is there"
    LOST = "all of it is gone"
    TORN = "names are there, and half of the bytes"
    EMPTIED = "names are there, without the bytes"


@dataclass(eq=False)
class _File:
    inode: int
    data: bytes = b""
    durable: bytes = b""
    is_locked: bool = False


@dataclass(eq=False)
class _Directory:
    inode: int
    names: dict[str, _File] = field(default_factory=dict)
    durable: dict[str, _File] = field(default_factory=dict)


class MemoryFiles:
    """`services.chassis.files.Files` as far as the oracle uses it."""

    def __init__(self) -> None:
        self._directories: dict[Path, _Directory] = {Path("/"): _Directory(0)}
        self._durable_directories = {Path("/")}
        self._inodes = 0
        self.calls: list[str] = []
        """The names of the calls that change something, in their order."""
        self.crash_before: int | None = None
        """The number of the call that the machine does not live to see."""
        self.crash_after: int | None = None
        self.fail: Callable[[str], OSError | None] = lambda call: None
        """Asked with the name of each call; what it returns is raised."""
        self.fsync_seconds = 0.0

    def after_power_cut(self, unsynced: Unsynced) -> MemoryFiles:
        """The disk as the next start finds it; nobody holds a lock."""
        found = MemoryFiles()
        found._inodes = self._inodes
        for path, directory in self._directories.items():
            if path not in self._durable_directories and unsynced is not Unsynced.KEPT:
                continue
            names = directory.durable if unsynced is Unsynced.LOST else directory.names
            copies = {
                name: _File(file.inode, data, data)
                for name, file in names.items()
                for data in [_left_of(file, unsynced)]
            }
            found._directories[path] = _Directory(directory.inode, copies, dict(copies))
            found._durable_directories.add(path)
        return found

    async def make_directory(self, path: Path) -> None:
        self._call("mkdir")
        if path in self._directories:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        self._directory(path.parent)
        self._directories[path] = _Directory(self._inode())
        self._done()

    async def fsync_directory(self, path: Path) -> None:
        self._call("fsync_directory")
        directory = self._directory(path)
        directory.durable = dict(directory.names)
        self._durable_directories |= {child for child in self._directories if child.parent == path}
        self._done()

    async def rename(self, source: Path, target: Path) -> None:
        self._call("rename")
        names = self._directory(source.parent).names
        names[target.name] = names.pop(source.name)
        self._done()

    async def create(self, path: Path, *, exclusive: bool = True) -> OpenFile:
        self._call("create")
        names = self._directory(path.parent).names
        file = names.get(path.name)
        if file is not None and exclusive:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        if file is None:
            file = names[path.name] = _File(self._inode())
        file.data = b""
        self._done()
        return _MemoryOpenFile(self, file)

    async def read(self, path: Path, *, bytes_max: int) -> bytes:
        data = self._file(path).data
        if len(data) > bytes_max:
            raise OSError(errno.EFBIG, "too long", str(path))
        return data

    async def stat(self, path: Path) -> FileStatus:
        return self.stat_now(path)

    def stat_now(self, path: Path) -> FileStatus:
        file = self._file(path)
        return FileStatus(inode=file.inode, device=1, is_directory=False, size_bytes=len(file.data))

    async def lock(self, path: Path) -> FileLock:
        self._call("lock")
        names = self._directory(path.parent).names
        file = names.get(path.name)
        if file is None:
            file = names[path.name] = _File(self._inode())
        if file.is_locked:
            raise BlockingIOError(errno.EAGAIN, "locked", str(path))
        file.is_locked = True
        self._done()
        return _MemoryLock(file)

    async def unlink(self, path: Path) -> None:
        self._call("unlink")
        del self._directory(path.parent).names[path.name]
        self._done()

    async def list(self, path: Path) -> list[str]:
        return sorted(self._directory(path).names)

    async def remove_directory(self, path: Path) -> None:
        raise OSError(errno.ENOTSUP, "the oracle removes no directories", str(path))

    async def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.ENOTSUP, "the oracle links nothing", str(target))

    async def open_to_append(self, path: Path) -> OpenFile:
        return _MemoryOpenFile(self, self._file(path))

    def close(self) -> None:
        """There is nothing to close."""

    def _call(self, name: str) -> None:
        error = self.fail(name)
        if error is not None:
            raise error
        if len(self.calls) == self.crash_before:
            raise Crash
        self.calls.append(name)

    def _done(self) -> None:
        if len(self.calls) - 1 == self.crash_after:
            raise Crash

    def _inode(self) -> int:
        self._inodes += 1
        return self._inodes

    def _directory(self, path: Path) -> _Directory:
        if path not in self._directories:
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(path))
        return self._directories[path]

    def _file(self, path: Path) -> _File:
        names = self._directory(path.parent).names
        if path.name not in names:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return names[path.name]


class _MemoryOpenFile:
    def __init__(self, files: MemoryFiles, file: _File) -> None:
        self._files = files
        self._file = file

    async def append(self, data: bytes) -> None:
        self._files._call("append")
        self._file.data += data
        self._files._done()

    async def fsync(self) -> None:
        await asyncio.sleep(self._files.fsync_seconds)
        self._files._call("fsync")
        self._file.durable = self._file.data
        self._files._done()

    async def close(self) -> None:
        """There is nothing to close."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class _MemoryLock:
    def __init__(self, file: _File) -> None:
        self._file = file

    def release(self) -> None:
        self._file.is_locked = False


def _left_of(file: _File, unsynced: Unsynced) -> bytes:
    if unsynced is Unsynced.KEPT:
        return file.data
    if unsynced is Unsynced.TORN and file.data != file.durable:
        return file.data[: len(file.data) // 2]
    return file.durable
