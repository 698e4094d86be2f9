"""Before an oracle leads time into the future, the other machines of the cluster have to agree."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from percolator.errors import NotReady, Unavailable
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.oracle.candidate import Candidate, OtherClocks, Site
from percolator.services.oracle.oracle import OracleLimits
from percolator.v1.cluster_pb2 import DescribeResponse, Server
from percolator.wire.cluster_clock import clocks_of, majority
from percolator.wire.methods import DESCRIBE
from percolator.world import UnaryMethod, World
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles
from tests.simulation.virtual_time import VirtualClock
from tests.unit.oracle.ledgers import STORE
from tests.unit.unary_network import UnaryNetwork

SECOND = 1_000
HOUR = 3_600 * SECOND
DAY = 24 * HOUR
YEAR = 365 * DAY


class Masters(UnaryNetwork):
    """One master at each address, and the clocks of others that it knows."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.clock_leads = {"tablets:1": 0, "locks:1": 200, "oracle:1": 10 * YEAR}
        """Ahead of the masters'. What they know of the asking oracle itself does not count."""
        self.not_heard: list[str] = []
        """Listed without a clock: a new leader has not heard from them yet, or not for a while."""
        self.silent: set[str] = set()
        self.of_an_older_release = False
        self.asked = 0

    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> Any:
        assert method is DESCRIBE
        self.asked += 1
        if address in self.silent:
            raise Unavailable("nothing listens there", where=address)
        if self.of_an_older_release:
            return DescribeResponse(servers=[Server(address=one) for one in self.clock_leads])
        leads = {address: 0, **self.clock_leads}
        return DescribeResponse(
            wall_milliseconds=self.clock.wall_milliseconds(),
            servers=[
                *(Server(address=one) for one in self.not_heard),
                *(Server(address=one, clock_lead_milliseconds=lead) for one, lead in leads.items()),
            ],
        )


class Machine:
    """Where the oracle runs, again and again."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.disk = MemoryDisk()
        self.disk.make_durable_directory(STORE)
        self.right = VirtualClock(loop)
        self.masters = Masters(self.right)

    def candidate(
        self, ahead: int, masters: tuple[str, ...], limits: OracleLimits, first: int = 0
    ) -> Candidate:
        wall = self.right.wall_milliseconds() + ahead
        clock = VirtualClock(asyncio.get_running_loop(), wall_milliseconds=wall)
        coordinator = DirectoryCoordinator(MemoryFiles(self.disk), clock, STORE)
        world = World(clock, self.masters, random.Random(1))
        clocks = OtherClocks(world, masters, "oracle:1")
        return Candidate(
            Site(clock, str(STORE), "oracle:1", "", limits, first), coordinator, clocks=clocks
        )

    @asynccontextmanager
    async def oracle(
        self,
        *,
        ahead: int = 0,
        masters: tuple[str, ...] = ("m:1", "n:1"),
        limits: OracleLimits = OracleLimits(),  # noqa: B008 - frozen
        first: int = 0,
    ) -> AsyncIterator[Candidate]:
        """One life, which begins when the one before has ended."""
        candidate = self.candidate(ahead, masters, limits, first)
        running = asyncio.create_task(candidate.run())
        yield candidate
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def lead(self, candidate: Candidate) -> float:
        """How far the timestamps are ahead of the right clock, in milliseconds."""
        async with asyncio.timeout(10):
            while candidate.oracle is None:  # noqa: ASYNC110  # virtual time
                await asyncio.sleep(0.01)
        timestamp = await candidate.candidacy.serving().get_timestamps(1)
        return (timestamp >> 18) - self.right.wall_milliseconds()


@pytest.mark.parametrize("ahead", [90 * SECOND, 2 * HOUR, 3 * DAY, 20 * YEAR])
async def test_an_oracle_with_a_fast_clock_follows_the_majority(ahead: int) -> None:
    machine = Machine()
    async with machine.oracle() as before:
        await machine.lead(before)
    async with machine.oracle(ahead=ahead) as fast:
        assert await machine.lead(fast) < 4 * SECOND
        await asyncio.sleep(3_600)
        assert await machine.lead(fast) < 4 * SECOND
    async with machine.oracle() as after:
        assert await machine.lead(after) < 8 * SECOND


async def test_the_first_oracle_of_a_new_store_does_not_begin_in_the_future_either() -> None:
    machine = Machine()
    async with machine.oracle(ahead=2 * HOUR) as first:
        assert await machine.lead(first) < SECOND


@pytest.mark.parametrize("stopped", [HOUR, 40 * DAY])
async def test_after_a_long_stop_a_clock_that_others_agree_with_is_followed(stopped: int) -> None:
    machine = Machine()
    async with machine.oracle() as before:
        await machine.lead(before)
    await asyncio.sleep(stopped / 1000)
    async with machine.oracle() as after:
        assert abs(await machine.lead(after)) < SECOND


@pytest.mark.parametrize("masters", [("m:1", "n:1"), ()])
async def test_a_slow_clock_is_not_below_the_epoch_of_a_row_store(masters: tuple[str, ...]) -> None:
    """Nothing older can be stored there, so nothing could be committed."""
    machine = Machine()
    first = machine.right.wall_milliseconds() - 30 * DAY
    async with machine.oracle(ahead=-YEAR, masters=masters, first=first) as slow:
        assert await machine.lead(slow) == pytest.approx(-30 * DAY, abs=SECOND)
        await asyncio.sleep(100)
        assert await machine.lead(slow) == pytest.approx(-30 * DAY, abs=5 * SECOND)
    async with machine.oracle(masters=masters, first=first) as right:
        assert abs(await machine.lead(right)) < SECOND


async def test_a_slow_clock_is_not_pushed_by_the_majority() -> None:
    """Going ahead needs both: its own clock and the others'."""
    machine = Machine()
    async with machine.oracle(ahead=-2 * HOUR) as slow:
        assert await machine.lead(slow) == pytest.approx(-2 * HOUR, abs=SECOND)


async def test_while_no_master_answers_a_clock_far_above_the_mark_leads_nowhere() -> None:
    machine = Machine()
    async with machine.oracle() as before:
        await machine.lead(before)
    machine.masters.silent = {"m:1", "n:1"}
    async with machine.oracle(ahead=HOUR) as fast:
        await asyncio.sleep(60)
        assert fast.oracle is None
        machine.masters.silent.remove("n:1")
        assert await machine.lead(fast) < SECOND


BESIDE_A_MASTER = ("oracle:2", "n:1")


def alone(machine: Machine, *, ahead: int, listed: Sequence[str] = ()) -> None:
    """From now on, the only master that answers runs on the oracle's own host, whose clock is far
    ahead. It lists these servers, but does not know their clocks."""
    machine.masters.clock_leads = {"oracle:2": ahead}
    machine.masters.not_heard = list(listed)
    machine.masters.silent = {"n:1", "oracle:3"}


async def test_a_master_that_knows_only_the_clock_of_the_oracles_own_host_confirms_nothing() -> (
    None
):
    """It has just begun to lead: it knows which servers there were, and has heard from none."""
    machine = Machine()
    async with machine.oracle() as before:
        await machine.lead(before)
    alone(machine, ahead=2 * HOUR, listed=["tablets:1", "locks:1"])
    async with machine.oracle(ahead=2 * HOUR, masters=BESIDE_A_MASTER) as fast:
        await asyncio.sleep(60)
        assert fast.oracle is None
        machine.masters.clock_leads |= {"tablets:1": 0, "locks:1": 0}
        assert await machine.lead(fast) < SECOND


async def test_a_host_that_is_cut_off_from_all_others_confirms_nothing() -> None:
    """The master there has forgotten the servers from which it has not heard for a while."""
    machine = Machine()
    alone(machine, ahead=2 * HOUR)
    async with machine.oracle(ahead=2 * HOUR, masters=BESIDE_A_MASTER) as fast:
        await asyncio.sleep(60)
        assert fast.oracle is None
        machine.masters.silent = set()
        assert await machine.lead(fast) < SECOND


async def test_a_cluster_of_one_host_believes_its_clock_though_one_of_two_masters_is_down() -> None:
    machine = Machine()
    alone(machine, ahead=HOUR)
    async with machine.oracle(ahead=HOUR, masters=("oracle:2", "oracle:3")) as only:
        assert await machine.lead(only) == pytest.approx(HOUR, abs=SECOND)


async def test_an_oracle_that_waits_for_other_clocks_names_their_hosts() -> None:
    machine = Machine()
    alone(machine, ahead=HOUR, listed=["tablets:1"])
    fast = machine.candidate(HOUR, BESIDE_A_MASTER, OracleLimits())
    with pytest.raises(NotReady, match="those of oracle, but not yet those of n, tablets"):
        await fast.lead_within(5)


async def test_an_oracle_that_does_not_stand_by_says_why_it_cannot_start() -> None:
    machine = Machine()
    machine.masters.silent = {"m:1", "n:1"}
    fast = machine.candidate(HOUR, ("m:1", "n:1"), OracleLimits())
    with pytest.raises(NotReady, match="no master answers that could report the other clocks"):
        await fast.lead_within(5)


async def test_an_oracle_whose_clock_is_near_the_mark_asks_no_master() -> None:
    machine = Machine()
    async with machine.oracle() as before:
        await machine.lead(before)
    machine.masters.asked, machine.masters.silent = 0, {"m:1", "n:1"}
    async with machine.oracle() as after:
        await machine.lead(after)
    assert not machine.masters.asked


@pytest.mark.parametrize("reason", ["told to", "alone", "older masters"])
async def test_its_own_clock_is_believed_where_no_other_can_be(reason: str) -> None:
    machine = Machine()
    machine.masters.of_an_older_release = reason == "older masters"
    limits = OracleLimits(follow_jumps=reason == "told to")
    masters = () if reason == "alone" else ("m:1", "n:1")
    async with machine.oracle(ahead=HOUR, masters=masters, limits=limits) as fast:
        assert await machine.lead(fast) == pytest.approx(HOUR, abs=SECOND)


async def test_a_clock_that_is_a_year_and_more_above_the_mark_is_refused_again_and_again() -> None:
    """The process stays: its clock may be corrected, and another candidate may lead meanwhile."""
    machine = Machine()
    async with machine.oracle() as before:
        await machine.lead(before)
    async with machine.oracle(ahead=2 * YEAR, masters=()) as fast:
        await asyncio.sleep(60)
        assert fast.oracle is None


def test_each_host_has_one_vote_and_of_two_the_earlier_counts() -> None:
    assert majority({}) is None
    assert majority({"a:1": 7}) == 7
    assert majority({"a:1": 7, "b:1": 900}) == 7
    assert majority({"a:1": 7, "b:1": 900, "c:1": 901}) == 900
    many_on_one_host = {f"wrong:{port}": 900 for port in range(1, 9)}
    assert majority({**many_on_one_host, "a:1": 7, "b:1": 8}) == 8
    # All processes of one host but the one that was lied to.
    assert majority({"a:1": 900, "a:2": 7, "a:3": 7}) == 7


def test_a_server_of_which_the_master_knows_no_clock_has_no_vote() -> None:
    servers = [Server(address="a:1", clock_lead_milliseconds=-5), Server(address="b:1")]
    assert clocks_of(DescribeResponse(wall_milliseconds=100, servers=servers)) == {"a:1": 95}
    assert clocks_of(DescribeResponse(servers=servers)) == {}
