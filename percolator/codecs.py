"""How Python values become the bytes of cells, and row keys the bytes of rows.

    raw, text, integer, float, boolean, timestamp, date, uuid,     for columns
    decimal(10, 2), json, model(MyDataclass), message(MyProto)
    text (the default), raw, uuid, ordered_integer,                for row keys
    ordered_timestamp, ordered_date, tuple_of(...), hashed(...)

Programs in all languages use the same bytes (docs/formats.md). There is no pickle codec: reading a
value would run stored code, and only Python could read it.

Rows are stored in the order of their bytes, so a key's codec determines the order of a scan: text
by code point, integers, moments and days by value, tuples by their first part, then by the second,
and hashed keys in no order. `Table(key=...)` refuses the other codecs.

A table's schema keeps the names of the codecs that programs declare, and refuses others. `stored`
passes, for programs that copy cells.
"""

from __future__ import annotations

import builtins
import datetime as _datetime
import decimal as _decimal
import json as _json
import re
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from percolator.column_codec import Codec, MadeCodec, damaged, wrong
from percolator.errors import SchemaError
from percolator.fixed_keys import OrderedNumberCodec, UuidCodec, stored_integer, too_large
from percolator.hashed_keys import HashedCodec, SplitPoint, hashed, splits_for
from percolator.key_codec import KeyCodec, name_of, require_key_codec
from percolator.model_codec import model
from percolator.moments import day_at, days_of, microseconds_of, moment_at

__all__ = [
    "Codec",
    "HashedCodec",
    "KeyCodec",
    "SplitPoint",
    "boolean",
    "date",
    "decimal",
    "float",
    "hashed",
    "integer",
    "json",
    "message",
    "model",
    "ordered_date",
    "ordered_integer",
    "ordered_timestamp",
    "raw",
    "splits_for",
    "stored",
    "text",
    "timestamp",
    "tuple_of",
    "uuid",
]

MessageT = TypeVar("MessageT", bound=Message)

# ---------------------------------------------------------------------------- bytes and text


class _Delimited:
    """Parts of tuples that end with 00 00. Inside, 00 is written as 00 FF; this keeps the order."""

    @staticmethod
    def escape(data: bytes) -> bytes:
        return data.replace(b"\x00", b"\x00\xff") + b"\x00\x00"

    @staticmethod
    def unescape(row: bytes, start: int) -> tuple[bytes, int]:
        at = start
        while True:
            at = row.find(b"\x00", at)
            if at < 0 or at + 1 >= len(row):
                raise damaged("a tuple", row)
            if row[at + 1] == 0:
                return row[start:at].replace(b"\x00\xff", b"\x00"), at + 2
            at += 2


class RawCodec(Codec[bytes], _Delimited):
    """Bytes as they are."""

    def __init__(self, name: str = "raw") -> None:
        super().__init__(name, _encode_raw, bytes)

    def encode_prefix(self, prefix: bytes) -> bytes:
        return self.encode(prefix)

    def encode_part(self, key: bytes) -> bytes:
        return self.escape(self.encode(key))

    def decode_part(self, row: bytes, start: int) -> tuple[bytes, int]:
        return self.unescape(row, start)


class _StoredCodec(RawCodec):
    """Bytes as they are, whatever codec has written them."""

    def __init__(self) -> None:
        super().__init__("")

    def __repr__(self) -> str:
        return "codecs.stored"


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


def _named(name: str) -> object:
    """The codec of this name, of which there is one."""
    return globals()[name]


def _encode_raw(value: bytes) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise wrong("bytes", value)


def _encode_text(value: str) -> bytes:
    if not isinstance(value, str):
        raise wrong("str", value)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise SchemaError(f"the text cannot be encoded as UTF-8: {error.reason}") from None


def _decode_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise damaged("UTF-8 text", data) from None


# ---------------------------------------------------------------------------- numbers

_SIGNED = struct.Struct(">q")
_BINARY64 = struct.Struct(">d")


def _encode_integer(value: int) -> bytes:
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, int)):
        raise wrong("int", value)
    try:
        return _SIGNED.pack(value)
    except struct.error:
        raise too_large(value) from None


def _decode_integer(data: bytes) -> int:
    try:
        value: int = _SIGNED.unpack(data)[0]
    except struct.error:
        raise damaged("a 64-bit integer", data) from None
    return value


def _encode_float(value: builtins.float) -> bytes:
    if isinstance(value, bool) or not isinstance(value, builtins.float | int):
        raise wrong("float", value)
    try:
        return _BINARY64.pack(value)
    except (OverflowError, struct.error):
        raise SchemaError("the number is too large for a float") from None


def _decode_float(data: bytes) -> builtins.float:
    try:
        value: builtins.float = _BINARY64.unpack(data)[0]
    except struct.error:
        raise damaged("a 64-bit float", data) from None
    return value


def _encode_boolean(value: bool) -> bytes:
    if not isinstance(value, bool):
        raise wrong("bool", value)
    return b"\x01" if value else b"\x00"


def _decode_boolean(data: bytes) -> bool:
    if data not in (b"\x00", b"\x01"):
        raise damaged("a boolean", data)
    return data == b"\x01"


# ---------------------------------------------------------------------------- moments and days


def _encode_timestamp(value: _datetime.datetime) -> bytes:
    return _SIGNED.pack(microseconds_of(value))


def _decode_timestamp(data: bytes) -> _datetime.datetime:
    return moment_at(_decode_integer(data))


def _encode_date(value: _datetime.date) -> bytes:
    return _SIGNED.pack(days_of(value))


def _decode_date(data: bytes) -> _datetime.date:
    return day_at(_decode_integer(data))


# ---------------------------------------------------------------------------- exact numbers

DECIMAL_DIGITS_MAX = 38
_PLAIN_NUMBER = re.compile(rb"-?[0-9]+(\.[0-9]+)?")
_EXACT = _decimal.Context(
    prec=2 * DECIMAL_DIGITS_MAX, traps=[_decimal.InvalidOperation, _decimal.Inexact]
)


def decimal(digits: int, places: int) -> Codec[_decimal.Decimal]:
    """A codec for exact numbers of at most `digits` digits, `places` of them after the point.

    `decimal(10, 2)` stores them as text with all places, such as `-12.50`.
    """
    if not 1 <= digits <= DECIMAL_DIGITS_MAX or not 0 <= places <= digits:
        raise SchemaError(
            f"decimal({digits}, {places}): expected 1 to {DECIMAL_DIGITS_MAX} digits, "
            "and no more places than digits"
        )
    step = _decimal.Decimal(1).scaleb(-places)
    above = _decimal.Decimal(1).scaleb(digits - places)
    name = f"decimal({digits},{places})"

    def fitting(value: _decimal.Decimal) -> _decimal.Decimal:
        try:
            found = value.quantize(step, context=_EXACT)
        except (_decimal.InvalidOperation, _decimal.Inexact):
            raise SchemaError(f"{value} does not fit {name}") from None
        # abs() would round to the digits of the program's own context.
        if not found.is_finite() or found.copy_abs() >= above:
            raise SchemaError(f"{value} does not fit {name}")
        return found

    def encode(value: _decimal.Decimal) -> bytes:
        if not isinstance(value, _decimal.Decimal):
            raise wrong("Decimal", value)
        found = fitting(value)
        return format(found or found.copy_abs(), "f").encode()  # 0, and never -0

    def decode(data: bytes) -> _decimal.Decimal:
        if not _PLAIN_NUMBER.fullmatch(data):
            raise damaged(f"a {name}", data)
        return fitting(_decimal.Decimal(data.decode()))

    return MadeCodec((decimal, digits, places), name, encode, decode)


# ---------------------------------------------------------------------------- structures


def _encode_json(value: Any) -> bytes:  # noqa: ANN401 - anything that JSON can express
    try:
        text = _json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"not a JSON value: {error}") from None


def _decode_json(data: bytes) -> Any:  # noqa: ANN401 - anything that JSON can express
    try:
        return _json.loads(data)
    except (ValueError, RecursionError):
        raise damaged("JSON", data) from None


def message(kind: type[MessageT]) -> Codec[MessageT]:
    """A codec for Protobuf messages of one type."""

    def encode(value: MessageT) -> bytes:
        if not isinstance(value, kind):
            raise wrong(kind.DESCRIPTOR.full_name, value)
        return value.SerializeToString()

    def decode(data: bytes) -> MessageT:
        try:
            return kind.FromString(data)
        except DecodeError:
            raise damaged(kind.DESCRIPTOR.full_name, data) from None

    return MadeCodec((message, kind), f"message({kind.DESCRIPTOR.full_name})", encode, decode)


class TupleCodec:
    """Row keys of several parts, ordered by the first, then by the second, and so on."""

    def __init__(self, parts: Sequence[KeyCodec[Any]]) -> None:
        self._parts = parts
        names = [name_of(part) for part in parts]
        self.name = f"tuple_of({', '.join(names)})" if all(names) else ""

    @property
    def parts(self) -> Sequence[KeyCodec[Any]]:
        """The codecs of the parts."""
        return self._parts

    def encode(self, key: tuple[Any, ...]) -> bytes:
        if _length(key) != len(self._parts):
            raise wrong(f"a tuple of {len(self._parts)}", key)
        return self.encode_prefix(key)

    def decode(self, row: bytes) -> tuple[Any, ...]:
        key, end = self.decode_part(row, 0)
        if end != len(row):
            raise damaged("a tuple", row)
        return key

    def encode_prefix(self, prefix: tuple[Any, ...]) -> bytes:
        """The bytes of the first parts, each of which must be complete."""
        if not 0 <= _length(prefix) <= len(self._parts):
            raise wrong(f"a tuple of at most {len(self._parts)}", prefix)
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
    """The length of a tuple; -1 for anything else."""
    return len(key) if isinstance(key, tuple) else -1


def tuple_of(*parts: KeyCodec[Any]) -> TupleCodec:
    """Row keys of several parts: `tuple_of(text, ordered_integer)` takes `("log", 17)`."""
    if not parts:
        raise SchemaError("a tuple needs at least one part")
    for number, part in enumerate(parts, 1):
        require_key_codec(part, f"part {number} of a tuple")
    return TupleCodec(parts)


def after_prefix(prefix: bytes) -> bytes:
    """The first row after all that begin with the prefix; empty if there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b""


raw = RawCodec()
"""Bytes, unchanged; also for row keys."""
stored = _StoredCodec()
"""Bytes, unchanged, of any column and row: for programs that copy cells, and do not care what wrote
them. The table's schema neither keeps nor refuses it."""
text = TextCodec()
"""`str` as UTF-8; also for row keys."""
integer: Codec[int] = Codec("integer", _encode_integer, _decode_integer)
"""`int`, signed, of 64 bits."""
float: Codec[builtins.float] = Codec("float", _encode_float, _decode_float)
"""`float`, of 64 bits."""
boolean: Codec[bool] = Codec("boolean", _encode_boolean, _decode_boolean)
"""`bool`."""
timestamp: Codec[_datetime.datetime] = Codec("timestamp", _encode_timestamp, _decode_timestamp)
"""`datetime` with a time zone: a moment, to the microsecond. It comes back in UTC."""
date: Codec[_datetime.date] = Codec("date", _encode_date, _decode_date)
"""`date`."""
json: Codec[Any] = Codec("json", _encode_json, _decode_json)
"""Anything that JSON can express."""
uuid = UuidCodec()
"""`UUID`, 16 bytes; also for row keys, in the order of the bytes."""
ordered_integer: OrderedNumberCodec[int] = OrderedNumberCodec(
    "ordered_integer", stored_integer, stored_integer, _named
)
"""`int` for row keys, in numerical order."""
ordered_timestamp: OrderedNumberCodec[_datetime.datetime] = OrderedNumberCodec(
    "ordered_timestamp", microseconds_of, moment_at, _named
)
"""`datetime` with a time zone for row keys, in the order of time. It comes back in UTC."""
ordered_date: OrderedNumberCodec[_datetime.date] = OrderedNumberCodec(
    "ordered_date", days_of, day_at, _named
)
"""`date` for row keys, in the order of time."""
