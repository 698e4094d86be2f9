"""A sieve finds entries that may match by the bytes of many at a time."""

from __future__ import annotations

import math
from datetime import date
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from percolator import Column, Table, codecs
from percolator.codecs import Codec
from percolator.conditions import Condition, Predicate, necessary
from percolator.errors import SchemaError
from percolator.formats.records import RecordKind, WriteRecord
from percolator.tablet.cells import ColumnEncoder, W, cell_prefix, inverted
from percolator.tablet.sieve import Sieve, rows_around

TABLE = Table("t")
VALUES: dict[str, tuple[Codec[Any], list[Any]]] = {
    "i": (codecs.integer, [-(2**63), -1, 0, 1, 2**63 - 1]),
    "f": (codecs.float, [-math.inf, -1.0, 0.0, math.nan]),
    "d": (codecs.date, [date(1970, 1, 1), date(2026, 1, 1)]),
    "t": (codecs.text, ["", "aaaaaaaa", "ä"]),
    "r": (codecs.raw, [b"", b"aaaaaaaa"]),
}
COLUMNS: dict[str, Column[Any]] = {
    name: TABLE.column(name, codec) for name, (codec, _) in VALUES.items()
}
BAD = [b"", b"\xff", b"\x7f" * 8, b"\xff" * 8, b"\x80" * 9]
"""Values of other programs. Most codecs cannot read some of them."""
KINDS = [RecordKind.PUT] * 8 + list(RecordKind)

Cell = tuple[str, bytes, RecordKind]


def _comparisons(name: str) -> st.SearchStrategy[Condition]:
    column = COLUMNS[name]
    operators = [column.equals, column.differs_from, column.__lt__, column.__ge__]
    return st.builds(
        lambda compare, value: compare(value),
        st.sampled_from(operators),
        st.sampled_from(VALUES[name][1]),
    )


def _cells(name: str, kinds: list[RecordKind]) -> st.SearchStrategy[Cell]:
    codec, values = VALUES[name]
    stored = st.sampled_from([*map(codec.encode, values), *BAD])
    return st.tuples(st.just(name), stored, st.sampled_from(kinds))


def _rows(kinds: list[RecordKind], names: str) -> st.SearchStrategy[list[list[Cell]]]:
    cells = st.sampled_from(names).flatmap(lambda name: _cells(name, kinds))
    return st.lists(st.lists(cells, min_size=1, unique_by=lambda cell: cell[0]), min_size=1)


CONDITIONS = st.recursive(
    st.sampled_from("ifdtr").flatmap(_comparisons)
    | st.sampled_from("ifdtr").map(lambda name: COLUMNS[name].is_null()),
    lambda part: st.builds(Condition.__and__, part, part) | st.builds(Condition.__or__, part, part),
    max_leaves=5,
)


def _found(rows: list[list[Cell]], condition: Condition) -> set[int] | None:
    """The rows of which an entry may match; None if nothing can be said."""
    keys, values = [], []
    for row, cells in enumerate(rows):
        for name, value, kind in sorted(cells):
            key = W + cell_prefix(b"%04d" % row, name.encode()) + inverted(7)
            has_value = kind == RecordKind.PUT
            keys.append(key)
            values.append(WriteRecord(6, kind, value if has_value else b"").encode())
    sieve = Sieve(Predicate(condition.message), ColumnEncoder())
    if not sieve:
        return None
    places = sieve.may_match(keys, values)
    assert places == sorted({*places})
    around = rows_around(keys, places)
    found = {int(keys[at][1:5]) for at in places}
    assert around == [at for at, key in enumerate(keys) if int(key[1:5]) in found]
    return found


def _needed(rows: list[list[Cell]], condition: Condition) -> set[int]:
    """The rows that match, or have a value that is compared and cannot be read."""
    predicate, found = Predicate(condition.message), set()
    for number, cells in enumerate(rows):
        valued = {RecordKind.PUT, RecordKind.PUT_IN_DATA}
        row = {name.encode(): value for name, value, kind in cells if kind in valued}
        try:
            if predicate.keeps_row({**row}):
                found.add(number)
        except SchemaError:
            found.add(number)
    return found


@given(_rows(KINDS, "ifdtr"), CONDITIONS)
def test_no_row_is_missed_that_matches_or_cannot_be_read(
    rows: list[list[Cell]], condition: Condition
) -> None:
    found = _found(rows, condition)
    assert found is None or found >= _needed(rows, condition)


@given(
    st.sampled_from("ifdtr").flatmap(
        lambda name: st.tuples(
            st.sampled_from([name, "ifdtr"]).flatmap(lambda all_: _rows([RecordKind.PUT], all_)),
            st.lists(_comparisons(name), min_size=1, max_size=3),
        )
    )
)
def test_comparisons_of_one_column_are_judged_together_and_find_no_other_row(
    case: tuple[list[list[Cell]], list[Condition]],
) -> None:
    rows, (condition, *others) = case
    for one in others:
        condition &= one
    assert _found(rows, condition) == _needed(rows, condition)


def test_the_comparison_that_is_likely_to_hold_for_fewest_rows_is_looked_for() -> None:
    i, t, r = COLUMNS["i"], COLUMNS["t"], COLUMNS["r"]
    chosen = {
        "an equality": ((i >= 1) & t.equals("a"), t.equals("a")),
        "both ends of a range": ((t >= "a") & (i >= 1) & (i < 2), (i >= 1) & (i < 2)),
        "a prefix": (i.differs_from(1) & t.startswith("a"), t.startswith("a")),
        "one instead of two": ((t.equals("a") | r.equals(b"")) & (i > 0), i > 0),
        "one column": (i.equals(1) | i.equals(2), i.equals(1) | i.equals(2)),
        "besides a null": ((i > 0) & (t.is_null() | r.is_null()), i > 0),
    }
    for name, (condition, expected) in chosen.items():
        assert necessary(condition.message) == [expected.message], name
    assert necessary(((i > 0) | t.is_null()).message) == []
    assert necessary((i.is_null() & t.is_not_null()).message) == []
