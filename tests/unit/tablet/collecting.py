"""What the tests of collection write, and how they collect."""

from __future__ import annotations

from percolator.formats.records import RecordKind, acknowledgement_column
from percolator.tablet.state import SafePoints
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import (
    DATA,
    NOTIFY,
    WRITE,
    Rig,
    mutation,
    put,
    write_record,
)

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
    """What an observer has written next to a cell."""
    hidden = acknowledgement_column(b"observer", column)
    return mutation(row, put(WRITE, write_record(end - 1, value), end), column=hidden)
