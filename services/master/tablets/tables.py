"""Tables whose cells are in tablets."""

from __future__ import annotations

from percolator.codec_names import CodecNames
from percolator.errors import InvalidArgument
from percolator.services.master.map.catalogue import Table
from percolator.services.master.map.cluster_map import ClusterMap
from percolator.services.master.map.map_record import ttls_of
from percolator.services.master.map.map_store import MapStore
from percolator.services.master.oracle_time import OracleTime
from percolator.services.master.store_format import StoreFormat
from percolator.services.master.table_changes import Creation, TableChanges
from percolator.services.master.tablets.assignment import Assignment
from percolator.v1 import master_pb2 as pb
from percolator.world import Clock


class Tables(TableChanges[ClusterMap]):
    """A change is made when every tablet is served, and judges under the new version."""

    def __init__(
        self,
        clock: Clock,
        store: MapStore,
        assignment: Assignment,
        oracle_time: OracleTime,
        store_format: StoreFormat,
        *,
        tablets_max: int,
        retention_min_seconds: float,
    ) -> None:
        super().__init__(clock, store, oracle_time, retention_min_seconds=retention_min_seconds)
        self._assignment = assignment
        self._store_format = store_format
        self._tablets_max = tablets_max

    async def set_ttls(self, request: pb.SetTtlsRequest, deadline: float) -> Table:
        if any(one.ttl_milliseconds for one in request.ttls):
            self._store.current.table(request.table)  # raises if there is none
            await self._store_format.require_expiry("ttls")
        return await super().set_ttls(request, deadline)

    async def _prepared(self, request: pb.CreateTableRequest, deadline: float) -> Creation:
        if request.options.ttls:
            await self._store_format.require_expiry("options.ttls")
        return await super()._prepared(request, deadline)

    def _with_new_table(self, current: ClusterMap, creation: Creation) -> tuple[ClusterMap, Table]:
        request = creation.request
        if len(current.tablets) + len(request.splits) + 1 > self._tablets_max:
            raise InvalidArgument(
                "splits", f"the cluster would have more than {self._tablets_max} tablets"
            )
        return current.with_new_table(
            request.name,
            request.splits,
            request.options.retention_milliseconds,
            request.options.split_bytes,
            creation.created_at,
            change_feed=request.options.change_feed,
            ttls=ttls_of(request.options.ttls),
            codecs=CodecNames().declared(request.name, request.codecs),
        )

    def _taken_out(self, current: ClusterMap, table: Table) -> ClusterMap:
        """Its tablets get new epochs, which only callers that resolve locks are told. Calls with
        the old epochs are refused as soon as the tablets were taken over."""
        tablets = [
            one.given_to(one.server_id, one.address)
            for one in current.of_tables[table.table_id]
            if one.epoch
        ]
        return current.with_tables(table).with_tablets(tablets)

    async def _until_current(self, table: Table, deadline: float) -> None:
        tablets = self._store.current.of_tables.get(table.table_id, ())
        await self._assignment.until_served([one.tablet_id for one in tablets], deadline)

    def _are_in_use(self, name: str) -> bool:
        return bool(self._assignment.used_by_former_owners(name))

    async def _until_out_of_use(self, name: str, deadline: float) -> None:
        await self._assignment.until_out_of_use(name, deadline)
