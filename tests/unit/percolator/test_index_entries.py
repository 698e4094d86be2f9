"""Indexes are declared with tables, and their entries keep the order of values."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from datetime import UTC
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import Column, SchemaError, Table, codecs
from percolator.codecs.indexes import IndexDefinition, entry_part, require_indexable
from percolator.codecs.values import INTEGER_MAX, INTEGER_MIN
from percolator.schema import Index

INTEGERS = st.integers(INTEGER_MIN, INTEGER_MAX)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
MOMENTS = st.datetimes(timezones=st.just(UTC))
PRICE = codecs.decimal(38, 7)
PRICES = st.integers(1 - 10**38, 10**38 - 1).map(lambda number: Decimal(f"{number}E-7"))
VALUES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "raw": (codecs.raw, st.binary(max_size=4)),
    "text": (codecs.text, TEXTS),
    "integer": (codecs.integer, INTEGERS),
    "float": (codecs.float, st.floats(allow_nan=False)),
    "boolean": (codecs.boolean, st.booleans()),
    "timestamp": (codecs.timestamp, MOMENTS),
    "date": (codecs.date, st.dates()),
    "decimal": (codecs.decimal(5, 2), st.decimals(-999, 999, places=2)),
    "uuid": (codecs.uuid, st.uuids()),
}


def part(codec: Any, value: object) -> bytes:
    return entry_part(codec.name, codec.encode(value), b"c")


@pytest.mark.parametrize("name", VALUES)
@given(data=st.data())
def test_parts_of_entries_have_the_order_of_the_values(name: str, data: Any) -> None:
    codec, values = VALUES[name]
    one, other = data.draw(values), data.draw(values)
    key = str.encode if name == "text" else lambda value: value  # by code point
    assert (part(codec, one) < part(codec, other)) == (key(one) < key(other))
    assert (part(codec, one) == part(codec, other)) == (one == other)


@given(data=st.data())
def test_entries_of_several_columns_have_the_order_of_the_first_that_differs(data: Any) -> None:
    """Each part shows where it ends."""
    chosen = data.draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=3))
    columns = tuple((b"%d" % place, VALUES[one][0].name) for place, one in enumerate(chosen))
    index = IndexDefinition("i", columns)

    def entry(row: bytes) -> tuple[tuple[Any, ...], bytes]:
        values = tuple(data.draw(VALUES[one][1]) for one in chosen)
        stored = [VALUES[one][0].encode(value) for one, value in zip(chosen, values, strict=True)]
        found = index.entry(row, dict(zip(index.names, stored, strict=True)))
        assert found is not None
        return (*values, row), found

    (one, first), (other, second) = entry(b"a"), entry(b"b")
    assert (first < second) == (_by_code_point(one) < _by_code_point(other))


def _by_code_point(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.encode() if isinstance(one, str) else one for one in values)


@given(PRICES, PRICES)
def test_the_longest_decimals_keep_their_order(one: Decimal, other: Decimal) -> None:
    assert (part(PRICE, one) < part(PRICE, other)) == (one < other)


def test_both_zeros_are_one_value_and_infinity_is_the_last() -> None:
    assert part(codecs.float, -0.0) == part(codecs.float, 0.0)
    ends = [-math.inf, -1e300, -5e-324, 0.0, 5e-324, math.inf]
    assert sorted(ends, key=lambda value: part(codecs.float, value)) == ends


def test_a_unique_entry_is_the_values_alone_and_a_row_without_one_has_none() -> None:
    values = {b"a": b"x\0", b"b": codecs.integer.encode(-1)}
    columns = ((b"a", "raw"), (b"b", "integer"))
    wanted = b"x\0\xff\0\0" + b"\x7f" + b"\xff" * 7
    assert IndexDefinition("i", columns, unique=True).entry(b"row", values) == wanted
    assert IndexDefinition("i", columns).entry(b"row", values) == wanted + b"row"
    assert IndexDefinition("i", columns).entry(b"row", {**values, b"a": None}) is None
    assert IndexDefinition("i", columns).entry(b"row", {b"a": b""}) is None


@pytest.mark.parametrize("codec", ["", "json", "model(Order)", "decimal(99,1)", "unknown"])
def test_values_without_an_order_cannot_be_indexed(codec: str) -> None:
    with pytest.raises(SchemaError, match="column 'c'"):
        require_indexable(codec, b"c")


@pytest.mark.parametrize("name", sorted(VALUES.keys() - {"raw", "text"}))
def test_bytes_of_another_codec_are_refused_with_their_column(name: str) -> None:
    with pytest.raises(SchemaError, match=r"column 'c': .* stored bytes are not"):
        entry_part(VALUES[name][0].name, b"seven..", b"c")


# Declarations.


def test_a_column_declares_an_index_of_its_name() -> None:
    people = Table("people")
    city = people.column("city", codecs.text, indexed=True)
    people.column("email", codecs.text, unique=True)
    people.column("name", codecs.text)
    place = people.index("place", city, people.column("age", codecs.integer))
    assert list(people.indexes) == ["city", "email", "place"]
    assert people.indexes["place"] is place
    assert [one.definition() for one in people.indexes.values()] == [
        IndexDefinition("city", ((b"city", "text"),)),
        IndexDefinition("email", ((b"email", "text"),), unique=True),
        IndexDefinition("place", ((b"city", "text"), (b"age", "integer"))),
    ]
    assert Table("people") == people
    assert repr(people.indexes["email"]) == "Index('people', 'email', b'email', unique)"


def test_the_same_declaration_gives_the_index_that_is_known() -> None:
    people = Table("people")
    city = people.column("city", codecs.text, indexed=True)
    known = people.indexes["city"]
    assert people.index("city", city) is known
    people.column("city", codecs.text, indexed=True)
    assert people.indexes == {"city": known}
    for other in (
        lambda: people.column("city", codecs.text, unique=True),
        lambda: people.column("city", codecs.raw, indexed=True),
        lambda: people.index("city", people.column("town", codecs.text)),
    ):
        with pytest.raises(SchemaError, match="table 'people' has another index 'city'"):
            other()
    assert people.indexes["city"] is known


def test_a_table_is_pickled_with_its_indexes() -> None:
    people = Table("people")
    city = people.column("city", codecs.text, indexed=True)
    back: Column[str] = pickle.loads(pickle.dumps(city))
    assert back.table.indexes == people.indexes
    assert back.table.indexes["city"].columns[0].table is back.table


_T = Table("people")
_CITY = _T.column("city", codecs.text)
_JSON = _T.column("document", codecs.json)
_STORED = _T.column("anything", codecs.stored)


@pytest.mark.parametrize(
    ("declare", "reason"),
    [
        (lambda: _T.index("i"), "index 'i': expected 1 to 16 columns, got 0"),
        (lambda: _T.index("i", *[_CITY] * 17), "index 'i': expected 1 to 16 columns, got 17"),
        (lambda: _T.index("i", _CITY, _CITY), "index 'i': column 'city' is named twice"),
        (
            lambda: _T.index("i", _CITY, unique="no"),  # type: ignore[arg-type]
            "index 'i': unique must be a bool, got str",
        ),
        (
            lambda: _T.column("city", codecs.text, unique=None),  # type: ignore[arg-type]
            "column 'city': unique must be a bool, got NoneType",
        ),
        (
            lambda: _T.column("city", codecs.text, indexed="no"),  # type: ignore[arg-type]
            "column 'city': indexed must be a bool, got str",
        ),
        (
            lambda: _T.index("i", Table("other").column("city", codecs.text)),
            "index 'i': .*is not a column of table 'people'",
        ),
        (lambda: _T.index("i", "city"), "index 'i': 'city' is not a column"),  # type: ignore[arg-type]
        (
            lambda: _T.index("i", _T.family("city:", codecs.text).column("x")),
            "index 'i': .* is of a family",
        ),
        (
            lambda: _T.index("i", _T.family("city:", codecs.text)),  # type: ignore[arg-type]
            "index 'i': .* is not a column of table 'people'",
        ),
        (lambda: _T.index("i", _JSON), "column 'document': values of codec json have no order"),
        (lambda: _T.index("i", _STORED), "column 'anything' has no codec"),
        (lambda: _T.index("", _CITY), "an index name must have 1 to 64 bytes"),
        (lambda: _T.index("n" * 65, _CITY), "an index name must have 1 to 64 bytes"),
        (lambda: _T.index("i\n", _CITY), "unprintable"),
        (lambda: _T.index(b"i", _CITY), "an index name must be a str"),  # type: ignore[arg-type]
        (lambda: _T.column(b"\xff", codecs.text, indexed=True), "is not text: use table.index"),
        (
            lambda: _T.column("c" * 65, codecs.text, unique=True),
            "an index name must have 1 to 64 bytes",
        ),
    ],
)
def test_an_index_that_cannot_be_kept_is_refused_at_its_declaration(
    declare: Callable[[], object], reason: str
) -> None:
    with pytest.raises(SchemaError, match=reason):
        declare()
    assert not _T.indexes


def test_an_index_is_known_by_its_table_and_name() -> None:
    assert Index(_T, "i", [_CITY]) == Index(Table("people"), "i", [_CITY])
    assert len({Index(_T, "i", [_CITY]), Index(_T, "i", [_CITY]), Index(_T, "j", [_CITY])}) == 2
