"""A report explains the first violations, counts the rest, and stays readable."""

from __future__ import annotations

from tests.isolation.checker import ViolationKind, check
from tests.unit.isolation.histories import COMMITTED, history, put, read, transaction


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
