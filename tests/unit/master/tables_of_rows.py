"""Tables with rows in several tablets, for the tests of who serves them."""

from __future__ import annotations

from collections import Counter

from percolator.v1 import master_pb2 as pb
from percolator.wire import methods
from tests.unit.master.cluster_world import ModelCluster

SPLITS = [b"c", b"f", b"i", b"l", b"o"]
LEASE_SECONDS = 3.0


async def create(world: ModelCluster, name: str = "t", splits: list[bytes] = SPLITS) -> int:
    request = pb.CreateTableRequest(name=name, splits=splits)
    return (await world.ask(methods.CREATE_TABLE, request)).table.table_id


async def addresses(world: ModelCluster, table: int) -> Counter[str]:
    return Counter(one.address for one in await world.locate(table))


async def fill(world: ModelCluster, table: int) -> None:
    for letter in b"abcdefghijklmnopq":
        await world.write(table, bytes([letter]), b"value")


async def is_complete(world: ModelCluster, table: int) -> bool:
    rows = [bytes([letter]) for letter in b"abcdefghijklmnopq"]
    return all([await world.read(table, row) == b"value" for row in rows])


async def served(at: ModelCluster, table: int) -> bool:
    for one in await at.locate(table):
        await at.read(table, one.range.start)
    return True
