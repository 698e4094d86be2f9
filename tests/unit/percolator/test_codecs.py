"""Values are decoded as they were encoded, keys keep their order, and all else is refused."""

from __future__ import annotations

import decimal
import math
import subprocess
import sys
import typing
import uuid
from bisect import bisect
from collections import Counter
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal, localcontext
from enum import Enum
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import Database, InvalidArgument, SchemaError, Table, codecs
from percolator.codecs import readable
from percolator.codecs.values import INTEGER_MAX, INTEGER_MIN, name_of
from percolator.testing.pytest_plugin import percolator_db
from percolator.v1.cells_pb2 import Cell, RowRange

INTEGERS = st.integers(INTEGER_MIN, INTEGER_MAX)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | INTEGERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
PAIR = codecs.tuple_of(codecs.text, codecs.ordered_integer)
NESTED = codecs.tuple_of(codecs.raw, codecs.tuple_of(codecs.text, codecs.raw), codecs.text)


@pytest.mark.parametrize(
    ("codec", "values"),
    [
        (codecs.integer, INTEGERS),
        (codecs.float, st.floats(allow_nan=False)),
        (codecs.text, TEXTS),
        (codecs.json, JSON),
        (codecs.boolean, st.booleans()),
        (codecs.date, st.dates()),
        (codecs.uuid, st.uuids()),
    ],
    ids=repr,
)
@given(data=st.data())
def test_values_are_decoded_unchanged(
    codec: Any, values: st.SearchStrategy[object], data: Any
) -> None:
    value = data.draw(values)
    back = codec.decode(codec.encode(value))
    assert (type(back), back) == (type(value), value)


def test_nan_is_decoded_as_nan() -> None:
    assert math.isnan(codecs.float.decode(codecs.float.encode(math.nan)))


@given(st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=45))])))
def test_moments_are_decoded_in_utc(value: datetime) -> None:
    try:
        value.astimezone(UTC)
    except OverflowError:  # within hours of the first or last moment that a datetime can be
        with pytest.raises(SchemaError, match="beyond the years 1 to 9999 in UTC"):
            codecs.timestamp.encode(value)
        return
    back = codecs.timestamp.decode(codecs.timestamp.encode(value))
    assert (back, back.tzinfo) == (value, UTC)


@given(st.integers(1, 38), st.data())
def test_decimals_are_decoded_unchanged_with_all_their_places(digits: int, data: Any) -> None:
    places = data.draw(st.integers(0, digits))
    unscaled = data.draw(st.integers(-(10**digits) + 1, 10**digits - 1))
    with localcontext(prec=80):
        value = Decimal(unscaled).scaleb(-places)
    codec = codecs.decimal(digits, places)
    back = codec.decode(codec.encode(value))
    assert back == value
    assert back.as_tuple().exponent == -places


@pytest.mark.parametrize("text", ["9" * 38, "-" + "9" * 38, "9" * 30 + "5" + "0" * 7])
def test_the_largest_decimals_fit_whatever_the_context_of_the_program(text: str) -> None:
    codec = codecs.decimal(38, 0)
    with localcontext(prec=5):
        assert codec.decode(codec.encode(Decimal(text))).as_tuple() == Decimal(text).as_tuple()


@pytest.mark.parametrize(
    ("digits", "places"), [(0, 0), (39, 2), (5, 6), (5, -1), ("5", 1), (5, None), (5, 1.0)]
)
def test_impossible_decimals_are_refused(digits: Any, places: Any) -> None:
    with pytest.raises(SchemaError, match="expected 1 to 38 digits"):
        codecs.decimal(digits, places)


@pytest.mark.parametrize("kind", [None, "Cell", int, Cell()])
def test_a_codec_for_what_is_no_class_of_messages_is_refused(kind: Any) -> None:
    with pytest.raises(SchemaError, match="expected a class of Protobuf messages"):
        codecs.message(kind)


def test_messages_are_decoded_unchanged_and_other_types_refused() -> None:
    codec = codecs.message(Cell)
    cell = Cell(row=b"r", timestamp=7)
    assert codec.decode(codec.encode(cell)) == cell
    with pytest.raises(SchemaError, match=r"percolator\.v1\.Cell"):
        codec.encode(RowRange())  # type: ignore[arg-type]  # the mistake


@given(st.lists(INTEGERS, min_size=2, max_size=2))
def test_integer_keys_keep_their_order(keys: list[int]) -> None:
    one, other = keys
    encode = codecs.ordered_integer.encode
    assert (encode(one) < encode(other)) == (one < other)
    assert codecs.ordered_integer.decode(encode(one)) == one


@given(st.lists(st.tuples(TEXTS, INTEGERS), min_size=2, max_size=2))
def test_pairs_keep_their_order(keys: list[tuple[str, int]]) -> None:
    one, other = ((text.encode(), number) for text, number in keys)
    encoded_one, encoded_other = (PAIR.encode(key) for key in keys)
    assert (encoded_one < encoded_other) == (one < other)
    assert PAIR.decode(encoded_one) == keys[0]


@given(
    st.lists(st.tuples(st.binary(), st.tuples(TEXTS, st.binary()), TEXTS), min_size=2, max_size=2)
)
def test_nested_tuples_keep_their_order(keys: list[Any]) -> None:
    def comparable(key: Any) -> Any:
        return key[0], (key[1][0].encode(), key[1][1]), key[2].encode()

    one, other = keys
    assert (NESTED.encode(one) < NESTED.encode(other)) == (comparable(one) < comparable(other))
    assert NESTED.decode(NESTED.encode(one)) == one


@given(TEXTS, TEXTS, INTEGERS)
def test_a_prefix_matches_exactly_the_tuples_that_begin_with_it(
    first: str, other: str, number: int
) -> None:
    begins = PAIR.encode((other, number)).startswith(PAIR.encode_prefix((first,)))
    assert begins == (first == other)


@pytest.mark.parametrize(
    ("codec", "wrong"),
    [
        (codecs.raw, "text"),
        (codecs.raw, None),
        (codecs.text, b"bytes"),
        (codecs.text, "\ud800"),
        (codecs.integer, "1"),
        (codecs.integer, 1.0),
        (codecs.integer, True),
        (codecs.integer, 2**63),
        (codecs.integer, -(2**63) - 1),
        pytest.param(codecs.integer, 10**5000, id="too long to be shown"),
        (codecs.float, "1.0"),
        (codecs.float, True),
        pytest.param(codecs.float, 10**400, id="too large"),
        (codecs.boolean, 1),
        (codecs.timestamp, date(2026, 1, 1)),
        (codecs.timestamp, datetime(2026, 1, 1)),  # noqa: DTZ001 - the mistake
        (codecs.timestamp, datetime.max.replace(tzinfo=timezone(-timedelta(hours=1)))),
        (codecs.timestamp, datetime.min.replace(tzinfo=timezone(timedelta(hours=1)))),
        (codecs.date, datetime(2026, 1, 1, tzinfo=UTC)),
        (codecs.date, "2026-01-01"),
        (codecs.decimal(5, 2), 1.5),
        (codecs.decimal(5, 2), True),
        (codecs.decimal(5, 2), Decimal("1.234")),
        (codecs.decimal(5, 2), 1),
        (codecs.decimal(5, 2), Decimal(1000)),
        (codecs.decimal(5, 2), Decimal("1E+30")),
        (codecs.decimal(5, 2), Decimal("NaN")),
        (codecs.decimal(5, 2), Decimal("Infinity")),
        (codecs.json, {1, 2}),
        (codecs.json, math.nan),
        (codecs.json, b"bytes"),
        (codecs.ordered_integer, True),
        (codecs.ordered_integer, 2**63),
        (PAIR, "text"),
        (PAIR, ("only one",)),
        (PAIR, ("text", "text")),
    ],
)
def test_a_value_of_another_type_or_size_is_refused(codec: Any, wrong: object) -> None:
    with pytest.raises(SchemaError):
        codec.encode(wrong)


@pytest.mark.parametrize(
    ("codec", "stored"),
    [
        (codecs.text, b"\xff"),
        (codecs.integer, b"1234567"),
        (codecs.float, b""),
        (codecs.boolean, b"\x02"),
        (codecs.timestamp, b"\x7f" + bytes(7)),
        (codecs.timestamp, b"1234567"),
        (codecs.date, b"\x7f" + bytes(7)),
        (codecs.decimal(5, 2), b"1000.00"),
        (codecs.decimal(5, 2), b"1e2"),
        (codecs.decimal(5, 2), b"NaN"),
        (codecs.decimal(5, 2), b"1.234"),
        (codecs.json, b"{"),
        (codecs.message(Cell), b"\xff\xff"),
        (codecs.ordered_integer, b"123"),
        (PAIR, b"text"),
        (PAIR, b"text\x00\x00" + bytes(9)),
    ],
)
def test_stored_bytes_of_another_type_are_refused(codec: Any, stored: bytes) -> None:
    with pytest.raises(
        SchemaError, match=r"stored bytes are not|beyond the year 9999|does not fit"
    ):
        codec.decode(stored)


def test_values_are_encoded_as_the_format_says() -> None:
    assert codecs.integer.encode(-2) == b"\xff\xff\xff\xff\xff\xff\xff\xfe"
    assert codecs.float.encode(1.5) == b"\x3f\xf8\x00\x00\x00\x00\x00\x00"
    assert codecs.timestamp.encode(datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)) == (
        b"\xff\xff\xff\xff\xff\xf0\xbd\xc0"
    )
    assert codecs.date.encode(date(1970, 1, 2)) == bytes([0] * 7 + [1])
    assert codecs.decimal(5, 2).encode(Decimal("-2.5")) == b"-2.50"
    assert codecs.decimal(5, 2).encode(Decimal("-0.00")) == b"0.00"
    assert codecs.decimal(8, 8).encode(Decimal("0.00000001")) == b"0.00000001"
    assert codecs.json.encode({"ä": [1, None]}) == '{"ä":[1,null]}'.encode()
    assert codecs.ordered_integer.encode(-1) == b"\x7f\xff\xff\xff\xff\xff\xff\xff"
    assert PAIR.encode(("a\x00b", 0)) == b"a\x00\xffb\x00\x00" + b"\x80" + bytes(7)


def test_there_is_no_pickle() -> None:
    assert not any("pickle" in name for name in dir(codecs))


# Row keys keep the order that their codec claims, and other codecs are refused for keys.

__all__ = ["percolator_db"]

MOMENTS = st.datetimes(timezones=st.just(UTC))


@pytest.mark.parametrize(
    ("codec", "keys"),
    [
        (codecs.uuid, st.uuids()),
        (codecs.ordered_timestamp, MOMENTS),
        (codecs.ordered_date, st.dates()),
    ],
    ids=repr,
)
@given(data=st.data())
def test_keys_come_back_and_keep_their_order_alone_and_in_tuples(
    codec: Any, keys: st.SearchStrategy[Any], data: Any
) -> None:
    one, other = data.draw(keys), data.draw(keys)
    assert codec.decode(codec.encode(one)) == one
    assert (codec.encode(one) < codec.encode(other)) == (one < other)
    pair = codecs.tuple_of(codec, codecs.text)
    first, second = (one, data.draw(st.sampled_from("ab"))), (other, "a")
    assert pair.decode(pair.encode(first)) == first
    assert (pair.encode(first) < pair.encode(second)) == (first < second)


@pytest.mark.parametrize(
    ("codec", "wrong", "says"),
    [
        (codecs.uuid, "00000000-0000-0000-0000-000000000001", "expected UUID, got str"),
        (codecs.ordered_timestamp, datetime(2026, 1, 1), "no time zone"),  # noqa: DTZ001 - the mistake
        (codecs.ordered_timestamp, date(2026, 1, 1), "expected datetime, got date"),
        (
            codecs.ordered_timestamp,
            datetime.max.replace(tzinfo=timezone(-timedelta(hours=1))),
            "beyond the years 1 to 9999 in UTC",
        ),
        (codecs.ordered_date, datetime(2026, 1, 1, tzinfo=UTC), "expected date, got datetime"),
    ],
)
def test_a_key_of_another_type_is_refused(codec: Any, wrong: object, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        codec.encode(wrong)


@pytest.mark.parametrize(
    ("codec", "stored", "says"),
    [
        (codecs.uuid, bytes(15), "15 stored bytes are not a UUID"),
        (codecs.ordered_date, bytes(7), "7 stored bytes are not a key of codecs.ordered_date"),
        (codecs.ordered_date, b"\xff" * 8, "days are beyond the year 9999"),
        (codecs.ordered_timestamp, b"\xff" * 8, "microseconds are beyond the year 9999"),
    ],
)
def test_rows_of_another_codec_are_refused(codec: Any, stored: bytes, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        codec.decode(stored)


def test_keys_are_encoded_as_the_format_says() -> None:
    assert codecs.uuid.encode(UUID(int=1)) == bytes(15) + b"\x01"
    assert codecs.ordered_date.encode(date(1969, 12, 31)) == b"\x7f" + b"\xff" * 7
    moment = datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)
    assert codecs.ordered_timestamp.encode(moment) == bytes.fromhex("7ffffffffff0bdc0")


@pytest.mark.parametrize(
    "codec",
    [
        codecs.integer,
        codecs.float,
        codecs.boolean,
        codecs.timestamp,
        codecs.date,
        codecs.decimal(5, 2),
        codecs.json,
        str,
        None,
    ],
    ids=repr,
)
def test_a_codec_that_keeps_no_order_is_refused_for_keys(codec: Any) -> None:
    with pytest.raises(SchemaError, match=r"table 'k': .* is not a codec for row keys"):
        Table("k", key=codec)
    with pytest.raises(SchemaError, match=r"part 2 of a tuple: .* is not a codec for row keys"):
        codecs.tuple_of(codecs.text, codec)


def test_a_table_is_scanned_in_the_order_of_time(percolator_db: Database) -> None:
    days = Table("days", key=codecs.ordered_date)
    visits = days.column("visits", codecs.uuid)
    percolator_db.create_table(days)
    written = [date(2026, 1, 2), date(1950, 1, 1), date(1970, 1, 1)]
    percolator_db.set_many((day, {visits: UUID(int=day.year)}) for day in written)
    with percolator_db.snapshot() as snapshot:
        found = [(row.key, row[visits]) for row in snapshot.scan(days)]
        assert found == [(day, UUID(int=day.year)) for day in sorted(written)]
        with pytest.raises(SchemaError, match=r"codecs\.ordered_date have no prefixes"):
            list(snapshot.scan(days, prefix=written[0]))


# Hashed keys: spread evenly, read back as they were, and in no order.


@pytest.mark.parametrize(
    "keys", [range(20_000), range(10**12, 10**12 + 2_000_000, 100)], ids=["dense", "sparse"]
)
def test_keys_in_order_are_spread_evenly(keys: range) -> None:
    codec = codecs.hashed(codecs.ordered_integer)
    splits = [split.row for split in codecs.splits_for(codec, 16)]
    found = Counter(bisect(splits, codec.encode(key)) for key in keys)
    assert len(found) == 16
    assert max(found.values()) < 1.3 * len(keys) / 16


def test_rows_are_read_back_and_the_hash_is_checked() -> None:
    codec = codecs.hashed(codecs.text)
    assert codec.decode(codec.encode("ann")) == "ann"
    assert codec.encode("ann") == bytes.fromhex("e720616e6e")  # as docs/formats.md says
    row = codec.encode("ann")
    with pytest.raises(SchemaError, match="not a hashed key"):
        codec.decode(row[:2] + b"bob")
    with pytest.raises(SchemaError, match="not a hashed key"):
        codec.decode(b"")
    with pytest.raises(SchemaError, match="expected str, got int"):
        codec.encode(7)  # type: ignore[arg-type]


def test_a_table_is_split_and_read_by_key(percolator_db: Database) -> None:
    readings = Table("readings", key=codecs.hashed(codecs.ordered_integer))
    value = readings.column("value", codecs.integer)
    percolator_db.create_table(readings, codecs.splits_for(readings.key, 8))
    percolator_db.set_many((number, {value: number}) for number in range(100))
    with percolator_db.snapshot() as snapshot:
        assert snapshot.get(42, value) == 42
        found = [row.key for row in snapshot.scan(readings)]
        assert found != sorted(found) == list(range(100))
        with pytest.raises(SchemaError, match="hashed keys have no prefixes"):
            list(snapshot.scan(readings, prefix=4))


def test_as_the_first_part_of_a_tuple_it_spreads_groups(percolator_db: Database) -> None:
    key = codecs.tuple_of(codecs.hashed(codecs.text), codecs.ordered_integer)
    readings = Table("readings", key=key)
    value = readings.column("value", codecs.integer)
    percolator_db.create_table(readings, codecs.splits_for(key, 4))
    rows = [(f"sensor {number % 7}", number) for number in range(50)]
    percolator_db.set_many((row, {value: row[1]}) for row in rows)
    found = [row.key for row in percolator_db.snapshot().scan(readings, prefix=("sensor 3",))]
    assert found == [("sensor 3", number) for number in range(3, 50, 7)]


@pytest.mark.parametrize(
    ("says", "call"),
    [
        ("codec: expected a codec for row keys", lambda: codecs.hashed(codecs.integer)),  # type: ignore[arg-type]
        ("codec: expected hashed keys", lambda: codecs.splits_for(codecs.text, 4)),
        (
            "codec: expected hashed keys",
            lambda: codecs.splits_for(codecs.tuple_of(codecs.text, codecs.hashed(codecs.text)), 4),
        ),
        (
            "tablets: expected an int from 1 to 65536, got 0",
            lambda: codecs.splits_for(codecs.hashed(codecs.text), 0),
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(says: str, call: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call()


# Rows and values as people write them: what is shown is read back as the same bytes.

MOMENT = datetime(2026, 1, 31, 12, 0, 0, 250000, tzinfo=UTC)
ID = uuid.UUID("12345678-1234-5678-1234-567812345678")


@dataclass
class Purchase:
    """A model, whose class only its program knows."""

    product: str
    amount: int


VALUES: list[tuple[codecs.Codec[Any], Any, str]] = [
    (codecs.text, "Å -", "Å -"),
    (codecs.raw, b"\x00\xff", "hex:00ff"),
    (codecs.integer, 12345678, "12345678"),
    (codecs.integer, -(2**63), "-9223372036854775808"),
    (codecs.float, 1.5, "1.5"),
    (codecs.boolean, True, "true"),
    (codecs.timestamp, MOMENT, "2026-01-31T12:00:00.250000+00:00"),
    (codecs.date, date(2026, 1, 31), "2026-01-31"),
    (codecs.uuid, ID, str(ID)),
    (codecs.decimal(10, 2), decimal.Decimal("-2.50"), "-2.50"),
    (codecs.json, "hex:00", '"hex:00"'),
    (codecs.json, {"a": [1, None]}, '{"a": [1, null]}'),
    (codecs.model(Purchase), Purchase("pen", 2), '{"product": "pen", "amount": 2}'),
]


@pytest.mark.parametrize(("codec", "value", "shown"), VALUES, ids=lambda one: repr(one)[:30])
def test_a_value_is_shown_by_the_name_of_its_codec_and_read_back(
    codec: codecs.Codec[Any], value: object, shown: str
) -> None:
    named = readable.value_codec(codec.name)
    data = codec.encode(value)
    assert readable.value_text(named, data) == shown
    assert codec.decode(readable.value_bytes("cells", named, shown)) == value


KEYS: list[tuple[Any, Any, str]] = [
    (codecs.text, "bob", "bob"),
    (codecs.raw, b"\xff", "hex:ff"),
    (codecs.uuid, ID, str(ID)),
    (codecs.ordered_integer, -5, "-5"),
    (codecs.ordered_date, date(2026, 1, 31), "2026-01-31"),
    (codecs.ordered_timestamp, MOMENT, "2026-01-31T12:00:00.250000+00:00"),
    (codecs.hashed(codecs.text), "ann", "ann"),
    (codecs.tuple_of(codecs.text, codecs.ordered_integer), ("a", 17), '["a", 17]'),
    (
        codecs.tuple_of(codecs.hashed(codecs.text), codecs.tuple_of(codecs.raw, codecs.uuid)),
        ("x", (b"\xff", ID)),
        f'["x", ["hex:ff", "{ID}"]]',
    ),
    (codecs.hashed(codecs.tuple_of(codecs.text, codecs.text)), ("a", "b"), '["a", "b"]'),
]


@pytest.mark.parametrize(("codec", "key", "shown"), KEYS, ids=lambda one: repr(one)[:40])
def test_a_row_key_is_shown_by_the_name_of_its_codec_and_read_back(
    codec: Any, key: object, shown: str
) -> None:
    named = readable.key_codec(name_of(codec))
    row = codec.encode(key)
    assert readable.key_text(named, row) == shown
    assert readable.key_bytes("row", named, shown) == row
    assert readable.key_bytes("row", named, f"hex:{row.hex()}") == row


def test_a_prefix_of_a_tuple_is_its_first_parts() -> None:
    codec = codecs.tuple_of(codecs.text, codecs.ordered_integer)
    assert readable.prefix_bytes("--prefix", codec, '["a"]') == codec.encode_prefix(("a",))


@given(st.binary(max_size=20), st.sampled_from(VALUES), st.sampled_from(KEYS))
def test_any_stored_bytes_can_be_shown(
    data: bytes, value: tuple[codecs.Codec[Any], Any, str], key: tuple[Any, Any, str]
) -> None:
    assert isinstance(readable.value_text(readable.value_codec(value[0].name), data), str)
    assert isinstance(readable.key_text(readable.key_codec(name_of(key[0])), data), str)


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (codecs.integer, "many"),
        (codecs.integer, "9223372036854775808"),
        (codecs.boolean, "1"),
        (codecs.date, "2026-02-30"),
        (codecs.timestamp, "2026-01-31T12:00:00"),
        (codecs.uuid, "x"),
        (codecs.decimal(3, 2), "1.234"),
        (codecs.decimal(3, 2), "much"),
        (codecs.json, "{"),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused_with_its_column(
    codec: codecs.Codec[Any], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=r"stock.*expected"):
        readable.value_bytes("stock", readable.value_codec(codec.name), text)


@pytest.mark.parametrize("text", ["a", '"a"', "[17]", '["a", 1, 2]', '["a"]', '["a", "b"]'])
def test_a_row_key_of_another_type_is_refused(text: str) -> None:
    codec = readable.key_codec("tuple_of(text, ordered_integer)")
    with pytest.raises(InvalidArgument, match=r'row.*expected tuple_of.*\["a", 17\]'):
        readable.key_bytes("row", codec, text)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "jason",
        "tuple_of()",
        "tuple_of(integer)",
        "hashed(text, text)",
        "decimal(99,1)",
        "(",
        "a(",
        "hashed(" * 50 + "text" + ")" * 50,
    ],
)
def test_a_name_that_is_no_codec_is_none(name: str) -> None:
    assert readable.value_codec(name) is None
    assert readable.key_codec(name) is None
    with pytest.raises(InvalidArgument, match="--key"):
        readable.require_key_name("--key", name)
    with pytest.raises(InvalidArgument, match="--column"):
        readable.require_value_name("--column", name)


# Dataclasses and pydantic models come back as they were, and all else is refused by field.

MODEL_MOMENTS = st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - bounds have no zone
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False)


class Colour(Enum):
    RED = "red"
    BLUE = 2


@dataclass
class Line:
    product: str
    price: Decimal
    colour: Colour | None = None


@dataclass
class Order:
    number: int
    weight: float
    paid: bool
    placed: datetime
    due: date
    customer: UUID
    lines: list[Line]
    totals: dict[str, int]
    path: tuple[str, ...]
    place: tuple[int, str]
    previous: Order | None = None


class Parcel(pydantic.BaseModel):
    number: int
    sent: datetime
    weight: Decimal
    tags: list[str] = []
    holder: str = pydantic.Field(default="", alias="heldBy")


LINES = st.builds(Line, TEXTS, DECIMALS, st.none() | st.sampled_from(Colour))
ORDERS: st.SearchStrategy[Order] = st.deferred(
    lambda: st.builds(
        Order,
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.booleans(),
        MODEL_MOMENTS,
        st.dates(),
        st.uuids(),
        st.lists(LINES, max_size=3),
        st.dictionaries(TEXTS, st.integers(), max_size=3),
        st.lists(TEXTS, max_size=3).map(tuple),
        st.tuples(st.integers(), TEXTS),
        st.none() | ORDERS,
    )
)
orders = codecs.model(Order)
lines = codecs.model(Line)
parcels = codecs.model(Parcel)


@given(ORDERS)
def test_dataclasses_are_decoded_unchanged(order: Order) -> None:
    assert orders.decode(orders.encode(order)) == order


@given(st.builds(Parcel, number=st.integers(), sent=MODEL_MOMENTS, weight=DECIMALS, heldBy=TEXTS))
def test_pydantic_models_are_decoded_unchanged(parcel: Parcel) -> None:
    assert parcels.decode(parcels.encode(parcel)) == parcel


def test_a_dataclass_is_encoded_as_the_format_says() -> None:
    line = Line("Å", Decimal("2.50"), Colour.BLUE)
    assert lines.encode(line) == '{"product":"Å","price":"2.50","colour":2}'.encode()


def test_a_field_that_was_added_later_has_its_default() -> None:
    assert lines.decode(b'{"product":"tea","price":"1"}') == Line("tea", Decimal(1))


def _line(**changed: object) -> Any:
    return Line(**({"product": "tea", "price": Decimal(1)} | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (_line(price=1.5), "model Line, field 'price': expected Decimal, got float"),
        (_line(price=Decimal("NaN")), "model Line, field 'price': NaN is not an exact number"),
        (_line(product="\ud800"), "model Line, field 'product': the text cannot be encoded"),
        (_line(colour="red"), "model Line, field 'colour': expected Colour, got str"),
        ({"product": "tea"}, "model Line: expected Line, got dict"),
        (None, "model Line: expected Line, got NoneType"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(wrong: Any, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        lines.encode(wrong)


def _order(**changed: object) -> Any:
    plain: dict[str, Any] = {
        "number": 1,
        "weight": 1.5,
        "paid": True,
        "placed": datetime(2026, 1, 1, tzinfo=UTC),
        "due": date(2026, 1, 1),
        "customer": UUID(int=1),
        "lines": [],
        "totals": {},
        "path": (),
        "place": (1, "x"),
    }
    return Order(**(plain | changed))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"number": True}, "field 'number': expected int, got bool"),
        ({"number": 10**5000}, "model Order: .*digits"),
        ({"weight": float("nan")}, "field 'weight': nan is not a number in JSON"),
        ({"placed": datetime(2026, 1, 1)}, "field 'placed': the datetime has no time zone"),  # noqa: DTZ001 - the mistake
        ({"due": datetime(2026, 1, 1, tzinfo=UTC)}, "field 'due': expected date, got datetime"),
        ({"lines": [_line(), _line(price=2)]}, r"field 'lines\[1\].price': expected Decimal"),
        ({"totals": {"a": "1"}}, r"""field "totals\['a'\]": expected int, got str"""),
        ({"place": (1,)}, "field 'place': expected 2 parts, got 1"),
        ({"path": ["a"]}, "field 'path': expected tuple, got list"),
        ({"previous": _order(paid=1)}, "field 'previous.paid': expected bool, got int"),
    ],
)
def test_the_name_leads_to_the_value_wherever_it_is(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        orders.encode(_order(**changed))


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        (b"{", "1 stored bytes are not JSON"),
        (b"\xff", "1 stored bytes are not JSON"),
        (b"[]", "model Line: expected dict, got list"),
        (b'{"product":"tea"}', "model Line: Line needs a field 'price', which is not stored"),
        (b'{"product":"tea","price":1}', "model Line, field 'price': expected str, got int"),
        (b'{"product":"tea","price":"x"}', "model Line, field 'price': 'x' is no Decimal"),
        (b'{"product":"tea","price":"1","colour":"green"}', "'green' is no Colour"),
        (b'{"product":"tea","price":"1","size":3}', "a field 'size' is stored, which Line does"),
    ],
)
def test_stored_bytes_of_another_model_are_refused(stored: bytes, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        lines.decode(stored)


def _declared(hint: Any) -> type[Any]:
    return dataclass(type("Declared", (), {"__annotations__": {"part": hint}}))


@pytest.mark.parametrize(
    "hint",
    [
        bytes,
        Any,
        list,
        typing.List,  # noqa: UP006 - without its items
        typing.Dict | None,  # noqa: UP006
        typing.Tuple,  # noqa: UP006
        dict[int, str],
        int | str,
        set[int],
        complex,
        "NotDefined",
        "sys.NotDefined",
        "1 +",
    ],
)
def test_a_field_that_could_not_be_read_back_is_refused_at_declaration(hint: Any) -> None:
    with pytest.raises(SchemaError, match="model Declared"):
        codecs.model(_declared(hint))


def test_a_field_that_is_no_argument_is_refused_at_declaration() -> None:
    @dataclass
    class Summed:
        total: int = field(init=False)

    with pytest.raises(SchemaError, match="model Summed, field 'total': it has init=False"):
        codecs.model(Summed)


def test_a_class_that_its_fields_do_not_make_is_refused_at_declaration() -> None:
    @dataclass
    class Priced:
        price: int
        rate: InitVar[int]

    @dataclass(init=False)
    class Counted:
        count: int

        def __init__(self, start: int) -> None:
            self.count = start

    with pytest.raises(SchemaError, match=r"model Priced: .* missing a required argument: 'rate'"):
        codecs.model(Priced)
    with pytest.raises(SchemaError, match="model Counted: it cannot be made from its fields"):
        codecs.model(Counted)


@pytest.mark.parametrize("kind", [dict, int, "Order", None, _line()])
def test_only_classes_with_fields_are_models(kind: Any) -> None:
    with pytest.raises(SchemaError, match="expected a dataclass or a pydantic model"):
        codecs.model(kind)


def test_what_a_model_checks_itself_is_checked_when_it_is_read() -> None:
    @dataclass
    class Positive:
        number: int

        def __post_init__(self) -> None:
            if self.number < 0:
                raise ValueError("below zero")

    with pytest.raises(SchemaError, match="Positive refuses what is stored: below zero"):
        codecs.model(Positive).decode(b'{"number":-1}')


def test_a_pydantic_model_names_the_field_that_is_wrong() -> None:
    with pytest.raises(SchemaError, match="model Parcel: field 'weight': Field required"):
        parcels.decode(b'{"number":1,"sent":"2026-01-01T00:00:00Z"}')
    with pytest.raises(SchemaError, match="expected Parcel, got dict"):
        parcels.encode({"number": 1})  # type: ignore[arg-type]  # the mistake


def test_a_pydantic_model_that_would_come_back_different_is_refused() -> None:
    class Account(pydantic.BaseModel):
        name: str
        password: pydantic.SecretStr

    codec = codecs.model(Account)
    with pytest.raises(SchemaError, match="read back from JSON, it would differ"):
        codec.encode(Account(name="ann", password=pydantic.SecretStr("s")))


def test_a_moment_without_a_zone_does_not_pass_for_one_with_a_zone() -> None:
    class Alarm(pydantic.BaseModel):
        at: datetime

        @pydantic.field_validator("at", mode="after")
        @classmethod
        def local(cls, moment: datetime) -> datetime:
            return moment.replace(tzinfo=None) if moment.tzinfo else moment.replace(tzinfo=UTC)

    with pytest.raises(SchemaError, match="read back from JSON, it would differ"):
        codecs.model(Alarm).encode(Alarm(at=datetime(2026, 1, 1, tzinfo=UTC)))


@pytest.mark.parametrize("day", [datetime(2026, 10, 25), datetime(2026, 3, 29)])  # noqa: DTZ001 - as clocks show it
@pytest.mark.parametrize("fold", [0, 1])
def test_a_pydantic_model_is_written_in_hours_that_clocks_show_twice_or_never(
    day: datetime, fold: int
) -> None:
    @dataclass
    class Stop:
        at: datetime

    class Trip(pydantic.BaseModel):
        begins: datetime
        before: Trip | None = None
        stops: dict[str, list[Stop]] = {}
        seats: int = 1

    local = day.replace(hour=2, minute=30, fold=fold, tzinfo=ZoneInfo("Europe/Berlin"))
    Trip.model_rebuild(_types_namespace={"Trip": Trip, "Stop": Stop})
    codec = codecs.model(Trip)
    trip = Trip(begins=local, before=Trip(begins=local), stops={"Lund": [Stop(local)]}, seats=3)
    found = codec.decode(codec.encode(trip))
    assert found.before is not None
    moments = [found.begins, found.before.begins, found.stops["Lund"][0].at]
    assert [moment.astimezone(UTC) for moment in moments] == [local.astimezone(UTC)] * 3
    assert found.seats == 3


def test_models_need_no_pydantic() -> None:
    program = (
        "import sys, dataclasses; from percolator import codecs\n"
        "Point = dataclasses.make_dataclass('Point', [('x', int)])\n"
        "codecs.model(Point).encode(Point(1)); assert 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
