"""The part of `percolator.v1.MasterService` that is about tables, whatever has their cells."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic

from percolator.errors import SchemaError
from percolator.services.chassis.serving.rpc import caller_role, remaining_seconds
from percolator.services.master import collection_report
from percolator.services.master.map import locations
from percolator.services.master.map.catalogue import Table
from percolator.services.master.map.map_record import table_message
from percolator.services.master.map.map_store import MapT
from percolator.services.master.master import Master, TermT
from percolator.v1 import master_pb2 as pb
from percolator.wire.roles import Role
from percolator.world import Clock

WAIT_SECONDS_MAX = 60.0
_ANSWER_SECONDS = 0.2
"""What is reserved of the caller's deadline for the answer."""


class TableHandler(Generic[MapT, TermT]):
    """Answers from the leader, or from the map that it recorded."""

    def __init__(self, clock: Clock, master: Master[MapT, TermT]) -> None:
        self._clock = clock
        self._master = master

    async def create_table(self, request: pb.CreateTableRequest) -> pb.CreateTableResponse:
        async with self._master.leading() as leader:
            table, created = await leader.tables.create(request, self._deadline())
            tablets = leader.stored.current.tablets_of(table)
        return pb.CreateTableResponse(table=table_message(table, tablets), created=created)

    async def delete_table(self, request: pb.DeleteTableRequest) -> pb.DeleteTableResponse:
        async with self._master.leading() as leader:
            deleted = await leader.tables.delete(request, self._deadline())
        return pb.DeleteTableResponse(deleted=deleted)

    async def list_tables(self, request: pb.ListTablesRequest) -> pb.ListTablesResponse:
        return locations.list_tables(await self._master.current())

    async def describe_table(self, request: pb.DescribeTableRequest) -> pb.DescribeTableResponse:
        try:
            return locations.describe_table(await self._master.current(), request)
        except SchemaError:
            # A standby may not have heard of it yet: only the leader may deny that it exists.
            async with self._master.leading() as leader:
                return locations.describe_table(leader.stored.current, request)

    async def change_observers(
        self, request: pb.ChangeObserversRequest
    ) -> pb.ChangeObserversResponse:
        table = await self._after(
            lambda leader: leader.tables.change_observers(request, self._deadline())
        )
        return pb.ChangeObserversResponse(table=table)

    async def report_backfill(self, request: pb.ReportBackfillRequest) -> pb.ReportBackfillResponse:
        table = await self._after(
            lambda leader: leader.tables.report_backfill(request, self._deadline())
        )
        return pb.ReportBackfillResponse(table=table)

    async def set_change_feed(self, request: pb.SetChangeFeedRequest) -> pb.SetChangeFeedResponse:
        table = await self._after(
            lambda leader: leader.tables.set_change_feed(request, self._deadline())
        )
        return pb.SetChangeFeedResponse(table=table)

    async def set_ttls(self, request: pb.SetTtlsRequest) -> pb.SetTtlsResponse:
        table = await self._after(lambda leader: leader.tables.set_ttls(request, self._deadline()))
        return pb.SetTtlsResponse(table=table)

    async def declare_codecs(self, request: pb.DeclareCodecsRequest) -> pb.DeclareCodecsResponse:
        table = await self._after(lambda leader: leader.tables.declare_codecs(request))
        return pb.DeclareCodecsResponse(table=table)

    async def change_codecs(self, request: pb.ChangeCodecsRequest) -> pb.ChangeCodecsResponse:
        table = await self._after(
            lambda leader: leader.tables.change_codecs(request, self._deadline())
        )
        return pb.ChangeCodecsResponse(table=table)

    async def describe_collection(
        self, request: pb.DescribeCollectionRequest
    ) -> pb.DescribeCollectionResponse:
        async with self._master.leading() as leader:
            tables = leader.stored.current.tables.values()
            # Whoever knows the id of a session can end it, and this would end other clients' pins.
            tells_id = caller_role() >= Role.ADMIN
            return collection_report.describe(
                leader.collection, tables, leader.now(), tells_id=tells_id
            )

    async def _after(self, change: Callable[[TermT], Awaitable[Table]]) -> pb.Table:
        """The table as the leader describes it after a change."""
        async with self._master.leading() as leader:
            table = await change(leader)
            return table_message(table, leader.stored.current.tablets_of(table))

    def _deadline(self) -> float:
        """When to stop waiting: early enough to tell the caller that the work continues."""
        remaining = remaining_seconds()
        seconds = WAIT_SECONDS_MAX if remaining is None else min(remaining, WAIT_SECONDS_MAX)
        return self._clock.monotonic_seconds() + max(seconds - _ANSWER_SECONDS, 0.0)
