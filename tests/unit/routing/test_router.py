"""Rows find their tablets, wherever these have moved."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.errors import (
    DeadlineExceeded,
    PercolatorError,
    Retry,
    SchemaChanged,
    SchemaError,
    TabletLocation,
    Unavailable,
)
from percolator.limits import Limits
from percolator.routing.catalog import TabletMap
from percolator.routing.cells import APPLIED, FoundCell
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import frames
from tests.unit.routing.tablet_servers import (
    Cluster,
    Server,
    cancelled_while_it_waits,
    failure,
    moved,
    row_request,
    step,
    tablet,
)


async def test_rows_of_one_batch_go_to_different_servers_after_a_split() -> None:
    old, new = Server(), Server()
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.tablets.learn([tablet("a:1")])
    children = (
        tablet("a:1", b"", b"m", tablet_id=2),
        tablet("b:1", b"m", b"", tablet_id=3),
    )
    old.refuse_batch = lambda target, rows: moved(*children) if target.tablet_id == 1 else None
    answers = await cluster.router.mutate([step(b"a"), step(b"z")], cluster.deadline())
    assert (answers, new.rows_mutated()) == ([APPLIED, APPLIED], [b"z"])
    assert cluster.searches == 0


async def test_after_a_server_that_knows_nothing_the_master_is_asked() -> None:
    old, new = Server(), Server()
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.tablets.learn([tablet("a:1")])
    cluster.now_at = [tablet("b:1", epoch=2)]
    old.refuse_batch = lambda target, rows: moved()
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]
    assert new.rows_mutated() == [b"a"]


async def test_rows_of_an_unknown_tablet_wait_until_it_is_known() -> None:
    cluster = Cluster({"a:1": Server()})
    router, deadline = cluster.router, cluster.deadline()
    asked = router.mutate([step(b"a")], deadline), router.read_cell(1, b"a", b"c", 7, deadline)
    pending = asyncio.gather(*asked)
    await asyncio.sleep(2.0)
    cluster.now_at = [tablet("a:1")]
    written, found = await pending
    assert (written, found) == ([APPLIED], FoundCell(7, b"value of a"))


async def test_mutations_of_a_tablet_that_never_appears_are_definitely_not_executed() -> None:
    cluster = Cluster({})
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline(2.0))
    assert isinstance(answer, DeadlineExceeded)
    assert answer.retry is Retry.SAFE
    assert "no tablet is known" in answer.message
    with pytest.raises(DeadlineExceeded):
        await cluster.router.read([row_request(b"a")], cluster.deadline(2.0))


async def test_a_missing_table_is_a_schema_error() -> None:
    cluster = Cluster({})
    cluster.search_error = SchemaError("there is no such table")
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline())
    assert isinstance(answer, SchemaError)
    for reading in (
        cluster.router.read([row_request(b"a")], cluster.deadline()),
        cluster.router.read_cell(1, b"a", b"c", 7, cluster.deadline()),
    ):
        with pytest.raises(SchemaError):
            await reading


async def test_a_dead_servers_reads_are_answered_by_the_next_owner() -> None:
    old, new = Server(), Server()
    old.down = True
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.tablets.learn([tablet("a:1")])
    pending = asyncio.ensure_future(cluster.router.read([row_request(b"a")], cluster.deadline()))
    await asyncio.sleep(1.0)
    cluster.now_at = [tablet("b:1", epoch=2)]
    (answer,) = await pending
    assert answer.found[b"c"].value == b"value of a"


async def test_a_dead_servers_mutations_trigger_a_search_for_the_next_owner() -> None:
    old, new = Server(), Server()
    old.down = True
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.tablets.learn([tablet("a:1")])
    cluster.now_at = [tablet("b:1", epoch=2)]
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline())
    assert isinstance(answer, PercolatorError)
    await asyncio.sleep(0.1)
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]


def _has_schema_5(target: pb.TabletTarget, rows: list[bytes]) -> PercolatorError | None:
    if target.schema_version == 5:
        return None
    return SchemaChanged("newer", table_id=1, schema_version=5)


async def test_steps_that_mean_the_same_in_every_schema_follow_the_tablets_version() -> None:
    server = Server()
    server.refuse_batch = _has_schema_5
    cluster = Cluster({"a:1": server})
    cluster.tablets.learn([tablet("a:1")])
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]
    assert await cluster.router.read([row_request(b"a")], cluster.deadline())
    assert len(server.mutate_calls) == 2


async def test_steps_built_for_a_schema_are_returned_when_it_has_changed() -> None:
    server = Server()
    server.refuse_batch = _has_schema_5
    cluster = Cluster({"a:1": server})
    cluster.tablets.learn([tablet("a:1")])
    old, new = await cluster.router.mutate(
        [step(b"a", schema_version=4), step(b"b", schema_version=5)], cluster.deadline()
    )
    assert isinstance(old, SchemaChanged)
    assert new is APPLIED


# ---------------------------------------------------------------------------- scans


async def test_a_read_cancelled_before_its_tablet_is_known_leaves_no_exception_behind() -> None:
    """conftest.py fails the test if the deadline sets one that nothing retrieves."""
    cluster = Cluster({})
    router, deadline = cluster.router, cluster.deadline(2.0)
    await cancelled_while_it_waits(router.read([row_request(b"a")], deadline))
    await cancelled_while_it_waits(router.read_cell(1, b"a", b"c", 7, deadline))
    await asyncio.sleep(3.0)


async def test_a_request_cancelled_before_its_first_step_leaves_no_exception_behind() -> None:
    """A coroutine that is cancelled so early never runs, and could not give up its future."""
    cluster = Cluster({})
    router, deadline = cluster.router, cluster.deadline(2.0)
    await cancelled_while_it_waits(router.read([row_request(b"a")], deadline), 0.0)
    await cancelled_while_it_waits(router.read_cell(1, b"a", b"c", 7, deadline), 0.0)
    await cancelled_while_it_waits(router.mutate([step(b"a")], deadline), 0.0)
    await asyncio.sleep(3.0)
    assert not router._open


async def test_closing_answers_those_that_still_look_for_their_tablet() -> None:
    cluster = Cluster({})
    writing = asyncio.ensure_future(cluster.router.mutate([step(b"a")], cluster.deadline(1e9)))
    reading = asyncio.ensure_future(cluster.router.read([row_request(b"a")], cluster.deadline(1e9)))
    await asyncio.sleep(0.5)
    await cluster.router.close()
    (answer,) = await writing
    assert failure(answer)[1] is Retry.SAFE
    with pytest.raises(DeadlineExceeded, match="closed"):
        await reading


async def test_a_bug_in_the_search_for_a_tablet_reaches_the_caller() -> None:
    cluster = Cluster({})
    cluster.search_error = LookupError("a bug")
    with pytest.raises(LookupError):
        await cluster.router.read([row_request(b"a")], cluster.deadline())


# The map finds rows, and learns only what is newer.


def _map(*locations: TabletLocation) -> TabletMap:
    tablets = TabletMap()
    tablets.learn(locations)
    return tablets


def test_a_row_is_in_the_tablet_whose_range_holds_it() -> None:
    tablets = _map(tablet("a:1", b"", b"m"), tablet("b:1", b"m", b"", tablet_id=2))
    found = [tablets.locate(1, row) for row in (b"", b"l\xff", b"m", b"z")]
    assert [location and location.address for location in found] == ["a:1", "a:1", "b:1", "b:1"]
    assert tablets.locate(2, b"a") is None


def test_the_last_rows_below_an_end_are_in_the_tablet_before_it() -> None:
    tablets = _map(tablet("a:1", b"", b"m"), tablet("b:1", b"m", b"", tablet_id=2))
    found = [tablets.locate_below(1, end) for end in (b"a", b"m", b"m\x00", b"")]
    assert [location and location.address for location in found] == ["a:1", "a:1", "b:1", "b:1"]


def test_a_row_in_a_gap_is_not_located() -> None:
    tablets = _map(tablet("a:1", b"b", b"d"), tablet("b:1", b"f", b"h", tablet_id=2))
    assert [tablets.locate(1, row) for row in (b"a", b"d", b"e", b"h")] == [None] * 4
    assert [tablets.locate_below(1, end) for end in (b"b", b"e", b"f", b"", b"a")] == [None] * 5


def test_children_take_the_place_of_their_parent() -> None:
    tablets = _map(tablet("a:1"))
    tablets.learn([tablet("a:1", b"", b"m", tablet_id=2), tablet("b:1", b"m", b"", tablet_id=3)])
    assert [location.tablet_id for location in tablets.tablets(1)] == [2, 3]


def test_an_older_epoch_changes_nothing() -> None:
    tablets = _map(tablet("b:1", epoch=3))
    tablets.learn([tablet("a:1", epoch=2)])
    assert [location.address for location in tablets.tablets(1)] == ["b:1"]


def test_a_tablet_without_a_server_leaves_a_gap() -> None:
    tablets = _map(tablet("a:1", epoch=3))
    tablets.learn([tablet("", epoch=4)])
    assert tablets.locate(1, b"row") is None


async def test_for_a_silent_server_each_of_its_tables_is_looked_up_once() -> None:
    asked: list[tuple[int, bytes]] = []

    async def find(table_id: int, row: bytes) -> list[TabletLocation]:
        asked.append((table_id, row))
        return []

    tablets = TabletMap(find)
    tablets.learn(
        [
            tablet("b:1", b"", b"c"),
            tablet("a:1", b"c", b"m", tablet_id=2),
            tablet("a:1", b"m", b"", tablet_id=3),
            TabletLocation(2, 7, 1, b"", b"", "a:1"),
            TabletLocation(3, 8, 1, b"", b"", "b:1"),
        ]
    )
    await tablets.refresh_server("a:1")
    assert sorted(asked) == [(1, b"c"), (2, b"")]


class _Pages:
    """A master that lists two tablets at a time, from the tablet of the row on."""

    def __init__(self, *addresses: str) -> None:
        bounds = [b"", *(bytes([one]) for one in b"bcdefgh"[: len(addresses) - 1]), b""]
        self.now_at = [
            tablet(address, bounds[at], bounds[at + 1], tablet_id=at + 1)
            for at, address in enumerate(addresses)
        ]
        self.asked: list[bytes] = []

    async def find(self, table_id: int, row: bytes) -> list[TabletLocation]:
        self.asked.append(row)
        await asyncio.sleep(0.1)
        return [one for one in self.now_at if not one.end or row < one.end][:2]


async def test_a_caller_shares_only_a_search_that_is_about_its_row() -> None:
    pages = _Pages("a:1", "b:1", "c:1", "d:1", "e:1")
    tablets = TabletMap(pages.find)
    rows = [b"b", b"c", b"a", b"e", b"bb"]
    found = await asyncio.gather(*(tablets.located(1, row) for row in rows))
    assert [one.address for one in found] == ["b:1", "c:1", "a:1", "e:1", "b:1"]
    assert pages.asked == [b"b", b"a", b"e"]


async def test_for_a_silent_server_all_of_its_tablets_are_looked_up() -> None:
    """A master lists the tablets of a large table in pages."""
    pages = _Pages("a:1", "b:1", "a:1", "b:1", "b:1", "b:1", "a:1")
    tablets = TabletMap(pages.find)
    tablets.learn(pages.now_at)
    pages.now_at[-1] = replace(pages.now_at[-1], epoch=2, address="c:1")
    await tablets.refresh_server("a:1")
    assert [one.address for one in tablets.tablets(1)] == [
        *("a:1", "b:1", "a:1", "b:1", "b:1", "b:1", "c:1")
    ]
    assert pages.asked == [b"", b"c", b"g"]


async def test_a_search_that_fails_after_its_caller_was_cancelled_logs_nothing() -> None:
    """conftest.py refuses what the event loop would log."""

    async def find(table_id: int, row: bytes) -> list[TabletLocation]:
        await asyncio.sleep(1.0)
        raise Unavailable("no master answers")

    tablets = TabletMap(find)
    for leaves_after in (0.5, 1.0):
        asking = asyncio.create_task(tablets.refresh(1, b"row"))
        await asyncio.sleep(leaves_after)
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.sleep(2.0)
    with pytest.raises(Unavailable):
        await tablets.refresh(1, b"row")


async def test_a_deleted_table_does_not_keep_others_from_being_found() -> None:
    async def find(table_id: int, row: bytes) -> list[TabletLocation]:
        if table_id == 2:
            raise SchemaError("there is no table with the id 2")
        return [tablet("b:1", epoch=3)]

    tablets = TabletMap(find)
    tablets.learn([tablet("a:1", epoch=2), TabletLocation(2, 7, 1, b"", b"", "a:1")])
    await tablets.refresh_server("a:1")
    assert [location.address for location in tablets.tablets(1)] == ["b:1"]
    assert tablets.tablets(2) == []


@given(st.lists(st.binary(max_size=3), min_size=1, max_size=8, unique=True), st.binary(max_size=4))
def test_every_row_of_a_table_without_gaps_is_found(splits: list[bytes], row: bytes) -> None:
    bounds = sorted({b"", *splits})
    ends = [*bounds[1:], b""]
    tablets = _map(
        *(
            tablet("a:1", start, end, tablet_id=index)
            for index, (start, end) in enumerate(zip(bounds, ends, strict=True))
        )
    )
    found = tablets.locate(1, row)
    assert found is not None
    assert found.start <= row
    assert not found.end or row < found.end
    below = tablets.locate_below(1, row)
    if row:
        assert below is not None
        assert below.start < row
        assert not below.end or row <= below.end


async def test_a_search_that_has_just_ended_holds_up_nobody_who_asks_about_other_rows() -> None:
    """Its task is done a turn of the event loop before others hear of that."""
    answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def find(_: int, row: bytes) -> list[TabletLocation]:
        if row == b"a":
            await answered
            return [tablet("a:1", b"", b"m")]
        return [tablet("b:1", b"m", b"", tablet_id=2)]

    tablets = TabletMap(find)

    async def asks_when_the_first_search_ends() -> None:
        await answered
        await tablets.refresh(1, b"z")

    first = asyncio.create_task(tablets.refresh(1, b"a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = asyncio.create_task(asks_when_the_first_search_ends())
    await asyncio.sleep(0)
    answered.set_result(None)
    await asyncio.gather(first, second)
    assert [location.address for location in tablets.tablets(1)] == ["a:1", "b:1"]


class _Row(bytes):
    """A row that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: bytes) -> bool:
        _Row.compared += 1
        return bytes.__lt__(self, other)

    def __le__(self, other: bytes) -> bool:
        _Row.compared += 1
        return bytes.__le__(self, other)

    def __eq__(self, other: object) -> bool:
        _Row.compared += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__


def test_learning_of_a_tablet_takes_no_longer_when_many_others_are_known() -> None:
    """Otherwise clients of a large table stand still while a master tells them where it is now."""
    rows = [_Row(b""), *(_Row(b"%04d" % number) for number in range(1, 2_000)), _Row(b"")]
    known = [
        tablet("a:1", start, end, tablet_id=number)
        for number, (start, end) in enumerate(pairwise(rows), start=1)
    ]
    tablets = _map(*known)
    _Row.compared = 0
    tablets.learn(replace(one, epoch=2, address="b:1") for one in known)
    assert {location.address for location in tablets.tablets(1)} == {"b:1"}
    assert _Row.compared < 100 * len(known)


# A row whose tablet no server has at the moment does not hold up others.


def _half_served() -> Cluster:
    """A server that had two tablets is down, and another one has taken over only the upper."""
    cluster = Cluster({"a:1": Server(), "b:1": Server()})
    cluster.tablets.learn([tablet("a:1", b"", b"m"), tablet("a:1", b"m", b"", tablet_id=2)])
    cluster.servers["a:1"].down = True
    cluster.now_at = [
        tablet("", b"", b"m", epoch=2),
        tablet("b:1", b"m", b"", tablet_id=2, epoch=2),
    ]
    return cluster


async def test_reads_of_one_call_do_not_wait_for_each_others_tablets() -> None:
    cluster = _half_served()
    waiting = asyncio.ensure_future(
        cluster.router.read([row_request(b"a")], cluster.deadline(20.0))
    )
    (answer,) = await cluster.router.read([row_request(b"z")], cluster.deadline(5.0))
    assert answer.found[b"c"].value == b"value of z"
    assert cluster.clock.monotonic_seconds() < 0.5
    cluster.now_at = [tablet("b:1", b"", b"m", epoch=3)]
    (answer,) = await waiting
    assert answer.found[b"c"].value == b"value of a"


async def test_mutations_of_one_request_do_not_wait_for_each_others_tablets() -> None:
    cluster = _half_served()
    cluster.tablets.forget(1)
    writing = asyncio.ensure_future(
        cluster.router.mutate([step(b"a"), step(b"z")], cluster.deadline(5.0))
    )
    await asyncio.sleep(0.5)
    assert cluster.servers["b:1"].rows_mutated() == [b"z"]
    lost, applied = await writing
    assert applied is APPLIED
    assert isinstance(lost, DeadlineExceeded)
    assert lost.retry is Retry.SAFE
    assert "no tablet is known" in str(lost)


async def test_rows_whose_tablets_are_known_do_not_wait_while_no_master_answers() -> None:
    """Nor do those that wait for room wait for it: a search takes seconds then."""
    full, free = Server(seconds=1.0), Server()
    cluster = Cluster({"a:1": full, "b:1": free}, Limits(server_rows_max=1))
    cluster.tablets.learn([tablet("a:1", b"m", b"t"), tablet("b:1", b"t", b"", tablet_id=2)])
    cluster.search_seconds, cluster.search_error = 5.0, Unavailable("no master answers")
    filling = asyncio.ensure_future(cluster.router.mutate([step(b"n")], cluster.deadline()))
    writing = asyncio.ensure_future(
        cluster.router.mutate([step(b"a"), step(b"o"), step(b"z")], cluster.deadline(8.0))
    )
    await asyncio.sleep(0.5)
    assert free.rows_mutated() == [b"z"]
    await asyncio.sleep(2.0)
    assert full.rows_mutated() == [b"n", b"o"]
    assert await filling == [APPLIED]
    lost, *applied = await writing
    assert isinstance(lost, DeadlineExceeded)
    assert applied == [APPLIED] * 2


async def test_many_rows_that_nobody_serves_are_few_questions_to_a_master() -> None:
    cluster = _half_served()
    cluster.tablets.forget(1)
    steps = [step(b"a %d" % number) for number in range(1_000)]
    answers = await cluster.router.mutate(steps, cluster.deadline(5.0))
    assert all(isinstance(answer, DeadlineExceeded) for answer in answers)
    assert cluster.searches < 20


async def test_every_row_of_a_table_that_was_dropped_is_refused_at_once() -> None:
    cluster = _half_served()
    cluster.tablets.forget(1)
    cluster.search_error = SchemaError("there is no such table")
    answers = await cluster.router.mutate([step(b"a"), step(b"z")], cluster.deadline())
    assert [type(answer) for answer in answers] == [SchemaError] * 2
    assert cluster.clock.monotonic_seconds() < 0.1


async def test_reads_of_one_call_do_not_wait_for_room_at_each_others_servers() -> None:
    """The silent server is full, and has taken over a tablet of one that is down."""
    full, free = Server(seconds=10**6), Server()
    cluster = Cluster(
        {"a:1": Server(), "full:1": full, "b:1": free},
        Limits(server_rows_max=2, attempt_seconds_max=60.0),
    )
    cluster.servers["a:1"].down = True
    cluster.tablets.learn(
        [
            tablet("a:1", b"", b"m"),
            tablet("a:1", b"m", b"t", tablet_id=2),
            tablet("full:1", b"t", b"", tablet_id=3),
        ]
    )
    cluster.now_at = [
        tablet("full:1", b"", b"m", epoch=2),
        tablet("b:1", b"m", b"t", tablet_id=2, epoch=2),
        tablet("full:1", b"t", b"", tablet_id=3),
    ]
    for row in (b"y", b"z", b"a"):
        reading = cluster.router.read([row_request(row)], cluster.deadline(20.0))
        asyncio.ensure_future(reading).add_done_callback(lambda done: done.exception())
    (answer,) = await cluster.router.read([row_request(b"n")], cluster.deadline(5.0))
    assert answer.found[b"c"].value == b"value of n"
    with pytest.raises(DeadlineExceeded):
        await cluster.router.read([row_request(b"z")], cluster.deadline(1.0))


async def test_mutations_of_one_request_do_not_wait_for_room_at_each_others_servers() -> None:
    """As the heartbeats of all transactions of a client, which are one request."""
    full, free = Server(seconds=10**6), Server()
    cluster = Cluster({"a:1": full, "b:1": free}, Limits(server_rows_max=1))
    cluster.tablets.learn([tablet("a:1", b"", b"m"), tablet("b:1", b"m", b"", tablet_id=2)])
    cluster.now_at = cluster.tablets.tablets(1)
    filling = asyncio.ensure_future(cluster.router.mutate([step(b"b")], cluster.deadline(20.0)))
    await asyncio.sleep(0.1)
    writing = asyncio.ensure_future(
        cluster.router.mutate([step(b"a"), step(b"z"), step(b"a"), step(b"y")], cluster.deadline())
    )
    await asyncio.sleep(0.5)
    assert free.rows_mutated() == [b"z", b"y"]
    cluster.now_at = [tablet("b:1", b"", b"m", epoch=2)]
    assert await writing == [APPLIED] * 4
    assert cluster.clock.monotonic_seconds() < 3.0
    (unknown,) = await filling
    assert isinstance(unknown, DeadlineExceeded)


# Requests leave a silent server once a master names another one, and wait for a slow one.


def _silent_cluster() -> Cluster:
    """A cluster in which everything was at a:1, which has fallen silent."""
    cluster = Cluster({"a:1": Server(seconds=10**6), "b:1": Server()}, Limits(server_calls_max=2))
    cluster.tablets.learn([tablet("a:1")])
    cluster.now_at = [tablet("a:1")]
    return cluster


async def test_reads_leave_a_silent_server_once_a_master_names_another_one() -> None:
    cluster = _silent_cluster()
    reading = asyncio.ensure_future(cluster.router.read([row_request(b"a")], cluster.deadline()))
    await asyncio.sleep(2.2)
    assert not reading.done()
    cluster.now_at = [tablet("b:1", epoch=2)]
    (answer,) = await reading
    assert answer.found[b"c"].value == b"value of a"
    assert cluster.clock.monotonic_seconds() == pytest.approx(2.5, abs=0.3)


async def test_mutations_sent_to_a_silent_server_are_unknown_once_it_is_replaced() -> None:
    cluster = _silent_cluster()
    cluster.now_at = [tablet("b:1", epoch=2)]
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline())
    assert failure(answer) == (DeadlineExceeded, Retry.UNKNOWN)
    assert cluster.clock.monotonic_seconds() == pytest.approx(1.0, abs=0.2)
    assert cluster.servers["b:1"].rows_mutated() == []


async def test_mutations_not_yet_sent_to_a_silent_server_go_to_its_replacement() -> None:
    """They waited for a call that never came back."""
    cluster = _silent_cluster()
    sent = asyncio.ensure_future(cluster.router.mutate([step(b"a")], cluster.deadline()))
    await asyncio.sleep(0.1)
    waiting = asyncio.ensure_future(cluster.router.mutate([step(b"b")], cluster.deadline()))
    cluster.now_at = [tablet("b:1", epoch=2)]
    assert await waiting == [APPLIED]
    assert cluster.servers["b:1"].rows_mutated() == [b"b"]
    (unknown,) = await sent
    assert isinstance(unknown, DeadlineExceeded)


async def test_a_slow_server_that_keeps_its_tablets_is_waited_for() -> None:
    cluster = _silent_cluster()
    cluster.servers["a:1"].seconds = 3.0
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]
    assert 1 < cluster.searches < 6


async def test_a_slow_server_is_also_waited_for_while_no_master_answers() -> None:
    cluster = _silent_cluster()
    cluster.search_error = DeadlineExceeded("no master answered in time")
    cluster.servers["a:1"].seconds = 3.0
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]


@pytest.mark.parametrize("search_seconds", [0.0, 5.0])
async def test_a_router_is_closed_at_once_while_a_master_is_asked_about_a_silent_server(
    search_seconds: float,
) -> None:
    cluster = _silent_cluster()
    cluster.search_seconds = search_seconds
    reading = asyncio.ensure_future(cluster.router.read([row_request(b"a")], cluster.deadline()))
    await asyncio.sleep(1.2)
    assert cluster.searches == 1
    began = cluster.clock.monotonic_seconds()
    await cluster.router.close()
    assert cluster.clock.monotonic_seconds() == began
    with pytest.raises(Unavailable):
        await reading


# A client keeps nothing for a server long not called, and calls it again if it must.

UNUSED_SECONDS = 5.0


@pytest.fixture(autouse=True)
def _soon_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a call is in progress, deadlines are looked at twenty times a second."""
    monkeypatch.setattr(frames, "UNUSED_SECONDS", UNUSED_SECONDS)


async def _write(cluster: Cluster, row: bytes, seconds: float = 10.0) -> None:
    assert await cluster.router.mutate([step(row)], cluster.deadline(seconds)) == [APPLIED]


def _addresses(cluster: Cluster) -> list[str]:
    return [dispatcher.address for dispatcher in cluster.router._dispatchers]


async def test_a_tablet_that_moves_leaves_nothing_at_its_former_servers() -> None:
    servers = {f"server-{number}:1": Server() for number in range(20)}
    cluster = Cluster(servers)
    for epoch, address in enumerate(servers, start=1):
        cluster.tablets.learn([tablet(address, epoch=epoch)])
        await _write(cluster, b"a")
        await asyncio.sleep(UNUSED_SECONDS + 1.0)
    assert _addresses(cluster) == ["server-19:1"]
    assert cluster.router.calls_sent == cluster.router.rows_sent == 20, "the figures stay"


async def test_a_server_is_called_again_when_a_tablet_comes_back_to_it() -> None:
    cluster = Cluster({"a:1": Server(), "b:1": Server()})
    for epoch, address in enumerate(["a:1", "b:1", "a:1"], start=1):
        cluster.tablets.learn([tablet(address, epoch=epoch)])
        await _write(cluster, b"row %d" % epoch)
        await asyncio.sleep(UNUSED_SECONDS + 1.0)
    assert cluster.servers["a:1"].rows_mutated() == [b"row 1", b"row 3"]
    assert _addresses(cluster) == ["a:1"]


async def test_a_call_in_progress_and_what_waits_behind_it_keep_their_server() -> None:
    slow = Server(seconds=2 * UNUSED_SECONDS)
    servers = {"a:1": slow, "b:1": Server(), "c:1": Server()}
    cluster = Cluster(servers, Limits(attempt_seconds_max=60.0))
    cluster.tablets.learn([tablet("a:1", b"", b"m")])
    writing = asyncio.ensure_future(_write(cluster, b"a", 60.0))
    await asyncio.sleep(1.5 * UNUSED_SECONDS)
    cluster.tablets.learn([tablet("b:1", b"m", b"", tablet_id=2)])
    await _write(cluster, b"z")
    assert _addresses(cluster) == ["a:1", "b:1"]
    await writing
    await asyncio.sleep(UNUSED_SECONDS - 1.0)
    cluster.tablets.learn([tablet("c:1", b"m", b"", tablet_id=2, epoch=2)])
    await _write(cluster, b"z")
    assert "a:1" in _addresses(cluster), "the time counts from the last answer"
