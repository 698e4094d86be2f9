"""What the machine gives to a tablet server: the kind of its file system, and space.

Contract: the store root must have coherent metadata, since the fence of a tablet is a rename that
its former owner sees with its next `stat` (a network file system may answer that from a cache, and
then two owners acknowledge). Known network file systems are therefore refused before anything is
opened. All functions only ask; none writes.
"""

from __future__ import annotations

import os
from pathlib import Path

NETWORK_FILE_SYSTEMS = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "davfs",
        "fuse.ceph",
        "fuse.glusterfs",
        "fuse.gvfsd-fuse",
        "fuse.mfs",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
        "gfs2",
        "glusterfs",
        "lustre",
        "moosefs",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "smb3",
        "smbfs",
        "virtiofs",
    }
)
"""Names as in the third column of /proc/mounts."""

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


def network_file_system(path: Path) -> str | None:
    """The type of the network file system that holds `path`; None when it is a local one.

    A machine without /proc/mounts (not Linux) cannot tell, and is taken for local.
    """
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return None
    kind = file_system_type(path.resolve(), mounts)
    return kind if kind in NETWORK_FILE_SYSTEMS else None


def free_bytes(path: Path) -> int:
    """Bytes that an unprivileged process may still write beside `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _is_within(path: str, point: str) -> bool:
    return point == "/" or path == point or path.startswith(point.rstrip("/") + "/")


def _unescape(field: str) -> str:
    for escape, character in _ESCAPES:
        field = field.replace(escape, character)
    return field
