"""Audits a store at rest: the structural invariants of its locks, commits, markers and values.

    found = audit([StoredTable(1, "accounts", cells)], history=recorder.history)
    assert found.report, str(found.report)
    report = check(recorder.history, resolve=found.stored.commit_timestamp)

It needs only the stored cells. With the history of all clients, it also finds acknowledged commits
that are missing, aborted ones that are there, and transactions that were torn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from percolator.testing.isolation.findings import Report
from percolator.testing.isolation.history import History
from percolator.testing.isolation.observer_runs import WatchedColumns
from percolator.testing.isolation.outcomes import settled
from percolator.testing.store_audit.cell_rules import check_cells
from percolator.testing.store_audit.history_rules import (
    check_accounted_for,
    check_against_history,
)
from percolator.testing.store_audit.invariants import Invariant
from percolator.testing.store_audit.notification_rules import check_notified
from percolator.testing.store_audit.stored_cells import Cell, StoredCells, StoredTable
from percolator.testing.store_audit.time_rules import check_collected, check_issued
from percolator.testing.store_audit.transaction_rules import check_transactions

__all__ = ["Audit", "Cell", "Invariant", "StoredCells", "StoredTable", "audit"]


class Audit(NamedTuple):
    """What the audit found, and what is stored."""

    report: Report
    stored: StoredCells


def audit(
    tables: Iterable[StoredTable],
    *,
    history: History | None = None,
    history_is_complete: bool = False,
    observers: Iterable[WatchedColumns] = (),
    timestamp_max: int | None = None,
    collected_below: int = 0,
    collection_finished: bool = False,
    collected: Mapping[int, int] = MappingProxyType({}),
    parts: Mapping[int, int] = MappingProxyType({}),
    left_out: Collection[int] = (),
    violations_max: int = 100,
) -> Audit:
    """Audits all tables together, because transactions may span several.

    `history_is_complete` says that no other client ever wrote. `timestamp_max` is the oracle's
    durable mark. Below `collected_below`, the safe point, history may be collected, and if
    `collection_finished`, it must be. `collected` has the commit timestamps of transactions of
    which a record was seen to be collected, by their start timestamps: the store cannot tell.
    `parts` has the start timestamps of the parts of shared transactions that were chosen to be
    committed, and those under which the history knows the whole. `left_out` has the ids of other
    tables, such as dropped ones that are still stored: transactions may have their primaries there.
    """
    report = Report(violations_max)
    stored = StoredCells(tables, report, collected, parts)
    check_cells(stored, report)
    check_transactions(stored, collected_below, left_out, report)
    if timestamp_max is not None:
        check_issued(stored, timestamp_max, report)
    if collection_finished:
        check_collected(stored, collected_below, report)
    if history is not None:
        final = settled(history, stored.commit_timestamp)
        check_against_history(stored, final, collected_below, report)
        check_notified(stored, final, observers, report)
        if history_is_complete:
            check_accounted_for(stored, final, report)
    return Audit(report, stored)
