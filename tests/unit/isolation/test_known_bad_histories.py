"""Histories that no snapshot-isolated store can produce: each is flagged, with the right name.

The explanation must say who read or wrote what: it contains the fragments beside each history.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    serializable,
    transaction,
)

# Histories that no snapshot-isolated store can produce, and what must be reported about each.


@dataclass(frozen=True)
class Bad:
    """Findings that must be reported about a history, and how often at most."""

    history: History
    kind: ViolationKind
    explained: tuple[str, ...]
    unknown_commit: int | None = None


LOST_UPDATE = history(
    transaction(1, put("x", "0"), commit=2),
    transaction(3, read("x", "0"), put("x", "a"), commit=6),
    transaction(4, read("x", "0"), put("x", "b"), commit=7),
)
DIRTY_WRITE = history(
    transaction(1, put("x", "a"), put("y", "a"), commit=4),
    transaction(2, put("x", "b"), put("y", "b"), commit=3),
)
LONG_FORK = history(
    transaction(1, put("x", "1"), commit=3),
    transaction(2, put("y", "1"), commit=4),
    transaction(5, read("x", "1"), read("y", None)),
    transaction(6, read("x", None), read("y", "1")),
)

BAD_HISTORIES: dict[str, Bad] = {
    "lost update": Bad(
        LOST_UPDATE,
        ViolationKind.CONFLICT,
        ("transaction 4", "t['x']['v'] at 7", "transaction 3", "at 6", "above the snapshot 4"),
    ),
    "dirty write": Bad(DIRTY_WRITE, ViolationKind.CONFLICT, ("transaction 1", "transaction 2")),
    "lock-only write ignored by a writer": Bad(
        history(
            transaction(1, lock("x"), commit=3),
            transaction(2, put("x", "b"), commit=4),
        ),
        ViolationKind.CONFLICT,
        ("transaction 2", "transaction 1"),
    ),
    "two lock-only writes at once": Bad(
        history(transaction(1, lock("x"), commit=3), transaction(2, lock("x"), commit=4)),
        ViolationKind.CONFLICT,
        ("transaction 2", "transaction 1"),
    ),
    "written while it was read-locked": Bad(
        history(
            transaction(1, read("x", None), read_lock("x"), put("y", "a"), commit=4),
            transaction(2, put("x", "b"), commit=3),
        ),
        ViolationKind.CONFLICT,
        ("transaction 1", "t['x']['v'] at 4", "transaction 2", "at 3"),
    ),
    "read-locked while it was written": Bad(
        history(
            transaction(1, put("x", "b"), commit=4),
            transaction(2, read("x", None), read_lock("x"), put("y", "a"), commit=3),
        ),
        ViolationKind.CONFLICT,
        ("transaction 1", "t['x']['v'] at 4", "transaction 2", "at 3"),
    ),
    "serializable, and what it has read was changed": Bad(
        history(
            transaction(1, put("x", "b"), commit=3),
            serializable(transaction(2, read("x", None), put("y", "a"), commit=4)),
        ),
        ViolationKind.NOT_SERIALIZABLE,
        ("transaction 2", "t['x']['v']", "transaction 1", "before its commit at 4"),
    ),
    "long writer around a short one": Bad(
        history(transaction(1, put("x", "a"), commit=9), transaction(3, put("x", "b"), commit=4)),
        ViolationKind.CONFLICT,
        ("transaction 1", "at 9", "transaction 3", "at 4"),
    ),
    "stale read": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, put("x", "2"), commit=4),
            transaction(5, read("x", "1")),
        ),
        ViolationKind.STALE_READ,
        ("transaction 5", "read '1'", "by transaction 1", "holds '2'", "by transaction 3"),
    ),
    "committed write not seen at all": Bad(
        history(transaction(1, put("x", "1"), commit=2), transaction(3, read("x", None))),
        ViolationKind.STALE_READ,
        (
            "read nothing",
            "before the first transaction",
            "by transaction 1 (s1 #1), committed at 2",
        ),
    ),
    "write at the reader's own timestamp not seen": Bad(
        history(
            transaction(1, put("x", "1"), commit=5),
            transaction(5, read("x", None), historic=True),
        ),
        ViolationKind.STALE_READ,
        ("holds '1'",),
    ),
    "torn transaction": Bad(
        history(
            transaction(1, put("x", "1"), put("y", "1"), commit=2),
            transaction(3, read("x", "1"), read("y", None)),
        ),
        ViolationKind.STALE_READ,
        ("t['y']['v']", "transaction 1"),
    ),
    "second read of a cell differs": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, read("x", "1"), read("x", "2")),
            transaction(4, put("x", "2"), commit=5),
        ),
        ViolationKind.FUTURE_READ,
        ("transaction 3", "transaction 4", "committed at 5", "holds '1'"),
    ),
    "dirty read of a transaction that commits later": Bad(
        history(transaction(1, put("x", "1"), commit=9), transaction(3, read("x", "1"))),
        ViolationKind.FUTURE_READ,
        ("transaction 3", "written by transaction 1", "committed at 9"),
    ),
    "deletion seen too early": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, read("x", None)),
            transaction(4, delete("x"), commit=5),
        ),
        ViolationKind.STALE_READ,
        ("read nothing", "holds '1'"),
    ),
    "deletion not seen": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, delete("x"), commit=4),
            transaction(5, read("x", "1")),
        ),
        ViolationKind.STALE_READ,
        ("deleted by transaction 3",),
    ),
    "empty value taken for a deleted cell": Bad(
        history(transaction(1, put("x", ""), commit=2), transaction(3, read("x", None))),
        ViolationKind.STALE_READ,
        ("holds ''",),
    ),
    "deleted cell taken for an empty value": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, delete("x"), commit=4),
            transaction(5, read("x", "")),
        ),
        ViolationKind.UNWRITTEN_READ,
        ("read ''", "no transaction ever wrote", "holds nothing"),
    ),
    "aborted read (G1a)": Bad(
        history(transaction(1, put("x", "1"), outcome=ABORTED), transaction(3, read("x", "1"))),
        ViolationKind.ABORTED_READ,
        ("by transaction 1 (s1 #1), which aborted", "holds nothing"),
    ),
    "aborted deletion read": Bad(
        history(
            transaction(1, delete("x"), outcome=ABORTED),
            transaction(2, read("x", None)),
            x="1",
        ),
        ViolationKind.ABORTED_READ,
        ("transaction 1", "holds '1' (there before the first transaction)"),
    ),
    "intermediate read (G1b)": Bad(
        history(
            transaction(1, put("x", "1"), put("x", "2"), commit=2),
            transaction(3, read("x", "1")),
        ),
        ViolationKind.INTERMEDIATE_READ,
        ("replaced before its commit", "holds '2'"),
    ),
    "value out of thin air": Bad(
        history(transaction(1, read("x", "7"))),
        ViolationKind.UNWRITTEN_READ,
        ("read '7'", "no transaction ever wrote"),
    ),
    "value of another cell": Bad(
        history(
            transaction(1, put("x", "1"), put("y", "2"), commit=2),
            transaction(3, read("x", "2")),
        ),
        ViolationKind.UNWRITTEN_READ,
        ("t['x']['v']", "no transaction ever wrote"),
    ),
    "own write not read": Bad(
        history(transaction(1, put("x", "1"), read("x", None), commit=2)),
        ViolationKind.OWN_WRITE_NOT_READ,
        ("read nothing", "written '1' there"),
    ),
    "own deletion not read": Bad(
        history(transaction(1, delete("x"), read("x", "0"), commit=2), x="0"),
        ViolationKind.OWN_WRITE_NOT_READ,
        ("read '0'", "itself deleted it"),
    ),
    "own write read before it was made": Bad(
        history(transaction(1, read("x", "1"), put("x", "1"), commit=2)),
        ViolationKind.OWN_WRITE_NOT_READ,
        ("read '1'",),
    ),
    "an aborted transaction read wrongly": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, read("x", None), outcome=ABORTED),
        ),
        ViolationKind.STALE_READ,
        ("transaction 3",),
    ),
    "long fork": Bad(LONG_FORK, ViolationKind.STALE_READ, ("t['y']['v']", "transaction 2")),
    "historic read of a newer version": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, put("x", "2"), commit=4),
            transaction(2, read("x", "2"), historic=True, session="past"),
        ),
        ViolationKind.FUTURE_READ,
        ("past", "committed at 4"),
    ),
    "historic read of an older version": Bad(
        history(
            transaction(1, put("x", "1"), commit=2),
            transaction(3, put("x", "2"), commit=4),
            transaction(4, read("x", "1"), historic=True, session="past"),
        ),
        ViolationKind.STALE_READ,
        ("holds '2'",),
    ),
    "one timestamp for two transactions": Bad(
        history(transaction(1, put("x", "1"), commit=2), transaction(2, read("y", None))),
        ViolationKind.DUPLICATE_TIMESTAMP,
        ("2 was handed to", "transaction 1", "transaction 2"),
    ),
    "two transactions with one start": Bad(
        history(
            transaction(1, put("x", "1"), commit=2, session="a"),
            transaction(1, put("y", "1"), commit=3, session="b"),
        ),
        ViolationKind.DUPLICATE_TIMESTAMP,
        ("(a #1)", "(b #1)"),
    ),
    "commit at its own start": Bad(
        history(transaction(5, put("x", "1"), commit=5)),
        ViolationKind.TIMESTAMP_ORDER,
        ("transaction 5", "committed at 5"),
    ),
    "committed without a commit timestamp": Bad(
        history(transaction(5, put("x", "1"))),
        ViolationKind.TIMESTAMP_ORDER,
        ("committed at 0",),
    ),
    "session does not see its own commit": Bad(
        history(
            transaction(3, put("x", "1"), commit=9, session="a", number=1),
            transaction(5, read("x", None), session="a", number=2),
        ),
        ViolationKind.SESSION_ORDER,
        ("transaction 5", "snapshot 5", "transaction 3", "given 9"),
    ),
    "snapshot of a session goes back": Bad(
        history(
            transaction(5, read("x", None), session="a", number=1),
            transaction(3, read("x", None), session="a", number=2),
        ),
        ViolationKind.SESSION_ORDER,
        ("snapshot 3", "given 5"),
    ),
    "acknowledged commit invisible to a later stranger": Bad(
        history(
            transaction(3, put("x", "1"), commit=9, instants=(0.0, 0.1, 0.2, 0.3)),
            transaction(5, read("x", None), instants=(0.4, 0.5, None, None)),
        ),
        ViolationKind.REAL_TIME_ORDER,
        ("transaction 5", "given 5, requested after", "transaction 3", "received 9"),
    ),
    "oracle goes back between two snapshots": Bad(
        history(
            transaction(5, read("x", None), instants=(0.0, 0.1, None, None)),
            transaction(3, read("x", None), instants=(0.2, 0.3, None, None)),
        ),
        ViolationKind.REAL_TIME_ORDER,
        ("transaction 3", "given 3"),
    ),
    "commit timestamp fetched before commit was called": Bad(
        history(
            transaction(1, put("x", "1"), commit=2, instants=(0.0, 0.1, 5.0, 6.0)),
            transaction(3, read("x", None), instants=(1.0, 2.0, None, None)),
        ),
        ViolationKind.REAL_TIME_ORDER,
        ("transaction 1", "given 2", "transaction 3", "received 3"),
    ),
    "unknown commit seen, though the store says it never happened": Bad(
        history(transaction(1, put("x", "1"), outcome=UNKNOWN), transaction(3, read("x", "1"))),
        ViolationKind.ABORTED_READ,
        ("transaction 1", "aborted"),
    ),
    "unknown commit not seen, though the store has it": Bad(
        history(transaction(1, put("x", "1"), outcome=UNKNOWN), transaction(3, read("x", None))),
        ViolationKind.STALE_READ,
        ("by transaction 1", "committed at 2"),
        unknown_commit=2,
    ),
    "unknown commit over a concurrent one": Bad(
        history(
            transaction(1, put("x", "1"), outcome=UNKNOWN),
            transaction(2, put("x", "2"), commit=3),
        ),
        ViolationKind.CONFLICT,
        ("transaction 1", "at 4", "transaction 2"),
        unknown_commit=4,
    ),
}


# Scan results that no snapshot-isolated store can return, and what must be reported about each.


def _two_rows() -> tuple[TransactionRecord, ...]:
    return (transaction(1, put("a", "1"), put("c", "3"), commit=2),)


BAD_SCANS: dict[str, Bad] = {
    "phantom row": Bad(
        history(
            *_two_rows(),
            transaction(3, scan("a", "z", ("a", "1"), ("b", "2"), ("c", "3"))),
            transaction(4, put("b", "2"), commit=5),
        ),
        ViolationKind.PHANTOM,
        ("scan of t from 'a' to 'z'", "t['b']['v']", "transaction 4", "holds nothing"),
    ),
    "deleted row still in a scan": Bad(
        history(
            *_two_rows(),
            transaction(3, delete("c"), commit=4),
            transaction(5, scan("a", "z", ("a", "1"), ("c", "3"))),
        ),
        ViolationKind.PHANTOM,
        ("deleted by transaction 3",),
    ),
    "row missing in a scan": Bad(
        history(*_two_rows(), transaction(3, scan("a", "z", ("c", "3")))),
        ViolationKind.LOST_ROW,
        ("read nothing in t['a']['v']", "transaction 1"),
    ),
    "column missing in a scanned row": Bad(
        history(
            transaction(1, put("a.p", "1"), put("a.q", "2"), commit=2),
            transaction(3, scan("a", "z", ("a.p", "1"))),
        ),
        ViolationKind.LOST_ROW,
        ("t['a']['q']",),
    ),
    "row at the inclusive start missing": Bad(
        history(*_two_rows(), transaction(3, scan("a", "b"))),
        ViolationKind.LOST_ROW,
        ("t['a']['v']",),
    ),
    "row at the exclusive end returned": Bad(
        history(*_two_rows(), transaction(3, scan("a", "c", ("a", "1"), ("c", "3")))),
        ViolationKind.SCAN_OUT_OF_BOUNDS,
        ("t['c']['v'] is outside",),
    ),
    "row doubled at a page boundary": Bad(
        history(*_two_rows(), transaction(3, scan("", "", ("a", "1"), ("a", "1"), ("c", "3")))),
        ViolationKind.DOUBLED_ROW,
        ("t['a']['v'] appears twice", "to the end"),
    ),
    "row doubled with another between": Bad(
        history(*_two_rows(), transaction(3, scan("", "", ("a", "1"), ("c", "3"), ("a", "1")))),
        ViolationKind.DOUBLED_ROW,
        ("t['a']['v'] appears twice",),
    ),
    "scan out of order": Bad(
        history(*_two_rows(), transaction(3, scan("", "", ("c", "3"), ("a", "1")))),
        ViolationKind.UNORDERED_SCAN,
        ("'a' after 'c'",),
    ),
    "reverse scan in forward order": Bad(
        history(*_two_rows(), transaction(3, scan("", "", ("a", "1"), ("c", "3"), reverse=True))),
        ViolationKind.UNORDERED_SCAN,
        ("reverse", "'c' after 'a'"),
    ),
    "limited reverse scan from the wrong end": Bad(
        history(*_two_rows(), transaction(3, scan("", "", ("a", "1"), reverse=True, limit=1))),
        ViolationKind.LOST_ROW,
        ("t['c']['v']",),
    ),
    "scan beyond its limit": Bad(
        history(*_two_rows(), transaction(3, scan("", "", ("a", "1"), ("c", "3"), limit=1))),
        ViolationKind.SCAN_OUT_OF_BOUNDS,
        ("at most 1 rows", "returned 2 rows"),
    ),
    "limited scan ends early": Bad(
        history(*_two_rows(), transaction(3, scan("", "", ("a", "1"), limit=2))),
        ViolationKind.LOST_ROW,
        ("t['c']['v']",),
    ),
    "limited scan skips a row": Bad(
        history(
            *_two_rows(),
            transaction(3, scan("", "", ("c", "3"), limit=1)),
        ),
        ViolationKind.LOST_ROW,
        ("t['a']['v']",),
    ),
    "column that was not asked for": Bad(
        history(
            transaction(1, put("a.p", "1"), put("a.q", "2"), commit=2),
            transaction(3, scan("", "", ("a.p", "1"), ("a.q", "2"), columns="p")),
        ),
        ViolationKind.SCAN_OUT_OF_BOUNDS,
        ("columns 'p'", "t['a']['q'] was not requested"),
    ),
    "scan with a stale value": Bad(
        history(
            *_two_rows(),
            transaction(3, put("a", "2"), commit=4),
            transaction(5, scan("", "", ("a", "1"), ("c", "3"))),
        ),
        ViolationKind.STALE_READ,
        ("scan of t", "by transaction 3"),
    ),
    "scan without an own insert": Bad(
        history(*_two_rows(), transaction(3, put("b", "2"), scan("a", "c", ("a", "1")), commit=4)),
        ViolationKind.OWN_WRITE_NOT_READ,
        ("t['b']['v']", "written '2' there"),
    ),
    "scan with a row that it had deleted": Bad(
        history(*_two_rows(), transaction(3, delete("a"), scan("a", "b", ("a", "1")), commit=4)),
        ViolationKind.OWN_WRITE_NOT_READ,
        ("itself deleted it",),
    ),
    "incomplete scan that skipped a row": Bad(
        history(*_two_rows(), transaction(3, scan("", "", ("c", "3"), complete=False))),
        ViolationKind.LOST_ROW,
        ("t['a']['v']",),
    ),
}


BAD = BAD_HISTORIES | BAD_SCANS


@pytest.mark.parametrize("name", BAD)
def test_a_known_bad_history_is_flagged_by_name_and_explained(name: str) -> None:
    bad = BAD[name]
    report = check(bad.history, resolve=lambda record: bad.unknown_commit)
    assert not report
    flagged = [v for v in report.violations if v.kind is bad.kind]
    assert flagged, f"expected {bad.kind}, found: {report}"
    text = "\n".join(map(str, flagged))
    assert [part for part in bad.explained if part not in text] == [], text
    assert all(violation.transactions for violation in flagged)


@pytest.mark.parametrize("name", BAD)
def test_one_fault_is_reported_as_few_violations(name: str) -> None:
    """A person must not have to guess which of twenty violations is the cause."""
    bad = BAD[name]
    report = check(bad.history, resolve=lambda record: bad.unknown_commit)
    assert report.counts.total() <= 3, str(report)


@pytest.mark.parametrize(
    "name",
    ["row at the exclusive end returned", "column that was not asked for", "scan beyond its limit"],
)
def test_what_is_there_but_was_not_asked_for_is_no_phantom_too(name: str) -> None:
    assert check(BAD[name].history).counts == {ViolationKind.SCAN_OUT_OF_BOUNDS: 1}


# Histories that look suspicious and are right: the checker accepts every one of them.

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
    "serializable transactions that read what was there, their own writes, or only a snapshot": (
        history(
            transaction(1, put("x", "b"), commit=5),
            serializable(transaction(2, read("x", None), put("y", "a"), commit=3)),
            serializable(transaction(4, read("x", None), read("y", "a"))),
            serializable(transaction(6, read("x", "b"), put("x", "c"), read("x", "c"), commit=7)),
            transaction(8, read("x", "c"), put("y", "b"), commit=10),
            transaction(9, put("x", "d"), commit=11),
        )
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
    assert (len(report.violations), report.counts[ViolationKind.UNWRITTEN_READ]) == (7, 50)
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
