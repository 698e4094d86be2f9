"""Pages whose cells are joined have what pages of lists have, or are lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.formats.records import RecordKind
from percolator.routing.range_scan import joined_page
from percolator.tablet.scans import join_cells
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import (
    WRITE,
    Rig,
    mutation,
    prewrite,
    put,
    write_record,
    written,
)

CELLS = st.dictionaries(
    st.tuples(st.sampled_from([b"", b"a", b"a\0", b"b"]), st.sampled_from([b"x", b"y", b"z\0"])),
    st.binary(max_size=3),
)


@given(CELLS)
def test_cells_are_joined_if_all_rows_have_the_same_columns(
    cells: dict[tuple[bytes, bytes], bytes],
) -> None:
    ordered = sorted(cells)
    rows, columns = [row for row, _ in ordered], [column for _, column in ordered]
    found = pb.JoinedCells()
    joined = join_cells(rows, columns, [cells[one] for one in ordered], found)
    of_rows = [{column for row, column in ordered if row == one} for one in {*rows}]
    assert joined == (bool(of_rows) and all(one == of_rows[0] for one in of_rows))
    if not joined:
        assert found == pb.JoinedCells()
        return
    page = joined_page(found, b"", b"")
    assert page is not None
    assert page.rows.ends() == (rows[0], rows[-1])
    assert len(page.rows) == len({*rows})
    seen = {
        (row, column): value
        for column, values in page.columns.items()
        for row, value in zip(page.rows.cut(), values.cut(), strict=True)
    }
    assert seen == cells


async def test_a_scan_joins_what_it_can_if_its_caller_takes_that() -> None:
    rig = await Rig().open()
    await rig.apply(*(written(row, 5, 6, b"value of " + row) for row in (b"a", b"b", b"c")))
    [listed] = await rig.scan(30)
    assert not listed.HasField("joined")
    [sent] = await rig.scan(30, joined=True)
    assert not sent.HasField("found")
    page = joined_page(sent.joined, b"", b"")
    assert page is not None
    assert page.rows.cut() == list(listed.found.rows)
    assert [values.cut() for values in page.columns.values()] == [list(listed.found.values)]


async def test_locks_deletions_and_rows_of_other_columns_are_never_left_out() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 5, 6, b"1"), prewrite(b"b", 7))
    [page] = await rig.scan(30, joined=True)
    assert [lock.lock.row for lock in page.locks] == [b"b"]
    assert list(page.found.rows) == [b"a"]
    rig = await Rig().open()
    gone = write_record(5, b"", RecordKind.DELETE)
    await rig.apply(written(b"a", 5, 6, b"1"), mutation(b"b", put(WRITE, gone, 6)))
    [page] = await rig.scan(30, joined=True, report_deletes=True)
    assert (list(page.found.rows), list(page.found.deletes)) == ([b"a", b"b"], [1])
    rig = await Rig().open()
    other = mutation(b"b", put(WRITE, write_record(5, b"2"), 6), column=b"other")
    await rig.apply(written(b"a", 5, 6, b"1"), other)
    [page] = await rig.scan(30, joined=True)
    assert list(page.found.values) == [b"1", b"2"]
    [page] = await rig.scan(2, joined=True)
    assert not page.HasField("joined")


def _column(block: bytes, *offsets: int) -> pb.JoinedBytes:
    return pb.JoinedBytes(
        block=block, offsets=b"".join(one.to_bytes(4, "little") for one in offsets)
    )


@pytest.mark.parametrize(
    ("rows", "values"),
    [
        (_column(b"ab", 0, 1, 2), _column(b"v", 0, 1)),
        (_column(b"ab", 0, 1, 3), _column(b"vv", 0, 1, 2)),
        (_column(b"ab", 0, 1, 2), _column(b"vv", 1, 1, 2)),
        (pb.JoinedBytes(block=b"", offsets=b""), pb.JoinedBytes()),
        (pb.JoinedBytes(block=b"", offsets=bytes(5)), pb.JoinedBytes(offsets=bytes(5))),
        (_column(b"", 0), _column(b"", 0)),
    ],
)
def test_joined_cells_that_do_not_fit_together_are_no_page(
    rows: pb.JoinedBytes, values: pb.JoinedBytes
) -> None:
    columns = [pb.JoinedColumn(name=b"c", values=values)]
    assert joined_page(pb.JoinedCells(rows=rows, columns=columns), b"", b"") is None
    assert joined_page(pb.JoinedCells(rows=rows), b"", b"") is None
