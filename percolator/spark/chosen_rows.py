"""The rows of a table that a read or a stream touches: options that name keys become row ranges.

    key="com.example/"                           one row
    keys='["com.example/", "org.example/"]'      these rows
    key_from="com.", key_to="com/"               from the first key (included) to the second (not)
    key_prefix="com.example/"                    the rows whose keys begin like this
    key_ranges='[{"prefix": "com."}, {"from": "net.", "to": "org."}, {"key": "xyz"}]'

`keys` and `key_ranges` are JSON. Of a key with several members, which is a JSON list, a prefix or a
bound may be the first members alone: `key_prefix='["example.com"]'`. A key without a row gives no
row, and a key that is given twice gives one.

Nothing here asks the cluster, and nothing here needs Spark.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from percolator import codecs
from percolator.codecs.readable import row_bytes
from percolator.codecs.values import after_prefix
from percolator.errors import InvalidArgument, SchemaError
from percolator.limits import Limits
from percolator.spark import catalog
from percolator.spark.catalog import FrameCatalog
from percolator.timestamps import Timestamp


@dataclass(frozen=True, order=True)
class RowsBetween:
    """Rows from start (included) to end (excluded; empty: to the last row)."""

    start: bytes = b""
    end: bytes = b""

    @classmethod
    def only(cls, row: bytes) -> RowsBetween:
        return cls(row, row + b"\0")

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
        """True if the row is in one of the ranges."""
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


_EXPECTED = {"text": "text", "raw": "text, or hex:… for bytes", "ordered_integer": "an integer"}
_PYTHON_BYTES = re.compile(r"""b(['"]).*\1""", re.DOTALL)


class KeySyntax:
    """Turns what options say into row keys. Everything raises `InvalidArgument` for the option.

    A text key is given as it is, an integer in digits, bytes as text or as `hex:00ff`. A key of
    several members is a JSON list. Where a key is a bound or a prefix, its last members may be left
    out.
    """

    def __init__(self, catalogue: FrameCatalog | None) -> None:
        key = () if catalogue is None else catalogue.key
        self._types = tuple(part.type for part in key) or ("raw",)
        self._codec: Any = codecs.raw if catalogue is None else catalogue.key_codec

    def parsed(self, option: str, text: str) -> object:
        """An option that is one key, as JSON would have it."""
        if len(self._types) > 1:
            return catalog.parsed(option, text)
        if self._types[0] != "ordered_integer":
            return text
        try:
            return int(text)
        except ValueError:
            raise InvalidArgument(option, f"expected an integer key, found {text!r}") from None

    def row(self, option: str, value: object) -> bytes:
        """A whole key."""
        return self._encoded(option, value, least=len(self._types))

    def bound(self, option: str, value: object) -> bytes:
        """The first row at or above a key, or above the first parts of one."""
        return self._encoded(option, value, least=1)

    def prefix(self, option: str, value: object) -> RowsBetween:
        """The rows whose keys begin like this."""
        if self._types == ("ordered_integer",):
            raise InvalidArgument(option, "integers have no prefix; give key_from and key_to")
        start = self._encoded(option, value, least=1)
        if not start:
            raise InvalidArgument(option, "is empty; leave it out to read all rows")
        return RowsBetween(start, after_prefix(start))

    def _encoded(self, option: str, value: object, *, least: int) -> bytes:
        parts = tuple(
            self._part(option, kind, part)
            for kind, part in zip(self._types, self._parts(option, value, least), strict=False)
        )
        try:
            if len(self._types) == 1:
                row: bytes = self._codec.encode(parts[0])
            else:
                row = self._codec.encode_prefix(parts)
        except SchemaError as error:
            raise InvalidArgument(option, error.message) from None
        most = Limits().row_bytes_max
        if len(row) > most:
            raise InvalidArgument(option, f"has {len(row)} bytes; a row key has at most {most}")
        return row

    def _parts(self, option: str, value: object, least: int) -> Sequence[object]:
        most = len(self._types)
        if most == 1:
            return (value,)
        if not isinstance(value, list) or not least <= len(value) <= most:
            parts = f"{least} to {most}" if least < most else f"{most}"
            raise InvalidArgument(
                option,
                f"expected a JSON list of {parts} parts ({', '.join(self._types)}), "
                f"found {value!r}",
            )
        return value

    def _part(self, option: str, kind: str, value: object) -> object:
        expected = int if kind == "ordered_integer" else str
        if not isinstance(value, expected) or isinstance(value, bool):
            raise InvalidArgument(
                option, f"expected {_EXPECTED[kind]} for a key of type {kind}, found {value!r}"
            )
        if kind != "raw" or not isinstance(value, str):
            return value
        if _PYTHON_BYTES.fullmatch(value):
            raise InvalidArgument(
                option, f"{value} is how Python shows bytes; write 'hex:' + key.hex()"
            )
        return row_bytes(option, value)


KEY_OPTIONS = ("key", "keys", "key_prefix", "key_ranges", "key_from", "key_to")
ENTRIES_MAX = 100_000
"""All of them travel to every task: a join with a frame of keys does not have that cost."""

_RANGE_FORMS = ({"key"}, {"prefix"}, {"from"}, {"to"}, {"from", "to"})


def chosen_rows(given: Mapping[str, str], catalogue: FrameCatalog | None) -> RowRanges:
    """The rows that options choose; all rows if no option does."""
    ways = [name for name in KEY_OPTIONS if name in given]
    if not ways:
        return ALL_ROWS
    if len(ways) > 1 and ways != ["key_from", "key_to"]:
        raise InvalidArgument(
            ways[1], f"cannot be given together with {ways[0]}; key_ranges takes several ranges"
        )
    syntax = KeySyntax(catalogue)
    if ways[0] == "keys":
        return RowRanges(
            _each("keys", given["keys"], lambda key: RowsBetween.only(syntax.row("keys", key)))
        )
    if ways[0] == "key_ranges":
        return RowRanges(_each("key_ranges", given["key_ranges"], _one_range(syntax)))
    values = {name: syntax.parsed(name, given[name]) for name in ways}
    if ways[0] == "key":
        return RowRanges([RowsBetween.only(syntax.row("key", values["key"]))])
    if ways[0] == "key_prefix":
        return RowRanges([syntax.prefix("key_prefix", values["key_prefix"])])
    return RowRanges([rows_between(syntax, "key_from", "key_to", values)])


def rows_between(
    syntax: KeySyntax, first: str, last: str, values: Mapping[str, object]
) -> RowsBetween:
    """The rows from one bound to the other. Each may be missing, but they may not be swapped."""
    start = syntax.bound(first, values[first]) if first in values else b""
    if last not in values:
        return RowsBetween(start)
    end = syntax.bound(last, values[last])
    if start >= end:
        raise InvalidArgument(
            last, f"{values[last]!r} is not above {first}, {values.get(first, '')!r}"
        )
    return RowsBetween(start, end)


def _each(option: str, text: str, range_of: Callable[[Any], RowsBetween]) -> list[RowsBetween]:
    """The ranges that the entries of a JSON list stand for."""
    entries = catalog.parsed(option, text)
    if not isinstance(entries, list):
        raise InvalidArgument(option, f"expected a JSON list, found {text!r}")
    if len(entries) > ENTRIES_MAX:
        raise InvalidArgument(
            option,
            f"has {len(entries)} entries, at most {ENTRIES_MAX}; join with a frame of keys instead",
        )
    found = []
    for number, entry in enumerate(entries, 1):
        try:
            found.append(range_of(entry))
        except InvalidArgument as error:
            raise InvalidArgument(option, f"entry {number}: {error.reason}") from None
    return found


def _one_range(syntax: KeySyntax) -> Callable[[Any], RowsBetween]:
    def range_of(entry: object) -> RowsBetween:
        if not isinstance(entry, dict) or set(entry) not in _RANGE_FORMS:
            raise InvalidArgument(
                "key_ranges",
                'expected {"key": …}, {"prefix": …} or {"from": …, "to": …}, '
                f"found {entry!r}",
            )
        if "key" in entry:
            return RowsBetween.only(syntax.row("key", entry["key"]))
        if "prefix" in entry:
            return syntax.prefix("prefix", entry["prefix"])
        return rows_between(syntax, "from", "to", entry)

    return range_of


SNAPSHOT, NOW = "snapshot", "now"


@dataclass(frozen=True)
class Wanted:
    """The changes that a stream delivers."""

    table: str
    starting_from: str | Timestamp = SNAPSHOT
    """`SNAPSHOT`, `NOW`, or the timestamp above which a new query begins."""
    rows: RowRanges = ALL_ROWS
    columns: frozenset[bytes] | None = None
    """The stream has a row for each row of the table that a commit has changed in one of these
    columns. With None, it has one for each cell."""
    fail_on_data_loss: bool = True
    timeout_seconds: float = 10.0
