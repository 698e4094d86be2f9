"""A network in one process whose calls end with their time-outs."""

from __future__ import annotations

import asyncio

from percolator.errors import DeadlineExceeded
from percolator.testing.in_process_network import InProcessNetwork
from percolator.world import RequestT, ResponseT, UnaryCall, UnaryMethod


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
