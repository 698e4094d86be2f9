"""The environment may name a proxy for the outside world, which gRPC uses for everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from percolator.errors import ExecutionUnknown
from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.wire.channels import GrpcNetwork
from percolator.wire.methods import GET_TIMESTAMPS
from tests.unit.chassis.framed_edge import echo, framed

pytestmark = pytest.mark.real_time

ELSEWHERE = "192.0.2.1:7100"
"""An address that no machine has."""


class Proxy:
    """Notes what it is asked to connect to, and hangs up."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.was_asked = asyncio.Event()

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(await reader.readline())
        self.was_asked.set()
        writer.close()


@asynccontextmanager
async def proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    """The proxy of everything, as the environment says."""
    found = Proxy()
    async with await asyncio.start_server(found.meet, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", f"http://{host}:{port}")
        yield found


async def dial(network: GrpcNetwork, seconds: float) -> None:
    """Makes a call that nobody answers."""
    call = network.unary(ELSEWHERE, GET_TIMESTAMPS)
    with pytest.raises(ExecutionUnknown):
        await call(GetTimestampsRequest(count=1), seconds)
    await network.close()


async def test_a_server_on_the_same_machine_is_dialled_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proxy would look for it on its own machine."""
    async with proxy(monkeypatch) as unwanted, framed(echo) as edge:
        assert (await edge.timestamps(3)).count == 3
        assert unwanted.asked == []


async def test_servers_of_a_cluster_dial_each_other_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Docker, for one, sets these variables in every container."""
    async with proxy(monkeypatch) as unwanted:
        await dial(GrpcNetwork(is_within=True), 0.3)
        assert unwanted.asked == []


async def test_a_client_outside_dials_a_gateway_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with proxy(monkeypatch) as wanted:
        await dial(GrpcNetwork(), 5.0)
        assert wanted.asked[0].startswith(b"CONNECT 192.0.2.1:7100")
