"""An observer as the cluster knows it: its table's id, the bytes of its name, whether it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from percolator.errors import CellAddress
from percolator.formats.hidden_cells import acknowledgement_column
from percolator.observers.counters import Counters
from percolator.observers.definition import Observer
from percolator.schema import Column
from percolator.v1.master_pb2 import OwedBackfill

_COLUMNS_READ_MAX = 16
"""An observer that reads more of a row reads the others when it needs them."""


class Watched:
    """One observer of one worker."""

    __slots__ = (
        "_acknowledgements",
        "columns_read",
        "counters",
        "hot_cell",
        "id",
        "is_active",
        "is_gone",
        "observer",
        "owed",
        "table_id",
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
        self.counters = Counters()
        self.columns_read: Sequence[bytes] = ()
        """The columns of the row of its change that the last run has read."""
        self.hot_cell: CellAddress | None = None
        """Where a run has lost, if all runs that committed since have written it, too."""
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

    def acknowledgement(self, row: bytes, column: bytes) -> CellAddress:
        """The hidden cell that says which changes of this cell were handled."""
        return CellAddress(self.table_id, row, self._acknowledgements[column])

    def __repr__(self) -> str:
        return f"Watched({self.observer.name!r} of table {self.table_id})"
