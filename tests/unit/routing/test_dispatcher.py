"""Many rows share few calls, and no row enters above the limits."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    Overloaded,
    PercolatorError,
    Retry,
    Unavailable,
)
from percolator.limits import MEBIBYTE, Limits
from percolator.routing.cells import APPLIED, Answer
from percolator.routing.router import Dispatcher
from percolator.v1 import tabletserver_pb2 as pb

from .tablet_servers import Cluster, Server, row_request, step, tablet


def _cluster(server: Server, limits: Limits | None = None) -> Cluster:
    cluster = Cluster({"a:1": server}, limits)
    cluster.tablets.learn([tablet("a:1")])
    return cluster


async def test_rows_of_one_turn_of_the_loop_leave_in_one_call() -> None:
    server = Server()
    cluster = _cluster(server)
    pending = [cluster.router.mutate([step(b"%d" % i)], cluster.deadline()) for i in range(100)]
    answers = await asyncio.gather(*pending)
    assert answers == [[APPLIED]] * 100
    assert len(server.mutate_calls) == 1


async def test_rows_that_come_while_all_calls_are_in_flight_form_the_next_one() -> None:
    server = Server()
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
    assert sizes[:5] == [1, 1, 2, 4, 8]
    assert sum(sizes) == 30
    assert (
        cluster.clock.monotonic_seconds() < 2.5
    )  # rows that waited for a call left with the next one


async def test_a_full_call_does_not_wait_for_others() -> None:
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
    reads = [row_request(b"%d" % i) for i in range(300)]
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


async def test_a_value_larger_than_a_batch_is_sent_alone() -> None:
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
    assert isinstance(late, DeadlineExceeded)
    assert late.retry is Retry.SAFE
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


async def test_a_request_larger_than_the_queue_passes_in_portions() -> None:
    cluster = _cluster(Server(), Limits(server_rows_max=10, batch_rows_max=5))
    answers = await cluster.router.mutate([step(b"%d" % i) for i in range(100)], cluster.deadline())
    assert answers == [APPLIED] * 100


async def test_an_overloaded_tablet_is_left_alone_but_no_other_one() -> None:
    server = Server()
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


async def test_one_bad_row_does_not_fail_other_callers_rows_in_its_batch() -> None:
    server = Server()

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
    assert isinstance(answer, PercolatorError)
    assert answer.retry is Retry.UNKNOWN


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
    second, third = (asyncio.create_task(dispatcher.room(1)) for _ in range(2))
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
