"""A server that registers at an address where another kind of server is listed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from percolator.errors import InvalidArgument, NotReady
from percolator.services.chassis.server import Health
from percolator.services.master.registry import SERVICE_OF, KindCheck
from percolator.v1 import cluster_pb2 as pb
from percolator.v1.cluster_pb2 import Server, ServiceKind
from tests.unit.master.cluster_world import ModelCluster, ModelNetwork, cluster

HERE = "a:1"
ORACLE, WORKER = pb.SERVICE_KIND_ORACLE, pb.SERVICE_KIND_WORKER
TABLET_SERVER, LOCKS = pb.SERVICE_KIND_TABLET_SERVER, pb.SERVICE_KIND_LOCK_SERVICE
MASTER = pb.SERVICE_KIND_MASTER


def server(kind: ServiceKind, address: str = HERE) -> Server:
    return Server(kind=kind, server_id=f"id-{kind}", address=address, version="0.1.0")


class Process:
    """What listens at an address: its health service knows its services, as in a real process."""

    def __init__(self, kind: ServiceKind) -> None:
        self._health = Health()
        if kind in SERVICE_OF:
            self._health.add([SERVICE_OF[kind]])

    async def watch(self, request: HealthCheckRequest) -> AsyncIterator[HealthCheckResponse]:
        yield HealthCheckResponse(status=self._health._status(request.service))


def network(kind: ServiceKind | None) -> ModelNetwork:
    found = ModelNetwork()
    if kind is not None:
        found.handlers[HERE] = (Process(kind),)
    return found


@pytest.mark.parametrize(
    ("listed", "claimed"),
    [(TABLET_SERVER, WORKER), (TABLET_SERVER, ORACLE), (LOCKS, ORACLE), (WORKER, TABLET_SERVER)],
)
async def test_another_kind_is_refused_while_the_listed_server_is_there(
    listed: ServiceKind, claimed: ServiceKind
) -> None:
    kinds = KindCheck(network(listed))
    with pytest.raises(InvalidArgument, match=f"{HERE} answers as a ") as caught:
        await kinds.require(server(claimed), [server(listed)])
    assert caught.value.field == "server.kind"


@pytest.mark.parametrize(
    ("listed", "claimed"),
    [(TABLET_SERVER, WORKER), (TABLET_SERVER, ORACLE), (WORKER, TABLET_SERVER), (MASTER, LOCKS)],
)
async def test_another_kind_is_accepted_when_it_is_what_answers_there_now(
    listed: ServiceKind, claimed: ServiceKind
) -> None:
    """A process was started on the port of a stopped one of another kind, still listed."""
    kinds = KindCheck(network(claimed))
    await kinds.require(server(claimed), [server(listed)])
    assert kinds.questions == 1


@pytest.mark.parametrize("silent", [False, True])
async def test_while_the_address_does_not_answer_the_server_is_told_to_come_back(
    silent: bool,
) -> None:
    where = network(TABLET_SERVER if silent else None)
    where.silent.update([HERE] if silent else [])
    with pytest.raises(NotReady, match="does not say what it is"):
        await KindCheck(where).require(server(ORACLE), [server(TABLET_SERVER)])


def listed(world: ModelCluster) -> set[tuple[int, str]]:
    return {(one.kind, one.address) for one in world.masters[0].master.registry.servers()}


async def test_a_worker_cannot_take_the_address_of_a_tablet_server_from_it() -> None:
    async with cluster(HERE, "b:1") as world:
        await world.until(lambda: is_listed(world, TABLET_SERVER), 5)
        world.network.handlers[HERE] += (Process(TABLET_SERVER),)
        with pytest.raises(InvalidArgument, match="answers as a tablet_server, not as a worker"):
            await world.masters[0].master.registered(server(WORKER), 0)
        assert (WORKER, HERE) not in listed(world)
        assert (TABLET_SERVER, HERE) in listed(world)


async def test_a_server_that_has_another_kind_after_a_restart_replaces_its_former_entry() -> None:
    async with cluster(HERE, "b:1") as world:
        await world.until(lambda: is_listed(world, TABLET_SERVER), 5)
        world.kill_server(HERE)
        world.network.handlers[HERE] = (Process(LOCKS),)
        await world.masters[0].master.registered(server(LOCKS), 0)
        assert (LOCKS, HERE) in listed(world)
        assert (TABLET_SERVER, HERE) not in listed(world)


async def test_the_address_of_the_master_itself_is_not_given_away() -> None:
    async with cluster(HERE, "b:1") as world:
        address = world.masters[0].address
        world.network.handlers[address] += (Process(MASTER),)
        with pytest.raises(InvalidArgument, match="answers as a master"):
            await world.masters[0].master.registered(server(ORACLE, address), 0)


async def test_who_registers_as_before_is_asked_nothing() -> None:
    async with cluster(HERE, "b:1") as world:
        await world.until(lambda: is_listed(world, TABLET_SERVER), 5)
        assert world.masters[0].master._kinds.questions == 0


async def test_a_master_does_not_register() -> None:
    async with cluster(HERE, "b:1") as world:
        with pytest.raises(InvalidArgument, match="masters do not register") as caught:
            await world.masters[0].master.registered(server(MASTER, "c:1"), 0)
        assert caught.value.field == "server.kind"
        assert (MASTER, "c:1") not in listed(world)


async def is_listed(world: ModelCluster, kind: ServiceKind) -> bool:
    return (kind, HERE) in listed(world)
