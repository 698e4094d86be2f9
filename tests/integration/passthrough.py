"""A file system in user space that shows a directory: `python -m tests.integration.passthrough
SOURCE POINT`.

Stopped by SIGSTOP it hangs; killed, it is dead, and every call on it fails with ENOTCONN. What was
written is in SOURCE then, and a new process can show it again.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import mfusepy

SUBTYPE = "passthrough"


class Passthrough:
    """Passes each call on to the operating system."""

    use_ns = True

    def __init__(self, source: Path) -> None:
        self._source = str(source)

    def _real(self, path: str) -> str:
        return self._source + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._real(path)) if fh is None else os.fstat(fh)
        names = ("ino", "mode", "nlink", "uid", "gid", "size", "blocks")
        times = {f"st_{one}time": getattr(found, f"st_{one}time_ns") for one in "amc"}
        return {f"st_{name}": getattr(found, f"st_{name}") for name in names} | times

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        # A name without an inode counts as deleted.
        with os.scandir(self._real(path)) as found:
            return [(one.name, {"st_ino": one.inode()}, 0) for one in found]

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._real(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._real(path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._real(path))
        return 0

    def rename(self, old: str, new: str, flags: int = 0) -> int:
        if flags:
            raise mfusepy.FuseOSError(errno.EINVAL)
        os.rename(self._real(old), self._real(new))
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self._real(source), self._real(target), follow_symlinks=False)
        return 0

    def open(self, path: str, flags: int) -> int:
        # The kernel has done the appending: it passes the offset.
        return os.open(self._real(path), flags & ~os.O_APPEND)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._real(path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._real(path) if fh is None else fh, length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        directory = os.open(self._real(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._real(path))
        names = ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "namemax")
        return {f"f_{name}": getattr(found, f"f_{name}") for name in names}


def main() -> None:
    source, point = sys.argv[1:]
    mfusepy.FUSE(
        Passthrough(Path(source)),
        point,
        foreground=True,
        nothreads=True,
        subtype=SUBTYPE,
        use_ino=True,
        # The kernel remembers nothing: every look reaches the program, or waits for it.
        entry_timeout=0,
        attr_timeout=0,
    )


if __name__ == "__main__":
    main()
