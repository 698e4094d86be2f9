"""The local launcher, the command line, and the services together, as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.local.cluster import LocalCluster, running
from services.local.process import LocalClusterError

pytestmark = pytest.mark.integration

SERVICES = ["lock service", "master", "oracle"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=0) as started:
        yield started


def percolator(cluster: LocalCluster, *arguments: str) -> Any:
    """Runs the command line, and reads the JSON that it prints."""
    command = [sys.executable, "-m", "percolator.cli"]
    command += ["--address", cluster.address, "--json", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    return json.loads(done.stdout)


def wait_until(condition: Any, seconds: float = 15) -> None:
    """Polls what another process does; there is no virtual time between processes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_status_lists_every_service_with_its_version_and_address(cluster: LocalCluster) -> None:
    status = percolator(cluster, "status")
    assert sorted(server["kind"] for server in status["servers"]) == SERVICES
    addresses = {server["address"] for server in status["servers"]}
    assert addresses == {process.address for process in cluster.processes.values()}
    assert status["missing"] == []


def test_timestamps_asked_for_later_are_larger(cluster: LocalCluster) -> None:
    first = percolator(cluster, "timestamp", "--count", "3")
    second = percolator(cluster, "timestamp")
    assert first == list(range(first[0], first[0] + 3))
    assert second[0] > first[-1]


def test_a_killed_oracle_comes_back_with_larger_timestamps(cluster: LocalCluster) -> None:
    before = percolator(cluster, "timestamp")[0]
    cluster.processes["oracle"].kill()
    cluster.restart("oracle")
    assert percolator(cluster, "timestamp")[0] > before


def test_sessions_are_listed(cluster: LocalCluster) -> None:
    assert percolator(cluster, "sessions") == []


def test_a_cluster_keeps_its_identity_when_it_is_stopped_and_started(tmp_path: Path) -> None:
    identities = []
    for _ in range(2):
        with LocalCluster(tmp_path, tablet_servers=0) as started:
            identities.append(percolator(started, "status")["cluster_id"])
    assert identities[0] == identities[1]


def test_two_launchers_never_run_on_the_same_data(cluster: LocalCluster) -> None:
    with pytest.raises(LocalClusterError, match=r"running .* already"):
        LocalCluster(cluster.data, tablet_servers=0).start()
    assert cluster.processes["master"].exit_code is None


def test_a_launcher_that_cannot_start_everything_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "somebody-elses-file").write_text("precious")
    failing = LocalCluster(tmp_path, tablet_servers=0)
    with pytest.raises(LocalClusterError, match="master exited with 2"):
        failing.start()
    assert failing.processes["master"].exit_code == 2
    assert running(tmp_path) is None
    assert (tmp_path / "store" / "somebody-elses-file").read_text() == "precious"


def test_services_of_one_cluster_refuse_the_store_of_another(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with LocalCluster(tmp_path, tablet_servers=0):
        pass
    command = [sys.executable, "-m", "services.oracle", "--listen", "127.0.0.1:0"]
    command += ["--metrics-listen", "", "--masters", cluster.address]
    command += ["--store", str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "cluster" in done.stderr.strip().splitlines()[-1]


def test_killing_the_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.local", "--data", str(tmp_path), "--port", "0"]
    command += ["--tablet-servers", "0"]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: bool(running(tmp_path)), seconds=30)
        state: Any = running(tmp_path)
        services = [psutil.Process(process["pid"]) for process in state["processes"]]
        assert len(services) == 3
    finally:
        launcher.kill()
        launcher.wait()
    _, alive = psutil.wait_procs(services, timeout=20)
    assert alive == []


def test_a_detached_cluster_is_stopped_by_down(tmp_path: Path) -> None:
    base = [sys.executable, "-m", "services.local"]
    up = [*base, "--data", str(tmp_path), "--port", "0", "--tablet-servers", "0", "--detach"]
    started = subprocess.run(up, check=True, capture_output=True, text=True, timeout=40)
    state: Any = running(tmp_path)
    try:
        assert started.stdout.strip() == state["address"]
        down = [*base, "down", "--data", str(tmp_path)]
        subprocess.run(down, check=True, capture_output=True, timeout=40)
    finally:
        if running(tmp_path):
            os.kill(state["pid"], signal.SIGKILL)
    assert running(tmp_path) is None
    assert not any(psutil.pid_exists(process["pid"]) for process in state["processes"])


def test_why_a_detached_cluster_did_not_start_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "somebody-elses-file").touch()
    command = [sys.executable, "-m", "services.local", "--data", str(tmp_path), "--detach"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: master exited with 2 while starting: master: store: ")
