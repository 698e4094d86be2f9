"""Messages above a limit, both ways, through real gRPC servers on this machine's loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from prometheus_client import CollectorRegistry

from percolator import errors
from percolator.errors import Retry
from percolator.services.chassis.gate import Gate, received_bytes_max
from percolator.services.chassis.metrics import RpcMetrics
from percolator.services.chassis.rpc import Exposed, RpcEdge
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import channels, methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.status import DETAILS_TRAILER, from_rpc_error
from percolator.world import MachineClock

pytestmark = pytest.mark.real_time

TABLETS = pb.DESCRIPTOR.services_by_name["TabletServerService"]
LIMIT = 4_096
SECONDS = 10.0


class Tablets:
    """Answers with as many bytes as the row of a request says; nothing else is ever called."""

    def __init__(self) -> None:
        self.executed = 0

    async def read(self, request: pb.ReadRequest) -> pb.ReadResponse:
        self.executed += 1
        size = int(request.batches[0].reads[0].row or b"0")
        found = pb.FoundCells(values=[bytes(size)])
        return pb.ReadResponse(batches=[pb.ReadBatchResult(found=found)])

    async def mutate(self, request: pb.MutateRequest) -> pb.MutateResponse:
        self.executed += 1
        size = int(request.batches[0].mutations[0].column or b"0")
        error = pb.MutationBatchResult()
        error.error.message = "x" * size
        return pb.MutateResponse(batches=[error])

    async def scan(self, request: pb.ScanRequest) -> AsyncIterator[pb.ScanResponse]:
        self.executed += 1
        yield pb.ScanResponse()
        size = int(request.range.start or b"0")
        yield pb.ScanResponse(found=pb.FoundCells(values=[bytes(size)]))

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.read


@dataclass
class Served:
    address: str
    network: GrpcNetwork
    tablets: Tablets


@asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """A server that accepts `LIMIT` bytes, and a client that accepts and sends eight times that."""
    most = 8 * LIMIT
    smaller = dict(channels._OPTIONS) | {
        "grpc.max_send_message_length": most,
        "grpc.max_receive_message_length": most,
    }
    monkeypatch.setattr(channels, "_OPTIONS", list(smaller.items()))
    tablets, registry, metrics = Tablets(), CollectorRegistry(), RpcMetrics()
    registry.register(metrics)
    edge = RpcEdge(Gate(100, LIMIT), metrics, MachineClock())
    edge.expose([Exposed(TABLETS, tablets)])
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", received_bytes_max(LIMIT)),
            ("grpc.max_send_message_length", -1),
        ]
    )
    server.add_generic_rpc_handlers((edge,))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    network = GrpcNetwork()
    try:
        yield Served(address, network, tablets)
    finally:
        await network.close()
        await server.stop(None)


def a_read(row: bytes, size: int = 0) -> pb.ReadRequest:
    read = pb.RowRead(row=row, columns=[bytes(size)])
    return pb.ReadRequest(batches=[pb.ReadBatch(reads=[read])])


@pytest.mark.parametrize("size", [LIMIT + 1, 2 * LIMIT - 100, 3 * LIMIT, 9 * LIMIT])
async def test_a_request_above_the_limit_is_an_invalid_argument_that_names_size_and_remedy(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by our own check, by the server's gRPC, or by the client's own, as it grows."""
    async with serving(monkeypatch) as served:
        read = served.network.unary(served.address, methods.READ)
        request = a_read(b"", size)
        with pytest.raises(errors.InvalidArgument) as caught:
            await read(request, SECONDS)
        error = caught.value
        assert (error.field, error.retry) == ("request", Retry.USELESS)
        assert f"has {request.ByteSize()} bytes, at most " in error.reason
        assert error.reason.endswith("; send less in one call")
        assert served.tablets.executed == 0
        await read(a_read(b""), SECONDS)  # the connection goes on


@pytest.mark.parametrize("size", [LIMIT + 1, 3 * LIMIT, 9 * LIMIT])
async def test_a_streaming_call_is_refused_alike(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(monkeypatch) as served:
        scan = served.network.stream(served.address, methods.SCAN)
        with pytest.raises(errors.InvalidArgument, match=r"request: has \d+ bytes, at most"):
            _ = [page async for page in scan(pb.ScanRequest(columns=[bytes(size)]), SECONDS)]
        assert served.tablets.executed == 0


async def test_an_answer_above_the_limit_is_an_invalid_argument_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(monkeypatch) as served:
        read = served.network.unary(served.address, methods.READ)
        with pytest.raises(errors.InvalidArgument) as caught:
            await read(a_read(b"%d" % (9 * LIMIT)), SECONDS)
        assert (caught.value.field, caught.value.retry) == ("response", Retry.USELESS)
        assert f"at most {8 * LIMIT} are accepted; ask for less" in caught.value.reason


async def test_a_streamed_answer_above_the_limit_ends_the_stream_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(monkeypatch) as served:
        scan = served.network.stream(served.address, methods.SCAN)
        request = pb.ScanRequest()
        request.range.start = b"%d" % (9 * LIMIT)
        pages = scan(request, SECONDS)
        assert await anext(pages) == pb.ScanResponse()
        with pytest.raises(errors.InvalidArgument, match="response: has"):
            await anext(pages)


async def test_of_a_change_whose_answer_is_too_large_only_its_sender_can_tell_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was executed: to say that nothing was written would be wrong."""
    async with serving(monkeypatch) as served:
        mutation = pb.Mutation(column=b"%d" % (9 * LIMIT))
        batch = pb.MutationBatch(mutations=[mutation])
        mutate = served.network.unary(served.address, methods.MUTATE)
        with pytest.raises(errors.ExecutionUnknown, match="executed, but its response has"):
            await mutate(pb.MutateRequest(batches=[batch]), SECONDS)
        assert served.tablets.executed == 1


async def test_a_client_in_another_language_gets_a_typed_detail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(monkeypatch) as served, grpc.aio.insecure_channel(served.address) as raw:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw.unary_unary(methods.READ.path)(bytes(LIMIT + 1), timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert DETAILS_TRAILER in dict(caught.value.trailing_metadata())
        understood = from_rpc_error(caught.value, methods.READ.path)
        assert f"at most {LIMIT} are accepted (request_bytes_max)" in str(understood)
