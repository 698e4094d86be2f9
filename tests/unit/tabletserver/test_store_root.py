"""Store roots that a tablet server accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import structlog

from percolator.errors import InvalidArgument, WrongCluster
from percolator.services.chassis.files import RealFiles
from percolator.services.tabletserver import service
from percolator.services.tabletserver.settings import TabletServerSettings

pytestmark = pytest.mark.real_time

LOG = structlog.stdlib.get_logger("test")


async def opened(settings: TabletServerSettings, cluster_id: str = "") -> Path:
    files = RealFiles()
    try:
        return await service.open_store_root(files, settings, cluster_id, LOG)
    finally:
        files.close()


async def test_a_local_directory_is_accepted(tmp_path: Path) -> None:
    assert await opened(TabletServerSettings(store=str(tmp_path))) == tmp_path


async def test_a_file_is_no_store_root(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(InvalidArgument, match="is not a directory"):
        await opened(TabletServerSettings(store=str(file)))


async def test_a_network_file_system_is_refused_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def file_system(self: RealFiles, path: Path) -> str:
        return "fuse.ceph-fuse"

    monkeypatch.setattr(RealFiles, "file_system", file_system)
    with pytest.raises(InvalidArgument, match=r"fuse.ceph-fuse.*--store-unsafe"):
        await opened(TabletServerSettings(store=str(tmp_path)))
    unsafe = TabletServerSettings(store=str(tmp_path), store_unsafe=True)
    assert await opened(unsafe) == tmp_path


async def test_the_root_of_another_cluster_is_refused(tmp_path: Path) -> None:
    identity = {"cluster_id": "one", "format": 1, "created_by": "0.1.0"}
    (tmp_path / "cluster.json").write_text(json.dumps(identity))
    settings = TabletServerSettings(store=str(tmp_path), masters=("localhost:7100",))
    assert await opened(settings, "one") == tmp_path
    with pytest.raises(WrongCluster):
        await opened(settings, "two")


async def test_with_masters_a_root_without_a_cluster_is_refused(tmp_path: Path) -> None:
    settings = TabletServerSettings(store=str(tmp_path), masters=("localhost:7100",))
    with pytest.raises(InvalidArgument, match="no cluster"):
        await opened(settings, "one")


async def test_a_newer_format_is_refused_by_a_standalone_server_too(tmp_path: Path) -> None:
    identity = {"cluster_id": "one", "format": 99, "created_by": "9.0.0"}
    (tmp_path / "cluster.json").write_text(json.dumps(identity))
    with pytest.raises(WrongCluster, match="format 99"):
        await opened(TabletServerSettings(store=str(tmp_path)))
