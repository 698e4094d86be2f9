"""What the tests of transactions that commit in one round use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from percolator.errors import PercolatorError
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import COLUMN, Rig, SlowDisk

PUT, DELETE, LOCK_ONLY = KIND_PUT, KIND_DELETE, KIND_LOCK_ONLY


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


def whole(
    start: int, writes: Mapping[bytes, bytes], kind: int = PUT, column: bytes = COLUMN
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


def only(result: pb.TransactionBatchResult) -> pb.MutationResult:
    """Why the only transaction was not committed."""
    assert list(result.commit_timestamps) == [0]
    (uncommitted,) = result.uncommitted
    return uncommitted.result
