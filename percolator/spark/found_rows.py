"""The rows of a read to which an index leads.

    index="by place", index_values='["IT"]'      the rows with these values in its first columns
    index_from="M", index_to="S"                 from the first value of the next column to the last
    index_prefix="Ro"                            values of the next column that begin like this

The driver looks them up in the snapshot of the read, when Spark plans it: then index and rows
agree. Each task reads some of them by key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass

from percolator import codecs
from percolator.aio.database import DatabaseInternals
from percolator.aio.find import Search, declared_for_bytes, index_named
from percolator.codecs.indexes import IndexDefinition
from percolator.codecs.readable import value_bytes, value_codec, value_from_data
from percolator.errors import InvalidArgument
from percolator.schema import Table
from percolator.spark.catalog import parsed
from percolator.spark.chosen_rows import ENTRIES_MAX, RowRanges, RowsBetween
from percolator.timestamps import Timestamp
from percolator.wire.table_indexes import no_index

INDEX = "index"
_FROM, _TO, _PREFIX, _VALUES = "index_from", "index_to", "index_prefix", "index_values"
INDEX_OPTIONS = (INDEX, _FROM, _TO, _PREFIX, _VALUES)


@dataclass(frozen=True)
class Lookup:
    """The look-up of a read."""

    index: str
    values: tuple[object, ...]
    """Values of the first columns, as JSON has them."""
    limits: Mapping[str, str]
    """The options about the column after those."""

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Lookup | None:
        """The look-up that the options describe; None if they name no index."""
        limits = {name: given[name] for name in (_FROM, _TO, _PREFIX) if name in given}
        if INDEX not in given:
            for name in (_VALUES, *limits):
                if name in given:
                    raise InvalidArgument(name, f"is about an index: give the option {INDEX}, too")
            return None
        values = parsed(_VALUES, given.get(_VALUES, "[]"))
        if not isinstance(values, list):
            raise InvalidArgument(_VALUES, f"expected a JSON list, found {json.dumps(values)}")
        return cls(given[INDEX], tuple(values), limits)

    async def rows(
        self,
        internal: DatabaseInternals,
        name: str,
        timestamp: Timestamp,
        chosen: RowRanges,
        seconds: float,
    ) -> RowRanges:
        """Rows of a table, among the chosen ones, that are found at the timestamp. Raises
        `InvalidArgument` if there are too many, and `SchemaError` if it has no such index."""
        engine = internal.engine
        deadline = engine.now() + seconds
        info = await engine.catalog.table(name, deadline)
        known = await index_named(engine.env, info.table_id, self.index, deadline)
        if known is None:
            raise no_index(name, self.index)
        table = Table(name, key=codecs.stored)
        rows: list[RowsBetween] = []
        async with internal.snapshot(timestamp, seconds) as snapshot:
            columns = declared_for_bytes(table, known).columns
            pages = snapshot.find_pages(self._search(table, known), columns, seconds)
            async with aclosing(pages) as found:
                async for page in found:
                    rows += [RowsBetween.only(row.key) for row in page if chosen.contains(row.key)]
                    if len(rows) > ENTRIES_MAX:
                        reason = f"leads to more than {ENTRIES_MAX} rows: read all, and filter them"
                        raise InvalidArgument(INDEX, reason)
        return RowRanges(rows)

    def _search(self, table: Table[bytes], known: IndexDefinition) -> Search:
        types = [value_codec(codec) for _, codec in known.columns]
        if len(self.values) > len(types):
            raise InvalidArgument(
                _VALUES, f"has {len(self.values)} values; index {known.name!r} is over {len(types)}"
            )
        values = [
            value_from_data(_VALUES, codec, value)
            for codec, value in zip(types, self.values, strict=False)
        ]
        limits: dict[str, bytes] = {}
        for name, text in self.limits.items():
            if len(values) == len(types):
                raise InvalidArgument(
                    name, f"index {known.name!r} has no column after those in {_VALUES}"
                )
            limits[name] = value_bytes(name, types[len(values)], text)
        return Search(
            declared_for_bytes(table, known),
            values,
            limits.get(_FROM),
            limits.get(_TO),
            limits.get(_PREFIX),
        )
