"""The master as a process: on which store roots it starts, and what survives its death."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from percolator.errors import WrongCluster
from percolator.services.local.process import ServiceProcess
from percolator.v1 import cluster_pb2 as pb
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork

pytestmark = pytest.mark.integration

START_SECONDS = 20.0


Start = Callable[..., ServiceProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts services, and stops them however the test ends."""
    started: list[ServiceProcess] = []

    def start_one(name: str, *arguments: str) -> ServiceProcess:
        process = ServiceProcess(name, name, list(arguments), logs=tmp_path, run=tmp_path)
        process.start()
        started.append(process)
        process.wait_ready(START_SECONDS)
        return process

    yield start_one
    for process in reversed(started):
        process.ask_to_stop()
        assert process.wait_stopped() == 0


async def described(address: str) -> pb.DescribeResponse:
    network = GrpcNetwork()
    try:
        return await network.unary(address, methods.DESCRIBE)(pb.DescribeRequest(), 5)
    finally:
        await network.close()


async def test_the_cluster_keeps_its_id_and_its_servers_through_kill_9(
    start: Start, tmp_path: Path
) -> None:
    first = start("master", "--store", str(tmp_path / "store"))
    before = await described(first.address)
    member = start("lockservice", "--masters", first.address)
    first.kill()
    first.start()
    first.wait_ready(START_SECONDS)
    deadline = time.monotonic() + START_SECONDS
    while len((after := await described(first.address)).servers) < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert after.cluster_id == before.cluster_id
    assert [server.address for server in after.servers] == [first.address, member.address]


async def test_a_server_of_another_cluster_or_release_is_refused(
    start: Start, tmp_path: Path
) -> None:
    process = start("master", "--store", str(tmp_path / "store"))
    network = GrpcNetwork()
    register = network.unary(process.address, methods.REGISTER)
    stranger = pb.Server(
        kind=pb.SERVICE_KIND_ORACLE, server_id="x", address="host:1", version="9.0.0"
    )
    with pytest.raises(WrongCluster, match="another"):
        await register(pb.RegisterRequest(cluster_id="another", server=stranger), 5)
    with pytest.raises(WrongCluster, match=r"9\.0\.0"):
        await register(pb.RegisterRequest(server=stranger), 5)
    await network.close()


def of_another_user(store: Path) -> None:
    store.mkdir()
    (store / "thesis.odt").touch()


def of_a_newer_release(store: Path) -> None:
    store.mkdir()
    newer = {"cluster_id": "abc", "format": 99, "created_by": "7.1.0"}
    (store / "cluster.json").write_text(json.dumps(newer))


@pytest.mark.parametrize(
    ("prepare", "named"),
    [
        (of_another_user, "thesis.odt"),
        (of_a_newer_release, "7.1.0"),
        (Path.touch, "directory"),
    ],
)
def test_an_unusable_store_root_is_one_line_and_exit_code_2(
    tmp_path: Path, prepare: Callable[[Path], None], named: str
) -> None:
    store = tmp_path / "store"
    prepare(store)
    command = [
        sys.executable,
        "-m",
        "percolator.cli",
        "serve",
        "master",
        "--store",
        str(store),
        "--log-format=json",
    ]
    command += ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("master: ")
    assert named in line


def test_a_master_does_not_accept_addresses_of_masters(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "percolator.cli", "serve", "master", "--store", str(tmp_path)]
    command += ["--masters", "localhost:7100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS)
    assert done.returncode == 2
    assert "masters" in done.stderr
