"""The servers that a gateway forwards calls to: as masters list them, and a little longer."""

from __future__ import annotations

import asyncio
import random

import pytest

from percolator.errors import NotReady, UnknownServer
from percolator.services.gateway.servers import ClusterHandler, Servers
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import cluster_pb2
from percolator.v1.cluster_pb2 import DescribeRequest, DescribeResponse, Server
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock

MASTER = "master:7100"
TABLET_SERVER = Server(
    kind=cluster_pb2.SERVICE_KIND_TABLET_SERVER, server_id="t1", address="tablets:7103"
)


class Master:
    """Describes the cluster that a test has set up."""

    def __init__(self) -> None:
        self.cluster_id = "c"
        self.servers = [TABLET_SERVER]
        self.asked = 0

    async def describe(self, request: DescribeRequest) -> DescribeResponse:
        self.asked += 1
        await asyncio.sleep(0.01)
        return DescribeResponse(cluster_id=self.cluster_id, servers=self.servers, version="1.0.0")


def site() -> tuple[Master, InProcessNetwork, Servers]:
    clock, master = VirtualClock(asyncio.get_running_loop()), Master()
    network = InProcessNetwork({MASTER: master})
    return master, network, Servers(World(clock, network, random.Random(1)), [MASTER], "c")


async def test_a_server_is_known_by_its_id_and_by_its_address() -> None:
    _, _, servers = site()
    assert servers.known("t1") is None
    assert await servers.find("t1") == await servers.find("tablets:7103") == TABLET_SERVER
    with pytest.raises(UnknownServer, match="'t2' is in this cluster") as caught:
        await servers.find("t2")
    assert caught.value.server == "t2"


async def test_a_master_that_has_just_started_and_lists_no_servers_does_no_harm() -> None:
    master, _, servers = site()
    following = asyncio.ensure_future(servers.follow())
    await servers.refresh()
    master.servers = []
    await asyncio.sleep(20.0)
    assert await servers.find("t1") == TABLET_SERVER
    await asyncio.sleep(20.0)
    with pytest.raises(UnknownServer):
        await servers.find("t1")
    following.cancel()


async def test_known_servers_stay_known_while_no_master_answers() -> None:
    _, network, servers = site()
    following = asyncio.ensure_future(servers.follow())
    await servers.refresh()
    network.handlers.clear()
    await asyncio.sleep(3_600.0)
    assert await servers.find("t1") == TABLET_SERVER
    following.cancel()


async def test_a_server_that_is_unknown_because_no_master_answers_is_not_denied() -> None:
    _, network, servers = site()
    await servers.refresh()
    network.handlers.clear()
    await asyncio.sleep(1.0)
    for _ in range(2):  # the second time, no master is asked
        with pytest.raises(UnknownServer, match=r"'t2' is unknown here.*listening") as caught:
            await servers.find("t2")
        assert caught.value.server == "t2"


async def test_a_description_of_another_cluster_is_ignored() -> None:
    master, _, servers = site()
    await servers.refresh()
    master.cluster_id, master.servers = "other", [Server(server_id="x", address="x:1")]
    await servers.refresh()
    assert servers.known("x") is None
    assert servers.known("t1") == TABLET_SERVER


async def test_many_calls_for_unknown_servers_are_one_request_to_the_master() -> None:
    master, _, servers = site()
    asked = [servers.find(f"stranger-{number}") for number in range(100)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(answer) for answer in answers} == {UnknownServer}
    assert master.asked == 1


async def test_a_gateway_describes_the_cluster_with_another_route_and_registers_no_server() -> None:
    master, _, servers = site()
    handler = ClusterHandler(servers, "1.1.0")
    told = await handler.describe(DescribeRequest())
    assert (told.route, told.version) == (cluster_pb2.ROUTE_THROUGH, "1.1.0")
    assert list(told.servers) == master.servers
    with pytest.raises(Exception, match="a gateway does not register servers"):
        await handler.register(cluster_pb2.RegisterRequest())
    _, silent, without_masters = site()
    silent.handlers.clear()
    with pytest.raises(NotReady, match="no master"):
        await ClusterHandler(without_masters, "1.1.0").describe(DescribeRequest())
