"""Requests leave a silent server once a master names another one, and wait for a slow one."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import (
    DeadlineExceeded,
    Retry,
    TabletLocation,
    Unavailable,
)
from percolator.limits import Limits
from percolator.routing.cells import APPLIED

from .tablet_servers import Cluster, Server, row_request, step, tablet


def _silent_cluster() -> Cluster:
    """A cluster in which everything was at a:1, which has fallen silent."""
    cluster = Cluster({"a:1": Server(seconds=10**6), "b:1": Server()}, Limits(server_calls_max=2))
    cluster.tablets.learn([tablet("a:1")])
    cluster.now_at = [tablet("a:1")]
    return cluster


async def test_reads_leave_a_silent_server_once_a_master_names_another_one() -> None:
    cluster = _silent_cluster()
    reading = asyncio.ensure_future(cluster.router.read([row_request(b"a")], cluster.deadline()))
    await asyncio.sleep(2.2)
    assert not reading.done()
    cluster.now_at = [tablet("b:1", epoch=2)]
    (answer,) = await reading
    assert answer.found[b"c"].value == b"value of a"
    assert cluster.clock.monotonic_seconds() == pytest.approx(2.5, abs=0.3)


async def test_mutations_sent_to_a_silent_server_are_unknown_once_it_is_replaced() -> None:
    cluster = _silent_cluster()
    cluster.now_at = [tablet("b:1", epoch=2)]
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline())
    assert isinstance(answer, DeadlineExceeded)
    assert answer.retry is Retry.UNKNOWN
    assert cluster.clock.monotonic_seconds() == pytest.approx(1.0, abs=0.2)
    assert cluster.servers["b:1"].rows_mutated() == []


async def test_mutations_not_yet_sent_to_a_silent_server_go_to_its_replacement() -> None:
    """They waited for a call that never came back."""
    cluster = _silent_cluster()
    sent = asyncio.ensure_future(cluster.router.mutate([step(b"a")], cluster.deadline()))
    await asyncio.sleep(0.1)
    waiting = asyncio.ensure_future(cluster.router.mutate([step(b"b")], cluster.deadline()))
    cluster.now_at = [tablet("b:1", epoch=2)]
    assert await waiting == [APPLIED]
    assert cluster.servers["b:1"].rows_mutated() == [b"b"]
    (unknown,) = await sent
    assert isinstance(unknown, DeadlineExceeded)


async def test_a_slow_server_that_keeps_its_tablets_is_waited_for() -> None:
    cluster = _silent_cluster()
    cluster.servers["a:1"].seconds = 3.0
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]
    assert 1 < cluster.searches < 6


async def test_a_slow_server_is_also_waited_for_while_no_master_answers() -> None:
    cluster = _silent_cluster()

    async def unanswered(table_id: int, row: bytes) -> list[TabletLocation]:
        raise DeadlineExceeded("no master answered in time")

    cluster.tablets._find = unanswered
    cluster.servers["a:1"].seconds = 3.0
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]


@pytest.mark.parametrize("search_seconds", [0.0, 5.0])
async def test_a_router_is_closed_at_once_while_a_master_is_asked_about_a_silent_server(
    search_seconds: float,
) -> None:
    cluster = _silent_cluster()
    cluster.search_seconds = search_seconds
    reading = asyncio.ensure_future(cluster.router.read([row_request(b"a")], cluster.deadline()))
    await asyncio.sleep(1.2)
    assert cluster.searches == 1
    began = cluster.clock.monotonic_seconds()
    await cluster.router.close()
    assert cluster.clock.monotonic_seconds() == began
    with pytest.raises(Unavailable):
        await reading
