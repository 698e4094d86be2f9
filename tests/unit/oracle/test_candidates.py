"""Several oracles on one store: one leads, and its successor hands out nothing twice.

Before an oracle leads time into the future, the other machines of the cluster have to agree.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.bucket.port import Attempts
from percolator.errors import DeadlineExceeded, NotReady, PercolatorError, Unavailable, UsageError
from percolator.services.chassis import directory_coordinator
from percolator.services.chassis.cluster_store import BucketClusterStore
from percolator.services.chassis.coordinator import Coordinator, CoordinatorTimes
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.files import Files
from percolator.services.oracle.candidate import Candidate, OtherClocks, Probe, Site
from percolator.services.oracle.oracle import Oracle, OracleLimits
from percolator.tasks import Tasks
from percolator.v1.cluster_pb2 import DescribeResponse, Server
from percolator.wire.cluster_clock import clocks_of, majority
from percolator.wire.methods import DESCRIBE
from percolator.world import Network, UnaryMethod, World
from tests.doubles.bucket_in_memory import BucketFaults, BucketInMemory
from tests.doubles.memory_files import MemoryDisk, MemoryFiles, run_until_killed
from tests.simulation.virtual_time import VirtualClock, run_virtually
from tests.unit.oracle.marks import STORE, open_mark
from tests.unit.unary_network import UnaryNetwork

HOUR = 3_600_000
MASTER = "master:1"


class SlowingFiles(MemoryFiles):
    """The files of a process that can be paused: its next system call waits for `running`."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__(disk)
        self.running = asyncio.Event()
        self.running.set()

    async def step(self, operation: str, path: Path) -> None:
        await self.running.wait()
        await super().step(operation, path)


class Roads:
    """A network between oracles and a master, in which some addresses cannot be reached."""

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self.cut: set[tuple[str, str]] = set()
        """Pairs of (caller, callee)."""

    def seen_from(self, caller: str) -> Network:
        return _Seen(self, caller)


class _Seen(UnaryNetwork):
    def __init__(self, roads: Roads, caller: str) -> None:
        self._roads = roads
        self._caller = caller

    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> Any:
        if (self._caller, address) in self._roads.cut:
            await asyncio.sleep(timeout)
            raise DeadlineExceeded("cut", where=address)
        if address != MASTER:
            await self._roads.processes[address].ask()
        return method.response()


class Process:
    """One oracle and its parts."""

    def __init__(
        self, disk: MemoryDisk, name: str, *, clock_back: int = 0, roads: Roads | None = None
    ) -> None:
        roads = roads or Roads()
        roads.processes[f"{name}:1"] = self
        self.files = SlowingFiles(disk)
        clock = VirtualClock(asyncio.get_running_loop())
        clock.set_wall_back(clock_back)
        self.coordinator: Coordinator = DirectoryCoordinator(self.files, clock, STORE)
        site = Site(clock, str(STORE), f"{name}:1", "", OracleLimits())
        world = World(clock, roads.seen_from(f"{name}:1"), random.Random(name))
        probe = Probe(world, [MASTER], grace_seconds=3.0)
        self.candidate = Candidate(site, self.coordinator, probe)
        self.running: asyncio.Task[None] | None = None

    def resume(self) -> None:
        self.files.running.set()

    def start(self) -> None:
        self.running = asyncio.create_task(self.candidate.run())

    async def ask(self) -> int:
        return await self.candidate.candidacy.serving().get_timestamps(1)

    async def until_it_leads(self) -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with asyncio.timeout(20):
            while self.candidate.oracle is None:  # noqa: ASYNC110  # virtual time
                await asyncio.sleep(0.01)
        return loop.time() - started

    async def end(self) -> None:
        self.resume()
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
        await self.coordinator.close()


@asynccontextmanager
async def two(roads: Roads | None = None) -> AsyncIterator[tuple[Process, Process]]:
    """The first one leads. The clock of the second is an hour slow, so only the mark can help."""
    disk = MemoryDisk()
    disk.make_durable_directory(STORE)
    roads = roads or Roads()
    first = Process(disk, "a", roads=roads)
    second = Process(disk, "b", clock_back=HOUR, roads=roads)
    first.start()
    await first.until_it_leads()
    second.start()
    await asyncio.sleep(1)
    yield first, second
    await first.end()
    await second.end()


async def test_a_standby_says_who_leads_and_answers_nothing_else() -> None:
    async with two() as (first, second):
        await first.ask()
        with pytest.raises(NotReady, match="the one at a:1 does"):
            await second.ask()


async def test_a_killed_oracle_is_replaced_at_once_and_time_goes_on_above_it() -> None:
    async with two() as (first, second):
        before = await first.ask()
        first.files.kill()
        assert await second.until_it_leads() < 0.5
        assert await second.ask() > before


async def test_a_paused_oracle_is_replaced_after_its_silence_and_refuses_when_it_wakes() -> None:
    async with two() as (first, second):
        before = await first.ask()
        first.files.running.clear()
        assert 2.5 < await second.until_it_leads() < 4
        after = await second.ask()
        assert after > before
        # Not even from the window that it had made durable before.
        with pytest.raises(PercolatorError):
            await first.ask()
        first.files.running.set()
        await asyncio.sleep(5)
        with pytest.raises(NotReady, match="the one at b:1 does"):
            await first.ask()
        assert await second.ask() > after


async def test_however_often_leaders_change_no_timestamp_is_handed_out_twice() -> None:
    async with two() as (first, second):
        given = [await first.ask()]
        for leader, other in [(first, second), (second, first)] * 4:
            leader.files.running.clear()
            await other.until_it_leads()
            leader.files.running.set()
            given += [await other.ask() for _ in range(100)]
            await asyncio.sleep(3)
        assert given == sorted(set(given))


async def test_a_leader_that_cannot_be_reached_is_replaced_though_it_writes_to_the_store() -> None:
    roads = Roads()
    async with two(roads) as (first, second):
        before = await first.ask()
        roads.cut |= {("b:1", "a:1")}
        assert 2.5 < await second.until_it_leads() < 6
        assert await second.ask() > before
        with pytest.raises(NotReady):
            await first.ask()


async def test_a_standby_that_is_cut_off_itself_does_not_depose_the_leader() -> None:
    roads = Roads()
    async with two(roads) as (first, second):
        roads.cut |= {("b:1", "a:1"), ("b:1", MASTER)}
        await asyncio.sleep(30)
        await first.ask()
        with pytest.raises(NotReady):
            await second.ask()


async def test_two_that_cannot_reach_each_other_take_turns_less_and_less_often() -> None:
    """Each change makes time jump, and makes clients wait."""
    roads = Roads()
    async with two(roads) as (first, _):
        roads.cut |= {("b:1", "a:1"), ("a:1", "b:1")}
        changes, leader = 0, "a:1"
        for _ in range(1_200):
            await asyncio.sleep(0.1)
            found = await first.coordinator.leader("oracle")
            if found is not None and found.holder != leader:
                changes, leader = changes + 1, found.holder
        # Without the growing pauses there would be one every three seconds, 40 in all.
        assert 1 <= changes <= 16


async def test_an_oracle_without_standby_refuses_to_start_when_another_one_leads() -> None:
    async with two() as (first, _):
        third = Process(first.files.disk, "c")
        with pytest.raises(UsageError, match=r"another oracle, the one at a:1; with --standby"):
            await third.candidate.lead_within(5)
        await first.ask()
        await third.end()


async def test_an_oracle_whose_store_was_emptied_goes_on_above_what_it_handed_out() -> None:
    """The process still knows what the store has lost."""
    disk = MemoryDisk()
    disk.make_durable_directory(STORE)
    oracle = Process(disk, "a")
    oracle.start()
    await oracle.until_it_leads()
    await asyncio.sleep(3)
    mark = oracle.candidate.candidacy.serving().mark_milliseconds
    await oracle.files.rename(STORE / "coordinator", STORE / "elsewhere")
    with pytest.raises(NotReady):
        await oracle.ask()
    await asyncio.sleep(3)
    assert await oracle.ask() >= mark << 18
    await oracle.end()


class Reach:
    """The way of one process to a bucket. It can be paused before its next call."""

    def __init__(self, model: BucketInMemory) -> None:
        self._model = model
        self.running = asyncio.Event()
        self.running.set()
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    async def read(self, key: str) -> Any:
        self.reads += 1
        await self.running.wait()
        return await self._model.read(key)

    async def replace(self, key: str, data: bytes, tag: str) -> str:
        await self.running.wait()
        return await self._model.replace(key, data, tag)


class BucketProcess(Process):
    """An oracle whose role is in a bucket."""

    def __init__(self, model: BucketInMemory, name: str) -> None:
        clock = VirtualClock(asyncio.get_running_loop())
        self.reach = Reach(model)
        world = World(clock, Roads().seen_from(f"{name}:1"), random.Random(name))
        store = BucketClusterStore(cast("Attempts", self.reach), world)
        self.coordinator = store.coordinator(CoordinatorTimes(grace_seconds=1.0))
        site = Site(clock, store.name, f"{name}:1", "", OracleLimits())
        self.candidate = Candidate(site, self.coordinator)
        self.running = None

    def resume(self) -> None:
        self.reach.running.set()


@asynccontextmanager
async def two_in_a_bucket() -> AsyncIterator[tuple[BucketProcess, BucketProcess]]:
    """The first one leads."""
    clock = VirtualClock(asyncio.get_running_loop())
    model = BucketInMemory(clock, random.Random(1), Tasks(), BucketFaults(call_seconds=0.02))
    first, second = BucketProcess(model, "a"), BucketProcess(model, "b")
    first.start()
    await first.until_it_leads()
    second.start()
    await asyncio.sleep(1)
    yield first, second
    await first.end()
    await second.end()


async def test_an_oracle_paused_between_its_timestamps_and_its_look_hands_out_none() -> None:
    """They are below its mark, which is durable, and below what its successor has handed out."""
    async with two_in_a_bucket() as (first, second):
        before = await first.ask()
        first.reach.running.clear()
        asked = asyncio.create_task(first.ask())
        await second.until_it_leads()
        after = await second.ask()
        assert after > before
        first.reach.running.set()
        with pytest.raises(NotReady):
            await asked
        with pytest.raises(NotReady):
            await first.ask()
        assert await second.ask() > after


async def test_requests_that_come_together_share_one_look_at_the_bucket() -> None:
    async with two_in_a_bucket() as (first, _):
        first.reach.reads = 0
        given = await asyncio.gather(*(first.ask() for _ in range(1_000)))
        assert given == sorted(set(given))
        assert first.reach.reads == 1


SECOND = 1_000
HOUR_CLOCKS = 3_600 * SECOND
DAY = 24 * HOUR_CLOCKS
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


@pytest.fixture
@asynccontextmanager
async def machine() -> AsyncIterator[Machine]:
    """Where the oracle runs, again and again."""
    yield Machine()


@pytest.mark.parametrize("ahead", [90 * SECOND, 2 * HOUR_CLOCKS, 3 * DAY, 20 * YEAR])
async def test_an_oracle_with_a_fast_clock_follows_the_majority(
    machine: Machine, ahead: int
) -> None:
    async with machine.oracle() as before:
        await machine.lead(before)
    async with machine.oracle(ahead=ahead) as fast:
        assert await machine.lead(fast) < 4 * SECOND
        await asyncio.sleep(3_600)
        assert await machine.lead(fast) < 4 * SECOND
    async with machine.oracle() as after:
        assert await machine.lead(after) < 8 * SECOND


async def test_the_first_oracle_of_a_new_store_does_not_begin_in_the_future_either(
    machine: Machine,
) -> None:
    async with machine.oracle(ahead=2 * HOUR_CLOCKS) as first:
        assert await machine.lead(first) < SECOND


@pytest.mark.parametrize("stopped", [HOUR_CLOCKS, 40 * DAY])
async def test_after_a_long_stop_a_clock_that_others_agree_with_is_followed(
    machine: Machine, stopped: int
) -> None:
    async with machine.oracle() as before:
        await machine.lead(before)
    await asyncio.sleep(stopped / 1000)
    async with machine.oracle() as after:
        assert abs(await machine.lead(after)) < SECOND


@pytest.mark.parametrize("masters", [("m:1", "n:1"), ()])
async def test_a_slow_clock_is_not_below_the_epoch_of_a_row_store(
    machine: Machine, masters: tuple[str, ...]
) -> None:
    """Nothing older can be stored there, so nothing could be committed."""
    first = machine.right.wall_milliseconds() - 30 * DAY
    async with machine.oracle(ahead=-YEAR, masters=masters, first=first) as slow:
        assert await machine.lead(slow) == pytest.approx(-30 * DAY, abs=SECOND)
        await asyncio.sleep(100)
        assert await machine.lead(slow) == pytest.approx(-30 * DAY, abs=5 * SECOND)
    async with machine.oracle(masters=masters, first=first) as right:
        assert abs(await machine.lead(right)) < SECOND


async def test_a_slow_clock_is_not_pushed_by_the_majority(machine: Machine) -> None:
    """Going ahead needs both: its own clock and the others'."""
    async with machine.oracle(ahead=-2 * HOUR_CLOCKS) as slow:
        assert await machine.lead(slow) == pytest.approx(-2 * HOUR_CLOCKS, abs=SECOND)


async def test_while_no_master_answers_a_clock_far_above_the_mark_leads_nowhere(
    machine: Machine,
) -> None:
    async with machine.oracle() as before:
        await machine.lead(before)
    machine.masters.silent = {"m:1", "n:1"}
    async with machine.oracle(ahead=HOUR_CLOCKS) as fast:
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


async def test_a_master_that_knows_only_the_clock_of_the_oracles_own_host_confirms_nothing(
    machine: Machine,
) -> None:
    """It has just begun to lead: it knows which servers there were, and has heard from none."""
    async with machine.oracle() as before:
        await machine.lead(before)
    alone(machine, ahead=2 * HOUR_CLOCKS, listed=["tablets:1", "locks:1"])
    async with machine.oracle(ahead=2 * HOUR_CLOCKS, masters=BESIDE_A_MASTER) as fast:
        await asyncio.sleep(60)
        assert fast.oracle is None
        machine.masters.clock_leads |= {"tablets:1": 0, "locks:1": 0}
        assert await machine.lead(fast) < SECOND


async def test_a_host_that_is_cut_off_from_all_others_confirms_nothing(machine: Machine) -> None:
    """The master there has forgotten the servers from which it has not heard for a while."""
    alone(machine, ahead=2 * HOUR_CLOCKS)
    async with machine.oracle(ahead=2 * HOUR_CLOCKS, masters=BESIDE_A_MASTER) as fast:
        await asyncio.sleep(60)
        assert fast.oracle is None
        machine.masters.silent = set()
        assert await machine.lead(fast) < SECOND


async def test_a_cluster_of_one_host_believes_its_clock_though_one_of_two_masters_is_down(
    machine: Machine,
) -> None:
    alone(machine, ahead=HOUR_CLOCKS)
    async with machine.oracle(ahead=HOUR_CLOCKS, masters=("oracle:2", "oracle:3")) as only:
        assert await machine.lead(only) == pytest.approx(HOUR_CLOCKS, abs=SECOND)


async def test_an_oracle_that_waits_for_other_clocks_names_their_hosts(machine: Machine) -> None:
    alone(machine, ahead=HOUR_CLOCKS, listed=["tablets:1"])
    fast = machine.candidate(HOUR_CLOCKS, BESIDE_A_MASTER, OracleLimits())
    with pytest.raises(NotReady, match="those of oracle, but not yet those of n, tablets"):
        await fast.lead_within(5)


async def test_an_oracle_that_does_not_stand_by_says_why_it_cannot_start(machine: Machine) -> None:
    machine.masters.silent = {"m:1", "n:1"}
    fast = machine.candidate(HOUR_CLOCKS, ("m:1", "n:1"), OracleLimits())
    with pytest.raises(NotReady, match="no master answers that could report the other clocks"):
        await fast.lead_within(5)


async def test_an_oracle_whose_clock_is_near_the_mark_asks_no_master(machine: Machine) -> None:
    async with machine.oracle() as before:
        await machine.lead(before)
    machine.masters.asked, machine.masters.silent = 0, {"m:1", "n:1"}
    async with machine.oracle() as after:
        await machine.lead(after)
    assert not machine.masters.asked


@pytest.mark.parametrize("reason", ["told to", "alone", "older masters"])
async def test_its_own_clock_is_believed_where_no_other_can_be(
    machine: Machine, reason: str
) -> None:
    machine.masters.of_an_older_release = reason == "older masters"
    limits = OracleLimits(follow_jumps=reason == "told to")
    masters = () if reason == "alone" else ("m:1", "n:1")
    async with machine.oracle(ahead=HOUR_CLOCKS, masters=masters, limits=limits) as fast:
        assert await machine.lead(fast) == pytest.approx(HOUR_CLOCKS, abs=SECOND)


async def test_a_clock_that_is_a_year_and_more_above_the_mark_is_refused_again_and_again(
    machine: Machine,
) -> None:
    """The process stays: its clock may be corrected, and another candidate may lead meanwhile."""
    async with machine.oracle() as before:
        await machine.lead(before)
    async with machine.oracle(ahead=2 * YEAR, masters=()) as fast:
        await asyncio.sleep(60)
        assert fast.oracle is None


def test_each_host_has_one_vote_and_of_two_the_earlier_counts() -> None:
    assert (majority({}), majority({"a:1": 7}), majority({"a:1": 7, "b:1": 900})) == (None, 7, 7)
    assert majority({"a:1": 7, "b:1": 900, "c:1": 901}) == 900
    many_on_one_host = {f"wrong:{port}": 900 for port in range(1, 9)}
    assert majority({**many_on_one_host, "a:1": 7, "b:1": 8}) == 8
    # All processes of one host but the one that was lied to.
    assert majority({"a:1": 900, "a:2": 7, "a:3": 7}) == 7


def test_a_server_of_which_the_master_knows_no_clock_has_no_vote() -> None:
    servers = [Server(address="a:1", clock_lead_milliseconds=-5), Server(address="b:1")]
    assert clocks_of(DescribeResponse(wall_milliseconds=100, servers=servers)) == {"a:1": 95}
    assert clocks_of(DescribeResponse(servers=servers)) == {}


# A kill or a power cut at every call to the disk: no timestamp is handed out twice.
#
# The wall clock is an hour slow at the restart, so only the mark can prevent it.

NOON = 1_800_000_000_000
LIVES_SECONDS = 5.0
"""Long enough for two extensions."""

Replace = Callable[[Files, Path, bytes], Awaitable[None]]


async def live(files: MemoryFiles, wall_milliseconds: int) -> tuple[int, int]:
    """Serves until the process dies or its time is up; the lowest and highest timestamp."""
    served: list[int] = []
    await run_until_killed(files, serve(files, wall_milliseconds, served))
    return (served[0], served[-1] + 999) if served else (0, 0)


async def serve(files: MemoryFiles, wall_milliseconds: int, served: list[int]) -> None:
    clock = VirtualClock(asyncio.get_running_loop(), wall_milliseconds=wall_milliseconds)
    mark = await open_mark(files, clock, cluster_id="c")
    oracle = Oracle(clock, mark, mark.leadership.is_held, OracleLimits())
    await oracle.extend()
    extending = asyncio.ensure_future(oracle.keep_extended())
    try:
        while clock.monotonic_seconds() < LIVES_SECONDS and not extending.done():
            served.append(await oracle.get_timestamps(1000))
            await asyncio.sleep(0.05)
    finally:
        extending.cancel()
        await asyncio.gather(extending, return_exceptions=True)


class Crash(NamedTuple):
    """How a process ends, and what happens to data that it had not made durable."""

    kill_at: int
    """The number of the first system call that it does not make."""
    seed: int
    """KILLED: the machine goes on; ALL_LOST: nothing survives; otherwise random, torn anywhere."""


KILLED, ALL_LOST = -2, -1
SEEDS = range(KILLED, 3)


def after(disk: MemoryDisk, seed: int) -> MemoryFiles:
    """Files that the next process finds."""
    if seed != KILLED:
        disk.cut_power(None if seed == ALL_LOST else random.Random(seed))
    return MemoryFiles(disk)


def crash_and_restart(crash: Crash) -> tuple[int, int]:
    """The highest timestamp before the crash, and the lowest after it."""
    files = MemoryFiles(MemoryDisk())
    files.faults.kill_at(crash.kill_at)
    _, highest = run_virtually(live(files, NOON))
    files.kill()
    lowest, _ = run_virtually(live(after(files.disk, crash.seed), NOON - HOUR))
    return highest, lowest


def calls_of_a_life_without_faults() -> list[str]:
    files = MemoryFiles(MemoryDisk())
    run_virtually(live(files, NOON))
    return files.faults.operations


CALLS = calls_of_a_life_without_faults()


def moments_of_change(calls: list[str]) -> list[int]:
    """Before and after each call that changes something; other moments make no difference."""
    changes = [number for number, call in enumerate(calls) if call not in ("stat", "read", "list")]
    return sorted({*changes, *(number + 1 for number in changes)})


def failures_of_every_crash() -> Iterator[str]:
    for number in moments_of_change(calls_of_a_life_without_faults()):
        for seed in SEEDS:
            crash = Crash(number, seed)
            try:
                highest, lowest = crash_and_restart(crash)
            except PercolatorError as error:
                yield f"{crash}: {error}"
            else:
                if lowest <= highest:
                    yield f"{crash}: {lowest} after {highest}"


def test_a_life_without_faults_extends_the_mark_several_times() -> None:
    """Otherwise the crashes would have nothing to hit."""
    assert CALLS.count("fsync") >= 5


def test_no_crash_at_any_call_repeats_a_timestamp_or_prevents_a_start() -> None:
    assert list(failures_of_every_crash()) == []


@given(
    st.lists(
        st.tuples(
            st.integers(0, len(CALLS)),
            st.sampled_from(SEEDS),
            st.integers(-10 * HOUR, 10 * HOUR),
        ),
        min_size=2,
        max_size=6,
    )
)
@settings(max_examples=50, deadline=None)
def test_timestamps_increase_over_any_number_of_crashes_and_clocks(
    lives: list[tuple[int, int, int]],
) -> None:
    files, highest_ever = MemoryFiles(MemoryDisk()), 0
    for kill_at, seed, clock_offset in lives:
        files.faults.kill_at(kill_at)
        lowest, highest = run_virtually(live(files, NOON + clock_offset))
        if lowest:
            assert lowest > highest_ever
            highest_ever = highest
        files.kill()
        files = after(files.disk, seed)


async def _without_fsync_of_the_file(files: Files, path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    async with await files.create(temporary, exclusive=False) as file:
        await file.append(data)
    await files.rename(temporary, path)
    await files.fsync_directory(path.parent)


async def _without_fsync_of_the_directory(files: Files, path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    async with await files.create(temporary, exclusive=False) as file:
        await file.append(data)
        await file.fsync()
    await files.rename(temporary, path)


async def _in_place(files: Files, path: Path, data: bytes) -> None:
    async with await files.create(path, exclusive=False) as file:
        await file.append(data)
        await file.fsync()
    await files.fsync_directory(path.parent)


async def _later(files: Files, path: Path, data: bytes) -> None:
    """Serves from the window before its mark is durable."""


@pytest.mark.parametrize(
    "careless",
    [_without_fsync_of_the_file, _without_fsync_of_the_directory, _in_place, _later],
)
def test_every_careless_way_to_write_the_mark_is_caught(
    careless: Replace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this, the test above might be unable to fail."""
    monkeypatch.setattr(directory_coordinator, "replace_durably", careless)
    assert any(failures_of_every_crash())
