"""An order to collect names two bounds: one for history, one for what only transactions need."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import InvalidArgument
from percolator.formats.records import RecordKind, WriteRecord
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tabletserver.memory_store import COLUMN, COMMIT, START, Machine, put, target


def locked(commit: int) -> pb.MutationBatch:
    record = WriteRecord(commit - 1, RecordKind.LOCK_ONLY).encode()
    change = pb.Change(
        kind=pb.Change.KIND_PUT, space=cells_pb2.SPACE_WRITE, timestamp=commit, value=record
    )
    mutation = pb.Mutation(row=b"a", column=COLUMN, changes=[change])
    return pb.MutationBatch(target=target(1), mutations=[mutation])


async def test_lock_only_records_of_ended_transactions_go_although_history_is_kept() -> None:
    machine = Machine()
    await machine.open(1)
    for batch in (put(1, b"a"), locked(COMMIT + 10), locked(COMMIT + 20), locked(COMMIT + 30)):
        await machine.mutate(batch)
    order = pb.SafePoint(
        tablet_id=1, epoch=1, reads=START - 5, transactions=COMMIT + 25, collect_below=START - 5
    )
    request = pb.RaiseSafePointsRequest(safe_points=[order])
    (raised,) = (await machine.handler.raise_safe_points(request)).safe_points
    assert not raised.HasField("error"), raised.error
    await asyncio.gather(*machine.tasks)
    assert machine.collecting.cells == 2
    assert await machine.value(1, b"a") == b"v"


async def test_an_order_that_names_a_tablet_twice_is_refused_and_raises_nothing() -> None:
    """Each naming is a durable write, so that thousands of them would hold the server up."""
    machine = Machine()
    await machine.open(1)
    twice = [pb.SafePoint(tablet_id=1, epoch=1, reads=at) for at in (START, START + 1)]
    with pytest.raises(InvalidArgument) as caught:
        await machine.handler.raise_safe_points(pb.RaiseSafePointsRequest(safe_points=twice))
    assert caught.value.field == "safe_points[1].tablet_id"
    once = pb.RaiseSafePointsRequest(safe_points=[pb.SafePoint(tablet_id=1, epoch=1)])
    (still,) = (await machine.handler.raise_safe_points(once)).safe_points
    assert still.reads == 0
