"""A tablet, on either storage, answers every request as the naive model of its contract does."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.errors import CellAddress
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.services.chassis.files import DiskThreads
from percolator.services.tabletserver.storage import LevelDBStorage
from percolator.testing.memory_storage import DurableMemory, MemoryStorage
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Storage
from tests.simulation.virtual_time import run_virtually
from tests.unit.tablet.naive_tablet import NaiveTablet
from tests.unit.tablet.tablets import (
    ABSENT,
    BEGINS_IF_PRESENT,
    DATA,
    EQUALS,
    LOCK,
    NOTIFY,
    PRESENT,
    ROLLBACK,
    TARGET,
    WRITE,
    Rig,
    delete,
    delete_if,
    own,
    put,
)

ROWS = st.sampled_from([b"", b"\0", b"a", b"a\0", b"a\0\x01", b"a\x01", b"b", b"\xff", b"\xff\xff"])
COLUMNS = st.sampled_from([b"", b"\0", b"c", b"c\0d"])
COLUMN_PREFIXES = st.lists(st.sampled_from([b"c", b"c\0", b"c\0d", b"d"]), max_size=2)
TIMES = st.integers(1, 12)
VALUES = st.sampled_from([b"", b"\0", b"v", b"a longer value"])
QUALIFIERS = st.sampled_from([b"f", b"f\0", b"g"])
KINDS = st.sampled_from(list(RecordKind))
# Strategies are created once: hypothesis examines each new one, which takes longer than a draw.
TTLS = st.integers(0, 2)
SESSIONS = st.sampled_from([b"", b"session"])
STARTS = st.integers(1, 11)


@st.composite
def locks(draw: st.DrawFn) -> bytes:
    kind = draw(KINDS)
    return LockRecord(
        start_timestamp=draw(TIMES),
        min_commit_timestamp=draw(TIMES),
        ttl_milliseconds=draw(TTLS),
        kind=kind,
        session=draw(SESSIONS),
        primary=CellAddress(1, draw(ROWS), draw(COLUMNS)),
        value=draw(VALUES) if kind is RecordKind.PUT else b"",
    ).encode()


@st.composite
def commits(draw: st.DrawFn) -> list[pb.Change]:
    """A write record, and the data that it points to."""
    start, kind = draw(STARTS), draw(KINDS)
    value = draw(VALUES)
    record = WriteRecord(start, kind, value if kind is RecordKind.PUT else b"").encode()
    changes = [put(WRITE, record, start + 1 + draw(TIMES) % (13 - start))]
    if kind is RecordKind.PUT_IN_DATA:
        changes.append(put(DATA, value, start))
    return changes


LOCKS = locks()
COMMITS = commits()
OTHER_CHANGES: st.SearchStrategy[list[pb.Change]] = st.one_of(
    LOCKS.map(lambda record: put(LOCK, record)),
    st.just(delete(LOCK)),
    TIMES.map(lambda start: delete_if(LOCK, own(start))),
    TIMES.map(lambda start: put(ROLLBACK, b"", start)),
    TIMES.map(lambda start: delete(ROLLBACK, start)),
    TIMES.map(lambda end: delete(WRITE, end)),
    st.tuples(TIMES, TIMES).map(lambda ts: delete_if(WRITE, own(ts[0]), ts[1])),
    st.tuples(TIMES, QUALIFIERS).map(lambda to: put(NOTIFY, b"", *to)),
    st.tuples(TIMES, QUALIFIERS).map(lambda to: delete(NOTIFY, *to)),
).map(lambda change: [change])
SPACES = st.sampled_from([LOCK, WRITE, DATA, ROLLBACK, NOTIFY])
EXPECTATIONS = st.sampled_from([ABSENT, PRESENT, EQUALS, BEGINS_IF_PRESENT])
PREFIXES = st.integers(0, 5)
OFFSETS = st.integers(0, 3)


@st.composite
def conditions(draw: st.DrawFn) -> pb.Condition:
    space = draw(SPACES)
    start = draw(TIMES)
    from_ = 0 if space == LOCK else [0, start, start, draw(TIMES)][draw(OFFSETS)]
    until = 0 if space == LOCK else [0, 0, from_ + 1, from_ + 4][draw(OFFSETS)]
    seen = own(start) + own(draw(TIMES)) + (0).to_bytes(4, "big")
    full = draw(LOCKS)
    return pb.Condition(
        space=space,
        expectation=draw(EXPECTATIONS),
        from_timestamp=from_,
        until_timestamp=until,
        prefix=[b"", own(start), own(start), seen, full, full[:-1]][draw(PREFIXES)],
        required=[b"", own(start), seen, full][draw(OFFSETS)],
        qualifier=draw(QUALIFIERS) if space == NOTIFY else b"",
    )


CHANGES = st.lists(COMMITS | OTHER_CHANGES, max_size=3)
CONDITIONS = st.lists(conditions(), max_size=3)


@st.composite
def mutations(draw: st.DrawFn) -> pb.Mutation:
    changes: dict[tuple[int, int, bytes], pb.Change] = {}
    for part in draw(CHANGES):
        for change in part:
            changes.setdefault((change.space, change.timestamp, change.qualifier), change)
    return pb.Mutation(
        row=draw(ROWS),
        column=draw(COLUMNS),
        conditions=draw(CONDITIONS),
        changes=changes.values(),
    )


MUTATIONS = mutations()


@st.composite
def scans(draw: st.DrawFn) -> pb.ScanRequest:
    start, end = draw(ROWS), draw(ROWS)
    if end and start >= end:
        start, end = end, start
    columns = draw(st.lists(COLUMNS, max_size=2))
    prefixes = draw(COLUMN_PREFIXES)
    return pb.ScanRequest(
        target=TARGET,
        range=cells_pb2.RowRange(start=start if start != end else b"", end=end),
        columns=columns,
        all_columns=not (prefixes or columns),
        column_prefixes=prefixes,
        timestamp=draw(TIMES),
        passing=draw(st.lists(TIMES, max_size=2)),
        reverse=draw(st.booleans()),
        row_limit=draw(st.integers(0, 5)),
        page_rows_max=draw(st.integers(0, 3)),
        page_bytes_max=draw(st.sampled_from([0, 1, 30])),
        report_deletes=draw(st.booleans()),
    )


@st.composite
def reads(draw: st.DrawFn) -> pb.RowRead:
    all_columns = draw(st.booleans())
    prefixes = [] if all_columns else draw(COLUMN_PREFIXES)
    columns = [] if all_columns else draw(st.lists(COLUMNS, max_size=3, unique=True))
    return pb.RowRead(
        row=draw(ROWS),
        columns=columns,
        all_columns=all_columns,
        timestamp=draw(TIMES),
        passing=draw(st.lists(TIMES, max_size=2)),
        report_deletes=draw(st.booleans()),
        column_prefixes=prefixes,
    )


READS = reads()


def wanted_by(asked: pb.RowRead | pb.ScanRequest) -> Callable[[bytes], bool]:
    """All columns are those that are not reserved."""
    if asked.column_prefixes:
        prefixes = tuple(asked.column_prefixes)
        return lambda column: column in asked.columns or column.startswith(prefixes)
    if asked.all_columns:
        return lambda column: not column.startswith(b"\0")
    return lambda column: column in asked.columns


Step = Callable[[Rig, NaiveTablet], Coroutine[Any, Any, None]]


def mutating(requests: list[list[pb.Mutation]]) -> Step:
    async def step(rig: Rig, model: NaiveTablet) -> None:
        """Several requests at once: the same cell may be in all of them, several times."""
        answers = await asyncio.gather(*(rig.mutate(*request) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            for result in answer:
                result.ClearField("error")
            assert answer == [model.mutate(mutation) for mutation in request]

    return step


def reading(reads: list[pb.RowRead]) -> Step:
    async def step(rig: Rig, model: NaiveTablet) -> None:
        answer = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=reads))
        found = answer.found
        entries = []
        for at, index in enumerate(found.reads):
            value = None if at in found.deletes else found.values[at]
            entries.append((index, found.columns[at], found.commit_timestamps[at], value))
        blocked = [(found.read, found.lock.column, found.lock.value) for found in answer.locks]
        expected_entries, expected_locks = [], []
        for index, read in enumerate(reads):
            cells, in_the_way = model.read_row(
                read.row,
                read.timestamp,
                wanted=wanted_by(read),
                passing=read.passing,
                report_deletes=read.report_deletes,
            )
            expected_entries += [(index, *cell[1:]) for cell in cells]
            expected_locks += [(index, lock[1], lock[2]) for lock in in_the_way]
        assert sorted(entries, key=repr) == sorted(expected_entries, key=repr)
        assert sorted(blocked) == sorted(expected_locks)

    return step


def scanning(request: pb.ScanRequest) -> Step:
    async def step(rig: Rig, model: NaiveTablet) -> None:
        pages = [page async for page in rig.tablet.scan(request)]
        expected_cells, expected_locks, rows = [], [], 0
        for row in sorted(
            model.rows(request.range.start, request.range.end), reverse=request.reverse
        ):
            cells, in_the_way = model.read_row(
                row,
                request.timestamp,
                wanted=wanted_by(request),
                passing=request.passing,
                report_deletes=request.report_deletes,
            )
            rows += bool(cells or in_the_way)
            if request.row_limit and rows > request.row_limit:
                break
            expected_cells += cells
            expected_locks += in_the_way
        assert [cell for page in pages for cell in cells_of(page)] == expected_cells
        blocked = [
            (found.lock.row, found.lock.column, found.lock.value)
            for page in pages
            for found in page.locks
        ]
        assert sorted(blocked) == sorted(expected_locks)
        for page in pages:
            page_rows = {*page.found.rows, *(found.lock.row for found in page.locks)}
            assert len(page_rows) <= (request.page_rows_max or 1000)
            if page.HasField("rest"):
                rest = page.rest
                assert not any(
                    rest.start <= row and (not rest.end or row < rest.end) for row in page_rows
                )

    return step


def cells_of(page: pb.ScanResponse) -> list[tuple[bytes, bytes, int, bytes | None]]:
    found = page.found
    return [
        (
            found.rows[at],
            found.columns[at],
            found.commit_timestamps[at],
            None if at in found.deletes else found.values[at],
        )
        for at in range(len(found.rows))
    ]


def dumping(space: cells_pb2.Space, page_rows_max: int, from_: int, until: int) -> Step:
    async def step(rig: Rig, model: NaiveTablet) -> None:
        cells = await rig.cells(
            space, page_rows_max=page_rows_max, from_timestamp=from_, until_timestamp=until
        )
        expected = []
        for (row, column, where, qualifier, timestamp), value in model.cells.items():
            time = LockRecord.decode(value).start_timestamp if where == LOCK else timestamp
            if where == space and from_ <= time and (not until or time < until):
                expected.append((row, column, qualifier, -timestamp, value))
        found = [(c.row, c.column, c.qualifier, -c.timestamp, c.value) for c in cells]
        assert found == sorted(expected)
        assert all(cell.space == space for cell in cells)

    return step


STEPS: st.SearchStrategy[Step] = st.one_of(
    st.lists(st.lists(MUTATIONS, min_size=1, max_size=5), min_size=1, max_size=3).map(mutating),
    st.lists(MUTATIONS, min_size=1, max_size=8).map(lambda all_: mutating([all_])),
    st.lists(READS, min_size=1, max_size=4).map(reading),
    scans().map(scanning),
    st.builds(
        lambda space, rows, from_, length: dumping(
            space, rows, from_, from_ + length if length else 0
        ),
        st.sampled_from([LOCK, WRITE, DATA, ROLLBACK, NOTIFY]),
        st.integers(0, 2),
        st.integers(0, 4),
        st.integers(0, 8),
    ),
)

PROGRAMS = st.lists(st.lists(STEPS, min_size=1, max_size=6), min_size=1, max_size=3)
"""The tablet is closed and opened again between the parts."""

TINY_LIMITS: dict[str, Any] = {
    "slice_entries": 3,
    "slice_rows": 2,
    "page_entries_max": 6,
    "recent_writes_max": 2,
    "notifications_indexed_max": 2,
    "commit_mutations_max": 4,
}
"""Small limits, so that every pause, every page and every overflow happens."""


async def run(
    program: list[list[Step]], limits: dict[str, Any], open_: Callable[[], Storage[Any]]
) -> None:
    model = NaiveTablet()
    for part in program:
        rig = await Rig(storage=open_(), **limits).open()
        for step in part:
            await step(rig, model)
        await rig.tablet.close()
        assert not rig.closed


@settings(max_examples=60, deadline=None)
@given(program=PROGRAMS, limits=st.sampled_from([{}, TINY_LIMITS]))
def test_a_tablet_in_memory_behaves_like_its_model(
    program: list[list[Step]], limits: dict[str, Any]
) -> None:
    disk = DurableMemory()
    run_virtually(run(program, limits, lambda: MemoryStorage(disk)))


@settings(max_examples=25, deadline=None)
@given(program=PROGRAMS, limits=st.sampled_from([{}, TINY_LIMITS]))
def test_a_tablet_on_leveldb_behaves_like_its_model(
    program: list[list[Step]], limits: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as directory, DiskThreads(1, "leveldb") as pool:
        path = Path(directory)
        asyncio.run(run(program, limits, lambda: LevelDBStorage(path, pool, create=True)))
