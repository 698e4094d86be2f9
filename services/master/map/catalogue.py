"""Tables: what every master decides, whatever has their cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Self

from percolator.codec_names import CodecNames
from percolator.errors import SchemaError

DELETIONS_KEPT = 100
FIRST_VERSION = 1
"""The version of the schema of a new table."""


@dataclass(frozen=True)
class OwedBackfill:
    """The cells of which an observer has yet to be notified, since they are older than it."""

    version: int
    """The version of the schema since which it is owed."""
    columns: tuple[bytes, ...]
    row: bytes = b""
    """Everything before this row is done."""
    cells: int = 0
    """The number of cells that were notified so far."""


@dataclass(frozen=True)
class Observer:
    """An observer, and the columns whose changes it is notified of."""

    name: str
    columns: tuple[bytes, ...]
    weak: bool = False
    paused: bool = False
    """Not run for now, though notifications are still written for it."""
    backfill: bool = False
    """It was registered to handle older cells, too. Earlier releases knew no such observers."""
    owed: OwedBackfill | None = None
    """The backfill that is not finished yet."""


@dataclass(frozen=True)
class TableLoad:
    """The bulk load that creates a table."""

    name: str
    run: int
    """Identifies the attempt: a timestamp of the oracle that nothing else has."""
    commit_timestamp: int = 0
    """That of all that was loaded; 0 until the table is published."""


@dataclass(frozen=True)
class Table:
    """A table, without its tablets."""

    table_id: int
    name: str
    schema_version: int = FIRST_VERSION
    retention_milliseconds: int = 0
    split_bytes: int = 0
    observers: tuple[Observer, ...] = ()
    deleting: bool = False
    created_at: int = 0
    """A timestamp of the oracle: no snapshot below it may use the table. 0 if an earlier release
    created it."""
    change_feed: bool = False
    ttls: tuple[tuple[bytes, int], ...] = ()
    """The columns whose values expire, by name, with their milliseconds."""
    codecs: CodecNames = field(default_factory=CodecNames)
    """Those that programs have declared. An earlier release kept none."""
    load: TableLoad | None = None
    """Only in a cluster on a row store."""
    created_by: bytes = b""
    """The id of the request that created it; empty if that had none."""

    @property
    def is_hidden(self) -> bool:
        """Whether only a bulk load knows the table."""
        return self.load is not None and not self.load.commit_timestamp

    @property
    def is_used(self) -> bool:
        """Whether transactions may use the table."""
        return not self.deleting and not self.is_hidden


@dataclass(frozen=True)
class Catalogue:
    """The tables of a cluster. Each change makes a new one. Ids only grow, and are not used again
    after a deletion."""

    next_id: int = 1
    tables: Mapping[int, Table] = field(default_factory=lambda: MappingProxyType({}))
    load_floor: int = field(default=0, kw_only=True)
    """The latest run of a bulk load that was ended; none up to it begins again."""
    deletions: tuple[bytes, ...] = field(default=(), kw_only=True)
    """The ids of the requests that deleted tables, as far as they had any; the latest last."""
    awaited: Mapping[str, tuple[Observer, ...]] = field(
        default_factory=lambda: MappingProxyType({}), kw_only=True
    )
    """Observers of tables that do not exist yet, by the name of the table."""

    def tablets_of(self, table: Table) -> int:
        """How many tablets a table has: none, where a row store has its cells."""
        return 0

    def named(self, name: str) -> Table | None:
        """The table of that name. One that is being deleted no longer has a name, and one that is
        being loaded has none yet."""
        for table in self.tables.values():
            if table.name == name and table.is_used:
                return table
        return None

    def deleted(self, name: str) -> list[Table]:
        """The tables that had that name, and of which something is left."""
        return [
            one
            for one in self.tables.values()
            if one.name == name and one.deleting and not one.is_hidden
        ]

    def table(self, name: str) -> Table:
        """The table of that name. Raises `SchemaError` if there is none."""
        found = self.named(name)
        if found is None:
            raise SchemaError(f"there is no table {name!r}")
        return found

    def without_table(self, table_id: int) -> Self:
        """Without the table, of which nothing is left."""
        return replace(
            self, tables={key: one for key, one in self.tables.items() if key != table_id}
        )

    def with_deletion(self, request_id: bytes) -> Self:
        """After a table was deleted by that request."""
        if not request_id:
            return self
        return replace(self, deletions=(*self.deletions, request_id)[-DELETIONS_KEPT:])

    def with_awaited(self, name: str, observers: tuple[Observer, ...]) -> Self:
        """With these observers of a table that does not exist yet."""
        awaited = {**self.awaited, name: observers}
        return replace(self, awaited={key: found for key, found in awaited.items() if found})

    def with_tables(self, *tables: Table) -> Self:
        return replace(self, tables={**self.tables, **{table.table_id: table for table in tables}})
