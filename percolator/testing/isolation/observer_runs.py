"""The promise of observers: at most one committed run per change, at least one eventually.

A run with snapshot s answers for every change with commit_ts <= s, so many changes may collapse
into one run. Two committed runs need a change between their snapshots. When all work is done, the
newest change of a cell must have a committed run above it. Weak observers may run more often.

Check it only after the observers had the time to finish (`percolator wait`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from percolator.testing.findings import Report, shown_key
from percolator.testing.history import CellKey, History, Notify, TransactionRecord
from percolator.testing.isolation.violations import ViolationKind


@dataclass(frozen=True)
class WatchedColumns:
    """What an observer was registered for."""

    observer: str
    columns: frozenset[tuple[str, bytes]]
    """Table and column."""
    weak: bool = False


def check_observer_runs(
    history: History, observers: Iterable[WatchedColumns], report: Report
) -> None:
    """Adds to `report` changes without a run, and runs without a change."""
    changes = changes_of(history)
    runs: dict[tuple[str, CellKey], list[TransactionRecord]] = {}
    for record in history:
        if record.observer and record.trigger is not None and record.committed:
            runs.setdefault((record.observer, record.trigger), []).append(record)
    for watched in observers:
        cells = {key for key in changes if (key[0], key[2]) in watched.columns}
        cells |= {key for observer, key in runs if observer == watched.observer}
        for key in sorted(cells):
            made = sorted(runs.get((watched.observer, key), []), key=lambda run: run.start_ts)
            commits = sorted(changes.get(key, {}))
            if not watched.weak:
                _check_repeated(watched.observer, key, made, commits, report)
            last_seen = made[-1].start_ts if made else 0
            if commits and commits[-1] > last_seen:
                writer = changes[key][commits[-1]]
                text = (
                    f"{watched.observer} has no run above {last_seen} for {shown_key(key)}, "
                    f"which {writer} changed at {commits[-1]}"
                )
                report.add(ViolationKind.MISSED_RUN, text, writer, key=key)


def changes_of(history: History) -> dict[CellKey, dict[int, TransactionRecord]]:
    """Per cell, the commits that notify its observers."""
    changes: dict[CellKey, dict[int, TransactionRecord]] = {}
    for record in history:
        if record.committed and record.commit_ts:
            notified = {o.key for o in record.operations if isinstance(o, Notify)}
            for key in notified | record.writes().keys():
                changes.setdefault(key, {})[record.commit_ts] = record
    return changes


def _check_repeated(
    observer: str,
    key: CellKey,
    runs: list[TransactionRecord],
    commits: list[int],
    report: Report,
) -> None:
    if runs and bisect_right(commits, runs[0].start_ts) == 0:
        text = f"{runs[0]} is a run of {observer} for {shown_key(key)}, which had not changed"
        report.add(ViolationKind.REPEATED_RUN, text, runs[0], key=key)
    for before, after in pairwise(runs):
        if bisect_right(commits, before.start_ts) == bisect_right(commits, after.start_ts):
            text = (
                f"{before} and {after} are both committed runs of {observer} for "
                f"{shown_key(key)}, which did not change between their snapshots"
            )
            report.add(ViolationKind.REPEATED_RUN, text, after, before, key=key)
