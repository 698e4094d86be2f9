"""What a container's health check finds, with and without TLS."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from percolator.services.local.authority import files_in, make_all
from percolator.services.local.cluster import LocalCluster
from percolator.wire.credentials import TLS_VARIABLES
from tests.integration.chassis_process import service

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", name="certificates")
def _certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    make_all(directory)
    return directory


@pytest.fixture(scope="module", name="cluster")
def _cluster(
    tmp_path_factory: pytest.TempPathFactory, certificates: Path
) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path_factory.mktemp("cluster"), tablet_servers=0, oracles=2, certificates=certificates
    ) as started:
        yield started


def probed(ready_file: Path, certificates: Path | None) -> tuple[int, str]:
    environment = dict(os.environ)
    if certificates is not None:
        files = files_in(certificates / "cluster")
        environment |= {name: getattr(files, part) for part, name in TLS_VARIABLES.items()}
    done = subprocess.run(
        [sys.executable, "-m", "percolator.services.chassis.health_probe", str(ready_file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stderr


def test_every_ready_service_including_standbys_is_healthy(
    cluster: LocalCluster, certificates: Path
) -> None:
    for name in cluster.processes:
        ready_file = cluster.data / "run" / f"{name}.ready.json"
        assert probed(ready_file, certificates) == (0, ""), name


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.0.0.3:0"])
async def test_a_service_is_asked_where_it_listens_whatever_address_others_dial(
    tmp_path: Path, listen: str
) -> None:
    """Such as that of a proxy, or the published port of a container."""
    async with service(tmp_path, f"--listen={listen}", "--advertise=proxy:80") as running:
        assert (await running.ready()).address == "proxy:80"
        assert probed(running.ready_file, None) == (0, "")


async def test_a_service_is_asked_directly_where_the_environment_names_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    async with service(tmp_path, "--listen=127.0.0.1:0") as running:
        await running.ready()
        assert probed(running.ready_file, None) == (0, "")


def test_a_service_that_is_not_ready_is_not_healthy(
    cluster: LocalCluster, certificates: Path, tmp_path: Path
) -> None:
    code, said = probed(tmp_path / "none.json", certificates)
    assert (code, said) == (1, f"not ready: {tmp_path / 'none.json'} does not exist\n")


def test_a_service_that_does_not_answer_is_not_healthy(
    cluster: LocalCluster, certificates: Path
) -> None:
    master = cluster.processes["master"]
    ready_file = cluster.data / "run" / "master.ready.json"
    master.pause()
    try:
        code, said = probed(ready_file, certificates)
    finally:
        master.resume()
    assert code == 1
    assert "127.0.0.1:" in said
    # In plain text it gets no answer either.
    assert probed(ready_file, None)[0] == 1
