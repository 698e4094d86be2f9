"""The type of file system that a store is on, and which types are refused.

Contract: a store needs coherent metadata, since an owner is fenced by a rename, which it has to see
with its next `stat`. A network file system may answer that from a cache, and then two owners would
acknowledge writes; and some lose acknowledged writes. So every service refuses network file systems
before it opens anything.
"""

from __future__ import annotations

from pathlib import Path

from structlog.stdlib import BoundLogger

from percolator.errors import InvalidArgument
from percolator.services.chassis.settings.service_settings import StoreSettings
from percolator.services.chassis.store.files import Files

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
    """Whether a type of file system is a network one, as far as its name tells.

    A FUSE file system is one unless it is known to be local (`fuseblk` always is).
    """
    if kind in NETWORK_FILE_SYSTEMS:
        return True
    in_user_space = kind == "fuse" or kind.startswith("fuse.")
    return in_user_space and kind not in _LOCAL_IN_USER_SPACE


async def refuse_network(
    files: Files, root: Path, settings: StoreSettings, log: BoundLogger
) -> None:
    """Raises `InvalidArgument` if `root`, which need not exist yet, would be on a network."""
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
