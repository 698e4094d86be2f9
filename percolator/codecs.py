"""How Python values become the bytes of cells, and row keys the bytes of rows.

    raw, text, integer, float, boolean, json, message(MyProto)     for columns
    text (the default), raw, ordered_integer, tuple_of(...)        for row keys

Everybody uses the same bytes, in whatever language (docs/formats.md). There is no pickle: what is
stored would run code when it is read, and nothing but Python could read it.

Row keys are stored in the order of their bytes, so a key's codec decides in which order a scan
meets them: text by code point, integers by value, tuples by their first part, then by the second.
"""

from __future__ import annotations

import builtins
import json as _json
import struct
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from percolator.errors import SchemaError

__all__ = [
    "Codec",
    "KeyCodec",
    "boolean",
    "float",
    "integer",
    "json",
    "message",
    "ordered_integer",
    "raw",
    "text",
    "tuple_of",
]

T = TypeVar("T")
K = TypeVar("K")
MessageT = TypeVar("MessageT", bound=Message)

INTEGER_MIN = -(2**63)
INTEGER_MAX = 2**63 - 1


class Codec(Generic[T]):
    """Values of one type as bytes. `encode` refuses everything else with `SchemaError`."""

    def __init__(
        self, name: str, encode: Callable[[T], bytes], decode: Callable[[bytes], T]
    ) -> None:
        self.name = name
        self.encode = encode
        self.decode = decode

    def __repr__(self) -> str:
        return f"codecs.{self.name}"


class KeyCodec(Protocol[K]):
    """Row keys as bytes, in order."""

    def encode(self, key: K) -> bytes:
        """The row of a key."""
        ...

    def decode(self, row: bytes) -> K:
        """The key of a row."""
        ...

    def encode_prefix(self, prefix: K) -> bytes:
        """With what the rows begin whose keys begin with `prefix`."""
        ...

    def encode_part(self, key: K) -> bytes:
        """As a part of a tuple: says itself where it ends, and keeps the order."""
        ...

    def decode_part(self, row: bytes, start: int) -> tuple[K, int]:
        """The part, and where the next one begins."""
        ...


def _wrong(expected: str, value: object) -> SchemaError:
    return SchemaError(f"expected {expected}, got {type(value).__name__}")


def _damaged(expected: str, data: bytes) -> SchemaError:
    return SchemaError(f"{len(data)} stored bytes are not {expected}")


# ---------------------------------------------------------------------------- bytes and text


class _Delimited:
    """Parts of tuples that end with 00 00, in which a 00 is written 00 FF: the order stays."""

    @staticmethod
    def escape(data: bytes) -> bytes:
        return data.replace(b"\x00", b"\x00\xff") + b"\x00\x00"

    @staticmethod
    def unescape(row: bytes, start: int) -> tuple[bytes, int]:
        at = start
        while True:
            at = row.find(b"\x00", at)
            if at < 0 or at + 1 >= len(row):
                raise _damaged("a tuple", row)
            if row[at + 1] == 0:
                return row[start:at].replace(b"\x00\xff", b"\x00"), at + 2
            at += 2


class RawCodec(Codec[bytes], _Delimited):
    """Bytes as they are."""

    def __init__(self) -> None:
        super().__init__("raw", _encode_raw, bytes)

    def encode_prefix(self, prefix: bytes) -> bytes:
        return self.encode(prefix)

    def encode_part(self, key: bytes) -> bytes:
        return self.escape(self.encode(key))

    def decode_part(self, row: bytes, start: int) -> tuple[bytes, int]:
        return self.unescape(row, start)


class TextCodec(Codec[str], _Delimited):
    """Text in UTF-8."""

    def __init__(self) -> None:
        super().__init__("text", _encode_text, _decode_text)

    def encode_prefix(self, prefix: str) -> bytes:
        return self.encode(prefix)

    def encode_part(self, key: str) -> bytes:
        return self.escape(self.encode(key))

    def decode_part(self, row: bytes, start: int) -> tuple[str, int]:
        part, end = self.unescape(row, start)
        return _decode_text(part), end


def _encode_raw(value: bytes) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise _wrong("bytes", value)


def _encode_text(value: str) -> bytes:
    if not isinstance(value, str):
        raise _wrong("str", value)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise SchemaError(f"the text has no UTF-8 form: {error.reason}") from None


def _decode_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _damaged("UTF-8 text", data) from None


# ---------------------------------------------------------------------------- numbers

_SIGNED = struct.Struct(">q")
_BINARY64 = struct.Struct(">d")


def _encode_integer(value: int) -> bytes:
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, int)):
        raise _wrong("int", value)
    try:
        return _SIGNED.pack(value)
    except struct.error:
        raise SchemaError(f"{value} has more than 64 bits") from None


def _decode_integer(data: bytes) -> int:
    try:
        value: int = _SIGNED.unpack(data)[0]
    except struct.error:
        raise _damaged("a 64-bit integer", data) from None
    return value


def _encode_float(value: builtins.float) -> bytes:
    if isinstance(value, bool) or not isinstance(value, builtins.float | int):
        raise _wrong("float", value)
    try:
        return _BINARY64.pack(value)
    except (OverflowError, struct.error):
        raise SchemaError("the number is too large for a float") from None


def _decode_float(data: bytes) -> builtins.float:
    try:
        value: builtins.float = _BINARY64.unpack(data)[0]
    except struct.error:
        raise _damaged("a 64-bit float", data) from None
    return value


def _encode_boolean(value: bool) -> bytes:
    if not isinstance(value, bool):
        raise _wrong("bool", value)
    return b"\x01" if value else b"\x00"


def _decode_boolean(data: bytes) -> bool:
    if data not in (b"\x00", b"\x01"):
        raise _damaged("a boolean", data)
    return data == b"\x01"


class OrderedIntegerCodec:
    """Row keys that are integers of 64 bits, in the order of their values."""

    def encode(self, key: int) -> bytes:
        if isinstance(key, bool) or not isinstance(key, int):
            raise _wrong("int", key)
        if not INTEGER_MIN <= key <= INTEGER_MAX:
            raise SchemaError(f"{key} has more than 64 bits")
        return (key - INTEGER_MIN).to_bytes(8, "big")

    def decode(self, row: bytes) -> int:
        if len(row) != 8:
            raise _damaged("an integer key", row)
        return int.from_bytes(row, "big") + INTEGER_MIN

    def encode_prefix(self, prefix: int) -> bytes:
        raise SchemaError("integers have no prefixes: give start and end")

    def encode_part(self, key: int) -> bytes:
        return self.encode(key)

    def decode_part(self, row: bytes, start: int) -> tuple[int, int]:
        return self.decode(row[start : start + 8]), start + 8

    def __repr__(self) -> str:
        return "codecs.ordered_integer"


# ---------------------------------------------------------------------------- structures


def _encode_json(value: Any) -> bytes:  # noqa: ANN401 - whatever JSON can say
    try:
        text = _json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"not a JSON value: {error}") from None


def _decode_json(data: bytes) -> Any:  # noqa: ANN401
    try:
        return _json.loads(data)
    except (ValueError, RecursionError):
        raise _damaged("JSON", data) from None


def message(kind: type[MessageT]) -> Codec[MessageT]:
    """Protobuf messages of one type."""

    def encode(value: MessageT) -> bytes:
        if not isinstance(value, kind):
            raise _wrong(kind.DESCRIPTOR.full_name, value)
        return value.SerializeToString()

    def decode(data: bytes) -> MessageT:
        try:
            return kind.FromString(data)
        except DecodeError:
            raise _damaged(kind.DESCRIPTOR.full_name, data) from None

    return Codec(f"message({kind.__name__})", encode, decode)


class TupleCodec:
    """Row keys of several parts, ordered by the first, then by the second, and so on."""

    def __init__(self, parts: Sequence[KeyCodec[Any]]) -> None:
        self._parts = parts

    def encode(self, key: tuple[Any, ...]) -> bytes:
        if _length(key) != len(self._parts):
            raise _wrong(f"a tuple of {len(self._parts)}", key)
        return self.encode_prefix(key)

    def decode(self, row: bytes) -> tuple[Any, ...]:
        key, end = self.decode_part(row, 0)
        if end != len(row):
            raise _damaged("a tuple", row)
        return key

    def encode_prefix(self, prefix: tuple[Any, ...]) -> bytes:
        """The first parts, whole."""
        if not 0 <= _length(prefix) <= len(self._parts):
            raise _wrong(f"a tuple of at most {len(self._parts)}", prefix)
        pairs = zip(self._parts, prefix, strict=False)
        return b"".join([codec.encode_part(part) for codec, part in pairs])

    def encode_part(self, key: tuple[Any, ...]) -> bytes:
        return self.encode(key)

    def decode_part(self, row: bytes, start: int) -> tuple[tuple[Any, ...], int]:
        parts = []
        for codec in self._parts:
            part, start = codec.decode_part(row, start)
            parts.append(part)
        return tuple(parts), start

    def __repr__(self) -> str:
        return f"codecs.tuple_of({', '.join(map(repr, self._parts))})"


def _length(key: object) -> int:
    """Of a tuple; -1 for what is none."""
    return len(key) if isinstance(key, tuple) else -1


def tuple_of(*parts: KeyCodec[Any]) -> TupleCodec:
    """Row keys of several parts: `tuple_of(text, ordered_integer)` takes `("log", 17)`."""
    if not parts:
        raise SchemaError("a tuple needs at least one part")
    return TupleCodec(parts)


def after_prefix(prefix: bytes) -> bytes:
    """The least row above all that begin with the prefix; empty when there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b""


raw = RawCodec()
"""Bytes as they are; also for row keys."""
text = TextCodec()
"""`str`, in UTF-8; also for row keys."""
integer: Codec[int] = Codec("integer", _encode_integer, _decode_integer)
"""`int` of 64 bits, with sign."""
float: Codec[builtins.float] = Codec("float", _encode_float, _decode_float)
"""`float`, of 64 bits."""
boolean: Codec[bool] = Codec("boolean", _encode_boolean, _decode_boolean)
"""`bool`."""
json: Codec[Any] = Codec("json", _encode_json, _decode_json)
"""Whatever JSON can say."""
ordered_integer = OrderedIntegerCodec()
"""`int` for row keys: in the order of the numbers."""
