"""Bugs that report or show something before it is durable, which a simulation has to find."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from percolator.tablet.keys import TIMESTAMP_MAX
from percolator.tablet.memory.recent_writes import RecentWrites
from percolator.tablet.writing.group_commit import GroupCommit
from percolator.tablet.writing.judge import Judge
from percolator.tablet.writing.mutation_work import MutationWork
from percolator.testing.memory_storage import MemoryBatch, MemoryCursor, MemoryStorage, View
from percolator.v1.cells_pb2 import SPACE_WRITE
from percolator.v1.tabletserver_pb2 import MutationResult
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def refusal_answered_before_its_batch_is_durable(patch: Patch) -> None:
    """It reports a commit that is still being written, and that a power cut undoes."""
    correct = GroupCommit.execute

    async def wrong(self: GroupCommit, work: MutationWork) -> list[MutationResult]:
        state = self._state
        storage = state.storage
        if isinstance(storage, MemoryStorage) and storage.disk.in_doubt is not None:
            view: Any = _WithWhatIsBeingWritten(storage)
            judge = Judge(
                view, state.mirror, _nothing_recent(), state.last_changes, state.read_locks
            )
            refusals = [judge.refusal(step) for step in work.mutations]
            found = [one for one in refusals if one is not None and _tells_of_commit(one)]
            if len(found) == len(refusals):
                return found
        return await correct(self, work)

    patch.setattr(GroupCommit, "execute", wrong)


def _tells_of_commit(refusal: MutationResult) -> bool:
    return refusal.cell.space == SPACE_WRITE


class _WithWhatIsBeingWritten:
    """A storage that shows a batch before it is durable."""

    def __init__(self, storage: MemoryStorage) -> None:
        self._entries = dict(storage._view.entries)
        for key, value in (storage.disk.in_doubt or {}).items():
            if value is None:
                self._entries.pop(key, None)
            else:
                self._entries[key] = value
        self.get = self._entries.get

    def cursor(self) -> MemoryCursor:
        return MemoryCursor(View(self._entries, sorted(self._entries)))


def _nothing_recent() -> RecentWrites:
    """Makes the judge look in the storage."""
    recent = RecentWrites(cells_max=1)
    recent.load(TIMESTAMP_MAX, TIMESTAMP_MAX)
    return recent


def shown_before_it_is_durable(patch: Patch) -> None:
    """A client reads a commit that a power cut undoes, and that is then rolled back."""
    correct = MemoryStorage.write

    async def wrong(
        self: MemoryStorage, batch: MemoryBatch, then: Callable[[], bool] | None = None
    ) -> bool:
        self._check()
        self._show(batch.changes)
        return await correct(self, batch, then)

    patch.setattr(MemoryStorage, "write", wrong)


def answered_before_it_is_durable(patch: Patch) -> None:
    """A write is acknowledged without waiting for the disk, and is gone after a power cut."""
    correct = MemoryStorage.write
    syncing: dict[MemoryStorage, asyncio.Task[bool]] = {}

    async def wrong(
        self: MemoryStorage, batch: MemoryBatch, then: Callable[[], bool] | None = None
    ) -> bool:
        self._check()
        if self in syncing:
            await syncing.pop(self)
        self._show(batch.changes)
        syncing[self] = late = asyncio.create_task(correct(self, batch))
        late.add_done_callback(_heard)  # what became of it is not the bug
        return then is None or then()

    patch.setattr(MemoryStorage, "write", wrong)


def _heard(task: asyncio.Task[bool]) -> None:
    if not task.cancelled():
        task.exception()


ALL: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
    (shown_before_it_is_durable, (Kind.POWER, Kind.SLOW_DISK, Kind.CLIENT_STEP), False),
    (answered_before_it_is_durable, (Kind.POWER, Kind.SLOW_DISK), True),
)
"""The bugs that need nothing special, with the strikes that bring them to light, and whether they
are caught in seconds."""
