"""A distant service that is busy, silent or gone: what the layer above the driver makes of it."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from percolator.bigtable.admission import CALLS_MAX, Admission
from percolator.errors import ExecutionUnknown, PercolatorError
from percolator.limits import Limits
from percolator.routing.cells import APPLIED, Answer, RowRequest
from percolator.rowstore.cells import RowStoreCells
from percolator.rowstore.intents import Intents
from percolator.rowstore.times import Times
from percolator.v1.tabletserver_pb2 import RowRead
from percolator.world import MachineClock, World, machine_random
from tests.doubles.bigtable_service import Refusal
from tests.unit.bigtable.connected import SECONDS, TABLE, Connected, connected
from tests.unit.rowstore.model_store import EPOCH_MILLISECONDS, at
from tests.unit.rowstore.test_calls import prewrites

pytestmark = pytest.mark.real_time


def cells_of(over: Connected, **limits: float) -> RowStoreCells:
    world = World(MachineClock(), over.network, machine_random())
    times, allowed = Times(EPOCH_MILLISECONDS), Limits(**limits)  # type: ignore[arg-type]  # seconds
    intents = Intents(over.store, times, world, allowed)
    return RowStoreCells(over.store, intents, times, world, allowed)


def busy(seconds: float, code: grpc.StatusCode = grpc.StatusCode.RESOURCE_EXHAUSTED) -> Refusal:
    packed = Packed()
    packed.Pack(RetryInfo(retry_delay=Duration(nanos=round(seconds * 1e9))))
    status = Status(code=code.value[0], details=[packed])
    return Refusal(code, "busy", status.SerializeToString())


async def prewritten(cells: RowStoreCells) -> Answer:
    (answer,) = await cells.mutate(prewrites(at(1), b"row", [b"a"]), time.monotonic() + SECONDS)
    return answer


async def test_what_is_refused_by_a_quota_is_made_after_the_pause_that_was_asked_for() -> None:
    async with connected() as over:
        over.service.refusals.extend([busy(0.2), busy(0.2)])
        began = time.monotonic()
        assert await prewritten(cells_of(over)) is APPLIED
        assert time.monotonic() - began >= 0.4
        assert over.names("CheckAndMutateRow") == 3


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.ABORTED],
    ids=lambda code: code.name,
)
async def test_a_change_that_may_have_been_made_is_not_sent_again_and_a_read_is(
    code: grpc.StatusCode,
) -> None:
    async with connected() as over:
        cells = cells_of(over)
        over.service.refusals.append(Refusal(code, "perhaps"))
        answer = await prewritten(cells)
        assert isinstance(answer, ExecutionUnknown)
        assert over.names("CheckAndMutateRow") == 1
        over.service.refusals.append(Refusal(code, "perhaps"))
        read = RowRequest(TABLE, RowRead(row=b"row", all_columns=True, timestamp=at(9)))
        await cells.read([read], time.monotonic() + SECONDS)
        assert over.names("ReadRows") == 2


async def test_a_read_is_repeated_after_the_pause_that_was_asked_for_with_another_code() -> None:
    async with connected() as over:
        over.service.refusals.append(busy(0.3, grpc.StatusCode.UNAVAILABLE))
        began = time.monotonic()
        read = RowRequest(TABLE, RowRead(row=b"row", all_columns=True, timestamp=at(9)))
        await cells_of(over).read([read], began + SECONDS)
        assert time.monotonic() - began >= 0.3
        assert over.names("ReadRows") == 2


async def test_a_table_that_is_still_being_created_is_waited_for() -> None:
    async with connected() as over:
        code, said = grpc.StatusCode.FAILED_PRECONDITION, "Table is still being created."
        over.service.refusals.extend([Refusal(code, said), Refusal(code, said)])
        assert await prewritten(cells_of(over)) is APPLIED
        assert over.names("CheckAndMutateRow") == 3
        over.service.refusals.extend([Refusal(code, said)] * 10_000)
        late = time.monotonic() + 0.5
        (answer,) = await cells_of(over).mutate(prewrites(at(2), b"row", [b"b"]), late)
        assert isinstance(answer, PercolatorError)
        assert "still being created" in answer.message


async def test_a_silent_node_is_given_up_in_time_and_gets_fewer_calls() -> None:
    async with connected() as over:
        over.service.seconds = 60.0
        cells = cells_of(over, attempt_seconds_max=0.2)
        assert isinstance(await prewritten(cells), PercolatorError)
        admission: Admission = over.store._admission
        assert admission.bound == CALLS_MAX // 2


async def test_no_more_calls_are_in_flight_than_the_store_is_allowed() -> None:
    async with connected() as over:
        over.store._admission = Admission(5)
        over.service.seconds = 0.02
        await asyncio.gather(*(over.put(b"row-%d" % number) for number in range(40)))
        assert over.service.in_flight_max == 5
