"""How much is sent, and how much may be sent to us."""

from __future__ import annotations

import asyncio

import pytest

from percolator.bigtable.http2.call import Call
from percolator.bigtable.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    HEADERS,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    frame,
)
from percolator.bigtable.http2.messages import prefixed
from percolator.bigtable.http2.settings import (
    CONNECTION_WINDOW,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    STREAM_WINDOW,
    WINDOW_DEFAULT,
    WINDOW_MAX,
)
from percolator.bigtable.http2.status import CallFailed, Code
from tests.unit.bigtable.http2.peer import OK, Peer, Wire, block, head, passes

LARGE = bytes(range(256)) * 4 * 1024
"""A mebibyte: sixteen times the window that a peer has at first."""


def begun(wire: Wire, request: bytes, *, wants_all: bool = True) -> Call:
    return wire.connection.begin(head(), prefixed(request), 60.0, wants_all=wants_all)


def setting(name: int, value: int) -> bytes:
    return name.to_bytes(2) + value.to_bytes(4)


def more(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4))


async def data_sent(wire: Wire) -> list[tuple[int, int, bool]]:
    """Of each frame of data that was sent: its stream, its length, and whether it is the last."""
    for _ in range(5):
        await asyncio.sleep(0)
    sent = await wire.sent()
    return [(at, len(data), flags == END_STREAM) for kind, flags, at, data in sent if kind == DATA]


async def test_a_large_request_keeps_to_the_windows_of_the_peer() -> None:
    """The library on the other side refuses what goes beyond them."""
    peer = Peer()
    calls = [begun(peer, LARGE), begun(peer, b"small"), begun(peer, LARGE[::-1])]
    await passes(500)
    assert [call.is_sent for call in calls] == [True] * 3
    assert peer.bodies == {1: prefixed(LARGE), 3: prefixed(b"small"), 5: prefixed(LARGE[::-1])}
    assert peer.whole == {1, 3, 5}


async def test_small_calls_pass_one_that_waits_for_its_window() -> None:
    wire = Wire(settings=setting(INITIAL_WINDOW_SIZE, 1_000))
    await wire.sent()
    large, small = begun(wire, bytes(5_000)), begun(wire, bytes(500))
    assert await data_sent(wire) == [(1, 1_000, False), (3, 505, True)]
    assert (large.is_sent, small.is_sent) == (False, True)
    wire.arrive(more(1, 3_000), more(3, 10))
    assert await data_sent(wire) == [(1, 3_000, False)]
    wire.arrive(more(1, WINDOW_MAX))
    assert await data_sent(wire) == [(1, 1_005, True)]


async def test_all_streams_together_keep_to_the_window_of_the_connection() -> None:
    wire = Wire()
    await wire.sent()
    calls = [begun(wire, bytes(40_000)) for _ in range(3)]
    sent = await data_sent(wire)
    assert sum(size for _, size, _ in sent) == WINDOW_DEFAULT
    wire.arrive(more(0, 40_000))
    assert {stream for stream, _, _ in await data_sent(wire)} == {3, 5}  # in turns
    wire.arrive(more(0, 60_000))
    sent = [*sent, (0, 40_000, False), *await data_sent(wire)]
    assert sum(size for _, size, _ in sent) == 3 * 40_005
    assert all(call.is_sent for call in calls)


async def test_a_window_may_become_negative_and_then_waits_until_it_is_not() -> None:
    wire = Wire()
    await wire.sent()
    call = begun(wire, bytes(100_000))
    assert sum(size for _, size, _ in await data_sent(wire)) == WINDOW_DEFAULT
    wire.arrive(more(0, 1_000_000), frame(SETTINGS, 0, 0, setting(INITIAL_WINDOW_SIZE, 5_535)))
    assert await data_sent(wire) == []
    wire.arrive(more(1, 60_000))
    assert await data_sent(wire) == []
    wire.arrive(more(1, 10))
    assert await data_sent(wire) == [(1, 10, False)]
    wire.arrive(frame(SETTINGS, 0, 0, setting(INITIAL_WINDOW_SIZE, 1_000_000)))
    assert sum(size for _, size, _ in await data_sent(wire)) == 100_005 - WINDOW_DEFAULT - 10
    assert call.is_sent


async def test_frames_are_as_long_as_the_peer_permits() -> None:
    wire = Wire(settings=setting(INITIAL_WINDOW_SIZE, 200_000) + setting(MAX_FRAME_SIZE, 50_000))
    wire.arrive(more(0, 200_000))
    await wire.sent()
    begun(wire, bytes(99_995))
    assert await data_sent(wire) == [(1, 50_000, False), (1, 50_000, True)]
    begun(wire, bytes(49_995))
    assert await data_sent(wire) == [(3, 50_000, True)]


async def test_headers_that_do_not_fit_into_a_frame_are_continued() -> None:
    peer = Peer()
    encoded = (
        head()
        + b"\x00\x06x-long\x7f"
        + b"\xa1\x9c\x01"
        + b"v" * (127 + 0x21 + 0x1C * 128 + 128 * 128)
    )
    peer.connection.begin(encoded, prefixed(b"request"), 5.0, wants_all=True)
    await passes()
    assert peer.requests[1]["x-long"].startswith("vvv")
    assert peer.whole == {1}


async def test_a_full_socket_gets_no_more_of_a_large_request() -> None:
    wire = Wire(settings=setting(INITIAL_WINDOW_SIZE, WINDOW_MAX))
    wire.arrive(more(0, 10_000_000))
    await wire.sent()
    wire.connection.pause_writing()
    call = begun(wire, LARGE)
    assert await data_sent(wire) == []
    wire.connection.resume_writing()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first = len(wire.transport.writes[-1])
    assert 256 * 1024 <= first < 300 * 1024  # the rest follows, piece by piece
    assert sum(size for _, size, _ in await data_sent(wire)) == len(LARGE) + 5
    assert call.is_sent


async def test_more_calls_than_the_peer_takes_wait_for_a_stream() -> None:
    peer = Peer(settings={MAX_CONCURRENT_STREAMS: 2})
    await passes()
    calls = [begun(peer, b"%d" % number) for number in range(5)]
    await passes()
    assert set(peer.requests) == {1, 3}
    peer.connection.leave(calls[2])  # was never sent
    peer.begin_answer(1)
    peer.say(1, prefixed(b"first"))
    peer.end_answer(1)
    assert await calls[0].message() == b"first"
    await passes()
    assert peer.bodies[5] == prefixed(b"3")
    assert set(peer.requests) == {1, 3, 5}
    peer.connection.leave(calls[1])
    await passes()
    assert peer.bodies[7] == prefixed(b"4")


async def test_a_peer_that_takes_more_calls_later_gets_those_that_wait() -> None:
    wire = Wire(settings=setting(MAX_CONCURRENT_STREAMS, 0))
    await wire.sent()
    call = begun(wire, b"request")
    assert await wire.sent() == []
    wire.arrive(frame(SETTINGS, 0, 0, setting(MAX_CONCURRENT_STREAMS, 1)))
    assert [(stream, last) for stream, _, last in await data_sent(wire)] == [(1, True)]
    wire.answer(1, b"answer")
    assert await call.message() == b"answer"


async def test_a_slow_consumer_holds_up_its_own_stream_and_no_other() -> None:
    peer = Peer()
    slow, other = begun(peer, b"slow", wants_all=False), begun(peer, b"other", wants_all=False)
    await passes()
    peer.begin_answer(1)
    peer.begin_answer(3)
    answer = prefixed(bytes(99_995)) * 50
    said = 0
    for _ in range(200):
        said += peer.say(1, answer[said:])
        await passes(3)
    assert said == STREAM_WINDOW  # nobody takes anything, so no more may come
    for _ in range(20):
        assert peer.say(3, prefixed(bytes(99_995))) == 100_000
        assert await other.next() == bytes(99_995)
        peer.connection.taken(other)
        await passes(3)
    taken = 0
    while taken < 50:
        assert await slow.next() == bytes(99_995)
        taken += 1
        peer.connection.taken(slow)
        await passes(3)
        said += peer.say(1, answer[said:])
        await passes(3)
        assert said <= taken * 100_000 + STREAM_WINDOW + STREAM_WINDOW // 2
    assert said == len(answer)


@pytest.mark.parametrize("wants_all", [True, False])
async def test_one_message_may_be_larger_than_the_windows(wants_all: bool) -> None:
    peer = Peer()
    call = begun(peer, b"request", wants_all=wants_all)
    await passes()
    peer.begin_answer(1)
    message = LARGE * 5
    waiting = asyncio.create_task(call.message() if wants_all else call.next())
    said, data = 0, prefixed(message)
    while said < len(data):
        part = peer.say(1, data[said:])
        assert part > 0
        said += part
        await passes(3)
    peer.end_answer(1)
    assert await waiting == message


async def test_the_window_of_the_connection_grows_whoever_takes_what() -> None:
    wire = Wire()
    calls = [begun(wire, b"request", wants_all=False) for _ in range(40)]
    for call in calls:
        wire.arrive(frame(HEADERS, END_HEADERS, call.stream, block(*OK)))
    await wire.sent()
    message = bytes(FRAME_BYTES_MAX - 5)
    grown = 0
    for call in calls:
        for _ in range(STREAM_WINDOW // FRAME_BYTES_MAX):
            wire.arrive(frame(DATA, 0, call.stream, prefixed(message)))
        sent = await wire.sent()
        assert {stream for kind, _, stream, _ in sent if kind == WINDOW_UPDATE} <= {0}
        grown += sum(int.from_bytes(data) for kind, _, _, data in sent if kind == WINDOW_UPDATE)
    assert grown >= CONNECTION_WINDOW // 2
    wire.arrive(frame(DATA, 0, calls[0].stream, b"x"))
    for _ in range(STREAM_WINDOW // FRAME_BYTES_MAX):
        assert await calls[0].next() == message
    with pytest.raises(CallFailed) as caught:
        await calls[0].next()
    assert caught.value.code is Code.INTERNAL
    assert "more data than the window permits" in caught.value.message
    assert (RST_STREAM, 0, calls[0].stream, ErrorCode.CANCEL.to_bytes(4)) in await wire.sent()
