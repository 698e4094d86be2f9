"""Calls in frames end as calls over gRPC do, and gRPC takes over whenever there are no frames."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import socket
import struct
from unittest.mock import Mock

import pytest

from percolator import errors
from percolator.services.chassis.frames import ServedConnection
from percolator.services.chassis.rpc import remaining_seconds
from percolator.v1.frames_pb2 import FramesHello
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from percolator.wire.channels import GrpcNetwork
from percolator.wire.frames import choosing
from percolator.wire.frames import connection as connections
from percolator.wire.frames.layout import CALL_HEAD, PREAMBLE, Kind, NotFrames, frame
from percolator.wire.methods import GET_TIMESTAMPS
from tests.unit.chassis.framed_edge import SECONDS, SERVER_ID, echo, framed
from tests.unit.chassis.test_rpc_edge import EVERY_ERROR, cut_off

pytestmark = pytest.mark.real_time

PATH = GET_TIMESTAMPS.path
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

    async def answer(self, request: GetTimestampsRequest) -> GetTimestampsResponse:
        if self.hold:
            self.asked.set()
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return await echo(request)


async def test_calls_travel_in_frames_once_the_server_has_offered_them() -> None:
    async with framed(echo) as edge:
        await edge.until_connected()
        connection = edge.network._frames._peers.get(edge.address).connection
        assert connection is not None
        sent = []
        call = connection.call

        async def spied(path: str, request: bytes, timeout: float) -> bytes:
            sent.append(path)
            return await call(path, request, timeout)

        connection.call = spied  # type: ignore[method-assign]
        assert (await edge.timestamps(5)).count == 5
        assert sent == [PATH]
        large = GetTimestampsRequest(count=2)
        large.MergeFromString(b"\x7a" + b"\x80\x40" + bytes(choosing.SMALL_BYTES_MAX))
        answer = await edge.network.unary(edge.address, GET_TIMESTAMPS)(large, 5.0)
        assert answer.count == 2
        assert sent == [PATH], "a large request goes over gRPC"


async def test_programs_that_call_a_few_times_do_not_ask_for_frames() -> None:
    async with framed(echo) as edge:
        for _ in range(choosing.CALLS_BEFORE):
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


async def test_a_call_that_is_too_late_fails_and_is_cancelled_at_the_server() -> None:
    held = Held()
    async with framed(held.answer) as edge:
        await edge.until_connected()
        held.hold = True
        with pytest.raises(errors.DeadlineExceeded) as caught:
            await edge.timestamps(timeout=0.1)
        assert edge.address in caught.value.where
        await asyncio.wait_for(held.cancelled.wait(), SECONDS)
        held.hold = False
        assert (await edge.timestamps(2)).count == 2


async def test_the_server_gives_up_a_call_at_its_deadline_even_if_it_hears_nothing() -> None:
    held = Held()
    async with framed(held.answer) as edge:
        held.hold = True
        peer = await edge.greeted()
        peer.send(frame(Kind.CALL, 1, CALL_HEAD.pack(0, 50)))
        await asyncio.wait_for(held.cancelled.wait(), SECONDS)
        peer.writer.close()


async def test_a_caller_is_told_if_what_its_call_waits_for_is_cancelled() -> None:
    async with framed(cut_off) as edge:
        connection = await edge.connected()
        with pytest.raises(errors.ExecutionUnknown, match="was cancelled"):
            await connection.call(PATH, b"", 10.0)
        connection.close()


async def test_a_cancelled_call_is_cancelled_at_the_server() -> None:
    held = Held()
    async with framed(held.answer) as edge:
        await edge.until_connected()
        held.hold = True
        call = asyncio.create_task(edge.timestamps())
        await held.asked.wait()
        call.cancel()
        await asyncio.wait_for(held.cancelled.wait(), SECONDS)
        assert call.cancelled()


async def test_with_its_connection_gone_nobody_knows_whether_a_call_was_executed() -> None:
    held = Held()
    async with framed(held.answer) as edge:
        await edge.until_connected()
        held.hold = True
        call = asyncio.create_task(edge.timestamps())
        await held.asked.wait()
        for connection in list(edge.frames._connections):
            connection.abort()
        with pytest.raises(errors.Unavailable) as caught:
            await call
        assert caught.value.retry is errors.Retry.UNKNOWN
        await asyncio.wait_for(held.cancelled.wait(), SECONDS)
        held.hold = False
        # Over gRPC, at once; and in frames again, after a while.
        assert (await edge.timestamps(2)).count == 2
        await edge.until_connected()


async def test_a_closed_network_ends_its_calls_with_an_error_not_a_cancellation() -> None:
    held = Held()
    async with framed(held.answer) as edge:
        await edge.until_connected()
        held.hold = True
        bound = edge.network.unary(edge.address, GET_TIMESTAMPS)
        call = asyncio.create_task(edge.timestamps())
        await held.asked.wait()
        await edge.network.close()
        with pytest.raises(errors.Unavailable, match="the connection was closed"):
            await call
        with pytest.raises(errors.UsageError, match="closed"):
            await bound(GetTimestampsRequest(count=1), 5.0)


async def test_a_server_that_leaves_answers_what_it_has_and_takes_no_more() -> None:
    held = Held()
    async with framed(held.answer) as edge:
        await edge.until_connected()
        held.hold = True
        call = asyncio.create_task(edge.timestamps(3))
        await held.asked.wait()
        stopping = asyncio.create_task(edge.frames.stop(2 * SECONDS))
        await asyncio.sleep(0.1)
        held.hold = False
        assert (await edge.timestamps(2)).count == 2, "over gRPC"
        held.let_go.set()
        assert (await call).count == 3
        await asyncio.wait_for(stopping, SECONDS)


async def test_a_connection_whose_handshake_ends_after_the_server_has_left_is_ended() -> None:
    async with framed(echo) as edge:
        accepted = edge.frames._connection()
        await edge.frames.stop(0)
        transport = Mock(spec=asyncio.Transport)
        accepted.connection_made(transport)
        transport.abort.assert_called_once_with()
        assert edge.frames.connections() == 0


async def test_a_certificate_may_have_names_that_are_no_text() -> None:
    async with framed(echo) as edge:
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
        assert edge.network._frames._peers.get(edge.address).connection is None


async def test_grpc_goes_on_where_the_port_cannot_be_reached() -> None:
    async with framed(echo) as edge:
        await edge.frames.stop(0)
        for _ in range(20):
            assert (await edge.timestamps(2)).count == 2
            await asyncio.sleep(0.01)


async def test_a_request_above_the_limit_is_refused_as_over_grpc_and_disturbs_no_other() -> None:
    held = Held()
    async with framed(held.answer) as edge:
        await edge.until_connected()
        held.hold = True
        other = asyncio.create_task(edge.timestamps(3))
        await held.asked.wait()
        large = GetTimestampsRequest(count=1)
        large.MergeFromString(b"\x7a" + b"\x80\x80\x08" + bytes(131_072))
        with pytest.raises(errors.InvalidArgument, match="at most 65536"):
            await edge.network.unary(edge.address, GET_TIMESTAMPS)(large, 5.0)
        held.let_go.set()
        assert (await other).count == 3


async def test_a_hello_for_another_server_is_refused() -> None:
    async with framed(echo) as edge:
        with pytest.raises(NotFrames):
            await edge.connected("another server")
        assert len(edge.refusals) == 1


async def test_a_server_that_gives_no_sign_of_life_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.05)
    held = Held()
    async with framed(held.answer) as edge:
        held.hold = True
        connection = await edge.connected()
        call = asyncio.create_task(connection.call(PATH, b"", 2 * SECONDS))
        await held.asked.wait()
        # It answers nothing for long, but it is there.
        await asyncio.sleep(0.5)
        assert not call.done()
        # As if it stood still.
        for one in edge.frames._connections:
            assert one._transport is not None
            one._transport.pause_reading()
        with pytest.raises(errors.Unavailable, match="no sign of life"):
            await asyncio.wait_for(call, SECONDS)


async def test_a_connection_on_which_everything_is_lost_is_given_up_sooner_than_a_silent_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a firewall has forgotten it: what is sent is lost, and nothing says so."""
    monkeypatch.setattr(connections, "UNACKNOWLEDGED_SECONDS", 0.3)
    monkeypatch.setattr(connections, "LOOK_SECONDS", 1000.0)
    async with framed(echo) as edge:
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
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


async def test_a_server_with_as_many_calls_as_it_takes_gives_signs_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.1)
    held = Held()
    async with framed(held.answer) as edge:
        held.hold = True
        connection = await edge.connected()
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
async def test_a_server_that_sends_nonsense_is_left(nonsense: bytes) -> None:
    held = Held()
    async with framed(held.answer) as edge:
        held.hold = True
        connection = await edge.connected()
        call = asyncio.create_task(connection.call(PATH, b"", 2 * SECONDS))
        await held.asked.wait()
        connection.data_received(nonsense)
        with pytest.raises(errors.Unavailable, match="nonsense"):
            await call
        assert not connection.takes(PATH)


async def test_a_network_is_closed_while_it_connects() -> None:
    async with framed(echo) as edge:
        other = GrpcNetwork()
        call = other.unary(edge.address, GET_TIMESTAMPS)
        for _ in range(choosing.CALLS_BEFORE + 1):
            await call(GetTimestampsRequest(count=1), 5.0)
        await asyncio.wait_for(other.close(), SECONDS)


async def test_an_attempt_to_connect_that_fails_leaves_no_error_that_nobody_sees() -> None:
    """The server closes the connection, and before the caller hears of it, its time is over."""

    async def connect(connection: connections.FrameConnection) -> None:
        connection.connection_lost(None)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        await connections.FrameConnection._opened(connect, FramesHello(), SECONDS)
    gc.collect()


async def test_a_connection_that_ends_with_its_welcome_is_not_looked_at_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a server that is shutting down: what it sends last arrives together."""
    looks = Mock()
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(connections.FrameConnection, "_look_after", looks)

    async def connect(connection: connections.FrameConnection) -> None:
        connection.data_received(frame(Kind.WELCOME, 0))
        connection.connection_lost(None)

    with pytest.raises(NotFrames, match="closed"):
        await connections.FrameConnection._opened(connect, FramesHello(), SECONDS)
    await asyncio.sleep(0.01)
    looks.assert_not_called()
