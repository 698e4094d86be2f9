"""Filters encoded part by part equal their messages, and rows are put together from chunks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.bigtable.messages import Rows, checking, selecting
from percolator.errors import ExecutionUnknown
from percolator.rowstore.port import Check, Selection, StoredCell, StoredRow
from percolator.v1.bigtable_pb2 import BigtableReadRowsResponse, BigtableRowFilter

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
    """The filter of a selection, field by field."""
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
def test_an_encoded_filter_equals_its_message(selections: list[Selection]) -> None:
    assert selecting(selections) == _all(selections).SerializeToString(deterministic=True)


@given(st.lists(SELECTIONS, min_size=1, max_size=3), st.integers(1, 1_000))
def test_a_check_that_counts_skips_the_cells_that_may_exist(
    selections: list[Selection], more_than: int
) -> None:
    check = Check(tuple(selections), found=True, more_than=more_than)
    offset = BigtableRowFilter(cells_per_row_offset_filter=more_than)
    chain = BigtableRowFilter.Chain(filters=[_all(selections), offset])
    expected = BigtableRowFilter(chain=chain)
    assert checking(check) == expected.SerializeToString(deterministic=True)


Chunk = BigtableReadRowsResponse.CellChunk


def chunk(
    row: bytes = b"", family: str | None = None, column: bytes | None = None, **fields: Any
) -> Chunk:
    made = Chunk(row_key=row, **fields)
    if family is not None:
        made.family_name.value = family
    if column is not None:
        made.qualifier.value = column
    return made


def rows_of(*chunks: Chunk, reverse: bool = False) -> list[StoredRow]:
    """The rows of these chunks, of which each comes in its own message."""
    rows = Rows(reverse=reverse)
    found = [row for one in chunks for row in rows.take([one])]
    rows.end()
    return found


def test_fields_that_a_chunk_omits_keep_their_values() -> None:
    found = rows_of(
        chunk(b"r", "w", b"c", timestamp_micros=2_000, value=b"new"),
        chunk(timestamp_micros=1_000, value=b"old"),
        chunk(column=b"", timestamp_micros=1_000, value=b""),
        chunk(family="l", column=b"c", timestamp_micros=3_000, value=b"x", commit_row=True),
        chunk(b"s", "w", b"c", timestamp_micros=1_000, value=b"y", commit_row=True),
    )
    assert found == [
        StoredRow(
            b"r",
            [
                StoredCell("w", b"c", 2_000, b"new"),
                StoredCell("w", b"c", 1_000, b"old"),
                StoredCell("w", b"", 1_000, b""),
                StoredCell("l", b"c", 3_000, b"x"),
            ],
        ),
        StoredRow(b"s", [StoredCell("w", b"c", 1_000, b"y")]),
    ]


def test_a_long_value_is_put_together_from_its_parts() -> None:
    found = rows_of(
        chunk(b"r", "w", b"c", timestamp_micros=2_000, value=b"a", value_size=3),
        chunk(value=b"b", value_size=3),
        chunk(value=b"c"),
        chunk(column=b"d", timestamp_micros=1_000, value=b"z", commit_row=True),
    )
    values = [(cell.column, cell.time, cell.value) for cell in found[0].cells]
    assert values == [(b"c", 2_000, b"abc"), (b"d", 1_000, b"z")]


def test_a_row_that_is_reset_begins_again() -> None:
    found = rows_of(
        chunk(b"r", "w", b"c", timestamp_micros=2_000, value=b"half", value_size=8),
        chunk(reset_row=True),
        chunk(b"r", "w", b"c", timestamp_micros=1_000, value=b"whole", commit_row=True),
    )
    assert found == [StoredRow(b"r", [StoredCell("w", b"c", 1_000, b"whole")])]


@pytest.mark.parametrize("keys", [b"aa", b"ba", b"aba"])
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_out_of_order_are_an_error(keys: bytes, reverse: bool) -> None:
    """A call that was duplicated on its way may be answered twice."""
    names = [bytes([key]) for key in (keys[::-1] if reverse else keys)]
    chunks = [chunk(name, "w", b"c", value=b"x", commit_row=True) for name in names]
    with pytest.raises(ExecutionUnknown, match="rows are not in order"):
        rows_of(*chunks, reverse=reverse)
    in_order = sorted(set(names), reverse=reverse)
    chunks = [chunk(name, "w", b"c", value=b"x", commit_row=True) for name in in_order]
    assert [row.key for row in rows_of(*chunks, reverse=reverse)] == in_order


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(b"r", "w", b"c", value=b"x")],
        [chunk(b"r", "w", b"c", value=b"x", value_size=2, commit_row=True)],
        [chunk(b"r", "w", b"c", value=b"x"), chunk(b"s", "w", b"c", commit_row=True)],
        [chunk(b"r", value=b"x", commit_row=True)],
        [chunk(family="w", column=b"c", value=b"x", commit_row=True)],
    ],
    ids=["cut off", "within a value", "two rows", "no family", "no row"],
)
def test_malformed_chunks_are_an_error_and_never_a_row(chunks: list[Chunk]) -> None:
    with pytest.raises(ExecutionUnknown, match="malformed"):
        rows_of(*chunks)


def _passing(*keys: bytes, reverse: bool = False) -> Rows:
    rows = Rows(reverse=reverse)
    for key in keys:
        rows.pass_over(key)
    return rows


def test_a_scan_continues_after_the_key_that_it_has_reported() -> None:
    rows = _passing(b"a", b"b", b"b")
    one = chunk(b"c", "w", b"c", timestamp_micros=1_000, value=b"", commit_row=True)
    assert [row.key for row in rows.take([one])] == [b"c"]
    rows.pass_over(b"c")
    _passing(b"b", b"a", reverse=True).end()


def test_a_scan_that_reports_an_earlier_key_is_an_error() -> None:
    for rows, key in ((_passing(b"b"), b"a"), (_passing(b"a", reverse=True), b"b")):
        with pytest.raises(ExecutionUnknown, match="malformed: a scan goes back"):
            rows.pass_over(key)
    rows = _passing(b"b")
    with pytest.raises(ExecutionUnknown, match="malformed: its rows are not in order"):
        list(rows.take([chunk(b"a", "w", b"c", value=b"", commit_row=True)]))
    rows = Rows()
    list(rows.take([chunk(b"a", "w", b"c", value=b"")]))
    with pytest.raises(ExecutionUnknown, match="malformed: a scan goes on within a row"):
        rows.pass_over(b"b")
