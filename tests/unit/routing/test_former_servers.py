"""A client keeps nothing for a server long not called, and calls it again if it must."""

from __future__ import annotations

import asyncio

import pytest

from percolator.limits import Limits
from percolator.routing.cells import APPLIED
from percolator.wire import frames

from .tablet_servers import Cluster, Server, step, tablet

UNUSED_SECONDS = 5.0


@pytest.fixture(autouse=True)
def _soon_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a call is in progress, deadlines are looked at twenty times a second."""
    monkeypatch.setattr(frames, "UNUSED_SECONDS", UNUSED_SECONDS)


async def _write(cluster: Cluster, row: bytes, seconds: float = 10.0) -> None:
    assert await cluster.router.mutate([step(row)], cluster.deadline(seconds)) == [APPLIED]


def _addresses(cluster: Cluster) -> list[str]:
    return [dispatcher.address for dispatcher in cluster.router._dispatchers]


async def test_a_tablet_that_moves_leaves_nothing_at_its_former_servers() -> None:
    servers = {f"server-{number}:1": Server() for number in range(20)}
    cluster = Cluster(servers)
    for epoch, address in enumerate(servers, start=1):
        cluster.tablets.learn([tablet(address, epoch=epoch)])
        await _write(cluster, b"a")
        await asyncio.sleep(UNUSED_SECONDS + 1.0)
    assert _addresses(cluster) == ["server-19:1"]
    assert cluster.router.calls_sent == cluster.router.rows_sent == 20, "the figures stay"


async def test_a_server_is_called_again_when_a_tablet_comes_back_to_it() -> None:
    cluster = Cluster({"a:1": Server(), "b:1": Server()})
    for epoch, address in enumerate(["a:1", "b:1", "a:1"], start=1):
        cluster.tablets.learn([tablet(address, epoch=epoch)])
        await _write(cluster, b"row %d" % epoch)
        await asyncio.sleep(UNUSED_SECONDS + 1.0)
    assert cluster.servers["a:1"].rows_mutated() == [b"row 1", b"row 3"]
    assert _addresses(cluster) == ["a:1"]


async def test_a_call_in_progress_and_what_waits_behind_it_keep_their_server() -> None:
    slow = Server(seconds=2 * UNUSED_SECONDS)
    servers = {"a:1": slow, "b:1": Server(), "c:1": Server()}
    cluster = Cluster(servers, Limits(attempt_seconds_max=60.0))
    cluster.tablets.learn([tablet("a:1", b"", b"m")])
    writing = asyncio.ensure_future(_write(cluster, b"a", 60.0))
    await asyncio.sleep(1.5 * UNUSED_SECONDS)
    cluster.tablets.learn([tablet("b:1", b"m", b"", tablet_id=2)])
    await _write(cluster, b"z")
    assert _addresses(cluster) == ["a:1", "b:1"]
    await writing
    await asyncio.sleep(UNUSED_SECONDS - 1.0)
    cluster.tablets.learn([tablet("c:1", b"m", b"", tablet_id=2, epoch=2)])
    await _write(cluster, b"z")
    assert "a:1" in _addresses(cluster), "the time counts from the last answer"
