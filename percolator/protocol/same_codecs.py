"""Refuses to commit what was encoded with a codec that its column no longer has.

`percolator tables alter` raises the version of the table's schema, and returns when all its tablets
refuse commits under the former one. Whoever is refused learns the new schema, and comes here.
Without this, a transaction that has encoded its values before would commit them after, and programs
would read them with the new codec.

What is being committed in two phases is judged where it becomes final, on the primary. So values
for another table than the primary's may still be committed if their cells were locked before. The
parts of a shared transaction are not judged: their primaries are in a table of Percolator's own,
and become final with one group of mutations, which knows nothing of their values.
"""

from __future__ import annotations

from collections.abc import Mapping

from percolator.formats.records import KIND_PUT
from percolator.protocol.environment import Schemas
from percolator.protocol.write_steps import WriteSteps
from percolator.routing.catalog import TableInfo


class SameCodecs:
    """The codecs of one transaction's writes, as they were when it encoded its values."""

    __slots__ = ("_tables", "_write")

    def __init__(self, write: WriteSteps, tables: Mapping[str, TableInfo]) -> None:
        """`tables` may have others, too."""
        self._write = write
        self._tables = tables

    def require(self, schemas: Schemas) -> None:
        """Raises `SchemaError` if a table has others now, as far as this client knows."""
        for info in self._tables.values():
            schema = schemas.get(info.table_id)
            if schema is not None and info.codecs is not schema.codecs:
                writes = self._write.writes
                put = {
                    cell.column
                    for cell, (kind, _) in writes.items()
                    if cell.table_id == info.table_id and kind == KIND_PUT
                }
                info.codecs.require_unchanged(schema.codecs, put)
