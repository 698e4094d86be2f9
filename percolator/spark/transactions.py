"""The transactions of one task: built in the task's thread, committed in the client's.

Rows are sorted, so that a transaction touches few tablets, and two attempts of one task meet at the
same rows in the same order. A transaction that loses a conflict is tried again on a new snapshot:
it writes what it writes whatever was there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from operator import itemgetter

from percolator import aio, codecs
from percolator.errors import (
    CellAddress,
    ConflictError,
    ExecutionUnknown,
    OutcomeUnknown,
    PercolatorError,
    Retry,
)
from percolator.loop_thread import Pending
from percolator.protocol.records import KIND_DELETE, KIND_PUT
from percolator.protocol.write_steps import Write
from percolator.retries import RetryPolicy
from percolator.schema import Column, Table
from percolator.spark.connections import Connection
from percolator.spark.options import WriteOptions
from percolator.spark.shapes import Cell

TRANSACTION_BYTES = 8 << 20
"""A transaction ends here, too."""
ATTEMPTS_MAX = 1_000_000
"""Time is what limits them."""

_row = itemgetter(0)


class Transactions:
    """Commits cells, `transactions_in_flight` transactions at a time."""

    def __init__(self, here: Connection, options: WriteOptions) -> None:
        self._here = here
        self._options = options
        self._table = Table(options.target.table, key=codecs.raw)
        self._policy = RetryPolicy(
            attempts_max=ATTEMPTS_MAX, deadline_seconds=options.retry_seconds
        )
        catalog, deadline = here.database.engine.catalog, here.deadline(options.target)
        info = here.call(lambda: catalog.table(options.target.table, deadline))
        self._table_id = info.table_id
        self._in_flight: deque[tuple[set[bytes], Pending[None]]] = deque()
        self.cells = 0
        self.equal = 0
        self.committed = 0
        self.conflicts = 0

    def write(self, cells: list[Cell]) -> None:
        """Returns once all but a few are committed. Raises what made one of them impossible."""
        cells.sort(key=_row)  # keeps the order of what is written twice: the last one counts
        for part in self._parts(cells):
            rows = {address.row for address in part}
            while len(self._in_flight) >= self._options.transactions_in_flight:
                self._wait()
            # Two of one row might commit in any order: the last row of a task is the one to stay.
            while not all(rows.isdisjoint(others) for others, _ in self._in_flight):
                self._wait()
            pending = self._here.thread.start(partial(self._commit, part))
            self._in_flight.append((rows, pending))

    def finish(self) -> None:
        """Waits for the rest."""
        while self._in_flight:
            self._wait()

    def _wait(self) -> None:
        _, pending = self._in_flight.popleft()
        pending.wait()

    def _parts(self, cells: list[Cell]) -> Iterator[dict[CellAddress, Write]]:
        """The writes of one transaction after the other; no row is in two of them."""
        table_id, rows_max = self._table_id, self._options.transaction_rows
        writes: dict[CellAddress, Write] = {}
        rows = size_bytes = 0
        last: bytes | None = None
        for row, column, value in cells:
            if row != last:
                if rows >= rows_max or size_bytes >= TRANSACTION_BYTES:
                    yield writes
                    writes, rows, size_bytes = {}, 0, 0
                last = row
                rows += 1
            if value is None:
                writes[CellAddress(table_id, row, column)] = (KIND_DELETE, b"")
            else:
                writes[CellAddress(table_id, row, column)] = (KIND_PUT, value)
                size_bytes += len(value)
        if writes:
            yield writes

    # ------------------------------------------------------------------ in the event loop

    async def _commit(self, writes: dict[CellAddress, Write]) -> None:
        database = self._here.database
        attempts = database.attempts(self._policy)
        while True:
            transaction = database.attempt(attempts, 0)
            try:
                written = await self._attempt(transaction, writes)
            except PercolatorError as error:
                self.conflicts += 1
                if isinstance(error, OutcomeUnknown) and await _was_committed(transaction):
                    written = len(writes)
                elif not await attempts.again(_as_repeatable(error)):
                    raise
                else:
                    continue
            self.committed += bool(written)
            self.cells += written
            self.equal += len(writes) - written
            return

    async def _attempt(self, transaction: aio.Transaction, writes: dict[CellAddress, Write]) -> int:
        """Returns how many cells it has written."""
        changed = writes
        if self._options.skip_equal:
            changed = await self._changed(transaction, writes)
        write_set = transaction.writes
        for address, (kind, value) in changed.items():
            if kind == KIND_DELETE:
                write_set.delete(address)
            else:
                write_set.put(address, value)
        await transaction.commit()
        return len(changed)

    async def _changed(
        self, transaction: aio.Transaction, writes: dict[CellAddress, Write]
    ) -> dict[CellAddress, Write]:
        """Those that would make a difference to what the transaction's snapshot shows."""
        rows = list(dict.fromkeys(address.row for address in writes))
        names = dict.fromkeys(address.column for address in writes)
        columns = [Column(self._table, name, codecs.raw) for name in names]
        found = await transaction.get_many(self._table, rows, columns)
        stored = {row.key: row.raw() for row in found}
        return {
            address: (kind, value)
            for address, (kind, value) in writes.items()
            if stored[address.row].get(address.column) != (value if kind == KIND_PUT else None)
        }


async def _was_committed(transaction: aio.Transaction) -> bool:
    """After an unknown outcome. Still unknown counts as no: writing the rows again is harmless."""
    try:
        return await transaction.resolve() is aio.Outcome.COMMITTED
    except PercolatorError:
        return False


def _as_repeatable(error: PercolatorError) -> PercolatorError:
    """Rows that were written may be written again, so what is unknown need not be found out."""
    if isinstance(error, OutcomeUnknown | ExecutionUnknown):
        again = ConflictError(error.message)
        again.retry = Retry.SAFE
        return again
    return error
