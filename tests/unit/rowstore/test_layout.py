"""Names of rows and columns in a row store."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from percolator.codecs.values import after_prefix
from percolator.rowstore.layout import (
    ALL_COLUMNS,
    column_bounds,
    column_of,
    row_key,
    row_of,
    stored_column,
)

_NAMES = st.binary(max_size=4) | st.text("\0a", max_size=3).map(str.encode)


@given(_NAMES, _NAMES)
def test_keys_have_the_order_of_rows_and_are_never_empty(one: bytes, other: bytes) -> None:
    assert row_of(row_key(one)) == one
    assert row_key(one)
    assert (row_key(one) < row_key(other)) is (one < other)


@given(_NAMES)
def test_only_hidden_columns_are_outside_of_all_columns(column: bytes) -> None:
    stored = stored_column(column)
    assert column_of(stored) == column
    assert (ALL_COLUMNS[0] <= stored < ALL_COLUMNS[1]) is not column.startswith(b"\0")
    first, end = column_bounds(column)
    assert first == stored < end == stored + b"\0"


@given(st.binary(max_size=3), st.binary(max_size=4))
def test_what_begins_with_a_prefix_lies_before_its_end(prefix: bytes, name: bytes) -> None:
    end = after_prefix(prefix)
    inside = prefix <= name and (not end or name < end)
    assert inside is name.startswith(prefix)
