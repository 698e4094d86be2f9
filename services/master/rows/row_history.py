"""What collects the rows of a cluster, for as long as this master leads."""

from __future__ import annotations

from percolator.errors import SchemaError
from percolator.history.rows import RowHistory
from percolator.limits import Limits
from percolator.protocol.environment import Environment, Timestamps
from percolator.protocol.verdicts import Verdicts
from percolator.routing.table_info import TableSchema
from percolator.rowstore.cells import RowStoreCells
from percolator.rowstore.dropped import DroppedTables
from percolator.rowstore.intents import Intents
from percolator.rowstore.times import Numbers, SpacedTimestamps, Times
from percolator.services.chassis.store_kinds.row_cluster_store import RowClusterStore
from percolator.services.master.history.collecting import NoOwners
from percolator.services.master.history.row_collecting import RowCollecting
from percolator.services.master.map.catalogue import Table
from percolator.services.master.map.map_record import observer_messages
from percolator.services.master.map.map_store import CatalogueStore
from percolator.services.master.rows.row_drops import RowDrops
from percolator.world import World


def row_collecting(
    world: World,
    catalogue: CatalogueStore,
    rows: RowClusterStore,
    drops: RowDrops,
    oracle: Numbers,
) -> RowCollecting:
    """A client of the cluster's store that resolves old locks, and walks over the rows."""
    times, limits = Times(rows.identity.epoch_milliseconds), Limits()
    timestamps: Timestamps = SpacedTimestamps(oracle)
    intents = Intents(rows.store, times, world, limits)
    schemas = _Schemas(catalogue)
    env = Environment(
        cells=RowStoreCells(rows.store, intents, times, world, limits),
        timestamps=timestamps,
        owners=NoOwners(),
        schemas=schemas,
        clock=world.clock,
        random=world.random,
        limits=limits,
        verdicts=Verdicts(limits.verdicts_max),
        deleted_tables=DroppedTables(schemas.refresh),
    )

    async def registered() -> dict[int, TableSchema]:
        await catalogue.leadership.check()
        return {
            one.table_id: _schema_of(one)
            for one in catalogue.current.tables.values()
            if one.is_used
        }

    history = RowHistory(env, rows.store, times, world, registered)
    return RowCollecting(history, lambda: list(catalogue.current.tables), drops)


class _Schemas:
    """`Schemas` that are read from the catalogue itself."""

    def __init__(self, catalogue: CatalogueStore) -> None:
        self._catalogue = catalogue

    def get(self, table_id: int) -> TableSchema | None:
        table = self._catalogue.current.tables.get(table_id)
        return None if table is None else _schema_of(table)

    async def refresh(self, table_id: int, deadline: float) -> TableSchema:
        schema = self.get(table_id)
        if schema is None:
            raise SchemaError(f"table {table_id} is gone", table_id=table_id)
        return schema


def _schema_of(table: Table) -> TableSchema:
    return TableSchema.of(table.schema_version, observer_messages(table.observers))
