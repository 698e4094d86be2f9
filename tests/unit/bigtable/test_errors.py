"""Errors of Bigtable: above all, whether a call was executed, and what to do.

Only the service can say that it made no change: not a lost answer, nor one that is not gRPC's.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from contextlib import aclosing

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from percolator import errors
from percolator.bigtable.connection import BigtableNetwork
from percolator.bigtable.errors import FamilyMissing, from_rpc_error
from percolator.bigtable.messages import CHECK_AND_MUTATE_ROW, READ_ROWS
from percolator.errors import Retry
from percolator.v1.bigtable_pb2 import (
    BigtableCheckAndMutateRowRequest,
    BigtableCheckAndMutateRowResponse,
    BigtableReadRowsRequest,
    BigtableReadRowsResponse,
)
from tests.unit.bigtable.servers import DONE, HEADERS, Peer, PeerConnection

pytestmark = pytest.mark.real_time

DATA = "/google.bigtable.v2.Bigtable/CheckAndMutateRow of projects/p/instances/i/tables/t"
READ = "/google.bigtable.v2.Bigtable/ReadRows of projects/p/instances/i/tables/t"
ADMIN = "/google.bigtable.admin.v2.BigtableTableAdmin/CreateTable of projects/p/instances/i"

MEANINGS = {
    grpc.StatusCode.NOT_FOUND: (errors.SchemaError, Retry.USELESS),
    grpc.StatusCode.INVALID_ARGUMENT: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.FAILED_PRECONDITION: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.ALREADY_EXISTS: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.OUT_OF_RANGE: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.PERMISSION_DENIED: (errors.PermissionDenied, Retry.USELESS),
    grpc.StatusCode.UNAUTHENTICATED: (errors.Unauthenticated, Retry.USELESS),
    grpc.StatusCode.UNIMPLEMENTED: (errors.UsageError, Retry.USELESS),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (errors.Overloaded, Retry.SAFE),
    grpc.StatusCode.UNAVAILABLE: (errors.Unavailable, Retry.UNKNOWN),
    grpc.StatusCode.DEADLINE_EXCEEDED: (errors.DeadlineExceeded, Retry.UNKNOWN),
}


def failed(code: grpc.StatusCode, said: str, details: bytes = b"") -> grpc.aio.AioRpcError:
    trailer = [("grpc-status-details-bin", details)] if details else []
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), said)


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: code.name)
def test_only_codes_of_immediate_refusals_mean_not_executed(code: grpc.StatusCode) -> None:
    kind, retry = MEANINGS.get(code, (errors.ExecutionUnknown, Retry.UNKNOWN))
    found = from_rpc_error(failed(code, "what it says"), DATA)
    assert type(found) is kind
    assert found.retry is retry
    assert found.where == DATA


SAID = [
    # Code and message of the service, the call, and the error with a part of its text.
    (
        grpc.StatusCode.PERMISSION_DENIED,
        "Access denied. Missing IAM permission: bigtable.tables.mutateRows.",
        DATA,
        errors.PermissionDenied,
        "Missing IAM permission: bigtable.tables.mutateRows: grant the account roles/bigtable.user",
    ),
    (
        grpc.StatusCode.PERMISSION_DENIED,
        "Access denied. Missing IAM permission: bigtable.tables.create.",
        ADMIN,
        errors.PermissionDenied,
        "grant the account roles/bigtable.admin",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Instance not found: projects/p/instances/i",
        DATA,
        errors.InvalidArgument,
        "store: Instance not found: projects/p/instances/i: check bigtable://PROJECT/INSTANCE",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Project not found: p",
        ADMIN,
        errors.InvalidArgument,
        "check bigtable://PROJECT/INSTANCE",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "App profile not found: projects/p/instances/i/appProfiles/a",
        DATA,
        errors.InvalidArgument,
        "check the profile in the address",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Table not found: projects/p/instances/i/tables/t",
        DATA,
        errors.SchemaError,
        "Table not found",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        'table "projects/p/instances/user-profiles/tables/t" not found',
        DATA,
        errors.SchemaError,
        "user-profiles",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Instance not found: projects/tables/instances/tables",
        DATA,
        errors.InvalidArgument,
        "check bigtable://PROJECT/INSTANCE",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Error while mutating the row 'profile 1' (projects/p/instances/i/tables/t) : Requested "
        "column family not found.",
        DATA,
        FamilyMissing,
        "the table t lacks a family that it needs: somebody has removed it in the store itself",
    ),
    (
        grpc.StatusCode.UNKNOWN,
        'unknown family "w"',
        DATA,
        FamilyMissing,
        "the table t lacks the family w: somebody has removed it in the store itself",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Requested column family not found.",
        DATA.replace("tables/t", "tables/percolator-intents"),
        FamilyMissing,
        "create the family again there; changes that waited for observers are forgotten",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Requested column family not found.",
        DATA.replace("tables/t", "tables/percolator-0"),
        FamilyMissing,
        "restore it from a backup of the instance",
    ),
    (
        grpc.StatusCode.FAILED_PRECONDITION,
        "Table projects/p/instances/i/tables/t is being created",
        DATA,
        errors.NotReady,
        "is being created",
    ),
    (
        grpc.StatusCode.FAILED_PRECONDITION,
        "The table is either creating or deleting, please try again",
        DATA,
        errors.NotReady,
        "please try again",
    ),
    (
        grpc.StatusCode.FAILED_PRECONDITION,
        "Error while mutating the row 'creating' (projects/p/instances/creating/tables/t) : "
        "Single-row transactions are not allowed by this app profile",
        DATA,
        errors.UsageError,
        "routes to a single cluster",
    ),
    (
        grpc.StatusCode.FAILED_PRECONDITION,
        "Single-row transactions are not allowed by this app profile",
        DATA,
        errors.UsageError,
        "routes to a single cluster",
    ),
    (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "Quota exceeded for quota metric 'Read requests'",
        DATA,
        errors.Overloaded,
        "add nodes, or ask for a higher quota",
    ),
    (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CLIENT: Sent message larger than max (300 vs. 200)",
        DATA,
        errors.InvalidArgument,
        "send less in one call",
    ),
    (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "Stream removed (CLIENT: Received message larger than max (300 vs. 200))",
        READ,
        errors.InvalidArgument,
        "a row is too large",
    ),
    (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "Stream removed (CLIENT: Received message larger than max (300 vs. 200))",
        DATA,
        errors.ExecutionUnknown,
        "larger than max",
    ),
    (
        grpc.StatusCode.UNAUTHENTICATED,
        "Request had invalid authentication credentials.",
        DATA,
        errors.Unauthenticated,
        "GOOGLE_APPLICATION_CREDENTIALS",
    ),
]


@pytest.mark.parametrize(("code", "said", "where", "kind", "told"), SAID)
def test_an_error_comes_with_advice(
    code: grpc.StatusCode, said: str, where: str, kind: type[errors.PercolatorError], told: str
) -> None:
    found = from_rpc_error(failed(code, said), where)
    assert type(found) is kind
    assert told in found.message


def _asking(seconds: int, nanos: int) -> bytes:
    packed = Packed()
    packed.Pack(RetryInfo(retry_delay=Duration(seconds=seconds, nanos=nanos)))
    encoded: bytes = Status(code=8, details=[packed]).SerializeToString()
    return encoded


@pytest.mark.parametrize(
    ("trailer", "seconds"),
    [
        (_asking(2, 500_000_000), 2.5),
        (_asking(-1, 0), 0.0),
        (b"\xff damaged", 0.1),
        (Status(code=8).SerializeToString(), 0.1),
        (b"", 0.1),
    ],
)
def test_the_error_has_the_pause_that_the_service_asks_for(trailer: bytes, seconds: float) -> None:
    found = from_rpc_error(failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", trailer), DATA)
    assert isinstance(found, errors.Overloaded)
    assert found.retry_after_seconds == seconds


@pytest.mark.parametrize(
    ("code", "seconds"),
    [
        (grpc.StatusCode.UNAVAILABLE, 2.5),
        (grpc.StatusCode.ABORTED, 2.5),
        (grpc.StatusCode.INTERNAL, 2.5),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 2.5),
        (grpc.StatusCode.NOT_FOUND, 0.0),
        (grpc.StatusCode.INVALID_ARGUMENT, 0.0),
    ],
    ids=lambda given: str(given),
)
def test_every_error_after_which_a_call_may_be_repeated_has_the_pause(
    code: grpc.StatusCode, seconds: float
) -> None:
    found = from_rpc_error(failed(code, "later", _asking(2, 500_000_000)), DATA)
    assert found.retry_after_seconds == seconds
    assert from_rpc_error(failed(code, "later", b""), DATA).retry_after_seconds == 0.0


SECONDS = 10.0
CHANGE = BigtableCheckAndMutateRowRequest(table_name="projects/p/instances/i/tables/t")
READING = BigtableReadRowsRequest(table_name=CHANGE.table_name)
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


async def error_of(answer: Answering) -> tuple[errors.PercolatorError, Peer]:
    """The error of a change, after which the next one is answered."""
    peer = Peer(answer)
    network = BigtableNetwork()
    async with peer.listening() as address:
        change = network.unary(address, CHECK_AND_MUTATE_ROW)
        with pytest.raises(errors.PercolatorError) as caught:
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
    error, peer = await error_of(answer)
    assert isinstance(error, errors.ExecutionUnknown)
    assert error.retry is Retry.UNKNOWN
    assert peer.calls == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, errors.Unauthenticated), (403, errors.PermissionDenied), (404, errors.UsageError)],
)
async def test_a_server_in_front_of_the_service_may_refuse_calls(
    status: int, kind: type[errors.PercolatorError]
) -> None:
    error, _ = await error_of(http(status))
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
        with pytest.raises(errors.Unavailable):
            await change(CHANGE, SECONDS)
        assert peer.calls == 3
        await network.close()


async def test_a_row_above_the_limit_is_named_as_the_reason() -> None:
    network = BigtableNetwork()
    async with Peer(above_the_limit).listening() as address:
        with pytest.raises(errors.InvalidArgument, match=r"response: .*a row is too large"):
            await anext(network.stream(address, READ_ROWS)(READING, SECONDS))
        await network.close()


async def test_an_error_with_long_details_keeps_its_status() -> None:
    status = Status(code=14)
    delay = RetryInfo()
    delay.retry_delay.seconds = 3
    status.details.add().Pack(delay)
    status.details.add(value=bytes(20_000))
    details = base64.b64encode(status.SerializeToString()).decode()
    error, _ = await error_of(
        only_headers(*HEADERS, ("grpc-status", "14"), ("grpc-status-details-bin", details))
    )
    assert type(error) is errors.Unavailable
    assert error.retry_after_seconds == 3.0


async def test_a_scan_that_is_abandoned_is_cancelled_at_the_server() -> None:
    peer = Peer(lambda peer, stream: peer.begin(stream, b""))
    network = BigtableNetwork()
    async with peer.listening() as address, asyncio.timeout(SECONDS):
        async with aclosing(network.stream(address, READ_ROWS)(READING, SECONDS)) as responses:
            assert await anext(responses) == BigtableReadRowsResponse()
        assert await peer.resets.get() == CANCEL
        await network.close()
