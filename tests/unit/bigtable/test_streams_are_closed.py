"""A call that streams ends when nobody wants the rest of its answer, and not when that is noticed:
until then, the service goes on reading."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from percolator.bigtable.store import BigtableStore
from percolator.bigtable.tables import create_table
from percolator.errors import ExecutionUnknown
from percolator.rowstore.layout import WRITES
from percolator.rowstore.port import TIME_UNIT, RowChange, Selection, SetCell
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import bigtable_pb2 as pb
from percolator.world import RequestT, ResponseT, StreamCall, StreamMethod
from tests.unit.rowstore.model_store import PLACE, SECONDS, TABLE

CELL = (SetCell(WRITES, b"column", TIME_UNIT, b"value"),)
ROWS = [RowChange(b"row %d" % number, CELL) for number in range(3)]


class Refusing(BigtableInMemory):
    """Writes no row."""

    async def mutate_rows(
        self, request: pb.BigtableMutateRowsRequest
    ) -> AsyncGenerator[pb.BigtableMutateRowsResponse, None]:
        for index, _ in enumerate(request.entries):
            answer = pb.BigtableMutateRowsResponse()
            answer.entries.add(index=index).status.code = 14
            yield answer


class Counting(InProcessNetwork):
    """Counts the streams that are open."""

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


async def test_a_scan_of_which_only_the_first_row_is_wanted() -> None:
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


async def test_a_write_that_has_failed_with_its_first_answer() -> None:
    network = Counting({PLACE.address: Refusing()})
    await create_table(network, PLACE, TABLE, SECONDS)
    with pytest.raises(ExecutionUnknown):
        await BigtableStore(network, PLACE).write(TABLE, ROWS, SECONDS)
    assert network.in_flight == 0
