"""Changes to a tablet while it serves, written between two batches, when no cell is held."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from percolator.errors import ExecutionUnknown, InvalidArgument, NotExecuted
from percolator.formats.records import too_old
from percolator.tablet import bulk_load, collection, opening
from percolator.tablet.cells import SAFE_POINT_KEY, STATISTICS_KEY, ColumnEncoder, cells_locked_by
from percolator.tablet.collection import collect
from percolator.tablet.group_commit import GroupCommit
from percolator.tablet.judge import Judge, JudgedBatch, WriteLatch
from percolator.tablet.requests import APPLIED, CheckedMutation, not_executed
from percolator.tablet.state import (
    ChangeFeed,
    Collected,
    Lifetimes,
    SafePoints,
    TabletState,
    Ttls,
    closed,
)
from percolator.tasks import Tasks
from percolator.v1 import tabletserver_pb2 as pb


class Upkeep:
    """The schema, safe points, collection, loads, groups of mutations and the end of one tablet."""

    def __init__(
        self,
        state: TabletState,
        commit: GroupCommit,
        columns: ColumnEncoder,
        *,
        change_feed: bool,
    ) -> None:
        self._state = state
        self._commit = commit
        self._columns = columns
        self._change_feed = change_feed
        """The current version of the schema; the tablet has yet to follow it."""
        self._tasks = Tasks()
        """Writes between two batches: torn there, they would let the next batch be judged while
        the disk is still at the write, and memory would never learn of what became durable."""

    async def close(self) -> None:
        """See `Tablet.close`."""
        await self._tasks.run_to_the_end(self._close())

    async def _close(self) -> None:
        state = self._state
        async with self._commit.latch:
            served_until_now = state.is_loaded and state.closed_because is None
            state.closed_because = state.closed_because or state.moved("closed here")
            self._commit.abandon()
            try:
                try:
                    if served_until_now:
                        await self._note(STATISTICS_KEY, opening.counts_record(state))
                finally:
                    await state.storage.close()
            except state.storage.failures as error:
                raise state.storage_failed(error) from error

    async def apply_together(
        self, mutations: Sequence[CheckedMutation], schema_version: int, deadline_seconds: float
    ) -> list[pb.MutationResult]:
        """See `Tablet.mutate_together`."""
        latch = self._commit.latch
        work = apply_together(self._state, latch, mutations, schema_version, deadline_seconds)
        return await self._tasks.run_to_the_end(work)

    async def set_schema_version(
        self, schema_version: int, *, change_feed: bool = False, ttls: Ttls = ()
    ) -> None:
        """Returns once the tablet judges and reads under this version, everything judged under an
        older one is durable and answered, and the change feed is on or off, durably. Never goes
        back: an older version is ignored.

        The version and its times to live take effect between two writes. If readers went by longer
        ones while a deletion judged under the shorter ones is on its way to the disk, they would
        see the record of a value that is gone soon after.
        """
        work = self._follow_schema(schema_version, change_feed=change_feed, ttls=ttls)
        await self._tasks.run_to_the_end(work)

    async def _follow_schema(self, schema_version: int, *, change_feed: bool, ttls: Ttls) -> None:
        state = self._state
        async with self._commit.latch:
            state.require_open()
            if schema_version > state.schema_version:
                state.schema_version = schema_version
                self._change_feed = change_feed
                if ttls != state.lifetimes.ttls:
                    state.lifetimes = Lifetimes(ttls)
                    state.collected = replace(state.collected, more_at=0)
            try:
                await self.switch_feed()
            except state.storage.failures as error:
                raise state.storage_failed(error) from error

    async def switch_feed(self) -> None:
        """Turns the change feed on or off, as the schema says. Call it between two batches. Raises
        the storage's `failures`."""
        state, feed = self._state, self._state.feed
        if not feed.is_changed_by(state.schema_version, on=self._change_feed):
            return
        feed = ChangeFeed(
            state.schema_version,
            self._change_feed,
            state.recent.newest_commit,
            max((fence.run for fence in state.load_fences), default=0),
        )
        batch = state.storage.batch()
        feed.note(batch, beside_read_locks=state.read_locks.used)
        await state.storage.write(batch)
        state.feed = feed

    async def raise_safe_points(self, asked: SafePoints) -> None:
        """Refuses reads and mutations below them from now on, durably; returns when nothing below
        them is being judged. Never goes back."""
        state = self._state
        state.safe_points = SafePoints(*map(max, state.safe_points, asked))
        await self._tasks.run_to_the_end(self._note_safe_points())

    async def _note_safe_points(self) -> None:
        state = self._state
        async with self._commit.latch:
            state.require_open()
            await self._note(SAFE_POINT_KEY, opening.safe_points_record(state.safe_points))
            await state.require_ownership()

    async def collect(self, below: int, ended_below: int = 0) -> Collected:
        """Deletes what no read at or above `below` can see, and the evidence of transactions that
        began below `ended_below`, while the tablet serves. The safe points of reads and of
        transactions must have been raised to these, and all older locks of all tables be resolved.

        Raises `NotReady` while such locks are left here, `StoreUnusable`, `TabletMoved`.
        """
        state = self._state
        state.require_open()
        try:
            state.collected = await collect(
                state,
                self._commit.latch,
                below,
                ended_below,
                before_deleting=lambda: self.raise_safe_points(
                    SafePoints(collected=max(below, ended_below))
                ),
            )
        except state.storage.failures as error:
            raise self._state.unreadable(error) from error
        state.counters.cells_collected += state.collected.cells
        state.counters.bytes_collected += state.collected.bytes
        return state.collected

    async def trim(self) -> int:
        """Deletes such cells while the tablet serves; returns how many.

        Raises `StoreUnusable`, `TabletMoved`.
        """
        state = self._state
        state.require_open()
        try:
            return await collection.trim(state, self._commit.latch)
        except state.storage.failures as error:
            raise self._state.unreadable(error) from error

    async def fence(self, request: pb.FenceRequest) -> pb.FenceResponse:
        """Closes rows for a bulk load, or opens them. Raises `InvalidArgument`, `NotReady` (as
        `mutate` does), `StoreUnusable`, `TabletMoved`."""
        guard, fence = self._state.guard, request.fence
        # A run from the future would keep out every later load until then.
        await guard.require(fence.run, "fence.run")
        await guard.require(fence.commit_timestamp, "fence.commit_timestamp")
        self._state.require_tablet(request.target)
        try:
            return await self._tasks.run_to_the_end(
                bulk_load.fence(self._state, self._commit.latch, request)
            )
        except self._state.storage.failures as error:
            raise self._state.unreadable(error) from error

    async def load(self, request: pb.LoadRequest) -> pb.LoadResponse:
        """Puts rows into a range that is fenced for them. Raises like `fence`, and
        `SchemaChanged`."""
        await self._state.guard.require(request.commit_timestamp, "commit_timestamp")
        self._state.require_tablet(request.target)
        latch = self._commit.latch
        await self._tasks.run_to_the_end(bulk_load.load(self._state, latch, request, self._columns))
        return pb.LoadResponse()

    async def _note(self, key: bytes, value: bytes) -> None:
        """Stores something about the tablet itself. Writes only between two batches."""
        batch = self._state.storage.batch()
        batch.put(key, value)
        await self._state.write(batch)


_OTHERS_REFUSED = not_executed(NotExecuted("another mutation of the group was not applied"))


async def apply_together(
    state: TabletState,
    latch: WriteLatch,
    mutations: Sequence[CheckedMutation],
    schema_version: int,
    deadline_seconds: float,
) -> list[pb.MutationResult]:
    """Applies all of these mutations or none. Each is of another cell. Raises the error because of
    which nothing was executed, and `ExecutionUnknown`.

    A shared transaction (percolator/protocol/shared/driver.py) consists of participants, each with
    a primary of its own. All of them are committed at once, because the primaries are cells
    of one row, and so of one tablet: their commits are one write.

    Such groups are rare, so they go between two batches of the group commit, where nothing is in
    flight: what they are judged against is durable, and nothing changes it before they are written.
    For the rest, the rules are those of a batch (group_commit.py): no answer leaves before the
    ownership of the tablet is checked, and after a failed write the outcome is unknown.
    """
    async with AsyncExitStack() as latched:
        late = NotExecuted("the deadline passed while the mutations waited to be written")
        try:
            async with asyncio.timeout(deadline_seconds - state.clock.monotonic_seconds()):
                await latched.enter_async_context(latch)
        except TimeoutError:
            raise late from None
        state.require_open()
        if schema_version != state.schema_version:
            raise state.schema_changed()
        if state.clock.monotonic_seconds() >= deadline_seconds:
            raise late
        judge = Judge.of(state)
        batch = JudgedBatch(state, judge.last_change)
        try:
            refusals = [_refusal(state, judge, mutation) for mutation in mutations]
            if not any(refusals):
                for mutation in mutations:
                    batch.add(mutation)
        except state.storage.failures as error:
            raise NotExecuted(str(state.storage_failed(error))) from error
        finally:
            judge.close()
        if any(refusals):
            batch.refused = len(mutations)
            await state.require_ownership()
            batch.publish()
            return [refusal or _OTHERS_REFUSED for refusal in refusals]
        batch.applied = len(mutations)
        await _write(state, batch)
        return [APPLIED] * len(mutations)


def _refusal(
    state: TabletState, judge: Judge, mutation: CheckedMutation
) -> pb.MutationResult | None:
    row, _, _, not_below, _, _ = mutation
    fence = state.load_fences.over(row) if state.load_fences else None
    if fence is not None:
        return not_executed(closed(fence))
    if not_below and not_below < state.safe_points.transactions:
        return not_executed(too_old(not_below, state.safe_points.transactions))
    return judge.refusal(mutation)


async def _write(state: TabletState, batch: JudgedBatch) -> None:
    try:
        batch.begin()
        owned = await state.write_owned(batch.writes)
    except state.storage.failures as error:
        raise ExecutionUnknown(f"the write failed: {state.storage_failed(error)}") from error
    except BaseException as error:
        # Memory does not know what is durable, so nothing more may be judged or read.
        state.stop(NotExecuted(f"{state.identity} stopped: {error!r}"))
        raise
    if not owned:
        raise ExecutionUnknown(f"it may have been done: {state.closed_because}")
    batch.publish()


def require_different_cells(mutations: Sequence[CheckedMutation]) -> None:
    """Raises `InvalidArgument` if two mutations are of one cell, or if one is of a read lock of
    another's: both would be judged before either is durable."""
    cells = {mutation[2] for mutation in mutations}
    if len(cells) != len(mutations):
        raise InvalidArgument("batch.mutations", "two mutations of one cell")
    if not cells.isdisjoint(cells_locked_by(cells)):
        raise InvalidArgument("batch.mutations", "a cell is written and read-locked")
