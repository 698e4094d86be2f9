"""Files, system call by system call: what a service stores, other than LevelDB, goes through here.

Every operation is one step that either happens or does not, and a crash may come between any two.
Nothing is durable by itself: the content of a file is durable after its `fsync`, a name (created,
renamed, removed) after `fsync_directory` of its directory. A failed `fsync` means that the content
may never become durable, whatever a later one says: write another file.

The operations are coroutines: in the real implementation (`real_files`) each waits in a thread, so
that a slow or dead mount only stops its callers, and never the event loop. A simulation may stop
between any two.

Errors are `OSError`s with their errno, as the operating system gives them.
"""

from __future__ import annotations

import errno
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from percolator.errors import StoreFault


class FileStatus(NamedTuple):
    """What `stat` reports. Two with the same inode and device are the same file."""

    inode: int
    device: int
    is_directory: bool
    size_bytes: int


class OpenFile(Protocol):
    """A file open for appending."""

    async def append(self, data: bytes) -> None:
        """Appends all of `data`; after an `OSError`, a part of it may have been appended."""
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

    def release(self) -> None:
        """Releases it. Returns at once; another process can take it soon after."""
        ...


class Files(Protocol):
    """The file system as one process sees it."""

    @property
    def fsyncs(self) -> int:
        """The number of fsyncs so far, of files and directories, including failed ones."""
        ...

    async def make_directory(self, path: Path) -> None:
        """Fails if anything has that name, so that only one process can create it."""
        ...

    async def remove_directory(self, path: Path) -> None:
        """Removes an empty directory."""
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
        """Like `stat`, but it blocks: for a thread that may wait for the disk."""
        ...

    async def stat_waits(self, device: int) -> bool:
        """Whether a `stat` of a known name on this device may have to wait for anything."""
        ...

    async def list(self, path: Path) -> list[str]:
        """The names in a directory, sorted."""
        ...

    async def read(self, path: Path, *, bytes_max: int) -> bytes:
        """The whole content; `OSError` EFBIG if it is longer than `bytes_max`."""
        ...

    async def create(self, path: Path, *, exclusive: bool = True) -> OpenFile:
        """Creates an empty file. Unless `exclusive`, an existing one is emptied."""
        ...

    async def fsync_directory(self, path: Path) -> None:
        """Makes its names durable, and the absence of those that were removed."""
        ...

    async def lock(self, path: Path) -> FileLock:
        """Locks a file, created if missing; `BlockingIOError` if another holder has it."""
        ...

    async def free_bytes(self, path: Path) -> int:
        """How many bytes an unprivileged process may still write beside `path`."""
        ...

    async def file_system(self, path: Path) -> str:
        """The type of the file system that holds `path`, which need not be there yet, as
        /proc/mounts names it; empty where there is none."""
        ...

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
    """What an error of the operating system means for a store."""
    return _FAULTS.get(error.errno or 0, StoreFault.INPUT_OUTPUT)
