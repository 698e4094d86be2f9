"""Keys sort as cells do, for any bytes, and tell cells apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.errors import InvariantViolation
from percolator.tablet import cells as tablet_cells
from percolator.tablet.cells import (
    FENCES,
    LOCK,
    NOTIFY,
    PREFIX_OF_SPACE,
    SPACE_OF_PREFIX,
    SPACES,
    TIMESTAMP_MAX,
    WRITE,
    CellKey,
    ColumnEncoder,
    after_component,
    cell_bounds,
    cell_prefix,
    change_key,
    change_of_write,
    component,
    decode,
    is_reserved,
    space_bounds,
    split_change,
)

# Many zeros, ones and 255s: the bytes that the encoding treats, or could treat, specially.
TRICKY = st.lists(st.sampled_from([0, 1, 2, 0xFE, 0xFF, 0x61]), max_size=6).map(bytes)
ANY_BYTES = TRICKY | st.binary(max_size=12)
TIMESTAMPS = st.integers(0, TIMESTAMP_MAX)


@st.composite
def cells(draw: st.DrawFn) -> CellKey:
    space = draw(st.sampled_from(SPACES))
    return CellKey(
        space,
        draw(ANY_BYTES),
        draw(ANY_BYTES),
        draw(ANY_BYTES) if space == NOTIFY else b"",
        0 if space == LOCK else draw(TIMESTAMPS),
    )


def encode(cell: CellKey) -> bytes:
    return tablet_cells.encode(cell.space, cell.row, cell.column, cell.timestamp, cell.qualifier)


@given(cell=cells())
def test_a_key_decodes_to_the_cell_that_it_encodes(cell: CellKey) -> None:
    assert decode(encode(cell)) == cell


@given(one=cells(), other=cells())
def test_keys_sort_as_cells_and_newer_versions_first(one: CellKey, other: CellKey) -> None:
    def rank(cell: CellKey) -> tuple[bytes, bytes, bytes, bytes, int]:
        prefix = PREFIX_OF_SPACE[cell.space]
        return prefix, cell.row, cell.column, cell.qualifier, -cell.timestamp

    assert (encode(one) < encode(other)) == (rank(one) < rank(other))
    assert (encode(one) == encode(other)) == (one == other)


@given(one=cells(), other=cells())
def test_no_cell_is_mistaken_for_a_version_of_another(one: CellKey, other: CellKey) -> None:
    """Readers and the judge treat every key with a cell's prefix as a version of that cell."""
    prefix = PREFIX_OF_SPACE[one.space] + cell_prefix(one.row, one.column)
    same = (one.space, one.row, one.column) == (other.space, other.row, other.column)
    assert encode(other).startswith(prefix) == same


@given(cell=cells(), start=ANY_BYTES, end=ANY_BYTES)
def test_row_bounds_contain_exactly_the_cells_of_these_rows(
    cell: CellKey, start: bytes, end: bytes
) -> None:
    first, stop = space_bounds(PREFIX_OF_SPACE[cell.space], start, end)
    inside = start <= cell.row and (not end or cell.row < end)
    assert (first <= encode(cell) < stop) == inside
    first, last = cell_bounds(start, end)
    assert (first <= encode(cell)[1:] and (last is None or encode(cell)[1:] < last)) == inside


@given(row=ANY_BYTES, other=cells())
def test_what_comes_after_a_row_comes_after_all_its_cells(row: bytes, other: CellKey) -> None:
    behind = after_component(component(row))
    assert (encode(other)[1:] >= behind) == (other.row > row)


@given(cell=cells())
def test_every_cell_is_between_the_fences_of_its_space(cell: CellKey) -> None:
    """An iterator that leaves a space meets a fence at once, whatever was deleted in the next."""
    key = encode(cell)
    behind = next(fence for fence in FENCES if fence > key)
    others = [prefix for prefix in SPACE_OF_PREFIX if prefix != key[:1]]
    assert not any(key[:1] < prefix < behind for prefix in others)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"Q\0\x01\0\x01",
        b"W",
        b"Wrow\0\x01",
        b"Wrow\0\x01column",
        b"Wr\0\x01c\0\x01short",
        b"Lr\0\0\x01c\0\x01",
    ],
)
def test_damaged_keys_are_reported(damaged: bytes) -> None:
    with pytest.raises(InvariantViolation):
        decode(damaged)


def test_the_cache_of_columns_is_bounded() -> None:
    encoder = ColumnEncoder()
    for number in range(10_000):
        assert encoder[b"%d" % number] == component(b"%d" % number)
    assert len(encoder) <= 4096


@given(row=st.binary(max_size=4), column=st.binary(max_size=4))
def test_a_column_that_begins_with_00_is_reserved_whatever_its_row(
    row: bytes, column: bytes
) -> None:
    assert is_reserved(cell_prefix(row, column)) == column.startswith(b"\0")


@given(row=st.binary(max_size=4), column=st.binary(max_size=4), at=st.integers(0, 2**64 - 1))
def test_a_change_names_its_commit_and_its_cell(row: bytes, column: bytes, at: int) -> None:
    cell = cell_prefix(row, column)
    assert split_change(change_key(cell, at)) == (at, cell)
    write = tablet_cells.encode(WRITE, row, column, at)
    assert change_of_write(write) == change_key(cell, at)
