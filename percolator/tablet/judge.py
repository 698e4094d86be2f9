"""Judges one mutation against what is durable: the first condition that fails decides.

Nothing is in flight while the judge works (group_commit.py): the mirror and the storage agree, and
nobody but the batch being judged will change them.

A prewrite asks four questions and costs one seek and one lookup: both questions about writes are
answered by the newest write record when it is older than the transaction, which it nearly always
is; the lock is asked of the mirror, and only the rollback marker is looked up.
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
    R,
    W,
    component,
    inverted,
)
from percolator.tablet.lock_mirror import LockMirror
from percolator.tablet.mutations import ABSENT, BEGINS_IF_PRESENT, EQUALS, Condition, Step
from percolator.tablet.versions import Version
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Storage

_HOLD_WHEN_NOTHING_IS_SELECTED = (ABSENT, BEGINS_IF_PRESENT)


class Judge:
    """Judges the mutations of one batch. Make it when the batch before is durable; close it."""

    def __init__(self, storage: Storage[Any], mirror: LockMirror) -> None:
        self._get = storage.get
        self._headers = mirror.headers
        self._cursor = storage.cursor()

    def close(self) -> None:
        self._cursor.close()

    def refusal(self, step: Step) -> pb.MutationResult | None:
        """None when every condition holds."""
        cell = step.cell
        newest_write: int | None = None
        for index, condition in enumerate(step.conditions):
            space, expectation, from_, until, _, _, _ = condition
            if expectation in _HOLD_WHEN_NOTHING_IS_SELECTED:
                if space == WRITE:
                    if newest_write is None:
                        newest_write = self._newest_write(cell)
                    if newest_write < from_:
                        continue
                elif space == LOCK:
                    if cell not in self._headers:
                        continue
                elif (
                    space == ROLLBACK
                    and until == from_ + 1
                    and self._get(R + cell + inverted(from_)) is None
                ):
                    continue
            holds, offender = self._judge(cell, condition)
            if not holds:
                return self._refused(step, index, condition, offender)
        return None

    def _newest_write(self, cell: bytes) -> int:
        """The newest commit timestamp of the cell; -1 when there is none."""
        prefix = W + cell
        cursor = self._cursor
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
            return versions.descending(self._cursor, key, from_, until)
        found = versions.ascending(self._cursor, key, from_, until)
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
            timestamp, value = offender
            if condition[0] == LOCK:
                value = self._get(L + step.cell) or b""
            result.cell.space = condition[0]
            result.cell.row = step.row
            result.cell.column = step.column
            result.cell.timestamp = timestamp
            result.cell.value = value
            result.cell.qualifier = condition[6]
        return result
