"""Sets of rows as ranges of row keys: the rows that options choose, cut at the tablets' bounds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from percolator.codecs import after_prefix


@dataclass(frozen=True, order=True)
class RowsBetween:
    """Rows from start (included) to end (excluded; empty: to the last row)."""

    start: bytes = b""
    end: bytes = b""

    @classmethod
    def only(cls, row: bytes) -> RowsBetween:
        return cls(row, row + b"\0")

    @classmethod
    def with_prefix(cls, prefix: bytes) -> RowsBetween:
        return cls(prefix, after_prefix(prefix))

    @property
    def is_one_row(self) -> bool:
        return self.end == self.start + b"\0"

    def intersected(self, other: RowsBetween) -> RowsBetween | None:
        """The rows in both; None if there are none."""
        start = max(self.start, other.start)
        ends = [end for end in (self.end, other.end) if end]
        end = min(ends) if ends else b""
        return None if end and start >= end else RowsBetween(start, end)


class RowRanges:
    """Any number of ranges, in order. Those that overlap become one, so that no row is read twice.

    Single rows that are neighbours stay apart: a read asks for them together.
    """

    def __init__(self, ranges: Iterable[RowsBetween]) -> None:
        merged: list[RowsBetween] = []
        for one in sorted(ranges):
            last = merged[-1] if merged else None
            if last is None or (last.end and last.end <= one.start):
                merged.append(one)
            elif last.end and (not one.end or one.end > last.end):
                merged[-1] = RowsBetween(last.start, one.end)
        self.ranges = tuple(merged)
        self._starts = [one.start for one in merged]

    def contains(self, row: bytes) -> bool:
        """Whether the row is in one of the ranges."""
        place = bisect_right(self._starts, row) - 1
        if place < 0:
            return False
        end = self.ranges[place].end
        return not end or row < end

    def within(self, bounds: RowsBetween) -> tuple[RowsBetween, ...]:
        """The rows that lie within the bounds, as ranges in order."""
        found = []
        first = max(bisect_right(self._starts, bounds.start) - 1, 0)
        for one in self.ranges[first:]:
            if bounds.end and one.start >= bounds.end:
                break
            inside = one.intersected(bounds)
            if inside is not None:
                found.append(inside)
        return tuple(found)


ALL_ROWS = RowRanges([RowsBetween()])
