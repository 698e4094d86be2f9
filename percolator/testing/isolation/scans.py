"""Compares a scan with the snapshot: the rows it must return, in order, up to its limit.

The lists are normally equal, which costs one comparison. Only if they differ is the difference
taken apart into rows that are missing, doubled, out of order, too many or wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby, islice, pairwise

from percolator.testing.isolation.blame import Blame
from percolator.testing.isolation.findings import Report, shown_key, shown_value
from percolator.testing.isolation.frontier import Frontier, in_range
from percolator.testing.isolation.history import CellKey, Found, Scan, TransactionRecord
from percolator.testing.isolation.violations import ViolationKind


def check_scan(
    reader: TransactionRecord,
    scan: Scan,
    frontier: Frontier,
    own: Mapping[CellKey, bytes | None],
    blame: Blame,
    report: Report,
) -> None:
    """Adds to `report` every difference between what `scan` returned and the snapshot."""
    expected = [
        (row, column, value)
        for row, cells in islice(frontier.scan(scan, own), _rows_due(scan))
        for column, value in cells
    ]
    if expected == list(scan.found):
        return
    comparison = _Comparison(reader, scan, frontier, own, blame, report)
    comparison.bounds()
    comparison.order()
    comparison.cells([Found(*cell) for cell in expected])


def _rows_due(scan: Scan) -> int | None:
    """How many rows must have been returned; None for all of them."""
    limit = scan.row_limit or None
    if scan.complete:
        return limit
    seen = len({found.row for found in scan.found})
    return seen if limit is None else min(limit, seen)


class _Comparison:
    """One scan that differs from its snapshot."""

    def __init__(
        self,
        reader: TransactionRecord,
        scan: Scan,
        frontier: Frontier,
        own: Mapping[CellKey, bytes | None],
        blame: Blame,
        report: Report,
    ) -> None:
        self._reader = reader
        self._scan = scan
        self._frontier = frontier
        self._own = own
        self._blame = blame
        self._report = report

    def bounds(self) -> None:
        """Reports what is outside the requested range, columns or limit."""
        scan = self._scan
        for found in scan.found:
            if not in_range(found.row, scan):
                self._add(ViolationKind.SCAN_OUT_OF_BOUNDS, found, "is outside its range")
            elif scan.columns is not None and found.column not in scan.columns:
                self._add(ViolationKind.SCAN_OUT_OF_BOUNDS, found, "was not requested")
        rows = list(self._found_rows())
        if scan.row_limit and len(rows) > scan.row_limit:
            text = f"{self._name()} returned {len(rows)} rows"
            self._report.add(ViolationKind.SCAN_OUT_OF_BOUNDS, text, self._reader)

    def order(self) -> None:
        """Reports rows out of order, and rows or columns that appear twice."""
        seen: set[bytes] = set()
        for row, cells in self._found_rows():
            columns = [cell.column for cell in cells]
            if row in seen or len(set(columns)) != len(columns):
                self._add(ViolationKind.DOUBLED_ROW, cells[0], "appears twice")
            seen.add(row)
        distinct = list(dict.fromkeys(row for row, _ in self._found_rows()))
        for before, after in pairwise(distinct):
            if (before > after) is not self._scan.reverse:
                text = (
                    f"{self._name()} returned row {shown_value(after)} after {shown_value(before)}"
                )
                self._report.add(ViolationKind.UNORDERED_SCAN, text, self._reader)

    def cells(self, expected: list[Found]) -> None:
        """Reports cells that are missing, that do not belong there, or that have a wrong value."""
        due = {(cell.row, cell.column): cell.value for cell in expected}
        got = {(cell.row, cell.column): cell.value for cell in self._scan.found}
        for name in dict.fromkeys([*due, *got]):
            if got.get(name) != due.get(name):
                self._wrong_cell(name, got.get(name), due.get(name))

    def _wrong_cell(
        self, name: tuple[bytes, bytes], found: bytes | None, due: bytes | None
    ) -> None:
        key: CellKey = (self._scan.table, *name)
        if key in self._own:
            kind, text, writer = self._blame.wrong_own_read(
                self._reader, key, found, self._own[key]
            )
        else:
            version = self._frontier.get(key)
            if due is None and version.value is not None:
                return  # it exists, but is not due: bounds() has reported it, or a row is missing
            kind, text, writer = self._blame.wrong_read(self._reader, key, found, version)
            if found is None:
                kind = ViolationKind.LOST_ROW
            elif due is None:
                kind = ViolationKind.PHANTOM
        self._report.add(kind, f"{self._name()}: {text}", self._reader, writer, key=key)

    def _found_rows(self) -> Iterator[tuple[bytes, list[Found]]]:
        for row, cells in groupby(self._scan.found, key=lambda found: found.row):
            yield row, list(cells)

    def _add(self, kind: ViolationKind, found: Found, what: str) -> None:
        key: CellKey = (self._scan.table, found.row, found.column)
        self._report.add(kind, f"{self._name()}: {shown_key(key)} {what}", self._reader, key=key)

    def _name(self) -> str:
        scan = self._scan
        stop = shown_value(scan.stop) if scan.stop else "the end"
        parts = [f"scan of {scan.table} from {shown_value(scan.start)} to {stop}"]
        if scan.columns is not None:
            parts.append("columns " + ", ".join(map(shown_value, scan.columns)))
        if scan.reverse:
            parts.append("reverse")
        if scan.row_limit:
            parts.append(f"at most {scan.row_limit} rows")
        return f"{self._reader}, {', '.join(parts)}"
