"""Finding out what became of a transaction whose commit was not answered."""

from __future__ import annotations

from percolator.errors import (
    CellAddress,
    OutcomeLost,
    OutcomeUnknown,
    PercolatorError,
    SchemaError,
    SnapshotTooOld,
)
from percolator.formats.records import KIND_LOCK_ONLY
from percolator.protocol import aftermath
from percolator.protocol.environment import Environment
from percolator.protocol.write_steps import WriteSteps


async def settled(env: Environment, start: int, primary: CellAddress, deadline: float) -> int:
    """The commit timestamp of the transaction, or 0 once it can never commit.

    Raises `OutcomeUnknown` if there is no answer in time, and `OutcomeLost` if there is none left.
    """
    write = WriteSteps(start, {primary: (KIND_LOCK_ONLY, b"")}, b"", 0)
    try:
        return await aftermath.mark_primary(env, write, deadline)
    except (SnapshotTooOld, SchemaError) as problem:
        raise OutcomeLost(
            f"the outcome of the transaction that began at {start} can no longer be determined: "
            f"{problem}",
            start_timestamp=start,
            primary=primary,
        ) from problem
    except PercolatorError as problem:
        raise OutcomeUnknown(
            f"still unknown: {problem}", start_timestamp=start, primary=primary
        ) from problem
