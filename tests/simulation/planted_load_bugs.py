"""Bugs of bulk loads that a simulation has to find."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from percolator.aio.bulk_load import CALL_SECONDS, BulkLoad, LoadTimestamps
from percolator.errors import UsageError
from percolator.tablet import bulk_load
from percolator.tablet.memory.load_fences import LoadFence, LoadFences
from percolator.tablet.memory.recent_writes import RecentWrites
from percolator.tablet.memory.state import TabletState
from percolator.tablet.writing.write_latch import WriteLatch
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from percolator.wire.methods import FENCE
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
    """Of several loaders one always waits, and no transaction of other rows holds cells."""

    @asynccontextmanager
    async def wrong(self: WriteLatch) -> AsyncIterator[None]:
        async with self:
            yield

    patch.setattr(WriteLatch, "between_batches", wrong)
    transactions_have_no_turn(patch)


def transactions_have_no_turn(patch: Patch) -> None:
    """Whoever needs all cells to be let go follows the one before at once."""

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
"""The same, for the workload in which loaders and transactions meet."""

ALL: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
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
"""Each with the strikes that bring it to light, and whether it is caught in seconds."""
