"""Judges one mutation against what is durable: the first condition that fails decides.

Nothing is in flight while the judge works (group_commit.py): the mirror and the storage agree, and
nothing but the batch being judged will change them.

A prewrite has four conditions, and memory nearly always decides them all: the lock mirror knows the
locks, and recent_writes.py knows how new the write records and rollback markers can be. If that is
not enough, one seek finds the newest write record. This decides both conditions on writes, unless
the record is newer than the transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from percolator.errors import InvalidArgument
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    LOCK_HEADER_BYTES,
    START_TIMESTAMP_BYTES,
    WRITE_KIND_OFFSET,
    timestamp_bytes,
)
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
from percolator.tablet.memory.last_change import (
    LastChanges,
    lies_under_a_lock,
    newest_change_below,
)
from percolator.tablet.memory.lock_mirror import LockMirror
from percolator.tablet.memory.read_locks import ReadLocks
from percolator.tablet.memory.recent_writes import RecentWrites
from percolator.tablet.memory.state import TabletState
from percolator.tablet.reading import versions
from percolator.tablet.reading.versions import VERSIONS_MAX, TooManyVersions, Version, limited
from percolator.tablet.writing.exclusion import Exclusion
from percolator.tablet.writing.mutations import (
    ABSENT,
    AT_MOST,
    BEGINS_IF_PRESENT,
    EQUALS,
    PRESENT,
    PUT,
    CheckedChange,
    CheckedCondition,
    CheckedMutation,
    PrewriteConditions,
)
from percolator.tablet.writing.results import not_executed
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Cursor, Storage

_HOLD_WHEN_NOTHING_IS_SELECTED = (ABSENT, BEGINS_IF_PRESENT)


class Judge:
    """Judges the mutations of one batch after another. Use it only when the previous batch is
    durable, and close it at the end of each batch."""

    def __init__(
        self,
        storage: Storage[Any],
        mirror: LockMirror,
        recent: RecentWrites,
        last_changes: LastChanges,
        read_locks: ReadLocks,
    ) -> None:
        self._storage = storage
        self._get = storage.get
        self._headers = mirror.headers
        self._recent = recent
        self._last_changes = last_changes
        self._read_locks = read_locks
        self._exclusion = Exclusion(storage, mirror, recent, read_locks)
        self._open_cursor: Cursor | None = None

    @classmethod
    def of(cls, state: TabletState) -> Judge:
        """The judge of what a tablet has stored and remembers."""
        return cls(state.storage, state.mirror, state.recent, state.last_changes, state.read_locks)

    def close(self) -> None:
        if self._open_cursor is not None:
            self._open_cursor.close()
            self._open_cursor = None

    def refusal(self, mutation: CheckedMutation) -> pb.MutationResult | None:
        """Why the mutation must not be applied: a condition fails, or a stored record would become
        false. None if it may be applied."""
        cell, changes = mutation[2], mutation[5]
        conditions: Sequence[CheckedCondition] = mutation[4]
        bound: int | None = None
        if type(conditions) is PrewriteConditions and self._all_hold(cell, conditions.start):
            conditions = ()
        for index, condition in enumerate(conditions):
            space, expectation, from_, _, prefix, _, _ = condition
            if space == LOCK and expectation == PRESENT:
                # Every commit has this condition, and the header in memory nearly always meets it.
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
            try:
                holds, offender = self._judge(cell, condition)
            except TooManyVersions:
                return _too_many_versions(index)
            if not holds:
                return self._refused(mutation, index, condition, offender)
        for change in changes:
            # Nothing is above the bound. Where it is the timestamp itself, nothing is above that.
            if change[1] == WRITE and change[0] == PUT and self._recent.bound(cell) > change[2]:
                return self._out_of_order(cell, change)
        if self._read_locks.used:
            return self._exclusion.refusal(mutation, self._cursor)
        return None

    def _all_hold(self, cell: bytes, start: int) -> bool:
        """Whether memory alone says that all conditions of a prewrite hold."""
        recent = self._recent
        if cell in self._headers or start <= recent.newest_marker:
            return False
        return recent.bound(cell) < start

    def last_change(self, cell: bytes, timestamp: int) -> int | None:
        """The newest put or deletion of the cell below the timestamp, or 0 if there is none; None
        if finding it takes too long."""
        known = self._last_changes.of(cell)
        if known is not None and known < timestamp:
            return known
        return newest_change_below(self._cursor(), cell, timestamp)

    def _out_of_order(self, cell: bytes, change: CheckedChange) -> pb.MutationResult | None:
        """Refuses a put or deletion below a lock-only record that names an older one: readers would
        never see it (last_change.py)."""
        _, _, timestamp, record, _ = change
        if record[WRITE_KIND_OFFSET] == KIND_LOCK_ONLY:
            return None
        if not lies_under_a_lock(self._cursor(), cell, timestamp):
            return None
        return not_executed(
            InvalidArgument(
                "mutations.changes.timestamp",
                f"a commit at {timestamp} is below a lock-only commit of its cell; the commits of "
                "a cell must come in order",
            )
        )

    def _cursor(self) -> Cursor:
        if self._open_cursor is None:
            self._open_cursor = self._storage.cursor()
        return self._open_cursor

    def _newest_write(self, cell: bytes) -> int:
        """The newest commit timestamp of the cell in the storage; -1 if there is none."""
        prefix = W + cell
        cursor = self._cursor()
        cursor.seek(prefix)
        key = cursor.key()
        if key.startswith(prefix):
            return int.from_bytes(key[-8:], "big") ^ TIMESTAMP_MAX
        return -1

    def _judge(self, cell: bytes, condition: CheckedCondition) -> tuple[bool, Version | None]:
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
                if expectation == AT_MOST:
                    end = len(prefix) + len(required)
                    holds = version[1][len(prefix) : end] <= required
                    return holds, None if holds else version
                if expectation != EQUALS or version[1] == prefix:
                    return True, None
                return False, other or version
            other = other or version
        return False, other

    def _versions(self, cell: bytes, condition: CheckedCondition) -> Iterable[Version]:
        """The versions in the condition's range: oldest first if ABSENT, otherwise newest first."""
        space, expectation, from_, until, prefix, required, qualifier = condition
        if space == LOCK:
            header = self._headers.get(cell)
            if header is None:
                return ()
            longest = max(len(prefix), len(required))
            if expectation == AT_MOST:
                longest = len(prefix) + len(required)
            if expectation == EQUALS or longest > LOCK_HEADER_BYTES:
                return ((0, self._get(L + cell) or b""),)
            return ((0, header),)
        key = PREFIX_OF_SPACE[space] + cell
        if space == NOTIFY:
            key += component(qualifier)
        if until == from_ + 1:
            value = self._get(key + inverted(from_))
            return () if value is None else ((from_, value),)
        if expectation != ABSENT:
            return limited(versions.descending(self._cursor(), key, from_, until))
        found = versions.ascending(self._cursor(), key, from_, until)
        if space == WRITE and prefix[:START_TIMESTAMP_BYTES] == timestamp_bytes(from_):
            # A transaction's own commit is the oldest write at or above its start, because it held
            # the lock until then: there is no need to look at a thousand later writes.
            return islice(found, 1)
        return limited(found)

    def _refused(
        self,
        mutation: CheckedMutation,
        index: int,
        condition: CheckedCondition,
        offender: Version | None,
    ) -> pb.MutationResult:
        result = pb.MutationResult(outcome=pb.OUTCOME_REFUSED, failed_condition=index)
        if offender is not None:
            row, column, cell, _, _, _ = mutation
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


def _too_many_versions(index: int) -> pb.MutationResult:
    return not_executed(
        InvalidArgument(
            f"mutations.conditions[{index}]",
            f"needs more than {VERSIONS_MAX} versions of the cell; narrow its timestamps",
        )
    )
