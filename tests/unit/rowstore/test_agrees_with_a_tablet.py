"""Any steps in any order: a row store answers each of them as a tablet does, and reads agree."""

from __future__ import annotations

from random import Random

import pytest

from percolator.errors import CellAddress
from percolator.formats.hidden_cells import read_lock_column
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    WRITE_HEADER_BYTES,
    WRITE_KIND_OFFSET,
    LockRecord,
    RecordKind,
    WriteRecord,
)
from percolator.protocol import steps
from percolator.protocol.read_locks import mark
from percolator.routing.cells import APPLIED, Answer, CellMutation, Refused, RowRequest
from percolator.rowstore import mapping
from percolator.rowstore.contents import stored_cells
from percolator.rowstore.layout import DATA, ROLLBACKS
from percolator.rowstore.port import Change, DeleteCell
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_WRITE, Cell
from tests.simulation import planted_row_bugs as row_bugs
from tests.unit.rowstore.model_store import SECONDS, TABLE, TIMES, ModelStore, at
from tests.unit.tablet.tablets import REFUSED, Rig

_ROWS = (b"", b"a", b"\0")
_COLUMNS = (b"c", b"", b"cd", b"\0hidden")
_KINDS = (RecordKind.PUT, RecordKind.PUT_IN_DATA, RecordKind.DELETE, RecordKind.LOCK_ONLY)
_SPACES = (1, 2, 3, 4)


class _Steps:
    """Steps of a few transactions on a few cells: timely, late and repeated ones."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.now = 1

    def _later(self) -> int:
        self.now += self._random.randint(1, 2)
        return at(self.now)

    def some(self) -> list[pb.Mutation]:
        """Steps on one row, as one call of the protocol has them."""
        row, start = self._random.choice(_ROWS), self._start()
        columns = self._random.sample(_COLUMNS, self._random.randint(1, 3))
        kind = self._random.choice(_KINDS)
        make = self._random.choice(
            (self._prewrite, self._prewrite, self._commit, self._roll_back, self._other)
        )
        commit = self._later()
        if self._random.random() < 0.3:
            locked = self._random.choice(_COLUMNS[:2])
            columns = [read_lock_column(locked, start)]
            kind = RecordKind.LOCK_ONLY
        return [make(row, column, start, commit, kind) for column in columns]

    def _start(self) -> int:
        return at(self._random.randint(max(self.now - 12, 1), self.now))

    def _lock(self, start: int, kind: RecordKind) -> LockRecord:
        min_commit = start + self._random.choice((1, 1, 200))
        ttl = self._random.choice((1_000, 2_000))
        primary = CellAddress(TABLE, b"a", b"c")
        value = b"value" if kind is RecordKind.PUT else b""
        return LockRecord(start, min_commit, ttl, kind, b"", primary, value)

    def _prewrite(
        self, row: bytes, column: bytes, start: int, _: int, kind: RecordKind
    ) -> pb.Mutation:
        data = b"x" * 20 if kind is RecordKind.PUT_IN_DATA else None
        step = steps.prewrite(row, column, start, self._lock(start, kind).encode(), data)
        if column.startswith(b"\0read"):
            mark(step)
        return step

    def _commit(
        self, row: bytes, column: bytes, start: int, commit: int, kind: RecordKind
    ) -> pb.Mutation:
        value = b"value" if kind is RecordKind.PUT else b""
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


@pytest.mark.parametrize("bug", ["passes a heartbeat", "passes a push", "deletes no value"])
async def test_a_mistake_that_no_history_shows_is_found(
    bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rolling back a living owner, for instance, costs it a run, and breaks no promise."""
    if bug == "deletes no value":
        correct = mapping._changed
        monkeypatch.setattr(mapping, "_changed", lambda *step: _no_deletion(correct(*step)))
    elif bug == "passes a heartbeat":
        monkeypatch.setattr(mapping, "_other_locks", lambda *_: iter(()))
    else:
        row_bugs.commit_of_the_primary_passes_a_push(monkeypatch)
    with pytest.raises(AssertionError):
        await _all_agree(30)


def _no_deletion(change: Change) -> Change:
    if isinstance(change, DeleteCell) and change.family == DATA:
        return DeleteCell(ROLLBACKS, b"c", change.time)
    return change


async def _all_agree(seeds: int) -> None:
    for seed in range(seeds):
        await _agrees(seed)


async def _agrees(seed: int) -> None:
    random = Random(seed)
    tablet, rows = await Rig().open(), await ModelStore().opened()
    drawn = _Steps(random)
    for _ in range(150):
        some = drawn.some()
        by_tablet = await tablet.mutate(*some)
        by_rows = await rows.cells.mutate([CellMutation(TABLE, one) for one in some], rows.deadline)
        assert list(map(_told_by_row_store, by_rows)) == list(map(_told_by_tablet, by_tablet))
        await _reads_agree(tablet, rows, at(random.randint(1, drawn.now)) + random.choice((0, 7)))
    found = [cell async for cell in stored_cells(rows.store, TABLE, TIMES, SECONDS)]
    stored = [cell for space in _SPACES for cell in await tablet.cells(space)]  # type: ignore[arg-type]
    assert sorted(map(_plain, found), key=repr) == sorted(map(_plain, stored), key=repr)
    assert len(stored) > 20


async def _reads_agree(tablet: Rig, rows: ModelStore, timestamp: int) -> None:
    row = _ROWS[timestamp // 64 % len(_ROWS)]
    passing = [timestamp // 64 * 64 - 64] if timestamp % 64 else []
    wanted: tuple[tuple[tuple[bytes, ...], bool, tuple[bytes, ...]], ...]
    wanted = ((), True, ()), (_COLUMNS, False, ()), ((b"",), True, (b"c",))
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
