"""Read locks and writers exclude each other, although their records are in different cells.

A prewrite has two conditions that name no transaction: there is no lock, and no newer commit. In a
tablet with read locks, they hold for more than the cell itself (percolator/tablet/memory/
read_locks.py): for a cell, also for the read locks of it; for a read lock, also for the cell that
it locks. So a client that knows nothing of read locks is kept away from them as well. What each
rule prevents:

* A live lock on the other side refuses, as a lock on the cell does. Its owner may yet commit.
* A commit on the other side, above the start, refuses. A writer and a read lock whose times overlap
  would otherwise both commit, and what was read under the lock was changed before its commit.
* Read locks of one cell are not compared with each other: that they all may commit is their use.
* The refusal names the cell of the mutation, and the column on the other side as a qualifier. A
  client that knows nothing of it takes the lock for one on the cell, and waits.
* What is judged is durable, since a mutation waits while the other side is touched or held
  (lines.py). Judged in one batch, each would pass before the other is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from percolator.errors import NotReady
from percolator.tablet import keys
from percolator.tablet.keys import LOCK, WRITE, L, W, timestamp_of
from percolator.tablet.memory.lock_mirror import LockMirror
from percolator.tablet.memory.read_locks import ReadLocks
from percolator.tablet.memory.recent_writes import RecentWrites
from percolator.tablet.reading import versions
from percolator.tablet.writing.mutations import ABSENT, CheckedCondition, CheckedMutation
from percolator.tablet.writing.results import not_executed
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_WRITE, Space
from percolator.world import Cursor, Storage

LOOKED_AT_MAX = 16_384
"""The most read locks of one cell that are looked at for a transaction that is older than what
memory knows. Until they are collected, it is told to come back: a loop must not stand still."""

_RETRY_SECONDS = 0.5


class Exclusion:
    """Judges prewrites by what is on the other side. The previous batch must be durable."""

    def __init__(
        self,
        storage: Storage[Any],
        mirror: LockMirror,
        recent: RecentWrites,
        read_locks: ReadLocks,
    ) -> None:
        self._get = storage.get
        self._headers = mirror.headers
        self._recent = recent
        self._read_locks = read_locks

    def refusal(
        self, mutation: CheckedMutation, cursor: Callable[[], Cursor]
    ) -> pb.MutationResult | None:
        """Why a mutation whose conditions hold on its own cell must not be applied, or None.

        `cursor` returns the judge's, which shows what is durable.
        """
        unlocked = unwritten = since = -1
        for index, condition in enumerate(mutation[4]):
            if _names_nobody(condition):
                if condition[0] == LOCK:
                    unlocked = index
                elif condition[0] == WRITE:
                    unwritten, since = index, condition[2]
        if unlocked < 0 and unwritten < 0:
            return None  # not a prewrite
        cell = mutation[2]
        locked = keys.locked_cell(cell)
        if unlocked >= 0:
            on_other_side = self._read_lock(cell) if locked is None else self._lock(locked)
            if on_other_side is not None:
                record = self._get(L + on_other_side) or b""
                return _refused(unlocked, SPACE_LOCK, mutation, on_other_side, 0, record)
        if unwritten < 0:
            return None
        if locked is None:
            found = self._newer_read(cell, since, cursor)
        else:
            found = self._newer(locked, since, cursor)
        if isinstance(found, pb.MutationResult) or found is None:
            return found
        return _refused(unwritten, SPACE_WRITE, mutation, *found)

    # ------------------------------------------------------------------ what a writer meets

    def _read_lock(self, cell: bytes) -> bytes | None:
        return next(iter(self._read_locks.live.get(cell, ())), None)

    def _newer_read(
        self, cell: bytes, since: int, new_cursor: Callable[[], Cursor]
    ) -> tuple[bytes, int, bytes] | pb.MutationResult | None:
        """A read lock that was committed at or above `since`: cell, timestamp and record."""
        if self._read_locks.recent.bound(cell) < since:
            return None
        begin = W + keys.read_locks_prefix(cell)
        cursor = new_cursor()
        cursor.seek(begin + keys.AFTER_READ_LOCKS)
        # The youngest transactions come first: nearly always, one of them is the answer.
        for _ in range(LOOKED_AT_MAX):
            cursor.prev()
            key, record = cursor.item()
            if not key.startswith(begin):
                return None
            if timestamp_of(key) >= since:
                return key[1 : -keys.TIMESTAMP_BYTES], timestamp_of(key), record
        return not_executed(
            NotReady(
                f"the cell has more than {LOOKED_AT_MAX} read locks that wait to be collected",
                retry_after_seconds=_RETRY_SECONDS,
            )
        )

    # ------------------------------------------------------------------ what a read lock meets

    def _lock(self, locked: bytes) -> bytes | None:
        return locked if locked in self._headers else None

    def _newer(
        self, locked: bytes, since: int, cursor: Callable[[], Cursor]
    ) -> tuple[bytes, int, bytes] | None:
        """The first commit of the locked cell at or above `since`."""
        if self._recent.bound(locked) < since:
            return None
        for timestamp, record in versions.ascending(cursor(), W + locked, since, 0):
            return locked, timestamp, record
        return None


def _names_nobody(condition: CheckedCondition) -> bool:
    _, expectation, _, until, prefix, _, _ = condition
    return expectation == ABSENT and not prefix and not until


def _refused(
    index: int,
    space: Space,
    mutation: CheckedMutation,
    other: bytes,
    timestamp: int,
    record: bytes,
) -> pb.MutationResult:
    """As the judge refuses, because of a cell on the other side."""
    result = pb.MutationResult(outcome=pb.OUTCOME_REFUSED, failed_condition=index)
    result.cell.space = space
    result.cell.row, result.cell.column = mutation[0], mutation[1]
    result.cell.timestamp = timestamp
    result.cell.value = record
    result.cell.qualifier = keys.split_component(other, keys.split_component(other, 0)[1])[0]
    return result
