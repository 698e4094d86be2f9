"""The way to one address: when it connects, and what it repeats."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from percolator.bigtable.http2.connection import Connection
from percolator.bigtable.http2.dialling import NoConnection
from percolator.bigtable.http2.frames import (
    DATA,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    RST_STREAM,
    ErrorCode,
    frame,
)
from percolator.bigtable.http2.lane import PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN, HttpLane
from percolator.bigtable.http2.messages import prefixed
from percolator.bigtable.http2.settings import MAX_CONCURRENT_STREAMS
from percolator.bigtable.http2.status import CallFailed, Code
from tests.unit.bigtable.http2.peer import OK, PATH, Wire, block, passes

REFUSED = frame(RST_STREAM, 0, 1, ErrorCode.REFUSED_STREAM.to_bytes(4))
LEAVING = frame(GOAWAY, 0, 0, bytes(8))


class Server:
    """Dialled by a lane. Each attempt takes a second, and fails if a test says so."""

    def __init__(self) -> None:
        self.wires: list[Wire] = []
        self.attempts = 0
        self.problem = ""
        self.settings = b""
        self._changed = asyncio.Condition()

    async def dial(self, address: str, tls: ssl.SSLContext | None) -> Connection:
        self.attempts += 1
        await asyncio.sleep(1.0)
        if self.problem:
            raise NoConnection(self.problem)
        async with self._changed:
            self.wires.append(Wire(settings=self.settings))
            self._changed.notify_all()
        return self.wires[-1].connection

    async def connections(self, number: int) -> Wire:
        """The newest connection, when there are so many and calls were sent."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.wires) >= number)
        await passes()
        return self.wires[-1]


def lane_to(server: Server) -> HttpLane:
    return HttpLane("server:1", None, server.dial)


async def collected(lane: HttpLane, timeout: float = 10.0) -> list[bytes]:
    return [message async for message in lane.stream(PATH, b"request", timeout, ())]


async def one(lane: HttpLane, timeout: float = 10.0) -> list[bytes]:
    return [await lane.unary(PATH, b"request", timeout, ())]


CALLS = pytest.mark.parametrize("call", [one, collected], ids=["unary", "stream"])
Calling = Callable[[HttpLane], Coroutine[Any, Any, list[bytes]]]


async def failed(calling: asyncio.Task[list[bytes]]) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        await calling
    return caught.value


@CALLS
async def test_calls_share_one_connection_which_is_opened_for_the_first(call: Calling) -> None:
    server = Server()
    lane = lane_to(server)
    assert server.attempts == 0
    calling = [asyncio.create_task(call(lane)) for _ in range(3)]
    wire = await server.connections(1)
    for stream in (1, 3, 5):
        wire.answer(stream, b"%d" % stream)
    assert await asyncio.gather(*calling) == [[b"1"], [b"3"], [b"5"]]
    assert server.attempts == 1
    await lane.close()
    assert wire.transport.is_closed


async def test_an_attempt_that_fails_fails_the_calls_that_wait_and_those_until_the_next() -> None:
    server = Server()
    server.problem = "nobody listens"
    lane = lane_to(server)
    loop = asyncio.get_running_loop()
    calling = [asyncio.create_task(one(lane)) for _ in range(2)]
    for each in calling:
        found = await failed(each)
        assert (found.code, found.not_executed) == (Code.UNAVAILABLE, True)
        assert found.message == "there is no connection to server:1: nobody listens"
    assert loop.time() == 1.0
    await failed(asyncio.create_task(one(lane)))
    assert (loop.time(), server.attempts) == (1.0, 1)  # at once, and without another attempt
    pauses = []
    for _ in range(9):
        ended, before = loop.time(), server.attempts
        while server.attempts == before:
            await asyncio.sleep(PAUSE_SECONDS_MIN / 10)
            await failed(asyncio.create_task(one(lane)))
        pauses.append(round(loop.time() - 1.0 - ended, 1))
    assert pauses[:3] == [PAUSE_SECONDS_MIN, 2 * PAUSE_SECONDS_MIN, 4 * PAUSE_SECONDS_MIN]
    assert max(pauses) == PAUSE_SECONDS_MAX
    server.problem = ""
    await asyncio.sleep(PAUSE_SECONDS_MAX)
    answering = asyncio.create_task(one(lane))
    (await server.connections(1)).answer(1, b"answer")
    assert await answering == [b"answer"]
    await lane.close()


async def test_a_call_waits_for_a_connection_no_longer_than_it_may() -> None:
    server = Server()
    lane = lane_to(server)
    found = await failed(asyncio.create_task(one(lane, timeout=0.5)))
    assert (found.code, found.not_executed) == (Code.DEADLINE_EXCEEDED, True)
    assert asyncio.get_running_loop().time() == 0.5
    answering = asyncio.create_task(one(lane))
    (await server.connections(1)).answer(1, b"answer")
    assert await answering == [b"answer"]
    assert server.attempts == 1  # the one that had begun
    await lane.close()


@CALLS
@pytest.mark.parametrize("end", [REFUSED, LEAVING], ids=["refused", "leaving"])
async def test_what_was_not_executed_is_repeated_once(call: Calling, end: bytes) -> None:
    server = Server()
    lane = lane_to(server)
    calling = asyncio.create_task(call(lane))
    wire = await server.connections(1)
    wire.arrive(end)
    if end is LEAVING:
        wire, stream = await server.connections(2), 1
    else:
        await passes()
        stream = 3
    sent = await wire.sent()
    assert [kind for kind, _, at, _ in sent if at == stream] == [HEADERS, DATA]
    (head,) = [payload for kind, _, at, payload in sent if kind == HEADERS and at == stream]
    assert (b"grpc-timeout\x059" in head) == (end is REFUSED)  # what is left of ten seconds
    assert (b"grpc-timeout\x058" in head) == (end is LEAVING)
    wire.answer(stream, b"answer")
    assert await calling == [b"answer"]
    await lane.close()


@CALLS
async def test_it_is_not_repeated_twice(call: Calling) -> None:
    server = Server()
    lane = lane_to(server)
    calling = asyncio.create_task(call(lane))
    wire = await server.connections(1)
    wire.arrive(REFUSED)
    await passes()
    wire.arrive(frame(RST_STREAM, 0, 3, ErrorCode.REFUSED_STREAM.to_bytes(4)))
    found = await failed(calling)
    assert found.not_executed
    await lane.close()


@CALLS
async def test_what_may_have_been_executed_is_never_repeated(call: Calling) -> None:
    server = Server()
    lane = lane_to(server)
    calling = asyncio.create_task(call(lane))
    wire = await server.connections(1)
    wire.lose(ConnectionResetError("reset by peer"))
    found = await failed(calling)
    assert (found.code, found.not_executed) == (Code.UNAVAILABLE, False)
    await asyncio.sleep(5.0)
    assert server.attempts == 1
    await lane.close()


async def test_a_connection_that_is_left_finishes_what_it_has_beside_the_new_one() -> None:
    server = Server()
    lane = lane_to(server)
    first = asyncio.create_task(one(lane))
    old = await server.connections(1)
    old.arrive(frame(GOAWAY, 0, 0, (2**31 - 1).to_bytes(4) + bytes(4)))
    second = asyncio.create_task(one(lane))
    new = await server.connections(2)
    new.answer(1, b"second")
    assert await second == [b"second"]
    old.answer(1, b"first")
    assert await first == [b"first"]
    await passes()
    assert old.transport.is_closed
    assert not lane._leaving
    await lane.close()


async def test_a_close_ends_calls_on_all_connections_and_attempts_to_connect() -> None:
    server = Server()
    lane = lane_to(server)
    first = asyncio.create_task(one(lane))
    old = await server.connections(1)
    old.arrive(frame(GOAWAY, 0, 0, (2**31 - 1).to_bytes(4) + bytes(4)))
    connecting = asyncio.create_task(one(lane))
    await asyncio.sleep(0.5)
    await lane.close()
    for each in (first, connecting):
        assert (await failed(each)).message == "the connection was closed"
    assert old.transport.is_closed
    assert (await failed(asyncio.create_task(one(lane)))).message == "the connection was closed"
    assert server.attempts == 2


async def test_a_stream_that_nobody_reads_to_its_end_is_cancelled() -> None:
    server = Server()
    lane = lane_to(server)
    messages = lane.stream(PATH, b"request", 10.0, ())
    first = asyncio.ensure_future(anext(messages))
    wire = await server.connections(1)
    wire.arrive(frame(HEADERS, END_HEADERS, 1, block(*OK)), frame(DATA, 0, 1, prefixed(b"one") * 2))
    assert await first == b"one"
    await wire.sent()
    await messages.aclose()
    assert await wire.sent() == [(RST_STREAM, 0, 1, ErrorCode.CANCEL.to_bytes(4))]
    await lane.close()


async def test_it_says_how_many_calls_the_server_takes() -> None:
    server = Server()
    server.settings = MAX_CONCURRENT_STREAMS.to_bytes(2) + (7).to_bytes(4)
    lane = lane_to(server)
    assert lane.calls_max > 1_000
    calling = asyncio.create_task(one(lane))
    (await server.connections(1)).answer(1, b"answer")
    await calling
    assert lane.calls_max == 7
    await lane.close()
