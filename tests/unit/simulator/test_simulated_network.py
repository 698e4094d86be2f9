"""Calls between simulated processes, and everything that can happen to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    Overloaded,
    PercolatorError,
    TabletLocation,
    TabletMoved,
    Unavailable,
    UsageError,
)
from percolator.v1 import cluster_pb2, oracle_pb2, tabletserver_pb2
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from percolator.v1.tabletserver_pb2 import ScanRequest, ScanResponse
from percolator.wire.methods import DESCRIBE, GET_TIMESTAMPS, SCAN
from tests.simulation.loop import SimulationLoop, run_simulation
from tests.simulation.network import (
    STREAM_WINDOW_MESSAGES,
    Envelope,
    Fault,
    Links,
    NetworkFaults,
    Wire,
)
from tests.simulation.process import Incarnation, SimulatedProcess

# A stage for network tests: a server, a client, and a handler that logs what it did.

SERVER, CLIENT = "server:1", "client:1"
T = TypeVar("T")


@dataclass(frozen=True)
class Served:
    descriptor: ServiceDescriptor
    handler: object


@dataclass
class Handler:
    """Answers a request with its count, and records its steps in `log`."""

    log: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """How long a response takes."""
    error: Exception | None = None
    responses: list[GetTimestampsResponse] = field(default_factory=list)
    requests: list[GetTimestampsRequest] = field(default_factory=list)

    async def get_timestamps(self, request: GetTimestampsRequest) -> GetTimestampsResponse:
        self.log.append(f"begin {request.count}")
        self.requests.append(request)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.log.append(f"cancelled {request.count}")
            raise
        if self.error is not None:
            raise self.error
        self.log.append(f"end {request.count}")
        self.responses.append(GetTimestampsResponse(first=7, count=request.count))
        return self.responses[-1]

    async def scan(self, request: ScanRequest) -> AsyncIterator[ScanResponse]:
        """`row_limit` pages, each with its number as its only row."""
        try:
            for number in range(request.row_limit):
                await asyncio.sleep(self.seconds)
                if self.error is not None and number == 2:
                    raise self.error
                self.log.append(f"page {number}")
                page = ScanResponse()
                page.found.rows.append(b"%d" % number)
                yield page
        finally:
            self.log.append("closed")


def services(handler: object) -> list[Served]:
    return [
        Served(oracle_pb2.DESCRIPTOR.services_by_name["OracleService"], handler),
        Served(tabletserver_pb2.DESCRIPTOR.services_by_name["TabletServerService"], handler),
    ]


class Stage:
    """A running server, and a client to run code in."""

    def __init__(self, loop: SimulationLoop, seed: int) -> None:
        self.random = Random(seed)
        self.wire = Wire(loop, self.random)
        self.loop = loop
        self.handler = Handler()
        self.server = SimulatedProcess(SERVER, self.wire, self.random)
        self.client = SimulatedProcess(CLIENT, self.wire, self.random)
        self.server.start(serving(self.handler))

    def run(self, program: Callable[[Incarnation], Awaitable[T]]) -> asyncio.Future[T]:
        """Starts `program` as the client process; returns its result unless the process dies."""
        result: asyncio.Future[T] = self.loop.create_future()

        async def main(incarnation: Incarnation) -> None:
            try:
                result.set_result(await program(incarnation))
            except Exception as error:  # noqa: BLE001  # raised where the result is awaited
                result.set_exception(error)

        self.client.start(main)
        return result

    def call(self, count: int = 1, *, timeout: float = 10.0) -> asyncio.Future[int]:
        """Makes one call from a new client process, and returns the response."""
        return self.run(lambda incarnation: call(incarnation, count, timeout=timeout))

    def decide(self, *fates: Fault | None) -> None:
        """The fates of the next messages, in the order in which they are sent."""
        waiting = list(fates)

        def watch(envelope: Envelope) -> Fault | None:
            return waiting.pop(0) if waiting else None

        self.wire.watcher = watch


async def call(incarnation: Incarnation, count: int = 1, *, timeout: float = 10.0) -> int:
    network = incarnation.world.network
    answer = await network.unary(SERVER, GET_TIMESTAMPS)(GetTimestampsRequest(count=count), timeout)
    return answer.count


async def pages(
    incarnation: Incarnation, count: int, seen: list[int] | None = None, *, timeout: float = 10.0
) -> list[int]:
    """The numbers of the pages that arrived, also in `seen` when an error ends it."""
    found = [] if seen is None else seen
    scan = incarnation.world.network.stream(SERVER, SCAN)
    async for page in scan(ScanRequest(row_limit=count), timeout):
        found.append(int(page.found.rows[0]))  # what came before an error counts
    return found


def on_stage(play: Callable[[Stage], Coroutine[Any, Any, T]], *, seed: int = 1) -> T:
    """Runs a test on a new stage."""

    async def main(loop: SimulationLoop) -> T:
        stage = Stage(loop, seed)
        result = await play(stage)
        assert stage.wire.unexpected == []
        return result

    return run_simulation(main)


def serving(handler: Handler) -> Callable[[Incarnation], Coroutine[Any, Any, None]]:
    """The program of a server that goes on until it is killed."""

    async def main(incarnation: Incarnation) -> None:
        incarnation.listen(services(handler))
        await asyncio.Event().wait()

    return main


def staged(play: Callable[[Stage], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that runs on a new stage."""
    return lambda: on_stage(play)


@staged
async def test_a_call_is_answered_after_a_delay_each_way(stage: Stage) -> None:
    assert await stage.call(5) == 5
    assert 2 * 0.0002 <= stage.loop.time() <= 2 * 0.001


@staged
async def test_caller_and_handler_share_no_object(stage: Stage) -> None:
    request = GetTimestampsRequest(count=3)

    async def program(incarnation: Incarnation) -> None:
        answer = await incarnation.world.network.unary(SERVER, GET_TIMESTAMPS)(request, 1.0)
        assert answer is not stage.handler.responses[0]
        assert stage.handler.requests[0] is not request

    await stage.run(program)


@staged
async def test_a_request_travels_as_it_was_when_it_was_sent(stage: Stage) -> None:
    """A caller that reuses its message must not change one that is in flight."""

    async def program(incarnation: Incarnation) -> int:
        request = GetTimestampsRequest(count=3)
        unary = incarnation.world.network.unary(SERVER, GET_TIMESTAMPS)
        answer = asyncio.ensure_future(unary(request, 1.0))
        await asyncio.sleep(0)
        request.count = 99
        return (await answer).count

    assert await stage.run(program) == 3


def _told(error: PercolatorError) -> dict[str, object]:
    """All that an error says, but for where it was found."""
    return {name: value for name, value in vars(error).items() if name not in ("where", "retry")}


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("count", "is zero"),
        Overloaded("queue full", retry_after_seconds=0.5),
        TabletMoved(
            "not here",
            tablet_id=4,
            epoch=7,
            locations=(TabletLocation(1, 4, 8, b"a", b"b", "other:1"),),
        ),
    ],
)
def test_errors_cross_the_network_with_their_details_as_copies(error: PercolatorError) -> None:
    async def play(stage: Stage) -> None:
        stage.handler.error = error
        with pytest.raises(type(error)) as caught:
            await stage.call()
        assert caught.value is not error
        assert caught.value.retry is error.retry
        assert _told(caught.value) == _told(error)

    on_stage(play)


@staged
async def test_an_exception_that_no_handler_may_raise_fails_the_simulation(stage: Stage) -> None:
    stage.handler.error = KeyError("a bug")
    with pytest.raises(PercolatorError, match="failed unexpectedly"):
        await stage.call()
    found = [repr(error) for error in stage.wire.unexpected]
    stage.wire.unexpected.clear()
    assert found == ["KeyError('a bug')"]


@staged
async def test_a_watcher_that_fails_fails_the_simulation_and_leaves_no_call_behind(
    stage: Stage,
) -> None:
    """The caller may take the exception for a failed call, and continue."""

    def fail(_: Envelope) -> Fault | None:
        raise KeyError("a bug")

    stage.wire.watcher = fail
    with pytest.raises(KeyError):
        await stage.call(timeout=1.0)
    await asyncio.sleep(2.0)  # until the call would have timed out
    found = [repr(error) for error in stage.wire.unexpected]
    stage.wire.unexpected.clear()
    assert found == ["KeyError('a bug')"]


@staged
async def test_an_address_where_nothing_listens_refuses(stage: Stage) -> None:
    stage.server.crash()
    with pytest.raises(Unavailable, match="refused"):
        await stage.call()
    assert stage.loop.time() < 1
    assert stage.wire.counts[Fault.REFUSED] == 1


@staged
async def test_a_method_that_is_not_served_is_said_to_be_missing(stage: Stage) -> None:
    async def program(incarnation: Incarnation) -> None:
        describe = incarnation.world.network.unary(SERVER, DESCRIBE)
        with pytest.raises(UsageError, match="no such method"):
            await describe(cluster_pb2.DescribeRequest(), 1.0)

    await stage.run(program)


@staged
async def test_two_processes_cannot_listen_at_one_address(stage: Stage) -> None:
    async def program(incarnation: Incarnation) -> None:
        with pytest.raises(OSError, match="in use"):
            stage.wire.listen(incarnation.life, SERVER, [])

    await stage.run(program)


@staged
async def test_a_handler_can_learn_how_long_its_caller_waits(stage: Stage) -> None:
    told: list[float] = []
    stage.wire.on_call = lambda remaining, _: told.append(remaining())
    await stage.call(timeout=2.5)
    assert told == [2.5]


# ------------------------------------------------------------------------ faults of messages


def _outcome(*fates: Fault | None, seconds: float = 0.0) -> tuple[str, list[str], dict[Fault, int]]:
    """The caller's answer to one call, the handler's calls, and the counted faults."""

    async def play(stage: Stage) -> tuple[str, list[str], dict[Fault, int]]:
        stage.handler.seconds = seconds
        stage.decide(*fates)
        try:
            outcome = f"answer {await stage.call(1, timeout=1.0)}"
        except PercolatorError as error:
            outcome = type(error).__name__
        await asyncio.sleep(20)
        return outcome, stage.handler.log, dict(stage.wire.counts)

    return on_stage(play)


ONCE = ["begin 1", "end 1"]


@pytest.mark.parametrize(
    ("fates", "seconds", "outcome", "log"),
    [
        ([Fault.REQUEST_DROPPED], 0.0, "DeadlineExceeded", []),
        ([None, Fault.REPLY_DROPPED], 0.0, "DeadlineExceeded", ONCE),
        ([Fault.BROKEN_BEFORE], 0.0, "Unavailable", []),
        ([Fault.BROKEN_AFTER], 0.0, "Unavailable", ONCE),
        ([None, Fault.BROKEN_AFTER], 0.0, "Unavailable", ONCE),
        ([Fault.DUPLICATED], 0.0, "answer 1", ONCE * 2),
        ([], 5.0, "DeadlineExceeded", ["begin 1", "cancelled 1"]),
    ],
    ids=[
        "a dropped request is never executed and its caller times out",
        "a dropped reply is executed and its caller times out",
        "a connection that breaks before the execution does not say so",
        "nor one that breaks after it",
        "nor one that breaks with the reply",
        "a duplicated request is executed twice and answered once",
        "a handler is cancelled when its caller gives up",
    ],
)
def test_each_fate_of_a_message_shows_at_both_ends_and_is_counted(
    fates: list[Fault | None], seconds: float, outcome: str, log: list[str]
) -> None:
    found, executed, counts = _outcome(*fates, seconds=seconds)
    assert (found, executed) == (outcome, log)
    expected = {fate: 1 for fate in fates if fate is not None}
    if outcome == "DeadlineExceeded":
        expected[Fault.GIVEN_UP] = 1
    assert counts == expected


def test_the_second_copy_of_a_request_may_bring_the_answer_that_the_first_lost() -> None:
    outcomes = {seed: _duplicate_with_lost_first_answer(seed) for seed in range(20)}
    assert {"answer", "DeadlineExceeded"} == set(outcomes.values())


def _duplicate_with_lost_first_answer(seed: int) -> str:
    async def play(stage: Stage) -> str:
        stage.decide(Fault.DUPLICATED, Fault.REPLY_DROPPED)
        try:
            await stage.call(1, timeout=1.0)
        except PercolatorError as error:
            return type(error).__name__
        return "answer"

    return on_stage(play, seed=seed)


@staged
async def test_a_slow_request_may_be_executed_long_after_its_caller_gave_up(stage: Stage) -> None:
    stage.wire.faults = NetworkFaults(slow_seconds_max=1000.0)
    stage.decide(Fault.SLOW)
    with pytest.raises(DeadlineExceeded):
        await stage.call(1, timeout=0.01)
    assert stage.loop.time() < 0.1
    await asyncio.sleep(1001)
    assert stage.handler.log == ["begin 1", "end 1"]


@staged
async def test_a_handler_is_cancelled_when_its_caller_is(stage: Stage) -> None:
    stage.handler.seconds = 5.0

    async def program(incarnation: Incarnation) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await call(incarnation)

    await stage.run(program)
    await asyncio.sleep(1)
    assert stage.handler.log == ["begin 1", "cancelled 1"]


@staged
async def test_messages_overtake_each_other_and_that_is_counted(stage: Stage) -> None:
    async def program(incarnation: Incarnation) -> None:
        await asyncio.gather(*(call(incarnation, count) for count in range(1, 21)))

    await stage.run(program)
    assert sorted(stage.handler.log) != stage.handler.log
    assert stage.wire.counts[Fault.REORDERED] > 0


def test_faults_occur_about_as_often_as_they_are_set() -> None:
    async def play(stage: Stage) -> dict[Fault, int]:
        stage.wire.faults = NetworkFaults(
            slow=0.1, duplicate=0.1, drop_request=0.1, drop_reply=0.1, break_connection=0.1
        )

        async def program(incarnation: Incarnation) -> None:
            for _ in range(1000):
                try:
                    await call(incarnation, timeout=1.0)
                except PercolatorError:
                    continue

        await stage.run(program)
        return dict(stage.wire.counts)

    counts = on_stage(play)
    for fault in (Fault.DUPLICATED, Fault.REQUEST_DROPPED, Fault.REPLY_DROPPED):
        assert 50 < counts[fault] < 150, fault
    assert 120 < counts[Fault.SLOW] < 280
    assert 20 < counts[Fault.BROKEN_BEFORE] < 80


@pytest.mark.parametrize(
    ("impossible", "said"),
    [
        ({"drop_reply": 1.5}, "drop_reply"),
        ({"delay_seconds_min": 1.0}, "min <= max"),
        ({"drop_request": 0.6, "duplicate": 0.6}, "add up"),
    ],
)
def test_impossible_probabilities_are_refused(impossible: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        NetworkFaults(**impossible)


# ------------------------------------------------------------------------------- partitions


def _through(stage: Stage) -> asyncio.Future[str]:
    """A call whose result says whether it got through, and if not, whether its request did."""

    async def program(incarnation: Incarnation) -> str:
        executed = len(stage.handler.log)
        try:
            await call(incarnation, timeout=1.0)
        except DeadlineExceeded:
            return "request lost" if len(stage.handler.log) == executed else "reply lost"
        return "through"

    return stage.run(program)


@staged
async def test_a_link_is_cut_one_way(stage: Stage) -> None:
    for one, other, seen in ((CLIENT, SERVER, "request lost"), (SERVER, CLIENT, "reply lost")):
        stage.wire.links.cut(one, other)
        assert await _through(stage) == seen
        stage.wire.links.heal()
        await stage.client.ended()
    assert await _through(stage) == "through"
    assert stage.wire.counts[Fault.CUT_OFF] >= 2


@staged
async def test_what_is_on_its_way_when_the_link_is_cut_is_lost(stage: Stage) -> None:
    answer = stage.call(timeout=1.0)
    await asyncio.sleep(0.0001)
    stage.wire.links.cut(CLIENT, SERVER)
    with pytest.raises(DeadlineExceeded):
        await answer
    assert stage.handler.log == []


@staged
async def test_a_slow_link_delays_everything_on_it(stage: Stage) -> None:
    stage.wire.links.slow(SERVER, CLIENT, 0.5)
    await stage.call()
    assert stage.wire.counts[Fault.SLOW_LINK] == 1
    assert 0.5 < stage.loop.time() < 0.51


# ------------------------------------------------------------------------------ determinism


def _trace(seed: int) -> list[tuple[float, str]]:
    trace: list[tuple[float, str]] = []

    async def main(loop: SimulationLoop) -> None:
        stage = Stage(loop, seed)
        stage.wire.faults = NetworkFaults(
            slow=0.1, duplicate=0.1, drop_request=0.1, drop_reply=0.1, break_connection=0.1
        )

        async def one(incarnation: Incarnation, count: int) -> None:
            try:
                await call(incarnation, count, timeout=1.0)
                outcome = "answered"
            except PercolatorError as error:
                outcome = type(error).__name__
            trace.append((loop.time(), f"{count} {outcome}"))

        async def program(incarnation: Incarnation) -> None:
            await asyncio.gather(*(one(incarnation, count) for count in range(100)))

        await stage.run(program)
        trace.extend((0.0, line) for line in stage.handler.log)

    run_simulation(main)
    return trace


def test_a_seed_decides_everything() -> None:
    assert _trace(1) == _trace(1)
    assert _trace(1) != _trace(2)


# Streamed answers arrive in order, to their end or their error, or stop without a gap.


@staged
async def test_pages_arrive_in_order_and_end(stage: Stage) -> None:
    assert await stage.run(lambda incarnation: pages(incarnation, 40)) == list(range(40))


def test_slow_pages_do_not_overtake_each_other() -> None:
    async def play(stage: Stage) -> list[int]:
        stage.wire.faults = NetworkFaults(slow=0.5, slow_seconds_max=1.0)
        return await stage.run(lambda incarnation: pages(incarnation, 40, timeout=1000.0))

    for seed in range(5):
        assert on_stage(play, seed=seed) == list(range(40))


@staged
async def test_an_error_comes_after_the_pages_before_it(stage: Stage) -> None:
    stage.handler.error = NotReady("draining", retry_after_seconds=0.25)
    seen: list[int] = []
    with pytest.raises(NotReady) as caught:
        await stage.run(lambda incarnation: pages(incarnation, 5, seen))
    assert (caught.value.retry_after_seconds, seen) == (0.25, [0, 1])


@staged
async def test_a_reader_that_stops_early_closes_the_handler(stage: Stage) -> None:
    stage.handler.seconds = 1.0

    async def program(incarnation: Incarnation) -> None:
        scan = incarnation.world.network.stream(SERVER, SCAN)
        async with aclosing(scan(ScanRequest(row_limit=50), 100.0)) as found:
            async for _ in found:
                break

    await stage.run(program)
    await asyncio.sleep(10)
    assert stage.handler.log == ["page 0", "closed"]


@staged
async def test_a_slow_reader_holds_the_handler_back(stage: Stage) -> None:
    made_before_the_second_was_read = 0

    async def program(incarnation: Incarnation) -> int:
        nonlocal made_before_the_second_was_read
        read = 0
        scan = incarnation.world.network.stream(SERVER, SCAN)
        async for _ in scan(ScanRequest(row_limit=200), 1000.0):
            if read == 0:
                await asyncio.sleep(10)
                made_before_the_second_was_read = len(stage.handler.log)
            read += 1
        return read

    assert await stage.run(program) == 200
    # One was read, and one is in the handler's hand.
    assert made_before_the_second_was_read == STREAM_WINDOW_MESSAGES + 2


@staged
async def test_after_a_lost_page_nothing_more_arrives(stage: Stage) -> None:
    """A gap in a scan would look like a row that is not there."""
    stage.handler.seconds = 0.1
    stage.decide(None, None, None, Fault.REPLY_DROPPED)
    seen: list[int] = []
    with pytest.raises(DeadlineExceeded):
        await stage.run(lambda incarnation: pages(incarnation, 10, seen))
    assert seen == [0, 1]


@staged
async def test_a_stream_breaks_with_its_connection_or_its_server(stage: Stage) -> None:
    stage.handler.seconds = 0.1
    stage.decide(None, None, Fault.BROKEN_AFTER)
    with pytest.raises(Unavailable, match="broke"):
        await stage.run(lambda incarnation: pages(incarnation, 10))
    await stage.client.ended()
    reading = stage.run(lambda incarnation: pages(incarnation, 10))
    await asyncio.sleep(0.35)
    stage.server.crash()
    with pytest.raises(Unavailable, match="reset"):
        await reading


@staged
async def test_a_stream_ends_at_the_time_out_of_its_caller(stage: Stage) -> None:
    stage.handler.seconds = 1.0
    with pytest.raises(DeadlineExceeded):
        await stage.run(lambda incarnation: pages(incarnation, 10, timeout=2.5))
    await asyncio.sleep(1)
    assert stage.handler.log == ["page 0", "page 1", "closed"]


# Processes that die, stop and come back, and what the others see of it.


@staged
async def test_the_callers_of_a_killed_process_see_their_connections_reset(stage: Stage) -> None:
    stage.handler.seconds = 5.0
    answer = stage.call()
    await asyncio.sleep(1)
    stage.server.crash()
    with pytest.raises(Unavailable, match="reset"):
        await answer
    assert stage.loop.time() < 1.1
    assert stage.handler.log == ["begin 1", "cancelled 1"]


@staged
async def test_the_callers_of_a_machine_without_power_hear_nothing(stage: Stage) -> None:
    stage.handler.seconds = 5.0
    answer = stage.call(timeout=3.0)
    await asyncio.sleep(1)
    stage.server.crash(machine=True)
    with pytest.raises(DeadlineExceeded):
        await answer
    with pytest.raises(DeadlineExceeded):
        await stage.call(timeout=3.0)
    await stage.client.ended()
    await stage.server.restart()
    stage.handler.seconds = 0.0
    assert await stage.call() == 1
    assert stage.wire.counts[Fault.CUT_OFF] >= 1


@staged
async def test_a_restarted_process_remembers_nothing_but_its_machine(stage: Stage) -> None:
    lives: list[Incarnation] = []

    async def main(incarnation: Incarnation) -> None:
        lives.append(incarnation)
        incarnation.listen(services(Handler()))
        await asyncio.Event().wait()

    stage.server.crash()
    await stage.server.ended()
    stage.server.start(main)
    await asyncio.sleep(1)
    stage.server.clock.set_wall_back(60_000)
    before = stage.server.clock.wall_milliseconds()
    await stage.server.restart()
    await asyncio.sleep(1)
    first, second = lives
    assert (first.number, second.number) == (2, 3)
    assert not first.life.alive
    assert second.world.clock is first.world.clock
    assert second.world.clock.wall_milliseconds() == before + 1000
    assert second.world.random.random() != first.world.random.random()
    assert (stage.wire.counts[Fault.RESTART], stage.wire.counts[Fault.CRASH]) == (1, 2)


@staged
async def test_a_killed_process_sends_nothing_from_its_clean_up(stage: Stage) -> None:
    async def program(incarnation: Incarnation) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await call(incarnation, 99)

    stage.run(program)
    await asyncio.sleep(1)
    stage.client.crash()
    await stage.client.ended()
    await asyncio.sleep(100)
    assert stage.handler.log == []


@staged
async def test_nothing_is_left_of_a_killed_process_that_begins_anew_whatever_ends(
    stage: Stage,
) -> None:
    begun: list[asyncio.Task[None]] = []

    async def wait() -> None:
        await asyncio.sleep(100)

    def begin(_: object = None) -> None:
        if len(begun) < 10:
            begun.append(asyncio.create_task(wait()))
            begun[-1].add_done_callback(begin)

    async def program(incarnation: Incarnation) -> None:
        begin()
        await asyncio.Event().wait()

    stage.run(program)
    await asyncio.sleep(1)
    stage.client.crash()
    await stage.client.ended()
    assert [len(begun), sum(task.done() for task in begun)] == [10, 10]


@staged
async def test_what_a_killed_process_had_sent_still_arrives(stage: Stage) -> None:
    stage.call()
    await asyncio.sleep(0.0001)
    stage.client.crash()
    await asyncio.sleep(10)
    assert stage.handler.log == ["begin 1", "end 1"]


@staged
async def test_an_answer_never_leaves_a_process_after_its_death(stage: Stage) -> None:
    """Clean-up code that answers would acknowledge what a real process never said."""

    class Late(Handler):
        async def get_timestamps(self, request: object) -> None:  # type: ignore[override]
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                raise NotReady("going down") from None

    stage.server.crash()
    await stage.server.ended()

    stage.server.start(serving(Late()))
    answer = stage.call(timeout=10.0)
    await asyncio.sleep(1)
    stage.server.crash()
    with pytest.raises(Unavailable, match="reset"):
        await answer


@staged
async def test_messages_to_a_paused_process_queue_until_it_goes_on(stage: Stage) -> None:
    await asyncio.sleep(1)
    stage.server.pause()
    with pytest.raises(DeadlineExceeded):
        await stage.call(timeout=1.0)
    # It resumes before it can hear that its caller has given up.
    assert stage.handler.log == []
    stage.server.resume()
    await asyncio.sleep(1)
    assert stage.handler.log == ["begin 1", "end 1"]
    assert stage.wire.counts[Fault.PAUSE] == 1


@staged
async def test_a_paused_caller_finds_the_answer_that_came_meanwhile(stage: Stage) -> None:
    """Its time-out comes late, like everything else in it."""
    stage.handler.seconds = 0.5
    answer = stage.call(4, timeout=1.0)
    await asyncio.sleep(0.1)
    stage.client.pause()
    await asyncio.sleep(60)
    stage.client.resume()
    assert (await answer, round(stage.loop.time())) == (4, 60)


@staged
async def test_a_paused_process_learns_only_later_that_its_caller_has_given_up(
    stage: Stage,
) -> None:
    """Else its tasks would end while it stands still, and answers to them would find no call."""
    log: list[str] = []
    stage.handler.seconds = 2.0

    class Relay(Handler):
        async def get_timestamps(self, request: GetTimestampsRequest) -> GetTimestampsResponse:
            unary = relay.world.network.unary(SERVER, GET_TIMESTAMPS)
            try:
                return await unary(request, 10.0)
            except asyncio.CancelledError:
                log.append("cancelled")
                raise

    async def program(incarnation: Incarnation) -> None:
        unary = incarnation.world.network.unary("relay:1", GET_TIMESTAMPS)
        with pytest.raises(DeadlineExceeded):
            await unary(GetTimestampsRequest(count=1), 1.0)

    process = SimulatedProcess("relay:1", stage.wire, stage.random)
    relay = process.start(serving(Relay()))
    asked = stage.run(program)
    await asyncio.sleep(0.5)
    process.pause()
    await asked
    await asyncio.sleep(2.0)  # the server's answer has arrived
    assert log == []
    process.resume()
    await asyncio.sleep(0.1)
    assert (log, stage.handler.log) == (["cancelled"], ["begin 1", "end 1"])


@staged
async def test_a_process_exits_when_its_program_ends_and_tells_how(stage: Stage) -> None:
    async def fails(incarnation: Incarnation) -> None:
        raise NotReady("lost the lease")

    async def ends(incarnation: Incarnation) -> None:
        asyncio.create_task(asyncio.sleep(100))  # noqa: RUF006  # left behind on purpose

    for main in (fails, ends):
        stage.client.start(main)
        await asyncio.sleep(1)
        assert not stage.client.alive
        await stage.client.ended()
    failed, ended = stage.client.exits
    assert isinstance(failed, NotReady)
    assert ended is None


@staged
async def test_a_running_process_is_not_started_twice(stage: Stage) -> None:
    async def main(incarnation: Incarnation) -> None: ...

    with pytest.raises(UsageError, match="already running"):
        stage.server.start(main)
    with pytest.raises(UsageError, match="never started"):
        await stage.client.restart()


# ------------------------------------------------------------------------ shapes of partitions

NAMES = ["a", "b", "c", "d", "e"]


def _reached(links: Links, name: str) -> set[str]:
    return {other for other in NAMES if other != name and not links.is_cut(name, other)}


def test_a_split_leaves_two_groups() -> None:
    links = Links()
    links.split(["a", "b"], ["c", "d", "e"])
    assert [_reached(links, name) for name in NAMES] == [
        {"b"},
        {"a"},
        {"d", "e"},
        {"c", "e"},
        {"c", "d"},
    ]


def test_a_random_split_has_two_halves() -> None:
    for seed in range(20):
        links = Links()
        links.split_at_random(NAMES, Random(seed))
        assert sorted(len(_reached(links, name)) for name in NAMES) == [1, 1, 2, 2, 2]


def test_in_a_ring_each_reaches_its_neighbours() -> None:
    links = Links()
    links.ring(NAMES)
    assert [_reached(links, name) for name in NAMES] == [
        {"b", "e"},
        {"a", "c"},
        {"b", "d"},
        {"c", "e"},
        {"a", "d"},
    ]


def test_an_isolated_process_reaches_no_other_until_all_is_healed() -> None:
    links = Links()
    links.isolate("c", NAMES)
    assert (_reached(links, "c"), _reached(links, "a")) == (set(), {"b", "d", "e"})
    links.heal()
    assert _reached(links, "c") == {"a", "b", "d", "e"}
    assert links.whole
