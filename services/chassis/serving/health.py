"""The standard gRPC health service: per service name, and "" for the whole process.

This is not the one from grpcio-health-checking: there, when one watcher leaves, all the others
lose their notifications, and open watches keep a server from stopping.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_health.v1.health_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
    HealthListResponse,
)

from percolator.services.chassis.serving.open_calls import Context, OpenCalls


class Health:
    """The services of this process, and whether they are serving."""

    def __init__(self) -> None:
        self._names = {""}
        self._serving = False
        self._finished = False
        self._changed = asyncio.Event()

    def add(self, names: Iterable[str]) -> None:
        """Adds services that share the status of the process."""
        self._names.update(names)
        self._tell()

    def set_serving(self, serving: bool) -> None:
        """Changes the status of every service."""
        self._serving = serving
        self._tell()

    def finish(self) -> None:
        """Reports NOT_SERVING for good, and ends the watches."""
        self._finished = True
        self.set_serving(False)

    async def check(
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> HealthCheckResponse:
        """The current status."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return HealthCheckResponse(status=self._status(request.service))

    async def list(self, request: HealthListRequest, _: Context) -> HealthListResponse:
        """The current status of every service."""
        return HealthListResponse(
            statuses={name: HealthCheckResponse(status=self._status(name)) for name in self._names}
        )

    async def watch(
        self, requests: AsyncIterator[HealthCheckRequest], _: Context
    ) -> AsyncGenerator[HealthCheckResponse, None]:
        """The current status of one service, and the new one each time it changes."""
        async for request in requests:
            told = None
            while True:
                # Take all three at one moment: a change while the response leaves is sent next.
                changed, finished = self._changed, self._finished
                status = self._status(request.service)
                if status != told:
                    told = status
                    yield HealthCheckResponse(status=status)
                if finished:
                    return
                await changed.wait()

    def handler(self, calls: OpenCalls) -> grpc.GenericRpcHandler:
        """The handler for the calls. Handlers that are added in gRPC's own way come before all
        others, even before those that forward calls to other servers."""
        return grpc.method_handlers_generic_handler(
            health.SERVICE_NAME,
            {
                "Check": calls.unary(HealthCheckRequest, self.check),
                "List": calls.unary(HealthListRequest, self.list),
                "Watch": calls.stream(HealthCheckRequest, self.watch),
            },
        )

    def _status(self, name: str) -> int:
        if name not in self._names:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        if self._serving and not self._finished:
            return int(health_pb2.HealthCheckResponse.SERVING)
        return int(health_pb2.HealthCheckResponse.NOT_SERVING)

    def _tell(self) -> None:
        # A new event for the next change: those that wait for this one keep it, however late they
        # look.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
