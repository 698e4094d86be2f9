"""A real file system, ext4 in a file, which can hang, fill up and die like that of a disk.

It hangs because it is frozen, as for a snapshot of the disk that takes long, and dies by the call
that ends it as a dead disk would.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

MAY_MOUNT = bool(
    os.geteuid() == 0 and Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4")
)
"""It takes root, loop devices and mkfs.ext4."""

_FREEZE, _THAW = 0xC0045877, 0xC0045878
_SHUT_DOWN = 0x8004587D
_WITHOUT_ITS_LOG = 2
_BYTES = 400 << 20
_BALLAST = "ballast"


class FileSystem:
    """ext4 in a file, mounted."""

    def __init__(self, directory: Path, *, bytes_max: int = _BYTES) -> None:
        self.point = directory / "mounted"
        self._image = directory / "image"
        self._bytes = bytes_max

    def make(self) -> None:
        self.point.mkdir()
        with self._image.open("wb") as image:
            image.truncate(self._bytes)
        _run("mkfs.ext4", "-q", str(self._image))

    def mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.point))

    def unmount(self) -> None:
        _run("umount", str(self.point))

    def unmount_in_any_case(self) -> None:
        """However far a test came: processes may still use it."""
        subprocess.run(["umount", "-l", str(self.point)], check=False, capture_output=True)

    def freeze(self) -> None:
        self._control(_FREEZE, 0)

    def thaw(self) -> None:
        self._control(_THAW, 0)

    def shut_down(self) -> None:
        self._control(_SHUT_DOWN, _WITHOUT_ITS_LOG)

    def fill(self) -> None:
        """Leaves not a single block: every write that needs one fails."""
        size = self._bytes
        with (self.point / _BALLAST).open("wb") as ballast:
            while size:
                try:
                    os.posix_fallocate(ballast.fileno(), ballast.seek(0, os.SEEK_END), size)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2

    def empty(self) -> None:
        """Takes out what filled it."""
        (self.point / _BALLAST).unlink(missing_ok=True)

    def _control(self, request: int, argument: int) -> None:
        descriptor = os.open(self.point, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, request, struct.pack("I", argument))
        finally:
            os.close(descriptor)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)
