"""Values come back as they went in, keys keep their order, and nothing else is let through."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import codecs
from percolator.errors import SchemaError
from percolator.v1.cells_pb2 import Cell, RowRange

INTEGERS = st.integers(codecs.INTEGER_MIN, codecs.INTEGER_MAX)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | INTEGERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
PAIR = codecs.tuple_of(codecs.text, codecs.ordered_integer)
NESTED = codecs.tuple_of(codecs.raw, codecs.tuple_of(codecs.text, codecs.raw), codecs.text)


@given(INTEGERS)
def test_integers_come_back(value: int) -> None:
    assert codecs.integer.decode(codecs.integer.encode(value)) == value


@given(st.floats())
def test_floats_come_back(value: float) -> None:
    back = codecs.float.decode(codecs.float.encode(value))
    assert back == value or (math.isnan(back) and math.isnan(value))


@given(TEXTS)
def test_texts_come_back(value: str) -> None:
    assert codecs.text.decode(codecs.text.encode(value)) == value


@given(JSON)
def test_json_comes_back(value: object) -> None:
    assert codecs.json.decode(codecs.json.encode(value)) == value


@given(st.booleans())
def test_booleans_come_back(value: bool) -> None:
    assert codecs.boolean.decode(codecs.boolean.encode(value)) is value


def test_messages_come_back() -> None:
    codec = codecs.message(Cell)
    cell = Cell(row=b"r", timestamp=7)
    assert codec.decode(codec.encode(cell)) == cell
    with pytest.raises(SchemaError, match=r"percolator\.v1\.Cell"):
        codec.encode(RowRange())  # type: ignore[arg-type]


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
def test_the_rows_of_a_prefix_are_those_of_its_tuples(first: str, other: str, number: int) -> None:
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
        (codecs.float, "1.0"),
        (codecs.float, True),
        pytest.param(codecs.float, 10**400, id="too large"),
        (codecs.boolean, 1),
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
def test_what_does_not_fit_is_refused(codec: Any, wrong: object) -> None:
    with pytest.raises(SchemaError):
        codec.encode(wrong)


@pytest.mark.parametrize(
    ("codec", "stored"),
    [
        (codecs.text, b"\xff"),
        (codecs.integer, b"1234567"),
        (codecs.float, b""),
        (codecs.boolean, b"\x02"),
        (codecs.json, b"{"),
        (codecs.message(Cell), b"\xff\xff"),
        (codecs.ordered_integer, b"123"),
        (PAIR, b"text"),
        (PAIR, b"text\x00\x00" + bytes(9)),
    ],
)
def test_stored_bytes_of_another_kind_are_said_so(codec: Any, stored: bytes) -> None:
    with pytest.raises(SchemaError, match="stored bytes are not"):
        codec.decode(stored)


def test_the_bytes_are_those_of_the_format() -> None:
    assert codecs.integer.encode(-2) == b"\xff\xff\xff\xff\xff\xff\xff\xfe"
    assert codecs.float.encode(1.5) == b"\x3f\xf8\x00\x00\x00\x00\x00\x00"
    assert codecs.json.encode({"ä": [1, None]}) == '{"ä":[1,null]}'.encode()
    assert codecs.ordered_integer.encode(-1) == b"\x7f\xff\xff\xff\xff\xff\xff\xff"
    assert PAIR.encode(("a\x00b", 0)) == b"a\x00\xffb\x00\x00" + b"\x80" + bytes(7)


def test_there_is_no_pickle() -> None:
    assert not any("pickle" in name for name in dir(codecs))
