"""The transactions of one task: built in the task's thread, committed in the client's.

Rows are sorted so that a transaction touches few tablets, and so that two attempts of one task meet
at the same rows in the same order. A transaction that loses a conflict is retried on a new
snapshot: what it writes does not depend on what was there.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from percolator import aio, codecs
from percolator.blocking.loop_thread import Pending
from percolator.errors import (
    CellAddress,
    ConflictError,
    DeadlineExceeded,
    ExecutionUnknown,
    OutcomeUnknown,
    PercolatorError,
    Retry,
    RowChanged,
)
from percolator.formats.records import KIND_DELETE
from percolator.retries import Attempts, RetryPolicy
from percolator.schema import Table
from percolator.spark.connections import Connection
from percolator.spark.options import MERGE, WriteOptions
from percolator.spark.shapes.fields import Cell
from percolator.spark.writing.cutting import cut
from percolator.spark.writing.reviews import Condition, Writes, differing, merged
from percolator.spark.writing.written import log
from percolator.timestamps import Timestamp

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
        self.cells = 0
        self.equal = 0
        self.committed = 0
        self.conflicts = 0

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
                self.conflicts += 1
                if isinstance(error, OutcomeUnknown) and await _was_committed(transaction):
                    written = len(writes)
                elif await attempts.again(_as_repeatable(error)):
                    may_be_own = may_be_own or error.retry is not Retry.SAFE
                    continue
                elif _as_repeatable(error).retry is Retry.SAFE:
                    raise self._gave_up(tried, clock.monotonic_seconds() - began, error) from error
                else:
                    raise
            self.committed += bool(written)
            self.cells += written
            self.equal += len(writes) - written
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
