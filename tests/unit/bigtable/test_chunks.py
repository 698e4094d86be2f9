"""Rows from the chunks in which Bigtable streams them."""

from __future__ import annotations

from typing import Any

import pytest

from percolator.bigtable.chunks import Rows
from percolator.errors import ExecutionUnknown
from percolator.rowstore.port import StoredCell, StoredRow
from percolator.v1.bigtable_pb2 import BigtableReadRowsResponse

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
    """Each chunk in a message of its own."""
    rows = Rows(reverse=reverse)
    found = [row for one in chunks for row in rows.take([one])]
    rows.end()
    return found


def test_what_is_not_said_is_as_before() -> None:
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


def test_a_long_value_comes_in_parts() -> None:
    found = rows_of(
        chunk(b"r", "w", b"c", timestamp_micros=2_000, value=b"a", value_size=3),
        chunk(value=b"b", value_size=3),
        chunk(value=b"c"),
        chunk(column=b"d", timestamp_micros=1_000, value=b"z", commit_row=True),
    )
    values = [(cell.column, cell.time, cell.value) for cell in found[0].cells]
    assert values == [(b"c", 2_000, b"abc"), (b"d", 1_000, b"z")]


def test_a_row_that_is_taken_back_begins_again() -> None:
    found = rows_of(
        chunk(b"r", "w", b"c", timestamp_micros=2_000, value=b"half", value_size=8),
        chunk(reset_row=True),
        chunk(b"r", "w", b"c", timestamp_micros=1_000, value=b"whole", commit_row=True),
    )
    assert found == [StoredRow(b"r", [StoredCell("w", b"c", 1_000, b"whole")])]


@pytest.mark.parametrize("keys", [b"aa", b"ba", b"aba"])
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_out_of_order_are_an_error(keys: bytes, reverse: bool) -> None:
    """Such as those of a call that was doubled on its way, and answered twice."""
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
def test_what_makes_no_sense_is_an_error_and_never_a_row(chunks: list[Chunk]) -> None:
    with pytest.raises(ExecutionUnknown, match="malformed"):
        rows_of(*chunks)


def _passing(*keys: bytes, reverse: bool = False) -> Rows:
    rows = Rows(reverse=reverse)
    for key in keys:
        rows.pass_over(key)
    return rows


def test_a_scan_that_says_how_far_it_has_come_goes_on_behind_that() -> None:
    rows = _passing(b"a", b"b", b"b")
    one = chunk(b"c", "w", b"c", timestamp_micros=1_000, value=b"", commit_row=True)
    assert [row.key for row in rows.take([one])] == [b"c"]
    rows.pass_over(b"c")
    _passing(b"b", b"a", reverse=True).end()


def test_a_scan_that_says_it_goes_back_makes_no_sense() -> None:
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
