"""Tablets for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.unit.tablet.tablets import OneRoundRig, Rig


@pytest.fixture
@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    """An open tablet on a disk in memory."""
    yield await Rig().open()


@pytest.fixture
@asynccontextmanager
async def one_round_rig() -> AsyncIterator[OneRoundRig]:
    """A tablet whose transactions commit in one round."""
    yield OneRoundRig()
