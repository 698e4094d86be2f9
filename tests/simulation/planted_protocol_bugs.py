"""Bugs in the steps of the protocol, and in who takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

from percolator.aio.reader import Reader
from percolator.aio.transaction import LateWrites
from percolator.errors import PercolatorError
from percolator.formats.records import KIND_LOCK_ONLY, WRITE_KIND_OFFSET
from percolator.protocol import commit, steps
from percolator.protocol.conflicts import MetLock
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.protocol.write_set import WriteSteps
from percolator.routing import lanes
from percolator.routing.cells import (
    APPLIED,
    CellMutation,
    CommonStep,
    Refused,
    RowRequest,
    RowResult,
)
from percolator.routing.lanes import CellAnswer, PendingRow, Problem, Queued
from percolator.routing.router import Router
from percolator.services.master.collection import CollectionTimes
from percolator.tablet import judge, requests, scans
from percolator.tablet.cells import (
    TIMESTAMP_MAX,
    HeldCells,
    Holder,
    LastChanges,
    newest_change_below,
)
from percolator.tablet.collection import _WalkOfVersions
from percolator.tablet.requests import ABSENT, CheckedCondition, PrewriteConditions
from percolator.tablet.scans import ScanPage, join_cells
from percolator.tablet.visible_cells import ChosenColumns, LockReader, LocksFound, Room, VisibleRuns
from percolator.timestamps import NEWEST
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_ROLLBACK, SPACE_WRITE
from percolator.v1.tabletserver_pb2 import Change, Mutation
from percolator.world import Cursor
from tests.simulation import programs
from tests.simulation.bug import PerSeed
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch

_LATE_SECONDS = 0.01


def heartbeat_raises_the_lock_whatever_it_is(patch: Patch) -> None:
    """It lowers what a reader has pushed, and the reader has passed."""
    correct = WriteSteps.heartbeat

    def wrong(
        self: WriteSteps, seen: int, ttl_seen: int, min_commit: int, ttl: int
    ) -> CellMutation:
        table_id, row, column = self.primary
        step = correct(self, seen, ttl_seen, seen + 1, ttl)
        lock = step.message().changes[0].value
        return CellMutation(
            table_id, steps.raise_lock(row, column, self.start, TIMESTAMP_MAX, lock)
        )

    patch.setattr(WriteSteps, "heartbeat", wrong)


def commit_leaves_out_writes_whose_table_is_not_known_yet(patch: Patch) -> None:
    """The first writes of a client, of which nobody has awaited any, are lost."""

    async def wrong(self: LateWrites, deadline: float) -> None:
        self._waiting.clear()

    patch.setattr(LateWrites, "settle", wrong)


def no_copy_of_a_refused_commit_is_expected(patch: Patch) -> None:
    """A copy arrives when the server has the tablet; the transaction was reported as aborted."""
    correct = commit.Commit._heard_of_primary

    def wrong(self: commit.Commit, error: PercolatorError) -> None:
        correct(self, error)
        if not self.is_unanswered:
            self.is_out = False

    patch.setattr(commit.Commit, "_heard_of_primary", wrong)


def no_rollback_marker(patch: Patch) -> None:
    """A late prewrite resurrects a transaction that others have rolled back."""

    def drop_marker(mutation: Mutation) -> None:
        mutation.changes.pop()

    change_step(patch, "roll_back", drop_marker)
    change_step(patch, "roll_back_expired", drop_marker)


def secondaries_decided_without_the_primary(patch: Patch) -> None:
    """A cell that is judged alone is rolled back while its transaction commits."""

    async def wrong(self: Cleanup, met: Sequence[MetLock], **arguments: Any) -> set[int]:
        requests = [
            CellMutation(
                lock.address.table_id,
                steps.roll_back(lock.address.row, lock.address.column, lock.lock.start_timestamp),
            )
            for lock in met
        ]
        await self._env.cells.mutate(requests, arguments["deadline"])
        return set()

    patch.setattr(Cleanup, "resolve", wrong)


def rollback_deletes_a_foreign_lock(patch: Patch) -> None:
    """Another transaction has locked the cell since, and loses its write."""

    def delete_any(mutation: Mutation) -> None:
        mutation.changes[0].kind = Change.KIND_DELETE
        mutation.changes[0].ClearField("value")

    change_step(patch, "roll_back", delete_any)
    change_step(patch, "roll_back_expired", delete_any)


def commit_ignores_min_commit_ts(patch: Patch) -> None:
    """A reader above the commit timestamp has pushed it, and has read past the lock."""

    def own_start_only(mutation: Mutation) -> None:
        mutation.conditions[2].prefix = mutation.conditions[2].prefix[:8]

    change_step(patch, "commit_primary", own_start_only)


def commit_timestamp_before_the_prewrites(patch: Patch) -> None:
    """A reader above it has read a cell that was not locked yet."""
    correct = commit.Commit.prewrite

    async def wrong(self: commit.Commit, deadline: float) -> int:
        await self.take_commit_timestamp(deadline)
        return await correct(self, deadline)

    patch.setattr(commit.Commit, "prewrite", wrong)


def prewrite_ignores_newer_commits(patch: Patch) -> None:
    """A lost update."""

    def forget(mutation: Mutation) -> None:
        mutation.conditions.pop()

    change_step(patch, "prewrite", forget)


def primary_by_chance(patch: Patch) -> None:
    """Two committers of one transaction decide in two places."""
    correct = WriteSteps.__init__
    turns = [0]

    def wrong(self: WriteSteps, start: int, writes: Any, *rest: Any, **named: Any) -> None:
        turns[0] += 1
        cells = sorted(writes)
        turn = turns[0] % len(cells)
        one = {cell: writes[cell] for cell in cells[turn : turn + 1]}
        correct(self, start, one, *rest, **named)
        self.writes = writes
        self.cells = cells[turn:] + cells[:turn]

    patch.setattr(WriteSteps, "__init__", wrong)


def without_lists(patch: Patch) -> None:
    """Sends steps as mutations: in lists, only their kind is sent."""
    correct = PendingRow.__init__

    def written_out(
        self: PendingRow, pending: Any, index: int, table_id: int, version: int, message: Any
    ) -> None:
        if isinstance(message, CommonStep):
            message = message.mutation()
        correct(self, pending, index, table_id, version, message)

    patch.setattr(PendingRow, "__init__", written_out)


def new_commit_timestamp_after_a_time_out(patch: Patch) -> None:
    """The first attempt may have been applied; the other cells get the second's timestamp."""

    async def wrong(self: commit.Commit, deadline: float) -> int:
        lock = self.begin_two_phases()
        while True:
            await self.take_commit_timestamp(deadline)
            schema = await self._env.schema(self._write.primary.table_id, deadline)
            step = self._write.commit_primary(schema, lock.min_commit, lock.commit)
            self.is_unanswered = True
            (answer,) = await self._env.cells.mutate((step,), deadline)
            if answer is APPLIED:
                return lock.commit
            if isinstance(answer, Refused):
                if answer.condition == steps.OWN_COMMIT:
                    return lock.commit
                if not lock.is_ours(answer):
                    return await self._no_lock(answer, deadline)
                lock.learn(answer)

    patch.setattr(commit.Commit, "commit_primary", wrong)


def read_ignores_locks(patch: Patch) -> None:
    """The owner of the lock may already hold a commit timestamp below the reader's."""
    correct = Router.read

    async def wrong(
        self: Router, requests: Sequence[RowRequest], deadline: float, **how: Any
    ) -> list[RowResult]:
        answers = await correct(self, requests, deadline, **how)
        for answer in answers:
            answer.locks.clear()
        return answers

    patch.setattr(Router, "read", wrong)


def abort_not_primary_first(patch: Patch) -> None:
    """Others go first: they are gone when another transaction finds the primary locked, and commits
    it."""

    async def wrong(self: commit.Commit, problem: PercolatorError, deadline: float) -> int:
        for cell in reversed(self._write.cells):
            # Each as late as a network may make it.
            await asyncio.sleep(_LATE_SECONDS)
            await self._env.cells.mutate((self._write.roll_back(cell),), deadline)
        raise problem

    patch.setattr(commit.Commit, "_give_up", wrong)


def change_step(patch: Patch, name: str, change: Callable[[Mutation], None]) -> None:
    """Plants a bug into one of the steps of the protocol."""
    without_lists(patch)
    correct: Callable[..., Mutation] = getattr(steps, name)

    def wrong(*arguments: Any) -> Mutation:
        mutation = correct(*arguments)
        change(mutation)
        return mutation

    patch.setattr(steps, name, wrong)


# Bugs in the steps that travel as parallel lists: at the tablet, and where answers come back.


def listed_prewrite_ignores_newer_commits(patch: Patch) -> None:
    """A lost update."""
    correct = requests.prewrite_conditions

    def wrong(start: int) -> list[CheckedCondition]:
        conditions = correct(start)
        conditions[3] = (SPACE_WRITE, ABSENT, 1, 2, b"", b"", b"")
        return conditions

    patch.setattr(requests, "prewrite_conditions", wrong)


def listed_steps_ignore_markers(patch: Patch) -> None:
    """Late ones resurrect a transaction that others have rolled back. Either of them would stop it,
    so neither of the two is enough of a bug."""
    prewrite, commit = requests.prewrite_conditions, requests.commit_conditions

    def wrong_prewrite(start: int) -> PrewriteConditions:
        return PrewriteConditions(start, _without_marker(prewrite(start)))

    def wrong_commit(kind: int, start: int, min_commit: int) -> list[CheckedCondition]:
        return _without_marker(commit(kind, start, min_commit))

    patch.setattr(requests, "prewrite_conditions", wrong_prewrite)
    patch.setattr(requests, "commit_conditions", wrong_commit)


def _without_marker(conditions: list[CheckedCondition]) -> list[CheckedCondition]:
    """Conditions without the marker, as many as before, since the client reads their indexes."""
    holds: CheckedCondition = (SPACE_ROLLBACK, ABSENT, 1, 2, b"", b"", b"")
    return [holds if one[0] == SPACE_ROLLBACK else one for one in conditions]


def listed_commit_overlooks_a_push(patch: Patch) -> None:
    """A reader above the commit timestamp has pushed the lock, and has read past it."""
    correct = requests.commit_conditions

    def wrong(kind: int, start: int, min_commit: int) -> list[CheckedCondition]:
        return correct(requests.COMMIT_SECONDARY, start, min_commit)

    patch.setattr(requests, "commit_conditions", wrong)


def unapplied_steps_taken_for_applied(patch: Patch) -> None:
    """A transaction goes on without its locks."""

    def wrong(group: Sequence[Queued], result: pb.MutationBatchResult) -> list[Problem]:
        for entry in group:
            entry.pending.answer(entry.index, APPLIED)
        return []

    patch.setattr(lanes, "_answer_mutations", wrong)


STEP_BUGS = (
    (listed_prewrite_ignores_newer_commits, (), False),
    (listed_steps_ignore_markers, (Kind.PAUSE, Kind.SLOW_LINKS), False),
    (listed_commit_overlooks_a_push, (), False),
    (unapplied_steps_taken_for_applied, (), False),
)
"""With the disruptions that show it, and whether it is quickly caught."""


# Bugs of lock-only records, and of what they name,.


def change_does_not_end_what_is_remembered_of_its_cell(patch: Patch) -> None:
    """Readers keep seeing the value that the cell had when it was locked."""

    patch.setattr(LastChanges, "begin", lambda self, committed: None)


def change_ends_what_is_remembered_only_when_its_writer_hears_of_it(patch: Patch) -> None:
    """By then its lock is gone from the storage, and readers were sent below it."""
    begin, publish = LastChanges.begin, LastChanges.publish
    begun: dict[int, Collection[bytes]] = {}

    def begin_late(self: LastChanges, committed: Collection[bytes]) -> None:
        begun[id(self)] = committed

    def wrong(self: LastChanges, under_locks: Mapping[bytes, int]) -> None:
        begin(self, begun[id(self)])
        publish(self, under_locks)

    patch.setattr(LastChanges, "begin", begin_late)
    patch.setattr(LastChanges, "publish", wrong)


def lock_names_what_the_first_lock_of_its_cell_named(patch: Patch) -> None:
    """A stale name is stored, and stays although the cell has changed since."""
    named = PerSeed(dict[bytes, int | None])

    def wrong(cursor: Cursor, cell: bytes, timestamp: int) -> int | None:
        first = named.now()
        if cell not in first:
            first[cell] = newest_change_below(cursor, cell, timestamp)
        return first[cell]

    patch.setattr(judge, "newest_change_below", wrong)
    patch.setattr(LastChanges, "of", lambda self, cell: None)
    patch.setattr(LastChanges, "learn", lambda self, cell, timestamp: None)


def lock_only_record_collected_once_there_is_a_newer_commit(patch: Patch) -> None:
    """The newer one excludes the same transactions, but does not tell how the older one ended."""
    correct = _WalkOfVersions._look_above

    def wrong(self: _WalkOfVersions, key: bytes, value: bytes, timestamp: int) -> int | None:
        if value[WRITE_KIND_OFFSET] == KIND_LOCK_ONLY and self._newer:
            self._delete(key, value)
            return None
        return correct(self, key, value, timestamp)

    patch.setattr(_WalkOfVersions, "_look_above", wrong)
    times = CollectionTimes(round_seconds=0.2, retention_seconds=1.0)
    patch.setattr(programs, "_COLLECTION", times)


LOCK_ONLY_BUGS: tuple[Callable[[Patch], None], ...] = (
    change_does_not_end_what_is_remembered_of_its_cell,
    change_ends_what_is_remembered_only_when_its_writer_hears_of_it,
    lock_names_what_the_first_lock_of_its_cell_named,
    lock_only_record_collected_once_there_is_a_newer_commit,
)


# Bugs of reads without a timestamp: one for each of their rules.


def locks_are_not_in_the_way_of_now(patch: Patch) -> None:
    """A transaction that was acknowledged when its primary was committed is not visible."""
    correct = LockReader.on_cell

    def wrong(self: LockReader, cell: bytes) -> bytes | None:
        return None if self._timestamp == NEWEST else correct(self, cell)

    patch.setattr(LockReader, "on_cell", wrong)


def reads_of_now_do_not_wait_for_held_cells(patch: Patch) -> None:
    """A commit is missed whose timestamp is below one that the reader had before."""
    correct = HeldCells.in_the_way

    def wrong(self: HeldCells, cell: bytes, timestamp: int) -> Holder | None:
        return None if timestamp == NEWEST else correct(self, cell, timestamp)

    patch.setattr(HeldCells, "in_the_way", wrong)


def locked_cell_counts_as_empty(patch: Patch) -> None:
    """The answer that reports a lock does not have the cell's value."""
    correct = Router.read_cell

    async def wrong(
        self: Router, table_id: int, row: bytes, column: bytes, timestamp: int, deadline: float
    ) -> CellAnswer:
        found = await correct(self, table_id, row, column, timestamp, deadline)
        return None if timestamp == NEWEST and isinstance(found, RowResult) else found

    patch.setattr(Router, "read_cell", wrong)


NEWEST_BUGS = (
    (locks_are_not_in_the_way_of_now, 0.0),
    (locked_cell_counts_as_empty, 0.0),
    (reads_of_now_do_not_wait_for_held_cells, 0.8),
)
"""Each with the share of transactions that try to commit in one round."""


# Bugs of reads of families.


def locks_of_a_family_are_not_in_the_way(patch: Patch) -> None:
    """Their owners may have committed below the timestamp of the read."""
    correct = LockReader.in_rows

    def wrong(self: LockReader, *bounds: bytes, **options: Any) -> LocksFound:
        if isinstance(options["wanted"], ChosenColumns):
            return LocksFound()
        return correct(self, *bounds, **options)

    patch.setattr(LockReader, "in_rows", wrong)


def own_writes_of_a_family_are_not_seen(patch: Patch) -> None:
    """A transaction reads what was there before it."""
    correct = Reader._written

    def wrong(self: Reader, table_id: int, rows: Any, names: Any, prefixes: Any) -> Any:
        return {} if prefixes else correct(self, table_id, rows, names, prefixes)

    patch.setattr(Reader, "_written", wrong)


FAMILY_BUGS = (
    (locks_of_a_family_are_not_in_the_way, 0.0),
    (own_writes_of_a_family_are_not_seen, 0.8),
)
"""Each with the share of transactions that try to commit in one round."""


# Bugs of scans that judge many entries at a time.


def a_run_forgets_the_cell_that_the_one_before_has_ended_with(patch: Patch) -> None:
    """It shows the cell's next version, too, which is older."""
    correct = VisibleRuns._stand_behind

    def wrong(self: VisibleRuns, key: bytes, rows: list[bytes]) -> None:
        correct(self, key, rows)
        if self._column is None:
            self._cell = b"\0"

    patch.setattr(VisibleRuns, "_stand_behind", wrong)


def a_run_takes_what_was_committed_after_its_timestamp(patch: Patch) -> None:
    correct = VisibleRuns._took

    def wrong(
        self: VisibleRuns, keys: list[bytes], values: list[bytes], room: Room, worth: int
    ) -> bool:
        inverted, self._inverted = self._inverted, bytes(8)
        took = correct(self, keys, values, room, worth)
        self._inverted = inverted
        return took

    patch.setattr(VisibleRuns, "_took", wrong)


def a_run_backwards_takes_the_end_of_a_row_that_begins_before_it(patch: Patch) -> None:
    """The row's other cells are never found."""
    correct = VisibleRuns._fetched_before

    def wrong(
        self: VisibleRuns, first: bytes, stop: bytes, entries: int
    ) -> tuple[list[bytes], list[bytes]]:
        keys, values = correct(self, first, stop, entries)
        if not keys:
            return keys, values
        self._cursor.seek(keys[0])
        self._cursor.prev()
        key, value = self._cursor.item()
        return ([key, *keys], [value, *values]) if key >= first else (keys, values)

    patch.setattr(VisibleRuns, "_fetched_before", wrong)


def a_run_backwards_takes_its_rows_forwards(patch: Patch) -> None:
    """A scan with a limit returns others than the last rows."""
    patch.setattr(VisibleRuns, "_turn_around", lambda *_: None)


SCAN_BUGS: tuple[Callable[[Patch], None], ...] = (
    a_run_forgets_the_cell_that_the_one_before_has_ended_with,
    a_run_takes_what_was_committed_after_its_timestamp,
    a_run_backwards_takes_the_end_of_a_row_that_begins_before_it,
    a_run_backwards_takes_its_rows_forwards,
)


# Bugs of joined pages.


def a_page_with_locks_is_joined(patch: Patch) -> None:
    """Joined cells say nothing about locks, so nobody resolves them."""
    correct = ScanPage._response

    def wrong(self: ScanPage) -> pb.ScanResponse:
        self._lock_rows = []
        return correct(self)

    patch.setattr(ScanPage, "_response", wrong)


def rows_of_different_columns_are_joined(patch: Patch) -> None:
    """If only the number of cells fits, values come to other columns and rows."""

    def wrong(
        rows: list[bytes], columns: list[bytes], values: list[bytes], found: pb.JoinedCells
    ) -> bool:
        width = rows.count(rows[0]) if rows else 1
        distinct = list(dict.fromkeys(rows))
        if len(distinct) * width != len(rows):
            return join_cells(rows, columns, values, found)
        as_first = columns[:width] * len(distinct)
        return join_cells([row for row in distinct for _ in range(width)], as_first, values, found)

    patch.setattr(scans, "join_cells", wrong)


def joined_values_are_those_of_the_next_row(patch: Patch) -> None:
    def wrong(
        rows: list[bytes], columns: list[bytes], values: list[bytes], found: pb.JoinedCells
    ) -> bool:
        width = rows.count(rows[0]) if rows else 0
        return join_cells(rows, columns, values[width:] + values[:width], found)

    patch.setattr(scans, "join_cells", wrong)


def joined_columns_are_sent_in_another_order(patch: Patch) -> None:
    """The names of a page's columns come in another order than their values."""

    def wrong(
        rows: list[bytes], columns: list[bytes], values: list[bytes], found: pb.JoinedCells
    ) -> bool:
        if not join_cells(rows, columns, values, found):
            return False
        names = [column.name for column in found.columns]
        for column, name in zip(found.columns, reversed(names), strict=True):
            column.name = name
        return True

    patch.setattr(scans, "join_cells", wrong)


JOINED_BUGS: tuple[Callable[[Patch], None], ...] = (
    a_page_with_locks_is_joined,
    rows_of_different_columns_are_joined,
    joined_values_are_those_of_the_next_row,
    joined_columns_are_sent_in_another_order,
)
