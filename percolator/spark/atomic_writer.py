"""Writing a DataFrame as one shared transaction: all of its rows appear at once, or none.

The driver makes the ticket before any task. Every attempt at a task locks its cells in parts of its
own, and its receipt travels with Spark's commit message. Spark gives the driver the messages of one
attempt at each task, and the driver commits their parts; all other attempts are never committed.

Spark runs these three steps in processes of its own, which may end when their step does. So no
process on the driver keeps the transaction alive: the tasks under way do, and what they have locked
outlives them by `keep_seconds`.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from percolator import aio, codecs
from percolator.aio.replacing import rest_deleted
from percolator.aio.shared import FLUSH_BYTES, FLUSH_CELLS, Receipt, Ticket
from percolator.arguments import require_seconds
from percolator.blocking.api import SharedTransaction
from percolator.blocking.loop_thread import Pending
from percolator.errors import (
    CellAddress,
    ConflictError,
    InvalidArgument,
    OutcomeUnknown,
    PercolatorError,
    UsageError,
    WrittenTwice,
)
from percolator.formats.records import KIND_DELETE, KIND_PUT
from percolator.process import private_opener
from percolator.protocol.shared.driver import roll_back_all
from percolator.protocol.write_set import Write
from percolator.schema import Table
from percolator.spark.connections import Connection, checked, connection_to, shared_database
from percolator.spark.options import KEEP_SECONDS_MAX, KEEP_SECONDS_MIN, WriteOptions
from percolator.spark.shapes import Cell
from percolator.spark.transaction_writer import (
    Written,
    cells_of,
    collecting_rarely,
    log,
    refuse_created_table,
    show_log,
    total,
)
from percolator.timestamps import Timestamp


class Locking:
    """One attempt at a task. Leaving its block before `finish` rolls it back.

    One portion is under way while the task makes the next one. No process holds more than two.
    """

    def __init__(self, here: Connection, options: WriteOptions, ticket: Ticket, task: str) -> None:
        self._here = here
        self._task = task
        internal = here.database.internal
        # It waits for other writers' locks as long as a transaction would be retried.
        self._attempt = internal.share(
            ticket, task, 0, options.retry_seconds, only_changes=options.only_changes
        )
        catalog, deadline = internal.engine.catalog, here.deadline(options.target)
        info = here.call(lambda: catalog.table(options.target.table, deadline))
        info.require_older_than(ticket.began)
        self._table_id = info.table_id
        self._writes: dict[CellAddress, Write] = {}
        self._bytes = 0
        self._under_way: Pending[None] | None = None

    def lock(self, cells: list[Cell]) -> None:
        """Returns once all but two portions are locked. Raises `WrittenTwice` if a cell has two
        values: which one counts would depend on the order in which Spark delivers the rows."""
        table_id = self._table_id
        for row, column, value in cells:
            address = CellAddress(table_id, row, column)
            write = (KIND_DELETE, b"") if value is None else (KIND_PUT, value)
            if self._writes.setdefault(address, write) != write:
                cell = self._here.database.internal.engine.env.described(address)
                raise WrittenTwice(f"task {self._task!r} writes {cell} twice", cell=address)
            self._bytes += len(write[1])
            if len(self._writes) >= FLUSH_CELLS or self._bytes >= FLUSH_BYTES:
                self._flush()

    @property
    def kept(self) -> int:
        """How many cells had their values already."""
        return self._attempt.kept

    def finish(self) -> Receipt:
        """Locks the rest, and returns what the driver needs to commit it."""
        self._flush()
        self._wait()
        return self._here.call(self._attempt.finish)

    def _flush(self) -> None:
        self._wait()
        if self._writes:
            writes, self._writes, self._bytes = self._writes, {}, 0
            self._under_way = self._here.thread.start(partial(self._attempt.write, writes))

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.wait()

    def __enter__(self) -> Locking:
        self._here.call(self._attempt.begin)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(PercolatorError):  # what failed to be locked needs no rolling back
            self._wait()
        try:
            self._here.call(self._attempt.abandon)
        except PercolatorError as problem:
            # The first error says more, and what is not rolled back expires by itself.
            log.warning("an attempt at task %r was left to expire: %s", self._task, problem)


_SUFFIX = ".receipts"
_PREFIX_BYTES = 6


@dataclass(frozen=True)
class WriteOfJob:
    """One write of the job, as the processes of that write know it."""

    ticket: Ticket
    directory: str
    name: str
    """Tells the tasks of this write from those of others."""

    def note(self, receipts: Sequence[Receipt]) -> None:
        """Leaves the receipts to the job. Raises `UsageError` on any other machine."""
        directory = Path(self.directory)
        if not directory.is_dir():
            raise UsageError(
                f"together: there is no directory {directory} here: the program that began the "
                "job has to run on the driver's machine, and be in its block"
            )
        made = directory / f"{self.name}.new"
        with open(made, "wb", opener=private_opener) as file:
            pickle.dump(list(receipts), file)
        made.rename(directory / f"{self.name}{_SUFFIX}")


def write_of_job(option: str) -> WriteOfJob:
    """A new write of the job that this option names."""
    try:
        given = json.loads(option)
        directory = given.pop("directory")
        ticket = Ticket(**(given | {"row": bytes.fromhex(given["row"])}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(
            "together", "is not from percolator.spark.together: pass all of its options"
        ) from error
    return WriteOfJob(ticket, directory, os.urandom(_PREFIX_BYTES).hex())


async def commit_or_roll_back(
    shared: aio.SharedTransaction, receipts: Sequence[Receipt], job: str
) -> Timestamp | None:
    """As `commit`, but an unknown outcome is settled by asking: otherwise the job would fail, and
    its rows might appear."""
    try:
        return await shared.commit(receipts)
    except OutcomeUnknown as unknown:
        committed = await shared.abort()
        if committed is None:
            raise ConflictError(f"{job} was rolled back: {unknown.message}") from unknown
        return committed


class Together:
    """The job, on the driver. Leaving its block commits what its writes have locked; leaving it by
    an error gives all of it up.

    Spark runs the end of each write in a process of its own on the driver's machine. There the
    receipts of the write's tasks go into a file, in a directory of the job, and the program commits
    those of all files together. A write that fails closes the transaction, so the job can no longer
    commit.
    """

    def __init__(self, address: str | None, keep_seconds: float) -> None:
        require_seconds(keep_seconds, "keep_seconds")
        if not KEEP_SECONDS_MIN <= keep_seconds <= KEEP_SECONDS_MAX:
            bounds = f"from {KEEP_SECONDS_MIN:.0f} to {KEEP_SECONDS_MAX:.0f}"
            raise InvalidArgument("keep_seconds", f"expected a number {bounds}, got {keep_seconds}")
        self._address = address
        self._keep_seconds = keep_seconds
        self._shared: SharedTransaction | None = None
        self._directory: TemporaryDirectory[str] | None = None

    @property
    def options(self) -> dict[str, str]:
        """The options that make a write one of the job."""
        if self._shared is None or self._directory is None:
            raise UsageError("the job begins with its block: use it in a with statement")
        ticket = self._shared.ticket
        option = asdict(ticket) | {"row": ticket.row.hex(), "directory": self._directory.name}
        address = {} if self._address is None else {"address": self._address}
        return {"together": json.dumps(option), "atomic": "true", **address}

    @property
    def commit_timestamp(self) -> Timestamp | None:
        """When everything appeared. None before that, and if nothing was written."""
        return None if self._shared is None else self._shared.commit_timestamp

    def _commit(self, shared: SharedTransaction, directory: Path) -> None:
        files = sorted(directory.glob(f"*{_SUFFIX}"))
        receipts: list[Receipt] = []
        for file in files:
            receipts += pickle.loads(file.read_bytes())  # noqa: S301 - only our user can write there
        shared.call_inside(commit_or_roll_back, receipts, "the job")

    def __enter__(self) -> Together:
        if self._shared is not None:
            raise UsageError("the job has begun already")
        shared = shared_database(self._address).shared_transaction(ttl=self._keep_seconds)
        # Before the transaction begins: if the disk is full, nothing would end that.
        directory = TemporaryDirectory(prefix="percolator-job-")
        try:
            shared.__enter__()
        except BaseException:
            directory.cleanup()
            raise
        self._shared, self._directory = shared, directory
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._shared is None or self._directory is None:
            return
        with self._directory as directory:
            try:
                if error is None:
                    self._commit(self._shared, Path(directory))
            except BaseException as failure:
                self._shared.__exit__(type(failure), failure, failure.__traceback__)
                raise
            self._shared.__exit__(kind, error, traceback)


REST = "rest"
"""The driver's own task in a job that overwrites. Other tasks are named by numbers."""
TOLD_SECONDS = 1.0
"""How long a committed job waits until its tablets know that."""


@dataclass
class Locked(Written):
    """The receipt of one attempt at a task for its locks."""

    receipt: Receipt | None = None


def begin(here: Connection, options: WriteOptions) -> Ticket:
    """The ticket of a new transaction. Called on the driver, before any task."""
    internal, target = here.database.internal, options.target
    return here.call(lambda: internal.shared_ticket(options.keep_seconds, target.timeout_seconds))


class AtomicWriter(DataSourceArrowWriter):
    """Upserts or deletes, in one transaction of the whole job."""

    def __init__(
        self, options: WriteOptions, ticket: Ticket, write: WriteOfJob | None = None
    ) -> None:
        """`write`: the write of a job of several writes that this is; then the job commits it."""
        self._options = options
        self.ticket = ticket
        self._write = write
        self._prefix = "" if write is None else f"{write.name}."

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
        if self._write is not None:
            self._leave_to_job(here, self._write, receipts)
            log.info("write of a job that is not committed yet: %s", total(messages))
            return
        committed = here.call(lambda: commit(here, self._options, self.ticket, receipts))
        log.info("atomic job, committed at %s: %s", committed, total(messages))

    def _leave_to_job(
        self, here: Connection, write: WriteOfJob, receipts: Sequence[Receipt]
    ) -> None:
        chosen = list(receipts)
        if self._options.overwrite:
            task = f"{self._prefix}{REST}"
            chosen.append(
                here.call(lambda: _rest(here, self._options, self.ticket, receipts, task))
            )
        write.note(chosen)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        show_log()
        locked = [message for message in messages if isinstance(message, Locked)]
        committed = roll_back(self._options, self.ticket, locked)
        if committed:
            log.warning("the atomic job was committed at %d before it was given up", committed)
        else:
            log.warning("the atomic job failed: nothing of it was written")


def receipts_of(messages: Sequence[WriterCommitMessage | None]) -> list[Receipt]:
    """The receipts of all tasks. Raises `UsageError` if one of them is missing."""
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
    async with internal.shared_transaction(None, None, options.retry_seconds, ticket) as shared:
        chosen = list(receipts)
        if options.overwrite:
            chosen.append(await _rest(here, options, ticket, receipts, REST))
        committed = await commit_or_roll_back(shared, chosen, "the atomic job")
        await shared.told(TOLD_SECONDS)  # this process may end next
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
