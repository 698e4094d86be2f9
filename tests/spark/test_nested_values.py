"""Nested values come back from JSON as they were, and JSON of another form is refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType

from percolator import errors
from percolator.spark.catalog import parse_type
from percolator.spark.values import decoded_nested, encoded_nested

pytestmark = pytest.mark.spark

texts = st.text(st.characters(codec="utf-8"), max_size=4)
ATOMS: dict[str, Any] = {
    "string": texts,
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "int": st.integers(-(2**31), 2**31 - 1),
    "boolean": st.booleans(),
    "double": st.floats(allow_nan=False, allow_infinity=False),
    "binary": st.binary(max_size=4),
    "date": st.dates(),
    "timestamp": st.datetimes().map(lambda moment: moment.replace(tzinfo=UTC)),
    "decimal(7,2)": st.decimals(-99999, 99999, places=2),
}


def types_and_values(depth: int) -> Any:
    """Draws a type and a strategy for its values, None among them."""
    atoms = st.sampled_from([(name, st.none() | values) for name, values in ATOMS.items()])
    if not depth:
        return atoms
    inner = types_and_values(depth - 1)
    return (
        atoms
        | inner.map(lambda one: (f"array<{one[0]}>", st.none() | st.lists(one[1], max_size=3)))
        | inner.map(
            lambda one: (
                f"map<string,{one[0]}>",
                st.none()
                | st.dictionaries(texts, one[1], max_size=3).map(lambda d: list(d.items())),
            )
        )
        | st.lists(inner, min_size=1, max_size=3).map(
            lambda some: (
                f"struct<{','.join(f'f{n}:{one[0]}' for n, one in enumerate(some))}>",
                st.none() | st.fixed_dictionaries({f"f{n}": one[1] for n, one in enumerate(some)}),
            )
        )
    )


def arrow(kind: DataType) -> pa.DataType:
    return to_arrow_type(kind, timezone="UTC")


@given(drawn=types_and_values(3), data=st.data())
def test_values_of_any_type_come_back(drawn: tuple[str, Any], data: Any) -> None:
    text, values = drawn
    kind = parse_type(text)
    assert kind.simpleString() == text
    array = pa.array(data.draw(st.lists(values, max_size=3)), arrow(kind))
    stored = encoded_nested(array, kind)
    assert all(one is None or json.loads(one) is not ... for one in stored)
    assert decoded_nested(stored, kind, arrow(kind)).to_pylist() == array.to_pylist()


def test_what_is_stored_is_plain_json() -> None:
    kind = parse_type(
        "struct<at:timestamp,price:decimal(5,2),tags:array<string>,sizes:map<string,int>>"
    )
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    price = Decimal("1.50")
    row = {"at": moment, "price": price, "tags": ["ä", None], "sizes": [("m", 3)]}
    assert encoded_nested(pa.array([row, None], arrow(kind)), kind) == [
        '{"at":"2026-01-02T00:00:00+00:00","price":"1.50","tags":["ä",null],"sizes":{"m":3}}'.encode(),
        None,
    ]


@pytest.mark.parametrize(
    "zone", ["UTC", "Asia/Kathmandu", "+05:30", "GMT+01:00", "UTC+3", "PST", "Z"]
)
def test_moments_of_a_session_in_any_time_zone_are_stored_in_utc(zone: str) -> None:
    """Java knows more names of time zones than Python, and some moments have no local time."""
    kind = parse_type("struct<at:timestamp,all:array<timestamp>,by:map<string,timestamp>>")
    first, last = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    rows = [{"at": first, "all": [last, None], "by": [("a", first)]}, None]
    array = pa.array(rows, arrow(kind)).cast(to_arrow_type(kind, timezone=zone))
    stored = encoded_nested(array, kind)
    assert stored == encoded_nested(pa.array(rows, arrow(kind)), kind)
    assert decoded_nested(stored, kind, arrow(kind)).to_pylist() == rows


def test_members_that_are_missing_are_null_and_unknown_ones_left_out() -> None:
    kind = parse_type("struct<a:int,b:string>")
    found = decoded_nested([b'{"c":1, "b":"x"}'], kind, arrow(kind))
    assert found.to_pylist() == [{"a": None, "b": "x"}]


@pytest.mark.parametrize(
    ("kind", "stored", "reason"),
    [
        ("struct<a:int>", "[1]", r"expected struct<a:int> in JSON, found \[1\]"),
        ("struct<a:struct<b:int>>", '{"a":{"b":"1"}}', "a.b: expected int in JSON, found '1'"),
        ("struct<a:array<int>>", '{"a":[1,2147483648]}', r"a\[\]: expected int"),
        ("array<bigint>", "[true]", "expected bigint in JSON, found True"),
        ("array<bigint>", "[1.0]", "expected bigint"),
        ("array<double>", '["1"]', "expected double"),
        ("array<double>", "[" + "9" * 400 + "]", "expected double"),
        ("map<string,date>", '{"x":"yesterday"}', r"\.\*: expected date"),
        ("array<timestamp>", '["2026-01-01T00:00:00"]', "expected timestamp"),
        ("array<decimal(3,1)>", '["1.25"]', "expected decimal"),
        ("array<binary>", '["?"]', "expected binary"),
        ("struct<a:int>", "{", "stored bytes are not JSON"),
        ("struct<a:string>", r'{"a":"\ud800"}', "text in JSON is not Unicode"),
        ("map<string,int>", r'{"\udc00":1}', "text in JSON is not Unicode"),
    ],
)
def test_json_of_another_form_is_refused_with_the_place(
    kind: str, stored: str, reason: str
) -> None:
    parsed = parse_type(kind)
    with pytest.raises(errors.SchemaError, match=reason):
        decoded_nested([stored.encode()], parsed, arrow(parsed))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "found 'nothing'"),
        ("integer", "found 'integer'"),
        ("array<int", "expected > after array"),
        ("array<int>>", "continues after the end"),
        ("map<int,int>", "keys of a map in JSON are string"),
        ("struct<>", "expected a field of a struct"),
        ("struct<a int>", "expected : after field"),
        ("struct<a:int b:int>", "expected , or >|found"),
        ("struct<a:int,A:int>", "two fields of one name"),
        ("decimal(39,2)", "found"),
        ("array<" * 40 + "int" + ">" * 40, "nested more than 32"),
    ],
)
def test_what_is_not_a_type_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_type(text)
