"""A large transaction is sent in portions, so that its messages do not all exist at one time."""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import CellAddress

STEPS_AT_ONCE_MAX = 4_096


def portions(cells: Sequence[CellAddress]) -> range:
    """The indexes at which the portions begin."""
    return range(0, len(cells), STEPS_AT_ONCE_MAX)


def portion(cells: Sequence[CellAddress], first: int) -> Sequence[CellAddress]:
    """The portion that begins at this index."""
    if len(cells) <= STEPS_AT_ONCE_MAX:
        return cells  # the usual case, in which nothing is copied
    return cells[first : first + STEPS_AT_ONCE_MAX]
