"""What timestamps promise: each is handed out once, and a commit's is above its start's.

They also follow the time outside the database. A timestamp requested after another one was
received is larger, even if the two clients differ (external consistency), and a session never goes
back in time. Snapshots of the past, chosen by timestamp or shared between readers, promise neither.
Nor does the start of a transaction that has read nothing, if it was fetched in advance: it shows
nothing to anybody. Its commit promises both.
"""

from __future__ import annotations

from collections.abc import Iterator

from percolator.testing.isolation.findings import Report
from percolator.testing.isolation.history import History, Outcome, TransactionRecord
from percolator.testing.isolation.violations import ViolationKind


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
            given, what = record.start_ts, "has the snapshot"
            newest = max(given, told)
            if record.is_rightly_early:
                if not (record.committed and record.commit_ts):
                    continue  # it shows nothing, and the session has learnt nothing from it
                given, what, newest = record.commit_ts, "committed at", told
            if given <= known:
                text = (
                    f"{record} {what} {given}, although {source} of the same session had been "
                    f"given {known}"
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
    if start and not record.is_rightly_early:
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
