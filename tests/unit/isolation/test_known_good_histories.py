"""Histories that look suspicious and are right: the checker accepts every one of them."""

from __future__ import annotations

from enum import Enum

import pytest

from percolator.errors import UsageError
from tests.isolation.checker import ViolationKind, WatchedColumns, check
from tests.isolation.history import History, TransactionRecord
from tests.unit.isolation.histories import (
    ABORTED,
    COMMITTED,
    UNKNOWN,
    delete,
    history,
    lock,
    notify,
    put,
    read,
    read_lock,
    run,
    scan,
    transaction,
)

GOOD: dict[str, History] = {
    "nothing at all": history(),
    "write skew is allowed": history(
        transaction(1, put("x", "1"), put("y", "1"), commit=2),
        transaction(3, read("x", "1"), read("y", "1"), put("x", "0"), commit=5),
        transaction(4, read("x", "1"), read("y", "1"), put("y", "0"), commit=6),
        transaction(7, read("x", "0"), read("y", "0")),
    ),
    "a commit is visible at its own timestamp": history(
        transaction(1, put("x", "1"), commit=5),
        transaction(5, read("x", "1"), historic=True, session="past"),
    ),
    "blind writes, one after the other": history(
        transaction(1, put("x", "1"), commit=2),
        transaction(3, put("x", "2"), commit=4),
        transaction(5, read("x", "2")),
    ),
    "a write that begins exactly at the other's commit": history(
        transaction(1, put("x", "1"), commit=2),
        transaction(2, put("x", "2"), commit=3, historic=True),
    ),
    "an old snapshot reads old values beside new writers": history(
        transaction(1, put("x", "1"), commit=2),
        transaction(3, read("x", "1"), read("y", None)),
        transaction(4, put("x", "2"), put("y", "2"), commit=5),
    ),
    "a lock-free reader ignores a commit above its snapshot": history(
        transaction(1, put("x", "1"), commit=9),
        transaction(3, read("x", None)),
        transaction(10, read("x", "1")),
    ),
    "empty values, empty rows and empty columns exist": history(
        transaction(1, put("", ""), put("x.", ""), commit=2),
        transaction(3, read("", ""), read("x", "")),
    ),
    "deleted, written again": history(
        transaction(1, put("x", "1"), commit=2),
        transaction(3, delete("x"), commit=4),
        transaction(5, read("x", None)),
        transaction(6, put("x", ""), commit=7),
        transaction(8, read("x", "")),
    ),
    "a deletion of what was never there": history(
        transaction(1, delete("x"), commit=2), transaction(3, read("x", None), scan("", ""))
    ),
    "own reads: last word, deletion, and back": history(
        transaction(
            1,
            read("x", "0"),
            put("x", "1"),
            read("x", "1"),
            delete("x"),
            read("x", None),
            put("x", "2"),
            read("x", "2"),
            commit=2,
        ),
        transaction(3, read("x", "2")),
        x="0",
    ),
    "own reads of an aborted transaction": history(
        transaction(1, put("x", "1"), read("x", "1"), outcome=ABORTED),
        transaction(2, read("x", None)),
    ),
    "the same value written by an aborted and a committed transaction": history(
        transaction(1, put("x", "1"), outcome=ABORTED),
        transaction(2, put("x", "1"), commit=3),
        transaction(4, read("x", "1")),
    ),
    "a value that went and came back": history(
        transaction(1, put("x", "a"), commit=2),
        transaction(3, put("x", "b"), commit=4),
        transaction(5, put("x", "a"), commit=6),
        transaction(7, read("x", "a")),
    ),
    "a lock-only write changes nothing": history(
        transaction(1, put("x", "1"), commit=2),
        transaction(3, lock("x"), read("x", "1"), commit=4),
        transaction(5, read("x", "1"), scan("", "", ("x", "1"))),
    ),
    "read locks of one cell at the same time, and writers before and after them": history(
        transaction(1, put("x", "1"), commit=2),
        transaction(3, read("x", "1"), read_lock("x"), put("y", "a"), commit=5),
        transaction(4, read("x", "1"), read_lock("x"), put("z", "b"), commit=6),
        transaction(7, put("x", "2"), commit=8),
    ),
    "a lock-only write between two writers": history(
        transaction(1, put("x", "1"), commit=2),
        transaction(3, lock("x"), commit=4),
        transaction(5, put("x", "2"), commit=6),
    ),
    "locked and then written by one transaction": history(
        transaction(1, lock("x"), put("x", "1"), commit=2), transaction(3, read("x", "1"))
    ),
    "concurrent writers of which one aborted": history(
        transaction(1, put("x", "1"), commit=4),
        transaction(2, put("x", "2"), outcome=ABORTED),
        transaction(5, read("x", "1")),
    ),
    "a reader between start and commit of a writer": history(
        transaction(1, put("x", "1"), put("y", "1"), commit=5),
        transaction(3, read("x", None), read("y", None)),
    ),
    "data from before the run": history(
        transaction(1, read("x", "0"), scan("", "", ("x", "0"))), x="0"
    ),
    "scan with own writes laid over it": history(
        transaction(1, put("a", "1"), put("b", "1"), put("d", "1"), commit=2),
        transaction(
            3,
            put("b", "2"),
            delete("a"),
            put("c", "2"),
            scan("", "", ("b", "2"), ("c", "2"), ("d", "1")),
            delete("c"),
            scan("", "", ("b", "2"), ("d", "1")),
            commit=4,
        ),
        transaction(5, scan("", "", ("b", "2"), ("d", "1"))),
    ),
    "reverse scan with own writes and a limit": history(
        transaction(1, put("a", "1"), put("c", "1"), put("e", "1"), commit=2),
        transaction(
            3,
            put("d", "2"),
            delete("e"),
            scan("", "", ("d", "2"), ("c", "1"), reverse=True, limit=2),
            commit=4,
        ),
    ),
    "an own deletion does not use up the limit": history(
        transaction(1, put("a", "1"), put("b", "1"), put("c", "1"), commit=2),
        transaction(3, delete("a"), scan("", "", ("b", "1"), ("c", "1"), limit=2), commit=4),
    ),
    "limit counts rows, not cells": history(
        transaction(1, put("a.p", "1"), put("a.q", "2"), put("b.p", "3"), commit=2),
        transaction(3, scan("", "", ("a.p", "1"), ("a.q", "2"), limit=1)),
    ),
    "limit skips rows without the wanted column": history(
        transaction(1, put("a.p", "1"), put("b.q", "2"), put("c.q", "3"), commit=2),
        transaction(3, scan("", "", ("b.q", "2"), columns="q", limit=1)),
    ),
    "columns of a row may come in any order": history(
        transaction(1, put("a.p", "1"), put("a.q", "2"), commit=2),
        transaction(3, scan("", "", ("a.q", "2"), ("a.p", "1"))),
    ),
    "a prefix, ends included and excluded": history(
        transaction(1, put("a", "1"), put("b", "2"), put("b9", "3"), put("c", "4"), commit=2),
        transaction(3, scan("b", "c", ("b", "2"), ("b9", "3"))),
    ),
    "empty and impossible ranges": history(
        transaction(1, put("b", "1"), commit=2),
        transaction(3, scan("c", "d"), scan("b", "b"), scan("c", "a")),
    ),
    "a scan left early": history(
        transaction(1, put("a", "1"), put("b", "2"), commit=2),
        transaction(3, scan("", "", ("a", "1"), complete=False), scan("", "", complete=False)),
    ),
    "a row inserted above the snapshot is no phantom": history(
        transaction(1, put("a", "1"), commit=2),
        transaction(3, scan("", "", ("a", "1")), read("b", None)),
        transaction(4, put("b", "1"), commit=5),
        transaction(6, scan("", "", ("a", "1"), ("b", "1"))),
    ),
    "a row whose last column goes, goes": history(
        transaction(1, put("a.p", "1"), put("a.q", "1"), commit=2),
        transaction(3, delete("a.p"), delete("a.q"), commit=4),
        transaction(5, scan("", "")),
    ),
    "a historic snapshot is outside session and real-time order": history(
        transaction(
            5, put("x", "1"), commit=6, session="a", number=1, instants=(0.0, 0.1, 0.2, 0.3)
        ),
        transaction(
            3,
            read("x", None),
            session="a",
            number=2,
            historic=True,
            instants=(0.4, 0.5, None, None),
        ),
        transaction(7, read("x", "1"), session="a", number=3, instants=(0.6, 0.7, None, None)),
    ),
    "one pinned snapshot shared by two readers": history(
        transaction(3, read("x", None), session="a", historic=True),
        transaction(3, read("x", None), session="b", historic=True),
    ),
    "timestamps of overlapping calls may come in either order": history(
        transaction(5, read("x", None), instants=(0.0, 0.4, None, None)),
        transaction(3, read("x", None), instants=(0.3, 0.5, None, None)),
    ),
    "what happens at one instant is in no order": history(
        transaction(5, read("x", None), instants=(0.0, 0.3, None, None)),
        transaction(3, read("x", None), instants=(0.3, 0.5, None, None)),
    ),
    "instants of different clocks are not compared": history(
        transaction(5, read("x", None), instants=(0.0, 0.1, None, None), clock="a"),
        transaction(3, read("x", None), instants=(9.0, 9.1, None, None), clock="b"),
    ),
    "a read-only transaction shares no timestamp with anyone but may report none": history(
        transaction(1, read("x", None)), transaction(2, read("x", None), scan("", ""))
    ),
    "read-only transactions that report their start as their commit": history(
        transaction(1, read("x", None), commit=1, instants=(0.0, 0.1, 0.2, 0.3)),
        transaction(2, read("x", None), commit=2),
    ),
    "a transaction that never learned its start": history(
        transaction(0, outcome=ABORTED), transaction(0, outcome=UNKNOWN, session="b")
    ),
    "a weak form of unknown: it wrote nothing": history(
        transaction(1, read("x", None), outcome=UNKNOWN)
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_known_good_history_is_accepted(name: str) -> None:
    report = check(GOOD[name])
    assert report, str(report)


def _unknown_writer(*seen: str | None) -> History:
    """A writer of unknown outcome, then readers that saw what `seen` says."""
    readers = [transaction(5 + 2 * n, read("x", value)) for n, value in enumerate(seen)]
    return history(transaction(1, put("x", "1"), outcome=UNKNOWN), *readers)


def test_an_unknown_commit_may_have_happened() -> None:
    assert check(_unknown_writer("1", "1"), resolve=lambda record: 2)


def test_an_unknown_commit_may_not_have_happened() -> None:
    assert check(_unknown_writer(None, None), resolve=lambda record: None)


def test_an_unknown_commit_may_have_happened_above_a_reader() -> None:
    assert check(_unknown_writer(None, "1"), resolve=lambda record: 6)


def test_an_unknown_commit_did_not_both_happen_and_not_happen() -> None:
    assert not check(_unknown_writer("1", None), resolve=lambda record: None)
    assert not check(_unknown_writer("1", None), resolve=lambda record: 2)


def test_an_unknown_commit_binds_no_session_and_no_clock() -> None:
    """Its client was told nothing, so its next transaction may have an older snapshot."""
    unknown = transaction(
        1,
        put("x", "1"),
        outcome=UNKNOWN,
        session="a",
        number=1,
        instants=(0.0, 0.1, 0.2, 0.3),
    )
    after = transaction(3, read("x", None), session="a", number=2, instants=(0.4, 0.5, None, None))
    assert check(history(unknown, after), resolve=lambda record: 4)


def test_an_unknown_writer_without_a_resolver_is_refused() -> None:
    """Guessing would accept a history that contradicts the store."""
    with pytest.raises(UsageError, match="transaction 1"):
        check(_unknown_writer(None))


# At most one committed run of an observer per change, at least one eventually.

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


# A report explains the first violations, counts the rest, and stays readable.


def test_every_violation_is_reported_not_only_the_first() -> None:
    report = check(
        history(
            transaction(1, put("x", "1"), put("y", "1"), commit=2),
            transaction(3, read("x", None), put("z", "1"), commit=6),
            transaction(4, read("y", None), put("z", "2"), commit=7),
        )
    )
    kinds = [violation.kind for violation in report.violations]
    assert sorted(kind.name for kind in kinds) == ["CONFLICT", "STALE_READ", "STALE_READ"]


def test_a_report_keeps_a_bounded_number_and_counts_the_rest() -> None:
    readers = [transaction(n, read("x", "wrong")) for n in range(1, 51)]
    report = check(history(*readers), violations_max=7)
    assert len(report.violations) == 7
    assert report.counts[ViolationKind.UNWRITTEN_READ] == 50
    assert "… and 43 more" in str(report)


def test_long_values_are_cut_in_explanations() -> None:
    report = check(history(transaction(1, read("x", "v" * 10_000))))
    assert len(str(report)) < 1_000
    assert "(10000 bytes)" in str(report)


def test_the_outcome_of_a_violation_names_the_reader_first() -> None:
    reader = transaction(3, read("x", None))
    writer = transaction(1, put("x", "1"), commit=2)
    (violation,) = check(history(writer, reader)).violations
    assert violation.transactions[0] is reader
    assert reader.outcome is COMMITTED
