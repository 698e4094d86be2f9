"""What one group commit is going to write, and what becomes true in memory once it is durable."""

from __future__ import annotations

from typing import Any

from percolator.protocol.records import LOCK_HEADER_BYTES
from percolator.tablet.keys import (
    LOCK,
    NEWEST_KEY,
    NOTIFY,
    PREFIX_OF_SPACE,
    ROLLBACK,
    WRITE,
    L,
    component,
    inverted,
)
from percolator.tablet.lock_mirror import LockMirror
from percolator.tablet.mutations import DELETE, PUT, Change, Step
from percolator.tablet.notify_index import NotifyIndex
from percolator.tablet.recent_writes import NEWEST, RecentWrites
from percolator.tablet.statistics import Counters
from percolator.world import Storage


class JudgedBatch:
    """Collects the changes of mutations whose conditions held."""

    def __init__(self, storage: Storage[Any], mirror: LockMirror) -> None:
        self._get = storage.get
        self._headers = mirror.headers
        self.writes = storage.batch()
        self.touched: set[bytes] = set()
        """Cells that change, or whose mutation waits: whoever comes for one of them waits too."""
        self.bytes = 0
        """Of the keys and values written."""
        self.applied = 0
        self.refused = 0
        self._locks_put: list[tuple[bytes, bytes]] = []
        self._locks_removed: list[bytes] = []
        self.notifications: list[bytes] = []
        """Put by the batch: keys without their space byte."""
        self._notifications_removed: list[bytes] = []
        self._committed: dict[bytes, int] = {}
        self._newest_commit = 0
        self._newest_marker = 0
        self._cells_added = 0
        self._bytes_added = 0
        self._changed = False

    @property
    def changed(self) -> bool:
        """Whether there is anything to write."""
        return self._changed

    def add(self, step: Step) -> None:
        """Adds the changes of a mutation on a cell that was not touched before."""
        cell, changes = step[2], step[5]
        self.touched.add(cell)
        for change in changes:
            kind, space, timestamp, value, qualifier = change
            if space == LOCK:
                self._change_lock(cell, kind, value)
                continue
            suffix = inverted(timestamp)
            if space == NOTIFY:
                suffix = component(qualifier) + suffix
            if kind == PUT:
                key = PREFIX_OF_SPACE[space] + cell + suffix
                self.writes.put(key, value)
                self._changed = True
                size = len(key) + len(value)
                self.bytes += size
                if space == NOTIFY:
                    self.notifications.append(cell + suffix)
                    continue
                self._cells_added += 1
                self._bytes_added += size
                if space == WRITE:
                    self._committed[cell] = max(timestamp, self._committed.get(cell, 0))
                    self._newest_commit = max(self._newest_commit, timestamp)
                elif space == ROLLBACK:
                    self._newest_marker = max(self._newest_marker, timestamp)
            else:
                self._delete(change, cell + suffix)

    def note_bounds(self, recent: RecentWrites) -> None:
        """Writes, with the batch, what `RecentWrites` has to know when the tablet is opened."""
        commit, marker = self._newest_commit, self._newest_marker
        if commit > recent.newest_commit or marker > recent.newest_marker:
            newest = max(commit, recent.newest_commit), max(marker, recent.newest_marker)
            self.writes.put(NEWEST_KEY, NEWEST.pack(*newest))

    def publish(
        self, mirror: LockMirror, index: NotifyIndex, recent: RecentWrites, counters: Counters
    ) -> None:
        """Makes the batch known in memory. Only when it is durable."""
        for cell in self._locks_removed:
            mirror.remove(cell)
        for cell, record in self._locks_put:
            mirror.put(cell, record)
        for key in self._notifications_removed:
            index.remove(key)
        for key in self.notifications:
            index.put(key)
        if self._committed or self._newest_marker:
            recent.publish(self._committed, self._newest_commit, self._newest_marker)
        counters.locks_written += len(self._locks_put)
        counters.notifications_written += len(self.notifications)
        counters.cells += self._cells_added
        counters.bytes += self._bytes_added
        counters.batches_synced += self._changed
        counters.mutations_applied += self.applied
        counters.mutations_refused += self.refused
        counters.mutation_rate.add(self.applied + self.refused)

    def _change_lock(self, cell: bytes, kind: int, value: bytes) -> None:
        key = L + cell
        if kind == PUT:
            self.writes.put(key, value)
            self._locks_put.append((cell, value))
            self.bytes += len(key) + len(value)
        else:
            header = self._headers.get(cell)
            if header is None:
                return
            if kind != DELETE:
                record = header if len(value) <= LOCK_HEADER_BYTES else self._get(key)
                if record is None or not record.startswith(value):
                    return
            self.writes.delete(key)
            self._locks_removed.append(cell)
        self._changed = True

    def _delete(self, change: Change, address: bytes) -> None:
        """Deletes what is there only: a tombstone for what never was costs every later seek."""
        kind, space, _, value, _ = change
        key = PREFIX_OF_SPACE[space] + address
        found = self._get(key)
        if found is None or (kind != DELETE and not found.startswith(value)):
            return
        self.writes.delete(key)
        self._changed = True
        if space == NOTIFY:
            self._notifications_removed.append(address)
        else:
            self._cells_added -= 1
            self._bytes_added -= len(key) + len(found)
