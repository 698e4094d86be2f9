"""Unknown outcomes, resolved before anything is checked.

A transaction whose client was not told how it ended is either committed at a timestamp that the
store knows, or it never happened. Both are allowed; what is not allowed is that some readers see
it one way and some the other, which the replay finds once the answer is fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from percolator.errors import UsageError
from percolator.testing.history import History, Outcome, TransactionRecord

Resolver = Callable[[TransactionRecord], int | None]
"""The commit timestamp that the store has for an unknown transaction, or None: not committed."""


def settled(history: History, resolve: Resolver | None) -> History:
    """The history with every unknown transaction either found committed or aborted."""
    return History([_settled(record, resolve) for record in history], history.initial)


def _settled(record: TransactionRecord, resolve: Resolver | None) -> TransactionRecord:
    if record.outcome is not Outcome.UNKNOWN:
        return record
    if not record.locked():
        # It wrote nothing, so there is nothing to ask the store about; its reads still count.
        return replace(record, outcome=Outcome.ABORTED)
    if resolve is None:
        raise UsageError(f"{record} ended unknown: pass a resolver to find out how")
    commit_ts = resolve(record)
    if commit_ts is None:
        return replace(record, outcome=Outcome.ABORTED, commit_ts=0)
    return replace(record, outcome=Outcome.FOUND_COMMITTED, commit_ts=commit_ts)
