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
from typing import Any

from percolator.codecs import values
from percolator.codecs.models import model
from percolator.codecs.values import (
    Codec,
    HashedCodec,
    KeyCodec,
    OrderedNumberCodec,
    RawCodec,
    SplitPoint,
    StoredCodec,
    TextCodec,
    UuidCodec,
    decimal,
    hashed,
    message,
    splits_for,
    tuple_of,
)

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


def _named(name: str) -> object:
    """The codec of this name, of which there is one."""
    return globals()[name]


raw = RawCodec()
"""Bytes, unchanged; also for row keys."""
stored = StoredCodec()
"""Bytes, unchanged, of any column and row: for programs that copy cells, and do not care what wrote
them. The table's schema neither keeps nor refuses it."""
text = TextCodec()
"""`str` as UTF-8; also for row keys."""
integer: Codec[int] = Codec("integer", values.encode_integer, values.decode_integer)
"""`int`, signed, of 64 bits."""
float: Codec[builtins.float] = Codec("float", values.encode_float, values.decode_float)
"""`float`, of 64 bits."""
boolean: Codec[bool] = Codec("boolean", values.encode_boolean, values.decode_boolean)
"""`bool`."""
timestamp: Codec[_datetime.datetime] = Codec(
    "timestamp", values.encode_timestamp, values.decode_timestamp
)
"""`datetime` with a time zone, to the microsecond. It comes back in UTC."""
date: Codec[_datetime.date] = Codec("date", values.encode_date, values.decode_date)
"""`date`."""
json: Codec[Any] = Codec("json", values.encode_json, values.decode_json)
"""Anything that JSON can express."""
uuid = UuidCodec()
"""`UUID`, 16 bytes; also for row keys, in the order of the bytes."""
ordered_integer: OrderedNumberCodec[int] = OrderedNumberCodec(
    "ordered_integer", values.require_integer, values.require_integer, _named
)
"""`int` for row keys, in numerical order."""
ordered_timestamp: OrderedNumberCodec[_datetime.datetime] = OrderedNumberCodec(
    "ordered_timestamp", values.microseconds_of, values.moment_at, _named
)
"""`datetime` with a time zone for row keys, in the order of time. It comes back in UTC."""
ordered_date: OrderedNumberCodec[_datetime.date] = OrderedNumberCodec(
    "ordered_date", values.days_of, values.day_at, _named
)
"""`date` for row keys, in the order of time."""
