"""Codecs for the values of columns and for row keys: how each type becomes bytes.

Dataclasses and pydantic models are in models.py.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any, Generic, Protocol, TypeVar
from uuid import UUID

from google.protobuf.message import DecodeError, Message

from percolator.errors import InvalidArgument, SchemaError

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


# Numbers.

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


# Times and days.

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


# Exact numbers.

DECIMAL_DIGITS_MAX = 38
_PLAIN_NUMBER = re.compile(rb"-?[0-9]+(\.[0-9]+)?")
_EXACT = Context(prec=2 * DECIMAL_DIGITS_MAX, traps=[InvalidOperation, Inexact])


def decimal(digits: int, places: int) -> Codec[Decimal]:
    """A codec for exact numbers of at most `digits` digits, `places` of them after the point.

    `decimal(10, 2)` stores them as text with all places, such as `-12.50`.
    """
    are_numbers = type(digits) is type(places) is int
    if not are_numbers or not 1 <= digits <= DECIMAL_DIGITS_MAX or not 0 <= places <= digits:
        raise SchemaError(
            f"decimal({digits!r}, {places!r}): expected 1 to {DECIMAL_DIGITS_MAX} digits, "
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


# Structures.


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
    given: object = kind
    if not (isinstance(given, type) and issubclass(given, Message)):
        raise SchemaError(f"message({kind!r:.80}): expected a class of Protobuf messages")

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


# Codecs for row keys: their bytes keep the order of the keys, and can be parts of a tuple.
#
# Keys of a fixed length need nothing that shows where they end inside a tuple; others are
# delimited.

K = TypeVar("K")

_METHODS = ("encode", "decode", "encode_prefix", "encode_part", "decode_part")


class KeyCodec(Protocol[K]):
    """Converts row keys to bytes whose order is that of the keys."""

    def encode(self, key: K) -> bytes:
        """The row of a key."""
        ...

    def decode(self, row: bytes) -> K:
        """The key of a row."""
        ...

    def encode_prefix(self, prefix: K) -> bytes:
        """The bytes with which all rows begin whose keys begin with `prefix`."""
        ...

    def encode_part(self, key: K) -> bytes:
        """The key as part of a tuple: its bytes show where they end, and keep the order."""
        ...

    def decode_part(self, row: bytes, start: int) -> tuple[K, int]:
        """The part that begins at `start`, and where the next one begins."""
        ...


def name_of(codec: object) -> str:
    """The name that a table's schema keeps for a codec; empty for one that has none."""
    name = getattr(codec, "name", "")
    return name if isinstance(name, str) else ""


def is_key_codec(codec: object) -> bool:
    """True if it can encode row keys, and parts of them."""
    return all(callable(getattr(codec, method, None)) for method in _METHODS)


def require_key_codec(codec: object, where: str) -> None:
    """Refuses, where it is declared, what a scan or a tuple could not use.

    A codec for columns has both of a row's own methods, so that single rows could be read and
    written with it. But its bytes need not have the order of the keys: `integer` would put 3 and
    300 before -5.
    """
    if not is_key_codec(codec):
        raise SchemaError(
            f"{where}: {codec!r:.80} is not a codec for row keys, which keep their order and can "
            "be parts of a tuple: use text, raw, uuid, ordered_integer, ordered_timestamp, "
            "ordered_date, tuple_of(...) or hashed(...)"
        )


# Fixed length.

_NUMBER_BYTES = 8
_UUID_BYTES = 16


class _FixedLength(Generic[K]):
    """Parts of tuples that are encoded as a whole key is."""

    encode: Callable[[K], bytes]
    decode: Callable[[bytes], K]
    _length: int

    def encode_prefix(self, prefix: K) -> bytes:
        """Raises `SchemaError`."""
        raise SchemaError(f"keys of {self!r} have no prefixes: use start and end")

    def encode_part(self, key: K) -> bytes:
        """The key as part of a tuple."""
        return self.encode(key)

    def decode_part(self, row: bytes, start: int) -> tuple[K, int]:
        """The part that begins at `start`, and where the next one begins."""
        end = start + self._length
        return self.decode(row[start:end]), end


class OrderedNumberCodec(_FixedLength[K]):
    """Row keys in the order of the 64-bit numbers that stand for them."""

    _length = _NUMBER_BYTES

    def __init__(
        self,
        name: str,
        number_of: Callable[[K], int],
        key_at: Callable[[int], K],
        named: Callable[[str], object],
    ) -> None:
        """`named` finds the codec by its name when it is unpickled: its functions cannot be
        pickled."""
        self.name = name
        self._named = named

        def encode(key: K) -> bytes:
            return (number_of(key) - INTEGER_MIN).to_bytes(_NUMBER_BYTES, "big")

        def decode(row: bytes) -> K:
            if len(row) != _NUMBER_BYTES:
                raise damaged(f"a key of {self!r}", row)
            return key_at(int.from_bytes(row, "big") + INTEGER_MIN)

        self.encode, self.decode = encode, decode

    def __reduce__(self) -> tuple[Any, ...]:
        return self._named, (self.name,)

    def __repr__(self) -> str:
        return f"codecs.{self.name}"


class UuidCodec(Codec[UUID], _FixedLength[UUID]):
    """UUIDs, whose order is that of their bytes."""

    _length = _UUID_BYTES

    def __init__(self) -> None:
        super().__init__("uuid", _encode_uuid, _decode_uuid)


def _encode_uuid(value: UUID) -> bytes:
    if not isinstance(value, UUID):
        raise wrong("UUID", value)
    return value.bytes


def _decode_uuid(data: bytes) -> UUID:
    if len(data) != _UUID_BYTES:
        raise damaged("a UUID", data)
    return UUID(bytes=data)


# Bytes and text.


class _Delimited(Generic[K]):
    """Parts of tuples that end with 00 00. Inside, 00 is written as 00 FF; this keeps the order."""

    encode: Callable[[K], bytes]
    decode: Callable[[bytes], K]

    def encode_prefix(self, prefix: K) -> bytes:
        return self.encode(prefix)

    def encode_part(self, key: K) -> bytes:
        return self.encode(key).replace(b"\x00", b"\x00\xff") + b"\x00\x00"

    def decode_part(self, row: bytes, start: int) -> tuple[K, int]:
        at = start
        while True:
            at = row.find(b"\x00", at)
            if at < 0 or at + 1 >= len(row):
                raise damaged("a tuple", row)
            if row[at + 1] == 0:
                return self.decode(row[start:at].replace(b"\x00\xff", b"\x00")), at + 2
            at += 2


class RawCodec(Codec[bytes], _Delimited[bytes]):
    """Bytes as they are."""

    def __init__(self, name: str = "raw") -> None:
        super().__init__(name, _encode_raw, bytes)


class StoredCodec(RawCodec):
    """Bytes as they are, whatever codec has written them."""

    def __init__(self) -> None:
        super().__init__("")

    def __repr__(self) -> str:
        return "codecs.stored"


class TextCodec(Codec[str], _Delimited[str]):
    """Text in UTF-8."""

    def __init__(self) -> None:
        super().__init__("text", _encode_text, _decode_text)


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


# Tuples.


class TupleCodec:
    """Row keys of several parts, ordered by the first, then by the second, and so on."""

    def __init__(self, parts: Sequence[KeyCodec[Any]]) -> None:
        self.parts = parts
        """The codecs of the parts."""
        names = [name_of(part) for part in parts]
        self.name = f"tuple_of({', '.join(names)})" if all(names) else ""

    def encode(self, key: tuple[Any, ...]) -> bytes:
        if _length(key) != len(self.parts):
            raise wrong(f"a tuple of {len(self.parts)}", key)
        return self.encode_prefix(key)

    def decode(self, row: bytes) -> tuple[Any, ...]:
        key, end = self.decode_part(row, 0)
        if end != len(row):
            raise damaged("a tuple", row)
        return key

    def encode_prefix(self, prefix: tuple[Any, ...]) -> bytes:
        """The bytes of the first parts, each of which must be complete."""
        if not 0 <= _length(prefix) <= len(self.parts):
            raise wrong(f"a tuple of at most {len(self.parts)}", prefix)
        pairs = zip(self.parts, prefix, strict=False)
        return b"".join([codec.encode_part(part) for codec, part in pairs])

    def encode_part(self, key: tuple[Any, ...]) -> bytes:
        return self.encode(key)

    def decode_part(self, row: bytes, start: int) -> tuple[tuple[Any, ...], int]:
        parts = []
        for codec in self.parts:
            part, start = codec.decode_part(row, start)
            parts.append(part)
        return tuple(parts), start

    def __repr__(self) -> str:
        return f"codecs.tuple_of({', '.join(map(repr, self.parts))})"


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


# Hashed keys.

# Rows are stored in the order of their keys. So if new keys are the highest so far, as numbers and
# times are, all writers meet in the last tablet. A hash in front spreads them over all tablets.

HASH_BYTES = 2
HASHES = 1 << 16
"""How many hashes there are, and so the most tablets that keys can be spread over."""


def row_hash(data: bytes) -> bytes:
    """The hash that stands before these bytes: the first two bytes of their CRC-32."""
    return (zlib.crc32(data) >> 16).to_bytes(HASH_BYTES, "big")


class HashedCodec(Generic[K]):
    """Row keys of another codec behind a hash, for keys that come in order."""

    def __init__(self, keys: KeyCodec[K]) -> None:
        self.keys = keys
        """The codec of the keys behind the hash."""
        inner = name_of(keys)
        self.name = f"hashed({inner})" if inner else ""

    def encode(self, key: K) -> bytes:
        """The row of a key."""
        row = self.keys.encode(key)
        return row_hash(row) + row

    def decode(self, row: bytes) -> K:
        """The key of a row. Raises `SchemaError` if the hash does not belong to it."""
        if row_hash(row[HASH_BYTES:]) != row[:HASH_BYTES]:
            raise SchemaError(f"{len(row)} stored bytes are not a hashed key")
        return self.keys.decode(row[HASH_BYTES:])

    def encode_prefix(self, prefix: K) -> bytes:
        """Raises `SchemaError`."""
        raise SchemaError("hashed keys have no prefixes: keys that are alike are far apart")

    def encode_part(self, key: K) -> bytes:
        """The key as part of a tuple, whose other parts are in order."""
        part = self.keys.encode_part(key)
        return row_hash(part) + part

    def decode_part(self, row: bytes, start: int) -> tuple[K, int]:
        """The part that begins at `start`, and where the next one begins."""
        key, end = self.keys.decode_part(row, start + HASH_BYTES)
        if row_hash(row[start + HASH_BYTES : end]) != row[start : start + HASH_BYTES]:
            raise SchemaError(f"{len(row)} stored bytes are not a hashed key")
        return key, end

    def __repr__(self) -> str:
        return f"codecs.hashed({self.keys!r})"


class SplitPoint:
    """A row that begins a tablet, and need not be that of a key."""

    __slots__ = ("row",)

    def __init__(self, row: bytes) -> None:
        self.row = row

    def __repr__(self) -> str:
        return f"SplitPoint({self.row!r})"


def hashed(codec: KeyCodec[K]) -> HashedCodec[K]:
    """Row keys in no order, spread evenly over all tablets: for keys that come in order.

    Single rows are read and written as before. A scan yields all rows, ordered by hash, so that
    `start`, `end` and `prefix` are of no use. As the first part of a tuple, it spreads groups of
    rows, each of which stays together: with `tuple_of(hashed(text), ordered_integer)`, a scan with
    the prefix `("sensor 7",)` yields one sensor's rows in order.
    """
    if not is_key_codec(codec):
        raise InvalidArgument("codec", f"expected a codec for row keys, got {codec!r:.80}")
    return HashedCodec(codec)


def splits_for(codec: object, tablets: int) -> list[SplitPoint]:
    """Where to split a new table with hashed keys into `tablets` tablets of the same size.

    >>> db.create_table(readings, codecs.splits_for(readings.key, 8))
    """
    first = next(iter(getattr(codec, "parts", ())), codec)
    if not isinstance(first, HashedCodec):
        raise InvalidArgument(
            "codec", f"expected hashed keys, or a tuple of which they are the first part: {codec!r}"
        )
    if not 1 <= tablets <= HASHES:
        raise InvalidArgument("tablets", f"expected an int from 1 to {HASHES}, got {tablets!r}")
    return [
        SplitPoint((number * HASHES // tablets).to_bytes(HASH_BYTES, "big"))
        for number in range(1, tablets)
    ]
