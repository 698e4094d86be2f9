"""Frames of HTTP/2 as bytes (RFC 9113, sections 4 and 6)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES_MAX: Final = 16_384
"""The longest payload that we accept: the least that a peer may rely on."""
STREAM_MAX: Final = 2**31 - 1

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
WITH_PRIORITY: Final = 0x20

_HEAD: Final = struct.Struct(">IBI")
"""The length and the kind share the first four bytes."""
HEAD_BYTES: Final = 9
_PRIORITY_BYTES: Final = 5
_NUMBER: Final = struct.Struct(">I")
_GOAWAY: Final = struct.Struct(">II")


class ErrorCode(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


def error_name(code: int) -> str:
    """For messages; a peer may send any number."""
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"error {code}"


class Violation(Exception):
    """The peer does what HTTP/2 forbids. The connection cannot be used any more."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


Frame = tuple[int, int, int, bytes]
"""Kind, flags, stream, payload."""


class FrameReader:
    """Cuts what arrives into frames, whatever the pieces in which it arrives."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete by now. Consume them all, unless the connection ends."""
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while end - at >= HEAD_BYTES:
            length_and_kind, flags, stream = _HEAD.unpack_from(data, at)
            length = length_and_kind >> 8
            if length > FRAME_BYTES_MAX:
                raise Violation(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length:,} bytes")
            first = at + HEAD_BYTES
            if first + length > end:
                break
            at = first + length
            yield length_and_kind & 0xFF, flags, stream & STREAM_MAX, data[first:at]
        self._rest = data[at:]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return _HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


def frame_head(kind: int, flags: int, stream: int, length: int) -> bytes:
    """What comes before a payload of that length."""
    return _HEAD.pack(length << 8 | kind, flags, stream)


def rst_stream(stream: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def window_update(stream: int, more: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(more))


def goaway(code: ErrorCode, reason: str) -> bytes:
    """We have accepted no stream of the peer's, so the last one is 0."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(0, code) + reason.encode())


def number_in(payload: bytes, what: str) -> int:
    """The payload of RST_STREAM and WINDOW_UPDATE."""
    if len(payload) != _NUMBER.size:
        raise Violation(ErrorCode.FRAME_SIZE_ERROR, f"{what} of {len(payload)} bytes")
    number: int = _NUMBER.unpack(payload)[0]
    return number


def goaway_in(payload: bytes) -> tuple[int, int, str]:
    """The last stream that was, or may be, executed; the error; and what the peer says about it."""
    if len(payload) < _GOAWAY.size:
        raise Violation(ErrorCode.FRAME_SIZE_ERROR, f"a GOAWAY of {len(payload)} bytes")
    last, code = _GOAWAY.unpack_from(payload)
    said = payload[_GOAWAY.size :].decode("utf-8", "replace")
    return last & STREAM_MAX, code, said


def content(flags: int, payload: bytes) -> bytes:
    """The payload of DATA or HEADERS without padding. The flag of priority is only for HEADERS."""
    first, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, "padding without its length")
        first, end = 1, end - payload[0]
    if flags & WITH_PRIORITY:
        first += _PRIORITY_BYTES
    if first > end:
        raise Violation(ErrorCode.PROTOCOL_ERROR, "padding that is longer than its frame")
    return payload[first:end]
