"""Tools with which tests build and drive tablets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Self, TypeVar

import pytest

from percolator.errors import CellAddress, NotReady, PercolatorError
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    KIND_PUT,
    LockRecord,
    RecordKind,
    WriteRecord,
    acknowledgement_column,
    read_lock_column,
)
from percolator.tablet.state import (
    CommitTimestamps,
    SafePoints,
    TabletIdentity,
    TabletLimits,
    TimestampGuard,
    Ttls,
)
from percolator.tablet.tablet import Tablet
from percolator.testing.memory_storage import (
    DurableMemory,
    MemoryBatch,
    MemoryCursor,
    MemoryOwnership,
    MemoryStorage,
)
from percolator.v1 import cells_pb2, errors_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Clock, Storage
from tests.simulation.virtual_time import VirtualClock

LOCK, WRITE, DATA = cells_pb2.SPACE_LOCK, cells_pb2.SPACE_WRITE, cells_pb2.SPACE_DATA
ROLLBACK, NOTIFY = cells_pb2.SPACE_ROLLBACK, cells_pb2.SPACE_NOTIFY

ABSENT = pb.Condition.EXPECTATION_ABSENT
PRESENT = pb.Condition.EXPECTATION_PRESENT
EQUALS = pb.Condition.EXPECTATION_EQUALS
BEGINS_IF_PRESENT = pb.Condition.EXPECTATION_BEGINS_IF_PRESENT

APPLIED, REFUSED = pb.OUTCOME_APPLIED, pb.OUTCOME_REFUSED
NOT_EXECUTED, UNKNOWN = pb.OUTCOME_NOT_EXECUTED, pb.OUTCOME_UNKNOWN

IDENTITY = TabletIdentity(table_id=7, tablet_id=1, epoch=2, start=b"", end=b"")
TARGET = pb.TabletTarget(tablet_id=1, epoch=2, schema_version=3)
COLUMN = b"balance"

T = TypeVar("T")


class SlowDisk(DurableMemory):
    """Takes a second of virtual time for every write, and fails when told to."""

    def __init__(self, seconds: float = 1.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.writes = 0
        self.failure: OSError | None = None

    async def sync(self) -> None:
        self.writes += 1
        await asyncio.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure


class BreakingDisk(DurableMemory):
    """Fails after a number of writes."""

    writes_left = 1_000

    async def sync(self) -> None:
        self.writes_left -= 1
        await super().sync()
        if self.writes_left < 1:
            raise OSError("the disk failed")


class Rig:
    """A tablet, with the means to drive it."""

    def __init__(
        self,
        *,
        disk: DurableMemory | None = None,
        storage: Storage[Any] | None = None,
        clock: Clock | None = None,
        identity: TabletIdentity = IDENTITY,
        schema_version: int = 3,
        guard: TimestampGuard | None = None,
        change_feed: bool = False,
        ttls: Ttls = (),
        timestamps: CommitTimestamps | None = None,
        **limits: Any,
    ) -> None:
        self.disk = disk or SlowDisk()
        self.clock = clock or VirtualClock(asyncio.get_running_loop())
        self.owner = True
        self.store_is_silent = False
        """The store does not say who owns the tablet."""
        self.owner_checks = 0
        self.closed: list[PercolatorError] = []
        self.tablet = Tablet(
            identity,
            schema_version=schema_version,
            storage=storage or MemoryStorage(self.disk),
            clock=self.clock,
            ownership=MemoryOwnership(self._still_owner),
            on_closed=self.closed.append,
            guard=guard or TimestampGuard.by_own_clock(self.clock),
            limits=TabletLimits(**limits),
            change_feed=change_feed,
            ttls=ttls,
            timestamps=timestamps,
            commits=self._commits_of,
        )
        self.commits: dict[int, int] = {}
        """By start timestamp: what primaries say when they are asked."""
        self.asked: list[Sequence[tuple[CellAddress, int]]] = []
        """Questions that were asked of primaries."""

    async def _commits_of(self, transactions: Sequence[tuple[CellAddress, int]]) -> list[int]:
        self.asked.append(transactions)
        await asyncio.sleep(0.01)
        return [self.commits.get(start, 0) for _, start in transactions]

    def _still_owner(self) -> bool:
        self.owner_checks += 1
        if self.store_is_silent:
            raise NotReady("the store is silent")
        return self.owner

    async def open(self) -> Self:
        await self.tablet.open()
        return self

    async def reopened(self, **options: Any) -> Self:
        """Closes the tablet, and opens one on its disk."""
        await self.tablet.close()
        return await type(self)(disk=self.disk, **options).open()

    async def mutate(
        self, *mutations: pb.Mutation, within_seconds: float = 3600.0
    ) -> list[pb.MutationResult]:
        result = await self.tablet.mutate(
            batch(mutations), deadline_seconds=self.clock.monotonic_seconds() + within_seconds
        )
        return results_of(result)

    async def apply(self, *mutations: pb.Mutation) -> None:
        outcomes = [result.outcome for result in await self.mutate(*mutations)]
        assert outcomes == [APPLIED] * len(mutations)

    async def read(
        self, row: bytes, timestamp: int, *columns: bytes, passing: Iterable[int] = ()
    ) -> pb.ReadBatchResult:
        read = pb.RowRead(
            row=row, columns=columns or [COLUMN], timestamp=timestamp, passing=passing
        )
        return await self.tablet.read(pb.ReadBatch(target=TARGET, reads=[read]))

    async def read_row(self, row: bytes, timestamp: int) -> pb.ReadBatchResult:
        read = pb.RowRead(row=row, all_columns=True, timestamp=timestamp)
        return await self.tablet.read(pb.ReadBatch(target=TARGET, reads=[read]))

    async def value(self, row: bytes, timestamp: int) -> bytes | None:
        """The value of a cell without a lock."""
        result = await self.read(row, timestamp)
        assert not result.locks
        return result.found.values[0] if result.found.values else None

    async def scan(self, timestamp: int, **fields: Any) -> list[pb.ScanResponse]:
        request = pb.ScanRequest(target=TARGET, timestamp=timestamp, **fields)
        if not (request.columns or request.column_prefixes):
            request.all_columns = True
        return [page async for page in self.tablet.scan(request)]

    async def cells(self, space: cells_pb2.Space, **fields: Any) -> list[cells_pb2.Cell]:
        request = pb.ScanCellsRequest(target=TARGET, space=space, **fields)
        return [cell async for page in self.tablet.scan_cells(request) for cell in page.cells]


def results_of(answer: pb.MutationBatchResult) -> list[pb.MutationResult]:
    """The result of each mutation of a batch, in order."""
    results = [pb.MutationResult(outcome=APPLIED) for _ in range(answer.mutations)]
    for one in answer.unapplied:
        results[one.mutation] = one.result
    return results


def batch(mutations: Iterable[pb.Mutation], schema_version: int = 3) -> pb.MutationBatch:
    target = pb.TabletTarget(tablet_id=1, epoch=2, schema_version=schema_version)
    return pb.MutationBatch(target=target, mutations=mutations)


def own(start: int) -> bytes:
    return start.to_bytes(8, "big")


def lock_record(start: int, value: bytes = b"", **fields: Any) -> bytes:
    fields.setdefault("min_commit_timestamp", start + 1)
    fields.setdefault("ttl_milliseconds", 3000)
    fields.setdefault("kind", RecordKind.PUT)
    fields.setdefault("session", b"")
    fields.setdefault("primary", CellAddress(7, b"primary", COLUMN))
    return LockRecord(start_timestamp=start, value=value, **fields).encode()


def write_record(start: int, value: bytes = b"", kind: RecordKind = RecordKind.PUT) -> bytes:
    return WriteRecord(start, kind, value).encode()


def put(
    space: cells_pb2.Space, value: bytes = b"", timestamp: int = 0, qualifier: bytes = b""
) -> pb.Change:
    return pb.Change(
        kind=pb.Change.KIND_PUT,
        space=space,
        timestamp=timestamp,
        value=value,
        qualifier=qualifier,
    )


def delete(space: cells_pb2.Space, timestamp: int = 0, qualifier: bytes = b"") -> pb.Change:
    return pb.Change(
        kind=pb.Change.KIND_DELETE, space=space, timestamp=timestamp, qualifier=qualifier
    )


def delete_if(space: cells_pb2.Space, prefix: bytes, timestamp: int = 0) -> pb.Change:
    return pb.Change(
        kind=pb.Change.KIND_DELETE_IF_PREFIX, space=space, timestamp=timestamp, value=prefix
    )


def condition(
    space: cells_pb2.Space, expectation: pb.Condition.Expectation, **fields: Any
) -> pb.Condition:
    return pb.Condition(space=space, expectation=expectation, **fields)


def no_own_write(start: int) -> pb.Condition:
    return condition(WRITE, ABSENT, from_timestamp=start, prefix=own(start))


def no_marker(start: int) -> pb.Condition:
    return condition(ROLLBACK, ABSENT, from_timestamp=start, until_timestamp=start + 1)


def mutation(
    row: bytes,
    *changes: pb.Change,
    conditions: Iterable[pb.Condition] = (),
    column: bytes = COLUMN,
    not_below: int = 0,
) -> pb.Mutation:
    return pb.Mutation(
        row=row, column=column, conditions=conditions, changes=changes, not_below=not_below
    )


def prewrite(row: bytes, start: int, value: bytes = b"", **fields: Any) -> pb.Mutation:
    """The prewrite of the protocol's table of steps."""
    return mutation(
        row,
        put(LOCK, lock_record(start, value, **fields)),
        conditions=[
            no_own_write(start),
            no_marker(start),
            condition(LOCK, ABSENT),
            condition(WRITE, ABSENT, from_timestamp=start),
        ],
        not_below=start,
    )


def commit(
    row: bytes, start: int, end: int, value: bytes = b"", kind: RecordKind = RecordKind.PUT
) -> pb.Mutation:
    """The rollback of a secondary, or of any other cell."""
    return mutation(
        row,
        delete(LOCK),
        put(WRITE, write_record(start, value, kind), end),
        conditions=[no_own_write(start), condition(LOCK, PRESENT, prefix=own(start))],
        not_below=start,
    )


def roll_back(row: bytes, start: int) -> pb.Mutation:
    return mutation(
        row,
        delete_if(LOCK, own(start)),
        delete(DATA, start),
        put(ROLLBACK, b"", start),
        conditions=[no_own_write(start)],
        not_below=start,
    )


def written(row: bytes, start: int, end: int, value: bytes = b"") -> pb.Mutation:
    """A committed write without a prewrite before it."""
    return mutation(row, put(WRITE, write_record(start, value), end))


def started(rig: Rig, *mutations: pb.Mutation) -> asyncio.Task[list[pb.MutationResult]]:
    return asyncio.ensure_future(rig.mutate(*mutations))


async def under_way(work: Awaitable[T], *, seconds: float = 0.5) -> asyncio.Task[T]:
    """A task of this work that has run for a while."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(seconds)
    return task


class Turns:
    """How often another task has run."""

    count = 0

    async def run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


@asynccontextmanager
async def counted_turns() -> AsyncIterator[Turns]:
    turns = Turns()
    running = asyncio.ensure_future(turns.run())
    yield turns
    running.cancel()


async def outcomes(results: Awaitable[list[pb.MutationResult]]) -> list[int]:
    return [result.outcome for result in await results]


# What the tests of collection write, and how they collect.

DELETE, LOCK_ONLY, IN_DATA = RecordKind.DELETE, RecordKind.LOCK_ONLY, RecordKind.PUT_IN_DATA


def record(row: bytes, start: int, end: int, kind: RecordKind) -> pb.Mutation:
    return mutation(row, put(WRITE, write_record(start, b"", kind), end))


def in_data(row: bytes, start: int, end: int, value: bytes) -> pb.Mutation:
    return mutation(
        row, put(WRITE, write_record(start, b"", IN_DATA), end), put(DATA, value, start)
    )


def notified(row: bytes, at: int) -> pb.Mutation:
    return mutation(row, put(NOTIFY, b"", at, qualifier=b"observer"))


async def stored(rig: Rig, space: cells_pb2.Space) -> list[tuple[bytes, int]]:
    return [(cell.row, cell.timestamp) for cell in await rig.cells(space)]


async def collected(rig: Rig, below: int) -> int:
    """Collects, and returns how many cells were deleted."""
    await rig.tablet.raise_safe_points(SafePoints(below, below))
    return (await rig.tablet.collect(below)).cells


def noted(row: bytes, column: bytes, end: int, value: bytes) -> pb.Mutation:
    """The acknowledgement that an observer has written next to a cell."""
    hidden = acknowledgement_column(b"observer", column)
    return mutation(row, put(WRITE, write_record(end - 1, value), end), column=hidden)


# Counting instead of timing: how often a storage is read, or a method is called.


class CountingCursor(MemoryCursor):
    """Counts what is expensive: steps, and seeks by the space that they go to."""

    counts: Counter[str]

    def seek(self, key: bytes) -> None:
        self.counts[f"seek {key[:1].decode()}"] += 1
        super().seek(key)

    def next(self) -> None:
        self.counts["step"] += 1
        super().next()

    def prev(self) -> None:
        self.counts["step"] += 1
        super().prev()


class CountingStorage(MemoryStorage):
    def __init__(self, disk: DurableMemory) -> None:
        super().__init__(disk)
        self.counts: Counter[str] = Counter()

    def cursor(self) -> MemoryCursor:
        cursor = CountingCursor(self._view)
        cursor.counts = self.counts
        return cursor

    def get(self, key: bytes) -> bytes | None:
        self.counts[f"get {key[:1].decode()}"] += 1
        return super().get(key)


def counted(patch: pytest.MonkeyPatch, owner: type, method: str) -> list[object]:
    """Notes each call of a method in the list that it returns."""
    correct = getattr(owner, method)
    calls: list[object] = []

    def noting(self: object, *arguments: Any) -> Any:
        calls.append(self)
        return correct(self, *arguments)

    patch.setattr(owner, method, noting)
    return calls


# Storages in memory for tests of reading: one shows a batch early, one counts what is loaded.


class LingeringStorage(MemoryStorage):
    """Shows a batch a while before the write returns, as LevelDB does in its thread."""

    lingering = False

    async def write(self, batch: MemoryBatch, then: Callable[[], bool] | None = None) -> bool:
        owned = await super().write(batch, then)
        if self.lingering:
            await asyncio.sleep(1)
        return owned


class ValueCountingStorage(MemoryStorage):
    """Counts the values that are read from it."""

    values_read = 0

    def get(self, key: bytes) -> bytes | None:
        self.values_read += 1
        return super().get(key)

    def iterate(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        for entry in super().iterate(start, stop):
            self.values_read += 1
            yield entry


# What the tests of change feeds ask, and a plain form of the answers.


class Change(NamedTuple):
    """One change; the value of a deletion is None."""

    commit: int
    row: bytes
    column: bytes
    value: bytes | None


class Answer(NamedTuple):
    """A stream of pages, as one."""

    changes: list[Change]
    reached: int
    locks: list[bytes]
    """The rows of the locks in the way."""
    pages: list[pb.ScanChangesResponse]


async def changes(rig: Rig, after: int, until: int, **fields: Any) -> Answer:
    request = pb.ScanChangesRequest(target=TARGET, after=after, until=until, **fields)
    pages = [page async for page in rig.tablet.scan_changes(request)]
    found = [change for page in pages for change in _changes(page.found)]
    locks = [blocking.lock.row for page in pages for blocking in page.locks]
    return Answer(found, pages[-1].reached, locks, pages)


async def look(rig: Rig, after: int, until: int) -> tuple[int, int]:
    """How far changes are settled, and the newest one."""
    asked = pb.ChangesLook(target=TARGET, after=after, until=until)
    result = await rig.tablet.look_for_changes(asked)
    return result.reached, result.newest


def before(page: pb.ScanChangesResponse) -> list[bytes | None]:
    """Values of the cells before the changes of a page."""
    found = page.found
    return [
        None if at in found.new_cells else value for at, value in enumerate(found.values_before)
    ]


def _changes(found: pb.FoundChanges) -> list[Change]:
    return [
        Change(
            found.commit_timestamps[at],
            found.rows[at],
            found.columns[at],
            None if at in found.deletes else found.values[at],
        )
        for at in range(len(found.rows))
    ]


# What the tests of read locks use.

LOCKED, NEWER = 2, 3
"""The conditions of a prewrite that fail because of others."""


def hidden(start: int) -> bytes:
    """The column of the read lock of a transaction."""
    return read_lock_column(COLUMN, start)


def read_lock(row: bytes, start: int) -> pb.Mutation:
    """The prewrite of a read lock."""
    step = prewrite(row, start, kind=RecordKind.LOCK_ONLY)
    step.column = hidden(start)
    return step


def commit_read_lock(row: bytes, start: int, end: int) -> pb.Mutation:
    step = commit(row, start, end, kind=RecordKind.LOCK_ONLY)
    step.column = hidden(start)
    return step


def roll_back_read_lock(row: bytes, start: int) -> pb.Mutation:
    step = roll_back(row, start)
    step.column = hidden(start)
    return step


def one_round_read_lock(start: int, row: bytes) -> pb.TransactionBatch:
    """A transaction that does nothing but hold a read lock, and commits in one round."""
    return one_round(start, {row: b""}, KIND_LOCK_ONLY, hidden(start))


# What the tests of transactions that commit in one round use.


class Oracle:
    """Hands out 100 and what follows, then 200, and so on; takes a second of virtual time."""

    def __init__(self) -> None:
        self.next = 100
        self.asked: list[int] = []
        self.seconds = 1.0
        self.failure: PercolatorError | None = None
        self.gate: asyncio.Event | None = None
        """If given, it answers when this is set, and takes no time."""

    async def __call__(self, count: int) -> int:
        self.asked.append(count)
        await (self.gate.wait() if self.gate else asyncio.sleep(self.seconds))
        if self.failure is not None:
            raise self.failure
        first, self.next = self.next, self.next + 100
        return first


class OneRoundRig(Rig):
    """A tablet with an oracle."""

    def __init__(self, **options: Any) -> None:
        self.oracle = Oracle()
        super().__init__(timestamps=self.oracle, **options)

    @property
    def slow_disk(self) -> SlowDisk:
        assert isinstance(self.disk, SlowDisk)
        return self.disk

    async def commit(
        self, *transactions: pb.TransactionBatch, within_seconds: float = 3600.0, **fields: Any
    ) -> pb.TransactionBatchResult:
        request = together(transactions, **fields)
        deadline = self.clock.monotonic_seconds() + within_seconds
        return await self.tablet.commit(request, deadline_seconds=deadline)

    def committing(
        self, *transactions: pb.TransactionBatch, **options: Any
    ) -> asyncio.Task[pb.TransactionBatchResult]:
        return asyncio.ensure_future(self.commit(*transactions, **options))


def one_round(
    start: int, writes: Mapping[bytes, bytes], kind: int = KIND_PUT, column: bytes = COLUMN
) -> pb.TransactionBatch:
    """One transaction that writes these rows."""
    return pb.TransactionBatch(
        start_timestamps=[start],
        cells=[len(writes)],
        rows=writes.keys(),
        columns=[column] * len(writes),
        kinds=[kind] * len(writes),
        values=writes.values(),
    )


def together(
    transactions: Iterable[pb.TransactionBatch], schema_version: int = 3
) -> pb.TransactionBatch:
    found = pb.TransactionBatch()
    for transaction in transactions:
        found.MergeFrom(transaction)
    found.target.CopyFrom(pb.TabletTarget(tablet_id=1, epoch=2, schema_version=schema_version))
    return found


def not_executed(result: pb.MutationResult) -> errors_pb2.ErrorDetail:
    """Why a mutation was not executed."""
    assert result.outcome == NOT_EXECUTED
    return result.error


def only(result: pb.TransactionBatchResult) -> pb.MutationResult:
    """Why the only transaction was not committed."""
    assert list(result.commit_timestamps) == [0]
    (uncommitted,) = result.uncommitted
    return uncommitted.result
