"""Which types of file systems are mounted, according to /proc. It only reads."""

from __future__ import annotations

import os
from pathlib import Path

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
    """Whether a `stat` on this device may have to wait, for a network, a program or a disk.

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
