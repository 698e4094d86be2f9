"""Decides whether a run kept snapshot isolation, external consistency and the promise of observers.

    report = check(history, resolve=store.commit_timestamp)
    assert report, str(report)

The verdict is exact with respect to the timestamps that the transactions used. For this store that
is the right question, because timestamps are the specification. Write skew is not a violation:
snapshot isolation allows it. A hundred thousand transactions take seconds.
"""

from __future__ import annotations

from collections.abc import Iterable

from percolator.errors import InvalidArgument
from percolator.testing.isolation.findings import Report, Violation
from percolator.testing.isolation.history import History
from percolator.testing.isolation.observer_runs import WatchedColumns, check_observer_runs
from percolator.testing.isolation.outcomes import Resolver, settled
from percolator.testing.isolation.replay import replay
from percolator.testing.isolation.timestamps import (
    check_real_time,
    check_sessions,
    check_uniqueness,
)
from percolator.testing.isolation.violations import ViolationKind

__all__ = ["Report", "Resolver", "Violation", "ViolationKind", "WatchedColumns", "check"]


def check(
    history: History,
    *,
    resolve: Resolver | None = None,
    observers: Iterable[WatchedColumns] = (),
    violations_max: int = 100,
) -> Report:
    """Checks a whole run.

    `resolve` is asked how each transaction of unknown outcome ended. Pass `observers` only if they
    had time to finish. The report explains at most `violations_max` violations.
    """
    _refuse_namesakes(history)
    _refuse_unplaced(history)
    final = settled(history, resolve)
    report = Report(violations_max)
    report.looked_at["transactions"] = len(final)
    check_uniqueness(final, report)
    check_sessions(final, report)
    check_real_time(final, report)
    replay(final, report)
    check_observer_runs(final, observers, report)
    return report


def _refuse_namesakes(history: History) -> None:
    """Refuses sessions of the same name from two processes: they would be judged as one."""
    named: set[tuple[str, int]] = set()
    for record in history:
        name = record.session, record.number
        if name in named:
            raise InvalidArgument(
                "history", f"two transactions are #{name[1]} of session {name[0]}"
            )
        named.add(name)


def _refuse_unplaced(history: History) -> None:
    """Refuses reads without a snapshot: with nothing to compare, all would count as right."""
    for record in history:
        if not record.start_ts and record.has_read_others():
            raise InvalidArgument("history", f"{record} has read without a start timestamp")
