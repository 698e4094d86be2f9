"""Filters are encoded part by part: they have to be the messages that they stand for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from percolator.bigtable.filters import checking, selecting
from percolator.rowstore.port import Check, Selection
from percolator.v1.bigtable_pb2 import BigtableRowFilter

_NAMES = st.binary(max_size=300)
_TIMES = st.integers(0, 2**63 - 1)
SELECTIONS = st.builds(
    Selection,
    st.sampled_from("lwodr"),
    _NAMES,
    _NAMES,
    st.one_of(st.just(0), _TIMES),
    st.one_of(st.just(0), _TIMES),
    st.one_of(st.just(b""), _NAMES),
    st.one_of(st.just(b""), _NAMES),
    st.booleans(),
    st.lists(st.tuples(_NAMES, _NAMES), max_size=3).map(tuple),
)


def _one(selection: Selection) -> BigtableRowFilter:
    """What a selection means, field by field."""
    filters = [BigtableRowFilter()]
    columns = filters[0].column_range_filter
    columns.family_name = selection.family
    if selection.first_column:
        columns.start_qualifier_closed = selection.first_column
    if selection.end_column:
        columns.end_qualifier_open = selection.end_column
    if selection.from_time or selection.until_time:
        times = BigtableRowFilter()
        times.timestamp_range_filter.start_timestamp_micros = selection.from_time
        times.timestamp_range_filter.end_timestamp_micros = selection.until_time
        filters.append(times)
    if selection.first_value or selection.end_value:
        filters.append(_values(selection.first_value, selection.end_value))
    if selection.any_of:
        filters.append(_any_of([_values(first, end) for first, end in selection.any_of]))
    if selection.newest:
        filters.append(BigtableRowFilter(cells_per_column_limit_filter=1))
    if len(filters) == 1:
        return filters[0]
    return BigtableRowFilter(chain=BigtableRowFilter.Chain(filters=filters))


def _values(first: bytes, end: bytes) -> BigtableRowFilter:
    values = BigtableRowFilter()
    values.value_range_filter.SetInParent()
    if first:
        values.value_range_filter.start_value_closed = first
    if end:
        values.value_range_filter.end_value_open = end
    return values


def _any_of(filters: list[BigtableRowFilter]) -> BigtableRowFilter:
    if len(filters) == 1:
        return filters[0]
    return BigtableRowFilter(interleave=BigtableRowFilter.Interleave(filters=filters))


def _all(selections: list[Selection]) -> BigtableRowFilter:
    return _any_of(list(map(_one, selections)))


@given(st.lists(SELECTIONS, min_size=1, max_size=9))
def test_an_encoded_filter_is_the_message_that_it_stands_for(selections: list[Selection]) -> None:
    assert selecting(selections) == _all(selections).SerializeToString(deterministic=True)


@given(st.lists(SELECTIONS, min_size=1, max_size=3), st.integers(1, 1_000))
def test_a_check_that_counts_skips_the_cells_that_may_be_there(
    selections: list[Selection], more_than: int
) -> None:
    check = Check(tuple(selections), found=True, more_than=more_than)
    offset = BigtableRowFilter(cells_per_row_offset_filter=more_than)
    chain = BigtableRowFilter.Chain(filters=[_all(selections), offset])
    expected = BigtableRowFilter(chain=chain)
    assert checking(check) == expected.SerializeToString(deterministic=True)
