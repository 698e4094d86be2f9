"""Mutations that take effect at one moment or not at all.

A shared transaction (percolator/protocol/shared/whole.py) consists of parts, each with a primary of
its own. All of them become committed at one moment, because the primaries are cells of one row, and
so of one tablet: their commits are one write.

Such groups are rare, so they go between two batches of the group commit, where nothing is in
flight: what they are judged against is durable, and nothing changes it before they are written. For
the rest, the rules are those of a batch (group_commit.py): no answer leaves before the ownership of
the tablet is checked, and after a failed write the outcome is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from percolator.errors import ExecutionUnknown, InvalidArgument, NotExecuted
from percolator.formats.reach import too_old
from percolator.tablet.memory.load_fences import closed
from percolator.tablet.memory.read_locks import cells_locked_by
from percolator.tablet.memory.state import TabletState
from percolator.tablet.writing.judge import Judge
from percolator.tablet.writing.judged_batch import JudgedBatch
from percolator.tablet.writing.mutations import CheckedMutation
from percolator.tablet.writing.results import APPLIED, not_executed
from percolator.tablet.writing.write_latch import WriteLatch
from percolator.v1 import tabletserver_pb2 as pb

_OTHERS_REFUSED = not_executed(NotExecuted("another mutation of the group was not applied"))


async def apply_together(
    state: TabletState,
    latch: WriteLatch,
    mutations: Sequence[CheckedMutation],
    schema_version: int,
    deadline_seconds: float,
) -> list[pb.MutationResult]:
    """Applies all or none of them. Each is of another cell.

    Raises the error because of which nothing was executed, and `ExecutionUnknown`.
    """
    async with AsyncExitStack() as turn:
        late = NotExecuted("the deadline passed while the mutations waited for their turn")
        try:
            async with asyncio.timeout(deadline_seconds - state.clock.monotonic_seconds()):
                await turn.enter_async_context(latch)
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
