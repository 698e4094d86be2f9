"""Judges one mutation against what is durable: the first condition that fails decides.

Nothing is in flight while the judge works (group_commit.py): the mirror and the storage agree, and
nobody but the batch being judged will change them.

A prewrite asks four questions, and nearly always memory answers all of them: the lock mirror, and
what recent_writes.py knows of write records and rollback markers. When it does not know, one seek
finds the newest write record, and that answers both questions about writes unless it is newer
than the transaction.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from percolator.protocol.records import (
    LOCK_HEADER_BYTES,
    START_TIMESTAMP_BYTES,
    timestamp_bytes,
)
from percolator.tablet import versions
from percolator.tablet.keys import (
    LOCK,
    NOTIFY,
    PREFIX_OF_SPACE,
    ROLLBACK,
    TIMESTAMP_MAX,
    WRITE,
    L,
    W,
    component,
    inverted,
)
from percolator.tablet.lock_mirror import LockMirror
from percolator.tablet.mutations import (
    ABSENT,
    BEGINS_IF_PRESENT,
    EQUALS,
    PRESENT,
    Condition,
    Step,
)
from percolator.tablet.recent_writes import RecentWrites
from percolator.tablet.versions import Version
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Cursor, Storage

_HOLD_WHEN_NOTHING_IS_SELECTED = (ABSENT, BEGINS_IF_PRESENT)


class Judge:
    """Judges the mutations of one batch after another: begin when the batch before is durable, and
    close it at the end of each."""

    def __init__(self, storage: Storage[Any], mirror: LockMirror, recent: RecentWrites) -> None:
        self._storage = storage
        self._get = storage.get
        self._headers = mirror.headers
        self._recent = recent
        self._open_cursor: Cursor | None = None

    def close(self) -> None:
        if self._open_cursor is not None:
            self._open_cursor.close()
            self._open_cursor = None

    def refusal(self, step: Step) -> pb.MutationResult | None:
        """None when every condition holds."""
        cell, conditions = step[2], step[4]
        bound: int | None = None
        for index, condition in enumerate(conditions):
            space, expectation, from_, _, prefix, _, _ = condition
            if space == LOCK and expectation == PRESENT:
                # Every commit asks this, and the header in memory nearly always says yes.
                header = self._headers.get(cell)
                if header is not None and header.startswith(prefix):
                    continue
            elif expectation in _HOLD_WHEN_NOTHING_IS_SELECTED:
                if space == WRITE:
                    if bound is None:
                        bound = self._recent.bound(cell)
                    if bound >= from_:
                        bound = self._newest_write(cell)
                    if bound < from_:
                        continue
                elif space == LOCK:
                    if cell not in self._headers:
                        continue
                elif space == ROLLBACK and from_ > self._recent.newest_marker:
                    continue
            holds, offender = self._judge(cell, condition)
            if not holds:
                return self._refused(step, index, condition, offender)
        return None

    def _cursor(self) -> Cursor:
        if self._open_cursor is None:
            self._open_cursor = self._storage.cursor()
        return self._open_cursor

    def _newest_write(self, cell: bytes) -> int:
        """The newest commit timestamp of the cell in the storage; -1 when there is none."""
        prefix = W + cell
        cursor = self._cursor()
        cursor.seek(prefix)
        key = cursor.key()
        if key.startswith(prefix):
            return int.from_bytes(key[-8:], "big") ^ TIMESTAMP_MAX
        return -1

    def _judge(self, cell: bytes, condition: Condition) -> tuple[bool, Version | None]:
        """Whether the condition holds, and the version that fails it, if one does."""
        _, expectation, _, _, prefix, required, _ = condition
        versions_found = self._versions(cell, condition)
        if expectation == ABSENT:
            for version in versions_found:
                if version[1].startswith(prefix):
                    return False, version
            return True, None
        if expectation == BEGINS_IF_PRESENT:
            for version in versions_found:
                if version[1].startswith(prefix) and not version[1].startswith(required):
                    return False, version
            return True, None
        other: Version | None = None
        for version in versions_found:
            if version[1].startswith(prefix):
                if expectation != EQUALS or version[1] == prefix:
                    return True, None
                return False, other or version
            other = other or version
        return False, other

    def _versions(self, cell: bytes, condition: Condition) -> Iterable[Version]:
        """The versions in the condition's range: oldest first for ABSENT, else newest first."""
        space, expectation, from_, until, prefix, required, qualifier = condition
        if space == LOCK:
            header = self._headers.get(cell)
            if header is None:
                return ()
            if expectation == EQUALS or max(len(prefix), len(required)) > LOCK_HEADER_BYTES:
                return ((0, self._get(L + cell) or b""),)
            return ((0, header),)
        key = PREFIX_OF_SPACE[space] + cell
        if space == NOTIFY:
            key += component(qualifier)
        if until == from_ + 1:
            value = self._get(key + inverted(from_))
            return () if value is None else ((from_, value),)
        if expectation != ABSENT:
            return versions.descending(self._cursor(), key, from_, until)
        found = versions.ascending(self._cursor(), key, from_, until)
        if space == WRITE and prefix[:START_TIMESTAMP_BYTES] == timestamp_bytes(from_):
            # A transaction's own commit is the oldest write at or above its start, because it
            # held the lock until then: a thousand later writes need not be looked at.
            return islice(found, 1)
        return found

    def _refused(
        self, step: Step, index: int, condition: Condition, offender: Version | None
    ) -> pb.MutationResult:
        result = pb.MutationResult(outcome=pb.OUTCOME_REFUSED, failed_condition=index)
        if offender is not None:
            row, column, cell, _, _, _ = step
            timestamp, value = offender
            if condition[0] == LOCK:
                value = self._get(L + cell) or b""
            result.cell.space = condition[0]
            result.cell.row = row
            result.cell.column = column
            result.cell.timestamp = timestamp
            result.cell.value = value
            result.cell.qualifier = condition[6]
        return result
