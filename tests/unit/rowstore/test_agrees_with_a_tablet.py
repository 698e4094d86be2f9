"""Any steps in any order: a row store answers each of them as a tablet does, and reads agree."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from random import Random

import pytest

from percolator.errors import CellAddress, SnapshotTooOld
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    PUT_ASIDE,
    WRITE_HEADER_BYTES,
    WRITE_KIND_OFFSET,
    LockRecord,
    RecordKind,
    WriteRecord,
    acknowledgement_column,
    read_lock_column,
)
from percolator.protocol import steps
from percolator.routing.cells import (
    APPLIED,
    Answer,
    CellMutation,
    RangeRequest,
    Refused,
    RowRequest,
)
from percolator.rowstore import mapping
from percolator.rowstore.adapter import stored_cells
from percolator.rowstore.collection import Bounds, Collected, RowCollector
from percolator.rowstore.layout import (
    COLLECTED,
    DATA,
    LOCK_ONLY,
    READS,
    ROLLBACKS,
    TRANSACTIONS,
    WRITES,
    row_key,
    stored_column,
)
from percolator.rowstore.port import Change, DeleteCell
from percolator.tablet.state import SafePoints
from percolator.testing.bigtable_in_memory import Row
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_WRITE, Cell, RowRange
from tests.simulation import planted_shared_bugs as row_bugs
from tests.unit.rowstore.model_store import PLACE, SECONDS, TABLE, TIMES, ModelStore, at
from tests.unit.tablet.tablets import REFUSED, Rig

_ROWS = (b"", b"a", b"\0")
_BOUNDS = (b"", b"\0", b"\0\0", b"a", b"b")
_ACKNOWLEDGEMENT = acknowledgement_column(b"f", b"c")
_COLUMNS = (b"c", b"", b"cd", b"\0hidden", _ACKNOWLEDGEMENT)
_VALUES = (b"value", b"12345678" + PUT_ASIDE)
_KINDS = (RecordKind.PUT, RecordKind.PUT_IN_DATA, RecordKind.DELETE, RecordKind.LOCK_ONLY)
_SPACES = (1, 2, 3, 4)
_WHOLE_SHARE = 0.5


def _kind_in(column: bytes, kind: RecordKind) -> RecordKind:
    """Acknowledgements are never long."""
    is_long = kind is RecordKind.PUT_IN_DATA
    return RecordKind.PUT if is_long and column == _ACKNOWLEDGEMENT else kind


class _Steps:
    """Steps of a few transactions on a few cells: timely, late and repeated ones."""

    def __init__(self, random: Random, *, acknowledging: bool) -> None:
        self._random = random
        self._columns = _COLUMNS if acknowledging else _COLUMNS[:-1]
        self.now = 1
        self._recent: deque[tuple[bytes, bytes, int]] = deque(maxlen=20)

    def _later(self) -> int:
        self.now += self._random.randint(1, 2)
        return at(self.now)

    def some(self) -> list[pb.Mutation]:
        """Steps on one row, as one call of the protocol has them."""
        row, start = self._random.choice(_ROWS), self._start()
        columns = self._random.sample(self._columns, self._random.randint(1, 3))
        kind = _KINDS[start // 64 % len(_KINDS)]
        make = self._random.choice(
            (self._prewrite, self._prewrite, self._commit, self._roll_back, self._other)
        )
        commit = self._later()
        if self._random.random() < 0.3:
            locked = self._random.choice(_COLUMNS[:2])
            columns = [read_lock_column(locked, start)]
            kind = RecordKind.LOCK_ONLY
        return [make(row, column, start, commit, _kind_in(column, kind)) for column in columns]

    def whole(self) -> tuple[list[pb.Mutation], list[pb.Mutation]]:
        """A transaction that locks its cells, and commits them."""
        row, start, commit = self._random.choice(_ROWS), self._later(), self._later()
        columns = self._random.sample(_COLUMNS, self._random.randint(1, 3))
        kinds = [_kind_in(one, self._random.choice(_KINDS)) for one in columns]
        locked = [
            self._prewrite(row, column, start, commit, kind)
            for column, kind in zip(columns, kinds, strict=True)
        ]
        committed = []
        for column, kind in zip(columns, kinds, strict=True):
            record = WriteRecord(start, kind, self._value(kind)).encode()
            committed.append(steps.commit_secondary(row, column, start, commit, record, ()))
            self._recent.append((row, column, start))
        return locked, committed

    def late_rollbacks(self) -> list[pb.Mutation]:
        """Of transactions that were committed."""
        return [steps.roll_back(*one) for one in self._recent]

    def _start(self) -> int:
        return at(self._random.randint(max(self.now - 12, 1), self.now))

    def _lock(self, start: int, kind: RecordKind) -> LockRecord:
        min_commit = start + self._random.choice((1, 1, 200))
        ttl = self._random.choice((1_000, 2_000))
        primary = CellAddress(TABLE, b"a", b"c")
        return LockRecord(start, min_commit, ttl, kind, b"", primary, self._value(kind))

    def _value(self, kind: RecordKind) -> bytes:
        return self._random.choice(_VALUES) if kind is RecordKind.PUT else b""

    def _prewrite(
        self, row: bytes, column: bytes, start: int, _: int, kind: RecordKind
    ) -> pb.Mutation:
        data = b"x" * 20 if kind is RecordKind.PUT_IN_DATA else None
        return steps.prewrite(row, column, start, self._lock(start, kind).encode(), data)

    def _commit(
        self, row: bytes, column: bytes, start: int, commit: int, kind: RecordKind
    ) -> pb.Mutation:
        value = self._value(kind)
        record = WriteRecord(start, kind, value).encode()
        if self._random.random() < 0.5:
            seen = start + self._random.choice((1, 1, 200))
            return steps.commit_primary(row, column, start, seen, commit, record, ())
        return steps.commit_secondary(row, column, start, commit, record, ())

    def _roll_back(
        self, row: bytes, column: bytes, start: int, _: int, kind: RecordKind
    ) -> pb.Mutation:
        if self._random.random() < 0.5:
            return steps.roll_back(row, column, start)
        seen = self._lock(start, kind).prefix if self._random.random() < 0.8 else b""
        return steps.roll_back_expired(row, column, start, seen)

    def _other(
        self, row: bytes, column: bytes, start: int, _: int, kind: RecordKind
    ) -> pb.Mutation:
        if self._random.random() < 0.5:
            return steps.status(row, column, start)
        seen = self._lock(start, kind)
        return steps.replace_lock(row, column, seen.prefix, self._lock(start, kind).encode())


def _told_by_tablet(result: pb.MutationResult) -> object:
    if result.outcome != REFUSED:
        return result.outcome
    cell = result.cell if result.HasField("cell") else None
    return result.failed_condition, _plain(cell)


def _told_by_row_store(answer: Answer) -> object:
    if isinstance(answer, Refused):
        return answer.condition, _plain(answer.cell)
    return pb.OUTCOME_APPLIED if answer is APPLIED else answer


def _plain(cell: Cell | None) -> object:
    """Without what a tablet adds to lock-only records. Of several read locks on the other side, any
    may be named."""
    if cell is None:
        return None
    if cell.qualifier:
        return cell.space, cell.row, cell.column, "another column"
    value = cell.value
    if cell.space == SPACE_WRITE and value[WRITE_KIND_OFFSET] == KIND_LOCK_ONLY:
        value = value[:WRITE_HEADER_BYTES]
    return cell.space, cell.row, cell.column, cell.timestamp, value


@pytest.mark.parametrize("seed", range(30))
async def test_every_step_is_answered_as_by_a_tablet_and_leaves_the_same_cells(seed: int) -> None:
    await _agrees(seed)


@pytest.mark.parametrize("seed", range(30))
async def test_collection_leaves_the_same_cells_as_in_a_tablet(seed: int) -> None:
    """A row refuses what may meet a gap, but only if something of it was collected."""
    await _agrees(seed, collecting=True)


COLLECTION_BUGS = {
    "prewrite passes the note": row_bugs.prewrite_passes_the_note,
    "rollback passes the note": row_bugs.rollback_passes_the_note,
    "note before the own commit": row_bugs.note_judged_before_the_own_commit,
    "read passes the note": row_bugs.read_passes_the_note,
    "deletes without a note": row_bugs.deletes_without_a_note,
    "deletion goes first": row_bugs.deletion_goes_first,
    "dead letters are forgotten": row_bugs.dead_letters_are_forgotten,
    "acknowledgements stay": row_bugs.acknowledgements_stay,
    "values stay": row_bugs.values_stay,
}


FIRST_SEEDS = {"passes a heartbeat": 20, "passes a push": 13, "prewrite passes the note": 3}
"""Where the search for a mistake that only few seeds show begins: it costs only time if another
shows it by now. All other seeds are tried after it."""


@pytest.mark.parametrize("bug", COLLECTION_BUGS)
async def test_a_mistake_of_collection_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    COLLECTION_BUGS[bug](monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await _all_agree(60, first=FIRST_SEEDS.get(bug, 0), collecting=True)


@pytest.mark.parametrize("bug", ["passes a heartbeat", "passes a push", "deletes no value"])
async def test_a_mistake_that_no_history_shows_is_found(
    bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rolling back a living owner, for instance, costs it a run, and breaks no promise."""
    if bug == "deletes no value":
        correct = mapping._changed
        monkeypatch.setattr(mapping, "_changed", lambda *step: _no_deletion(*correct(*step)))
    elif bug == "passes a heartbeat":
        monkeypatch.setattr(mapping, "_other_locks", lambda *_: iter(()))
    else:
        row_bugs.commit_of_the_primary_passes_a_push(monkeypatch)
    with pytest.raises(AssertionError):
        await _all_agree(30, first=FIRST_SEEDS.get(bug, 0))


def _no_deletion(*changes: Change) -> tuple[Change, ...]:
    return tuple(
        DeleteCell(ROLLBACKS, b"c", one.time)
        if isinstance(one, DeleteCell) and one.family == DATA
        else one
        for one in changes
    )


async def _all_agree(seeds: int, *, first: int, collecting: bool = False) -> None:
    for seed in range(seeds):
        await _agrees((first + seed) % seeds, collecting=collecting)


async def _agrees(seed: int, *, collecting: bool = False) -> None:
    random = Random(seed)
    tablet = await Rig(slice_entries=3, page_entries_max=seed + 5).open()
    rows = await ModelStore(page_rows_max=1 + seed % 3).opened()
    drawn = _Steps(random, acknowledging=collecting)
    pair = _Pair(tablet, rows)
    for number in range(150):
        if collecting and number % 30 == 29:
            await pair.collect(random, drawn.now)
            for late in drawn.late_rollbacks():
                await pair.make([late])
        if collecting and random.random() < _WHOLE_SHARE:
            for some in drawn.whole():
                await pair.make(some)
        await pair.make(drawn.some())
        read_at = at(random.randint(1, drawn.now)) + random.choice((0, 7))
        await pair.reads_agree(read_at)
        await pair.scans_agree(read_at)
    assert (await pair.require_same_cells()) + pair.collected > 20
    assert pair.collected > 10 or not collecting


class _Pair:
    """A tablet and a row store in which the same was done."""

    def __init__(self, tablet: Rig, rows: ModelStore) -> None:
        self._tablet = tablet
        self._rows = rows
        self._below = self._ended_below = 0
        self.collected = 0
        self._collector = RowCollector(rows.store, TIMES, rows.world, rows.limits)

    async def make(self, some: Sequence[pb.Mutation]) -> None:
        """Makes steps of one row on both sides, and compares the answers.

        Below a safe point, a row store still tells what became of the transaction, if it knows.
        """
        if not self._is_comparable(some[0]):
            return
        knows = [self._knows_commit(one) for one in some]
        by_tablet = await self._tablet.mutate(*some)
        mutations = [CellMutation(TABLE, one) for one in some]
        by_rows = await self._rows.cells.mutate(mutations, self._rows.deadline)
        for told, expected, known in zip(by_rows, by_tablet, knows, strict=True):
            if not expected.error.HasField("snapshot_too_old"):
                assert _told_by_row_store(told) == _told_by_tablet(expected)
            elif known:
                assert isinstance(told, Refused)
                assert told.condition == steps.OWN_COMMIT
            elif isinstance(told, Refused):
                assert told.condition == steps.OWN_ROLLBACK
            else:
                assert isinstance(told, SnapshotTooOld)

    def _knows_commit(self, step: pb.Mutation) -> bool:
        start = mapping.mapped(step, TIMES).start.to_bytes(8, "big")
        return any(
            family in (WRITES, LOCK_ONLY)
            and column == stored_column(step.column)
            and value[:8] == start
            for (family, column, _), value in self._row(step.row).items()
        )

    async def collect(self, random: Random, now: int) -> None:
        """Resolves older locks, as a round does, and collects on both sides."""
        ended = random.randint(max(now - 20, 1), now)
        below = at(random.randint(max(ended - 10, 1), ended))
        self._below = max(self._below, below)
        self._ended_below = max(self._ended_below, at(ended))
        for lock in await self._tablet.cells(SPACE_LOCK):
            start = LockRecord.decode(lock.value).start_timestamp
            if start < self._ended_below:
                rolling = steps.roll_back(lock.row, lock.column, start)
                await self._tablet.apply(rolling)
                mutation = CellMutation(TABLE, rolling)
                assert await self._rows.cells.mutate([mutation], self._rows.deadline) == [APPLIED]
        before = await self.require_same_cells()
        rows_before = {row: self._row(row) for row in _ROWS}
        safe_points = SafePoints(self._below, self._ended_below)
        await self._tablet.tablet.raise_safe_points(safe_points)
        await self._tablet.tablet.collect(*safe_points[:2])
        bounds = Bounds(self._below, self._ended_below)
        collected = Collected()
        assert await self._collector.collect(TABLE, bounds, collected) is None
        assert not collected.passed_over
        assert before - (await self.require_same_cells()) == collected.cells
        self.collected += collected.cells
        for row, cells in rows_before.items():
            gone = {family for family, _, _ in cells.keys() - self._row(row).keys()}
            if gone - {COLLECTED}:
                assert self._note(row, TRANSACTIONS) == self._ended_below
            if WRITES in gone:
                assert self._note(row, READS) == self._below

    def _is_comparable(self, step: pb.Mutation) -> bool:
        """True if a row refuses the step if the tablet does: that has one safe point for all."""
        start = mapping.mapped(step, TIMES).start
        return start >= self._ended_below or start < self._note(step.row, TRANSACTIONS)

    def _note(self, row: bytes, column: bytes) -> int:
        found = [one[2] for one in self._row(row) if one[:2] == (COLLECTED, column)]
        return TIMES.timestamp(max(found)) if found else 0

    def _row(self, row: bytes) -> Row:
        rows: Mapping[bytes, Row] = self._rows.model.tables[PLACE.table(TABLE)].rows
        return rows.get(row_key(row), {})

    async def reads_agree(self, timestamp: int) -> None:
        row = _ROWS[timestamp // 64 % len(_ROWS)]
        if timestamp >= self._below:
            await _reads_agree(self._tablet, self._rows, row, timestamp)
        elif timestamp < self._note(row, READS):
            read = pb.RowRead(row=row, columns=_COLUMNS, timestamp=timestamp)
            with pytest.raises(SnapshotTooOld, match="older than the history that is kept"):
                await self._rows.cells.read([RowRequest(TABLE, read)], self._rows.deadline)
            pages = self._rows.cells.scan(RangeRequest(TABLE, b"", b"", None, timestamp), SECONDS)
            with pytest.raises(SnapshotTooOld):
                [page async for page in pages]

    async def scans_agree(self, timestamp: int) -> None:
        """Reads some range of rows, in either direction and in pages of any size."""
        if timestamp < self._below:
            return
        random = Random(timestamp)
        start, end = sorted(random.choices(_BOUNDS, k=2))
        if start == end:
            end = b""
        passing = [timestamp // 64 * 64 - 64] if timestamp % 64 else []
        reverse, columns = random.random() < 0.5, random.choice((None, _COLUMNS[:2]))
        request = RangeRequest(
            TABLE, start, end, columns, timestamp, reverse, report_deletes=True, passing=(*passing,)
        )
        pages = [page async for page in self._rows.cells.scan(request, SECONDS)]
        by_rows = [
            (row, column, cell.commit_timestamp, cell.value)
            for page in pages
            for row, cells in page.rows.items()
            for column, cell in sorted(cells.items())
        ]
        answers = await self._tablet.scan(
            timestamp,
            range=RowRange(start=start, end=end),
            columns=columns,
            reverse=reverse,
            report_deletes=True,
            passing=passing,
            page_rows_max=random.randint(1, 3),
        )
        assert by_rows == [cell for answer in answers for cell in _cells_of(answer.found)]
        # Backwards, a tablet names the locks of a row in the order of the scan.
        locks = sorted(lock.value for page in pages for lock in page.locks)
        assert locks == sorted(one.lock.value for answer in answers for one in answer.locks)

    async def require_same_cells(self) -> int:
        """Returns how many there are."""
        found = [cell async for cell in stored_cells(self._rows.store, TABLE, TIMES, SECONDS)]
        stored = [cell for space in _SPACES for cell in await self._tablet.cells(space)]  # type: ignore[arg-type]
        assert sorted(map(_plain, found), key=repr) == sorted(map(_plain, stored), key=repr)
        return len(stored)


def _cells_of(found: pb.FoundCells) -> Iterator[tuple[bytes, bytes, int, bytes | None]]:
    """Row, column, commit timestamp and value; None for a deletion."""
    cells = zip(found.rows, found.columns, found.commit_timestamps, found.values, strict=True)
    for place, (row, column, commit, value) in enumerate(cells):
        yield row, column, commit, None if place in found.deletes else value


async def _reads_agree(tablet: Rig, rows: ModelStore, row: bytes, timestamp: int) -> None:
    passing = [timestamp // 64 * 64 - 64] if timestamp % 64 else []
    wanted: tuple[tuple[tuple[bytes, ...], bool, tuple[bytes, ...]], ...]
    wanted = ((), True, ()), (_COLUMNS, False, ()), ((b"",), False, (b"c",))
    for columns, all_columns, prefixes in wanted:
        read = pb.RowRead(
            row=row,
            columns=columns,
            all_columns=all_columns,
            column_prefixes=prefixes,
            timestamp=timestamp,
            passing=passing,
            report_deletes=True,
        )
        (by_rows,) = await rows.cells.read([RowRequest(TABLE, read)], rows.deadline)
        target = pb.TabletTarget(tablet_id=1, epoch=2, schema_version=3)
        by_tablet = await tablet.tablet.read(pb.ReadBatch(target=target, reads=[read]))
        locks = {(one.lock.column, one.lock.value) for one in by_tablet.locks}
        assert {(one.column, one.value) for one in by_rows.locks} == locks
        assert all(one.space == SPACE_LOCK for one in by_rows.locks)
        if locks:
            continue  # what was found is then incomplete, in either way
        found = by_tablet.found
        cells = zip(found.columns, found.commit_timestamps, found.values, strict=True)
        expected = {
            column: (commit, None if place in set(found.deletes) else value)
            for place, (column, commit, value) in enumerate(cells)
        }
        assert by_rows.found == expected
