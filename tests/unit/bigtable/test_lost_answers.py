"""Changes whose answers are lost, or not gRPC's: only the service can say that it made none."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from contextlib import aclosing

import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from percolator.bigtable.channel import BigtableNetwork
from percolator.bigtable.methods import CHECK_AND_MUTATE_ROW, READ_ROWS
from percolator.errors import (
    ExecutionUnknown,
    InvalidArgument,
    PercolatorError,
    PermissionDenied,
    Retry,
    Unauthenticated,
    Unavailable,
    UsageError,
)
from percolator.v1.bigtable_pb2 import (
    BigtableCheckAndMutateRowRequest,
    BigtableCheckAndMutateRowResponse,
    BigtableReadRowsRequest,
    BigtableReadRowsResponse,
)
from tests.unit.bigtable.peer import DONE, HEADERS, Peer, PeerConnection

pytestmark = pytest.mark.real_time

SECONDS = 10.0
CHANGE = BigtableCheckAndMutateRowRequest(table_name="projects/p/instances/i/tables/t")
READ = BigtableReadRowsRequest(table_name=CHANGE.table_name)
MADE = BigtableCheckAndMutateRowResponse(predicate_matched=True)

CANCEL = 8

Answering = Callable[[PeerConnection, int], None]


def resetting(code: int, *messages: bytes, begins: bool = False) -> Answering:
    def answer(peer: PeerConnection, stream: int) -> None:
        if begins:
            peer.begin(stream, *messages)
        peer.h2.reset_stream(stream, code)

    return answer


def only_headers(*headers: tuple[str, str]) -> Answering:
    return lambda peer, stream: peer.h2.send_headers(stream, list(headers), end_stream=True)


def cut_off(data: bytes) -> Answering:
    def answer(peer: PeerConnection, stream: int) -> None:
        peer.h2.send_headers(stream, HEADERS)
        peer.h2.send_data(stream, data, end_stream=True)

    return answer


def dropping(peer: PeerConnection, _: int) -> None:
    peer.transport.abort()


def ending(peer: PeerConnection, stream: int) -> None:
    peer.leave(stream)
    peer.transport.close()


def without_message(peer: PeerConnection, stream: int) -> None:
    peer.begin(stream)
    peer.h2.send_headers(stream, DONE, end_stream=True)


def of_another_type(peer: PeerConnection, stream: int) -> None:
    peer.begin(stream, b"\xff")
    peer.h2.send_headers(stream, DONE, end_stream=True)


def above_the_limit(peer: PeerConnection, stream: int) -> None:
    peer.h2.send_headers(stream, HEADERS)
    peer.h2.send_data(stream, b"\0\xff\xff\xff\xff")


def with_endless_trailers(peer: PeerConnection, stream: int) -> None:
    peer.begin(stream, MADE.SerializeToString())
    endless = [(f"endless-{number}", "x" * 10_000) for number in range(8)]
    peer.h2.send_headers(stream, [*DONE, *endless], end_stream=True)


def http(status: int) -> Answering:
    return only_headers((":status", str(status)), ("content-type", "text/html"))


PERHAPS: dict[str, Answering] = {
    **{f"reset with {code}": resetting(code) for code in range(14)},
    **{f"begun and reset with {code}": resetting(code, begins=True) for code in (0, 7, 8, 11, 12)},
    "made and reset with 11": resetting(11, MADE.SerializeToString(), begins=True),
    **{f"HTTP status {status}": http(status) for status in (200, 400, 429, 431, 500, 502, 503)},
    "an unknown status": only_headers(*HEADERS, ("grpc-status", "99")),
    "a cut off message": cut_off(b"\0\0\0\0\5x"),
    "no status": cut_off(b"\0\0\0\0\0"),
    "a lost connection": dropping,
    "no message": without_message,
    "a message of another type": of_another_type,
    "a message above the limit": above_the_limit,
    "endless trailers": with_endless_trailers,
}


async def failed(answer: Answering) -> tuple[PercolatorError, Peer]:
    """The error of a change, after which the next one is answered."""
    peer = Peer(answer)
    network = BigtableNetwork()
    async with peer.listening() as address:
        change = network.unary(address, CHECK_AND_MUTATE_ROW)
        with pytest.raises(PercolatorError) as caught:
            await change(CHANGE, SECONDS)
        calls = peer.calls
        peer.answer_call = lambda peer, stream: peer.answer(stream, MADE)
        assert await change(CHANGE, SECONDS) == MADE
        peer.calls = calls
        await network.close()
    return caught.value, peer


@pytest.mark.parametrize("answer", PERHAPS.values(), ids=PERHAPS)
async def test_a_change_whose_answer_is_lost_may_have_been_made_and_is_not_repeated(
    answer: Answering,
) -> None:
    error, peer = await failed(answer)
    assert isinstance(error, ExecutionUnknown)
    assert error.retry is Retry.UNKNOWN
    assert peer.calls == 1


@pytest.mark.parametrize(
    ("status", "kind"), [(401, Unauthenticated), (403, PermissionDenied), (404, UsageError)]
)
async def test_a_server_in_front_of_the_service_may_refuse_calls(
    status: int, kind: type[PercolatorError]
) -> None:
    error, _ = await failed(http(status))
    assert type(error) is kind
    assert error.retry is Retry.USELESS


async def test_a_call_that_a_leaving_server_has_not_begun_is_made_once_elsewhere() -> None:
    def answer(connection: PeerConnection, stream: int) -> None:
        if connection is peer.connections[0]:
            connection.leave(0)
        else:
            connection.answer(stream, MADE)

    peer = Peer(answer)
    network = BigtableNetwork()
    async with peer.listening() as address:
        assert await network.unary(address, CHECK_AND_MUTATE_ROW)(CHANGE, SECONDS) == MADE
        assert peer.calls == 2
        await network.close()


async def test_a_leaving_server_answers_the_calls_that_it_has_begun() -> None:
    def answer(peer: PeerConnection, stream: int) -> None:
        peer.leave(stream)
        peer.answer(stream, MADE)

    peer = Peer(answer)
    network = BigtableNetwork()
    async with peer.listening() as address:
        change = network.unary(address, CHECK_AND_MUTATE_ROW)
        for calls in (1, 2):
            assert await change(CHANGE, SECONDS) == MADE
            assert peer.calls == calls
        peer.answer_call = ending
        with pytest.raises(Unavailable):
            await change(CHANGE, SECONDS)
        assert peer.calls == 3
        await network.close()


async def test_a_row_above_the_limit_is_named_as_the_reason() -> None:
    network = BigtableNetwork()
    async with Peer(above_the_limit).listening() as address:
        with pytest.raises(InvalidArgument, match=r"response: .*a row is too large"):
            await anext(network.stream(address, READ_ROWS)(READ, SECONDS))
        await network.close()


async def test_an_error_with_long_details_keeps_its_status() -> None:
    status = Status(code=14)
    delay = RetryInfo()
    delay.retry_delay.seconds = 3
    status.details.add().Pack(delay)
    status.details.add(value=bytes(20_000))
    details = base64.b64encode(status.SerializeToString()).decode()
    error, _ = await failed(
        only_headers(*HEADERS, ("grpc-status", "14"), ("grpc-status-details-bin", details))
    )
    assert type(error) is Unavailable
    assert error.retry_after_seconds == 3.0


async def test_a_scan_that_is_left_is_cancelled_at_the_server() -> None:
    peer = Peer(lambda peer, stream: peer.begin(stream, b""))
    network = BigtableNetwork()
    async with peer.listening() as address, asyncio.timeout(SECONDS):
        async with aclosing(network.stream(address, READ_ROWS)(READ, SECONDS)) as responses:
            assert await anext(responses) == BigtableReadRowsResponse()
        assert await peer.resets.get() == CANCEL
        await network.close()
