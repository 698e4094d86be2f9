"""One tablet: a contiguous range of rows over one `Storage`.

A tablet belongs to one event loop: open it, serve, close it; it is never opened again once closed.
Everything here may be called concurrently. What it guarantees, and where:

* mutations: judged, durable, ownership checked, and only then answered (group_commit.py);
* reads see nothing that is not durable, and everything committed at or below their timestamp,
  unless they report a lock in the way (cells.py); they wait for no write but that of a
  transaction that commits in one round;
* changes of the schema, safe points, collection and loads write between two batches (upkeep.py);
* no response is sent after ownership was lost, and none below the safe point (state.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Container, Sequence
from contextlib import aclosing, suppress
from itertools import islice
from typing import Any, TypeVar

from percolator.errors import InvalidArgument, InvariantViolation, NotExecuted, PercolatorError
from percolator.formats.records import (
    KIND_DELETE,
    KIND_LOCK_ONLY,
    KIND_PUT,
    WRITE_HEADER_BYTES,
    WRITE_KIND_OFFSET,
    last_change,
    observed_column,
    too_old,
)
from percolator.tablet import change_scan, collection, opening, scans
from percolator.tablet.cells import (
    TIMESTAMP_MAX,
    ColumnEncoder,
    Holder,
    W,
    after_component,
    component,
    inverted,
    timestamp_of,
)
from percolator.tablet.collection import newest_acknowledged
from percolator.tablet.group_commit import GroupCommit, MutationWork
from percolator.tablet.notification_scan import LockVanished, NotificationLook
from percolator.tablet.notification_watch import NotificationWatch
from percolator.tablet.requests import (
    CheckedMutation,
    MutationChecker,
    OneRoundTransaction,
    StepChecker,
    TransactionChecker,
    answer_of,
)
from percolator.tablet.rolling_forward import RollingForward
from percolator.tablet.scans import ScanPlan, parts, propose
from percolator.tablet.state import (
    FOREVER,
    Collected,
    Commits,
    CommitTimestamps,
    Lifetimes,
    Ownership,
    SafePoints,
    TabletIdentity,
    TabletLimits,
    TabletState,
    TimestampGuard,
    Ttls,
    UnheardTimestamp,
    closed,
    too_long,
)
from percolator.tablet.upkeep import Upkeep, require_different_cells
from percolator.tablet.visible_cells import (
    LockReader,
    VisibleCells,
    Walked,
    chosen_columns,
    lock_cell,
    value_in_data,
)
from percolator.timestamps import NEWEST
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import to_detail
from percolator.world import Clock, Cursor, Storage


class CellRead:
    """A read of one cell, which stands for a `RowRead` of one column. Plain attributes: reading a
    field of a message takes longer."""

    __slots__ = ("columns", "row", "timestamp")

    all_columns = False
    column_prefixes = ()
    report_deletes = False
    passing = ()
    acknowledgement = b""

    def __init__(self, row: bytes, column: bytes, timestamp: int) -> None:
        self.row = row
        self.columns = (column,)
        self.timestamp = timestamp


AskedRead = pb.RowRead | CellRead


def asked_reads(batch: pb.ReadBatch) -> Sequence[AskedRead]:
    """The reads of a batch: rows first, then single cells. Raises `InvalidArgument`."""
    if not batch.HasField("cells"):
        return batch.reads
    cells = batch.cells
    rows, columns, timestamps = cells.rows, cells.columns, cells.timestamps
    if not len(rows) == len(columns) == len(timestamps):
        raise InvalidArgument("cells", "rows, columns and timestamps differ in number")
    return [*batch.reads, *map(CellRead, rows, columns, timestamps)]


_Wanted = tuple[int, bytes, bytes, bytes]
"""Index of the read, column, the cell's key in W without its timestamp, and the inverted timestamp
to look at: that of the read, or an older one if the cell is known not to have changed since."""


_FULL = NotExecuted("the response is full; request the rest again")


class AnswerBudget:
    """Bytes that the batches of one call share: each for itself, batches to a hundred tablets would
    make an answer of hundreds of MiB."""

    __slots__ = ("taken_bytes", "walking")

    def __init__(self) -> None:
        self.taken_bytes = 0
        self.walking = asyncio.Lock()
        """Held while one of them walks over a row, in slices: how much that takes is not known
        before, so all of them at once would fit."""


class PointReads:
    """One batch of reads of rows, each at its own timestamp, and its answer.

    First a slice waits until no commit in one round is about to write its cells. Then the mirror is
    asked for locks in the way, then one cursor is created, then every cell costs one seek (cells.py
    says why in this order). A cell costs a second seek if lock-only records are above its newest
    change and memory does not know where that change is. A slice of the batch runs without yielding
    to the event loop, unless it has to step over many records; the next slice creates its own
    cursor.
    """

    def __init__(
        self,
        state: TabletState,
        reads: Sequence[AskedRead],
        columns: ColumnEncoder,
        budget: AnswerBudget,
    ) -> None:
        self._state = state
        self._asked = reads
        self._encoded = columns
        self._result = pb.ReadBatchResult()
        self._oldest = TIMESTAMP_MAX
        self._reads: list[int] = []
        self._columns: list[bytes] = []
        self._commits: list[int] = []
        self._values: list[bytes] = []
        self._deletes: list[int] = []
        self._bytes = 0
        self._budget = budget
        self._taken = 0
        """How many of them are known to the other batches of the call."""
        self._bytes_max = state.limits.answer_bytes_max
        """Bytes that the other batches leave of the answer. Below 0 if they have exceeded it."""
        self._admitted = -1
        """The index of the last read that fitted: it is answered completely."""
        self._began = 0
        """The size of the answer before that read."""
        self._skipped = 0
        self._published = 0
        """How many commits had been published when the cursor was created."""
        self._lifetimes = state.lifetimes
        """As of the cursor in use."""
        self._refused: dict[int, PercolatorError] = {}
        self._chosen: dict[int, Container[bytes] | None] = {}
        """Columns of each read that walks over its whole row."""

    async def answer(self) -> pb.ReadBatchResult:
        """Raises `InvalidArgument`."""
        asked, slice_rows = self._asked, self._state.limits.slice_rows
        for first in range(0, len(asked), slice_rows):
            if first:
                await asyncio.sleep(0)
                self._state.require_open()
            stop = min(first + slice_rows, len(asked))
            await self._held_cells_let_go(first, stop)
            self._share_budget()
            whole_rows = await self._answer_cells(first, stop)
            self._share_budget()
            for index in whole_rows:
                async with self._budget.walking:
                    self._state.require_open()
                    await self._answer_row(index, asked[index])
                    self._share_budget()
        # Check after reading, since versions may have been collected while the batch was read.
        if self._oldest < self._state.safe_points.reads:
            self._refuse_too_old()
        if self._refused:
            self._drop_refused()
        for index, error in self._refused.items():
            self._result.refused.add(read=index, error=to_detail(error))
        found = self._result.found
        found.reads.extend(self._reads)
        found.columns.extend(self._columns)
        found.commit_timestamps.extend(self._commits)
        found.values.extend(self._values)
        found.deletes.extend(self._deletes)
        counters = self._state.counters
        counters.reads += len(asked)
        counters.read_rate.add(len(asked))
        counters.versions_skipped += self._skipped
        return self._result

    def give_up(self) -> None:
        """Gives back the budget of an answer that is not sent."""
        self._bytes = 0
        self._share_budget()

    def _share_budget(self) -> None:
        self._budget.taken_bytes += self._bytes - self._taken
        self._taken = self._bytes
        others = self._budget.taken_bytes - self._taken
        self._bytes_max = self._state.limits.answer_bytes_max - others

    async def _held_cells_let_go(self, first: int, stop: int) -> None:
        """Returns when no commit in the way of these reads is about to land. There must be no await
        between this and the look at mirror and storage."""
        held = self._state.held_cells
        if held.holders:
            await held.let_pass(lambda: self._in_the_way(first, stop))
            self._state.require_open()

    def _in_the_way(self, first: int, stop: int) -> list[Holder]:
        held, encoded = self._state.held_cells, self._encoded
        found: dict[Holder, None] = {}
        for read in islice(self._asked, first, stop):
            row, timestamp = read.row, read.timestamp
            if read.all_columns or read.column_prefixes:
                found |= dict.fromkeys(held.in_the_way_in_rows(row, row + b"\0", timestamp))
                continue
            prefix = component(row)
            for column in read.columns:
                holder = held.in_the_way(prefix + encoded[column], timestamp)
                if holder is not None:
                    found[holder] = None
        return list(found)

    async def _answer_cells(self, first: int, stop: int) -> list[int]:
        """Answers a slice, except for reads that walk over a whole row; returns their indexes."""
        identity, guard = self._state.identity, self._state.guard
        start, end = identity.start, identity.end
        headers, encoded = self._state.mirror.headers, self._encoded
        last_changes = self._state.last_changes.inverted
        fences = self._state.load_fences
        self._lifetimes = self._state.lifetimes
        lifetimes = self._lifetimes or None  # a test of None is no call
        columns_max = self._state.limits.columns_max
        known, known_inverted = 0, b""
        wanted: list[_Wanted] = []
        whole_rows: list[int] = []
        for index, read in enumerate(islice(self._asked, first, stop), first):
            row, timestamp = read.row, read.timestamp
            if row < start or (end and row >= end):
                raise InvalidArgument(f"reads[{index}].row", "not in this tablet")
            if timestamp != known or not timestamp:
                if timestamp != NEWEST:
                    guard.check_read(timestamp, "reads[%d].timestamp", index)
                known, known_inverted = timestamp, inverted(timestamp)
                if timestamp < self._oldest:
                    self._oldest = timestamp
            if read.acknowledgement:
                self._require_acknowledgement(index, read)
            fence = fences.over(row) if fences else None
            if fence is not None:
                self._refused[index] = closed(fence)
                continue
            columns = read.columns
            if len(columns) > columns_max:
                raise InvalidArgument(
                    f"reads[{index}].columns",
                    f"{len(columns)} entries, at most {columns_max} allowed",
                )
            if lifetimes and timestamp == NEWEST and self._may_expire(read):
                self._refused[index] = InvalidArgument(
                    f"reads[{index}].timestamp",
                    "values of the column expire, and only a timestamp decides which have",
                )
                continue
            if read.all_columns or read.column_prefixes:
                field, limits = f"reads[{index}].", self._state.limits
                self._chosen[index] = chosen_columns(field, read, encoded, limits)
                whole_rows.append(index)
                continue
            row_prefix = component(row)
            for column in columns:
                cell = row_prefix + encoded[column]
                if cell in headers:
                    record = self._locks(read).on_cell(cell)
                    if record is not None:
                        if self._fits(index):
                            self._report(index, row, column, record)
                        continue
                look_at = known_inverted
                if last_changes and cell in last_changes:
                    # Inverted timestamps: the greater one is the older one.
                    look_at = max(look_at, last_changes[cell])
                wanted.append((index, column, W + cell, look_at))
        if wanted:
            cursor = self._state.storage.cursor()
            try:
                self._published = self._state.last_changes.published
                await self._read_cells(cursor, wanted)
            finally:
                cursor.close()
            if self._bytes > self._bytes_max and self._admitted >= 0:
                # Its last cell has not been counted yet: it may be as large as a value can be.
                self._fits(self._admitted)
        return whole_rows

    async def _read_cells(self, cursor: Cursor, wanted: list[_Wanted]) -> None:
        seek, item = cursor.seek, cursor.item
        lifetimes, asked = self._lifetimes or None, self._asked
        reads, columns, commits, values = self._reads, self._columns, self._commits, self._values
        size, size_max = self._bytes, self._bytes_max
        current, began = self._admitted, self._began
        for index, column, prefix, suffix in wanted:
            if size > size_max:
                self._bytes, self._admitted, self._began = size, current, began
                if not self._fits(index):
                    continue
            elif index != current:
                # As `_fits` does, without the call.
                current, began = index, size
            seek(prefix + suffix)
            key, value = item()
            if not key.startswith(prefix):
                continue
            kind = value[WRITE_KIND_OFFSET]
            if kind == KIND_LOCK_ONLY:
                key, value = await self._under_locks(cursor, prefix, asked[index].timestamp)
                if not key:
                    continue
                kind = value[WRITE_KIND_OFFSET]
            if lifetimes and lifetimes.hides(column, timestamp_of(key), asked[index].timestamp):
                kind = KIND_DELETE
            if kind == KIND_PUT:
                values.append(value[WRITE_HEADER_BYTES:])
            elif kind == KIND_DELETE:
                if not asked[index].report_deletes:
                    continue
                self._deletes.append(len(values))
                values.append(b"")
            else:
                try:
                    apart = value_in_data(self._state.storage.get, prefix[1:], value)
                except InvariantViolation:
                    if not self._is_gone(index):
                        raise
                    continue
                values.append(apart)
                size += len(apart)
            size += len(value) + len(column)
            reads.append(index)
            columns.append(column)
            commits.append(int.from_bytes(key[-8:], "big") ^ TIMESTAMP_MAX)
        self._bytes, self._admitted, self._began = size, current, began

    async def _under_locks(
        self, cursor: Cursor, prefix: bytes, timestamp: int
    ) -> tuple[bytes, bytes]:
        """The newest put or deletion below the lock-only record at the cursor; empty if there is
        none."""
        state = self._state
        key, record = cursor.item()
        while key.startswith(prefix) and record[WRITE_KIND_OFFSET] == KIND_LOCK_ONLY:
            self._skipped += 1
            named = last_change(record)
            if named is None:
                cursor.next()
                if self._skipped % state.limits.slice_entries == 0:
                    # The cursor keeps its view, and the mirror was asked before, so this is safe.
                    await asyncio.sleep(0)
                    state.require_open()
            else:
                cursor.seek(prefix + inverted(named))
            key, record = cursor.item()
        found = key.startswith(prefix)
        is_newest = state.recent.bound(prefix[1:]) <= timestamp
        if is_newest and state.last_changes.published == self._published:
            state.last_changes.learn(prefix[1:], timestamp_of(key) if found else 0)
        return (key, record) if found else (b"", b"")

    def _fits(self, index: int) -> bool:
        """True if this read may add more to the answer. Refuses the read if not."""
        limits, size = self._state.limits, self._bytes
        if index != self._admitted:
            if size > self._bytes_max:
                self._refused.setdefault(index, _FULL)
                return False
            self._admitted, self._began = index, size
        others = self._budget.taken_bytes - self._taken + self._began
        if others + size - self._began > limits.read_bytes_max:
            self._refused[index] = (
                _FULL
                if others
                else InvalidArgument(
                    f"reads[{index}]",
                    f"its answer exceeds {limits.read_bytes_max} bytes; read fewer columns",
                )
            )
            return False
        return True

    async def _answer_row(self, index: int, read: AskedRead) -> None:
        """Reads the chosen columns of a row, in slices."""
        await self._held_cells_let_go(index, index + 1)
        fence = self._state.load_fences.over(read.row)
        if fence is not None:  # raised since the rest of its slice was answered
            self._refused[index] = closed(fence)
            return
        self._share_budget()
        if not self._fits(index):
            return
        row, slice_entries = read.row, self._state.limits.slice_entries
        wanted = self._chosen[index]
        locks = self._locks(read).in_rows(
            row, row + b"\0", wanted=wanted, rows_max=1, looked_at_max=1, bytes_max=1
        )
        for _, column, record in locks.records:
            self._report(index, row, column, record)
        storage, before = self._state.storage, self._bytes
        cursor = storage.cursor()
        self._lifetimes = self._state.lifetimes
        try:
            cells = VisibleCells(
                cursor,
                storage.get,
                read.timestamp,
                wanted=wanted,
                hidden=locks.cells,
                report_deletes=read.report_deletes,
                lifetimes=self._lifetimes,
            )
            start = W + component(row)
            cells.seek(start)
            while cells.walk(after_component(start), slice_entries) is not Walked.TO_THE_END:
                self._bytes = before + cells.bytes
                if not self._fits(index):
                    self._bytes = before
                    return
                await asyncio.sleep(0)
                self._state.require_open()
            self._bytes = before + cells.bytes
            if not self._fits(index):
                self._bytes = before
                return
        except InvariantViolation:
            if not self._is_gone(index):
                raise
            self._bytes = before
            return
        finally:
            cursor.close()
        offset = len(self._values)
        self._reads.extend([index] * len(cells.values))
        self._columns.extend(cells.columns)
        self._commits.extend(cells.commit_timestamps)
        self._values.extend(cells.values)
        self._deletes.extend(offset + at for at in cells.deletes)
        self._skipped += cells.skipped

    def _may_expire(self, read: AskedRead) -> bool:
        """True if the read may find values that expire."""
        if read.all_columns or read.column_prefixes:
            return True
        return any(column in self._lifetimes.by_column for column in read.columns)

    def _locks(self, read: AskedRead) -> LockReader:
        passed = frozenset(read.passing)
        return LockReader(self._state.storage, self._state.mirror, read.timestamp, passed)

    def _report(self, index: int, row: bytes, column: bytes, record: bytes) -> None:
        lock = lock_cell(row, column, record, self._lifetimes)
        self._result.locks.add(read=index, lock=lock)
        self._bytes += len(record)

    def _is_gone(self, index: int) -> bool:
        """True if what this read has not found may have been collected since its cursor was
        created: values that lie apart are read as they are now. It is refused at the end. Raises
        `SchemaChanged` if it may have expired under times to live that are newer than the cursor.
        """
        if self._asked[index].timestamp < self._state.safe_points.reads:
            return True
        self._state.require_lifetimes(self._lifetimes)
        return False

    def _refuse_too_old(self) -> None:
        safe_point = self._state.safe_points.reads
        for index, read in enumerate(self._asked):
            if read.timestamp < safe_point and not self._was_last_seen(read):
                self._refused[index] = too_old(read.timestamp, safe_point)

    def _was_last_seen(self, read: AskedRead) -> bool:
        """True if collection has left what this read sees, because it is what the last run of an
        observer has seen. Asked after reading: if there was another run meanwhile, it may not."""
        if not read.acknowledgement:
            return False
        hidden = component(read.row) + component(read.acknowledgement)
        return newest_acknowledged(self._state.storage, hidden) == read.timestamp

    def _require_acknowledgement(self, index: int, read: AskedRead) -> None:
        observed = observed_column(read.acknowledgement)
        if read.all_columns or read.column_prefixes or [*read.columns] != [observed]:
            raise InvalidArgument(
                f"reads[{index}].acknowledgement",
                "expected the acknowledgement of the one column that is read",
            )

    def _drop_refused(self) -> None:
        """Removes what was found for reads before they were refused."""
        kept = [at for at, index in enumerate(self._reads) if index not in self._refused]
        deleted = set(self._deletes)
        self._deletes = [new for new, at in enumerate(kept) if at in deleted]
        self._reads = [self._reads[at] for at in kept]
        self._columns = [self._columns[at] for at in kept]
        self._commits = [self._commits[at] for at in kept]
        self._values = [self._values[at] for at in kept]


# Reports of a tablet about itself.


def statistics(state: TabletState, queue_bytes: int) -> pb.TabletStatistics:
    counters, turns = state.counters, state.turns
    return pb.TabletStatistics(
        cells=max(0, counters.cells - counters.foreign_cells),
        bytes=max(0, counters.bytes - counters.foreign_bytes),
        locks=len(state.mirror),
        notifications=len(state.index),
        mutations_applied=counters.mutations_applied,
        mutations_refused=counters.mutations_refused,
        reads=counters.reads,
        rows_scanned=counters.rows_scanned,
        versions_skipped=counters.versions_skipped,
        batches_synced=counters.batches_synced,
        mutations_per_second=counters.mutation_rate.per_second(),
        reads_per_second=counters.read_rate.per_second(),
        queue_bytes=queue_bytes,
        notifications_written=counters.notifications_written,
        locks_written=counters.locks_written,
        turn_cells=len(turns.queues),
        turns_waiting=turns.waiting,
        turns_granted=turns.granted,
        turns_given_up=turns.given_up,
        turns_timed_out=turns.timed_out,
    )


def describe(state: TabletState, queue_bytes: int) -> pb.TabletDescription:
    identity = state.identity
    return pb.TabletDescription(
        table_id=identity.table_id,
        tablet_id=identity.tablet_id,
        epoch=identity.epoch,
        schema_version=state.schema_version,
        range=cells_pb2.RowRange(start=identity.start, end=identity.end),
        statistics=statistics(state, queue_bytes),
    )


T = TypeVar("T")


class Tablet:
    """One range of rows, with the guarantees that the module's docstring names."""

    def __init__(
        self,
        identity: TabletIdentity,
        *,
        schema_version: int,
        storage: Storage[Any],
        clock: Clock,
        ownership: Ownership,
        on_closed: Callable[[PercolatorError], None],
        guard: TimestampGuard,
        limits: TabletLimits = TabletLimits(),  # noqa: B008 - frozen
        watch: NotificationWatch | None = None,
        timestamps: CommitTimestamps | None = None,
        commits: Commits | None = None,
        notifications_written: int = 0,
        change_feed: bool = False,
        ttls: Ttls = (),
    ) -> None:
        """`ownership` is checked after each batch and each read, before any response is sent.
        `on_closed` is called once, on the event loop, when the tablet stops serving by itself: with
        `StoreUnusable` after a failed write (close this object, then open a new storage and a new
        tablet), with `TabletMoved` after a failed owner check (close only). `guard` is shared by
        all tablets of a server. `watch` receives notifications. `timestamps` asks the oracle for
        commit timestamps; without it, no transaction commits in one round. `commits` asks
        primaries; without it, `roll_forward` does nothing.
        `notifications_written` is the counter's initial value: within an epoch it must never
        shrink. `change_feed` says whether the table has a change feed under this version of its
        schema, and `ttls` which values expire.
        """
        self._state = TabletState(
            identity,
            schema_version=schema_version,
            storage=storage,
            clock=clock,
            ownership=ownership,
            on_closed=on_closed,
            limits=limits,
            guard=guard,
            timestamps=timestamps,
            commits=commits,
            lifetimes=Lifetimes(ttls) if ttls else FOREVER,
        )
        self._state.watch = watch
        self._state.counters.notifications_written = notifications_written
        self._columns = ColumnEncoder()
        self._checker = MutationChecker(self._state, self._columns)
        self._steps = StepChecker(self._state, self._columns)
        self._transactions = TransactionChecker(self._state, self._columns)
        self._commit = GroupCommit(self._state)
        self._upkeep = Upkeep(self._state, self._commit, self._columns, change_feed=change_feed)
        self._rolling = RollingForward(self._state, self._commit, self._columns)

    @property
    def identity(self) -> TabletIdentity:
        return self._state.identity

    @property
    def schema_version(self) -> int:
        return self._state.schema_version

    @property
    def safe_points(self) -> SafePoints:
        """Reads and mutations below them are refused."""
        return self._state.safe_points

    @property
    def collected(self) -> Collected:
        """The last complete pass of collection since the tablet was opened."""
        return self._state.collected

    @property
    def cells_collected(self) -> int:
        return self._state.counters.cells_collected

    @property
    def bytes_collected(self) -> int:
        return self._state.counters.bytes_collected

    async def open(self) -> None:
        """Rebuilds the lock mirror and the notification index. Call once, before anything else.

        Raises `StoreUnusable` (damaged, failing, or of another format).
        """
        try:
            await opening.load(self._state)
            await self._upkeep.switch_feed()
        except self._state.storage.failures as error:
            raise self._state.storage_failed(error) from error

    async def close(self) -> None:
        """Lets the batch under way finish, answers what waits as not executed, saves the
        statistics and closes the storage. May be called again; after a failure, too.

        Raises `StoreUnusable` when the storage cannot be closed cleanly: it is closed anyway.
        """
        await self._rolling.close()
        await self._upkeep.close()

    async def set_schema_version(
        self, schema_version: int, *, change_feed: bool = False, ttls: Ttls = ()
    ) -> None:
        """Judges under this version from now on: see `Upkeep`, as for the methods that follow."""
        await self._upkeep.set_schema_version(schema_version, change_feed=change_feed, ttls=ttls)

    async def raise_safe_points(self, asked: SafePoints) -> None:
        await self._upkeep.raise_safe_points(asked)

    async def collect(self, below: int, ended_below: int = 0) -> Collected:
        return await self._upkeep.collect(below, ended_below)

    @property
    def needs_trimming(self) -> bool:
        """True if cells of other tablets' rows may be stored here, for example after a split."""
        return collection.is_due(self._state)

    async def trim(self) -> int:
        return await self._upkeep.trim()

    async def fence(self, request: pb.FenceRequest) -> pb.FenceResponse:
        return await self._upkeep.fence(request)

    async def load(self, request: pb.LoadRequest) -> pb.LoadResponse:
        return await self._upkeep.load(request)

    async def mutate(
        self, batch: pb.MutationBatch, *, deadline_seconds: float
    ) -> pb.MutationBatchResult:
        """Applies a batch; `deadline_seconds` is on the clock's monotonic time.

        Once queued, each mutation has its own outcome (NOT_EXECUTED and UNKNOWN with their
        `error`), and nothing is raised.
        Before that, the whole batch is refused, nothing executed: `InvalidArgument` (field paths
        begin at the batch: "mutations[3].row"), `Overloaded`, `NotReady` (the oracle has to be
        asked about a timestamp, and does not answer), `StoreUnusable`, `TabletMoved`,
        `SchemaChanged`.
        """
        mutations, weight = await self._state.guard.checked(lambda: self._checked(batch))
        work = MutationWork(mutations, weight, batch.target.schema_version, deadline_seconds)
        return answer_of(await self._commit.execute(work))

    def _checked(self, batch: pb.MutationBatch) -> tuple[list[CheckedMutation], int]:
        self._state.require_target(batch.target)
        self._commit.require_capacity(0)
        if not batch.mutations:  # as in nearly all batches
            mutations, weight = self._steps.check(batch.steps)
        else:
            mutations, weight = self._checker.check(batch)
            if batch.HasField("steps"):
                steps, weight_of_steps = self._steps.check(batch.steps)
                mutations += steps
                weight += weight_of_steps
        if not mutations:
            raise InvalidArgument("mutations", "none")
        return mutations, weight

    async def mutate_together(
        self, batch: pb.MutationBatch, *, deadline_seconds: float
    ) -> pb.MutateTogetherResponse:
        """Applies all mutations of the batch atomically, or none. Raises what `mutate` does when
        nothing was executed, and `ExecutionUnknown` when it may have been."""
        if batch.HasField("steps"):
            raise InvalidArgument("batch.steps", "a group has mutations")
        mutations, _ = await self._state.guard.checked(lambda: self._checked(batch))
        require_different_cells(mutations)
        results = await self._upkeep.apply_together(
            mutations, batch.target.schema_version, deadline_seconds
        )
        return pb.MutateTogetherResponse(results=results)

    async def roll_forward(self, request: pb.RollForwardRequest) -> pb.RollForwardResponse:
        """Rolls the locks of committed transactions forward, in the background. Raises what
        `mutate` does when it takes nothing, except `Overloaded`."""
        await self._state.guard.checked(lambda: self._rolling.take(request))
        if request.await_cells:
            await self._rolling.get_ahead(request.await_cells)
        return pb.RollForwardResponse()

    async def commit(
        self, batch: pb.TransactionBatch, *, deadline_seconds: float
    ) -> pb.TransactionBatchResult:
        """Commits transactions in one round; means and raises what `mutate` does."""
        transactions = await self._state.guard.checked(
            lambda: self._checked_transactions(batch, deadline_seconds)
        )
        return await self._commit.commit(transactions)

    def _checked_transactions(
        self, batch: pb.TransactionBatch, deadline_seconds: float
    ) -> list[OneRoundTransaction]:
        self._state.require_target(batch.target)
        self._commit.require_capacity(0)
        return self._transactions.check(batch, deadline_seconds)

    async def read(
        self, batch: pb.ReadBatch, budget: AnswerBudget | None = None
    ) -> pb.ReadBatchResult:
        """Raises `InvalidArgument` ("reads[3].row"), `NotReady` (as `mutate` does), `TabletMoved`,
        `SchemaChanged` or `StoreUnusable`; then nothing of the batch is answered. `budget` is what
        it shares with other batches of its call."""
        state, budget = self._state, budget or AnswerBudget()
        asked = asked_reads(batch)
        while True:
            state.require_target(batch.target)
            reads = PointReads(state, asked, self._columns, budget)
            try:
                result = await reads.answer()
            except UnheardTimestamp as unheard:
                reads.give_up()
                await state.guard.settle(unheard)
            except state.storage.failures as error:
                raise state.unreadable(error) from error
            else:
                await state.require_ownership()
                result.reads = len(asked)
                return result

    async def await_turn(
        self, request: pb.AwaitTurnRequest, *, deadline_seconds: float
    ) -> pb.AwaitTurnResponse:
        """Waits for a turn at a cell, and reads the cell then: see turns.py. Raises what `read`
        does, and `Overloaded`; a turn that has not come in time is no error."""
        state = self._state
        state.require_tablet(request.target)
        if not request.place:
            raise InvalidArgument("place", "missing")
        cell = self._turns_cell(request.row, request.column)
        turn = state.turns.join(
            cell, request.place, request.start_timestamp, request.hold_milliseconds / 1000
        )
        try:
            if not turn.came.done():
                left = deadline_seconds - state.clock.monotonic_seconds()
                # Not the future itself: a copy of this call may wait for it, too.
                await asyncio.wait((turn.came,), timeout=left)
                state.require_open()
            if not turn.came.done() or turn.came.cancelled():  # by `end_turn`
                state.turns.leave(cell, turn)
                return pb.AwaitTurnResponse(contended=True)
            start = request.start_timestamp or turn.take_start() or await self._new_start()
            contended = state.turns.answered(cell, turn, start)
        except BaseException:
            state.turns.leave(cell, turn)
            raise
        response = pb.AwaitTurnResponse(in_turn=True, contended=contended)
        if not request.start_timestamp:
            response.start_timestamp = start
        if start and request.target.schema_version == state.schema_version:
            read = pb.RowRead(
                row=request.row,
                columns=(request.column,),
                timestamp=NEWEST if request.start_timestamp else start,
                report_deletes=True,
            )
            with suppress(PercolatorError):  # the transaction reads the cell, and is told
                batch = pb.ReadBatch(target=request.target, reads=(read,))
                response.found.CopyFrom(await self.read(batch))
        return response

    async def _new_start(self) -> int:
        """A start timestamp from the oracle; 0 if it gives none."""
        state = self._state
        if state.timestamps is None:
            return 0
        try:
            start = await state.timestamps(1)
        except PercolatorError:  # the client asks it, and is told
            return 0
        state.guard.heard(start)
        return start

    def end_turn(self, request: pb.EndTurnRequest) -> pb.EndTurnResponse:
        """Ends a turn, or gives up a place. Raises `TabletMoved` and `InvalidArgument`."""
        self._state.require_tablet(request.target)
        self._state.turns.end(self._turns_cell(request.row, request.column), request.place)
        return pb.EndTurnResponse()

    def _turns_cell(self, row: bytes, column: bytes) -> bytes:
        """The cell of a queue: one of this tablet, with a row and a column that it would store."""
        identity, limits = self._state.identity, self._state.limits
        if row < identity.start or (identity.end and row >= identity.end):
            raise InvalidArgument("row", "not in this tablet")
        if len(row) > limits.row_bytes_max:
            raise InvalidArgument("row", too_long(row, limits.row_bytes_max))
        if len(column) > limits.column_bytes_max:
            raise InvalidArgument("column", too_long(column, limits.column_bytes_max))
        return component(row) + self._columns[column]

    async def scan(self, request: pb.ScanRequest) -> AsyncGenerator[pb.ScanResponse, None]:
        """Pages; raises like `read`, and `SnapshotTooOld`, possibly after some pages."""
        state = self._state
        plan = await state.guard.checked(lambda: self._planned(request))
        try:
            async with aclosing(scans.pages(state, request, plan)) as pages:
                async for page in pages:
                    yield page
        except state.storage.failures as error:
            raise state.unreadable(error) from error

    def _planned(self, request: pb.ScanRequest) -> ScanPlan:
        self._state.require_target(request.target)
        return scans.plan_scan(self._state, request, self._columns)

    async def scan_cells(
        self, request: pb.ScanCellsRequest
    ) -> AsyncGenerator[pb.ScanCellsResponse, None]:
        """Pages of raw stored cells. Raises like `read`, possibly after some pages."""
        state = self._state
        state.require_target(request.target)
        try:
            async for page in scans.stored_pages(state, request):
                yield page
        except state.storage.failures as error:
            raise state.unreadable(error) from error

    async def scan_changes(
        self, request: pb.ScanChangesRequest
    ) -> AsyncGenerator[pb.ScanChangesResponse, None]:
        """Pages of the change feed. Means the same under every version of the schema. Raises like
        `scan`, and `InvalidArgument` if the table has no feed."""
        state = self._state
        state.require_tablet(request.target)
        await change_scan.require_feed(state)
        plan = await state.guard.checked(lambda: change_scan.plan_changes(state, request))
        try:
            async for page in change_scan.pages(state, plan):
                yield page
        except state.storage.failures as error:
            raise state.unreadable(error) from error

    async def look_for_changes(self, asked: pb.ChangesLook) -> pb.ChangesLookResult:
        """How new the newest change is. Raises like `scan_changes`."""
        state = self._state
        state.require_tablet(asked.target)
        await change_scan.require_feed(state)
        await state.guard.checked(lambda: change_scan.check_times(state, asked.after, asked.until))
        try:
            return await change_scan.look(state, asked)
        except state.storage.failures as error:
            raise state.unreadable(error) from error

    async def scan_notifications(self, scan: pb.NotificationScan) -> pb.NotificationScanResult:
        """Work for observers. Means the same under every version of the schema. Raises like `read`,
        and `InvalidArgument`."""
        state = self._state
        state.require_tablet(scan.target)
        try:
            if state.index.worth_filling:
                await opening.fill_index(state)
            try:
                result = NotificationLook(state, scan).answer()
            except LockVanished:
                async with self._commit.latch.between_batches():
                    state.require_open()
                    result = NotificationLook(state, scan).answer()
        except state.storage.failures as error:
            raise state.unreadable(error) from error
        await state.require_ownership()
        return result

    async def propose_parts(self, request: pb.ProposePartsRequest) -> pb.ProposePartsResponse:
        """Rows that cut a range into parts. Raises `TabletMoved`, `InvalidArgument`."""
        state = self._state
        state.require_tablet(request.target)
        if not request.part_bytes:
            raise InvalidArgument("part_bytes", "missing")
        start, end = scans.clipped(state, request.range)
        try:
            rows = parts(state, start, end, request.part_bytes)
        except state.storage.failures as error:
            raise state.unreadable(error) from error
        return pb.ProposePartsResponse(rows=rows)

    async def propose_split(self, target: pb.TabletTarget | None = None) -> bytes | None:
        """The first row of the upper half by size; None when there are fewer than two rows. Refuses
        a target that is not this tablet at this epoch and schema."""
        state = self._state
        state.require_open()
        if target is not None:
            state.require_target(target)
        try:
            return await propose(state)
        except state.storage.failures as error:
            raise state.unreadable(error) from error

    def statistics(self) -> pb.TabletStatistics:
        return statistics(self._state, self._commit.queued_bytes)

    def describe(self) -> pb.TabletDescription:
        return describe(self._state, self._commit.queued_bytes)
