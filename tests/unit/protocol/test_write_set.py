"""What a transaction is about to write."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.errors import CellAddress, TransactionTooLarge
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT
from percolator.limits import Limits
from percolator.protocol.write_set import Write, WriteSet

from .cells_and_steps import A, B, C


def test_the_last_write_of_a_cell_counts() -> None:
    own = WriteSet(Limits())
    own.put(A, b"1")
    own.put(A, b"22")
    own.lock(A)
    assert own.cells[A] == (KIND_PUT, b"22")
    assert own.size_bytes == 2 + len(A.row) + len(A.column)
    own.delete(A)
    own.lock(B)
    own.put(C, b"")
    assert {cell: kind for cell, (kind, _) in own.cells.items()} == {
        A: KIND_DELETE,
        B: KIND_LOCK_ONLY,
        C: KIND_PUT,
    }


def test_writes_without_room_for_all_of_them_change_nothing() -> None:
    own = WriteSet(Limits(transaction_cells_max=2))
    own.put(A, b"1")
    before, size_bytes = dict(own.cells), own.size_bytes
    with pytest.raises(TransactionTooLarge):
        own.write_together([(A, None), (B, b"2"), (C, b"3")])
    assert (own.cells, own.size_bytes) == (before, size_bytes)


CELLS = [
    CellAddress(table, row, column)
    for table in (1, 2)
    for row in (b"", b"a", b"a\0", b"b", b"c")
    for column in (b"x", b"y", b"z", b"zz", b"zzz")
]
Step = tuple[str, list[CellAddress]]
steps: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(
        st.sampled_from(["put", "delete", "lock", "together", "adopt", "look"]),
        st.lists(st.sampled_from(CELLS), min_size=1, max_size=20),
    ),
    max_size=20,
)


@given(steps, st.sampled_from([b"", b"a", b"b"]), st.sampled_from([b"", b"a\0", b"c"]))
def test_writes_are_found_by_their_rows_however_many_there_are_and_however_they_came(
    course: list[Step], start: bytes, end: bytes
) -> None:
    own = WriteSet(Limits(transaction_cells_max=45))
    for kind, cells in course:
        with suppress(TransactionTooLarge):
            _take(own, kind, cells)
    for table in (1, 2):
        found: dict[bytes, dict[bytes, Write]] = {}
        for cell, write in own.cells.items():
            if cell.table_id == table:
                found.setdefault(cell.row, {})[cell.column] = write
        assert own.of_rows(table, [b"c", b"a", b"no"]) == {
            row: found[row] for row in (b"c", b"a") if row in found
        }
        assert own.rows(table, start, end) == {
            row: writes for row, writes in found.items() if start <= row and (not end or row < end)
        }


def _take(own: WriteSet, kind: str, cells: list[CellAddress]) -> None:
    if kind == "adopt":
        other = WriteSet(Limits())
        for cell in cells:
            other.put(cell, b"adopted")
        own.adopt(other)
    elif kind == "together":
        own.write_together([(cell, None if cell.row == b"b" else b"1") for cell in cells])
    elif kind == "look":
        own.rows(1, b"", b"")
    else:
        for cell in cells:
            {"put": lambda one: own.put(one, b"2"), "delete": own.delete, "lock": own.lock}[kind](
                cell
            )
