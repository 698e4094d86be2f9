"""The bytes of a connection that carries frames, for both sides.

The caller begins with `PREAMBLE`. What follows, in both directions, are frames: a header with the
size of the body, the kind, and the number of the call, and then the body. Numbers are
little-endian.

| kind | from | body |
|---|---|---|
| HELLO | caller | a `FramesHello` |
| WELCOME | server | a `FramesWelcome` |
| CALL | caller | the index of the method, the time-out in milliseconds, and the request |
| CANCEL | caller | empty: the caller no longer waits, and there will be no answer |
| ANSWER | server | the response |
| FAILURE | server | a `google.rpc.Status` with one `percolator.v1.ErrorDetail`, as over gRPC |
| PING | caller | empty |
| PONG | server | empty |
| LEAVING | server | empty: it is about to end the connection; further calls go elsewhere |
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from percolator.wire import methods

PREAMBLE = b"percolator frames 1\n"
"""Its number changes with every change that the other side has to know of."""

HEADER = struct.Struct("<IBI")
CALL_HEAD = struct.Struct("<BI")

GREETING_BYTES_MAX = 8 * 1024
"""The size of a hello; its token has at most 1,024 characters."""
ANSWER_BYTES_MAX = 32 * 1024 * 1024
"""The size of the largest answer, as over gRPC (percolator/wire/channels.py)."""
TIMEOUT_MILLISECONDS_MAX = 2**32 - 1

FRAMED = frozenset(
    method.path
    for method in (
        methods.GET_TIMESTAMPS,
        methods.READ,
        methods.SCAN,
        methods.MUTATE,
        methods.COMMIT_TRANSACTIONS,
    )
)
"""The paths of the methods that travel in frames, where a server offers them. An answer is one
response: of a method that streams, the first."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    CALL = 3
    CANCEL = 4
    ANSWER = 5
    FAILURE = 6
    PING = 7
    PONG = 8
    LEAVING = 9


class Frame(NamedTuple):
    """One frame. `kind` is a number that the sender chose: perhaps none of `Kind`."""

    kind: int
    call: int
    body: bytes


class NotFrames(Exception):
    """What was received is not what this layout allows; the text says why."""


def frame(kind: Kind, call: int, body: bytes = b"") -> bytes:
    """The bytes of a frame."""
    return HEADER.pack(len(body), kind, call) + body


class FrameReader:
    """Cuts what was received into frames.

    Only what a frame lacks is kept. What others send in many small pieces is copied once.
    """

    def __init__(self, bytes_max: int, preamble: bytes = b"") -> None:
        """`bytes_max` is the size of the largest body; `preamble` has to come first."""
        self.bytes_max = bytes_max
        self._preamble = preamble
        self._kept = bytearray()

    @property
    def kept(self) -> int:
        """The bytes that were received and are not a whole frame yet, or not taken."""
        return len(self._kept)

    def add(self, data: bytes) -> None:
        """Takes what was received."""
        self._kept += data

    def next(self) -> Frame | None:
        """The next frame; None if it is not complete. `NotFrames` if there will never be one."""
        kept = self._kept
        if self._preamble and not self._skip_preamble():
            return None
        if len(kept) < HEADER.size:
            return None
        size, kind, call = HEADER.unpack_from(kept)
        if size > self.bytes_max:
            raise NotFrames(f"a frame of {size} bytes, at most {self.bytes_max} are accepted")
        end = HEADER.size + size
        if len(kept) < end:
            return None
        with memoryview(kept) as view:
            body = bytes(view[HEADER.size : end])
        del kept[:end]
        return Frame(kind, call, body)

    def _skip_preamble(self) -> bool:
        # Judged by what is there: noise is refused at its first byte.
        kept, expected = self._kept, self._preamble
        if kept[: len(expected)] != expected[: len(kept)]:
            raise NotFrames("does not begin as a connection for frames")
        if len(kept) < len(expected):
            return False
        del kept[: len(expected)]
        self._preamble = b""
        return True
