"""A row store that keeps everything of a cluster: its records, and the cells of its tables."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial

from percolator.bigtable.admin import delete_table, has_table, require_table
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.errors import InvalidArgument, InvariantViolation, PercolatorError, SchemaError
from percolator.limits import Limits
from percolator.rowstore.identity import TABLE_ID
from percolator.rowstore.intents import INTENTS_TABLE
from percolator.rowstore.layout import FAMILIES
from percolator.rowstore.port import Selection
from percolator.rowstore.steady_scan import steady_scan
from percolator.services.chassis.coordinator.row_coordinator import RowCoordinator
from percolator.services.chassis.coordinator.times import CoordinatorTimes
from percolator.services.chassis.host import AnyHost
from percolator.services.chassis.records.records import Records
from percolator.services.chassis.store_kinds import row_identity
from percolator.services.chassis.store_kinds.row_identity import RowIdentity
from percolator.services.chassis.store_kinds.row_store_watch import RowStoreWatch
from percolator.v1.cluster_pb2 import RowStorePlace
from percolator.world import Network, World

_TABLE_SECONDS = 30.0


class RowClusterStore:
    """A `percolator.services.chassis.store_kinds.cluster_store.ClusterStore`."""

    def __init__(self, network: Network, place: Place, world: World) -> None:
        """`network` reaches the store; that of `world`, the cluster's servers."""
        self.network = network
        self.place = place
        self.store = BigtableStore(network, place)
        self._world = world
        self._records = Records(self.store, world)
        self._identity: RowIdentity | None = None

    @property
    def name(self) -> str:
        return str(self.place)

    @property
    def identity(self) -> RowIdentity:
        if self._identity is None:
            raise InvariantViolation("the identity of the store is used before it is known")
        return self._identity

    async def establish_identity(self) -> RowIdentity:
        await self.create_table(TABLE_ID)
        await self.create_table(INTENTS_TABLE)
        self._identity = await row_identity.establish(self._records, self.name, self._world)
        return self._identity

    async def refuse_other_cluster(self, cluster_id: str) -> None:
        try:
            found = await has_table(self.network, self.place, TABLE_ID, _TABLE_SECONDS)
        except PercolatorError as error:
            raise self._named(error) from error
        if not found:
            raise InvalidArgument(
                "store", f"{self.name} belongs to no cluster yet: start a master on it first"
            )
        self._identity = await row_identity.require(self._records, self.name, cluster_id)

    async def create_table(self, table_id: int) -> None:
        """Creates a table, unless there is one of that id. Raises `SchemaError` for one that does
        not have the families of a table of a cluster."""
        try:
            await require_table(self.network, self.place, table_id, _TABLE_SECONDS)
        except PercolatorError as error:
            raise self._named(error) from error

    async def has_table(self, table_id: int) -> bool:
        """Whether there is a table of that id."""
        try:
            return await has_table(self.network, self.place, table_id, _TABLE_SECONDS)
        except PercolatorError as error:
            raise self._named(error) from error

    async def delete_table(self, table_id: int) -> None:
        """Deletes a table with everything in it, if it is there."""
        try:
            await delete_table(self.network, self.place, table_id, _TABLE_SECONDS)
        except PercolatorError as error:
            raise self._named(error) from error

    async def require_empty(self, table_id: int) -> None:
        """Raises `SchemaError` unless a table that is about to be used has nothing in it."""
        try:
            # The store may say for a while that the table is still being created.
            families = [Selection(family) for family in FAMILIES]
            scan = steady_scan(self.store, table_id, families, self._world, Limits(), rows_max=1)
            async with aclosing(scan) as found:
                rows = [row async for row in found]
        except PercolatorError as error:
            raise self._named(error) from error
        if rows:
            name = self.place.table_name(table_id)
            raise SchemaError(
                f"store: {self.name}: the table {name} was made by another program: it has rows, "
                "and no table of this cluster has used it"
            )

    def coordinator(self, times: CoordinatorTimes) -> RowCoordinator:
        return RowCoordinator(self._records, self._world, times)

    def watch(self, host: AnyHost) -> None:
        look = partial(row_identity.read, self._records, self.name)
        host.watch(
            partial(RowStoreWatch, look, self.identity, self.name, self._world.clock, host.log)
        )

    def rows(self) -> RowStorePlace:
        return RowStorePlace(
            address=self.name,
            emulator=self.place.address if self.place.is_emulated else "",
            epoch_milliseconds=self.identity.epoch_milliseconds,
        )

    def _named(self, error: PercolatorError) -> PercolatorError:
        """The error, with the setting that leads there."""
        error.message = f"store: {self.name}: {error.message}"
        return error
