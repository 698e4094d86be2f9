"""Checks cells that come as parallel lists: of whole transactions, and of steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from percolator.errors import InvalidArgument
from percolator.schema import ROW_BYTES_MAX
from percolator.tablet.keys import ColumnEncoder, component
from percolator.tablet.limits import too_long
from percolator.tablet.memory.state import TabletState
from percolator.v1 import tabletserver_pb2 as pb


class ListedCells:
    """The checks of one tablet. Each of them raises `InvalidArgument`."""

    def __init__(self, state: TabletState, columns: ColumnEncoder) -> None:
        self._start = state.identity.start
        self._end = state.identity.end
        self._limits = state.limits
        self._columns = columns

    def cell(
        self, prefix: str, at: int, row: bytes, column: bytes, *, is_new: bool = True
    ) -> bytes:
        """Returns `keys.cell_prefix` of a row and a column. A long row is only refused where it
        `is_new`: a transaction that has such a primary can still be settled."""
        limits = self._limits
        if row < self._start or (self._end and row >= self._end):
            refuse_listed(f"{prefix}rows", at, "not in this tablet")
        if len(row) > limits.row_bytes_max and (is_new or len(row) > ROW_BYTES_MAX):
            refuse_listed(f"{prefix}rows", at, too_long(row, limits.row_bytes_max))
        if len(column) > limits.column_bytes_max:
            refuse_listed(f"{prefix}columns", at, too_long(column, limits.column_bytes_max))
        return component(row) + self._columns[column]

    def observed(
        self, field: str, columns: Iterable[pb.ObservedColumn]
    ) -> dict[bytes, tuple[bytes, ...]]:
        """The observers by column."""
        found = {one.column: tuple(one.observers) for one in columns}
        for names in found.values():
            self.check_observers(field, names)
        return found

    def check_observers(self, field: str, names: Sequence[bytes]) -> None:
        limits = self._limits
        if len(names) >= limits.changes_max:
            raise InvalidArgument(field, f"{len(names)}, fewer than {limits.changes_max} allowed")
        if len(set(names)) != len(names):
            raise InvalidArgument(field, "an observer is named twice")
        for name in names:
            if not 0 < len(name) <= limits.qualifier_bytes_max:
                raise InvalidArgument(
                    field, f"expected 1 to {limits.qualifier_bytes_max} bytes, the observer's name"
                )


def refuse_listed(field: str, at: int, reason: str) -> NoReturn:
    raise InvalidArgument(f"{field}[{at}]", reason)
