"""A service process and the masters of its cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from percolator.errors import WrongCluster
from percolator.services.chassis.gate import Gate
from percolator.services.chassis.metrics import RpcMetrics
from percolator.services.chassis.rpc import Exposed, RpcEdge
from percolator.v1 import cluster_pb2
from percolator.v1.cluster_pb2 import (
    DescribeRequest,
    DescribeResponse,
    RegisterRequest,
    RegisterResponse,
)
from percolator.world import MachineClock
from tests.integration.chassis_process import (
    NOT_SERVING,
    SECONDS,
    SERVING,
    Waiter,
    health,
    service,
)

pytestmark = pytest.mark.integration


class Master:
    """The part of a master that the chassis talks to."""

    def __init__(self, cluster_id: str) -> None:
        self.cluster_id = cluster_id
        self.registered: list[RegisterRequest] = []

    async def describe(self, request: DescribeRequest) -> DescribeResponse:
        return DescribeResponse(cluster_id=self.cluster_id)

    async def register(self, request: RegisterRequest) -> RegisterResponse:
        if request.cluster_id != self.cluster_id:
            raise WrongCluster(
                "the cluster is another one", expected=self.cluster_id, found=request.cluster_id
            )
        self.registered.append(RegisterRequest.FromString(request.SerializeToString()))
        return RegisterResponse(cluster_id=self.cluster_id, interval_milliseconds=100)


@asynccontextmanager
async def serving(master: Master, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    edge = RpcEdge(Gate(100, 16 << 20), RpcMetrics(), MachineClock())
    edge.expose([Exposed(cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"], master)])
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((edge,))
    host, _, _ = address.rpartition(":")
    bound = f"{host}:{server.add_insecure_port(address)}"
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


async def until(running: Waiter, status: int) -> None:
    """Returns once the process reports this health status."""
    address = (await running.ready()).address
    async with asyncio.timeout(SECONDS):
        while await health(address) != status:  # noqa: ASYNC110  # another process's state
            await asyncio.sleep(0.02)


async def test_a_service_waits_for_its_master_and_registers_with_it(tmp_path: Path) -> None:
    # A port that was free a moment ago: nothing listens there yet.
    async with serving(Master("")) as address:
        pass
    master = Master("shop")
    async with service(tmp_path, f"--masters={address}") as running:
        waiting = await running.log_until("waiting for a master")
        assert waiting["masters"] == address
        assert not running.ready_file.exists()
        async with serving(master, address):
            entry = await running.log_until("ready")
            ready = await running.ready()
        assert entry["cluster_id"] == "shop"
        announced = master.registered[0].server
        assert master.registered[0].cluster_id == "shop"
        assert announced.kind == cluster_pb2.SERVICE_KIND_ORACLE
        assert announced.address == ready.address
        assert announced.metrics_address == ready.metrics_address
        assert announced.server_id == ready.server_id
        assert announced.version
        # Losing the master does not stop the service.
        await running.log_until("not registered")
        assert (await running.call(1)).first == 1
        assert await health(ready.address) == SERVING
        async with serving(master, address):
            await running.log_until("registered again")
        running.terminate()
        assert await running.exit_code() == 0
        for line in await running.log():
            json.loads(line)


async def test_a_service_that_waits_for_its_master_can_be_stopped(tmp_path: Path) -> None:
    async with service(tmp_path, "--masters=127.0.0.1:1") as running:
        await running.log_until("waiting for a master")
        running.terminate()
        assert await running.exit_code() == 0


class TwoFacedMaster(Master):
    """Two masters of different clusters behind one address."""

    async def describe(self, request: DescribeRequest) -> DescribeResponse:
        return DescribeResponse(cluster_id="another")


async def test_a_service_between_two_clusters_does_not_start(tmp_path: Path) -> None:
    async with (
        serving(TwoFacedMaster("shop")) as address,
        service(tmp_path, f"--masters={address}") as running,
    ):
        assert await running.exit_code() == 2
        last = (await running.log())[-1]
    register = "/percolator.v1.ClusterService/Register"
    assert last == f"waiter: the cluster is another one [{register} at {address}]"


async def test_a_service_refuses_to_serve_while_its_master_belongs_to_another_cluster(
    tmp_path: Path,
) -> None:
    master = Master("shop")
    async with serving(master) as address, service(tmp_path, f"--masters={address}") as running:
        await running.ready()
        master.cluster_id = "robbers"
        await until(running, NOT_SERVING)
        with pytest.raises(WrongCluster) as caught:
            await running.call(1)
        assert (caught.value.expected, caught.value.found) == ("robbers", "shop")
        master.cluster_id = "shop"
        await until(running, SERVING)
        assert (await running.call(1)).first == 1
