"""What a machine offers, read from the texts that it gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.tabletserver.host_limits import (
    NETWORK_FILE_SYSTEMS,
    file_system_type,
    free_bytes,
    network_file_system,
)

MOUNTS = r"""
overlay / overlay rw 0 0
/dev/sda1 /data ext4 rw 0 0
server:/export /data/shared nfs4 rw 0 0
/dev/sdb1 /data/shared/local xfs rw 0 0
server:/two /mnt/two\040words cifs rw 0 0
/dev/sdc1 /over ext4 rw 0 0
server:/over /over nfs rw 0 0
short line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "overlay"),
        ("/database", "overlay"),
        ("/data", "ext4"),
        ("/data/store", "ext4"),
        ("/data/shared", "nfs4"),
        ("/data/shared/store", "nfs4"),
        ("/data/shared/local/store", "xfs"),
        ("/mnt/two words/store", "cifs"),
        ("/over/store", "nfs"),
    ],
)
def test_the_innermost_and_last_mount_decides(path: str, kind: str) -> None:
    assert file_system_type(Path(path), MOUNTS) == kind


def test_the_ones_that_lose_writes_are_known() -> None:
    assert {"nfs", "nfs4", "cifs", "fuse.sshfs", "9p", "virtiofs"} <= NETWORK_FILE_SYSTEMS
    assert not {"ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs"} & NETWORK_FILE_SYSTEMS


def test_a_local_directory_is_accepted_and_has_room(tmp_path: Path) -> None:
    assert network_file_system(tmp_path) is None
    assert free_bytes(tmp_path) > 0
