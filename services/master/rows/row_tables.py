"""Tables whose cells are in a row store: each is a table of the store, named by its id.

An id is used up, durably, before the store's table is made, and the table of the cluster is
recorded after it. So a master that ends in between leaves an empty table of the store that nobody
ever uses, and no table of the cluster without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from percolator.codec_names import CodecNames
from percolator.errors import DeadlineExceeded, InvalidArgument, NotReady, PercolatorError
from percolator.services.chassis.store_kinds.row_cluster_store import RowClusterStore
from percolator.services.master.map.catalogue import Catalogue, Table
from percolator.services.master.map.map_store import CatalogueStore
from percolator.services.master.oracle_time import OracleTime
from percolator.services.master.table_changes import Creation, TableChanges
from percolator.v1 import master_pb2 as pb
from percolator.world import Clock


class RowTables(TableChanges[Catalogue]):
    """The store divides its tables by itself: splits, and sizes of tablets, are not used."""

    def __init__(
        self,
        clock: Clock,
        store: CatalogueStore,
        oracle_time: OracleTime,
        rows: RowClusterStore,
        *,
        retention_min_seconds: float,
    ) -> None:
        super().__init__(clock, store, oracle_time, retention_min_seconds=retention_min_seconds)
        self._rows = rows
        self._creating = asyncio.Lock()
        self._told: set[int] = set()
        """The deleted tables of whose deletion the oracle was told in this term."""

    async def create(self, request: pb.CreateTableRequest, deadline: float) -> tuple[Table, bool]:
        self._require_possible(request)
        async with self._alone(deadline):
            return await super().create(request, deadline)

    def _require_possible(self, request: pb.CreateTableRequest) -> None:
        if request.options.change_feed:
            raise InvalidArgument(
                "options.change_feed", f"tables in {self._rows.name} have no change feeds"
            )
        if request.options.ttls:
            raise InvalidArgument("options.ttls", f"no value in {self._rows.name} expires")

    @asynccontextmanager
    async def _alone(self, deadline: float) -> AsyncIterator[None]:
        """Of two that create a table of the same name, one finds the other's."""
        left = deadline - self._clock.monotonic_seconds()
        try:
            async with asyncio.timeout(left):
                await self._creating.acquire()
        except TimeoutError:
            raise NotReady("other tables are being created") from None
        try:
            yield
        finally:
            self._creating.release()

    async def _until_registered(self, table: Table, deadline: float) -> None:
        await self._oracle_time.raise_epoch(deadline)

    async def _prepared(self, request: pb.CreateTableRequest, deadline: float) -> Creation:
        creation = await super()._prepared(request, deadline)
        table_id = await self._store.change(_with_id_used)
        await self._rows.create_table(table_id)
        await self._rows.require_empty(table_id)
        return creation._replace(table_id=table_id)

    def _with_new_table(self, current: Catalogue, creation: Creation) -> tuple[Catalogue, Table]:
        request = creation.request
        require_not_loading(current, request.name)
        table = Table(
            creation.table_id,
            request.name,
            retention_milliseconds=request.options.retention_milliseconds,
            split_bytes=request.options.split_bytes,
            created_at=creation.created_at,
            codecs=CodecNames().declared(request.name, request.codecs),
        )
        return current.with_tables(table), table

    def _taken_out(self, current: Catalogue, table: Table) -> Catalogue:
        return current.with_tables(table)

    async def _until_current(self, table: Table, deadline: float) -> None:
        """It can be used: the store's table was there before it."""

    def _are_in_use(self, name: str) -> bool:
        return bool(self._untold(name))

    async def _until_out_of_use(self, name: str, deadline: float) -> None:
        """Whoever gets a timestamp from then on learns that they are gone before it commits."""
        untold = self._untold(name)
        if not untold:
            return
        try:
            await self._oracle_time.raise_epoch(deadline)
        except PercolatorError as error:
            raise DeadlineExceeded(error.message) from error
        self._told |= untold

    def _untold(self, name: str) -> set[int]:
        return {one.table_id for one in self._store.current.deleted(name)} - self._told


def require_not_loading(current: Catalogue, name: str, load: str = "") -> None:
    """Raises `InvalidArgument` if a table of that name is being loaded, by another load."""
    for table in current.tables.values():
        if table.name == name and table.is_hidden and not table.deleting and table.load is not None:
            other = table.load.name
            if other != load:
                raise InvalidArgument(
                    "name",
                    f"table {name!r} is being loaded by the bulk load {other!r}: wait until it is "
                    "complete, or abandon it",
                )


def _with_id_used(current: Catalogue) -> tuple[Catalogue, int]:
    return replace(current, next_id=current.next_id + 1), current.next_id
