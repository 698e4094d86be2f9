"""The oracle's remote procedure: knows nothing of sockets, so that it can be simulated."""

from __future__ import annotations

from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from services.oracle.oracle import Oracle


class OracleHandler:
    """`percolator.v1.OracleService`."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle

    async def get_timestamps(self, request: GetTimestampsRequest) -> GetTimestampsResponse:
        count = request.count
        return GetTimestampsResponse(
            first=await self._oracle.get_timestamps(count),
            count=count,
        )
