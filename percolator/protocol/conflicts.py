"""What stopped a transaction, in words: which cell, and who was there."""

from __future__ import annotations

from percolator.errors import CellAddress, ConflictError
from percolator.protocol.cleanup import MetLock
from percolator.protocol.write_steps import WriteSteps
from percolator.v1.cells_pb2 import Cell


def locked(write: WriteSteps, met: MetLock) -> ConflictError:
    """Another transaction holds a lock, and it is not ours to wait for it any longer."""
    other = met.lock.start_timestamp
    return ConflictError(
        f"{met.address} is locked by transaction {other}",
        cell=met.address,
        start_timestamp=write.start,
        other_start_timestamp=other,
    )


def written(write: WriteSteps, cell: CellAddress, record: Cell) -> ConflictError:
    """Another transaction has committed the cell since this one began."""
    other = int.from_bytes(record.value[:8], "big")
    return ConflictError(
        f"{cell} was committed by transaction {other} at {record.timestamp}, "
        f"after this one had begun at {write.start}",
        cell=cell,
        start_timestamp=write.start,
        other_start_timestamp=other,
        other_commit_timestamp=record.timestamp,
    )


def rolled_back_by_others(write: WriteSteps, cell: CellAddress) -> ConflictError:
    """Its rollback marker was found."""
    return ConflictError(
        f"somebody who met the lock on {cell} took this transaction, begun at "
        f"{write.start}, for dead, and rolled it back",
        cell=cell,
        start_timestamp=write.start,
    )


def given_up(write: WriteSteps) -> ConflictError:
    """It could not be committed, was not sent for commit, and its marker is durable."""
    return ConflictError(
        f"the transaction begun at {write.start} was given up, and is rolled back",
        cell=write.primary,
        start_timestamp=write.start,
    )
