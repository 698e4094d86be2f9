"""Real processes tell the master which kind they are, when two claim one address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from percolator.errors import InvalidArgument
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess
from percolator.v1 import cluster_pb2 as pb
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork

pytestmark = pytest.mark.integration

SECONDS = 10.0


@pytest.fixture(name="cluster")
def _cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "cluster", tablet_servers=1, gateways=1) as started:
        yield started


async def kinds_at(cluster: LocalCluster, network: GrpcNetwork, address: str) -> list[int]:
    describe = network.unary(cluster.address, methods.DESCRIBE)
    found = await describe(pb.DescribeRequest(), SECONDS)
    return [one.kind for one in found.servers if one.address == address]


async def test_no_kind_is_listed_at_the_address_of_another_that_answers_there(
    cluster: LocalCluster,
) -> None:
    network = GrpcNetwork()
    try:
        describe = network.unary(cluster.address, methods.DESCRIBE)
        servers = (await describe(pb.DescribeRequest(), SECONDS)).servers
        assert len(servers) == 5
        register = network.unary(cluster.address, methods.REGISTER)
        for one in servers:
            for name in pb.ServiceKind.keys():  # noqa: SIM118 (it is no dict)
                if pb.ServiceKind.Value(name) in (one.kind, pb.SERVICE_KIND_UNSPECIFIED):
                    continue
                false = pb.Server()
                false.CopyFrom(one)
                false.MergeFrom(pb.Server(kind=name, server_id="another"))
                is_master = pb.ServiceKind.Value(name) == pb.SERVICE_KIND_MASTER
                why = "masters do not register" if is_master else ".* answers as a "
                with pytest.raises(InvalidArgument, match=rf"server\.kind: {why}"):
                    await register(pb.RegisterRequest(server=false), SECONDS)
            assert await kinds_at(cluster, network, one.address) == [one.kind]
    finally:
        await network.close()


async def test_a_port_may_be_given_to_another_kind_of_server_at_once(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    gateway = cluster.processes["gateway"]
    address = gateway.address
    gateway.kill()
    successor = ServiceProcess(
        "successor",
        "lockservice",
        ["--masters", cluster.address],
        logs=tmp_path,
        run=tmp_path,
    )
    successor.listen_on(address)
    network = GrpcNetwork()
    try:
        successor.start()
        successor.wait_ready(SECONDS)
        assert await kinds_at(cluster, network, address) == [pb.SERVICE_KIND_LOCK_SERVICE]
    finally:
        await network.close()
        successor.ask_to_stop()
        successor.wait_stopped()
