"""Judges a history of growing lists by Elle's method: which anomalies does it prove?

It reports only what no execution under snapshot isolation could have produced, as long as
transactions read a list before they append to it. Aborted transactions must have read a
consistent snapshot, too. Weaker evidence is looked at only if stronger evidence shows nothing:
values first, then the order in real time, then the store's own timestamps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tests.chaos.list_append.cycles import anomalies
from tests.chaos.list_append.dependencies import (
    REAL_TIME,
    TIMESTAMPS,
    dependencies,
    own_order,
    real_time,
    timestamps,
)
from tests.chaos.list_append.transactions import Anomaly, Outcome, Transaction
from tests.chaos.list_append.versions import Versions


def judge(transactions: Sequence[Transaction]) -> list[Anomaly]:
    """All anomalies of the simplest kind of evidence that shows any."""
    versions = Versions(transactions)
    found = versions.anomalies + _shared_timestamps(transactions)
    if found:
        # Edges drawn from reads that fit no order would blame the wrong transactions.
        return found
    edges = [*dependencies(versions), *own_order(transactions, versions.committed)]
    if found := anomalies(edges, order=frozenset()):
        return found
    edges += real_time(transactions, versions.committed)
    if found := anomalies(edges, suffix="-realtime", order=frozenset({REAL_TIME})):
        return found
    edges += timestamps(transactions)
    order = frozenset({REAL_TIME, TIMESTAMPS})
    return anomalies(edges, suffix="-timestamps", order=order)


def lost_appends(
    transactions: Sequence[Transaction], final: Mapping[str, tuple[str, ...]]
) -> list[Anomaly]:
    """Elements that were acknowledged, and are not in the lists at the end."""
    stored = {(key, element) for key, elements in final.items() for element in elements}
    return [
        Anomaly("lost append", f"{one} appended {append.element} to {append.key}")
        for one in transactions
        if one.outcome is Outcome.COMMITTED
        for append in one.appends()
        if (append.key, append.element) not in stored
    ]


def _shared_timestamps(transactions: Sequence[Transaction]) -> list[Anomaly]:
    """Every start of a writer and every commit has a timestamp of its own."""
    used = Counter(one.commit_ts for one in transactions if one.commit_ts)
    used.update(one.start_ts for one in transactions if one.start_ts and any(one.appends()))
    return [
        Anomaly("shared timestamp", f"{number} was handed out {times} times")
        for number, times in used.items()
        if times > 1
    ]
