"""The edge between handlers and the wire, through a real gRPC server in this process.

Health and reflection refuse what is not a message, and nothing is logged about it.

Messages above a limit, both ways, through real gRPC servers on this machine's loopback.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import structlog
from grpc_reflection.v1alpha import reflection_pb2
from prometheus_client import CollectorRegistry

from percolator import errors
from percolator.errors import ExecutionUnknown, InvalidArgument, Retry
from percolator.services.chassis.rpc import (
    Exposed,
    Gate,
    RpcEdge,
    RpcMetrics,
    received_bytes_max,
    remaining_seconds,
)
from percolator.services.chassis.server import Health, OpenCalls, reflection_handler
from percolator.v1 import lockservice_pb2, oracle_pb2, tabletserver_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.oracle_pb2 import (
    AdvanceEpochRequest,
    AdvanceEpochResponse,
    CheckTimestampsRequest,
    CheckTimestampsResponse,
    GetTimestampsRequest,
    GetTimestampsResponse,
)
from percolator.v1.tabletserver_pb2 import ScanRequest, ScanResponse
from percolator.wire import channels, methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.methods import GET_TIMESTAMPS
from percolator.wire.status import DETAILS_TRAILER, from_detail, from_rpc_error, to_detail
from percolator.world import MachineClock, UnaryMethod
from tests.unit.chassis.framed_edge import echo, framed

pytestmark = pytest.mark.real_time

ORACLE = oracle_pb2.DESCRIPTOR.services_by_name["OracleService"]
TABLETS = tabletserver_pb2.DESCRIPTOR.services_by_name["TabletServerService"]
LOCKS = lockservice_pb2.DESCRIPTOR.services_by_name["LockService"]
SECONDS = 10.0
"""How long a call may be stuck before the test fails."""


class OracleHandler:
    """Answers as each test requires."""

    def __init__(self, answer: Callable[[GetTimestampsRequest], Any]) -> None:
        self._answer = answer

    async def get_timestamps(self, request: GetTimestampsRequest) -> GetTimestampsResponse:
        found = self._answer(request)
        if asyncio.iscoroutine(found):
            found = await found
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, GetTimestampsResponse)
        return found

    async def advance_epoch(self, request: AdvanceEpochRequest) -> AdvanceEpochResponse:
        raise AssertionError("nobody calls this")

    async def check_timestamps(self, request: CheckTimestampsRequest) -> CheckTimestampsResponse:
        raise AssertionError("nobody calls this")


def echo_handler(request: GetTimestampsRequest) -> GetTimestampsResponse:
    return GetTimestampsResponse(first=7, count=request.count)


@dataclass
class Edge:
    address: str
    network: GrpcNetwork
    gate: Gate
    edge: RpcEdge
    registry: CollectorRegistry
    raw: grpc.aio.Channel
    log: list[Any] = field(default_factory=list)

    async def timestamps(self, count: int = 1) -> GetTimestampsResponse:
        call = self.network.unary(self.address, methods.GET_TIMESTAMPS)
        return await call(GetTimestampsRequest(count=count), SECONDS)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@asynccontextmanager
async def serving(
    *exposed: Exposed, concurrency_max: int = 100, request_bytes_max: int = 65_536
) -> AsyncIterator[Edge]:
    gate = Gate(concurrency_max, request_bytes_max)
    calls = RpcMetrics()
    registry = CollectorRegistry()
    registry.register(calls)
    edge = RpcEdge(gate, calls, MachineClock())
    if exposed:
        edge.expose(list(exposed))
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", received_bytes_max(request_bytes_max)),
            ("grpc.max_send_message_length", -1),
        ]
    )
    server.add_generic_rpc_handlers((edge,))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    network = GrpcNetwork()
    with structlog.testing.capture_logs() as log:
        async with grpc.aio.insecure_channel(address) as raw:
            try:
                yield Edge(address, network, gate, edge, registry, raw, log)
            finally:
                await network.close()
                await server.stop(None)


def oracle(answer: Callable[[GetTimestampsRequest], Any]) -> Exposed:
    return Exposed(ORACLE, OracleHandler(answer))


@pytest.fixture
def edge() -> AbstractAsyncContextManager[Edge]:
    """An oracle that answers at once."""
    return serving(oracle(echo_handler))


async def test_a_call_reaches_its_handler_and_its_answer_the_caller(edge: Edge) -> None:
    assert await edge.timestamps(5) == GetTimestampsResponse(first=7, count=5)


EVERY_ERROR: list[errors.PercolatorError] = [
    errors.ConflictError("lost", start_timestamp=1, other_start_timestamp=2, where="w"),
    errors.InvalidArgument("count", "is 0", where="the oracle"),
    errors.SchemaChanged("older", table_id=1, schema_version=2, where="w"),
    errors.Overloaded("full", retry_after_seconds=0.25, where="w"),
    errors.NotReady("starting", retry_after_seconds=1.5, where="w"),
    errors.UnknownServer("not here", server="somebody", where="w"),
    errors.TabletMoved(
        "moved",
        tablet_id=1,
        epoch=2,
        locations=(errors.TabletLocation(1, 2, 3, b"a", b"\xff", "host:1"),),
        where="w",
    ),
    errors.StoreUnusable("full", fault=errors.StoreFault.DISK_FULL, where="w"),
    errors.UniqueViolation("taken", index="email", rows=(b"a", b"b"), where="w"),
    errors.Unauthenticated("no token", where="w"),
    errors.PermissionDenied("too low", where="w"),
    errors.SessionExpired("gone", session_id=b"\x00" * 16, where="w"),
    errors.SnapshotTooOld("old", timestamp=1, safe_point=2, where="w"),
    errors.WrongCluster("other", expected="a", found="b", where="w"),
    errors.InvariantViolation("broken", where="w"),
    errors.NotExecuted("not done", where="w"),
    errors.ExecutionUnknown("who knows", where="w"),
    errors.UsageError("wrong use", where="w"),
]


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: str(type(error)))
async def test_an_error_arrives_as_it_was_raised(error: errors.PercolatorError) -> None:
    async with serving(oracle(lambda _: error)) as edge:
        with pytest.raises(errors.PercolatorError) as caught:
            await edge.timestamps()
    if not isinstance(error, errors.UsageError):
        assert type(caught.value) is type(error)
    arrived, raised = vars(caught.value), vars(error)
    assert {name: arrived[name] for name in raised} == raised
    assert caught.value.retry is error.retry
    assert str(caught.value) == str(error)


def public(kind: type[errors.PercolatorError]) -> set[type[errors.PercolatorError]]:
    """The class and its subclasses, except those that are private to a module."""
    found = {kind} if kind.__module__ == errors.__name__ else set()
    return found.union(*(public(below) for below in kind.__subclasses__()))


@pytest.mark.parametrize("kind", sorted(public(errors.PercolatorError), key=str))
def test_what_may_be_repeated_is_the_same_on_both_sides(
    kind: type[errors.PercolatorError],
) -> None:
    """This holds for every class of error, even for those that never reach the edge."""
    samples = {type(error): error for error in EVERY_ERROR}
    error = samples.get(kind) or kind("message", where="w")
    assert from_detail(to_detail(error)).retry is error.retry


async def test_an_error_with_much_to_tell_still_arrives_typed() -> None:
    """Trailers are limited to a few KiB: beyond that, gRPC would drop the type and retry safety."""
    locations = tuple(
        errors.TabletLocation(1, number, 3, b"k" * 4000, b"", "host:1") for number in range(100)
    )
    for error in (
        errors.InvalidArgument("f" * 50_000, "r" * 50_000, where="w" * 50_000),
        errors.NotReady("é" * 100_000),
        errors.TabletMoved("m" * 50_000, tablet_id=1, epoch=2, locations=locations),
    ):
        async with serving(oracle(Mock(return_value=error))) as edge:
            with pytest.raises(type(error)) as caught:
                await edge.timestamps()
            assert caught.value.retry is error.retry


async def test_an_unexpected_exception_is_logged_answered_and_survived() -> None:
    answers = iter([KeyError("a stored value"), echo_handler(GetTimestampsRequest(count=3))])
    async with serving(oracle(lambda _: next(answers))) as edge:
        with pytest.raises(errors.InvariantViolation) as caught:
            await edge.timestamps()
        assert "KeyError" in str(caught.value)
        assert "GetTimestamps" in str(caught.value)
        assert "stored value" not in str(caught.value), "it may be secret"
        assert [type(entry["exc_info"]) for entry in edge.log if "exc_info" in entry] == [KeyError]
        assert (await edge.timestamps()).count == 3


async def cut_off(request: GetTimestampsRequest) -> GetTimestampsResponse:
    """As when a task on which it waits ends with its service."""
    task = asyncio.create_task(asyncio.sleep(SECONDS))
    asyncio.get_running_loop().call_soon(task.cancel)
    await task
    return echo_handler(request)


async def test_a_caller_is_told_if_what_its_call_waits_for_is_cancelled() -> None:
    """gRPC sends no status for a cancelled handler: nobody would be there to hear it."""
    async with serving(oracle(cut_off)) as edge:
        with pytest.raises(errors.ExecutionUnknown, match="was cancelled"):
            await edge.timestamps()
        assert [entry["event"] for entry in edge.log] == ["what a call waited for was cancelled"]
        await edge.gate.idle.wait()  # the call ends after its answer has left


async def test_what_is_no_message_is_refused_by_name(edge: Edge) -> None:
    garbage = edge.raw.unary_unary(methods.GET_TIMESTAMPS.path)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await garbage(b"\xff\xff\xff", timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await edge.timestamps()).first == 7


async def test_calls_above_the_limit_are_told_when_to_come_back() -> None:
    both_in, go = asyncio.Event(), asyncio.Event()
    edges: list[Edge] = []

    async def slow(request: GetTimestampsRequest) -> GetTimestampsResponse:
        if edges[0].gate.in_flight == 2:
            both_in.set()
        await go.wait()
        return echo_handler(request)

    async with serving(oracle(slow), concurrency_max=4) as edge:  # of which one machine may have 2
        edges.append(edge)
        admitted = [asyncio.ensure_future(edge.timestamps()) for _ in range(2)]
        await both_in.wait()
        with pytest.raises(errors.Overloaded) as caught:
            await edge.timestamps()
        assert caught.value.retry_after_seconds > 0
        go.set()
        await asyncio.gather(*admitted)
        assert (await edge.timestamps()).first == 7
        assert edge.gate.idle.is_set()


async def test_a_gate_that_was_closed_stays_closed(edge: Edge) -> None:
    edge.gate.refuse(errors.WrongCluster("other", expected="a", found="b"))
    with pytest.raises(errors.WrongCluster):
        await edge.timestamps()
    edge.gate.refuse(None)
    await edge.timestamps()
    edge.gate.close(errors.NotReady("shutting down"))
    edge.gate.refuse(None)
    with pytest.raises(errors.NotReady):
        await edge.timestamps()


async def test_until_a_service_is_exposed_its_callers_are_told_to_come_back() -> None:
    async with serving() as edge:
        with pytest.raises(errors.NotReady):
            await edge.timestamps()
        scan = edge.network.stream(edge.address, methods.SCAN)
        with pytest.raises(errors.NotReady):
            await anext(scan(ScanRequest(), SECONDS))
        edge.edge.expose([oracle(echo_handler)])
        assert (await edge.timestamps()).first == 7
        with pytest.raises(errors.UsageError, match="no such method"):
            await anext(scan(ScanRequest(), SECONDS))


async def test_a_handler_knows_how_long_its_caller_waits() -> None:
    seen: list[float | None] = []

    def note(request: GetTimestampsRequest) -> GetTimestampsResponse:
        seen.append(remaining_seconds())
        return echo_handler(request)

    async with serving(oracle(note)) as edge:
        await edge.timestamps()
        unlimited = edge.raw.unary_unary(methods.GET_TIMESTAMPS.path)
        await unlimited(b"")
    assert remaining_seconds() is None
    assert seen[0] is not None
    assert 0 < seen[0] <= SECONDS * 1.1, "gRPC rounds it up on the wire"
    assert seen[1] is None


async def test_a_call_whose_caller_went_away_is_cancelled_and_counted() -> None:
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def forever(request: GetTimestampsRequest) -> GetTimestampsResponse:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError("unreachable")

    async with serving(oracle(forever)) as edge:
        calling = asyncio.ensure_future(edge.timestamps())
        await entered.wait()
        calling.cancel()
        await cancelled.wait()
        await edge.gate.idle.wait()
        labels = {"service": ORACLE.full_name, "method": "GetTimestamps"}
        assert edge.metric("percolator_rpc_finished_total", **labels, code="CANCELLED") == 1
        assert edge.metric("percolator_rpc_in_flight", **labels) == 0


async def test_calls_are_counted_by_their_outcome() -> None:
    def picky(request: GetTimestampsRequest) -> Any:
        return echo_handler(request) if request.count else errors.InvalidArgument("count", "is 0")

    async with serving(oracle(picky)) as edge:
        for count in (1, 2, 0):
            try:
                await edge.timestamps(count)
            except errors.InvalidArgument:
                assert count == 0
        await edge.gate.idle.wait()
        labels = {"service": ORACLE.full_name, "method": "GetTimestamps"}
        assert edge.metric("percolator_rpc_finished_total", **labels, code="OK") == 2
        assert edge.metric("percolator_rpc_finished_total", **labels, code="INVALID_ARGUMENT") == 1
        assert edge.metric("percolator_rpc_seconds_count", **labels) == 3
        assert edge.metric("percolator_rpc_seconds_bucket", **labels, le="+Inf") == 3


class TabletHandler:
    """Streams scans; the other methods are not called."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def scan(self, request: ScanRequest) -> AsyncIterator[ScanResponse]:
        try:
            for _ in range(request.row_limit or 1_000_000):
                yield ScanResponse()
            if request.reverse:
                raise errors.SnapshotTooOld("too late", timestamp=1, safe_point=2)
            if request.report_deletes:
                raise asyncio.CancelledError
        finally:
            self.closed.set()

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        return lambda _: errors.UsageError(name)


async def test_pages_stream_until_the_end_or_an_error() -> None:
    async with serving(Exposed(TABLETS, TabletHandler())) as edge:
        scan = edge.network.stream(edge.address, methods.SCAN)
        assert len([page async for page in scan(ScanRequest(row_limit=3), SECONDS)]) == 3
        failing = scan(ScanRequest(row_limit=3, reverse=True), SECONDS)
        for _ in range(3):
            await anext(failing)
        with pytest.raises(errors.SnapshotTooOld):
            await anext(failing)
        cut = scan(ScanRequest(row_limit=1, report_deletes=True), SECONDS)
        await anext(cut)
        with pytest.raises(errors.ExecutionUnknown, match="was cancelled"):
            await anext(cut)
        assert edge.gate.idle.is_set()


async def test_a_stream_is_closed_at_once_when_its_reader_leaves() -> None:
    handler = TabletHandler()
    async with serving(Exposed(TABLETS, handler)) as edge:
        stream = edge.raw.unary_stream(methods.SCAN.path)(b"")
        await stream.read()
        stream.cancel()
        await handler.closed.wait()
        await edge.gate.idle.wait()


def test_a_handler_without_one_of_its_methods_is_found_out_at_the_start() -> None:
    with pytest.raises(errors.InvariantViolation, match="open_session"):
        Exposed(LOCKS, OracleHandler(echo_handler))


@pytest.mark.parametrize(
    "method",
    [found for found in vars(methods).values() if isinstance(found, UnaryMethod)],
    ids=lambda method: method.path.rpartition("/")[2],
)
def test_methods_are_named_as_in_the_wire_api(method: UnaryMethod[Any, Any]) -> None:
    rpc = method.path.rpartition("/")[2]
    assert "".join(word.capitalize() for word in methods.method_name(rpc).split("_")) == rpc


def test_an_error_that_a_gate_gives_to_many_does_not_grow_with_them() -> None:
    """Each time the same exception is raised, its traceback grows and keeps the frames alive."""
    gate = Gate(concurrency_max=1, request_bytes_max=1_024)
    refusal = errors.WrongCluster("other", expected="a", found="b")
    gate.refuse(refusal)
    for _ in range(3):
        with pytest.raises(errors.WrongCluster) as caught:
            gate.require_open()
        assert vars(caught.value) == vars(refusal)
    assert refusal.__traceback__ is None


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


LIMIT = 4_096


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


@pytest.fixture
@asynccontextmanager
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """A server that accepts `LIMIT` bytes, and a client that accepts and sends eight times that."""
    most = 8 * LIMIT
    smaller = dict(channels._OPTIONS) | {
        "grpc.max_send_message_length": most,
        "grpc.max_receive_message_length": most,
    }
    monkeypatch.setattr(channels, "_OPTIONS", list(smaller.items()))
    tablets = Tablets()
    async with serving(Exposed(TABLETS, tablets), request_bytes_max=LIMIT) as edge:
        yield Served(edge.address, edge.network, tablets)


def a_read(row: bytes, size: int = 0) -> pb.ReadRequest:
    read = pb.RowRead(row=row, columns=[bytes(size)])
    return pb.ReadRequest(batches=[pb.ReadBatch(reads=[read])])


@pytest.mark.parametrize("size", [LIMIT + 1, 2 * LIMIT - 100, 3 * LIMIT, 9 * LIMIT])
async def test_a_request_above_the_limit_is_an_invalid_argument_that_names_size_and_remedy(
    served: Served,
    size: int,
) -> None:
    """Refused by our own check, by the server's gRPC, or by the client's own, as it grows."""
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
    served: Served,
    size: int,
) -> None:
    scan = served.network.stream(served.address, methods.SCAN)
    with pytest.raises(errors.InvalidArgument, match=r"request: has \d+ bytes, at most"):
        _ = [page async for page in scan(pb.ScanRequest(columns=[bytes(size)]), SECONDS)]
    assert served.tablets.executed == 0


async def test_an_answer_above_the_limit_is_an_invalid_argument_too(
    served: Served,
) -> None:
    read = served.network.unary(served.address, methods.READ)
    with pytest.raises(errors.InvalidArgument) as caught:
        await read(a_read(b"%d" % (9 * LIMIT)), SECONDS)
    assert (caught.value.field, caught.value.retry) == ("response", Retry.USELESS)
    assert f"at most {8 * LIMIT} are accepted; ask for less" in caught.value.reason


async def test_a_streamed_answer_above_the_limit_ends_the_stream_alike(
    served: Served,
) -> None:
    scan = served.network.stream(served.address, methods.SCAN)
    request = pb.ScanRequest()
    request.range.start = b"%d" % (9 * LIMIT)
    pages = scan(request, SECONDS)
    assert await anext(pages) == pb.ScanResponse()
    with pytest.raises(errors.InvalidArgument, match="response: has"):
        await anext(pages)


async def test_of_a_change_whose_answer_is_too_large_only_its_sender_can_tell_what_to_do(
    served: Served,
) -> None:
    """It was executed: to say that nothing was written would be wrong."""
    mutation = pb.Mutation(column=b"%d" % (9 * LIMIT))
    batch = pb.MutationBatch(mutations=[mutation])
    mutate = served.network.unary(served.address, methods.MUTATE)
    with pytest.raises(errors.ExecutionUnknown, match="executed, but its response has"):
        await mutate(pb.MutateRequest(batches=[batch]), SECONDS)
    assert served.tablets.executed == 1


async def test_a_client_in_another_language_gets_a_typed_detail(
    served: Served,
) -> None:
    async with grpc.aio.insecure_channel(served.address) as raw:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw.unary_unary(methods.READ.path)(bytes(LIMIT + 1), timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert DETAILS_TRAILER in dict(caught.value.trailing_metadata())
        understood = from_rpc_error(caught.value, methods.READ.path)
        assert f"at most {LIMIT} are accepted (request_bytes_max)" in str(understood)


# The environment may name a proxy for the outside world, which gRPC uses for everything.


ELSEWHERE = "192.0.2.1:7100"
"""An address that no machine has."""


class Proxy:
    """Notes what it is asked to connect to, and hangs up."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.was_asked = asyncio.Event()

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(await reader.readline())
        self.was_asked.set()
        writer.close()


@pytest.fixture
@asynccontextmanager
async def proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    """The proxy of everything, as the environment says."""
    found = Proxy()
    async with await asyncio.start_server(found.meet, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", f"http://{host}:{port}")
        yield found


async def dial(network: GrpcNetwork, seconds: float) -> None:
    """Makes a call that nobody answers."""
    call = network.unary(ELSEWHERE, GET_TIMESTAMPS)
    with pytest.raises(ExecutionUnknown):
        await call(GetTimestampsRequest(count=1), seconds)
    await network.close()


async def test_a_server_on_the_same_machine_is_dialled_directly(proxy: Proxy) -> None:
    """A proxy would look for it on its own machine."""
    async with framed(echo) as edge:
        assert (await edge.timestamps(3)).count == 3
    assert proxy.asked == []


async def test_servers_of_a_cluster_dial_each_other_directly(
    proxy: Proxy,
) -> None:
    """Docker, for one, sets these variables in every container."""
    await dial(GrpcNetwork(is_within=True), 0.3)
    assert proxy.asked == []


async def test_a_client_outside_dials_a_gateway_through_the_proxy(
    proxy: Proxy,
) -> None:
    await dial(GrpcNetwork(), 5.0)
    assert proxy.asked[0].startswith(b"CONNECT 192.0.2.1:7100")
