"""The promise of observers: at most one committed run for each change, and eventually at least one.

A run with snapshot s covers every change with commit_ts <= s, so one run may cover many changes.
Two committed runs need a change between their snapshots. When all work is done, the newest change
of a cell must have a committed run above it. Weak observers may run more often. Those that deletes
do not wake are owed no run for a deleted cell, and have none that sees it deleted.

Check it only after the observers had time to finish (`percolator wait`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from percolator.testing.isolation.findings import Report, shown_key
from percolator.testing.isolation.history import CellKey, History, Notify, TransactionRecord
from percolator.testing.isolation.violations import ViolationKind

Commits = dict[int, TransactionRecord]
"""What has changed one cell, by commit timestamp."""


@dataclass(frozen=True)
class WatchedColumns:
    """The columns for which an observer was registered."""

    observer: str
    columns: frozenset[tuple[str, bytes]]
    """Pairs of table and column."""
    weak: bool = False
    deletes: bool = True

    def owed(self, key: CellKey, commits: Commits) -> int:
        """The commit of the cell above which there has to be a run; 0 if there is none."""
        if not self.deletes:
            written = _written(key, commits)
            if not written or not written[-1][1]:
                return 0
        return max(commits, default=0)


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
            if not watched.deletes:
                _check_unwanted(watched.observer, key, made, changes.get(key, {}), report)
            last_seen = made[-1].start_ts if made else 0
            owed = watched.owed(key, changes.get(key, {}))
            if owed > last_seen:
                writer = changes[key][owed]
                text = (
                    f"{watched.observer} has no run above {last_seen} for {shown_key(key)}, "
                    f"which {writer} changed at {owed}"
                )
                report.add(ViolationKind.MISSED_RUN, text, writer, key=key)


def changes_of(history: History) -> dict[CellKey, Commits]:
    """For each cell, the commits that notify its observers."""
    changes: dict[CellKey, Commits] = {}
    for record in history:
        if record.committed and record.commit_ts:
            notified = {o.key for o in record.operations if isinstance(o, Notify)}
            for key in notified | record.writes().keys():
                changes.setdefault(key, {})[record.commit_ts] = record
    return changes


def _written(key: CellKey, commits: Commits) -> list[tuple[int, bool]]:
    """The commits that wrote the cell, in order, and whether they left a value in it."""
    writes = ((commit, commits[commit].writes()) for commit in sorted(commits))
    return [(commit, written[key] is not None) for commit, written in writes if key in written]


def _check_unwanted(
    observer: str,
    key: CellKey,
    runs: list[TransactionRecord],
    commits: Commits,
    report: Report,
) -> None:
    written = _written(key, commits)
    for run in runs:
        place = bisect_right(written, (run.start_ts, True))
        if not place or not written[place - 1][1]:
            text = f"{run} is a run of {observer} for {shown_key(key)}, which has no value there"
            report.add(ViolationKind.UNWANTED_RUN, text, run, key=key)


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
