"""The oracle's one remote procedure. It knows nothing of sockets, so it can be simulated."""

from __future__ import annotations

from collections.abc import Callable

from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from services.oracle.oracle import Oracle


class OracleHandler:
    """`percolator.v1.OracleService`."""

    def __init__(self, serving: Callable[[], Oracle]) -> None:
        """`serving` raises while this process does not lead."""
        self._serving = serving

    async def get_timestamps(self, request: GetTimestampsRequest) -> GetTimestampsResponse:
        count = request.count
        return GetTimestampsResponse(
            first=await self._serving().get_timestamps(count),
            count=count,
        )
