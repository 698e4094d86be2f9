"""Bulk loads into the row store of a simulation: the real master's decisions, in the stand-in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from percolator.errors import PercolatorError
from percolator.services.master.cluster_map import (
    Catalogue,
    Table,
    decode_catalogue,
    encode_catalogue,
    table_message,
)
from percolator.services.master.row_term import RowLoads
from percolator.v1 import master_pb2 as pb
from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.wire import methods
from percolator.world import World
from tests.simulation.programs import ORACLE
from tests.simulation.rows import drop_table, make_table

_FIRST_ID = 1_000
"""Above those of the tables that are there from the beginning."""
_CALL_SECONDS = 3.0


@dataclass
class LoadedTables:
    """What survives every crash of the stand-in."""

    current: Catalogue = field(default_factory=lambda: Catalogue(_FIRST_ID))

    async def change(self, decide: Callable[[Catalogue], tuple[Catalogue, Any]]) -> Any:
        """As a leader changes its catalogue."""
        changed, result = decide(self.current)
        self.current = decode_catalogue(encode_catalogue(changed))
        return result

    def published(self) -> list[pb.Table]:
        return [table_message(one) for one in self.current.tables.values() if one.is_used]


class Loading:
    """One life of the stand-in."""

    def __init__(self, world: World, tables: LoadedTables) -> None:
        self._world = world
        self._tables = tables
        kept, here = cast("Any", tables), cast("Any", self)
        self._loads = RowLoads(world.clock, kept, here, here, retention_min_seconds=0.0)

    async def begin(self, request: pb.BeginLoadRequest) -> pb.BeginLoadResponse:
        table = await self._loads.begin_load(request, self._deadline())
        return pb.BeginLoadResponse(table=None if table is None else table_message(table))

    async def publish(self, request: pb.PublishLoadsRequest) -> pb.PublishLoadsResponse:
        tables = await self._loads.publish_loads(request, self._deadline())
        return pb.PublishLoadsResponse(tables=map(table_message, tables))

    async def abandon(self, request: pb.AbandonLoadRequest) -> pb.AbandonLoadResponse:
        return await self._loads.abandon_load(request, self._deadline())

    async def remove_dropped(self) -> None:
        """Deletes the store's tables of runs that were given up, as collection does."""
        for table in list(self._tables.current.tables.values()):
            if table.deleting:
                await self._remove(table)

    async def _remove(self, table: Table) -> None:
        try:
            await drop_table(self._world.network, table.table_id)
        except PercolatorError:
            return  # the next round tries again
        self._tables.current = self._tables.current.without_table(table.table_id)

    def _deadline(self) -> float:
        return self._world.clock.monotonic_seconds() + _CALL_SECONDS

    # ------------------------------------------------------------------ oracle and store

    name = "the simulated store"

    def source(self) -> Loading:
        return self

    async def get(self, *, timeout_seconds: float) -> int:
        ask = self._world.network.unary(ORACLE, methods.GET_TIMESTAMPS)
        return (await ask(GetTimestampsRequest(count=1), timeout_seconds)).first

    async def create_table(self, table_id: int) -> None:
        await make_table(self._world.network, table_id)

    async def require_empty(self, table_id: int) -> None:
        """Nobody else makes tables here."""
