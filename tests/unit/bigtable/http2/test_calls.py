"""Calls and their answers, as another implementation of HTTP/2 reads and writes them."""

from __future__ import annotations

import asyncio
import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.bigtable.http2.call import Call
from percolator.bigtable.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PRIORITY,
    WITH_PRIORITY,
    ErrorCode,
    frame,
)
from percolator.bigtable.http2.headers import RequestHeads
from percolator.bigtable.http2.messages import MESSAGE_BYTES_MAX, prefixed
from percolator.bigtable.http2.settings import HEADER_TABLE_SIZE
from percolator.bigtable.http2.status import CallFailed, Code
from tests.simulation.virtual_time import run_virtually
from tests.unit.bigtable.http2.peer import DONE, OK, PATH, Peer, Wire, block, head, passes

Fields = list[tuple[str, str]]


def begun(wire: Wire, body: bytes = b"request", *, wants_all: bool = True) -> Call:
    return wire.connection.begin(head(), prefixed(body), 10.0, wants_all=wants_all)


async def failed(call: Call) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        await call.message()
    return caught.value


async def test_a_call_says_what_grpc_asks_for() -> None:
    peer = Peer()
    heads = RequestHeads("server:1", is_secure=True, user_agent="test")
    metadata = (("x-goog-request-params", "a=b" * 100), ("authorization", "Bearer " + "t" * 2000))
    encoded = heads.head(PATH, metadata, 1.5)
    call = peer.connection.begin(encoded, prefixed(b"request"), 1.5, wants_all=True)
    await passes()
    assert peer.requests == {
        1: {
            ":method": "POST",
            ":scheme": "https",
            ":path": PATH,
            ":authority": "server:1",
            "te": "trailers",
            "grpc-timeout": "1501m",
            "content-type": "application/grpc",
            "user-agent": "test",
            "grpc-accept-encoding": "identity",
            "x-goog-request-params": "a=b" * 100,
            "authorization": "Bearer " + "t" * 2000,
        }
    }
    assert b"\x10\x0dauthorization" in encoded  # never to be indexed
    assert peer.bodies == {1: b"\x00\x00\x00\x00\x07request"}
    assert peer.whole == {1}
    peer.begin_answer(1)
    peer.say(1, prefixed(b"answer"))
    peer.end_answer(1)
    assert await call.message() == b"answer"
    peer.connection.leave(call)
    await passes()
    assert not peer.resets


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, b"1m"),
        (0.25, b"251m"),
        (99_999.0, b"99999001m"),
        (1e6, b"1000001S"),
        (1e12, b"99999999S"),
    ],
)
def test_a_time_out_has_at_most_eight_digits(seconds: float, text: bytes) -> None:
    name = b"\x0cgrpc-timeout"
    encoded = head(seconds)
    assert name + bytes((len(text),)) + text in encoded


@pytest.mark.parametrize("size", [0, 1_024, 65_536])
async def test_a_peer_may_keep_a_table_of_headers_of_any_size(size: int) -> None:
    """By RFC 7541, it need not understand us if we have not said that ours is smaller, too."""
    peer = Peer(settings={HEADER_TABLE_SIZE: size})
    await passes()
    calls = [begun(peer), begun(peer)]
    await passes()
    peer.h2.update_settings({HEADER_TABLE_SIZE: size // 2})
    peer.send()
    await passes()
    calls.append(begun(peer))
    await passes()
    assert peer.whole == {1, 3, 5}
    for call in calls:
        peer.connection.leave(call)


async def test_calls_of_one_pass_leave_in_one_piece() -> None:
    wire = Wire()
    await wire.sent()
    before = len(wire.transport.writes)
    for _ in range(5):
        begun(wire)
    sent = await wire.sent()
    assert [(kind, stream) for kind, _, stream, _ in sent] == [
        (kind, stream) for stream in (1, 3, 5, 7, 9) for kind in (HEADERS, DATA)
    ]
    assert len(wire.transport.writes) == before + 1


async def test_messages_of_a_stream_are_given_out_as_they_come() -> None:
    peer = Peer()
    call = begun(peer, wants_all=False)
    await passes()
    peer.begin_answer(1)
    waiting = asyncio.create_task(call.next())
    await passes()
    assert not waiting.done()
    peer.say(1, prefixed(b"one") + prefixed(b"") + prefixed(b"three"))
    assert await waiting == b"one"
    assert [await call.next(), await call.next()] == [b"", b"three"]
    peer.end_answer(1)
    assert await call.next() is None


@given(
    messages=st.lists(st.binary(max_size=40), max_size=5),
    frame_sizes=st.lists(st.integers(0, 20), min_size=1, max_size=30),
    pieces=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    padding=st.lists(st.integers(0, 9), min_size=1, max_size=10),
)
def test_however_an_answer_is_cut_its_messages_are_the_same(
    messages: list[bytes], frame_sizes: list[int], pieces: list[int], padding: list[int]
) -> None:
    async def check() -> None:
        wire = Wire()
        call = begun(wire, wants_all=False)
        data = b"".join(map(prefixed, messages))
        answer = frame(HEADERS, END_HEADERS, 1, block(*OK))
        number = 0
        while data:
            size, pad = frame_sizes[number % len(frame_sizes)], padding[number % len(padding)]
            part, data = data[: size or number % 3], data[size or number % 3 :]
            if pad:
                answer += frame(DATA, PADDED, 1, bytes((pad,)) + part + bytes(pad))
            else:
                answer += frame(DATA, 0, 1, part)
            number += 1
        answer += frame(HEADERS, END_HEADERS | END_STREAM, 1, block(*DONE))
        number = 0
        while answer:
            size = pieces[number % len(pieces)]
            wire.arrive(answer[:size])
            answer = answer[size:]
            number += 1
        found = []
        while (message := await call.next()) is not None:
            found.append(message)
        assert found == messages

    run_virtually(check())


async def test_headers_may_be_continued_padded_and_have_a_priority() -> None:
    wire = Wire()
    call = begun(wire)
    fields = block(*OK, ("x-more", "m" * 50))
    padded = b"\x03" + bytes(5) + fields[:10] + bytes(3)
    wire.arrive(
        frame(PRIORITY, 0, 1, bytes(5)),
        frame(HEADERS, PADDED | WITH_PRIORITY, 1, padded),
        frame(CONTINUATION, 0, 1, fields[10:20]),
        frame(CONTINUATION, 0, 1),
        frame(CONTINUATION, END_HEADERS, 1, fields[20:]),
        frame(DATA, 0, 1, prefixed(b"answer")),
        frame(0xFA, 0xFF, 1, b"a kind that nobody knows"),
        frame(HEADERS, END_STREAM, 1, b""),
        frame(CONTINUATION, END_HEADERS, 1, block(*DONE)),
    )
    assert await call.message() == b"answer"


async def test_answers_that_only_announce_another_one_are_passed_over() -> None:
    wire = Wire()
    call = begun(wire)
    wire.arrive(frame(HEADERS, END_HEADERS, 1, block((":status", "103"))))
    wire.answer(1, b"answer")
    assert await call.message() == b"answer"


STATUS = b"\x08\x08\x12\x04busy"
TRAILERS: dict[str, tuple[Fields, Code, str, bytes]] = {
    "a status with a message": (
        [("grpc-status", "9"), ("grpc-message", "caf%C3%A9 %25 100% %zz")],
        Code.FAILED_PRECONDITION,
        "café % 100% %zz",
        b"",
    ),
    "details with padding": (
        [("grpc-status", "8"), ("grpc-status-details-bin", base64.b64encode(STATUS).decode())],
        Code.RESOURCE_EXHAUSTED,
        "",
        STATUS,
    ),
    "details without": (
        [
            ("grpc-status", "8"),
            ("grpc-status-details-bin", base64.b64encode(STATUS).decode().rstrip("=")),
        ],
        Code.RESOURCE_EXHAUSTED,
        "",
        STATUS,
    ),
    "details that are damaged": (
        [("grpc-status", "8"), ("grpc-status-details-bin", "!!")],
        Code.RESOURCE_EXHAUSTED,
        "",
        b"",
    ),
    "a status that is not UTF-8": (
        [("grpc-status", "5"), ("grpc-message", "%ff")],
        Code.NOT_FOUND,
        "\N{REPLACEMENT CHARACTER}",
        b"",
    ),
    "a status of the future": ([("grpc-status", "17")], Code.UNKNOWN, "", b""),
    "a status that is no number": ([("grpc-status", "-1")], Code.UNKNOWN, "", b""),
    "no status": ([("x-other", "1")], Code.UNKNOWN, "the answer has no status", b""),
}


@pytest.mark.parametrize("name", TRAILERS)
@pytest.mark.parametrize("only", [False, True], ids=["after a message", "trailers only"])
async def test_the_status_at_the_end_decides(name: str, only: bool) -> None:
    fields, code, said, details = TRAILERS[name]
    wire = Wire()
    call = begun(wire)
    if only:
        fields = OK + fields
    else:
        wire.arrive(
            frame(HEADERS, END_HEADERS, 1, block(*OK)), frame(DATA, 0, 1, prefixed(b"answer"))
        )
    wire.arrive(frame(HEADERS, END_HEADERS | END_STREAM, 1, block(*fields)))
    found = await failed(call)
    assert (found.code, found.message, found.details) == (code, said, details)
    assert not found.not_executed


async def test_messages_before_a_bad_status_are_given_out_first() -> None:
    wire = Wire()
    call = begun(wire, wants_all=False)
    wire.arrive(
        frame(HEADERS, END_HEADERS, 1, block(*OK)),
        frame(DATA, 0, 1, prefixed(b"one")),
        frame(HEADERS, END_HEADERS | END_STREAM, 1, block(("grpc-status", "10"))),
    )
    assert await call.next() == b"one"
    with pytest.raises(CallFailed) as caught:
        await call.next()
    assert caught.value.code is Code.ABORTED


HTML = ("content-type", "text/html")
OF_HTTP = {
    "400": Code.INTERNAL,
    "401": Code.UNAUTHENTICATED,
    "403": Code.PERMISSION_DENIED,
    "404": Code.UNIMPLEMENTED,
    "429": Code.UNAVAILABLE,
    "502": Code.UNAVAILABLE,
    "503": Code.UNAVAILABLE,
    "504": Code.UNAVAILABLE,
    "500": Code.UNKNOWN,
    "301": Code.UNKNOWN,
    "200": Code.UNKNOWN,
}


@pytest.mark.parametrize("status", OF_HTTP)
@pytest.mark.parametrize("last", [False, True], ids=["with a page", "without"])
async def test_what_is_no_answer_of_grpc_has_the_status_of_http(status: str, last: bool) -> None:
    wire = Wire()
    call = begun(wire)
    await wire.sent()
    flags = END_HEADERS | (END_STREAM if last else 0)
    wire.arrive(frame(HEADERS, flags, 1, block((":status", status), HTML)))
    found = await failed(call)
    assert found.code is OF_HTTP[status]
    assert f"HTTP status {status}, text/html" in found.message
    wire.arrive(frame(DATA, END_STREAM, 1, b"<html>"))  # on its way
    await wire.answered(b"the next call")


G, T = frame(HEADERS, END_HEADERS, 1, block(*OK)), block(*DONE)
END = frame(HEADERS, END_HEADERS | END_STREAM, 1, T)
IMPOSSIBLE: dict[str, tuple[list[bytes], str]] = {
    "no message": ([G, END], "without a message"),
    "two messages": ([G, frame(DATA, 0, 1, prefixed(b"a") * 2)], "several messages"),
    "half a message": ([G, frame(DATA, 0, 1, prefixed(b"abc")[:-1]), END], "cut off"),
    "half a prefix": ([G, frame(DATA, 0, 1, b"\0\0"), END], "cut off"),
    "no trailers": ([G, frame(DATA, END_STREAM, 1, prefixed(b"a"))], "no status"),
    "data before headers": ([frame(DATA, 0, 1, prefixed(b"a"))], "without headers"),
    "no HTTP status": ([frame(HEADERS, END_HEADERS, 1, block(*OK[1:]))], "without an HTTP"),
    "a strange HTTP status": (
        [frame(HEADERS, END_HEADERS, 1, block((":status", "2000"), OK[1]))],
        "without an HTTP",
    ),
    "headers twice": ([G, G], "in the middle"),
    "only announced": (
        [frame(HEADERS, END_HEADERS | END_STREAM, 1, block((":status", "100")))],
        "only announces",
    ),
    "a compressed message": ([G, frame(DATA, 0, 1, b"\1\0\0\0\1a")], "is compressed"),
    "compressed messages": (
        [frame(HEADERS, END_HEADERS, 1, block(*OK, ("grpc-encoding", "gzip")))],
        "is compressed",
    ),
    "a huge message": (
        [G, frame(DATA, 0, 1, b"\0" + (MESSAGE_BYTES_MAX + 1).to_bytes(4))],
        "Received message larger than max",
    ),
    "an upper-case name": (
        [frame(HEADERS, END_HEADERS, 1, block(*OK, ("X-Up", "1")))],
        "headers have a field b'X-Up'",
    ),
    "a field of connections": (
        [frame(HEADERS, END_HEADERS, 1, block(*OK, ("connection", "close")))],
        "a field b'connection'",
    ),
    "a request": ([frame(HEADERS, END_HEADERS, 1, block(*OK, (":path", "/")))], "a field b':path'"),
    "a status at the end": (
        [G, frame(HEADERS, END_HEADERS | END_STREAM, 1, block(*OK, *DONE))],
        "in the middle",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
async def test_an_answer_that_cannot_be_fails_its_call_and_no_other(name: str) -> None:
    answer, told = IMPOSSIBLE[name]
    wire = Wire()
    call = begun(wire)
    wire.arrive(*answer)
    found = await failed(call)
    assert told in found.message
    assert found.code in (Code.INTERNAL, Code.UNKNOWN, Code.RESOURCE_EXHAUSTED)
    assert not found.not_executed
    wire.connection.leave(call)
    await wire.answered(b"the next call")


async def test_a_call_ends_at_its_deadline_for_both_sides() -> None:
    peer = Peer()
    began = asyncio.get_running_loop().time()
    call = begun(peer)
    found = await failed(call)
    assert found.code is Code.DEADLINE_EXCEEDED
    assert asyncio.get_running_loop().time() == began + 10.0
    peer.connection.leave(call)
    await passes()
    assert peer.resets == {1: ErrorCode.CANCEL}


async def test_a_call_that_is_left_is_cancelled_and_its_late_answer_ignored() -> None:
    wire = Wire()
    call = begun(wire)
    waiting = asyncio.create_task(call.message())
    await wire.sent()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    wire.connection.leave(call)
    assert await wire.sent() == [(3, 0, 1, b"\0\0\0\x08")]
    wire.answer(1, b"late")
    await wire.answered(b"the next call")
