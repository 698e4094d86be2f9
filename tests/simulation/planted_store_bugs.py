"""Bugs in looking who owns a tablet on a store that stalls, which a simulation has to find."""

from __future__ import annotations

import asyncio

import pytest

from percolator.services.chassis.epoch_directory import EpochDirectory, SharedLook
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch

_IMPATIENT_SECONDS = 0.05


def stalled_look_answered_without_the_store(patch: Patch) -> None:
    """An owner whose store does not answer goes on as if it still were one."""
    correct = EpochDirectory.stands

    async def wrong(self: EpochDirectory) -> bool:
        try:
            async with asyncio.timeout(_IMPATIENT_SECONDS):
                return await correct(self)
        except TimeoutError:
            return True

    patch.setattr(EpochDirectory, "stands", wrong)


def look_under_way_joined(patch: Patch) -> None:
    """It may have seen the directory long before the work of those who join was done."""
    correct = SharedLook.__call__
    under_way: dict[SharedLook[bool], asyncio.Future[bool]] = {}

    def wrong(self: SharedLook[bool]) -> asyncio.Future[bool]:
        if self._looking is None or under_way[self].done():
            under_way[self] = correct(self)
        return asyncio.shield(under_way[self])

    patch.setattr(SharedLook, "__call__", wrong)


ALL = (
    (stalled_look_answered_without_the_store, True),
    (look_under_way_joined, False),
)
"""The bugs, and whether they are caught in seconds."""

KINDS = (Kind.STALL, Kind.TAKEOVER)
"""What brings them to light: the store stalls for the owner, and another process takes over."""
