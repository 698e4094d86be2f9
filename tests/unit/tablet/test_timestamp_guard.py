"""Timestamps are admitted if the oracle has issued them, whatever any clock says, or refused."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import DeadlineExceeded, InvalidArgument, NotReady, TabletMoved
from percolator.tablet.state import TimestampGuard
from percolator.v1 import tabletserver_pb2 as pb
from tests.simulation.virtual_time import VirtualClock
from tests.unit.tablet.tablets import (
    LOCK,
    TARGET,
    Rig,
    lock_record,
    mutation,
    put,
    started,
    written,
)

SECOND = 1_000 << 18
HOUR = 3_600 * SECOND
DAY = 24 * HOUR
YEAR = 365 * DAY
NOW = 1_800_000_000_000 << 18  # the virtual clock's


class Oracle:
    """Hands out timestamps, unless it is cut off."""

    def __init__(self, now: int = NOW) -> None:
        self.now = now
        self.asked = 0
        self.is_cut_off = False

    async def __call__(self) -> int:
        self.asked += 1
        await asyncio.sleep(0.001)
        if self.is_cut_off:
            raise DeadlineExceeded("no answer in time")
        return self.hand_out()

    def hand_out(self) -> int:
        self.now += 1
        return self.now


class Server:
    """A server: its clock, its guard, and tablets that share the guard."""

    def __init__(self, *, clock_back: int = 0) -> None:
        self.oracle = Oracle()
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.clock.set_wall_back(clock_back >> 18)
        self.guard = TimestampGuard(self.oracle, self.clock)

    async def tablet(self) -> Rig:
        return await Rig(clock=self.clock, guard=self.guard).open()


@pytest.mark.parametrize("clock_back", [-3 * YEAR, -2 * HOUR, 0, 2 * HOUR, 3 * YEAR])
@pytest.mark.parametrize("jump", [0, 2 * HOUR, 40 * DAY, 100 * YEAR])
async def test_a_timestamp_issued_just_now_is_admitted_whatever_the_servers_clock_says(
    clock_back: int, jump: int
) -> None:
    server = Server(clock_back=clock_back)
    tablet = await server.tablet()
    await tablet.apply(written(b"a", 5, server.oracle.hand_out()))
    server.oracle.now += jump
    await tablet.apply(written(b"a", 6, server.oracle.hand_out(), b"value"))
    server.oracle.now += jump
    assert await tablet.value(b"a", server.oracle.hand_out()) == b"value"
    server.oracle.now += jump
    [page] = await tablet.scan(server.oracle.hand_out())
    assert list(page.found.values) == [b"value"]


@pytest.mark.parametrize("clock_back", [-3 * YEAR, 0, 3 * YEAR])
async def test_timestamps_far_above_the_oracle_are_refused_by_field_and_nothing_is_done(
    clock_back: int,
) -> None:
    server = Server(clock_back=clock_back)
    tablet = await server.tablet()
    absurd = NOW + HOUR + SECOND
    with pytest.raises(InvalidArgument, match="was not handed out by the oracle") as caught:
        await tablet.mutate(written(b"a", 5, 6), written(b"a", 5, absurd))
    assert caught.value.field == "mutations[1].changes[0].timestamp"
    with pytest.raises(InvalidArgument) as caught:
        await tablet.read(b"a", absurd)
    assert caught.value.field == "reads[0].timestamp"
    with pytest.raises(InvalidArgument) as caught:
        await tablet.scan(absurd)
    assert caught.value.field == "timestamp"
    assert await tablet.value(b"a", 6) is None
    assert server.guard.refused == 3


@pytest.mark.parametrize("lies_in", ["start", "min_commit"])
async def test_a_lock_from_the_future_is_refused(lies_in: str) -> None:
    """Such a lock would never expire or never be committed, and would block its cell."""
    tablet = await Server().tablet()
    absurd = NOW + 2 * HOUR
    record = lock_record(absurd if lies_in == "start" else 5, min_commit_timestamp=absurd)
    with pytest.raises(InvalidArgument, match="was not handed out") as caught:
        await tablet.mutate(mutation(b"a", put(LOCK, record), not_below=5))
    assert caught.value.field == "mutations[0].changes[0].value"


@pytest.mark.parametrize("field", ["run", "commit_timestamp"])
async def test_a_bulk_load_from_the_future_is_refused(field: str) -> None:
    tablet = await Server().tablet()
    fence = pb.LoadFence(name="load", run=5)
    setattr(fence, field, NOW + 2 * HOUR)
    request = pb.FenceRequest(target=TARGET, action=pb.FenceRequest.ACTION_RAISE, fence=fence)
    with pytest.raises(InvalidArgument) as caught:
        await tablet.tablet.fence(request)
    assert caught.value.field == f"fence.{field}"


async def test_callers_cannot_creep_into_the_future_step_by_step() -> None:
    """An admitted timestamp says nothing about the oracle's time."""
    server = Server()
    tablet = await server.tablet()
    await tablet.apply(written(b"a", 5, NOW + HOUR))
    with pytest.raises(InvalidArgument):
        await tablet.mutate(written(b"a", 5, NOW + HOUR + HOUR // 2))


async def test_while_the_oracle_does_not_answer_the_caller_is_told_to_retry() -> None:
    server = Server()
    tablet = await server.tablet()
    server.oracle.is_cut_off = True
    handed_out = server.oracle.hand_out()
    with pytest.raises(NotReady, match=r"cannot tell whether .* no answer in time") as caught:
        await tablet.mutate(written(b"a", 5, handed_out))
    assert caught.value.retry_after_seconds > 0
    server.oracle.is_cut_off = False
    await tablet.apply(written(b"a", 5, handed_out))


async def test_the_masters_word_is_enough_where_the_oracle_cannot_be_reached() -> None:
    server = Server()
    tablet = await server.tablet()
    server.oracle.is_cut_off = True
    handed_out = server.oracle.hand_out()
    waiting = started(tablet, written(b"a", 5, handed_out))
    await asyncio.sleep(0)
    server.guard.heard(handed_out)
    assert [one.outcome for one in await waiting] == [pb.OUTCOME_APPLIED]
    asked = server.oracle.asked
    assert await tablet.value(b"a", server.oracle.hand_out()) == b""
    assert server.oracle.asked == asked


async def test_a_server_that_cannot_reach_the_oracle_keeps_serving_while_time_runs_steadily() -> (
    None
):
    server = Server()
    tablet = await server.tablet()
    server.guard.heard(server.oracle.hand_out())
    server.oracle.is_cut_off = True
    for _ in range(10):
        await asyncio.sleep(86_400)
        server.oracle.now += DAY
        await tablet.apply(written(b"a", 5, server.oracle.hand_out()))
    assert not server.oracle.asked


async def test_a_new_tablet_knows_what_its_server_knows_and_asks_nothing() -> None:
    server = Server(clock_back=2 * HOUR)
    await (await server.tablet()).apply(written(b"a", 5, server.oracle.hand_out()))
    assert server.oracle.asked == 1
    await (await server.tablet()).apply(written(b"a", 5, server.oracle.hand_out()))
    assert server.oracle.asked == 1


async def test_a_tablet_that_is_closed_while_the_oracle_is_asked_executes_nothing() -> None:
    server = Server()
    tablet = await server.tablet()
    waiting = started(tablet, written(b"a", 5, server.oracle.hand_out()))
    reading = asyncio.ensure_future(tablet.read(b"a", server.oracle.hand_out()))
    await asyncio.sleep(0)
    await tablet.tablet.close()
    for task in (waiting, reading):
        with pytest.raises(TabletMoved):
            await task
