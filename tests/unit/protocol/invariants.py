"""What must hold for a store and the histories of its clients, whatever happened to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from percolator.errors import CellAddress
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY

from .naive_cells import NOTIFY, ROLLBACK, NaiveCells
from .protocol_world import OBSERVED, OBSERVER, WEAK_OBSERVER, Transaction

Read = tuple[int, CellAddress, bytes | None]


def violations(
    store: NaiveCells, transactions: Iterable[Transaction], reads: Iterable[Read]
) -> list[str]:
    """A description of each broken rule; empty if all hold."""
    found: list[str] = []
    by_start = {transaction.start: transaction for transaction in transactions}
    committed = _commits(store, found)
    for start, cells in committed.items():
        found += _whole(store, by_start[start], cells)
    for start, transaction in by_start.items():
        found += _told_the_truth(start, transaction, committed.get(start, {}))
    for start, transaction in by_start.items():
        reads = [*reads, *((start, cell, value) for cell, value in transaction.reads.items())]
    for timestamp, cell, value in reads:
        shown = store.at(cell, timestamp)
        expected = shown.value if shown else None
        if value != expected:
            found.append(f"read of {cell} at {timestamp} gave {value!r}, not {expected!r}")
    return found


def _commits(store: NaiveCells, found: list[str]) -> dict[int, dict[CellAddress, int]]:
    committed: dict[int, dict[CellAddress, int]] = {}
    for cell, versions in store.cells.items():
        spans = sorted((record.start_timestamp, commit) for commit, record in store.commits(cell))
        for (first, first_commit), (second, _) in itertools.pairwise(spans):
            if first == second:
                found.append(f"{first} committed {cell} twice")
            elif first_commit >= second:
                found.append(f"lost update on {cell}: {first}..{first_commit} overlaps {second}")
        for start, commit in spans:
            if commit <= start:
                found.append(f"{start} committed before it began, at {commit}")
            if (ROLLBACK, b"", start) in versions:
                found.append(f"{start} is committed and rolled back on {cell}")
            committed.setdefault(start, {})[cell] = commit
        if store.lock_of(cell):
            found.append(f"a lock is left on {cell}")
    return committed


def _whole(store: NaiveCells, transaction: Transaction, cells: dict[CellAddress, int]) -> list[str]:
    found = []
    start = transaction.start
    if set(cells) != set(transaction.writes):
        found.append(f"torn: {start} wrote {set(transaction.writes)}, committed {set(cells)}")
    if len(set(cells.values())) > 1:
        found.append(f"{start} has several commit timestamps: {cells}")
    commit = max(cells.values())
    for cell in cells:
        kind, value = transaction.writes[cell]
        if kind == KIND_LOCK_ONLY:
            continue
        shown = store.at(cell, cells[cell])
        if shown is None or shown.value != (None if kind == KIND_DELETE else value):
            found.append(f"{start} wrote {value!r} to {cell}, which shows {shown}")
        notified = (NOTIFY, OBSERVER, cells[cell]) in store.cells[cell]
        if cell.column == OBSERVED and not notified:
            found.append(f"no observer is notified of {start} on {cell}")
    found += [
        f"the weak notification of {start} on {cell} is lost"
        for cell in transaction.weak
        if (NOTIFY, WEAK_OBSERVER, commit) not in store.cells.get(cell, {})
    ]
    return found


def _told_the_truth(
    start: int, transaction: Transaction, cells: dict[CellAddress, int]
) -> list[str]:
    found = []
    for outcome in transaction.outcomes:
        if outcome and set(cells.values()) != {outcome}:
            found.append(f"{start} was reported committed at {outcome}; stored is {cells}")
        if not outcome and cells:
            found.append(f"{start} was reported aborted; stored is {cells}")
    return found
