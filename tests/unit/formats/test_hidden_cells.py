"""The names of hidden columns, and which cells they belong to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from percolator.formats.records import (
    acknowledgement_column,
    acknowledging_observer,
    locked_column,
    observed_column,
    read_lock_column,
)
from percolator.tablet.cells import AFTER_READ_LOCKS, cell_prefix, locked_cell, read_locks_prefix
from tests.unit.formats.test_records import documented

NAMES = st.binary(max_size=12) | st.text("\0\x01ab", max_size=6).map(str.encode)
STARTS = st.integers(0, 2**64 - 1)


@given(NAMES, STARTS)
def test_a_read_lock_names_its_column_and_its_transaction(column: bytes, start: int) -> None:
    name = read_lock_column(column, start)
    assert (locked_column(name), int.from_bytes(name[-8:], "big")) == (column, start)
    assert observed_column(name) is None
    assert locked_column(acknowledgement_column(b"index", column)) is None


@given(NAMES, NAMES)
def test_an_acknowledgement_names_its_observer_and_the_observed_column(
    observer: bytes, column: bytes
) -> None:
    name = acknowledgement_column(observer, column)
    assert (acknowledging_observer(name), observed_column(name)) == (observer, column)


@given(NAMES)
def test_other_names_are_no_read_locks(name: bytes) -> None:
    assert locked_column(name) is None
    assert locked_column(read_lock_column(name, 1)[:-1]) is None
    assert locked_column(read_lock_column(name, 1) + b"x") is None


@given(NAMES, NAMES, STARTS)
def test_a_read_lock_is_found_from_its_cell_and_the_other_way_round(
    row: bytes, column: bytes, start: int
) -> None:
    cell = cell_prefix(row, column)
    hidden = cell_prefix(row, read_lock_column(column, start))
    assert locked_cell(hidden) == cell
    assert locked_cell(cell) is None
    prefix = read_locks_prefix(cell)
    assert prefix < hidden < prefix + AFTER_READ_LOCKS
    assert hidden.startswith(prefix)


@given(NAMES, NAMES, NAMES, STARTS)
def test_the_read_locks_of_two_columns_are_never_mixed(
    row: bytes, column: bytes, other: bytes, start: int
) -> None:
    hidden = cell_prefix(row, read_lock_column(other, start))
    found = hidden.startswith(read_locks_prefix(cell_prefix(row, column)))
    assert found == (column == other)


def test_the_documented_read_lock_is_the_real_one() -> None:
    name = read_lock_column(b"balance", 3).hex(" ")
    assert f"`balance`, start 3: `{name}`" in documented("Read locks")
