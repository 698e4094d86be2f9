"""Tablets for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.unit.tablet.tablets import OneRoundRig, Rig, SlowDisk


@pytest.fixture
def disk() -> SlowDisk:
    """The disk of `rig`, which later tablets may be opened on."""
    return SlowDisk()


@pytest.fixture
@asynccontextmanager
async def rig(disk: SlowDisk) -> AsyncIterator[Rig]:
    """An open tablet on a disk in memory."""
    yield await Rig(disk=disk).open()


@pytest.fixture
@asynccontextmanager
async def one_round_rig() -> AsyncIterator[OneRoundRig]:
    """An open tablet whose transactions commit in one round."""
    yield await OneRoundRig().open()
