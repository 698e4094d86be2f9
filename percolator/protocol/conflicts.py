"""The errors that say what stopped a transaction: which cell, and which other transaction.

For a read lock, the cell is the one that it locks: the hidden one means nothing to programs, and
their transactions meet at the other.
"""

from __future__ import annotations

from typing import NamedTuple

from percolator.errors import CellAddress, ConflictError, PercolatorError
from percolator.formats.records import (
    KIND_PUT,
    KIND_PUT_IN_DATA,
    LockRecord,
    WriteRecord,
    locked_column,
)
from percolator.protocol import steps
from percolator.protocol.environment import Environment
from percolator.protocol.write_set import WriteSteps, is_read_lock, locked_cell, stored_column
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
    """The transaction cannot be committed any more. Reported once its marker is durable."""
    return ConflictError(
        f"the transaction begun at {write.start} was given up and rolled back",
        cell=locked_cell(write.primary),
        start_timestamp=write.start,
    )


# A lock of another transaction that was met on the way.


class MetLock(NamedTuple):
    """Another transaction's lock, and the cell that holds it."""

    address: CellAddress
    lock: LockRecord
    ttl_milliseconds: int = 0
    """For how long the value in it is visible once it is committed; 0: forever."""

    @classmethod
    def of(cls, table_id: int, cell: Cell) -> MetLock:
        address = CellAddress(table_id, cell.row, stored_column(cell))
        return cls(address, LockRecord.decode(cell.value), cell.ttl_milliseconds)

    @property
    def on_primary(self) -> bool:
        return self.address == self.lock.primary


# Whether the lock or record that a transaction finds of its own is what its write set puts there.
#
# Several committers may commit one transaction at once, all with the same writes. Another write set
# under the same start timestamp is a mistake of its sender, and must not be mixed with the first:
# with another primary, two cells would decide one transaction.


class AnotherWriteSet(PercolatorError):
    """Another committer has begun to commit other writes under the same start timestamp.

    This rolls nothing back: a marker or an unlocked cell might hit the other write set.
    """


def another(write: WriteSteps, cell: CellAddress, what: str) -> AnotherWriteSet:
    """Builds the error; `what` continues a sentence that begins with the cell."""
    return AnotherWriteSet(
        f"another write set was sent under the start timestamp {write.start}: {cell} {what}"
    )


def is_own_lock(write: WriteSteps, cell: CellAddress, answer: Refused) -> bool:
    """True if a prewrite of the cell was refused because of the transaction's own lock."""
    if answer.condition != steps.PREWRITE_LOCKED:
        return False
    found = answer.offender
    if int.from_bytes(found.value[:8], "big") != write.start:
        return False
    if stored_column(found) != cell.column:
        raise another(write, cell, "is read-locked for one of them, and written for the other")
    require_same(write, cell, answer)
    return True


def require_same(write: WriteSteps, cell: CellAddress, answer: Refused) -> None:
    """Raises unless the transaction's own commit record or lock on this cell has the same write.

    A value that is stored apart from its record is not compared.
    """
    stored: LockRecord | WriteRecord
    if answer.condition == steps.OWN_COMMIT:
        stored = WriteRecord.decode(answer.offender.value)
    else:
        stored = LockRecord.decode(answer.offender.value)
        if stored.primary != write.primary:
            what = f"is locked for a commit that {stored.primary} decides"
            raise another(write, cell, what)
    kind, value = write.writes[cell]
    # How a value is stored, in the record or apart from it, is not part of the write.
    same_kind = stored.kind == kind or (stored.kind, kind) == (KIND_PUT_IN_DATA, KIND_PUT)
    if not same_kind or (stored.kind == KIND_PUT and stored.value != value):
        raise another(write, cell, "has something else written to it")
