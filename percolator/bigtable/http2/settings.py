"""What the two sides of a connection announce (RFC 9113, section 6.5)."""

from __future__ import annotations

import struct
from typing import Final

from percolator.bigtable.http2.frames import SETTINGS, ErrorCode, Violation, frame

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

WINDOW_MAX: Final = 2**31 - 1
WINDOW_DEFAULT: Final = 65_535
STREAM_WINDOW: Final = 1024 * 1024
"""What a peer may send on one stream before its messages are taken: at most so much waits for a
consumer that is slow."""
CONNECTION_WINDOW: Final = 64 * 1024 * 1024
"""Of all streams together. It only has to be so large that it never keeps a stream waiting."""
HEADER_LIST_BYTES_MAX: Final = 64 * 1024
_FRAME_BYTES_RANGE: Final = (16_384, 2**24 - 1)
_UNLIMITED: Final = 2**32

_SETTING: Final = struct.Struct(">HI")

OURS: Final = frame(
    SETTINGS,
    0,
    0,
    b"".join(
        _SETTING.pack(name, value)
        for name, value in (
            # So each block of headers can be decoded by itself, and equal ones only once.
            (HEADER_TABLE_SIZE, 0),
            (ENABLE_PUSH, 0),
            (INITIAL_WINDOW_SIZE, STREAM_WINDOW),
            (MAX_HEADER_LIST_SIZE, HEADER_LIST_BYTES_MAX),
        )
    ),
)


class PeerSettings:
    """What the server permits."""

    def __init__(self) -> None:
        self.streams_max = _UNLIMITED
        self.window = WINDOW_DEFAULT
        """Of each new stream."""
        self.frame_bytes_max = _FRAME_BYTES_RANGE[0]

    def take(self, payload: bytes) -> None:
        """Raises `Violation` for values that cannot be. Unknown settings are ignored."""
        if len(payload) % _SETTING.size:
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, f"settings of {len(payload)} bytes")
        for name, value in _SETTING.iter_unpack(payload):
            match name:
                case _ if name == MAX_CONCURRENT_STREAMS:
                    self.streams_max = value
                case _ if name == INITIAL_WINDOW_SIZE:
                    if value > WINDOW_MAX:
                        raise Violation(ErrorCode.FLOW_CONTROL_ERROR, f"a window of {value:,}")
                    self.window = value
                case _ if name == MAX_FRAME_SIZE:
                    least, most = _FRAME_BYTES_RANGE
                    if not least <= value <= most:
                        raise Violation(ErrorCode.PROTOCOL_ERROR, f"frames of {value:,} bytes")
                    self.frame_bytes_max = value
                case _ if name == ENABLE_PUSH and value:
                    raise Violation(ErrorCode.PROTOCOL_ERROR, "a server that may be pushed to")
