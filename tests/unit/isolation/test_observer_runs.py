"""At most one committed run of an observer per change, at least one eventually."""

from __future__ import annotations

from enum import Enum

from tests.isolation.checker import ViolationKind, WatchedColumns, check
from tests.isolation.history import History, TransactionRecord
from tests.unit.isolation.histories import (
    ABORTED,
    delete,
    history,
    notify,
    put,
    read,
    run,
    transaction,
)

WATCHED = WatchedColumns("index", frozenset({("t", b"v")}))
UNDELETED = WatchedColumns("index", frozenset({("t", b"v")}), deletes=False)
WEAK = WatchedColumns("index", frozenset({("t", b"v")}), weak=True)


def _run(start: int, commit: int = 0, cell: str = "x") -> TransactionRecord:
    """A committed run, which acknowledges its cell."""
    acknowledged = transaction(start, put(f"{cell}.ack", str(start)), commit=commit or start + 1)
    return run("index", cell, acknowledged)


def _kinds(recorded: History, watched: WatchedColumns = WATCHED) -> list[Enum]:
    return [violation.kind for violation in check(recorded, observers=[watched]).violations]


def test_one_run_per_change_is_right() -> None:
    assert (
        _kinds(
            history(
                transaction(1, put("x", "1"), commit=2),
                _run(3),
                transaction(5, put("x", "2"), commit=6),
                _run(7),
            )
        )
        == []
    )


def test_many_changes_may_collapse_into_one_run() -> None:
    assert (
        _kinds(
            history(
                transaction(1, put("x", "1"), commit=2),
                transaction(3, put("x", "2"), commit=4),
                _run(5),
            )
        )
        == []
    )


def test_a_run_that_aborted_is_no_run() -> None:
    aborted = run("index", "x", transaction(3, read("x", "1"), outcome=ABORTED))
    assert _kinds(history(transaction(1, put("x", "1"), commit=2), aborted, _run(5))) == []
    assert _kinds(history(transaction(1, put("x", "1"), commit=2), aborted)) == [
        ViolationKind.MISSED_RUN
    ]


def test_a_second_committed_run_for_one_change_is_flagged() -> None:
    recorded = history(transaction(1, put("x", "1"), commit=2), _run(3), _run(5))
    report = check(recorded, observers=[WATCHED])
    assert [violation.kind for violation in report.violations] == [ViolationKind.REPEATED_RUN]
    assert "transaction 3" in str(report)
    assert "transaction 5" in str(report)


def test_a_run_without_any_change_is_flagged() -> None:
    assert _kinds(history(_run(3))) == [ViolationKind.REPEATED_RUN]


def test_a_change_above_the_last_run_was_missed() -> None:
    recorded = history(
        transaction(1, put("x", "1"), commit=2), _run(3), transaction(5, put("x", "2"), commit=6)
    )
    report = check(recorded, observers=[WATCHED])
    assert [violation.kind for violation in report.violations] == [ViolationKind.MISSED_RUN]
    assert "no run above 3 for t['x']['v']" in str(report)


def test_a_run_that_overlapped_the_change_did_not_see_it() -> None:
    """Its snapshot is below the commit, whichever came first in time."""
    assert _kinds(history(transaction(1, put("x", "1"), commit=4), _run(3, 5))) == [
        ViolationKind.REPEATED_RUN,
        ViolationKind.MISSED_RUN,
    ]


def test_a_run_that_writes_its_own_trigger_has_to_run_again() -> None:
    writing = run("index", "x", transaction(3, put("x", "2"), put("x.ack", "3"), commit=4))
    first = transaction(1, put("x", "1"), commit=2)
    assert _kinds(history(first, writing)) == [ViolationKind.MISSED_RUN]
    assert _kinds(history(first, writing, _run(5))) == []


def test_an_observer_that_deletes_do_not_wake_is_owed_no_run_for_one() -> None:
    changes = transaction(1, put("x", "1"), commit=2), transaction(3, delete("x"), commit=4)
    assert _kinds(history(*changes), UNDELETED) == []
    assert _kinds(history(*changes)) == [ViolationKind.MISSED_RUN]
    again = transaction(5, put("x", "2"), commit=6)
    assert _kinds(history(*changes, again), UNDELETED) == [ViolationKind.MISSED_RUN]
    assert _kinds(history(*changes, again, _run(7)), UNDELETED) == []


def test_an_observer_that_deletes_do_not_wake_has_no_run_that_sees_one() -> None:
    changes = transaction(1, put("x", "1"), commit=2), transaction(5, delete("x"), commit=6)
    assert _kinds(history(*changes, _run(3)), UNDELETED) == []
    assert _kinds(history(*changes, _run(7)), UNDELETED) == [ViolationKind.UNWANTED_RUN]
    assert _kinds(history(*changes, _run(7))) == []


def test_other_columns_notify_no_observer() -> None:
    assert _kinds(history(transaction(1, put("x.other", "1"), commit=2))) == []


def test_a_weak_observer_may_run_again_but_must_run() -> None:
    change = transaction(1, notify("x"), put("y.other", "1"), commit=2)
    assert _kinds(history(change, _run(3), _run(5)), WEAK) == []
    assert _kinds(history(change), WEAK) == [ViolationKind.MISSED_RUN]
