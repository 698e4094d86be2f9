"""The newest committed version of every cell, as the replay moves from commit to commit.

When all commits up to a timestamp have been applied, the frontier *is* the snapshot at that
timestamp. Tables that are scanned are also kept in row order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from sortedcontainers import SortedDict

from percolator.testing.isolation.blame import NEVER_WRITTEN, Version
from percolator.testing.isolation.history import CellKey, Scan

Cells = dict[bytes, bytes]
"""The live cells of a row, by column."""


class ScannedRow(NamedTuple):
    """A row as a scan must return it: at least one cell, columns in order."""

    row: bytes
    cells: list[tuple[bytes, bytes]]


class Frontier:
    """The state of the store at one point of the replay."""

    def __init__(self, initial: Mapping[CellKey, bytes], scanned_tables: Iterable[str]) -> None:
        self._versions: dict[CellKey, Version] = {}
        self._tables: dict[str, SortedDict] = {table: SortedDict() for table in scanned_tables}
        for key, value in initial.items():
            self.put(key, Version(value, None))

    def get(self, key: CellKey) -> Version:
        return self._versions.get(key, NEVER_WRITTEN)

    def put(self, key: CellKey, version: Version) -> None:
        """Makes `version` the newest; its value is None after a deletion."""
        self._versions[key] = version
        rows = self._tables.get(key[0])
        if rows is None:
            return
        _, row, column = key
        cells: Cells | None = rows.get(row)
        if version.value is not None:
            if cells is None:
                rows[row] = {column: version.value}
            else:
                cells[column] = version.value
        elif cells is not None and cells.pop(column, None) is not None and not cells:
            del rows[row]

    def scan(self, scan: Scan, own: Mapping[CellKey, bytes | None]) -> Iterator[ScannedRow]:
        """The rows that `scan` must return, in its order, before its limit is applied.

        `own` is what the scanning transaction had written by then; it hides what the snapshot has.
        """
        rows = self._tables[scan.table]
        wanted = None if scan.columns is None else frozenset(scan.columns)
        overlay = _overlay(scan, own)
        for row in self._rows_in_order(rows, scan, overlay):
            cells: Cells = rows.get(row) or {}
            over = overlay.get(row)
            if over is not None:
                mixed: dict[bytes, bytes | None] = {**cells, **over}
                cells = {column: value for column, value in mixed.items() if value is not None}
            if wanted is not None:
                cells = {column: value for column, value in cells.items() if column in wanted}
            if cells:
                yield ScannedRow(row, sorted(cells.items()))

    @staticmethod
    def _rows_in_order(
        rows: SortedDict, scan: Scan, overlay: Mapping[bytes, object]
    ) -> Iterator[bytes]:
        committed: Iterator[bytes] = rows.irange(
            scan.start, scan.stop or None, inclusive=(True, False), reverse=scan.reverse
        )
        if not overlay:
            return committed
        own = sorted(overlay, reverse=scan.reverse)
        merged = heapq.merge(committed, own, reverse=scan.reverse)
        return (row for row, _ in groupby(merged))


def in_range(row: bytes, scan: Scan) -> bool:
    return scan.start <= row and (not scan.stop or row < scan.stop)


def _overlay(
    scan: Scan, own: Mapping[CellKey, bytes | None]
) -> dict[bytes, dict[bytes, bytes | None]]:
    overlay: dict[bytes, dict[bytes, bytes | None]] = {}
    for (table, row, column), value in own.items():
        if table == scan.table and in_range(row, scan):
            overlay.setdefault(row, {})[column] = value
    return overlay
