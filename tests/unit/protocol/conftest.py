"""A world for the tests of the protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.unit.protocol.protocol_world import PATIENT, Client, World, world


@pytest.fixture
@asynccontextmanager
async def here() -> AsyncIterator[World]:
    """A store, and clients of it, over a network without faults."""
    yield world()


@pytest.fixture
@asynccontextmanager
async def client(here: World) -> AsyncIterator[Client]:
    yield here.client()


@asynccontextmanager
async def _patient(here: World) -> AsyncIterator[Client]:
    """A client whose locks live for three seconds."""
    yield here.client(PATIENT)


patient = pytest.fixture(name="patient")(_patient)
reader = pytest.fixture(name="reader")(_patient)
writer = pytest.fixture(name="writer")(_patient)
