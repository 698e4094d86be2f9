"""What a transaction wants to write, kept in the client until commit, and seen by its own reads.

A deletion is a write; so is a lock, which changes nothing but conflicts with other writers; and so
is a read lock, which conflicts with all but read locks. An empty value is a value. The limits are
checked as the set grows, so that the error is raised at the line that exceeds them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from sortedcontainers import SortedDict

from percolator.errors import CellAddress, TransactionTooLarge
from percolator.formats.records import (
    KIND_DELETE,
    KIND_LOCK_ONLY,
    KIND_PUT,
    KIND_PUT_IN_DATA,
    KIND_READ_LOCK,
    LOCK_HEADER,
    WRITE_HEADER,
    lock_prefix,
    locked_column,
    read_lock_column,
    shared_part,
)
from percolator.limits import Limits
from percolator.protocol import steps
from percolator.routing.catalog import TableInfo, TableSchema
from percolator.routing.cells import CellMutation, CommonStep, FoundCell, WholeCommit
from percolator.v1.cells_pb2 import Cell
from percolator.v1.tabletserver_pb2 import Mutation, StepList

# Read locks in the client: a transaction's write set names the cell, the cluster a hidden one.
#
# The hidden cell has the start timestamp in its name (formats/hidden_cells.py), which is known only
# at the commit. From then on a read lock is a lock-only write like any other: it may be the
# primary, and it is prewritten, committed and rolled back.


def stored_writes(
    writes: Mapping[CellAddress, tuple[int, bytes]], start: int
) -> dict[CellAddress, tuple[int, bytes]]:
    """What the transaction writes to which stored cells."""
    return {
        read_lock_of(cell, start) if write[0] == KIND_READ_LOCK else cell: (
            (KIND_LOCK_ONLY, b"") if write[0] == KIND_READ_LOCK else write
        )
        for cell, write in writes.items()
    }


def read_lock_of(cell: CellAddress, start: int) -> CellAddress:
    """The hidden cell in which the transaction that began then holds its read lock of this cell."""
    return CellAddress(cell.table_id, cell.row, read_lock_column(cell.column, start))


def stored_column(found: Cell) -> bytes:
    """The column of a lock or record that a tablet has returned. It need not be the one that was
    asked about: a read lock is in the way of its cell, and the cell's lock in that of a read lock.
    """
    return found.qualifier or found.column


def is_read_lock(cell: CellAddress) -> bool:
    return locked_column(cell.column) is not None


def locked_cell(cell: CellAddress) -> CellAddress:
    """The cell that is locked, if this one is a read lock; else the cell itself."""
    column = locked_column(cell.column)
    return cell if column is None else CellAddress(cell.table_id, cell.row, column)


# The steps of one transaction: the table of `steps.py`, filled in with its cells and values.
#
# Building a step has no effect and may be repeated: its content depends on nothing but the write
# set, the start timestamp and the arguments, so a repeated step is identical.

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


# Refuses to commit what was encoded with a codec that its column no longer has.
#
# `percolator tables alter` raises the version of the table's schema, and returns when all its
# tablets refuse commits under the former one. Whoever is refused learns the new schema, and comes
# here. Without this, a transaction that has encoded its values before would commit them after, and
# programs would read them with the new codec.
#
# What is being committed in two phases is judged where it becomes final, on the primary. So values
# for another table than the primary's may still be committed if their cells were locked before. The
# parts of a shared transaction are not judged: their primaries are in a table of Percolator's own,
# and become final with one group of mutations, which knows nothing of their values.


def require_same_codecs(
    writes: Mapping[CellAddress, Write],
    tables: Mapping[str, TableInfo],
    schema_of: Callable[[int], TableSchema | None],
) -> None:
    """Raises `SchemaError` if a table has others now, as far as this client knows, than when the
    transaction encoded its values. `tables`: as they were then; there may be others among them."""
    for info in tables.values():
        schema = schema_of(info.table_id)
        if schema is not None and info.codecs is not schema.codecs:
            put = {
                cell.column
                for cell, (kind, _) in writes.items()
                if cell.table_id == info.table_id and kind == KIND_PUT
            }
            info.codecs.require_unchanged(schema.codecs, put)


# What an observer's transaction knows of the row of its change, and what it reads of it.
#
# The columns of this row that the last run of an observer has read are read together with the
# change, in the first message of its next run (the paper's section 2.5). All of it is as of the
# transaction's own timestamp: nothing that an earlier run has read is used.


class KnownRow:
    """Some cells of one row, as a transaction's timestamp shows them."""

    __slots__ = ("_cells", "_place", "read")

    def __init__(self, table_id: int, row: bytes, cells: Mapping[bytes, FoundCell | None]) -> None:
        self._place = (table_id, row)
        self._cells = cells
        self.read: dict[bytes, None] = {}
        """The columns of the row that were asked for, known or not, in that order."""

    def has(self, address: CellAddress) -> bool:
        """Whether the cell is known, and need not be read. Notes that it was asked for."""
        table_id, row, column = address
        if (table_id, row) != self._place:
            return False
        self.read[column] = None
        return column in self._cells

    def cells_of(
        self, table_id: int, row: bytes, columns: Sequence[bytes]
    ) -> Mapping[bytes, FoundCell | None] | None:
        """These cells, if all of them are known. Notes that they were asked for."""
        if (table_id, row) != self._place:
            return None
        self.read.update(dict.fromkeys(columns))
        if not self._cells.keys() >= set(columns):
            return None
        return {column: self._cells[column] for column in columns}

    def __getitem__(self, column: bytes) -> FoundCell | None:
        return self._cells[column]


def known_rows(
    known: KnownRow | None, table_id: int, rows: Iterable[bytes], columns: Sequence[bytes] | None
) -> dict[bytes, Mapping[bytes, FoundCell | None]]:
    """The rows of which all these columns are known; none without columns."""
    if known is None or not columns:
        return {}
    found = {row: known.cells_of(table_id, row, columns) for row in rows}
    return {row: cells for row, cells in found.items() if cells is not None}


_FEW = 32
"""So many writes are sooner looked through than sorted by row."""


class WriteSet:
    """The writes by cell; only the last write to a cell counts."""

    __slots__ = ("_columns", "_limits", "cells", "has_read_locks", "size_bytes")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.cells: dict[CellAddress, Write] = {}
        self.size_bytes = 0
        self.has_read_locks = False
        self._columns: SortedDict[tuple[int, bytes], list[bytes]] | None = None
        """The columns of the cells, by table and row. Made for the first read that needs them:
        otherwise, each read of a row would look through all writes."""

    def put(self, cell: CellAddress, value: bytes) -> None:
        self._write(cell, (KIND_PUT, value))

    def delete(self, cell: CellAddress) -> None:
        self._write(cell, (KIND_DELETE, b""))

    def lock(self, cell: CellAddress) -> None:
        known = self.cells.get(cell)
        if known is None or known[0] == KIND_READ_LOCK:  # a put or a delete locks the cell anyway
            self._write(cell, (KIND_LOCK_ONLY, b""))

    def read_lock(self, cell: CellAddress) -> None:
        if cell not in self.cells:  # any other write excludes more
            self._write(cell, (KIND_READ_LOCK, b""))
            self.has_read_locks = True

    def adopt(self, other: WriteSet) -> None:
        """Takes over all writes of a set that was checked against the same limits."""
        self.cells.update(other.cells)
        self._columns = None
        self.has_read_locks = self.has_read_locks or other.has_read_locks

    def stored(self, start: int) -> Mapping[CellAddress, Write]:
        """What is stored in which cells by a transaction that began then."""
        return stored_writes(self.cells, start) if self.has_read_locks else self.cells

    def write_together(self, writes: Sequence[tuple[CellAddress, bytes | None]]) -> None:
        """Writes all values, or none if there is no room for all of them; None deletes."""
        before = {cell: self.cells.get(cell) for cell, _ in writes}
        size_bytes = self.size_bytes
        try:
            for cell, value in writes:
                self._write(cell, (KIND_DELETE, b"") if value is None else (KIND_PUT, value))
        except TransactionTooLarge:
            for cell, old in before.items():
                if old is None:
                    self.cells.pop(cell, None)
                else:
                    self.cells[cell] = old
            self.size_bytes = size_bytes
            self._columns = None
            raise

    def _write(self, cell: CellAddress, write: Write) -> None:
        cells, limits = self.cells, self._limits
        old = cells.get(cell)
        size_bytes = self.size_bytes + len(write[1])
        if old is None:
            if len(cells) >= limits.transaction_cells_max:
                raise TransactionTooLarge(
                    f"a transaction can write at most {limits.transaction_cells_max} cells"
                )
            size_bytes += len(cell.row) + len(cell.column)
        else:
            size_bytes -= len(old[1])
        if size_bytes > limits.transaction_bytes_max:
            raise TransactionTooLarge(
                f"a transaction can write at most {limits.transaction_bytes_max} bytes"
            )
        cells[cell] = write
        self.size_bytes = size_bytes
        if old is None and self._columns is not None:
            _note(self._columns, cell)

    def rows(self, table_id: int, start: bytes, end: bytes) -> dict[bytes, dict[bytes, Write]]:
        """The writes in a range of rows, by row and column. An empty `end` means the last row."""
        if len(self.cells) <= _FEW:
            return _by_row(
                (cell, write)
                for cell, write in self.cells.items()
                if cell[0] == table_id and start <= cell[1] and (not end or cell[1] < end)
            )
        stop = (table_id, end) if end else (table_id + 1, b"")
        columns = self._columns_by_row()
        rows = columns.irange((table_id, start), stop, inclusive=(True, False))
        return {row: self._of_row(table_id, row, columns[table_id, row]) for _, row in rows}

    def of_rows(self, table_id: int, rows: Collection[bytes]) -> dict[bytes, dict[bytes, Write]]:
        """The writes to these rows, by row and column; rows without any are missing."""
        if len(self.cells) <= _FEW:
            wanted = frozenset(rows)
            return _by_row(
                (cell, write)
                for cell, write in self.cells.items()
                if cell[0] == table_id and cell[1] in wanted
            )
        columns = self._columns_by_row()
        return {
            row: self._of_row(table_id, row, columns[table_id, row])
            for row in rows
            if (table_id, row) in columns
        }

    def _of_row(self, table_id: int, row: bytes, columns: list[bytes]) -> dict[bytes, Write]:
        return {column: self.cells[CellAddress(table_id, row, column)] for column in columns}

    def _columns_by_row(self) -> SortedDict[tuple[int, bytes], list[bytes]]:
        if self._columns is None:
            self._columns = SortedDict()
            for cell in self.cells:
                _note(self._columns, cell)
        return self._columns


def _note(columns: SortedDict[tuple[int, bytes], list[bytes]], cell: CellAddress) -> None:
    table_id, row, column = cell
    columns.setdefault((table_id, row), []).append(column)


def _by_row(writes: Iterable[tuple[CellAddress, Write]]) -> dict[bytes, dict[bytes, Write]]:
    found: dict[bytes, dict[bytes, Write]] = {}
    for (_, row, column), write in writes:
        found.setdefault(row, {})[column] = write
    return found
