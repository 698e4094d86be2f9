"""A machine for the tests of the tablet server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.unit.tabletserver.memory_store import Machine


@pytest.fixture
@asynccontextmanager
async def machine() -> AsyncIterator[Machine]:
    """A tablet server on a store in memory."""
    yield Machine()


@pytest.fixture
@asynccontextmanager
async def serving() -> AsyncIterator[Machine]:
    """A tablet server that serves tablet 1."""
    machine = Machine()
    await machine.open(1)
    yield machine
