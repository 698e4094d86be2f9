"""What a transaction is about to write."""

from __future__ import annotations

import pytest

from percolator.errors import TransactionTooLarge
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT
from percolator.limits import Limits
from percolator.protocol.write_set import WriteSet

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
