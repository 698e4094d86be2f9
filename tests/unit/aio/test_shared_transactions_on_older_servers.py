"""Shared transactions over tablet servers of releases that refuse reads without a timestamp."""

from __future__ import annotations

from percolator.errors import InvalidArgument
from percolator.timestamps import NEWEST
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import to_detail
from tests.unit.aio.shared_attempts import receipt_of, share_of, values_of
from tests.unit.connected import Cluster, connected_to

SECONDS = 30.0


class OlderCluster(Cluster):
    refusals = 0

    async def read(self, request: pb.ReadRequest) -> pb.ReadResponse:
        response = await super().read(request)
        for batch, answer in zip(request.batches, response.batches, strict=True):
            for index, read in enumerate(batch.reads):
                if read.timestamp == NEWEST:
                    self.refusals += 1
                    refused = InvalidArgument(f"reads[{index}].timestamp", "is in the future")
                    answer.CopyFrom(pb.ReadBatchResult(error=to_detail(refused)))
        return response


async def test_an_attempt_that_was_not_chosen_is_rolled_back() -> None:
    async with connected_to(OlderCluster) as (db, cluster):
        async with db.shared_transaction() as whole:
            await share_of(db, whole.ticket, "1", ann=1)  # speculation: never finished
            receipt = await receipt_of(db, whole.ticket, "1", ann=2, zoe=2)
            await whole.commit([receipt])
        assert await db.internal.engine.env.background.drain(SECONDS)  # after the answer
        assert cluster.refusals
        assert await values_of(db) == {"ann": 2, "zoe": 2}


async def test_a_rolled_back_one_leaves_no_locks() -> None:
    async with connected_to(OlderCluster) as (db, cluster):
        async with db.shared_transaction() as whole:
            await receipt_of(db, whole.ticket, "1", ann=1)
        assert cluster.refusals
        assert await values_of(db) == {}
