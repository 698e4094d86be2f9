"""Settles unknown outcomes before anything is checked.

If the client was not told how a transaction ended, it either committed at a timestamp that the
store knows, or it never happened. Both are allowed. It is not allowed that some readers see it
one way and some the other: the replay finds that once the outcome is settled.

A transaction that wrote nothing commits nothing: if its client reported a commit timestamp, that
was never handed out for it. (A run of an observer always writes its acknowledgement.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from percolator.errors import UsageError
from percolator.testing.isolation.history import History, Outcome, TransactionRecord

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
