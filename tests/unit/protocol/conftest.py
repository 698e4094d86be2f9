"""A world for the tests of the protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.unit.protocol.protocol_world import World, world


@pytest.fixture
@asynccontextmanager
async def here() -> AsyncIterator[World]:
    """A store, and clients of it, over a network without faults."""
    yield world()
