"""`Files` on a `MemoryDisk`: one process's view, which can be made to fail and to die.

Before each system call, `faults` is asked: it may raise the error with which the call shall fail,
or kill the process. A killed process does nothing more: its next call never returns (the test or
simulation that runs it cancels its tasks), and its locks are free. What it had written stays until
the power fails.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from percolator.services.chassis.files import FileLock, FileStatus, OpenFile
from percolator.world import Random

# A disk in memory that forgets, when the power fails, everything that was not made durable.
#
# Content is durable after `fsync` of the file, names after `fsync` of their directory. The names
# in a directory become durable in the order of their changes, the contents of several files in any
# order. Content that was being written may be torn anywhere, and may end in zeros where data never
# arrived. After a failed fsync, the content written before it never becomes durable, although it
# can still be read and a later fsync succeeds. Linux file systems behave like this, and other
# databases have lost data because of it.

_DEVICE = 1
"""The device of all files."""


class File:
    """An inode with content."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.content = b""
        self.locked = False
        self._durable = b""
        self._lost = False

    def truncate(self) -> None:
        self.content = b""
        self._lost = False

    @property
    def status(self) -> FileStatus:
        return FileStatus(self.number, _DEVICE, is_directory=False, size_bytes=len(self.content))

    def append(self, data: bytes) -> None:
        self.content += data

    def fsync(self) -> None:
        if not self._lost:
            self._durable = self.content

    def fail_fsync(self) -> None:
        """The pages are dropped as clean: no later fsync writes them."""
        self._lost = self.content != self._durable

    def lose_power(self, chance: Random | None) -> None:
        self.content = self._durable if chance is None else self._torn(chance)
        self._durable = self.content
        self.locked = False
        self._lost = False

    def _torn(self, chance: Random) -> bytes:
        extended = self.content.startswith(self._durable)
        if not extended and chance.random() < 0.5:
            return self._durable
        certain = len(self._durable) if extended else 0
        length = chance.randint(certain, len(self.content))
        arrived = chance.choice((length, chance.randint(certain, length)))
        return self.content[:arrived] + bytes(length - arrived)


class Directory:
    """An inode with names."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.status = FileStatus(number, _DEVICE, is_directory=True, size_bytes=0)
        """Never changes; kept because it is requested after each batch."""
        self.names: dict[str, File | Directory] = {}
        self._durable: dict[str, File | Directory] = {}
        self._pending: list[dict[str, File | Directory | None]] = []

    def change(self, names: dict[str, File | Directory | None]) -> None:
        """Sets and (None) removes names, all in one step."""
        self._apply(self.names, names)
        self._pending.append(names)

    def fsync(self) -> None:
        self._keep(len(self._pending))

    def lose_power(self, chance: Random | None) -> None:
        self._keep(0 if chance is None else chance.randint(0, len(self._pending)))
        self.names = dict(self._durable)

    def everything(self) -> list[File | Directory]:
        """All entries that have a name here, or had one that a power cut may bring back."""
        changed = [node for names in self._pending for node in names.values() if node is not None]
        return [*self.names.values(), *self._durable.values(), *changed]

    def _keep(self, steps: int) -> None:
        for names in self._pending[:steps]:
            self._apply(self._durable, names)
        self._pending.clear()

    @staticmethod
    def _apply(to: dict[str, File | Directory], names: dict[str, File | Directory | None]) -> None:
        for name, node in names.items():
            if node is None:
                to.pop(name, None)
            else:
                to[name] = node


class MemoryDisk:
    """Stored files and directories; the processes that see them are `MemoryFiles`."""

    def __init__(self) -> None:
        self._numbers = itertools.count(2)
        self.root = Directory(1)
        self.generation = 0
        """How often the power has failed: processes of an earlier generation are dead."""

    def make_durable_directory(self, path: Path) -> None:
        """Makes a directory and its parents, as an operator would before anything starts."""
        directory = self.root
        for name in path.parts[1:]:
            found = directory.names.get(name)
            if found is None:
                found = self.new_directory()
                directory.change({name: found})
                directory.fsync()
            if isinstance(found, File):
                raise fault(errno.ENOTDIR, path)
            directory = found

    def cut_power(self, chance: Random | None = None) -> None:
        """Everything that was not made durable is lost; with `chance`, some of it survives."""
        self.generation += 1
        # In the order of their numbers: the same seed has to lose the same things.
        for _, node in sorted(self._all().items()):
            node.lose_power(chance)

    def new_file(self) -> File:
        return File(next(self._numbers))

    def new_directory(self) -> Directory:
        return Directory(next(self._numbers))

    def find(self, path: Path) -> File | Directory:
        """The file or directory that has this name now."""
        parts = path.parts
        if not parts or parts[0] != "/":
            raise fault(errno.EINVAL, path)
        node: Any = self.root
        try:
            for name in parts[1:]:
                node = node.names[name]
        except KeyError:
            raise fault(errno.ENOENT, path) from None
        except AttributeError:  # a file has no names in it
            raise fault(errno.ENOTDIR, path) from None
        found: File | Directory = node
        return found

    def find_file(self, path: Path) -> File:
        node = self.find(path)
        if isinstance(node, Directory):
            raise fault(errno.EISDIR, path)
        return node

    def find_directory(self, path: Path) -> Directory:
        node = self.find(path)
        if isinstance(node, File):
            raise fault(errno.ENOTDIR, path)
        return node

    def _all(self) -> dict[int, File | Directory]:
        found: dict[int, File | Directory] = {}
        waiting: list[File | Directory] = [self.root]
        while waiting:
            node = waiting.pop()
            if node.number not in found:
                found[node.number] = node
                if isinstance(node, Directory):
                    waiting.extend(node.everything())
        return found


def fault(number: int, path: Path) -> OSError:
    """The `OSError`, in the proper subclass, that the operating system would raise."""
    return OSError(number, os.strerror(number), str(path))


T = TypeVar("T")

_FSYNCS = ("fsync", "fsync_directory")


@dataclass
class _Failure:
    operation: str
    number: int
    calls_before: int
    calls_failing: int


class Faults:
    """Decides which system calls of one process fail, and when it dies."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        """The names of the system calls made so far: "fsync", "append", …"""
        self.hits = 0
        """How many calls have failed."""
        self._failures: list[_Failure] = []
        self._kill_at: int | None = None

    @property
    def calls(self) -> int:
        """The number of system calls so far, as for `kill_at`."""
        return len(self.operations)

    def fail(
        self, operation: str, *, nth: int = 1, times: int = 1, number: int = errno.EIO
    ) -> None:
        """The `nth` call of `operation` ("fsync", "append", …) from now on fails, and the next
        `times - 1` too, with this errno."""
        self._failures.append(_Failure(operation, number, nth - 1, times))

    def heal(self) -> None:
        """Removes all faults."""
        self._failures.clear()

    def kill_at(self, call: int) -> None:
        """The process dies before its system call of this number (from 0) is made."""
        self._kill_at = call

    def hit(self, operation: str, path: Path) -> bool:
        """Counts one call. Returns True if the process dies now. Raises the error of the call."""
        if self._kill_at is not None and self.calls == self._kill_at:
            return True
        self.operations.append(operation)
        for failure in self._failures:
            if failure.operation == operation and failure.calls_failing > 0:
                if failure.calls_before > 0:
                    failure.calls_before -= 1
                else:
                    failure.calls_failing -= 1
                    self.hits += 1
                    raise fault(failure.number, path)
        return False


class MemoryFiles:
    """The file system in memory, as one process sees it."""

    def __init__(self, disk: MemoryDisk) -> None:
        self.disk = disk
        self.faults = Faults()
        self.killed = asyncio.Event()
        self.before_fsync: Callable[[], Awaitable[object]] | None = None
        """A wait before each fsync of a file, if there is any, to simulate a slow disk."""
        self.fsyncs = 0
        self.bytes_free = 1 << 40
        self.answers = asyncio.Event()
        """While it is not set, the store hangs."""
        self.answers.set()
        self._is_killed = False
        self._generation = disk.generation
        self._locked: set[File] = set()

    def kill(self) -> None:
        """Dies as with kill -9: nothing more happens, nothing is cleaned up, the locks are free."""
        self._is_killed = True
        self.killed.set()
        self.close()

    def close(self) -> None:
        for file in self._locked:
            file.locked = False
        self._locked.clear()

    async def make_directory(self, path: Path) -> None:
        await self.step("make_directory", path)
        parent = self._parent_without(path)
        parent.change({path.name: self.disk.new_directory()})

    async def remove_directory(self, path: Path) -> None:
        await self.step("remove_directory", path)
        if self.disk.find_directory(path).names:
            raise fault(errno.ENOTEMPTY, path)
        self._parent(path).change({path.name: None})

    async def rename(self, source: Path, target: Path) -> None:
        await self.step("rename", source)
        if source.parent != target.parent:
            raise fault(errno.EXDEV, target)
        node = self.disk.find(source)
        parent = self._parent(source)
        replaced = parent.names.get(target.name)
        if replaced is node:
            return
        if isinstance(node, File) and isinstance(replaced, Directory):
            raise fault(errno.EISDIR, target)
        if isinstance(node, Directory) and isinstance(replaced, File):
            raise fault(errno.ENOTDIR, target)
        if isinstance(replaced, Directory) and replaced.names:
            raise fault(errno.ENOTEMPTY, target)
        parent.change({source.name: None, target.name: node})

    async def link(self, source: Path, target: Path) -> None:
        await self.step("link", source)
        node = self.disk.find(source)
        parent = self._parent_without(target)
        if isinstance(node, Directory):
            raise fault(errno.EPERM, source)
        parent.change({target.name: node})

    async def unlink(self, path: Path) -> None:
        await self.step("unlink", path)
        self.disk.find_file(path)
        self._parent(path).change({path.name: None})

    async def stat(self, path: Path) -> FileStatus:
        await self.step("stat", path)
        return self.disk.find(path).status

    def stat_now(self, path: Path) -> FileStatus:
        """A process that is killed here sees the result, but gets no further than its next call."""
        self.survives("stat", path)
        return self.disk.find(path).status

    async def stat_waits(self, device: int) -> bool:
        """As over a network: what looks shows more orders than what need not wait."""
        return True

    async def list(self, path: Path) -> list[str]:
        await self.step("list", path)
        return sorted(self.disk.find_directory(path).names)

    async def read(self, path: Path, *, bytes_max: int) -> bytes:
        await self.step("read", path)
        content = self.disk.find_file(path).content
        if len(content) > bytes_max:
            raise fault(errno.EFBIG, path)
        return content

    async def create(self, path: Path, *, exclusive: bool = True) -> OpenFile:
        await self.step("create", path)
        return MemoryOpenFile(self, path, self._created(path, exclusive=exclusive))

    async def fsync_directory(self, path: Path) -> None:
        await self.step("fsync_directory", path)
        self.disk.find_directory(path).fsync()

    async def free_bytes(self, path: Path) -> int:
        await self.step("free_bytes", path)
        return self.bytes_free

    async def file_system(self, path: Path) -> str:
        await self.step("file_system", path)
        return "tmpfs"

    async def lock(self, path: Path) -> FileLock:
        await self.step("lock", path)
        parent = self._parent(path)
        if path.name in parent.names:
            file = self.disk.find_file(path)
        else:
            file = self._created(path, exclusive=True)
        if file.locked:
            raise fault(errno.EAGAIN, path)
        file.locked = True
        self._locked.add(file)
        return MemoryFileLock(self, file)

    def unlock(self, file: File) -> None:
        """Frees only what this process holds: after its death another one may hold the lock."""
        if file in self._locked:
            self._locked.remove(file)
            file.locked = False

    async def step(self, operation: str, path: Path) -> None:
        """One system call is about to happen, unless it fails or the process is dead."""
        if not self.answers.is_set():
            await self.answers.wait()
        if not self.survives(operation, path):
            await asyncio.get_running_loop().create_future()

    def survives(self, operation: str, path: Path) -> bool:
        """True if the process survives this call. Raises the error of the call."""
        if operation in _FSYNCS:
            self.fsyncs += 1
        if self._generation != self.disk.generation and not self._is_killed:
            self._is_killed = True
            self.killed.set()
        if self._is_killed:
            return False
        if self.faults.hit(operation, path):
            self.kill()
            return False
        return True

    def _parent(self, path: Path) -> Directory:
        return self.disk.find_directory(path.parent)

    def _parent_without(self, path: Path) -> Directory:
        parent = self._parent(path)
        if path.name in parent.names:
            raise fault(errno.EEXIST, path)
        return parent

    def _created(self, path: Path, *, exclusive: bool) -> File:
        parent = self._parent(path)
        if path.name in parent.names:
            if exclusive:
                raise fault(errno.EEXIST, path)
            file = self.disk.find_file(path)
            file.truncate()
            return file
        file = self.disk.new_file()
        parent.change({path.name: file})
        return file


class MemoryOpenFile:
    """An open file of `MemoryFiles`."""

    def __init__(self, files: MemoryFiles, path: Path, file: File) -> None:
        self._files = files
        self._path = path
        self._file = file

    async def append(self, data: bytes) -> None:
        try:
            await self._files.step("append", self._path)
        except OSError:
            # A full disk accepts what still fits.
            self._file.append(data[: len(data) // 2])
            raise
        self._file.append(data)

    async def fsync(self) -> None:
        if self._files.before_fsync is not None:
            await self._files.before_fsync()
        try:
            await self._files.step("fsync", self._path)
        except OSError:
            self._file.fail_fsync()
            raise
        self._file.fsync()

    async def close(self) -> None:
        """Does nothing: there is nothing to release."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class MemoryFileLock:
    """A lock of `MemoryFiles`."""

    def __init__(self, files: MemoryFiles, file: File) -> None:
        self._files = files
        self._file: File | None = file

    def release(self) -> None:
        # Only once: by the second time, another process may have locked the file.
        file, self._file = self._file, None
        if file is not None:
            self._files.unlock(file)


async def run_until_killed(files: MemoryFiles, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if the process of `files` died first."""
    working = asyncio.ensure_future(work)
    dying = asyncio.ensure_future(files.killed.wait())
    try:
        await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, dying):
            task.cancel()
        await asyncio.gather(working, dying, return_exceptions=True)
