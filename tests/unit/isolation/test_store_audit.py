"""A store at rest that breaks an invariant is flagged; one that only looks odd is accepted."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.errors import CellAddress, InvalidArgument, NotReady, TabletMoved
from percolator.formats.records import LockRecord, RecordKind, WriteRecord, read_lock_column
from percolator.schema import SHARED_NAME
from percolator.v1 import cells_pb2
from percolator.v1.cells_pb2 import Cell
from tests.isolation import store_audit as module
from tests.isolation.checker import WatchedColumns, check
from tests.isolation.history import CellKey, History, Lock, TransactionRecord
from tests.isolation.store_audit import Audit, Invariant, StoredTable, audit, stored_tables
from tests.patching import in_place_of
from tests.unit.isolation import histories
from tests.unit.isolation.histories import (
    ABORTED,
    UNKNOWN,
    cell,
    delete,
    history,
    put,
    read,
    run,
    transaction,
)
from tests.unit.isolation.test_checker_against_definition import SmallStore

# Short notation for stored cells: one table "t" with id 7, one column "v" unless named.

TABLE_ID = 7
PUT, DATA = RecordKind.PUT, RecordKind.PUT_IN_DATA
DELETE, LOCK_ONLY = RecordKind.DELETE, RecordKind.LOCK_ONLY


def _cell(space: cells_pb2.Space, name: str, timestamp: int, value: bytes) -> Cell:
    _, row, column = cell(name)
    return Cell(space=space, row=row, column=column, timestamp=timestamp, value=value)


def commit(
    name: str,
    start_ts: int,
    commit_ts: int,
    value: str = "",
    kind: RecordKind = PUT,
    last_change: int | None = None,
) -> Cell:
    record = WriteRecord(start_ts, kind, value.encode(), last_change)
    return _cell(cells_pb2.SPACE_WRITE, name, commit_ts, record.encode())


def lock(
    name: str,
    start_ts: int,
    primary: str,
    *,
    value: str = "",
    kind: RecordKind = PUT,
    table_id: int = TABLE_ID,
) -> Cell:
    _, row, column = cell(primary)
    record = LockRecord(
        start_ts,
        start_ts + 1,
        3000,
        kind,
        b"",
        CellAddress(table_id, row, column),
        value.encode(),
    )
    return _cell(cells_pb2.SPACE_LOCK, name, 0, record.encode())


def data(name: str, start_ts: int, value: str) -> Cell:
    return _cell(cells_pb2.SPACE_DATA, name, start_ts, value.encode())


def marker(name: str, start_ts: int) -> Cell:
    return _cell(cells_pb2.SPACE_ROLLBACK, name, start_ts, b"")


def notification(name: str, timestamp: int, observer: str = "index") -> Cell:
    stored = _cell(cells_pb2.SPACE_NOTIFY, name, timestamp, b"")
    stored.qualifier = observer.encode()
    return stored


def audited(
    *cells: Cell,
    history: History | None = None,
    complete: bool = True,
    observers: tuple[WatchedColumns, ...] = (),
    timestamp_max: int | None = None,
    collected_below: int = 0,
    collection_finished: bool = False,
) -> Audit:
    return audit(
        [StoredTable(TABLE_ID, "t", cells)],
        history=history,
        history_is_complete=complete,
        observers=observers,
        timestamp_max=timestamp_max,
        collected_below=collected_below,
        collection_finished=collection_finished,
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

    assert (leftovers(newer), leftovers(kept, newer), leftovers(older, kept, newer)) == (0, 0, 1)
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


# What was acknowledged is stored completely, with its values; what was aborted is not.

SHARED_ID = TABLE_ID + 1
TRANSFER = (put("x", "1"), put("y", "2"))
WATCHED = (WatchedColumns("index", frozenset({("t", b"v")})),)
UNDELETED = (replace(WATCHED[0], deletes=False),)


SET_X = history(transaction(1, put("x", "1"), commit=2))
MOVED_TO_Y = history(transaction(1, *TRANSFER, commit=2))
NOBODY_KNOWS = history(transaction(1, *TRANSFER, outcome=UNKNOWN))
GIVEN_UP = history(transaction(1, *TRANSFER, outcome=ABORTED))
REWRITTEN = history(
    transaction(1, put("x", "1"), commit=2),
    transaction(3, put("x", "2"), commit=4),
    transaction(5, put("x", "3"), commit=6),
)
REMOVED = history(transaction(1, put("x", "1"), commit=2), transaction(3, delete("x"), commit=4))
X, Y = commit("x", 1, 2, "1"), commit("y", 1, 2, "2")
LOST = [Invariant.ACKNOWLEDGED, Invariant.ATOMIC]
WAITING = lock("y", 1, "x", value="2")
SECOND, THIRD = commit("x", 3, 4, "2"), commit("x", 5, 6, "3")

STORED: dict[str, tuple[History, Cells, int, list[Invariant]]] = {
    "an acknowledged commit with its values": (
        history(transaction(1, *TRANSFER, delete("z"), histories.lock("l"), commit=2)),
        (
            commit("l", 1, 2, kind=LOCK_ONLY),
            X,
            commit("y", 1, 2, kind=DATA),
            data("y", 1, "2"),
            commit("z", 1, 2, kind=DELETE),
        ),
        0,
        [],
    ),
    "an acknowledged commit at another timestamp": (
        SET_X,
        (commit("x", 1, 3, "1"),),
        0,
        [Invariant.ACKNOWLEDGED],
    ),
    "a secondary that is still locked": (MOVED_TO_Y, (X, WAITING), 0, []),
    "a primary that is still locked": (
        MOVED_TO_Y,
        (lock("x", 1, "x", value="1"), WAITING),
        0,
        [Invariant.ACKNOWLEDGED],
    ),
    "an unknown transaction that is not there": (NOBODY_KNOWS, (), 0, []),
    "an unknown transaction that is wholly there": (NOBODY_KNOWS, (X, Y), 0, []),
    "an unknown transaction that is locked": (
        NOBODY_KNOWS,
        (lock("x", 1, "x"), lock("y", 1, "x")),
        0,
        [],
    ),
    "an unknown transaction that is being rolled back": (
        NOBODY_KNOWS,
        (marker("x", 1), lock("y", 1, "x")),
        0,
        [],
    ),
    "only the primary of an unknown transaction": (NOBODY_KNOWS, (X,), 0, [Invariant.ATOMIC]),
    "only the secondary of an unknown transaction": (
        NOBODY_KNOWS,
        (Y,),
        0,
        [Invariant.PRIMARY_FIRST, Invariant.ATOMIC],
    ),
    "locks and markers of an aborted transaction": (
        GIVEN_UP,
        (marker("x", 1), lock("y", 1, "x")),
        0,
        [],
    ),
    "commits of an aborted transaction": (GIVEN_UP, (X, Y), 0, [Invariant.ABORTED_ABSENT]),
    "another value": (SET_X, (commit("x", 1, 2, "9"),), 0, [Invariant.RIGHT_VALUE]),
    "a deletion in place of a value": (
        SET_X,
        (commit("x", 1, 2, kind=DELETE),),
        0,
        [Invariant.RIGHT_VALUE],
    ),
    "a lock in place of a value": (
        SET_X,
        (commit("x", 1, 2, kind=LOCK_ONLY),),
        0,
        [Invariant.RIGHT_VALUE],
    ),
    "a deletion in place of an empty value": (
        history(transaction(1, put("x", ""), commit=2)),
        (commit("x", 1, 2, kind=DELETE),),
        0,
        [Invariant.RIGHT_VALUE],
    ),
    "a long value with another last byte": (
        history(transaction(1, put("x", "v" * 5000 + "1"), commit=2)),
        (commit("x", 1, 2, kind=DATA), data("x", 1, "v" * 5000 + "2")),
        0,
        [Invariant.RIGHT_VALUE],
    ),
    "an acknowledgement of a run in a cell of its own": (
        history(run("index", "x", transaction(1, put("x", "1"), commit=2))),
        (X, commit("x.ack", 1, 2, "")),
        0,
        [],
    ),
    "collection has taken what is superseded": (REWRITTEN, (SECOND, THIRD), 5, []),
    "collection has taken what a snapshot shows": (REWRITTEN, (THIRD,), 5, LOST),
    "collection has taken what is newest": (REWRITTEN, (SECOND,), 5, LOST),
    "collection has taken a deletion and all below it": (REMOVED, (), 4, []),
    "collection has taken a deletion above it": (REMOVED, (), 3, LOST * 2),
}


@pytest.mark.parametrize("what", STORED)
def test_what_is_stored_is_compared_with_what_clients_were_told(what: str) -> None:
    recorded, cells, collected_below, broken = STORED[what]
    found = audited(*cells, history=recorded, collected_below=collected_below)
    assert [violation.kind for violation in found.report.violations] == broken


def test_an_acknowledged_commit_that_is_gone_is_flagged() -> None:
    report = audited(history=SET_X).report
    assert [v.kind for v in report.violations] == [Invariant.ACKNOWLEDGED, Invariant.ATOMIC]
    assert "told that it committed at 2; its primary t['x']['v'] holds no commit" in str(report)


def test_what_decides_a_shared_transaction_is_in_its_own_row() -> None:
    """A reader passes lock-only locks, so those of a job may stay, also on its least cell."""
    primary = Lock((SHARED_NAME, b"job", b"0.1.0.task"))
    recorded = history(transaction(9, histories.lock("a"), put("x", "1"), primary, commit=12))
    waiting, done = lock("a", 9, "p", kind=LOCK_ONLY, table_id=SHARED_ID), commit("x", 9, 12, "1")
    decided = WriteRecord(9, LOCK_ONLY).encode()

    def found(*decisions: int) -> list[object]:
        row, column = primary.key[1:]
        own = tuple(
            Cell(space=cells_pb2.SPACE_WRITE, row=row, column=column, timestamp=at, value=decided)
            for at in decisions
        )
        tables = [
            StoredTable(TABLE_ID, "t", (waiting, done)),
            StoredTable(SHARED_ID, SHARED_NAME, own),
        ]
        return [one.kind for one in audit(tables, history=recorded).report.violations]

    assert Invariant.ACKNOWLEDGED not in found(12)
    assert Invariant.ACKNOWLEDGED in found()
    assert Invariant.ACKNOWLEDGED in found(13)


def test_a_transaction_committed_in_part_is_flagged() -> None:
    report = audited(X, history=MOVED_TO_Y).report
    assert [v.kind for v in report.violations] == [Invariant.ATOMIC]
    assert "committed at 2, has no record on t['y']['v']" in str(report)


def test_a_record_without_a_writer_is_flagged_when_all_writers_are_known() -> None:
    stored = (X, commit("x", 5, 6, "stranger"), commit("y", 1, 2, "more"))
    assert audited(*stored, history=SET_X).report.counts == {Invariant.ACCOUNTED_FOR: 2}
    assert audited(*stored, history=SET_X, complete=False).report


def test_a_change_has_a_notification_or_a_run_above_it() -> None:
    change = transaction(1, put("x", "1"), commit=2)
    stored = commit("x", 1, 2, "1")
    seen = run("index", "x", transaction(3, read("x", "1")))
    unseen = run("index", "x", transaction(3, read("x", "1"), outcome=ABORTED))

    def forgotten(recorded: History, *cells: Cell) -> int:
        report = audited(*cells, history=recorded, observers=WATCHED).report
        return report.counts[Invariant.NOTIFIED]

    assert forgotten(history(change), stored) == 1
    assert forgotten(history(change), stored, notification("x", 2, "another")) == 1
    assert forgotten(history(change), stored, notification("x", 1)) == 1
    assert forgotten(history(change), stored, notification("x", 2)) == 0
    assert forgotten(history(change), stored, notification("x", 9)) == 0
    assert forgotten(history(change, seen), stored) == 0
    assert forgotten(history(change, unseen), stored) == 1


def test_a_delete_needs_no_notification_of_an_observer_that_it_does_not_wake() -> None:
    recorded = history(transaction(1, delete("x"), commit=2))
    stored = commit("x", 1, 2, kind=DELETE)
    assert not audited(stored, history=recorded, observers=UNDELETED).report.violations
    assert audited(stored, history=recorded, observers=WATCHED).report.violations


def test_the_lock_on_a_watched_cell_is_its_notification() -> None:
    change = transaction(1, put("w.plain", "1"), put("x", "1"), commit=2)
    stored = (commit("w.plain", 1, 2, "1"), lock("x", 1, "w.plain", value="1"))
    found = audited(*stored, history=history(change), observers=WATCHED)
    assert found.report, str(found.report)


# --------------------------------------------------------------- a store made from a history


def _address(key: CellKey) -> CellAddress:
    return CellAddress(TABLE_ID, key[1], key[2])


def _record(transaction: TransactionRecord, key: CellKey) -> tuple[RecordKind, bytes]:
    writes = transaction.writes()
    if key not in writes:
        return RecordKind.LOCK_ONLY, b""
    value = writes[key]
    return (RecordKind.DELETE, b"") if value is None else (RecordKind.PUT, value)


def _stored(recorded: History, store: SmallStore, chance: Random) -> list[Cell]:
    """Cells that the clients of a history would have left, some secondaries not yet committed."""
    cells = []
    for record in recorded:
        commit_ts = store.resolve(record)
        if commit_ts is None:
            continue
        locked = sorted(record.locked(), key=lambda key: key[1:])
        for place, key in enumerate(locked):
            kind, value = _record(record, key)
            cell = Cell(row=key[1], column=key[2])
            cell.space, cell.timestamp = cells_pb2.SPACE_WRITE, commit_ts
            cell.value = WriteRecord(record.start_ts, kind, value).encode()
            newest = all(key not in r.locked() or r is record for r in recorded)
            if place and newest and chance.random() < 0.3:
                cell.space, cell.timestamp = cells_pb2.SPACE_LOCK, 0
                cell.value = LockRecord(
                    record.start_ts, 0, 0, kind, b"", _address(locked[0]), value
                ).encode()
            cells.append(cell)
    return cells


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 120))
def test_a_store_that_its_clients_wrote_is_accepted_and_settles_their_history(
    seed: int, steps: int
) -> None:
    chance = Random(seed)
    store = SmallStore(chance)
    recorded = store.run(steps)
    cells = _stored(recorded, store, chance)
    chance.shuffle(cells)
    found = audited(*cells, history=recorded, timestamp_max=10_000)
    assert found.report, str(found.report)
    assert check(recorded, resolve=found.stored.commit_timestamp)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(40, 120))
def test_a_commit_record_lost_moved_or_changed_is_flagged(seed: int, steps: int) -> None:
    chance = Random(seed)
    store = SmallStore(chance)
    recorded = store.run(steps)
    cells = _stored(recorded, store, chance)
    told = {record.start_ts for record in recorded if record.committed and record.locked()}
    for place, stored_cell in enumerate(cells):
        if stored_cell.space != cells_pb2.SPACE_WRITE:
            continue
        record = WriteRecord.decode(stored_cell.value)
        if record.start_timestamp not in told:
            continue  # of unknown outcome: removing it may well leave a valid store
        others = cells[:place] + cells[place + 1 :]
        moved, changed = Cell(), Cell()
        moved.CopyFrom(stored_cell)
        moved.timestamp += 100_000
        changed.CopyFrom(stored_cell)
        changed.value = WriteRecord(record.start_timestamp, RecordKind.PUT, b"other").encode()
        assert not audited(*others, history=recorded).report
        assert not audited(*others, moved, history=recorded).report
        assert not audited(*others, changed, history=recorded).report
        stale = marker("nowhere", record.start_timestamp)
        assert not audited(*cells, stale, history=recorded).report


# Reading a store for the audit: it counts when nothing moved or changed meanwhile.

CELLS = [StoredTable(1, "cells", [])]
MOVED = TabletMoved("moved", tablet_id=1, epoch=2)
NOTHING: Any = None


def readings(monkeypatch: pytest.MonkeyPatch, *found: Any) -> list[Any]:
    """Lets one reading after another find this."""
    left = list(found)

    @in_place_of(monkeypatch, module, "_read")
    async def read(*arguments: object) -> list[StoredTable]:
        one = left.pop(0)
        if isinstance(one, Exception):
            raise one
        return list(one)

    return left


async def test_the_reading_starts_again_when_a_tablet_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = readings(monkeypatch, CELLS, MOVED, CELLS, CELLS)
    assert await stored_tables(NOTHING, NOTHING, ["cells"], 1.0) == CELLS
    assert left == []


async def test_a_store_that_never_rests_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    readings(monkeypatch, *([MOVED] * 100))
    with pytest.raises(NotReady, match="does not come to rest"):
        await stored_tables(NOTHING, NOTHING, ["cells"], 1.0)
