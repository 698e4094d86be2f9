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

from percolator.errors import CellAddress
from percolator.formats.records import KIND_PUT
from percolator.protocol.environment import Schemas
from percolator.protocol.write_steps import Write
from percolator.routing.table_info import TableInfo


def require_same_codecs(
    writes: Mapping[CellAddress, Write], tables: Mapping[str, TableInfo], schemas: Schemas
) -> None:
    """Raises `SchemaError` if a table has others now, as far as this client knows, than when the
    transaction encoded its values. `tables`: as they were then; there may be others among them."""
    for info in tables.values():
        schema = schemas.get(info.table_id)
        if schema is not None and info.codecs is not schema.codecs:
            put = {
                cell.column
                for cell, (kind, _) in writes.items()
                if cell.table_id == info.table_id and kind == KIND_PUT
            }
            info.codecs.require_unchanged(schema.codecs, put)
