"""Histories that no snapshot-isolated store can produce: each is flagged, with the right name.

The explanation must say who read or wrote what: it contains the fragments beside each history.
"""

from __future__ import annotations

import pytest

from tests.isolation.checker import ViolationKind, check
from tests.unit.isolation.bad_histories import BAD_HISTORIES
from tests.unit.isolation.bad_scans import BAD_SCANS

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
