"""A stage for network tests: a server, a client, and a handler that logs what it did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from google.protobuf.descriptor import ServiceDescriptor

from percolator.v1 import oracle_pb2, tabletserver_pb2
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from percolator.v1.tabletserver_pb2 import ScanRequest, ScanResponse
from percolator.wire.methods import GET_TIMESTAMPS, SCAN
from tests.simulation.loop import SimulationLoop, run_simulation
from tests.simulation.network import Envelope, Fault, Wire
from tests.simulation.process import Incarnation, SimulatedProcess

SERVER, CLIENT = "server:1", "client:1"
T = TypeVar("T")


@dataclass(frozen=True)
class Served:
    descriptor: ServiceDescriptor
    handler: object


@dataclass
class Handler:
    """Answers a request with its count, and records its steps in `log`."""

    log: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """How long a response takes."""
    error: Exception | None = None
    responses: list[GetTimestampsResponse] = field(default_factory=list)
    requests: list[GetTimestampsRequest] = field(default_factory=list)

    async def get_timestamps(self, request: GetTimestampsRequest) -> GetTimestampsResponse:
        self.log.append(f"begin {request.count}")
        self.requests.append(request)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.log.append(f"cancelled {request.count}")
            raise
        if self.error is not None:
            raise self.error
        self.log.append(f"end {request.count}")
        self.responses.append(GetTimestampsResponse(first=7, count=request.count))
        return self.responses[-1]

    async def scan(self, request: ScanRequest) -> AsyncIterator[ScanResponse]:
        """`row_limit` pages, each with its number as its only row."""
        try:
            for number in range(request.row_limit):
                await asyncio.sleep(self.seconds)
                if self.error is not None and number == 2:
                    raise self.error
                self.log.append(f"page {number}")
                page = ScanResponse()
                page.found.rows.append(b"%d" % number)
                yield page
        finally:
            self.log.append("closed")


def services(handler: object) -> list[Served]:
    return [
        Served(oracle_pb2.DESCRIPTOR.services_by_name["OracleService"], handler),
        Served(tabletserver_pb2.DESCRIPTOR.services_by_name["TabletServerService"], handler),
    ]


class Stage:
    """A running server, and a client to run code in."""

    def __init__(self, loop: SimulationLoop, seed: int) -> None:
        self.random = Random(seed)
        self.wire = Wire(loop, self.random)
        self.loop = loop
        self.handler = Handler()
        self.server = SimulatedProcess(SERVER, self.wire, self.random)
        self.client = SimulatedProcess(CLIENT, self.wire, self.random)
        self.server.start(self._serve)

    async def _serve(self, incarnation: Incarnation) -> None:
        incarnation.listen(services(self.handler))
        await asyncio.Event().wait()

    def run(self, program: Callable[[Incarnation], Awaitable[T]]) -> asyncio.Future[T]:
        """Starts `program` as the client process; returns its result unless the process dies."""
        result: asyncio.Future[T] = self.loop.create_future()

        async def main(incarnation: Incarnation) -> None:
            try:
                result.set_result(await program(incarnation))
            except Exception as error:  # noqa: BLE001  # raised where the result is awaited
                result.set_exception(error)

        self.client.start(main)
        return result

    def call(self, count: int = 1, *, timeout: float = 10.0) -> asyncio.Future[int]:
        """Makes one call from a new client process, and returns the response."""
        return self.run(lambda incarnation: call(incarnation, count, timeout=timeout))

    def decide(self, *fates: Fault | None) -> None:
        """The fates of the next messages, in the order in which they are sent."""
        waiting = list(fates)

        def watch(envelope: Envelope) -> Fault | None:
            return waiting.pop(0) if waiting else None

        self.wire.watcher = watch


async def call(incarnation: Incarnation, count: int = 1, *, timeout: float = 10.0) -> int:
    network = incarnation.world.network
    answer = await network.unary(SERVER, GET_TIMESTAMPS)(GetTimestampsRequest(count=count), timeout)
    return answer.count


async def pages(
    incarnation: Incarnation, count: int, seen: list[int] | None = None, *, timeout: float = 10.0
) -> list[int]:
    """The numbers of the pages that arrived, also in `seen` when an error ends it."""
    found = [] if seen is None else seen
    scan = incarnation.world.network.stream(SERVER, SCAN)
    async for page in scan(ScanRequest(row_limit=count), timeout):
        found.append(int(page.found.rows[0]))  # what came before an error counts
    return found


def on_stage(play: Callable[[Stage], Coroutine[Any, Any, T]], *, seed: int = 1) -> T:
    """Runs a test on a new stage."""

    async def main(loop: SimulationLoop) -> T:
        stage = Stage(loop, seed)
        result = await play(stage)
        assert stage.wire.unexpected == []
        return result

    return run_simulation(main)
