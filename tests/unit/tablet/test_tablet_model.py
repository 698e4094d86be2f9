"""A tablet, on either storage, answers every request as the naive model of its contract does."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.conditions import Predicate
from percolator.errors import CellAddress, InvariantViolation, SchemaError
from percolator.formats.records import LockRecord, RecordKind, WriteRecord, acknowledgement_column
from percolator.services.chassis.files import DiskThreads
from percolator.services.tabletserver.storage import LevelDBStorage
from percolator.tablet import scans as tablet_scans
from percolator.tablet.cells import D, W, cell_prefix, component, inverted
from percolator.tablet.state import FOREVER, Lifetimes, Ttls
from percolator.tablet.visible_cells import RUN_VALUE_BYTES_MAX, VisibleCells, VisibleRuns, Walked
from percolator.testing.memory_storage import DurableMemory, MemoryStorage
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import RowFilter
from percolator.world import Storage
from tests.simulation.virtual_time import run_virtually
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
    CountingStorage,
    Rig,
    delete,
    delete_if,
    lock_record,
    mutation,
    own,
    put,
    write_record,
)

# What tabletserver.proto promises, written down as plainly as possible: the model of a tablet.

Address = tuple[bytes, bytes, int, bytes, int]
"""Row, column, space, qualifier, timestamp."""

Found = tuple[bytes, bytes, int, bytes | None]
"""Row, column, commit timestamp, value (None: deleted)."""


class NaiveTablet:
    """All cells in one dictionary, which every request searches completely."""

    def __init__(self) -> None:
        self.cells: dict[Address, bytes] = {}

    def mutate(self, mutation: pb.Mutation) -> pb.MutationResult:
        for index, condition in enumerate(mutation.conditions):
            holds, offender = self._judge(mutation, condition)
            if not holds:
                result = pb.MutationResult(outcome=pb.OUTCOME_REFUSED, failed_condition=index)
                if offender is not None:
                    result.cell.CopyFrom(
                        cells_pb2.Cell(
                            space=condition.space,
                            row=mutation.row,
                            column=mutation.column,
                            timestamp=offender[0],
                            value=offender[1],
                            qualifier=condition.qualifier,
                        )
                    )
                return result
        if any(self._is_out_of_order(mutation, change) for change in mutation.changes):
            return pb.MutationResult(outcome=pb.OUTCOME_NOT_EXECUTED)
        for change in mutation.changes:
            address = (
                mutation.row,
                mutation.column,
                change.space,
                change.qualifier,
                change.timestamp,
            )
            if change.kind == pb.Change.KIND_PUT:
                self.cells[address] = self._stored(mutation, change)
            elif change.kind == pb.Change.KIND_DELETE or self.cells.get(address, b"").startswith(
                change.value
            ):
                self.cells.pop(address, None)
        return pb.MutationResult(outcome=pb.OUTCOME_APPLIED)

    def _is_out_of_order(self, mutation: pb.Mutation, change: pb.Change) -> bool:
        """True if a put or deletion is just below a lock-only commit that names an older one."""
        if change.kind != pb.Change.KIND_PUT or change.space != cells_pb2.SPACE_WRITE:
            return False
        above = [
            (commit, record)
            for commit, record in self.commits(mutation.row, mutation.column)
            if commit > change.timestamp
        ]
        if not above or WriteRecord.decode(change.value).kind is RecordKind.LOCK_ONLY:
            return False
        named = above[0][1].last_change
        return named is not None and named < change.timestamp

    def _stored(self, mutation: pb.Mutation, change: pb.Change) -> bytes:
        """A lock-only record names the change below it, if the mutation commits nothing else."""
        if change.space != cells_pb2.SPACE_WRITE:
            return change.value
        record = WriteRecord.decode(change.value)
        commits = sum(other.space == cells_pb2.SPACE_WRITE for other in mutation.changes)
        if record.kind is not RecordKind.LOCK_ONLY or commits > 1:
            return record.encode()
        changes = [
            commit
            for commit, other in self.commits(mutation.row, mutation.column)
            if commit < change.timestamp and other.kind is not RecordKind.LOCK_ONLY
        ]
        return replace(record, last_change=max(changes, default=0)).encode()

    def commits(self, row: bytes, column: bytes) -> list[tuple[int, WriteRecord]]:
        """The versions of a cell, oldest first."""
        return sorted(
            (
                (address[4], WriteRecord.decode(value))
                for address, value in self.cells.items()
                if address[:3] == (row, column, cells_pb2.SPACE_WRITE)
            ),
            key=lambda commit: commit[0],
        )

    def _judge(
        self, mutation: pb.Mutation, condition: pb.Condition
    ) -> tuple[bool, tuple[int, bytes] | None]:
        in_range = sorted(
            (timestamp, value)
            for (row, column, space, qualifier, timestamp), value in self.cells.items()
            if (row, column, space) == (mutation.row, mutation.column, condition.space)
            and qualifier == condition.qualifier
            and condition.from_timestamp <= timestamp
            and (not condition.until_timestamp or timestamp < condition.until_timestamp)
        )
        own = condition.from_timestamp.to_bytes(8, "big")
        selected = [found for found in in_range if found[1].startswith(condition.prefix)]
        match condition.expectation:
            case pb.Condition.EXPECTATION_ABSENT:
                if condition.space == cells_pb2.SPACE_WRITE and condition.prefix[:8] == own:
                    selected = [found for found in in_range[:1] if found in selected]
                return not selected, selected[0] if selected else None
            case pb.Condition.EXPECTATION_PRESENT:
                others = [found for found in in_range if found not in selected]
                return bool(selected), others[-1] if others and not selected else None
            case pb.Condition.EXPECTATION_EQUALS:
                if selected and selected[-1][1] == condition.prefix:
                    return True, None
                others = [found for found in in_range if found[1] != condition.prefix]
                return False, others[-1] if others else None
            case _:
                wrong = [found for found in selected if not found[1].startswith(condition.required)]
                return not wrong, wrong[-1] if wrong else None

    def rows(self, start: bytes, end: bytes) -> list[bytes]:
        """Rows of the range that have any cell."""
        return sorted(
            {
                address[0]
                for address in self.cells
                if start <= address[0] and (not end or address[0] < end)
            }
        )

    def read_row(
        self,
        row: bytes,
        timestamp: int,
        *,
        wanted: Callable[[bytes], bool],
        passing: Iterable[int] = (),
        report_deletes: bool = False,
    ) -> tuple[list[Found], list[tuple[bytes, bytes, bytes]]]:
        """The cells found, and the locks in the way (row, column, record), in column order."""
        found: list[Found] = []
        locks: list[tuple[bytes, bytes, bytes]] = []
        columns = sorted({address[1] for address in self.cells if address[0] == row})
        for column in filter(wanted, columns):
            record = self.cells.get((row, column, cells_pb2.SPACE_LOCK, b"", 0))
            if record is not None and _blocks(LockRecord.decode(record), timestamp, passing):
                locks.append((row, column, record))
                continue
            seen = self._newest(row, column, timestamp)
            if seen is not None and (seen[1] is not None or report_deletes):
                found.append((row, column, *seen))
        return found, locks

    def _newest(self, row: bytes, column: bytes, timestamp: int) -> tuple[int, bytes | None] | None:
        for commit, record in reversed(self.commits(row, column)):
            if commit > timestamp:
                continue
            match record.kind:
                case RecordKind.PUT:
                    return commit, record.value
                case RecordKind.PUT_IN_DATA:
                    start = record.start_timestamp
                    return commit, self.cells[(row, column, cells_pb2.SPACE_DATA, b"", start)]
                case RecordKind.DELETE:
                    return commit, None
        return None


def _blocks(lock: LockRecord, timestamp: int, passing: Iterable[int]) -> bool:
    return (
        lock.kind != RecordKind.LOCK_ONLY
        and lock.start_timestamp <= timestamp
        and lock.min_commit_timestamp <= timestamp
        and lock.start_timestamp not in passing
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


@st.composite
def row_filters(draw: st.DrawFn, depth: int = 0) -> RowFilter:
    kind = draw(st.sampled_from(_CONDITIONS if depth < 2 else _CONDITIONS[2:]))
    if kind in _CONDITIONS[:2]:
        parts = draw(st.lists(row_filters(depth + 1), min_size=1, max_size=2))
        return RowFilter(kind=kind, parts=parts)
    column = draw(st.sampled_from([b"c", b"c\0d"]))
    if kind == RowFilter.KIND_NULL:
        return RowFilter(kind=kind, column=column)
    codec = draw(st.sampled_from(["raw", "boolean"]))
    operand = b"\0" if codec == "boolean" else draw(VALUES)
    return RowFilter(kind=kind, column=column, codec=codec, operands=[operand])


_CONDITIONS = (
    RowFilter.KIND_ALL,
    RowFilter.KIND_ANY,
    RowFilter.KIND_NULL,
    RowFilter.KIND_EQUAL,
    RowFilter.KIND_AT_LEAST,
    RowFilter.KIND_LESS,
)


def scanning_by_condition(asked: pb.ScanRequest, condition: RowFilter, sifted_min: int) -> Step:
    """A scan returns the rows that another one returns, but for those that certainly do not match:
    no lock is in their way, and all that is compared can be read."""
    asked.ClearField("columns")
    asked.ClearField("column_prefixes")
    asked.all_columns, asked.report_deletes, asked.row_limit = True, False, 0

    async def step(rig: Rig, _model: NaiveTablet) -> None:
        predicate = Predicate(condition)
        pages = [page async for page in rig.tablet.scan(asked)]
        rows: dict[bytes, dict[bytes, bytes | None]] = {}
        for page in pages:
            for row, column, _, value in cells_of(page):
                rows.setdefault(row, {})[column] = value
        locks = [found.lock for page in pages for found in page.locks]
        open_rows = {lock.row for lock in locks}
        matches = 0
        for row, cells in list(rows.items()):
            try:
                keeps = predicate.keeps_row(cells)
            except SchemaError:
                open_rows.add(row)
                continue
            matches += keeps and row not in open_rows
            if not keeps and row not in open_rows:
                del rows[row]
        filtered = pb.ScanRequest()
        filtered.CopyFrom(asked)
        filtered.filter.CopyFrom(condition)
        for filtered.count in (False, True):
            counted, found, met = 0, dict[bytes, dict[bytes, bytes | None]](), []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tablet_scans, "SIFTED_MIN", sifted_min)
                pages = [page async for page in rig.tablet.scan(filtered)]
            for page in pages:
                counted += page.counted
                met += [one.lock for one in page.locks]
                for row, column, _, value in cells_of(page):
                    assert column not in found.get(row, {})
                    found.setdefault(row, {})[column] = value
            assert met == locks
            if filtered.count:
                assert counted == matches
                assert found == {row: rows[row] for row in rows if row in open_rows}
            else:
                assert list(found.items()) == list(rows.items())

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
    st.builds(scanning_by_condition, scans(), row_filters(), st.sampled_from([0, 2, 8])),
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


def _dense(chance: random.Random) -> list[pb.Mutation]:
    """Rows with several columns and versions of all kinds, some of them locked."""
    found: dict[tuple[bytes, bytes, int], pb.Mutation] = {}
    for row in range(12):
        for column in (b"c", b"c\0d", b"d"):
            key = b"%02d" % row
            for at in range(1, chance.randrange(1, 8)):
                kind = chance.choice([RecordKind.PUT] * 4 + list(RecordKind))
                value = chance.choice([b"", b"\0", b"\1", b"v"])
                apart = kind == RecordKind.PUT_IN_DATA
                record = WriteRecord(at, kind, b"" if apart else value).encode()
                changes = [put(WRITE, record, at + 1)]
                if apart:
                    changes.append(put(DATA, value, at))
                found[key, column, at] = mutation(key, *changes, column=column)
            if chance.random() < 0.02:
                lock = put(LOCK, lock_record(6, b"v"))
                found[key, column, 0] = mutation(key, lock, column=column)
    return list(found.values())


@pytest.mark.parametrize("limits", [{}, TINY_LIMITS], ids=["large pages", "tiny pages"])
@pytest.mark.parametrize("seed", range(20))
async def test_a_condition_leaves_out_what_certainly_does_not_match(
    seed: int, limits: dict[str, Any]
) -> None:
    chance = random.Random(seed)
    rig, model = await Rig(**limits).open(), NaiveTablet()
    await rig.apply(*_dense(chance))
    for codec, kind, operand in product(
        ("raw", "boolean"), _CONDITIONS[2:], (b"", b"\0", b"\1", b"v")
    ):
        if codec == "boolean" and operand not in (b"\0", b"\1"):
            continue
        one = RowFilter(kind=kind, column=b"c", codec=codec, operands=[operand])
        if kind == RowFilter.KIND_NULL:
            one = RowFilter(kind=kind, column=b"c")
        other = RowFilter(
            kind=RowFilter.KIND_EQUAL, column=b"c\0d", codec=codec, operands=[operand]
        )
        both = RowFilter(kind=chance.choice(_CONDITIONS[:2]), parts=[one, other])
        asked = pb.ScanRequest(
            target=TARGET,
            timestamp=chance.randrange(2, 9),
            page_rows_max=chance.choice([0, 2]),
            reverse=chance.random() < 0.2,
        )
        condition = chance.choice([one, both])
        await scanning_by_condition(asked, condition, chance.choice([0, 2, 8]))(rig, model)


# Cells judged in runs: a page has what it has when its entries are judged one by one.

RUN_COLUMNS = (b"a", b"b\0", b"\x01", acknowledgement_column(b"observer", b"a"))
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
    st.integers(0, len(RUN_COLUMNS) - 1),
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
        cell = cell_prefix(_row(row, zeros), RUN_COLUMNS[column])
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
    columns = None if wanted is None else frozenset(component(RUN_COLUMNS[one]) for one in wanted)
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
        found.append((page.fill(slice_entries), cursor.key(), *page.found()))
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
        columns=[RUN_COLUMNS[one] for one in wanted],
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
    assert (len(page.found.rows), page.found.rows[0]) == (rows, _row(rows - 1, zeros=False))
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
    assert (page.rows, counts) == (60, Counter({"seek W": 1, "step": 60}))


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
