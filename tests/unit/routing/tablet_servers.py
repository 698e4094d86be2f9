"""Tablet servers that answer as a test tells them to, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from percolator.errors import (
    DeadlineExceeded,
    PercolatorError,
    Retry,
    TabletLocation,
    TabletMoved,
    Unavailable,
)
from percolator.limits import Limits
from percolator.routing.catalog import TabletMap
from percolator.routing.cells import CellMutation, RowRequest
from percolator.routing.router import Router
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import to_detail
from percolator.world import RequestT, ResponseT, StreamCall, StreamMethod, World
from tests.simulation.virtual_time import VirtualClock

Refusal = Callable[[pb.TabletTarget, list[bytes]], PercolatorError | None]


class Server:
    """Applies every mutation and finds every row, unless told otherwise."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds
        self.mutate_calls: list[pb.MutateRequest] = []
        self.read_calls: list[pb.ReadRequest] = []
        self.in_flight = 0
        self.in_flight_max = 0
        self.down = False
        self.answers_lost = False
        self.refuse_batch: Refusal = lambda target, rows: None
        """Returns the error of a whole tablet batch, given its rows."""
        self.pages: Callable[[pb.ScanRequest], list[pb.ScanResponse]] = lambda request: []
        self.refuses_scans_with: PercolatorError | None = None

    async def _serve(self) -> None:
        if self.down:
            raise Unavailable("connection refused")
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        await asyncio.sleep(self.seconds)
        self.in_flight -= 1
        if self.answers_lost:
            raise Unavailable("connection reset")

    async def mutate(self, request: pb.MutateRequest) -> pb.MutateResponse:
        self.mutate_calls.append(request)
        await self._serve()
        response = pb.MutateResponse()
        for batch in request.batches:
            result = response.batches.add()
            error = self.refuse_batch(batch.target, [m.row for m in batch.mutations])
            if error is not None:
                result.error.CopyFrom(to_detail(error))
            else:
                result.mutations = len(batch.mutations)
        return response

    async def read(self, request: pb.ReadRequest) -> pb.ReadResponse:
        self.read_calls.append(request)
        await self._serve()
        response = pb.ReadResponse()
        for batch in request.batches:
            result = response.batches.add()
            reads = [(read.row, read.timestamp) for read in batch.reads]
            reads += zip(batch.cells.rows, batch.cells.timestamps, strict=True)
            error = self.refuse_batch(batch.target, [row for row, _ in reads])
            if error is not None:
                result.error.CopyFrom(to_detail(error))
                continue
            result.reads = len(reads)
            for index, (row, timestamp) in enumerate(reads):
                result.found.reads.append(index)
                result.found.columns.append(b"c")
                result.found.commit_timestamps.append(timestamp)
                result.found.values.append(b"value of " + row)
        return response

    async def scan(self, request: pb.ScanRequest) -> AsyncIterator[pb.ScanResponse]:
        await self._serve()
        if self.refuses_scans_with is not None:
            yield pb.ScanResponse(error=to_detail(self.refuses_scans_with))
            return
        for page in self.pages(request):
            yield page

    def rows_mutated(self) -> list[bytes]:
        return [m.row for c in self.mutate_calls for b in c.batches for m in b.mutations]


class TimedNetwork(InProcessNetwork):
    """Streams end with their timeout, as real ones do."""

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        untimed = super().stream(address, method)

        async def call(request: RequestT, timeout: float) -> AsyncGenerator[ResponseT, None]:
            try:
                async with asyncio.timeout(timeout):
                    async for response in untimed(request, timeout):
                        yield response
            except TimeoutError:
                raise DeadlineExceeded("no answer in time", where=address) from None

        return call


class Cluster:
    """Some servers, a map of tablets, and a router over them."""

    def __init__(self, servers: dict[str, Server], limits: Limits | None = None) -> None:
        self.servers = servers
        self.now_at: list[TabletLocation] = []
        """Answer of a master."""
        self.searches = 0
        self.search_seconds = 0.0
        self.search_error: Exception | None = None
        loop = asyncio.get_running_loop()
        self.clock = VirtualClock(loop)
        handlers: dict[str, object] = dict(servers)
        self.world = World(self.clock, TimedNetwork(handlers), random.Random(1))
        self.tablets = TabletMap(self._find)
        self.router = Router(self.world, self.tablets, limits or Limits())

    async def _find(self, table_id: int, row: bytes) -> list[TabletLocation]:
        self.searches += 1
        if self.search_seconds:
            await asyncio.sleep(self.search_seconds)
        if self.search_error is not None:
            raise self.search_error
        return [replace(one) for one in self.now_at]  # each answer is a message of its own

    def deadline(self, seconds: float = 10.0) -> float:
        return self.clock.monotonic_seconds() + seconds


def tablet(
    address: str, start: bytes = b"", end: bytes = b"", *, tablet_id: int = 1, epoch: int = 1
) -> TabletLocation:
    return TabletLocation(1, tablet_id, epoch, start, end, address)


def step(row: bytes, *, schema_version: int = 0, size: int = 0) -> CellMutation:
    mutation = pb.Mutation(row=row, column=b"c")
    if size:
        mutation.changes.add(value=bytes(size))
    return CellMutation(1, mutation, schema_version)


def row_request(row: bytes) -> RowRequest:
    return RowRequest(1, pb.RowRead(row=row, columns=[b"c"], timestamp=7))


def moved(*locations: TabletLocation) -> TabletMoved:
    return TabletMoved("not here", tablet_id=1, epoch=1, locations=locations)


def failure(answer: object) -> tuple[type[PercolatorError], Retry]:
    """The kind of error that an answer is, and whether the call may be repeated."""
    assert isinstance(answer, PercolatorError)
    return type(answer), answer.retry


async def cancelled_while_it_waits(request: Awaitable[object], seconds: float = 0.5) -> None:
    waiting = asyncio.ensure_future(request)
    if seconds:
        await asyncio.sleep(seconds)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
