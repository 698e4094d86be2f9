"""While a server of an older release runs, no value may expire; once one may, none comes back."""

from __future__ import annotations

import pytest

from percolator.errors import InvalidArgument, WrongCluster
from percolator.services.chassis.cluster_store import EXPIRING_FORMAT, FIRST_FORMAT, read_identity
from percolator.v1 import cluster_pb2
from percolator.v1 import master_pb2 as pb
from percolator.v1.tabletserver_pb2 import ColumnTtl
from percolator.wire import methods
from tests.doubles.memory_files import MemoryFiles
from tests.unit.master.cluster_world import ROOT, ModelCluster, cluster
from tests.unit.master.tables_of_rows import create

_TTLS = [ColumnTtl(column=b"a", ttl_milliseconds=5)]
_WITH_TTL = pb.CreateTableRequest(name="brief", options=pb.TableOptions(ttls=_TTLS))


async def _format(world: ModelCluster) -> int:
    return (await read_identity(MemoryFiles(world.disk), ROOT)).format


def _old(kind: cluster_pb2.ServiceKind, address: str) -> cluster_pb2.Server:
    return cluster_pb2.Server(kind=kind, server_id=address, address=address, version="0.1.0")


async def _until_values_may_expire(world: ModelCluster) -> None:
    async def may_expire() -> bool:
        try:
            await world.ask(methods.SET_TTLS, pb.SetTtlsRequest(table="t", ttls=_TTLS))
        except InvalidArgument:
            world.masters[0].master.registry.forget_silent()
            return False
        return True

    await world.until(may_expire)


@pytest.mark.parametrize("kind", ["master", "oracle", "tablet server"])
async def test_no_value_may_expire_while_a_server_runs_that_would_ignore_it(kind: str) -> None:
    async with cluster("a:1") as world:
        await create(world)
        match kind:
            case "master":
                world.start_master(store_format=0)
            case "oracle":
                world.parts.append(_old(cluster_pb2.SERVICE_KIND_ORACLE, "old:1"))
            case _:
                world.start_server("b:1").store_format = 0

        async def is_listed() -> bool:
            registry = world.masters[0].master.registry
            return len([*registry.masters, *registry.servers()]) == 4

        await world.until(is_listed)
        why = rf"ttls: the {kind} at .* runs release .*: upgrade all masters, oracles and tablet"
        with pytest.raises(InvalidArgument, match=why):
            await world.ask(methods.SET_TTLS, pb.SetTtlsRequest(table="t", ttls=_TTLS))
        with pytest.raises(InvalidArgument, match=f"options.{why}"):
            await world.ask(methods.CREATE_TABLE, _WITH_TTL)
        assert not (
            await world.ask(methods.DESCRIBE_TABLE, pb.DescribeTableRequest(name="t"))
        ).table.options.ttls
        assert await _format(world) == FIRST_FORMAT
        match kind:
            case "master":
                world.kill_master(world.masters[1])
            case "oracle":
                world.parts.pop()
            case _:
                world.kill_server("b:1")
        await _until_values_may_expire(world)
        assert await _format(world) == EXPIRING_FORMAT == world.masters[0].master.store_format


async def test_a_lock_service_or_a_worker_of_an_older_release_is_in_nobody_s_way() -> None:
    async with cluster("a:1") as world:
        world.parts.append(_old(cluster_pb2.SERVICE_KIND_LOCK_SERVICE, "locks:1"))
        world.parts.append(_old(cluster_pb2.SERVICE_KIND_WORKER, "worker:1"))
        assert (await world.ask(methods.CREATE_TABLE, _WITH_TTL)).created


async def test_an_older_tablet_server_is_refused_once_values_may_expire_by_every_master() -> None:
    async with cluster("a:1") as world:
        old = _old(cluster_pb2.SERVICE_KIND_TABLET_SERVER, "old:1")
        await world.masters[0].master.registered(old, 0)
        del world.masters[0].master.registry._entries[old.kind, old.address]  # it falls silent
        assert (await world.ask(methods.CREATE_TABLE, _WITH_TTL)).created
        for _ in range(2):
            with pytest.raises(WrongCluster, match="values expire in this cluster, which release"):
                await world.masters[0].master.registered(old, 0)
            world.start_master()
            world.kill_master(world.masters[0])

            async def leads() -> bool:
                return world.masters[0].master.leader is not None

            await world.until(leads)


async def test_that_values_no_longer_expire_needs_no_server_of_this_release() -> None:
    async with cluster("a:1") as world:
        await create(world)
        world.start_server("b:1").store_format = 0
        never = pb.SetTtlsRequest(table="t", ttls=[ColumnTtl(column=b"a")])
        assert not (await world.ask(methods.SET_TTLS, never)).table.options.ttls
        assert await _format(world) == FIRST_FORMAT
