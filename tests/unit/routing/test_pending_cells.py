"""The fast path for a single cell behaves like the general path for many rows."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import (
    DeadlineExceeded,
    NotReady,
    PercolatorError,
    Retry,
    SchemaChanged,
    SchemaError,
    SnapshotTooOld,
    TabletLocation,
    TabletMoved,
)
from percolator.limits import Limits
from percolator.routing.cells import FoundCell, RowResult
from percolator.routing.lanes import CellAnswer
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import Cell
from percolator.wire.status import to_detail

from .tablet_servers import Cluster, Server, row_request, tablet


def _cluster(server: Server, limits: Limits | None = None) -> Cluster:
    cluster = Cluster({"a:1": server}, limits)
    cluster.tablets.learn([tablet("a:1")])
    return cluster


async def _read(cluster: Cluster, row: bytes = b"a", seconds: float = 10.0) -> CellAnswer:
    return await cluster.router.read_cell(1, row, b"c", 7, cluster.deadline(seconds))


class Answering(Server):
    """Answers reads as a test wants."""

    def __init__(self, answer: pb.ReadBatchResult) -> None:
        super().__init__()
        self.answer = answer

    async def read(self, request: pb.ReadRequest) -> pb.ReadResponse:
        await super().read(request)
        return pb.ReadResponse(batches=[self.answer])


async def test_a_cell_is_found() -> None:
    server = Server()
    assert await _read(_cluster(server)) == FoundCell(7, b"value of a")
    cells = server.read_calls[0].batches[0].cells
    assert (list(cells.rows), list(cells.columns), list(cells.timestamps)) == ([b"a"], [b"c"], [7])


async def test_a_cell_that_does_not_exist_is_none() -> None:
    assert await _read(_cluster(Answering(pb.ReadBatchResult(reads=1)))) is None


async def test_a_lock_in_the_way_is_reported() -> None:
    lock = Cell(row=b"a", column=b"c", value=b"lock")
    locked = pb.ReadBatchResult(reads=1, locks=[pb.BlockingLock(read=0, lock=lock)])
    answer = await _read(_cluster(Answering(locked)))
    assert isinstance(answer, RowResult)
    assert list(answer.locks) == [lock]


async def test_cells_and_rows_share_a_call_and_get_their_own_answers() -> None:
    server = Server()
    cluster = _cluster(server)
    deadline = cluster.deadline()
    cells = [cluster.router.read_cell(1, b"%d" % i, b"c", 7, deadline) for i in range(5)]
    rows = cluster.router.read([row_request(b"x"), row_request(b"y")], deadline)
    assert await asyncio.gather(*cells) == [FoundCell(7, b"value of %d" % i) for i in range(5)]
    answers = await rows
    assert [answer.found[b"c"].value for answer in answers] == [b"value of x", b"value of y"]
    assert len(server.read_calls) == 1


async def test_one_refused_read_does_not_fail_the_others() -> None:
    old = SnapshotTooOld("too old", timestamp=7, safe_point=9)
    answer = pb.ReadBatchResult(reads=2, refused=[pb.RefusedRead(read=1, error=to_detail(old))])
    answer.found.reads.append(0)
    answer.found.columns.append(b"c")
    answer.found.commit_timestamps.append(3)
    answer.found.values.append(b"v")
    cluster = _cluster(Answering(answer))
    good, bad = await asyncio.gather(
        _read(cluster, b"a"), _read(cluster, b"b"), return_exceptions=True
    )
    assert good == FoundCell(3, b"v")
    assert isinstance(bad, SnapshotTooOld)


@pytest.mark.parametrize(
    "error",
    [
        TabletMoved("gone", tablet_id=1, epoch=1),
        SchemaChanged("newer", table_id=1, schema_version=4),
        NotReady("starting"),
    ],
)
async def test_a_read_that_was_not_executed_is_sent_again(error: PercolatorError) -> None:
    server = Server()
    answers: list[PercolatorError | None] = [error, None]
    server.refuse_batch = lambda target, rows: answers.pop(0)
    cluster = _cluster(server)
    cluster.now_at = [tablet("a:1", epoch=2)]
    assert await _read(cluster) == FoundCell(7, b"value of a")


async def test_a_lost_answer_is_requested_again() -> None:
    server = Server()
    server.answers_lost = True
    cluster = _cluster(server)
    reading = asyncio.ensure_future(_read(cluster))
    await asyncio.sleep(0.5)
    server.answers_lost = False
    assert await reading == FoundCell(7, b"value of a")


async def test_a_silent_server_ends_with_the_deadline() -> None:
    cluster = _cluster(Server(seconds=1e6))
    with pytest.raises(DeadlineExceeded) as caught:
        await _read(cluster, seconds=2.0)
    assert caught.value.retry is Retry.SAFE
    assert cluster.clock.monotonic_seconds() == pytest.approx(2.0, abs=0.1)


async def test_a_cell_of_an_unknown_tablet_waits_until_it_is_known() -> None:
    cluster = Cluster({"a:1": Server()})
    reading = asyncio.ensure_future(_read(cluster))
    await asyncio.sleep(2.0)
    cluster.now_at = [tablet("a:1")]
    assert await reading == FoundCell(7, b"value of a")


async def test_a_cell_of_a_missing_table_is_a_schema_error() -> None:
    cluster = Cluster({})

    async def find(table_id: int, row: bytes) -> list[TabletLocation]:
        raise SchemaError("there is no such table")

    cluster.tablets._find = find
    with pytest.raises(SchemaError):
        await _read(cluster)


async def test_without_room_a_cell_waits_for_its_turn() -> None:
    server = Server(seconds=0.5)
    cluster = _cluster(server, Limits(server_rows_max=2, batch_rows_max=2))
    found = await asyncio.gather(*(_read(cluster, b"%d" % i) for i in range(9)))
    assert found == [FoundCell(7, b"value of %d" % i) for i in range(9)]
