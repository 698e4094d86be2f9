"""Errors and gRPC's status codes: as errors.proto documents them, and as calls fail."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from percolator import errors
from percolator.v1 import errors_pb2
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.wire import methods
from percolator.wire.frames import HEADER, PREAMBLE, Frame, FrameReader, Kind, NotFrames, frame
from percolator.wire.status import (
    DETAILS_TRAILER,
    from_detail,
    from_rpc_error,
    status_code,
    to_detail,
    to_trailer,
)

PROTO = Path(__file__).parents[3] / "protos/percolator/v1/errors.proto"


def test_each_cause_is_sent_with_the_status_code_that_its_comment_names() -> None:
    documented = {
        message: code
        for code, message in re.findall(r"Sent as (\w+)\.\nmessage (\w+)", PROTO.read_text())
    }
    sent = {}
    for field in ErrorDetail.DESCRIPTOR.oneofs_by_name["cause"].fields:
        detail = ErrorDetail()
        getattr(detail, field.name).SetInParent()
        cause = type(getattr(detail, field.name)).__name__
        sent[cause] = status_code(from_detail(detail)).name
    assert sent == documented


CAUSES = [field.name for field in ErrorDetail.DESCRIPTOR.oneofs_by_name["cause"].fields]


def filled(message: Message) -> None:
    """Sets every field of a message."""
    for field in message.DESCRIPTOR.fields:
        target = getattr(message, field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            filled(target.add() if hasattr(target, "add") else target)
        elif hasattr(target, "append"):
            target.append(b"7")
        elif field.type == FieldDescriptor.TYPE_STRING:
            setattr(message, field.name, "text")
        else:
            setattr(message, field.name, b"7" if isinstance(target, bytes) else 1)


@pytest.mark.parametrize("cause", CAUSES)
def test_every_field_of_every_cause_travels_both_ways(cause: str) -> None:
    """A cause that was added to the messages but forgotten in one direction fails here."""
    detail = ErrorDetail(message="text", where="w", retry=errors_pb2.RETRY_SAFETY_UNKNOWN)
    getattr(detail, cause).SetInParent()
    filled(getattr(detail, cause))
    back = to_detail(from_detail(detail))
    assert back.WhichOneof("cause") == cause
    assert getattr(back, cause) == getattr(detail, cause)
    assert (back.where, back.retry) == (detail.where, detail.retry)


@pytest.mark.parametrize(("asked", "told"), [(2.5, 2.5), (0.0, 0.0), (1e9, 4_294_967.295)])
@pytest.mark.parametrize(
    "error",
    [
        errors.Unavailable("restarting"),
        errors.ExecutionUnknown("ABORTED"),
        errors.NotReady("being created"),
        errors.Overloaded("busy", retry_after_seconds=0.0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_pause_that_a_store_asks_for_passes_through_a_gateway(
    error: errors.PercolatorError, asked: float, told: float
) -> None:
    """Behind it, nobody else could keep the pause."""
    error.retry_after_seconds = asked
    assert from_detail(to_detail(error)).retry_after_seconds == told


def failed_call(
    code: grpc.StatusCode, details: str, trailer: bytes | None = None
) -> grpc.aio.AioRpcError:
    metadata = () if trailer is None else ((DETAILS_TRAILER, trailer),)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        ("no role may call it", errors.UsageError),
        ("it needs ADMIN", errors.PermissionDenied),
    ],
)
def test_a_method_that_no_role_may_call_is_one_that_an_older_gateway_does_not_know(
    needed: str, expected: type[errors.PercolatorError]
) -> None:
    sent = errors.PermissionDenied(f"the caller has the role CLIENT, but {needed}")
    trailer = to_trailer(status_code(sent), str(sent), to_detail(sent))
    call = failed_call(status_code(sent), str(sent), trailer)
    assert type(from_rpc_error(call, "/percolator.v1.New/Method at a:1")) is expected


def _starting(where: str) -> grpc.aio.AioRpcError:
    sent = errors.NotReady("starting", retry_after_seconds=0.5, where=where)
    trailer = to_trailer(status_code(sent), str(sent), to_detail(sent))
    return failed_call(status_code(sent), "starting", trailer)


@pytest.mark.parametrize(
    ("call", "kind", "where"),
    [
        (_starting(""), errors.NotReady, "Scan at a:1"),
        (_starting("tablet 7"), errors.NotReady, "tablet 7"),
        (failed_call(grpc.StatusCode.UNAVAILABLE, "refused"), errors.Unavailable, "Scan at a:1"),
    ],
    ids=["a typed error without a place", "one with a place", "no server was reached"],
)
def test_an_error_without_a_place_names_the_address_that_was_dialled(
    call: grpc.aio.AioRpcError, kind: type[errors.PercolatorError], where: str
) -> None:
    found = from_rpc_error(call, "Scan at a:1")
    assert (type(found), found.where) == (kind, where)


@pytest.mark.parametrize(
    "details",
    [
        "CLIENT: Sent message larger than max (2000 vs. 100)",
        "SERVER: Received message larger than max (2000 vs. 100)",
    ],
)
def test_a_request_above_a_limit_is_refused_and_the_error_names_the_limit(details: str) -> None:
    found = from_rpc_error(failed_call(grpc.StatusCode.RESOURCE_EXHAUSTED, details), "Scan")
    assert isinstance(found, errors.InvalidArgument)
    assert found.field == "request"
    assert found.retry is errors.Retry.USELESS
    assert "has 2000 bytes, at most 100 are accepted; send less" in str(found)


@pytest.mark.parametrize(
    "details",
    [
        "SERVER: Sent message larger than max (5000 vs. 100)",
        "Stream removed (CLIENT: Received message larger than max (5000 vs. 100))",
    ],
)
@pytest.mark.parametrize(
    ("method", "kind", "says"),
    [
        (methods.SCAN, errors.InvalidArgument, "response: has 5000 bytes, at most 100"),
        (methods.MUTATE, errors.ExecutionUnknown, "executed, but its response has 5000 bytes"),
    ],
)
def test_an_answer_above_a_limit_says_whether_anything_may_have_changed(
    details: str, method: Any, kind: type[errors.PercolatorError], says: str
) -> None:
    error = failed_call(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
    found = from_rpc_error(error, f"{method.path} at a:1")
    assert type(found) is kind
    assert says in str(found)
    assert found.retry is not errors.Retry.SAFE


def test_a_quota_of_a_proxy_is_not_taken_for_a_message_above_a_limit() -> None:
    """The call may have been executed."""
    error = failed_call(grpc.StatusCode.RESOURCE_EXHAUSTED, "the quota of this proxy is used up")
    assert type(from_rpc_error(error, "Scan")) is errors.ExecutionUnknown


# Frames are cut out of whatever pieces the network delivers, and noise is refused at once.

SENT = [
    Frame(Kind.HELLO, 0, b"hello"),
    Frame(Kind.CALL, 1, b""),
    Frame(Kind.ANSWER, 2**32 - 1, bytes(1000)),
]
BYTES = PREAMBLE + b"".join(frame(Kind(one.kind), one.call, one.body) for one in SENT)


def cut(reader: FrameReader) -> list[Frame]:
    found = []
    while (one := reader.next()) is not None:
        found.append(one)
    return found


@pytest.mark.parametrize("size", [1, 2, 7, 100, len(BYTES)])
def test_frames_come_out_as_they_were_sent_whatever_the_pieces(size: int) -> None:
    reader = FrameReader(1000, PREAMBLE)
    found = []
    for start in range(0, len(BYTES), size):
        reader.add(BYTES[start : start + size])
        found += cut(reader)
    assert found == SENT
    assert not reader.kept


def test_a_part_of_a_frame_is_kept() -> None:
    reader = FrameReader(1000)
    reader.add(frame(Kind.PING, 0)[:-1])
    assert cut(reader) == []
    assert reader.kept


@pytest.mark.parametrize(
    ("noise", "begins", "said"),
    [
        (b"G", PREAMBLE, "does not begin"),
        (b"\x16\x03\x01", PREAMBLE, "does not begin"),
        (PREAMBLE[:-2] + b"2\n", PREAMBLE, "does not begin"),
        (HEADER.pack(1001, Kind.CALL, 1), b"", "1001 bytes, at most 1000"),
    ],
)
def test_what_is_no_frame_or_too_large_is_refused_at_its_first_bytes(
    noise: bytes, begins: bytes, said: str
) -> None:
    reader = FrameReader(1000, begins)
    reader.add(noise)
    with pytest.raises(NotFrames, match=said):
        reader.next()
