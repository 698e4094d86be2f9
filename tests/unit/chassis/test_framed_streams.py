"""A short scan travels in a frame, and ends after its first page; all others go over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from percolator import errors
from percolator.services.chassis.rpc import Exposed
from percolator.v1 import tabletserver_pb2
from percolator.v1.cells_pb2 import RowRange
from percolator.v1.tabletserver_pb2 import ScanRequest, ScanResponse
from percolator.wire.frames.layout import FRAMED
from percolator.wire.methods import SCAN, SHORT_SCAN_ROWS_MAX
from tests.unit.chassis.framed_edge import SECONDS, Framed, echo, framed

pytestmark = pytest.mark.real_time

TABLETS = tabletserver_pb2.DESCRIPTOR.services_by_name["TabletServerService"]
PAGES = 3


class Pages:
    """Scans three pages; the start of the rest is the number of the page. Notes how scans end."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.asked = asyncio.Event()
        self.closed = asyncio.Event()

    async def scan(self, request: ScanRequest) -> AsyncGenerator[ScanResponse, None]:
        sent = 0
        try:
            if request.all_columns:
                raise errors.SnapshotTooOld("too late", timestamp=1, safe_point=2)
            if request.reverse:
                self.asked.set()
                await asyncio.Event().wait()
            for sent in range(1, PAGES + 1):
                yield ScanResponse(rest=RowRange(start=str(sent).encode()))
        finally:
            self.ends.append(f"after {sent}")
            self.closed.set()

    @property
    def exposed(self) -> Exposed:
        return Exposed(TABLETS, _Everything(self))


class _Everything:
    """A handler of all methods, of which only one is called."""

    def __init__(self, pages: Pages) -> None:
        self.scan = pages.scan

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        return lambda _: errors.UsageError(name)


async def scanned(edge: Framed, request: ScanRequest) -> list[bytes]:
    call = edge.network.stream(edge.address, SCAN)
    return [page.rest.start async for page in call(request, 2 * SECONDS)]


@pytest.mark.parametrize("rows", [1, SHORT_SCAN_ROWS_MAX])
async def test_a_short_scan_ends_after_its_first_page(rows: int) -> None:
    pages = Pages()
    async with framed(echo, pages.exposed) as edge:
        await edge.until_connected()
        assert await scanned(edge, ScanRequest(row_limit=rows)) == [b"1"]
        assert pages.ends == ["after 1"]
        assert edge.gate.idle.is_set()


@pytest.mark.parametrize("rows", [0, SHORT_SCAN_ROWS_MAX + 1])
async def test_any_other_scan_gets_all_its_pages_over_grpc(rows: int) -> None:
    pages = Pages()
    async with framed(echo, pages.exposed) as edge:
        await edge.until_connected()
        assert await scanned(edge, ScanRequest(row_limit=rows)) == [b"1", b"2", b"3"]


async def test_without_frames_a_short_scan_gets_all_its_pages() -> None:
    pages = Pages()
    async with framed(echo, pages.exposed, offers=False) as edge:
        assert await scanned(edge, ScanRequest(row_limit=1)) == [b"1", b"2", b"3"]


async def test_a_server_whose_frames_have_no_scans_is_asked_over_grpc() -> None:
    """As one of an earlier release."""
    pages = Pages()
    async with framed(echo, pages.exposed, framed_paths=FRAMED - {SCAN.path}) as edge:
        await edge.until_connected()
        assert await scanned(edge, ScanRequest(row_limit=1)) == [b"1", b"2", b"3"]


async def test_an_error_of_a_short_scan_arrives_as_over_grpc() -> None:
    async with framed(echo, Pages().exposed) as edge:
        failing = ScanRequest(row_limit=1, all_columns=True)
        with pytest.raises(errors.SnapshotTooOld) as over_grpc:
            await scanned(edge, failing)
        await edge.until_connected()
        with pytest.raises(errors.SnapshotTooOld) as caught:
            await scanned(edge, failing)
        assert vars(caught.value) == vars(over_grpc.value)


async def test_a_short_scan_that_is_given_up_is_cancelled_at_the_server() -> None:
    pages = Pages()
    async with framed(echo, pages.exposed) as edge:
        await edge.until_connected()
        scan = asyncio.create_task(scanned(edge, ScanRequest(row_limit=1, reverse=True)))
        await pages.asked.wait()
        scan.cancel()
        await asyncio.wait_for(pages.closed.wait(), SECONDS)
        assert pages.ends == ["after 0"]
