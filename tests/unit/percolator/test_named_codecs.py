"""Rows and values as people write them: what is shown is read back as the same bytes."""

from __future__ import annotations

import datetime
import decimal
import uuid
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import codecs, named_codecs
from percolator.errors import InvalidArgument
from percolator.key_codec import name_of

MOMENT = datetime.datetime(2026, 1, 31, 12, 0, 0, 250000, tzinfo=datetime.UTC)
ID = uuid.UUID("12345678-1234-5678-1234-567812345678")


@dataclass
class Order:
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
    (codecs.date, datetime.date(2026, 1, 31), "2026-01-31"),
    (codecs.uuid, ID, str(ID)),
    (codecs.decimal(10, 2), decimal.Decimal("-2.50"), "-2.50"),
    (codecs.json, "hex:00", '"hex:00"'),
    (codecs.json, {"a": [1, None]}, '{"a": [1, null]}'),
    (codecs.model(Order), Order("pen", 2), '{"product": "pen", "amount": 2}'),
]


@pytest.mark.parametrize(("codec", "value", "shown"), VALUES, ids=lambda one: repr(one)[:30])
def test_a_value_is_shown_by_the_name_of_its_codec_and_read_back(
    codec: codecs.Codec[Any], value: object, shown: str
) -> None:
    named = named_codecs.value_codec(codec.name)
    data = codec.encode(value)
    assert named_codecs.value_text(named, data) == shown
    assert codec.decode(named_codecs.value_bytes("cells", named, shown)) == value


KEYS: list[tuple[Any, Any, str]] = [
    (codecs.text, "bob", "bob"),
    (codecs.raw, b"\xff", "hex:ff"),
    (codecs.uuid, ID, str(ID)),
    (codecs.ordered_integer, -5, "-5"),
    (codecs.ordered_date, datetime.date(2026, 1, 31), "2026-01-31"),
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
    named = named_codecs.key_codec(name_of(codec))
    row = codec.encode(key)
    assert named_codecs.key_text(named, row) == shown
    assert named_codecs.key_bytes("row", named, shown) == row
    assert named_codecs.key_bytes("row", named, f"hex:{row.hex()}") == row


def test_a_prefix_of_a_tuple_is_its_first_parts() -> None:
    codec = codecs.tuple_of(codecs.text, codecs.ordered_integer)
    assert named_codecs.prefix_bytes("--prefix", codec, '["a"]') == codec.encode_prefix(("a",))


@given(st.binary(max_size=20), st.sampled_from(VALUES), st.sampled_from(KEYS))
def test_any_stored_bytes_can_be_shown(
    data: bytes, value: tuple[codecs.Codec[Any], Any, str], key: tuple[Any, Any, str]
) -> None:
    assert isinstance(named_codecs.value_text(named_codecs.value_codec(value[0].name), data), str)
    assert isinstance(named_codecs.key_text(named_codecs.key_codec(name_of(key[0])), data), str)


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
        named_codecs.value_bytes("stock", named_codecs.value_codec(codec.name), text)


@pytest.mark.parametrize("text", ["a", '"a"', "[17]", '["a", 1, 2]', '["a"]', '["a", "b"]'])
def test_a_row_key_of_another_type_is_refused(text: str) -> None:
    codec = named_codecs.key_codec("tuple_of(text, ordered_integer)")
    with pytest.raises(InvalidArgument, match=r'row.*expected tuple_of.*\["a", 17\]'):
        named_codecs.key_bytes("row", codec, text)


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
    assert named_codecs.value_codec(name) is None
    assert named_codecs.key_codec(name) is None
    with pytest.raises(InvalidArgument, match="--key"):
        named_codecs.require_key_name("--key", name)
    with pytest.raises(InvalidArgument, match="--column"):
        named_codecs.require_value_name("--column", name)
