"""Codecs for the values of columns: the base class, and how each type becomes bytes.

Row keys with a codec of their own are in keys.py, dataclasses and pydantic models in models.py.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from percolator.errors import SchemaError

T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=Message)

INTEGER_MIN = -(2**63)
INTEGER_MAX = 2**63 - 1
_BITS_SHOWN_MAX = 256


class Codec(Generic[T]):
    """Converts values of one type to bytes. `encode` refuses all others with `SchemaError`."""

    def __init__(
        self, name: str, encode: Callable[[T], bytes], decode: Callable[[bytes], T]
    ) -> None:
        self.name = name
        self.encode = encode
        self.decode = decode

    def __repr__(self) -> str:
        return f"codecs.{self.name}"


class MadeCodec(Codec[T]):
    """A codec that a function makes. It is pickled as a call of that function, since what the
    function has defined in itself cannot be."""

    def __init__(
        self,
        made_by: tuple[Callable[..., Codec[T]], *tuple[object, ...]],
        name: str,
        encode: Callable[[T], bytes],
        decode: Callable[[bytes], T],
    ) -> None:
        """`made_by` is the function and its arguments."""
        super().__init__(name, encode, decode)
        self._made_by = made_by

    def __reduce__(self) -> tuple[Any, ...]:
        return self._made_by[0], self._made_by[1:]


def wrong(expected: str, value: object) -> SchemaError:
    """The error about a value of another type."""
    return SchemaError(f"expected {expected}, got {type(value).__name__}")


def damaged(expected: str, data: bytes) -> SchemaError:
    """The error about bytes that another codec has written."""
    return SchemaError(f"{len(data)} stored bytes are not {expected}")


# ---------------------------------------------------------------------------- numbers

_SIGNED = struct.Struct(">q")
_BINARY64 = struct.Struct(">d")


def require_integer(value: int) -> int:
    """The number itself. Refuses what does not fit into 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong("int", value)
    if not INTEGER_MIN <= value <= INTEGER_MAX:
        # Python shows none with more than 4,300 digits.
        shown = str(value) if value.bit_length() <= _BITS_SHOWN_MAX else "the number"
        raise SchemaError(f"{shown} does not fit into 64 bits")
    return value


def encode_integer(value: int) -> bytes:
    return _SIGNED.pack(require_integer(value))


def decode_integer(data: bytes) -> int:
    try:
        value: int = _SIGNED.unpack(data)[0]
    except struct.error:
        raise damaged("a 64-bit integer", data) from None
    return value


def encode_float(value: float) -> bytes:
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise wrong("float", value)
    try:
        return _BINARY64.pack(value)
    except (OverflowError, struct.error):
        raise SchemaError("the number is too large for a float") from None


def decode_float(data: bytes) -> float:
    try:
        value: float = _BINARY64.unpack(data)[0]
    except struct.error:
        raise damaged("a 64-bit float", data) from None
    return value


def encode_boolean(value: bool) -> bytes:
    if not isinstance(value, bool):
        raise wrong("bool", value)
    return b"\x01" if value else b"\x00"


def decode_boolean(data: bytes) -> bool:
    if data not in (b"\x00", b"\x01"):
        raise damaged("a boolean", data)
    return data == b"\x01"


# ---------------------------------------------------------------------------- times and days

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_FIRST_DAY = _EPOCH.toordinal()
_FIRST = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_LAST = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND


def microseconds_of(moment: datetime) -> int:
    """The microseconds since 1970. Refuses anything else."""
    if not isinstance(moment, datetime):
        raise wrong("datetime", moment)
    if moment.utcoffset() is None:
        raise SchemaError("the datetime has no time zone, so it is not one moment")
    found = (moment - _EPOCH) // _MICROSECOND
    # In its own zone, such a moment is in these years; it comes back in UTC, where it would not be.
    if not _FIRST <= found <= _LAST:
        raise SchemaError("the datetime is beyond the years 1 to 9999 in UTC")
    return found


def moment_at(microseconds: int) -> datetime:
    """The moment, in UTC, `microseconds` after 1970 began."""
    try:
        return _EPOCH + microseconds * _MICROSECOND
    except OverflowError:
        raise SchemaError(f"{microseconds} microseconds are beyond the year 9999") from None


def days_of(day: date) -> int:
    """The days since the first of 1970. Refuses anything else."""
    if isinstance(day, datetime) or not isinstance(day, date):
        raise wrong("date", day)
    return day.toordinal() - _FIRST_DAY


def day_at(days: int) -> date:
    """The day `days` after the first of 1970."""
    try:
        return date.fromordinal(days + _FIRST_DAY)
    except (OverflowError, ValueError):
        raise SchemaError(f"{days} days are beyond the year 9999") from None


def encode_timestamp(value: datetime) -> bytes:
    return _SIGNED.pack(microseconds_of(value))


def decode_timestamp(data: bytes) -> datetime:
    return moment_at(decode_integer(data))


def encode_date(value: date) -> bytes:
    return _SIGNED.pack(days_of(value))


def decode_date(data: bytes) -> date:
    return day_at(decode_integer(data))


# ---------------------------------------------------------------------------- exact numbers

DECIMAL_DIGITS_MAX = 38
_PLAIN_NUMBER = re.compile(rb"-?[0-9]+(\.[0-9]+)?")
_EXACT = Context(prec=2 * DECIMAL_DIGITS_MAX, traps=[InvalidOperation, Inexact])


def decimal(digits: int, places: int) -> Codec[Decimal]:
    """A codec for exact numbers of at most `digits` digits, `places` of them after the point.

    `decimal(10, 2)` stores them as text with all places, such as `-12.50`.
    """
    if not 1 <= digits <= DECIMAL_DIGITS_MAX or not 0 <= places <= digits:
        raise SchemaError(
            f"decimal({digits}, {places}): expected 1 to {DECIMAL_DIGITS_MAX} digits, "
            "and no more places than digits"
        )
    step = Decimal(1).scaleb(-places)
    above = Decimal(1).scaleb(digits - places)
    name = f"decimal({digits},{places})"

    def fitting(value: Decimal) -> Decimal:
        try:
            found = value.quantize(step, context=_EXACT)
        except (InvalidOperation, Inexact):
            raise SchemaError(f"{value} does not fit {name}") from None
        # abs() would round to the digits of the program's own context.
        if not found.is_finite() or found.copy_abs() >= above:
            raise SchemaError(f"{value} does not fit {name}")
        return found

    def encode(value: Decimal) -> bytes:
        if not isinstance(value, Decimal):
            raise wrong("Decimal", value)
        found = fitting(value)
        return format(found or found.copy_abs(), "f").encode()  # 0, and never -0

    def decode(data: bytes) -> Decimal:
        if not _PLAIN_NUMBER.fullmatch(data):
            raise damaged(f"a {name}", data)
        return fitting(Decimal(data.decode()))

    return MadeCodec((decimal, digits, places), name, encode, decode)


# ---------------------------------------------------------------------------- structures


def encode_json(value: Any) -> bytes:  # noqa: ANN401 - anything that JSON can express
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"not a JSON value: {error}") from None


def decode_json(data: bytes) -> Any:  # noqa: ANN401 - anything that JSON can express
    try:
        return json.loads(data)
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
