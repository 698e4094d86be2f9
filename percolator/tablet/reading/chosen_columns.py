"""Which columns a read wants: all, those that it names, or those that begin with a prefix."""

from __future__ import annotations

from collections.abc import Container

from percolator.errors import InvalidArgument
from percolator.tablet.keys import RESERVED, ColumnEncoder, column_prefix
from percolator.tablet.limits import TabletLimits
from percolator.tablet.reading.listed_reads import AskedRead
from percolator.v1 import tabletserver_pb2 as pb


class ChosenColumns(Container[bytes]):
    """The encoded columns that a read names, and all that begin with one of its prefixes."""

    def __init__(self, names: frozenset[bytes], prefixes: tuple[bytes, ...]) -> None:
        self._names = names
        self._prefixes = prefixes

    def __contains__(self, column: object) -> bool:
        return isinstance(column, bytes) and (
            column.startswith(self._prefixes) or column in self._names
        )


def chosen_columns(
    field: str,
    read: AskedRead | pb.ScanRequest,
    encoder: ColumnEncoder,
    limits: TabletLimits,
) -> Container[bytes] | None:
    """The encoded columns that a read wants; None for all but reserved ones.

    `field` comes before the names of fields in errors. Raises `InvalidArgument`.
    """
    given = read.column_prefixes
    where = f"{field}column_prefixes"
    if read.all_columns:
        if read.columns or given:
            raise InvalidArgument(f"{field}all_columns", "beside columns or prefixes")
        return None
    if not given:
        return frozenset(encoder[c] for c in read.columns)
    if len(given) > limits.column_prefixes_max:
        raise InvalidArgument(
            where, f"{len(given)} entries, at most {limits.column_prefixes_max} allowed"
        )
    prefixes = tuple(column_prefix(one) for one in given)
    for one in prefixes:
        if not one or one.startswith(RESERVED):
            raise InvalidArgument(where, "expected prefixes that are not empty or begin with 00")
    return ChosenColumns(frozenset(encoder[c] for c in read.columns), prefixes)
