"""A row store that answers at once, for benchmarks of a client by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from google.protobuf.message import Message

from percolator.v1.bigtable_pb2 import (
    BigtableCheckAndMutateRowRequest,
    BigtableCheckAndMutateRowResponse,
)
from percolator.world import StreamCall, StreamMethod, UnaryCall, UnaryMethod

_NOT_FOUND = BigtableCheckAndMutateRowResponse()
_FOUND = BigtableCheckAndMutateRowResponse(predicate_matched=True)


class HollowNetwork:
    """Answers at once, without a call: nothing is found, and every change is made. What is left is
    the client's own cost."""

    def unary(self, address: str, method: UnaryMethod[Any, Any]) -> UnaryCall[Any, Any]:
        async def call(
            request: BigtableCheckAndMutateRowRequest, timeout: float
        ) -> BigtableCheckAndMutateRowResponse:
            await asyncio.sleep(0)
            return _FOUND if request.true_mutations else _NOT_FOUND

        return call

    def stream(self, address: str, method: StreamMethod[Any, Any]) -> StreamCall[Any, Any]:
        async def call(request: Message, timeout: float) -> AsyncGenerator[Any, None]:
            await asyncio.sleep(0)
            for nothing in list[Any]():
                yield nothing

        return call

    async def close(self) -> None:
        """Has nothing to close."""
