"""Creating and deleting the tables of a cluster in Bigtable, and recognizing them."""

from __future__ import annotations

from contextlib import suppress

from percolator.bigtable.methods import CREATE_TABLE, DELETE_TABLE, GET_TABLE
from percolator.bigtable.missing_family import WITH_FAMILIES
from percolator.bigtable.place import Place
from percolator.errors import InvalidArgument, NotReady, SchemaError
from percolator.rowstore.layout import FAMILIES
from percolator.v1.bigtable_pb2 import (
    BigtableCreateTableRequest,
    BigtableDeleteTableRequest,
    BigtableGetTableRequest,
    BigtableTable,
)
from percolator.world import Network


async def create_table(
    network: Network, place: Place, table_id: int, timeout_seconds: float
) -> None:
    """Creates a table with the families of a row store. They have no garbage-collection rule: the
    service would delete versions that snapshots need."""
    request = BigtableCreateTableRequest(parent=place.parent, table_id=place.table_name(table_id))
    for family in FAMILIES:
        request.table.column_families[family].SetInParent()
    await network.unary(place.tables_address, CREATE_TABLE)(request, timeout_seconds)


async def has_table(network: Network, place: Place, table_id: int, timeout_seconds: float) -> bool:
    """Whether there is such a table. Raises `SchemaError` for one that was made by somebody else,
    or changed by hand."""
    request = BigtableGetTableRequest(name=place.table(table_id), view=WITH_FAMILIES)
    try:
        found = await network.unary(place.tables_address, GET_TABLE)(request, timeout_seconds)
    except SchemaError:
        return False
    _require_families(place.table_name(table_id), found)
    return True


async def require_table(
    network: Network, place: Place, table_id: int, timeout_seconds: float
) -> None:
    """Creates a table unless it is there. Two may do so at the same time, and repeat it."""
    if await has_table(network, place, table_id, timeout_seconds):
        return
    try:
        await create_table(network, place, table_id, timeout_seconds)
    except (InvalidArgument, SchemaError, NotReady):
        # Another was faster, or is at it, or an earlier attempt of ours was late.
        if not await has_table(network, place, table_id, timeout_seconds):
            raise


async def delete_table(
    network: Network, place: Place, table_id: int, timeout_seconds: float
) -> None:
    """Deletes a table with everything in it, if it is there."""
    request = BigtableDeleteTableRequest(name=place.table(table_id))
    with suppress(SchemaError):
        await network.unary(place.tables_address, DELETE_TABLE)(request, timeout_seconds)


def _require_families(name: str, found: BigtableTable) -> None:
    families = set(found.column_families)
    if families != set(FAMILIES):
        raise SchemaError(
            f"the table {name} was made by another program, or changed by hand: it has the "
            f"families {_listed(families)}, and a table of a cluster has {_listed(set(FAMILIES))}"
        )
    for family in sorted(families):
        if found.column_families[family].HasField("gc_rule"):
            raise SchemaError(
                f"the family {family} of the table {name} has a garbage-collection rule, by which "
                "the service deletes versions that snapshots need: remove the rule"
            )


def _listed(families: set[str]) -> str:
    return ", ".join(sorted(families)) or "none"
