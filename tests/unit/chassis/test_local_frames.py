"""Callers on a server's machine use its Unix socket, if nothing is between them and it."""

from __future__ import annotations

import asyncio
import socket
import ssl

import pytest

from percolator.services.chassis.frames import FrameServer
from percolator.services.chassis.gate import Quota
from percolator.tasks import Tasks
from percolator.v1.frames_pb2 import OfferFramesRequest, OfferFramesResponse
from percolator.wire.addresses import HostPort
from percolator.wire.frames import choosing
from tests.unit.chassis.framed_edge import REQUEST_BYTES_MAX, SECONDS, Framed, echo, framed

pytestmark = pytest.mark.real_time

NEAR = HostPort("127.0.0.1", 7001)


def family(edge: Framed) -> int:
    """How the network is connected to the edge."""
    connection = edge.network._frames._peers.get(edge.address).connection
    assert connection is not None
    assert connection._transport is not None
    return int(connection._transport.get_extra_info("socket").family)


async def offered(frames: FrameServer) -> OfferFramesResponse:
    answer = await frames.offer("it").handler.offer_frames(  # type: ignore[attr-defined]
        OfferFramesRequest()
    )
    assert isinstance(answer, OfferFramesResponse)
    return answer


async def test_calls_within_a_machine_travel_over_a_unix_socket() -> None:
    async with framed(echo, near=True) as edge:
        await edge.until_connected()
        assert family(edge) == socket.AF_UNIX
        assert (await edge.timestamps(5)).count == 5
        assert edge.frames.connections() == 1


async def test_who_dials_another_address_gets_no_further_than_that_address() -> None:
    # Such as a relay on the same machine, which a shorter way would leave out.
    async with framed(echo, near=True) as edge:
        edge.address = edge.address.replace("127.0.0.1", "localhost")
        await edge.until_connected()
        assert family(edge) != socket.AF_UNIX


async def test_a_server_elsewhere_sends_nobody_to_a_socket_of_this_machine() -> None:
    async def offer(address: str) -> OfferFramesResponse:
        raise AssertionError("nothing is asked here")

    far, near = "192.0.2.1:7001", str(NEAR)
    for address, followed in ((far, False), (near, True)):
        peer = choosing._Peer(address, offer, Tasks())
        answer = OfferFramesResponse(port=1, local_name="x", local_address=address)
        dialled = HostPort(address.split(":")[0], 7001)
        assert peer._is_near(answer, dialled) is followed


async def test_tcp_is_used_where_the_socket_cannot_be_reached() -> None:
    async with framed(echo, near=True) as edge:
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


async def test_callers_that_come_all_at_once_wait_in_line() -> None:
    # As after a restart. The server accepts none of them while this function runs.
    async with framed(echo, near=True) as edge:
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


async def test_a_server_that_stops_ends_the_connections_at_its_socket() -> None:
    async with framed(echo, near=True) as edge:
        await edge.until_connected()
        connection = edge.network._frames._peers.get(edge.address).connection
        assert connection is not None
        await edge.frames.stop(0)
        async with asyncio.timeout(SECONDS):
            await connection.ended
        assert (await edge.timestamps(3)).count == 3, "gRPC goes on"
