"""Requests that are begun and not finished, with and without a token, cost a server little."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from percolator import Table, aio, codecs
from percolator.services.local.authority import files_in, make_all
from percolator.services.local.cluster import LocalCluster
from percolator.wire import methods
from tests.unfinished import Unfinished

pytestmark = [pytest.mark.integration, pytest.mark.real_time, pytest.mark.timeout(180)]

STREAMS = 100
MIB = 1 << 20
UNAUTHENTICATED = "16"
HEALTH = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
PATHS = {
    "oracle": methods.GET_TIMESTAMPS.path,
    "lockservice": methods.TRY_LOCK.path,
    "tabletserver-1": methods.MUTATE.path,
    "gateway": methods.GET.path,
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certificates")
    make_all(made)
    return made


@pytest.fixture(scope="module")
def cluster(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with LocalCluster(
        directory, tablet_servers=1, gateways=1, certificates=certificates
    ) as started:
        yield started


@pytest.fixture
def tls(certificates: Path) -> ssl.SSLContext:
    files = files_in(certificates / "client")
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    return context


def memory(cluster: LocalCluster, name: str) -> int:
    return int(psutil.Process(cluster.processes[name].pid).memory_info().rss)


def address(cluster: LocalCluster, name: str) -> str:
    return cluster.processes[name].wait_ready(10).address


def token(certificates: Path) -> list[tuple[str, str]]:
    text = (certificates / "client" / "client.token").read_text().strip()
    return [("authorization", f"Bearer {text}")]


@pytest.mark.parametrize("name", PATHS)
async def test_of_a_caller_without_a_token_nothing_is_received(
    name: str, cluster: LocalCluster, tls: ssl.SSLContext
) -> None:
    before = memory(cluster, name)
    async with Unfinished(address(cluster, name), tls) as caller:
        await caller.begin([PATHS[name]] * STREAMS, MIB)
        assert set(caller.answers.values()) == {UNAUTHENTICATED}
        assert len(caller.answers) == STREAMS
        assert memory(cluster, name) - before < 16 * MIB


@pytest.mark.parametrize(
    ("name", "size", "most"),
    [
        ("oracle", 1 * MIB, 16 * MIB),
        ("lockservice", 1 * MIB, 16 * MIB),
        ("tabletserver-1", 16 * MIB, 64 * MIB),
        ("gateway", 16 * MIB, 64 * MIB),
    ],
)
async def test_the_unfinished_requests_of_a_client_take_its_share_and_others_get_through(
    name: str,
    size: int,
    most: int,
    cluster: LocalCluster,
    certificates: Path,
    tls: ssl.SSLContext,
) -> None:
    before = memory(cluster, name)
    async with Unfinished(address(cluster, name), tls) as caller:
        await caller.begin([PATHS[name]] * STREAMS, size, token(certificates))
        assert len(caller.streams) == STREAMS
        assert caller.sent > most / 4  # this is what fills memory without a limit
        assert memory(cluster, name) - before < most + 32 * MIB
        files = files_in(certificates / "client")
        secret = (certificates / "client" / "admin.token").read_text().strip()
        async with aio.connect(cluster.address, tls=files, token=secret) as operator:
            table = Table(f"while_{name.partition('-')[0]}")
            column = table.column("value", codecs.integer)
            await operator.create_table(table)

            async def write(tx: aio.Transaction) -> None:
                await tx.set("row", column, 1)

            await operator.run(write)


@pytest.mark.parametrize("name", ["oracle", "tabletserver-1"])
@pytest.mark.parametrize("path", [HEALTH, WATCH, REFLECTION])
async def test_requests_that_need_no_token_have_a_small_share(
    name: str, path: str, cluster: LocalCluster, tls: ssl.SSLContext
) -> None:
    before = memory(cluster, name)
    async with Unfinished(address(cluster, name), tls) as caller:
        await caller.begin([path] * STREAMS, 16 * MIB)
        assert memory(cluster, name) - before < 48 * MIB
