"""The columns whose values expire, and what that means for a stored version.

An expired value counts as a deletion at the timestamp of its commit: the version before it does not
come back. Whether it has expired is decided by three numbers alone: its commit timestamp, the
timestamp at which it is read, and the column's time to live. So all readers of a snapshot agree,
whatever their clocks say, and whenever they look.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.tablet.keys import component, split_component
from percolator.timestamps import expires_at, is_expired, oldest_unexpired
from percolator.v1 import tabletserver_pb2 as pb

Ttls = tuple[tuple[bytes, int], ...]
"""Columns with their times to live in milliseconds."""


def ttls_of(messages: Sequence[pb.ColumnTtl]) -> Ttls:
    return tuple((one.column, one.ttl_milliseconds) for one in messages)


class Lifetimes:
    """The times to live of one table; false if no column has one. It is never changed, but replaced
    by another one: what has begun with one ends with it."""

    __slots__ = ("by_column", "by_component", "ttls")

    def __init__(self, ttls: Ttls = ()) -> None:
        self.ttls = ttls
        self.by_column = dict(ttls)
        """Milliseconds by column."""
        self.by_component = {component(column): ttl for column, ttl in ttls}
        """The same by encoded column."""

    def __bool__(self) -> bool:
        return bool(self.ttls)

    def hides(self, column: bytes, commit: int, timestamp: int) -> bool:
        """Whether a value of this column is expired at the timestamp."""
        ttl = self.by_column.get(column)
        return ttl is not None and is_expired(commit, timestamp, ttl)

    def hides_component(self, encoded: bytes, commit: int, timestamp: int) -> bool:
        """The same for an encoded column."""
        ttl = self.by_component.get(encoded)
        return ttl is not None and is_expired(commit, timestamp, ttl)

    def lasting(self, timestamp: int) -> dict[bytes, int]:
        """By encoded column: the oldest commit whose value is not expired at the timestamp."""
        return {
            column: oldest_unexpired(timestamp, ttl) for column, ttl in self.by_component.items()
        }

    def end_of(self, cell: bytes, commit: int) -> int | None:
        """The timestamp from which on a value of this cell (`cell_prefix`) is invisible; None if
        that is never."""
        ttl = self.by_component.get(cell[split_component(cell, 0)[1] :])
        return None if ttl is None else expires_at(commit, ttl)


FOREVER = Lifetimes()
