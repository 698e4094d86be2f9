"""The steps of one transaction: the table of `steps.py`, filled in with its cells and values.

Building a step has no effect and may be repeated: its content depends on nothing but the write set,
the start timestamp and the arguments, so a repeated step is identical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from percolator.errors import CellAddress
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    KIND_PUT_IN_DATA,
    LOCK_HEADER,
    WRITE_HEADER,
    lock_prefix,
    shared_part,
)
from percolator.limits import Limits
from percolator.protocol import steps
from percolator.routing.cells import CellMutation, WholeCommit
from percolator.routing.common_step import CommonStep
from percolator.routing.table_info import TableInfo, TableSchema
from percolator.v1.tabletserver_pb2 import Mutation, StepList

Write = tuple[int, bytes]
"""KIND_PUT, KIND_DELETE or KIND_LOCK_ONLY, and the value of a put. In a `WriteSet`, it may be a
KIND_READ_LOCK, too: a lock-only write of a hidden cell, once the start timestamp is known."""


_NO_TABLES: Mapping[str, TableInfo] = {}


class WriteSteps:
    """What one transaction writes, and the steps that it sends for these cells."""

    __slots__ = (
        "_session",
        "_shared",
        "cells",
        "inline_bytes_max",
        "primary",
        "start",
        "tables",
        "weak_notifications",
        "writes",
    )

    def __init__(
        self,
        start: int,
        writes: Mapping[CellAddress, Write],
        session: bytes,
        inline_bytes_max: int,
        *,
        weak_notifications: Sequence[CellAddress] = (),
        tables: Mapping[str, TableInfo] = _NO_TABLES,
    ) -> None:
        """The write set has at least one cell. `tables`: as they were when it was encoded, by name;
        there may be others among them."""
        self.start = start
        self.writes = writes
        self.cells = sorted(writes) if len(writes) > 1 else list(writes)
        self.primary = self.cells[0]
        """The least cell: a function of the write set, so that every committer of the transaction
        picks the same one."""
        self._session = session
        self._shared = b""
        self.inline_bytes_max = inline_bytes_max
        self.weak_notifications = weak_notifications
        """The cells whose weak observers the commit notifies."""
        self.tables = tables

    def fits_one_message(self, limits: Limits) -> bool:
        """Whether the transaction is small enough to be one message, and in one table."""
        writes, weak = self.writes, self.weak_notifications
        if len(writes) + len(weak) > limits.one_round_cells_max:
            return False
        size_bytes = 0
        for _, value in writes.values():
            size_bytes += len(value)
        if size_bytes > limits.batch_bytes_max // 2:
            return False
        if len(writes) + len(weak) == 1:
            return True
        return len({cell.table_id for cells in (writes, weak) for cell in cells}) == 1

    def message(self, schema: TableSchema, *, is_followed: bool) -> WholeCommit:
        """The whole transaction. Repeated, it is the same but for a newer schema's observers."""
        observers = schema.observers
        rows: list[bytes] = []
        columns: list[bytes] = []
        kinds: list[int] = []
        values: list[bytes] = []
        for cell in self.cells:
            kind, value = self.writes[cell]
            if len(value) > self.inline_bytes_max:
                kind = KIND_PUT_IN_DATA
            _, row, column = cell
            rows.append(row)
            columns.append(column)
            kinds.append(kind)
            values.append(value)
        return WholeCommit(
            self.primary[0],
            schema.version,
            self.start,
            rows,
            columns,
            kinds,
            values,
            _observers_of(columns, observers) if observers else (),
            _weak_notifications(self.weak_notifications, schema) if self.weak_notifications else (),
            is_followed,
        )

    def prewrite(self, cell: CellAddress, min_commit: int, ttl_milliseconds: int) -> CellMutation:
        kind, value = self.writes[cell]
        data = None
        if len(value) > self.inline_bytes_max:
            kind, value, data = KIND_PUT_IN_DATA, b"", value
        table_id, row, column = cell
        lock = self._lock(min_commit, ttl_milliseconds, kind, value)
        if data is None:
            return CellMutation(table_id, Prewrite(row, column, lock, self.start))
        return CellMutation(table_id, steps.prewrite(row, column, self.start, lock, data))

    def _lock(self, min_commit: int, ttl_milliseconds: int, kind: int, value: bytes) -> bytes:
        if not self._shared:  # what commits in one round needs no lock
            self._shared = shared_part(self._session, self.primary)
        header = LOCK_HEADER.pack(self.start, min_commit, ttl_milliseconds, kind)
        return b"".join((header, self._shared, value))

    def heartbeat(
        self, min_commit_seen: int, ttl_seen: int, min_commit: int, ttl_milliseconds: int
    ) -> CellMutation:
        """Raises the time to live: of the lock as it was seen or, with a `min_commit` above what
        was seen, of whatever lock has a lower one."""
        table_id, row, column = self.primary
        kind, value = self.writes[self.primary]
        if len(value) > self.inline_bytes_max:
            kind, value = KIND_PUT_IN_DATA, b""
        lock = self._lock(min_commit, ttl_milliseconds, kind, value)
        if min_commit > min_commit_seen:
            step = steps.raise_lock(row, column, self.start, min_commit - 1, lock)
        else:
            seen = lock_prefix(self.start, min_commit_seen, ttl_seen)
            step = steps.replace_lock(row, column, seen, lock)
        return CellMutation(table_id, step)

    def commit_primary(self, schema: TableSchema, min_commit: int, commit: int) -> CellMutation:
        table_id, row, column = self.primary
        record, observers = self._record(self.primary, schema)
        step = CommitPrimary(row, column, record, self.start, commit, min_commit, observers)
        return CellMutation(table_id, step, schema.version)

    def commit_secondary(self, cell: CellAddress, schema: TableSchema, commit: int) -> CellMutation:
        """Refused below the safe point, unlike when others roll the cell forward."""
        table_id, row, column = cell
        record, observers = self._record(cell, schema)
        step = CommitSecondary(row, column, record, self.start, commit, observers=observers)
        return CellMutation(table_id, step, schema.version)

    def roll_back(self, cell: CellAddress, *, not_below: int = 0) -> CellMutation:
        table_id, row, column = cell
        step = steps.roll_back(row, column, self.start)
        step.not_below = not_below
        return CellMutation(table_id, step)

    def observers(self, cell: CellAddress, schema: TableSchema) -> tuple[bytes, ...]:
        """The observers that the commit of a cell notifies; a lock-only write changes nothing."""
        return () if self.writes[cell][0] == KIND_LOCK_ONLY else schema.observers.get(cell[2], ())

    def _record(self, cell: CellAddress, schema: TableSchema) -> tuple[bytes, tuple[bytes, ...]]:
        """The commit record of a cell, and the observers that its commit notifies."""
        kind, value = self.writes[cell]
        if len(value) > self.inline_bytes_max:
            kind, value = KIND_PUT_IN_DATA, b""
        return WRITE_HEADER.pack(self.start, kind) + value, self.observers(cell, schema)


class Prewrite(CommonStep):
    """Locks a cell, with a value that is short enough to travel in the lock."""

    __slots__ = ()

    kind = StepList.KIND_PREWRITE

    def mutation(self) -> Mutation:
        return steps.prewrite(self.row, self.column, self.start, self.value, None)


class CommitPrimary(CommonStep):
    """Commits the transaction."""

    __slots__ = ()

    kind = StepList.KIND_COMMIT_PRIMARY

    def mutation(self) -> Mutation:
        return steps.commit_primary(
            self.row,
            self.column,
            self.start,
            self.min_commit,
            self.commit,
            self.value,
            self.observers,
        )


class CommitSecondary(CommonStep):
    """Rolls a cell forward, unless its history may have been collected."""

    __slots__ = ()

    kind = StepList.KIND_COMMIT_SECONDARY

    def mutation(self) -> Mutation:
        step = steps.commit_secondary(
            self.row, self.column, self.start, self.commit, self.value, self.observers
        )
        step.not_below = self.start
        return step


def _observers_of(
    columns: Sequence[bytes], observers: Mapping[bytes, tuple[bytes, ...]]
) -> list[tuple[bytes, tuple[bytes, ...]]]:
    return [(column, observers[column]) for column in dict.fromkeys(columns) if column in observers]


def _weak_notifications(
    cells: Sequence[CellAddress], schema: TableSchema
) -> list[tuple[bytes, bytes, tuple[bytes, ...]]]:
    observers = schema.weak_observers
    return [(row, column, observers[column]) for _, row, column in cells if column in observers]
