"""Finds the entries that may be of rows which a condition keeps, by the bytes of their values.

Most scans with a condition keep few rows. So nothing is built for the others: all values of a slice
are compared at once, whatever their versions, and the rows of what is left are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, compress, islice
from operator import itemgetter

from percolator.conditions import Predicate, necessary
from percolator.errors import SchemaError
from percolator.formats.records import (
    KIND_DELETE,
    KIND_LOCK_ONLY,
    KIND_PUT,
    WRITE_HEADER_BYTES,
    WRITE_KIND_OFFSET,
)
from percolator.tablet.cells import TIMESTAMP_BYTES, ColumnEncoder, split_component
from percolator.tablet.visible_cells import RUN_VALUE_BYTES_MAX
from percolator.v1.cells_pb2 import RowFilter

_kind_of = itemgetter(WRITE_KIND_OFFSET)
_PUT = bytes([KIND_PUT])
_ALWAYS_READABLE = ("", "raw")
"""No codec, where only null is asked for, and that of bytes."""
_LOOKED_INTO = frozenset((KIND_PUT, KIND_DELETE, KIND_LOCK_ONLY))


def add_entries(
    stream: Iterator[tuple[bytes, bytes]], entries: int, keys: list[bytes], values: list[bytes]
) -> bool:
    """Adds the next ones, so many at most. A large value is the last of them: a thousand may be
    gigabytes. Returns False at the end."""
    before = len(keys)
    for key, value in islice(stream, entries):
        keys.append(key)
        values.append(value)
        if len(value) > RUN_VALUE_BYTES_MAX:
            break
    return len(keys) > before


class Sieve:
    """Conditions on single columns: of a row that is kept, an entry matches one of them. There may
    be none of them: then nothing can be said about entries."""

    def __init__(self, predicate: Predicate, columns: ColumnEncoder) -> None:
        parts = [*map(Predicate, necessary(predicate.message))]
        if parts:
            # A row stays if a value that is compared cannot be read, whatever its other values are.
            read = {one for part in parts for one in part.codecs}
            others = [one for one in predicate.codecs if one not in read]
            parts += [_nothing_of(*one) for one in others if one[1] not in _ALWAYS_READABLE]
        self._parts = [(columns[part.columns[0]], part) for part in parts]
        self._are_alike = len(parts) == 1
        """True as long as all values that were looked at have the same size."""

    def __bool__(self) -> bool:
        return bool(self._parts)

    def may_match(self, keys: list[bytes], values: list[bytes]) -> list[int]:
        """The places of entries that may match, in order: of any version of their cell."""
        if self._are_alike:
            # Columns are only compared where values match: it costs more than all the rest.
            [(column, predicate)] = self._parts
            kept = _kept_packed(predicate, values)
            if kept is not None:
                places = [*compress(range(len(keys)), kept)]
                return [*_of(column, places, [keys[at] for at in places])]
            self._are_alike = False
        found: set[int] = set()
        for column, predicate in self._parts:
            places = [*_of(column, range(len(keys)), keys)]
            found.update(_among(predicate, places, [values[at] for at in places]))
        return sorted(found)


def _nothing_of(column: bytes, codec: str) -> Predicate:
    """Keeps no value of the column, and reads all."""
    return Predicate(RowFilter(kind=RowFilter.KIND_ONE_OF, column=column, codec=codec))


def _of(column: bytes, places: Iterable[int], keys: list[bytes]) -> Iterator[int]:
    """The places whose entry is of this column, and perhaps of one that ends like it."""
    end = -len(column) - TIMESTAMP_BYTES
    return compress(places, [key[end:-TIMESTAMP_BYTES] == column for key in keys])


def _among(predicate: Predicate, places: list[int], values: list[bytes]) -> Iterable[int]:
    """The places of records whose value may match. Some may be stored apart from them."""
    kept = _kept_packed(predicate, values)
    if kept is not None:
        return compress(places, kept)
    kinds = [*map(_kind_of, values)]
    apart = [kind not in _LOOKED_INTO for kind in kinds]
    puts = [kind == KIND_PUT for kind in kinds]
    inside = [*compress(places, puts)]
    bodies = [value[WRITE_HEADER_BYTES:] for value in compress(values, puts)]
    kept, unreadable = predicate.evaluate({predicate.columns[0]: bodies}, len(bodies))
    return chain(compress(places, apart), compress(inside, kept), (inside[at] for at in unreadable))


def _kept_packed(predicate: Predicate, values: list[bytes]) -> list[bool] | None:
    """For each record, True if its value matches; None if they are not all alike."""
    size = WRITE_HEADER_BYTES + predicate.packed_bytes
    if not predicate.packed_bytes or {*map(len, values)} != {size}:
        return None
    packed = b"".join(values)
    if packed[WRITE_KIND_OFFSET::size] != _PUT * len(values):
        return None
    try:
        return predicate.keeps_packed(packed, len(values), skipped=WRITE_HEADER_BYTES)
    except SchemaError:
        return None


def rows_around(keys: list[bytes], places: list[int]) -> list[int]:
    """The places of all entries that are in a row with one of these, in order."""
    found: list[int] = []
    end = 0
    for at in places:
        if at < end:
            continue
        row = row_prefix(keys[at])
        begin, end = at, at + 1
        while begin and keys[begin - 1].startswith(row):
            begin -= 1
        while end < len(keys) and keys[end].startswith(row):
            end += 1
        found += range(begin, end)
    return found


def row_prefix(key: bytes) -> bytes:
    """The beginning of all keys of a row, from one of them."""
    return key[: split_component(key, 1)[1]]
