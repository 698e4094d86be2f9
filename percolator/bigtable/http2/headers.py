"""Blocks of headers (RFC 7541), without tables that change: ours are literal, and so are a peer's.

We announce a table of no size, so a block means the same whenever it arrives. Those of most answers
are equal, and are decoded once. In requests, the same fields come again and again: they are encoded
once, but for the time-out. The token is never to be indexed, also not by anybody on the way.

The first block of a connection says that our table has no size, either: a peer that has announced a
smaller one than usual need not understand us otherwise.
"""

from __future__ import annotations

from typing import Final

from hpack import Decoder, HPACKError

from percolator.bigtable.http2.frames import ErrorCode, Violation
from percolator.bigtable.http2.settings import HEADER_LIST_BYTES_MAX

Metadata = tuple[tuple[str, str], ...]

NO_TABLE: Final = b"\x20"
"""The beginning of the first block on a connection (RFC 7541, section 6.3)."""
_REMEMBERED: Final = 256
_REMEMBERED_BYTES_MAX: Final = 1_024
"""Of one block."""
_SECRET: Final = ("authorization",)
_OF_CONNECTIONS: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
_STATUS: Final = b":status"

# By their numbers in the static table.
_POST: Final = b"\x83"
_HTTP: Final = b"\x86"
_HTTPS: Final = b"\x87"
_AUTHORITY: Final = b"\x01"
_PATH: Final = b"\x04"
_LITERAL: Final = b"\x00"
_NEVER_INDEXED: Final = b"\x10"

_TIMEOUT_DIGITS_MAX: Final = 99_999_999


class Malformed(Exception):
    """A block that is no answer of HTTP/2. It ends a stream, not the connection."""


class HeaderReader:
    """Decodes the blocks of one connection."""

    def __init__(self) -> None:
        self._decoder = Decoder(HEADER_LIST_BYTES_MAX)
        self._decoder.max_allowed_table_size = 0
        self._decoder.header_table_size = 0
        self._known: dict[bytes, dict[bytes, bytes]] = {}

    def fields(self, block: bytes) -> dict[bytes, bytes]:
        """The fields, in which equal names are joined. Do not change them. Raises `Violation`, and
        `Malformed`."""
        found = self._known.get(block)
        if found is None:
            try:
                decoded = self._decoder.decode(block, raw=True)
            # The library checks indices itself, but not each length.
            except (HPACKError, IndexError, ValueError) as error:
                raise Violation(ErrorCode.COMPRESSION_ERROR, f"headers: {error}") from None
            found = _joined([(bytes(name), bytes(value)) for name, value in decoded])
            if len(block) <= _REMEMBERED_BYTES_MAX:
                if len(self._known) >= _REMEMBERED:
                    self._known.clear()
                self._known[block] = found
        return found


def _joined(decoded: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    regular = False
    for name, value in decoded:
        if name.startswith(b":"):
            if regular or name != _STATUS or name in found:
                raise Malformed(f"a field {name!r} where none may be")
        else:
            regular = True
            if not name or name != name.lower() or name in _OF_CONNECTIONS:
                raise Malformed(f"a field {name!r}")
        found[name] = found[name] + b"," + value if name in found else value
    return found


class RequestHeads:
    """The headers of requests to one server."""

    def __init__(self, authority: str, *, is_secure: bool, user_agent: str) -> None:
        self._scheme = _HTTPS if is_secure else _HTTP
        self._authority = _AUTHORITY + _text(authority)
        self._every = _field("content-type", "application/grpc") + _field("user-agent", user_agent)
        self._every += _field("grpc-accept-encoding", "identity")
        self._known: dict[tuple[str, Metadata], tuple[bytes, bytes]] = {}

    def head(self, path: str, metadata: Metadata, seconds: float) -> bytes:
        """The block of headers of a call."""
        known = self._known.get((path, metadata))
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            first = _POST + self._scheme + _PATH + _text(path) + self._authority + _TE
            rest = self._every + b"".join([_field(*one) for one in metadata])
            known = self._known[path, metadata] = first + _TIMEOUT_NAME, rest
        return known[0] + _timeout(seconds) + known[1]


def _timeout(seconds: float) -> bytes:
    """As a value: in milliseconds, rounded up, or in seconds if those have too many digits."""
    milliseconds = int(seconds * 1000.0) + 1
    if milliseconds > _TIMEOUT_DIGITS_MAX:
        return _text(f"{min(int(seconds) + 1, _TIMEOUT_DIGITS_MAX)}S")
    text = b"%dm" % milliseconds
    return _SHORT[len(text)] + text


def _field(name: str, value: str) -> bytes:
    kind = _NEVER_INDEXED if name in _SECRET else _LITERAL
    return kind + _text(name) + _text(value)


def _text(text: str) -> bytes:
    """Without Huffman's code: it saves bytes, which cost less than encoding them."""
    encoded = text.encode("ascii")
    return _length(len(encoded)) + encoded


def _length(number: int) -> bytes:
    """An integer with a prefix of seven bits."""
    if number < 0x7F:
        return bytes((number,))
    found = bytearray((0x7F,))
    number -= 0x7F
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


_SHORT: Final = [bytes((number,)) for number in range(16)]
_TE: Final = _field("te", "trailers")
_TIMEOUT_NAME: Final = _LITERAL + _text("grpc-timeout")
