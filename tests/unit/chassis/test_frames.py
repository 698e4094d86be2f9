"""Calls in frames end as calls over gRPC do, and gRPC takes over whenever there are no frames.

A short scan travels in a frame, and ends after its first page; all others go over gRPC.

Callers on a server's machine use its Unix socket, if nothing is between them and it.

What a hostile caller of the port for frames gets: nothing, at a bounded cost.

Connections to servers that are no longer called are closed, and opened again when needed.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import socket
import ssl
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest

from percolator import errors
from percolator.errors import Unavailable
from percolator.services.chassis import frames
from percolator.services.chassis.frames import FrameServer, ServedConnection
from percolator.services.chassis.rpc import Exposed, Quota, remaining_seconds
from percolator.tasks import Tasks
from percolator.v1 import tabletserver_pb2
from percolator.v1.cells_pb2 import RowRange
from percolator.v1.frames_pb2 import FramesHello, OfferFramesRequest, OfferFramesResponse
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from percolator.v1.tabletserver_pb2 import ScanRequest, ScanResponse
from percolator.wire import frames as client_frames
from percolator.wire.addresses import HostPort
from percolator.wire.channels import GrpcNetwork
from percolator.wire.frames import (
    CALL_HEAD,
    FRAMED,
    GREETING_BYTES_MAX,
    HEADER,
    PREAMBLE,
    Kind,
    NotFrames,
    frame,
)
from percolator.wire.methods import GET_TIMESTAMPS, SCAN, SHORT_SCAN_ROWS_MAX
from tests.unit.chassis.framed_edge import (
    REQUEST_BYTES_MAX,
    SECONDS,
    SERVER_ID,
    Framed,
    echo,
    framed,
)
from tests.unit.chassis.test_rpc_edge import EVERY_ERROR, cut_off

pytestmark = pytest.mark.real_time

PATH = GET_TIMESTAMPS.path
ResultT = TypeVar("ResultT")
SO_ATTACH_FILTER = 26
BPF_RET = 0x06
"""Linux's numbers for a filter of packets, and for its instruction that says how much to keep."""


class Held:
    """A handler whose calls end when the test says so."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.let_go = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.hold = False

    async def begun(self, call: Awaitable[ResultT]) -> asyncio.Future[ResultT]:
        """A call that is in progress, and is held."""
        self.hold = True
        begun = asyncio.ensure_future(call)
        await asyncio.wait_for(self.asked.wait(), SECONDS)
        return begun

    async def answer(self, request: GetTimestampsRequest) -> GetTimestampsResponse:
        if self.hold:
            self.asked.set()
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return await echo(request)


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def holding(held: Held) -> AbstractAsyncContextManager[Framed]:
    """A server whose calls end when the test says so."""
    return framed(held.answer)


@pytest.fixture
def edge(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Framed]:
    """A server that answers at once."""
    return framed(echo, **getattr(request, "param", {}))


near = pytest.mark.parametrize("edge", [{"near": True}], indirect=True)


async def test_calls_travel_in_frames_once_the_server_has_offered_them(edge: Framed) -> None:
    connection = await edge.until_connected()
    sent = []
    call = connection.call

    async def spied(path: str, request: bytes, timeout: float) -> bytes:
        sent.append(path)
        return await call(path, request, timeout)

    connection.call = spied  # type: ignore[method-assign]
    assert (await edge.timestamps(5)).count == 5
    assert sent == [PATH]
    large = GetTimestampsRequest(count=2)
    large.MergeFromString(b"\x7a" + b"\x80\x40" + bytes(client_frames.SMALL_BYTES_MAX))
    answer = await edge.network.unary(edge.address, GET_TIMESTAMPS)(large, 5.0)
    assert answer.count == 2
    assert sent == [PATH], "a large request goes over gRPC"


async def test_programs_that_call_a_few_times_do_not_ask_for_frames(edge: Framed) -> None:
    for _ in range(client_frames.CALLS_BEFORE):
        await edge.timestamps()
    await asyncio.sleep(0.1)
    assert edge.frames.connections() == 0


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
async def test_an_error_arrives_as_over_grpc(error: errors.PercolatorError) -> None:
    async def fail(request: GetTimestampsRequest) -> GetTimestampsResponse:
        raise error

    async with framed(fail) as edge:
        connection = await edge.connected()
        with pytest.raises(errors.PercolatorError) as over_grpc:
            await edge.timestamps()
        with pytest.raises(errors.PercolatorError) as caught:
            await connection.call(PATH, b"", 10.0)
        assert type(caught.value) is type(over_grpc.value)
        assert vars(caught.value) == vars(over_grpc.value)
        connection.close()


async def test_a_handler_is_told_how_long_its_caller_waits() -> None:
    told: list[float | None] = []

    async def tell(request: GetTimestampsRequest) -> GetTimestampsResponse:
        told.append(remaining_seconds())
        return await echo(request)

    async with framed(tell) as edge:
        connection = await edge.connected()
        await connection.call(PATH, b"", 7.0)
        assert told[0] is not None
        assert 6.0 < told[0] <= 7.0
        connection.close()


async def test_a_call_that_is_too_late_fails_and_is_cancelled_at_the_server(
    holding: Framed,
    held: Held,
) -> None:
    await holding.until_connected()
    held.hold = True
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await holding.timestamps(timeout=0.1)
    assert holding.address in caught.value.where
    await asyncio.wait_for(held.cancelled.wait(), SECONDS)
    held.hold = False
    assert (await holding.timestamps(2)).count == 2


async def test_the_server_gives_up_a_call_at_its_deadline_even_if_it_hears_nothing(
    holding: Framed,
    held: Held,
) -> None:
    held.hold = True
    peer = await holding.greeted()
    peer.send(frame(Kind.CALL, 1, CALL_HEAD.pack(0, 50)))
    await asyncio.wait_for(held.cancelled.wait(), SECONDS)
    peer.writer.close()


async def test_a_caller_is_told_if_what_its_call_waits_for_is_cancelled() -> None:
    async with framed(cut_off) as edge:
        connection = await edge.connected()
        with pytest.raises(errors.ExecutionUnknown, match="was cancelled"):
            await connection.call(PATH, b"", 10.0)
        connection.close()


async def test_a_cancelled_call_is_cancelled_at_the_server(holding: Framed, held: Held) -> None:
    await holding.until_connected()
    call = await held.begun(holding.timestamps())
    call.cancel()
    await asyncio.wait_for(held.cancelled.wait(), SECONDS)
    assert call.cancelled()


async def test_with_its_connection_gone_nobody_knows_whether_a_call_was_executed(
    holding: Framed,
    held: Held,
) -> None:
    await holding.until_connected()
    call = await held.begun(holding.timestamps())
    for connection in list(holding.frames._connections):
        connection.abort()
    with pytest.raises(errors.Unavailable) as caught:
        await call
    assert caught.value.retry is errors.Retry.UNKNOWN
    await asyncio.wait_for(held.cancelled.wait(), SECONDS)
    held.hold = False
    # Over gRPC, at once; and in frames again, after a while.
    assert (await holding.timestamps(2)).count == 2
    await holding.until_connected()


async def test_a_closed_network_ends_its_calls_with_an_error_not_a_cancellation(
    holding: Framed,
    held: Held,
) -> None:
    await holding.until_connected()
    bound = holding.network.unary(holding.address, GET_TIMESTAMPS)
    call = await held.begun(holding.timestamps())
    await holding.network.close()
    with pytest.raises(errors.Unavailable, match="the connection was closed"):
        await call
    with pytest.raises(errors.UsageError, match="closed"):
        await bound(GetTimestampsRequest(count=1), 5.0)


async def test_a_server_that_leaves_answers_what_it_has_and_takes_no_more(
    holding: Framed,
    held: Held,
) -> None:
    await holding.until_connected()
    call = await held.begun(holding.timestamps(3))
    stopping = asyncio.create_task(holding.frames.stop(2 * SECONDS))
    await asyncio.sleep(0.1)
    held.hold = False
    assert (await holding.timestamps(2)).count == 2, "over gRPC"
    held.let_go.set()
    assert (await call).count == 3
    await asyncio.wait_for(stopping, SECONDS)


async def test_a_connection_whose_handshake_ends_after_the_server_has_left_is_ended(
    edge: Framed,
) -> None:
    accepted = edge.frames._connection()
    await edge.frames.stop(0)
    transport = Mock(spec=asyncio.Transport)
    accepted.connection_made(transport)
    transport.abort.assert_called_once_with()
    assert edge.frames.connections() == 0


async def test_a_certificate_may_have_names_that_are_no_text(edge: Framed) -> None:
    directory_entry = ((("commonName", "percolator.cluster"),),)
    shown = {"subjectAltName": (("DirName", directory_entry), ("DNS", "somebody"))}
    transport = Mock(spec=asyncio.Transport)
    transport.is_closing.return_value = False
    transport.get_extra_info.return_value = shown
    accepted = edge.frames._connection()
    accepted.connection_made(transport)
    hello = FramesHello(server_id=SERVER_ID).SerializeToString()
    accepted.data_received(PREAMBLE + frame(Kind.HELLO, 0, hello))
    assert accepted._caller is not None
    assert accepted._caller.names == [b"somebody"]
    accepted.connection_lost(None)


@pytest.mark.parametrize("offers", [True, False])
async def test_grpc_goes_on_where_frames_are_not_offered_or_another_server_answers(
    offers: bool,
) -> None:
    async with framed(echo, offers=offers, server_id="another server") as edge:
        for _ in range(20):
            assert (await edge.timestamps(2)).count == 2
            await asyncio.sleep(0.01)
        assert edge.frames.connections() == 0
        assert edge.connection is None


async def test_grpc_goes_on_where_the_port_cannot_be_reached(edge: Framed) -> None:
    await edge.frames.stop(0)
    for _ in range(20):
        assert (await edge.timestamps(2)).count == 2
        await asyncio.sleep(0.01)


async def test_a_request_above_the_limit_is_refused_as_over_grpc_and_disturbs_no_other(
    holding: Framed,
    held: Held,
) -> None:
    await holding.until_connected()
    other = await held.begun(holding.timestamps(3))
    large = GetTimestampsRequest(count=1)
    large.MergeFromString(b"\x7a" + b"\x80\x80\x08" + bytes(131_072))
    with pytest.raises(errors.InvalidArgument, match="at most 65536"):
        await holding.network.unary(holding.address, GET_TIMESTAMPS)(large, 5.0)
    held.let_go.set()
    assert (await other).count == 3


async def test_a_hello_for_another_server_is_refused(edge: Framed) -> None:
    with pytest.raises(NotFrames):
        await edge.connected("another server")
    assert len(edge.refusals) == 1


async def test_a_server_that_gives_no_sign_of_life_is_given_up(
    held: Held,
    holding: Framed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_frames, "LOOK_SECONDS", 0.05)
    connection = await holding.connected()
    call = await held.begun(connection.call(PATH, b"", 2 * SECONDS))
    # It answers nothing for long, but it is there.
    await asyncio.sleep(0.5)
    assert not call.done()
    # As if it stood still.
    for one in holding.frames._connections:
        assert one._transport is not None
        one._transport.pause_reading()
    with pytest.raises(errors.Unavailable, match="no sign of life"):
        await asyncio.wait_for(call, SECONDS)


async def test_a_connection_on_which_everything_is_lost_is_given_up_sooner_than_a_silent_one(
    edge: Framed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a firewall has forgotten it: what is sent is lost, and nothing says so."""
    monkeypatch.setattr(client_frames, "UNACKNOWLEDGED_SECONDS", 0.3)
    monkeypatch.setattr(client_frames, "LOOK_SECONDS", 1000.0)
    connection = await edge.connected()
    (served,) = edge.frames._connections
    lose_what_arrives(served)
    async with asyncio.timeout(SECONDS):
        with pytest.raises(errors.Unavailable, match="timed out"):
            await connection.call(PATH, b"", 10 * SECONDS)


def lose_what_arrives(at: ServedConnection) -> None:
    """Has the system drop all packets for a socket before it looks at them."""
    assert at._transport is not None
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RET, 0, 0, 0))
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(nothing))
    sock = at._transport.get_extra_info("socket")
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    except PermissionError:
        pytest.skip("this system lets only root drop packets")


async def test_a_server_with_as_many_calls_as_it_takes_gives_signs_of_life(
    held: Held,
    holding: Framed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_frames, "LOOK_SECONDS", 0.1)
    held.hold = True
    connection = await holding.connected()
    calls = []
    while connection.takes(PATH):
        calls.append(asyncio.create_task(connection.call(PATH, b"", 2 * SECONDS)))
        await asyncio.sleep(0)
    await asyncio.sleep(1.0)
    assert not any(call.done() for call in calls)
    held.let_go.set()
    await asyncio.gather(*calls)
    connection.close()


@pytest.mark.parametrize(
    "nonsense",
    [frame(Kind.CALL, 1), frame(Kind.WELCOME, 0), b"\xff" * 9],
    ids=["a call", "a second welcome", "a huge frame"],
)
async def test_a_server_that_sends_nonsense_is_left(
    holding: Framed,
    held: Held,
    nonsense: bytes,
) -> None:
    connection = await holding.connected()
    call = await held.begun(connection.call(PATH, b"", 2 * SECONDS))
    connection.data_received(nonsense)
    with pytest.raises(errors.Unavailable, match="nonsense"):
        await call
    assert not connection.takes(PATH)


async def test_a_network_is_closed_while_it_connects(edge: Framed) -> None:
    other = GrpcNetwork()
    call = other.unary(edge.address, GET_TIMESTAMPS)
    for _ in range(client_frames.CALLS_BEFORE + 1):
        await call(GetTimestampsRequest(count=1), 5.0)
    await asyncio.wait_for(other.close(), SECONDS)


async def test_an_attempt_to_connect_that_fails_leaves_no_error_that_nobody_sees() -> None:
    """The server closes the connection, and before the caller hears of it, its time is over."""

    async def connect(connection: client_frames.FrameConnection) -> None:
        connection.connection_lost(None)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        await client_frames.FrameConnection._opened(connect, FramesHello(), SECONDS)
    gc.collect()


async def test_a_connection_that_ends_with_its_welcome_is_not_looked_at_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a server that is shutting down: what it sends last arrives together."""
    looks = Mock()
    monkeypatch.setattr(client_frames, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(client_frames.FrameConnection, "_look_after", looks)

    async def connect(connection: client_frames.FrameConnection) -> None:
        connection.data_received(frame(Kind.WELCOME, 0))
        connection.connection_lost(None)

    with pytest.raises(NotFrames, match="closed"):
        await client_frames.FrameConnection._opened(connect, FramesHello(), SECONDS)
    await asyncio.sleep(0.01)
    looks.assert_not_called()


TABLETS = tabletserver_pb2.DESCRIPTOR.services_by_name["TabletServerService"]
PAGES = 3


class Pages:
    """Scans three pages; the start of the rest is the number of the page. Notes how scans end."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.asked = asyncio.Event()
        self.closed = asyncio.Event()

    async def scan(self, request: ScanRequest) -> AsyncGenerator[ScanResponse, None]:
        sent = 0
        try:
            if request.all_columns:
                raise errors.SnapshotTooOld("too late", timestamp=1, safe_point=2)
            if request.reverse:
                self.asked.set()
                await asyncio.Event().wait()
            for sent in range(1, PAGES + 1):
                yield ScanResponse(rest=RowRange(start=str(sent).encode()))
        finally:
            self.ends.append(f"after {sent}")
            self.closed.set()

    @property
    def exposed(self) -> Exposed:
        return Exposed(TABLETS, _Everything(self))


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def paged(pages: Pages) -> AbstractAsyncContextManager[Framed]:
    """A server that streams pages."""
    return framed(echo, pages.exposed)


class _Everything:
    """A handler of all methods, of which only one is called."""

    def __init__(self, pages: Pages) -> None:
        self.scan = pages.scan

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        return lambda _: errors.UsageError(name)


async def scanned(edge: Framed, request: ScanRequest) -> list[bytes]:
    call = edge.network.stream(edge.address, SCAN)
    return [page.rest.start async for page in call(request, 2 * SECONDS)]


@pytest.mark.parametrize("rows", [1, SHORT_SCAN_ROWS_MAX])
async def test_a_short_scan_ends_after_its_first_page(
    paged: Framed,
    pages: Pages,
    rows: int,
) -> None:
    await paged.until_connected()
    assert await scanned(paged, ScanRequest(row_limit=rows)) == [b"1"]
    assert pages.ends == ["after 1"]
    assert paged.gate.idle.is_set()


@pytest.mark.parametrize("rows", [0, SHORT_SCAN_ROWS_MAX + 1])
async def test_any_other_scan_gets_all_its_pages_over_grpc(
    paged: Framed,
    pages: Pages,
    rows: int,
) -> None:
    await paged.until_connected()
    assert await scanned(paged, ScanRequest(row_limit=rows)) == [b"1", b"2", b"3"]


async def test_without_frames_a_short_scan_gets_all_its_pages(pages: Pages) -> None:
    async with framed(echo, pages.exposed, offers=False) as edge:
        assert await scanned(edge, ScanRequest(row_limit=1)) == [b"1", b"2", b"3"]


async def test_a_server_whose_frames_have_no_scans_is_asked_over_grpc(pages: Pages) -> None:
    async with framed(echo, pages.exposed, framed_paths=FRAMED - {SCAN.path}) as edge:
        await edge.until_connected()
        assert await scanned(edge, ScanRequest(row_limit=1)) == [b"1", b"2", b"3"]


async def test_an_error_of_a_short_scan_arrives_as_over_grpc() -> None:
    async with framed(echo, Pages().exposed) as edge:
        failing = ScanRequest(row_limit=1, all_columns=True)
        with pytest.raises(errors.SnapshotTooOld) as over_grpc:
            await scanned(edge, failing)
        await edge.until_connected()
        with pytest.raises(errors.SnapshotTooOld) as caught:
            await scanned(edge, failing)
        assert vars(caught.value) == vars(over_grpc.value)


async def test_a_short_scan_that_is_given_up_is_cancelled_at_the_server(
    paged: Framed,
    pages: Pages,
) -> None:
    await paged.until_connected()
    scan = asyncio.create_task(scanned(paged, ScanRequest(row_limit=1, reverse=True)))
    await pages.asked.wait()
    scan.cancel()
    await asyncio.wait_for(pages.closed.wait(), SECONDS)
    assert pages.ends == ["after 0"]


NEAR = HostPort("127.0.0.1", 7001)


def family(edge: Framed) -> int:
    """How the network is connected to the edge."""
    connection = edge.connection
    assert connection is not None
    assert connection._transport is not None
    return int(connection._transport.get_extra_info("socket").family)


async def offered(frames: FrameServer) -> OfferFramesResponse:
    answer = await frames.offer("it").handler.offer_frames(  # type: ignore[attr-defined]
        OfferFramesRequest()
    )
    assert isinstance(answer, OfferFramesResponse)
    return answer


@near
async def test_calls_within_a_machine_travel_over_a_unix_socket(edge: Framed) -> None:
    await edge.until_connected()
    assert family(edge) == socket.AF_UNIX
    assert (await edge.timestamps(5)).count == 5
    assert edge.frames.connections() == 1


@near
async def test_who_dials_another_address_gets_no_further_than_that_address(edge: Framed) -> None:
    # Such as a relay on the same machine, which a shorter way would leave out.
    edge.address = edge.address.replace("127.0.0.1", "localhost")
    await edge.until_connected()
    assert family(edge) != socket.AF_UNIX


async def test_a_server_elsewhere_sends_nobody_to_a_socket_of_this_machine() -> None:
    async def offer(address: str) -> OfferFramesResponse:
        raise AssertionError("nothing is asked here")

    far, near = "192.0.2.1:7001", str(NEAR)
    for address, followed in ((far, False), (near, True)):
        peer = client_frames._Peer(address, offer, Tasks())
        answer = OfferFramesResponse(port=1, local_name="x", local_address=address)
        dialled = HostPort(address.split(":")[0], 7001)
        assert peer._is_near(answer, dialled) is followed


@near
async def test_tcp_is_used_where_the_socket_cannot_be_reached(edge: Framed) -> None:
    assert edge.frames._local is not None
    edge.frames._local.close()
    await edge.until_connected()
    assert family(edge) == socket.AF_INET
    assert (await edge.timestamps(5)).count == 5


async def test_a_server_with_tls_or_beyond_this_machine_has_no_such_socket() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for near, tls, expected in (
        (NEAR, None, True),
        (NEAR, context, False),
        (HostPort("192.0.2.1", 7001), None, False),
        (None, None, False),
    ):
        quota = Quota("connections", "frame_connections_max", 100)
        frames = FrameServer(HostPort("127.0.0.1", 0), REQUEST_BYTES_MAX, tls, lambda: None, quota)
        await frames.start(near=near)
        answer = await offered(frames)
        await frames.stop(0)
        assert bool(answer.local_name) is expected
        assert bool(answer.local_address) is expected


@near
async def test_callers_that_come_all_at_once_wait_in_line(edge: Framed) -> None:
    # As after a restart. The server accepts none of them while this function runs.
    assert edge.frames._local is not None
    (local,) = edge.frames._local.sockets
    tcp = (edge.frames.listen.host, edge.frames.listen.port)
    for family_of_both, at in ((socket.AF_UNIX, local.getsockname()), (socket.AF_INET, tcp)):
        callers = [socket.socket(family_of_both) for _ in range(300)]
        for caller in callers:
            caller.settimeout(5)
            caller.connect(at)
        for caller in callers:
            caller.close()


@near
async def test_a_server_that_stops_ends_the_connections_at_its_socket(edge: Framed) -> None:
    connection = await edge.until_connected()
    await edge.frames.stop(0)
    async with asyncio.timeout(SECONDS):
        await connection.ended
    assert (await edge.timestamps(3)).count == 3, "gRPC goes on"


HELLO = FramesHello(server_id=SERVER_ID).SerializeToString()
CALL = CALL_HEAD.pack(0, 60_000)

BEFORE_THE_HELLO = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "grpc": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01",
    "no hello": PREAMBLE + frame(Kind.CALL, 1, CALL),
    "a huge hello": PREAMBLE + HEADER.pack(GREETING_BYTES_MAX + 1, Kind.HELLO, 0),
    "a hello that is no message": PREAMBLE + frame(Kind.HELLO, 0, b"\xff\xff\xff"),
    "no server": PREAMBLE + frame(Kind.HELLO, 0),
}
AFTER_THE_HELLO = {
    "a huge frame": HEADER.pack(2**32 - 1, Kind.CALL, 1),
    "just too large": HEADER.pack(REQUEST_BYTES_MAX + CALL_HEAD.size + 1, Kind.CALL, 1),
    "an unknown kind": frame(Kind.CALL, 1).replace(b"\x03", b"\xc8", 1),
    "a server's frame": frame(Kind.ANSWER, 1, b""),
    "a second hello": frame(Kind.HELLO, 0, HELLO),
    "a call without a method": frame(Kind.CALL, 1, b"\0"),
    "a method that was not offered": frame(Kind.CALL, 1, CALL_HEAD.pack(9, 1)),
    "a number twice": frame(Kind.CALL, 1, CALL) * 2,
}


@pytest.mark.parametrize("noise", BEFORE_THE_HELLO)
async def test_nobody_who_does_not_say_hello_stays_connected(edge: Framed, noise: str) -> None:
    peer = await edge.dialled()
    peer.send(BEFORE_THE_HELLO[noise])
    assert await peer.is_ended()
    assert edge.frames.connections() == 0
    assert len(edge.refusals) == 1


@pytest.mark.parametrize("noise", AFTER_THE_HELLO)
async def test_what_is_no_call_ends_the_connection_and_its_calls(
    holding: Framed,
    held: Held,
    noise: str,
) -> None:
    held.hold = True
    peer = await holding.greeted()
    peer.send(frame(Kind.CALL, 7, CALL))
    await held.asked.wait()
    peer.send(AFTER_THE_HELLO[noise])
    assert await peer.is_ended()
    await asyncio.wait_for(held.cancelled.wait(), SECONDS)
    assert holding.gate.in_flight == 0
    assert holding.frames.connections() == 0


async def test_a_request_that_is_no_message_is_refused_with_an_error(edge: Framed) -> None:
    peer = await edge.greeted()
    peer.send(frame(Kind.CALL, 1, CALL + b"\xff\xff\xff"))
    answer = await peer.received()
    assert (answer.kind, answer.call) == (Kind.FAILURE, 1)
    assert b"is not a message of its type" in answer.body
    assert edge.frames.connections() == 1


@pytest.mark.parametrize("begun", [b"", PREAMBLE[:5], PREAMBLE + frame(Kind.HELLO, 0, HELLO)[:-1]])
async def test_who_says_nothing_or_half_a_hello_is_cut_off(
    edge: Framed, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "HELLO_SECONDS", 0.1)
    peer = await edge.dialled()
    peer.send(begun)
    assert await peer.is_ended()
    assert edge.frames.connections() == 0


async def test_who_does_not_complete_a_frame_is_cut_off_however_slowly_it_comes(
    edge: Framed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "FRAME_SECONDS", 0.3)
    peer = await edge.greeted()
    # Idle callers stay.
    await asyncio.sleep(0.5)
    assert edge.frames.connections() == 1
    dripping = asyncio.create_task(_drip(peer.writer, HEADER.pack(1_000, Kind.CALL, 1)))
    assert await peer.is_ended()
    dripping.cancel()
    assert edge.frames.connections() == 0


async def _drip(writer: asyncio.StreamWriter, first: bytes) -> None:
    writer.write(first)
    while True:
        await asyncio.sleep(0.02)
        writer.write(b"x")


async def test_of_a_flood_of_calls_no_more_than_the_limit_are_in_progress(
    holding: Framed,
    held: Held,
) -> None:
    held.hold = True
    peer = await holding.greeted()
    count = 3 * frames.CALLS_MAX
    for number in range(count):
        peer.send(frame(Kind.CALL, number, CALL))
    await held.asked.wait()
    await asyncio.sleep(0.2)
    assert holding.gate.in_flight == frames.CALLS_MAX
    # Answered in the end, all of them.
    held.let_go.set()
    answered = {(await peer.received()).call for _ in range(count)}
    assert answered == set(range(count))


async def test_a_flood_of_small_frames_leaves_turns_for_others(edge: Framed) -> None:
    await edge.greeted()
    (flooded,) = edge.frames._connections
    turns = 0
    flooded.data_received(frame(Kind.CANCEL, 1) * 100_000)
    while flooded._reader.kept:
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 100_000 // frames.FRAMES_PER_TURN - 1


async def test_who_takes_no_answers_is_not_read_any_more_and_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "UNREAD_SECONDS", 0.3)
    calls = 0

    async def large(request: GetTimestampsRequest) -> GetTimestampsResponse:
        nonlocal calls
        calls += 1
        found = GetTimestampsResponse(first=1)
        found.MergeFromString(b"\x7a" + b"\x80\x80\x40" + bytes(1 << 20))
        return found

    async with framed(large) as edge:
        peer = await edge.greeted()
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        for number in range(10_000):
            peer.send(frame(Kind.CALL, number, CALL))
        async with asyncio.timeout(SECONDS):
            await edge.frames._all_ended.wait()
        # The calls that had begun when the first answer did not fit.
        assert calls <= 2 * frames.CALLS_MAX
        assert edge.gate.in_flight == 0


@pytest.mark.parametrize("edge", [{"connections_max": 4}], indirect=True)
async def test_one_connection_too_many_is_refused_and_the_others_go_on(edge: Framed) -> None:
    # All are of one machine, which may have half of them.
    first, second = await edge.greeted(), await edge.greeted()
    third = await edge.dialled()
    assert await third.is_ended()
    first.send(frame(Kind.CALL, 1, CALL))
    assert (await first.received()).kind == Kind.ANSWER
    second.writer.close()
    await until(lambda: edge.frames.connections() <= 1)
    await edge.greeted()


async def test_a_caller_whose_machine_has_vanished_is_noticed_within_minutes(edge: Framed) -> None:
    # No test can take a machine away, so this asks what the system has been told to do then.
    await edge.greeted()
    (served,) = edge.frames._connections
    assert served._transport is not None
    sock = served._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    asked = [
        sock.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPCNT, socket.TCP_KEEPINTVL)
    ]
    idle, probes, interval = asked
    assert idle + probes * interval < 600


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110  # only the other side makes it true
            await asyncio.sleep(0)


@pytest.mark.parametrize("edge", [{"unknown_max": 2}], indirect=True)
async def test_of_too_many_callers_without_a_hello_the_one_that_waits_longest_is_cut_off(
    edge: Framed,
) -> None:
    known = await edge.greeted()
    silent = [await edge.dialled() for _ in range(3)]
    assert await silent[0].is_ended()
    silent[2].send(PREAMBLE + frame(Kind.HELLO, 0, HELLO))
    assert (await silent[2].received()).kind == Kind.WELCOME
    known.send(frame(Kind.PING, 0))
    assert (await known.received()).kind == Kind.PONG
    assert (edge.frames.connections(), len(edge.refusals)) == (3, 1)


async def test_incomplete_frames_of_all_callers_together_take_a_bounded_amount_of_memory() -> None:
    size = 40_000
    async with framed(echo, unfinished_bytes_max=2 * size) as edge:
        peers = [await edge.greeted() for _ in range(3)]
        for peer in peers[:2]:
            peer.send((HEADER.pack(size, Kind.CALL, 1) + CALL)[: size - 1].ljust(size - 1, b"0"))
        await until(lambda: edge.frames.unfinished_bytes >= 2 * (size - 1))
        peers[2].send(HEADER.pack(size, Kind.CALL, 1).ljust(GREETING_BYTES_MAX + 1, b"0"))
        assert await peers[2].is_ended()
        assert len(edge.refusals) == 1
        peers[0].writer.transport.abort()
        again = await edge.greeted()
        await until(lambda: edge.frames.unfinished_bytes <= size)
        again.send(HEADER.pack(size, Kind.CALL, 1).ljust(GREETING_BYTES_MAX + 1, b"0"))
        await until(lambda: edge.frames.unfinished_bytes > size)
        assert len(edge.refusals) == 1


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever no call uses at the moment counts as long unused."""
    monkeypatch.setattr(client_frames, "UNUSED_SECONDS", 0.0)


async def _call_another_server(edge: Framed) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        call = edge.network.unary(f"127.0.0.1:{unused.getsockname()[1]}", GET_TIMESTAMPS)
        with pytest.raises(Unavailable):
            await call(GetTimestampsRequest(count=1), SECONDS)


async def test_an_unused_connection_for_frames_ends_and_the_same_call_connects_again(
    edge: Framed,
) -> None:
    kept_call = edge.network.unary(edge.address, GET_TIMESTAMPS)
    connection = await edge.until_connected()
    await _call_another_server(edge)
    await asyncio.wait_for(connection.ended, SECONDS)
    assert (await kept_call(GetTimestampsRequest(count=3), SECONDS)).count == 3
    await edge.until_connected()
    assert (await kept_call(GetTimestampsRequest(count=4), SECONDS)).count == 4


@pytest.mark.parametrize("edge", [{"offers": False}], indirect=True)
async def test_an_unused_channel_is_closed_and_the_same_call_opens_another(edge: Framed) -> None:
    kept_call = edge.network.unary(edge.address, GET_TIMESTAMPS)
    assert (await kept_call(GetTimestampsRequest(count=3), SECONDS)).count == 3
    former = edge.network.line(edge.address)
    await _call_another_server(edge)
    assert edge.network.line(edge.address) is not former
    assert (await kept_call(GetTimestampsRequest(count=4), SECONDS)).count == 4
    with pytest.raises(Exception, match="closed"):
        await former.channel.unary_unary(GET_TIMESTAMPS.path)(b"")


@pytest.mark.parametrize("in_frames", [True, False])
async def test_a_call_in_progress_keeps_its_connection(held: Held, in_frames: bool) -> None:
    async with framed(held.answer, offers=in_frames) as edge:
        if in_frames:
            await edge.until_connected()
        connection = edge.connection
        line = edge.network.line(edge.address)
        calling = await held.begun(edge.timestamps(3))
        await _call_another_server(edge)
        if in_frames:
            assert edge.connection is connection
        else:
            assert edge.network.line(edge.address) is line
        held.let_go.set()
        assert (await calling).count == 3


async def test_a_connection_is_in_use_as_long_as_its_server_is_heard(edge: Framed) -> None:
    connection = await edge.connected()
    began = connection.unused_since()
    await connection.call(GET_TIMESTAMPS.path, GetTimestampsRequest().SerializeToString(), SECONDS)
    assert connection._look is not None
    connection._look.cancel()
    connection._look_after()
    last = connection.unused_since()
    assert began is not None
    assert last is not None
    assert last > began
    connection._look.cancel()
    connection._look_after()
    assert connection.unused_since() == last, "nothing was heard since"
    connection.close()
