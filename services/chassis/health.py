"""The standard gRPC health service: per service name, and "" for the whole process.

Not the one that comes with grpcio-health-checking: there, a watcher that leaves takes the
notifications of all the others with it, and open watches keep a server from stopping.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc has no types
    """What is served here, and whether."""

    def __init__(self) -> None:
        self._names = {""}
        self._serving = False
        self._finished = False
        self._changed = asyncio.Event()

    def add(self, names: Iterable[str]) -> None:
        """Services that share the status of the process."""
        self._names.update(names)
        self._tell()

    def set_serving(self, serving: bool) -> None:
        """Changes the status of every service."""
        self._serving = serving
        self._tell()

    def finish(self) -> None:
        """Not serving for good; ends the watches."""
        self._finished = True
        self.set_serving(False)

    async def Check(  # noqa: N802  # gRPC's name
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> HealthCheckResponse:
        """The status now."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return HealthCheckResponse(status=self._status(request.service))

    async def Watch(  # noqa: N802
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[HealthCheckResponse]:
        """The status now, and each time that it changes."""
        told = None
        while True:
            # All three of one moment: what changes while the answer leaves is told next.
            changed, finished = self._changed, self._finished
            status = self._status(request.service)
            if status != told:
                told = status
                yield HealthCheckResponse(status=status)
            if finished:
                return
            await changed.wait()

    def handler(self) -> grpc.GenericRpcHandler:
        """Answers the calls. gRPC's own way of adding them is looked at before all other handlers,
        those included that pass calls on to other servers."""
        return grpc.method_handlers_generic_handler(
            health.SERVICE_NAME,
            {
                "Check": grpc.unary_unary_rpc_method_handler(
                    self.Check,
                    request_deserializer=HealthCheckRequest.FromString,
                    response_serializer=HealthCheckResponse.SerializeToString,
                ),
                "Watch": grpc.unary_stream_rpc_method_handler(
                    self.Watch,
                    request_deserializer=HealthCheckRequest.FromString,
                    response_serializer=HealthCheckResponse.SerializeToString,
                ),
            },
        )

    def _status(self, name: str) -> int:
        if name not in self._names:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        if self._serving and not self._finished:
            return int(health_pb2.HealthCheckResponse.SERVING)
        return int(health_pb2.HealthCheckResponse.NOT_SERVING)

    def _tell(self) -> None:
        # A new event for the next change: whoever waits for this one has it, however late it looks.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
