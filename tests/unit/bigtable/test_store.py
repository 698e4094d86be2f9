"""Calls in flight: bounded, in order, fewer when the store is busy, and none in a pause.

Streams are closed as soon as the rest of their answer is not wanted: until then, the service goes
on reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from percolator.bigtable.admin import create_table
from percolator.bigtable.store import Admission, BigtableStore
from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    Overloaded,
    PercolatorError,
    Retry,
    Unavailable,
)
from percolator.rowstore.layout import WRITES
from percolator.rowstore.port import TIME_UNIT, RowChange, Selection, SetCell
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import bigtable_pb2 as pb
from percolator.world import RequestT, ResponseT, StreamCall, StreamMethod
from tests.unit.rowstore.model_store import PLACE, SECONDS, TABLE


def _busy(seconds: float = 0.0) -> Overloaded:
    return Overloaded("busy", retry_after_seconds=seconds)


async def test_calls_beyond_the_bound_wait_and_are_let_through_in_order() -> None:
    admission = Admission(2)
    first, second = admission.enter_at_once(), admission.enter_at_once()
    assert [bool(one) for one in (first, second, admission.enter_at_once())] == [True, True, False]
    order: list[int] = []

    async def enter(number: int) -> int:
        ticket = await admission.enter(SECONDS)
        order.append(number)
        return ticket

    waiting = [asyncio.create_task(enter(number)) for number in range(3)]
    await asyncio.sleep(0)
    admission.leave(first)
    assert not admission.enter_at_once(), "whoever comes later passed those who wait"
    admission.leave(await waiting[0])
    admission.leave(second)
    await asyncio.gather(*waiting)
    assert (order, admission.in_flight) == ([0, 1, 2], 2)


@pytest.mark.parametrize("error", [_busy(), DeadlineExceeded("silent")])
async def test_refusals_and_time_outs_halve_the_bound_once_for_all_calls_in_flight(
    error: Exception,
) -> None:
    admission = Admission(64)
    tickets = [admission.enter_at_once() for _ in range(10)]
    for ticket in tickets:
        admission.leave(ticket, error)  # type: ignore[arg-type]  # of both kinds
    assert admission.bound == 32
    later = admission.enter_at_once()
    admission.leave(later, error)  # type: ignore[arg-type]
    assert admission.bound == 16


async def test_the_bound_never_falls_below_one_and_answers_raise_it_again() -> None:
    admission = Admission(8)
    for _ in range(20):
        admission.leave(admission.enter_at_once(), _busy())
    assert admission.bound == 1
    answers = 0
    while admission.bound < 8:
        admission.leave(admission.enter_at_once())
        answers += 1
    assert 25 < answers < 45, "it is raised by one for each round of as many answers"


async def test_a_new_call_does_not_exceed_the_bound_that_waiting_calls_keep() -> None:
    """The bound is halved and raised in parts of a call."""
    admission = Admission(3)
    admission.leave(admission.enter_at_once(), _busy())
    assert admission.bound == 1
    assert admission.enter_at_once()
    assert not admission.enter_at_once()


async def test_a_broken_connection_does_not_lower_the_bound() -> None:
    admission = Admission(8)
    admission.leave(admission.enter_at_once(), Unavailable("gone"))
    assert admission.bound == 8


def _unavailable(seconds: float) -> Unavailable:
    error = Unavailable("later")
    error.retry_after_seconds = seconds
    return error


@pytest.mark.parametrize("error", [_busy(3.0), _unavailable(3.0)], ids=["busy", "unavailable"])
async def test_nothing_is_sent_while_the_store_asks_for_a_pause(error: PercolatorError) -> None:
    loop = asyncio.get_running_loop()
    admission = Admission(8)
    began = loop.time()
    admission.leave(admission.enter_at_once(), error)
    assert not admission.enter_at_once()
    await admission.enter(SECONDS)
    assert loop.time() - began == pytest.approx(3.0)
    assert admission.enter_at_once()


@pytest.mark.parametrize("asked", [(1.0, 9.0, 3.0), (9.0, 1.0), (0.1, 9.0)])
async def test_of_several_pauses_the_one_that_ends_last_is_kept(asked: tuple[float, ...]) -> None:
    """Calls that were in flight together are refused one after the other."""
    loop = asyncio.get_running_loop()
    admission = Admission(8)
    tickets = [admission.enter_at_once() for _ in asked]
    for ticket, seconds in zip(tickets, asked, strict=True):
        admission.leave(ticket, _busy(seconds))
    began = loop.time()
    await admission.enter(SECONDS)
    assert loop.time() - began == pytest.approx(9.0)
    assert admission.enter_at_once()


async def test_a_call_that_waits_too_long_is_not_made() -> None:
    admission = Admission(1)
    held = admission.enter_at_once()
    with pytest.raises(Overloaded, match="1 calls are in flight") as caught:
        await admission.enter(0.5)
    assert caught.value.retry is Retry.SAFE
    admission.leave(held)
    assert admission.enter_at_once(), "the place of who gave up is free"


@pytest.mark.parametrize("admitted", [False, True], ids=["waiting", "admitted"])
async def test_a_call_that_is_cancelled_takes_no_place_and_lets_the_next_one_through(
    admitted: bool,
) -> None:
    admission = Admission(1)
    held = admission.enter_at_once()
    waiting = asyncio.create_task(admission.enter(SECONDS))
    behind = asyncio.create_task(admission.enter(SECONDS))
    await asyncio.sleep(0)
    if admitted:
        admission.leave(held)
        waiting.cancel()
    else:
        waiting.cancel()
        await asyncio.sleep(0)
        admission.leave(held)
    assert await behind
    assert admission.in_flight == 1


CELL = (SetCell(WRITES, b"column", TIME_UNIT, b"value"),)
ROWS = [RowChange(b"row %d" % number, CELL) for number in range(3)]


class Refusing(BigtableInMemory):
    """A model that writes no row."""

    async def mutate_rows(
        self, request: pb.BigtableMutateRowsRequest
    ) -> AsyncGenerator[pb.BigtableMutateRowsResponse, None]:
        for index, _ in enumerate(request.entries):
            answer = pb.BigtableMutateRowsResponse()
            answer.entries.add(index=index).status.code = 14
            yield answer


class Counting(InProcessNetwork):
    """A network that counts its open streams."""

    in_flight = 0

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        make = super().stream(address, method)

        async def call(request: RequestT, timeout: float) -> AsyncGenerator[ResponseT, None]:
            self.in_flight += 1
            try:
                async with aclosing(make(request, timeout)) as responses:
                    async for response in responses:
                        yield response
            finally:
                self.in_flight -= 1

        return call


async def test_a_scan_that_is_left_after_its_first_row_closes_its_stream() -> None:
    network = Counting({PLACE.address: BigtableInMemory()})
    await create_table(network, PLACE, TABLE, SECONDS)
    store = BigtableStore(network, PLACE)
    await store.write(TABLE, ROWS, SECONDS)
    scan = store.scan(
        TABLE,
        b"",
        b"",
        [Selection(WRITES)],
        rows_max=0,
        reverse=False,
        timeout_seconds=SECONDS,
    )
    async with aclosing(scan) as rows:
        assert (await anext(rows)).key == ROWS[0].key
        assert network.in_flight == 1
    assert network.in_flight == 0


async def test_a_write_that_fails_at_its_first_answer_closes_its_stream() -> None:
    network = Counting({PLACE.address: Refusing()})
    await create_table(network, PLACE, TABLE, SECONDS)
    with pytest.raises(ExecutionUnknown):
        await BigtableStore(network, PLACE).write(TABLE, ROWS, SECONDS)
    assert network.in_flight == 0
