"""Bugs of notifications and acknowledgements that a simulation has to find."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from percolator import aio
from percolator.aio import observing
from percolator.aio.reader import Reader
from percolator.errors import CellAddress, OutcomeUnknown, PercolatorError, SnapshotTooOld
from percolator.formats.records import START_TIMESTAMP_BYTES, acknowledgement_column
from percolator.history import fates
from percolator.history.fates import Fates, Judged
from percolator.observers import backfill, quiet, watched_cell
from percolator.observers import intent_notifications as finding
from percolator.observers.context import Admission, WorkerContext
from percolator.observers.intent_notifications import IntentNotifications
from percolator.observers.runs import ObserverRun, RunPool
from percolator.observers.watched import Watched
from percolator.observers.watched_cell import Acknowledgement, WatchedCell
from percolator.observers.work_queue import Work, WorkQueue
from percolator.protocol import commit, steps
from percolator.protocol.announcing import Announcement
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.commit import Commit
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import ROLLED_BACK, Environment, OpenStarts, Statistics
from percolator.protocol.read import read_rows
from percolator.protocol.roll_forward import Rolling
from percolator.recipes.combine_queue import CombineQueue
from percolator.recipes.export_queue import ExportQueue
from percolator.recipes.index import IndexEntries
from percolator.recipes.sharded_counter import ShardedCounter
from percolator.routing.catalog import Catalog, TableSchema
from percolator.routing.cells import FoundCell, RowRequest
from percolator.rowstore import intents, reads
from percolator.rowstore.collection import Plan, _Row
from percolator.rowstore.intents import Intent, Intents, SharedWrites
from percolator.rowstore.port import RowChange, StoredCell
from percolator.schema import Table as AnyTable
from percolator.services.master.cluster_map import Table
from percolator.services.master.collection import CollectionTimes
from percolator.services.master.leader import Tables
from percolator.services.master.table_changes import Creation, TableChanges
from percolator.services.master.tablet_collection import OldLocks
from percolator.services.tabletserver.settings import TabletServerSettings
from percolator.tablet import collection, group_commit, opening
from percolator.tablet.cells import LockMirror
from percolator.tablet.collection import AnsweredCells, Record, Sweep, _WalkOfVersions
from percolator.tablet.group_commit import MutationWork
from percolator.tablet.scans import ScanPage
from percolator.tablet.state import Lifetimes, SafePoints, TabletState, Ttls
from percolator.tablet.tablet import PointReads
from percolator.tablet.upkeep import Upkeep
from percolator.timestamps import SEQUENCE_BITS, is_expired
from percolator.v1 import master_pb2
from percolator.v1.cells_pb2 import SPACE_NOTIFY, Cell
from percolator.v1.tabletserver_pb2 import Mutation, RowRead
from tests.patching import in_place_of
from tests.simulation import programs
from tests.simulation.bug import PerSeed
from tests.simulation.planted_protocol_bugs import without_lists
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def notification_newer_than_the_snapshot_deleted(patch: Patch) -> None:
    """It announces a change that the run could not see."""
    correct = RunPool._handled

    @in_place_of(patch, RunPool, "_handled")
    def wrong(self: RunPool, work: Work, seen: int) -> None:
        correct(self, work, max(work.timestamps | {seen}))


def changes_during_a_pause_are_not_looked_at(patch: Patch) -> None:
    """Whatever comes during the pause is taken for handled by the run before it."""
    correct = WorkQueue._remember

    @in_place_of(patch, WorkQueue, "_remember")
    def wrong(self: WorkQueue, work: Work, seen: int) -> None:
        milliseconds = int(work.watched.observer.pause_seconds * 1000)
        correct(self, work, seen + (milliseconds << SEQUENCE_BITS))


def notification_at_the_start_timestamp(patch: Patch) -> None:
    """A run whose snapshot is between start and commit takes the change for one that it covered."""
    without_lists(patch)
    for name in ("commit_primary", "commit_secondary"):
        _at_the_start(patch, name)


def _at_the_start(patch: Patch, name: str) -> None:
    correct = getattr(steps, name)

    @in_place_of(patch, steps, name)
    def wrong(row: bytes, column: bytes, start: int, *rest: Any) -> Mutation:
        mutation: Mutation = correct(row, column, start, *rest)
        for change in mutation.changes:
            if change.space == SPACE_NOTIFY:
                change.timestamp = start
        return mutation


def acknowledgement_not_in_the_transaction(patch: Patch) -> None:
    """It is written afterwards: two runs for one change do not even notice each other."""
    begin, commit = ObserverRun.begin, ObserverRun.commit

    @in_place_of(patch, ObserverRun, "begin")
    async def begin_wrong(self: ObserverRun) -> bool:
        wanted = await begin(self)
        for work in self.open:
            address = work.watched.acknowledgement(work.row, work.column)
            self.transaction.internal.writes.cells.pop(address, None)
        return wanted

    @in_place_of(patch, ObserverRun, "commit")
    async def commit_wrong(self: ObserverRun) -> int | None:
        committed = await commit(self)
        for work in self.open:
            if work.watched.observer.weak:
                continue
            later = self._context.begin(None)
            # Otherwise it would be caught for writing a cell that no client knows.
            vars(later)["_recorded"].record.observer = work.watched.observer.name
            await later.timestamp()
            address = work.watched.acknowledgement(work.row, work.column)
            later.internal.writes.put(address, Acknowledgement(self.start).encode())
            await later.commit()
        return committed


def deletes_wake_every_observer(patch: Patch) -> None:
    """One that deletes its trigger would run forever."""
    patch.setattr(WatchedCell, "has_value", property(lambda self: True))


def write_after_a_delete_handled_with_it(patch: Patch) -> None:
    """It was announced while the run looked at the deleted cell, and is never run for."""
    correct = ObserverRun.begin

    @in_place_of(patch, ObserverRun, "begin")
    async def wrong(self: ObserverRun) -> bool:
        is_wanted = await correct(self)
        for work in self.handled:
            if not self.cells[work].has_value:
                self.start = max(work.timestamps | {self.start})
        return is_wanted


def columns_read_last_time_kept_from_then(patch: Patch) -> None:
    """The next run does not read them again, and takes what its snapshot does not show."""
    correct = WatchedCell.known
    kept: dict[tuple[Watched, bytes, bytes], FoundCell | None] = {}

    @in_place_of(patch, WatchedCell, "known")
    def wrong(self: WatchedCell, work: Work) -> Mapping[bytes, FoundCell | None]:
        for column, found in self.others.items():
            kept.setdefault((work.watched, work.row, column), found)
        others = {column: kept[work.watched, work.row, column] for column in self.others}
        return correct(self._replace(others=others), work)


def weak_notification_not_written_again(patch: Patch) -> None:
    """The commit timestamp has changed, and the observer that was notified has run too early."""
    correct = Commit._notify

    @in_place_of(patch, Commit, "_notify")
    async def wrong(self: Commit, commit: int, deadline: float) -> None:
        await correct(self, commit, deadline)
        self._write.weak_notifications = ()


def roll_forward_without_the_notification(patch: Patch) -> None:
    """Another client commits an observed cell for its dead owner, and notifies no observer."""
    correct = Rolling.roll

    @in_place_of(patch, Rolling, "roll")
    async def wrong(self: Rolling, met: list[MetLock], deadline: float) -> list[MetLock]:
        env = replace(self._env, schemas=_Unobserved(self._env.schemas))
        return await correct(Rolling(env, self._once), met, deadline)


class _Unobserved:
    """Schemas without any observers."""

    def __init__(self, schemas: Any) -> None:
        self._schemas = schemas

    def get(self, table_id: int) -> TableSchema | None:
        known = self._schemas.get(table_id)
        return None if known is None else TableSchema(known.version)

    async def refresh(self, table_id: int, deadline: float) -> TableSchema:
        return TableSchema((await self._schemas.refresh(table_id, deadline)).version)


def registration_returns_before_tablets_know(patch: Patch) -> None:
    """Commits for the older schema are accepted for a while: they do not notify the observer."""

    @in_place_of(patch, Tables, "_until_current")
    async def wrong(self: Tables, table: Table, deadline: float) -> None:
        return


def commits_of_any_schema_are_taken(patch: Patch) -> None:
    """A client that does not know an observer commits what it observes, long after registration."""
    correct = MutationWork.refusal

    @in_place_of(patch, MutationWork, "refusal")
    def wrong(self: MutationWork, state: TabletState) -> PercolatorError | None:
        self._schema_version = state.schema_version
        return correct(self, state)

    patch.setattr(TabletState, "require_target", TabletState.require_tablet)


def unknown_run_taken_for_committed(patch: Patch) -> None:
    """Its notifications are deleted, but it turns out to have been rolled back."""
    correct = ObserverRun.commit

    @in_place_of(patch, ObserverRun, "commit")
    async def wrong(self: ObserverRun) -> int | None:
        try:
            return await correct(self)
        except OutcomeUnknown:
            return None


def notification_deleted_before_the_run(patch: Patch) -> None:
    """A worker that dies in the middle leaves nothing to find."""
    correct = RunPool._attempt

    @in_place_of(patch, RunPool, "_attempt")
    async def wrong(self: RunPool, works: Sequence[Work], task: asyncio.Task[Any]) -> None:
        for work in works:
            self._results.deletions.add(work, sorted(work.timestamps))
        await self._results.deletions.done()
        await correct(self, works, task)


# ---------------------------------------------------------------------------- batches


def batch_that_failed_counts_as_handled(patch: Patch) -> None:
    """The others of its rows, although only one may be to blame."""
    correct = RunPool._run_each_alone

    @in_place_of(patch, RunPool, "_run_each_alone")
    def wrong(self: RunPool, works: Sequence[Work]) -> None:
        correct(self, works[:1])
        for work in works[1:]:
            self._handled(work, max(work.timestamps))


def rest_of_a_failed_batch_is_forgotten(patch: Patch) -> None:
    """It is not run again, and this worker ignores it when it is found."""
    correct = RunPool._run_each_alone

    @in_place_of(patch, RunPool, "_run_each_alone")
    def wrong(self: RunPool, works: Sequence[Work]) -> None:
        correct(self, works[:1])


def batch_acknowledges_its_first_row_only(patch: Patch) -> None:
    """Another worker that finds one of the others handles it, too."""
    correct = ObserverRun.begin

    @in_place_of(patch, ObserverRun, "begin")
    async def wrong(self: ObserverRun) -> bool:
        is_wanted = await correct(self)
        for work in self.open[1:]:
            address = work.watched.acknowledgement(work.row, work.column)
            self.transaction.internal.writes.cells.pop(address, None)
        return is_wanted


def batch_takes_in_what_was_handled_before(patch: Patch) -> None:
    """Only the first row is looked at for that."""
    correct = ObserverRun._begin_for

    @in_place_of(patch, ObserverRun, "_begin_for")
    def wrong(self: ObserverRun, work: Work) -> None:
        if work is not self.works[0] and not work.watched.observer.weak:
            cell = self.cells[work]
            self.cells[work] = cell._replace(acknowledged=Acknowledgement())
        correct(self, work)


BATCH_BUGS = (
    batch_that_failed_counts_as_handled,
    rest_of_a_failed_batch_is_forgotten,
    batch_acknowledges_its_first_row_only,
    batch_takes_in_what_was_handled_before,
)


# ---------------------------------------------------------------------------- backfills


def backfill_at_a_snapshot_from_before_the_registration(patch: Patch) -> None:
    """A commit after that on a tablet that does not know the observer yet notifies nobody, and is
    not in the snapshot. The next snapshot, if one is needed, is a new one."""
    early = ContextVar("early", default=0)
    correct, snapshot = backfill.backfill_owed, backfill._Backfill._snapshot

    @in_place_of(patch, backfill, "backfill_owed")
    async def wrong(context: WorkerContext, watched: Watched, **rest: Any) -> None:
        early.set(await context.env.timestamps.get(timeout_seconds=1.0))
        await correct(context, watched, **rest)

    @in_place_of(patch, backfill._Backfill, "_snapshot")
    async def taken_before(self: backfill._Backfill) -> int:
        found = early.get()
        early.set(0)
        return found or await snapshot(self)


def waiting_does_not_count_backfills(patch: Patch) -> None:
    """It returns while cells are there of which the observer was not notified."""
    correct = quiet._Pass.remaining

    @in_place_of(patch, quiet._Pass, "remaining")
    def wrong(self: quiet._Pass) -> quiet.Remaining:
        return replace(correct(self), backfills={})


def backfill_counts_as_done_when_it_begins(patch: Patch) -> None:
    """If its worker dies, nobody knows that something is left."""
    correct = Catalog.report_backfill

    @in_place_of(patch, Catalog, "report_backfill")
    async def wrong(
        self: Catalog, request: master_pb2.ReportBackfillRequest, deadline: float
    ) -> master_pb2.Table:
        table = await correct(self, request, deadline)
        if not request.HasField("row"):
            done = master_pb2.ReportBackfillRequest()
            done.CopyFrom(request)
            done.done = True
            await correct(self, done, deadline)
        return table


def backfill_is_reported_before_its_notifications_are_durable(patch: Patch) -> None:
    """If its worker dies then, the next one goes on behind cells that were not notified."""
    correct = backfill._Backfill._notify

    @in_place_of(patch, backfill._Backfill, "_notify")
    async def wrong(self: backfill._Backfill, cells: Sequence[backfill.Cell]) -> None:
        self._context.env.background.start(correct(self, cells))


def table_created_without_the_observers_that_wait_for_it(patch: Patch) -> None:
    """Its first commits notify nobody."""
    correct = TableChanges._decide_creation

    @in_place_of(patch, TableChanges, "_decide_creation")
    def wrong(self: TableChanges[Any], creation: Creation, current: Any) -> Any:
        changed, decided = correct(self, creation, replace(current, awaited={}))
        return replace(changed, awaited=current.awaited), decided


# Bugs of the recipes.


def rest_of_a_batch_is_not_announced(patch: Patch) -> None:
    """A run that leaves entries to the next one does not wake it."""
    correct = CombineQueue._combine_bucket

    @in_place_of(patch, CombineQueue, "_combine_bucket")
    async def wrong(self: Any, tx: aio.Transaction, bucket: bytes, batch: int) -> Any:
        changes = await correct(self, tx, bucket, batch)
        tx._buffer.weak = None
        return changes


def entry_after_a_batch_is_deleted(patch: Patch) -> None:
    """A run that is cut off deletes the entry at which it noticed."""
    correct = CombineQueue._combine_bucket

    @in_place_of(patch, CombineQueue, "_combine_bucket")
    async def wrong(self: Any, tx: aio.Transaction, bucket: bytes, batch: int) -> Any:
        changes = await correct(self, tx, bucket, batch)
        if tx._buffer.weak:
            first, last = self._rows.entries_of(bucket)
            async for row in tx.scan(self.table, start=first, end=last, limit=1):
                await tx.delete(row.key, self._entry)
        return changes


def exports_numbered_by_start_timestamp(patch: Patch) -> None:
    """An export that began before a number that has arrived, and commits after it, is left out
    forever."""

    @in_place_of(patch, ExportQueue, "_sequence")
    def wrong(self: Any, row: bytes, commit_timestamp: int) -> int:
        return int.from_bytes(row[-12:], "big")


def shards_of_the_present_number_only(patch: Patch) -> None:
    """The number was raised: a program that still has the lower one overlooks the others."""

    @in_place_of(patch, ShardedCounter, "_value")
    async def wrong(self: Any, reads: Any, key: Any) -> Any:
        part = self._parts.part(key)
        rows = [part + shard.to_bytes(2, "big") for shard in range(self._shards)]
        found = await reads.get_many(self.table, rows, [self._count])
        return sum(row.get(self._count, 0) for row in found)


def former_words_stay_in_the_index(patch: Patch) -> None:
    """The entries of a row are not read in the transaction that replaces it."""

    @in_place_of(patch, IndexEntries, "recorded")
    async def wrong(self: Any, tx: aio.Transaction, row: Any) -> frozenset[bytes]:
        return frozenset()


RECIPE_BUGS: tuple[Callable[[Patch], None], ...] = (
    rest_of_a_batch_is_not_announced,
    entry_after_a_batch_is_deleted,
    exports_numbered_by_start_timestamp,
    shards_of_the_present_number_only,
    former_words_stay_in_the_index,
)


# Bugs of intents, the notifications of a row store,.


_LATE_SECONDS = 0.05
_SOON_AFTER = 10_000 << SEQUENCE_BITS


def intents_after_the_commit_point(patch: Patch) -> None:
    """The client dies in between."""
    correct = Announcement.announce

    @in_place_of(patch, Announcement, "announce")
    async def wrong(self: Announcement, cells: Sequence[CellAddress], deadline: float) -> None:
        async def late() -> None:
            await self._env.clock.sleep(_LATE_SECONDS)
            await correct(self, cells, inf)

        self._env.background.start(late())


def second_committer_announces_nothing(patch: Patch) -> None:
    """The first one has died, or was slower: its intents are not there."""
    correct = Announcement.announce
    announced = PerSeed(set[int])

    @in_place_of(patch, Announcement, "announce")
    async def wrong(self: Announcement, cells: Sequence[CellAddress], deadline: float) -> None:
        if self._write.start not in announced.now():
            announced.now().add(self._write.start)
            await self._env.clock.sleep(_LATE_SECONDS)
            await correct(self, cells, deadline)


def intents_that_were_not_answered_taken_for_written(patch: Patch) -> None:
    """The call was lost, and nobody repeats it."""
    correct = Intents.announce

    @in_place_of(patch, Intents, "announce")
    async def wrong(
        self: Intents, start: int, cells: Sequence[tuple[CellAddress, bytes]], deadline: float
    ) -> None:
        try:
            await correct(self, start, cells, self._world.clock.monotonic_seconds())
        except PercolatorError:
            return


def intents_that_join_a_sent_call_taken_for_written(patch: Patch) -> None:
    """It does not have them, and whoever leads it tells the others that all is well."""

    @in_place_of(patch, SharedWrites, "write")
    async def wrong(self: SharedWrites, rows: Sequence[RowChange], deadline: float) -> None:
        call = self._open
        if call is not None and call.admits(rows, deadline):
            await call.follow(rows)
            return
        call = self._open = intents._Call(rows, deadline)
        try:
            await self._write(list(call.rows.values()), deadline)
        finally:
            if self._open is call:
                self._open = None
            call.end(True)


def intent_cleared_while_its_cell_is_locked(patch: Patch) -> None:
    """Its transaction may still commit."""
    _judged(patch, lambda judged: [intent for intent, _ in judged.locked])


def intent_cleared_without_a_trace(patch: Patch) -> None:
    """The prewrite of its cell is on its way, and no marker stops it."""
    _judged(patch, lambda judged: judged.without_trace)


def _judged(patch: Patch, cleared: Callable[[Judged], list[Intent]]) -> None:
    correct = Fates.judge

    @in_place_of(patch, Fates, "judge")
    async def wrong(self: Fates, found: Sequence[Intent]) -> Judged:
        judged = await correct(self, found)
        judged.rolled_back += cleared(judged)
        return judged


def marker_put_over_a_lock(patch: Patch) -> None:
    """The cell was locked after the worker had looked. Workers do not wait for long, or else hardly
    any transaction would be so slow."""
    patch.setattr(finding, "_NO_TRACE_SECONDS", 0.0)
    patch.setattr(fates, "steps", _MarkersOverLocks())


class _MarkersOverLocks:
    """The steps of the protocol, where a marker removes the lock of its transaction."""

    def __getattr__(self, name: str) -> Any:
        return getattr(steps, name)

    def roll_back_expired(self, row: bytes, column: bytes, start: int, _: bytes) -> Mutation:
        return steps.roll_back(row, column, start)


def intent_cleared_by_the_marker_of_another_start(patch: Patch) -> None:
    """A later transaction was rolled back in the cell."""
    patch.setattr(fates, "steps", _MarkersOfLaterStarts())


class _MarkersOfLaterStarts:
    """The steps of the protocol, where `status` finds them, too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(steps, name)

    def status(self, row: bytes, column: bytes, start: int) -> Mutation:
        step = steps.status(row, column, start)
        step.conditions[steps.OWN_ROLLBACK].until_timestamp = start + _SOON_AFTER
        return step


def low_water_mark_moved_too_far(patch: Patch) -> None:
    """Transactions that begin early and are announced late are never looked for."""
    correct = IntentNotifications._look_into

    @in_place_of(patch, IntentNotifications, "_look_into")
    async def wrong(self: IntentNotifications, bucket: int, admission: Admission, now: int) -> int:
        undecided = await correct(self, bucket, admission, now)
        self._from[bucket] = now
        return undecided

    patch.setattr(finding, "_FULL_PASS_SECONDS", inf)


def commits_without_a_look_at_the_epoch(patch: Patch) -> None:
    """An observer that was registered meanwhile is not notified."""

    @in_place_of(patch, Announcement, "renew")
    async def wrong(self: Announcement, deadline: float) -> None:
        return


_STOPS = (Kind.PAUSE, Kind.SLOW_LINKS)

AT_THE_COMMIT_POINT: tuple[Callable[[Patch], None], ...] = (
    intents_after_the_commit_point,
    second_committer_announces_nothing,
)
"""They show if a client dies with many transactions at this step."""

AT_ANY_STEP: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
    (intents_that_were_not_answered_taken_for_written, _STOPS, True),
    (intents_that_join_a_sent_call_taken_for_written, (), True),
    (intent_cleared_while_its_cell_is_locked, (), True),
    (intent_cleared_without_a_trace, _STOPS, False),
    (marker_put_over_a_lock, _STOPS, False),
    (intent_cleared_by_the_marker_of_another_start, _STOPS, False),
    (low_water_mark_moved_too_far, (), True),
    (commits_without_a_look_at_the_epoch, _STOPS, False),
)
"""Each with the kinds of disruptions that reveal it, and whether it is caught within
seconds."""


# Bugs of collecting history that a simulation has to find.


def collects_before_old_locks_are_resolved(patch: Patch) -> None:
    """The rest of a committed transaction is rolled back: its primary no longer shows a commit."""

    @in_place_of(patch, OldLocks, "resolve")
    async def nothing(*_: object) -> None:
        return

    patch.setattr(collection, "_require_no_older_locks", lambda state, below: None)
    # Tablets also refuse rollback markers below what they have collected. With that, nothing would
    # be torn: the locks would stay, and the cells behind them would never be read again.
    patch.setattr(group_commit, "marked_below", lambda collected, changes: 0)
    collect_eagerly(patch)


def old_locks_rolled_back_without_their_primary(patch: Patch) -> None:
    """Their owners need not be asked, but what the primary says counts: it may have committed."""
    correct = Cleanup.resolve

    @in_place_of(patch, Cleanup, "resolve")
    async def wrong(
        self: Cleanup, met: Sequence[MetLock], *, ended_below: int = 0, **rest: Any
    ) -> set[int]:
        for one in met if ended_below else ():
            self._env.verdicts.put(one.lock.start_timestamp, ROLLED_BACK)
        return await correct(self, met, ended_below=ended_below, **rest)


def a_transaction_counts_as_gone_with_its_first_lock(patch: Patch) -> None:
    """The search for old locks does not find its other locks, and nobody rolls them forward."""

    @in_place_of(patch, LockMirror, "_forget_start")
    def wrong(self: LockMirror, header: bytes) -> None:
        self._starts.pop(header[:START_TIMESTAMP_BYTES], None)

    patch.setattr(group_commit, "marked_below", lambda collected, changes: 0)
    collect_eagerly(patch)


def new_owner_forgets_the_safe_point(patch: Patch) -> None:
    """It serves snapshots half of which its predecessor has collected."""
    correct = opening.load

    @in_place_of(patch, opening, "load")
    async def wrong(state: TabletState) -> None:
        await correct(state)
        state.safe_points = SafePoints()

    collect_eagerly(patch, round_seconds=1.0)  # the next round tells the new owner


def safe_point_checked_before_the_read(patch: Patch) -> None:
    """While a page is being read, cells that it has not reached yet are collected."""
    patch.setattr(PointReads, "_refuse_too_old", lambda self: None)
    collect_eagerly(patch)


def newest_version_under_a_notification_collected(patch: Patch) -> None:
    """An observer that runs late does not find the change for which it had to run."""
    patch.setattr(Sweep, "_is_awaited", lambda self, cell: False)
    collect_eagerly(patch)


def acknowledgement_collected_although_its_cell_is_there(patch: Patch) -> None:
    """A second notification of the same change causes a second run."""

    @in_place_of(patch, AnsweredCells, "came_to")
    def wrong(self: AnsweredCells, cell: bytes) -> list[Record]:
        self.end()
        return []

    collect_eagerly(patch)


def old_locks_rolled_back_when_collecting(patch: Patch) -> None:
    """Masters roll back old locks too early, and tablets do not refuse it either."""
    old_locks_rolled_back_without_their_primary(patch)
    patch.setattr(group_commit, "marked_below", lambda collected, changes: 0)
    collect_eagerly(patch)


def collect_eagerly(patch: Patch, *, round_seconds: float = 0.2) -> None:
    """So that a run of a few seconds sees much of it. No client tells what it needs: then only
    being refused keeps it from what is gone."""
    patch.setattr(OpenStarts, "oldest", lambda self: 0)
    times = CollectionTimes(round_seconds=round_seconds, retention_seconds=0.3)
    patch.setattr(programs, "_COLLECTION", times)


COLLECTION_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], str | None], ...] = (
    (collects_before_old_locks_are_resolved, (Kind.CLIENT_STEP,), None),
    (a_transaction_counts_as_gone_with_its_first_lock, (Kind.CLIENT_STEP,), None),
    (old_locks_rolled_back_when_collecting, (Kind.CLIENT_STEP,), None),
    (safe_point_checked_before_the_read, (Kind.PAUSE,), None),
    (newest_version_under_a_notification_collected, (Kind.PAUSE, Kind.CRASH), "chains"),
    (acknowledgement_collected_although_its_cell_is_there, (Kind.PAUSE, Kind.CRASH), "chains"),
)
"""Each with the disruptions that reveal it, and the workload; but for the safe point that is
forgotten, which takes owners that change when something was collected."""


# Bugs of what an observer has last seen: one for each of the rules.


def what_was_last_seen_is_collected(patch: Patch) -> None:
    """It is older than a version below the safe point, and an observer still has to undo it."""
    patch.setattr(_WalkOfVersions, "_was_last_seen", lambda self, cell, timestamp: False)
    collect_eagerly(patch)


def what_was_last_seen_is_collected_from_a_row(patch: Patch) -> None:
    """The bug above, on a row store."""
    correct = _Row._hear_of_runs

    @in_place_of(patch, _Row, "_hear_of_runs")
    def wrong(self: _Row, column: bytes, records: Sequence[StoredCell]) -> None:
        correct(self, column, records)
        self._last_runs.clear()


def what_was_seen_is_left_under_a_deletion(patch: Patch) -> None:
    """The deletion is collected, and what it has deleted is there again."""
    correct = _WalkOfVersions._end_cell

    @in_place_of(patch, _WalkOfVersions, "_end_cell")
    def wrong(self: _WalkOfVersions) -> None:
        self._seen = []
        correct(self)

    collect_eagerly(patch)


def what_was_seen_is_left_under_a_deletion_in_a_row(patch: Patch) -> None:
    """The bug above, on a row store."""
    correct = _Row.plan

    @in_place_of(patch, _Row, "plan")
    def wrong(self: _Row) -> Plan:
        plan = correct(self)
        seen = [one for cells in self._seen.values() for one in cells]
        plan.last = [[one for one in group if one not in seen] for group in plan.last]
        return plan


def the_version_before_is_taken_for_what_was_seen(patch: Patch) -> None:
    """A run handles several changes: nobody undoes what the last run has seen."""
    _looks_back_to(patch, lambda start, newest: newest - 1)


def what_was_committed_during_a_run_counts_as_seen_by_it(patch: Patch) -> None:
    """As if the acknowledgement were written at its commit timestamp."""
    during = 500 << SEQUENCE_BITS
    _looks_back_to(patch, lambda start, newest: min(start + during, newest - 1))


def _looks_back_to(patch: Patch, moment: Callable[[int, int], int]) -> None:
    """`moment` is given the start of the last run, and the newest change. The reads name no
    acknowledgement; where they are refused, since what they want may be gone, all is right."""
    correct = watched_cell.look_back

    @in_place_of(patch, observing, "look_back")
    async def wrong(
        env: Environment,
        cleanup: Cleanup,
        last_runs: Mapping[Work, int],
        deadline: float,
        statistics: Statistics,
    ) -> dict[Work, bytes | None]:
        seen: dict[Work, bytes | None] = {}
        for work, start in last_runs.items():
            at = moment(start, max(work.timestamps))
            read = RowRead(row=work.row, columns=(work.column,), timestamp=at)
            asked = RowRequest(work.watched.table_id, read)
            try:
                (answer,) = await read_rows(env, cleanup, [asked], deadline, statistics)
            except SnapshotTooOld:
                return await correct(env, cleanup, last_runs, deadline, statistics)
            found = answer.found.get(work.column)
            seen[work] = found.value if found and start else None
        return seen


def delete_row_drops_the_acknowledgement(patch: Patch) -> None:
    """Rows that were derived from the deleted one stay for ever."""
    correct = aio.Transaction.delete_row

    @in_place_of(patch, aio.Transaction, "delete_row")
    async def wrong(self: aio.Transaction, table: AnyTable[bytes], row: bytes) -> None:
        await correct(self, table, row)
        info = await self._reader.info(table, self._reader.deadline(None))
        for observer in (b"invert", b"invert many"):
            hidden = acknowledgement_column(observer, b"source")
            self._buffer.cells.delete(CellAddress(info.table_id, row, hidden))


def a_run_that_was_overtaken_reads_what_may_be_gone(patch: Patch) -> None:
    """The tablet does not look whether it is still the last one that has acknowledged."""
    patch.setattr(PointReads, "_was_last_seen", lambda self, read: bool(read.acknowledgement))
    collect_eagerly(patch)


def a_run_that_was_overtaken_reads_what_may_be_gone_from_a_row(patch: Patch) -> None:
    """The bug above, on a row store."""
    patch.setattr(reads, "_was_last_seen", lambda cells, wanted: bool(wanted.acknowledgement))


PREVIOUS_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
    (what_was_last_seen_is_collected, (), False),
    (what_was_last_seen_is_collected_from_a_row, (), True),
    (what_was_seen_is_left_under_a_deletion, (), False),
    (what_was_seen_is_left_under_a_deletion_in_a_row, (), True),
    (the_version_before_is_taken_for_what_was_seen, (), False),
    (what_was_committed_during_a_run_counts_as_seen_by_it, (), False),
    (delete_row_drops_the_acknowledgement, (), False),
    (a_run_that_was_overtaken_reads_what_may_be_gone, (Kind.PAUSE,), False),
    (a_run_that_was_overtaken_reads_what_may_be_gone_from_a_row, (Kind.PAUSE,), True),
)
"""Each, the disruptions that reveal it, and whether it is in the code for row stores."""


# Bugs of values that expire: one for each of their rules.

_of = MetLock.of


def scans_show_expired_values(patch: Patch) -> None:
    """A scan and a read of the same snapshot disagree."""
    patch.setattr(Lifetimes, "hides_component", lambda self, encoded, commit, timestamp: False)
    patch.setattr(Lifetimes, "lasting", lambda self, timestamp: {})


def expiry_is_judged_when_the_read_arrives(patch: Patch) -> None:
    """By a clock, instead of the snapshot's timestamp: a snapshot changes while it is read."""
    correct = PointReads.answer
    late = {"by": 0}

    @in_place_of(patch, PointReads, "answer")
    async def answer(self: PointReads) -> object:
        newest = self._state.guard._newest
        oldest = min((read.timestamp for read in self._asked), default=newest)
        late["by"] = max(0, newest - oldest)
        return await correct(self)

    @in_place_of(patch, Lifetimes, "hides")
    def hides(self: Lifetimes, column: bytes, commit: int, timestamp: int) -> bool:
        ttl = self.by_column.get(column)
        return ttl is not None and is_expired(commit, timestamp + late["by"], ttl)


def reads_of_now_find_everything_expired(patch: Patch) -> None:
    """There is no timestamp to judge by, and the largest one is taken. Clients that do not know of
    the time to live yet ask for that."""
    patch.setattr(PointReads, "_may_expire", lambda self, columns: False)
    patch.setattr(Reader, "_expires", lambda self, cell: False)


def values_are_collected_before_the_safe_point_has_seen_their_end(patch: Patch) -> None:
    """A snapshot at the safe point still sees them."""

    @in_place_of(patch, _WalkOfVersions, "_has_expired")
    def wrong(self: _WalkOfVersions, cell: bytes, commit: int) -> bool:
        return self._lifetimes.end_of(cell, commit) is not None

    collect_eagerly(patch)


def values_in_locks_never_expire(patch: Patch) -> None:
    """A reader takes a committed value from its lock, and shows it for longer than the tablet. Such
    locks stay where clients die after the commit point, as all of them do here."""

    @in_place_of(patch, commit, "commit_secondaries")
    async def never_comes(*arguments: object) -> None:
        pass

    @in_place_of(patch, MetLock, "of")
    def of(table_id: int, cell: Cell) -> MetLock:
        return _of(table_id, cell)._replace(ttl_milliseconds=0)


def kept_cells_are_judged_by_the_clients_own_schema(patch: Patch) -> None:
    """It may have been learned before another client set the ttl."""
    patch.setattr(Environment, "schema_of_reads", Environment.schema)


def readers_do_not_notice_that_a_ttl_has_become_shorter(patch: Patch) -> None:
    """Values that they have seen under the longer one are collected before they have read them."""
    patch.setattr(TabletState, "require_lifetimes", lambda self, lifetimes: None)
    _read_slowly(patch)


def a_ttl_becomes_longer_while_expired_cells_are_deleted(patch: Patch) -> None:
    """A reader goes by it at once. It finds the record of a value that is gone a little later."""
    correct = Upkeep._follow_schema

    @in_place_of(patch, Upkeep, "_follow_schema")
    async def wrong(self: Upkeep, schema_version: int, *, change_feed: bool, ttls: Ttls) -> None:
        state = self._state
        if schema_version > state.schema_version and ttls != state.lifetimes.ttls:
            state.lifetimes = Lifetimes(ttls)
        await correct(self, schema_version, change_feed=change_feed, ttls=ttls)

    _read_slowly(patch)
    _sweep_slowly(patch)


def _sweep_slowly(patch: Patch) -> None:
    """The disk takes long for deletions. Otherwise nothing happens meanwhile."""
    correct = TabletState.write

    @in_place_of(patch, TabletState, "write")
    async def write(self: TabletState, batch: object) -> None:
        await asyncio.sleep(0.1)
        await correct(self, batch)


def _read_slowly(patch: Patch) -> None:
    """Servers do something else after each row of a page. Otherwise a page takes no time at all."""
    limits = TabletServerSettings.limits

    @in_place_of(patch, ScanPage, "_pause")
    async def pause(self: ScanPage) -> None:
        await asyncio.sleep(0.02)
        self._state.require_open()

    patch.setattr(
        TabletServerSettings, "limits", lambda self: replace(limits(self), slice_entries=1)
    )
    collect_eagerly(patch, round_seconds=0.1)


EXPIRY_BUGS: tuple[tuple[Callable[[Patch], None], bool], ...] = (
    (scans_show_expired_values, False),
    (expiry_is_judged_when_the_read_arrives, False),
    (reads_of_now_find_everything_expired, False),
    (values_in_locks_never_expire, False),
    (kept_cells_are_judged_by_the_clients_own_schema, True),
    (values_are_collected_before_the_safe_point_has_seen_their_end, True),
)
"""Each with whether it takes the real master, which collects."""
