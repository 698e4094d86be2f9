"""The next master knows who has left on purpose, as when a whole cluster is stopped and started."""

from __future__ import annotations

import asyncio

from percolator.services.master.cluster_map import ClusterMap
from percolator.services.master.leader import Leader
from percolator.services.master.master import Master
from percolator.v1 import cluster_pb2
from tests.unit.master.cluster_world import ModelCluster, cluster


def gateway(name: str) -> cluster_pb2.Server:
    return cluster_pb2.Server(
        kind=cluster_pb2.SERVICE_KIND_GATEWAY, server_id=name, address=f"{name}:1", version="0.1.0"
    )


async def missed_by_the_next_master(model: ModelCluster) -> list[str]:
    """The leading master dies at this moment, and another one takes its place."""
    model.kill_master(model.masters[0])
    registry = model.start_master().master.registry
    await asyncio.sleep(60)
    registry.forget_silent()
    return [one.server_id for one in registry.missed()]


async def test_who_has_left_on_purpose_is_not_missed_by_the_next_master() -> None:
    """Masters are stopped last, right after the others have said that they leave."""
    async with cluster() as model:
        leaves, dies = gateway("leaves"), gateway("dies")
        model.parts += [leaves, dies]
        await asyncio.sleep(5)
        model.parts.remove(leaves)
        model.parts.remove(dies)
        leaves.leaving = True
        await model.masters[0].master.registered(leaves, 0)
        assert await missed_by_the_next_master(model) == ["dies"]


async def test_who_has_come_back_and_then_dies_is_missed_by_the_next_master() -> None:
    async with cluster() as model:
        returns = gateway("returns")
        returns.leaving = True
        await model.masters[0].master.registered(returns, 0)
        returns.leaving = False
        model.parts.append(returns)
        await asyncio.sleep(5)
        model.parts.remove(returns)
        assert await missed_by_the_next_master(model) == ["returns"]


async def test_the_next_master_leads_even_if_it_may_list_fewer_servers_than_there_are() -> None:
    """Its `--servers-max` was lowered: each master that began to lead ended with an error."""
    async with cluster() as model:
        model.parts += [gateway("a"), gateway("b")]
        await asyncio.sleep(5)
        model.kill_master(model.masters[0])
        master = model.start_master(servers_max=2).master
        await model.until(lambda: _leads(master))
        await asyncio.sleep(5)
        assert len(master.registry.servers()) == 2


async def _leads(master: Master[ClusterMap, Leader]) -> bool:
    return master.leader is not None and not master.leader.is_over
