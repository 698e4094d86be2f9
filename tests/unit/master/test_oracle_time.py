"""The leading master asks the oracle for the time, and passes it on to the tablet servers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from percolator.errors import NotReady
from percolator.services.master.collection import OracleTime
from percolator.v1 import cluster_pb2
from percolator.v1 import tabletserver_pb2 as tablets
from tests.unit.master.history_world import HistoryWorld, history_cluster

SECOND = 1_000 << 18


def reports_heard(world: HistoryWorld) -> list[int]:
    """The timestamp of each report that some server is asked for from now on."""
    heard: list[int] = []
    for server in world.models.servers.values():
        report = server.report

        async def listening(
            request: tablets.ReportRequest, report: Any = report
        ) -> tablets.ReportResponse:
            heard.append(request.newest_timestamp)
            answer: tablets.ReportResponse = await report(request)
            return answer

        server.report = listening  # type: ignore[method-assign]
    return heard


async def test_every_report_carries_a_timestamp_that_is_hardly_older_than_a_second() -> None:
    async with history_cluster() as world:
        await asyncio.sleep(2)
        heard = reports_heard(world)
        await asyncio.sleep(5)
        assert len(heard) >= 20
        assert min(heard) >= world.oracle.now() - 7 * SECOND
        assert max(heard) >= world.oracle.now() - 2 * SECOND


async def test_the_leader_describes_how_far_timestamps_are_from_its_clock() -> None:
    async with history_cluster() as world:
        await asyncio.sleep(2)
        master = world.models.masters[0].master
        clock = world.models.clock
        lead = master.timestamp_lead_milliseconds
        assert lead is not None
        assert abs((world.oracle.now() >> 18) - clock.wall_milliseconds() - lead) < 100
        clock.set_wall_back(3_600_000)
        after = master.timestamp_lead_milliseconds
        assert after is not None
        assert abs(after - lead - 3_600_000) < 100


async def test_while_the_oracle_is_silent_servers_are_told_what_was_heard_last() -> None:
    async with history_cluster() as world:
        await asyncio.sleep(2)
        world.models.parts[:] = [
            one for one in world.models.parts if one.kind != cluster_pb2.SERVICE_KIND_ORACLE
        ]
        world.models.network.handlers.pop("oracle:1")
        await asyncio.sleep(3)
        heard = reports_heard(world)
        await asyncio.sleep(1)
        assert len(set(heard)) == 1
        assert heard[0] > 0


def oracle_time_of(world: HistoryWorld) -> OracleTime:
    leader = world.models.masters[0].master.leader
    assert leader is not None
    found: OracleTime = leader.oracle_time
    return found


async def test_the_epoch_is_raised_above_what_any_client_has_seen() -> None:
    """Also above what this master has not heard of: another may have led meanwhile."""
    async with history_cluster() as world:
        await asyncio.sleep(2)
        clock = world.models.clock
        world.oracle.epoch, world.oracle.refusals = 41, 2
        await oracle_time_of(world).raise_epoch(clock.monotonic_seconds() + 10)
        assert world.oracle.epoch == 42
        assert world.oracle.refusals == 0


async def test_whoever_waits_for_the_epoch_is_told_that_it_was_not_raised() -> None:
    async with history_cluster() as world:
        await asyncio.sleep(2)
        world.oracle.refusals = 1_000
        with pytest.raises(NotReady, match=r"not told of the change: .*another oracle leads"):
            await oracle_time_of(world).raise_epoch(world.models.clock.monotonic_seconds() + 3)
        assert world.oracle.epoch == 0
