"""Judges one answer: accepted, refused with a typed error, or wrong."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from google.protobuf.message import DecodeError, Message

from percolator.errors import InvariantViolation
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.wire.roles import REQUIRED, Role
from percolator.wire.status import DETAILS_TRAILER, from_detail, from_rpc_error
from tests.fuzz.messages import places
from tests.fuzz.methods import MAY_WAIT, Method

_REFUSALS = (
    "ReadResponse",
    "MutateResponse",
    "CommitTransactionsResponse",
    "MutateTogetherResponse",
    "ScanResponse",
    "ScanCellsResponse",
    "ScanNotificationsResponse",
    "RaiseSafePointsResponse",
)
"""Answers in which an error refuses a part of the request. In others it describes a tablet."""

_UNTYPED = {
    ("unknown method", grpc.StatusCode.UNIMPLEMENTED): "gRPC answers for methods that do not exist",
    ("other server", grpc.StatusCode.UNIMPLEMENTED): "that server has no such method",
    ("through a gateway", grpc.StatusCode.UNIMPLEMENTED): "that server has no such method",
    ("through a gateway", grpc.StatusCode.UNAVAILABLE): "nothing listens where a server registered",
    ("metadata", grpc.StatusCode.RESOURCE_EXHAUSTED): "gRPC limits the size of metadata",
    ("abandoned", grpc.StatusCode.DEADLINE_EXCEEDED): "the caller's own deadline",
    ("abandoned", grpc.StatusCode.CANCELLED): "the caller's own doing",
}
"""Statuses without our detail that are right, by the kind of input, with the reason."""

_BY_LIBRARY = {
    ("damaged bytes", grpc.StatusCode.UNKNOWN): "the library of the service decodes it",
}
"""Statuses of gRPC's own services that are neither ours to choose nor harmful, with the reason."""

_NOT_TO_BE = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class Wrong(Exception):
    """An answer that must not be."""


_STREAM_HAD_ENDED = "Internal error from Core"
"""What gRPC's client says when a call has ended before it could send all requests of a stream."""


def judge_success(method: Method, kind: str, answers: list[bytes], role: Role) -> str:
    """What became of a call that succeeded: "accepted", or the error of its refused part."""
    required = REQUIRED.get(method.path)
    if method.own and (required is None or role < required):
        raise Wrong(f"{method.path} was executed for the role {role.name}")
    outcome = "accepted"
    for raw in answers:
        try:
            answer = method.response.FromString(raw)
        except DecodeError as error:
            raise Wrong(f"{method.path} answers what is no {method.response.__name__}") from error
        for detail in _details(answer):
            error_name = _judge_detail(method, detail)
            if type(answer).__name__ in _REFUSALS:
                outcome = error_name
    return outcome


def judge_failure(method: Method, kind: str, error: grpc.aio.AioRpcError, role: Role) -> str:
    """The name of the typed error with which a call failed, or of its status."""
    code = error.code()
    trailers = {key for key, _ in error.trailing_metadata() or ()}
    if method.own and DETAILS_TRAILER in trailers:
        typed = from_rpc_error(error, method.path)
        return (
            _judge_typed(method, typed.message, isinstance(typed, InvariantViolation))
            or type(typed).__name__
        )
    if (kind, code) in _UNTYPED:
        return str(code.name)
    if method.client_streaming and error.details() == _STREAM_HAD_ENDED:
        return "ended"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        if method.path in MAY_WAIT:
            return str(code.name)
        raise Wrong(f"{method.path} hangs: no answer before the deadline")
    if not method.own and (code not in _NOT_TO_BE or (kind, code) in _BY_LIBRARY):
        return str(code.name)
    if code is grpc.StatusCode.UNAVAILABLE:
        raise Wrong(f"a server of {method.path.split('/')[1]} is gone: {error.details()}")
    raise Wrong(f"{method.path} ({kind}): {code.name} without detail: {error.details()}")


def _details(answer: Message) -> Iterator[ErrorDetail]:
    for place in places(answer):
        if isinstance(place, ErrorDetail):
            yield place


def _judge_detail(method: Method, detail: ErrorDetail) -> str:
    typed = from_detail(detail)
    _judge_typed(method, typed.message, isinstance(typed, InvariantViolation))
    return type(typed).__name__


def _judge_typed(method: Method, message: str, violation: bool) -> str:
    """An error that no check has foreseen is wrong, whatever was sent."""
    if violation:
        raise Wrong(f"{method.path}: {message}")
    return ""
