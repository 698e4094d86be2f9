"""An observer as the cluster knows it: its table's id, the bytes of its name, its counters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import islice

from percolator.errors import CellAddress
from percolator.formats.records import acknowledgement_column
from percolator.observers.definition import Observer
from percolator.observers.time_limits import ThreadShare
from percolator.protocol.environment import ContendedCells
from percolator.schema import Column
from percolator.v1.master_pb2 import OwedBackfill

_COLUMNS_READ_MAX = 16
"""An observer that reads more of a row reads the others when it needs them."""


class Watched:
    """One observer of one worker."""

    __slots__ = (
        "_acknowledgements",
        "batch_max",
        "columns_read",
        "counters",
        "hot_cell",
        "id",
        "is_active",
        "is_gone",
        "observer",
        "owed",
        "runs_max",
        "table_id",
        "threads",
    )

    def __init__(self, observer: Observer, table_id: int) -> None:
        self.observer = observer
        self.table_id = table_id
        self.id = observer.name.encode()
        """The observer's name as bytes, as in notifications."""
        self.is_active = True
        """False while it is paused, and while it is gone."""
        self.is_gone = False
        """It was removed from the table, or the table was dropped. Others may have its name now."""
        self.owed: OwedBackfill | None = None
        """The backfill that is not finished yet."""
        self.threads = ThreadShare(observer.threads)
        """For its function, if that is blocking."""
        self.runs_max = observer.concurrency if observer.is_async else observer.threads
        """How many runs may be in progress, of which those that hang are a part."""
        self.batch_max = observer.batch or 1
        """The most rows in one run, as long as such runs do not conflict."""
        self.counters = Counters()
        self.columns_read: Sequence[bytes] = ()
        """The columns of the row of its change that the last run has read."""
        self.hot_cell: CellAddress | None = None
        """The cell where a run has lost, if all runs that committed since have written it, too."""
        self._acknowledgements = {
            column.name: acknowledgement_column(self.id, column.name) for column in observer.columns
        }

    @property
    def columns(self) -> Sequence[bytes]:
        return list(self._acknowledgements)

    def note_read(self, columns: Iterable[bytes]) -> None:
        """Takes note of what a run has read of its row: the next one will probably do the same."""
        self.columns_read = tuple(islice(columns, _COLUMNS_READ_MAX))

    def watches(self, column: bytes) -> bool:
        return column in self._acknowledgements

    def column(self, name: bytes) -> Column[object]:
        """The column of this name, as the program declared it."""
        return next(column for column in self.observer.columns if column.name == name)

    def arguments(self, rows: Sequence[bytes], column: bytes) -> list[object]:
        """The arguments of the function after the transaction, for changes of these rows."""
        keys = [self.observer.table.key.decode(row) for row in rows]
        found: list[object] = [keys if self.observer.batch else keys[0]]
        return [*found, self.column(column)] if self.observer.wants_column else found

    def acknowledgement(self, row: bytes, column: bytes) -> CellAddress:
        """The hidden cell that says which changes of this cell were handled."""
        return CellAddress(self.table_id, row, self._acknowledgements[column])

    def __repr__(self) -> str:
        return f"Watched({self.observer.name!r} of table {self.table_id})"


LATENCY_BOUNDS_SECONDS = (
    0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
"""Upper bounds of the histogram of latencies."""


class Counters:
    """The counters of one observer, since the worker was started. Plain numbers, updated only in
    its event loop.
    """

    __slots__ = (
        "abandoned",
        "acknowledged",
        "cells",
        "cells_written",
        "commits",
        "conflicts",
        "dead_letters",
        "failures",
        "hung",
        "latencies",
        "latency_seconds",
        "postponed",
        "round_trips",
        "rows_read",
        "runs",
    )

    def __init__(self) -> None:
        self.runs = 0
        """How often the function was called; of a batch, each row counts."""
        self.commits = 0
        """Runs that committed."""
        self.conflicts = 0
        """Runs that conflicted with another transaction, and are retried."""
        self.cells = ContendedCells()
        """The cells where they conflicted."""
        self.postponed = 0
        """Attempts that the cluster did not answer in time, and that are retried."""
        self.failures = 0
        """Runs that raised, wrote too much, or took too long."""
        self.abandoned = 0
        """Failures because the run took too long."""
        self.hung = 0
        """Threads that are currently still busy with a run that was given up."""
        self.dead_letters = 0
        """Changes that were put aside."""
        self.acknowledged = 0
        """Notifications with nothing left to do: a run had committed already, or the cell was
        deleted and deletes do not wake the observer."""
        self.rows_read = 0
        """Rows that its runs have asked for or scanned, including those that did not commit."""
        self.round_trips = 0
        """How often they have waited for answers; parallel requests count once."""
        self.cells_written = 0
        """Cells that they have put, deleted or locked, with their acknowledgements."""
        self.latencies = [0] * (len(LATENCY_BOUNDS_SECONDS) + 1)
        """Runs by the time from the change to their commit; the last bucket has no upper bound."""
        self.latency_seconds = 0.0
        """The sum of all latencies."""

    def committed(self, latency_seconds: float | None) -> None:
        """Counts a committed run. The latency is None if it wrote nothing and has no timestamp."""
        self.commits += 1
        if latency_seconds is not None:
            self.latencies[bisect_left(LATENCY_BOUNDS_SECONDS, latency_seconds)] += 1
            self.latency_seconds += latency_seconds
