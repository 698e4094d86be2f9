"""Whether what a transaction finds of itself on a cell is what its write set puts there.

It may be committed by several at once, all with the same writes. Another write set under the same
start timestamp is a mistake of whoever sent it, and must not be mixed with the first: with another
primary, two cells would decide about one transaction.
"""

from __future__ import annotations

from percolator.errors import CellAddress, PercolatorError
from percolator.protocol import steps
from percolator.protocol.aftermath import shown
from percolator.protocol.records import KIND_PUT, KIND_PUT_IN_DATA, LockRecord, WriteRecord
from percolator.protocol.write_steps import WriteSteps
from percolator.wire.questions import Refused


class AnotherWriteSet(PercolatorError):
    """Somebody has begun to commit other writes under the same start timestamp.

    Nothing is rolled back for it: what would be marked or unlocked may belong to the other one.
    """


def another(write: WriteSteps, cell: CellAddress, what: str) -> AnotherWriteSet:
    """The error, in words."""
    return AnotherWriteSet(
        f"another write set was sent under the start timestamp {write.start}: {cell} {what}"
    )


def require_same(write: WriteSteps, cell: CellAddress, answer: Refused) -> None:
    """Of a cell that shows the own commit record or the own lock.

    A value that is stored apart from its record is not compared.
    """
    stored: LockRecord | WriteRecord
    if answer.condition == steps.OWN_COMMIT:
        stored = WriteRecord.decode(shown(answer).value)
    else:
        stored = LockRecord.decode(shown(answer).value)
        if stored.primary != write.primary:
            what = f"is locked for a commit that {stored.primary} decides"
            raise another(write, cell, what)
    kind, value = write.writes[cell]
    # Which of its two ways a value is stored in is no matter of the transaction's.
    same_kind = stored.kind == kind or (stored.kind, kind) == (KIND_PUT_IN_DATA, KIND_PUT)
    if not same_kind or (stored.kind == KIND_PUT and stored.value != value):
        raise another(write, cell, "has something else written to it")
