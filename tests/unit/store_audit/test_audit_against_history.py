"""What was acknowledged is stored completely, with its values; what was aborted is not."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.errors import CellAddress
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.schema import SHARED_NAME
from percolator.v1 import cells_pb2
from percolator.v1.cells_pb2 import Cell
from tests.isolation.checker import WatchedColumns, check
from tests.isolation.history import CellKey, History, Lock, TransactionRecord
from tests.isolation.store_audit import Invariant, StoredTable, audit
from tests.unit.isolation import histories
from tests.unit.isolation.histories import (
    ABORTED,
    UNKNOWN,
    delete,
    history,
    put,
    read,
    run,
    transaction,
)
from tests.unit.isolation.small_store import SmallStore
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

SHARED_ID = TABLE_ID + 1
TRANSFER = (put("x", "1"), put("y", "2"))
WATCHED = (WatchedColumns("index", frozenset({("t", b"v")})),)
UNDELETED = (replace(WATCHED[0], deletes=False),)


def _broken(recorded: History, *cells: Cell, collected_below: int = 0) -> list[object]:
    found = audited(*cells, history=recorded, collected_below=collected_below)
    return [violation.kind for violation in found.report.violations]


def test_an_acknowledged_commit_is_there_with_its_values() -> None:
    recorded = history(transaction(1, *TRANSFER, delete("z"), histories.lock("l"), commit=2))
    stored = [
        commit("l", 1, 2, kind=LOCK_ONLY),
        commit("x", 1, 2, "1"),
        commit("y", 1, 2, kind=DATA),
        data("y", 1, "2"),
        commit("z", 1, 2, kind=DELETE),
    ]
    assert _broken(recorded, *stored) == []


def test_an_acknowledged_commit_that_is_gone_is_flagged() -> None:
    recorded = history(transaction(1, put("x", "1"), commit=2))
    report = audited(history=recorded).report
    assert [v.kind for v in report.violations] == [Invariant.ACKNOWLEDGED, Invariant.ATOMIC]
    assert "told that it committed at 2; its primary t['x']['v'] holds no commit" in str(report)


def test_an_acknowledged_commit_at_another_timestamp_is_flagged() -> None:
    recorded = history(transaction(1, put("x", "1"), commit=2))
    assert _broken(recorded, commit("x", 1, 3, "1")) == [Invariant.ACKNOWLEDGED]


def test_a_secondary_may_still_be_locked_but_the_primary_may_not() -> None:
    recorded = history(transaction(1, *TRANSFER, commit=2))
    waiting = lock("y", 1, "x", value="2")
    assert _broken(recorded, commit("x", 1, 2, "1"), waiting) == []
    assert _broken(recorded, lock("x", 1, "x", value="1"), waiting) == [Invariant.ACKNOWLEDGED]


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
    recorded = history(transaction(1, *TRANSFER, commit=2))
    report = audited(commit("x", 1, 2, "1"), history=recorded).report
    assert [v.kind for v in report.violations] == [Invariant.ATOMIC]
    assert "committed at 2, has no record on t['y']['v']" in str(report)


def test_an_unknown_transaction_is_there_wholly_or_not_at_all() -> None:
    recorded = history(transaction(1, *TRANSFER, outcome=UNKNOWN))
    x, y = commit("x", 1, 2, "1"), commit("y", 1, 2, "2")
    assert _broken(recorded) == []
    assert _broken(recorded, x, y) == []
    assert _broken(recorded, lock("x", 1, "x"), lock("y", 1, "x")) == []
    assert _broken(recorded, marker("x", 1), lock("y", 1, "x")) == []
    assert _broken(recorded, x) == [Invariant.ATOMIC]
    assert _broken(recorded, y) == [Invariant.PRIMARY_FIRST, Invariant.ATOMIC]


def test_an_aborted_transaction_left_nothing_but_locks_and_markers() -> None:
    recorded = history(transaction(1, *TRANSFER, outcome=ABORTED))
    assert _broken(recorded, marker("x", 1), lock("y", 1, "x")) == []
    assert _broken(recorded, commit("x", 1, 2, "1"), commit("y", 1, 2, "2")) == [
        Invariant.ABORTED_ABSENT
    ]


def test_a_stored_value_that_was_never_written_is_flagged() -> None:
    recorded = history(transaction(1, put("x", "1"), commit=2))
    assert _broken(recorded, commit("x", 1, 2, "9")) == [Invariant.RIGHT_VALUE]
    assert _broken(recorded, commit("x", 1, 2, kind=DELETE)) == [Invariant.RIGHT_VALUE]
    assert _broken(recorded, commit("x", 1, 2, kind=LOCK_ONLY)) == [Invariant.RIGHT_VALUE]
    empty = history(transaction(1, put("x", ""), commit=2))
    assert _broken(empty, commit("x", 1, 2, kind=DELETE)) == [Invariant.RIGHT_VALUE]


def test_long_values_are_compared_to_their_last_byte() -> None:
    recorded = history(transaction(1, put("x", "v" * 5000 + "1"), commit=2))
    stored = (commit("x", 1, 2, kind=DATA), data("x", 1, "v" * 5000 + "2"))
    assert _broken(recorded, *stored) == [Invariant.RIGHT_VALUE]


def test_a_record_without_a_writer_is_flagged_when_all_writers_are_known() -> None:
    recorded = history(transaction(1, put("x", "1"), commit=2))
    stored = (commit("x", 1, 2, "1"), commit("x", 5, 6, "stranger"), commit("y", 1, 2, "more"))
    assert _broken(recorded, *stored) == [Invariant.ACCOUNTED_FOR, Invariant.ACCOUNTED_FOR]
    assert audited(*stored, history=recorded, complete=False).report


def test_a_run_of_an_observer_may_acknowledge_in_cells_of_its_own() -> None:
    recorded = history(run("index", "x", transaction(1, put("x", "1"), commit=2)))
    assert _broken(recorded, commit("x", 1, 2, "1"), commit("x.ack", 1, 2, "")) == []


def test_collection_may_take_what_is_superseded_and_nothing_else() -> None:
    recorded = history(
        transaction(1, put("x", "1"), commit=2),
        transaction(3, put("x", "2"), commit=4),
        transaction(5, put("x", "3"), commit=6),
    )
    second, third = commit("x", 3, 4, "2"), commit("x", 5, 6, "3")
    assert _broken(recorded, second, third, collected_below=5) == []
    assert _broken(recorded, third, collected_below=5) != []
    assert _broken(recorded, second, collected_below=5) != []


def test_collection_may_take_a_deletion_and_all_below_it() -> None:
    recorded = history(
        transaction(1, put("x", "1"), commit=2), transaction(3, delete("x"), commit=4)
    )
    assert _broken(recorded, collected_below=4) == []
    assert _broken(recorded, collected_below=3) != []


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
    """What the clients of a history would have left, some secondaries not yet committed."""
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
    for place, cell in enumerate(cells):
        if cell.space != cells_pb2.SPACE_WRITE:
            continue
        record = WriteRecord.decode(cell.value)
        if record.start_timestamp not in told:
            continue  # of unknown outcome: removing it may well leave a valid store
        others = cells[:place] + cells[place + 1 :]
        moved, changed = Cell(), Cell()
        moved.CopyFrom(cell)
        moved.timestamp += 100_000
        changed.CopyFrom(cell)
        changed.value = WriteRecord(record.start_timestamp, RecordKind.PUT, b"other").encode()
        assert not audited(*others, history=recorded).report
        assert not audited(*others, moved, history=recorded).report
        assert not audited(*others, changed, history=recorded).report
        stale = marker("nowhere", record.start_timestamp)
        assert not audited(*cells, stale, history=recorded).report
