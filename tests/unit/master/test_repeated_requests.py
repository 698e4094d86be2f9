"""A request to create or delete a table whose answer was lost, repeated at another master."""

from __future__ import annotations

import pytest

from percolator.errors import InvalidArgument, SchemaError
from percolator.services.master import cluster_map
from percolator.services.master.cluster_map import DELETIONS_KEPT, Catalogue
from percolator.services.master.table_changes import REQUEST_ID_BYTES_MAX
from percolator.v1 import master_pb2 as pb
from percolator.wire import methods
from tests.unit.master.cluster_world import ModelCluster, cluster


async def create(world: ModelCluster, request_id: bytes) -> pb.CreateTableResponse:
    request = pb.CreateTableRequest(name="t", splits=[b"m"], request_id=request_id)
    return await world.ask(methods.CREATE_TABLE, request, 30.0)


async def delete(world: ModelCluster, request_id: bytes) -> pb.DeleteTableResponse:
    request = pb.DeleteTableRequest(name="t", request_id=request_id)
    return await world.ask(methods.DELETE_TABLE, request, 30.0)


async def described(world: ModelCluster) -> int:
    request = pb.DescribeTableRequest(name="t")
    return (await world.ask(methods.DESCRIBE_TABLE, request)).table.table_id


def fail_over(world: ModelCluster) -> None:
    world.kill_master(world.masters[0])
    world.start_master()


async def test_a_creation_repeated_at_the_next_master_finds_its_own_table() -> None:
    async with cluster("a:1") as world:
        first = await create(world, b"one")
        fail_over(world)
        again = await create(world, b"one")
        assert first.created
        assert again.created
        assert again.table.table_id == first.table.table_id
        for other in (b"two", b""):
            with pytest.raises(InvalidArgument, match="exists"):
                await create(world, other)


async def test_a_table_without_an_id_of_its_creation_is_nobodys_own() -> None:
    async with cluster("a:1") as world:
        await create(world, b"")
        with pytest.raises(InvalidArgument, match="exists"):
            await create(world, b"")


async def test_a_deletion_repeated_at_the_next_master_spares_the_next_table_of_that_name() -> None:
    async with cluster("a:1") as world:
        await create(world, b"one")
        assert (await delete(world, b"two")).deleted
        fail_over(world)
        assert (await delete(world, b"two")).deleted
        later = await create(world, b"three")
        fail_over(world)
        assert (await delete(world, b"two")).deleted
        assert await described(world) == later.table.table_id
        assert (await delete(world, b"four")).deleted
        for other in (b"five", b""):
            with pytest.raises(SchemaError):
                await delete(world, other)


async def test_ids_of_requests_are_short() -> None:
    async with cluster("a:1") as world:
        for ask in (create, delete):
            with pytest.raises(InvalidArgument, match="request_id"):
                await ask(world, bytes(REQUEST_ID_BYTES_MAX + 1))
        with pytest.raises(SchemaError):
            await described(world)


def test_a_catalogue_remembers_the_last_deletions_only() -> None:
    catalogue = Catalogue()
    ids = [b"%d" % number for number in range(DELETIONS_KEPT + 5)]
    for one in (*ids, b""):
        catalogue = catalogue.with_deletion(one)
    stored = cluster_map.decode_catalogue(cluster_map.encode_catalogue(catalogue))
    assert stored.deletions == tuple(ids[5:])
