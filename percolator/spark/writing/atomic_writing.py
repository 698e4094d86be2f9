"""Writing a DataFrame as one shared transaction: all of its rows appear at one moment, or none.

The driver makes the ticket before any task. Every attempt at a task locks its cells in parts of its
own, and its receipt travels with Spark's commit message. Spark gives the driver the messages of one
attempt at each task, and the driver commits their parts; all other attempts are never committed.

Spark runs these three steps in processes of its own, which may end when their step does. So no
process on the driver keeps the transaction alive: the tasks under way do, and what they have locked
outlives them by `keep_seconds`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from percolator import codecs
from percolator.aio.replacing import rest_deleted
from percolator.aio.tickets import Receipt, Ticket
from percolator.errors import UsageError
from percolator.protocol.shared.rolling_back import roll_back_all
from percolator.schema import Table
from percolator.spark.connections import Connection, checked, connection_to
from percolator.spark.options import WriteOptions
from percolator.spark.writing.created_tables import refuse_created_table
from percolator.spark.writing.joint_writes import PartOfJob, commit_or_roll_back
from percolator.spark.writing.locking import Locking
from percolator.spark.writing.plain_writing import cells_of, collecting_rarely
from percolator.spark.writing.written import Written, log, show_log, total
from percolator.timestamps import Timestamp

REST = "rest"
"""The driver's own task in a job that overwrites. Other tasks are named by numbers."""
TOLD_SECONDS = 1.0
"""How long a committed job waits until its tablets know that."""


@dataclass
class Locked(Written):
    """What one attempt at a task has locked."""

    receipt: Receipt | None = None


def begin(here: Connection, options: WriteOptions) -> Ticket:
    """The ticket of a new transaction. Called on the driver, before any task."""
    internal, target = here.database.internal, options.target
    return here.call(lambda: internal.shared_ticket(options.keep_seconds, target.timeout_seconds))


class AtomicWriter(DataSourceArrowWriter):
    """Upserts or deletes, in one transaction of the whole job."""

    def __init__(
        self, options: WriteOptions, ticket: Ticket, part: PartOfJob | None = None
    ) -> None:
        """`part`: which part of a job of several writes this is; then the job commits it."""
        self._options = options
        self.ticket = ticket
        self._part = part
        self._prefix = "" if part is None else f"{part.name}."

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Locked:
        show_log()
        refuse_created_table()
        began = time.monotonic()
        cells = cells_of(self._options)
        locked = Locked()
        task = TaskContext.get()
        # One name for all attempts, also those of a stage that runs again: the driver is given the
        # messages of tasks that an earlier attempt at the stage has finished.
        name = f"{self._prefix}{task.partitionId() if task is not None else 0}"
        here = checked(self._options.target, self._options.catalog)
        with Locking(here, self._options, self.ticket, name) as locking:
            with collecting_rarely():
                for batch in iterator:
                    locked.rows += batch.num_rows
                    locking.lock(cells(batch))
            locked.receipt = receipt = locking.finish()
        locked.equal = locking.kept
        locked.cells = receipt.cells - locked.equal
        locked.transactions = len(receipt.parts)
        locked.seconds = time.monotonic() - began
        log.info("task of an atomic job, which is not committed yet: %s", locked)
        return locked

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        show_log()
        here = connection_to(self._options.target)
        receipts = receipts_of(messages)
        if self._part is not None:
            self._leave_to_job(here, self._part, receipts)
            log.info("part of a job that is not committed yet: %s", total(messages))
            return
        committed = here.call(lambda: commit(here, self._options, self.ticket, receipts))
        log.info("atomic job, committed at %s: %s", committed, total(messages))

    def _leave_to_job(self, here: Connection, part: PartOfJob, receipts: Sequence[Receipt]) -> None:
        chosen = list(receipts)
        if self._options.overwrite:
            task = f"{self._prefix}{REST}"
            chosen.append(
                here.call(lambda: _rest(here, self._options, self.ticket, receipts, task))
            )
        part.note(chosen)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        show_log()
        locked = [message for message in messages if isinstance(message, Locked)]
        committed = roll_back(self._options, self.ticket, locked)
        if committed:
            log.warning("the atomic job was committed at %d before it was given up", committed)
        else:
            log.warning("the atomic job failed: nothing of it was written")


def receipts_of(messages: Sequence[WriterCommitMessage | None]) -> list[Receipt]:
    """What all tasks have locked. Raises `UsageError` if one of them is missing."""
    found = [message.receipt for message in messages if isinstance(message, Locked)]
    receipts = [receipt for receipt in found if receipt is not None]
    if len(receipts) < len(messages):
        raise UsageError(
            f"only {len(receipts)} of {len(messages)} tasks have said what they have locked"
        )
    return receipts


async def commit(
    here: Connection, options: WriteOptions, ticket: Ticket, receipts: Sequence[Receipt]
) -> Timestamp | None:
    """Commits what these tasks have locked, or rolls it back and raises. Runs in the event loop."""
    internal = here.database.internal
    async with internal.shared_transaction(None, None, options.retry_seconds, ticket) as whole:
        chosen = list(receipts)
        if options.overwrite:
            chosen.append(await _rest(here, options, ticket, receipts, REST))
        committed = await commit_or_roll_back(whole, chosen, "the atomic job")
        await whole.told(TOLD_SECONDS)  # this process may end next
    return committed


async def _rest(
    here: Connection, options: WriteOptions, ticket: Ticket, receipts: Sequence[Receipt], task: str
) -> Receipt:
    """Locks the deletion of what the job does not write."""
    columns = None
    if options.catalog is not None:
        columns = tuple(field.column for field in options.catalog.values)
    table = Table(options.target.table, key=codecs.stored)
    seconds = options.retry_seconds
    internal = here.database.internal
    began = time.monotonic()
    # This process may remember a table of that name that was dropped since.
    await internal.engine.catalog.describe(table.name, here.deadline(options.target))
    async with internal.snapshot(None, seconds) as snapshot:
        rest = await rest_deleted(
            internal, ticket, receipts, snapshot, table, columns=columns, task=task, timeout=seconds
        )
    log.info("old cells to delete: %d, found in %.1f s", rest.cells, time.monotonic() - began)
    return rest


def roll_back(options: WriteOptions, ticket: Ticket, locked: Sequence[Locked]) -> int:
    """Rolls back what can be found. What a task locks after that is never committed, either.

    Returns 0, or the commit timestamp if it turns out to be committed: then nothing is undone.
    """
    here = connection_to(options.target)
    parts = sorted(part for one in locked if one.receipt is not None for part in one.receipt.parts)
    env, deadline = here.database.internal.engine.env, here.deadline(options.target)
    return here.call(lambda: roll_back_all(env, ticket.job, parts, deadline))
