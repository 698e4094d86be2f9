"""What one task of an atomic job writes: locked in the client's thread, portion by portion.

One portion is under way while the task makes the next one. No process holds more than two.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from types import TracebackType

from percolator.aio.share import FLUSH_BYTES, FLUSH_CELLS
from percolator.aio.tickets import Receipt, Ticket
from percolator.blocking.loop_thread import Pending
from percolator.errors import CellAddress, PercolatorError, WrittenTwice
from percolator.formats.records import KIND_DELETE, KIND_PUT
from percolator.protocol.write_steps import Write
from percolator.spark.connections import Connection
from percolator.spark.options import WriteOptions
from percolator.spark.shapes.fields import Cell
from percolator.spark.writing.written import log


class Locking:
    """One attempt at a task. Leaving its block before `finish` rolls it back."""

    def __init__(self, here: Connection, options: WriteOptions, ticket: Ticket, task: str) -> None:
        self._here = here
        self._task = task
        internal = here.database.internal
        # It waits for other writers' locks as long as a transaction would be retried.
        self._share = internal.share(
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
        return self._share.kept

    def finish(self) -> Receipt:
        """Locks the rest, and returns what the driver needs to commit it."""
        self._flush()
        self._wait()
        return self._here.call(self._share.finish)

    def _flush(self) -> None:
        self._wait()
        if self._writes:
            writes, self._writes, self._bytes = self._writes, {}, 0
            self._under_way = self._here.thread.start(partial(self._share.write, writes))

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.wait()

    def __enter__(self) -> Locking:
        self._here.call(self._share.begin)
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
            self._here.call(self._share.abandon)
        except PercolatorError as problem:
            # The first error says more, and what is not rolled back expires by itself.
            log.warning("an attempt at task %r was left to expire: %s", self._task, problem)
