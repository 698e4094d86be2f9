"""The invariants that the audit checks.

c is a commit timestamp, s a start timestamp. "At rest" means that nothing is written while the
cells are collected; locks left behind by clients that died are not a violation.
"""

from __future__ import annotations

from enum import Enum


class Invariant(Enum):
    """Which rule was broken."""

    READABLE = "a stored cell is malformed"
    ONE_LOCK = "more than one lock on a cell"
    SETTLED_LOCK = "a lock beside its own commit record or rollback marker"
    ONE_RECORD = "two commit records of one transaction on a cell"
    COMMIT_ABOVE_START = "commit not above start"
    ONE_COMMIT_TIMESTAMP = "a transaction with two commit timestamps"
    COMMITTED_OR_ROLLED_BACK = "a transaction both committed and rolled back"
    PRIMARY_FIRST = "a secondary committed without its primary"
    DISJOINT_COMMITS = "overlapping transactions committed one cell"
    LAST_CHANGE = "a lock-only record that hides a change"
    VALUE_STORED = "a commit record without its value"
    VALUE_OWNED = "a value without a record or lock"
    TIMESTAMP_ISSUED = "a timestamp that the oracle has not handed out"
    COLLECTED = "history left over below the collected safe point"
    ACKNOWLEDGED = "an acknowledged commit is not in the store"
    ATOMIC = "a transaction committed in part"
    ABORTED_ABSENT = "an aborted transaction left a commit record"
    RIGHT_VALUE = "a commit record with another value than was written"
    ACCOUNTED_FOR = "a commit record that no transaction wrote"
    NOTIFIED = "a change without a notification or a run"
