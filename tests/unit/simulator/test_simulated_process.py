"""Processes that die, stop and come back, and what the others see of it."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import DeadlineExceeded, NotReady, Unavailable, UsageError
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from percolator.wire.methods import GET_TIMESTAMPS
from percolator.world import Random
from tests.simulation.network import Fault, Links
from tests.simulation.process import Incarnation, SimulatedProcess
from tests.unit.simulator.stage import SERVER, Handler, Stage, call, on_stage, services


def test_the_callers_of_a_killed_process_see_their_connections_reset() -> None:
    async def play(stage: Stage) -> tuple[float, list[str]]:
        stage.handler.seconds = 5.0
        answer = stage.call()
        await asyncio.sleep(1)
        stage.server.crash()
        with pytest.raises(Unavailable, match="reset"):
            await answer
        return stage.loop.time(), stage.handler.log

    seconds, log = on_stage(play)
    assert seconds < 1.1
    assert log == ["begin 1", "cancelled 1"]


def test_the_callers_of_a_machine_without_power_hear_nothing() -> None:
    async def play(stage: Stage) -> int:
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
        return stage.wire.counts[Fault.CUT_OFF]

    assert on_stage(play) >= 1


def test_a_restarted_process_remembers_nothing_but_its_machine() -> None:
    async def play(stage: Stage) -> None:
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
        assert stage.wire.counts[Fault.RESTART] == 1
        assert stage.wire.counts[Fault.CRASH] == 2

    on_stage(play)


def test_a_killed_process_sends_nothing_from_its_clean_up() -> None:
    async def play(stage: Stage) -> list[str]:
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
        return stage.handler.log

    assert on_stage(play) == []


def test_nothing_is_left_of_a_killed_process_that_begins_anew_whatever_ends() -> None:
    async def play(stage: Stage) -> list[int]:
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
        return [len(begun), sum(task.done() for task in begun)]

    assert on_stage(play) == [10, 10]


def test_what_a_killed_process_had_sent_still_arrives() -> None:
    async def play(stage: Stage) -> list[str]:
        stage.call()
        await asyncio.sleep(0.0001)
        stage.client.crash()
        await asyncio.sleep(10)
        return stage.handler.log

    assert on_stage(play) == ["begin 1", "end 1"]


def test_an_answer_never_leaves_a_process_after_its_death() -> None:
    """Clean-up code that answers would acknowledge what a real process never said."""

    class Late(Handler):
        async def get_timestamps(self, request: object) -> None:  # type: ignore[override]
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                raise NotReady("going down") from None

    async def play(stage: Stage) -> None:
        stage.server.crash()
        await stage.server.ended()

        async def main(incarnation: Incarnation) -> None:
            incarnation.listen(services(Late()))
            await asyncio.Event().wait()

        stage.server.start(main)
        answer = stage.call(timeout=10.0)
        await asyncio.sleep(1)
        stage.server.crash()
        with pytest.raises(Unavailable, match="reset"):
            await answer

    on_stage(play)


def test_messages_to_a_paused_process_queue_until_it_goes_on() -> None:
    async def play(stage: Stage) -> list[list[str]]:
        await asyncio.sleep(1)
        stage.server.pause()
        with pytest.raises(DeadlineExceeded):
            await stage.call(timeout=1.0)
        # It resumes before it can hear that its caller has given up.
        seen = [list(stage.handler.log)]
        stage.server.resume()
        await asyncio.sleep(1)
        seen.append(list(stage.handler.log))
        assert stage.wire.counts[Fault.PAUSE] == 1
        return seen

    before, after = on_stage(play)
    assert before == []
    assert after == ["begin 1", "end 1"]


def test_a_paused_caller_finds_the_answer_that_came_meanwhile() -> None:
    """Its time-out comes late, like everything else in it."""

    async def play(stage: Stage) -> tuple[int, float]:
        stage.handler.seconds = 0.5
        answer = stage.call(4, timeout=1.0)
        await asyncio.sleep(0.1)
        stage.client.pause()
        await asyncio.sleep(60)
        stage.client.resume()
        return await answer, stage.loop.time()

    count, seconds = on_stage(play)
    assert (count, round(seconds)) == (4, 60)


def test_a_paused_process_learns_only_later_that_its_caller_has_given_up() -> None:
    """Else its tasks would end while it stands still, and answers to them would find no call."""
    log: list[str] = []

    async def play(stage: Stage) -> list[list[str]]:
        stage.handler.seconds = 2.0

        class Relay(Handler):
            async def get_timestamps(self, request: GetTimestampsRequest) -> GetTimestampsResponse:
                unary = relay.world.network.unary(SERVER, GET_TIMESTAMPS)
                try:
                    return await unary(request, 10.0)
                except asyncio.CancelledError:
                    log.append("cancelled")
                    raise

        async def serve(incarnation: Incarnation) -> None:
            incarnation.listen(services(Relay()))
            await asyncio.Event().wait()

        async def program(incarnation: Incarnation) -> None:
            unary = incarnation.world.network.unary("relay:1", GET_TIMESTAMPS)
            with pytest.raises(DeadlineExceeded):
                await unary(GetTimestampsRequest(count=1), 1.0)

        process = SimulatedProcess("relay:1", stage.wire, stage.random)
        relay = process.start(serve)
        asked = stage.run(program)
        await asyncio.sleep(0.5)
        process.pause()
        await asked
        await asyncio.sleep(2.0)  # the server's answer has arrived
        seen = [list(log)]
        process.resume()
        await asyncio.sleep(0.1)
        return [*seen, log, stage.handler.log]

    while_paused, afterwards, at_the_server = on_stage(play)
    assert while_paused == []
    assert afterwards == ["cancelled"]
    assert at_the_server == ["begin 1", "end 1"]


def test_a_process_exits_when_its_program_ends_and_tells_how() -> None:
    async def play(stage: Stage) -> None:
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

    on_stage(play)


def test_a_running_process_is_not_started_twice() -> None:
    async def play(stage: Stage) -> None:
        async def main(incarnation: Incarnation) -> None: ...

        with pytest.raises(UsageError, match="already running"):
            stage.server.start(main)
        with pytest.raises(UsageError, match="never started"):
            await stage.client.restart()

    on_stage(play)


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
    assert _reached(links, "c") == set()
    assert _reached(links, "a") == {"b", "d", "e"}
    links.heal()
    assert _reached(links, "c") == {"a", "b", "d", "e"}
    assert links.whole
