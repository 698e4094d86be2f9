"""What a machine offers, read from the texts that it gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from percolator.services.chassis.files import (
    NETWORK_FILE_SYSTEMS,
    device_waits,
    file_system_of,
    file_system_type,
    is_network,
    waits,
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
    assert {"nfs", "nfs4", "cifs", "9p", "virtiofs"} <= NETWORK_FILE_SYSTEMS
    assert not any(map(is_network, ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "")))


@pytest.mark.parametrize(
    "kind", ["fuse.ceph-fuse", "fuse.glusterfs", "fuse.sshfs", "fuse.unknown", "fuse"]
)
def test_in_user_space_every_file_system_is_a_network_one_unless_it_is_known(kind: str) -> None:
    """Their names are free, and new ones come: a list of those that lose writes is never whole."""
    assert is_network(kind)


def test_local_file_systems_in_user_space_are_known() -> None:
    assert not any(map(is_network, ("fuseblk", "fuse.fuse-overlayfs", "fuse.ntfs-3g")))


def test_a_path_that_is_not_there_yet_is_on_the_file_system_above_it(tmp_path: Path) -> None:
    assert file_system_of(tmp_path / "not" / "there") == file_system_of(tmp_path)


MOUNTINFO = """
22 27 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 27 8:17 / /data rw,relatime - xfs /dev/sdb1 rw
24 27 0:55 / /mnt rw,relatime - fuse.glusterfs server rw
25 27 0:56 / /cloud rw,relatime shared:7 master:2 - nfs4 server:/ rw
"""


@pytest.mark.parametrize(
    ("device", "may_wait"),
    [((8, 1), False), ((8, 17), False), ((0, 55), True), ((0, 56), True), ((9, 9), True)],
)
def test_only_of_known_local_devices_a_stat_needs_no_thread(
    device: tuple[int, int], may_wait: bool
) -> None:
    """What is not known, as the devices that btrfs invents, may wait."""
    assert waits(os.makedev(*device), MOUNTINFO) is may_wait


def test_what_this_machine_mounts_is_looked_up(tmp_path: Path) -> None:
    assert isinstance(device_waits(tmp_path.stat().st_dev), bool)
    assert device_waits(os.makedev(4095, 4095))
