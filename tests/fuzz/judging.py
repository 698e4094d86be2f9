"""A whole tablet in memory, given requests: whatever they hold, it judges or refuses them.

The first byte of an input says which request follows. A tablet lives for many inputs, so that one
request meets what others have written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError, Message

from percolator.errors import CellAddress, InvariantViolation, PercolatorError
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.protocol import steps
from percolator.tablet.identity import TabletIdentity
from percolator.tablet.limits import TabletLimits
from percolator.tablet.memory.timestamp_guard import TimestampGuard
from percolator.tablet.tablet import Tablet
from percolator.testing.memory_storage import DurableMemory, MemoryOwnership, MemoryStorage
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import MachineClock

_LIFE_INPUTS = 2_000
_TARGET = pb.TabletTarget(tablet_id=1, epoch=2, schema_version=3)
_START, _COMMIT = 7 << 18, 8 << 18
_ROW, _COLUMN = b"row", b"column"


class Lost(Exception):
    """A tablet says of itself that a rule was broken, only because of what it was sent."""


class Judging:
    """Gives one request after another to a tablet."""

    def __init__(self) -> None:
        self._loop = asyncio.get_event_loop()
        self._inputs = 0
        self._newest = 0
        self._tablet: Tablet | None = None

    def __call__(self, data: bytes) -> None:
        if not data:
            return
        request, answer = _REQUESTS[data[0] % len(_REQUESTS)]
        try:
            message: Any = request.FromString(data[1:])
        except DecodeError:
            return
        if hasattr(message, "target"):
            # The guard of epochs and schemas is one comparison: most inputs should get past it.
            message.target.CopyFrom(_TARGET)
        self._loop.run_until_complete(self._answered(answer, message))

    async def _answered(
        self, answer: Callable[[Tablet, Any], Awaitable[list[Message]]], message: Message
    ) -> None:
        tablet = await self._living()
        try:
            answers = await answer(tablet, message)
        except InvariantViolation as violation:
            raise Lost(str(violation)) from violation
        except PercolatorError:
            return
        for one in answers:
            one.SerializeToString()

    async def _take_timestamps(self, count: int) -> int:
        """As the oracle would, by this machine's clock."""
        now = MachineClock().wall_milliseconds() << SEQUENCE_BITS
        first = max(now, self._newest + 1)
        self._newest = first + count - 1
        return first

    async def _living(self) -> Tablet:
        self._inputs += 1
        if self._tablet is None or self._inputs % _LIFE_INPUTS == 0:
            if self._tablet is not None:
                await self._tablet.close()
            clock = MachineClock()
            self._tablet = Tablet(
                TabletIdentity(table_id=7, tablet_id=1, epoch=2, start=b"", end=b""),
                schema_version=3,
                storage=MemoryStorage(DurableMemory()),
                clock=clock,
                ownership=MemoryOwnership(lambda: True),
                on_closed=_never,
                guard=TimestampGuard.by_own_clock(clock),
                limits=TabletLimits(),
                timestamps=self._take_timestamps,
            )
            await self._tablet.open()
        return self._tablet


def judging() -> Callable[[bytes], None]:
    return Judging()


def _never(error: PercolatorError) -> None:
    raise Lost(f"the tablet closed itself: {error}")


async def _mutate(tablet: Tablet, batch: pb.MutationBatch) -> list[Message]:
    deadline = MachineClock.monotonic_seconds() + 60.0
    return [await tablet.mutate(batch, deadline_seconds=deadline)]


async def _commit(tablet: Tablet, batch: pb.TransactionBatch) -> list[Message]:
    deadline = MachineClock.monotonic_seconds() + 60.0
    return [await tablet.commit(batch, deadline_seconds=deadline)]


async def _read(tablet: Tablet, batch: pb.ReadBatch) -> list[Message]:
    return [await tablet.read(batch)]


async def _pages(pages: AsyncIterator[Message]) -> list[Message]:
    return [page async for page in pages]


async def _scan(tablet: Tablet, request: pb.ScanRequest) -> list[Message]:
    return await _pages(tablet.scan(request))


async def _scan_cells(tablet: Tablet, request: pb.ScanCellsRequest) -> list[Message]:
    return await _pages(tablet.scan_cells(request))


async def _notifications(tablet: Tablet, scan: pb.NotificationScan) -> list[Message]:
    return [await tablet.scan_notifications(scan)]


async def _fence(tablet: Tablet, request: pb.FenceRequest) -> list[Message]:
    return [await tablet.fence(request)]


async def _load(tablet: Tablet, request: pb.LoadRequest) -> list[Message]:
    return [await tablet.load(request)]


async def _parts(tablet: Tablet, request: pb.ProposePartsRequest) -> list[Message]:
    return [await tablet.propose_parts(request)]


_REQUESTS: tuple[tuple[type[Message], Callable[[Tablet, Any], Awaitable[list[Message]]]], ...] = (
    (pb.MutationBatch, _mutate),
    (pb.TransactionBatch, _commit),
    (pb.ReadBatch, _read),
    (pb.ScanRequest, _scan),
    (pb.ScanCellsRequest, _scan_cells),
    (pb.NotificationScan, _notifications),
    (pb.FenceRequest, _fence),
    (pb.LoadRequest, _load),
    (pb.ProposePartsRequest, _parts),
)


def seeds() -> list[bytes]:
    """The steps of the protocol, and the reads that find what they leave."""
    primary = CellAddress(7, _ROW, _COLUMN)
    lock = LockRecord(_START, _START, 5_000, RecordKind.PUT, b"", primary, b"value").encode()
    record = WriteRecord(_START, RecordKind.PUT, b"value").encode()
    observers = (b"observer",)
    mutations = [
        steps.prewrite(_ROW, _COLUMN, _START, lock, None),
        steps.prewrite(_ROW, _COLUMN, _START, lock, b"long"),
        steps.replace_lock(_ROW, _COLUMN, lock[:20], lock),
        steps.commit_primary(_ROW, _COLUMN, _START, _START, _COMMIT, record, observers),
        steps.commit_secondary(_ROW, _COLUMN, _START, _COMMIT, record, observers),
        steps.roll_back(_ROW, _COLUMN, _START),
        steps.roll_back_expired(_ROW, _COLUMN, _START, lock[:20]),
        steps.status(_ROW, _COLUMN, _START),
        steps.notify(_ROW, _COLUMN, _COMMIT, observers),
    ]
    whole = cells_pb2.RowRange()
    fence = pb.LoadFence(name="load", run=_START, range=cells_pb2.RowRange(start=b"x"))
    valid: list[tuple[int, Message]] = [
        *((0, pb.MutationBatch(target=_TARGET, mutations=[one])) for one in mutations),
        (
            1,
            pb.ReadBatch(
                target=_TARGET, reads=[pb.RowRead(row=_ROW, all_columns=True, timestamp=_COMMIT)]
            ),
        ),
        (2, pb.ScanRequest(target=_TARGET, range=whole, all_columns=True, timestamp=_COMMIT)),
        (3, pb.ScanCellsRequest(target=_TARGET, space=cells_pb2.SPACE_WRITE, range=whole)),
        (
            4,
            pb.NotificationScan(
                target=_TARGET, range=whole, locked_columns=[_COLUMN], locks_before=_COMMIT
            ),
        ),
        (5, pb.FenceRequest(target=_TARGET, action=pb.FenceRequest.ACTION_RAISE, fence=fence)),
        (
            6,
            pb.LoadRequest(
                target=_TARGET,
                name="load",
                start_timestamp=_START,
                commit_timestamp=_COMMIT,
                rows=[b"xy"],
                columns=[_COLUMN],
                values=[b"v"],
            ),
        ),
        (7, pb.ProposePartsRequest(target=_TARGET, range=whole, part_bytes=1_000)),
    ]
    return [bytes([place]) + message.SerializeToString() for place, message in valid]
