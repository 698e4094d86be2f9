"""Through gateways, too, a transaction never meets the successor of a table that it has used."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from percolator.errors import SchemaError
from percolator.v1 import gateway_pb2 as pb
from percolator.v1 import master_pb2

from .gateways import TABLE, Cluster, Gateway, gateways, write


async def _create_again(cluster: Cluster) -> None:
    await cluster.delete_table(master_pb2.DeleteTableRequest(name=TABLE))
    await cluster.create_table(master_pb2.CreateTableRequest(name=TABLE))


async def _scan(gateway: Gateway, start: int) -> object:
    return await gateway.scan(pb.ScanTableRequest(start_timestamp=start, table=TABLE))


async def _commit(gateway: Gateway, start: int) -> object:
    return await gateway.commit(start, [write(b"bob", b"2")])


CALLS: dict[str, Callable[[Gateway, int], Awaitable[object]]] = {
    "Get": lambda gateway, start: gateway.get(start, b"bob"),
    "ScanTable": _scan,
    "Commit": _commit,
    "Resolve": lambda gateway, start: gateway.resolve(start, b"bob"),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_gateway_that_has_never_heard_of_the_first_table_refuses_the_next(
    call: str,
) -> None:
    async with gateways() as (cluster, (one, other)):
        await one.commit(await one.begin(), [write(b"bob", b"1")])
        start = await one.begin()
        assert await one.get(start, b"bob") == [b"1"]
        await _create_again(cluster)
        with pytest.raises(SchemaError, match="'accounts' is younger than the snapshot"):
            await CALLS[call](other, start)
        assert await other.read(b"bob") == [None], "nothing was written into the new table"


@pytest.mark.parametrize("call", ["Get", "ScanTable"])
async def test_a_gateway_that_knows_the_first_table_says_that_it_was_dropped(call: str) -> None:
    async with gateways() as (cluster, (one, other)):
        start = await one.begin()
        assert await one.get(start, b"bob") == [None]
        await _create_again(cluster)
        with pytest.raises(SchemaError, match="'accounts' was dropped"):
            await CALLS[call](one, start)
        # By now it knows the next table.
        assert await one.read(b"bob") == [None]
        with pytest.raises(SchemaError, match="'accounts' is younger than the snapshot"):
            await _commit(one, start)
        assert await other.read(b"bob") == [None]


async def test_a_commit_that_is_sent_again_does_not_commit_into_the_next_table() -> None:
    async with gateways() as (cluster, (one, other)):
        start, writes = await one.begin(), [write(b"bob", b"1")]
        await one.commit(start, writes)
        await _create_again(cluster)
        with pytest.raises(SchemaError, match="younger"):
            await other.commit(start, writes)
        assert await other.read(b"bob") == [None]
