"""Many rows share few calls, and no row enters above the limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    InvalidArgument,
    InvariantViolation,
    NotReady,
    Overloaded,
    PercolatorError,
    Retry,
    SchemaChanged,
    SnapshotTooOld,
    StoreFault,
    StoreUnusable,
    TabletMoved,
    Unavailable,
    UnknownServer,
)
from percolator.limits import MEBIBYTE, Limits
from percolator.routing.cells import APPLIED, Answer, CellMutation, FoundCell, RowResult
from percolator.routing.lanes import CellAnswer
from percolator.routing.router import Dispatcher
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import Cell
from percolator.wire.status import to_detail
from tests.unit.routing.tablet_servers import Cluster, Server, failure, row_request, step, tablet


@pytest.fixture
@asynccontextmanager
async def server() -> AsyncIterator[Server]:
    """A tablet server that applies all mutations."""
    yield Server()


def _cluster(server: Server, limits: Limits | None = None) -> Cluster:
    cluster = Cluster({"a:1": server}, limits)
    cluster.tablets.learn([tablet("a:1")])
    return cluster


async def test_rows_of_one_turn_of_the_loop_leave_in_one_call(server: Server) -> None:
    cluster = _cluster(server)
    pending = [cluster.router.mutate([step(b"%d" % i)], cluster.deadline()) for i in range(100)]
    assert await asyncio.gather(*pending) == [[APPLIED]] * 100
    assert len(server.mutate_calls) == 1


async def test_rows_that_come_while_all_calls_are_in_flight_form_the_next_one(
    server: Server,
) -> None:
    cluster = _cluster(server)

    async def one(i: int) -> None:
        await asyncio.sleep(i * 0.0001)
        await cluster.router.mutate([step(b"%d" % i)], cluster.deadline())

    await asyncio.gather(*(one(i) for i in range(100)))
    # The first four leave in three calls; the others share the calls that leave after 10 ms.
    assert len(server.mutate_calls) <= 6
    assert sorted(server.rows_mutated()) == sorted(b"%d" % i for i in range(100))


async def test_a_further_call_carries_as_many_rows_as_those_in_flight() -> None:
    server = Server(seconds=1.0)
    cluster = _cluster(server, Limits(server_calls_max=6))

    async def one(i: int) -> None:
        await asyncio.sleep(i * 0.01)
        await cluster.router.mutate([step(b"%d" % i)], cluster.deadline())

    await asyncio.gather(*(one(i) for i in range(30)))
    sizes = [len(batch.mutations) for call in server.mutate_calls for batch in call.batches]
    assert (sizes[:5], sum(sizes)) == ([1, 1, 2, 4, 8], 30)
    assert (
        cluster.clock.monotonic_seconds() < 2.5
    )  # rows that waited for a call left with the next one


@pytest.mark.parametrize(
    "rows", [pytest.param(30, id="full calls"), pytest.param(1, id="a lone caller")]
)
async def test_a_full_call_or_a_lone_caller_waits_for_one_round_trip(rows: int) -> None:
    cluster = _cluster(Server(seconds=1.0), Limits(batch_rows_max=10, server_calls_max=4))
    await cluster.router.mutate([step(b"%d" % i) for i in range(rows)], cluster.deadline())
    assert cluster.clock.monotonic_seconds() == pytest.approx(1.0)


async def test_calls_and_batches_are_bounded(server: Server) -> None:
    cluster = _cluster(server, Limits(batch_rows_max=10, server_calls_max=4))
    steps = [step(b"%d" % i) for i in range(300)]
    reads = [row_request(b"%d" % i) for i in range(300)]
    await asyncio.gather(
        cluster.router.mutate(steps, cluster.deadline()),
        cluster.router.read(reads, cluster.deadline()),
    )
    assert server.in_flight_max == 4
    sizes = [len(batch.mutations) for call in server.mutate_calls for batch in call.batches]
    assert max(sizes) == 10


async def test_a_batch_is_bounded_in_bytes(server: Server) -> None:
    cluster = _cluster(server, Limits(batch_bytes_max=MEBIBYTE))
    steps = [step(b"%d" % i, size=400_000) for i in range(6)]
    await cluster.router.mutate(steps, cluster.deadline())
    assert [len(call.batches[0].mutations) for call in server.mutate_calls] == [2, 2, 2]


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        (Limits(batch_bytes_max=1000, server_bytes_max=2000), [step(b"a", size=5000)]),
        (Limits(server_rows_max=10, batch_rows_max=5), [step(b"%d" % i) for i in range(100)]),
    ],
    ids=["a value larger than a batch, sent alone", "more rows than the queue, in portions"],
)
async def test_what_is_larger_than_the_limits_passes(
    server: Server, limits: Limits, steps: list[CellMutation]
) -> None:
    cluster = _cluster(server, limits)
    assert await cluster.router.mutate(steps, cluster.deadline()) == [APPLIED] * len(steps)


async def test_neither_reads_nor_mutations_take_all_calls() -> None:
    server = Server(seconds=1.0)
    cluster = _cluster(server, Limits(batch_rows_max=1))
    mutating = asyncio.ensure_future(
        cluster.router.mutate([step(b"%d" % i) for i in range(50)], cluster.deadline(60))
    )
    await asyncio.sleep(0.1)
    await cluster.router.read([row_request(b"a")], cluster.deadline())
    assert cluster.clock.monotonic_seconds() < 1.2
    mutating.cancel()


async def test_above_the_limits_callers_wait_until_their_deadline_and_nothing_is_sent() -> None:
    server = Server(seconds=3.0)
    cluster = _cluster(server, Limits(server_rows_max=5, batch_rows_max=5))
    first = asyncio.ensure_future(
        cluster.router.mutate([step(b"%d" % i) for i in range(5)], cluster.deadline())
    )
    (late,) = await cluster.router.mutate([step(b"late")], cluster.deadline(1.0))
    assert failure(late) == (DeadlineExceeded, Retry.SAFE)
    assert await first == [APPLIED] * 5
    await asyncio.sleep(5)
    assert b"late" not in server.rows_mutated()


async def test_callers_that_wait_for_room_enter_when_there_is_some() -> None:
    server = Server(seconds=0.5)
    cluster = _cluster(server, Limits(server_rows_max=5, batch_rows_max=5))
    answers = await asyncio.gather(
        *(cluster.router.mutate([step(b"%d" % i)], cluster.deadline()) for i in range(23))
    )
    assert answers == [[APPLIED]] * 23


async def test_an_overloaded_tablet_is_left_alone_but_no_other_one(server: Server) -> None:
    cluster = Cluster({"a:1": server})
    cluster.tablets.learn([tablet("a:1", b"", b"m"), tablet("a:1", b"m", b"", tablet_id=2)])
    until = cluster.clock.monotonic_seconds() + 2.0

    def refuse(target: pb.TabletTarget, rows: list[bytes]) -> PercolatorError | None:
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


async def test_one_bad_row_does_not_fail_other_callers_rows_in_its_batch(server: Server) -> None:
    def refuse(target: pb.TabletTarget, rows: list[bytes]) -> PercolatorError | None:
        return InvalidArgument("row", "bad") if b"bad" in rows else None

    server.refuse_batch = refuse
    cluster = _cluster(server)
    rows = [b"a", b"bad", b"c"]
    answers = await asyncio.gather(
        *(cluster.router.mutate([step(row)], cluster.deadline()) for row in rows)
    )
    assert [answer[0] for answer in answers[::2]] == [APPLIED, APPLIED]
    assert isinstance(answers[1][0], InvalidArgument)


async def test_rows_of_a_cancelled_caller_are_not_sent() -> None:
    server = Server(seconds=1.0)
    cluster = _cluster(server, Limits(batch_rows_max=1))
    pending = [
        asyncio.ensure_future(cluster.router.mutate([step(b"%d" % i)], cluster.deadline()))
        for i in range(5)
    ]
    await asyncio.sleep(0.1)
    for one in pending:
        one.cancel()
    await asyncio.sleep(5.0)
    assert len(server.mutate_calls) == 3


async def test_closing_leaves_no_caller_waiting() -> None:
    cluster = _cluster(Server(seconds=1e6))
    pending = asyncio.ensure_future(cluster.router.mutate([step(b"a")], cluster.deadline(1e9)))
    await asyncio.sleep(0.1)
    await cluster.router.close()
    (answer,) = await pending
    assert failure(answer)[1] is Retry.UNKNOWN


async def _about_to_call(cluster: Cluster) -> tuple[Dispatcher, asyncio.Future[list[Answer]]]:
    """A call that has been assembled, in the moment before it begins."""
    await cluster.router.mutate([step(b"first")], cluster.deadline())
    (dispatcher,) = cluster.router._dispatchers
    pending = asyncio.ensure_future(
        cluster.router.mutate([step(b"a"), step(b"b"), step(b"c")], cluster.deadline())
    )
    for _ in range(10):  # a few turns of the loop are enough
        if not dispatcher._in_flight:
            await asyncio.sleep(0)
    assert dispatcher._in_flight
    assert not any(call.begun for call in dispatcher._in_flight)
    return dispatcher, pending


async def test_a_call_that_is_given_up_before_it_begins_holds_up_no_later_one() -> None:
    """Otherwise, the next calls would wait for one that never ends, until as many rows had come."""
    cluster = _cluster(Server())
    dispatcher, pending = await _about_to_call(cluster)
    dispatcher.leave(lambda _: True)
    assert len(await pending) == 3
    assert await cluster.router.mutate([step(b"z")], cluster.deadline()) == [APPLIED]
    assert dispatcher.silent_seconds() == 0.0


async def test_closing_before_a_call_begins_leaves_no_caller_waiting() -> None:
    cluster = _cluster(Server())
    _, pending = await _about_to_call(cluster)
    began = cluster.clock.monotonic_seconds()
    await cluster.router.close()
    assert all(isinstance(answer, Unavailable) for answer in await pending)
    assert cluster.clock.monotonic_seconds() == began


async def test_the_turn_of_a_caller_cancelled_at_that_moment_passes_to_the_next() -> None:
    cluster = _cluster(Server(), Limits(server_rows_max=1, batch_rows_max=1))
    first = asyncio.ensure_future(cluster.router.mutate([step(b"a")], cluster.deadline()))
    dispatcher = cluster.router._dispatchers.get("a:1")
    second, third = (asyncio.create_task(dispatcher.capacity(1)) for _ in range(2))
    # Between being woken and continuing.
    first.add_done_callback(lambda _: second.cancel())
    assert await first == [APPLIED]
    await asyncio.wait_for(third, 1.0)
    assert second.cancelled()


async def test_a_turn_that_comes_with_the_deadline_passes_to_the_next_caller() -> None:
    cluster = _cluster(Server(seconds=1.0), Limits(server_rows_max=1, batch_rows_max=1))
    first = asyncio.ensure_future(cluster.router.mutate([step(b"a")], cluster.deadline()))
    second = asyncio.ensure_future(cluster.router.mutate([step(b"b")], cluster.deadline()))
    third = asyncio.ensure_future(cluster.router.mutate([step(b"c")], cluster.deadline(5.0)))
    await asyncio.sleep(0.5)
    late = next(pending for pending in cluster.router._open if pending.entries[0].row == b"b")  # type: ignore[union-attr]
    first.add_done_callback(lambda _: late.expire())
    await first
    (answer,) = await second
    assert isinstance(answer, DeadlineExceeded)
    assert await third == [APPLIED]


# The fast path for a single cell behaves like the general path for many rows.


async def _read(cluster: Cluster, row: bytes = b"a", seconds: float = 10.0) -> CellAnswer:
    return await cluster.router.read_cell(1, row, b"c", 7, cluster.deadline(seconds))


async def _read_row(cluster: Cluster, row: bytes = b"a", seconds: float = 10.0) -> CellAnswer:
    (answer,) = await cluster.router.read([row_request(row)], cluster.deadline(seconds))
    return answer.found[b"c"]


both_paths = pytest.mark.parametrize("read", [_read, _read_row], ids=["one cell", "rows"])


class Answering(Server):
    """Answers reads as a test wants."""

    def __init__(self, answer: pb.ReadBatchResult) -> None:
        super().__init__()
        self.answer = answer

    async def read(self, request: pb.ReadRequest) -> pb.ReadResponse:
        await super().read(request)
        return pb.ReadResponse(batches=[self.answer])


async def test_a_cell_is_found(server: Server) -> None:
    assert await _read(_cluster(server)) == FoundCell(7, b"value of a")
    cells = server.read_calls[0].batches[0].cells
    assert (list(cells.rows), list(cells.columns), list(cells.timestamps)) == ([b"a"], [b"c"], [7])
    assert await _read(_cluster(Answering(pb.ReadBatchResult(reads=1)))) is None


async def test_a_lock_in_the_way_is_reported() -> None:
    lock = Cell(row=b"a", column=b"c", value=b"lock")
    locked = pb.ReadBatchResult(reads=1, locks=[pb.BlockingLock(read=0, lock=lock)])
    answer = await _read(_cluster(Answering(locked)))
    assert isinstance(answer, RowResult)
    assert list(answer.locks) == [lock]


async def test_cells_and_rows_share_a_call_and_get_their_own_answers(server: Server) -> None:
    cluster = _cluster(server)
    deadline = cluster.deadline()
    cells = [cluster.router.read_cell(1, b"%d" % i, b"c", 7, deadline) for i in range(5)]
    rows = cluster.router.read([row_request(b"x"), row_request(b"y")], deadline)
    assert await asyncio.gather(*cells) == [FoundCell(7, b"value of %d" % i) for i in range(5)]
    answers = await rows
    assert [answer.found[b"c"].value for answer in answers] == [b"value of x", b"value of y"]
    assert len(server.read_calls) == 1


async def test_one_refused_read_does_not_fail_the_others() -> None:
    old = SnapshotTooOld("too old", timestamp=7, safe_point=9)
    found = pb.FoundCells(reads=[0], columns=[b"c"], commit_timestamps=[3], values=[b"v"])
    refused = [pb.RefusedRead(read=1, error=to_detail(old))]
    cluster = _cluster(Answering(pb.ReadBatchResult(reads=2, refused=refused, found=found)))
    good, bad = await asyncio.gather(
        _read(cluster, b"a"), _read(cluster, b"b"), return_exceptions=True
    )
    assert good == FoundCell(3, b"v")
    assert isinstance(bad, SnapshotTooOld)


@both_paths
@pytest.mark.parametrize(
    "error",
    [
        TabletMoved("gone", tablet_id=1, epoch=1),
        SchemaChanged("newer", table_id=1, schema_version=4),
        NotReady("starting"),
    ],
)
async def test_a_read_that_was_not_executed_is_sent_again(
    server: Server, error: PercolatorError, read: Callable[..., Awaitable[CellAnswer]]
) -> None:
    answers: list[PercolatorError | None] = [error, None]
    server.refuse_batch = lambda target, rows: answers.pop(0)
    cluster = _cluster(server)
    cluster.now_at = [tablet("a:1", epoch=2)]
    assert await read(cluster) == FoundCell(7, b"value of a")


@both_paths
async def test_a_read_whose_answer_is_lost_is_sent_again(
    server: Server, read: Callable[..., Awaitable[CellAnswer]]
) -> None:
    server.answers_lost = True
    cluster = _cluster(server)
    reading = asyncio.ensure_future(read(cluster))
    await asyncio.sleep(0.5)
    server.answers_lost = False
    assert await reading == FoundCell(7, b"value of a")


@both_paths
async def test_a_read_of_a_silent_server_ends_with_the_deadline_and_is_safe_to_retry(
    read: Callable[..., Awaitable[CellAnswer]],
) -> None:
    cluster = _cluster(Server(seconds=1e6))
    with pytest.raises(DeadlineExceeded) as caught:
        await read(cluster, seconds=2.0)
    assert caught.value.retry is Retry.SAFE
    assert cluster.clock.monotonic_seconds() == pytest.approx(2.0, abs=0.1)


async def test_without_room_a_cell_waits_for_its_turn() -> None:
    cluster = _cluster(Server(seconds=0.5), Limits(server_rows_max=2, batch_rows_max=2))
    found = await asyncio.gather(*(_read(cluster, b"%d" % i) for i in range(9)))
    assert found == [FoundCell(7, b"value of %d" % i) for i in range(9)]


# Calls that fail, are not answered, or are answered with nonsense: what their rows hear.


async def test_a_server_that_is_not_ready_is_retried(server: Server) -> None:
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


async def test_a_mutation_without_an_answer_is_left_to_its_sender(server: Server) -> None:
    server.answers_lost = True
    cluster = _cluster(server)
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline())
    assert (failure(answer), len(server.mutate_calls)) == ((Unavailable, Retry.UNKNOWN), 1)


async def test_a_silent_server_leaves_a_mutation_unknown() -> None:
    cluster = _cluster(Server(seconds=1e6))
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline(2.0))
    assert failure(answer) == (DeadlineExceeded, Retry.UNKNOWN)
    assert cluster.clock.monotonic_seconds() == pytest.approx(2.0, abs=0.1)


async def test_a_full_disk_is_reported_at_once(server: Server) -> None:
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


def _one_less(response: pb.MutateResponse) -> pb.MutateResponse:
    response.batches[0].mutations -= 1
    return response


def _changed(change: Callable[[Any], object]) -> Callable[[Any], object]:
    """Changes the answer about the first tablet."""

    def malform(response: Any) -> object:
        change(response.batches[0])
        return response

    return malform


@pytest.mark.parametrize(
    "malform",
    [
        lambda response: type(response)(),
        _one_less,
        _changed(lambda batch: batch.unapplied.add(mutation=2)),
        _changed(lambda batch: batch.Clear()),
        _changed(lambda batch: [batch.unapplied.add(mutation=number) for number in range(2)]),
    ],
    ids=["no batches", "one less", "one that was not sent", "an empty batch", "no outcome"],
)
async def test_mutations_whose_answer_is_malformed_may_have_been_executed(
    server: Server,
    malform: Callable[[pb.MutateResponse], object],
) -> None:
    _answers(server, mutate=malform)
    cluster = _cluster(server)
    answers = await cluster.router.mutate([step(b"a"), step(b"b")], cluster.deadline(1.0))
    assert [failure(answer)[1] for answer in answers] == [Retry.UNKNOWN] * 2
    assert len(server.mutate_calls) == 1
    assert cluster.clock.monotonic_seconds() < 0.5


@pytest.mark.parametrize(
    "malform",
    [
        _changed(lambda batch: batch.found.values.pop()),
        _changed(lambda batch: batch.found.reads.__setitem__(0, 99)),
        _changed(lambda batch: batch.Clear()),  # which must not mean that nothing exists
    ],
    ids=["a value less", "a row that was not asked for", "nothing found"],
)
async def test_malformed_answers_to_reads_leave_no_call_behind(
    server: Server,
    malform: Callable[[pb.ReadResponse], object],
) -> None:
    correct = server.read
    _answers(server, read=malform)
    cluster = _cluster(server, Limits(server_calls_max=2, server_rows_max=2))
    for _ in range(3):
        with pytest.raises(DeadlineExceeded, match="malformed"):
            await cluster.router.read([row_request(b"a")], cluster.deadline(1.0))
    server.read = correct  # type: ignore[method-assign]
    await asyncio.sleep(5.0)
    assert await _read_row(cluster) == FoundCell(7, b"value of a")


def _reports() -> list[BaseException]:
    """Errors that the event loop is told of from now on."""
    found: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: found.append(context["exception"])
    )
    return found


async def test_a_bug_in_a_call_is_reported_and_its_mutations_may_have_been_executed() -> None:
    server, reports = Server(), _reports()
    _answers(server, mutate=lambda _: "no response")
    cluster = _cluster(server)
    for answer in await cluster.router.mutate([step(b"a"), step(b"b")], cluster.deadline()):
        assert isinstance(answer, ExecutionUnknown)
        assert (answer.retry, answer.where) == (Retry.UNKNOWN, "a:1")
        assert "a bug in the client" in answer.message
    assert [type(report) for report in reports] == [AttributeError]


async def test_a_bug_in_a_call_fails_its_reads_at_once() -> None:
    server, reports = Server(), _reports()
    _answers(server, read=lambda _: "no response")
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
    server: Server,
    seconds: float,
) -> None:
    """Before their first step, or while they wait. Counted as in flight for ever, four of them
    would be the last ones."""
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
