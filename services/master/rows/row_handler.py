"""`percolator.v1.MasterService` of a cluster in a row store: tables, and sentences for the rest."""

from __future__ import annotations

from typing import NoReturn

from percolator.errors import InvalidArgument
from percolator.v1 import master_pb2 as wire
from percolator.world import Clock
from services.master.map.catalogue import Catalogue
from services.master.map.map_record import table_message
from services.master.master import Master
from services.master.rows.row_term import RowTerm
from services.master.table_handler import TableHandler

_NOT_YET = "are not there yet on a row store (docs/bigtable.md)"


class RowMasterHandler(TableHandler[Catalogue, RowTerm]):
    """Answers the calls of one master over a row store."""

    def __init__(self, clock: Clock, master: Master[Catalogue, RowTerm], store: str) -> None:
        """`store` is named in refusals."""
        super().__init__(clock, master)
        self._store = store

    async def begin_load(self, request: wire.BeginLoadRequest) -> wire.BeginLoadResponse:
        async with self._master.leading() as leader:
            table = await leader.tables.begin_load(request, self._deadline())
        message = None if table is None else table_message(table)
        return wire.BeginLoadResponse(table=message)

    async def publish_loads(self, request: wire.PublishLoadsRequest) -> wire.PublishLoadsResponse:
        async with self._master.leading() as leader:
            tables = await leader.tables.publish_loads(request, self._deadline())
        return wire.PublishLoadsResponse(tables=map(table_message, tables))

    async def abandon_load(self, request: wire.AbandonLoadRequest) -> wire.AbandonLoadResponse:
        async with self._master.leading() as leader:
            return await leader.tables.abandon_load(request, self._deadline())

    # -------------------------------------------------------------------- not there yet

    async def set_change_feed(
        self, request: wire.SetChangeFeedRequest
    ) -> wire.SetChangeFeedResponse:
        raise InvalidArgument("change feeds", _NOT_YET)

    async def set_ttls(self, request: wire.SetTtlsRequest) -> wire.SetTtlsResponse:
        raise InvalidArgument("times to live", _NOT_YET)

    async def change_codecs(self, request: wire.ChangeCodecsRequest) -> wire.ChangeCodecsResponse:
        raise InvalidArgument("changes of declared codecs", _NOT_YET)

    # -------------------------------------------------------------------- only tablets

    async def locate_tablets(
        self, request: wire.LocateTabletsRequest
    ) -> wire.LocateTabletsResponse:
        self._refuse_tablets()

    async def list_tablets(self, request: wire.ListTabletsRequest) -> wire.ListTabletsResponse:
        self._refuse_tablets()

    async def split_tablet(self, request: wire.SplitTabletRequest) -> wire.SplitTabletResponse:
        self._refuse_tablets()

    async def move_tablet(self, request: wire.MoveTabletRequest) -> wire.MoveTabletResponse:
        self._refuse_tablets()

    async def list_servers(self, request: wire.ListServersRequest) -> wire.ListServersResponse:
        async with self._master.leading():  # a call by which callers learn who leads
            return wire.ListServersResponse()

    async def drain_server(self, request: wire.DrainServerRequest) -> wire.DrainServerResponse:
        self._refuse_tablets()

    def _refuse_tablets(self) -> NoReturn:
        raise InvalidArgument(
            "tablets",
            f"the cells of this cluster are in {self._store}, and it has no tablets",
        )
