"""How calls and connections end, and whether a call is known not to have been executed."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.bigtable.http2 import frames
from percolator.bigtable.http2.call import Call
from percolator.bigtable.http2.connection import CLOSE_SECONDS
from percolator.bigtable.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    STREAM_MAX,
    WINDOW_UPDATE,
    ErrorCode,
    frame,
)
from percolator.bigtable.http2.messages import prefixed
from percolator.bigtable.http2.settings import (
    ENABLE_PUSH,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
)
from percolator.bigtable.http2.signs_of_life import LOOK_SECONDS, LOOKS_BEFORE_PING
from percolator.bigtable.http2.status import CallFailed, Code
from tests.simulation.virtual_time import run_virtually
from tests.unit.bigtable.http2.peer import DONE, OK, Peer, Wire, block, head, passes

LARGE = bytes(100_000)
"""More than the windows of a peer that says nothing."""


def begun(wire: Wire, request: bytes = b"request", seconds: float = 600.0) -> Call:
    return wire.connection.begin(head(), prefixed(request), seconds, wants_all=True)


async def failed(call: Call) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        await call.message()
    return caught.value


def number(value: int) -> bytes:
    return value.to_bytes(4)


def goaway(last: int, code: int = 0, said: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, number(last) + number(code) + said)


async def last_words(wire: Wire) -> int:
    """The error with which the connection was ended."""
    for kind, _, _, payload in await wire.sent():
        if kind == GOAWAY:
            return int.from_bytes(payload[4:8])
    raise AssertionError("nothing was said")


RESETS = {
    ErrorCode.NO_ERROR: Code.INTERNAL,
    ErrorCode.PROTOCOL_ERROR: Code.INTERNAL,
    ErrorCode.REFUSED_STREAM: Code.UNAVAILABLE,
    ErrorCode.CANCEL: Code.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: Code.UNAVAILABLE,
    ErrorCode.INADEQUATE_SECURITY: Code.INTERNAL,
    ErrorCode.HTTP_1_1_REQUIRED: Code.UNKNOWN,
    99: Code.INTERNAL,
}


@pytest.mark.parametrize("code", RESETS)
async def test_only_a_refused_stream_was_not_executed(code: int) -> None:
    wire = Wire()
    call = begun(wire)
    wire.arrive(frame(RST_STREAM, 0, 1, number(code)))
    found = await failed(call)
    assert found.code is RESETS[code]
    assert found.not_executed == (code == ErrorCode.REFUSED_STREAM)
    await wire.answered(b"the next call")


async def test_a_stream_that_has_answered_is_not_refused_any_more() -> None:
    wire = Wire()
    call = begun(wire)
    wire.arrive(
        frame(HEADERS, END_HEADERS, 1, block(*OK)),
        frame(RST_STREAM, 0, 1, number(ErrorCode.REFUSED_STREAM)),
    )
    assert not (await failed(call)).not_executed
    call = begun(wire)
    wire.arrive(frame(HEADERS, END_HEADERS, 3, block(*OK)), goaway(1))
    assert not (await failed(call)).not_executed


async def test_a_request_that_did_not_leave_completely_was_not_executed() -> None:
    wire = Wire()
    call = begun(wire, LARGE)
    await passes()
    wire.arrive(frame(RST_STREAM, 0, 1, number(ErrorCode.INTERNAL_ERROR)))
    assert (await failed(call)).not_executed
    await wire.sent()
    wire.arrive(frame(WINDOW_UPDATE, 0, 0, number(1_000_000)))
    assert await wire.sent() == []  # nothing of it is left to be sent


async def test_an_answer_may_come_before_the_whole_request_has_left() -> None:
    peer = Peer(consumes=False)
    call = begun(peer, LARGE)
    await passes()
    peer.h2.send_headers(1, [*OK, ("grpc-status", "8")], end_stream=True)
    peer.send()
    found = await failed(call)
    assert (found.code, found.not_executed) == (Code.RESOURCE_EXHAUSTED, False)
    await passes()
    assert peer.resets == {1: ErrorCode.NO_ERROR}


async def test_a_lost_connection_leaves_open_what_became_of_what_was_sent() -> None:
    wire = Wire(settings=number_of_streams(2))
    sent, partly, waiting = begun(wire), begun(wire, LARGE), begun(wire)
    await wire.sent()
    wire.lose(ConnectionResetError("reset by peer"))
    outcomes = [await failed(call) for call in (sent, partly, waiting)]
    assert [one.not_executed for one in outcomes] == [False, True, True]
    assert {one.code for one in outcomes} == {Code.UNAVAILABLE}
    assert {one.message for one in outcomes} == {"reset by peer"}
    assert not wire.connection.takes_calls
    assert (await failed(begun(wire))).not_executed


def number_of_streams(most: int) -> bytes:
    return MAX_CONCURRENT_STREAMS.to_bytes(2) + number(most)


async def test_a_peer_that_leaves_answers_what_it_has_begun() -> None:
    peer = Peer()
    calls = [begun(peer) for _ in range(3)]
    await passes()
    peer.connection.data_received(goaway(STREAM_MAX))
    assert not peer.connection.takes_calls
    peer.connection.data_received(goaway(3, ErrorCode.NO_ERROR, b"max_age"))
    found = await failed(calls[2])
    assert found.not_executed
    assert found.message == "the server is leaving: NO_ERROR max_age"
    for call in calls[:2]:
        assert not peer.transport.is_closed
        peer.begin_answer(call.stream)
        peer.say(call.stream, prefixed(b"answer"))
        peer.end_answer(call.stream)
        assert await call.message() == b"answer"
    await passes()
    assert peer.transport.is_closed
    assert peer.connection.ended.done()


async def test_a_peer_that_leaves_has_not_executed_what_waits() -> None:
    wire = Wire(settings=number_of_streams(1))
    first, waiting = begun(wire), begun(wire)
    wire.arrive(goaway(1, ErrorCode.ENHANCE_YOUR_CALM, b"too_many_pings"))
    found = await failed(waiting)
    assert found.not_executed
    assert "ENHANCE_YOUR_CALM too_many_pings" in found.message
    wire.answer(1, b"answer")
    assert await first.message() == b"answer"


async def test_a_connection_whose_numbers_are_used_up_ends_with_its_last_call() -> None:
    wire = Wire()
    wire.connection._streams._next = STREAM_MAX
    call = begun(wire)
    assert call.stream == STREAM_MAX
    assert not wire.connection.takes_calls
    wire.answer(STREAM_MAX, b"answer")
    assert await call.message() == b"answer"
    assert wire.transport.is_closed


async def test_pings_are_answered() -> None:
    peer = Peer()
    peer.h2.ping(b"12345678")
    peer.send()
    await passes()
    assert peer.pongs == 1


async def test_a_silent_peer_is_asked_for_a_sign_and_kept_if_it_gives_one() -> None:
    peer = Peer()
    call = begun(peer)
    await asyncio.sleep(10 * LOOK_SECONDS)
    assert not call.ended
    assert sum(type(event).__name__ == "PingReceived" for event in peer.events) == 2
    peer.connection.leave(call)
    await peer.connection.close()


async def test_a_peer_that_is_gone_is_given_up_with_its_calls() -> None:
    wire = Wire()
    loop = asyncio.get_running_loop()
    began = loop.time()
    found = await failed(begun(wire))
    assert found.message == "the server gives no sign of life"
    assert not found.not_executed
    assert wire.transport.is_aborted
    assert loop.time() == began + (LOOKS_BEFORE_PING + 2) * LOOK_SECONDS


async def test_a_peer_that_is_gone_is_given_up_also_if_no_call_waits_that_long() -> None:
    """A router that has forgotten an idle connection swallows whatever is sent on it."""
    wire = Wire()
    for _ in range(LOOKS_BEFORE_PING):
        call = begun(wire, seconds=0.5 * LOOK_SECONDS)
        await failed(call)
        wire.connection.leave(call)
        await asyncio.sleep(1.5 * LOOK_SECONDS)
    assert wire.transport.is_aborted
    found = await failed(begun(wire))
    assert (found.message, found.not_executed) == ("the server gives no sign of life", True)


async def test_a_peer_that_ignores_a_call_is_kept_if_it_answers_when_asked() -> None:
    peer = Peer()
    await passes()
    call = begun(peer, seconds=5.0)
    await failed(call)
    peer.connection.leave(call)
    await asyncio.sleep(100 * LOOK_SECONDS)
    assert peer.connection.takes_calls
    assert sum(type(event).__name__ == "PingReceived" for event in peer.events) == 1
    await peer.connection.close()


async def test_an_idle_connection_is_not_asked_for_anything() -> None:
    wire = Wire()
    await wire.sent()
    await asyncio.sleep(100 * LOOK_SECONDS)
    assert await wire.sent() == []
    await wire.connection.close()


async def test_a_close_ends_the_calls_and_says_so_to_the_peer() -> None:
    peer = Peer()
    call = begun(peer)
    await passes()
    await peer.connection.close()
    found = await failed(call)
    assert (found.message, found.not_executed) == ("the connection was closed", False)
    assert peer.last_words is not None
    assert peer.last_words.error_code == ErrorCode.NO_ERROR
    await peer.connection.close()  # again, which does nothing


async def test_a_peer_that_reads_nothing_does_not_hold_up_a_close() -> None:
    wire = Wire()
    wire.transport.close = lambda: None  # type: ignore[method-assign]  # still has to send
    aborted = asyncio.get_running_loop().create_future()

    def abort() -> None:
        aborted.set_result(None)
        wire.connection.connection_lost(None)

    wire.transport.abort = abort  # type: ignore[method-assign]
    began = asyncio.get_running_loop().time()
    await wire.connection.close()
    assert aborted.done()
    assert asyncio.get_running_loop().time() == began + CLOSE_SECONDS


VIOLATIONS: dict[str, tuple[list[bytes], ErrorCode]] = {
    "a frame that is too long": ([b"\x00\x40\x01" + bytes(6)], ErrorCode.FRAME_SIZE_ERROR),
    "data of no stream": ([frame(DATA, 0, 0, b"")], ErrorCode.PROTOCOL_ERROR),
    "data of a stream of ours that never was": ([frame(DATA, 0, 7)], ErrorCode.PROTOCOL_ERROR),
    "a stream of the peer's": ([frame(HEADERS, 4, 2, b"")], ErrorCode.PROTOCOL_ERROR),
    "a reset of nothing": ([frame(RST_STREAM, 0, 9, bytes(4))], ErrorCode.PROTOCOL_ERROR),
    "a short reset": ([frame(RST_STREAM, 0, 1, bytes(3))], ErrorCode.FRAME_SIZE_ERROR),
    "padding without length": ([frame(DATA, PADDED, 1)], ErrorCode.FRAME_SIZE_ERROR),
    "padding that is too long": ([frame(DATA, PADDED, 1, b"\x02a")], ErrorCode.PROTOCOL_ERROR),
    "headers that cannot be": ([frame(HEADERS, 4, 1, b"\xff\xff")], ErrorCode.COMPRESSION_ERROR),
    "a table that was not permitted": (
        [frame(HEADERS, 4, 1, b"\x3f\xe1\x1f\x88")],
        ErrorCode.COMPRESSION_ERROR,
    ),
    "headers of the table": ([frame(HEADERS, 4, 1, b"\xbe")], ErrorCode.COMPRESSION_ERROR),
    "headers that are not continued": (
        [frame(HEADERS, 0, 1), frame(PING, 0, 0, bytes(8))],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a continuation of others": (
        [frame(HEADERS, 0, 1), frame(CONTINUATION, 4, 3)],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a continuation of nothing": ([frame(CONTINUATION, 4, 1)], ErrorCode.PROTOCOL_ERROR),
    "endless headers": (
        [frame(HEADERS, 0, 1)] + [frame(CONTINUATION, 0, 1)] * 8_000,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "a push": ([frame(PUSH_PROMISE, 4, 1, number(2))], ErrorCode.PROTOCOL_ERROR),
    "a priority of nothing": ([frame(PRIORITY, 0, 0, bytes(5))], ErrorCode.PROTOCOL_ERROR),
    "a short ping": ([frame(PING, 0, 0, bytes(7))], ErrorCode.FRAME_SIZE_ERROR),
    "a ping of a stream": ([frame(PING, 0, 1, bytes(8))], ErrorCode.PROTOCOL_ERROR),
    "a short GOAWAY": ([frame(GOAWAY, 0, 0, bytes(7))], ErrorCode.FRAME_SIZE_ERROR),
    "settings of a stream": ([frame(SETTINGS, 0, 1)], ErrorCode.PROTOCOL_ERROR),
    "half a setting": ([frame(SETTINGS, 0, 0, bytes(7))], ErrorCode.FRAME_SIZE_ERROR),
    "settings in an acknowledgement": (
        [frame(SETTINGS, 1, 0, bytes(6))],
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "a window that is too large": (
        [frame(SETTINGS, 0, 0, INITIAL_WINDOW_SIZE.to_bytes(2) + number(2**31))],
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "frames that are too small": (
        [frame(SETTINGS, 0, 0, MAX_FRAME_SIZE.to_bytes(2) + number(16_383))],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a server that wants pushes": (
        [frame(SETTINGS, 0, 0, ENABLE_PUSH.to_bytes(2) + number(1))],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a window that grows by nothing": (
        [frame(WINDOW_UPDATE, 0, 0, number(0))],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a window that grows too far": (
        [frame(WINDOW_UPDATE, 0, 0, number(STREAM_MAX))],
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "a short window update": ([frame(WINDOW_UPDATE, 0, 0, b"")], ErrorCode.FRAME_SIZE_ERROR),
}


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_a_peer_that_breaks_the_protocol_is_told_and_left(name: str) -> None:
    data, code = VIOLATIONS[name]
    wire = Wire()
    call = begun(wire)
    await wire.sent()
    wire.arrive(*data)
    found = await failed(call)
    assert found.code is Code.UNAVAILABLE
    assert "the server breaks HTTP/2" in found.message
    assert not found.not_executed
    assert wire.transport.is_closed
    assert await last_words(wire) == code


async def test_a_stream_whose_window_cannot_be_fails_alone() -> None:
    for update in (0, STREAM_MAX):
        wire = Wire(settings=INITIAL_WINDOW_SIZE.to_bytes(2) + number(70_000))
        call = begun(wire, LARGE)
        await wire.sent()
        wire.arrive(frame(WINDOW_UPDATE, 0, 1, number(update)))
        assert "a window that grows by" in (await failed(call)).message
        assert not wire.transport.is_closed


async def test_who_speaks_something_else_is_found_out_at_once() -> None:
    for said in (b"HTTP/1.1 400 Bad Request\r\n\r\n", frame(PING, 0, 0, bytes(8))):
        wire = Wire(settings=None)
        wire.arrive(said)
        assert "the server breaks HTTP/2" in await wire.connection.ready
        assert wire.transport.is_closed


async def test_a_peer_that_asks_and_does_not_read_is_left() -> None:
    wire = Wire()
    wire.connection.pause_writing()
    ping = frame(PING, 0, 0, bytes(8))
    wire.arrive(ping * 10_000)
    assert wire.connection.takes_calls
    wire.arrive(ping)
    assert wire.transport.is_closed
    assert await last_words(wire) == ErrorCode.ENHANCE_YOUR_CALM


async def test_a_connection_that_was_ended_before_it_was_made_is_given_up() -> None:
    wire = Wire(settings=None)
    connection = type(wire.connection)()
    await connection.close()
    connection.connection_made(wire.transport)  # type: ignore[arg-type]  # what it uses
    assert wire.transport.is_aborted


KINDS = st.sampled_from([*range(11), DATA, DATA, HEADERS, HEADERS])
BLOCKS = st.sampled_from([block(*OK), block(*DONE), block(*OK, *DONE), b"\x20" + block(*OK)])
PAYLOADS = st.one_of(
    BLOCKS, st.binary(max_size=30), st.integers(0, 2**32 - 1).map(number), st.just(bytes(8))
)
HOSTILE = st.lists(
    st.one_of(
        st.builds(
            frame,
            KINDS,
            st.sampled_from([0, END_STREAM, END_HEADERS, END_HEADERS | END_STREAM, PADDED, 255]),
            st.sampled_from([0, 1, 1, 3, 3, 5, 2, STREAM_MAX]),
            PAYLOADS,
        ),
        st.binary(max_size=12),
    ),
    max_size=25,
)


@given(hostile=HOSTILE, cut=st.integers(1, 50))
def test_whatever_arrives_every_call_ends_and_nothing_is_raised(
    hostile: list[bytes], cut: int
) -> None:
    async def check() -> None:
        wire = Wire()
        calls = [begun(wire, seconds=5.0), begun(wire, LARGE, seconds=5.0)]
        data = b"".join(hostile)
        for first in range(0, len(data), cut):
            if wire.transport.is_closed:
                break
            wire.connection.data_received(data[first : first + cut])
            await asyncio.sleep(0)
        for call in calls:
            with suppress(CallFailed):
                await call.message()
            assert call.ended
            wire.connection.leave(call)
        await wire.connection.close()
        assert not wire.connection._streams
        assert frames.frame(SETTINGS, frames.ACK, 0) in b"".join(wire.transport.writes)

    run_virtually(check())
