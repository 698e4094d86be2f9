"""Which rows a query's filters leave, as far as they are about the row key.

Rows are stored in the order of their keys' bytes, and Spark compares text and bytes in that same
order, so a comparison of the key, or of its first part, is a range of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from percolator.codecs import after_prefix
from percolator.errors import SchemaError


@dataclass(frozen=True)
class RowsBetween:
    """Rows from start (included) to end (excluded; empty: to the last row)."""

    start: bytes = b""
    end: bytes = b""
    nothing: bool = False

    def intersected(self, other: RowsBetween) -> RowsBetween:
        start = max(self.start, other.start)
        ends = [end for end in (self.end, other.end) if end]
        end = min(ends) if ends else b""
        nothing = self.nothing or other.nothing or bool(end and start >= end)
        return RowsBetween(start, end, nothing)


_NOTHING = RowsBetween(nothing=True)


class KeyFilters:
    """Turns filters on one table's key into a range of rows."""

    def __init__(self, key_fields: Sequence[str], key_codec: Any) -> None:  # noqa: ANN401
        self._first = key_fields[0].lower()
        self._fields = {name.lower() for name in key_fields}
        self._codec = key_codec
        self._whole = len(key_fields) == 1

    def push(self, filters: Sequence[Filter]) -> tuple[RowsBetween, Iterator[Filter]]:
        """The rows that can match, and the filters that Spark still has to apply."""
        rows = RowsBetween()
        left = []
        for one in filters:
            found, exact = self._rows(one)
            rows = rows.intersected(found)
            if not exact:
                left.append(one)
        return rows, iter(left)

    def _rows(self, one: Filter) -> tuple[RowsBetween, bool]:
        """A range that holds all rows that match, and whether it holds nothing else."""
        path: tuple[str, ...] = getattr(one, "attribute", ())
        if len(path) != 1 or path[0].lower() not in self._fields:
            return RowsBetween(), False
        if isinstance(one, IsNotNull):
            return RowsBetween(), True  # no part of a key is null
        if path[0].lower() != self._first:
            return RowsBetween(), False
        if isinstance(one, In):
            ranges = [self._equal(value) for value in one.value if value is not None]
            if not ranges:
                return _NOTHING, True
            ends = [found.end for found in ranges]
            end = b"" if b"" in ends else max(ends)
            return RowsBetween(min(found.start for found in ranges), end), len(ranges) == 1
        return self._compared(one)

    def _compared(self, one: Filter) -> tuple[RowsBetween, bool]:
        value = getattr(one, "value", None)
        if value is None:
            return RowsBetween(), False
        if isinstance(one, EqualTo | EqualNullSafe):
            return self._equal(value), True
        if isinstance(one, GreaterThanOrEqual):
            return RowsBetween(start=self._equal(value).start), True
        if isinstance(one, GreaterThan):
            end = self._equal(value).end
            return (RowsBetween(start=end) if end else _NOTHING), True
        if isinstance(one, LessThan):
            end = self._equal(value).start
            return (RowsBetween(end=end) if end else _NOTHING), True
        if isinstance(one, LessThanOrEqual):
            return RowsBetween(end=self._equal(value).end), True
        if isinstance(one, StringStartsWith) and self._whole:
            prefix = self._codec.encode_prefix(value)
            return RowsBetween(prefix, after_prefix(prefix)), True
        return RowsBetween(), False

    def _equal(self, value: Any) -> RowsBetween:  # noqa: ANN401
        """The rows whose key, or its first part, is this value."""
        try:
            if self._whole:
                row = self._codec.encode(value)
                return RowsBetween(row, row + b"\0")
            prefix = self._codec.encode_prefix((value,))
            return RowsBetween(prefix, after_prefix(prefix))
        except SchemaError as error:
            raise SchemaError(f"a filter on the key: {error.message}") from error
