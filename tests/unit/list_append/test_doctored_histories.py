"""Histories that were doctored by hand, one for each anomaly, and those that must be accepted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.chaos.list_append.judge import judge, lost_appends
from tests.chaos.list_append.transactions import Append, Operation, Outcome, Read, Transaction


def t(
    name: str,
    *operations: Operation,
    outcome: Outcome = Outcome.COMMITTED,
    at: tuple[float, float, float, float] | None = None,
    ts: tuple[int, int] = (0, 0),
) -> Transaction:
    return Transaction(name, operations, outcome, *ts, *(at or (None, None, None, None)))


def r(key: str, elements: str = "") -> Read:
    return Read(key, tuple(elements))


def a(key: str, element: str) -> Append:
    return Append(key, element)


def kinds(*history: Transaction) -> set[str]:
    return {one.kind for one in judge(history)}


def test_a_serial_history_is_accepted() -> None:
    assert not kinds(
        t("1", r("x"), a("x", "a"), at=(0, 1, 2, 3), ts=(1, 2)),
        t("2", r("x", "a"), a("x", "b"), r("x", "ab"), at=(4, 5, 6, 7), ts=(3, 4)),
        t("3", r("x", "ab"), at=(8, 9, 10, 11), ts=(5, 0)),
    )


def test_write_skew_is_accepted_for_snapshot_isolation_allows_it() -> None:
    assert not kinds(
        t("1", r("x"), r("y"), a("x", "a")),
        t("2", r("x"), r("y"), a("y", "b")),
        t("3", r("x", "a"), r("y", "b")),
    )


def test_a_long_fork_is_found() -> None:
    assert kinds(
        t("1", r("x"), a("x", "a")),
        t("2", r("y"), a("y", "b")),
        t("3", r("x", "a"), r("y")),
        t("4", r("x"), r("y", "b")),
        t("5", r("x", "a"), r("y", "b")),
    ) == {"G-nonadjacent"}


ANOMALIES: dict[str, tuple[str, Sequence[Transaction]]] = {
    "lists that are written in opposite orders": (
        "G0",
        [
            t("1", a("x", "a"), a("y", "b")),
            t("2", a("x", "c"), a("y", "d")),
            t("3", r("x", "ac"), r("y", "db")),
        ],
    ),
    "an aborted element is read": (
        "G1a",
        [t("1", a("x", "a"), outcome=Outcome.ABORTED), t("2", r("x", "a"))],
    ),
    "half of a transaction is read": (
        "G1b",
        [t("1", a("x", "a"), a("x", "b")), t("2", r("x", "a")), t("3", r("x", "ab"))],
    ),
    "two transactions read from each other": (
        "G1c",
        [
            t("1", r("y", "b"), a("x", "a")),
            t("2", r("x", "a"), a("y", "b")),
        ],
    ),
    "one list is read before, the other after a transaction": (
        "G-single",
        [
            t("1", r("x"), r("y"), a("x", "a"), a("y", "b")),
            t("2", r("x"), r("y", "b")),
            t("3", r("x", "a"), r("y", "b")),
        ],
    ),
    "read skew of a transaction that was aborted": (
        "G-single",
        [
            t("1", r("x"), r("y"), a("x", "a"), a("y", "b")),
            t("2", r("x"), r("y", "b"), outcome=Outcome.ABORTED),
            t("3", r("x", "a"), r("y", "b")),
        ],
    ),
    "two append to the same version": (
        "lost update",
        [t("1", r("x"), a("x", "a")), t("2", r("x"), a("x", "b")), t("3", r("x", "b"))],
    ),
    "two append to the same version, and both are there": (
        "lost update",
        [t("1", r("x"), a("x", "a")), t("2", r("x"), a("x", "b")), t("3", r("x", "ab"))],
    ),
    "a list loses an element in the middle": (
        "incompatible order",
        [
            t("1", r("x"), a("x", "a")),
            t("2", r("x", "a"), a("x", "b")),
            t("3", r("x", "ab")),
            t("4", r("x", "b")),
        ],
    ),
    "the same element appears twice": (
        "duplicate element",
        [t("1", r("x"), a("x", "a")), t("2", r("x", "aa"))],
    ),
    "an element that was appended elsewhere": (
        "garbage read",
        [t("1", r("x"), a("x", "a")), t("2", r("y", "a"))],
    ),
    "an element that was never appended": ("garbage read", [t("1", r("x", "q"))]),
    "two reads of one transaction differ": (
        "internal",
        [t("1", r("x"), a("x", "a")), t("2", r("x"), r("x", "a"))],
    ),
    "a transaction does not see its own element": (
        "internal",
        [t("1", r("x"), a("x", "a"), r("x"))],
    ),
    "a snapshot older than an acknowledged commit": (
        "G-single-realtime",
        [
            t("1", r("x"), a("x", "a"), at=(0, 1, 2, 3)),
            t("2", r("x"), at=(4, 5, 6, 7)),
            t("3", r("x", "a"), at=(8, 9, 10, 11)),
        ],
    ),
    "an acknowledged element that no one ever reads": (
        "G-single-realtime",
        [
            t("1", r("x"), a("x", "a"), at=(0, 1, 2, 3)),
            t("2", r("x"), at=(4, 5, 6, 7)),
        ],
    ),
    "an element is read before its commit was called": (
        "G1c-realtime",
        [
            t("1", r("x"), a("x", "a"), at=(0, 1, 9, 10)),
            t("2", r("x", "a"), at=(4, 5, 6, 7)),
        ],
    ),
    "timestamps in the wrong order": (
        "order-timestamps",
        [t("1", r("x"), at=(0, 1, 2, 3), ts=(9, 0)), t("2", r("x"), at=(4, 5, 6, 7), ts=(8, 0))],
    ),
    "a snapshot that lacks a commit with a lower timestamp": (
        "G-single-timestamps",
        [t("1", r("x"), a("x", "a"), ts=(1, 2)), t("2", r("x"), ts=(3, 0)), t("3", r("x", "a"))],
    ),
    "one timestamp for two": (
        "shared timestamp",
        [t("1", r("x"), a("x", "a"), ts=(1, 2)), t("2", r("y"), a("y", "b"), ts=(2, 3))],
    ),
}


@pytest.mark.parametrize("name", ANOMALIES)
def test_each_anomaly_is_found_and_named(name: str) -> None:
    kind, history = ANOMALIES[name]
    assert kinds(*history) == {kind}


def test_an_unknown_transaction_counts_as_committed_once_another_has_read_it() -> None:
    unknown = t("1", r("x"), a("x", "a"), outcome=Outcome.UNKNOWN, at=(0, 1, 2, 3))
    assert not kinds(unknown, t("2", r("x"), at=(4, 5, 6, 7)))
    later = t("3", r("x"), at=(8, 9, 10, 11))
    assert kinds(unknown, t("2", r("x", "a"), at=(4, 5, 6, 7)), later) == {"G-single-realtime"}


def test_an_anomaly_says_which_transactions_and_why() -> None:
    _, history = ANOMALIES["one list is read before, the other after a transaction"]
    (found,) = judge(history)
    assert "snapshot 2 < commit 1 (rw: did not read a of x)" in str(found)
    assert "commit 1 < snapshot 2 (wr: read b of y)" in str(found)


def test_what_was_acknowledged_must_be_there_at_the_end() -> None:
    history = [
        t("1", r("x"), a("x", "a")),
        t("2", r("x"), a("x", "b"), outcome=Outcome.ABORTED),
        t("3", r("x"), a("x", "c"), outcome=Outcome.UNKNOWN),
    ]
    assert not lost_appends(history, {"x": ("a",)})
    assert [one.kind for one in lost_appends(history, {"x": ("c",)})] == ["lost append"]


def test_an_element_that_is_appended_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="appended twice"):
        judge([t("1", a("x", "a")), t("2", a("y", "a"))])
