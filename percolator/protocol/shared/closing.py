"""A shared transaction that has ended is closed: no further part of it can begin.

The transaction's row has one more cell, which is never locked and never shown. Like any primary, it
has a commit record or a rollback marker, under the timestamp with which the transaction began. The
group that commits the parts writes that record, and a client that rolls the transaction back writes
the marker before anything else.

A part locks its primary in one group with a look at this cell. So the tablet puts each part in one
of two places: before the end, and then the client that ends the transaction finds its lock and
rolls it back; or after it, and then the part is refused before it has locked anything. Without that
order, a task that goes on after its job has failed would lock rows for as long as a part lives.
"""

from __future__ import annotations

from percolator.errors import CellAddress, ConflictError, PercolatorError, UsageError
from percolator.formats.records import KIND_LOCK_ONLY, WRITE_HEADER
from percolator.protocol import steps
from percolator.protocol.shared.names import CLOSED, Job
from percolator.routing.cells import Refused
from percolator.v1.tabletserver_pb2 import Mutation


def look(job: Job) -> Mutation:
    """Is refused if the transaction has ended."""
    return steps.require_open(job.row, CLOSED, job.began)


def close(job: Job, commit: int) -> Mutation:
    """Closes it as committed. Is refused if it has ended."""
    record = WRITE_HEADER.pack(job.began, KIND_LOCK_ONLY)
    return steps.close_committed(job.row, CLOSED, job.began, commit, record)


def ended(job: Job, answer: Refused, task: str) -> PercolatorError:
    """Why a part of the task cannot begin, from the answer to `look`."""
    if answer.condition == steps.OWN_COMMIT:
        return UsageError(f"the shared transaction was committed while task {task!r} was writing")
    return ConflictError(
        f"the shared transaction has ended: it was rolled back, and task {task!r} comes too late",
        cell=CellAddress(job.table_id, job.row, CLOSED),
        start_timestamp=job.began,
    )
