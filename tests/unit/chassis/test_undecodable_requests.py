"""Health and reflection refuse what is not a message, and nothing is logged about it."""

from __future__ import annotations

import logging

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from percolator.errors import InvalidArgument
from percolator.services.chassis.gate import Gate
from percolator.services.chassis.rpc import OpenCalls
from percolator.services.chassis.server import Health, reflection_handler
from percolator.wire.status import from_rpc_error

pytestmark = pytest.mark.real_time

SECONDS = 10.0
NO_MESSAGE = b"\xff\xff\xff"
INFO = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def open_calls() -> OpenCalls:
    return OpenCalls(Gate(10, 65_536).open)


class Reflection(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return (
            reflection_handler(["percolator.v1.OracleService"], open_calls())
            if details.method == INFO
            else None
        )


async def call(channel: grpc.aio.Channel, method: str, raw: bytes) -> bytes:
    if method == INFO:
        stream = channel.stream_stream(method)(timeout=SECONDS)
        await stream.write(raw)
        return bytes(await stream.read())
    if method.endswith("Watch"):
        return bytes(await channel.unary_stream(method)(raw, timeout=SECONDS).read())
    return bytes(await channel.unary_unary(method)(raw, timeout=SECONDS))


@pytest.mark.parametrize(
    "method", ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", INFO]
)
async def test_what_is_no_message_is_refused_without_a_traceback_in_the_log(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone who reaches the port could fill the disk with tracebacks."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Health().handler(open_calls()), Reflection()))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, method, NO_MESSAGE)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            error = from_rpc_error(caught.value, method)
            assert isinstance(error, InvalidArgument)
            assert error.field == "request"
            valid = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
            await call(channel, method, valid if method == INFO else b"")
    finally:
        await server.stop(None)
    errors = [one for one in caplog.records if one.levelno >= logging.ERROR]
    # gRPC may still wake the loop of an earlier test, which is closed: asyncio logs that.
    assert [one for one in errors if one.name != "asyncio"] == []
