"""An observer as the cluster knows it: its table's id, the bytes of its name, whether it is run."""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import CellAddress
from percolator.observers.counters import Counters
from percolator.observers.definition import Observer
from percolator.protocol.hidden_cells import acknowledgement_column
from percolator.schema import Column


class Watched:
    """One observer of one worker."""

    __slots__ = ("_acknowledgements", "counters", "id", "is_active", "observer", "table_id")

    def __init__(self, observer: Observer, table_id: int) -> None:
        self.observer = observer
        self.table_id = table_id
        self.id = observer.name.encode()
        """As notifications name it."""
        self.is_active = True
        """Not while it is paused, nor once it was removed from the table."""
        self.counters = Counters()
        self._acknowledgements = {
            column.name: acknowledgement_column(self.id, column.name) for column in observer.columns
        }

    @property
    def columns(self) -> Sequence[bytes]:
        return list(self._acknowledgements)

    def watches(self, column: bytes) -> bool:
        return column in self._acknowledgements

    def column(self, name: bytes) -> Column[object]:
        """The column of this name, as the program declared it."""
        return next(column for column in self.observer.columns if column.name == name)

    def acknowledgement(self, row: bytes, column: bytes) -> CellAddress:
        """The hidden cell that says which changes of this cell were seen."""
        return CellAddress(self.table_id, row, self._acknowledgements[column])

    def __repr__(self) -> str:
        return f"Watched({self.observer.name!r} of table {self.table_id})"
