"""Proofs: what says that a cell has neither a commit nor a marker of a transaction.

A check finds cells, or finds that there are none; it cannot do both at once. Where cells have to be
found, a proof makes it possible to find, too, that something else is not there (grouping.py).

A proof is put under the condition that the cell has neither. Whatever puts one of them deletes the
proof in the same change: every rollback does, and so do groups with those that they have counted.
It lies among the markers, at the start of the transaction, and is collected as they are: once no
transaction that began then can still be running, with a note that says so.
"""

from __future__ import annotations

from percolator.rowstore.layout import ROLLBACKS, is_proof_column, proof_column
from percolator.rowstore.port import TIME_UNIT, DeleteCell, Selection, SetCell, StoredCell
from percolator.rowstore.times import Times


def proof(column: bytes, start: int, times: Times) -> SetCell:
    """Puts the proof about a transaction in a cell."""
    return SetCell(ROLLBACKS, proof_column(column), times.time(start), b"")


def no_proof(column: bytes, start: int, times: Times) -> DeleteCell:
    """Deletes it, if it is there."""
    return DeleteCell(ROLLBACKS, proof_column(column), times.time(start))


def proof_selected(column: bytes, start: int, times: Times) -> Selection:
    """Finds it."""
    stored, time = proof_column(column), times.time(start)
    return Selection(ROLLBACKS, stored, stored + b"\0", time, time + TIME_UNIT)


def is_proof(cell: StoredCell) -> bool:
    return cell.family == ROLLBACKS and is_proof_column(cell.column)
