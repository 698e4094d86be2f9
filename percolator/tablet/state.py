"""The state that the parts of an open tablet share: `TabletState`, and what it consists of.

TabletIdentity, Ownership, TabletLimits  which tablet this is, whether it is still ours, its limits
SafePoints, Collected, ChangeFeed        how far back it answers, and what was collected
Lifetimes                                the times to live of the table's cells
TimestampGuard                           refuses timestamps that the oracle has not handed out
LoadFences                               ranges that are closed for bulk loads
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from percolator.errors import (
    CellAddress,
    InvalidArgument,
    NotReady,
    PercolatorError,
    SchemaChanged,
    StoreFault,
    StoreUnusable,
    TabletMoved,
)
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    KIND_PUT_IN_DATA,
    WRITE_HEADER,
    WRITE_KIND_OFFSET,
)
from percolator.tablet.cells import (
    FEED_FENCE,
    FEED_KEY,
    FORMAT_KEY,
    FORMAT_WITH_READ_LOCKS,
    LOAD_FENCE_PREFIX,
    LOAD_FLOOR_KEY,
    TIMESTAMP_MAX,
    HeldCells,
    LastChanges,
    LockMirror,
    NotifyIndex,
    ReadLocks,
    RecentWrites,
    TabletCounts,
    Tombstones,
    change_key,
    component,
    is_reserved,
    split_component,
)
from percolator.tablet.notification_watch import NotificationWatch
from percolator.tablet.turns import Turns
from percolator.timestamps import SEQUENCE_BITS, Timestamp, expires_at, is_expired, oldest_unexpired
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Clock, Storage, StorageBatch

# Which tablet it is: its name in storage, orders and errors.


@dataclass(frozen=True)
class TabletIdentity:
    """Which tablet this is, and in which term of ownership."""

    table_id: int
    tablet_id: int
    epoch: int
    start: bytes
    end: bytes
    """Rows from start (included) to end (excluded); an empty end means up to the last row."""

    def __str__(self) -> str:
        return f"tablet {self.tablet_id} epoch {self.epoch}"


# The right to serve a tablet, as the tablet checks it.
#
# It is checked after the work and before the response is sent. If it is still held then, no later
# owner had read or written anything when the work was done.


class Ownership(Protocol):
    """One server's ownership of a tablet: once lost, it never comes back."""

    def is_held_blocking(self) -> bool:
        """True if it is held. Blocks, so call it from a thread that waits for the disk anyway."""

    async def is_held(self) -> bool:
        """As above, without blocking. One look answers every call made before it began. Raises
        `NotReady` if the store does not say: then it may be held or not, and nothing is answered.
        """


# How far the history of a tablet's cells may have been collected.


class SafePoints(NamedTuple):
    """Timestamps below which requests are refused; stored before they apply, and never lowered."""

    reads: int = 0
    """The safe point of snapshots: versions superseded below it may have been deleted."""
    transactions: int = 0
    """The safe point of prewrites and commits: the highest one of all tables, because a
    transaction's evidence may be in a different table than its locks."""
    collected: int = 0
    """The safe point of roll-backs: it is raised when something is collected, at which time all
    locks below it are resolved, in all tables. A roll-back that was sent earlier and arrives late
    would find no commit, because it was collected, and would mark a committed transaction as
    rolled back."""


# The limits of what one tablet accepts. Everything has a limit, named with its unit.

KIBIBYTE = 1024
MEBIBYTE = 1024 * KIBIBYTE


@dataclass(frozen=True)
class TabletLimits:
    """The limits of one tablet. The defaults are those of docs/operating.md."""

    row_bytes_max: int = 4 * KIBIBYTE
    column_bytes_max: int = 1 * KIBIBYTE
    qualifier_bytes_max: int = 1 * KIBIBYTE
    value_bytes_max: int = 4 * MEBIBYTE + 64 * KIBIBYTE
    """The size of one stored cell: a value of 4 MiB plus the rest of its record."""
    conditions_max: int = 64
    """The number of conditions in one mutation."""
    changes_max: int = 256
    """Per mutation: one cell's lock, write and data, and a notification for each observer."""

    queue_bytes_max: int = 4 * MEBIBYTE
    """The size of all mutations waiting for their group commit; above it, `Overloaded`."""
    overload_retry_seconds: float = 0.05
    commit_mutations_max: int = 1024
    """Mutations in one group commit: limits how long its first one waits for its last."""
    commit_bytes_max: int = 4 * MEBIBYTE

    answer_bytes_max: int = 8 * MEBIBYTE
    """The response to one call that reads, or the cells that made mutations of one batch fail: what
    does not fit is refused, and has to be requested again."""
    read_bytes_max: int = 31 * MEBIBYTE
    """The result of one read, which is as much as a scan can return of one row: messages end at 32
    MiB. The last read in a response may exceed `answer_bytes_max`; one that does not fit after the
    others has to be requested again."""
    columns_max: int = 10_000
    """The number of columns that one read can name."""
    column_prefixes_max: int = 100
    """Each entry of a scan is compared with all of them."""
    page_rows_default: int = 1_000
    page_rows_max: int = 10_000
    page_bytes_default: int = 1 * MEBIBYTE
    page_bytes_max: int = 8 * MEBIBYTE
    page_entries_max: int = 100_000
    """Stored entries examined for one page, so that a page of only deleted rows ends, too."""
    slice_rows: int = 256
    """Mutations or reads handled before the event loop gets its turn."""
    slice_entries: int = 1024
    """Entries of a scan handled before the event loop gets its turn: about 1.5 ms."""

    sweep_share: float = 0.1
    """The share of a tablet's time that collection and other background deletions may take."""

    notifications_indexed_max: int = 100_000
    """Live notifications kept in memory; the rest are found by scanning the store."""
    turns_waiting_max: int = 10_000
    """Transactions that wait for their turn at cells, and cells where one has its turn; above it,
    `Overloaded`."""
    recent_writes_max: int = 16_384
    """Cells remembered in each generation of `RecentWrites`: about 6 MiB in total."""


def too_long(found: bytes, bytes_max: int) -> str:
    """Why a field is refused."""
    return f"{len(found)} bytes, at most {bytes_max} allowed"


# The columns whose values expire, and what that means for a stored version.
#
# An expired value counts as a deletion at the timestamp of its commit: the version before it does
# not come back. Whether it has expired is decided by three numbers alone: its commit timestamp, the
# timestamp at which it is read, and the column's time to live. So all readers of a snapshot agree,
# whatever their clocks say, and whenever they look.

Ttls = tuple[tuple[bytes, int], ...]
"""Columns with their times to live in milliseconds."""


def ttls_of(messages: Sequence[pb.ColumnTtl]) -> Ttls:
    return tuple((one.column, one.ttl_milliseconds) for one in messages)


class Lifetimes:
    """The times to live of one table; false if no column has one. It is never changed, but replaced
    by another one: what has begun with one ends with it."""

    __slots__ = ("by_column", "by_component", "ttls")

    def __init__(self, ttls: Ttls = ()) -> None:
        self.ttls = ttls
        self.by_column = dict(ttls)
        """Milliseconds by column."""
        self.by_component = {component(column): ttl for column, ttl in ttls}
        """Milliseconds by encoded column."""

    def __bool__(self) -> bool:
        return bool(self.ttls)

    def hides(self, column: bytes, commit_ts: int, timestamp: int) -> bool:
        """True if a value of this column is expired at the timestamp."""
        ttl = self.by_column.get(column)
        return ttl is not None and is_expired(commit_ts, timestamp, ttl)

    def hides_component(self, encoded: bytes, commit_ts: int, timestamp: int) -> bool:
        """As `hides`, for an encoded column."""
        ttl = self.by_component.get(encoded)
        return ttl is not None and is_expired(commit_ts, timestamp, ttl)

    def lasting(self, timestamp: int) -> dict[bytes, int]:
        """By encoded column: the oldest commit whose value is not expired at the timestamp."""
        return {
            column: oldest_unexpired(timestamp, ttl) for column, ttl in self.by_component.items()
        }

    def end_of(self, cell: bytes, commit_ts: int) -> int | None:
        """The timestamp from which on a value of this cell (`cell_prefix`) is invisible; None if
        that is never."""
        ttl = self.by_component.get(cell[split_component(cell, 0)[1] :])
        return None if ttl is None else expires_at(commit_ts, ttl)


FOREVER = Lifetimes()


# Refuses timestamps that the oracle cannot have handed out yet, and never one that it has.
#
# One timestamp from the future that is taken for real would block its cell, and every reader of it,
# until that time comes. The oracle decides what is too far ahead, never this machine's clock: with
# a clock that differs, the guard would refuse what the oracle has just handed out. All tablets of a
# server share one guard, so a new tablet knows as much as an old one.
#
# What the guard has heard may be old, and a timestamp far above it may have been handed out a
# microsecond ago. So before the guard refuses a timestamp, it asks the oracle for one. The oracle's
# timestamps only increase, so everything that was handed out before the request lies below the
# answer. While the oracle does not answer, nothing is known, and the caller is told to retry.

LEAD_MILLISECONDS = 3_600_000
"""A timestamp may lie this far above the newest known one without asking the oracle."""

_RETRY_SECONDS = 0.1

T = TypeVar("T")


class UnheardTimestamp(Exception):
    """The oracle must be asked before this timestamp is admitted. Nothing was executed."""

    def __init__(self, timestamp: int, field: str) -> None:
        super().__init__(timestamp, field)
        self.timestamp = timestamp
        self.field = field


class TimestampGuard:
    """Admits timestamps that do not lie far above what the oracle has handed out."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[int]],
        clock: Clock,
        *,
        lead_milliseconds: int = LEAD_MILLISECONDS,
    ) -> None:
        """`ask` returns a timestamp that the oracle handed out after the call."""
        self._ask = ask
        self._clock = clock
        self._lead = lead_milliseconds << SEQUENCE_BITS
        self._newest = 0
        self._heard_at = 0.0
        self.admitted_to = self._lead
        """Timestamps up to this one need no further check."""
        self.requests = 0
        """How often the oracle had to be asked."""
        self.refused = 0
        """Refused timestamps: the oracle had not handed them out."""

    @classmethod
    def by_own_clock(cls, clock: Clock) -> TimestampGuard:
        """For a tablet without a cluster: there is no oracle to ask."""

        async def wall_clock() -> int:
            return clock.wall_milliseconds() << SEQUENCE_BITS

        return cls(wall_clock, clock)

    def heard(self, timestamp: int) -> None:
        """Notes a timestamp that the oracle has handed out, as reported by it or by the master."""
        if timestamp > self._newest:
            self._newest = timestamp
            self._heard_at = self._clock.monotonic_seconds()
            self.admitted_to = max(self.admitted_to, timestamp + self._lead)

    def admit(self, timestamp: int, field: str, *places: int) -> None:
        """Raises `UnheardTimestamp` when the oracle has to be asked; catch it with `checked`.

        Called for each mutation: the field's `places` are written into it only when it fails.
        """
        if timestamp > self.admitted_to:
            raise UnheardTimestamp(timestamp, field % places)

    def check_read(self, timestamp: int, field: str, *places: int) -> None:
        """Like `admit`, for a timestamp that is required."""
        if not timestamp:
            raise InvalidArgument(field % places, "missing")
        if timestamp > self.admitted_to:
            raise UnheardTimestamp(timestamp, field % places)

    async def checked(self, check: Callable[[], T]) -> T:
        """Returns what `check` returns, once none of the timestamps that it meets is in doubt.

        It runs again after each request, so it must not have done anything when it raises.
        """
        while True:
            try:
                return check()
            except UnheardTimestamp as unheard:
                await self.settle(unheard)

    async def require(self, timestamp: int, field: str) -> None:
        """Returns once the timestamp may be used. Raises like `settle`."""
        if timestamp > self.admitted_to:
            await self.settle(UnheardTimestamp(timestamp, field))

    async def settle(self, unheard: UnheardTimestamp) -> None:
        """Returns once the timestamp is admitted. Raises `InvalidArgument` if the oracle cannot
        have handed it out, and `NotReady` while the oracle does not answer."""
        timestamp = unheard.timestamp
        self._let_time_pass()
        if timestamp <= self.admitted_to:
            return
        self.requests += 1
        try:
            answer = await self._ask()
        except PercolatorError as error:
            if timestamp <= self.admitted_to:
                return  # the master has reported it meanwhile
            raise NotReady(
                f"cannot tell whether the oracle has handed out {_named(timestamp)}: it does not "
                f"answer this server, last error: {error.message}",
                retry_after_seconds=_RETRY_SECONDS,
            ) from error
        self.heard(answer)
        if timestamp > self.admitted_to:
            self.refused += 1
            ahead = (timestamp >> SEQUENCE_BITS) - (self._newest >> SEQUENCE_BITS)
            raise InvalidArgument(
                unheard.field,
                f"{_named(timestamp)} was not handed out by the oracle: it lies "
                f"{ahead / 1000:.0f} s above {_named(self._newest)}, which was handed out later",
            )

    def _let_time_pass(self) -> None:
        """Advances the newest known timestamp while nothing is heard from the oracle. Its time
        still passes, so a server cut off from it and from the master keeps serving."""
        if self._newest:
            elapsed = int((self._clock.monotonic_seconds() - self._heard_at) * 1000)
            expected = self._newest + (elapsed << SEQUENCE_BITS)
            self.admitted_to = max(self.admitted_to, expected + self._lead)


def _named(timestamp: int) -> str:
    return f"{timestamp} ({Timestamp(timestamp).describe()})"


# Ranges of rows that are closed for a bulk load, as this tablet knows them.
#
# M load_fence NAME    run 8, the range's start and end as components, commit_timestamp 8 M
# load_floor         the latest run whose fence was lifted, 8
#
# A fence has the range of the whole load, so that after a split both halves keep it unchanged. A
# fence that does not overlap the tablet's rows, as may happen after a split, is ignored. No fence
# is raised for a run below the floor: a late request would close rows that are never opened again.

RETRY_SECONDS = 0.1


@dataclass(frozen=True)
class LoadFence:
    """A range of rows that is closed for one bulk load."""

    name: str
    run: int
    start: bytes
    end: bytes
    """The end of the range, excluded. Empty: up to the last row."""
    commit_timestamp: int = 0
    """If this is not 0, the load is complete, and the fence can only be lifted."""

    @property
    def key(self) -> bytes:
        return LOAD_FENCE_PREFIX + self.name.encode()

    def covers(self, row: bytes) -> bool:
        return self.start <= row and (not self.end or row < self.end)

    def overlaps(self, start: bytes, end: bytes) -> bool:
        return (not self.end or start < self.end) and (not end or self.start < end)

    def record(self) -> bytes:
        """The fence as it is stored."""
        return b"".join(
            (
                self.run.to_bytes(8, "big"),
                component(self.start),
                component(self.end),
                self.commit_timestamp.to_bytes(8, "big"),
            )
        )

    @classmethod
    def of_record(cls, key: bytes, record: bytes) -> LoadFence:
        run = int.from_bytes(record[:8], "big")
        start, at = split_component(record, 8)
        end, at = split_component(record, at)
        name = key[len(LOAD_FENCE_PREFIX) :].decode()
        return cls(name, run, start, end, int.from_bytes(record[at:], "big"))

    def message(self) -> pb.LoadFence:
        return pb.LoadFence(
            name=self.name,
            run=self.run,
            range=cells_pb2.RowRange(start=self.start, end=self.end),
            commit_timestamp=self.commit_timestamp,
        )


class LoadFences:
    """The fences of one tablet: nearly always none."""

    def __init__(self) -> None:
        self._by_name: dict[str, LoadFence] = {}
        self.floor = 0
        """The latest run whose fence was lifted."""

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def __iter__(self) -> Iterator[LoadFence]:
        return iter(self._by_name.values())

    def load(self, storage: Storage[Any], start: bytes, end: bytes) -> None:
        """Reads them from the storage of the tablet, whose rows are [start, end)."""
        self.floor = int.from_bytes(storage.get(LOAD_FLOOR_KEY) or b"", "big")
        for key, record in storage.iterate(LOAD_FENCE_PREFIX, LOAD_FENCE_PREFIX + b"\xff"):
            fence = LoadFence.of_record(key, record)
            if fence.overlaps(start, end):
                self.put(fence)

    def get(self, name: str) -> LoadFence | None:
        return self._by_name.get(name)

    def put(self, fence: LoadFence) -> None:
        self._by_name[fence.name] = fence

    def remove(self, name: str) -> None:
        self._by_name.pop(name, None)

    def over(self, row: bytes) -> LoadFence | None:
        """The fence that closes this row."""
        for fence in self._by_name.values():
            if fence.covers(row):
                return fence
        return None

    def among(self, start: bytes, end: bytes) -> LoadFence | None:
        """A fence that closes part of this range."""
        for fence in self._by_name.values():
            if fence.overlaps(start, end):
                return fence
        return None


def closed(fence: LoadFence) -> NotReady:
    """The error for every request other than the load's own."""
    return NotReady(
        f"the rows are closed for the bulk load {fence.name!r}", retry_after_seconds=RETRY_SECONDS
    )


# The change feed of a tablet: whether it has one, and since when it is complete.
#
#     F   commit timestamp 8 | row | column    the start of a write record: start 8, kind 1, value
#     M feed    schema version 8, on 1, complete_from 8, loads_before 8
#
# Each put or deletion of a cell is also stored under F, where keys sort by commit timestamp, in the
# same write as its write record. So the changes since some timestamp are one range of keys, however
# large the tablet is. The record is a copy of the write record, so that reading changes need not
# look up each cell. Only large values, which a write record leaves out as well, and those of bulk
# loads are not stored twice: the kind is then PUT_IN_DATA, and the value is where the write record
# says.
#
# What each rule prevents:
#
# * The feed begins between two batches, and is complete from the newest commit of that time on.
# Every commit that is stored later is above it or in the feed, since its own lock is judged later.
# * A bulk load whose fence stands then may have stored rows that the feed lacks. They
# have its commit timestamp, which is known when the fence is lifted; the feed is complete from then
# on.
# * An order with an older version of the schema changes nothing: it may have arrived late.
# * A tablet with a feed has format 2. A release that does not know the feed would commit without
# it, and readers would never learn what they missed. So that release has to refuse the tablet.

FORMAT_WITH_FEED = b"2"

_RECORD = struct.Struct(">QBQQ")


@dataclass(frozen=True)
class ChangeFeed:
    """The notes of a tablet about its feed."""

    schema_version: int = 0
    """The version of the schema that has switched it on or off."""
    on: bool = False
    complete_from: int = 0
    """Every change above this timestamp is in the feed."""
    loads_before: int = 0
    """Bulk loads of runs up to this one may have stored rows before the feed was on."""

    @classmethod
    def load(cls, storage: Storage[Any]) -> ChangeFeed:
        """Reads it from the storage. Raises `StoreUnusable`."""
        record = storage.get(FEED_KEY)
        if record is None:
            return cls()
        if len(record) != _RECORD.size:
            raise StoreUnusable(
                f"the note about the change feed has {len(record)} bytes, not {_RECORD.size}; "
                "see docs/formats.md",
                fault=StoreFault.DAMAGED,
            )
        schema_version, on, complete_from, loads_before = _RECORD.unpack(record)
        return cls(schema_version, bool(on), complete_from, loads_before)

    @property
    def ever_on(self) -> bool:
        """True if anything may be stored under F."""
        return self.schema_version > 0

    def is_changed_by(self, schema_version: int, *, on: bool) -> bool:
        """True if this version of the schema switches the feed on or off."""
        return on != self.on and schema_version > self.schema_version

    def note(self, batch: StorageBatch, *, beside_read_locks: bool) -> None:
        """Adds to a batch what is stored about the feed. A tablet with read locks keeps their
        format: under a lower one, its next owner would not look for them."""
        record = _RECORD.pack(self.schema_version, self.on, self.complete_from, self.loads_before)
        batch.put(FEED_KEY, record)
        batch.put(FEED_FENCE, b"")
        batch.put(FORMAT_KEY, FORMAT_WITH_READ_LOCKS if beside_read_locks else FORMAT_WITH_FEED)


def note_change(batch: StorageBatch, cell: bytes, timestamp: int, record: bytes) -> int:
    """Adds a commit to the feed, unless readers cannot see it. Returns the bytes added."""
    if record[WRITE_KIND_OFFSET] == KIND_LOCK_ONLY or is_reserved(cell):
        return 0
    key = change_key(cell, timestamp)
    batch.put(key, record)
    return len(key) + len(record)


def loaded_change(start_timestamp: int) -> bytes:
    """The record in the feed of a cell that was put by a bulk load."""
    return WRITE_HEADER.pack(start_timestamp, KIND_PUT_IN_DATA)


@dataclass(frozen=True)
class Collected:
    """The result of one pass of collection (collection.py)."""

    below: int = 0
    cells: int = 0
    """The number of cells deleted."""
    bytes: int = 0
    history_bytes: int = 0
    """The size of superseded versions that stay because they are above the safe point."""
    spared: bool = False
    """True if deletions stayed because an observer has yet to be notified of them."""
    more_at: int = TIMESTAMP_MAX
    """Once the safe point has reached this timestamp, a value that stayed has expired."""
    missed_load: bool = False
    """True if a bulk load was opened since the pass began. What it has stored may lie below, since
    its commit timestamp is as old as the load is long."""


CommitTimestamps = Callable[[int], Awaitable[int]]
"""Fetches that many consecutive timestamps, all handed out after the call; returns the first."""

Commits = Callable[[Sequence[tuple[CellAddress, int]]], Awaitable[Sequence[int]]]
"""Asks the primaries of transactions, given with their start timestamps, when these have committed;
0 for each that is not known to have."""


class TabletState:
    """One tablet's environment, its memory, and its reasons to refuse requests."""

    def __init__(
        self,
        identity: TabletIdentity,
        *,
        schema_version: int,
        storage: Storage[Any],
        clock: Clock,
        ownership: Ownership,
        on_closed: Callable[[PercolatorError], None],
        limits: TabletLimits,
        guard: TimestampGuard,
        timestamps: CommitTimestamps | None = None,
        commits: Commits | None = None,
        lifetimes: Lifetimes = FOREVER,
    ) -> None:
        self.identity = identity
        self.schema_version = schema_version
        self.lifetimes = lifetimes
        """A read takes them once, together with its cursor. They are replaced together with the
        schema's version, and while nothing is being written (upkeep.py)."""
        self.storage = storage
        self.clock = clock
        self.limits = limits
        self.mirror = LockMirror()
        self.held_cells = HeldCells()
        self.turns = Turns(limits.turns_waiting_max, limits.overload_retry_seconds)
        self.index = NotifyIndex(limits.notifications_indexed_max)
        self.recent = RecentWrites(limits.recent_writes_max)
        self.last_changes = LastChanges(limits.recent_writes_max)
        self.read_locks = ReadLocks(limits.recent_writes_max)
        self.counters = TabletCounts(clock)
        self.guard = guard
        self.timestamps = timestamps
        """Without it, no transaction commits in one round."""
        self.commits = commits
        """Without it, no locks are rolled forward on the word of a client."""
        self.is_loaded = False
        """Memory has what the storage has. Until then, its counts are not those of the tablet."""
        self.counted_rows = (b"", b"")
        """The rows whose cells are stored here and counted: more than the tablet's own until it
        is trimmed. An empty end means up to the last row."""
        self.safe_points = SafePoints()
        self.collected = Collected()
        """The last complete pass since the tablet was opened."""
        self.tombstones = Tombstones()
        self.watch: NotificationWatch | None = None
        """Receives new notifications once they are durable."""
        self.load_fences = LoadFences()
        self.feed = ChangeFeed()
        self.closed_because: PercolatorError | None = None
        self._ownership = ownership
        self._on_closed = on_closed

    def require_open(self) -> None:
        if self.closed_because is not None:
            raise self.closed_because

    def require_target(self, target: pb.TabletTarget) -> None:
        """Refuses a request unless its target is this tablet at this epoch and schema version."""
        self.require_tablet(target)
        if target.schema_version != self.schema_version:
            raise self.schema_changed()

    def require_tablet(self, target: pb.TabletTarget) -> None:
        self.require_open()
        identity = self.identity
        if target.tablet_id != identity.tablet_id or target.epoch != identity.epoch:
            raise TabletMoved(
                f"asked for tablet {target.tablet_id} epoch {target.epoch}, this is {identity}",
                tablet_id=target.tablet_id,
                epoch=target.epoch,
            )

    async def require_ownership(self) -> None:
        """Call this after the work and before sending its response: if the tablet is still held
        now, no newer owner had served anything when the work was done. Otherwise this closes the
        tablet and raises. A store that does not say leaves it open, and raises `NotReady`."""
        self.require_open()
        self._heard(is_held=await self._ownership.is_held())
        self.require_open()

    async def owned(self) -> bool:
        """Like `require_ownership`, for callers that answer *unknown* if it is lost."""
        if self.closed_because is None:
            self._heard(is_held=await self._ownership.is_held())
        return self.closed_because is None

    async def write_owned(self, batch: Any) -> bool:  # noqa: ANN401 - the storage's own type
        """Writes the batch durably, then returns whether this server still owns the tablet. The
        check happens while waiting for the disk anyway. Raises the storage's `failures`."""
        self._heard(is_held=await self.storage.write(batch, self._ownership.is_held_blocking))
        return self.closed_because is None

    def _heard(self, *, is_held: bool) -> None:
        if not is_held:
            self.stop(self.moved("lost to a newer owner"))

    def stop(self, error: PercolatorError) -> None:
        """Closes the tablet to all requests and informs the server. The first reason counts."""
        if self.closed_because is None:
            self.closed_because = error
            self._on_closed(error)

    async def write(self, batch: Any) -> None:  # noqa: ANN401 - the storage's own type
        """Writes the batch durably. If it raises `StoreUnusable`, the tablet is closed."""
        try:
            await self.storage.write(batch)
        except self.storage.failures as error:
            raise self.storage_failed(error) from error

    def storage_failed(self, error: Exception) -> StoreUnusable:
        """Closes the tablet: after a failure, only the log, read at reopening, is reliable."""
        unusable = StoreUnusable(
            f"the storage of {self.identity} failed: {error}", fault=self.storage.fault(error)
        )
        unusable.__cause__ = error
        self.stop(unusable)
        return unusable

    def unreadable(self, error: Exception) -> StoreUnusable:
        """The error for a failed read. It fails only the request, since other rows may be fine,
        unless the tablet only has to be opened again."""
        if self.storage.is_cache:
            return self.storage_failed(error)
        return StoreUnusable(
            f"{self.identity} cannot be read: {error}", fault=self.storage.fault(error)
        )

    def moved(self, how: str) -> TabletMoved:
        identity = self.identity
        return TabletMoved(
            f"{identity} was {how}", tablet_id=identity.tablet_id, epoch=identity.epoch
        )

    def require_lifetimes(self, lifetimes: Lifetimes) -> None:
        """Call this if a value that lies apart from its record is missing, with the times to live
        by which it was visible. If shorter ones have replaced them since, it may have expired and
        been collected, and has to be asked for again."""
        if lifetimes is not self.lifetimes:
            raise self.schema_changed()

    def schema_changed(self) -> SchemaChanged:
        return SchemaChanged(
            f"the schema is at version {self.schema_version}",
            table_id=self.identity.table_id,
            schema_version=self.schema_version,
        )
