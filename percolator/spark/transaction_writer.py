"""Writing a DataFrame with transactions, several at a time in each task.

At least once: Spark runs a failed task again, and may run two attempts of a task at the same time.
All attempts write the same rows, so the table ends up the same; a cell that is written twice has
two versions, and its observers run twice, unless `skip_equal` is set. If a job fails, what it has
committed so far stays.

Rows are sorted so that a transaction touches few tablets, and so that two attempts of one task meet
at the same rows in the same order. A transaction that loses a conflict is retried on a new
snapshot: what it writes does not depend on what was there.

A transaction reads the rows that it is about to write, as of its start, and `differing` and
`merged` say what is left to write. Cells that it looked at and does not write are locked: then a
transaction that writes one of them meanwhile conflicts, and its cells are still the same at the
commit.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from percolator import aio, codecs
from percolator.blocking.loop_thread import Pending
from percolator.codecs.readable import counted, quoted
from percolator.errors import (
    CellAddress,
    ConflictError,
    DeadlineExceeded,
    ExecutionUnknown,
    OutcomeUnknown,
    PercolatorError,
    Retry,
    RowChanged,
    SchemaError,
    UsageError,
)
from percolator.formats.records import KIND_DELETE, KIND_PUT
from percolator.limits import Limits
from percolator.process import MIDDLE_COLLECTIONS, NEW_OBJECTS, YOUNG_COLLECTIONS
from percolator.protocol.write_set import Write
from percolator.retries import Attempts, RetryPolicy
from percolator.routing.cells import FoundCell
from percolator.schema import Table
from percolator.spark.connections import BATCH_ROWS_MAX, DRAIN_SECONDS, Connection, checked
from percolator.spark.options import MERGE, WriteOptions
from percolator.spark.shapes import Cell, Shape, column_of, shape_of
from percolator.timestamps import Timestamp

if TYPE_CHECKING:
    from percolator.spark.shapes import Cell


log = logging.getLogger("percolator.spark")


@dataclass
class Written(WriterCommitMessage):
    """Counts of one task, or of several together."""

    rows: int = 0
    """Rows of the frame that the task has taken."""
    cells: int = 0
    """Cells that it has committed."""
    equal: int = 0
    """Cells that had their values already, and were not written: with `skip_equal`, or
    `notify=changed`."""
    transactions: int = 0
    conflicts: int = 0
    """Attempts at a transaction that were repeated, after a conflict or without an answer."""
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{counted(self.cells, 'cell')} in {counted(self.transactions, 'transaction')}, of "
            f"{counted(self.rows, 'row')}; "
            f"{self.equal} cells were unchanged, {self.conflicts} attempts were repeated, "
            f"{self.seconds:.1f} s"
        )


def total(messages: list[WriterCommitMessage | None]) -> Written:
    """The sum over all tasks that have reported."""
    found = Written()
    for message in messages:
        if isinstance(message, Written):
            for field in fields(Written):
                value = getattr(found, field.name) + getattr(message, field.name)
                setattr(found, field.name, value)
    return found


def show_log() -> None:
    """Sets up logging in Spark's Python processes, which have none: the counters would be lost."""
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


_EXECUTION = "spark.sql.execution.id"
_ROOT_EXECUTION = "spark.sql.execution.root.id"
_STREAMING_QUERY = "sql.streaming.queryId"


def refuse_created_table() -> None:
    """Raises `UsageError` in a task that writes for more than `save()`.

    They make a table in Spark's own catalog as well, which cannot be read: Spark keeps none of its
    options. Spark 4.3 gives a data source the same options, schema and mode for them as for
    `save()`. One thing differs: they run the write as a second execution inside that of their
    command, and tasks are told both (`SQLExecution.EXECUTION_ROOT_ID_KEY`). A task fails here, so
    the job writes nothing, and Spark removes the table that it had begun.

    A batch of `foreachBatch` runs inside the execution of its query, too. So nothing is refused
    there.
    """
    task = TaskContext.get()
    if task is None or task.getLocalProperty(_STREAMING_QUERY) is not None:
        return
    own, root = task.getLocalProperty(_EXECUTION), task.getLocalProperty(_ROOT_EXECUTION)
    if own is None or root is None or own == root:
        return
    raise UsageError(
        "nothing was written: saveAsTable and create() also make a table in Spark's catalog, which "
        "could not be read, because Spark does not keep the options of a Python data source there; "
        'use write.format("percolator").options(...).mode("append").save()'
    )


CELLS_MAX = BATCH_ROWS_MAX
BYTES_MAX = Limits().batch_bytes_max // 2
FEW_CELLS = 16

_row = itemgetter(0)


def cut(
    cells: list[Cell], table_id: int, rows_max: int, borders: Sequence[bytes]
) -> Iterator[dict[CellAddress, Write]]:
    """The writes of each transaction in turn, sorted by row; no row is in two of them.

    `borders` are the first rows of all tablets but the first, in order. Of cells that are written
    twice, the last one counts.

    A transaction in one tablet commits in one round, at half the cost of two phases, unless it has
    more cells or bytes than one message. So a transaction ends at the border of a tablet, too.
    Borders may be out of date: then it takes two phases, or is repeated. A few cells before a
    border are not worth a message of their own, and go on with those of the next tablet.
    """
    cells.sort(key=_row)  # stable
    writes: dict[CellAddress, Write] = {}
    rows = size = first = passed = 0
    while first < len(cells):
        row = cells[first][0]
        after = first + 1
        while after < len(cells) and cells[after][0] == row:
            after += 1
        of_row = cells[first:after]
        row_size = sum(len(value) for _, _, value in of_row if value is not None)
        is_full = (
            rows >= rows_max or len(writes) + len(of_row) > CELLS_MAX or size + row_size > BYTES_MAX
        )
        is_past_border = False
        while passed < len(borders) and row >= borders[passed]:
            passed += 1
            is_past_border = True
        if writes and (is_full or (is_past_border and len(writes) >= FEW_CELLS)):
            yield writes
            writes, rows, size = {}, 0, 0
        for _, column, value in of_row:
            write = (KIND_DELETE, b"") if value is None else (KIND_PUT, value)
            writes[CellAddress(table_id, row, column)] = write
        rows += 1
        size += row_size
        first = after
    if writes:
        yield writes


Writes = dict[CellAddress, Write]
Versions = Mapping[CellAddress, FoundCell]
"""The newest versions of cells, deletions among them. Cells that were never written are missing."""


@dataclass(frozen=True)
class Condition:
    """The demand of `if_unchanged_since` on the rows that a task writes."""

    table: str
    since: Timestamp
    began: Timestamp
    """When the job began: only what is younger can be its own."""
    key_codec: Any
    skip_equal: bool = False
    is_merge: bool = False

    def unwritten(
        self,
        writes: Writes,
        found: Versions,
        *,
        may_be_own: bool,
        expiring: Container[bytes] = frozenset(),
    ) -> Writes:
        """The writes that are left: all, but for rows that an earlier attempt has written.

        Raises `RowChanged` if a row was written after `since`. Such a row counts as written by an
        earlier attempt if there may have been one, and the row has exactly what it would write,
        written by one transaction that committed after the job began. Cells that such an attempt
        leaves out, since they are as they should be, are as they were.
        """
        changed: dict[bytes, dict[CellAddress, FoundCell]] = {}
        for address, cell in found.items():
            if cell.commit_timestamp > self.since:
                changed.setdefault(address.row, {})[address] = cell
        wanted: dict[bytes, Writes] = {row: {} for row in changed}
        for address, write in writes.items():
            if address.row in wanted:
                wanted[address.row][address] = write
        for row, cells in changed.items():
            if not (may_be_own and self._is_own(wanted[row], cells, found, expiring)):
                raise self._error(row, cells)
        return {address: write for address, write in writes.items() if address.row not in changed}

    def _is_own(
        self,
        wanted: Writes,
        cells: Mapping[CellAddress, FoundCell],
        found: Versions,
        expiring: Container[bytes],
    ) -> bool:
        committed = {cell.commit_timestamp for cell in cells.values()}
        if len(committed) > 1 or min(committed) <= self.began:
            return False
        others = {address: write for address, write in wanted.items() if address not in cells}
        if self.is_merge and all(kind == KIND_DELETE for kind, _ in wanted.values()):
            others = merged(others, found, update=True, insert=True)
        if self.skip_equal:
            others = differing(others, found, expiring)
        written = {address: _value(wanted[address]) for address in cells if address in wanted}
        return not others and written == {address: cell.value for address, cell in cells.items()}

    def refuse_vanished(self, cells: Iterable[CellAddress]) -> None:
        """Refuses cells that were there at `since`, and of which nothing is left now."""
        for address in cells:
            raise self._error(address.row, {address: FoundCell(0, None)})

    def _error(self, row: bytes, cells: Mapping[CellAddress, FoundCell]) -> RowChanged:
        address, cell = max(cells.items(), key=lambda one: one[1].commit_timestamp)
        key = self.key_codec.decode(row)
        when = f"at {cell.commit_timestamp}" if cell.commit_timestamp else "and cleaned up"
        return RowChanged(
            f"row {key!r} of table {self.table!r} was written {when}, after {int(self.since)}, "
            f"column {address.column.decode(errors='backslashreplace')!r}: its new value "
            "was computed from older ones. Nothing of its transaction was written; read the "
            "table again",
            table=self.table,
            row=row,
            column=address.column,
            since=int(self.since),
            commit_timestamp=cell.commit_timestamp,
        )


def merged(writes: Writes, found: Versions, *, update: bool, insert: bool) -> Writes:
    """The cells that a merge writes: rows that exist are updated or deleted, others inserted.

    A row of which everything is to be deleted is never inserted.
    """
    existing = {address.row for address, cell in found.items() if cell.value is not None}
    kept = {address.row for address, (kind, _) in writes.items() if kind != KIND_DELETE}

    def is_wanted(address: CellAddress) -> bool:
        if address.row in existing:
            return update if address.row in kept else _stored(found, address) is not None
        return insert and address.row in kept

    return {address: write for address, write in writes.items() if is_wanted(address)}


def differing(writes: Writes, found: Versions, expiring: Container[bytes] = frozenset()) -> Writes:
    """The writes that would change what is there. A value of an expiring column is always written:
    the one that is there would expire as if nobody had written it again."""
    return {
        address: write
        for address, write in writes.items()
        if _stored(found, address) != _value(write)
        or (write[0] != KIND_DELETE and address.column in expiring)
    }


def _value(write: Write) -> bytes | None:
    kind, value = write
    return None if kind == KIND_DELETE else value


def _stored(found: Versions, address: CellAddress) -> bytes | None:
    cell = found.get(address)
    return None if cell is None else cell.value


ATTEMPTS_MAX = 1_000_000
"""No limit in practice: `retry_seconds` is what ends the attempts."""


class Transactions:
    """Commits cells, `transactions_in_flight` transactions at a time."""

    def __init__(
        self, here: Connection, options: WriteOptions, *, began: Timestamp, is_first: bool
    ) -> None:
        """`began` is when the job did; `is_first` says that no other attempt can have written."""
        self._here = here
        self._options = options
        self._is_first = is_first
        catalogue = options.catalog
        self._all_columns = [] if catalogue is None else [one.column for one in catalogue.values]
        self._condition = (
            None
            if options.if_unchanged_since is None
            else Condition(
                options.target.table,
                options.if_unchanged_since,
                began,
                codecs.raw if catalogue is None else catalogue.key_codec,
                skip_equal=options.skip_equal,
                is_merge=options.operation == MERGE,
            )
        )
        self._is_merge = options.operation == MERGE
        self._looks_first = self._condition is not None or self._is_merge or options.skip_equal
        self._table = Table(options.target.table, key=codecs.stored)
        self._policy = RetryPolicy(
            attempts_max=ATTEMPTS_MAX, deadline_seconds=options.retry_seconds
        )
        catalog, deadline = here.database.internal.engine.catalog, here.deadline(options.target)
        info = here.call(lambda: catalog.table(options.target.table, deadline))
        self._table_id = info.table_id
        ranges = here.call(lambda: here.ranges(options.target))
        self._borders = [one.start for one in ranges[1:]]
        self._in_flight: deque[tuple[set[bytes], Pending[None]]] = deque()
        self.written = Written()
        """Counts of what was committed so far."""

    def write(self, cells: list[Cell]) -> None:
        """Returns once all but a few are committed. Raises if one has failed for good."""
        for part in cut(cells, self._table_id, self._options.transaction_rows, self._borders):
            rows = {address.row for address in part}
            for row in rows:
                self._here.database.internal.engine.require_row("row", row)
            while len(self._in_flight) >= self._options.transactions_in_flight:
                self._wait()
            # Two that write the same row might commit in either order, and the last one has to win.
            while not all(rows.isdisjoint(others) for others, _ in self._in_flight):
                self._wait()
            pending = self._here.thread.start(partial(self._commit, part))
            self._in_flight.append((rows, pending))

    def finish(self) -> None:
        """Waits for the rest."""
        while self._in_flight:
            self._wait()

    def settle(self) -> None:
        """After a failure: waits for the transactions that are in flight, so that they count."""
        while self._in_flight:
            try:
                self._wait()
            except PercolatorError as error:
                log.warning("another transaction of the task failed: %s", error)

    def _wait(self) -> None:
        _, pending = self._in_flight.popleft()
        pending.wait()

    # ------------------------------------------------------------------ in the event loop

    async def _commit(self, writes: Writes) -> None:
        attempts = self._here.database.internal.attempts(self._policy)
        try:
            await self._commit_in(attempts, writes)
        finally:
            attempts.end()

    async def _commit_in(self, attempts: Attempts, writes: Writes) -> None:
        database = self._here.database
        clock = database.internal.engine.world.clock
        began, tried, may_be_own = clock.monotonic_seconds(), 0, not self._is_first
        while True:
            tried += 1
            transaction = database.internal.attempt(attempts, 0)
            try:
                written = await self._attempt(transaction, writes, may_be_own=may_be_own)
            except RowChanged:
                raise
            except PercolatorError as error:
                self.written.conflicts += 1
                if isinstance(error, OutcomeUnknown) and await _was_committed(transaction):
                    written = len(writes)
                elif await attempts.again(_as_repeatable(error)):
                    may_be_own = may_be_own or error.retry is not Retry.SAFE
                    continue
                elif _as_repeatable(error).retry is Retry.SAFE:
                    raise self._gave_up(tried, clock.monotonic_seconds() - began, error) from error
                else:
                    raise
            self.written.transactions += bool(written)
            self.written.cells += written
            self.written.equal += len(writes) - written
            return

    def _gave_up(self, tried: int, seconds: float, error: PercolatorError) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"gave up on a transaction after {tried} attempts in {seconds:.1f} s; the option "
            f"retry_seconds is {self._options.retry_seconds:g}; last error: {error.message}"
        )

    async def _attempt(
        self, transaction: aio.Transaction, writes: Writes, *, may_be_own: bool
    ) -> int:
        """Returns how many cells it wrote."""
        changed = writes
        if self._looks_first:
            changed = await self._reviewed(transaction, writes, may_be_own=may_be_own)
        write_set = transaction.internal.writes
        for address, (kind, value) in changed.items():
            if kind == KIND_DELETE:
                write_set.delete(address)
            else:
                write_set.put(address, value)
        await transaction.commit()
        return len(changed)

    async def _reviewed(
        self, transaction: aio.Transaction, writes: Writes, *, may_be_own: bool
    ) -> Writes:
        """The writes that are left once it is known what is there; other cells are locked."""
        options, condition, is_merge = self._options, self._condition, self._is_merge
        rows = dict.fromkeys(address.row for address in writes)
        seen = dict.fromkeys(writes)
        if condition is not None or is_merge:
            columns = self._all_columns
            seen |= dict.fromkeys(
                CellAddress(self._table_id, row, column) for row in rows for column in columns
            )
        deadline = self._here.deadline(options.target)
        found = await transaction.internal.versions(seen, deadline)
        expiring: frozenset[bytes] = frozenset()
        if options.skip_equal:
            env = self._here.database.internal.engine.env
            expiring = (await env.schema_of_reads(self._table_id, deadline)).expiring
        left = writes
        if condition is not None:
            left = condition.unwritten(left, found, may_be_own=may_be_own, expiring=expiring)
            missing = [address for address in seen if address not in found]
            condition.refuse_vanished(await self._present_before(missing))
        if is_merge:
            left = merged(
                left, found, update=options.update_existing, insert=options.insert_missing
            )
        if options.skip_equal:
            left = differing(left, found, expiring)
        if condition is not None or is_merge:
            kept = {address.row for address in left}
            for address in seen:
                if address.row in kept and address not in left:
                    transaction.internal.writes.lock(address)
        return left

    async def _present_before(self, cells: list[CellAddress]) -> list[CellAddress]:
        """Which of the cells were there when the rows were read that the frame comes from."""
        since = self._options.if_unchanged_since
        if not cells or since is None:
            return []
        rows = list(dict.fromkeys(address.row for address in cells))
        columns = list(dict.fromkeys(address.column for address in cells))
        seconds = self._options.target.timeout_seconds
        async with self._here.database.internal.snapshot(since, seconds) as snapshot:
            page = await snapshot.get_cells(self._table, rows, columns=columns)
        there = set(zip(page.rows, page.columns, strict=True))
        return [address for address in cells if (address.row, address.column) in there]


async def _was_committed(transaction: aio.Transaction) -> bool:
    """Asks after an unknown outcome. Still unknown counts as no: writing again is harmless."""
    try:
        return await transaction.resolve() is aio.Outcome.COMMITTED
    except PercolatorError:
        return False


def _as_repeatable(error: PercolatorError) -> PercolatorError:
    """Writing rows twice is harmless, so an unknown outcome can be retried like a conflict."""
    if isinstance(error, OutcomeUnknown | ExecutionUnknown):
        again = ConflictError(error.message)
        again.retry = Retry.SAFE
        return again
    return error


class TransactionWriter(DataSourceArrowWriter):
    """Upserts, deletes or merges."""

    def __init__(self, options: WriteOptions, began: Timestamp) -> None:
        """Made on the driver, at `began`, before any task."""
        self._options = options
        self._began = began

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        show_log()
        refuse_created_table()
        began = time.monotonic()
        here = checked(self._options.target, self._options.catalog)
        transactions = Transactions(
            here, self._options, began=self._began, is_first=_is_first_attempt()
        )
        cells = cells_of(self._options)
        written = transactions.written
        try:
            with collecting_rarely():
                for batch in iterator:
                    written.rows += batch.num_rows
                    transactions.write(cells(batch))
                transactions.finish()
        except Exception as error:
            transactions.settle()
            written.seconds = time.monotonic() - began
            log.warning("the task failed; what it committed stays: %s", written)
            error.add_note(f"the task failed; what it committed stays: {written}")
            raise
        finally:
            # The process may end with the task: let it finish what it has committed.
            here.call(lambda: here.database.internal.engine.env.background.drain(DRAIN_SECONDS))
        written.seconds = time.monotonic() - began
        log.info("task: %s", written)
        return written

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        show_log()
        log.info("job: %s", total(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        show_log()
        reported = sum(message is not None for message in messages)
        log.warning(
            "the job failed; what it committed stays. %d of %d tasks reported %s. "
            "A task that failed has logged its own count",
            reported,
            len(messages),
            total(messages),
        )


def cells_of(options: WriteOptions) -> Callable[[pa.RecordBatch], list[Cell]]:
    """The shape that turns the rows of a frame into the cells that are written."""
    shape = shape_of(options.catalog)
    if options.operation == "delete":
        return lambda batch: shape.deletions(batch, options.columns)
    if options.operation == MERGE:
        return lambda batch: _once(_merge_cells(batch, shape, options), "a merge")
    if options.if_unchanged_since is not None:
        # The values of both were computed from one row: whichever stays, the other one is lost.
        return lambda batch: _once(shape.cells(batch, options.nulls), "if_unchanged_since")
    return lambda batch: shape.cells(batch, options.nulls)


def _once(cells: list[Cell], who: str) -> list[Cell]:
    """The cells, none of which may be there twice."""
    addresses = [(row, column) for row, column, _ in cells]
    if len(set(addresses)) < len(addresses):
        row, _ = next(one for one, times in Counter(addresses).items() if times > 1)
        raise SchemaError(
            f"a key appears twice in the frame, and {who} needs each key once: row {quoted(row)}"
        )
    return cells


def _is_first_attempt() -> bool:
    """True if Spark says that no attempt of this task was made before.

    It does not say so of a whole stage that runs again: then rows that the task has written before
    are refused, which is safe.
    """
    task = TaskContext.get()
    return task is None or not task.attemptNumber()


def _merge_cells(batch: pa.RecordBatch, shape: Shape, options: WriteOptions) -> list[Cell]:
    """The cells of rows to write, and the deletions of those that `delete_field` names."""
    nulls = options.nulls
    if nulls == "delete" and not options.update_existing:
        # Of a row that exists, nothing is written: deletions alone would look like one to delete.
        nulls = "skip"
    if options.delete_field is None:
        return shape.cells(batch, nulls)
    flags = [bool(flag) for flag in column_of(batch, options.delete_field).to_pylist()]
    rows = batch.drop_columns([_named(batch, options.delete_field)])
    kept = rows.filter(pa.array([not flag for flag in flags], pa.bool_()))
    gone = rows.filter(pa.array(flags, pa.bool_()))
    return shape.cells(kept, nulls) + shape.deletions(gone, None)


def _named(batch: pa.RecordBatch, name: str) -> str:
    """The name as the batch spells it."""
    return next(one for one in batch.schema.names if one.lower() == name.lower())


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Thousands of rows in flight are not garbage, and searching them for some is expensive."""
    before = gc.get_threshold()
    gc.set_threshold(NEW_OBJECTS, YOUNG_COLLECTIONS, MIDDLE_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
