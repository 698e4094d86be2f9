"""Rows find their tablets, wherever these have gone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from percolator.errors import (
    DeadlineExceeded,
    PercolatorError,
    Retry,
    SchemaChanged,
    SchemaError,
    TabletLocation,
    TabletMoved,
)
from percolator.limits import Limits
from percolator.v1 import tabletserver_pb2 as wire
from percolator.v1.cells_pb2 import RowRange
from percolator.wire.questions import APPLIED, RangePage, RangeQuestion
from percolator.wire.status import to_detail

from .tablet_servers import Cluster, Server, question, step, tablet


def _moved(*locations: TabletLocation) -> TabletMoved:
    return TabletMoved("not here", tablet_id=1, epoch=1, locations=locations)


async def test_rows_of_one_batch_go_separate_ways_after_a_split() -> None:
    old, new = Server(), Server()
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.tablets.learn([tablet("a:1")])
    children = (
        tablet("a:1", b"", b"m", tablet_id=2),
        tablet("b:1", b"m", b"", tablet_id=3),
    )
    old.refuse_batch = lambda target, rows: _moved(*children) if target.tablet_id == 1 else None
    answers = await cluster.router.mutate([step(b"a"), step(b"z")], cluster.deadline())
    assert answers == [APPLIED, APPLIED]
    assert new.rows_mutated() == [b"z"]
    assert cluster.searches == 0


async def test_a_server_that_knows_nothing_sends_us_to_the_master() -> None:
    old, new = Server(), Server()
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.tablets.learn([tablet("a:1")])
    cluster.now_at = [tablet("b:1", epoch=2)]
    old.refuse_batch = lambda target, rows: _moved()
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]
    assert new.rows_mutated() == [b"a"]


async def test_rows_of_an_unknown_tablet_wait_until_it_is_known() -> None:
    cluster = Cluster({"a:1": Server()})
    asked = asyncio.ensure_future(cluster.router.mutate([step(b"a")], cluster.deadline()))
    await asyncio.sleep(2.0)
    cluster.now_at = [tablet("a:1")]
    assert await asked == [APPLIED]


async def test_a_tablet_that_never_appears_is_definitely_not_executed() -> None:
    cluster = Cluster({})
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline(2.0))
    assert isinstance(answer, DeadlineExceeded)
    assert answer.retry is Retry.SAFE
    assert "no tablet is known" in answer.message
    with pytest.raises(DeadlineExceeded):
        await cluster.router.read([question(b"a")], cluster.deadline(2.0))


async def test_a_table_that_does_not_exist_is_said_so() -> None:
    cluster = Cluster({})

    async def find(table_id: int, row: bytes) -> list[TabletLocation]:
        raise SchemaError("there is no such table")

    cluster.tablets._find = find
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline())
    assert isinstance(answer, SchemaError)
    with pytest.raises(SchemaError):
        await cluster.router.read([question(b"a")], cluster.deadline())


async def test_a_dead_servers_reads_are_answered_by_the_next_owner() -> None:
    old, new = Server(), Server()
    old.down = True
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.tablets.learn([tablet("a:1")])
    asked = asyncio.ensure_future(cluster.router.read([question(b"a")], cluster.deadline()))
    await asyncio.sleep(1.0)
    cluster.now_at = [tablet("b:1", epoch=2)]
    (answer,) = await asked
    assert answer.found[b"c"].value == b"value of a"


async def test_a_dead_servers_mutations_make_us_look_for_the_next_owner() -> None:
    old, new = Server(), Server()
    old.down = True
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.tablets.learn([tablet("a:1")])
    cluster.now_at = [tablet("b:1", epoch=2)]
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline())
    assert isinstance(answer, PercolatorError)
    await asyncio.sleep(0.1)
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]


async def test_steps_that_mean_the_same_in_every_schema_follow_the_tablets_version() -> None:
    server = Server()

    def refuse(target: wire.TabletTarget, rows: list[bytes]) -> PercolatorError | None:
        if target.schema_version == 5:
            return None
        return SchemaChanged("newer", table_id=1, schema_version=5)

    server.refuse_batch = refuse
    cluster = Cluster({"a:1": server})
    cluster.tablets.learn([tablet("a:1")])
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]
    assert await cluster.router.read([question(b"a")], cluster.deadline())
    assert len(server.mutate_calls) == 2


async def test_steps_built_for_a_schema_come_back_when_it_has_changed() -> None:
    server = Server()

    def refuse(target: wire.TabletTarget, rows: list[bytes]) -> PercolatorError | None:
        if target.schema_version == 5:
            return None
        return SchemaChanged("newer", table_id=1, schema_version=5)

    server.refuse_batch = refuse
    cluster = Cluster({"a:1": server})
    cluster.tablets.learn([tablet("a:1")])
    old, new = await cluster.router.mutate(
        [step(b"a", schema_version=4), step(b"b", schema_version=5)], cluster.deadline()
    )
    assert isinstance(old, SchemaChanged)
    assert new is APPLIED


# ---------------------------------------------------------------------------- scans


def _page(request: wire.ScanRequest, rows: int) -> list[wire.ScanResponse]:
    """Pages of `rows` rows out of a, b, c … z, as a tablet server makes them."""
    start, end = request.range.start, request.range.end
    letters = [bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz"]
    inside = [row for row in letters if start <= row and (not end or row < end)]
    if request.reverse:
        inside.reverse()
    pages = []
    batches = [inside[i : i + rows] for i in range(0, len(inside), rows)]
    for batch in batches or [[]]:
        page = wire.ScanResponse()
        for row in batch:
            page.found.rows.append(row)
            page.found.columns.append(b"c")
            page.found.commit_timestamps.append(7)
            page.found.values.append(b"v")
        if inside and batch[-1] != inside[-1]:
            if request.reverse:
                page.rest.CopyFrom(RowRange(start=start, end=batch[-1]))
            else:
                page.rest.CopyFrom(RowRange(start=batch[-1] + b"\x00", end=end))
        pages.append(page)
    return pages


async def _scan(cluster: Cluster, range_question: RangeQuestion) -> list[RangePage]:
    return [page async for page in cluster.router.scan(range_question, 5.0)]


def _three_tablets() -> Cluster:
    servers = {"a:1": Server(), "b:1": Server()}
    for server in servers.values():
        server.pages = lambda request: _page(request, 4)
    cluster = Cluster(servers)
    cluster.now_at = [
        tablet("a:1", b"", b"h"),
        tablet("b:1", b"h", b"h5", tablet_id=2),  # without a row
        tablet("a:1", b"h5", b"", tablet_id=3),
    ]
    return cluster


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("start", "end"), [(b"", b""), (b"c", b"x"), (b"h1", b"h2"), (b"y", b"")])
async def test_a_scan_crosses_tablets_without_gaps(start: bytes, end: bytes, reverse: bool) -> None:
    cluster = _three_tablets()
    pages = await _scan(cluster, RangeQuestion(1, start, end, None, 7, reverse))
    rows = [row for page in pages for row in page.rows]
    letters = [bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz"]
    expected = [row for row in letters if start <= row and (not end or row < end)]
    assert rows == (expected[::-1] if reverse else expected)
    covered = sorted((page.start, page.end) for page in pages)
    assert covered[0][0] == start
    assert covered[-1][1] == end
    assert all(one[1] == other[0] for one, other in itertools.pairwise(covered))


class _LargeTable(Cluster):
    """Its master tells of two tablets at a time."""

    async def _find(self, table_id: int, row: bytes) -> list[TabletLocation]:
        self.searches += 1
        return [one for one in self.now_at if not one.end or row < one.end][:2]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("end", [b"", b"x", b"x\x00", b"t"])
async def test_a_scan_finds_the_tablets_that_are_on_no_page_of_the_first(
    end: bytes, reverse: bool
) -> None:
    server = Server()
    server.pages = lambda request: _page(request, 4)
    cluster = _LargeTable({"a:1": server})
    bounds = [b"", *(bytes([letter]) for letter in b"ceghkmqtvz"), b""]
    cluster.now_at = [
        tablet("a:1", first, last, tablet_id=index)
        for index, (first, last) in enumerate(itertools.pairwise(bounds), 1)
    ]
    pages = await _scan(cluster, RangeQuestion(1, b"b", end, None, 7, reverse))
    rows = sorted(row for page in pages for row in page.rows)
    letters = [bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz"]
    assert rows == [row for row in letters if row >= b"b" and (not end or row < end)]


async def test_a_broken_stream_goes_on_where_it_was() -> None:
    cluster = _three_tablets()
    calls = 0

    def pages(request: wire.ScanRequest) -> list[wire.ScanResponse]:
        nonlocal calls
        calls += 1
        if calls == 1:
            return [
                _page(request, 4)[0],
                wire.ScanResponse(error=to_detail(_moved(tablet("b:1", b"", b"h", epoch=2)))),
            ]
        return _page(request, 4)

    cluster.servers["a:1"].pages = pages
    found = await _scan(cluster, RangeQuestion(1, b"", b"", None, 7))
    rows = [row for page in found for row in page.rows]
    assert rows == [bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz"]


def _a_value_less(page: wire.ScanResponse) -> None:
    page.found.values.pop()


def _again_from_the_beginning(page: wire.ScanResponse) -> None:
    page.rest.CopyFrom(RowRange(start=b"", end=b"h"))


def _backwards(page: wire.ScanResponse) -> None:
    page.rest.CopyFrom(RowRange(start=b"", end=b"c"))


def _a_row_of_somebody_else(page: wire.ScanResponse) -> None:
    page.found.rows[-1] = b"z"


@pytest.mark.parametrize(
    "malform", [_a_value_less, _again_from_the_beginning, _backwards, _a_row_of_somebody_else]
)
async def test_a_malformed_page_is_asked_for_again_until_the_time_out(
    malform: Callable[[wire.ScanResponse], None],
) -> None:
    cluster = _three_tablets()

    def pages(request: wire.ScanRequest) -> list[wire.ScanResponse]:
        found = _page(request, 4)
        malform(found[0])
        return found

    server = cluster.servers["a:1"]
    correct, server.pages = server.pages, pages
    with pytest.raises(DeadlineExceeded, match="malformed") as caught:
        await _scan(cluster, RangeQuestion(1, b"", b"", None, 7))
    assert caught.value.retry is Retry.SAFE
    server.pages = correct
    found = await _scan(cluster, RangeQuestion(1, b"", b"", None, 7))
    assert len([row for page in found for row in page.rows]) == 26


async def test_a_scan_that_nobody_answers_ends_with_its_time_out() -> None:
    cluster = _three_tablets()
    cluster.servers["a:1"].down = True
    with pytest.raises(DeadlineExceeded) as caught:
        await _scan(cluster, RangeQuestion(1, b"", b"", None, 7))
    assert caught.value.retry is Retry.SAFE
    assert cluster.clock.monotonic_seconds() == pytest.approx(5.0, abs=1.1)


async def test_a_scan_leaves_a_silent_server_for_the_one_that_took_over() -> None:
    """Paused or cut off, it refuses nothing: a master has to be asked."""
    cluster = Cluster({"a:1": Server(), "b:1": Server()}, Limits(silence_seconds=0.7))
    cluster.tablets.learn([tablet("a:1")])
    cluster.now_at = [tablet("b:1", epoch=2)]
    cluster.servers["a:1"].seconds = 10**6
    cluster.servers["b:1"].pages = lambda request: _page(request, 30)
    (page,) = await _scan(cluster, RangeQuestion(1, b"", b"", None, 7))
    assert len(page.rows) == 26
    assert cluster.clock.monotonic_seconds() == pytest.approx(0.7, abs=0.2)


async def test_a_page_that_comes_while_a_master_is_asked_about_its_server_is_not_lost() -> None:
    """The position has moved on to the next tablet by then, which another server has."""
    cluster = Cluster({"a:1": Server(), "b:1": Server()}, Limits(silence_seconds=0.7))
    cluster.now_at = [tablet("a:1", b"", b"h"), tablet("b:1", b"h", b"", tablet_id=2)]
    cluster.tablets.learn(cluster.now_at)
    cluster.search_seconds = 0.5
    cluster.servers["a:1"].seconds = 1.0
    for server in cluster.servers.values():
        server.pages = lambda request: _page(request, 30)
    pages = await _scan(cluster, RangeQuestion(1, b"", b"", None, 7))
    assert cluster.searches == 1
    assert sum(len(page.rows) for page in pages) == 26


async def test_a_scan_that_had_no_time_to_find_the_new_server_leaves_it_to_the_next_one() -> None:
    cluster = Cluster({"a:1": Server(), "b:1": Server()})
    cluster.tablets.learn([tablet("a:1")])
    cluster.now_at = [tablet("b:1", epoch=2)]
    cluster.servers["a:1"].seconds = 10**6
    cluster.servers["b:1"].pages = lambda request: _page(request, 30)
    short = cluster.router.scan(RangeQuestion(1, b"", b"", None, 7), 0.5)
    with pytest.raises(DeadlineExceeded):
        await anext(short)
    (page,) = await _scan(cluster, RangeQuestion(1, b"", b"", None, 7))
    assert len(page.rows) == 26
    assert cluster.clock.monotonic_seconds() == pytest.approx(0.5, abs=0.2)


async def test_a_silent_server_costs_one_silence_however_many_of_its_tablets_are_scanned() -> None:
    cluster = Cluster({"a:1": Server(), "b:1": Server()}, Limits(silence_seconds=0.7))
    cluster.tablets.learn([tablet("a:1", b"", b"h"), tablet("a:1", b"h", b"", tablet_id=2)])
    cluster.now_at = [
        tablet("b:1", b"", b"h", epoch=2),
        tablet("b:1", b"h", b"", tablet_id=2, epoch=2),
    ]
    cluster.servers["a:1"].seconds = 10**6
    cluster.servers["b:1"].pages = lambda request: _page(request, 30)
    pages = await _scan(cluster, RangeQuestion(1, b"", b"", None, 7))
    assert len(pages) == 2
    assert cluster.clock.monotonic_seconds() == pytest.approx(0.7, abs=0.2)


# ------------------------------------------------------------------ silence


def _silent_cluster() -> Cluster:
    """Everything was at a:1, which has fallen silent."""
    cluster = Cluster({"a:1": Server(seconds=10**6), "b:1": Server()}, Limits(server_calls_max=2))
    cluster.tablets.learn([tablet("a:1")])
    cluster.now_at = [tablet("a:1")]
    return cluster


async def test_reads_leave_a_silent_server_when_a_master_says_that_another_one_took_over() -> None:
    cluster = _silent_cluster()
    reading = asyncio.ensure_future(cluster.router.read([question(b"a")], cluster.deadline()))
    await asyncio.sleep(2.2)
    assert not reading.done()
    cluster.now_at = [tablet("b:1", epoch=2)]
    (answer,) = await reading
    assert answer.found[b"c"].value == b"value of a"
    assert cluster.clock.monotonic_seconds() == pytest.approx(2.5, abs=0.3)


async def test_mutations_that_a_silent_server_was_sent_are_unknown_once_it_was_replaced() -> None:
    cluster = _silent_cluster()
    cluster.now_at = [tablet("b:1", epoch=2)]
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline())
    assert isinstance(answer, DeadlineExceeded)
    assert answer.retry is Retry.UNKNOWN
    assert cluster.clock.monotonic_seconds() == pytest.approx(1.0, abs=0.2)
    assert cluster.servers["b:1"].rows_mutated() == []


async def test_mutations_that_a_silent_server_was_not_sent_go_to_the_one_in_its_place() -> None:
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


async def test_a_slow_server_is_waited_for_as_well_while_no_master_answers() -> None:
    cluster = _silent_cluster()

    async def nobody(table_id: int, row: bytes) -> list[TabletLocation]:
        raise DeadlineExceeded("no master answered in time")

    cluster.tablets._find = nobody
    cluster.servers["a:1"].seconds = 3.0
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]
