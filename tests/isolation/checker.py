"""Decides whether a run kept snapshot isolation, external consistency and the promise of observers.

    report = check(history, resolve=store.commit_timestamp)
    assert report, str(report)

The verdict is exact with respect to the timestamps that the transactions used. For this store that
is the right question, because timestamps are the specification. Write skew is a violation only in
transactions that were to be serializable. A hundred thousand transactions take seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from percolator.errors import InvalidArgument, UsageError
from tests.isolation.findings import Report, Violation, ViolationKind, shown_key
from tests.isolation.history import CellKey, History, Notify, Outcome, TransactionRecord
from tests.isolation.replay import replay

# The promises of timestamps: each is handed out once, and a commit's is above its start's.
#
# They also follow the time outside the database. A timestamp requested after another one was
# received is larger, even if the two clients differ (external consistency), and a session never
# goes back in time. Snapshots of the past, chosen by timestamp or shared between readers, promise
# neither. Nor does the start of a transaction that has read nothing, if it was fetched in advance:
# it shows nothing to anybody. Its commit promises both.


def check_uniqueness(history: History, report: Report) -> None:
    """No timestamp is handed out twice; every writer that committed has commit_ts > start_ts."""
    owners: dict[int, TransactionRecord] = {}

    def handed_out(timestamp: int, owner: TransactionRecord) -> None:
        other = owners.setdefault(timestamp, owner)
        if other is not owner:
            text = f"{timestamp} was handed to {other} and to {owner}"
            report.add(ViolationKind.DUPLICATE_TIMESTAMP, text, owner, other)

    for record in history:
        if record.start_ts and not record.historic:
            handed_out(record.start_ts, record)
        if not (record.committed and record.locked()):
            continue
        if record.commit_ts <= record.start_ts:
            text = f"{record} committed at {record.commit_ts}"
            report.add(ViolationKind.TIMESTAMP_ORDER, text, record)
        elif record.commit_ts:
            handed_out(record.commit_ts, record)


def check_sessions(history: History, report: Report) -> None:
    """Each transaction of a session sees everything that the session saw or was told before."""
    for records in _by_session(history).values():
        known = 0
        source: TransactionRecord | None = None
        for record in records:
            told = record.commit_ts if record.outcome is Outcome.COMMITTED else 0
            newest = max(record.start_ts, told)
            if record.start_ts <= known:
                text = (
                    f"{record} has the snapshot {record.start_ts}, although {source} of the same "
                    f"session had been given {known}"
                )
                report.add(ViolationKind.SESSION_ORDER, text, record, source)
            if newest > known:
                known, source = newest, record


def _by_session(history: History) -> dict[str, list[TransactionRecord]]:
    sessions: dict[str, list[TransactionRecord]] = {}
    for record in history:
        if record.start_ts and not record.historic:
            sessions.setdefault(record.session, []).append(record)
    for records in sessions.values():
        records.sort(key=lambda record: record.number)
    return sessions


_ASKED = 0
_RECEIVED = 1
"""At equal instants requests sort first: simultaneous events are not ordered."""

_Event = tuple[float, int, int, int]
"""Instant, `_ASKED` or `_RECEIVED`, the timestamp, the index of its transaction."""


def check_real_time(history: History, report: Report) -> None:
    """By the same clock, every timestamp received before another was requested is smaller."""
    clocks: dict[str, list[_Event]] = {}
    for index, record in enumerate(history):
        if not record.historic:
            clocks.setdefault(record.clock, []).extend(_events(index, record))
    for events in clocks.values():
        events.sort()
        largest, holder = 0, 0
        for _, kind, timestamp, index in events:
            if kind == _RECEIVED:
                if timestamp > largest:
                    largest, holder = timestamp, index
            elif timestamp <= largest:
                record, other = history.transactions[index], history.transactions[holder]
                text = (
                    f"{record} was given {timestamp}, requested after {other} had received "
                    f"{largest}"
                )
                report.add(ViolationKind.REAL_TIME_ORDER, text, record, other)


def _events(index: int, record: TransactionRecord) -> Iterator[_Event]:
    start, commit = record.start_ts, record.commit_ts
    if start:
        if record.begin_called is not None:
            yield record.begin_called, _ASKED, start, index
        if record.begin_returned is not None:
            yield record.begin_returned, _RECEIVED, start, index
    if commit and record.committed:
        if record.commit_called is not None:
            yield record.commit_called, _ASKED, commit, index
        # The client of an unknown commit was told nothing, so nothing follows from its return.
        if record.commit_returned is not None and record.outcome is Outcome.COMMITTED:
            yield record.commit_returned, _RECEIVED, commit, index


# Settles unknown outcomes before anything is checked.
#
# If the client was not told how a transaction ended, it either committed at a timestamp that the
# store knows, or it never happened. Both are allowed. It is not allowed that some readers see it
# one way and some the other: the replay finds that once the outcome is settled.
#
# A transaction that wrote nothing commits nothing: if its client reported a commit timestamp, that
# was never handed out for it. (A run of an observer always writes its acknowledgement.)

Resolver = Callable[[TransactionRecord], int | None]
"""The commit timestamp that the store has for an unknown transaction; None if it did not commit."""


def settled(history: History, resolve: Resolver | None) -> History:
    """The history with every transaction either aborted, or committed at a known timestamp."""
    records = [_settled(record, resolve) for record in history]
    return History(records, history.initial, history.ttls)


def _settled(record: TransactionRecord, resolve: Resolver | None) -> TransactionRecord:
    if not record.locked() and not record.observer:
        ended = Outcome.ABORTED if record.outcome is Outcome.UNKNOWN else record.outcome
        if ended is record.outcome and not record.commit_ts:
            return record
        return replace(record, outcome=ended, commit_ts=0)
    if record.outcome is not Outcome.UNKNOWN:
        return record
    if resolve is None:
        raise UsageError(f"{record} ended unknown: pass a resolver to find out how")
    commit_ts = resolve(record)
    if commit_ts is None:
        return replace(record, outcome=Outcome.ABORTED, commit_ts=0)
    return replace(record, outcome=Outcome.FOUND_COMMITTED, commit_ts=commit_ts)


# The promise of observers: at most one committed run for each change, and eventually at least one.
#
# A run with snapshot s covers every change with commit_ts <= s, so one run may cover many changes.
# Two committed runs need a change between their snapshots. When all work is done, the newest change
# of a cell must have a committed run above it. Weak observers may run more often. Those that
# deletes do not wake are owed no run for a deleted cell, and have none that sees it deleted.
#
# Check it only after the observers had time to finish (`percolator wait`).

Commits = dict[int, TransactionRecord]
"""Transactions that changed one cell, by commit timestamp."""


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
        for trigger in record.triggers if record.committed else ():
            runs.setdefault((record.observer, trigger), []).append(record)
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
