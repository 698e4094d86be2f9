"""Looking for changes in many tablets while their server refuses, or no master answers."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import DeadlineExceeded, NotReady, TabletLocation
from percolator.routing.cells import ChangesRequest
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import to_detail

from .tablet_servers import Cluster, Server, tablet

TABLETS = 20


class _NotReady(Server):
    """Refuses every look."""

    async def look_for_changes(
        self, request: pb.LookForChangesRequest
    ) -> pb.LookForChangesResponse:
        await self._serve()
        error = to_detail(NotReady("the server is shutting down"))
        return pb.LookForChangesResponse(
            looks=[pb.ChangesLookResult(error=error) for _ in request.looks]
        )


def _cluster() -> Cluster:
    cluster = Cluster({"a:1": _NotReady()})
    starts = [b"", *(b"%02d" % number for number in range(1, TABLETS))]
    cluster.now_at = [
        tablet("a:1", start, end, tablet_id=number)
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], b""], strict=True), 1)
    ]
    cluster.tablets.learn(cluster.now_at)
    return cluster


async def test_one_answer_of_a_master_is_about_all_tablets_that_refused() -> None:
    cluster = _cluster()
    with pytest.raises(NotReady):
        await cluster.router.look_for_changes(ChangesRequest(1, 0, 9), [], cluster.deadline(1.0))
    assert cluster.searches < TABLETS


async def test_while_no_master_answers_a_look_waits_for_one_question() -> None:
    cluster = _cluster()

    async def unanswered(table_id: int, row: bytes) -> list[TabletLocation]:
        await asyncio.sleep(5.0)
        raise DeadlineExceeded("no master answered in time")

    cluster.tablets._find = unanswered
    with pytest.raises(NotReady):
        await cluster.router.look_for_changes(ChangesRequest(1, 0, 9), [], cluster.deadline(1.0))
    assert cluster.clock.monotonic_seconds() < 6.0
