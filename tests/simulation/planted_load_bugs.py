"""Bugs of bulk loads that a simulation has to find."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from percolator.aio.bulk_load import CALL_SECONDS, BulkLoad, LoadTimestamps
from percolator.aio.changes import Following
from percolator.changes import Change
from percolator.errors import PercolatorError, UsageError
from percolator.protocol.change_reader import ChangeReader
from percolator.routing.cells import ChangesSeen, StoredChange
from percolator.rowstore import collection as row_collection
from percolator.rowstore.loading import RowLoader
from percolator.rowstore.port import RowChange
from percolator.services.master import row_term
from percolator.services.master.cluster_map import Catalogue, Table, TableLoad
from percolator.tablet import bulk_load, change_scan, collection, judge
from percolator.tablet.cells import F, RecentWrites
from percolator.tablet.change_scan import ChangePlan, Settled
from percolator.tablet.judge import JudgedBatch, WriteLatch
from percolator.tablet.state import LoadFence, LoadFences, TabletState, note_change
from percolator.v1 import master_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from percolator.wire.methods import FENCE
from tests.simulation.bug import PerSeed
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def scans_pass_the_fence(patch: Patch) -> None:
    """They see a part of what is being loaded."""
    patch.setattr(LoadFences, "among", lambda self, start, end: None)


def timestamps_before_the_fence(patch: Patch) -> None:
    """A snapshot in between has seen the range empty, and sees the rows when it looks again."""

    async def wrong(self: BulkLoad) -> LoadTimestamps:
        await self._know_table()
        timestamps = self._engine.env.timestamps
        early = LoadTimestamps(await timestamps.get(), await timestamps.get())
        await _raise_or_give_up(self, early.start)
        return early

    patch.setattr(BulkLoad, "begin", wrong)


async def _raise_or_give_up(load: BulkLoad, run: int) -> None:
    """Raises the run number in one step, or not at all."""
    found = await load._raise(run)
    if found.complete is not None:
        await load._open(run, found.complete)
    elif found.obstacle is not None or found.remains:
        await load._open_again(run)
    else:
        return
    raise UsageError("it cannot begin")


def rows_of_a_former_run_are_taken_for_ones_own(patch: Patch) -> None:
    """They were loaded at other timestamps, and not all of them."""
    correct = BulkLoad._raise

    async def wrong(self: BulkLoad, run: int) -> Any:
        found = await correct(self, run)
        found.remains = False
        return found

    patch.setattr(BulkLoad, "_raise", wrong)


def every_run_of_a_load_is_let_in(patch: Patch) -> None:
    """Rows of a run that was superseded end up among those of the run that took over."""
    correct = bulk_load._of_run

    def wrong(state: TabletState, asked: LoadFence) -> LoadFence:
        present = state.load_fences.get(asked.name)
        return correct(state, asked) if present is None else present

    patch.setattr(bulk_load, "_of_run", wrong)


def an_abandoned_load_is_opened_as_it_is(patch: Patch) -> None:
    """A part of it stays forever."""

    async def nothing(state: TabletState, asked: LoadFence) -> pb.FenceResponse:
        return pb.FenceResponse()

    patch.setitem(bulk_load._ACTIONS, pb.FenceRequest.ACTION_CLEAR, nothing)
    patch.setattr(bulk_load, "_first_cell", lambda state, fence: None)


def tablets_are_opened_before_all_know_that_the_load_is_complete(patch: Patch) -> None:
    """A run that takes over then clears the tablets that do not know."""

    async def wrong(self: BulkLoad, timestamps: LoadTimestamps) -> None:
        await self._know_table()
        asked = pb.FenceRequest

        async def one_by_one(location: Any) -> None:
            for action in (asked.ACTION_FINISH, asked.ACTION_LIFT):
                fence = pb.LoadFence(
                    name=self._plan.name,
                    run=timestamps.start,
                    range=RowRange(start=self._plan.start, end=self._plan.end),
                    commit_timestamp=timestamps.commit,
                )
                request = asked(target=self._target(location), action=action, fence=fence)
                call = self._engine.world.network.unary(location.address, FENCE)
                await call(request, CALL_SECONDS)

        await self._walk.each(self._table_id, self._plan.start, self._plan.end, one_by_one)

    patch.setattr(BulkLoad, "finish", wrong)


def the_judge_does_not_learn_of_loads(patch: Patch) -> None:
    """A transaction that began before the load writes over it."""
    patch.setattr(RecentWrites, "forget", lambda self, newest_commit: None)


def loads_keep_all_transactions_out(patch: Patch) -> None:
    """One of several loaders always waits, and no transaction of other rows holds cells."""

    @asynccontextmanager
    async def wrong(self: WriteLatch) -> AsyncIterator[None]:
        async with self:
            yield

    patch.setattr(WriteLatch, "between_batches", wrong)
    transactions_have_no_turn(patch)


def transactions_have_no_turn(patch: Patch) -> None:
    """A caller that needs all cells released follows the one before at once."""

    def wrong(self: WriteLatch) -> None:
        self._wanted -= 1
        if not self._wanted:
            self._admit_waiting()
        self._turn.release()

    patch.setattr(WriteLatch, "_leave", wrong)


def each_loader_comes_before_the_next_batch(patch: Patch) -> None:
    """Commits wait for as many loads as there are loaders."""

    @asynccontextmanager
    async def wrong(self: WriteLatch) -> AsyncIterator[None]:
        async with self.writing:
            yield

    patch.setattr(WriteLatch, "between_batches", wrong)


def a_range_is_closed_beside_transactions_that_hold_its_rows(patch: Patch) -> None:
    """They were judged before the fence, and are written behind it."""

    async def not_waited_for(self: WriteLatch) -> None:
        await self.between.acquire()
        await self.writing.acquire()

    async def left(self: WriteLatch, *error: object) -> None:
        self.writing.release()
        self.between.release()

    patch.setattr(WriteLatch, "__aenter__", not_waited_for)
    patch.setattr(WriteLatch, "__aexit__", left)


def transactions_hold_rows_while_their_range_is_being_closed(patch: Patch) -> None:
    """They are judged while the fence is on its way to the disk."""
    patch.setattr(WriteLatch, "is_wanted", property(lambda self: False))


def a_range_is_cleared_by_a_run_that_has_lost_it(patch: Patch) -> None:
    """It looks for its fence only before the first of its writes."""
    correct = bulk_load._of_run
    looked: set[int] = set()

    def wrong(state: TabletState, asked: LoadFence) -> LoadFence:
        present = state.load_fences.get(asked.name)
        if asked.run in looked and present is not None and asked.start:
            return replace(present, commit_timestamp=0)
        looked.add(asked.run)
        return correct(state, asked)

    patch.setattr(bulk_load, "CLEARED_PER_WRITE", 1)
    patch.setattr(bulk_load, "_of_run", wrong)


BESIDE_TRANSACTIONS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
    (loads_keep_all_transactions_out, (), True),
    (transactions_have_no_turn, (), True),
    (each_loader_comes_before_the_next_batch, (), True),
    (a_range_is_closed_beside_transactions_that_hold_its_rows, (), True),
    (transactions_hold_rows_while_their_range_is_being_closed, (Kind.SLOW_DISK,), True),
    (a_range_is_cleared_by_a_run_that_has_lost_it, (Kind.CLIENT_STEP,), True),
)
"""Bugs for the workload in which loaders and transactions meet."""

LOAD_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
    (scans_pass_the_fence, (), True),
    (timestamps_before_the_fence, (), False),
    (rows_of_a_former_run_are_taken_for_ones_own, (), False),
    (every_run_of_a_load_is_let_in, (), False),
    (an_abandoned_load_is_opened_as_it_is, (), True),
    (
        tablets_are_opened_before_all_know_that_the_load_is_complete,
        (Kind.CLIENT_STEP,),
        False,
    ),
    (the_judge_does_not_learn_of_loads, (), False),
)
"""Each with the disruptions that reveal it, and whether it is caught in seconds."""


# Bugs of bulk loads into a row store.
#
# That no ended run begins again, and that a published table is young, hardly ever matters in a
# simulation: tests/unit/rowstore/test_loading.py shows both.


def deletions_in_loaded_rows_are_collected(patch: Patch) -> None:
    """A late call of the load brings back what was deleted."""
    patch.setattr(row_collection, "LOADED", b"another")


def a_later_run_loads_into_the_table_of_an_earlier_one(patch: Patch) -> None:
    """Rows of a run that was superseded end up among those of the run that took over."""
    correct = row_term._begun

    def wrong(
        request: master_pb2.BeginLoadRequest, made: Table | None, current: Catalogue
    ) -> tuple[Catalogue, Table | None]:
        for table, load in row_term._of_load(current, request.table.name, request.load):
            if load.run < request.run and table.is_hidden:
                taken = replace(table, load=TableLoad(request.load, request.run))
                return current.with_tables(taken), taken
        return correct(request, made, current)

    patch.setattr(row_term, "_begun", wrong)


def every_run_is_published(patch: Patch) -> None:
    """Also one that has been taken over, whose table is about to be deleted."""

    def wrong(current: Catalogue, asked: master_pb2.PublishLoadsRequest.Loaded) -> Table:
        table = current.tables.get(asked.table_id)
        if table is None:
            raise row_term._taken_over("", asked.run)
        return table

    patch.setattr(row_term, "_loaded", wrong)


def rows_that_were_not_answered_are_taken_for_loaded(patch: Patch) -> None:
    """They are missing when the table is published."""

    async def wrong(
        self: RowLoader, table_id: int, rows: Sequence[RowChange], seconds: float
    ) -> None:
        with suppress(PercolatorError):
            await self._store.write(table_id, rows, seconds)

    patch.setattr(RowLoader, "_call", wrong)


ROW_LOAD_BUGS: tuple[Callable[[Patch], None], ...] = (
    deletions_in_loaded_rows_are_collected,
    a_later_run_loads_into_the_table_of_an_earlier_one,
    every_run_is_published,
    rows_that_were_not_answered_are_taken_for_loaded,
)


# Bugs of change feeds.


def entries_of_the_feed_are_written_with_the_next_batch(patch: Patch) -> None:
    """A reader comes between, or there is no next batch."""
    correct_begin = JudgedBatch.begin
    by_storage = PerSeed(dict[int, list[tuple[bytes, int, bytes]]])
    noted: list[tuple[bytes, int, bytes]] = []

    def note(batch: Any, cell: bytes, timestamp: int, record: bytes) -> int:
        noted.append((cell, timestamp, record))
        return 0

    def begin(self: JudgedBatch, *memory: Any) -> None:
        held = by_storage.now()
        before = held.pop(id(self._get.__self__), [])  # type: ignore[attr-defined]
        held[id(self._get.__self__)] = list(noted)  # type: ignore[attr-defined]
        noted.clear()
        for entry in before:
            note_change(self.writes, *entry)
        correct_begin(self, *memory)

    patch.setattr(judge, "note_change", note)
    patch.setattr(JudgedBatch, "begin", begin)


def readers_of_changes_ignore_locks(patch: Patch) -> None:
    """Changes that are committed below them later are never read."""
    correct = change_scan.find_settled

    async def wrong(state: TabletState, plan: ChangePlan) -> Settled:
        found = await correct(state, plan)
        return found if not found.locks else Settled(plan.until)

    patch.setattr(change_scan, "find_settled", wrong)


def readers_of_changes_ignore_locks_behind_those_that_are_reported(patch: Patch) -> None:
    """One of them may be of an earlier transaction."""
    correct = change_scan.find_settled

    async def wrong(state: TabletState, plan: ChangePlan) -> Settled:
        found = await correct(state, plan)
        if not found.locks:
            return found
        until = change_scan._last_before(found.locks[0][2])
        return Settled(max(plan.after, min(plan.until, until)), found.locks[:1])

    patch.setattr(change_scan, "find_settled", wrong)


def readers_of_changes_ignore_loads(patch: Patch) -> None:
    """The rows of a load that becomes visible below them are never read."""
    correct = change_scan.find_settled

    async def wrong(state: TabletState, plan: ChangePlan) -> Settled:
        fences, state.load_fences = state.load_fences, type(state.load_fences)()
        try:
            return await correct(state, plan)
        finally:
            state.load_fences = fences

    patch.setattr(change_scan, "find_settled", wrong)


def a_tablet_says_how_far_all_are_settled(patch: Patch) -> None:
    """Others may have locks below that."""
    correct = ChangeReader._look

    async def wrong(self: ChangeReader, until: int, deadline: float) -> ChangesSeen:
        seen = await correct(self, until, deadline)
        return seen._replace(reached=max(seen.reached, min(until, seen.newest)))

    patch.setattr(ChangeReader, "_look", wrong)


def a_page_that_ends_inside_a_commit_is_taken_for_whole(patch: Patch) -> None:
    """Who goes on from there loses the rest of the commit."""
    correct = ChangeReader.between

    async def wrong(
        self: ChangeReader, seen: ChangesSeen, timeout_seconds: float
    ) -> AsyncGenerator[list[StoredChange], None]:
        async for page in correct(self, seen, timeout_seconds):
            self.position = max(self.position, page[-1].commit_timestamp)
            yield page

    patch.setattr(ChangeReader, "between", wrong)


def a_follower_has_come_as_far_as_the_commit_that_it_reads(patch: Patch) -> None:
    """If it fails there and goes on from there, it loses the rest of the commit."""

    def wrong(self: Following[Any], change: Change[Any]) -> None:
        self._reached = change.commit_timestamp

    patch.setattr(Following, "has_handled", wrong)


def a_half_of_a_split_loses_what_was_in_the_feed(patch: Patch) -> None:
    """Its own rows are taken for the other half's."""

    def wrong(state: TabletState, sweep: Any, first: bytes) -> bytes | None:
        for key, value in state.storage.iterate(first, F + b"\xff" * 9):
            sweep.delete(key, len(key) + len(value))
        return None

    patch.setattr(collection, "_slice_of_feed", wrong)


def readers_of_changes_are_let_in_below_the_safe_point(patch: Patch) -> None:
    """The changes that they ask for were collected."""
    correct = change_scan.require_complete

    def wrong(state: TabletState, after: int) -> None:
        correct(state, max(after, state.safe_points.reads))

    patch.setattr(change_scan, "require_complete", wrong)


def a_former_owner_says_that_a_table_has_no_feed(patch: Patch) -> None:
    """The feed was switched on after the takeover: its readers end with an error."""

    async def wrong(state: TabletState) -> None:
        if not state.feed.on:
            raise change_scan._no_feed(state)

    patch.setattr(change_scan, "require_feed", wrong)


FEED_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool, bool], ...] = (
    (entries_of_the_feed_are_written_with_the_next_batch, (), False, True),
    (readers_of_changes_ignore_locks, (), False, True),
    (readers_of_changes_ignore_locks_behind_those_that_are_reported, (), False, False),
    (readers_of_changes_ignore_loads, (), False, False),
    (a_tablet_says_how_far_all_are_settled, (), False, False),
    (a_page_that_ends_inside_a_commit_is_taken_for_whole, (), False, False),
    (a_follower_has_come_as_far_as_the_commit_that_it_reads, (), False, True),
    (a_half_of_a_split_loses_what_was_in_the_feed, (Kind.SPLIT,), True, False),
    (readers_of_changes_are_let_in_below_the_safe_point, (), True, False),
)
"""Each with the disruptions that reveal it, whether it needs the real master, and whether it is
caught in seconds."""
