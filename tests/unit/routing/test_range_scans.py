"""Scans of ranges cross tablets and servers, and continue where a stream broke."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from percolator.errors import (
    DeadlineExceeded,
    NotReady,
    Retry,
    TabletLocation,
)
from percolator.limits import Limits
from percolator.routing.cells import ChangesRequest, RangePage, RangeRequest
from percolator.routing.range_scan import JoinedPage
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from percolator.wire.status import to_detail
from tests.unit.routing.tablet_servers import (
    Cluster,
    Server,
    cancelled_while_it_waits,
    moved,
    tablet,
)

LETTERS = [bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz"]


def _page(request: pb.ScanRequest, rows: int) -> list[pb.ScanResponse]:
    """Pages of `rows` rows out of a, b, c … z, as a tablet server makes them."""
    start, end = request.range.start, request.range.end
    inside = [row for row in LETTERS if start <= row and (not end or row < end)]
    if request.reverse:
        inside.reverse()
    pages = []
    batches = [inside[i : i + rows] for i in range(0, len(inside), rows)]
    for batch in batches or [[]]:
        page = pb.ScanResponse()
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


async def _scan(cluster: Cluster, range_request: RangeRequest) -> list[RangePage]:
    return [page async for page in cluster.router.scan(range_request, 5.0)]


async def _scanned(
    cluster: Cluster, start: bytes = b"", end: bytes = b"", *, reverse: bool = False, limit: int = 0
) -> list[bytes]:
    """The rows of a scan."""
    request = RangeRequest(1, start, end, None, 7, reverse, limit)
    return [row for page in await _scan(cluster, request) for row in page.rows]


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
    pages = await _scan(cluster, RangeRequest(1, start, end, None, 7, reverse))
    rows = [row for page in pages for row in page.rows]
    expected = [row for row in LETTERS if start <= row and (not end or row < end)]
    assert rows == (expected[::-1] if reverse else expected)
    covered = sorted((page.start, page.end) for page in pages)
    assert (covered[0][0], covered[-1][1]) == (start, end)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(covered))


class _LargeTable(Cluster):
    """A cluster whose master lists two tablets at a time."""

    async def _find(self, table_id: int, row: bytes) -> list[TabletLocation]:
        found = await super()._find(table_id, row)
        return [one for one in found if not one.end or row < one.end][:2]


def _with_a_silent_server(limits: Limits | None = None) -> Cluster:
    """All rows are known to be at a:1, which has fallen silent; b:1 has them."""
    cluster = Cluster({"a:1": Server(seconds=10**6), "b:1": Server()}, limits)
    cluster.tablets.learn([tablet("a:1")])
    cluster.now_at = [tablet("b:1", epoch=2)]
    cluster.servers["b:1"].pages = lambda request: _page(request, 30)
    return cluster


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("end", [b"", b"x", b"x\x00", b"t"])
async def test_a_scan_finds_tablets_beyond_the_masters_first_page(
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
    rows = await _scanned(cluster, b"b", end, reverse=reverse)
    assert sorted(rows) == [row for row in LETTERS if row >= b"b" and (not end or row < end)]


class _SplitTable(_LargeTable):
    """The last tablet is no longer served, and its master notes a second later what became of
    it: two halves on another server."""

    def __init__(self) -> None:
        former, other = Server(), Server()
        former.refuses_scans_with = moved()
        other.pages = lambda request: _page(request, 4)
        super().__init__({"a:1": former, "b:1": other})
        first = [
            tablet("b:1", start, end, tablet_id=index)
            for index, (start, end) in enumerate(itertools.pairwise([b"", b"c", b"g", b"k"]), 1)
        ]
        whole = tablet("a:1", b"k", b"", tablet_id=4)
        halves = [
            tablet("b:1", b"k", b"r", tablet_id=5),
            tablet("b:1", b"r", b"", tablet_id=6),
        ]
        self.now_at = [*first, whole]
        self.later = [*first, *halves]
        self.tablets.learn(self.now_at)

    async def _find(self, table_id: int, row: bytes) -> list[TabletLocation]:
        if self.clock.monotonic_seconds() > 1.0:
            self.now_at = self.later
        return await super()._find(table_id, row)


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_scan_asks_again_until_the_master_knows_where_a_tablet_went(reverse: bool) -> None:
    """A server refuses a tablet that is being split before the map says what it became."""
    cluster = _SplitTable()
    assert sorted(await _scanned(cluster, reverse=reverse)) == LETTERS
    assert cluster.searches > 1
    assert cluster.clock.monotonic_seconds() < 3.0


async def test_a_broken_stream_continues_where_it_stopped() -> None:
    cluster = _three_tablets()
    calls = 0

    def pages(request: pb.ScanRequest) -> list[pb.ScanResponse]:
        nonlocal calls
        calls += 1
        if calls == 1:
            return [
                _page(request, 4)[0],
                pb.ScanResponse(error=to_detail(moved(tablet("b:1", b"", b"h", epoch=2)))),
            ]
        return _page(request, 4)

    cluster.servers["a:1"].pages = pages
    assert await _scanned(cluster) == LETTERS


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_stream_that_ends_after_each_page_is_begun_again_behind_it(reverse: bool) -> None:
    """As a short scan's in a frame (percolator/wire/frames)."""
    cluster = _three_tablets()
    for server in cluster.servers.values():
        server.pages = lambda request: _page(request, 4)[:1]
    assert sorted(await _scanned(cluster, reverse=reverse, limit=100)) == LETTERS


def _rest(start: bytes, end: bytes) -> Callable[[pb.ScanResponse], object]:
    return lambda page: page.rest.CopyFrom(RowRange(start=start, end=end))


@pytest.mark.parametrize(
    "malform",
    [
        lambda page: page.found.values.pop(),
        _rest(b"", b"h"),
        _rest(b"", b"c"),
        lambda page: page.found.rows.__setitem__(-1, b"z"),
    ],
    ids=["a value less", "again from the beginning", "backwards", "a row of somebody else"],
)
async def test_a_malformed_page_is_requested_again_until_the_timeout(
    malform: Callable[[pb.ScanResponse], object],
) -> None:
    cluster = _three_tablets()

    def pages(request: pb.ScanRequest) -> list[pb.ScanResponse]:
        found = _page(request, 4)
        malform(found[0])
        return found

    server = cluster.servers["a:1"]
    correct, server.pages = server.pages, pages
    with pytest.raises(DeadlineExceeded, match="malformed") as caught:
        await _scanned(cluster)
    assert caught.value.retry is Retry.SAFE
    server.pages = correct
    assert await _scanned(cluster) == LETTERS


async def test_an_unanswered_scan_ends_with_its_timeout() -> None:
    cluster = _three_tablets()
    cluster.servers["a:1"].down = True
    with pytest.raises(DeadlineExceeded) as caught:
        await _scan(cluster, RangeRequest(1, b"", b"", None, 7))
    assert caught.value.retry is Retry.SAFE
    assert cluster.clock.monotonic_seconds() == pytest.approx(5.0, abs=1.1)


async def test_a_scan_leaves_a_silent_server_for_the_one_that_took_over() -> None:
    """A paused or disconnected server refuses nothing, so a master has to be asked."""
    cluster = _with_a_silent_server(Limits(silence_seconds=0.7))
    assert await _scanned(cluster) == LETTERS
    assert cluster.clock.monotonic_seconds() == pytest.approx(0.7, abs=0.2)


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_scan_asks_about_a_silent_server_until_another_one_has_taken_over(
    reverse: bool,
) -> None:
    """A master needs seconds to find out that a server is gone."""
    cluster = _with_a_silent_server()
    later, cluster.now_at = cluster.now_at, [tablet("a:1")]
    scanning = asyncio.ensure_future(_scanned(cluster, reverse=reverse))
    await asyncio.sleep(2.5)
    cluster.now_at = later
    assert sorted(await scanning) == LETTERS
    assert cluster.clock.monotonic_seconds() == pytest.approx(3.0, abs=0.2)


async def test_a_page_that_arrives_while_a_master_is_asked_about_its_server_is_not_lost() -> None:
    """By then, the position has moved to the next tablet, which another server has."""
    cluster = Cluster({"a:1": Server(), "b:1": Server()}, Limits(silence_seconds=0.7))
    cluster.now_at = [tablet("a:1", b"", b"h"), tablet("b:1", b"h", b"", tablet_id=2)]
    cluster.tablets.learn(cluster.now_at)
    cluster.search_seconds = 0.5
    cluster.servers["a:1"].seconds = 1.0
    for server in cluster.servers.values():
        server.pages = lambda request: _page(request, 30)
    assert await _scanned(cluster) == LETTERS
    assert cluster.searches == 1


async def test_a_scan_without_time_to_find_the_new_server_leaves_that_to_the_next_one() -> None:
    cluster = _with_a_silent_server()
    with pytest.raises(DeadlineExceeded):
        await anext(cluster.router.scan(RangeRequest(1, b"", b"", None, 7), 0.5))
    assert await _scanned(cluster) == LETTERS
    assert cluster.clock.monotonic_seconds() == pytest.approx(0.5, abs=0.2)


async def test_a_silent_server_costs_one_timeout_however_many_of_its_tablets_are_scanned() -> None:
    cluster = _with_a_silent_server(Limits(silence_seconds=0.7))
    cluster.tablets.forget(1)
    bounds = [(1, b"", b"h"), (2, b"h", b"")]
    cluster.tablets.learn([tablet("a:1", start, end, tablet_id=one) for one, start, end in bounds])
    cluster.now_at = [
        tablet("b:1", start, end, tablet_id=one, epoch=2) for one, start, end in bounds
    ]
    assert len(await _scan(cluster, RangeRequest(1, b"", b"", None, 7))) == 2
    assert cluster.clock.monotonic_seconds() == pytest.approx(0.7, abs=0.2)


# ------------------------------------------------------------------ silence


async def test_a_scan_cancelled_after_its_page_failed_leaves_no_exception_behind() -> None:
    """The reader was still asking a master about the server when the page failed."""
    cluster = Cluster({"a:1": Server()}, Limits(silence_seconds=0.2))
    cluster.tablets.learn([tablet("a:1")])
    cluster.search_seconds = 10.0
    cluster.servers["a:1"].seconds = 0.4
    cluster.servers["a:1"].answers_lost = True
    await cancelled_while_it_waits(_scan(cluster, RangeRequest(1, b"", b"", None, 7)))


def _joined(row: bytes) -> pb.ScanResponse:
    page = pb.ScanResponse()
    size = len(row).to_bytes(4, "little")
    for one in (page.joined.rows, page.joined.columns.add(name=b"c").values):
        one.block, one.offsets = row, bytes(4) + size
    return page


async def _scanned_cells(sent: pb.ScanResponse, *, joined: bool = True) -> list[object]:
    """The pages of a scan from b to x of a server that answers with this page."""
    server = Server()
    server.pages = lambda request: [sent]
    cluster = Cluster({"a:1": server})
    cluster.now_at = [tablet("a:1", b"", b"")]
    request = RangeRequest(1, b"b", b"x", None, 7, joined=joined)
    return [page async for page in cluster.router.scan_cells(request, 5.0)]


async def test_joined_cells_arrive_as_they_were_sent() -> None:
    [page] = await _scanned_cells(_joined(b"d"))
    assert isinstance(page, JoinedPage)
    assert (page.rows.cut(), page.columns[b"c"].cut()) == ([b"d"], [b"d"])
    assert (page.start, page.end) == (b"b", b"x")


@pytest.mark.parametrize(("row", "joined"), [(b"a", True), (b"x", True), (b"d", False)])
async def test_joined_cells_of_other_rows_or_that_nobody_asked_for_are_refused(
    row: bytes, joined: bool
) -> None:
    with pytest.raises(DeadlineExceeded, match="malformed"):
        await _scanned_cells(_joined(row), joined=joined)


@pytest.mark.parametrize(
    "bounds",
    [(0, 9, 2), (0, -1, 2), (1, 1, 2), (0, 1, 3), (0, 1, 1), ()],
    ids=["outside", "negative", "later start", "later end", "earlier end", "none"],
)
async def test_joined_values_that_do_not_fill_their_block_one_by_one_are_refused(
    bounds: tuple[int, ...],
) -> None:
    """Arrow would read memory outside of the block."""
    sent = _joined(b"dd")
    sent.joined.rows.block = b"de"
    sent.joined.rows.offsets = b"".join(at.to_bytes(4, "little") for at in (0, 1, 2))
    values = sent.joined.columns[0].values
    values.offsets = b"".join(at.to_bytes(4, "little", signed=True) for at in bounds)
    with pytest.raises(DeadlineExceeded, match="malformed"):
        await _scanned_cells(sent)


# Looking for changes in many tablets while their server refuses, or no master answers.

TABLETS = 20


class _NotReady(Server):
    """Refuses every look."""

    async def look_for_changes(
        self, request: pb.LookForChangesRequest
    ) -> pb.LookForChangesResponse:
        await self._serve()
        error = to_detail(NotReady("the server is shutting down"))
        return pb.LookForChangesResponse(
            looks=[pb.ChangesLookResult(error=error) for _ in request.looks]
        )


def _cluster() -> Cluster:
    cluster = Cluster({"a:1": _NotReady()})
    starts = [b"", *(b"%02d" % number for number in range(1, TABLETS))]
    cluster.now_at = [
        tablet("a:1", start, end, tablet_id=number)
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], b""], strict=True), 1)
    ]
    cluster.tablets.learn(cluster.now_at)
    return cluster


async def test_one_answer_of_a_master_is_about_all_tablets_that_refused() -> None:
    cluster = _cluster()
    with pytest.raises(NotReady):
        await cluster.router.look_for_changes(ChangesRequest(1, 0, 9), [], cluster.deadline(1.0))
    assert cluster.searches < TABLETS


async def test_while_no_master_answers_a_look_waits_for_one_question() -> None:
    cluster = _cluster()
    cluster.search_seconds = 5.0
    cluster.search_error = DeadlineExceeded("no master answered in time")
    with pytest.raises(NotReady):
        await cluster.router.look_for_changes(ChangesRequest(1, 0, 9), [], cluster.deadline(1.0))
    assert cluster.clock.monotonic_seconds() < 6.0
