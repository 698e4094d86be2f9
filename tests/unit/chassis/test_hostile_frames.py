"""What a hostile caller of the port for frames gets: nothing, at a bounded cost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from percolator.services.chassis import frames
from percolator.v1.frames_pb2 import FramesHello
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from percolator.wire.frames.layout import (
    CALL_HEAD,
    GREETING_BYTES_MAX,
    HEADER,
    PREAMBLE,
    Kind,
    frame,
)
from tests.unit.chassis.framed_edge import REQUEST_BYTES_MAX, SECONDS, SERVER_ID, echo, framed
from tests.unit.chassis.test_frames import Held

pytestmark = pytest.mark.real_time

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
async def test_nobody_who_does_not_say_hello_stays_connected(noise: str) -> None:
    async with framed(echo) as edge:
        peer = await edge.dialled()
        peer.send(BEFORE_THE_HELLO[noise])
        assert await peer.is_ended()
        assert edge.frames.connections() == 0
        assert len(edge.refusals) == 1


@pytest.mark.parametrize("noise", AFTER_THE_HELLO)
async def test_what_is_no_call_ends_the_connection_and_its_calls(noise: str) -> None:
    held = Held()
    async with framed(held.answer) as edge:
        held.hold = True
        peer = await edge.greeted()
        peer.send(frame(Kind.CALL, 7, CALL))
        await held.asked.wait()
        peer.send(AFTER_THE_HELLO[noise])
        assert await peer.is_ended()
        await asyncio.wait_for(held.cancelled.wait(), SECONDS)
        assert edge.gate.in_flight == 0
        assert edge.frames.connections() == 0


async def test_a_request_that_is_no_message_is_refused_with_an_error() -> None:
    async with framed(echo) as edge:
        peer = await edge.greeted()
        peer.send(frame(Kind.CALL, 1, CALL + b"\xff\xff\xff"))
        answer = await peer.received()
        assert (answer.kind, answer.call) == (Kind.FAILURE, 1)
        assert b"is not a message of its type" in answer.body
        assert edge.frames.connections() == 1


@pytest.mark.parametrize("begun", [b"", PREAMBLE[:5], PREAMBLE + frame(Kind.HELLO, 0, HELLO)[:-1]])
async def test_who_says_nothing_or_half_a_hello_is_cut_off(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "HELLO_SECONDS", 0.1)
    async with framed(echo) as edge:
        peer = await edge.dialled()
        peer.send(begun)
        assert await peer.is_ended()
        assert edge.frames.connections() == 0


async def test_who_does_not_complete_a_frame_is_cut_off_however_slowly_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "FRAME_SECONDS", 0.3)
    async with framed(echo) as edge:
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


async def test_of_a_flood_of_calls_no_more_than_the_limit_are_in_progress() -> None:
    held = Held()
    async with framed(held.answer) as edge:
        held.hold = True
        peer = await edge.greeted()
        count = 3 * frames.CALLS_MAX
        for number in range(count):
            peer.send(frame(Kind.CALL, number, CALL))
        await held.asked.wait()
        await asyncio.sleep(0.2)
        assert edge.gate.in_flight == frames.CALLS_MAX
        # Answered in the end, all of them.
        held.let_go.set()
        answered = {(await peer.received()).call for _ in range(count)}
        assert answered == set(range(count))


async def test_a_flood_of_small_frames_leaves_turns_for_others() -> None:
    async with framed(echo) as edge:
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


async def test_one_connection_too_many_is_refused_and_the_others_go_on() -> None:
    # All are of one machine, which may have half of them.
    async with framed(echo, connections_max=4) as edge:
        first, second = await edge.greeted(), await edge.greeted()
        third = await edge.dialled()
        assert await third.is_ended()
        first.send(frame(Kind.CALL, 1, CALL))
        assert (await first.received()).kind == Kind.ANSWER
        second.writer.close()
        deadline = asyncio.get_running_loop().time() + SECONDS
        while edge.frames.connections() > 1:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        await edge.greeted()


async def test_a_caller_whose_machine_has_vanished_is_noticed_within_minutes() -> None:
    # No test can take a machine away, so this asks what the system has been told to do then.
    async with framed(echo) as edge:
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


async def test_of_too_many_callers_without_a_hello_the_one_that_waits_longest_is_cut_off() -> None:
    async with framed(echo, unknown_max=2) as edge:
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
