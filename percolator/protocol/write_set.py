"""The writes of a transaction: its write set, the steps for their cells, and the primary's lock.

WriteSet      the writes, in the client until the commit, and seen by the transaction's own reads
WriteSteps    the mutations that lock, commit and roll back these cells
PrimaryLock   the lock on the primary while a commit in two phases is in progress
Heartbeats    keep the primary locks of a client's commits alive

A deletion is a write; so is a lock, which changes nothing but conflicts with other writers; and so
is a read lock, which conflicts with all but read locks. An empty value is a value. The limits are
checked as the set grows, so that the error is raised at the line that exceeds them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from sortedcontainers import SortedDict

from percolator.codecs.indexes import IndexDefinition
from percolator.errors import CellAddress, ConflictError, TransactionTooLarge
from percolator.formats.records import (
    KIND_DELETE,
    KIND_LOCK_ONLY,
    KIND_PUT,
    KIND_PUT_IN_DATA,
    KIND_READ_LOCK,
    LOCK_HEADER,
    TTL_MILLISECONDS_MAX,
    WRITE_HEADER,
    lock_prefix,
    locked_column,
    read_lock_column,
    shared_part,
    timestamp_bytes,
)
from percolator.limits import Limits
from percolator.protocol import steps
from percolator.protocol.environment import Environment
from percolator.routing.catalog import TableInfo, TableSchema
from percolator.routing.cells import (
    ANY_SCHEMA,
    APPLIED,
    Answer,
    CellMutation,
    FoundCell,
    ListedStep,
    OneRoundCommit,
    Refused,
)
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1.cells_pb2 import Cell
from percolator.v1.tabletserver_pb2 import Mutation, StepList

Write = tuple[int, bytes]
"""KIND_PUT, KIND_DELETE or KIND_LOCK_ONLY, and the value of a put. In a `WriteSet`, it may be a
KIND_READ_LOCK, too: a lock-only write of a hidden cell, once the start timestamp is known."""

LOCK_KINDS = (KIND_LOCK_ONLY, KIND_READ_LOCK)
"""Writes that change nothing a reader could see."""

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

    def leave_out_lone_read_locks(self) -> None:
        """Discards the read locks if nothing else is written: a snapshot alone is consistent."""
        if all(kind == KIND_READ_LOCK for kind, _ in self.cells.values()):
            self.cells.clear()
            self.has_read_locks = False
            self._columns = None

    def adopt(self, other: WriteSet) -> None:
        """Takes over all writes of a set that was checked against the same limits."""
        for cell in self.cells.keys() & other.cells.keys():
            self.size_bytes -= len(cell.row) + len(cell.column) + len(self.cells[cell][1])
        self.size_bytes += other.size_bytes
        self.cells.update(other.cells)
        self._columns = None
        self.has_read_locks = self.has_read_locks or other.has_read_locks

    def own_value(self, cell: CellAddress) -> FoundCell | None:
        """The written cell, with a value of None if it was deleted; None if it was not changed."""
        write = self.cells.get(cell)
        if write is None or write[0] in LOCK_KINDS:
            return None
        return FoundCell(0, write[1] if write[0] == KIND_PUT else None)

    def stored(self, start: int) -> Mapping[CellAddress, Write]:
        """The writes by stored cell, of a transaction that began then."""
        return stored_writes(self.cells, start) if self.has_read_locks else self.cells

    def write_together(self, writes: Sequence[tuple[CellAddress, bytes | None]]) -> None:
        """Writes all values, or none if not all of them fit; None deletes."""
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


# Read locks in the client: a transaction's write set names the cell, the cluster a hidden one.
#
# The hidden cell has the start timestamp in its name (formats/records.py), which is known only
# at the commit. From then on a read lock is a lock-only write like any other: it may be the
# primary, and it is prewritten, committed and rolled back.


def stored_writes(
    writes: Mapping[CellAddress, tuple[int, bytes]], start: int
) -> dict[CellAddress, tuple[int, bytes]]:
    """The writes by stored cell."""
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

_NO_TABLES: Mapping[str, TableInfo] = {}
_NO_CELLS: frozenset[CellAddress] = frozenset()
_NO_INDEXES: Mapping[int, tuple[IndexDefinition, ...]] = {}


class KeptIndexes(NamedTuple):
    """A write set with the entries that were added for the indexes of its tables."""

    indexes: Mapping[int, tuple[IndexDefinition, ...]]
    """By table, as they were known then."""
    cells: WriteSet
    """With what was added."""
    added: Set[CellAddress]


def may_have_indexes(env: Environment, cells: WriteSet) -> bool:
    """False if it is known that no table of the write set has an index, as in most transactions."""
    asked = 0
    for table_id, _, _ in cells.cells:
        if table_id != asked:
            schema = env.schemas.get(table_id)
            if schema is None or schema.indexes:
                return True
            asked = table_id
    return False


class WriteSteps:
    """The writes of one transaction, and the steps that it sends for their cells."""

    __slots__ = (
        "_shared",
        "added",
        "cells",
        "indexes",
        "inline_bytes_max",
        "is_sorted",
        "primary",
        "session",
        "start",
        "tables",
        "weak_notifications",
        "writes",
    )

    def __init__(
        self,
        start: int,
        writes: Mapping[CellAddress, Write],
        inline_bytes_max: int,
        *,
        weak_notifications: Sequence[CellAddress] = (),
        tables: Mapping[str, TableInfo] = _NO_TABLES,
        kept: KeptIndexes | None = None,
    ) -> None:
        """The write set has at least one cell. `tables`: as they were when it was encoded, by name;
        there may be others among them. `kept`: what was added to the write set for indexes; None if
        no table has one."""
        self.start = start
        self.writes = writes
        self.cells = sorted(writes) if len(writes) > 1 else list(writes)
        self.is_sorted = True
        self.added: Set[CellAddress] = _NO_CELLS
        """The cells that were added for indexes. Another committer may know other indexes."""
        self.indexes = _NO_INDEXES
        """By table: the indexes of which the writes have the entries; none of a table that is
        missing."""
        if kept is not None:
            self.indexes, self.added = kept.indexes, kept.added
            if kept.added:
                least = min(cell for cell in self.cells if cell not in kept.added)
                self.is_sorted = least == self.cells[0]
                self.cells.remove(least)
                self.cells.insert(0, least)
        self.primary = self.cells[0]
        """The least cell that the program writes: a function of its writes, so that every committer
        of the transaction picks the same one, whatever indexes it knows."""
        self.session = b""
        """The session of the process that commits it. Set it before the first lock is built."""
        self._shared = b""
        self.inline_bytes_max = inline_bytes_max
        self.weak_notifications = weak_notifications
        """The cells whose weak observers the commit notifies."""
        self.tables = tables

    def is_entry(self, cell: CellAddress) -> bool:
        """True if the cell is an entry of an index."""
        return any(
            one.table_id == cell.table_id for found in self.indexes.values() for one in found
        )

    def fits_one_message(self, limits: Limits) -> bool:
        """True if the transaction is small enough to be one message, and in one table."""
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

    def one_round_commit(self, schema: TableSchema, *, is_followed: bool) -> OneRoundCommit:
        """The message that commits everything. Repeated, it is the same but for a newer schema's
        observers."""
        observers = schema.observers
        rows: list[bytes] = []
        columns: list[bytes] = []
        kinds: list[int] = []
        values: list[bytes] = []
        for cell in self.cells if self.is_sorted else sorted(self.cells):
            kind, value = self.writes[cell]
            if len(value) > self.inline_bytes_max:
                kind = KIND_PUT_IN_DATA
            _, row, column = cell
            rows.append(row)
            columns.append(column)
            kinds.append(kind)
            values.append(value)
        return OneRoundCommit(
            self.primary[0],
            schema.version,
            self.start,
            rows,
            columns,
            kinds,
            values,
            [(each, observers[each]) for each in dict.fromkeys(columns) if each in observers]
            if observers
            else (),
            _weak_notifications(self.weak_notifications, schema) if self.weak_notifications else (),
            is_followed,
        )

    def prewrite_step(
        self,
        cell: CellAddress,
        min_commit: int,
        ttl_milliseconds: int,
        schema_version: int = ANY_SCHEMA,
    ) -> CellMutation:
        """Under a version of the schema: a lock that is set by a client that does not know an index
        could still be committed without an entry."""
        kind, value = self.writes[cell]
        data = None
        if len(value) > self.inline_bytes_max:
            kind, value, data = KIND_PUT_IN_DATA, b"", value
        table_id, row, column = cell
        lock = self._lock(min_commit, ttl_milliseconds, kind, value)
        if data is None:
            return CellMutation(table_id, Prewrite(row, column, lock, self.start), schema_version)
        step = steps.prewrite(row, column, self.start, lock, data)
        return CellMutation(table_id, step, schema_version)

    def _lock(self, min_commit: int, ttl_milliseconds: int, kind: int, value: bytes) -> bytes:
        if not self._shared:  # what commits in one round needs no lock
            self._shared = shared_part(self.session, self.primary)
        header = LOCK_HEADER.pack(self.start, min_commit, ttl_milliseconds, kind)
        return b"".join((header, self._shared, value))

    def heartbeat_step(
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

    def commit_primary_step(
        self, schema: TableSchema, min_commit: int, commit_ts: int
    ) -> CellMutation:
        table_id, row, column = self.primary
        record, observers = self._record(self.primary, schema)
        step = CommitPrimary(row, column, record, self.start, commit_ts, min_commit, observers)
        return CellMutation(table_id, step, schema.version)

    def commit_secondary_step(
        self, cell: CellAddress, schema: TableSchema, commit_ts: int
    ) -> CellMutation:
        """Refused below the safe point: whoever rolls the cell forward has seen its lock."""
        table_id, row, column = cell
        record, observers = self._record(cell, schema)
        step = CommitSecondary(row, column, record, self.start, commit_ts, observers=observers)
        return CellMutation(table_id, step, schema.version)

    def roll_back_step(self, cell: CellAddress, *, not_below: int = 0) -> CellMutation:
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


class Prewrite(ListedStep):
    """Locks a cell, with a value that is short enough to travel in the lock."""

    __slots__ = ()

    kind = StepList.KIND_PREWRITE

    def mutation(self) -> Mutation:
        return steps.prewrite(self.row, self.column, self.start, self.value, None)


class CommitPrimary(ListedStep):
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


class CommitSecondary(ListedStep):
    """Rolls a cell forward, unless its history may have been collected."""

    __slots__ = ()

    kind = StepList.KIND_COMMIT_SECONDARY

    def mutation(self) -> Mutation:
        step = steps.commit_secondary(
            self.row, self.column, self.start, self.commit, self.value, self.observers
        )
        step.not_below = self.start
        return step


def _weak_notifications(
    cells: Sequence[CellAddress], schema: TableSchema
) -> list[tuple[bytes, bytes, tuple[bytes, ...]]]:
    observers = schema.weak_observers
    return [(row, column, observers[column]) for _, row, column in cells if column in observers]


# Refuses to commit what was encoded with a codec that its column no longer has, or without entries
# of an index that its table has by now.
#
# A change of either raises the version of the table's schema, and returns when all its tablets
# refuse prewrites and commits under the former one. Whoever is refused learns the new schema, and
# comes here. Without this, a transaction that has encoded its values before would commit them
# after, and programs would read them with the new codec, or miss them in the index.
#
# Cells that were locked before may still be committed. Who builds an index waits until these locks
# are gone (indexes.py). The parts of a shared transaction are not judged here: their primaries are
# in a table of Percolator's own, and become final with one group of mutations.


def require_same_schemas(write: WriteSteps, schema_of: Callable[[int], TableSchema | None]) -> None:
    """Raises `SchemaError` if a table has other codecs now, as far as this client knows, than when
    the transaction encoded its values; and `ConflictError` if it has other indexes than when their
    entries were added: run again, it adds those."""
    for info in write.tables.values():
        schema = schema_of(info.table_id)
        if schema is None:
            continue
        if info.codecs is not schema.codecs:
            put = {
                cell.column
                for cell, (kind, _) in write.writes.items()
                if cell.table_id == info.table_id and kind == KIND_PUT
            }
            info.codecs.require_unchanged(schema.codecs, put)
        kept = write.indexes.get(info.table_id, ())
        if schema.indexes is not kept and any(
            cell.table_id == info.table_id for cell in write.cells
        ):
            now = {one.table_id for one in schema.indexes}
            if now != {one.table_id for one in kept}:
                raise other_indexes(write.start, schema.codecs.table)


def other_indexes(start: int, table: str = "") -> ConflictError:
    """The indexes of a table were changed under a transaction. Run again, it knows them."""
    named = f"table {table!r}" if table else "a table"
    return ConflictError(
        f"the indexes of {named} were changed while the transaction was running; nothing was "
        "committed",
        start_timestamp=start,
    )


# Keeping long commits alive: the lock on the primary, and the heartbeats that raise it.
#
# A lock's time to live is short, so that a dead owner holds others up for seconds only. While its
# owner is alive and committing, the primary's time to live is raised every second; the time to live
# of the other locks does not matter. One timer serves all commits of a client, since most end
# before it fires.
#
# Readers push the least commit timestamp in that lock, each time a younger snapshot meets one of
# the transaction's locks. A replacement that fits only the lock as it was last seen comes too late
# if its way takes longer than the time between two pushes. On a busy cluster, every one would, and
# a transaction at work would be taken for dead. So what keeps it alive pushes it as well: it raises
# the least commit timestamp, whatever that is by then, unless it is as high already. After a
# refusal, the next replacement has a wider margin: pushes follow the oracle's clock, so it arrives
# above them once the margin is longer than its way.
#
# Attempts at shared transactions are kept alive like that, too (shared/participant.py). A commit
# raises its lock only if a reader was faster than a plain replacement.
#
# Rules, each with the failure that it prevents:
# - A replacement is never below what its process has sent before: the margin is kept until one was
#   applied. And once a process says that the attempt has finished, it sends nothing else. Otherwise
#   a beat that is late, or on its way at the same time, would say that the attempt is still at
#   work, and nobody but that attempt would keep the part alive.
# - The margin is no wider than it has to be, and zero without a refusal: the commit waits until the
#   oracle is above it.
# - A commit's lock that is above the oracle already is not raised: no reader pushes it, so another
#   committer has. Two of them would raise it ever higher, and neither could commit.
# - While an ordinary commit has a timestamp that no reader has passed, its heartbeats raise the
#   lock no higher than that. Otherwise each of them would make the commit in progress fail, and a
#   slow commit would never be applied.

ATTEMPTS_PER_BEAT_MAX = 4
"""A reader that pushes the lock makes a heartbeat fail. The next one has a wider margin."""
MARGIN_SECONDS_MAX = 5.0
_ORACLE_SECONDS = 0.5
"""How far the oracle may be above where it is believed to be: its answer took time, too."""


class Margin:
    """How far above the least commit timestamp that was seen the next replacement is."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._seconds = 0.0

    def above(self, min_commit: int) -> int:
        """The least commit timestamp to set, given the one that was seen."""
        return later(min_commit, self._seconds) + 1

    @property
    def is_needed(self) -> bool:
        """Readers were faster, and no replacement was applied since."""
        return self._seconds > 0.0

    def refused(self, took_seconds: float) -> None:
        """A reader was faster; the answer came after this time."""
        # A push is at most this much ahead of its time.
        ahead = self._limits.push_after_seconds
        self._seconds = min(ahead + 2 * (self._seconds + took_seconds), MARGIN_SECONDS_MAX)

    def applied(self) -> None:
        self._seconds = 0.0


def later(timestamp: int, seconds: float) -> int:
    """The timestamp that many seconds above."""
    return timestamp + (int(seconds * 1000) << SEQUENCE_BITS)


def seconds_until(timestamp: int, now: int) -> float:
    """How long it takes until the oracle, which is at `now`, has reached this timestamp."""
    if now >= timestamp:
        return 0.0
    return max((timestamp >> SEQUENCE_BITS) - (now >> SEQUENCE_BITS), 1) / 1000


class Heartbeat(NamedTuple):
    """A step that raises the time to live of a commit's lock, and the lock's fields after it."""

    step: CellMutation
    min_commit: int
    ttl: int
    is_for_lock: bool
    """The lock was known to be there when this was sent."""


class PrimaryLock:
    """The lock of one commit on its primary, as it is stored: not as it was sent.

    Heartbeats raise its time to live, and readers push its least commit timestamp. The commit
    succeeds only on the lock that was last seen.
    """

    __slots__ = (
        "_env",
        "_margin",
        "_min_commit_sent",
        "_started_seconds",
        "_write",
        "commit_ts",
        "is_awaited",
        "is_gone",
        "is_locked",
        "min_commit",
        "ttl",
    )

    def __init__(self, env: Environment, write: WriteSteps, started_seconds: float) -> None:
        """`started_seconds`: when the start timestamp was received, on the monotonic clock."""
        self._env = env
        self._write = write
        self._started_seconds = started_seconds
        self._margin = Margin(env.limits)
        self._min_commit_sent = 0
        """The highest one that a heartbeat has raised the lock to, or was to raise it to."""
        self.commit_ts = 0
        """The commit timestamp that was taken for it."""
        self.min_commit = write.start + 1
        """The least commit timestamp in the stored lock; readers raise it."""
        self.ttl = 0
        """The time to live in the stored lock, in milliseconds; heartbeats raise it."""
        self.is_locked = False
        self.is_awaited = False
        """A prewrite of the primary was sent, with others, and they are not all answered."""
        self.is_gone = False
        """A heartbeat found the lock gone."""

    def choose_ttl(self) -> None:
        """Sets the time to live of the next prewrite. Once the primary is locked, heartbeats do."""
        if not self.is_locked:
            self.ttl = self._ttl_from(self._env.now())

    def answered(self, *, is_locked: bool) -> None:
        """The prewrites that were sent with that of the primary have been answered."""
        self.is_awaited = False
        self.is_locked = self.is_locked or is_locked

    def _ttl_from(self, now: float) -> int:
        """A time to live counts from the start timestamp, so the time already elapsed is added."""
        elapsed = now - self._started_seconds
        seconds = elapsed + self._env.limits.lock_ttl_seconds
        return min(int(seconds * 1000), TTL_MILLISECONDS_MAX)

    def learn(self, answer: Refused) -> None:
        """Takes over both numbers of our lock as it is stored: there, they only grow."""
        _, min_commit, ttl, _ = LOCK_HEADER.unpack_from(answer.offender.value)
        self.min_commit = max(self.min_commit, min_commit)  # answers may overtake each other
        # Until the primary is known to be locked, our `ttl` is what the last attempt would have
        # set. If we kept it, and an earlier attempt had set another, every heartbeat would fail.
        self.ttl = max(self.ttl, ttl) if self.is_locked else ttl

    def is_ours(self, answer: Refused) -> bool:
        """True if the lock that was found is that of this transaction."""
        cell = answer.cell
        return cell is not None and cell.value.startswith(timestamp_bytes(self._write.start))

    def wants_heartbeat(self, now: float) -> bool:
        """True if the primary is locked, or may be, and a good part of its time to live has passed.

        It may be while another tablet, which has failed perhaps, has not answered for its cells.
        """
        limits = self._env.limits
        set_at = self._started_seconds + self.ttl / 1000 - limits.lock_ttl_seconds
        is_due = now >= set_at + limits.heartbeat_seconds / 2
        return is_due and (self.is_locked or self.is_awaited) and not self.is_gone

    def heartbeat(self) -> Heartbeat:
        """The step that raises the time to live."""
        now = self._env.now()
        ttl = max(self.ttl, self._ttl_from(now))
        min_commit = self._next_min_commit(later(self._write.start, now - self._started_seconds))
        step = self._write.heartbeat_step(self.min_commit, self.ttl, min_commit, ttl)
        return Heartbeat(step, min_commit, ttl, self.is_locked)

    def _next_min_commit(self, oracle: int) -> int:
        """The least commit timestamp that the next heartbeat sets: that of the stored lock, unless
        it has to be raised. `oracle`: about where the oracle is."""
        seen = min_commit = self.min_commit
        if self._margin.is_needed and seen <= later(oracle, _ORACLE_SECONDS):
            min_commit = self.commit_ts if self.commit_ts >= seen else self._margin.above(seen)
        # One that was sent and not answered may still arrive.
        min_commit = max(min_commit, self._min_commit_sent)
        if min_commit > seen:
            self._min_commit_sent = min_commit
        return min_commit

    def after_heartbeat(self, beat: Heartbeat, answer: Answer, took_seconds: float) -> bool:
        """Returns True if the lock had changed, so that another heartbeat should follow at once."""
        if answer is APPLIED:
            self.min_commit = max(self.min_commit, beat.min_commit)
            self.ttl = max(self.ttl, beat.ttl)
            self.is_locked = True
            self._margin.applied()
        elif isinstance(answer, Refused):
            if self.is_ours(answer):
                self._margin.refused(took_seconds)
                self.learn(answer)
                self.is_locked = True
                return True
            # Otherwise it may have overtaken the prewrite, which may have been answered since.
            self.is_gone = self.is_gone or beat.is_for_lock
        return False


class Heartbeats:
    """The locks of the commits in progress that take two phases."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._locks: dict[PrimaryLock, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, lock: PrimaryLock) -> None:
        self._locks[lock] = None
        if self._timer is None:
            self._wait()

    def discard(self, lock: PrimaryLock) -> None:
        self._locks.pop(lock, None)

    def close(self) -> None:
        self._locks.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._env.limits.heartbeat_seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._locks:
            self._env.background.start(self._beat())
            self._wait()

    async def _beat(self) -> None:
        env, limits = self._env, self._env.limits
        now = env.now()
        due = [lock for lock in self._locks if lock.wants_heartbeat(now)]
        # The next beat repeats one that gets no answer: there are two in each time to live.
        deadline = now + limits.heartbeat_seconds
        for _ in range(ATTEMPTS_PER_BEAT_MAX):
            if not due:
                return
            beats = [lock.heartbeat() for lock in due]
            began = env.now()
            answers = await env.cells.mutate([beat.step for beat in beats], deadline)
            took = env.now() - began
            # A refused heartbeat is sent again at once. If it waited for the next beat, one reader
            # a second, each pushing the lock, would be enough to let a live owner's lock expire.
            due = [
                lock
                for lock, beat, answer in zip(due, beats, answers, strict=True)
                if lock.after_heartbeat(beat, answer, took) and lock in self._locks
            ]
