"""How a call failed: what the server says of it, or what is made of its end.

Servers of gRPC send a status with each answer. Where there is none, the status follows from that
of HTTP, or from the error with which the stream was reset, as gRPC prescribes. There is one
difference: no error but the server's own status says that a quota refused the call. The driver
takes that as a promise that it was not executed, and a stream that is reset promises nothing.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote_to_bytes

import grpc

from percolator.bigtable.http2.frames import ErrorCode, error_name

Code: Final = grpc.StatusCode
Fields = Mapping[bytes, bytes]
"""The fields of a block of headers."""

_CODES: Final = {code.value[0]: code for code in Code}
_OF_HTTP: Final = {
    b"400": Code.INTERNAL,
    b"401": Code.UNAUTHENTICATED,
    b"403": Code.PERMISSION_DENIED,
    b"404": Code.UNIMPLEMENTED,
    b"429": Code.UNAVAILABLE,
    b"502": Code.UNAVAILABLE,
    b"503": Code.UNAVAILABLE,
    b"504": Code.UNAVAILABLE,
}
_OF_RESETS: Final = {
    ErrorCode.REFUSED_STREAM: Code.UNAVAILABLE,
    ErrorCode.CANCEL: Code.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: Code.UNAVAILABLE,
    ErrorCode.HTTP_1_1_REQUIRED: Code.UNKNOWN,
}
_GRPC: Final = b"application/grpc"


class CallFailed(Exception):
    """The status of a call that did not succeed."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        details: bytes = b"",
        *,
        not_executed: bool = False,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.details = details
        """An encoded `google.rpc.Status`, if the server has sent one."""
        self.not_executed = not_executed
        """Whether it is certain: the request never left, or the peer says so."""


def not_executed(why: str) -> CallFailed:
    return CallFailed(Code.UNAVAILABLE, why, not_executed=True)


def lost(why: str) -> CallFailed:
    """Nobody knows whether it was executed."""
    return CallFailed(Code.UNAVAILABLE, why)


def reset(code: int) -> CallFailed:
    """The peer has reset the stream."""
    known = code if code in _OF_RESETS else ErrorCode.INTERNAL_ERROR
    return CallFailed(
        _OF_RESETS.get(ErrorCode(known), Code.INTERNAL),
        f"the server has reset the stream: {error_name(code)}",
        not_executed=code == ErrorCode.REFUSED_STREAM,
    )


def is_grpc(fields: Fields) -> bool:
    """Whether the answer comes from a server of gRPC, and not from something in front of it."""
    kind = fields.get(b"content-type", b"")
    # A letter that follows would be another type: application/grpc-web.
    return kind.startswith(_GRPC) and kind[len(_GRPC) : len(_GRPC) + 1] in (b"", b"+", b";")


def of_http(fields: Fields) -> CallFailed:
    """An answer that is not gRPC's."""
    status = fields[b":status"]
    kind = fields.get(b"content-type", b"no type").decode("latin-1")
    return CallFailed(
        _OF_HTTP.get(status, Code.UNKNOWN),
        f"the answer is not gRPC's: HTTP status {status.decode('latin-1')}, {kind}",
    )


def of_trailers(fields: Fields) -> CallFailed | None:
    """The status at the end of an answer; None if the call has succeeded."""
    status = fields.get(b"grpc-status")
    if status == b"0":
        return None
    if status is None:
        return CallFailed(Code.UNKNOWN, "the answer has no status")
    code = _CODES.get(int(status), Code.UNKNOWN) if status.isdigit() else Code.UNKNOWN
    if code is Code.OK:  # "00"
        return None
    said = unquote_to_bytes(fields.get(b"grpc-message", b"")).decode("utf-8", "replace")
    return CallFailed(code, said, _binary(fields.get(b"grpc-status-details-bin", b"")))


def _binary(value: bytes) -> bytes:
    """A field of bytes, whose padding may be missing; of several, the first. What is damaged is
    left out: the status counts without its details."""
    first = value.partition(b",")[0]
    try:
        return base64.b64decode(first + b"=" * (-len(first) % 4), validate=True)
    except binascii.Error:
        return b""
