"""`percolator.v1.MasterService` of a cluster in a row store: tables, and sentences for the rest."""

from __future__ import annotations

from typing import NoReturn

from percolator.errors import InvalidArgument
from percolator.services.master.map.catalogue import Catalogue
from percolator.services.master.map.map_record import table_message
from percolator.services.master.master import Master
from percolator.services.master.rows.row_term import RowTerm
from percolator.services.master.table_handler import TableHandler
from percolator.v1 import master_pb2 as pb
from percolator.world import Clock

_NOT_YET = "are not there yet on a row store (docs/bigtable.md)"


class RowMasterHandler(TableHandler[Catalogue, RowTerm]):
    """Answers the calls of one master over a row store."""

    def __init__(self, clock: Clock, master: Master[Catalogue, RowTerm], store: str) -> None:
        """`store` is named in refusals."""
        super().__init__(clock, master)
        self._store = store

    async def begin_load(self, request: pb.BeginLoadRequest) -> pb.BeginLoadResponse:
        async with self._master.leading() as leader:
            table = await leader.tables.begin_load(request, self._deadline())
        message = None if table is None else table_message(table)
        return pb.BeginLoadResponse(table=message)

    async def publish_loads(self, request: pb.PublishLoadsRequest) -> pb.PublishLoadsResponse:
        async with self._master.leading() as leader:
            tables = await leader.tables.publish_loads(request, self._deadline())
        return pb.PublishLoadsResponse(tables=map(table_message, tables))

    async def abandon_load(self, request: pb.AbandonLoadRequest) -> pb.AbandonLoadResponse:
        async with self._master.leading() as leader:
            return await leader.tables.abandon_load(request, self._deadline())

    # -------------------------------------------------------------------- not there yet

    async def set_change_feed(self, request: pb.SetChangeFeedRequest) -> pb.SetChangeFeedResponse:
        raise InvalidArgument("change feeds", _NOT_YET)

    async def set_ttls(self, request: pb.SetTtlsRequest) -> pb.SetTtlsResponse:
        raise InvalidArgument("times to live", _NOT_YET)

    async def change_codecs(self, request: pb.ChangeCodecsRequest) -> pb.ChangeCodecsResponse:
        raise InvalidArgument("changes of declared codecs", _NOT_YET)

    # -------------------------------------------------------------------- only tablets

    async def locate_tablets(self, request: pb.LocateTabletsRequest) -> pb.LocateTabletsResponse:
        self._refuse_tablets()

    async def list_tablets(self, request: pb.ListTabletsRequest) -> pb.ListTabletsResponse:
        self._refuse_tablets()

    async def split_tablet(self, request: pb.SplitTabletRequest) -> pb.SplitTabletResponse:
        self._refuse_tablets()

    async def move_tablet(self, request: pb.MoveTabletRequest) -> pb.MoveTabletResponse:
        self._refuse_tablets()

    async def list_servers(self, request: pb.ListServersRequest) -> pb.ListServersResponse:
        async with self._master.leading():  # a call by which callers learn who leads
            return pb.ListServersResponse()

    async def drain_server(self, request: pb.DrainServerRequest) -> pb.DrainServerResponse:
        self._refuse_tablets()

    def _refuse_tablets(self) -> NoReturn:
        raise InvalidArgument(
            "tablets",
            f"the cells of this cluster are in {self._store}, and it has no tablets",
        )
