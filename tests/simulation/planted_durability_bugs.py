"""Bugs of what is told, or shown, before it is durable, that a simulation has to find."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from percolator.tablet.commit_work import CommitWork
from percolator.tablet.group_commit import GroupCommit
from percolator.tablet.judge import Judge
from percolator.tablet.keys import TIMESTAMP_MAX
from percolator.tablet.memory_storage import MemoryBatch, MemoryCursor, MemoryStorage, View
from percolator.v1.cells_pb2 import SPACE_WRITE
from percolator.v1.tabletserver_pb2 import MutationResult
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def refusal_answered_before_its_batch_is_durable(patch: Patch) -> None:
    """It tells of a commit that is still being written, which a power cut takes back."""
    correct = GroupCommit.execute

    async def wrong(self: GroupCommit, work: CommitWork) -> list[MutationResult]:
        state = self._state
        storage = state.storage
        if isinstance(storage, MemoryStorage) and storage.disk.in_doubt is not None:
            view = _WithWhatIsBeingWritten(storage)
            judge = Judge(view, state.mirror, _NothingRecent())  # type: ignore[arg-type]
            refusals = [judge.refusal(step) for step in work.steps]
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


class _NothingRecent:
    """Makes the judge look for itself."""

    newest_marker = TIMESTAMP_MAX

    def bound(self, cell: bytes) -> int:
        return TIMESTAMP_MAX


def shown_before_it_is_durable(patch: Patch) -> None:
    """Somebody reads a commit that a power cut takes back, and that is then rolled back."""
    correct = MemoryStorage.write

    async def wrong(self: MemoryStorage, batch: MemoryBatch) -> None:
        self._check()
        self._show(batch.changes)
        await correct(self, batch)

    patch.setattr(MemoryStorage, "write", wrong)


def answered_before_it_is_durable(patch: Patch) -> None:
    """Acknowledged, and gone after a power cut: written without waiting for the disk."""
    correct = MemoryStorage.write
    syncing: dict[MemoryStorage, asyncio.Task[None]] = {}

    async def wrong(self: MemoryStorage, batch: MemoryBatch) -> None:
        self._check()
        if self in syncing:
            await syncing.pop(self)
        self._show(batch.changes)
        syncing[self] = asyncio.create_task(correct(self, batch))

    patch.setattr(MemoryStorage, "write", wrong)


ALL: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
    (shown_before_it_is_durable, (Kind.POWER, Kind.SLOW_DISK, Kind.CLIENT_STEP), False),
    (answered_before_it_is_durable, (Kind.POWER, Kind.SLOW_DISK), True),
)
"""Those that need nothing special, with the strikes that bring them to light, and whether they are
caught in seconds."""
