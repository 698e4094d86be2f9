"""What one group commit will write, and what becomes true in memory once that is durable."""

from __future__ import annotations

from collections.abc import Callable

from percolator.formats.records import (
    KIND_LOCK_ONLY,
    LAST_CHANGE,
    LOCK_HEADER_BYTES,
    WRITE_HEADER_BYTES,
    WRITE_KIND_OFFSET,
)
from percolator.tablet.keys import (
    FORMAT_KEY,
    LOCK,
    NEWEST_KEY,
    NOTIFY,
    PREFIX_OF_SPACE,
    ROLLBACK,
    TIMESTAMP_BYTES,
    WRITE,
    L,
    change_of_write,
    component,
    inverted,
    locked_cell,
)
from percolator.tablet.memory.change_feed import note_change
from percolator.tablet.memory.read_locks import FORMAT_WITH_READ_LOCKS
from percolator.tablet.memory.recent_writes import NEWEST
from percolator.tablet.memory.state import TabletState
from percolator.tablet.writing.mutations import DELETE, PUT, CheckedChange, CheckedMutation


class JudgedBatch:
    """Collects the changes of mutations whose conditions held."""

    def __init__(self, state: TabletState, last_change: Callable[[bytes, int], int | None]) -> None:
        """`last_change` returns a cell's newest put or deletion below a timestamp, or None."""
        self._state = state
        self._get = state.storage.get
        self._last_change = last_change
        self._headers = state.mirror.headers
        self._in_feed = state.feed.on
        self.writes = state.storage.batch()
        self.touched: dict[bytes, None] = {}
        """Cells that this batch changes: further mutations of them wait for the next batch."""
        self.read_locked: dict[bytes, None] = {}
        """Cells of whose read locks this batch changes any: their writers wait for the next one."""
        self.bytes = 0
        """The size of the keys and values written."""
        self.applied = 0
        self.refused = 0
        self._locks_put: list[tuple[bytes, bytes]] = []
        self._locks_removed: list[bytes] = []
        self._notifications_put: list[bytes] = []
        """Keys without their space byte."""
        self._notifications_removed: list[bytes] = []
        self._committed: dict[bytes, int] = {}
        self._under_locks: dict[bytes, int] = {}
        """For each cell with a lock-only commit, the newest change below it, if it is known."""
        self._newest_commit = 0
        self._newest_marker = 0
        self._cells_added = 0
        self._bytes_added = 0
        self._notes_read_locks = False
        self._changed = False

    @property
    def changed(self) -> bool:
        """Whether there is anything to write."""
        return self._changed

    def add(self, mutation: CheckedMutation) -> None:
        """Adds the changes of a mutation on a cell that was not touched before."""
        cell, changes = mutation[2], mutation[5]
        self.touched[cell] = None
        if self._state.read_locks.used and (locked := locked_cell(cell)) is not None:
            self.read_locked[locked] = None
        for change in changes:
            kind, space, timestamp, value, qualifier = change
            if space == LOCK:
                self._change_lock(cell, kind, value)
                continue
            suffix = inverted(timestamp)
            if space == NOTIFY:
                suffix = component(qualifier) + suffix
            if kind == PUT:
                if space == WRITE and value[WRITE_KIND_OFFSET] == KIND_LOCK_ONLY:
                    value = self._lock_only(mutation, timestamp, value)
                key = PREFIX_OF_SPACE[space] + cell + suffix
                self.writes.put(key, value)
                self._changed = True
                size = len(key) + len(value)
                self.bytes += size
                if space == NOTIFY:
                    self._notifications_put.append(cell + suffix)
                    continue
                self._cells_added += 1
                self._bytes_added += size
                if space == WRITE:
                    if self._in_feed:
                        self.bytes += note_change(self.writes, cell, timestamp, value)
                    self._committed[cell] = max(timestamp, self._committed.get(cell, 0))
                    self._newest_commit = max(self._newest_commit, timestamp)
                elif space == ROLLBACK:
                    self._newest_marker = max(self._newest_marker, timestamp)
            else:
                self._delete(change, cell + suffix)

    def begin(self) -> None:
        """Call it right before writing. Adds what memory has to know when the tablet is opened;
        what it says about the newest change of a cell stops being true."""
        recent, read_locks = self._state.recent, self._state.read_locks
        if self._committed:
            self._state.last_changes.begin(self._committed)
        if read_locks.used and not read_locks.noted:
            self.writes.put(FORMAT_KEY, FORMAT_WITH_READ_LOCKS)
            self._notes_read_locks = True
        commit, marker = self._newest_commit, self._newest_marker
        if commit > recent.newest_commit or marker > recent.newest_marker:
            newest = max(commit, recent.newest_commit), max(marker, recent.newest_marker)
            self.writes.put(NEWEST_KEY, NEWEST.pack(*newest))

    def publish(self) -> None:
        """Applies the batch to memory, and tells workers of its notifications. Call it only when
        the batch is durable."""
        state, counters = self._state, self._state.counters
        mirror, index, recent = state.mirror, state.index, state.recent
        if state.read_locks.used:
            put = [cell for cell, _ in self._locks_put]
            state.read_locks.publish(put, self._locks_removed, self._committed)
            state.read_locks.noted = state.read_locks.noted or self._notes_read_locks
        for cell in self._locks_removed:
            mirror.remove(cell)
        mirror.put_all(self._locks_put)
        for key in self._notifications_removed:
            index.remove(key)
        for key in self._notifications_put:
            index.put(key)
        if self._committed:
            # Leave out cells with a newer commit, which may be a change.
            state.last_changes.publish(
                {
                    cell: change
                    for cell, change in self._under_locks.items()
                    if recent.bound(cell) < self._committed[cell]
                }
            )
        if self._committed or self._newest_marker:
            recent.publish(self._committed, self._newest_commit, self._newest_marker)
        counters.locks_written += len(self._locks_put)
        counters.notifications_written += len(self._notifications_put)
        counters.cells += self._cells_added
        counters.bytes += self._bytes_added
        counters.batches_synced += self._changed
        counters.mutations_applied += self.applied
        counters.mutations_refused += self.refused
        counters.mutation_rate.add(self.applied + self.refused)
        if self._notifications_put and state.watch is not None:
            state.watch.tell(state.identity.table_id, self._notifications_put)

    def _lock_only(self, mutation: CheckedMutation, timestamp: int, record: bytes) -> bytes:
        """The record with the timestamp of the change below it, whatever the client has sent."""
        _, _, cell, _, _, changes = mutation
        record = record[:WRITE_HEADER_BYTES]
        if self._state.read_locks.used and locked_cell(cell) is not None:
            return record + LAST_CHANGE.pack(0)  # it holds no data, so nothing lies under it
        if sum(change[1] == WRITE for change in changes) > 1:
            return record  # the mutation's other commits are not in the storage yet
        change = self._last_change(cell, timestamp)
        if change is None:
            return record
        self._under_locks[cell] = change
        return record + LAST_CHANGE.pack(change)

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

    def _delete(self, change: CheckedChange, address: bytes) -> None:
        """Deletes only what exists: a tombstone for what never existed slows every later seek."""
        kind, space, _, value, _ = change
        key = PREFIX_OF_SPACE[space] + address
        # What memory knows, the store has. Nearly all handled notifications are among that.
        is_known = space == NOTIFY and kind == DELETE and address in self._state.index
        found = b"" if is_known else self._get(key)
        if found is None or (kind != DELETE and not found.startswith(value)):
            return
        self.writes.delete(key)
        self._changed = True
        if space == WRITE:
            # It may be the commit that memory has as the cell's newest change.
            self._committed.setdefault(address[:-TIMESTAMP_BYTES], 0)
            if self._in_feed:
                self.writes.delete(change_of_write(key))
        if space == NOTIFY:
            self._notifications_removed.append(address)
        else:
            self._cells_added -= 1
            self._bytes_added -= len(key) + len(found)
