"""Read locks and writers exclude each other, although they lock different cells of a row.

A tablet server does this by itself (percolator/tablet/writing/exclusion.py). A row store knows
nothing of it, so each prewrite asks about the other side, too, in the same check: a cell's prewrite
about all read locks of the cell, and a read lock's prewrite about the cell that it locks. A
prewrite is what has conditions that name no transaction: there is no lock, there is no newer
commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from percolator.formats.hidden_cells import locked_column, read_locks_of
from percolator.rowstore.layout import after_prefix, column_bounds, stored_column
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_WRITE, Space
from percolator.v1.tabletserver_pb2 import Condition, Mutation


class OtherSide(NamedTuple):
    """Cells that a prewrite must not find: stored columns in [first, end), as in the condition."""

    condition: int
    """The index of the condition that holds for these cells as well."""
    space: Space
    from_timestamp: int
    first_column: bytes
    end_column: bytes


def other_sides(step: Mutation) -> Iterator[OtherSide]:
    """What the conditions of a step mean for other cells of its row: nothing if it is no
    prewrite."""
    bounds = other_columns(step.column)
    for index, condition in _naming_nobody(step.conditions):
        yield OtherSide(index, condition.space, condition.from_timestamp, *bounds)


def other_columns(column: bytes) -> tuple[bytes, bytes]:
    """The stored columns that exclude this one: all read locks of a cell, or the cell of one."""
    locked = locked_column(column)
    if locked is not None:
        return column_bounds(locked)
    prefix = stored_column(read_locks_of(column))
    return prefix, after_prefix(prefix)


def _naming_nobody(conditions: Iterable[Condition]) -> Iterator[tuple[int, Condition]]:
    for index, condition in enumerate(conditions):
        if (
            condition.expectation == Condition.EXPECTATION_ABSENT
            and condition.space in (SPACE_LOCK, SPACE_WRITE)
            and not condition.prefix
            and not condition.until_timestamp
        ):
            yield index, condition
