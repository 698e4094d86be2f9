"""Bugs of joined pages, which a simulation has to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from percolator.tablet.reading import scan_page
from percolator.tablet.reading.joined_cells import join_cells
from percolator.tablet.reading.scan_page import ScanPage
from percolator.v1 import tabletserver_pb2 as pb

Patch = pytest.MonkeyPatch


def a_page_with_locks_is_joined(patch: Patch) -> None:
    """Joined cells say nothing about locks, so nobody resolves them."""
    correct = ScanPage._response

    def wrong(self: ScanPage) -> pb.ScanResponse:
        self._lock_rows = []
        return correct(self)

    patch.setattr(ScanPage, "_response", wrong)


def rows_of_different_columns_are_joined(patch: Patch) -> None:
    """If only the number of cells fits, values come to other columns and rows."""

    def wrong(
        rows: list[bytes], columns: list[bytes], values: list[bytes], found: pb.JoinedCells
    ) -> bool:
        width = rows.count(rows[0]) if rows else 1
        distinct = list(dict.fromkeys(rows))
        if len(distinct) * width != len(rows):
            return join_cells(rows, columns, values, found)
        as_first = columns[:width] * len(distinct)
        return join_cells([row for row in distinct for _ in range(width)], as_first, values, found)

    patch.setattr(scan_page, "join_cells", wrong)


def joined_values_are_those_of_the_next_row(patch: Patch) -> None:
    def wrong(
        rows: list[bytes], columns: list[bytes], values: list[bytes], found: pb.JoinedCells
    ) -> bool:
        width = rows.count(rows[0]) if rows else 0
        return join_cells(rows, columns, values[width:] + values[:width], found)

    patch.setattr(scan_page, "join_cells", wrong)


def joined_columns_are_sent_in_another_order(patch: Patch) -> None:
    """The names of a page's columns come in another order than their values."""

    def wrong(
        rows: list[bytes], columns: list[bytes], values: list[bytes], found: pb.JoinedCells
    ) -> bool:
        if not join_cells(rows, columns, values, found):
            return False
        names = [column.name for column in found.columns]
        for column, name in zip(found.columns, reversed(names), strict=True):
            column.name = name
        return True

    patch.setattr(scan_page, "join_cells", wrong)


ALL: tuple[Callable[[Patch], None], ...] = (
    a_page_with_locks_is_joined,
    rows_of_different_columns_are_joined,
    joined_values_are_those_of_the_next_row,
    joined_columns_are_sent_in_another_order,
)
