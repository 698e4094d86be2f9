"""A store at rest that breaks an invariant is flagged; one that only looks odd is accepted."""

from __future__ import annotations

import pytest

from percolator.errors import InvalidArgument
from percolator.formats.hidden_cells import read_lock_column
from percolator.v1 import cells_pb2
from percolator.v1.cells_pb2 import Cell
from tests.isolation.store_audit import Invariant, StoredTable, audit
from tests.unit.isolation.histories import history, put, transaction
from tests.unit.store_audit.stores import (
    DATA,
    DELETE,
    LOCK_ONLY,
    TABLE_ID,
    audited,
    commit,
    data,
    lock,
    marker,
    notification,
)

Cells = tuple[Cell, ...]

READ_LOCK_3, READ_LOCK_4 = (read_lock_column(b"v", start).decode() for start in (3, 4))

GOOD: dict[str, Cells] = {
    "nothing": (),
    "versions of a cell": (commit("x", 1, 2), commit("x", 3, 4), commit("x", 5, 9)),
    "one transaction on two cells": (commit("x", 1, 2), commit("y", 1, 2)),
    "the crash of a client before its commit": (lock("x", 1, "x"), lock("y", 1, "x")),
    "the crash of a client after its commit": (commit("x", 1, 2), lock("y", 1, "x")),
    "a lock whose primary is rolled back, not yet cleaned up": (
        marker("x", 1),
        lock("y", 1, "x"),
    ),
    "a lock of a newer transaction beside an older marker": (marker("x", 1), lock("x", 3, "x")),
    "a marker where the transaction never was": (commit("x", 3, 4), marker("x", 1)),
    "a marker between start and commit of another": (commit("x", 1, 5), marker("x", 3)),
    "a long value with its record": (commit("x", 1, 2, kind=DATA), data("x", 1, "long")),
    "a long value with its lock": (lock("x", 1, "x", kind=DATA), data("x", 1, "long")),
    "an empty value in place": (commit("x", 1, 2, ""),),
    "deletions and lock-only commits": (
        commit("x", 1, 2, kind=DELETE),
        commit("x", 3, 4, kind=LOCK_ONLY),
    ),
    "read locks of one cell at the same time, and a write before and after them": (
        commit("x", 1, 2),
        commit("x." + READ_LOCK_3, 3, 5, kind=LOCK_ONLY),
        commit("x." + READ_LOCK_4, 4, 6, kind=LOCK_ONLY),
        commit("x", 7, 8),
    ),
    "interleaved commits of different cells": (commit("x", 1, 4), commit("y", 2, 3)),
    "notifications": (commit("x", 1, 2), notification("x", 2), notification("x", 9, "other")),
}

BAD: dict[str, tuple[Cells, Invariant, str]] = {
    "two locks": (
        (lock("x", 1, "x"), lock("x", 3, "x")),
        Invariant.ONE_LOCK,
        "t['x']['v'] is locked by transactions 1 and 3",
    ),
    "a lock left beside its commit": (
        (commit("x", 1, 2), lock("x", 1, "x")),
        Invariant.SETTLED_LOCK,
        "transaction 1 still holds the lock",
    ),
    "a lock that came after its rollback": (
        (marker("x", 1), lock("x", 1, "x")),
        Invariant.SETTLED_LOCK,
        "where it was rolled back",
    ),
    "one transaction committed a cell twice": (
        (commit("x", 1, 2), commit("x", 1, 4)),
        Invariant.ONE_RECORD,
        "both of transaction 1",
    ),
    "commit at its start": ((commit("x", 2, 2),), Invariant.COMMIT_ABOVE_START, "began at 2"),
    "commit below its start": ((commit("x", 5, 2),), Invariant.COMMIT_ABOVE_START, "began at 5"),
    "two commit timestamps": (
        (commit("x", 1, 2), commit("y", 1, 3)),
        Invariant.ONE_COMMIT_TIMESTAMP,
        "committed t['x']['v'] at 2, but t['y']['v'] at 3",
    ),
    "committed here, rolled back there": (
        (commit("x", 1, 2), marker("y", 1)),
        Invariant.COMMITTED_OR_ROLLED_BACK,
        "committed t['x']['v'] at 2, but is rolled back on t['y']['v']",
    ),
    "rolled back on the very cell it committed": (
        (commit("x", 1, 2), marker("x", 1)),
        Invariant.COMMITTED_OR_ROLLED_BACK,
        "transaction 1",
    ),
    "a secondary committed, the primary still locked": (
        (lock("x", 1, "x"), commit("y", 1, 2)),
        Invariant.PRIMARY_FIRST,
        "committed t['y']['v'] at 2, but not its primary t['x']['v']",
    ),
    "a secondary committed, the primary gone": (
        (commit("y", 1, 2), lock("z", 1, "x")),
        Invariant.PRIMARY_FIRST,
        "not its primary t['x']['v']",
    ),
    "two writers at once": (
        (commit("x", 1, 4), commit("x", 2, 5)),
        Invariant.DISJOINT_COMMITS,
        "at 5 began at 2, and did not see the commit of t['x']['v'] at 4",
    ),
    "a lock-only commit overlapped": (
        (commit("x", 1, 4, kind=LOCK_ONLY), commit("x", 2, 5)),
        Invariant.DISJOINT_COMMITS,
        "began at 2",
    ),
    "a read lock overlapped": (
        (commit("x", 1, 4), commit("x." + READ_LOCK_3, 3, 5, kind=LOCK_ONLY)),
        Invariant.DISJOINT_COMMITS,
        "at 5 began at 3, and overlaps the commit of t['x']['v'] at 4",
    ),
    "a lock-only commit names what was changed since": (
        (commit("x", 1, 2), commit("x", 3, 4), commit("x", 5, 6, "", LOCK_ONLY, 2)),
        Invariant.LAST_CHANGE,
        "at 6 names the one at 2, and hides the commit of t['x']['v'] at 4",
    ),
    "a lock-only commit names what came later": (
        (commit("x", 3, 4, "", LOCK_ONLY, 6), commit("x", 5, 6)),
        Invariant.LAST_CHANGE,
        "at 4 names a later one, at 6",
    ),
    "a lock below a newer commit": (
        (commit("x", 2, 4), lock("x", 3, "x")),
        Invariant.DISJOINT_COMMITS,
        "transaction 3 holds a lock below the commit of t['x']['v'] at 4",
    ),
    "a long value lost": (
        (commit("x", 1, 2, kind=DATA),),
        Invariant.VALUE_STORED,
        "t['x']['v'] at 2",
    ),
    "a long value of a lock lost": (
        (lock("x", 1, "x", kind=DATA),),
        Invariant.VALUE_STORED,
        "transaction 1",
    ),
    "a long value forgotten by a rollback": (
        (marker("x", 1), data("x", 1, "long")),
        Invariant.VALUE_OWNED,
        "t['x']['v'] at 1",
    ),
    "a long value beside a short one": (
        (commit("x", 1, 2, "short"), data("x", 1, "long")),
        Invariant.VALUE_OWNED,
        "t['x']['v'] at 1",
    ),
    "a lock with a timestamp": (
        (Cell(space=cells_pb2.SPACE_LOCK, timestamp=3, value=lock("x", 1, "x").value),),
        Invariant.READABLE,
        "stored at timestamp 3",
    ),
    "a cut-off lock": (
        (Cell(space=cells_pb2.SPACE_LOCK, value=lock("x", 1, "x").value[:-1]),),
        Invariant.READABLE,
        "lock record",
    ),
    "a cut-off commit": (
        (Cell(space=cells_pb2.SPACE_WRITE, timestamp=2, value=b"\x00\x01"),),
        Invariant.READABLE,
        "write record",
    ),
    "a cell of no space": ((Cell(row=b"x"),), Invariant.READABLE, "no space 0"),
    "an observer's name where none belongs": (
        (Cell(space=cells_pb2.SPACE_ROLLBACK, qualifier=b"index"),),
        Invariant.READABLE,
        "only a notification",
    ),
    "a lock of a table that is gone": (
        (lock("x", 1, "x", table_id=99),),
        Invariant.READABLE,
        "names table 99",
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_an_odd_but_right_store_is_accepted(name: str) -> None:
    report = audited(*GOOD[name]).report
    assert report, str(report)


@pytest.mark.parametrize("name", BAD)
def test_a_broken_store_is_flagged_and_explained(name: str) -> None:
    cells, invariant, explained = BAD[name]
    report = audited(*cells, *(commit("other", 100, 101),)).report
    flagged = [v for v in report.violations if v.kind is invariant]
    assert flagged, str(report)
    assert explained in "\n".join(map(str, flagged))
    assert report.counts.total() <= 2, str(report)


@pytest.mark.parametrize(
    "stored",
    [
        commit("x", 1, 11),
        lock("x", 11, "x"),
        marker("x", 11),
        notification("x", 11),
    ],
    ids=["commit", "lock", "marker", "notification"],
)
def test_a_timestamp_above_the_oracles_mark_is_flagged(stored: Cell) -> None:
    assert audited(stored, timestamp_max=11).report
    assert audited(stored, timestamp_max=10).report.counts == {Invariant.TIMESTAMP_ISSUED: 1}


def test_collection_leaves_one_put_per_cell_below_the_safe_point() -> None:
    kept, older, newer = commit("x", 3, 4), commit("x", 1, 2), commit("x", 8, 9)

    def leftovers(*cells: Cell) -> int:
        report = audited(*cells, collected_below=5, collection_finished=True).report
        return report.counts[Invariant.COLLECTED]

    assert leftovers(newer) == 0
    assert leftovers(kept, newer) == 0
    assert leftovers(older, kept, newer) == 1
    assert leftovers(commit("x", 3, 4, kind=DELETE), newer) == 1
    assert leftovers(commit("x", 3, 4, kind=LOCK_ONLY)) == 1


def test_a_deletion_that_an_observer_has_yet_to_see_is_kept() -> None:
    deletion = commit("x", 3, 4, kind=DELETE)
    report = audited(
        deletion, notification("x", 4), collected_below=5, collection_finished=True
    ).report
    assert report, str(report)


def test_an_unfinished_collection_is_no_violation() -> None:
    assert audited(commit("x", 1, 2), commit("x", 3, 4), collected_below=5).report


def test_a_primary_may_be_collected_before_its_secondaries_lock_is_resolved() -> None:
    stored = (commit("y", 1, 2), lock("z", 1, "x"), commit("x", 3, 4))
    assert audited(*stored, collected_below=5).report
    assert not audited(*stored).report


def test_transactions_reach_across_tables() -> None:
    first, second = commit("x", 1, 2), commit("x", 1, 3)
    found = audit([StoredTable(1, "a", [first]), StoredTable(2, "b", [second])])
    assert found.report.counts == {Invariant.ONE_COMMIT_TIMESTAMP: 1}
    assert "a['x']['v'] at 2, but b['x']['v'] at 3" in str(found.report)


def test_a_lock_may_have_its_primary_in_a_table_that_is_left_out_and_in_no_unknown_one() -> None:
    stored = [StoredTable(TABLE_ID + 1, "a", [lock("z", 1, "x")])]
    assert audit(stored, left_out=[TABLE_ID]).report
    assert audit(stored).report.counts == {Invariant.READABLE: 1}
    assert audit(stored, left_out=[TABLE_ID + 2]).report.counts == {Invariant.READABLE: 1}


def test_a_history_about_a_table_that_was_not_passed_is_refused() -> None:
    """The audit would otherwise call all its commits lost."""
    with pytest.raises(InvalidArgument, match="history writes t"):
        audit(
            [StoredTable(TABLE_ID, "other", [])],
            history=history(transaction(1, put("x", "1"), commit=2)),
        )
