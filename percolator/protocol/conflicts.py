"""The errors that say what stopped a transaction: which cell, and which other transaction.

For a read lock, the cell is the one that it locks: the hidden one means nothing to programs, and
their transactions meet at the other.
"""

from __future__ import annotations

from percolator.errors import CellAddress, ConflictError
from percolator.formats.hidden_cells import locked_column
from percolator.protocol import steps
from percolator.protocol.environment import Environment
from percolator.protocol.met_lock import MetLock
from percolator.protocol.read_locks import is_read_lock, locked_cell, stored_column
from percolator.protocol.write_steps import WriteSteps
from percolator.routing.cells import Refused
from percolator.v1.cells_pb2 import Cell


def obstacle(
    env: Environment, write: WriteSteps, cell: CellAddress, answer: Refused, met: list[MetLock]
) -> ConflictError | None:
    """The error that a refused prewrite means; None for an older transaction's lock.

    That lock is added to `met`.
    """
    if answer.condition == steps.PREWRITE_LOCKED:
        lock = MetLock.of(cell.table_id, answer.offender)
        if lock.lock.start_timestamp < write.start:
            met.append(lock)
            return None
        # Only the younger waits for the older: two that wait for each other would never stop.
        return locked(env, write.start, lock)
    if answer.condition == steps.OWN_ROLLBACK:
        return rolled_back_by_others(env, write, cell)
    return written(env, write, cell, answer.offender)


def locked(env: Environment, start: int, met: MetLock) -> ConflictError:
    """Another transaction holds a lock, and we may not wait for it any longer."""
    other, cell = met.lock.start_timestamp, locked_cell(met.address)
    how = "read-locked" if is_read_lock(met.address) else "locked"
    return ConflictError(
        f"{env.described(cell)} is {how} by transaction {other}",
        cell=cell,
        start_timestamp=start,
        other_start_timestamp=other,
    )


def written(env: Environment, write: WriteSteps, cell: CellAddress, record: Cell) -> ConflictError:
    """Another transaction has committed the cell, or a read lock of it, since this one began."""
    other, cell = int.from_bytes(record.value[:8], "big"), locked_cell(cell)
    was_read = locked_column(stored_column(record)) is not None
    how = "read-locked until its commit" if was_read else "committed"
    return ConflictError(
        f"{env.described(cell)} was {how} by transaction {other} at {record.timestamp}, "
        f"after this transaction began at {write.start}",
        cell=cell,
        start_timestamp=write.start,
        other_start_timestamp=other,
        other_commit_timestamp=record.timestamp,
    )


def rolled_back_by_others(env: Environment, write: WriteSteps, cell: CellAddress) -> ConflictError:
    """The transaction's rollback marker was found."""
    cell = locked_cell(cell)
    return ConflictError(
        f"a client that met the lock on {env.described(cell)} presumed this transaction (begun at "
        f"{write.start}) dead and rolled it back",
        cell=cell,
        start_timestamp=write.start,
    )


def given_up(write: WriteSteps) -> ConflictError:
    """The transaction could not be committed, no commit was sent, and its marker is durable."""
    return ConflictError(
        f"the transaction begun at {write.start} was given up and rolled back",
        cell=locked_cell(write.primary),
        start_timestamp=write.start,
    )
