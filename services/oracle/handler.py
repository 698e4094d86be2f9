"""The oracle's remote procedures. They know nothing of sockets, so they can be simulated."""

from __future__ import annotations

from collections.abc import Callable

from percolator.services.oracle.oracle import Oracle
from percolator.v1.oracle_pb2 import (
    AdvanceEpochRequest,
    AdvanceEpochResponse,
    GetTimestampsRequest,
    GetTimestampsResponse,
)


class OracleHandler:
    """`percolator.v1.OracleService`."""

    def __init__(self, serving: Callable[[], Oracle]) -> None:
        """`serving` raises while this process does not lead."""
        self._serving = serving

    async def get_timestamps(self, request: GetTimestampsRequest) -> GetTimestampsResponse:
        count, oracle = request.count, self._serving()
        first = await oracle.get_timestamps(count)
        return GetTimestampsResponse(
            first=first, count=count, catalogue_epoch=oracle.catalogue_epoch
        )

    async def advance_epoch(self, request: AdvanceEpochRequest) -> AdvanceEpochResponse:
        epoch = await self._serving().advance_epoch(request.catalogue_epoch)
        return AdvanceEpochResponse(catalogue_epoch=epoch)
