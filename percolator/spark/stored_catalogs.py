"""Catalogues that are stored in the cluster, for `catalog="stored"`.

    table   percolator.catalogues
    row     the name of the table
    catalog the option `catalog`, as text

The catalogue is looked up when a read or write begins, and is the same for all its jobs. If none is
stored, it comes from the codecs that the table's schema keeps.
"""

from __future__ import annotations

from collections.abc import Mapping

from percolator import codecs
from percolator.errors import InvalidArgument, SchemaError
from percolator.schema import CATALOGUES_NAME, Table
from percolator.spark.catalog.declared_catalogs import declared_catalog
from percolator.spark.catalog.frame_catalog import FrameCatalog
from percolator.spark.connections import Connection, checked
from percolator.spark.options import Target
from percolator.v1.master_pb2 import TableOptions

CATALOGUES = Table(CATALOGUES_NAME)
CATALOGUE = CATALOGUES.column("catalog", codecs.text)
STORED = "stored"


def store(table: str, catalog: str, address: str | None) -> None:
    """Keeps the catalogue for all who read or write the table with `catalog="stored"`. Raises
    `SchemaError` if it contradicts the codecs that the table's schema keeps."""
    parsed = FrameCatalog.parse(catalog)
    given = {"table": table} if address is None else {"table": table, "address": address}
    target = Target.parse(given)
    here = checked(target, parsed)

    async def keep() -> None:
        tables, deadline = here.database.internal.engine.catalog, here.deadline(target)
        try:
            await tables.table(CATALOGUES.name, deadline)
        except SchemaError:
            await tables.create(
                CATALOGUES.name, (), TableOptions(), exist_ok=True, deadline=deadline
            )
        async with here.database.transaction() as tx:
            tx.set(table, CATALOGUE, catalog)

    here.call(keep)


def with_stored_catalog(options: Mapping[str, str]) -> dict[str, str]:
    """The options, with the catalogue of the table in place of the word `stored`."""
    found = {name.lower(): str(value) for name, value in options.items()}
    if found.get("catalog", "").strip().lower() == STORED:
        target = Target.parse(found)
        here = checked(target)
        found["catalog"] = here.call(lambda: _stored(here, target.table))
    return found


async def _stored(here: Connection, table: str) -> str:
    try:
        async with here.database.snapshot() as snapshot:
            found = await snapshot.get(table, CATALOGUE)
    except SchemaError:  # the table of catalogues is made with the first of them
        found = None
    if found is None:
        engine = here.database.internal.engine
        info = await engine.catalog.table(table, engine.now() + engine.limits.call_seconds)
        found = declared_catalog(info.codecs.names)
    if found is None:
        raise InvalidArgument(
            "catalog",
            f"none is stored for table {table!r}, and none of its columns has a codec yet; "
            "percolator.spark.store_catalog stores one",
        )
    return found
