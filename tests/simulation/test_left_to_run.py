"""When `wait_for_observers` has overlooked something: a notification for which nobody ran."""

from __future__ import annotations

import pytest

from tests.isolation.checker import WatchedColumns
from tests.isolation.history import History, Outcome, TransactionRecord
from tests.simulation.observing import left_to_run

_CELL = ("table", b"row", b"column")


def _run(start: int, outcome: Outcome = Outcome.COMMITTED) -> TransactionRecord:
    return TransactionRecord(
        "worker", 1, start_ts=start, outcome=outcome, observer="tend", trigger=_CELL
    )


def _left(
    timestamp: int, *runs: TransactionRecord, weak: bool = True, on_rows: bool = False
) -> set[str]:
    watched = WatchedColumns("tend", frozenset({("table", b"column")}), weak=weak)
    found = {_CELL: [("tend", timestamp)]}
    return left_to_run(found, History(list(runs)), [watched], on_rows=on_rows)


WITHOUT_CONDITION = pytest.mark.parametrize(("weak", "on_rows"), [(True, False), (False, True)])


@WITHOUT_CONDITION
def test_a_weak_notification_or_an_intent_above_all_runs_is_left(weak: bool, on_rows: bool) -> None:
    assert _left(5, weak=weak, on_rows=on_rows) == {"tend"}
    assert _left(5, _run(4), weak=weak, on_rows=on_rows) == {"tend"}
    lost = _run(6, Outcome.ABORTED)
    assert _left(5, _run(4), lost, weak=weak, on_rows=on_rows) == {"tend"}


@WITHOUT_CONDITION
def test_a_late_copy_of_it_is_not_left_once_a_run_began_after_it(weak: bool, on_rows: bool) -> None:
    assert _left(5, _run(6), _run(4), weak=weak, on_rows=on_rows) == set()


@pytest.mark.parametrize("start", [4, 6])
def test_a_notification_of_a_change_is_always_left(start: int) -> None:
    """It is written together with the change, under a condition: no copy of it can come late."""
    assert _left(5, _run(start), weak=False) == {"tend"}
