"""A network whose other ends are objects in this process: nothing is serialised, nothing waits."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from percolator.errors import Unavailable
from percolator.wire.methods import method_name
from percolator.world import (
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
)


class InProcessNetwork:
    """Calls handlers: objects with one coroutine method (or asynchronous generator) per RPC."""

    def __init__(self, handlers: dict[str, object] | None = None) -> None:
        self.handlers = handlers or {}
        """Handlers by address."""

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        async def call(request: RequestT, timeout: float) -> ResponseT:
            response: ResponseT = await self._find(address, method.path)(request)
            return response

        return call

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        async def call(request: RequestT, timeout: float) -> AsyncGenerator[ResponseT, None]:
            async with aclosing(self._find(address, method.path)(request)) as responses:
                async for response in responses:
                    yield response

        return call

    def _find(self, address: str, path: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
        handler = self.handlers.get(address)
        if handler is None:
            raise Unavailable("nothing is listening", where=f"{path} at {address}")
        return getattr(handler, method_name(path.rpartition("/")[2]))

    async def close(self) -> None:
        """Does nothing: no connection is open."""
