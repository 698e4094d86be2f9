"""A change of a cell, as programs see it: one entry of the change feed of a table."""

from __future__ import annotations

from enum import Enum
from typing import Any, Generic, TypeVar

from percolator.errors import SchemaError, UsageError
from percolator.schema import Column, KnownCodecs, Readable, Table, decoded_value
from percolator.timestamps import Timestamp

K = TypeVar("K")
T = TypeVar("T")


class ChangeKind(Enum):
    """Kind of change of a cell."""

    PUT = "put"
    """It has a value. Whether it had one before is not known: that was not asked for."""
    INSERT = "insert"
    """It has a value, and had none before."""
    UPDATE = "update"
    """It has a value, and had one before, which may have been the same."""
    DELETE = "delete"
    """It no longer has a value."""


class Change(Generic[K]):
    """One change of one cell.

    >>> for change in db.changes(accounts, after=position, before=True):
    ...     if change.is_of(balance):
    ...         print(change.key, change.before(balance), "->", change.value(balance))
    ...     if change.ends_commit:
    ...         position = change.commit_timestamp
    """

    __slots__ = (
        "_before_is_known",
        "_codecs",
        "column",
        "commit_timestamp",
        "ends_commit",
        "key",
        "kind",
        "raw_before",
        "raw_value",
        "table",
    )

    def __init__(
        self,
        table: Table[K],
        key: K,
        column: bytes,
        commit_timestamp: Timestamp,
        kind: ChangeKind,
        raw_value: bytes | None,
        raw_before: bytes | None,
        *,
        before_is_known: bool,
        ends_commit: bool,
        codecs: KnownCodecs | None = None,
    ) -> None:
        """`codecs` are those of the table, if they are known."""
        self._codecs = codecs
        self._before_is_known = before_is_known
        self.table = table
        self.key = key
        """The key of the row."""
        self.column = column
        """The name of the column."""
        self.commit_timestamp = commit_timestamp
        self.kind = kind
        self.raw_value = raw_value
        """The stored bytes; None if the cell was deleted."""
        self.raw_before = raw_before
        """The stored bytes before the change; None if there were none, or they were not asked
        for."""
        self.ends_commit = ends_commit
        """True for the last change of its commit. A reader that has handled it may later continue
        after `commit_timestamp`."""

    def is_of(self, column: Readable[Any]) -> bool:
        """True if it is a change of this column."""
        if not isinstance(column, Column) or column.table.name != self.table.name:
            raise SchemaError(f"{column!r} is not a column of table {self.table.name!r}")
        return column.name == self.column

    def value(self, column: Readable[T]) -> T | None:
        """The value after the change; None if the cell was deleted."""
        return self._decoded(column, self.raw_value)

    def before(self, column: Readable[T]) -> T | None:
        """The value before the change; None if there was none. It is known only with
        `before=True`."""
        if not self._before_is_known:
            raise UsageError(
                "the value before the change is not known: pass before=True to changes()"
            )
        return self._decoded(column, self.raw_before)

    def _decoded(self, column: Readable[T], stored: bytes | None) -> T | None:
        if not self.is_of(column):
            raise SchemaError(f"the change is to column {self.column!r}, not to {column!r}")
        codecs = self._codecs
        if codecs is not None and codecs.readable.get(column.name) is not column:
            codecs.require_readable(column)
        if stored is None:
            return None
        return decoded_value(column, self.key, stored)

    def __repr__(self) -> str:
        return (
            f"Change({self.kind.value} of {self.key!r}, {self.column!r} at {self.commit_timestamp})"
        )


class ChangePage(Generic[K]):
    """Changes that arrived together, perhaps none, and from where to continue after them."""

    __slots__ = ("changes", "reached")

    def __init__(self, changes: list[Change[K]], reached: Timestamp) -> None:
        self.changes = changes
        self.reached = reached
        """All changes up to here are in this page or in earlier ones. Pass it as `after` later. If
        a commit continues in the next page, this is below it: its changes will come again."""

    def __repr__(self) -> str:
        return f"ChangePage({len(self.changes)} changes, up to {self.reached})"
