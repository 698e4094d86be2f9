"""The source of timestamps: who shares which request, and what happens when oracles fail."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import errors
from percolator.errors import DeadlineExceeded, NotReady, PercolatorError, Unavailable
from percolator.v1.cluster_pb2 import DescribeResponse, Server, ServiceKind
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from percolator.wire import timestamp_source
from percolator.wire.methods import DESCRIBE, GET_TIMESTAMPS
from percolator.wire.timestamp_source import (
    ANSWER_SECONDS_MAX,
    ATTEMPT_SECONDS_MAX,
    REQUESTS_BEFORE_GROWTH,
    OracleOfCluster,
    TimestampSource,
)
from percolator.world import (
    RequestT,
    ResponseT,
    UnaryCall,
    UnaryMethod,
    World,
)
from tests.simulation.virtual_time import VirtualClock, run_virtually
from tests.unit.refusals import refused
from tests.unit.unary_network import UnaryNetwork

# A network with oracles in it, whose behaviour a test chooses.

ROUND_TRIP_SECONDS = 0.1

Behaviour = Callable[[int], Awaitable[int]]
"""Returns the first timestamp for a requested count."""


class Oracles(UnaryNetwork):
    """A network with oracles in it, which all draw from one sequence."""

    def __init__(self) -> None:
        self.next = 1000
        self.requests: list[tuple[float, str, int]] = []
        self.behaviours: dict[str, Behaviour] = {}
        self.in_flight = 0
        self.in_flight_most = 0

    async def healthy(self, count: int) -> int:
        """Allocates when the request arrives, half a round trip after it was sent."""
        await asyncio.sleep(ROUND_TRIP_SECONDS / 2)
        first, self.next = self.next, self.next + count
        await asyncio.sleep(ROUND_TRIP_SECONDS / 2)
        return first

    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> Any:
        assert isinstance(request, GetTimestampsRequest)
        self.requests.append((asyncio.get_running_loop().time(), address, request.count))
        self.in_flight += 1
        self.in_flight_most = max(self.in_flight_most, self.in_flight)
        try:
            async with asyncio.timeout(timeout):
                first = await self.behaviours.get(address, self.healthy)(request.count)
        except TimeoutError:
            raise errors.DeadlineExceeded("no answer in time", where=address) from None
        finally:
            self.in_flight -= 1
        return GetTimestampsResponse(first=first, count=request.count)

    def counts(self) -> list[int]:
        return [count for _, _, count in self.requests]


@pytest.fixture
@asynccontextmanager
async def oracles() -> AsyncIterator[Oracles]:
    """A network with oracles."""
    yield Oracles()


def source_of(
    oracles: Oracles, *addresses: str, all_of: Sequence[str] = ("a:1",), **settings: Any
) -> TimestampSource:
    """A source that knows these addresses, or those of a list that may change."""
    world = World(VirtualClock(asyncio.get_running_loop()), oracles, random.Random(1))
    return TimestampSource(world, addresses or all_of, **settings)


async def seconds_of(work: Awaitable[object]) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await work
    return loop.time() - began


def grants(most: int, oracles: Oracles) -> Behaviour:
    """Refuses requests for more than so many timestamps."""

    async def grant(count: int) -> int:
        if count > most:
            raise errors.InvalidArgument("count", f"{count} is outside 1 .. {most}")
        return await oracles.healthy(count)

    return grant


def refusing(error: errors.PercolatorError) -> Behaviour:
    async def refuse(count: int) -> int:
        raise error

    return refuse


async def silent(count: int) -> int:
    await asyncio.sleep(10**6)
    return 0


async def test_an_oracle_that_takes_over_later_is_asked_as_soon_as_its_address_is_known(
    cluster: Cluster,
    oracle: OracleOfCluster,
    oracles: Oracles,
) -> None:
    """No list has a standby until it leads; clients that connected before must find it."""
    oracles.behaviours["a:1"] = refusing(errors.Unavailable("killed"))
    addresses = ["a:1"]
    source = source_of(oracles, all_of=addresses)
    asking = source.get()
    await asyncio.sleep(3.0)
    addresses[:] = ["b:1"]
    assert await asking >= 1000
    oracles.requests.clear()
    await source.get()
    assert [address for _, address, _ in oracles.requests] == ["b:1"]
    await source.close()


@pytest.mark.parametrize(
    ("counts", "requests", "got"),
    [
        ([1] * 50, [50], list(range(1000, 1050))),
        ([4, 4, 4, 10, 1, 9], [8, 4, 10, 10], [1000, 1004, 1008, 1012, 1022, 1023]),
    ],
    ids=["one request", "several, if it is more than the oracle grants at once"],
)
async def test_calls_at_the_same_moment_share_requests(
    oracles: Oracles, counts: list[int], requests: list[int], got: list[int]
) -> None:
    source = source_of(oracles, count_max=max(requests))
    assert await asyncio.gather(*(source.get(count) for count in counts)) == got
    assert oracles.counts() == requests


async def test_calls_while_a_request_is_in_flight_share_the_next_one(oracles: Oracles) -> None:
    """The one in flight could return a timestamp that was allocated before the call."""
    source = source_of(oracles)
    first = source.get()
    await asyncio.sleep(ROUND_TRIP_SECONDS / 4)
    others = [source.get() for _ in range(3)]
    await asyncio.sleep(ROUND_TRIP_SECONDS / 4)
    assert oracles.counts() == [1]
    assert await first == 1000
    assert [await other for other in others] == [1001, 1002, 1003]
    assert (oracles.counts(), oracles.in_flight_most) == ([1, 3], 1)


async def test_a_lone_call_costs_one_round_trip(oracles: Oracles) -> None:
    source = source_of(oracles)
    for _ in range(5):
        assert await seconds_of(source.get()) == pytest.approx(ROUND_TRIP_SECONDS)


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.floats(0, 0.3), st.floats(0, 0.3)),
        min_size=1,
        max_size=30,
    )
)
def test_each_timestamp_is_allocated_after_it_was_asked_for_and_given_once(
    askers: list[tuple[int, float, float]],
) -> None:
    """A call gets a timestamp above all that the oracle had allocated when it was made."""

    async def main() -> None:
        oracles = Oracles()
        source = source_of(oracles, count_max=50)
        given_out: list[int] = []

        async def ask(count: int, wait: float, wait_again: float) -> None:
            await asyncio.sleep(wait)
            for _ in range(2):
                allocated_before = oracles.next
                first = await source.get(count)
                assert first >= allocated_before
                given_out.extend(range(first, first + count))
                await asyncio.sleep(wait_again)

        await asyncio.gather(*(ask(*asker) for asker in askers))
        assert len(set(given_out)) == len(given_out)
        assert oracles.in_flight_most == 1
        assert max(oracles.counts()) <= 50

    run_virtually(main())


async def test_an_oracle_with_a_lower_limit_gets_smaller_requests(oracles: Oracles) -> None:
    oracles.behaviours["a:1"] = grants(3, oracles)
    source = source_of(oracles)
    assert await asyncio.gather(*(source.get() for _ in range(10))) == list(range(1000, 1010))
    outcomes = await asyncio.gather(source.get(2), source.get(4), return_exceptions=True)
    assert outcomes[0] == 1010
    assert isinstance(outcomes[1], errors.InvalidArgument)
    before = len(oracles.requests)
    await asyncio.gather(*(source.get() for _ in range(10)))
    assert max(oracles.counts()[before:]) <= 3


async def test_an_oracle_whose_limit_is_raised_gets_larger_requests_again(oracles: Oracles) -> None:
    oracles.behaviours["a:1"] = grants(3, oracles)
    source = source_of(oracles, count_max=20)
    await asyncio.gather(*(source.get() for _ in range(20)))
    assert oracles.counts()[-1] <= 3
    oracles.behaviours["a:1"] = grants(20, oracles)
    before = len(oracles.requests)
    while oracles.counts()[-1] < 20:
        await asyncio.gather(*(source.get() for _ in range(40)))
    assert len(oracles.requests) - before <= 5 * REQUESTS_BEFORE_GROWTH


async def test_an_oracle_with_a_low_limit_refuses_few_requests(oracles: Oracles) -> None:
    oracles.behaviours["a:1"] = grants(3, oracles)
    source = source_of(oracles)
    await asyncio.gather(*(source.get() for _ in range(10)))
    before = len(oracles.requests)
    for _ in range(2 * REQUESTS_BEFORE_GROWTH):
        await asyncio.gather(*(source.get() for _ in range(10)))
    refused = sum(count > 3 for count in oracles.counts()[before:])
    assert 0 < refused <= len(oracles.requests) / 50


async def test_an_oracle_that_goes_back_is_never_trusted_again(oracles: Oracles) -> None:
    source = source_of(oracles)
    await source.get(10)
    oracles.next = 1009
    asked = [source.get(), source.get()]
    await asyncio.sleep(ROUND_TRIP_SECONDS / 2)
    asked.append(source.get())
    for future in asked:
        with pytest.raises(errors.TimestampRegression, match="1009 after 1009"):
            await future
    oracles.next = 10**6
    with pytest.raises(errors.TimestampRegression):
        await source.get()
    assert len(oracles.requests) == 2
    await source.close()


async def test_an_oracle_that_returns_another_count_is_never_trusted_again(
    oracles: Oracles,
) -> None:
    def unary(
        address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        async def call(request: RequestT, timeout: float) -> ResponseT:
            response = GetTimestampsResponse(first=5, count=1)
            assert isinstance(response, method.response)
            return response

        return call

    oracles.unary = unary  # type: ignore[method-assign]
    source = source_of(oracles)
    for _ in range(2):
        with pytest.raises(errors.InvariantViolation):
            await source.get(2)


@pytest.mark.parametrize(
    "error",
    [
        errors.NotReady("standby"),
        errors.Unavailable("no server there"),
        errors.StoreUnusable("disk full", fault=errors.StoreFault.DISK_FULL),
        errors.Overloaded("too many", retry_after_seconds=0.1),
    ],
)
async def test_when_one_oracle_does_not_serve_the_next_address_is_asked_and_kept(
    oracles: Oracles,
    error: errors.PercolatorError,
) -> None:
    oracles.behaviours["a:1"] = refusing(error)
    source = source_of(oracles, "a:1", "b:2", "c:3")
    assert (await source.get(), await source.get()) == (1000, 1001)
    assert [address for _, address, _ in oracles.requests] == ["a:1", "b:2", "b:2"]


async def test_a_silent_oracle_is_given_up_for_the_next_one(oracles: Oracles) -> None:
    oracles.behaviours["a:1"] = silent
    seconds = await seconds_of(source_of(oracles, "a:1", "b:2").get())
    assert seconds == pytest.approx(ATTEMPT_SECONDS_MAX + ROUND_TRIP_SECONDS)


async def test_on_trouble_is_called_when_an_oracle_does_not_answer(oracles: Oracles) -> None:
    oracles.behaviours["a:1"] = refusing(errors.Unavailable("gone"))
    addresses, told = ["a:1"], []

    def another() -> None:
        told.append(1)
        addresses[:] = ["b:2"]

    assert await source_of(oracles, all_of=addresses, on_trouble=another).get() == 1000
    assert told == [1]


@pytest.mark.parametrize(
    "serves", ["b:2", "a:1"], ids=["the successor", "the silent one, which was paused"]
)
async def test_who_serves_after_a_silence_is_found_within_a_second(
    oracles: Oracles, serves: str
) -> None:
    """Until one leads, it refuses; the silent one is tried again and again, each time briefly."""
    oracles.behaviours["a:1"] = silent
    oracles.behaviours["b:2"] = refusing(errors.NotReady("a:1 leads"))
    asked = source_of(oracles, "a:1", "b:2").get()
    await asyncio.sleep(5)
    del oracles.behaviours[serves]
    assert await asked == 1000
    assert asyncio.get_running_loop().time() == pytest.approx(5.5, abs=0.7)


async def test_it_keeps_trying_until_an_oracle_is_back_without_hammering_it(
    oracles: Oracles,
) -> None:
    oracles.behaviours["a:1"] = refusing(errors.Unavailable("restarting"))
    source = source_of(oracles)
    asked = source.get()
    await asyncio.sleep(5)
    assert 10 <= len(oracles.requests) <= 40
    del oracles.behaviours["a:1"]
    assert await asked == 1000


async def test_an_overloaded_oracle_is_left_alone_for_about_as_long_as_it_asked_for(
    oracles: Oracles,
) -> None:
    oracles.behaviours["a:1"] = refusing(errors.Overloaded("too many", retry_after_seconds=4.0))
    source = source_of(oracles)
    with pytest.raises(errors.DeadlineExceeded, match="too many"):
        await source.get(timeout_seconds=30.0)
    asked_at = [when for when, _, _ in oracles.requests]
    pauses = [after - before for before, after in pairwise(asked_at)]
    assert pauses
    assert all(2.0 <= pause <= 4.0 for pause in pauses)


async def test_calls_during_an_outage_share_the_next_attempt(oracles: Oracles) -> None:
    oracles.behaviours["a:1"] = refusing(errors.Unavailable("restarting"))
    source = source_of(oracles)
    asked = []
    for _ in range(20):
        asked.append(source.get())
        await asyncio.sleep(0.1)
    del oracles.behaviours["a:1"]
    assert await asyncio.gather(*asked) == list(range(1000, 1020))
    assert oracles.counts()[-1] == 20


async def test_no_call_waits_beyond_its_own_deadline_and_its_error_says_why(
    oracles: Oracles,
) -> None:
    oracles.behaviours["a:1"] = refusing(errors.Unavailable("connection refused"))
    source = source_of(oracles)

    async def ask(timeout: float | None) -> None:
        with pytest.raises(errors.DeadlineExceeded, match="connection refused"):
            await source.get(timeout_seconds=timeout)

    waited = await asyncio.gather(*(seconds_of(ask(one)) for one in (3.0, 0.5, None, 2.0)))
    assert waited == pytest.approx([3.0, 0.5, 10.0, 2.0])


async def test_a_deadline_passes_while_the_request_is_in_flight(oracles: Oracles) -> None:
    oracles.behaviours["a:1"] = silent
    source = source_of(oracles)
    with pytest.raises(errors.DeadlineExceeded, match="no answer yet"):
        await source.get(timeout_seconds=0.25)
    assert asyncio.get_running_loop().time() == pytest.approx(0.25)


async def test_a_cancelled_call_disturbs_no_other(oracles: Oracles) -> None:
    source = source_of(oracles)

    async def ask() -> int:
        return await source.get()

    asking = [asyncio.create_task(ask()) for _ in range(3)]
    await asyncio.sleep(ROUND_TRIP_SECONDS / 2)
    asking += [asyncio.create_task(ask()) for _ in range(3)]
    await asyncio.sleep(ROUND_TRIP_SECONDS / 4)
    asking[1].cancel()
    asking[4].cancel()
    got = await asyncio.gather(*asking, return_exceptions=True)
    assert [one for one in got if isinstance(one, int)] == [1000, 1002, 1003, 1005]
    assert isinstance(got[1], asyncio.CancelledError)
    assert await source.get() == 1006


async def test_a_permanent_error_reaches_all_calls_of_its_request_and_no_others(
    oracles: Oracles,
) -> None:
    oracles.behaviours["a:1"] = refusing(errors.WrongCluster("no", expected="x", found="y"))
    source = source_of(oracles)
    outcomes = await asyncio.gather(source.get(), source.get(), return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, errors.WrongCluster)
        assert outcome.found == "y"
    assert outcomes[0] is not outcomes[1], "each raise would lengthen the traceback of the other"
    del oracles.behaviours["a:1"]
    assert await source.get() == 1000


async def test_the_number_of_waiting_calls_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timestamp_source, "WAITERS_MAX", 3)
    oracles = Oracles()
    source = source_of(oracles)
    asked = [source.get() for _ in range(3)]
    with pytest.raises(errors.Overloaded):
        source.get()
    assert await asyncio.gather(*asked) == [1000, 1001, 1002]


async def test_closing_ends_all_waits_and_further_use(oracles: Oracles) -> None:
    oracles.behaviours["a:1"] = silent
    source = source_of(oracles)
    asked = [source.get()]
    await asyncio.sleep(0.1)
    asked.append(source.get())
    await source.close()
    await source.close()
    for future in asked:
        with pytest.raises(errors.UsageError, match="closed"):
            await future
    with pytest.raises(errors.UsageError):
        await source.get()
    assert oracles.in_flight == 0


async def test_a_bug_in_the_network_layer_hangs_no_caller() -> None:
    async def broken(count: int) -> int:
        raise ValueError("a bug")

    oracles = Oracles()
    oracles.behaviours["a:1"] = broken
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    source = source_of(oracles)
    for _ in range(2):
        with pytest.raises(errors.InvariantViolation, match="a bug"):
            await source.get()


class _CtrlC(BaseException):
    """A `KeyboardInterrupt` would end the test's loop."""


class _Interrupted(asyncio.Future[int]):
    def set_result(self, timestamp: int, /) -> None:
        super().set_result(timestamp)
        raise _CtrlC


async def test_no_call_is_forgotten_although_ctrl_c_came_while_timestamps_were_handed_out() -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)
    source = source_of(Oracles())
    create_future = source._create_future
    before = source.get()
    source._create_future = _Interrupted
    interrupted = source.get()
    source._create_future = create_future
    behind = [source.get(), source.get()]
    assert await before == 1000
    assert await interrupted == 1001
    assert await source.get() == 1006
    assert [await one for one in behind] == [1004, 1005]
    loop.set_exception_handler(None)


# How a tablet server finds the oracle that it asks for the time.


class Cluster(UnaryNetwork):
    """A master, and several oracles, one of which leads."""

    def __init__(self) -> None:
        self.oracles = ["a:1"]
        self.leading = "a:1"
        self.now = 7
        self.asked: list[str] = []
        self.silent: set[str] = set()
        """Addresses that answer nothing."""

    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> Any:
        self.asked.append(address)
        await asyncio.sleep(timeout if address in self.silent else 0.001)
        if address in self.silent:
            raise DeadlineExceeded("silent", where=address)
        if method is DESCRIBE:
            kind = ServiceKind.SERVICE_KIND_ORACLE
            servers = [Server(kind=kind, address=one) for one in self.oracles]
            return DescribeResponse(servers=servers)
        assert method is GET_TIMESTAMPS
        if address != self.leading:
            raise Unavailable("nothing is there", where=address)
        first, self.now = self.now + 1, self.now + request.count
        return GetTimestampsResponse(first=first, count=request.count)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
@asynccontextmanager
async def oracle(cluster: Cluster) -> AsyncIterator[OracleOfCluster]:
    """The oracle of the cluster, as a tablet server asks it."""
    world = World(VirtualClock(asyncio.get_running_loop()), cluster, random.Random(1))
    oracle = OracleOfCluster(world, ["master:1"])
    yield oracle
    await oracle.close()


async def take_in_vain(oracle: OracleOfCluster) -> None:
    with pytest.raises(PercolatorError):
        await oracle.take()


async def test_all_who_ask_at_once_share_a_description_and_hardly_any_requests(
    cluster: Cluster, oracle: OracleOfCluster
) -> None:
    assert len(set(await asyncio.gather(*(oracle.take() for _ in range(100))))) == 100
    assert cluster.asked.count("master:1") == 1
    assert cluster.asked.count("a:1") <= 2


async def test_an_oracle_that_has_taken_the_place_of_another_one_is_found(
    cluster: Cluster, oracle: OracleOfCluster
) -> None:
    await oracle.take()
    cluster.oracles, cluster.leading = ["b:1"], "b:1"
    assert await oracle.take() == cluster.now
    assert cluster.asked[-1] == "b:1"


@pytest.mark.parametrize("known", [False, True], ids=["the first", "one that is known"])
async def test_none_queues_behind_silent_masters(
    cluster: Cluster, oracle: OracleOfCluster, known: bool
) -> None:
    """All who ask at about the same time share one attempt to find the oracle, and none waits
    longer than one answer may take, however many there are."""
    if known:
        await oracle.take()
        cluster.leading = ""
    cluster.silent.add("master:1")
    waiting = []
    for _ in range(20):
        waiting.append(asyncio.ensure_future(seconds_of(take_in_vain(oracle))))
        await asyncio.sleep(0.1)
    assert max(await asyncio.gather(*waiting)) <= ANSWER_SECONDS_MAX + 0.001
    assert cluster.asked.count("master:1") <= 5


async def test_with_silent_masters_an_oracle_that_is_known_is_asked_at_once(
    cluster: Cluster,
    oracle: OracleOfCluster,
) -> None:
    await oracle.take()
    cluster.leading = ""
    cluster.silent.add("master:1")
    await take_in_vain(oracle)
    cluster.leading = "a:1"
    began = asyncio.get_running_loop().time()
    assert await oracle.take() == cluster.now
    assert asyncio.get_running_loop().time() - began < 0.5


async def test_one_who_leaves_takes_the_attempt_from_no_other(
    oracle: OracleOfCluster,
) -> None:
    leaving, staying = (asyncio.ensure_future(oracle.take()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying


async def test_where_no_oracle_is_registered_that_is_said_at_once(
    cluster: Cluster,
    oracle: OracleOfCluster,
) -> None:
    cluster.oracles = []
    with pytest.raises(NotReady, match="no oracle is registered"):
        await oracle.take()


async def test_an_oracle_that_does_not_answer_is_waited_for_as_long_as_a_caller_waits(
    cluster: Cluster,
    oracle: OracleOfCluster,
) -> None:
    cluster.leading = ""
    assert await seconds_of(take_in_vain(oracle)) < 2 * ANSWER_SECONDS_MAX


# Misuse of the source of timestamps is refused by name, and harms no other call.


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"all_of": []}, "addresses: is empty"),
        # Each of its characters would be taken for an address.
        ({"all_of": "a:1"}, r"addresses: expected a list .* 'a:1'"),
        ({"count_max": 0}, "count_max"),
        ({"timeout_seconds": math.nan}, "timeout_seconds"),
        ({"timeout_seconds": "1"}, "timeout_seconds"),
    ],
)
async def test_settings_that_cannot_be_are_refused_by_name(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=f"^{said}"):
        source_of(Oracles(), **settings)


@pytest.mark.parametrize("count", [0, -1, 11, 1.5, 1.0, "1", None, math.nan])
async def test_a_count_outside_its_limits_or_no_whole_number_is_refused_and_harms_no_other_call(
    oracles: Oracles, count: Any
) -> None:
    """In a shared request, it would make the other calls fail too."""
    source = source_of(oracles, count_max=10)
    other = source.get()
    with refused("count"):
        source.get(count)
    assert (await other, oracles.counts()) == (1000, [1])


@pytest.mark.parametrize("seconds", [math.nan, "1"])
async def test_a_timeout_that_is_not_a_number_is_refused_by_name(seconds: Any) -> None:
    """With NaN, the call would never learn that no oracle answers."""
    with refused("timeout_seconds"):
        source_of(Oracles()).get(1, seconds)


@pytest.mark.parametrize("seconds", [0.0, -1.0, -math.inf])
async def test_a_timeout_that_has_passed_already_ends_the_wait_at_once(seconds: float) -> None:
    source = source_of(Oracles())
    with pytest.raises(errors.DeadlineExceeded):
        await source.get(1, seconds)
    assert asyncio.get_running_loop().time() == 0
    assert await source.get() > 0


@pytest.mark.parametrize("seconds", [None, 0.0, ROUND_TRIP_SECONDS / 4])
async def test_no_call_is_forgotten_when_other_code_cancels_the_tasks_of_the_loop(
    oracles: Oracles,
    seconds: float | None,
) -> None:
    """Nor does the source stop asking, even if its task is cancelled before its first step."""
    source = source_of(oracles)
    asked = source.get()
    if seconds is not None:
        await asyncio.sleep(seconds)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)
    assert await source.get() > await asked


def test_a_source_used_outside_its_event_loop_raises_an_error() -> None:
    async def made() -> TimestampSource:
        return source_of(Oracles())

    async def used(source: TimestampSource) -> None:
        source.get()

    source = run_virtually(made())
    with pytest.raises(errors.UsageError, match="one event loop"):
        run_virtually(used(source))
    with pytest.raises(errors.UsageError, match="within an event loop"):
        source.get()
