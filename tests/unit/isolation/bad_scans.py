"""Scan results that no snapshot-isolated store can return, and what must be reported about each."""

from __future__ import annotations

from tests.isolation.checker import ViolationKind
from tests.isolation.history import TransactionRecord
from tests.unit.isolation.bad_histories import Bad
from tests.unit.isolation.histories import (
    delete,
    history,
    put,
    scan,
    transaction,
)


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
