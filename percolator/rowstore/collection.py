"""Collection in one row: what is deleted of it, in one change with the note that says so.

percolator/formats/records.py says which versions are out of reach. The round around this
(percolator/history) has resolved all locks below the safe point before, in all tables. Locks may
appear since then: a late prewrite is admitted by rows without a note. So the change is refused if
the row has a lock below the safe point; it is collected another time. Such a transaction can commit
only above the safe point, because its timestamp is younger than the round. So what was decided from
an earlier reading of the row still holds when the change is made.

What each rule prevents, besides those of records.py:

* A deletion stays while an observer may have to see it: from `awaited_from` on, the start of the
  oldest transaction whose observers have not run, and while its cell has a dead letter.
* What observers have acknowledged of a cell goes with the cell's deletion, or later: without it, a
  deletion would be handled again. One that tells of a dead letter stays.
* A deletion in a row that was loaded in bulk stays: a late call of the load may write its cells
  again, which then are as invisible as before.
* The version that a cell had at the start of an observer's last run stays under a newer one, until
  the observer has run again: otherwise it could not undo what it has made of that version. A
  deletion for which no observer waits takes it along, in the same change: left alone, it would be
  visible again.
* Many deletions are several changes, each with its note. The last records of cells go last.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Final

from percolator.formats.records import (
    KIND_PUT,
    KIND_PUT_IN_DATA,
    WRITE_HEADER,
    WRITE_HEADER_BYTES,
    WRITE_KIND_OFFSET,
    Fate,
    Reach,
    acknowledged_start,
    observed_column,
    tells_of_a_dead_letter,
)
from percolator.limits import Limits
from percolator.rowstore import layout
from percolator.rowstore.layout import (
    COLLECTED,
    DATA,
    LOADED,
    LOCK_ONLY,
    LOCKS,
    READS,
    ROLLBACKS,
    SPACING,
    TRANSACTIONS,
    WRITES,
    Times,
    column_of,
    row_of,
    stored_column,
    written_by_others,
)
from percolator.rowstore.patience import Patience, steady_scan
from percolator.rowstore.port import (
    Change,
    Check,
    DeleteCell,
    RowStore,
    Selection,
    SetCell,
    StoredCell,
    StoredRow,
)
from percolator.world import World

CHANGES_MAX: Final = 10_000
"""The most cells that one change deletes: stores limit that."""


@dataclass(frozen=True)
class Bounds:
    """How far history may be collected."""

    below: int
    """The safe point of snapshots of this table."""
    ended_below: int
    """The safe point of transactions, in all tables."""
    awaited_from: int = 0
    """Deletions committed at or above it stay, because an observer may have to see them; 0: none
    have to wait."""

    def storable(self) -> Bounds:
        """With safe points at which a note can stand."""
        below, ended = (at // SPACING * SPACING for at in (self.below, self.ended_below))
        return Bounds(below, max(below, ended), self.awaited_from)


@dataclass
class Plan:
    """Deletions in one row."""

    versions: list[DeleteCell] = field(default_factory=list)
    """Versions that older reads could have seen, with its values."""
    evidence: list[DeleteCell] = field(default_factory=list)
    """Lock-only records and rollback markers."""
    last: list[list[DeleteCell]] = field(default_factory=list)
    """Deletions that come after all others: in each case all of it or nothing."""
    old_notes: list[DeleteCell] = field(default_factory=list)

    @property
    def cells(self) -> int:
        """How many cells are deleted."""
        return len(self.versions) + len(self.evidence) + sum(map(len, self.last))

    def changes(self, bounds: Bounds, times: Times) -> Iterator[list[Change]]:
        """The changes, in their order, each with the notes that it needs."""
        notes = [SetCell(COLLECTED, TRANSACTIONS, times.time(bounds.ended_below), b"")]
        if self.versions or self.last:
            notes.append(SetCell(COLLECTED, READS, times.time(bounds.below), b""))
        replaced = {note.column for note in notes}
        part: list[Change] = [*notes, *(one for one in self.old_notes if one.column in replaced)]
        whole = ([one] for one in chain(self.evidence, self.versions))
        for group in chain(whole, self.last):
            if len(part) + len(group) > CHANGES_MAX and len(part) > len(notes):
                yield part
                part = [*notes]
            part += group
        yield part


def no_older_lock(bounds: Bounds, times: Times) -> Check:
    """Check that the row holds no older lock when it is changed."""
    return Check((Selection(LOCKS, until_time=times.at_or_above(bounds.ended_below)),), found=False)


def collectable(bounds: Bounds, times: Times) -> tuple[Selection, ...]:
    """Selections of all that `planned` needs of a row: locks, records up to the safe points and the
    newest of each cell, markers, and notes."""
    below = times.at_or_above(bounds.below + 1)
    ended = times.at_or_above(bounds.ended_below)
    return (
        Selection(LOCKS),
        Selection(WRITES, until_time=below),
        Selection(WRITES, newest=True),
        Selection(LOCK_ONLY, until_time=max(below, ended)),
        Selection(LOCK_ONLY, newest=True),
        Selection(ROLLBACKS, until_time=ended),
        Selection(COLLECTED),
    )


def planned(cells: Iterable[StoredCell], bounds: Bounds, times: Times) -> Plan | None:
    """Deletions in a row with these cells. None if it holds a lock below the safe points."""
    row = _Row(cells, bounds, times)
    return None if row.has_older_lock else row.plan()


class _Row:
    """One row, as it was read."""

    def __init__(self, cells: Iterable[StoredCell], bounds: Bounds, times: Times) -> None:
        self._bounds = bounds
        self._times = times
        self._reach = Reach(bounds.below, bounds.ended_below)
        self._plan = Plan()
        self._records: defaultdict[bytes, list[StoredCell]] = defaultdict(list)
        """Commits by column, the newest first."""
        self._deletions: dict[bytes, StoredCell] = {}
        """By column, the deletion that such a read meets."""
        self._put_aside: set[bytes] = set()
        """Stored columns of which a change is a dead letter, or may be about to become one."""
        self._answered: defaultdict[bytes, list[DeleteCell]] = defaultdict(list)
        """By stored column, the acknowledgements that may go with the column's last record."""
        self._last_runs: defaultdict[bytes, set[int]] = defaultdict(set)
        """By stored column, the starts of the last runs of its observers."""
        self._seen: defaultdict[bytes, list[DeleteCell]] = defaultdict(list)
        """By stored column, what they have seen, under its deletion."""
        self._was_loaded = False
        self.has_older_lock = False
        for cell in sorted(set(cells), key=lambda one: one.time, reverse=True):
            self._sort(cell)

    def _sort(self, cell: StoredCell) -> None:
        timestamp = self._times.timestamp(cell.time)
        match cell.family:
            case layout.LOCKS:
                self.has_older_lock |= timestamp < self._bounds.ended_below
                observed = _observed(cell.column)
                if observed is not None:
                    self._put_aside.add(observed)
            case layout.WRITES | layout.LOCK_ONLY:
                self._records[cell.column].append(cell)
            case layout.ROLLBACKS:
                if self._reach.drops_marker(timestamp):
                    self._plan.evidence.append(_deletion(cell))
            case layout.COLLECTED if cell.column == LOADED:
                self._was_loaded = True
            case layout.COLLECTED:
                newer = self._bounds.below if cell.column == READS else self._bounds.ended_below
                if timestamp < newer:
                    self._plan.old_notes.append(_deletion(cell))

    def plan(self) -> Plan:
        for column, records in self._records.items():
            self._hear_of_runs(column, records)
        for column, records in self._records.items():
            self._judge(column, records)
        for column, cell in self._deletions.items():
            awaited = 0 < self._bounds.awaited_from <= self._times.timestamp(cell.time)
            if not awaited and not self._was_loaded and column not in self._put_aside:
                group = [*self._seen[column], _deletion(cell), *self._answered[column]]
                self._plan.last.append(group)
        for column, answers in self._answered.items():
            if column not in self._records:
                self._plan.last.append(answers)
        return self._plan

    def _judge(self, column: bytes, records: Sequence[StoredCell]) -> None:
        self._reach.next_cell()
        newer = False
        last_runs = self._last_runs.get(column, set())
        for cell in records:
            start, kind = WRITE_HEADER.unpack_from(cell.value)
            timestamp = self._times.timestamp(cell.time)
            deletions = self._plan.versions
            fate = self._reach.fate(kind, timestamp)
            if fate is not Fate.NEWER and cell.family == WRITES:
                # The runs that have seen this version, and none of those that are newer.
                served = {one for one in last_runs if one >= timestamp}
                last_runs = last_runs - served
                if fate is Fate.GOES and served:
                    if column not in self._deletions:
                        continue
                    deletions = self._seen[column]
            match fate:
                case Fate.NEWER:
                    newer = True
                case Fate.STAYS:
                    observed = None if newer else _observed(column)
                    if observed is not None and not _tells_of_a_dead_letter(cell):
                        self._answered[observed].append(_deletion(cell))
                case Fate.GOES if cell.family == LOCK_ONLY:
                    self._plan.evidence.append(_deletion(cell))
                case Fate.GOES:
                    deletions.append(_deletion(cell))
                    if kind == KIND_PUT_IN_DATA:
                        data = DeleteCell(DATA, column, self._times.time(start))
                        deletions.append(data)
                case Fate.GOES_LAST:
                    self._deletions[column] = cell

    def _hear_of_runs(self, column: bytes, records: Sequence[StoredCell]) -> None:
        """Takes note of what an observer has acknowledged of another column."""
        observed = _observed(column)
        newest = next((one for one in records if one.family == WRITES), None)
        if observed is None or newest is None:
            return
        if newest.value[WRITE_KIND_OFFSET] == KIND_PUT:
            start = acknowledged_start(newest.value[WRITE_HEADER_BYTES:])
            self._last_runs[observed].add(start)
        if _tells_of_a_dead_letter(newest):
            self._put_aside.add(observed)


def _tells_of_a_dead_letter(cell: StoredCell) -> bool:
    is_put = cell.value[WRITE_KIND_OFFSET] == KIND_PUT  # acknowledgements are never long
    return is_put and tells_of_a_dead_letter(cell.value[WRITE_HEADER_BYTES:])


def _deletion(cell: StoredCell) -> DeleteCell:
    return DeleteCell(cell.family, cell.column, cell.time)


def _observed(column: bytes) -> bytes | None:
    """The stored column that an acknowledgement, in a stored column, is about."""
    observed = observed_column(column_of(column))
    return None if observed is None else stored_column(observed)


# Collects a table of a row store: scans it, and changes the rows in which something goes.

_ROWS_AT_A_TIME = 16
_ROWS_OF_A_SLICE = 200
_SLICE_SECONDS = 30.0


@dataclass
class Collected:
    """Progress of one pass over a table."""

    rows: int = 0
    """How many rows were looked at."""
    cells: int = 0
    """How many cells were deleted."""
    passed_over: int = 0
    """How many rows were left alone: they have a lock below the safe point."""


class RowCollector:
    """Collects rows within a share of the time, so that others are not held up."""

    def __init__(
        self, store: RowStore, times: Times, world: World, limits: Limits, *, share: float = 0.1
    ) -> None:
        """`share` is the part of the time in which the collector works; it pauses in between."""
        self._store = store
        self._times = times
        self._world = world
        self._limits = limits
        self._share = share

    async def collect(
        self, table_id: int, bounds: Bounds, collected: Collected, after: bytes = b""
    ) -> bytes | None:
        """One slice of a table, from the key `after` on. Returns where the next one begins; None at
        the end. Adds to `collected`.

        All locks below `bounds.ended_below` must have been resolved, in all tables. Raises the
        errors of the store; what was deleted by then stays deleted, and nothing depends on the
        rest.
        """
        bounds = bounds.storable()
        clock = self._world.clock
        began = clock.monotonic_seconds()
        rows = await self._slice(table_id, bounds, after)
        limit = asyncio.Semaphore(_ROWS_AT_A_TIME)

        async def one(row: StoredRow) -> None:
            async with limit:
                await self._row(table_id, row, bounds, collected)

        # All have ended when an error is raised: no change is under way behind the caller's back.
        for error in await asyncio.gather(*map(one, rows), return_exceptions=True):
            if error is not None:
                raise error
        collected.rows += len(rows)
        spent = clock.monotonic_seconds() - began
        await clock.sleep(spent * (1 / self._share - 1))
        return rows[-1].key + b"\0" if len(rows) == _ROWS_OF_A_SLICE else None

    async def _slice(self, table_id: int, bounds: Bounds, first: bytes) -> Sequence[StoredRow]:
        stream = steady_scan(
            self._store,
            table_id,
            collectable(bounds, self._times),
            self._world,
            self._limits,
            first=first,
            rows_max=_ROWS_OF_A_SLICE,
        )
        async with aclosing(stream) as rows:
            return [row async for row in rows]

    async def _row(
        self, table_id: int, row: StoredRow, bounds: Bounds, collected: Collected
    ) -> None:
        try:
            plan = planned(row.cells, bounds, self._times)
        except (struct.error, IndexError) as error:
            raise written_by_others(row_of(row.key), error) from error
        if plan is None:
            collected.passed_over += 1
            return
        if not plan.cells:
            return
        for changes in plan.changes(bounds, self._times):
            if not await self._change(table_id, row.key, bounds, changes):
                collected.passed_over += 1
                return
        collected.cells += plan.cells

    async def _change(
        self, table_id: int, key: bytes, bounds: Bounds, changes: Sequence[Change]
    ) -> bool:
        """Returns whether the change was made: not if there is an older lock by now."""
        check, patience = no_older_lock(bounds, self._times), self._patience()
        # It deletes what goes in any case, so it may be repeated even if it was executed.
        change = partial(self._store.check_and_mutate, table_id, key, check, changes)
        return await patience.repeated(change)

    def _patience(self) -> Patience:
        deadline = self._world.clock.monotonic_seconds() + _SLICE_SECONDS
        return Patience(self._world, self._limits, deadline)
