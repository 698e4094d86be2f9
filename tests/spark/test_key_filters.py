"""Filters on the row key become ranges of rows; nothing that matches is left out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringEndsWith,
    StringStartsWith,
)

from percolator import codecs
from percolator.spark.key_range import KeyFilters, RowsBetween

pytestmark = pytest.mark.spark

KEY = ("key",)
COMPARED: dict[type, Any] = {
    EqualTo: lambda key, value: key == value,
    GreaterThan: lambda key, value: key > value,
    GreaterThanOrEqual: lambda key, value: key >= value,
    LessThan: lambda key, value: key < value,
    LessThanOrEqual: lambda key, value: key <= value,
}
texts = st.text(st.characters(codec="utf-8"), max_size=3)
integers = st.integers(-(2**63), 2**63 - 1)


def _contains(rows: RowsBetween, row: bytes) -> bool:
    return not rows.nothing and rows.start <= row and (not rows.end or row < rows.end)


@given(kind=st.sampled_from(list(COMPARED)), value=texts, key=texts)
def test_a_comparison_of_text_keeps_exactly_the_keys_that_match(
    kind: type[Any], value: str, key: str
) -> None:
    rows, left = KeyFilters(KEY, codecs.text).push([kind(KEY, value)])
    # Spark compares text by its UTF-8 bytes.
    matches = COMPARED[kind](key.encode(), value.encode())
    assert _contains(rows, codecs.text.encode(key)) is matches
    assert list(left) == []


@given(kind=st.sampled_from(list(COMPARED)), value=integers, key=integers)
def test_a_comparison_of_integers_keeps_exactly_the_keys_that_match(
    kind: type[Any], value: int, key: int
) -> None:
    rows, _ = KeyFilters(KEY, codecs.ordered_integer).push([kind(KEY, value)])
    matches = COMPARED[kind](key, value)
    assert _contains(rows, codecs.ordered_integer.encode(key)) is matches


@given(kind=st.sampled_from(list(COMPARED)), value=texts, key=st.tuples(texts, integers))
def test_a_comparison_of_a_keys_first_part_keeps_exactly_the_keys_that_match(
    kind: type[Any], value: str, key: tuple[str, int]
) -> None:
    codec = codecs.tuple_of(codecs.text, codecs.ordered_integer)
    rows, _ = KeyFilters(("key", "number"), codec).push([kind(KEY, value)])
    matches = COMPARED[kind](key[0].encode(), value.encode())
    assert _contains(rows, codec.encode(key)) is matches


@given(values=st.lists(texts, min_size=1, max_size=4), prefix=texts, key=texts)
def test_prefixes_and_lists_leave_no_match_out(values: list[str], prefix: str, key: str) -> None:
    filters: list[Filter] = [In(KEY, tuple(values)), StringStartsWith(KEY, prefix), IsNotNull(KEY)]
    rows, left = KeyFilters(KEY, codecs.text).push(filters)
    if key in values and key.startswith(prefix):
        assert _contains(rows, codecs.text.encode(key))
    assert list(left) == (filters[:1] if len(values) > 1 else [])


@pytest.mark.parametrize(
    "one",
    [
        EqualTo(("other",), "a"),
        EqualTo(("key", "field"), "a"),
        Not(EqualTo(KEY, "a")),
        StringEndsWith(KEY, "a"),
        EqualTo(("number",), 7),
    ],
)
def test_what_is_no_range_of_rows_is_left_to_spark(one: Filter) -> None:
    codec = codecs.tuple_of(codecs.text, codecs.ordered_integer)
    rows, left = KeyFilters(("key", "number"), codec).push([one])
    assert rows == RowsBetween()
    assert list(left) == [one]
