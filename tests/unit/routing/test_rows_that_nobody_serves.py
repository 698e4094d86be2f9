"""A row whose tablet no server has at the moment does not hold up others."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import (
    DeadlineExceeded,
    Retry,
    SchemaError,
    TabletLocation,
    Unavailable,
)
from percolator.limits import Limits
from percolator.routing.cells import APPLIED

from .tablet_servers import Cluster, Server, row_request, step, tablet


def _half_served() -> Cluster:
    """A server that had two tablets is down, and another one has taken over only the upper."""
    cluster = Cluster({"a:1": Server(), "b:1": Server()})
    cluster.tablets.learn([tablet("a:1", b"", b"m"), tablet("a:1", b"m", b"", tablet_id=2)])
    cluster.servers["a:1"].down = True
    cluster.now_at = [
        tablet("", b"", b"m", epoch=2),
        tablet("b:1", b"m", b"", tablet_id=2, epoch=2),
    ]
    return cluster


async def test_reads_of_one_call_do_not_wait_for_each_others_tablets() -> None:
    cluster = _half_served()
    waiting = asyncio.ensure_future(
        cluster.router.read([row_request(b"a")], cluster.deadline(20.0))
    )
    (answer,) = await cluster.router.read([row_request(b"z")], cluster.deadline(5.0))
    assert answer.found[b"c"].value == b"value of z"
    assert cluster.clock.monotonic_seconds() < 0.5
    cluster.now_at = [tablet("b:1", b"", b"m", epoch=3)]
    (answer,) = await waiting
    assert answer.found[b"c"].value == b"value of a"


async def test_mutations_of_one_request_do_not_wait_for_each_others_tablets() -> None:
    cluster = _half_served()
    cluster.tablets.forget(1)
    writing = asyncio.ensure_future(
        cluster.router.mutate([step(b"a"), step(b"z")], cluster.deadline(5.0))
    )
    await asyncio.sleep(0.5)
    assert cluster.servers["b:1"].rows_mutated() == [b"z"]
    lost, applied = await writing
    assert applied is APPLIED
    assert isinstance(lost, DeadlineExceeded)
    assert lost.retry is Retry.SAFE
    assert "no tablet is known" in lost.message


async def test_rows_whose_tablets_are_known_do_not_wait_while_no_master_answers() -> None:
    """Nor do those that wait for room wait for it: a search takes seconds then."""
    full, free = Server(seconds=1.0), Server()
    cluster = Cluster({"a:1": full, "b:1": free}, Limits(server_rows_max=1))
    cluster.tablets.learn([tablet("a:1", b"m", b"t"), tablet("b:1", b"t", b"", tablet_id=2)])

    async def find(table_id: int, row: bytes) -> list[TabletLocation]:
        await asyncio.sleep(5.0)
        raise Unavailable("no master answers")

    cluster.tablets._find = find
    filling = asyncio.ensure_future(cluster.router.mutate([step(b"n")], cluster.deadline()))
    writing = asyncio.ensure_future(
        cluster.router.mutate([step(b"a"), step(b"o"), step(b"z")], cluster.deadline(8.0))
    )
    await asyncio.sleep(0.5)
    assert free.rows_mutated() == [b"z"]
    await asyncio.sleep(2.0)
    assert full.rows_mutated() == [b"n", b"o"]
    assert await filling == [APPLIED]
    lost, *applied = await writing
    assert isinstance(lost, DeadlineExceeded)
    assert applied == [APPLIED] * 2


async def test_many_rows_that_nobody_serves_are_few_questions_to_a_master() -> None:
    cluster = _half_served()
    cluster.tablets.forget(1)
    steps = [step(b"a %d" % number) for number in range(1_000)]
    answers = await cluster.router.mutate(steps, cluster.deadline(5.0))
    assert all(isinstance(answer, DeadlineExceeded) for answer in answers)
    assert cluster.searches < 20


async def test_every_row_of_a_table_that_was_dropped_is_refused_at_once() -> None:
    cluster = _half_served()
    cluster.tablets.forget(1)

    async def find(table_id: int, row: bytes) -> list[TabletLocation]:
        raise SchemaError("there is no such table")

    cluster.tablets._find = find
    answers = await cluster.router.mutate([step(b"a"), step(b"z")], cluster.deadline())
    assert [type(answer) for answer in answers] == [SchemaError] * 2
    assert cluster.clock.monotonic_seconds() < 0.1


async def test_reads_of_one_call_do_not_wait_for_room_at_each_others_servers() -> None:
    """The silent server is full, and has taken over a tablet of one that is down."""
    full, free = Server(seconds=10**6), Server()
    cluster = Cluster(
        {"a:1": Server(), "full:1": full, "b:1": free},
        Limits(server_rows_max=2, attempt_seconds_max=60.0),
    )
    cluster.servers["a:1"].down = True
    cluster.tablets.learn(
        [
            tablet("a:1", b"", b"m"),
            tablet("a:1", b"m", b"t", tablet_id=2),
            tablet("full:1", b"t", b"", tablet_id=3),
        ]
    )
    cluster.now_at = [
        tablet("full:1", b"", b"m", epoch=2),
        tablet("b:1", b"m", b"t", tablet_id=2, epoch=2),
        tablet("full:1", b"t", b"", tablet_id=3),
    ]
    for row in (b"y", b"z", b"a"):
        reading = cluster.router.read([row_request(row)], cluster.deadline(20.0))
        asyncio.ensure_future(reading).add_done_callback(lambda done: done.exception())
    (answer,) = await cluster.router.read([row_request(b"n")], cluster.deadline(5.0))
    assert answer.found[b"c"].value == b"value of n"
    with pytest.raises(DeadlineExceeded):
        await cluster.router.read([row_request(b"z")], cluster.deadline(1.0))


async def test_mutations_of_one_request_do_not_wait_for_room_at_each_others_servers() -> None:
    """As the heartbeats of all transactions of a client, which are one request."""
    full, free = Server(seconds=10**6), Server()
    cluster = Cluster({"a:1": full, "b:1": free}, Limits(server_rows_max=1))
    cluster.tablets.learn([tablet("a:1", b"", b"m"), tablet("b:1", b"m", b"", tablet_id=2)])
    cluster.now_at = cluster.tablets.tablets(1)
    filling = asyncio.ensure_future(cluster.router.mutate([step(b"b")], cluster.deadline(20.0)))
    await asyncio.sleep(0.1)
    writing = asyncio.ensure_future(
        cluster.router.mutate([step(b"a"), step(b"z"), step(b"a"), step(b"y")], cluster.deadline())
    )
    await asyncio.sleep(0.5)
    assert free.rows_mutated() == [b"z", b"y"]
    cluster.now_at = [tablet("b:1", b"", b"m", epoch=2)]
    assert await writing == [APPLIED] * 4
    assert cluster.clock.monotonic_seconds() < 3.0
    (unknown,) = await filling
    assert isinstance(unknown, DeadlineExceeded)
