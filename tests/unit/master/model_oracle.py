"""A model of the oracle, whose time is the virtual clock."""

from __future__ import annotations

from percolator.errors import NotReady
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import cluster_pb2
from percolator.v1 import oracle_pb2 as oracle
from tests.simulation.virtual_time import VirtualClock

ORACLE = "oracle:1"
SECOND = 1000 << SEQUENCE_BITS
SERVER = cluster_pb2.Server(
    kind=cluster_pb2.SERVICE_KIND_ORACLE,
    server_id=ORACLE,
    address=ORACLE,
    version="0.1.0",
)


class ModelOracle:
    """Hands out timestamps from the virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.epoch = 0
        self.refusals = 0
        """How many calls it refuses, as a standby."""

    def now(self) -> int:
        # Long after the epoch, so that retention never reaches back to 0.
        return 1_000 * SECOND + round(self._clock.monotonic_seconds() * SECOND)

    async def get_timestamps(
        self, request: oracle.GetTimestampsRequest
    ) -> oracle.GetTimestampsResponse:
        return oracle.GetTimestampsResponse(
            first=self.now(), count=request.count, catalogue_epoch=self.epoch
        )

    async def advance_epoch(
        self, request: oracle.AdvanceEpochRequest
    ) -> oracle.AdvanceEpochResponse:
        if self.refusals:
            self.refusals -= 1
            raise NotReady("another oracle leads")
        self.epoch = max(self.epoch, request.catalogue_epoch)
        return oracle.AdvanceEpochResponse(catalogue_epoch=self.epoch)
