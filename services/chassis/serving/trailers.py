"""Errors in trailers: gRPC limits them to 8 KiB, and a longer error loses its type on the way.

Then the caller would not know whether its call may be sent again. So texts are cut. If that is not
enough, everything but the plain fields of the cause is left out: the caller can ask again where a
tablet is, but not what kind of error it was.
"""

from __future__ import annotations

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from percolator.errors import PercolatorError
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.wire.status import DETAILS_TRAILER, status_code, to_detail, to_trailer

_DETAILS_BYTES_MAX = 3 * 1024
_TEXT_CHARACTERS_MAX = 200
"""Each character takes up to 12 bytes in the status message, as percent-encoded UTF-8."""


def failure(error: PercolatorError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """The arguments for `grpc.aio.ServicerContext.abort`."""
    code, message, detail = status_code(error), _short(str(error)), to_detail(error)
    trailer = to_trailer(code, message, detail)
    if len(trailer) > _DETAILS_BYTES_MAX:
        _cut(detail)
        trailer = to_trailer(code, message, detail)
    return code, message, ((DETAILS_TRAILER, trailer),)


def _cut(detail: ErrorDetail) -> None:
    _shorten(detail)
    cause = detail.WhichOneof("cause")
    if cause is not None:
        _shorten(getattr(detail, cause))
        if detail.ByteSize() > _DETAILS_BYTES_MAX:
            _leave_out_messages(getattr(detail, cause))


def _shorten(message: Message) -> None:
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            setattr(message, field.name, _short(value))


def _leave_out_messages(message: Message) -> None:
    for field, _ in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            message.ClearField(field.name)


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[: _TEXT_CHARACTERS_MAX - 1] + "…"
