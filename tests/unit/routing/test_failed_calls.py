"""Calls that fail, are not answered, or are answered with nonsense: what their rows hear."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    InvariantViolation,
    NotReady,
    PercolatorError,
    Retry,
    StoreFault,
    StoreUnusable,
    Unavailable,
    UnknownServer,
)
from percolator.limits import Limits
from percolator.routing.cells import APPLIED, FoundCell
from percolator.v1 import tabletserver_pb2 as pb

from .tablet_servers import Cluster, Server, row_request, step, tablet


def _cluster(server: Server, limits: Limits | None = None) -> Cluster:
    cluster = Cluster({"a:1": server}, limits)
    cluster.tablets.learn([tablet("a:1")])
    return cluster


async def test_a_server_that_is_not_ready_is_retried() -> None:
    server = Server()
    answers: list[PercolatorError | None] = [NotReady("starting"), NotReady("starting"), None]
    server.refuse_batch = lambda target, rows: answers.pop(0)
    cluster = _cluster(server)
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]


def _gone(server: str) -> UnknownServer:
    return UnknownServer(f"no server {server!r} is in this cluster", server=server)


@pytest.mark.parametrize(
    "error", [NotReady("the server is shutting down"), _gone("a:1")], ids=["not ready", "unknown"]
)
async def test_a_master_is_asked_about_a_server_that_is_never_ready(error: PercolatorError) -> None:
    """It ends, and waits for a call that hangs; or a gateway knows it no longer."""
    server, other = Server(), Server()
    server.refuse_batch = lambda target, rows: error
    cluster = Cluster({"a:1": server, "b:1": other})
    cluster.tablets.learn([tablet("a:1")])
    cluster.now_at = [tablet("b:1", epoch=2)]
    assert await cluster.router.mutate([step(b"a")], cluster.deadline(5.0)) == [APPLIED]
    (found,) = await cluster.router.read([row_request(b"a")], cluster.deadline(5.0))
    assert found.found == {b"c": FoundCell(7, b"value of a")}
    assert cluster.clock.monotonic_seconds() < 1.0


async def test_a_mutation_without_an_answer_is_left_to_its_sender() -> None:
    server = Server()
    server.answers_lost = True
    cluster = _cluster(server)
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline())
    assert isinstance(answer, Unavailable)
    assert answer.retry is Retry.UNKNOWN
    assert len(server.mutate_calls) == 1


async def test_a_read_without_an_answer_is_sent_again() -> None:
    server = Server()
    server.answers_lost = True
    cluster = _cluster(server)
    reading = asyncio.ensure_future(cluster.router.read([row_request(b"a")], cluster.deadline()))
    await asyncio.sleep(1.0)
    server.answers_lost = False
    (answer,) = await reading
    assert answer.found == {b"c": FoundCell(7, b"value of a")}


async def test_a_silent_server_leaves_a_mutation_unknown_and_a_read_safe_to_retry() -> None:
    server = Server(seconds=1e6)
    cluster = _cluster(server)
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline(2.0))
    assert isinstance(answer, DeadlineExceeded)
    assert answer.retry is Retry.UNKNOWN
    with pytest.raises(DeadlineExceeded) as caught:
        await cluster.router.read([row_request(b"a")], cluster.deadline(2.0))
    assert caught.value.retry is Retry.SAFE
    assert cluster.clock.monotonic_seconds() == pytest.approx(4.0, abs=0.2)


async def test_a_full_disk_is_reported_at_once() -> None:
    server = Server()
    server.refuse_batch = lambda target, rows: StoreUnusable("full", fault=StoreFault.DISK_FULL)
    cluster = _cluster(server)
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline())
    assert isinstance(answer, StoreUnusable)
    assert cluster.clock.monotonic_seconds() < 0.1


def _answers(server: Server, **methods: object) -> None:
    for name, answer in methods.items():
        correct = getattr(server, name)

        async def malformed(
            request: object, correct: object = correct, answer: object = answer
        ) -> object:
            return answer(await correct(request))  # type: ignore[operator]

        setattr(server, name, malformed)


def _without_batches(response: pb.MutateResponse) -> pb.MutateResponse:
    return type(response)()


def _one_less(response: pb.MutateResponse) -> pb.MutateResponse:
    response.batches[0].mutations -= 1
    return response


def _of_one_that_was_not_sent(response: pb.MutateResponse) -> pb.MutateResponse:
    response.batches[0].unapplied.add(mutation=2)
    return response


def _empty(response: pb.MutateResponse) -> pb.MutateResponse:
    response.batches[0].Clear()
    return response


def _without_outcome(response: pb.MutateResponse) -> pb.MutateResponse:
    for number in range(2):
        response.batches[0].unapplied.add(mutation=number)
    return response


@pytest.mark.parametrize(
    "malform",
    [_without_batches, _one_less, _of_one_that_was_not_sent, _empty, _without_outcome],
)
async def test_mutations_whose_answer_is_malformed_may_have_been_executed(
    malform: Callable[[pb.MutateResponse], object],
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


def _a_value_less(response: pb.ReadResponse) -> pb.ReadResponse:
    response.batches[0].found.values.pop()
    return response


def _of_a_row_that_was_not_asked_for(response: pb.ReadResponse) -> pb.ReadResponse:
    response.batches[0].found.reads[0] = 99
    return response


def _nothing_found(response: pb.ReadResponse) -> pb.ReadResponse:
    """An empty message must not mean that nothing exists."""
    response.batches[0].Clear()
    return response


@pytest.mark.parametrize(
    "malform", [_a_value_less, _of_a_row_that_was_not_asked_for, _nothing_found]
)
async def test_malformed_answers_to_reads_leave_no_call_behind(
    malform: Callable[[pb.ReadResponse], pb.ReadResponse],
) -> None:
    server = Server()
    correct = server.read
    _answers(server, read=malform)
    cluster = _cluster(server, Limits(server_calls_max=2, server_rows_max=2))
    for _ in range(3):
        with pytest.raises(DeadlineExceeded, match="malformed"):
            await cluster.router.read([row_request(b"a")], cluster.deadline(1.0))
    server.read = correct  # type: ignore[method-assign]
    await asyncio.sleep(5.0)
    (answer,) = await cluster.router.read([row_request(b"a")], cluster.deadline())
    assert answer.found == {b"c": FoundCell(7, b"value of a")}


def _reports() -> list[BaseException]:
    """What the event loop is told of from now on."""
    found: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: found.append(context["exception"])
    )
    return found


def _nothing_of_the_kind(response: object) -> str:
    return "no response"


async def test_a_bug_in_a_call_is_reported_and_its_mutations_may_have_been_executed() -> None:
    server, reports = Server(), _reports()
    _answers(server, mutate=_nothing_of_the_kind)
    cluster = _cluster(server)
    answers = await cluster.router.mutate([step(b"a"), step(b"b")], cluster.deadline())
    for answer in answers:
        assert isinstance(answer, ExecutionUnknown)
        assert answer.retry is Retry.UNKNOWN
        assert "a bug in the client" in answer.message
        assert answer.where == "a:1"
    assert [type(report) for report in reports] == [AttributeError]


async def test_a_bug_in_a_call_fails_its_reads_at_once() -> None:
    server, reports = Server(), _reports()
    _answers(server, read=_nothing_of_the_kind)
    cluster = _cluster(server)
    with pytest.raises(InvariantViolation, match="a bug in the client"):
        await cluster.router.read([row_request(b"a")], cluster.deadline())
    assert cluster.clock.monotonic_seconds() < 0.1
    assert reports


async def test_a_read_that_breaks_its_call_fails_alone() -> None:
    server, reports = Server(), _reports()
    cluster = _cluster(server)
    broken = row_request(b"broken")
    reading = [
        asyncio.ensure_future(cluster.router.read([one], cluster.deadline()))
        for one in (row_request(b"a"), broken, row_request(b"z"))
    ]
    (pending,) = (one for one in cluster.router._open if one.entries[0].row == b"broken")  # type: ignore[union-attr]
    pending.entries[0].message = "no message"  # type: ignore[union-attr]
    first, failed, last = await asyncio.gather(*reading, return_exceptions=True)
    assert isinstance(failed, InvariantViolation)
    for answer in (first, last):
        assert isinstance(answer, list)
        assert answer[0].found[b"c"].commit_timestamp == 7
    assert {type(report) for report in reports} == {TypeError}


@pytest.mark.parametrize("seconds", [0.0, 0.005])
async def test_a_server_is_called_on_although_other_code_has_cancelled_all_calls_to_it(
    seconds: float,
) -> None:
    """Before their first step, or while they wait. Counted as in flight for ever, four of them
    would be the last ones."""
    server = Server()
    cluster = _cluster(server)
    for _ in range(4):
        answers = cluster.router.mutate([step(b"a")], cluster.deadline())
        reading = cluster.router.read([row_request(b"a")], cluster.deadline())
        await asyncio.sleep(seconds)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        (answer,) = await answers
        assert isinstance(answer, Unavailable)
        with pytest.raises(Unavailable):
            await reading
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]
    await asyncio.sleep(5.0)
    assert cluster.searches == 0, "it has not fallen silent"
