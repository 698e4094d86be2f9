"""The real network with servers that answer nonsense, and after it has been closed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from percolator.errors import ExecutionUnknown, PercolatorError, Unavailable, UsageError
from percolator.services.chassis.server import ServerTls
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.v1.tabletserver_pb2 import ScanRequest
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.credentials import PLAIN_TEXT, Credentials
from percolator.wire.methods import GET_TIMESTAMPS, SCAN
from percolator.wire.tls import Tls, TlsMaterial
from tests.unit.wire.certificates import Certificates, made

__all__ = ["made"]

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


async def test_a_response_that_cannot_be_decoded_is_an_error() -> None:
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


async def test_a_call_on_a_closed_network_raises_a_typed_error() -> None:
    network = GrpcNetwork()
    unary = network.unary("127.0.0.1:1", GET_TIMESTAMPS)
    stream = network.stream("127.0.0.1:1", SCAN)
    await network.close()
    with pytest.raises(UsageError, match="closed"):
        await unary(GetTimestampsRequest(count=1), 10.0)
    with pytest.raises(UsageError, match="closed"):
        async for _ in stream(ScanRequest(), 10.0):
            pass


def untried(files: Tls) -> Credentials:
    """Credentials from these files, as used by a program that does not validate them."""
    ca, certificate, key = (
        Path(name).read_bytes() for name in (files.ca, files.certificate, files.key)
    )
    return Credentials(TlsMaterial(files, ca, certificate, key))


async def met(address: str, credentials: Credentials) -> PercolatorError:
    network = GrpcNetwork(credentials)
    try:
        with pytest.raises(PercolatorError) as caught:
            await network.unary(address, GET_TIMESTAMPS)(GetTimestampsRequest(count=1), 10.0)
    finally:
        await network.close()
    return caught.value


async def test_a_server_answers_only_good_certificates_and_a_client_only_good_servers(
    certificates: Certificates,
) -> None:
    server, plain = grpc.aio.server(), grpc.aio.server()
    for one in (server, plain):
        one.add_generic_rpc_handlers((_Liar(),))
    secure = ServerTls(certificates.cluster).grpc_credentials()
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', secure)}"
    in_plain_text = f"127.0.0.1:{plain.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await plain.start()
    expired, _, _ = certificates.bad["expired"]
    try:
        # The call got as far as the invalid response.
        assert isinstance(await met(address, untried(certificates.client)), ExecutionUnknown)
        assert isinstance(await met(address, untried(expired)), Unavailable)
        assert isinstance(await met(address, untried(certificates.foreign)), Unavailable)
        assert isinstance(await met(address, PLAIN_TEXT), Unavailable)
        assert isinstance(await met(in_plain_text, untried(certificates.client)), Unavailable)
    finally:
        await server.stop(0)
        await plain.stop(0)


# How a call over a real channel ends, depending on what cancelled it.


@asynccontextmanager
async def silent_server() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Accepts calls and never answers them."""
    asked = asyncio.Event()

    async def never(request: bytes, context: object) -> bytes:
        asked.set()
        await asyncio.get_running_loop().create_future()
        return request

    async def never_any(request: bytes, context: object) -> AsyncIterator[bytes]:
        yield await never(request, context)

    class Silent(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            if details.method == methods.SCAN.path:
                return grpc.unary_stream_rpc_method_handler(never_any)
            return grpc.unary_unary_rpc_method_handler(never)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Silent(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", asked
    finally:
        await server.stop(None)


async def _unary(network: GrpcNetwork, address: str) -> None:
    await network.unary(address, methods.READ)(pb.ReadRequest(), 60.0)


async def _stream(network: GrpcNetwork, address: str) -> None:
    request = pb.ScanRequest(range=cells_pb2.RowRange())
    async for _ in network.stream(address, methods.SCAN)(request, 60.0):
        pass


CALLS = {"unary": _unary, "stream": _stream}


@asynccontextmanager
async def endless_server() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Answers scans without an end. The event is set once one of them has ended."""
    ended = asyncio.Event()

    async def endless(request: bytes, context: object) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b""
        finally:
            ended.set()

    class Endless(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_stream_rpc_method_handler(endless)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Endless(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", ended
    finally:
        await server.stop(None)


def test_a_stream_that_is_left_ends_at_once_without_the_garbage_collector() -> None:
    """A server would go on reading for it, and what has arrived would fill the memory."""

    async def leave() -> None:
        async with endless_server() as (address, ended):
            network = GrpcNetwork()
            pages = network.stream(address, methods.SCAN)(pb.ScanRequest(), 60.0)
            await anext(pages)
            await pages.aclose()
            await asyncio.wait_for(ended.wait(), 20.0)
            left = [one for one in gc.get_objects() if isinstance(one, grpc.aio.UnaryStreamCall)]
            assert not left
            await network.close()

    gc.collect()
    gc.disable()
    try:
        asyncio.run(leave())
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_whose_channel_is_closed_raises_an_error_not_a_cancellation(kind: str) -> None:
    """The task that awaits the call was not cancelled, and must not end as if it had been."""

    async def close_meanwhile() -> None:
        async with silent_server() as (address, asked):
            network = GrpcNetwork()
            call = asyncio.create_task(CALLS[kind](network, address))
            await asked.wait()
            await network.close()
            with pytest.raises(Unavailable, match="channel was closed") as caught:
                await call
            assert address in caught.value.where

    asyncio.run(close_meanwhile())


@pytest.mark.parametrize("kind", CALLS)
def test_a_task_cancelled_while_the_channel_closes_stays_cancelled(kind: str) -> None:
    async def cancel_and_close() -> None:
        async with silent_server() as (address, asked):
            network = GrpcNetwork()
            call = asyncio.create_task(CALLS[kind](network, address))
            await asked.wait()
            call.cancel()
            await network.close()
            await asyncio.wait([call])
            assert call.cancelled()

    asyncio.run(cancel_and_close())
