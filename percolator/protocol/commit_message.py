"""The message that commits a whole transaction: what fits into one, and what it says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from percolator.errors import CellAddress
from percolator.formats.records import KIND_PUT_IN_DATA
from percolator.limits import Limits
from percolator.protocol.write_steps import Write
from percolator.routing.cells import WholeCommit
from percolator.routing.table_info import TableSchema


def fits_one_message(
    writes: Mapping[CellAddress, Write], weak: Collection[CellAddress], limits: Limits
) -> bool:
    """Whether the transaction is small enough, and in one table."""
    if len(writes) + len(weak) > limits.one_round_cells_max:
        return False
    size_bytes = 0
    for _, value in writes.values():
        size_bytes += len(value)
    if size_bytes > limits.batch_bytes_max // 2:
        return False
    if len(writes) + len(weak) == 1:
        return True
    return len({cell.table_id for cells in (writes, weak) for cell in cells}) == 1


def commit_message(
    start: int,
    cells: Sequence[CellAddress],
    writes: Mapping[CellAddress, Write],
    inline_bytes_max: int,
    schema: TableSchema,
    weak: Sequence[CellAddress],
    *,
    is_followed: bool,
) -> WholeCommit:
    """The whole transaction. Repeated, it is the same but for a newer schema's observers.

    `cells`: the keys of `writes`, in their order.
    """
    observers = schema.observers
    rows: list[bytes] = []
    columns: list[bytes] = []
    kinds: list[int] = []
    values: list[bytes] = []
    for cell in cells:
        kind, value = writes[cell]
        if len(value) > inline_bytes_max:
            kind = KIND_PUT_IN_DATA
        _, row, column = cell
        rows.append(row)
        columns.append(column)
        kinds.append(kind)
        values.append(value)
    return WholeCommit(
        cells[0][0],
        schema.version,
        start,
        rows,
        columns,
        kinds,
        values,
        _observers_of(columns, observers) if observers else (),
        _weak_notifications(weak, schema) if weak else (),
        is_followed,
    )


def _observers_of(
    columns: Sequence[bytes], observers: Mapping[bytes, tuple[bytes, ...]]
) -> list[tuple[bytes, tuple[bytes, ...]]]:
    return [(column, observers[column]) for column in dict.fromkeys(columns) if column in observers]


def _weak_notifications(
    cells: Sequence[CellAddress], schema: TableSchema
) -> list[tuple[bytes, bytes, tuple[bytes, ...]]]:
    observers = schema.weak_observers
    return [(row, column, observers[column]) for _, row, column in cells if column in observers]
