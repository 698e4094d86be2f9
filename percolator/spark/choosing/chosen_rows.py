"""The options that choose rows by their keys, so that a read touches only those.

    key="com.example/"                           one row
    keys='["com.example/", "org.example/"]'      these rows
    key_from="com.", key_to="com/"               from the first key (included) to the second (not)
    key_prefix="com.example/"                    the rows whose keys begin like this
    key_ranges='[{"prefix": "com."}, {"from": "net.", "to": "org."}, {"key": "xyz"}]'

`keys` and `key_ranges` are JSON. Of a key with several parts, which is a JSON list, a prefix or a
bound may be the first parts alone: `key_prefix='["example.com"]'`. A key without a row gives no
row, and a key that is given twice gives one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from percolator.errors import InvalidArgument
from percolator.spark.catalog import strict_json
from percolator.spark.catalog.frame_catalog import FrameCatalog
from percolator.spark.choosing.key_syntax import KeySyntax
from percolator.spark.choosing.row_ranges import ALL_ROWS, RowRanges, RowsBetween

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
        return RowRanges(_each("keys", given["keys"], _one_key(syntax)))
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
    entries = strict_json.parsed(option, text)
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


def _one_key(syntax: KeySyntax) -> Callable[[Any], RowsBetween]:
    return lambda entry: RowsBetween.only(syntax.row("keys", entry))


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
