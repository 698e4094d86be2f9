"""The part of a network that doubles of servers have in common."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from percolator.errors import DeadlineExceeded, UsageError
from percolator.testing.in_process_network import InProcessNetwork
from percolator.world import (
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
)


class UnaryNetwork(ABC):
    """Nothing is streamed, nothing is open, and one method answers all calls."""

    @abstractmethod
    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> Any:
        """The answer of the server at this address; raises what the call is to fail with."""

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        async def call(request: RequestT, timeout: float) -> ResponseT:
            response = await self.answer(address, method, request, timeout)
            assert isinstance(response, method.response)
            return response

        return call

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        raise UsageError("nothing is streamed here")

    async def close(self) -> None:  # noqa: B027 - most doubles have nothing to close
        """Nothing is open."""


# A network in one process whose calls end with their time-outs.


class UnaryTimeouts(InProcessNetwork):
    """Calls end with their time-outs, as real ones do."""

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        untimed = super().unary(address, method)

        async def call(request: RequestT, timeout: float) -> ResponseT:
            try:
                async with asyncio.timeout(timeout):
                    return await untimed(request, timeout)
            except TimeoutError:
                raise DeadlineExceeded("no answer in time", where=address) from None

        return call
