"""Answers of masters to tokens that have rights to some tables only."""

from __future__ import annotations

import pytest

from percolator.codecs.indexes import IndexDefinition
from percolator.errors import PermissionDenied, SchemaError
from percolator.v1 import master_pb2 as pb
from percolator.wire import methods
from percolator.wire.table_indexes import entries_name
from percolator.wire.tokens import Right, Rights
from tests.restricted import token
from tests.unit.master.cluster_world import ModelCluster

READER = Rights(read=(Right("stock", b"eu/"),))
WRITER = Rights(write=(Right("stock", b"eu/"),))
OPERATOR = Rights(administer=(Right("stock"),))


async def created(world: ModelCluster, name: str, *indexes: pb.Index) -> int:
    table = (
        await world.call(
            methods.CREATE_TABLE, name=name, indexes=indexes, codecs=CODECS, knows_indexes=True
        )
    ).table
    return table.table_id


CODECS = pb.Codecs(key="text", columns=[pb.ColumnCodec(column=b"c", codec="text")])
INDEX = IndexDefinition("c", ((b"c", "text"),)).message()


@pytest.mark.parametrize("rights", [READER, WRITER, OPERATOR])
async def test_only_tables_to_which_it_has_a_right_are_shown(
    world: ModelCluster, rights: Rights
) -> None:
    stock, other = await created(world, "stock", INDEX), await created(world, "other", INDEX)
    with token(rights):
        shown = {one.name: one for one in (await world.call(methods.LIST_TABLES)).tables}
        entries = entries_name(stock, "c")
        assert set(shown) == {"stock", entries}
        for table_id in (stock, shown[entries].table_id):
            await world.call(methods.DESCRIBE_TABLE, table_id=table_id, knows_indexes=True)
            assert await world.locate(table_id)
        for hidden in ({"name": "other"}, {"table_id": other}, {"name": "not there"}):
            with pytest.raises(PermissionDenied, match="no right to table"):
                await world.call(methods.DESCRIBE_TABLE, knows_indexes=True, **hidden)
        with pytest.raises(PermissionDenied) as caught:
            await world.locate(other)
        assert "other" not in caught.value.message
        with pytest.raises(SchemaError):
            await world.locate(1_000)
        history = await world.call(methods.DESCRIBE_COLLECTION)
        assert {one.table for one in history.tables} <= {"stock", entries}


async def test_codecs_are_declared_by_those_who_write_the_table(world: ModelCluster) -> None:
    stock, other = await created(world, "stock"), await created(world, "other")
    more = pb.Codecs(columns=[pb.ColumnCodec(column=b"d", codec="text")])
    for rights, table_id in ((READER, stock), (OPERATOR, stock), (WRITER, other)):
        with token(rights), pytest.raises(PermissionDenied):
            await world.call(methods.DECLARE_CODECS, table_id=table_id, codecs=more)
    with token(WRITER):
        await world.call(methods.DECLARE_CODECS, table_id=stock, codecs=more)
