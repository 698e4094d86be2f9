"""What a client knows of one table: who it is, whom its columns notify, and what encodes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from percolator.errors import SchemaError
from percolator.routing.table_codecs import TableCodecs
from percolator.timestamps import Timestamp
from percolator.v1 import master_pb2 as pb
from percolator.v1.tabletserver_pb2 import ColumnTtl


@dataclass(frozen=True)
class TableSchema:
    """Which columns of a table notify which observers, and what encodes them."""

    version: int = 0
    observers: Mapping[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    """By column: the observers notified when a put or delete commits."""
    weak_observers: Mapping[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    """By column: the observers notified by `notify` only."""
    codecs: TableCodecs = field(default_factory=TableCodecs.unknown, compare=False)
    """The same object until one of them is changed on purpose."""
    expiring: frozenset[bytes] = frozenset()
    """The columns whose values expire. Tablets judge which have; a client has to write these again
    even if they hold their values already."""

    @classmethod
    def of(
        cls,
        version: int,
        observers: Sequence[pb.Observer],
        codecs: TableCodecs | None = None,
        ttls: Iterable[ColumnTtl] = (),
    ) -> TableSchema:
        strong: dict[bytes, tuple[bytes, ...]] = {}
        weak: dict[bytes, tuple[bytes, ...]] = {}
        for observer in observers:
            by_column = weak if observer.weak else strong
            for column in observer.columns:
                by_column[column] = (*by_column.get(column, ()), observer.name.encode())
        expiring = frozenset(one.column for one in ttls)
        return cls(version, strong, weak, codecs or TableCodecs.unknown(), expiring)


NO_OBSERVERS = TableSchema()


@dataclass(frozen=True)
class TableInfo:
    """A table that exists."""

    table_id: int
    name: str
    schema: TableSchema
    created_at: int = 0
    """The table is younger than snapshots below this. 0 if it is older than any."""

    @property
    def codecs(self) -> TableCodecs:
        """What encodes its columns, as of when it was looked up."""
        return self.schema.codecs

    def require_older_than(self, snapshot: int) -> None:
        """Raises `SchemaError` if the table was created after a snapshot at this timestamp."""
        if self.created_at > snapshot:
            raise SchemaError(
                f"table {self.name!r} is younger than the snapshot: it was created at "
                f"{Timestamp(self.created_at).describe()}, and the snapshot is at "
                f"{Timestamp(snapshot).describe()}; begin a new transaction or snapshot to use it",
                table=self.name,
                table_id=self.table_id,
            )
