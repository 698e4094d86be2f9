"""Values and row keys as people read and write them, and codecs by the names that schemas keep.

A row key is shown as text, or as `hex:00ff`. A program's own types are not known here: a model is
shown as the JSON that it is stored as, and a message as bytes.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
import string
import uuid
from collections.abc import Callable
from typing import Any

from percolator import codecs
from percolator.codecs.values import Codec, HashedCodec, KeyCodec, TupleCodec
from percolator.errors import InvalidArgument, SchemaError

HEX = "hex:"


def row_bytes(field: str, text: str) -> bytes:
    """The row that `text` stands for: its UTF-8 bytes, or the bytes after "hex:"."""
    if not text.startswith(HEX):
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(
                field, f"{text!r} cannot be encoded as UTF-8; write bytes as hex:00ff"
            ) from None
    digits = text.removeprefix(HEX)
    if len(digits) % 2 or not set(digits) <= set(string.hexdigits):
        raise InvalidArgument(field, f"expected pairs of hexadecimal digits, found {digits[:40]!r}")
    return bytes.fromhex(digits)


def row_text(row: bytes) -> str:
    """The text that `row_bytes` turns into this row."""
    try:
        text = row.decode()
    except UnicodeDecodeError:
        return HEX + row.hex()
    return text if text.isprintable() and not text.startswith(HEX) else HEX + row.hex()


def quoted(name: bytes) -> str:
    """A row key or a column name in an error message: 'o4', or 'hex:00ff'; never b'o4'."""
    return repr(row_text(name))


def counted(number: float, noun: str, plural: str = "") -> str:
    """A number with its noun: "1 table", "2,048 tables". The default plural adds an s."""
    return f"{number:,.0f} {noun if number == 1 else plural or noun + 's'}"


# ---------------------------------------------------------------------------- codecs by name

_VALUES: dict[str, Codec[Any]] = {
    codec.name: codec
    for codec in (
        codecs.raw,
        codecs.text,
        codecs.integer,
        codecs.float,
        codecs.boolean,
        codecs.timestamp,
        codecs.date,
        codecs.uuid,
        codecs.json,
    )
}
_KEYS: dict[str, KeyCodec[Any]] = {
    "raw": codecs.raw,
    "text": codecs.text,
    "uuid": codecs.uuid,
    "ordered_integer": codecs.ordered_integer,
    "ordered_timestamp": codecs.ordered_timestamp,
    "ordered_date": codecs.ordered_date,
}
_PARSERS: dict[str, Callable[[str], Any]] = {
    "integer": int,
    "float": float,
    "uuid": uuid.UUID,
    "date": datetime.date.fromisoformat,
    "timestamp": datetime.datetime.fromisoformat,
    "ordered_integer": int,
    "ordered_date": datetime.date.fromisoformat,
    "ordered_timestamp": datetime.datetime.fromisoformat,
}
"""How the text of a value is read. What is not here is JSON."""
_DECIMAL = re.compile(r"decimal\((\d{1,2}), ?(\d{1,2})\)")
_OWN = re.compile(r"(model|message)\([^()]+\)")
_NESTED_MAX = 8


def value_codec(name: str) -> Codec[Any] | None:
    """The codec for the values of such a column here; None if nothing here can."""
    found = _DECIMAL.fullmatch(name)
    if found is not None:
        try:
            return codecs.decimal(int(found[1]), int(found[2]))
        except SchemaError:
            return None
    if name.startswith("model(") and _OWN.fullmatch(name):
        return codecs.json
    return _VALUES.get(name)


def for_bytes(name: str) -> Codec[bytes]:
    """A codec of this name whose values are the stored bytes."""
    return Codec(name, bytes, bytes)


def key_codec(name: str, depth: int = 0) -> KeyCodec[Any] | None:
    """The codec for such row keys here; None if nothing here can."""
    kind, bracket, inner = name.partition("(")
    if not bracket:
        return _KEYS.get(name)
    if not inner.endswith(")") or depth >= _NESTED_MAX:
        return None
    parts = [key_codec(part, depth + 1) for part in _split(inner[:-1])]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not parts:
        return None
    if kind == "tuple_of":
        return codecs.tuple_of(*known)
    return codecs.hashed(known[0]) if kind == "hashed" and len(known) == 1 else None


def require_value_name(field: str, name: str) -> None:
    """Refuses what is no codec of the library, nor can be one of a program's types."""
    if value_codec(name) is None and not _OWN.fullmatch(name):
        known = ", ".join([*_VALUES, "decimal(10,2)", "model(Name)", "message(Name)"])
        raise InvalidArgument(field, f"{name!r} is not a codec for columns: {known}")


def require_key_name(field: str, name: str) -> None:
    """Refuses what is no codec of the library for row keys."""
    if key_codec(name) is None:
        known = ", ".join([*_KEYS, "tuple_of(text, uuid)", "hashed(text)"])
        raise InvalidArgument(field, f"{name!r} is not a codec for row keys: {known}")


def _split(text: str) -> list[str]:
    """The parts between commas that are in no brackets."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(text[begin:at].strip())
            begin = at + 1
    parts.append(text[begin:].strip())
    return parts


# ---------------------------------------------------------------------------- values


def value_data(codec: Codec[Any] | None, data: bytes) -> object:
    """A value as JSON can hold it. Bytes that the codec has not written are shown as hex."""
    if codec is None or codec in (codecs.raw, codecs.text):
        return row_text(data)
    try:
        shown = json.dumps(_plain(codec.decode(data)))
    except SchemaError:
        return HEX + data.hex()
    return json.loads(shown, parse_constant=str)  # JSON cannot express NaN and the infinities


def value_text(codec: Codec[Any] | None, data: bytes) -> str:
    """A value on one line."""
    shown = value_data(codec, data)
    if isinstance(shown, str) and codec is not codecs.json:
        return shown
    return json.dumps(shown, ensure_ascii=False)


def value_bytes(field: str, codec: Codec[Any] | None, text: str) -> bytes:
    """The stored bytes of a value as people write it: as `value_text` shows it."""
    if codec is None or codec in (codecs.raw, codecs.text):
        return row_bytes(field, text)
    try:
        return codec.encode(_parsed(codec, text))
    except (ValueError, ArithmeticError, SchemaError) as error:
        reason = f"expected {codec.name}, found {text[:80]!r}"
        raise InvalidArgument(field, reason) from error


def value_from_data(field: str, codec: Codec[Any] | None, written: object) -> bytes:
    """The stored bytes of a value as JSON holds it. Raises `InvalidArgument` unless it is of the
    codec's own type."""
    if codec is None or codec in (codecs.raw, codecs.text):
        if not isinstance(written, str):
            raise InvalidArgument(field, f"expected text, found {_excerpt(written)}")
        return row_bytes(field, written)
    try:
        return codec.encode(_of_data(codec, written))
    except (ValueError, ArithmeticError, SchemaError) as error:
        reason = f"expected {codec.name}, found {_excerpt(written)}"
        raise InvalidArgument(field, reason) from error


def _of_data(codec: Codec[Any], written: Any) -> Any:  # noqa: ANN401 - a value of any type
    if codec in (codecs.integer, codecs.boolean, codecs.json):
        return written  # which their encoders judge
    if codec is codecs.float:
        is_number = type(written) in (int, float) and math.isfinite(written)
        if not is_number and written not in ("NaN", "Infinity", "-Infinity"):
            raise SchemaError("expected a number")
        return float(written)
    if not isinstance(written, str):
        raise SchemaError("expected text")
    return _parsed(codec, written)


def _excerpt(written: object) -> str:
    return json.dumps(written)[:80]


def _parsed(codec: Any, text: str) -> Any:  # noqa: ANN401 - a value of any type
    if codec.name.startswith("decimal"):
        return decimal.Decimal(text)
    return _PARSERS.get(codec.name, json.loads)(text)


def _plain(value: Any) -> object:  # noqa: ANN401 - a value of any type
    if isinstance(value, datetime.date):  # a datetime is one, too
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    return value


# ---------------------------------------------------------------------------- row keys


def key_data(codec: KeyCodec[Any] | None, row: bytes) -> object:
    """A row key as JSON can hold it; a tuple is a list. Other bytes are shown as hex."""
    if codec is None or codec in (codecs.raw, codecs.text):
        return row_text(row)
    try:
        return _key_plain(codec.decode(row))
    except (SchemaError, IndexError):
        return HEX + row.hex()


def _key_plain(key: Any) -> object:  # noqa: ANN401 - a key of any type
    if isinstance(key, tuple):
        return [_key_plain(part) for part in key]
    return row_text(key) if isinstance(key, bytes) else _plain(key)


def quoted_key(codec: KeyCodec[Any] | None, row: bytes) -> str:
    """A row key in an error message: as `quoted`, and a tuple as a list."""
    shown = key_data(codec, row)
    return repr(shown) if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


def key_text(codec: KeyCodec[Any] | None, row: bytes) -> str:
    """A row key on one line."""
    shown = key_data(codec, row)
    return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


def key_bytes(field: str, codec: KeyCodec[Any] | None, text: str) -> bytes:
    """The row of a key as people write it: as `key_text` shows it, or as its bytes in hex."""
    return _encoded(field, codec, text, prefix=False)


def key_from_data(field: str, codec: KeyCodec[Any] | None, written: object) -> bytes:
    """The row of a key as JSON holds it. Raises `InvalidArgument` unless it is as `key_data` shows
    it."""
    try:
        if codec is None or codec in (codecs.raw, codecs.text):
            if isinstance(written, str):
                return row_bytes(field, written)
        else:
            row = codec.encode(_key_of(codec, written))
            if json.dumps(key_data(codec, row)) == json.dumps(written):
                return row
    except (ValueError, ArithmeticError, SchemaError) as error:
        raise _no_key(field, codec, written) from error
    raise _no_key(field, codec, written)


def _no_key(field: str, codec: object, written: object) -> InvalidArgument:
    name = getattr(codec, "name", "text")
    return InvalidArgument(field, f"expected {name}, found {_excerpt(written)}")


def prefix_bytes(field: str, codec: KeyCodec[Any] | None, text: str) -> bytes:
    """The bytes with which rows begin: of a tuple, its first parts."""
    return _encoded(field, codec, text, prefix=True)


def _encoded(field: str, codec: KeyCodec[Any] | None, text: str, *, prefix: bool) -> bytes:
    if codec is None or text.startswith(HEX) or codec in (codecs.raw, codecs.text):
        return row_bytes(field, text)
    try:
        key = _key_of(codec, json.loads(text) if isinstance(_inner(codec), TupleCodec) else text)
        return codec.encode_prefix(key) if prefix else codec.encode(key)
    except (ValueError, SchemaError) as error:
        name = getattr(codec, "name", "another codec")
        example = ': write a list, such as ["a", 17]' if name.startswith("tuple_of") else ""
        reason = f"expected {name}, found {text[:80]!r}{example}"
        raise InvalidArgument(field, reason) from error


def _inner(codec: Any) -> Any:  # noqa: ANN401 - a codec of any keys
    return _inner(codec.keys) if isinstance(codec, HashedCodec) else codec


def _key_of(codec: Any, written: Any) -> Any:  # noqa: ANN401 - a key of any type
    codec = _inner(codec)
    if isinstance(codec, TupleCodec):
        if not isinstance(written, list) or len(written) > len(codec.parts):
            raise SchemaError("expected a list")
        pairs = zip(codec.parts, written, strict=False)
        return tuple(_key_of(part, one) for part, one in pairs)
    if codec is codecs.text:
        return written
    if codec is codecs.ordered_integer and isinstance(written, int):
        return written
    if not isinstance(written, str):
        raise SchemaError(f"expected text for {codec!r}")
    return row_bytes("key", written) if codec is codecs.raw else _parsed(codec, written)
