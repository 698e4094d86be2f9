"""Many rows share few calls, and nobody is let in beyond the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    Overloaded,
    PercolatorError,
    Retry,
    StoreFault,
    StoreUnusable,
    Unavailable,
)
from percolator.limits import MEBIBYTE, Limits
from percolator.v1 import tabletserver_pb2 as wire
from percolator.wire.dispatcher import Dispatcher
from percolator.wire.questions import APPLIED, Answer, FoundCell

from .tablet_servers import Cluster, Server, question, step, tablet


def _cluster(server: Server, limits: Limits | None = None) -> Cluster:
    cluster = Cluster({"a:1": server}, limits)
    cluster.tablets.learn([tablet("a:1")])
    return cluster


async def test_what_is_asked_in_one_turn_leaves_in_one_call() -> None:
    server = Server()
    cluster = _cluster(server)
    asked = [cluster.router.mutate([step(b"%d" % i)], cluster.deadline()) for i in range(100)]
    answers = await asyncio.gather(*asked)
    assert answers == [[APPLIED]] * 100
    assert len(server.mutate_calls) == 1


async def test_what_is_asked_while_all_calls_are_in_flight_forms_the_next() -> None:
    server = Server()
    cluster = _cluster(server)

    async def one(i: int) -> None:
        await asyncio.sleep(i * 0.0001)
        await cluster.router.mutate([step(b"%d" % i)], cluster.deadline())

    await asyncio.gather(*(one(i) for i in range(100)))
    # Three calls are let out for the first four; the others share what comes after 10 ms.
    assert len(server.mutate_calls) <= 6
    assert sorted(server.rows_mutated()) == sorted(b"%d" % i for i in range(100))


async def test_a_call_beside_others_carries_as_many_rows_as_they_do() -> None:
    server = Server(seconds=1.0)
    cluster = _cluster(server, Limits(server_calls_max=6))

    async def one(i: int) -> None:
        await asyncio.sleep(i * 0.01)
        await cluster.router.mutate([step(b"%d" % i)], cluster.deadline())

    await asyncio.gather(*(one(i) for i in range(30)))
    sizes = [len(batch.mutations) for call in server.mutate_calls for batch in call.batches]
    assert sizes[:5] == [1, 1, 2, 4, 8]
    assert sum(sizes) == 30
    assert cluster.clock.monotonic_seconds() < 2.5  # who waited for a call went with the next


async def test_a_full_call_waits_for_no_other() -> None:
    server = Server(seconds=1.0)
    cluster = _cluster(server, Limits(batch_rows_max=10, server_calls_max=4))
    steps = [step(b"%d" % i) for i in range(30)]
    await cluster.router.mutate(steps, cluster.deadline())
    assert cluster.clock.monotonic_seconds() == pytest.approx(1.0)


async def test_a_lone_caller_waits_for_one_round_trip() -> None:
    cluster = _cluster(Server(seconds=0.01))
    await cluster.router.mutate([step(b"a")], cluster.deadline())
    assert cluster.clock.monotonic_seconds() == pytest.approx(0.01)


async def test_calls_and_batches_are_bounded() -> None:
    server = Server()
    cluster = _cluster(server, Limits(batch_rows_max=10, server_calls_max=4))
    steps = [step(b"%d" % i) for i in range(300)]
    reads = [question(b"%d" % i) for i in range(300)]
    await asyncio.gather(
        cluster.router.mutate(steps, cluster.deadline()),
        cluster.router.read(reads, cluster.deadline()),
    )
    assert server.in_flight_max == 4
    sizes = [len(batch.mutations) for call in server.mutate_calls for batch in call.batches]
    assert max(sizes) == 10


async def test_a_batch_is_bounded_in_bytes() -> None:
    server = Server()
    cluster = _cluster(server, Limits(batch_bytes_max=MEBIBYTE))
    steps = [step(b"%d" % i, size=400_000) for i in range(6)]
    await cluster.router.mutate(steps, cluster.deadline())
    assert [len(call.batches[0].mutations) for call in server.mutate_calls] == [2, 2, 2]


async def test_one_value_larger_than_a_batch_travels_alone() -> None:
    server = Server()
    cluster = _cluster(server, Limits(batch_bytes_max=1000, server_bytes_max=2000))
    answers = await cluster.router.mutate([step(b"a", size=5000)], cluster.deadline())
    assert answers == [APPLIED]


async def test_neither_reads_nor_mutations_take_all_calls() -> None:
    server = Server(seconds=1.0)
    cluster = _cluster(server, Limits(batch_rows_max=1))
    mutating = asyncio.ensure_future(
        cluster.router.mutate([step(b"%d" % i) for i in range(50)], cluster.deadline(60))
    )
    await asyncio.sleep(0.1)
    await cluster.router.read([question(b"a")], cluster.deadline())
    assert cluster.clock.monotonic_seconds() < 1.2
    mutating.cancel()


async def test_beyond_the_limits_callers_wait_until_their_deadline_and_nothing_is_sent() -> None:
    server = Server(seconds=3.0)
    cluster = _cluster(server, Limits(server_rows_max=5, batch_rows_max=5))
    first = asyncio.ensure_future(
        cluster.router.mutate([step(b"%d" % i) for i in range(5)], cluster.deadline())
    )
    (late,) = await cluster.router.mutate([step(b"late")], cluster.deadline(1.0))
    assert isinstance(late, DeadlineExceeded)
    assert late.retry is Retry.SAFE
    assert await first == [APPLIED] * 5
    await asyncio.sleep(5)
    assert b"late" not in server.rows_mutated()


async def test_whoever_waits_for_room_gets_in_when_there_is_some() -> None:
    server = Server(seconds=0.5)
    cluster = _cluster(server, Limits(server_rows_max=5, batch_rows_max=5))
    answers = await asyncio.gather(
        *(cluster.router.mutate([step(b"%d" % i)], cluster.deadline()) for i in range(23))
    )
    assert answers == [[APPLIED]] * 23


async def test_a_request_larger_than_all_room_passes_in_portions() -> None:
    cluster = _cluster(Server(), Limits(server_rows_max=10, batch_rows_max=5))
    answers = await cluster.router.mutate([step(b"%d" % i) for i in range(100)], cluster.deadline())
    assert answers == [APPLIED] * 100


async def test_an_overloaded_tablet_is_left_alone_and_only_that_one() -> None:
    server = Server()
    cluster = Cluster({"a:1": server})
    cluster.tablets.learn([tablet("a:1", b"", b"m"), tablet("a:1", b"m", b"", tablet_id=2)])
    until = cluster.clock.monotonic_seconds() + 2.0

    def refuse(target: wire.TabletTarget, rows: list[bytes]) -> PercolatorError | None:
        if target.tablet_id == 1 and cluster.clock.monotonic_seconds() < until:
            return Overloaded("full", retry_after_seconds=2.0)
        return None

    server.refuse_batch = refuse
    busy = asyncio.ensure_future(cluster.router.mutate([step(b"a")], cluster.deadline()))
    await asyncio.sleep(0.1)
    also_busy = asyncio.ensure_future(cluster.router.mutate([step(b"b")], cluster.deadline()))
    assert await cluster.router.mutate([step(b"z")], cluster.deadline()) == [APPLIED]
    assert cluster.clock.monotonic_seconds() < 0.2
    assert await busy == [APPLIED]
    assert await also_busy == [APPLIED]
    assert cluster.clock.monotonic_seconds() >= 2.0
    calls_to_busy = [call for call in server.mutate_calls if call.batches[0].target.tablet_id == 1]
    assert len(calls_to_busy) == 2


async def test_a_server_that_is_not_ready_is_asked_again() -> None:
    server = Server()
    answers: list[PercolatorError | None] = [NotReady("starting"), NotReady("starting"), None]
    server.refuse_batch = lambda target, rows: answers.pop(0)
    cluster = _cluster(server)
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]


async def test_a_mutation_without_an_answer_is_its_senders_affair() -> None:
    server = Server()
    server.answers_lost = True
    cluster = _cluster(server)
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline())
    assert isinstance(answer, Unavailable)
    assert answer.retry is Retry.UNKNOWN
    assert len(server.mutate_calls) == 1


async def test_a_read_without_an_answer_is_asked_again() -> None:
    server = Server()
    server.answers_lost = True
    cluster = _cluster(server)
    reading = asyncio.ensure_future(cluster.router.read([question(b"a")], cluster.deadline()))
    await asyncio.sleep(1.0)
    server.answers_lost = False
    (answer,) = await reading
    assert answer.found == {b"c": FoundCell(7, b"value of a")}


async def test_a_silent_server_leaves_a_mutation_unknown_and_a_read_undone() -> None:
    server = Server(seconds=1e6)
    cluster = _cluster(server)
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline(2.0))
    assert isinstance(answer, DeadlineExceeded)
    assert answer.retry is Retry.UNKNOWN
    with pytest.raises(DeadlineExceeded) as caught:
        await cluster.router.read([question(b"a")], cluster.deadline(2.0))
    assert caught.value.retry is Retry.SAFE
    assert cluster.clock.monotonic_seconds() == pytest.approx(4.0, abs=0.2)


async def test_a_full_disk_is_said_at_once() -> None:
    server = Server()
    server.refuse_batch = lambda target, rows: StoreUnusable("full", fault=StoreFault.DISK_FULL)
    cluster = _cluster(server)
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline())
    assert isinstance(answer, StoreUnusable)
    assert cluster.clock.monotonic_seconds() < 0.1


async def test_one_bad_row_does_not_spoil_the_batch_of_strangers() -> None:
    server = Server()

    def refuse(target: wire.TabletTarget, rows: list[bytes]) -> PercolatorError | None:
        return InvalidArgument("row", "bad") if b"bad" in rows else None

    server.refuse_batch = refuse
    cluster = _cluster(server)
    rows = [b"a", b"bad", b"c"]
    answers = await asyncio.gather(
        *(cluster.router.mutate([step(row)], cluster.deadline()) for row in rows)
    )
    assert [answer[0] for answer in answers[::2]] == [APPLIED, APPLIED]
    assert isinstance(answers[1][0], InvalidArgument)


async def test_rows_whose_caller_has_gone_are_not_sent() -> None:
    server = Server(seconds=1.0)
    cluster = _cluster(server, Limits(batch_rows_max=1))
    asked = [
        asyncio.ensure_future(cluster.router.mutate([step(b"%d" % i)], cluster.deadline()))
        for i in range(5)
    ]
    await asyncio.sleep(0.1)
    for one in asked:
        one.cancel()
    await asyncio.sleep(5.0)
    assert len(server.mutate_calls) == 3


async def test_closing_leaves_nobody_waiting() -> None:
    cluster = _cluster(Server(seconds=1e6))
    asked = asyncio.ensure_future(cluster.router.mutate([step(b"a")], cluster.deadline(1e9)))
    await asyncio.sleep(0.1)
    await cluster.router.close()
    (answer,) = await asked
    assert isinstance(answer, PercolatorError)
    assert answer.retry is Retry.UNKNOWN


async def _about_to_call(cluster: Cluster) -> tuple[Dispatcher, asyncio.Future[list[Answer]]]:
    """A call that was put together, in the moment before it begins."""
    await cluster.router.mutate([step(b"first")], cluster.deadline())
    (dispatcher,) = cluster.router._dispatchers.values()
    asked = asyncio.ensure_future(
        cluster.router.mutate([step(b"a"), step(b"b"), step(b"c")], cluster.deadline())
    )
    for _ in range(10):  # turns of the loop, of which a few are needed
        if not dispatcher._in_flight:
            await asyncio.sleep(0)
    assert dispatcher._in_flight
    assert not any(call.begun for call in dispatcher._in_flight)
    return dispatcher, asked


async def test_a_call_that_is_given_up_before_it_begins_holds_up_nobody_after_it() -> None:
    """Else the next calls would wait for one that never ends, until as many rows had come."""
    cluster = _cluster(Server())
    dispatcher, asked = await _about_to_call(cluster)
    dispatcher.leave(lambda _: True)
    assert len(await asked) == 3
    assert await cluster.router.mutate([step(b"z")], cluster.deadline()) == [APPLIED]
    assert dispatcher.silent_seconds() == 0.0


async def test_closing_before_a_call_begins_leaves_nobody_waiting() -> None:
    cluster = _cluster(Server())
    _, asked = await _about_to_call(cluster)
    began = cluster.clock.monotonic_seconds()
    await cluster.router.close()
    assert all(isinstance(answer, Unavailable) for answer in await asked)
    assert cluster.clock.monotonic_seconds() == began


def _answers(server: Server, **methods: object) -> None:
    for name, answer in methods.items():
        correct = getattr(server, name)

        async def malformed(
            request: object, correct: object = correct, answer: object = answer
        ) -> object:
            return answer(await correct(request))  # type: ignore[operator]

        setattr(server, name, malformed)


def _without_batches(response: wire.MutateResponse) -> wire.MutateResponse:
    return type(response)()


def _one_result_less(response: wire.MutateResponse) -> wire.MutateResponse:
    response.batches[0].results.pop()
    return response


def _without_outcome(response: wire.MutateResponse) -> wire.MutateResponse:
    for result in response.batches[0].results:
        result.Clear()
    return response


def _not_even_a_response(response: wire.MutateResponse) -> str:
    return "nothing of the kind"


@pytest.mark.parametrize(
    "malform", [_without_batches, _one_result_less, _without_outcome, _not_even_a_response]
)
async def test_mutations_whose_answer_is_malformed_may_have_been_executed(
    malform: Callable[[wire.MutateResponse], object],
) -> None:
    server = Server()
    _answers(server, mutate=malform)
    cluster = _cluster(server)
    answers = await cluster.router.mutate([step(b"a"), step(b"b")], cluster.deadline(1.0))
    assert [answer.retry for answer in answers if isinstance(answer, PercolatorError)] == [
        Retry.UNKNOWN
    ] * 2
    assert len(server.mutate_calls) == 1
    assert cluster.clock.monotonic_seconds() < 0.5


def _a_value_less(response: wire.ReadResponse) -> wire.ReadResponse:
    response.batches[0].found.values.pop()
    return response


def _of_a_row_that_was_not_asked_for(response: wire.ReadResponse) -> wire.ReadResponse:
    response.batches[0].found.reads[0] = 99
    return response


@pytest.mark.parametrize("malform", [_a_value_less, _of_a_row_that_was_not_asked_for])
async def test_malformed_answers_to_reads_leave_no_call_behind(
    malform: Callable[[wire.ReadResponse], wire.ReadResponse],
) -> None:
    server = Server()
    correct = server.read
    _answers(server, read=malform)
    cluster = _cluster(server, Limits(server_calls_max=2, server_rows_max=2))
    for _ in range(3):
        with pytest.raises(DeadlineExceeded, match="malformed"):
            await cluster.router.read([question(b"a")], cluster.deadline(1.0))
    server.read = correct  # type: ignore[method-assign]
    await asyncio.sleep(5.0)
    (answer,) = await cluster.router.read([question(b"a")], cluster.deadline())
    assert answer.found == {b"c": FoundCell(7, b"value of a")}


async def test_the_turn_of_whoever_leaves_at_that_moment_is_the_next_ones() -> None:
    cluster = _cluster(Server(), Limits(server_rows_max=1, batch_rows_max=1))
    first = asyncio.ensure_future(cluster.router.mutate([step(b"a")], cluster.deadline()))
    dispatcher = cluster.router._dispatcher("a:1")
    second, third = (asyncio.create_task(dispatcher.room(1)) for _ in range(2))
    # Between being woken and going on.
    first.add_done_callback(lambda _: second.cancel())
    assert await first == [APPLIED]
    await asyncio.wait_for(third, 1.0)
    assert second.cancelled()


async def test_a_turn_that_comes_with_the_deadline_is_the_next_ones() -> None:
    cluster = _cluster(Server(seconds=1.0), Limits(server_rows_max=1, batch_rows_max=1))
    first = asyncio.ensure_future(cluster.router.mutate([step(b"a")], cluster.deadline()))
    second = asyncio.ensure_future(cluster.router.mutate([step(b"b")], cluster.deadline()))
    third = asyncio.ensure_future(cluster.router.mutate([step(b"c")], cluster.deadline(5.0)))
    await asyncio.sleep(0.5)
    late = next(asked for asked in cluster.router._open if asked.entries[0].row == b"b")  # type: ignore[union-attr]
    first.add_done_callback(lambda _: late.expire())
    await first
    (answer,) = await second
    assert isinstance(answer, DeadlineExceeded)
    assert await third == [APPLIED]
