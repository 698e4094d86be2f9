"""The real network against servers that answer nonsense, and after it was closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from percolator.errors import ExecutionUnknown, Unavailable, UsageError
from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.v1.tabletserver_pb2 import ScanRequest
from percolator.wire.channels import GrpcNetwork
from percolator.wire.methods import GET_TIMESTAMPS, SCAN

pytestmark = pytest.mark.integration

GARBAGE = b"\xff\xff\xff"


class _Liar(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        if details.method == SCAN.path:
            return grpc.unary_stream_rpc_method_handler(_lie_in_a_stream)
        return grpc.unary_unary_rpc_method_handler(_lie)


async def _lie(raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return GARBAGE


async def _lie_in_a_stream(raw: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    yield GARBAGE


async def test_an_answer_that_cannot_be_decoded_is_an_error_and_no_answer() -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Liar(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    network = GrpcNetwork()
    try:
        with pytest.raises(ExecutionUnknown, match="not a message of its type"):
            await network.unary(address, GET_TIMESTAMPS)(GetTimestampsRequest(count=1), 10.0)
        with pytest.raises(ExecutionUnknown, match="not a message of its type"):
            async for _ in network.stream(address, SCAN)(ScanRequest(), 10.0):
                pass
    finally:
        await network.close()
        await server.stop(0)


async def test_calling_after_the_network_was_closed_is_a_typed_error() -> None:
    network = GrpcNetwork()
    unary = network.unary("127.0.0.1:1", GET_TIMESTAMPS)
    stream = network.stream("127.0.0.1:1", SCAN)
    await network.close()
    with pytest.raises(UsageError, match="closed"):
        await unary(GetTimestampsRequest(count=1), 10.0)
    with pytest.raises(UsageError, match="closed"):
        async for _ in stream(ScanRequest(), 10.0):
            pass


async def test_closing_the_network_ends_calls_in_progress_with_an_error_of_their_own() -> None:
    """Not with a cancellation: nobody asked these tasks to stop."""
    called = asyncio.Event()

    async def forever(raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
        called.set()
        await asyncio.Event().wait()
        return b""

    class Silent(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(forever)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Silent(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    network = GrpcNetwork()
    call = network.unary(address, GET_TIMESTAMPS)
    calling = [asyncio.ensure_future(call(GetTimestampsRequest(count=1), 60.0)) for _ in range(2)]
    await called.wait()
    calling[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling[0]
    await network.close()
    with pytest.raises(Unavailable, match="the channel was closed") as caught:
        await calling[1]
    assert address in caught.value.where
    await server.stop(0)
