"""What the tests of read locks use."""

from __future__ import annotations

from percolator.formats.records import KIND_LOCK_ONLY, RecordKind, read_lock_column
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import COLUMN, commit, prewrite, roll_back
from tests.unit.tablet.whole_transactions import whole

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


def whole_read_lock(start: int, row: bytes) -> pb.TransactionBatch:
    """A transaction that does nothing but hold a read lock, and commits in one round."""
    return whole(start, {row: b""}, KIND_LOCK_ONLY, hidden(start))
