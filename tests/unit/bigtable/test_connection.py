"""Calls of the driver over TLS: who calls, connections, proxies, refused tokens, a busy service."""

from __future__ import annotations

import asyncio
import base64
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from percolator.bigtable import connection
from percolator.bigtable.account import Metadata, Token, Tokens
from percolator.bigtable.admin import create_table
from percolator.bigtable.connection import STREAMS_MAX, BigtableNetwork
from percolator.bigtable.messages import CHECK_AND_MUTATE_ROW, GET_TABLE, READ_ROWS
from percolator.bigtable.place import Place
from percolator.bigtable.store import CALLS_MAX, Admission, BigtableStore
from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    InvalidArgument,
    PercolatorError,
    Retry,
    Unauthenticated,
    Unavailable,
    UsageError,
)
from percolator.limits import Limits
from percolator.routing.cells import APPLIED, Answer, RowRequest
from percolator.rowstore.adapter import RowStoreCells
from percolator.rowstore.intents import Intents
from percolator.rowstore.layout import WRITES, Times
from percolator.rowstore.port import Selection
from percolator.v1 import bigtable_pb2 as pb
from percolator.v1.bigtable_pb2 import (
    BigtableGetTableRequest,
    BigtableReadRowsRequest,
    BigtableReadRowsResponse,
)
from percolator.v1.tabletserver_pb2 import RowRead
from percolator.world import MachineClock, World, machine_random
from tests.doubles.bigtable_service import ELSEWHERE, BigtableService, Refusal, served
from tests.unit.bigtable.servers import SECONDS, TABLE, Account, Connected, Peer, connected
from tests.unit.rowstore.model_store import EPOCH_MILLISECONDS, at
from tests.unit.rowstore.test_calls import prewrites


@pytest.fixture
def over() -> AbstractAsyncContextManager[Connected]:
    """A driver that is connected to a server over TLS."""
    return connected()


pytestmark = pytest.mark.real_time


async def test_every_call_carries_the_token_and_the_header_that_routes_it(over: Connected) -> None:
    assert await over.put(b"row")
    assert await over.rows() == [b"row"]
    table = "projects%2Fmy-project%2Finstances%2Fmy-instance%2Ftables%2Fpercolator-7"
    routed = f"table_name={table}&app_profile_id=one_cluster"
    found = [(name, metadata["x-goog-request-params"]) for name, metadata in over.service.calls]
    assert found == [
        ("CreateTable", "parent=projects%2Fmy-project%2Finstances%2Fmy-instance"),
        ("CheckAndMutateRow", routed),
        ("ReadRows", routed),
    ]
    assert {metadata["authorization"] for _, metadata in over.service.calls} == {"Bearer valid"}
    # The service tells how far a scan has come, and how long to pause, only if it knows that
    # it will be understood: fields 1, 4 and 7 of `google.bigtable.v2.FeatureFlags`.
    for _, metadata in over.service.calls[1:]:
        features = base64.urlsafe_b64decode(metadata["bigtable-features"])
        assert features == b"\x08\x01\x20\x01\x38\x01"
    assert over.account.asked == 1


async def test_a_refused_token_is_replaced_once_and_the_call_repeated(over: Connected) -> None:
    over.service.tokens = {"second"}
    over.account.tokens = ["second"]
    assert await over.put(b"row")
    assert over.account.asked == 2
    over.service.tokens = {"third"}
    over.account.tokens = ["third"]
    assert await over.rows() == [b"row"]
    assert over.account.asked == 3


async def test_an_account_that_is_refused_twice_is_reported(over: Connected) -> None:
    over.service.tokens = set()
    for call in (over.put(b"row"), over.rows()):
        with pytest.raises(Unauthenticated, match="does not accept the access token") as caught:
            await call
        assert caught.value.retry is Retry.USELESS
    assert [name for name, _ in over.service.calls[1:]] == ["CheckAndMutateRow"] * 2 + [
        "ReadRows"
    ] * 2


async def test_only_a_trusted_server_is_given_a_token_and_none_takes_plain_text(
    over: Connected,
) -> None:
    for network in (BigtableNetwork(Tokens(over.account)), BigtableNetwork()):
        store = BigtableStore(network, over.place)
        with pytest.raises(Unavailable):
            await store.read(TABLE, [b"row"], (Selection(WRITES),), 5.0)
        await network.close()
    assert len(over.service.calls) == 1


async def test_another_connection_is_opened_when_one_is_full_and_not_before(
    over: Connected,
) -> None:
    for number in range(3):
        await over.put(b"lone-%d" % number)
    assert len(over.service.peers) == 1
    over.service.seconds = 0.3
    selections = (Selection(WRITES),)
    reads = [over.store.read(TABLE, [b"row"], selections, SECONDS) for _ in range(STREAMS_MAX + 20)]
    await asyncio.gather(*reads)
    assert len(over.service.peers) == 2


async def test_a_call_cut_off_by_closing_fails_and_is_not_cancelled(over: Connected) -> None:
    over.service.seconds = 30.0
    putting, reading = asyncio.create_task(over.put(b"row")), asyncio.create_task(over.rows())
    await over.service.busy(2)
    await over.network.close()
    for task in (putting, reading):
        with pytest.raises(Unavailable, match="connection was closed"):
            await task
    with pytest.raises(UsageError, match="closed"):
        await over.put(b"row")


async def test_a_closed_network_makes_no_calls(over: Connected) -> None:
    await over.network.close()
    for address in (over.place.address, "127.0.0.1:1"):
        with pytest.raises(UsageError, match="the network of this client is closed"):
            await over.network.unary(address, GET_TABLE)(
                BigtableGetTableRequest(name=over.place.table(TABLE)), SECONDS
            )


async def test_a_cancelled_call_stays_cancelled(over: Connected) -> None:
    over.service.seconds = 30.0
    putting = asyncio.create_task(over.put(b"row"))
    await over.service.busy(1)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting


async def test_the_message_of_the_service_reaches_the_caller(over: Connected) -> None:
    denied = Refusal(grpc.StatusCode.PERMISSION_DENIED, "Missing IAM permission: x.")
    over.service.refusals.append(denied)
    with pytest.raises(Exception, match=r"Missing IAM permission: x: grant .*bigtable\.user") as it:
        await over.put(b"row")
    assert "percolator-7" in str(it.value)


async def test_keys_and_values_above_the_limits_are_refused_before_they_are_sent(
    over: Connected,
) -> None:
    long, selected = b"r" * 4097, (Selection(WRITES),)
    for call, said in (
        (over.put(long), "row: has 4,097 bytes.* at most 4,096"),
        (over.store.read(TABLE, [long], selected, SECONDS), "row: has 4,097 bytes"),
        (over.put(b"row", bytes(100 * 1024 * 1024 + 1)), "value: has 104,857,601 bytes"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            await call
    assert [name for name, _ in over.service.calls] == ["CreateTable"]
    assert await over.put(b"r" * 4096)


async def test_large_requests_and_answers_arrive_complete(over: Connected) -> None:
    values = [bytes((number,)) * (3 * 1024 * 1024 + number) for number in range(4)]
    rows = [b"row-%d" % number for number in range(4)]
    written = zip(rows, values, strict=True)
    assert await asyncio.gather(*(over.put(row, value) for row, value in written)) == [True] * 4
    found = await over.store.read(TABLE, rows, (Selection(WRITES),), SECONDS)
    assert [row.cells[0].value for row in found] == values


async def test_a_deadline_ends_a_call_at_the_client_and_at_the_service(over: Connected) -> None:
    over.service.seconds = 30.0
    with pytest.raises(DeadlineExceeded):
        await over.store.read(TABLE, [b"row"], (Selection(WRITES),), 0.2)
    await over.service.idle()


async def test_a_service_that_comes_back_is_found_again() -> None:
    network = BigtableNetwork()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    address = f"127.0.0.1:{port}"
    read = network.stream(address, READ_ROWS)
    request = BigtableReadRowsRequest(table_name="t")
    for _ in range(3):
        with pytest.raises(Unavailable, match="connect"):
            await anext(read(request, SECONDS))
    peer = Peer(lambda peer, stream: peer.answer(stream, BigtableReadRowsResponse()))
    async with peer.listening(port), asyncio.timeout(SECONDS):
        while True:
            try:
                assert [one async for one in read(request, SECONDS)] == [BigtableReadRowsResponse()]
                break
            except Unavailable:
                await asyncio.sleep(0.01)
    await network.close()


class Proxy:
    """A proxy that connects callers of `there` to `address`."""

    def __init__(self, there: str, address: str) -> None:
        self.asked: list[str] = []
        self._there = there
        self._host, _, self._port = address.rpartition(":")

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append((await reader.readuntil(b"\r\n\r\n")).decode().splitlines()[0])
        assert self.asked[-1] == f"CONNECT {self._there} HTTP/1.1"
        answers, requests = await asyncio.open_connection(self._host, int(self._port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        # Python 3.11 reports a connection's task that is cancelled at the end of its loop.
        with suppress(asyncio.CancelledError):
            await asyncio.gather(_copy(reader, requests), _copy(answers, writer))


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65_536):
            target.write(data)
            await target.drain()
    except ConnectionError:
        pass  # both sides may hang up
    finally:
        target.close()  # also at the end of the loop: nothing else would


@pytest.fixture(name="proxies")
def _proxies(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the variables that name a proxy."""

    def set_variables(**named: str) -> None:
        for kind in ("grpc", "https", "http", "no", "no_grpc"):
            for name in (f"{kind}_proxy", f"{kind}_proxy".upper()):
                monkeypatch.delenv(name, raising=False)
        for name, value in named.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize("variable", ["https_proxy", "grpc_proxy", "http_proxy"])
async def test_the_service_is_called_through_the_proxy_that_the_environment_names(
    variable: str, proxies: Callable[..., None]
) -> None:
    service, account = BigtableService(), Account()
    async with served(service) as (address, certificate):
        proxy = Proxy(ELSEWHERE, address)
        async with await asyncio.start_server(proxy.meet, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            proxies(**{variable: f"http://{host}:{port}"})
            network = BigtableNetwork(Tokens(account), certificate)
            place = Place(ELSEWHERE, "my-project", "my-instance")
            await create_table(network, place, TABLE, SECONDS)
            assert len(proxy.asked) == 1
            await network.close()


async def test_an_emulator_on_this_machine_is_called_without_the_proxy(
    proxies: Callable[..., None],
) -> None:
    proxies(http_proxy="http://127.0.0.1:1")
    async with connected() as over:
        assert await over.put(b"row")


def cells_of(over: Connected, **limits: float) -> RowStoreCells:
    world = World(MachineClock(), over.network, machine_random())
    times, allowed = Times(EPOCH_MILLISECONDS), Limits(**limits)  # type: ignore[arg-type]  # seconds
    intents = Intents(over.store, times, world, allowed)
    return RowStoreCells(over.store, intents, times, world, allowed)


def busy(seconds: float, code: grpc.StatusCode = grpc.StatusCode.RESOURCE_EXHAUSTED) -> Refusal:
    packed = Packed()
    packed.Pack(RetryInfo(retry_delay=Duration(nanos=round(seconds * 1e9))))
    status = Status(code=code.value[0], details=[packed])
    return Refusal(code, "busy", status.SerializeToString())


async def prewritten(cells: RowStoreCells) -> Answer:
    (answer,) = await cells.mutate(prewrites(at(1), b"row", [b"a"]), time.monotonic() + SECONDS)
    return answer


async def test_a_change_refused_by_a_quota_is_made_after_the_requested_pause(
    over: Connected,
) -> None:
    over.service.refusals.extend([busy(0.2), busy(0.2)])
    began = time.monotonic()
    assert await prewritten(cells_of(over)) is APPLIED
    assert time.monotonic() - began >= 0.4
    assert over.names("CheckAndMutateRow") == 3


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.ABORTED],
    ids=lambda code: code.name,
)
async def test_after_an_unclear_error_a_read_is_repeated_and_a_change_is_not(
    over: Connected,
    code: grpc.StatusCode,
) -> None:
    cells = cells_of(over)
    over.service.refusals.append(Refusal(code, "perhaps"))
    assert isinstance(await prewritten(cells), ExecutionUnknown)
    assert over.names("CheckAndMutateRow") == 1
    over.service.refusals.append(Refusal(code, "perhaps"))
    read = RowRequest(TABLE, RowRead(row=b"row", all_columns=True, timestamp=at(9)))
    await cells.read([read], time.monotonic() + SECONDS)
    assert over.names("ReadRows") == 2


async def test_a_requested_pause_is_kept_before_a_read_is_repeated(over: Connected) -> None:
    over.service.refusals.append(busy(0.3, grpc.StatusCode.UNAVAILABLE))
    began = time.monotonic()
    read = RowRequest(TABLE, RowRead(row=b"row", all_columns=True, timestamp=at(9)))
    await cells_of(over).read([read], began + SECONDS)
    assert time.monotonic() - began >= 0.3
    assert over.names("ReadRows") == 2


async def test_a_table_that_is_still_being_created_is_waited_for(over: Connected) -> None:
    code, said = grpc.StatusCode.FAILED_PRECONDITION, "Table is still being created."
    over.service.refusals.extend([Refusal(code, said), Refusal(code, said)])
    assert await prewritten(cells_of(over)) is APPLIED
    assert over.names("CheckAndMutateRow") == 3
    over.service.refusals.extend([Refusal(code, said)] * 10_000)
    late = time.monotonic() + 0.5
    (answer,) = await cells_of(over).mutate(prewrites(at(2), b"row", [b"b"]), late)
    assert isinstance(answer, PercolatorError)
    assert "still being created" in answer.message


async def test_a_silent_node_times_out_and_gets_fewer_calls(over: Connected) -> None:
    over.service.seconds = 60.0
    cells = cells_of(over, attempt_seconds_max=0.2)
    assert isinstance(await prewritten(cells), PercolatorError)
    admission: Admission = over.store._admission
    assert admission.bound == CALLS_MAX // 2


async def test_no_more_calls_are_in_flight_than_the_store_is_allowed(over: Connected) -> None:
    over.store._admission = Admission(5)
    over.service.seconds = 0.02
    await asyncio.gather(*(over.put(b"row-%d" % number) for number in range(40)))
    assert over.service.in_flight_max == 5


TOOK_SECONDS = 4.0


class RefusingChannel:
    """Refuses each token after some time, and notes how much time each call was given."""

    def __init__(self, messages: int = 0) -> None:
        self.given_seconds: list[float] = []
        self.took_seconds = 0.0
        self._messages = messages
        """Messages of an answer that come before the refusal."""

    def unary_unary(self, path: str, **_: object) -> Callable[..., Awaitable[bytes]]:
        async def call(request: Message, timeout: float, metadata: Metadata) -> bytes:
            self._refuse(timeout)
            raise AssertionError

        return call

    def unary_stream(self, path: str, **_: object) -> Callable[..., RefusedStream]:
        return lambda request, timeout, metadata: RefusedStream(self._responses(timeout))

    async def _responses(self, timeout: float) -> AsyncGenerator[Message, None]:
        for _ in range(self._messages):
            yield pb.BigtableReadRowsResponse()
        self._refuse(timeout)

    def _refuse(self, timeout: float) -> None:
        self.given_seconds.append(timeout)
        self.took_seconds += TOOK_SECONDS
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAUTHENTICATED, grpc.aio.Metadata(), grpc.aio.Metadata(), "expired"
        )

    async def close(self) -> None:
        pass


class RefusedStream:
    """A call of this channel that streams."""

    def __init__(self, responses: AsyncGenerator[Message, None]) -> None:
        self._responses = responses

    def __aiter__(self) -> AsyncGenerator[Message, None]:
        return self._responses

    def cancel(self) -> None:
        pass


def network(refusing: RefusingChannel, monkeypatch: pytest.MonkeyPatch) -> BigtableNetwork:
    loop = asyncio.get_running_loop()
    began = loop.time()
    monkeypatch.setattr(connection, "_now", lambda: began + refusing.took_seconds)
    monkeypatch.setattr(grpc.aio, "secure_channel", lambda *_, **__: refusing)
    return BigtableNetwork(Tokens(lambda: Token("token", 3_600.0, "")))


async def read_into(found: list[pb.BigtableReadRowsResponse], over: BigtableNetwork) -> None:
    read = over.stream("bigtable:443", READ_ROWS)
    async for message in read(pb.BigtableReadRowsRequest(table_name="t"), SECONDS):
        found += [message]


async def test_a_repeated_call_has_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = RefusingChannel()
    over = network(refusing, monkeypatch)
    change = over.unary("bigtable:443", CHECK_AND_MUTATE_ROW)
    request = pb.BigtableCheckAndMutateRowRequest(table_name="t")
    for call in (change(request, SECONDS), read_into([], over)):
        with pytest.raises(Unauthenticated):
            await call
    assert refusing.given_seconds == [SECONDS, SECONDS - TOOK_SECONDS] * 2
    await over.close()


async def test_a_stream_that_has_begun_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = RefusingChannel(messages=3)
    over = network(refusing, monkeypatch)
    found: list[pb.BigtableReadRowsResponse] = []
    with pytest.raises(Unauthenticated):
        await read_into(found, over)
    assert len(found) == 3
    await over.close()
