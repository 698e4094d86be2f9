"""Whether the lock or record that a transaction finds of its own is what its write set puts there.

Several committers may commit one transaction at once, all with the same writes. Another write set
under the same start timestamp is a mistake of its sender, and must not be mixed with the first:
with another primary, two cells would decide one transaction.
"""

from __future__ import annotations

from percolator.errors import CellAddress, PercolatorError
from percolator.formats.records import KIND_PUT, KIND_PUT_IN_DATA, LockRecord, WriteRecord
from percolator.protocol import steps
from percolator.protocol.read_locks import stored_column
from percolator.protocol.write_steps import WriteSteps
from percolator.routing.cells import Refused


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
    """Whether a prewrite of the cell was refused because of the transaction's own lock."""
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
