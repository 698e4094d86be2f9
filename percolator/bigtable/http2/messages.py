"""The messages in an answer's bytes: each has a length of its own, whatever the frames are."""

from __future__ import annotations

import struct
from typing import Final

from percolator.bigtable.http2.status import CallFailed, Code

MESSAGE_BYTES_MAX: Final = 256 * 1024 * 1024
"""The most that one row may have."""

_PREFIX: Final = struct.Struct(">BI")
PREFIX_BYTES: Final = _PREFIX.size


def prefixed(message: bytes) -> bytes:
    """A message as it is sent: not compressed, with its length."""
    return _PREFIX.pack(0, len(message)) + message


def is_one_message(data: bytes) -> bool:
    """Whether it is exactly that. Raises `CallFailed`."""
    return len(data) >= PREFIX_BYTES and _needed(data, 0) == len(data)


class MessageReader:
    """Cuts what arrives on one stream into messages."""

    __slots__ = ("_part", "_wanted")

    def __init__(self) -> None:
        self._part = bytearray()
        self._wanted = PREFIX_BYTES
        """How many bytes the message at the beginning of `_part` needs, as far as is known."""

    @property
    def is_within(self) -> bool:
        """Whether a message has begun that has not ended."""
        return bool(self._part)

    def take(self, data: bytes) -> list[bytes]:
        """The messages that are complete by now. Raises `CallFailed`."""
        self._part += data
        found: list[bytes] = []
        at, end = 0, len(self._part)
        while end - at >= self._wanted:
            if self._wanted == PREFIX_BYTES:
                self._wanted = _needed(self._part, at)
                if end - at < self._wanted:
                    break
            found.append(bytes(self._part[at + PREFIX_BYTES : at + self._wanted]))
            at += self._wanted
            self._wanted = PREFIX_BYTES
        del self._part[:at]
        return found


def _needed(data: bytes | bytearray, at: int) -> int:
    """How many bytes the message there takes, with its prefix."""
    compressed, length = _PREFIX.unpack_from(data, at)
    if compressed:
        raise CallFailed(Code.INTERNAL, "the answer is compressed, which was not asked for")
    if length > MESSAGE_BYTES_MAX:
        # As gRPC says it, so that both ways have one meaning.
        raise CallFailed(
            Code.RESOURCE_EXHAUSTED,
            f"CLIENT: Received message larger than max ({length} vs. {MESSAGE_BYTES_MAX})",
        )
    return PREFIX_BYTES + int(length)
