"""The network as one simulated process sees it: a `percolator.world.Network`.

Requests and responses travel as bytes, and errors as the same detail messages as on the real wire.
So two processes never share an object, and what cannot be serialised fails here too.

A handler is an object with one coroutine method per RPC (an asynchronous generator if it streams).
It runs as a task of its own process: it stops while that process is paused, dies with it, and is
cancelled when its caller gives up, as with gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from percolator.errors import InvalidArgument, Unavailable
from percolator.testing.simulator.simulated_call import CallingProcess, UnaryInFlight
from percolator.testing.simulator.simulated_life import Life
from percolator.testing.simulator.simulated_stream import StreamInFlight
from percolator.testing.simulator.simulated_wire import Wire
from percolator.world import (
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
)


class SimulatedNetwork:
    """The calls of one process. `address` is the origin of its messages."""

    def __init__(self, wire: Wire, life: Life, address: str) -> None:
        self._wire = wire
        self._life = life
        self._address = address
        self._closed = False
        self._waiting: dict[UnaryInFlight[Any, Any], None] = {}

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        _check(address)
        caller = CallingProcess(self._wire, self._life, self._address)
        waiting, decode = self._waiting, method.response.FromString

        async def call(request: RequestT, timeout: float) -> ResponseT:
            if self._closed or not caller.life.alive:
                await self._refuse(address)
            in_flight = UnaryInFlight(caller, method, address, request.SerializeToString(), timeout)
            waiting[in_flight] = None
            try:
                return decode(await in_flight.answer)
            except asyncio.CancelledError:
                in_flight.give_up()
                raise
            finally:
                del waiting[in_flight]

        return call

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        _check(address)
        caller = CallingProcess(self._wire, self._life, self._address)
        decode = method.response.FromString

        async def call(request: RequestT, timeout: float) -> AsyncGenerator[ResponseT, None]:
            if self._closed or not caller.life.alive:
                await self._refuse(address)
            in_flight = StreamInFlight(
                caller, method, address, request.SerializeToString(), timeout
            )
            try:
                while (payload := await in_flight.next()) is not None:
                    yield decode(payload)
            finally:
                in_flight.give_up()

        return call

    async def close(self) -> None:
        self._closed = True
        for in_flight in list(self._waiting):
            in_flight.break_off("the channel was closed")

    async def _refuse(self, address: str) -> None:
        if not self._life.alive:
            # A dead process sends nothing; this is cancelled by the end of the process.
            await self._wire.loop.create_future()
        raise Unavailable("the channel was closed", where=address)


def _check(address: str) -> None:
    if not address:
        raise InvalidArgument("address", "is empty; expected host:port")
