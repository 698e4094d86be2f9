"""Values are decoded as they were encoded, keys keep their order, and all else is refused."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal, localcontext
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import codecs
from percolator.errors import SchemaError
from percolator.fixed_keys import INTEGER_MAX, INTEGER_MIN
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


@given(INTEGERS)
def test_integers_are_decoded_unchanged(value: int) -> None:
    assert codecs.integer.decode(codecs.integer.encode(value)) == value


@given(st.floats())
def test_floats_are_decoded_unchanged(value: float) -> None:
    back = codecs.float.decode(codecs.float.encode(value))
    assert back == value or (math.isnan(back) and math.isnan(value))


@given(TEXTS)
def test_texts_are_decoded_unchanged(value: str) -> None:
    assert codecs.text.decode(codecs.text.encode(value)) == value


@given(JSON)
def test_json_is_decoded_unchanged(value: object) -> None:
    assert codecs.json.decode(codecs.json.encode(value)) == value


@given(st.booleans())
def test_booleans_are_decoded_unchanged(value: bool) -> None:
    assert codecs.boolean.decode(codecs.boolean.encode(value)) is value


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


@given(st.dates())
def test_dates_are_decoded_unchanged(value: date) -> None:
    assert codecs.date.decode(codecs.date.encode(value)) == value


@given(st.uuids())
def test_uuids_are_decoded_unchanged(value: UUID) -> None:
    assert codecs.uuid.decode(codecs.uuid.encode(value)) == value


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


@pytest.mark.parametrize(("digits", "places"), [(0, 0), (39, 2), (5, 6), (5, -1)])
def test_impossible_decimals_are_refused(digits: int, places: int) -> None:
    with pytest.raises(SchemaError, match="expected 1 to 38 digits"):
        codecs.decimal(digits, places)


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
