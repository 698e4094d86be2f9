"""Which version of a table's schema each of its tablets asks for: what every request names.

The catalog knows the newest version of a table. But tablets change one after another, so what a
tablet has said itself counts more.
"""

from __future__ import annotations

from collections.abc import Callable

from percolator.errors import SchemaChanged


class SchemaVersions:
    """The schema version under which each tablet accepts requests, as far as it is known."""

    def __init__(self) -> None:
        self.of_table: dict[int, int] = {}
        self.of_tablet: dict[int, int] = {}
        self._named: dict[int, int] = {}
        """By table: the newest that a tablet has named."""
        self.on_newer: Callable[[int, int], None] | None = None
        """Called with the id and the version of a schema that is newer than what is known."""

    def refused(self, tablet_id: int, error: SchemaChanged) -> None:
        """A tablet has refused another version than its own."""
        self.of_tablet[tablet_id] = error.schema_version
        self._named[error.table_id] = max(self.named(error.table_id), error.schema_version)
        known = self.of_table.get(error.table_id, 0)
        if error.schema_version > known and self.on_newer is not None:
            self.on_newer(error.table_id, error.schema_version)

    def named(self, table_id: int) -> int:
        """The newest version that a tablet of the table has named; 0 if none has."""
        return self._named.get(table_id, 0)

    def get(self, table_id: int, tablet_id: int) -> int:
        version = self.of_tablet.get(tablet_id)
        return self.of_table.get(table_id, 0) if version is None else version
