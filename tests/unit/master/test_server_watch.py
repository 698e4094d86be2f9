"""The watch over tablet servers, whatever they do and however long."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from percolator.errors import Unavailable
from percolator.services.master.server_watch import (
    PROBATION_SECONDS_MAX,
    ServerState,
    ServerWatch,
    WatchTimes,
)
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import UnaryMethod, World
from tests.simulation.virtual_time import VirtualClock
from tests.unit.unary_network import UnaryNetwork

LOSSES = 1_100
"""With so many doublings, a number does not fit into a float."""


class OneServer(UnaryNetwork):
    """A tablet server that refuses connections while it is down."""

    up = True

    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> pb.ReportResponse:
        if not self.up:
            raise Unavailable("refused", where=address)
        return pb.ReportResponse(server_id="a")


async def test_a_server_that_was_lost_a_thousand_times_is_still_put_on_probation() -> None:
    network = OneServer()
    world = World(VirtualClock(asyncio.get_running_loop()), network, Random(1))
    watch = ServerWatch(world, WatchTimes(), lambda: None, newest_timestamp=lambda: 0)

    async def until(state: ServerState) -> None:
        while watch.servers["a"].state is not state:
            watch.tick()
            await asyncio.sleep(0.1)

    for _ in range(LOSSES):
        network.up = True
        watch.watch("a", "a:1")
        await until(ServerState.ALIVE)
        network.up = False
        await until(ServerState.DEAD)
    network.up = True
    watch.watch("a", "a:1")
    await until(ServerState.ALIVE)
    assert watch.steady() == []
    for _ in range(int(PROBATION_SECONDS_MAX / 0.1) + 2):
        watch.tick()
        await asyncio.sleep(0.1)
    assert [one.server_id for one in watch.steady()] == ["a"]
    await watch.close()
