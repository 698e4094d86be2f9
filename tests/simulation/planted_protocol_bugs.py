"""Bugs in the steps of the protocol, and in who takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from percolator.aio.reader import Reader
from percolator.aio.transaction import LateWrites
from percolator.errors import (
    CellAddress,
    NotExecuted,
    PercolatorError,
    Retry,
)
from percolator.formats.records import KIND_LOCK_ONLY, KIND_READ_LOCK, WRITE_KIND_OFFSET
from percolator.protocol import commit, read, steps
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.commit import Commit, Sent, State
from percolator.protocol.conflicts import MetLock
from percolator.protocol.contention import Contender, Handover, HotCells
from percolator.protocol.turns import TransactionTurns
from percolator.protocol.write_set import Write, WriteSet, WriteSteps
from percolator.retries import Attempts
from percolator.routing import lanes
from percolator.routing.cells import (
    APPLIED,
    CellMutation,
    FollowedCommit,
    ListedStep,
    NotSent,
    Refused,
    RowRequest,
    RowResult,
    Turn,
)
from percolator.routing.lanes import CellAnswer, PendingCommit, PendingRow, Problem, Queued
from percolator.routing.router import Router
from percolator.services.master.collection import CollectionTimes
from percolator.tablet import change_scan, group_commit, judge, requests, scans
from percolator.tablet import group_commit as server
from percolator.tablet.cells import (
    TIMESTAMP_MAX,
    HeldCells,
    Holder,
    LastChanges,
    ReadLocks,
    newest_change_below,
)
from percolator.tablet.change_scan import ChangePlan
from percolator.tablet.collection import _WalkOfVersions
from percolator.tablet.group_commit import MutationQueue, OneRoundTransactions
from percolator.tablet.judge import Exclusion, Lines
from percolator.tablet.requests import (
    ABSENT,
    CheckedCondition,
    OneRoundTransaction,
    PrewriteConditions,
    not_executed,
    prewrite_conditions,
)
from percolator.tablet.scans import ScanPage, join_cells
from percolator.tablet.state import TabletState
from percolator.tablet.turns import Queue, Turns
from percolator.tablet.visible_cells import (
    ChosenColumns,
    LockReader,
    LocksFound,
    PageBudget,
    VisibleRuns,
)
from percolator.tasks import Tasks
from percolator.timestamps import NEWEST
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_ROLLBACK, SPACE_WRITE
from percolator.v1.tabletserver_pb2 import Change, Mutation
from percolator.world import Cursor
from tests.patching import in_place_of
from tests.simulation import programs
from tests.simulation.bug import PerSeed
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch

_LATE_SECONDS = 0.01


def heartbeat_raises_the_lock_whatever_it_is(patch: Patch) -> None:
    """It lowers what a reader has pushed, and the reader has passed."""
    correct = WriteSteps.heartbeat_step

    @in_place_of(patch, WriteSteps, "heartbeat_step")
    def wrong(
        self: WriteSteps, seen: int, ttl_seen: int, min_commit: int, ttl: int
    ) -> CellMutation:
        table_id, row, column = self.primary
        step = correct(self, seen, ttl_seen, seen + 1, ttl)
        lock = step.message().changes[0].value
        return CellMutation(
            table_id, steps.raise_lock(row, column, self.start, TIMESTAMP_MAX, lock)
        )


def commit_leaves_out_writes_whose_table_is_not_known_yet(patch: Patch) -> None:
    """The first writes of a client, of which nobody has awaited any, are lost."""

    @in_place_of(patch, LateWrites, "settle")
    async def wrong(self: LateWrites, deadline: float) -> None:
        self._waiting.clear()


def no_copy_of_a_refused_commit_is_expected(patch: Patch) -> None:
    """A copy arrives when the server has the tablet; the transaction was reported as aborted."""
    correct = commit.Commit._heard_of_primary

    @in_place_of(patch, commit.Commit, "_heard_of_primary")
    def wrong(self: commit.Commit, error: PercolatorError) -> None:
        correct(self, error)
        if self.sent is Sent.LATE_COPY:
            self.sent = Sent.NOTHING


def no_rollback_marker(patch: Patch) -> None:
    """A late prewrite resurrects a transaction that others have rolled back."""

    def drop_marker(mutation: Mutation) -> None:
        mutation.changes.pop()

    change_step(patch, "roll_back", drop_marker)
    change_step(patch, "roll_back_expired", drop_marker)


def secondaries_decided_without_the_primary(patch: Patch) -> None:
    """A cell that is judged alone is rolled back while its transaction commits."""

    @in_place_of(patch, Cleanup, "resolve")
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

    @in_place_of(patch, commit.Commit, "prewrite")
    async def wrong(self: commit.Commit, deadline: float) -> int | None:
        await self.take_commit_timestamp(deadline)
        return await correct(self, deadline)


def prewrite_ignores_newer_commits(patch: Patch) -> None:
    """A lost update."""

    def forget(mutation: Mutation) -> None:
        mutation.conditions.pop()

    change_step(patch, "prewrite", forget)


def primary_by_chance(patch: Patch) -> None:
    """Two committers of one transaction decide in two places."""
    correct = WriteSteps.__init__
    turns = [0]

    @in_place_of(patch, WriteSteps, "__init__")
    def wrong(self: WriteSteps, start: int, writes: Any, *rest: Any, **named: Any) -> None:
        turns[0] += 1
        cells = sorted(writes)
        turn = turns[0] % len(cells)
        one = {cell: writes[cell] for cell in cells[turn : turn + 1]}
        correct(self, start, one, *rest, **named)
        self.writes = writes
        self.cells = cells[turn:] + cells[:turn]


def without_lists(patch: Patch) -> None:
    """Sends steps as mutations: in lists, only their kind is sent."""
    correct = PendingRow.__init__

    @in_place_of(patch, PendingRow, "__init__")
    def written_out(
        self: PendingRow, pending: Any, index: int, table_id: int, version: int, message: Any
    ) -> None:
        if isinstance(message, ListedStep):
            message = message.mutation()
        correct(self, pending, index, table_id, version, message)


def new_commit_timestamp_after_a_time_out(patch: Patch) -> None:
    """The first attempt may have been applied; the other cells get the second's timestamp."""

    @in_place_of(patch, commit.Commit, "commit_primary")
    async def wrong(self: commit.Commit, deadline: float) -> int:
        lock = self.begin_two_phases()
        while True:
            await self.take_commit_timestamp(deadline)
            schema = await self._env.schema(self._write.primary.table_id, deadline)
            step = self._write.commit_primary_step(schema, lock.min_commit, lock.commit_ts)
            self.sent = Sent.UNANSWERED
            (answer,) = await self._env.cells.mutate((step,), deadline)
            if answer is APPLIED:
                return lock.commit_ts
            if isinstance(answer, Refused):
                if answer.condition == steps.OWN_COMMIT:
                    return lock.commit_ts
                if not lock.is_ours(answer):
                    return await self._no_lock(answer, deadline)
                lock.learn(answer)


def read_ignores_locks(patch: Patch) -> None:
    """The owner of the lock may already hold a commit timestamp below the reader's."""
    correct = Router.read

    @in_place_of(patch, Router, "read")
    async def wrong(
        self: Router, requests: Sequence[RowRequest], deadline: float, **how: Any
    ) -> list[RowResult]:
        answers = await correct(self, requests, deadline, **how)
        for answer in answers:
            answer.locks.clear()
        return answers


def abort_not_primary_first(patch: Patch) -> None:
    """Others go first: they are gone when another transaction finds the primary locked, and commits
    it."""

    @in_place_of(patch, commit.Commit, "_give_up")
    async def wrong(self: commit.Commit, problem: PercolatorError, deadline: float) -> int:
        for cell in reversed(self._write.cells):
            # Each as late as a network may make it.
            await asyncio.sleep(_LATE_SECONDS)
            await self._env.cells.mutate((self._write.roll_back_step(cell),), deadline)
        raise problem


def change_step(patch: Patch, name: str, change: Callable[[Mutation], None]) -> None:
    """Plants a bug into one of the steps of the protocol."""
    without_lists(patch)
    correct: Callable[..., Mutation] = getattr(steps, name)

    @in_place_of(patch, steps, name)
    def wrong(*arguments: Any) -> Mutation:
        mutation = correct(*arguments)
        change(mutation)
        return mutation


# Bugs in the steps that travel as parallel lists: at the tablet, and where answers come back.


def listed_prewrite_ignores_newer_commits(patch: Patch) -> None:
    """A lost update."""
    correct = requests.prewrite_conditions

    @in_place_of(patch, requests, "prewrite_conditions")
    def wrong(start: int) -> list[CheckedCondition]:
        conditions = correct(start)
        conditions[3] = (SPACE_WRITE, ABSENT, 1, 2, b"", b"", b"")
        return conditions


def listed_steps_ignore_markers(patch: Patch) -> None:
    """Late ones resurrect a transaction that others have rolled back. Either of them would stop it,
    so neither of the two is enough of a bug."""
    prewrite, commit = requests.prewrite_conditions, requests.commit_conditions

    @in_place_of(patch, requests, "prewrite_conditions")
    def wrong_prewrite(start: int) -> PrewriteConditions:
        return PrewriteConditions(start, _without_marker(prewrite(start)))

    @in_place_of(patch, requests, "commit_conditions")
    def wrong_commit(kind: int, start: int, min_commit: int) -> list[CheckedCondition]:
        return _without_marker(commit(kind, start, min_commit))


def _without_marker(conditions: list[CheckedCondition]) -> list[CheckedCondition]:
    """Conditions without the marker, as many as before, since the client reads their indexes."""
    holds: CheckedCondition = (SPACE_ROLLBACK, ABSENT, 1, 2, b"", b"", b"")
    return [holds if one[0] == SPACE_ROLLBACK else one for one in conditions]


def listed_commit_overlooks_a_push(patch: Patch) -> None:
    """A reader above the commit timestamp has pushed the lock, and has read past it."""
    correct = requests.commit_conditions

    @in_place_of(patch, requests, "commit_conditions")
    def wrong(kind: int, start: int, min_commit: int) -> list[CheckedCondition]:
        return correct(requests.COMMIT_SECONDARY, start, min_commit)


def unapplied_steps_taken_for_applied(patch: Patch) -> None:
    """A transaction goes on without its locks."""

    @in_place_of(patch, lanes, "_answer_mutations")
    def wrong(group: Sequence[Queued], result: pb.MutationBatchResult) -> list[Problem]:
        for entry in group:
            entry.pending.answer(entry.index, APPLIED)
        return []


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

    @in_place_of(patch, LastChanges, "begin")
    def begin_late(self: LastChanges, committed: Collection[bytes]) -> None:
        begun[id(self)] = committed

    @in_place_of(patch, LastChanges, "publish")
    def wrong(self: LastChanges, under_locks: Mapping[bytes, int]) -> None:
        begin(self, begun[id(self)])
        publish(self, under_locks)


def lock_names_what_the_first_lock_of_its_cell_named(patch: Patch) -> None:
    """A stale name is stored, and stays although the cell has changed since."""
    named = PerSeed(dict[bytes, int | None])

    @in_place_of(patch, judge, "newest_change_below")
    def wrong(cursor: Cursor, cell: bytes, timestamp: int) -> int | None:
        first = named.now()
        if cell not in first:
            first[cell] = newest_change_below(cursor, cell, timestamp)
        return first[cell]

    patch.setattr(LastChanges, "of", lambda self, cell: None)
    patch.setattr(LastChanges, "learn", lambda self, cell, timestamp: None)


def lock_only_record_collected_once_there_is_a_newer_commit(patch: Patch) -> None:
    """The newer one excludes the same transactions, but does not tell how the older one ended."""
    correct = _WalkOfVersions._look_above

    @in_place_of(patch, _WalkOfVersions, "_look_above")
    def wrong(self: _WalkOfVersions, key: bytes, value: bytes, timestamp: int) -> int | None:
        if value[WRITE_KIND_OFFSET] == KIND_LOCK_ONLY and self._newer:
            self._delete(key, value)
            return None
        return correct(self, key, value, timestamp)

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

    @in_place_of(patch, LockReader, "on_cell")
    def wrong(self: LockReader, cell: bytes) -> bytes | None:
        return None if self._timestamp == NEWEST else correct(self, cell)


def reads_of_now_do_not_wait_for_held_cells(patch: Patch) -> None:
    """A commit is missed whose timestamp is below one that the reader had before."""
    correct = HeldCells.in_the_way

    @in_place_of(patch, HeldCells, "in_the_way")
    def wrong(self: HeldCells, cell: bytes, timestamp: int) -> Holder | None:
        return None if timestamp == NEWEST else correct(self, cell, timestamp)


def locked_cell_counts_as_empty(patch: Patch) -> None:
    """The answer that reports a lock does not have the cell's value."""
    correct = Router.read_cell

    @in_place_of(patch, Router, "read_cell")
    async def wrong(
        self: Router, table_id: int, row: bytes, column: bytes, timestamp: int, deadline: float
    ) -> CellAnswer:
        found = await correct(self, table_id, row, column, timestamp, deadline)
        return None if timestamp == NEWEST and isinstance(found, RowResult) else found


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

    @in_place_of(patch, LockReader, "in_rows")
    def wrong(self: LockReader, *bounds: bytes, **options: Any) -> LocksFound:
        if isinstance(options["wanted"], ChosenColumns):
            return LocksFound()
        return correct(self, *bounds, **options)


def own_writes_of_a_family_are_not_seen(patch: Patch) -> None:
    """A transaction reads what was there before it."""
    correct = Reader._written

    @in_place_of(patch, Reader, "_written")
    def wrong(self: Reader, table_id: int, rows: Any, names: Any, prefixes: Any) -> Any:
        return {} if prefixes else correct(self, table_id, rows, names, prefixes)


FAMILY_BUGS = (
    (locks_of_a_family_are_not_in_the_way, 0.0),
    (own_writes_of_a_family_are_not_seen, 0.8),
)
"""Each with the share of transactions that try to commit in one round."""


# Bugs of scans that judge many entries at a time.


def a_run_forgets_the_cell_that_the_one_before_has_ended_with(patch: Patch) -> None:
    """It shows the cell's next version, too, which is older."""
    correct = VisibleRuns._stand_behind

    @in_place_of(patch, VisibleRuns, "_stand_behind")
    def wrong(self: VisibleRuns, key: bytes, rows: list[bytes]) -> None:
        correct(self, key, rows)
        if self._column is None:
            self._cell = b"\0"


def a_run_takes_what_was_committed_after_its_timestamp(patch: Patch) -> None:
    correct = VisibleRuns._took

    @in_place_of(patch, VisibleRuns, "_took")
    def wrong(
        self: VisibleRuns, keys: list[bytes], values: list[bytes], budget: PageBudget, worth: int
    ) -> bool:
        inverted, self._inverted = self._inverted, bytes(8)
        took = correct(self, keys, values, budget, worth)
        self._inverted = inverted
        return took


def a_run_backwards_takes_the_end_of_a_row_that_begins_before_it(patch: Patch) -> None:
    """The row's other cells are never found."""
    correct = VisibleRuns._fetched_before

    @in_place_of(patch, VisibleRuns, "_fetched_before")
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

    @in_place_of(patch, ScanPage, "_response")
    def wrong(self: ScanPage) -> pb.ScanResponse:
        self._lock_rows = []
        return correct(self)


def rows_of_different_columns_are_joined(patch: Patch) -> None:
    """If only the number of cells fits, values come to other columns and rows."""

    @in_place_of(patch, scans, "join_cells")
    def wrong(
        rows: list[bytes], columns: list[bytes], values: list[bytes], found: pb.JoinedCells
    ) -> bool:
        width = rows.count(rows[0]) if rows else 1
        distinct = list(dict.fromkeys(rows))
        if len(distinct) * width != len(rows):
            return join_cells(rows, columns, values, found)
        as_first = columns[:width] * len(distinct)
        return join_cells([row for row in distinct for _ in range(width)], as_first, values, found)


def joined_values_are_those_of_the_next_row(patch: Patch) -> None:
    @in_place_of(patch, scans, "join_cells")
    def wrong(
        rows: list[bytes], columns: list[bytes], values: list[bytes], found: pb.JoinedCells
    ) -> bool:
        width = rows.count(rows[0]) if rows else 0
        return join_cells(rows, columns, values[width:] + values[:width], found)


def joined_columns_are_sent_in_another_order(patch: Patch) -> None:
    """The names of a page's columns come in another order than their values."""

    @in_place_of(patch, scans, "join_cells")
    def wrong(
        rows: list[bytes], columns: list[bytes], values: list[bytes], found: pb.JoinedCells
    ) -> bool:
        if not join_cells(rows, columns, values, found):
            return False
        names = [column.name for column in found.columns]
        for column, name in zip(found.columns, reversed(names), strict=True):
            column.name = name
        return True


JOINED_BUGS: tuple[Callable[[Patch], None], ...] = (
    a_page_with_locks_is_joined,
    rows_of_different_columns_are_joined,
    joined_values_are_those_of_the_next_row,
    joined_columns_are_sent_in_another_order,
)


# Bugs of scans with conditions.


def locks_of_rows_that_do_not_match_are_left_out(patch: Patch) -> None:
    """A server judges a row without the cell that a lock hides, and says nothing of the lock."""
    correct = ScanPage._filter_rows

    @in_place_of(patch, ScanPage, "_filter_rows")
    def wrong(self: ScanPage) -> int:
        locked, self._lock_rows = {*self._lock_rows}, []
        counted = correct(self)
        left_out = locked.difference(self._cells.rows)
        records = self._locks.records
        self._locks.records = [lock for lock in records if lock[0] not in left_out]
        return counted


def own_writes_do_not_make_a_row_match(patch: Patch) -> None:
    """They are laid only over the rows that the server has kept."""
    patch.setattr(read, "_lay_over_left_out", lambda *_: 0)


def own_writes_are_counted_beside_the_stored_rows(patch: Patch) -> None:
    """A row that the server has counted is counted again, or still counts when it no longer
    matches."""
    correct = read._lay_over_left_out

    @in_place_of(patch, read, "_lay_over_left_out")
    def wrong(*arguments: Any) -> int:
        correct(*arguments)
        return 0


def a_row_is_sent_without_its_cells_that_do_not_match(patch: Patch) -> None:
    """Only the entries that may match are taken, and not the others of their rows."""
    patch.setattr(scans, "rows_around", lambda _, places: places)


CONDITION_BUGS: tuple[Callable[[Patch], None], ...] = (
    a_row_is_sent_without_its_cells_that_do_not_match,
    locks_of_rows_that_do_not_match_are_left_out,
    own_writes_do_not_make_a_row_match,
    own_writes_are_counted_beside_the_stored_rows,
)


# Bugs of commits in one round: one for each of their rules.


def reads_do_not_wait(patch: Patch) -> None:
    """A reader above the commit timestamp misses a commit that is on its way."""
    patch.setattr(HeldCells, "in_the_way", lambda self, cell, timestamp: None)
    patch.setattr(HeldCells, "in_the_way_in_rows", lambda self, start, end, timestamp: [])


def timestamp_fetched_before_the_cells_are_held(patch: Patch) -> None:
    """A reader above it has read the cells before they were held."""
    correct, tasks = OneRoundTransactions.arrive, Tasks()

    async def fetch_first(
        self: OneRoundTransactions, transactions: list[OneRoundTransaction]
    ) -> None:
        try:
            first = await self._first_timestamp(transactions)
        except PercolatorError as error:
            self._end_all(transactions, not_executed(NotExecuted(error.message)))
            return
        for timestamp, transaction in server.commit_timestamps(transactions, first):
            transaction.commit_ts = timestamp
        correct(self, transactions)

    @in_place_of(patch, OneRoundTransactions, "arrive")
    def wrong(self: OneRoundTransactions, transactions: Iterable[OneRoundTransaction]) -> None:
        tasks.start(fetch_first(self, list(transactions)))

    @in_place_of(patch, OneRoundTransactions, "_take_timestamps")
    def ready_at_once(self: OneRoundTransactions, held: Sequence[OneRoundTransaction]) -> None:
        self._ready.extend(held)
        self._wake()


def scans_of_changes_do_not_wait(patch: Patch) -> None:
    """A commit below their end lands after they have passed, and is never read."""

    @in_place_of(patch, change_scan, "_no_commit_is_landing")
    async def wrong(state: TabletState, plan: ChangePlan) -> None:
        """Does not wait."""


def marker_not_checked(patch: Patch) -> None:
    """A late copy commits what `resolve` has rolled back and reported."""
    _change_conditions(patch, 1, (SPACE_ROLLBACK, ABSENT, 1, 2, b"", b"", b""))


def own_commit_not_looked_for(patch: Patch) -> None:
    """A repeated message is told of a conflict, although its first copy has committed."""
    _change_conditions(patch, 0, (SPACE_WRITE, ABSENT, 1, 2, b"", b"", b""))


def _change_conditions(patch: Patch, index: int, condition: CheckedCondition) -> None:
    correct = prewrite_conditions

    @in_place_of(patch, server, "prewrite_conditions")
    def wrong(start: int) -> list[CheckedCondition]:
        conditions = correct(start)
        conditions[index] = condition
        return conditions


def two_phases_after_a_message_without_an_answer(patch: Patch) -> None:
    """They give up what the message commits."""
    correct = Commit._heard

    @in_place_of(patch, Commit, "_heard")
    def wrong(self: Commit, answer: Refused | PercolatorError) -> None:
        correct(self, answer)
        if self.state is State.ONE_ROUND and getattr(answer, "retry", None) is Retry.UNKNOWN:
            self.sent = Sent.NOTHING
            answer.retry = Retry.SAFE  # type: ignore[union-attr]


def refusal_speaks_for_an_unanswered_message(patch: Patch) -> None:
    """The message before it may have committed what is given up then."""
    correct = Commit._heard

    @in_place_of(patch, Commit, "_heard")
    def wrong(self: Commit, answer: Refused | PercolatorError) -> None:
        correct(self, answer)
        is_refusal = isinstance(answer, PercolatorError) and answer.retry is not Retry.UNKNOWN
        if is_refusal:
            self.sent = Sent.NOTHING


def message_is_not_noted_when_it_leaves(patch: Patch) -> None:
    """The caller is cancelled, hears that it is rolled back, and the message commits it."""
    correct = Commit._sending

    @in_place_of(patch, Commit, "_sending")
    def wrong(self: Commit) -> None:
        if self.state is not State.ONE_ROUND:
            correct(self)


def executed_counts_as_not_sent(patch: Patch) -> None:
    """A transaction that the message has committed, or still will, is reported as aborted."""
    fail = PendingCommit.fail

    @in_place_of(patch, PendingCommit, "fail")
    def wrong(self: PendingCommit, index: int, error: PercolatorError) -> None:
        fail(self, index, NotSent(error.message) if error.retry is Retry.UNKNOWN else error)

    patch.setattr(PendingCommit, "expire", lambda self: self.answer(0, NotSent("no answer")))


def answered_before_the_batch_is_durable(patch: Patch) -> None:
    """A power cut undoes what was acknowledged."""
    fill = OneRoundTransactions.fill

    @in_place_of(patch, OneRoundTransactions, "fill")
    def wrong(
        self: OneRoundTransactions, batch: Any, taken: list[OneRoundTransaction], *space: int
    ) -> None:
        fill(self, batch, taken, *space)
        for transaction in taken:
            self._end(transaction, transaction.refusal)

    @in_place_of(patch, OneRoundTransactions, "conclude")
    def conclude(
        self: OneRoundTransactions, taken: Sequence[OneRoundTransaction], result: object
    ) -> None:
        self._held_cells.let_go([one for one in taken if one.refusal is None])


def cells_let_go_before_the_batch_is_shown(patch: Patch) -> None:
    """A reader above the commit finds neither a lock, nor a held cell, nor the commit."""
    fill = OneRoundTransactions.fill

    def wrong(
        self: OneRoundTransactions, batch: Any, taken: list[OneRoundTransaction], *space: int
    ) -> None:
        fill(self, batch, taken, *space)
        self._held_cells.let_go(taken)

    let_go = HeldCells.let_go

    @in_place_of(patch, HeldCells, "let_go")
    def once(self: HeldCells, holders: Iterable[Holder]) -> None:
        still = [one for one in holders if self.holders.get(one.cells[0]) is one]
        let_go(self, still)

    patch.setattr(OneRoundTransactions, "fill", wrong)


def mutations_of_held_cells_do_not_wait(patch: Patch) -> None:
    """They are judged against what is neither durable nor held: a marker goes in, and then the
    commit that it was to keep out."""
    correct = MutationQueue._judge_part

    @in_place_of(patch, MutationQueue, "_judge_part")
    def wrong(self: MutationQueue, *arguments: Any, **rest: Any) -> int:
        held = self._state.held_cells
        holders, held.holders = held.holders, {}
        try:
            return correct(self, *arguments, **rest)
        finally:
            held.holders = holders


def judged_while_a_batch_changes_the_cell(patch: Patch) -> None:
    """The marker or the lock that is on its way to the disk is not seen."""

    correct = OneRoundTransactions.arrive

    @in_place_of(patch, OneRoundTransactions, "arrive")
    def wrong(self: OneRoundTransactions, transactions: Sequence[OneRoundTransaction]) -> None:
        touched, self._lines.touched = self._lines.touched, {}
        try:
            correct(self, transactions)
        finally:
            self._lines.touched = touched


def the_first_in_line_does_not_wait_for_the_cell(patch: Patch) -> None:
    """A transaction that is called too early is judged while its rival is neither durable nor
    held."""
    patch.setattr(Lines, "_is_free", lambda self, cell, place: True)


def what_gives_up_stays_in_its_lines(patch: Patch) -> None:
    """Nothing that comes to its cells later is ever judged."""
    patch.setattr(Lines, "give_up", lambda self, place: None)


def write_latch_does_not_wait_for_held_cells(patch: Patch) -> None:
    """A transaction that was judged before a fence was raised commits behind it."""

    @in_place_of(patch, HeldCells, "none_left")
    async def wrong(self: HeldCells) -> None:
        """Does not wait."""


ONE_ROUND_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], str | None, bool], ...] = (
    (reads_do_not_wait, (), None, True),
    (timestamp_fetched_before_the_cells_are_held, (), None, True),
    (scans_of_changes_do_not_wait, (), "feeds", False),
    (marker_not_checked, (Kind.SLOW_LINKS,), "registers", False),
    (own_commit_not_looked_for, (), None, True),
    (two_phases_after_a_message_without_an_answer, (Kind.PAUSE, Kind.SLOW_LINKS), None, True),
    (refusal_speaks_for_an_unanswered_message, (Kind.CRASH,), None, False),
    (message_is_not_noted_when_it_leaves, (Kind.PAUSE, Kind.SLOW_LINKS), None, True),
    (executed_counts_as_not_sent, (Kind.PAUSE, Kind.SLOW_LINKS), None, True),
    (answered_before_the_batch_is_durable, (Kind.POWER, Kind.SLOW_DISK), None, False),
    (cells_let_go_before_the_batch_is_shown, (), None, True),
    (mutations_of_held_cells_do_not_wait, (), None, True),
    (judged_while_a_batch_changes_the_cell, (Kind.SLOW_DISK,), None, True),
    (the_first_in_line_does_not_wait_for_the_cell, (), None, True),
    (what_gives_up_stays_in_its_lines, (Kind.CRASH_ORACLE,), "loaders", False),
)
"""The bugs, with the disruptions that reveal them, the workload if it has to be that one, and
whether they are caught in seconds."""


# Bugs of handing over a hot cell: one for each rule (percolator/protocol/contention.py).


def handover_used_by_one_that_came_later(patch: Patch) -> None:
    """Its snapshot lacks what was committed before its first read, but after the winner."""
    correct = HotCells.leave

    @in_place_of(patch, HotCells, "leave")
    def wrong(self: HotCells, contender: Contender, handover: Handover | None = None) -> None:
        contender.followers = self._joined
        correct(self, contender, handover)


def timestamp_is_not_set_aside(patch: Patch) -> None:
    """Another transaction has it, too: each of them takes the other's commit for its own."""

    @in_place_of(patch, group_commit, "commit_timestamps")
    def wrong(
        held: Iterable[OneRoundTransaction], first: int
    ) -> Iterator[tuple[int, OneRoundTransaction]]:
        yield from enumerate(held, first)

    @in_place_of(patch, OneRoundTransactions, "_first_timestamp")
    def one_each(
        self: OneRoundTransactions, held: Sequence[OneRoundTransaction]
    ) -> asyncio.Future[int]:
        assert self._state.timestamps is not None
        return asyncio.ensure_future(self._state.timestamps(len(held)))


def handover_of_every_commit(patch: Patch) -> None:
    """For commits in two phases, and for those that were found, no timestamp was set aside."""

    def wrong(
        cls: type[Handover], commit: int, writes: Mapping[CellAddress, Write]
    ) -> Handover | None:
        return correct(FollowedCommit(commit), writes)

    correct = Handover.after
    patch.setattr(Handover, "after", classmethod(wrong))


HANDOVER_BUGS = (
    (handover_used_by_one_that_came_later, False),
    (timestamp_is_not_set_aside, True),
    (handover_of_every_commit, True),
)
"""Each with whether it is caught in seconds."""


# Bugs of holding cells: others wait until a time-out ends it.


def ended_transactions_hold_their_cells(patch: Patch) -> None:
    """Nothing says that they have ended."""
    correct = Attempts.committed

    @in_place_of(patch, Attempts, "committed")
    def wrong(self: Attempts, commit_ts: int, writes: Mapping[CellAddress, Write]) -> None:
        contender, self._contender = self._contender, None
        correct(self, commit_ts, writes)
        self._contender = contender

    patch.setattr(Attempts, "end", lambda self: None)


def one_that_holds_cells_waits_for_another(patch: Patch) -> None:
    """Two that have read one cell each, and want the other's, wait for each other."""
    correct = Contender.stand_in_line

    @in_place_of(patch, Contender, "stand_in_line")
    def wrong(self: Contender, *, is_reading: bool = False) -> asyncio.Future[Handover | None]:
        held, self.held = self.held, []
        place = correct(self, is_reading=is_reading)
        self.held += held
        return place


HOLDING_BUGS = (ended_transactions_hold_their_cells, one_that_holds_cells_waits_for_another)


# Bugs of turns at cells (percolator/tablet/turns.py, percolator/protocol/turns.py).


def a_changed_cell_is_no_reason_to_begin_again(patch: Patch) -> None:
    """The transaction reads one cell as it is now, and others at its snapshot."""
    correct = TransactionTurns.at

    @in_place_of(patch, TransactionTurns, "at")
    async def wrong(
        self: TransactionTurns, cell: CellAddress, start: int, deadline: float
    ) -> Turn | None:
        turn = await self._await(cell, start, deadline - self._env.now())
        return turn or await correct(self, cell, start, deadline)


def turns_of_dead_clients_do_not_end(patch: Patch) -> None:
    """Others wait for them until their own time is over."""
    correct = Turns._begin

    @in_place_of(patch, Turns, "_begin")
    def wrong(self: Turns, cell: bytes, queue: Queue, start: int) -> None:
        correct(self, cell, queue, start)
        if queue.timer is not None:
            queue.timer.cancel()


def a_late_comer_begins_above_the_commit_before_its_turn(patch: Patch) -> None:
    """Its snapshot lacks what was committed before its first read, but after that timestamp."""

    @in_place_of(patch, Turns, "followers")
    def wrong(self: Turns, cells: Iterable[bytes], start: int) -> int:
        held = [self.queues[cell] for cell in cells if cell in self.queues]
        return TIMESTAMP_MAX if any(one.turn.start == start for one in held) else 0

    @in_place_of(patch, Turns, "set_aside")
    def whoever_waits(
        self: Turns, cells: Iterable[bytes], start: int, timestamp: int, too_late: int
    ) -> None:
        for cell in cells:
            queue = self.queues.get(cell)
            if queue is not None and queue.turn.start == start:
                queue.set_aside = (start, timestamp, too_late)
                return


TURN_BUGS = (
    (a_changed_cell_is_no_reason_to_begin_again, (), True),
    (turns_of_dead_clients_do_not_end, (Kind.CLIENT_STEP,), True),
    (a_late_comer_begins_above_the_commit_before_its_turn, (Kind.SLOW_DISK,), True),
)
"""Each with the disruptions that reveal it, and whether it is caught in seconds."""


# Bugs of read locks: one for each way to lose an exclusion.


def writers_pass_live_read_locks(patch: Patch) -> None:
    """Their owners commit later, and what they have read was changed before."""
    patch.setattr(Exclusion, "_read_lock", lambda self, cell: None)


def writers_pass_committed_read_locks(patch: Patch) -> None:
    """A writer that began before the commit has not seen what the reader added."""
    patch.setattr(Exclusion, "_newer_read", lambda self, cell, since, cursor: None)


def read_locks_pass_live_locks(patch: Patch) -> None:
    """The writer commits later, without what the reader adds."""
    patch.setattr(Exclusion, "_lock", lambda self, locked: None)


def read_locks_pass_newer_commits(patch: Patch) -> None:
    """The value that the transaction has read is gone when it commits."""
    patch.setattr(Exclusion, "_newer", lambda self, locked, since, cursor: None)


def writers_do_not_wait_for_read_locks_on_their_way(patch: Patch) -> None:
    """Both are judged before either is there."""
    patch.setattr(Lines, "_is_read_locked", lambda self, cell: False)


def read_locks_do_not_wait_for_writers_on_their_way(patch: Patch) -> None:
    """A read lock is taken while the commit of a writer is under way."""
    patch.setattr(group_commit, "cells_locked_by", lambda cells: ())


def one_round_looks_at_its_own_cells_only(patch: Patch) -> None:
    """The short cut of what commits in one round forgets the other side."""
    patch.setattr(ReadLocks, "may_exclude", lambda self, cell, start: False)


def new_owner_forgets_the_read_locks(patch: Patch) -> None:
    """It takes the tablet over, and lets writers pass those that it found."""

    @in_place_of(patch, ReadLocks, "load")
    def wrong(self: ReadLocks, *_: object) -> None:
        self.used = self.noted = True


# Bugs of serializable transactions: a read without its lock, in each way to read.


def _read_without_locks(patch: Patch, name: str) -> None:
    correct = getattr(Reader, name)

    @in_place_of(patch, Reader, name)
    async def wrong(self: Reader, *arguments: Any) -> Any:
        locks, self.read_locks = self.read_locks, None
        try:
            return await correct(self, *arguments)
        finally:
            self.read_locks = locks


def single_reads_are_not_locked(patch: Patch) -> None:
    """A cell that the transaction has read may have changed by its commit."""
    _read_without_locks(patch, "get")


def reads_of_many_cells_are_not_locked(patch: Patch) -> None:
    """As above."""
    _read_without_locks(patch, "_get_rows")


def read_locks_are_left_out_of_what_writes(patch: Patch) -> None:
    """Only what writes nothing may do without them."""

    @in_place_of(patch, WriteSet, "leave_out_lone_read_locks")
    def wrong(self: WriteSet) -> None:
        for cell in [cell for cell, (kind, _) in self.cells.items() if kind == KIND_READ_LOCK]:
            del self.cells[cell]


SERIALIZABLE_BUGS = (
    single_reads_are_not_locked,
    reads_of_many_cells_are_not_locked,
    read_locks_are_left_out_of_what_writes,
)

_TAKEOVERS = (Kind.TAKEOVER, Kind.CRASH)

READ_LOCK_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], float, bool], ...] = (
    (writers_pass_live_read_locks, (), 0.0, True),
    (writers_pass_committed_read_locks, (), 0.0, True),
    (read_locks_pass_live_locks, (), 0.0, True),
    (read_locks_pass_newer_commits, (), 0.0, True),
    (writers_do_not_wait_for_read_locks_on_their_way, (), 0.8, False),
    (read_locks_do_not_wait_for_writers_on_their_way, (), 0.0, False),
    (one_round_looks_at_its_own_cells_only, (), 0.8, True),
    (new_owner_forgets_the_read_locks, _TAKEOVERS, 0.0, False),
)
"""The bugs, with the disruptions that reveal them, the share of transactions that try to commit
in one round, and whether they are caught in seconds."""
