"""Cells judged in runs: a page has what it has when its entries are judged one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.errors import InvariantViolation
from percolator.formats.records import RecordKind, acknowledgement_column
from percolator.tablet.cells import D, W, cell_prefix, component, inverted
from percolator.tablet.state import FOREVER, Lifetimes, Ttls
from percolator.tablet.visible_cells import RUN_VALUE_BYTES_MAX, VisibleCells, VisibleRuns, Walked
from percolator.testing.memory_storage import DurableMemory
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import tabletserver_pb2 as pb
from tests.simulation.virtual_time import run_virtually
from tests.unit.tablet.counting import CountingStorage
from tests.unit.tablet.tablets import TARGET, Rig, write_record

COLUMNS = (b"a", b"b\0", b"\x01", acknowledgement_column(b"observer", b"a"))
MOMENT = 100
AT = MOMENT << SEQUENCE_BITS
LIFETIMES = (FOREVER, Lifetimes(((b"a", 40),)), Lifetimes(((b"a", 95), (b"b\0", 96), (b"x", 1))))
"""Simple entries are 95 ms old."""
STOP, BEHIND = W + component(b"r\xff"), W + b"\xff"


class Page:
    """A page that is filled one way or the other, and notes how each of its walks ended."""

    def __init__(self, cells: VisibleCells, rows_max: int, bytes_max: int) -> None:
        self.cells = cells
        self.rows = 0
        self.rows_max = rows_max
        self.bytes_max = bytes_max

    def admit(self, row: bytes) -> bool:
        if self.rows >= self.rows_max or self.cells.bytes >= self.bytes_max:
            return False
        self.rows += 1
        return True

    def fill(self, slice_entries: int) -> Walked:
        cells = self.cells
        cells.seek(W)
        walked = Walked.SLICE
        while walked is Walked.SLICE:
            if isinstance(cells, VisibleRuns):
                walked = cells.walk_in_runs(STOP, slice_entries, self)
            else:
                walked = cells.walk(STOP, slice_entries, self.admit)
        return walked

    def found(self) -> tuple[object, ...]:
        cells = self.cells
        lists = (cells.rows, cells.columns, cells.commit_timestamps, cells.values, cells.deletes)
        return (*lists, cells.bytes, self.rows)


class Version(NamedTuple):
    """A write record of a cell."""

    row: int
    column: int
    commit: int
    """In milliseconds."""
    kind: RecordKind
    size: int


_SIZES = st.sampled_from([0, 1, 20, RUN_VALUE_BYTES_MAX + 1])
_SIMPLE = st.builds(
    Version,
    st.integers(0, 60),
    st.just(0),
    st.just(5),
    st.just(RecordKind.PUT),
    st.sampled_from([0, 1, 20]),
)
_ANY = st.builds(
    Version,
    st.integers(0, 5),
    st.integers(0, len(COLUMNS) - 1),
    st.integers(2, 2 * MOMENT),
    st.sampled_from(RecordKind),
    _SIZES,
)
_OLD_VERSIONS = st.builds(
    lambda row, commits: [Version(row, 0, one, RecordKind.PUT, 1) for one in commits],
    st.integers(0, 5),
    st.sets(st.integers(2, 2 * MOMENT), min_size=5, max_size=40),
)
VERSIONS = st.builds(
    lambda simple, others, deep: [*simple, *others, *(one for some in deep for one in some)],
    st.lists(_SIMPLE, max_size=80),
    st.lists(_ANY, max_size=30),
    st.lists(_OLD_VERSIONS, max_size=3),
)


def _row(number: int, zeros: bool) -> bytes:
    return b"r%02d" % number + (b"\0\x01" if zeros and number % 7 == 0 else b"")


def _stored(versions: list[Version], zeros: bool) -> CountingStorage:
    disk = DurableMemory()
    for row, column, milliseconds, kind, size in versions:
        commit = milliseconds << SEQUENCE_BITS
        cell = cell_prefix(_row(row, zeros), COLUMNS[column])
        inline = b"v" * size if kind is RecordKind.PUT else b""
        disk.durable[W + cell + inverted(commit)] = write_record(commit - 1, inline, kind)
        disk.durable[D + cell + inverted(commit - 1)] = b"stored apart"
    disk.durable[BEHIND] = b""
    return CountingStorage(disk)


@settings(max_examples=400, deadline=None)
@given(
    VERSIONS,
    st.booleans(),
    st.sampled_from([None, (0,), (0, 1), (2, 3)]),
    st.booleans(),
    st.integers(1, 70),
    st.sampled_from([1, 300, 2_000, 1 << 20]),
    st.sampled_from([3, 30, 1024]),
    st.sampled_from(LIFETIMES),
)
def test_a_page_of_any_content_is_the_same_in_runs_and_one_by_one(
    versions: list[Version],
    zeros: bool,
    wanted: tuple[int, ...] | None,
    report_deletes: bool,
    rows_max: int,
    bytes_max: int,
    slice_entries: int,
    lifetimes: Lifetimes,
) -> None:
    storage = _stored(versions, zeros)
    columns = None if wanted is None else frozenset(component(COLUMNS[one]) for one in wanted)
    found = []
    for way in (VisibleCells, VisibleRuns):
        cursor = storage.cursor()
        cells = way(
            cursor,
            storage.get,
            AT,
            wanted=columns,
            hidden=(),
            report_deletes=report_deletes,
            lifetimes=lifetimes,
        )
        page = Page(cells, rows_max, bytes_max)
        ended = page.fill(slice_entries)
        found.append((ended, cursor.key(), *page.found()))
    assert found[0] == found[1]


async def _opened(
    stored: CountingStorage, ttls: Ttls = (), **limits: Any
) -> tuple[Rig, Counter[str]]:
    """A tablet that has stored this, and what it counts."""
    disk = DurableMemory()
    await Rig(disk=disk).open()  # notes of whom the store is
    disk.durable |= stored.disk.durable
    del disk.durable[BEHIND]
    storage = CountingStorage(disk)
    return await Rig(storage=storage, ttls=ttls, **limits).open(), storage.counts


def _pages(stored: CountingStorage, request: pb.ScanRequest, ttls: Ttls) -> list[pb.ScanResponse]:
    async def scanned() -> list[pb.ScanResponse]:
        rig, _ = await _opened(stored, ttls, slice_entries=30)
        return [page async for page in rig.tablet.scan(request)]

    return run_virtually(scanned())


@settings(max_examples=300, deadline=None)
@given(
    VERSIONS,
    st.booleans(),
    st.sampled_from([[], [0], [0, 1], [2, 3]]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 70),
    st.sampled_from([1, 300, 2_000, 1 << 20]),
    st.sampled_from([0, 1, 7]),
    st.sampled_from([(), ((b"a", 40),), ((b"a", 95), (b"b\0", 96))]),
)
def test_a_scan_backwards_has_the_same_pages_in_runs_and_row_by_row(
    versions: list[Version],
    zeros: bool,
    wanted: list[int],
    report_deletes: bool,
    joined: bool,
    rows_max: int,
    bytes_max: int,
    row_limit: int,
    ttls: Ttls,
) -> None:
    stored = _stored(versions, zeros)
    request = pb.ScanRequest(
        target=TARGET,
        columns=[COLUMNS[one] for one in wanted],
        all_columns=not wanted,
        timestamp=AT,
        reverse=True,
        report_deletes=report_deletes,
        joined=joined,
        page_rows_max=rows_max,
        page_bytes_max=bytes_max,
        row_limit=row_limit,
    )
    in_runs = _pages(stored, request, ttls)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VisibleRuns, "take_before", lambda *_: None)
        row_by_row = _pages(stored, request, ttls)
    assert in_runs == row_by_row


async def test_a_page_backwards_that_has_looked_at_very_many_entries_ends_between_two_rows() -> (
    None
):
    stored = _stored([Version(row, 0, 5, RecordKind.PUT, 10) for row in range(60)], zeros=False)
    rig, _ = await _opened(stored, page_entries_max=20)
    request = pb.ScanRequest(target=TARGET, all_columns=True, timestamp=AT, reverse=True)
    pages = [page async for page in rig.tablet.scan(request)]
    assert len(pages) > 1
    rows = [row for page in pages for row in page.found.rows]
    assert rows == [_row(number, zeros=False) for number in reversed(range(60))]


async def test_a_scan_backwards_steps_over_simple_entries_and_seeks_once_for_each_run() -> None:
    rows = 1_000
    versions = [Version(row, 0, 5, RecordKind.PUT, 10) for row in range(rows)]
    rig, counts = await _opened(_stored(versions, zeros=False))
    request = pb.ScanRequest(
        target=TARGET, all_columns=True, timestamp=AT, reverse=True, page_rows_max=rows
    )
    counts.clear()
    (page,) = [page async for page in rig.tablet.scan(request)]
    assert len(page.found.rows) == rows
    assert page.found.rows[0] == _row(rows - 1, zeros=False)
    assert counts["seek W"] <= rows / 50


def _filled(storage: CountingStorage) -> tuple[Page, Counter[str]]:
    cells = VisibleRuns(storage.cursor(), storage.get, AT, wanted=None)
    page = Page(cells, 1000, 1 << 20)
    storage.counts.clear()
    page.fill(1024)
    return page, storage.counts


def test_simple_entries_are_looked_at_once() -> None:
    versions = [Version(row, 0, 5, RecordKind.PUT, 10) for row in range(60)]
    page, counts = _filled(_stored(versions, zeros=True))
    assert page.rows == 60
    assert counts == Counter({"seek W": 1, "step": 60})


@pytest.mark.parametrize("kind", [RecordKind.LOCK_ONLY, RecordKind.PUT_IN_DATA])
def test_where_no_entry_is_simple_few_are_looked_at_twice(kind: RecordKind) -> None:
    disk = _stored([], zeros=False).disk
    for number in range(10_000):
        cell = cell_prefix(b"q%05d" % number, b"a")
        disk.durable[W + cell + inverted(5)] = write_record(4, b"", kind)
        disk.durable[D + cell + inverted(4)] = b""
    _, counts = _filled(CountingStorage(disk))
    assert counts["step"] <= 1.1 * 10_000


@pytest.mark.parametrize("ends", [0, 1, 3])
def test_a_damaged_key_is_found_in_a_run(ends: int) -> None:
    versions = [Version(row, 0, 5, RecordKind.PUT, 10) for row in range(60)]
    storage = _stored(versions, zeros=False)
    damaged = W + b"r30" + b"x\0\x01" * ends + inverted(5)
    storage.disk.durable[damaged] = write_record(4, b"")
    outcomes = []
    for way in (VisibleCells, VisibleRuns):
        page = Page(
            way(CountingStorage(storage.disk).cursor(), storage.get, AT, wanted=None), 99, 99_999
        )
        try:
            page.fill(1024)
        except InvariantViolation as error:
            outcomes.append(str(error))
        else:
            outcomes.append(repr(page.found()))
    assert outcomes[0] == outcomes[1]
