"""Histories that no snapshot-isolated store can produce: each is flagged, with the right name.

The explanation must say who read or wrote what: it contains the fragments beside each history.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.isolation.checker import ViolationKind, check
from tests.isolation.history import History, TransactionRecord
from tests.unit.isolation.histories import (
    ABORTED,
    UNKNOWN,
    delete,
    history,
    lock,
    put,
    read,
    read_lock,
    scan,
    transaction,
)

# Histories that no snapshot-isolated store can produce, and what must be reported about each.


@dataclass(frozen=True)
class Bad:
    """What must be reported about a history, and how often at most."""

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
