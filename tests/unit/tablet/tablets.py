"""What the tests of tablets use to build and drive them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from percolator.errors import CellAddress, PercolatorError
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.tablet.state import (
    CommitTimestamps,
    TabletIdentity,
    TabletLimits,
    TimestampGuard,
    Ttls,
)
from percolator.tablet.tablet import Tablet
from percolator.testing.memory_storage import DurableMemory, MemoryOwnership, MemoryStorage
from percolator.v1 import cells_pb2
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


class SlowDisk(DurableMemory):
    """Takes a second of virtual time for every write, and fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.failure: OSError | None = None

    async def sync(self) -> None:
        self.writes += 1
        await asyncio.sleep(1)
        if self.failure is not None:
            raise self.failure


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
        """What was asked of primaries."""

    async def _commits_of(self, transactions: Sequence[tuple[CellAddress, int]]) -> list[int]:
        self.asked.append(transactions)
        await asyncio.sleep(0.01)
        return [self.commits.get(start, 0) for _, start in transactions]

    def _still_owner(self) -> bool:
        self.owner_checks += 1
        return self.owner

    async def open(self) -> Rig:
        await self.tablet.open()
        return self

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


async def outcomes(task: asyncio.Task[list[pb.MutationResult]]) -> list[int]:
    return [result.outcome for result in await task]
