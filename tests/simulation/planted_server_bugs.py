"""Bugs in what oracles and tablet servers promise, which a simulation has to find."""

from __future__ import annotations

import asyncio
from copy import copy
from typing import Any

import pytest

from percolator.services.chassis.epoch_directory import EpochDirectory
from percolator.services.oracle.oracle import Ledger
from percolator.tablet.memory.state import TabletState
from percolator.tablet.reading.point_reads import AnswerRoom
from percolator.tablet.tablet import Tablet
from percolator.testing.memory_storage import MemoryCursor
from percolator.v1.tabletserver_pb2 import ReadBatch, ReadBatchResult

Patch = pytest.MonkeyPatch

_BETWEEN_TWO_LOOKS_SECONDS = 0.002


def oracle_without_persistence(patch: Patch) -> None:
    """After a restart it hands out the same timestamps again."""

    async def forget(self: Ledger, milliseconds: int) -> None:
        self._mark = self._mark.__class__(milliseconds, self._mark.cluster_id)

    patch.setattr(Ledger, "write", forget)


def mirror_after_the_snapshot(patch: Patch) -> None:
    """A reader takes its view of the writes first and checks locks second."""

    correct = Tablet.read

    async def wrong(
        self: Tablet, batch: ReadBatch, room: AnswerRoom | None = None
    ) -> ReadBatchResult:
        early = copy(self)
        early._state = copy(self._state)
        early._state.storage = _EarlyView(self._state.storage)
        await asyncio.sleep(_BETWEEN_TWO_LOOKS_SECONDS)
        return await correct(early, batch, room)

    patch.setattr(Tablet, "read", wrong)


class _EarlyView:
    """A storage whose cursors show what was there when this was created."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self._made = storage.cursor()

    def cursor(self) -> MemoryCursor:
        return MemoryCursor(self._made._view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def read_without_the_after_check(patch: Patch) -> None:
    """A deposed owner answers from what it knew."""

    async def wrong(self: TabletState) -> None:
        """Does not look."""

    patch.setattr(TabletState, "require_ownership", wrong)


def write_without_the_after_check(patch: Patch) -> None:
    """A deposed owner acknowledges a write that will never be read: the lost epoch check."""

    async def wrong(self: EpochDirectory) -> bool:
        return True

    patch.setattr(EpochDirectory, "look", lambda self: True)
    patch.setattr(EpochDirectory, "stands", wrong)
